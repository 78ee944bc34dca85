"""A packed model behaves like the model itself. Outside mapped calls NumPy computes the expected values.

Random programs with packed models are in `plain/`.
"""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import meshes, modules, states
from tests.helpers import assert_same

from .base.settings import fewer


jnp: Any = jax.numpy
few = fewer(1 / 4)

KINDS = (sm.ParamState, sm.BatchState, sm.State, sm.HiddenState)
SHAPES = ((), (3,), (8,), (0,), (8, 2), (0, 3), (8, 0))
DTYPES = (np.float32, np.float16, np.int32)
RATE = 0.25


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    return (
        np.arange(draw(st.integers(0, 9)), 99)[: int(np.prod(shape))].reshape(shape).astype(dtype)
    )


@st.composite
def models(draw: st.DrawFn, mesh: Any) -> dict[str, Any]:
    """States of every kind, of one, several or no arrays, and leaves outside States."""

    def state() -> Any:
        value = draw(st.dictionaries(st.sampled_from("ab"), arrays(), max_size=2))
        kind, names = draw(st.sampled_from(KINDS)), draw(st.sampled_from([(), mesh.axis_names]))
        specs = {
            key: P(names) if x.ndim and x.shape[0] % mesh.size == 0 else P()
            for key, x in value.items()
        }
        return kind(value, spec=specs)

    model: dict[str, Any] = {f"s{k}": state() for k in range(draw(st.integers(1, 4)))}
    for k in range(draw(st.integers(0, 2))):
        model[f"p{k}"] = draw(arrays())
    more = {"key": sm.RandomState(jax.random.key(0)), "act": np.tanh, "none": None}
    return {**model, **{name: more[name] for name in draw(st.sets(st.sampled_from([*more])))}}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Any]:
    mesh = draw(meshes())
    return mesh, draw(models(mesh))


def is_trained(node: Any) -> bool:
    if isinstance(node, sm.State):
        return isinstance(node, sm.ParamState)
    return isinstance(node, np.ndarray)


def floats(node: Any) -> bool:
    return any(x.dtype.kind == "f" for x in jax.tree.leaves(node) if isinstance(x, np.ndarray))


@pytest.mark.slow
@fewer(2 / 5)  # Each example compiles programs of its own.
@given(st.data())
def test_it_comes_back_bit_for_bit(data: st.DataObject) -> None:
    mesh = data.draw(meshes(), "mesh")
    model = data.draw(modules(states=states(mesh=mesh)), "model")
    packed = sm.pack(model, mesh)
    assert_same(packed.unpack(), model)
    assert {*packed.states, *packed.rest} >= {*sm.states(model, ...)}
    for path, state in sm.states(model, ...).items():
        if path in packed.states:
            assert_same(packed.states[path], state)


@given(cases())
def test_its_states_are_those_of_the_model(case: Any) -> None:
    mesh, model = case
    for where in (mesh, mesh.abstract_mesh):
        packed = sm.pack(model, where)
        assert_same(packed.unpack(), model)
        assert_same(sm.states(packed), sm.states(model))
        assert_same(sm.partition({"net": packed}), sm.partition({"net": model}))
        assert_same(sm.combine(*sm.partition(packed)), model)
        if any(is_trained(node) and floats(node) for node in model.values()):
            assert_same(sm.trainable(packed).unpack(), sm.trainable(model))


def loss_of(net: Any, x: Any) -> Any:
    """The sum of all floats, times `x`. States that are not trained are written."""
    total = x
    for node in net.values():
        for leaf in jax.tree.leaves(node):
            if hasattr(leaf, "dtype") and leaf.dtype in (np.float32, np.float16):
                total = total + leaf.astype(np.float32).sum() * x
    new = {
        name: jax.tree.map(lambda leaf: leaf + 1, node)
        if isinstance(node, sm.State) and not isinstance(node, sm.ParamState | sm.RandomState)
        else node
        for name, node in net.items()
    }
    return total[None], new


@few
@given(cases(), st.integers(1, 5))
def test_a_step_outside_moves_what_is_trained_by_its_gradient(case: Any, x: int) -> None:
    mesh, model = case
    if not any(is_trained(node) and floats(node) for node in model.values()):
        return
    call = sm.shard_map(loss_of, mesh, (None, P()), (P(mesh.axis_names), P()))

    def loss(net: Any, x: Any) -> Any:
        parts, net = call(net, x)
        return parts.sum(), net

    optimizer = optax.sgd(RATE)
    packed = sm.pack(model, mesh)
    slots = optimizer.init(sm.trainable(packed))
    (_, packed), grads = sm.value_and_grad(loss)(packed, jnp.float32(x))
    updates, slots = optimizer.update(grads, slots)
    packed = eqx.apply_updates(packed, updates)
    assert isinstance(packed, sm.Packed)
    new = packed.unpack()
    for name, node in model.items():
        after = new[name]
        if isinstance(node, sm.State) and not isinstance(node, sm.RandomState):
            node, after = node.value, after.value
        for old, got in zip(jax.tree.leaves(node), jax.tree.leaves(after), strict=True):
            if not isinstance(old, np.ndarray):
                continue
            want = old
            if is_trained(model[name]) and old.dtype.kind == "f":
                # A whole array adds to the loss of every shard. Of a split one, each shard adds its own part.
                split = isinstance(model[name], sm.State) and _is_split(model[name], mesh, old)
                want = old - RATE * x * (1 if split else mesh.size)
            elif isinstance(model[name], sm.State) and not is_trained(model[name]):
                want = old + 1
            np.testing.assert_array_equal(got, want.astype(old.dtype))


def _is_split(state: Any, mesh: Any, x: Any) -> bool:
    return any(x is leaf and state.spec[key] != P() for key, leaf in state.value.items())
