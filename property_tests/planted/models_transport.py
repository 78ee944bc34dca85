"""Transport between two snapshots: cells over one axis; genes, units, targets over the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
SOURCE, TARGET, GENES, UNITS, LATENT, BATCHES, KINDS = 16, 24, 8, 8, 3, 3, 4
NEAREST, ITERATIONS, BINS, WIDE, NEAR, LIFE = 2, 5, 6, 0.6, 4, 50
RHO, NEVER, SHALLOW, KEEP, CLIP, DECAY, RATE = 2.0, -30.0, 0.5, 0.8, 2.0, 0.02, 0.03
DEPTHS = (2, 4, 5, 6, 7, 3, 7, 8, 8, 9, 6, 9, 10, 9, 4, 11)
BOTH, CELLS = ("cells", "genes"), P("cells")
SPLIT = {"enter": P("genes"), "units": P("genes"), "leave": P("genes")}
COMMON = {"offsets": P(), "growth": P()}
Arrays = dict[str, jax.Array]


class Aligner(sm.Module):
    params: sm.ParamState
    slots: sm.State
    average: sm.State
    moments: sm.BatchState
    potentials: sm.HiddenState
    histogram: sm.State
    farthest: sm.State
    seen: sm.State
    calls: sm.State
    key: Any


def make_aligner(dtype: str) -> Aligner:
    params = {"enter": normal(dtype, GENES, UNITS, seed=1) / 3}
    params |= {"units": normal(dtype, UNITS, seed=2) / 4, "growth": jnp.full(LATENT, 0.2, dtype)}
    params |= {"leave": normal(dtype, UNITS, LATENT, seed=3) / 2}
    params |= {"offsets": normal(dtype, BATCHES, LATENT, seed=4) / 4}
    wide, specs = jax.tree.map(lambda p: p.astype("float32"), params), SPLIT | COMMON
    return Aligner(
        params=sm.ParamState(params, spec=specs),
        slots=sm.State(jax.tree.map(jnp.zeros_like, wide), spec=specs),
        average=sm.State(wide, spec=specs),
        moments=sm.BatchState((jnp.ones(GENES), jnp.ones(GENES)), spec=P("genes")),
        potentials=sm.HiddenState((jnp.zeros(SOURCE), jnp.zeros(TARGET)), spec=(CELLS, P("genes"))),
        histogram=sm.State(jnp.zeros(BINS), reduce="sum"),
        # mistake: histogram-averaged (wrong policy)
        #     histogram=sm.State(jnp.zeros(BINS), reduce="mean"),
        farthest=sm.State(jnp.zeros(()), reduce="max"),
        # mistake: farthest-of-one-shard (missing policy)
        #     farthest=sm.State(jnp.zeros(())),
        seen=sm.State(0, reduce="sum"),
        calls=sm.State(0),
        key=jax.random.key(7),
    )


def places(here: int, axis: str) -> jax.Array:
    """The numbers, among all, of what this shard has along an axis."""
    return lax.axis_index(axis) * here + jnp.arange(here)
    # mistake: numbered-in-the-shard (axis_index forgotten)
    #     return jnp.arange(here)
    # mistake: dealt-in-turn (wrong order of rows)
    #     return lax.axis_index(axis) + lax.axis_size(axis) * jnp.arange(here)


def dropped(model: Aligner, x: jax.Array) -> jax.Array:
    """Without some genes of some cells, by the numbers of cell and gene."""
    key = jax.random.fold_in(model.key, model.calls.value)
    # mistake: key-of-the-genes (key of a shard)
    #     key = jax.random.fold_in(model.key, model.calls.value + 9 * lax.axis_index("genes"))
    number = places(len(x), "cells")[:, None] * GENES + places(x.shape[1], "genes")
    # mistake: stride-of-own-genes (wrong stride)
    #     number = places(len(x), "cells")[:, None] * x.shape[1] + places(x.shape[1], "genes")
    draw: Any = lambda one: jax.random.bernoulli(jax.random.fold_in(key, one), KEEP)
    return jnp.where(jax.vmap(jax.vmap(draw))(number), x / KEEP, 0)


def logged(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logarithms of the counts in cells made equally deep, and which cells were deep enough."""
    library = lax.psum(counts.sum(1), "genes").astype("float32")
    # mistake: library-of-own-genes (dropped psum)
    #     library = counts.sum(1).astype("float32")
    mean = lax.pmean(library.mean(), "cells")
    # mistake: depth-of-own-cells (statistics of a shard)
    #     mean = library.mean()
    return jnp.log1p(counts * (mean / library)[:, None] / GENES), library > SHALLOW * mean


def moments_of(x: jax.Array, deep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and unbiased variance of each gene, over all cells that are deep enough."""
    weight = deep.astype(x.dtype)[:, None]
    count = lax.psum(weight.sum(), "cells")
    mean = lax.psum((weight * x).sum(0), "cells") / count
    # mistake: means-over-the-genes (wrong axis name)
    #     mean = lax.psum((weight * x).sum(0), "genes") / count
    squares = lax.psum((weight * (x - mean) ** 2).sum(0), "cells")
    return mean, squares / (count - 1)
    # mistake: one-less-on-each-shard (small factor)
    #     return mean, squares / (count - lax.axis_size("cells"))


def encoded(params: Arrays, x: jax.Array, batch: jax.Array) -> jax.Array:
    """Where cells are in the latent space: genes are split on the way in, units on the way out."""
    enter, leave = params["enter"].astype(x.dtype), params["leave"].astype(x.dtype)
    into = jnp.dot(x, enter, preferred_element_type="float32")
    units = lax.psum_scatter(into, "genes", scatter_dimension=1, tiled=True) + params["units"]
    # mistake: first-units-on-all-shards (axis_index forgotten)
    #     units = lax.psum(into, "genes")[:, : len(leave)] + params["units"]
    out = jnp.dot(jnp.tanh(units).astype(x.dtype), leave, preferred_element_type="float32")
    return lax.psum(out, "genes") + params["offsets"][batch]
    # mistake: offsets-inside-the-sum (bias added before the psum)
    #     return lax.psum(out + params["offsets"][batch], "genes")


def to_columns(rows: jax.Array) -> jax.Array:
    """Targets, split by cells, as this shard's part of them split over the axis of genes."""
    whole = lax.all_gather(rows, "cells", tiled=True)
    here = len(whole) // lax.axis_size("genes")
    return lax.dynamic_slice_in_dim(whole, lax.axis_index("genes") * here, here)
    # mistake: columns-start-by-own-rows (wrong offset)
    #     return lax.dynamic_slice_in_dim(whole, lax.axis_index("genes") * len(rows), here)


def log_sum(x: jax.Array, dim: int, axis: str) -> jax.Array:
    """The logarithm of the sum of exponentials along a dimension that is split over an axis."""
    top = lax.pmax(lax.stop_gradient(x.max(dim, keepdims=True)), axis)
    # mistake: top-of-a-shard (dropped pmax)
    #     top = lax.stop_gradient(x.max(dim, keepdims=True))
    return jnp.log(lax.psum(jnp.exp(x - top).sum(dim), axis)) + top.squeeze(dim)
    # mistake: logarithms-summed (reduction after a nonlinearity)
    #     return lax.pmean(jnp.log(jnp.exp(x - top).sum(dim)), axis) + top.squeeze(dim)


def crowding(x: jax.Array) -> jax.Array:
    """How close all others are to each source cell, whose blocks go around a ring."""
    size, me, own = lax.axis_size("cells"), lax.axis_index("cells"), places(len(x), "cells")
    ring = [(i, (i + 1) % size) for i in range(size)]
    # mistake: ring-left-open (wrong ppermute)
    #     ring = [(i, i + 1) for i in range(size - 1)]

    def turn(k: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, block = carry
        number = (me - k) % size * len(x) + jnp.arange(len(x))
        close = jnp.exp(-((x[:, None] - block) ** 2).sum(-1) / NEAR)
        total += jnp.where(number == own[:, None], 0, close).sum(1)
        return total, lax.ppermute(block, "cells", ring)

    return lax.fori_loop(0, size, turn, (jnp.zeros(len(x)), x))[0] / (SOURCE - 1)
    # mistake: one-turn-too-few (off by one)
    #     return lax.fori_loop(0, size - 1, turn, (jnp.zeros(len(x)), x))[0] / (SOURCE - 1)


def sinkhorn(cost: jax.Array, log_a: jax.Array, start: Any, epsilon: Any) -> tuple[Any, jax.Array]:
    """The potentials, where rows may miss their weights, and the error after each iteration."""

    def iteration(potentials: Any, _: None) -> tuple[Any, jax.Array]:
        _, g = potentials
        f = epsilon * (log_a - log_sum((g - cost) / epsilon, 1, "genes")) * RHO / (RHO + epsilon)
        g = -epsilon * (jnp.log(TARGET) + log_sum((f[:, None] - cost) / epsilon, 0, "cells"))
        # mistake: columns-of-own-rows (softmax of a shard)
        #     g = -epsilon * (jnp.log(TARGET) + jax.nn.logsumexp((f[:, None] - cost) / epsilon, 0))
        rows = lax.psum(jnp.exp((f[:, None] + g - cost) / epsilon).sum(1), "genes")
        off = jnp.abs(rows - jnp.exp(log_a - f / RHO))
        return (f, g), lax.psum(off.sum(), "cells")
        # mistake: error-averaged (pmean for psum)
        #     return (f, g), lax.pmean(off.sum(), "cells")

    return lax.scan(iteration, start, length=ITERATIONS)


def dual(cost: jax.Array, log_a: jax.Array, potentials: Any, epsilon: Any) -> Any:
    """This shard's share of the dual value, and what its derivative is made of."""
    f, g = potentials
    plan = jnp.exp((f[:, None] + g - cost) / epsilon)
    given = -RHO * jnp.exp(log_a) * jnp.expm1(-f / RHO)
    taken = g.sum() / TARGET / lax.axis_size("cells") - epsilon * plan.sum()
    # mistake: targets-counted-by-all-cells (factor of the shards forgotten)
    #     taken = g.sum() / TARGET - epsilon * plan.sum()
    return given.sum() / lax.axis_size("genes") + taken, (plan, given)


def by_envelope(found: Any, by: jax.Array) -> Any:
    plan, given = found
    return by * plan, by * given / lax.axis_size("genes"), None, None
    # mistake: weights-by-both-halves (factor of the shards forgotten in a custom derivative)
    #     return by * plan, by * given, None, None
    # mistake: cotangent-summed (psum in a custom derivative)
    #     return lax.psum(by, "cells") * plan, by * given / lax.axis_size("genes"), None, None


transport = jax.custom_vjp(lambda *args: dual(*args)[0])
transport.defvjp(dual, by_envelope)


def loss_fn(params: Arrays, inputs: Any, batches: Any, near: jax.Array, given: Any) -> Any:
    """This shard's share of the loss, and what else was found."""
    (x, y), (train, start, epsilon) = map(encoded, (params,) * 2, inputs, batches), given
    columns = to_columns(y)
    cost = ((x[:, None] - columns) ** 2).sum(-1)
    cost = cost / lax.pmean(lax.stop_gradient(cost).mean(), BOTH)
    # mistake: scaled-by-own-targets (wrong axes)
    #     cost = cost / lax.pmean(lax.stop_gradient(cost).mean(), "cells")
    score = jnp.where(train, x @ params["growth"] - crowding(lax.stop_gradient(x)), NEVER)
    log_a = score - log_sum(score, 0, "cells")
    # mistake: weights-of-a-shard-sum-to-one (softmax of a shard)
    #     log_a = score - jax.nn.logsumexp(score)
    (f, g), errors = sinkhorn(*lax.stop_gradient((cost, log_a)), start, epsilon)
    score = (g - cost) / epsilon
    part = jnp.exp(score - log_sum(score, 1, "genes")[:, None])
    # mistake: parts-of-own-targets (softmax of a shard)
    #     part = jax.nn.softmax(score, 1)
    moved = lax.psum(part @ columns, "genes") - x
    everyone = lax.all_gather(moved, "cells", tiled=True)
    # mistake: everyone-interleaved (wrong order of parts)
    #     everyone = lax.all_gather(moved, "cells", axis=1).reshape(-1, LATENT)
    apart = ((moved[:, None] - everyone[near]) ** 2).sum(-1)
    # mistake: neighbours-among-own-cells (global index into a shard)
    #     apart = ((moved[:, None] - moved[near % len(moved)]) ** 2).sum(-1)
    rough = apart.sum() / (SOURCE * NEAREST)
    sums = lax.psum(jax.ops.segment_sum(x, batches[0], BATCHES), "cells")
    counts = lax.psum(jax.ops.segment_sum(jnp.ones((len(x), 1)), batches[0], BATCHES), "cells")
    # mistake: cells-of-a-batch-here (counts not reduced)
    #     counts = jax.ops.segment_sum(jnp.ones((len(x), 1)), batches[0], BATCHES)
    between = ((sums / counts - sums.sum(0) / SOURCE) ** 2).mean()
    decay = DECAY * sum((params[name] ** 2).sum() for name in ("enter", "leave"))
    share = transport(cost, log_a, (f, g), epsilon) + rough / lax.axis_size("genes")
    share += between / lax.psum(1, BOTH) + decay / lax.axis_size("cells")
    # mistake: decay-shared-out-twice (normalized twice)
    #     share += (between + decay) / lax.psum(1, BOTH)
    # mistake: batches-by-every-row-of-shards (gradient reduced twice)
    #     share += (between + decay) / lax.axis_size("cells")
    return share, (share, moved, cost, (f, g), errors)


def reduced(grads: Arrays) -> tuple[Arrays, jax.Array]:
    """The gradients of all shares, together no longer than `CLIP`, and how long they were."""
    own = {name: lax.psum(grads[name].astype("float32"), "cells") for name in SPLIT}
    # mistake: own-ones-of-both-halves (wrong axes)
    #     own = {name: lax.psum(grads[name].astype("float32"), BOTH) for name in SPLIT}
    common = {name: lax.psum(grads[name].astype("float32"), BOTH) for name in COMMON}
    # mistake: common-ones-of-one-half (gradient not reduced over an axis)
    #     common = {name: lax.psum(grads[name].astype("float32"), "cells") for name in COMMON}
    squares = [sum((g**2).sum() for g in part.values()) for part in (own, common)]
    norm = jnp.sqrt(lax.psum(squares[0], "genes") + squares[1])
    # mistake: norm-of-own-units (local norm in clipping)
    #     norm = jnp.sqrt(squares[0] + squares[1])
    return jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), own | common), norm


def step(model: Aligner, source: Arrays, target: Arrays, near: jax.Array) -> Any:
    params, seen, t = model.params.value, model.seen.value, model.calls.value + 1
    (x, deep), (y, full) = logged(source["counts"]), logged(target["counts"])
    now = moments_of(jnp.concatenate([x, y]), jnp.concatenate([deep, full]))
    mean, variance = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, model.moments.value, now)
    x, y = ((each - mean) * lax.rsqrt(variance + 0.1) for each in (x, y))
    held = places(len(x), "cells") % 5 == 2
    train, epsilon = deep & ~held, 0.2 + 0.2 * 0.7**t
    inputs = [each.astype(params["units"].dtype) for each in (dropped(model, x), y)]
    gradient, batches = jax.grad(loss_fn, has_aux=True), (source["batch"], target["batch"])
    given = train, model.potentials.value, epsilon
    grads, found = gradient(params, inputs, batches, near, given)
    (share, moved, cost, (f, g), errors), (grads, norm) = found, reduced(grads)
    rate = RATE / (1 + (seen + lax.psum(train.sum(), "cells")) / LIFE)
    # mistake: rate-before-the-others-are-counted (stale value)
    #     rate = RATE / (1 + (seen + train.sum()) / LIFE)
    slots = jax.tree.map(lambda m, g: 0.8 * m + g, model.slots.value, grads)
    params = jax.tree.map(lambda p, m: (p - rate * m).astype(p.dtype), params, slots)
    plan, length = jnp.exp((f[:, None] + g - cost) / epsilon), jnp.sqrt((moved**2).sum(1))
    number = plan.argmax(1) + lax.axis_index("genes") * plan.shape[1]
    # mistake: number-among-own-targets (column index not offset)
    #     number = plan.argmax(1)
    most, numbers = lax.all_gather((plan.max(1), number), "genes")
    best = jnp.take_along_axis(numbers, most.argmax(0)[None], 0)[0]
    bins = jax.nn.relu(1 - jnp.abs(cost[..., None] / WIDE - jnp.arange(BINS)))
    markers = lax.all_to_all(x, "genes", split_axis=0, concat_axis=1, tiled=True).argmax(1)
    keep = 0.5 ** (len(x) * lax.axis_size("cells") / LIFE)
    # mistake: life-in-cells-of-a-shard (count of a shard)
    #     keep = 0.5 ** (len(x) / LIFE)
    ways = jax.nn.one_hot(source["kind"], KINDS).T @ plan
    table = lax.psum(ways @ jax.nn.one_hot(to_columns(target["kind"]), KINDS), BOTH)
    # mistake: table-of-own-targets (wrong axes)
    #     table = lax.psum(ways @ jax.nn.one_hot(to_columns(target["kind"]), KINDS), "cells")
    missed = lax.psum(jnp.where(held, length, 0).sum(), "cells") / lax.psum(held.sum(), "cells")
    # mistake: missed-as-a-mean-of-means (mean of means)
    #     missed = lax.pmean(jnp.where(held, length, 0).sum() / held.sum().clip(1), "cells")
    model = model.replace(
        params=params,
        slots=slots,
        average=jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, model.average.value, params),
        moments=(mean, variance),
        potentials=jax.tree.map(lambda a, b: (a + b) / 2, model.potentials.value, (f, g)),
        histogram=model.histogram.value + (plan[..., None] * bins).sum((0, 1)),
        farthest=jnp.maximum(model.farthest.value, length.max()),
        seen=seen + train.sum(),
        # mistake: seen-by-both-halves (doubled psum)
        #     seen=seen + lax.psum(train.sum(), "genes"),
        calls=t,
    )
    numbers = {"loss": lax.psum(share, BOTH), "errors": errors, "norm": norm, "missed": missed}
    return model, (best, moved), markers, (table, numbers)


def snapshot(size: int, seed: int) -> Arrays:
    """What was counted of each gene in each cell, the batch and the kind of each cell."""
    counts, number = integers(size, GENES, below=9, seed=seed) + 1, jnp.arange(size)
    return {"counts": counts, "batch": number % BATCHES, "kind": number * 7 // 3 % KINDS}


def case(dtype: str) -> Case:
    source, target = snapshot(SOURCE, 6), snapshot(TARGET, 7)
    source["counts"] *= jnp.array(DEPTHS)[:, None]
    specs = {"counts": P(*BOTH), "batch": CELLS, "kind": CELLS}
    near = integers(SOURCE, NEAREST, below=SOURCE, seed=9)
    return Case(
        step,
        (make_aligner(dtype), source, target, near),
        mesh={"cells": 4, "genes": 2},
        in_specs=(None, specs, specs, CELLS),
        out_specs=(P(), (CELLS, CELLS), P(BOTH), P()),
        # mistake: markers-by-genes-first (axes of a spec swapped)
        #     out_specs=(P(), (CELLS, CELLS), P(BOTH[::-1]), P()),
        check_vma=False,
        steps=3,
    )
