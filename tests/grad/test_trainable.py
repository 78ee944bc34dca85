"""`trainable`: the differentiated part of a model, in the form that an optimizer takes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


class Net(sm.Module):
    linear: eqx.nn.Linear
    w: sm.ParamState
    mean: sm.BatchState
    table: jax.Array
    rate: float = 0.5


def make_net() -> Net:
    return Net(
        eqx.nn.Linear(3, 2, key=jax.random.key(0)),
        sm.ParamState(jnp.ones(4), spec=P("x"), tag="split"),
        sm.BatchState(jnp.zeros(2)),
        jnp.arange(3),
    )


def loss_fn(net: Net, x: jax.Array) -> Any:
    y = jax.vmap(net.linear)(x).sum() + jnp.sum(net.w.value**2)
    return y * net.rate, net


def test_it_is_the_model_with_none_elsewhere() -> None:
    net = make_net()
    part = sm.trainable(net)
    assert part.linear.weight is net.linear.weight and part.linear.bias is net.linear.bias
    assert part.w.value is net.w.value and part.w.tag == {"split"}
    assert part.mean is part.table is part.rate is None
    # Of a state with integers the floats; NumPy's arrays are arrays.
    part = sm.trainable(
        {"p": sm.ParamState({"w": 1.0, "n": 2}), "x": np.ones(2), "n": np.arange(2)}
    )
    assert part["p"].value["n"] is part["n"] is None
    assert float(part["p"].value["w"]) == 1.0 and part["x"].tolist() == [1, 1]


def test_it_has_the_structure_of_the_gradients() -> None:
    net, x = make_net(), jnp.ones((2, 3))
    for wrt in (None, sm.ParamState, sm.filters.PathContains("linear")):
        _, grads = sm.value_and_grad(loss_fn, wrt=wrt)(net, x)
        part = sm.trainable(net, wrt)
        assert jax.tree.structure(part) == jax.tree.structure(grads)
        pairs = zip(jax.tree.leaves(part), jax.tree.leaves(grads), strict=True)
        assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def test_slots_lie_where_their_parameters_lie() -> None:
    optimizer = optax.adam(0.1)
    net = make_net()
    slots = optimizer.init(sm.trainable(net))

    def step(net: Net, slots: Any, x: jax.Array) -> Any:
        def loss(net: Net, x: jax.Array) -> Any:
            return loss_fn(net, x)[0], net

        (_, net), grads = sm.value_and_grad(loss, axis_name="x")(net, x)
        updates, slots = optimizer.update(grads, slots)
        return eqx.apply_updates(net, updates), slots

    call = sm.shard_map(step, make_mesh("4"), (None, P(), P("x")), P())
    net, slots = call(net, slots, np.ones((4, 3), np.float32))
    moments = slots[0].mu.w
    assert isinstance(moments, sm.ParamState) and moments.spec == P("x")
    for x in (moments.value, net.w.value):
        assert {shard.data.shape for shard in x.addressable_shards} == {(1,)}
    assert slots[0].mu.mean is None


def test_nothing_to_train() -> None:
    with pytest.raises(sm.StructureError, match=r"- model\['mean'\]: BatchState"):
        sm.trainable({"mean": sm.BatchState(0.0)})
    with pytest.raises(sm.StructureError, match=r"no floating .*\n  - model\['n'\]: State"):
        sm.trainable({"n": sm.State(0), "w": sm.ParamState(1.0)}, sm.State)


@pytest.mark.parametrize("number", [0.5, np.float32(0.5)], ids=["Python", "NumPy"])
def test_a_number_is_differentiated_in_a_mapped_call_if_it_is_outside(number: Any) -> None:
    def step(model: Any, x: Any) -> Any:
        return sm.grad(lambda m, x: (jnp.mean(x) * m["w"] * m["rate"], m), axis_name="x")(model, x)

    model, x = {"w": jnp.asarray(2.0), "rate": number}, np.ones(4, np.float32)
    mapped = sm.shard_map(step, make_mesh("4"), (P(), P("x")), P())
    inside, outside = mapped(model, x)[0], step(model, x)[0]
    assert jax.tree.structure(inside) == jax.tree.structure(outside)
