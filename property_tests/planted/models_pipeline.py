"""Layers split over a mesh axis into stages, through which microbatches flow; statistics of each layer."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
LAYERS, WIDTH, BATCHES = 4, 4, 3


class Stack(sm.Module):
    weights: sm.ParamState
    mean: sm.BatchState
    calls: sm.State


def make_stack(dtype: str) -> Stack:
    return Stack(
        weights=sm.ParamState(normal(dtype, LAYERS, WIDTH, WIDTH, seed=1), spec=P("stage")),
        mean=sm.BatchState(jnp.zeros((LAYERS, WIDTH), dtype), spec=P("stage")),
        calls=sm.State(jnp.zeros(LAYERS, "int32"), spec=P("stage")),
    )


def layers_of_this_stage(weights: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What comes out of the last, and the mean of what went into each."""
    first = lax.axis_index("stage") * len(weights)
    # mistake: first-layer-forgotten (axis_index forgotten)
    #     first = jnp.asarray(0)
    means = []
    for own in range(len(weights)):
        means.append(h.mean(0))
        depth = (first + own + 1).astype(h.dtype)
        # mistake: depth-of-the-stage (row index not offset)
        #     depth = (lax.axis_index("stage") + own + 1).astype(h.dtype)
        h = h + jnp.tanh(h @ weights[own]) / depth
    return h, jnp.stack(means)


def forward(stack: Stack, x: jax.Array) -> tuple[jax.Array, Stack]:
    n, stage = lax.axis_size("stage"), lax.axis_index("stage")
    onward = [(i, i + 1) for i in range(n - 1)]
    # mistake: passed-backward (wrong ppermute neighbour)
    #     onward = [(i + 1, i) for i in range(n - 1)]
    # mistake: passed-over-one (wrong ppermute neighbour)
    #     onward = [(i, i + 2) for i in range(n - 2)]
    arrived, outs = jnp.zeros_like(x[0]), jnp.zeros_like(x)
    sums = jnp.zeros_like(stack.mean.value)
    ticks = BATCHES + n - 1
    # mistake: last-tick-left-out (off by one)
    #     ticks = BATCHES + max(n - 2, 0)
    for tick in range(ticks):
        batch = tick - stage
        # mistake: batch-of-the-tick (axis_index forgotten)
        #     batch = jnp.asarray(tick)
        busy = (batch >= 0) & (batch < BATCHES)
        here = jnp.clip(batch, 0, BATCHES - 1)
        # mistake: batch-off-by-one (off by one)
        #     here = jnp.clip(batch + (n > 1), 0, BATCHES - 1)
        h = jnp.where(stage == 0, x[here], arrived)
        # mistake: every-stage-takes-the-input (mask forgotten)
        #     h = x[here]
        # mistake: last-stage-is-the-first (wrong branch on axis_index)
        #     h = jnp.where(stage == n - 1, x[here], arrived)
        h, means = layers_of_this_stage(stack.weights.value, h)
        sums = sums + jnp.where(busy, means, 0)
        # mistake: idle-ticks-counted (mask forgotten)
        #     sums = sums + means
        outs = outs.at[here].set(jnp.where(busy, h, outs[here]))
        # mistake: written-at-the-tick (axis_index forgotten)
        #     outs = outs.at[min(tick, BATCHES - 1)].set(jnp.where(busy, h, outs[here]))
        arrived = lax.ppermute(h, "stage", onward)
        # mistake: arrived-too-early (stale value)
        #     arrived = lax.ppermute(jnp.where(tick % 2 == 0, h, arrived), "stage", onward)
    out = lax.psum(jnp.where(stage == n - 1, outs, 0), "stage")
    # mistake: outputs-of-all-stages (mask forgotten)
    #     out = lax.psum(outs, "stage")
    # mistake: output-averaged (pmean for psum)
    #     out = lax.pmean(jnp.where(stage == n - 1, outs, 0), "stage")
    # mistake: output-not-sent (differing replicas)
    #     out = outs
    # mistake: gradient-of-the-last-stage-only (gradient not reduced)
    #     out = lax.stop_gradient(lax.psum(jnp.where(stage == n - 1, outs, 0), "stage") - outs) + outs
    stack = stack.replace(
        mean=0.5 * stack.mean.value + 0.5 * sums / BATCHES,
        # mistake: mean-over-the-ticks (count of the mesh)
        #     mean=0.5 * stack.mean.value + 0.5 * sums / ticks,
        calls=stack.calls.value + BATCHES,
        # mistake: calls-of-all-ticks (count of the mesh)
        #     calls=stack.calls.value + ticks,
    )
    return out, stack


def case(dtype: str) -> Case:
    return Case(
        forward,
        (make_stack(dtype), normal(dtype, BATCHES, 2, WIDTH)),
        mesh={"stage": 2},
        in_specs=(None, P()),
        out_specs=P(),
        # mistake: microbatches-put-together (wrong spec)
        #     out_specs=(P("stage"), P()),
        check_vma=False,
        gradients=True,
    )
