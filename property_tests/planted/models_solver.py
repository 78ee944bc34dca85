"""Least squares by conjugate gradients: rows over one axis, systems over the other, from call to call."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
MEASURED, CELLS, SYSTEMS, ROUNDS, TOLERANCE = 32, 24, 4, 8, 0.2
DAMPING, SMOOTHING = 1.0, 0.5

Edges = tuple[jax.Array, jax.Array]


class Search(NamedTuple):
    """How far the search has come: vectors of which each shard has a part, and a slope for each system."""

    x: jax.Array
    residual: jax.Array
    direction: jax.Array
    slope: jax.Array
    round: jax.Array


class Estimate(sm.Module):
    x: sm.HiddenState
    mode: sm.HiddenState
    residual: sm.State
    rounds: sm.State
    stiffest: sm.State


def make_estimate(dtype: str) -> Estimate:
    return Estimate(
        x=sm.HiddenState(normal(dtype, CELLS, SYSTEMS, seed=1) / 4, spec=P("rows", "systems")),
        mode=sm.HiddenState(normal(dtype, CELLS, 1, seed=2), spec=P("rows")),
        residual=sm.State(jnp.zeros(SYSTEMS, dtype), spec=P("systems")),
        rounds=sm.State(0),
        stiffest=sm.State(jnp.zeros((), dtype)),
    )


def dot(a: jax.Array, b: jax.Array) -> Any:
    """For each system, over the cells of all shards."""
    return lax.psum((a * b).sum(0), "rows")
    # mistake: dot-of-a-shard (dropped psum)
    #     return (a * b).sum(0)
    # mistake: dot-over-the-systems (wrong axis name)
    #     return lax.psum((a * b).sum(0), "systems")


def part_of(whole: jax.Array) -> jax.Array:
    """Of what every shard has, the cells of this one."""
    size = len(whole) // lax.axis_size("rows")
    first = lax.axis_index("rows") * size
    # mistake: first-cell-forgotten (axis_index forgotten)
    #     first = 0
    # mistake: first-cell-of-the-systems (wrong axis name)
    #     first = lax.axis_index("systems") * size
    return lax.dynamic_slice_in_dim(whole, first, size)


def exchanged(x: jax.Array) -> Edges:
    """The last cell of the shard before this one, and the first of the shard after; zero at the ends."""
    n = lax.axis_size("rows")
    before = lax.ppermute(x[-1:], "rows", [(i, i + 1) for i in range(n - 1)])
    # mistake: passed-backward (wrong ppermute neighbour)
    #     before = lax.ppermute(x[-1:], "rows", [(i + 1, i) for i in range(n - 1)])
    # mistake: ends-joined (wrong ppermute neighbour)
    #     unseen: one device joins its ends too
    #     before = lax.ppermute(x[-1:], "rows", [(i, (i + 1) % n) for i in range(n)])
    after = lax.ppermute(x[:1], "rows", [(i + 1, i) for i in range(n - 1)])
    # mistake: nothing-after (ppermute forgotten)
    #     after = jnp.zeros_like(x[:1])
    # mistake: wrong-edge-sent (off by one)
    #     after = lax.ppermute(x[1:2], "rows", [(i + 1, i) for i in range(n - 1)])
    return before, after


def product(rows: jax.Array, x: jax.Array, edges: Edges) -> Any:
    """Of the matrix that nobody builds: measured squares, damping, and differences of neighbours."""
    before, after = edges
    whole = lax.all_gather(x, "rows", tiled=True)
    # mistake: own-cells-repeated (all_gather forgotten)
    #     whole = jnp.tile(x, (lax.axis_size("rows"), 1))
    # mistake: parts-in-another-order (wrong order of parts)
    #     whole = jnp.swapaxes(lax.all_gather(x, "rows"), 0, 1).reshape(-1, x.shape[1])
    squares = lax.psum_scatter(rows.T @ (rows @ whole), "rows", tiled=True)
    # mistake: squares-of-own-rows (dropped psum)
    #     squares = part_of(rows.T @ (rows @ whole))
    neighbours = jnp.concatenate([before, x[:-1]]) + jnp.concatenate([x[1:], after])
    return squares + DAMPING * x + SMOOTHING * (2 * x - neighbours)
    # mistake: damped-by-every-shard (small factor)
    #     return squares + DAMPING * lax.axis_size("rows") * x + SMOOTHING * (2 * x - neighbours)


def goes_on(search: Search) -> jax.Array:
    length = jnp.sqrt(dot(search.residual, search.residual))
    # mistake: length-of-a-shard (stop criterion of a shard)
    #     length = jnp.sqrt((search.residual**2).sum(0))
    worst = lax.pmax(length.max(), "systems")
    # mistake: worst-of-these-systems (dropped pmax)
    #     worst = length.max()
    # mistake: worst-over-the-rows (wrong axis name)
    #     worst = lax.pmax(length.max(), "rows")
    return (search.round < ROUNDS) & (worst > TOLERANCE)
    # mistake: fewer-rounds-on-more-shards (count of the mesh)
    #     return (search.round < ROUNDS // lax.axis_size("rows")) & (worst > TOLERANCE)


def solved(rows: jax.Array, start: jax.Array, goal: jax.Array) -> Search:
    """Preconditioned by the diagonal. A system that has arrived waits for the others."""
    diagonal = part_of(lax.psum((rows**2).sum(0), "rows"))[:, None] + DAMPING + 2 * SMOOTHING
    # mistake: diagonal-of-own-rows (dropped psum)
    #     diagonal = part_of((rows**2).sum(0))[:, None] + DAMPING + 2 * SMOOTHING

    def once(search: Search) -> Search:
        x, residual, direction, slope, number = search
        moved = product(rows, direction, exchanged(direction))
        # mistake: edges-of-the-start (stale value)
        #     moved = product(rows, direction, exchanged(first / diagonal))
        curvature = dot(direction, moved)
        # mistake: curvature-averaged (pmean for psum)
        #     curvature = lax.pmean((direction * moved).sum(0), "rows")
        # mistake: curvature-over-both-axes (wrong axis name)
        #     curvature = lax.psum((direction * moved).sum(0), ("rows", "systems"))
        arrived = dot(residual, residual) < TOLERANCE**2
        size = jnp.where(arrived, 0, slope / curvature)
        x, residual = x + size * direction, residual - size * moved
        ahead = residual / diagonal
        new = dot(residual, ahead)
        # mistake: new-slope-of-a-shard (dropped psum)
        #     new = (residual * ahead).sum(0)
        return Search(x, residual, ahead + new / slope * direction, new, number + 1)

    first = goal - product(rows, start, exchanged(start))
    ahead = first / diagonal
    search = Search(start, first, ahead, dot(first, ahead), jnp.int32(0))
    return lax.while_loop(goes_on, once, search)


def stiffest(rows: jax.Array, mode: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest eigenvalue and its vector, by a few rounds of the power iteration."""

    def once(mode: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        moved = product(rows, mode, exchanged(mode))
        length = jnp.sqrt(dot(moved, moved))
        # mistake: lengths-summed (reduction after a nonlinearity)
        #     length = lax.psum(jnp.sqrt((moved**2).sum(0)), "rows")
        return moved / length, length[0]

    mode, values = lax.scan(once, mode, None, length=3)
    return mode, values[-1]


def centre(x: jax.Array) -> Any:
    """Where each system has most of what it found, in cells."""
    cell = lax.axis_index("rows") * len(x) + jnp.arange(len(x))
    # mistake: cells-of-a-shard (row index not offset)
    #     cell = jnp.arange(len(x))
    weight = jnp.abs(x)
    return lax.psum(cell.astype(x.dtype) @ weight, "rows") / lax.psum(weight.sum(0), "rows")
    # mistake: mean-of-centres (mean of means)
    #     return lax.pmean(cell.astype(x.dtype) @ weight / weight.sum(0), "rows")


def step(
    estimate: Estimate, rows: jax.Array, data: jax.Array
) -> tuple[Estimate, jax.Array, jax.Array, dict[str, jax.Array]]:
    old = estimate.x.value
    goal = lax.psum_scatter(rows.T @ data, "rows", tiled=True) + DAMPING * old
    search = solved(rows, old, goal)
    x, residual = search.x, search.residual
    mode, value = stiffest(rows, estimate.mode.value)
    missed = rows @ lax.all_gather(x, "rows", tiled=True) - data
    misfit = lax.pmean((missed**2).mean(0), "rows")
    # mistake: misfit-summed (psum for pmean)
    #     misfit = lax.psum((missed**2).mean(0), "rows")
    share = misfit / lax.psum(misfit.sum(), "systems")
    # mistake: share-of-these-systems (dropped psum)
    #     share = misfit / misfit.sum()
    estimate = estimate.replace(
        x=x,
        mode=mode,
        residual=jnp.sqrt(dot(residual, residual)),
        # mistake: residual-of-the-first-shard (statistics of a shard)
        #     residual=jnp.sqrt(lax.all_gather((residual**2).sum(0), "rows")[0]),
        rounds=estimate.rounds.value + search.round,
        # mistake: rounds-of-all-shards (doubled psum)
        #     rounds=estimate.rounds.value + lax.psum(search.round, "rows"),
        stiffest=jnp.maximum(estimate.stiffest.value, value),
    )
    numbers = {
        "mean": lax.pmean(x.mean(), ("rows", "systems")),
        "misfit": lax.pmax(misfit.max(), "systems"),
        "share": lax.pmax(share.max(), "systems"),
    }
    return estimate, x - old, centre(x), numbers


def case(dtype: str) -> Case:
    scale = jnp.array([1, 0.3, 0.7, 0.1], dtype)
    rows = normal(dtype, MEASURED, CELLS, seed=3) / 4
    return Case(
        step,
        (make_estimate(dtype), rows, normal(dtype, MEASURED, SYSTEMS, seed=4) * scale),
        mesh={"rows": 4, "systems": 2},
        in_specs=(None, P("rows"), P("rows", "systems")),
        out_specs=(P(), P("rows", "systems"), P("systems"), P()),
        # mistake: change-of-the-first-cells (wrong spec)
        #     out_specs=(P(), P(None, "systems"), P("systems"), P()),
        check_vma=False,
        steps=3,
    )
