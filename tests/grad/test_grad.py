"""`value_and_grad`: the leaves that it differentiates, the axes over which it reduces, and its result.

The reference is `plain`, which uses only JAX and Equinox and sees all rows at once.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget
from tests.helpers import make_mesh, slow


SHARDS = 4
WHOLE = P()
SPECS = (WHOLE, P("x"))
# By whether types are checked: the axes of the mesh.
KINDS = {True: AxisType.Explicit, False: AxisType.Auto}
X = np.sin(np.arange(24, dtype=np.float32)).reshape(8, 3)


def plain(
    fun: Callable[..., Any], *, axis_name: Any = None, reduce: str = "mean", has_aux: bool = False
) -> Callable[..., Any]:
    """The expected result of `value_and_grad` for the parameters that it picks by default."""
    del axis_name, reduce

    def wanted(node: Any) -> Any:
        taken = isinstance(node, sm.ParamState) or not sm.is_state(node)
        return jax.tree.map(lambda x: taken and eqx.is_inexact_array(x), node)

    @eqx.filter_jit
    def run(model: Any, *args: Any) -> Any:
        mask = jax.tree.map(wanted, model, is_leaf=sm.is_state)
        params, rest = eqx.partition(model, mask)

        def loss(params: Any) -> Any:
            value, new = fun(eqx.combine(params, rest), *args)
            return value[0] if has_aux else value, (value, new)

        (_, result), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return result, grads

    return run


def on_mesh(check: bool) -> Callable[..., Any]:
    def run(fun: Callable[..., Any], model: Any, x: Any) -> Any:
        return over_mesh(fun, str(SHARDS), check)(model, x)

    return run


def in_lanes(transform: Any) -> Callable[..., Any]:
    def run(fun: Callable[..., Any], model: Any, x: Any) -> Any:
        mapped = transform(fun, in_axes=(None, 0), out_axes=None, axis_name="x")
        return mapped(model, x.reshape(SHARDS, -1, *x.shape[1:]))

    return run


WAYS = {
    "check": on_mesh(True),
    "no check": on_mesh(False),
    "vmap2": in_lanes(sm.vmap2),
    "pmap2": in_lanes(sm.pmap2),
}
some_ways = pytest.mark.parametrize("way", ["check", "vmap2", slow("no check"), slow("pmap2")])
checked_or_not = pytest.mark.parametrize("check_vma", [True, slow(False)])


def over_mesh(
    fun: Callable[..., Any], name: str, check_vma: bool, specs: Any = SPECS, out: Any = WHOLE
) -> Any:
    mesh = make_mesh(name, KINDS[check_vma])
    return sm.shard_map(fun, mesh, specs, out, check_vma=check_vma)


def check(result: Any, expected: Any, rtol: float = 2e-5) -> None:
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        if not eqx.is_array(a):
            assert a == b
        elif jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert (jax.random.key_data(a) == jax.random.key_data(b)).all()
        else:
            assert a.dtype == b.dtype
            tolerance = 0.0 if jnp.issubdtype(a.dtype, jnp.integer) else rtol
            if a.dtype in (jnp.bfloat16, jnp.float16):
                tolerance = 1e-2
            wide = np.complex128 if jnp.iscomplexobj(a) else np.float64
            one, other = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=0.1 * tolerance)


class Net(sm.Module):
    """One leaf of every kind."""

    w: sm.ParamState
    unused: sm.ParamState
    mean: sm.BatchState
    steps: sm.State
    rng: sm.RandomState
    bias: jax.Array
    table: jax.Array
    act: Callable[[Any], Any]
    rate: float = 0.5
    name: str = "net"
    nothing: None = None

    def apply(self, x: Any) -> Any:
        return self.act(x @ self.w.value + self.bias) * self.rate + self.table[1]


def make_net() -> Net:
    return Net(
        sm.ParamState(jnp.array([0.3, -0.6, 0.9])),
        sm.ParamState({"a": jnp.ones(2), "n": jnp.arange(2)}),
        sm.BatchState(jnp.ones(3), reduce="mean"),
        sm.State(0),
        sm.RandomState(jax.random.key(3)),
        jnp.array(0.2),
        jnp.arange(3),
        jnp.tanh,
    )


def net_loss(net: Net, x: Any) -> Any:
    """A loss that reads and writes states of every kind."""
    keys, rng = jax.jit(lambda rng: rng.rows(len(x), "x"))(net.rng)
    noise = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)
    loss = jnp.mean(net.apply(x + 0.1 * noise - net.mean.value) ** 2)
    mean = 0.9 * net.mean.value + 0.1 * x.mean(axis=0)
    return loss, net.replace(mean=mean, steps=net.steps.value + 1, rng=rng)


def still_loss(net: Net, x: Any) -> Any:
    """A loss without random numbers."""
    return jnp.mean(net.apply(x) ** 2), net.replace(mean=x.mean(axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_everything_is_as_unsharded(way: str) -> None:
    got = WAYS[way](sm.value_and_grad(net_loss, axis_name="x"), make_net(), X)
    check(got, plain(net_loss)(make_net(), X))
    assert got[1].rng is None


def test_grads_have_the_structure_of_the_model_and_none_elsewhere() -> None:
    # Outside any mapped call an axis name means one shard.
    (loss, new), grads = sm.value_and_grad(still_loss, axis_name=("x", "nowhere"))(make_net(), X)
    check(((loss, new), grads), plain(still_loss)(make_net(), X))
    check(sm.grad(still_loss)(make_net(), X), (grads, new))
    assert isinstance(grads, Net) and isinstance(grads.w, sm.ParamState)
    assert grads.unused.value["a"].tolist() == [0, 0]
    assert grads.unused.value["n"] is None
    for field in ("mean", "steps", "rng", "table", "act", "rate", "name", "nothing"):
        assert getattr(grads, field) is None
    stepped = eqx.apply_updates(make_net(), jax.tree.map(lambda g: -g, grads))
    np.testing.assert_allclose(stepped.bias, 0.2 - grads.bias)
    assert stepped.act is jnp.tanh


@some_ways
def test_low_precision_and_complex_parameters_keep_their_dtypes(way: str) -> None:
    model = {
        "half": sm.ParamState(jnp.asarray([0.5, -0.25, 1], jnp.bfloat16)),
        "short": sm.ParamState(jnp.asarray(0.75, jnp.float16)),
        "complex": sm.ParamState(jnp.asarray([1 + 2j, 0.5j, -1], jnp.complex64)),
    }

    def loss(model: Any, x: Any) -> Any:
        y = x @ model["complex"].value + x @ model["half"].value.astype(x.dtype)
        # Low-precision slopes are rounded when they are summed, so the values need few bits.
        squares = jnp.abs(y * model["short"].value.astype(x.dtype)) ** 2
        return jnp.mean(squares.astype(jnp.bfloat16)), model

    x = np.sign(X) / 2
    got = WAYS[way](sm.value_and_grad(loss, axis_name="x"), model, x)
    check(got, plain(loss)(model, x))


WRT: dict[str, tuple[Any, set[str]]] = {
    "left out": (None, {"w", "frozen", "plain"}),
    "type": (sm.ParamState, {"w", "frozen"}),
    "tag": ("slow", {"frozen", "mean"}),
    "list": (["slow", sm.ParamState], {"w", "frozen", "mean"}),
    "function": (lambda path, node: "plain" in str(path), {"plain"}),
    "Where": (sm.filters.Where(lambda m: (m["w"], m["plain"])), {"w", "plain"}),
    "All": (sm.filters.All(sm.ParamState, sm.filters.Not("slow")), {"w"})
}  # fmt: skip


def test_wrt_in_every_form() -> None:
    def loss(model: Any, x: Any) -> Any:
        values = [model["w"].value, model["frozen"].value, model["mean"].value, model["plain"]]
        return x * jnp.prod(jnp.stack(values)), model

    model = {
        "w": sm.ParamState(2.0),
        "frozen": sm.ParamState(3.0, tag="slow"),
        "mean": sm.BatchState(5.0, tag="slow"),
        "plain": jnp.asarray(7.0),
    }
    numbers = {"w": 2, "frozen": 3, "mean": 5, "plain": 7}
    for form, (wrt, names) in WRT.items():
        _, grads = sm.value_and_grad(loss, wrt=wrt)(model, jnp.asarray(2.0))
        found = {name: float(leaf) for name in numbers for leaf in jax.tree.leaves(grads[name])}
        assert found == {name: 420 / numbers[name] for name in names}, form


@pytest.mark.slow
@checked_or_not
def test_what_was_not_written_comes_back_as_it_was(check_vma: bool) -> None:
    step = sm.value_and_grad(still_loss, axis_name="x")
    call = over_mesh(step, "4", check_vma)
    net, x = call.place(make_net(), X)
    for (_, new), _ in (call(net, x), step(net, x)):
        assert new.w.value is net.w.value
        assert new.unused.value["a"] is net.unused.value["a"]
        assert new.bias is net.bias and new.table is net.table
    # The loss and the mean; the gradients of w, unused and bias.
    shapes = sorted(x.shape for x in jax.tree.leaves(call.lower(net, x).program.out_info))
    assert shapes == [(), (), (2,), (3,), (3,)]


def test_what_comes_of_parameters_alone_is_one_value() -> None:
    def loss(model: Any, x: Any) -> Any:
        jax.debug.callback(called.append, x[0, 0])
        double = jax.lax.fori_loop(0, 2, lambda _, w: w * jnp.sqrt(2.0), model["w"].value)
        new = {**model, "copy": model["copy"].set(jax.lax.stop_gradient(double))}
        return (jnp.mean(x * model["w"].value), {"twice": double}), new

    called: list[Any] = []
    model = {"w": sm.ParamState(3.0), "copy": sm.State(0.0)}
    step = sm.value_and_grad(loss, axis_name="x", has_aux=True)
    for way in ("check", "vmap2", "pmap2"):
        ((_, aux), new), _ = WAYS[way](step, model, X)
        np.testing.assert_allclose(new["copy"].value, 6.0, rtol=1e-6)
        np.testing.assert_allclose(aux["twice"], 6.0, rtol=1e-6)
    # Nothing is sent for it, and what the function prints it prints once.
    mapped = over_mesh(step, "4", True)
    assert_budget(mapped, model, X, collectives={"psum": 1})
    called.clear()
    jax.block_until_ready(mapped(model, X))
    jax.effects_barrier()
    assert len(called) == SHARDS
    by_hand = over_mesh(
        sm.value_and_grad(loss, axis_name="x", has_aux=True, microbatches=2), "4", True
    )
    with pytest.raises(sm.DivergedStateError, match=r"\['copy'\]: .* varies over 'x'"):
        by_hand(model, X)


def test_what_comes_of_parameters_and_rows_differs() -> None:
    def loss(model: Any, x: Any) -> Any:
        new = {**model, "copy": model["copy"].set(x.sum() + model["w"].value)}
        return jnp.mean(x * model["w"].value), new

    model = {"w": sm.ParamState(3.0), "copy": sm.State(0.0)}
    with pytest.raises(sm.DivergedStateError, match=r"model\['copy'\]: .* varies over 'x'"):
        over_mesh(sm.value_and_grad(loss, axis_name="x"), "4", True)(model, X)


def test_a_cast_parameter_belongs_to_its_shard() -> None:
    def own(w: Any, x: Any) -> Any:
        return sm.grad(lambda w, x: ((w * x).sum(), w))(jax.lax.pcast(w, "x", to="varying"), x)[0]

    x = np.arange(4.0, dtype=np.float32)
    got = over_mesh(own, "4", True, out=P("x"))(jnp.ones(1), x)
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_parameter_per_shard(check_vma: bool) -> None:
    own = np.linspace(-1, 1, SHARDS, dtype=np.float32)
    model = {"w": sm.ParamState(0.3), "own": sm.ParamState(own, spec=sm.PerShard("x"))}

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean((x * model["w"].value - model["own"].value) ** 2), model

    step = sm.value_and_grad(loss, axis_name="x")
    (value, _), grads = over_mesh(step, "4", check_vma)(model, X)
    apart = X.astype(np.float64).reshape(SHARDS, -1) * 0.3 - own[:, None]
    np.testing.assert_allclose(value, np.mean(apart**2), rtol=1e-5)
    np.testing.assert_allclose(grads["own"].value, -2 * apart.sum(1) / X.size, rtol=1e-5)
    assert grads["own"].spec == sm.PerShard("x")


def test_aux_comes_back_by_its_own_spec() -> None:
    def loss(net: Net, x: Any) -> Any:
        y = net.apply(x)
        return (jnp.mean(y**2), {"rows": y, "kind": "text", "w": net.w}), net

    def both(net: Net, x: Any) -> Any:
        value_and_grads = sm.value_and_grad(loss, axis_name="x", has_aux=True)(net, x)
        return value_and_grads, sm.grad(loss, axis_name="x", has_aux=True)(net, x)

    net, aux = make_net(), {"rows": P("x"), "kind": None, "w": P()}
    out_specs = ((((P(), aux), P()), P()), ((P(), aux), P()))
    got = over_mesh(both, "4", True, out=out_specs)(net, X)
    ((loss_wanted, aux_wanted), new), grads = plain(loss, has_aux=True)(net, X)
    check(got, ((((loss_wanted, aux_wanted), new), grads), ((grads, aux_wanted), new)))


def test_a_message_names_axes_in_the_order_of_the_mesh() -> None:
    def exchanged(w: Any) -> Any:
        return (w * jax.lax.psum(w, ("y", "x"))).sum(), w

    split = P(("x", "y"))
    mapped = sm.shard_map(lambda w: sm.grad(exchanged)(w)[0], make_mesh("2x2"), split, split)
    with pytest.raises(sm.StatemeshError, match="varies over 'x', 'y', which axis_name does not"):
        mapped(jnp.ones(4))
