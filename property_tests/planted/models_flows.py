"""A normalizing flow: rows of data over one axis, hidden units and features over the other."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
ROWS, VALID, FEATURES, UNITS, LAYERS, LEVELS = 32, 27, 8, 8, 2, 16
CLASSES, WIDTH, PARTS, EULER, CHUNKS, BOTH = 4, 3, 4, 3, 2, ("rows", "units")
CLIP, RATE, WARMUP, DECAY, KEEP, FAR = 0.8, 0.2, 4, 0.1, 0.8, 5.3
EDGES = tuple(i / 2 for i in range(-4, 5))
SPLIT = {"table": P("units"), "first": P(None, None, "units"), "second": P(None, "units")}
SPLIT |= {"mix": P(None, "units"), "diagonal": P("units"), "bend": P("units")}
SPLIT |= {"centres": P("units"), "logits": P("units")}
SPECS = SPLIT | dict.fromkeys(("bias", "shift", "scale", "field", "time"), P())
Arrays = dict[str, Any]


class Flow(sm.Module):
    params: sm.ParamState
    slots: sm.State
    moments: sm.BatchState
    histogram: sm.State
    latent: sm.State
    worst: sm.State
    seen: sm.State
    patience: sm.State
    calls: sm.State
    key: Any


def make_flow(dtype: str) -> Flow:
    shapes: Arrays = {"table": (CLASSES, WIDTH), "first": (LAYERS, FEATURES + WIDTH, UNITS)}
    shapes |= {"second": (LAYERS, UNITS, 2 * FEATURES), "bias": (LAYERS, 2 * FEATURES)}
    shapes |= {"centres": (PARTS, FEATURES), "logits": (PARTS,), "time": (2, FEATURES)}
    shapes |= dict.fromkeys(("shift", "scale", "diagonal", "bend"), (FEATURES,))
    shapes |= dict.fromkeys(("mix", "field"), (FEATURES, FEATURES))
    params = {n: normal(dtype, *s, seed=i) / 3 for i, (n, s) in enumerate(shapes.items())}
    zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    return Flow(
        params=sm.ParamState(params, spec=SPECS),
        slots=sm.State((zeros, zeros), spec=(SPECS, SPECS)),
        moments=sm.BatchState((jnp.zeros(FEATURES), jnp.ones(FEATURES))),
        histogram=sm.State(jnp.zeros(len(EDGES)), reduce="sum"),
        # mistake: counts-averaged (wrong reduction)
        #     histogram=sm.State(jnp.zeros(len(EDGES)), reduce="mean"),
        latent=sm.State(jnp.zeros((ROWS, FEATURES)), spec=P("rows", "units")),
        worst=sm.State(jnp.zeros(()), reduce="max"),
        # mistake: worst-of-one-shard (reduction forgotten)
        #     worst=sm.State(jnp.zeros(())),
        seen=sm.State(0, reduce="sum"),
        patience=sm.State((99 * jnp.ones(()), 0)),
        calls=sm.State(0),
        key=jax.random.key(198),
    )


def noise_of(flow: Flow, use: int, number: jax.Array, draw: Any = jax.random.normal) -> jax.Array:
    """For each row, noise that depends on the call, the use and the row's number."""
    key = jax.random.fold_in(flow.key, 10 * flow.calls.value + use)
    # mistake: key-of-the-units (key of a shard)
    #     key = jax.random.fold_in(flow.key, 10 * flow.calls.value + use + lax.axis_index("units"))
    keys = jax.vmap(partial(jax.random.fold_in, key))(number)
    # mistake: keys-split-on-each-shard (shared key)
    #     keys = jax.random.split(key, len(number))
    return jax.vmap(lambda one: draw(one, (FEATURES,)))(keys).astype("float32")


def moments_of(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of each feature over all rows with a weight."""
    count = lax.psum(weight.sum(), "rows")
    mean = lax.psum(weight @ x, "rows") / count
    # mistake: centre-of-own-rows (statistics of a shard)
    #     mean = weight @ x / jnp.maximum(weight.sum(), 1)
    return mean, lax.psum(weight @ (x - mean) ** 2, "rows") / count
    # mistake: variance-by-own-rows (count of a shard)
    #     return mean, lax.psum(weight @ (x - mean) ** 2, "rows") / len(x)


def log_total(x: jax.Array, axis: int, name: str) -> jax.Array:
    """The logarithm of the sum of exponentials, over an axis and over all shards."""
    highest = lax.pmax(lax.stop_gradient(x).max(axis, keepdims=True), name)
    # mistake: own-maximum-taken-off (dropped pmax)
    #     highest = lax.stop_gradient(x).max(axis, keepdims=True)
    total = lax.psum(jnp.exp(x - highest).sum(axis), name)
    # mistake: logarithm-of-a-mean (pmean for psum)
    #     total = lax.pmean(jnp.exp(x - highest).sum(axis), name)
    return jnp.log(total) + highest.squeeze(axis)


@jax.custom_vjp
def calmed(z: jax.Array) -> jax.Array:
    """The same numbers; going back, no row has a long derivative by all its features."""
    return z


def calmed_back(_: None, given: jax.Array) -> tuple[jax.Array]:
    squares = lax.psum((given**2).sum(1, keepdims=True), "units")
    # mistake: calmed-by-own-features (norm of a shard)
    #     squares = (given**2).sum(1, keepdims=True)
    return (given * lax.rsqrt(1 + 400 * squares),)


calmed.defvjp(lambda z: (z, None), calmed_back)


def coupled(p: Arrays, x: jax.Array, labels: jax.Array, back: bool = False) -> Any:
    """Layers that scale and shift half of the features by the others; and the determinant."""
    own = labels - lax.axis_index("units") * len(p["table"])
    inside = (own >= 0) & (own < len(p["table"]))
    # mistake: first-label-of-the-next-too (off by one)
    #     inside = (own >= 0) & (own <= len(p["table"]))
    found = p["table"][jnp.clip(own, 0, len(p["table"]) - 1)]
    context = lax.psum(jnp.where(inside[:, None], found, 0), "units")
    # mistake: vectors-of-every-shard (mask forgotten)
    #     context = lax.psum(found, "units")

    def one(carry: Any, layer: Any) -> tuple[Any, None]:
        (x, log_det), (first, second, bias, mask) = carry, layer
        given = jnp.concatenate([(mask * x).astype(first.dtype), context], 1)
        out = lax.psum(jnp.tanh(given @ first) @ second, "units") + bias
        # mistake: bias-of-every-shard (bias added before the psum)
        #     out = lax.psum(jnp.tanh(given @ first) @ second + bias, "units")
        log_scale, shift = jnp.split(out.astype("float32"), 2, axis=1)
        log_scale = (1 - mask) * jnp.tanh(log_scale)
        away = (x - shift) * jnp.exp(-log_scale) if back else x * jnp.exp(log_scale) + shift
        log_det = log_det + (-log_scale if back else log_scale).sum(1)
        # mistake: determinant-of-every-shard (doubled psum)
        #     log_det = log_det + lax.psum((-log_scale if back else log_scale).sum(1), "units")
        return (mask * x + (1 - mask) * away, log_det), None

    mask = (jnp.arange(FEATURES) + jnp.arange(LAYERS)[:, None]) % 2
    layers = p["first"], p["second"], p["bias"], mask.astype("float32")
    return lax.scan(one, (x, jnp.zeros(len(x))), layers, reverse=back)[0]


def mixed(p: Arrays, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """This shard's features, mixed with those before them and passed on; and the determinant."""
    own, diagonal = p["mix"].shape[1], p["diagonal"].astype("float32")
    column = lax.axis_index("units") * own + jnp.arange(own)
    # mistake: column-in-the-shard (unit index not offset)
    #     column = jnp.arange(own)
    above = jnp.where(jnp.arange(FEATURES)[:, None] < column, p["mix"], 0)
    kept = lax.dynamic_slice_in_dim(x, lax.axis_index("units") * own, own, 1)
    # mistake: features-by-the-rows (wrong axis name)
    #     kept = lax.dynamic_slice_in_dim(x, lax.axis_index("rows") * own, own, 1)
    z = (x.astype(above.dtype) @ above).astype("float32") + kept * jnp.exp(diagonal)
    terms, n = jnp.tanh(z) * p["bend"].astype("float32"), lax.axis_size("units")
    totals = lax.all_gather(terms.sum(1), "units", axis=1)
    earlier = jnp.where(jnp.arange(n) < lax.axis_index("units"), totals, 0).sum(1)
    # mistake: own-total-before-it (off by one)
    #     earlier = jnp.where(jnp.arange(n) <= lax.axis_index("units"), totals, 0).sum(1)
    z = z + earlier[:, None] + jnp.cumsum(terms, 1) - terms
    # mistake: sweep-begins-on-each-shard (cumulative sum of a shard)
    #     z = z + jnp.cumsum(terms, 1) - terms
    last = lax.ppermute(z[:, -1:], "units", [(i, (i + 1) % n) for i in range(n)])
    # mistake: last-feature-stays (ppermute forgotten)
    #     last = z[:, -1:]
    return jnp.concatenate([last, z[:, :-1]], 1), lax.psum(diagonal.sum(), "units")
    # mistake: own-part-of-the-diagonal (determinant of a shard)
    #     return jnp.concatenate([last, z[:, :-1]], 1), diagonal.sum()


def flowed(flow: Flow, p: Arrays, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Euler's steps and a trace by Hutchinson: each shard takes all features of some rows."""
    here, dtype = len(z), p["field"].dtype
    z = lax.all_to_all(z, "units", 0, 1, tiled=True)
    number = lax.axis_index("rows") * here + lax.axis_index("units") * len(z) + jnp.arange(len(z))
    # mistake: number-without-the-units (wrong offset)
    #     number = lax.axis_index("rows") * here + jnp.arange(len(z))
    probe = noise_of(flow, 1, number, jax.random.rademacher)

    def one(carry: Any, t: jax.Array) -> tuple[Any, None]:
        push = jnp.stack([jnp.sin(t), jnp.cos(t)]).astype(dtype) @ p["time"]
        speed = lambda z: jnp.tanh(z.astype(dtype) @ p["field"] + push).astype("float32")
        now, change = jax.jvp(speed, carry[:1], (probe,))
        return (carry[0] + now / EULER, carry[1] + (probe * change).sum(1) / EULER), None

    (z, log_det), _ = lax.scan(one, (z, jnp.zeros(len(z))), jnp.arange(EULER) / EULER)
    log_det = lax.all_gather(log_det, "units", tiled=True)
    # mistake: traces-interleaved (wrong order of parts)
    #     log_det = lax.all_gather(log_det, "units", axis=1).reshape(-1)
    return lax.all_to_all(z, "units", 1, 0, tiled=True), log_det


def loss_of_data(p: Arrays, flow: Flow, x: jax.Array, labels: jax.Array, weight: jax.Array) -> Any:
    """This shard's share: the gradient through a psum is that of the sum over all shards."""
    x, log_det = coupled(p, (x - p["shift"]) * jnp.exp(p["scale"].astype("float32")), labels)
    mean, variance = moments_of(x, weight)
    z, by_mix = mixed(p, (x - mean) * lax.rsqrt(variance + 0.01))
    z, by_field = flowed(flow, p, z)
    log_det = log_det + by_mix + by_field + p["scale"].sum() - jnp.log(variance + 0.01).sum() / 2
    whole = lax.all_gather(calmed(z), "units", axis=1, tiled=True)
    logits, centres = p["logits"].astype("float32"), p["centres"].astype("float32")
    terms = logits - log_total(logits, 0, "units")
    # mistake: shares-of-own-components (softmax of a shard)
    #     terms = logits - jax.nn.logsumexp(logits)
    terms = terms - ((whole[:, None] - centres) ** 2 + jnp.log(2 * jnp.pi)).sum(2) / 2
    log_p, count = log_total(terms, 1, "units"), lax.psum(weight.sum(), "rows")
    usage = lax.psum(weight @ jnp.exp(terms - log_p[:, None]), "rows") / count
    uneven = (usage * jnp.log(usage + 0.01)).sum() / lax.axis_size("rows")
    # mistake: unevenness-of-every-shard (factor of the shards forgotten)
    #     uneven = (usage * jnp.log(usage + 0.01)).sum()
    share = uneven - (weight * (log_p + log_det)).sum() / count / lax.axis_size("units")
    return share, (log_p + log_det, z, usage, (mean, variance))


def sampled(p: Arrays, flow: Flow, number: jax.Array, heat: Any) -> Any:
    """This shard's share of how unlikely samples are under an energy; and samples and weights."""
    z = noise_of(flow, 2, number)
    x, log_det = coupled(p, z, number % CLASSES, back=True)
    apart = ((x - 0.5) ** 2).sum(1) / heat - (z**2).sum(1) / 2 - log_det
    return apart.sum() / ROWS / lax.axis_size("units"), (x, -apart)
    # mistake: mean-of-own-samples (count of a shard)
    #     return apart.mean() / CHUNKS / lax.axis_size("units"), (x, -apart)


def updated(flow: Flow, p: Arrays, grads: Arrays, t: jax.Array) -> Any:
    """The parameters and slots after a step with momentum and decay; and the gradient's length."""
    grads = {name: lax.psum(g.astype("float32"), "rows") for name, g in grads.items()}
    # mistake: shares-averaged (pmean for psum)
    #     grads = {name: lax.pmean(g.astype("float32"), "rows") for name, g in grads.items()}
    grads = {n: g if n in SPLIT else lax.psum(g, "units") for n, g in grads.items()}
    # mistake: common-ones-of-own-units (gradient not reduced)
    #     grads = dict(grads)
    squares = {name: (g**2).sum() for name, g in grads.items()}
    squares |= lax.psum({name: squares[name] for name in SPLIT}, "units")
    # mistake: every-norm-summed (doubled psum)
    #     squares |= lax.psum(squares, "units")
    norm = jnp.sqrt(jnp.stack(list(squares.values())).sum())
    rate, new, slots = RATE * jnp.minimum(1, t / WARMUP), {}, {}
    # mistake: warm-by-the-shards (small factor)
    #     rate, new, slots = RATE * jnp.minimum(1, t * lax.axis_size("rows") / WARMUP), {}, {}
    for name, g in grads.items():
        average, speed = (slot[name] for slot in flow.slots.value)
        speed, wide = 0.8 * speed + g * jnp.minimum(1, CLIP / norm), p[name].astype("float32")
        wide = wide - rate * (speed + (DECAY * wide if wide.ndim > 1 else 0))
        slots[name] = KEEP * average + (1 - KEEP) * wide, speed
        new[name] = wide.astype(p[name].dtype)
    return new, tuple({n: slots[n][i] for n in slots} for i in range(2)), norm


def step(flow: Flow, pixels: jax.Array, labels: jax.Array) -> Any:
    here, t, p = len(pixels), flow.calls.value + 1, flow.params.value
    number = lax.axis_index("rows") * here + jnp.arange(here)
    # mistake: number-in-the-shard (row index not offset)
    #     number = jnp.arange(here)
    weight = (number < VALID).astype("float32")
    # mistake: padding-at-the-end-of-each-shard (mask of a shard)
    #     weight = (jnp.arange(here) < here - (ROWS - VALID)).astype("float32")
    count = lax.psum(weight.sum(), "rows")
    x = 4 * ((pixels + noise_of(flow, 0, number, jax.random.uniform)) / LEVELS - 0.5)
    mean, variance = moments_of(x, weight)
    begun = {"shift": mean, "scale": -jnp.log(variance + 0.01) / 2}
    p = p | {n: jnp.where(t > 1, p[n], v.astype(p[n].dtype)) for n, v in begun.items()}
    gradient = partial(jax.grad, has_aux=True)
    grads, (log_p, z, usage, (mean, variance)) = gradient(loss_of_data)(p, flow, x, labels, weight)

    def one(grads: Arrays, some: jax.Array) -> tuple[Arrays, Any]:
        more, aux = gradient(sampled)(p, flow, some, 1 + 2 * 0.5**t)
        return jax.tree.map(jnp.add, grads, more), aux

    grads, (samples, log_w) = lax.scan(one, grads, number.reshape(CHUNKS, -1))
    # mistake: rows-dealt-to-chunks (wrong order of rows)
    #     grads, (samples, log_w) = lax.scan(one, grads, number.reshape(-1, CHUNKS).T)
    p, slots, norm = updated(flow, p, grads, t)
    even = slots[0]["centres"] / (1 - KEEP**t)
    # mistake: average-corrected-by-shards (factor of the shards)
    #     even = slots[0]["centres"] / (1 - KEEP ** (t * lax.axis_size("rows")))
    log_w = log_w.reshape(here)
    effective = 2 * log_total(log_w, 0, "rows") - log_total(2 * log_w, 0, "rows")
    # mistake: squared-weights-over-the-units (wrong axis name)
    #     effective = 2 * log_total(log_w, 0, "rows") - log_total(2 * log_w, 0, "units")
    bits = -(log_p / FEATURES + jnp.log(4 / LEVELS)) / jnp.log(2.0)
    mean_bits = lax.psum((weight * bits).sum(), "rows") / count
    # mistake: mean-of-the-shards-means (mean of means)
    #     mean_bits = lax.pmean((weight * bits).sum() / jnp.maximum(weight.sum(), 1), "rows")
    best, waited = flow.patience.value
    better, bad = mean_bits < best - 0.01, jnp.where(weight > 0, bits, -99)
    worst = lax.pmin(jnp.where(bad == lax.pmax(bad.max(), "rows"), number, ROWS).min(), "rows")
    # mistake: worst-of-own-rows (argmax of a shard)
    #     worst = number[bad.argmax()]
    far = lax.psum((weight * (lax.psum((z**2).sum(1), "units") > FAR**2)).sum(), "rows")
    below = (weight @ jax.nn.sigmoid(8 * (jnp.asarray(EDGES) - z[..., None])).sum(1)) / FEATURES
    apart = lax.psum(below, BOTH) / count - jax.scipy.stats.norm.cdf(jnp.asarray(EDGES))
    # mistake: calibrated-by-own-features (dropped psum)
    #     apart = lax.psum(below, "rows") / count - jax.scipy.stats.norm.cdf(jnp.asarray(EDGES))
    now = zip(flow.moments.value, (mean, variance * count / (count - 1)), strict=True)
    # mistake: unbiased-by-own-rows (small factor)
    #     now = zip(flow.moments.value, (mean, variance * here / (here - 1)), strict=True)
    flow = flow.replace(
        params=p,
        slots=slots,
        moments=tuple(0.7 * old + 0.3 * new for old, new in now),
        histogram=flow.histogram.value + below,
        latent=flow.latent.value / 2 + z,
        worst=jnp.maximum(flow.worst.value, bad.max()),
        seen=flow.seen.value + weight.sum().astype(int),
        # mistake: seen-on-all-shards-twice (doubled psum)
        #     seen=flow.seen.value + lax.psum(weight.sum(), "units").astype(int),
        patience=(jnp.where(better, mean_bits, best), jnp.where(better, 0, waited + 1)),
        calls=t,
    )
    numbers = {"bits": mean_bits, "norms": (norm, effective), "worst": (worst, far), "apart": apart}
    return flow, (bits, samples.reshape(here, -1)), (usage, even), numbers


def case(dtype: str) -> Case:
    pixels, labels = integers(ROWS, FEATURES, below=LEVELS), integers(ROWS, below=CLASSES, seed=1)
    return Case(
        step,
        (make_flow(dtype), pixels, labels),
        mesh={"rows": 4, "units": 2},
        in_specs=(None, P("rows"), P("rows")),
        out_specs=(P(), P("rows"), P("units"), P()),
        # mistake: usage-as-one-copy (wrong spec)
        #     out_specs=(P(), P("rows"), P(), P()),
        check_vma=False,
        steps=3,
    )
