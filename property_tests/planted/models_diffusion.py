"""Training of a diffusion model: rows are split over one axis of the mesh, hidden units over the other."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
ROWS, FEATURES, HIDDEN, TIMES, CLASSES, LEVELS = 16, 6, 8, 8, 5, 4
DROP, KEEP, GUIDANCE, CLIP, RATE, DECAY, HALFLIFE, LOGGED = 0.3, 0.75, 1.5, 0.5, 0.05, 0.1, 20, 9
BOTH = ("data", "model")


class Weights(NamedTuple):
    """What is trained, or something for each of them; all but the last is split over the hidden units."""

    into: Any
    times: Any
    table: Any
    scale: Any
    out: Any
    bias: Any


class Drawn(NamedTuple):
    """Rows to denoise and all that was drawn for them."""

    x: Any
    noise: Any
    label: Any
    kept: Any
    time: Any
    level: Any
    seen: Any


UNITS, SPLIT = P(None, "model"), P("data", "model")
SPECS = Weights(UNITS, UNITS, UNITS, P("model"), P("model"), P())
# Of the average each shard of the rows holds a part only.
PARTS = Weights(SPLIT, SPLIT, SPLIT, P(("model", "data")), P(("model", "data")), P("data"))
# mistake: parts-by-the-rows-first (wrong spec)
#     PARTS = Weights(SPLIT, SPLIT, SPLIT, P(("data", "model")), P(("data", "model")), P("data"))


class Denoiser(sm.Module):
    weights: sm.ParamState
    slots: sm.State
    average: sm.State
    power: sm.State
    edges: sm.State
    errors: sm.State
    counts: sm.State
    dropped: sm.State
    largest: sm.State
    activity: sm.BatchState
    updates: sm.State
    rng: sm.RandomState


def make_denoiser(dtype: str) -> Denoiser:
    weights = Weights(
        into=normal(dtype, FEATURES, HIDDEN, seed=0) / 2,
        times=normal(dtype, TIMES, HIDDEN, seed=1) / 2,
        table=normal(dtype, CLASSES + 1, HIDDEN, seed=2) / 2,
        scale=normal(dtype, HIDDEN, seed=3) / 2,
        out=normal(dtype, HIDDEN, FEATURES, seed=4) / 2,
        bias=normal(dtype, FEATURES, seed=5) / 2,
    )
    weights = weights._replace(scale=1 + weights.scale / 4)
    whole = jax.tree.map(lambda w: w.astype("float32"), weights)
    zeros = jax.tree.map(jnp.zeros_like, whole)
    return Denoiser(
        weights=sm.ParamState(weights, spec=SPECS),
        slots=sm.State((zeros, zeros), spec=(SPECS, SPECS)),
        average=sm.State(whole, spec=PARTS),
        power=sm.State(jnp.ones(FEATURES)),
        edges=sm.State(jnp.linspace(0.02, 0.98, LEVELS + 1)),
        errors=sm.State(jnp.zeros(LEVELS), reduce="sum"),
        # mistake: errors-averaged (wrong policy)
        #     errors=sm.State(jnp.zeros(LEVELS), reduce="mean"),
        counts=sm.State(jnp.zeros(LEVELS, "int32"), reduce="sum"),
        dropped=sm.State(0, reduce="sum"),
        # mistake: dropped-on-one-shard (policy forgotten)
        #     dropped=sm.State(0),
        largest=sm.State(jnp.zeros((), dtype), reduce="max"),
        activity=sm.BatchState(jnp.zeros(HIDDEN), spec=P("model"), reduce="mean"),
        # mistake: activity-added-up (wrong policy)
        #     activity=sm.BatchState(jnp.zeros(HIDDEN), spec=P("model"), reduce="sum"),
        updates=sm.State(0),
        rng=sm.RandomState(jax.random.key(3)),
    )


def power_of(x: jax.Array, seen: jax.Array) -> jax.Array:
    """The mean square of each feature, where it was seen."""
    squares = lax.psum(jnp.where(seen, x.astype("float32") ** 2, 0).sum(0), "data")
    # mistake: squares-of-every-copy (doubled psum)
    #     squares = lax.psum(jnp.where(seen, x.astype("float32") ** 2, 0).sum(0), BOTH)
    count = lax.psum(seen.sum(0), "data")
    return squares / jnp.maximum(count, 1)
    # mistake: power-averaged-over-shards (mean of means)
    #     return lax.pmean((x.astype("float32") ** 2).mean(0, where=seen), "data")


def times_of(edges: jax.Array, key: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """A time for each row, evenly spread over the levels, and the level it is in."""
    number = lax.axis_index("data") * n + jnp.arange(n)
    # mistake: number-in-the-shard (row index not offset)
    #     number = jnp.arange(n)
    even = (jax.random.uniform(key) + number / (n * lax.axis_size("data"))) % 1
    # mistake: spread-over-a-shard (count of a shard)
    #     even = (jax.random.uniform(key) + number / n) % 1
    place = even * LEVELS
    return jnp.interp(place, jnp.arange(LEVELS + 1), edges), place.astype("int32")


def draws(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Noise for a row, whether it loses its condition, and the factor of each hidden unit."""
    of_noise, of_label, of_units = jax.random.split(key, 3)
    kept = jax.random.bernoulli(of_units, KEEP, (HIDDEN,)) / KEEP
    return jax.random.normal(of_noise, (FEATURES,)), jax.random.bernoulli(of_label, DROP), kept


def embedded(time: jax.Array) -> jax.Array:
    """Waves of each time; each shard of the units makes the phases of its frequencies."""
    n = TIMES // 2 // lax.axis_size("model")
    octave = lax.axis_index("model") * n + jnp.arange(n)
    # mistake: octaves-from-the-first (unit index not offset)
    #     octave = jnp.arange(n)
    phase = lax.all_gather(time[:, None] * 2.0**octave, "model", axis=1, tiled=True)
    # mistake: octaves-from-the-other-end (wrong order of parts)
    #     phase = lax.all_gather(time[:, None] * 2.0**octave, "model", axis=2).reshape(len(time), -1)
    return jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], 1)


def denoise(weights: Weights, noisy: Any, time: Any, label: Any, kept: Any) -> Any:
    """What the network makes of the rows; each shard of the units gets some rows of the result."""
    hidden = noisy @ weights.into + weights.table[label]
    hidden += embedded(time).astype(noisy.dtype) @ weights.times
    mean = lax.pmean(hidden.mean(1, keepdims=True), "model")
    # mistake: centre-of-own-units (statistics of a shard)
    #     mean = hidden.mean(1, keepdims=True)
    apart = hidden - mean
    variance = lax.pmean((apart**2).mean(1, keepdims=True), "model")
    # mistake: variance-in-each-part (mean of variances)
    #     variance = lax.pmean(hidden.var(1, keepdims=True), "model")
    hidden = jax.nn.silu(apart * lax.rsqrt(variance + 0.05) * weights.scale)
    n = hidden.shape[1]
    kept = lax.dynamic_slice_in_dim(kept, lax.axis_index("model") * n, n, 1)
    # mistake: first-units-kept-everywhere (shared mask)
    #     kept = kept[:, :n]
    hidden *= kept.astype(hidden.dtype)
    result = lax.psum_scatter(hidden @ weights.out, "model", tiled=True) + weights.bias
    # mistake: bias-in-every-part (bias added before the sum)
    #     result = lax.psum_scatter(hidden @ weights.out + weights.bias, "model", tiled=True)
    # mistake: halves-without-a-sum (dropped psum)
    #     result = own_rows(hidden @ weights.out) + weights.bias
    return result, hidden


def own_rows(whole: Any) -> Any:
    """The rows for which this shard has the network's results."""
    n, shard = lax.axis_size("model"), lax.axis_index("model")
    # mistake: rows-of-another-shard (wrong axis name)
    #     n, shard = lax.axis_size("model"), lax.axis_index("data")
    return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:])[shard], whole)


def waves(time: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How much signal and how much noise there is at each time."""
    return jnp.cos(time * jnp.pi / 2)[:, None], jnp.sin(time * jnp.pi / 2)[:, None]


def loss_of(weights: Weights, rows: Drawn, widths: jax.Array) -> Any:
    """This shard's part of the loss: the gradient through a collective is that of the sum over shards."""
    signal, spread = jax.tree.map(lambda x: x.astype(rows.x.dtype), waves(rows.time))
    noisy, velocity = signal * rows.x + spread * rows.noise, signal * rows.noise - spread * rows.x
    result, hidden = denoise(weights, noisy, rows.time, rows.label, rows.kept)
    own, velocity = own_rows((rows, velocity))
    error = jnp.where(own.seen, (result - velocity).astype("float32") ** 2, 0).sum(1)
    signal, spread = waves(own.time)
    ratio = (signal / spread)[:, 0] ** 2
    weight = jnp.minimum(ratio, 5) / (ratio + 1) * widths[own.level]
    weight /= lax.pmean(weight.mean(), BOTH)
    # mistake: weights-relative-to-some (missing axis)
    #     weight /= lax.pmean(weight.mean(), "data")
    count = lax.psum(own.seen.sum(), BOTH)
    # mistake: seen-by-some-shards (missing axis)
    #     count = lax.psum(own.seen.sum(), "data")
    return (weight * error).sum() / count, (error, hidden, own)


def reduced(grads: Weights) -> Weights:
    """Of all rows. The bias is added to other rows on each shard of the units."""
    grads = jax.tree.map(lambda g: lax.psum(g.astype("float32"), "data"), grads)
    # mistake: gradients-of-own-rows (gradient not reduced)
    #     grads = jax.tree.map(lambda g: g.astype("float32"), grads)
    # mistake: gradients-averaged (pmean for psum)
    #     grads = jax.tree.map(lambda g: lax.pmean(g.astype("float32"), "data"), grads)
    return grads._replace(bias=lax.psum(grads.bias, "model"))
    # mistake: bias-by-own-rows (gradient not reduced)
    #     return grads


def clipped(grads: Weights) -> tuple[Weights, jax.Array]:
    """Scaled to a norm of at most `CLIP`, and the norm before."""
    *split, whole = ((g**2).sum() for g in grads)
    norm = jnp.sqrt(lax.psum(sum(split), "model") + whole)
    # mistake: norm-of-own-units (norm of a shard)
    #     norm = jnp.sqrt(sum(split) + whole)
    # mistake: bias-counted-by-each (doubled psum)
    #     norm = jnp.sqrt(lax.psum(sum(split) + whole, "model"))
    factor = jnp.minimum(1, CLIP / (norm + 1e-3))
    return jax.tree.map(lambda g: factor * g, grads), norm


def adam(weights: Weights, grads: Weights, slots: Any, t: jax.Array) -> Any:
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, slots[0], grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, slots[1], grads)

    def updated(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        direction = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.99**t)) + 0.02)
        return w.astype("float32") * (1 - RATE * DECAY) - RATE * direction
        # mistake: faster-on-more-shards (factor of the mesh)
        #     return w.astype("float32") * (1 - RATE * DECAY) - RATE * lax.axis_size("data") * direction

    return jax.tree.map(updated, weights, first, second), (first, second)


def averaged(average: Weights, weights: Weights, rows: int) -> Weights:
    """The average that forgets half after so many rows; each shard of the rows has a part of it."""
    keep = 0.5 ** (rows * lax.axis_size("data") / HALFLIFE)
    # mistake: forgets-by-own-rows (count of a shard)
    #     keep = 0.5 ** (rows / HALFLIFE)

    def moved(old: jax.Array, new: jax.Array) -> jax.Array:
        first = lax.axis_index("data") * len(old)
        # mistake: part-off-by-one (off by one)
        #     first = lax.axis_index("data") * (len(old) - 1)
        return keep * old + (1 - keep) * lax.dynamic_slice_in_dim(new, first, len(old))

    return jax.tree.map(moved, average, weights)


def guided(average: Weights, x: jax.Array, rows: Drawn) -> jax.Array:
    """What the averaged weights make of half noise, pushed away from what they make without a label."""
    weights = jax.tree.map(lambda w: lax.all_gather(w, "data", tiled=True).astype(x.dtype), average)
    time, kept = jnp.full(len(x), 0.5), jnp.ones_like(rows.kept)
    signal, spread = jax.tree.map(lambda x: x.astype(rows.x.dtype), waves(time))
    noisy = signal * x + spread * rows.noise
    with_label, _ = denoise(weights, noisy, time, rows.label, kept)
    without, _ = denoise(weights, noisy, time, jnp.full_like(rows.label, CLASSES), kept)
    signal, spread, noisy = own_rows((signal, spread, noisy))
    return signal * noisy - spread * (without + GUIDANCE * (with_label - without))


def refined(edges: jax.Array, level: jax.Array, error: jax.Array) -> jax.Array:
    """Edges of levels that are moved towards equal errors in all of them."""
    among = jax.nn.one_hot(level, LEVELS)
    total, count = lax.psum((error @ among, among.sum(0)), BOTH)
    # mistake: levels-of-these-rows (wrong axis name)
    #     total, count = lax.psum((error @ among, among.sum(0)), "model")
    mean = total / jnp.maximum(count, 1)
    reached = jnp.cumsum(0.5 / LEVELS + 0.5 * mean / mean.sum())
    return jnp.interp(jnp.linspace(0, 1, LEVELS + 1), jnp.pad(reached, (1, 0)), edges)


def trend(time: jax.Array, error: jax.Array) -> jax.Array:
    """How the error changes with the time, by least squares over all rows."""
    t, e = time - lax.pmean(time.mean(), BOTH), error - lax.pmean(error.mean(), BOTH)
    return lax.psum((t * e).sum(), BOTH) / lax.psum((t**2).sum(), BOTH)
    # mistake: mean-of-trends (mean of ratios)
    #     return lax.pmean((t * e).sum() / (t**2).sum(), BOTH)


def logged(rows: jax.Array) -> jax.Array:
    """One row of all, from the shard that has it."""
    mine = lax.axis_index(BOTH) == LOGGED // len(rows)
    # mistake: logged-by-another (wrong owner)
    #     mine = lax.axis_index(("model", "data")) == LOGGED // len(rows)
    return lax.psum(jnp.where(mine, rows[LOGGED % len(rows)], 0), BOTH)
    # mistake: logged-rows-of-all-shards (mask forgotten)
    #     return lax.psum(rows[LOGGED % len(rows)], BOTH)


def step(model: Denoiser, x: jax.Array, label: jax.Array, seen: jax.Array) -> Any:
    weights, edges = model.weights.value, model.edges.value
    for_times, rng = model.rng.rows(1)
    # mistake: times-by-a-stream-for-each (key of a shard)
    #     for_times, rng = model.rng.split(1)
    keys, rng = rng.rows(len(x), "data")
    # mistake: keys-of-the-first-rows (shared key)
    #     keys, rng = rng.rows(len(x))
    power = 0.9 * model.power.value + 0.1 * power_of(x, seen)
    scaled = x / jnp.sqrt(power).astype(x.dtype)
    noise, dropped, kept = jax.vmap(draws)(keys)
    time, level = times_of(edges, for_times[0], len(x))
    known = jnp.where(dropped, CLASSES, label)
    rows = Drawn(scaled, noise.astype(x.dtype), known, kept, time, level, seen)
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    (share, (error, hidden, own)), grads = gradient(weights, rows, jnp.diff(edges) * LEVELS)
    grads, norm = clipped(reduced(grads))
    updated, slots = adam(weights, grads, model.slots.value, model.updates.value + 1)
    average = averaged(model.average.value, updated, len(x))
    sample = guided(average, scaled, rows._replace(label=label))
    among = jax.nn.one_hot(own.level, LEVELS)
    largest = jnp.abs(hidden).max()
    unit_means = hidden.astype("float32").mean(0)
    model = model.replace(
        weights=jax.tree.map(lambda new, old: new.astype(old.dtype), updated, weights),
        slots=slots,
        average=average,
        power=power,
        edges=refined(edges, own.level, error),
        errors=model.errors.value + error @ among,
        counts=model.counts.value + among.sum(0).astype("int32"),
        dropped=model.dropped.value + dropped.sum(),
        largest=jnp.maximum(model.largest.value, largest),
        activity=0.9 * model.activity.value + 0.1 * unit_means,
        updates=model.updates.value + 1,
        rng=rng,
    )
    centre = lax.pmean(error.mean(), BOTH)
    spread = lax.pmean(((error - centre) ** 2).mean(), BOTH) * ROWS / (ROWS - 1)
    # mistake: one-less-of-the-rows-here (small factor)
    #     spread = lax.pmean(((error - centre) ** 2).mean(), BOTH) * len(error) / (len(error) - 1)
    numbers = {
        "loss": lax.psum(share, BOTH),
        # mistake: loss-of-own-rows (missing axis)
        #     "loss": lax.psum(share, "model"),
        "norm": norm,
        "spread": spread,
        "trend": trend(own.time, error),
        "worst": lax.pmax(error.max(), BOTH),
        "row": logged(sample),
    }
    return model, sample, error, numbers


def case(dtype: str) -> Case:
    x, label = normal(dtype, ROWS, FEATURES, seed=7), integers(ROWS, below=CLASSES, seed=8)
    seen = integers(ROWS, FEATURES, below=4, seed=9) > 0
    return Case(
        step,
        (make_denoiser(dtype), x, label, seen),
        mesh={"data": 2, "model": 2},
        in_specs=(None, P("data"), P("data"), P("data")),
        # mistake: labels-over-the-units (wrong spec)
        #     in_specs=(None, P("data"), P("model"), P("data")),
        out_specs=(P(), P(BOTH), P(BOTH), P()),
        # mistake: samples-by-the-units-first (wrong order of parts)
        #     out_specs=(P(), P(("model", "data")), P(BOTH), P()),
        check_vma=False,
    )
