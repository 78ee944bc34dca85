"""A Fourier neural operator learns a field's next steps; its lines and channels are split."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
LINES, COLUMNS, CHANNELS, LAYERS, STEPS, FEATURES, AXES = 16, 8, 4, 2, 2, 4, ("lines", "model")
WAVES, KEPT, RADIUS, BINS, SENSORS, REGIONS, POINTS = (0, 1, -2, -1), 4, 3, 4, 8, 3, LINES * COLUMNS
STEP, NOISE, DROPPED, LIMIT, CLIP, RATE, WARM, DECAY = 0.25, 0.1, 0.25, 0.05, 0.5, 0.2, 4, 0.05
LAYOUT = {"lift": P(None, "model"), "point": P(None, None, "model"), "out": P("model")}
LAYOUT |= {"modes": P(None, *AXES), "gain": P(None, "model"), "bias": P(), "mixing": P()}
OF_LINES = dict.fromkeys(("start", "seen", "region", "wind"), P("lines"))
ALONG, ACROSS = (np.fft.fft(np.eye(size)).astype("complex64") for size in (COLUMNS, LINES))
Arrays = dict[str, jax.Array]


class Operator(sm.Module):
    weights: sm.ParamState
    slots: sm.State
    average: sm.State
    running: sm.BatchState
    field: sm.HiddenState
    worst: sm.State
    highest: sm.State
    drift: sm.State
    seen: sm.State
    calls: sm.State
    rng: sm.RandomState
    key: Any


def make_operator(dtype: str) -> Operator:
    draw, zero, channels = partial(normal, dtype), jnp.zeros(()), jnp.zeros((LAYERS, CHANNELS))
    weights = {"lift": draw(FEATURES, CHANNELS, seed=1) / 2, "out": draw(CHANNELS, seed=4) / 2}
    weights["gain"] = 1 + draw(LAYERS, CHANNELS, seed=13) / 8
    weights["modes"] = draw(len(WAVES), KEPT, CHANNELS, CHANNELS, 2, seed=2)
    weights["point"] = draw(LAYERS, CHANNELS, CHANNELS, seed=3) / 2
    weights |= {"bias": jnp.asarray(0.25, dtype), "mixing": jnp.asarray(0.125, dtype)}
    wide = jax.tree.map(lambda p: p.astype("float32"), weights)
    return Operator(
        weights=sm.ParamState(weights, spec=LAYOUT),
        slots=sm.State(jax.tree.map(jnp.zeros_like, wide), spec=LAYOUT),
        average=sm.State(wide, spec=LAYOUT),
        running=sm.BatchState((channels, channels + 1), spec=P(None, "model")),
        field=sm.HiddenState(normal("float32", LINES, COLUMNS, seed=5), spec=P("lines")),
        worst=sm.State((zero, 0)),
        highest=sm.State(zero, reduce="max"),
        # mistake: highest-of-one-shard (missing policy)
        #     highest=sm.State(zero),
        drift=sm.State(zero, reduce="mean"),
        # mistake: drifts-added-up (wrong policy)
        #     drift=sm.State(zero, reduce="sum"),
        seen=sm.State(0, reduce="sum"),
        # mistake: seen-by-the-fullest-shard (wrong policy)
        #     seen=sm.State(0, reduce="max"),
        calls=sm.State(0),
        rng=sm.RandomState(jax.random.key(3)),
        key=jax.random.key(2),
    )


@jax.custom_vjp
def damped(x: jax.Array) -> jax.Array:
    """With a derivative that is, as a whole field, no longer than `LIMIT`."""
    return x


def damped_back(_: None, g: jax.Array) -> tuple[jax.Array]:
    whole = lax.psum(g, "model")
    # mistake: length-of-a-part (derivative not reduced)
    #     whole = g
    squares = lax.psum((whole**2).sum(), "lines")
    # mistake: length-on-own-lines (norm of a shard)
    #     squares = (whole**2).sum()
    return (g * lax.rsqrt(1 + squares / LIMIT**2),)


damped.defvjp(lambda x: (x, None), damped_back)


def numbers_of(here: int) -> jax.Array:
    """Where in the whole array the lines, or the modes, of this shard are."""
    return lax.axis_index("lines") * here + jnp.arange(here)
    # mistake: lines-dealt-in-turn (wrong order of lines)
    #     return lax.axis_index("lines") + lax.axis_size("lines") * jnp.arange(here)


def convolved(x: jax.Array, weights: jax.Array) -> jax.Array:
    """By products of low modes; those along a line are split, and stand for mirror images too."""
    here, size, own = len(x), lax.axis_size("lines"), x.shape[2]
    along, across = jnp.asarray(ALONG[:KEPT]), jnp.asarray(ACROSS[list(WAVES)])
    half = jnp.einsum("nmc,km->nkc", x, along) / (LINES * COLUMNS)
    # mistake: divided-by-own-points (count of a shard)
    #     half = jnp.einsum("nmc,km->nkc", x, along) / (here * COLUMNS)
    parts = lax.all_to_all(half.reshape(here, size, -1, own), "lines", 1, 1)
    half = jnp.swapaxes(parts, 0, 1).reshape(LINES, -1, own)
    # mistake: lines-joined-crosswise (wrong order of parts)
    #     half = parts.reshape(LINES, -1, own)
    modes = jnp.einsum("nkc,wn->wkc", half, across)
    number, columns = jnp.asarray(WAVES)[:, None], numbers_of(modes.shape[1])
    low = number**2 + columns**2 <= RADIUS**2
    # mistake: cut-by-own-wave-numbers (offset forgotten)
    #     low = number**2 + jnp.arange(len(columns)) ** 2 <= RADIUS**2
    images = jnp.where(columns > 0, 2, 1)
    # mistake: first-mode-of-each-shard-once (first of a shard)
    #     images = jnp.where(jnp.arange(len(columns)) > 0, 2, 1)
    parts = jnp.einsum("wki,wkio->wko", modes, lax.complex(weights[..., 0], weights[..., 1]))
    modes = lax.psum_scatter(parts, "model", scatter_dimension=2, tiled=True)
    # mistake: first-channels-on-both (wrong part)
    #     modes = lax.psum(parts, "model")[..., :own]
    modes = modes * jnp.where(low, images, 0)[..., None]
    half = jnp.einsum("wkc,wn->nkc", modes, across.conj())
    half = lax.all_to_all(half, "lines", 0, 1, tiled=True)
    # mistake: first-lines-on-every-shard (wrong part)
    #     half = lax.all_gather(half, "lines", axis=1, tiled=True)[:here]
    return jnp.einsum("nkc,km->nmc", half, along.conj()).real


def tendency(w: Arrays, u: jax.Array, keep: jax.Array) -> tuple[jax.Array, Any]:
    """What a step adds to each point, and every layer's mean and variance over the whole field."""
    line = 2 * jnp.pi * numbers_of(len(u))[:, None] / LINES
    column, dtype = 2 * jnp.pi * jnp.arange(COLUMNS) / COLUMNS, w["lift"].dtype
    shown = u, jnp.sin(line) + 0 * u, jnp.sin(column) + 0 * u, jnp.cos(line) * jnp.cos(column)

    def layer(x: jax.Array, own: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        whole = lax.all_gather(x, "model", axis=2, tiled=True)
        # mistake: channels-interleaved (wrong order of parts)
        #     whole = lax.all_gather(x, "model", axis=3).reshape(*x.shape[:2], CHANNELS)
        low = convolved(x.astype("float32"), w["modes"].astype("float32"))
        wide = low + (whole @ own[0]).astype("float32")
        mean = lax.pmean(wide.mean((0, 1)), "lines")
        # mistake: mean-over-the-channels (wrong axis name)
        #     mean = lax.pmean(wide.mean((0, 1)), "model")
        variance = lax.pmean(((wide - mean) ** 2).mean((0, 1)), "lines")
        # mistake: variances-around-own-means (mean of variances)
        #     variance = lax.pmean(wide.var((0, 1)), "lines")
        out = (wide - mean) * lax.rsqrt(variance + 0.01) * own[1]
        return x + (jnp.tanh(out) * keep).astype(dtype), (mean, variance)

    x = jnp.stack(shown, -1).astype(dtype) @ w["lift"]
    x, statistics = lax.scan(layer, x, (w["point"], w["gain"]))
    added = lax.psum(x @ w["out"], "model") + w["bias"]
    # mistake: bias-of-both-halves (bias added before the psum)
    #     added = lax.psum(x @ w["out"] + w["bias"], "model")
    return added.astype("float32"), statistics


def rolled(w: Arrays, u: jax.Array, key: jax.Array, keep: jax.Array) -> Any:
    """The next fields, each of the one before, with forcing that adds nothing on the whole."""
    keys = jax.vmap(partial(jax.random.fold_in, key))(numbers_of(len(u)))
    # mistake: keys-split-on-each-shard (shared key)
    #     keys = jax.random.split(key, len(u))
    noise = jax.vmap(lambda key: jax.random.normal(key, (STEPS, COLUMNS)), out_axes=1)(keys)
    noise = noise - lax.pmean(noise.mean((1, 2), keepdims=True), "lines")
    # mistake: balanced-on-own-lines (statistics of a shard)
    #     noise = noise - noise.mean((1, 2), keepdims=True)

    def one(u: jax.Array, forced: jax.Array) -> Any:
        added, statistics = tendency(w, damped(u), keep)
        u = 0.9 * u + STEP * added + NOISE * forced
        return u, (u, statistics)

    return lax.scan(one, u, noise)[1]


def left_over(mixing: jax.Array, wind: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """How far each point is from the equation of wind and mixing; the lines go around."""
    on = [(i, (i + 1) % lax.axis_size("lines")) for i in range(lax.axis_size("lines"))]
    before = lax.ppermute(new[-1:], "lines", on)
    # mistake: line-before-from-the-shard-after (wrong ppermute neighbour)
    #     before = lax.ppermute(new[-1:], "lines", [(j, i) for i, j in on])
    after = lax.ppermute(new[:1], "lines", [(j, i) for i, j in on])
    # mistake: own-first-line-after (halo of a shard)
    #     after = new[:1]
    wide = jnp.concatenate([before, new, after])
    around = wide[2:] + wide[:-2] + jnp.roll(new, 1, 1) + jnp.roll(new, -1, 1)
    return (new - old) / STEP + wind * (wide[2:] - wide[:-2]) / 2 - mixing * (around - 4 * new)


def spectrum(u: jax.Array) -> jax.Array:
    """The amplitude of the whole field by bins of the wave number."""
    parts = jnp.asarray(ACROSS[: LINES // 2])[:, numbers_of(len(u))] @ u @ ALONG[:, :KEPT] / POINTS
    own = lax.psum_scatter(parts, "lines", tiled=True)
    power, across = own.real**2 + own.imag**2, numbers_of(len(own))
    # mistake: wave-numbers-of-a-shard (offset forgotten)
    #     power, across = own.real**2 + own.imag**2, jnp.arange(len(own))
    bins = jnp.floor(jnp.sqrt(across[:, None] ** 2 + jnp.arange(KEPT) ** 2) + 0.5).astype(int)
    found = jax.ops.segment_sum(power.ravel(), jnp.minimum(bins, BINS - 1).ravel(), BINS)
    return jnp.sqrt(lax.psum(found, "lines") + 1e-3)
    # mistake: roots-summed (reduction after a nonlinearity)
    #     return lax.psum(jnp.sqrt(found + 1e-3), "lines")


def loss_fn(w: Arrays, start: jax.Array, given: Arrays, key: Any, keep: Any) -> Any:
    """A share of the loss: the sum of the shares of all shards has its derivative."""
    fields, statistics = rolled(w, start, key, keep)
    apart, copies = fields - given["goals"], lax.axis_size("model")
    count = lax.psum(given["seen"].sum(), "lines").astype("float32")
    # mistake: seen-on-own-lines (counts not reduced)
    #     count = given["seen"].sum().astype("float32")
    missed = jnp.where(given["seen"], apart**2, 0).sum() / (STEPS * count)
    olds = jnp.concatenate([start[None], fields[:-1]])
    left = jax.vmap(partial(left_over, w["mixing"], given["wind"][:, None]))(olds, fields)
    physical = (left**2).sum() / (STEPS * POINTS)
    # mistake: mean-of-own-points (factor of the shards forgotten)
    #     physical = (left**2).mean()
    off = (spectrum(fields[-1]) - spectrum(given["goals"][-1])) ** 2
    shared = (given["emphasis"] * off).sum() / lax.axis_size("lines")
    # mistake: bins-of-every-shard (gradient reduced twice)
    #     shared = (given["emphasis"] * off).sum()
    own = given["line"] - lax.axis_index("lines") * len(start)
    inside = (own >= 0) & (own < len(start))
    # mistake: first-of-the-next-too (off by one)
    #     inside = (own >= 0) & (own <= len(start))
    value = fields[-1][jnp.clip(own, 0, len(start) - 1), given["column"]]
    value = lax.psum(jnp.where(inside, value, 0), "lines")
    # mistake: sensors-read-everywhere (mask forgotten)
    #     value = lax.psum(value, "lines")
    sensed = ((value - given["reading"]) ** 2).sum() / SENSORS
    share = (missed + physical / 50 + shared) / copies + sensed / lax.axis_size("lines") / 4
    # mistake: sensors-shared-out-too (normalized twice)
    #     share = (missed + physical / 50 + shared + sensed / lax.axis_size("lines") / 4) / copies
    return share, (missed, left, sensed, fields, statistics)


def reduced(grads: Arrays, w: Arrays) -> tuple[Arrays, jax.Array]:
    """The gradients of all, with the decay of weights, no longer than `CLIP`; and their length."""
    total, squares = {}, jnp.zeros(())
    for name, spec in LAYOUT.items():
        g, decay = grads[name].astype("float32"), DECAY * w[name].astype("float32")
        others = tuple(axis for axis in AXES if axis not in spec)
        # mistake: modes-summed-too (doubled psum)
        #     others = ("lines",) if "model" in spec else AXES
        # mistake: gradients-of-own-channels (gradient not reduced)
        #     others = () if "lines" in spec else ("lines",)
        g = lax.psum(g, others) + decay
        # mistake: decay-on-every-shard (added before the psum)
        #     g = lax.psum(g + decay, others)
        total[name], axes = g, tuple(axis for axis in spec if axis)
        # mistake: length-by-channels-alone (wrong axis name)
        #     total[name], axes = g, tuple(axis for axis in spec if axis == "model")
        squares += lax.psum((g**2).sum(), axes)
    norm = jnp.sqrt(squares)
    return {name: g * jnp.minimum(1, CLIP / norm) for name, g in total.items()}, norm


def step(model: Operator, given: Arrays) -> Any:
    w, t = model.weights.value, model.calls.value + 1
    drops, rng = model.rng.rows(len(w["out"]), "model")
    # mistake: channels-drawn-by-the-lines (wrong axis name)
    #     drops, rng = model.rng.rows(len(w["out"]), "lines")
    keep = (jax.vmap(jax.random.uniform)(drops) > DROPPED) / (1 - DROPPED)
    key = jax.random.fold_in(model.key, t)
    # mistake: key-of-the-channels (key of a shard)
    #     key = jax.random.fold_in(model.key, t + 50 * lax.axis_index("model"))
    start = (given["start"] + model.field.value) / 2
    (_, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(w, start, given, key, keep)
    missed, left, sensed, fields, (means, variances) = aux
    grads, norm = reduced(grads, w)
    rate = RATE * jnp.minimum(1, t / WARM)
    # mistake: warm-up-by-all-shards (small factor)
    #     rate = RATE * jnp.minimum(1, t * lax.axis_size("lines") / WARM)
    slots = jax.tree.map(lambda m, g: 0.8 * m + g, model.slots.value, grads)
    weights = jax.tree.map(lambda p, m: (p - rate * m).astype(p.dtype), w, slots)
    now = means.mean(0), variances.mean(0) * POINTS / (POINTS - 1)
    # mistake: unbiased-by-own-points (small factor)
    #     now = means.mean(0), variances.mean(0) * start.size / (start.size - 1)
    last, apart, worst = fields[-1], fields[-1] - given["goals"][-1], model.worst.value
    number = lax.axis_index("lines") * apart.size + jnp.abs(apart).argmax()
    # mistake: number-by-lines-alone (wrong offset)
    #     number = lax.axis_index("lines") * len(apart) + jnp.abs(apart).argmax()
    values, numbers = lax.all_gather((jnp.abs(apart).max(), number), "lines")
    found = values.max(), numbers[values.argmax()]
    model = model.replace(
        weights=weights,
        slots=slots,
        average=jax.tree.map(lambda a, p: 0.8 * a + 0.2 * p, model.average.value, weights),
        running=jax.tree.map(lambda old, new: 0.8 * old + 0.2 * new, model.running.value, now),
        field=last,
        worst=jax.tree.map(lambda a, b: jnp.where(found[0] > worst[0], a, b), found, worst),
        highest=jnp.maximum(model.highest.value, jnp.abs(left).max()),
        drift=0.5 * model.drift.value + last.mean(),
        seen=model.seen.value + given["seen"].sum(),
        calls=t,
        rng=rng,
    )
    add = partial(jax.ops.segment_sum, segment_ids=given["region"].ravel(), num_segments=REGIONS)
    total, points = add((apart**2).ravel()), add(jnp.ones(apart.size))
    regions = lax.psum(total, "lines") / lax.psum(points, "lines")
    # mistake: means-of-shards-averaged (mean of means)
    #     regions = lax.pmean(total / jnp.maximum(points, 1), "lines")
    losses = lax.psum(missed, "lines"), lax.psum(sensed, "model")
    return model, last, {"losses": losses, "norm": norm, "regions": regions}


def case(dtype: str) -> Case:
    start, ramp = normal("float32", LINES, COLUMNS, seed=6), jnp.arange(LINES)[:, None]
    goals = 0.7 * start + normal("float32", STEPS, LINES, COLUMNS, seed=7) / 2
    given = {"start": start, "goals": goals.at[:, 11, 5].add(5)}
    given["seen"] = integers(LINES, COLUMNS, below=LINES, seed=9) > ramp // 2
    given["region"] = (integers(LINES, COLUMNS, below=LINES, seed=10) + ramp) // 11
    given |= {"wind": normal("float32", LINES, seed=11) / 2, "emphasis": 2.0 ** -jnp.arange(BINS)}
    given |= {"line": jnp.array([1, 4, 5, 8, 10, 12, 13, 15]), "column": jnp.arange(SENSORS)}
    given["reading"] = normal("float32", SENSORS, seed=12)
    sensors = dict.fromkeys(("line", "column", "reading"), P("model"))
    # mistake: sensors-over-the-lines (wrong spec)
    #     sensors = dict.fromkeys(("line", "column", "reading"), P("lines"))
    specs = OF_LINES | sensors | {"goals": P(None, "lines"), "emphasis": P()}
    # mistake: emphasis-in-parts (wrong spec)
    #     specs = OF_LINES | sensors | {"goals": P(None, "lines"), "emphasis": P("lines")}
    return Case(
        step,
        (make_operator(dtype), given),
        mesh={"lines": 4, "model": 2},
        in_specs=(None, specs),
        out_specs=(P(), P("lines"), P()),
        check_vma=False,
        steps=3,
    )
