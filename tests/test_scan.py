"""`scan` of models whose leaves are not all arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted, make_mesh


pytestmark = pytest.mark.usefixtures("each_kind")


class Net(sm.Module):
    total: sm.State
    w: Any
    activation: Any
    steps: int

    def __call__(self, x: Any) -> Any:
        y = self.activation(self.w * x)
        return y, self.replace(total=self.total.value + y)


def net(**fields: Any) -> Net:
    made = Net(sm.State(0.0, reduce="sum"), jnp.array(2.0), jax.nn.relu, 3)
    return made.replace(**fields) if fields else made


def step(model: Net, x: Any) -> Any:
    y, model = model(x)
    return model, {"y": y, "activation": model.activation, "steps": 2}


XS = np.array([1.0, -2.0, 3.0, 4.0], np.float32)


def loop(model: Net, xs: Any) -> Any:
    ys = []
    for x in xs:
        model, out = step(model, x)
        ys.append(out["y"])
    return model, jnp.stack(ys)


@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_a_loop(reverse: bool) -> None:
    body, count = counted(step)
    model, out = sm.scan(body, net(), XS, reverse=reverse, unroll=2)
    wanted, ys = loop(net(), XS[::-1] if reverse else XS)
    np.testing.assert_array_equal(out["y"], ys[::-1] if reverse else ys)
    assert model.total.value == wanted.total.value == 16
    assert out["activation"] is model.activation is jax.nn.relu
    # In a Module a number is static; outside of one JAX takes it for an array.
    assert model.steps == 3 and type(model.steps) is int
    np.testing.assert_array_equal(out["steps"], [2, 2, 2, 2])
    structure: Any = jax.tree.structure
    assert structure(model) == structure(wanted) and count.times <= 2


def test_static_leaves_in_what_is_scanned_over() -> None:
    layers = net(w=jnp.array([2.0, 3.0]), total=sm.State(jnp.zeros(2)))
    out, made = sm.scan(lambda x, layer: layer(x), jnp.float32(1), layers)
    assert out == 6 and made.activation is jax.nn.relu
    np.testing.assert_array_equal(made.total.value, [2, 6])


def test_without_rows_and_plain_carries() -> None:
    assert sm.scan(lambda n, _: (n + 1, None), 0, length=5) == (5, None)
    model, _ = sm.scan(lambda m, _: (m(1.0)[1], None), net(), length=3)
    assert model.total.value == 6


def test_gradients_and_jit() -> None:
    def loss(w: Any) -> Any:
        model, _ = sm.scan(step, net(w=w), XS)
        return model.total.value

    assert jax.jit(jax.grad(loss))(2.0) == jax.grad(loss)(2.0) == 8


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_states_policy_knows_what_the_loop_carried(check_vma: bool) -> None:
    def shard(model: Net, xs: Any) -> Any:
        model = (
            model.replace(total=jax.lax.pcast(model.total.value, "x", to="varying"))
            if check_vma
            else model
        )
        model, out = sm.scan(step, model, xs)
        return out["y"], model

    call = sm.shard_map(shard, make_mesh("4"), (None, P("x")), (P("x"), P()), check_vma=check_vma)
    model = net(total=sm.State(5.0, reduce="sum"))
    for seen in (21, 37):
        ys, model = call(model, XS)
        assert model.total.value == seen and model.activation is jax.nn.relu
    np.testing.assert_array_equal(ys, [2, 0, 6, 8])


def test_arrays_of_the_carry_keep_their_types() -> None:
    with pytest.raises(TypeError, match="have equal types"):
        sm.scan(lambda model, x: (model.replace(w=jnp.zeros(2)), x), net(), XS)
