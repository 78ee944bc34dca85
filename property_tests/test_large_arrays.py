"""States and gradients of every size from a few bytes to 4 MiB in one call, on every mesh."""

from functools import cache
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import meshes

from .base.settings import fewer


# Numbers of float32: reductions of small arrays are joined, those of large ones stand alone.
SIZES = (16, 2**16, 2**14, 2**18, 2**20)
POLICIES = ("mean", "sum", "max", "split", "gradient")
Kinds: TypeAlias = tuple[tuple[int, str], ...]
Donate: TypeAlias = Literal["none", "states"]


def start(size: int) -> Any:
    """Small whole numbers, whose sums and means over a power of two are exact."""
    return (np.arange(size) % 64).astype(np.float32)


def states_of(kinds: Kinds, names: Any) -> list[sm.State]:
    found: list[sm.State] = []
    for size, policy in kinds:
        if policy == "gradient":
            found.append(sm.ParamState(start(size)))
        elif policy == "split":
            found.append(sm.State(start(size), spec=P(names)))
        else:
            found.append(sm.State(start(size), reduce=policy))
    return found


@cache
def mapped(mesh: Mesh, kinds: Kinds, names: Any, donate: Donate) -> Any:
    def loss(states: list[sm.State], x: Any) -> Any:
        params = [s.value for s in states if isinstance(s, sm.ParamState)]
        new = [s if isinstance(s, sm.ParamState) else s.set(s.value + x.sum()) for s in states]
        return x.sum() + sum(((w * x.sum()).sum() for w in params), jnp.float32(0)), new

    def step(states: list[sm.State], x: Any) -> Any:
        (_, states), grads = sm.value_and_grad(loss, axis_name=names)(states, x)
        return [
            state.set(state.value + grad.value) if isinstance(state, sm.ParamState) else state
            for state, grad in zip(states, grads, strict=True)
        ]

    return sm.shard_map(step, mesh, (None, P(names)), P(), donate=donate)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Mesh, Kinds, Any, Donate]:
    mesh = draw(meshes())
    kind = st.tuples(st.sampled_from(SIZES), st.sampled_from(POLICIES))
    kinds = draw(st.lists(kind, min_size=1, max_size=4))
    names: Any = mesh.axis_names
    if len(names) == 1 and draw(st.booleans()):
        (names,) = names
    donate: Donate = draw(st.sampled_from(["none", "states"]))
    # One parameter there must be.
    return mesh, ((16, "gradient"), *kinds), names, donate


@pytest.mark.slow
@fewer(1 / 4)  # Each example compiles a program of its own.
@given(call=calls())
def test_arrays_of_every_size_are_merged_alike(call: tuple[Mesh, Kinds, Any, Donate]) -> None:
    mesh, kinds, names, donate = call
    step, states = mapped(*call), states_of(kinds, names)
    shards = np.arange(mesh.size, dtype=np.float32)
    for turn in range(3):
        states = jax.block_until_ready(step(states, shards))
        for (size, policy), state in zip(kinds, states, strict=True):
            added: Any = {
                "mean": shards.mean(),
                "gradient": shards.mean(),
                "sum": shards.sum(),
                "max": shards.max(),
                "split": np.repeat(shards, size // mesh.size),
            }[policy]
            np.testing.assert_array_equal(state.value, start(size) + (turn + 1) * added)
