"""Plain arrays and Python numbers in Modules that go through lanes again and again."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm


N = 4
X = np.arange(N, dtype=np.float32)


class Cell(sm.Module):
    gain: Any
    tau: float
    table: np.ndarray
    total: sm.State
    linear: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        assert isinstance(self.tau, float)
        y = self.linear(jnp.stack([x, self.gain])) * self.tau + self.table
        return y, self.replace(total=self.total.value + x)


class Gain(eqx.Module):
    """A module that is not a statemesh Module and holds no State."""

    gain: Any
    tau: Any


def cell() -> Cell:
    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    return Cell(jnp.asarray(2.0), 1.5, np.ones(3, np.float32), sm.State(0.0, reduce="sum"), linear)


def shapes(tree: Any) -> list[Any]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def scaled(model: Gain, x: Any) -> Any:
    return model.gain * model.tau * x, model


def test_a_model_comes_back_as_it_came(lanes: Any) -> None:
    f = lanes(lambda model, x: model(x), in_axes=(None, 0))
    model, wanted = cell(), np.stack([cell()(x)[0] for x in X])
    for number in range(3):
        before = model
        y, model = f(before, X)
        alike, unsharded = f.unsharded(before, X)
        np.testing.assert_allclose(y, wanted, rtol=1e-6)
        np.testing.assert_allclose(alike, wanted, rtol=1e-6)
        assert number or len(alike.devices()) == 1
        assert shapes(model) == shapes(unsharded) == shapes(cell())
        assert type(model.tau) is float
        assert float(model.total.value) == float(unsharded.total.value) == (number + 1) * X.sum()
        if number:
            assert model.linear.weight is before.linear.weight
            assert model.gain is before.gain and model.table is before.table
    results = jax.tree.leaves(f.lower(model, X).program.out_info)
    assert sorted(x.shape for x in results) == [(), (N, 3)]
    packed = sm.pack(model, jax.sharding.Mesh(np.array(jax.devices()[:N]), ("i",)))
    assert shapes(f(packed, X)[1].unpack()) == shapes(cell())


def test_what_is_written_follows_out_axes(lanes: Any) -> None:
    def write(model: Gain, plain: Any, x: Any) -> Any:
        return eqx.tree_at(lambda m: m.gain, model, model.gain + x), plain

    def write_alike(model: Gain, plain: Any, x: Any) -> Any:
        return eqx.tree_at(lambda m: m.gain, model, model.gain + 1), plain

    plain = np.arange(2.0, dtype=np.float32)
    for fun, wanted in ((write, 2 + X), (write_alike, np.full(N, 3.0))):
        f = lanes(fun, in_axes=(None, None, 0), out_axes=-1)
        model, copies = f(Gain(jnp.full(2, 2.0), jnp.ones(3)), plain, X)
        np.testing.assert_array_equal(np.asarray(model.gain), np.tile(wanted, (2, 1)))
        assert model.tau.shape == (3,)
        # Outside a Module the result is that of `jax.vmap`.
        np.testing.assert_array_equal(np.asarray(copies), np.tile(plain[:, None], N))
    model = lanes(lambda gain, x: Gain(gain, 1.0), in_axes=(None, 0))(jnp.asarray(2.0), X)
    assert model.gain.shape == (N,) and type(model.tau) is float


def test_in_a_loop_around_the_call(lanes: Any) -> None:
    f = lanes(scaled, in_axes=(None, 0))
    # The number becomes a weakly typed array in the loop. In a call it has its own dtype, traced or not.
    start = Gain(jnp.ones(3), 1.5)
    model, _ = jax.lax.scan(lambda m, _: (f(m, X)[1], None), start, None, length=3)
    assert shapes(model) == [(3,), ()]
    model = jax.jit(lambda m: f(f(jax.jit(lambda m: m)(m), X)[1], X)[1])(start)
    assert shapes(model) == [(3,), ()] and not model.tau.weak_type


AROUND: dict[str, Any] = {
    "jit of a scan": jax.jit(
        lambda m, x: jax.lax.scan(lambda m, _: scaled(m, x)[::-1], m, None, length=2)[::-1]
    ),
    "value_and_grad in a checkpoint": jax.checkpoint(
        lambda m, x: sm.value_and_grad(scaled)(m, x)[0]
    ),
    "nested lanes": lambda m, x: sm.vmap2(scaled, in_axes=(None, 0))(m, jnp.stack([x, x])),
}


@pytest.mark.parametrize("around", AROUND)
def test_through_transformations_inside(lanes: Any, around: str) -> None:
    f = lanes(AROUND[around], in_axes=(None, 0))
    model = Gain(jnp.float32(2.0), jnp.float32(1.5))
    for number in range(3):
        before = model
        _, model = f(before, X)
        assert shapes(model) == [(), ()]
        assert number == 0 or model.gain is before.gain
    assert [float(model.gain), float(model.tau)] == [2.0, 1.5]


def test_a_derivative_of_its_own_is_not_passed_by(lanes: Any) -> None:
    @jax.custom_vjp
    def reverse(x: Any) -> Any:
        return x

    reverse.defvjp(lambda x: (x, None), lambda _, g: (-g,))

    def reversing(model: Gain, x: Any) -> Any:
        return x, jax.tree.map(reverse, model)

    for fun in (reversing, jax.jit(reversing)):
        f = lanes(fun, in_axes=(None, 0), out_axes=(0, None))
        assert float(jax.grad(lambda w, f=f: f(Gain(w, 1.5), X)[1].gain)(2.0)) == -1
