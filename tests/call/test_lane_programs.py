"""`vmap2` and `pmap2` compile to the programs that one would write by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import without_names


LANES = 8


def lane(buffers: list[jax.Array], weight: jax.Array, x: jax.Array) -> Any:
    """One lane of a step: a result, new buffers, and a weight on which the lanes agree."""
    after = jax.lax.pmean(weight + x.sum() * weight, "i")
    return x * weight, [b + x for b in buffers], after


def step(buffers: list[sm.State], weight: sm.State, x: jax.Array) -> Any:
    out, after, merged = lane([b.value for b in buffers], weight.value, x)
    return out, [b.set(v) for b, v in zip(buffers, after, strict=True)], weight.set(merged)


def by_policy(buffers: list[sm.State], weight: sm.State, x: jax.Array) -> Any:
    """The same step, in which the state's own policy merges the lanes' weights."""
    w = weight.value
    after = [b.set(b.value + x) for b in buffers]
    return x * w, after, weight.set(w + x.sum() * w)


def vmapped() -> Any:
    hand = jax.vmap(lane, in_axes=(0, None, 0), out_axes=(0, 0, None), axis_name="i")
    return jax.jit(hand)


def on_devices() -> Any:
    mesh = Mesh(np.array(jax.devices()[:LANES]), ("i",))

    def shard(buffers: list[jax.Array], weight: jax.Array, x: jax.Array) -> Any:
        out, after, merged = lane([b[0] for b in buffers], weight, x[0])
        return out[None], [b[None] for b in after], merged

    specs = (P("i"), P(), P("i"))
    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=(P("i"), P("i"), P())))


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("fun", [step, by_policy])
@pytest.mark.parametrize(("transform", "by_hand"), [(sm.vmap2, vmapped), (sm.pmap2, on_devices)])
def test_compiled_program_is_the_hand_written_one(
    transform: Any, by_hand: Callable[[], Any], fun: Any, count: int
) -> None:
    reduce = "mean" if fun is by_policy else None
    buffers = [sm.BatchState(jnp.zeros((LANES, 3))) for _ in range(count)]
    weight, x = sm.ParamState(jnp.float32(2), reduce=reduce), jnp.ones((LANES, 3))
    mapped = transform(fun, axis_name="i", in_axes=(None, None, 0), state_in_axes=sm.BatchState)
    mine = mapped.lower(buffers, weight, x).compile().as_text()
    hand = by_hand()
    theirs = hand.lower([b.value for b in buffers], weight.value, x).compile().as_text()
    assert without_names(mine) == without_names(theirs)


@pytest.mark.parametrize("transform", [sm.vmap2, sm.pmap2])
def test_under_a_trace_there_is_no_layer_of_ours(transform: Any) -> None:
    mapped = transform(
        lambda s, read, x: (x, s.set(s.value + x), read),
        in_axes=(None, None, 0),
        state_out_axes={0: sm.State},
    )
    jaxpr = jax.make_jaxpr(mapped)(sm.State(0.0), sm.ParamState(jnp.ones(3)), jnp.ones(8)).jaxpr
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert not names & {"jit", "pjit", "custom_vmap_call"}
    # A state that was only read is no output of the program.
    assert jaxpr.outvars[2] is jaxpr.invars[1]
