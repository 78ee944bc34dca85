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


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def loss_fn(net: Net, x: jax.Array) -> Any:
    y = jax.vmap(net.linear)(x).sum() + jnp.sum(net.w.value**2)
    return y * net.rate, net


def test_it_is_the_model_with_none_elsewhere() -> None:
    net = make_net()
    part = sm.trainable(net)
    assert part.linear.weight is net.linear.weight and part.linear.bias is net.linear.bias
    assert part.w.value is net.w.value
    assert part.mean is part.table is part.rate is None


def test_it_has_the_structure_of_the_gradients() -> None:
    net, x = make_net(), jnp.ones((2, 3))
    for wrt in (None, sm.ParamState, sm.filters.PathContains("linear")):
        _, grads = sm.value_and_grad(loss_fn, wrt=wrt)(net, x)
        part = sm.trainable(net, wrt)
        assert structure(part) == structure(grads)
        pairs = zip(jax.tree.leaves(part), jax.tree.leaves(grads), strict=True)
        assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def test_an_optimizer_takes_it() -> None:
    net, x = make_net(), jnp.ones((2, 3))
    optimizer = optax.sgd(0.1, momentum=0.9)
    slots = optimizer.init(sm.trainable(net))
    (_, net), grads = sm.value_and_grad(loss_fn)(net, x)
    updates, slots = optimizer.update(grads, slots, sm.trainable(net))
    stepped = eqx.apply_updates(net, updates)
    np.testing.assert_allclose(stepped.w.value, np.full(4, 0.9), rtol=1e-6)
    assert stepped.mean is net.mean and stepped.table is net.table


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


def test_a_state_keeps_its_name_tags_and_policy() -> None:
    state = sm.ParamState(1.0, name="gain", tag="slow", reduce="mean")
    (kept,) = sm.trainable([state])
    assert (kept.name, kept.tag, kept.reduce) == ("gain", {"slow"}, "mean")


def test_of_a_state_with_integers_the_floats() -> None:
    part = sm.trainable({"p": sm.ParamState({"w": 1.0, "n": 2})})
    assert part["p"].value["n"] is None
    assert float(part["p"].value["w"]) == 1.0


def test_numpy_arrays_are_arrays() -> None:
    part = sm.trainable({"w": np.ones(2), "n": np.arange(2)})
    assert part["w"].tolist() == [1, 1] and part["n"] is None


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
    assert structure(inside) == structure(outside)
