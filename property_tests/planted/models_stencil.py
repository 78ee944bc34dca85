"""Water and heat in a basin: rows end at walls, columns go around, and both mesh axes split the grid."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
ROWS, COLUMNS, BOTH, GRID = 16, 12, ("rows", "columns"), P("rows", "columns")
CELLS, COURANT, RATE, SPRING, PROBE = ROWS * COLUMNS, 0.3, 2.0, (10, 4), (5, 8)


class Fields(NamedTuple):
    """Height and heat of each cell, and the speeds through its upper and through its left side."""

    height: Any
    heat: Any
    down: Any
    along: Any


class Given(NamedTuple):
    """Depth and roughness of each cell's upper and left side, wind of each row, and what was seen."""

    depth: Any
    roughness: Any
    wind: Any
    height: Any
    heat: Any
    seen: Any


class Basin(sm.Module):
    fields: sm.HiddenState
    friction: sm.ParamState
    mixing: sm.ParamState
    highest: sm.State
    inflow: sm.State
    variance: sm.State


def make_basin(dtype: str) -> Basin:
    fields = [normal(dtype, ROWS, COLUMNS, seed=seed) / 4 for seed in range(1, 5)]
    return Basin(
        fields=sm.HiddenState(Fields(*fields), spec=GRID),
        friction=sm.ParamState(0.2 + normal(dtype, COLUMNS, seed=5) / 20, spec=P("columns")),
        # mistake: friction-by-the-rows (wrong spec)
        #     friction=sm.ParamState(0.2 + normal(dtype, COLUMNS, seed=5) / 20, spec=P("rows")),
        mixing=sm.ParamState(jnp.asarray(0.2, dtype)),
        highest=sm.State(jnp.zeros((), dtype), reduce="max"),
        # mistake: highest-of-one-shard (reduction forgotten)
        #     highest=sm.State(jnp.zeros((), dtype)),
        inflow=sm.State(jnp.zeros((), dtype), reduce="sum"),
        # mistake: inflow-averaged (wrong reduction)
        #     inflow=sm.State(jnp.zeros((), dtype), reduce="mean"),
        variance=sm.State(jnp.zeros((), dtype)),
    )


def with_halo(x: jax.Array) -> jax.Array:
    """With a cell more on each side: a neighbour's, or zero over the first row and under the last."""
    n, m = lax.axis_size("rows"), lax.axis_size("columns")
    before = lax.ppermute(x[-1:], "rows", [(i, i + 1) for i in range(n - 1)])
    # mistake: before-from-the-shard-after (wrong ppermute neighbour)
    #     before = lax.ppermute(x[-1:], "rows", [(i + 1, i) for i in range(n - 1)])
    # mistake: last-row-but-one-sent (off by one)
    #     before = lax.ppermute(x[-2:-1], "rows", [(i, i + 1) for i in range(n - 1)])
    after = lax.ppermute(x[:1], "rows", [(i + 1, i) for i in range(n - 1)])
    # mistake: nothing-after (ppermute forgotten)
    #     after = jnp.zeros_like(x[:1])
    x = jnp.concatenate([before, x, after])
    # mistake: rows-around-swapped (swapped halos)
    #     x = jnp.concatenate([after, x, before])
    left = lax.ppermute(x[:, -1:], "columns", [(i, (i + 1) % m) for i in range(m)])
    # mistake: first-column-sent-right (halo from the wrong side)
    #     left = lax.ppermute(x[:, :1], "columns", [(i, (i + 1) % m) for i in range(m)])
    right = lax.ppermute(x[:, :1], "columns", [((i + 1) % m, i) for i in range(m)])
    # mistake: right-along-the-rows (wrong axis name)
    #     right = lax.ppermute(x[:, :1], "rows", [((i + 1) % n, i) for i in range(n)])
    return jnp.concatenate([left, x, right], 1)


def places(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row and the column of each cell of this shard, in the whole grid."""
    row = lax.axis_index("rows") * x.shape[0] + jnp.arange(x.shape[0])
    # mistake: rows-offset-by-the-width (wrong offset)
    #     row = lax.axis_index("rows") * x.shape[1] + jnp.arange(x.shape[0])
    column = lax.axis_index("columns") * x.shape[1] + jnp.arange(x.shape[1])
    # mistake: columns-of-a-shard (axis_index forgotten)
    #     column = jnp.arange(x.shape[1])
    return row.astype(x.dtype)[:, None], column.astype(x.dtype)


def spring(like: jax.Array) -> jax.Array:
    """What a spring adds to each cell."""
    row, column = places(like)
    return jnp.exp(-((row - SPRING[0]) ** 2 + (column - SPRING[1]) ** 2) / 4) / 4


def longest_step(fields: Fields, depth: jax.Array) -> Any:
    """As long as the fastest wave of all allows."""
    wave = jnp.sqrt(jnp.maximum(depth + fields.height, 0.1))
    speed = jnp.abs(fields.down) + jnp.abs(fields.along) + wave
    # mistake: maxima-added-in-the-shard (reduction after a nonlinearity)
    #     speed = jnp.abs(fields.down).max() + jnp.abs(fields.along).max() + wave.max()
    return COURANT / lax.pmax(speed.max(), BOTH)
    # mistake: step-of-a-shard (dropped pmax)
    #     return COURANT / speed.max()


def accelerated(fields: Fields, friction: jax.Array, wind: jax.Array, dt: jax.Array) -> Any:
    """The speeds, after slope of the surface, wind and friction; nothing goes through the walls."""
    height = with_halo(fields.height)
    down = fields.down - dt * (fields.height - height[:-2, 1:-1])
    along = fields.along - dt * (fields.height - height[1:-1, :-2] - wind[:, None])
    row, _ = places(down)
    # mistake: wall-in-each-shard (row index not offset)
    #     row = jnp.arange(len(down))[:, None]
    return jnp.where(row > 0, down, 0) / (1 + dt * friction), along / (1 + dt * friction)


def divergence(down: jax.Array, along: jax.Array) -> jax.Array:
    """What leaves each cell, by the flows through all upper and all left sides."""
    wide, high = with_halo(along), with_halo(down)
    # mistake: flows-padded-in-the-shard (halo of a shard)
    #     wide, high = jnp.pad(along, 1, mode="wrap"), jnp.pad(down, 1)
    return high[2:, 1:-1] - down + wide[1:-1, 2:] - along


def carried(heat: jax.Array, down: jax.Array, along: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The heat that flows with the water: of the mean of two rows, of limited slopes between columns."""
    wide = with_halo(heat)
    to_left, to_right = heat - wide[1:-1, :-2], wide[1:-1, 2:] - heat
    rising = jnp.maximum(jnp.minimum(to_left, to_right), 0)
    slope = rising + jnp.minimum(jnp.maximum(to_left, to_right), 0)
    from_left = (wide + with_halo(slope) / 2)[1:-1, :-2]
    between = jnp.maximum(along, 0) * from_left + jnp.minimum(along, 0) * (heat - slope / 2)
    return down * (heat + wide[:-2, 1:-1]) / 2, between


def advanced(closure: Any, fields: Fields, given: Given, dt: Any) -> Fields:
    friction, mixing = closure
    down, along = accelerated(fields, friction, given.wind, dt)
    added = spring(fields.height)
    seeping = lax.psum(added.sum(), BOTH) / CELLS
    # mistake: seeping-of-a-shard (dropped psum)
    #     seeping = added.sum() / CELLS
    # mistake: seeping-by-the-cells-here (count of a shard)
    #     seeping = lax.psum(added.sum(), BOTH) / added.size
    leaving = divergence(given.depth * down, given.depth * along)
    height = fields.height + dt * (added - seeping - leaving)
    heat = fields.heat - dt * divergence(*carried(fields.heat, down, along))
    wide = with_halo(heat)
    # mistake: neighbours-before-they-moved (stale value)
    #     wide = with_halo(fields.heat).at[1:-1, 1:-1].set(heat)
    from_above = jnp.where(places(heat)[0] > 0, given.roughness * (wide[:-2, 1:-1] - heat), 0)
    mixed = divergence(from_above, given.roughness * (wide[1:-1, :-2] - heat))
    return Fields(height, heat - dt * mixing * mixed, down, along)


def misfit(closure: Any, fields: Fields, given: Given, dt: Any) -> tuple[jax.Array, Fields]:
    """This shard's part of the mean over all that was seen."""
    new = advanced(closure, fields, given, dt)
    apart = (new.height - given.height) ** 2 + (new.heat - given.heat) ** 2
    count = lax.psum(given.seen.sum(), BOTH).astype(apart.dtype)
    # mistake: seen-by-a-shard (counts not reduced)
    #     count = given.seen.sum().astype(apart.dtype)
    return jnp.where(given.seen, apart, 0).sum() / count, new
    # mistake: misfit-summed-in-the-loss (gradient reduced twice)
    #     return lax.psum(jnp.where(given.seen, apart, 0).sum(), BOTH) / count, new


def probed(x: jax.Array) -> Any:
    """The value of one cell of the whole grid, from the shard that has it."""
    row, column = PROBE[0] // x.shape[0], PROBE[1] // x.shape[1]
    mine = (lax.axis_index("rows") == row) & (lax.axis_index("columns") == column)
    # mistake: probe-across (wrong owner)
    #     mine = (lax.axis_index("columns") == row) & (lax.axis_index("rows") == column)
    value = x[PROBE[0] % x.shape[0], PROBE[1] % x.shape[1]]
    return lax.psum(jnp.where(mine, value, 0), BOTH)
    # mistake: probes-of-all-shards (mask forgotten)
    #     return lax.psum(value, BOTH)


def step(basin: Basin, given: Given) -> Any:
    old, friction, mixing = basin.fields.value, basin.friction.value, basin.mixing.value
    dt = longest_step(old, given.depth)
    gradient = jax.value_and_grad(misfit, has_aux=True)
    (missed, fields), by = gradient((friction, mixing), old, given, dt)
    mean = lax.pmean(fields.heat.mean(), BOTH)
    # mistake: mean-of-a-shard (statistics of a shard)
    #     mean = fields.heat.mean()
    squares = lax.pmean(((fields.heat - mean) ** 2).mean(), BOTH)
    # mistake: mean-of-variances (mean of variances)
    #     squares = lax.pmean(fields.heat.var(), BOTH)
    variance = squares * (CELLS / (CELLS - 1))
    # mistake: one-less-of-the-cells-here (small factor)
    #     variance = squares * (fields.heat.size / (fields.heat.size - 1))
    basin = basin.replace(
        fields=fields,
        friction=friction - RATE * lax.psum(by[0], "rows"),
        # mistake: friction-of-all-columns (wrong axis name)
        #     friction=friction - RATE * lax.psum(by[0], BOTH),
        # mistake: friction-by-own-rows (gradient not reduced)
        #     friction=friction - RATE * by[0],
        mixing=mixing - RATE * lax.psum(by[1], BOTH),
        # mistake: mixing-by-the-mean (pmean for psum)
        #     mixing=mixing - RATE * lax.pmean(by[1], BOTH),
        highest=jnp.maximum(basin.highest.value, fields.height.max()),
        inflow=basin.inflow.value + dt * spring(fields.height).sum(),
        variance=0.9 * basin.variance.value + 0.1 * variance,
    )
    coarse = fields.heat.reshape(len(fields.heat) // 4, 4, -1, 2).mean((1, 3)) - mean
    total = lax.psum(fields.height.astype("float32").sum(), BOTH)
    # mistake: total-summed-again (doubled psum)
    #     total = lax.psum(lax.psum(fields.height.astype("float32").sum(), "rows"), BOTH)
    zonal = lax.pmean(fields.heat.mean(1), "columns")
    # mistake: zonal-summed (psum for pmean)
    #     zonal = lax.psum(fields.heat.mean(1), "columns")
    numbers = {"misfit": lax.psum(missed, BOTH), "total": total, "probe": probed(fields.height)}
    return basin, coarse, zonal, numbers


def case(dtype: str) -> Case:
    some = [normal(dtype, ROWS, COLUMNS, seed=seed) for seed in range(6, 10)]
    depth, roughness, wind = 2 + some[0] / 8, 0.5 + abs(some[1]) / 4, normal(dtype, ROWS, seed=10)
    seen = integers(ROWS, COLUMNS, below=3, seed=11) > 0
    return Case(
        step,
        (make_basin(dtype), Given(depth, roughness, wind, some[2] / 2, some[3] / 2, seen)),
        mesh={"rows": 2, "columns": 2},
        in_specs=(None, Given(GRID, GRID, P("rows"), GRID, GRID, GRID)),
        # mistake: wind-over-the-columns (wrong spec)
        #     in_specs=(None, Given(GRID, GRID, P("columns"), GRID, GRID, GRID)),
        out_specs=(P(), GRID, P("rows"), P()),
        # mistake: zonal-by-the-columns (wrong spec)
        #     out_specs=(P(), GRID, P("columns"), P()),
        check_vma=False,
        steps=3,
    )
