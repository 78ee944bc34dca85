"""Kriging over time: rows over one axis; inducing points, waves and units over the other."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
ROWS, VALID, COLUMNS, STATIONS, POINTS, UNITS, WAVES = 24, 22, 2, 8, 8, 8, 8
LAGS, TURNS, HELD, PERIOD, JITTER, SHARE, LEVEL = 2, 4, 5, 7, 0.2, 0.75, 0.8
LONGEST, CLIP, RATE, DECAY, WARMUP = 0.08, 0.3, 0.1, 0.1, 4
OF_POINTS = {"first": P(None, "points"), "second": P("points"), "z": P("points")}
OF_POINTS |= {"spectrum": P("points")}
COMMON = {"bias": P(), "scale": P(), "noise": P()}
Arrays = dict[str, jax.Array]


class Kriging(sm.Module):
    params: sm.ParamState
    slots: sm.State
    moments: sm.BatchState
    weights: sm.State
    products: sm.State
    offsets: sm.State
    extreme: sm.State
    measured: sm.State
    calls: sm.State
    key: Any


def make_kriging(dtype: str) -> Kriging:
    draw, zeros = partial(normal, dtype), partial(jnp.zeros, dtype="float32")
    params = {"first": draw(4, UNITS, seed=1) / 2, "second": draw(UNITS, 2, seed=2) / 4}
    params |= {"z": draw(POINTS, 2, seed=3), "spectrum": draw(WAVES, COLUMNS, seed=4) / 2}
    params |= {"bias": draw(2, seed=5), "scale": draw(2, seed=6), "noise": draw(STATIONS, seed=7)}
    products = zeros((COLUMNS, POINTS, POINTS)), zeros((COLUMNS, POINTS))
    slots = jax.tree.map(lambda p: zeros(p.shape), params)
    return Kriging(
        params=sm.ParamState(params | {"scale": params["scale"] / 8}, spec=OF_POINTS | COMMON),
        slots=sm.State(slots, spec=OF_POINTS | COMMON),
        moments=sm.BatchState((zeros(2), zeros(2) + 1)),
        weights=sm.State(normal("float32", POINTS, COLUMNS, seed=8) / 4, spec=P("points")),
        products=sm.State(products, spec=P(None, "points")),
        offsets=sm.State(zeros((STATIONS, COLUMNS)), spec=P("sites")),
        extreme=sm.State(zeros(COLUMNS), reduce="max"),
        # mistake: extreme-of-one-shard (policy forgotten)
        #     extreme=sm.State(zeros(COLUMNS)),
        measured=sm.State(0, reduce="sum"),
        # mistake: measured-by-the-busiest-shard (wrong policy)
        #     measured=sm.State(0, reduce="max"),
        calls=sm.State(0),
        key=jax.random.key(3),
    )


def numbers(axis: str, here: int) -> jax.Array:
    """The place of each of this shard's rows or points among all of them."""
    return lax.axis_index(axis) * here + jnp.arange(here)


def keys_of(key: jax.Array, use: int, number: jax.Array) -> jax.Array:
    key = jax.random.fold_in(key, use)
    # mistake: key-of-the-site-shard (key of a shard)
    #     key = jax.random.fold_in(key, use + 10 * lax.axis_index("sites"))
    return jax.vmap(lambda one: jax.random.fold_in(key, one))(number)
    # mistake: keys-split-on-each-shard (shared key)
    #     return jax.random.split(key, len(number))


def mean_over(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over all rows where the mask holds."""
    total, count = jnp.where(mask, x, 0).sum(0), mask.sum(0)
    return lax.psum(total, "sites") / lax.psum(count, "sites")
    # mistake: ratios-averaged (mean of ratios)
    #     return lax.pmean(total / count, "sites")


def warped(params: Arrays, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x.astype(params["first"].dtype) @ params["first"])
    part = jnp.dot(hidden, params["second"], preferred_element_type="float32")
    return x[:, :2] + lax.psum(part, "points") + params["bias"].astype("float32") / 4
    # mistake: warp-averaged (pmean for psum)
    #     return x[:, :2] + lax.pmean(part, "points") + params["bias"].astype("float32") / 4
    # mistake: bias-of-every-shard (bias added before the psum)
    #     return x[:, :2] + lax.psum(part + params["bias"].astype("float32") / 4, "points")


def kernel(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.exp(-(((a[:, None] - b) * jnp.exp(-scale)) ** 2).sum(-1) / 2)


def gram_of(z: jax.Array, scale: jax.Array) -> jax.Array:
    """This shard's points by all points, whose blocks go around a ring."""
    size, here, block = lax.axis_size("points"), len(z), z
    gram = JITTER * (numbers("points", here)[:, None] == jnp.arange(here * size))
    for i in range(size):
        place = (lax.axis_index("points") - i) % size * here
        # mistake: ring-turned-backwards (wrong offset)
        #     place = (lax.axis_index("points") + i) % size * here
        part = lax.dynamic_slice_in_dim(gram, place, here, 1) + kernel(z, block, scale)
        gram = lax.dynamic_update_slice_in_dim(gram, part, place, 1)
        block = lax.ppermute(block, "points", [(j, (j + 1) % size) for j in range(size)])
    return gram


def spreads(own: jax.Array, gram: jax.Array) -> jax.Array:
    """What the points leave unknown of each row; each shard solves for a part of the rows."""
    root = jnp.linalg.cholesky(lax.all_gather(gram, "points", tiled=True))
    some = lax.all_to_all(own, "points", 0, 1, tiled=True)
    known = (solve_triangular(root, some.T, lower=True) ** 2).sum(0)
    return lax.all_gather(1 - known, "points", tiled=True)
    # mistake: rows-interleaved (wrong order of parts)
    #     return lax.all_gather(1 - known, "points").T.reshape(-1)


@jax.custom_vjp
def limited(x: jax.Array) -> jax.Array:
    """The same, but no derivative by it is longer than `LONGEST`, of all rows together."""
    return x


def limited_backward(_: None, g: jax.Array) -> tuple[jax.Array]:
    """Each shard of the points has an equal share of `g`."""
    length = lax.axis_size("points") * jnp.sqrt(lax.psum((g**2).sum(), "sites"))
    # mistake: limit-by-own-rows (local norm in a custom derivative)
    #     length = lax.axis_size("points") * jnp.sqrt((g**2).sum())
    # mistake: share-taken-for-the-whole (factor of the shards forgotten)
    #     length = jnp.sqrt(lax.psum((g**2).sum(), "sites"))
    return (g * jnp.minimum(1, LONGEST / length),)


limited.defvjp(lambda x: (x, None), limited_backward)


def loss_fn(params: Arrays, model: Kriging, x: jax.Array, data: Arrays, used: jax.Array) -> Any:
    """This shard's share of the bound, negated: the sum over all shards is the loss."""
    wide, weights = {n: p.astype("float32") for n, p in params.items()}, model.weights.value
    gram, u = gram_of(wide["z"], wide["scale"]), warped(params, x)
    own = kernel(u, wide["z"], wide["scale"])
    keys = keys_of(model.key, 1, numbers("points", len(wide["spectrum"])))
    # mistake: same-waves-on-every-shard (index not offset)
    #     keys = keys_of(model.key, 1, jnp.arange(len(wide["spectrum"])))
    drawn = jax.vmap(lambda one: jax.random.normal(one, (3,)))(keys)
    angle = u @ (drawn[:, :2] * jnp.exp(-wide["scale"])).T + 3 * drawn[:, 2]
    smooth = jnp.cos(angle) @ wide["spectrum"] * (2 / WAVES) ** 0.5
    # mistake: waves-scaled-by-own-ones (count of a shard)
    #     smooth = jnp.cos(angle) @ wide["spectrum"] * (2 / len(drawn)) ** 0.5
    near, far = lax.psum(own @ weights, "points"), lax.psum(smooth, "points")
    spread, noise = spreads(own, gram), 0.1 + jax.nn.softplus(wide["noise"])[data["station"]]
    missed = (data["y"] - limited(near + far)) ** 2 + spread[:, None]
    each = missed / noise[:, None] + jnp.log(noise)[:, None]
    fit = jnp.where(used, each, 0).sum() / 2 / lax.psum(used.sum(), "sites")
    # mistake: fit-by-the-rows-here (count of a shard)
    #     fit = jnp.where(used, each, 0).sum() / 2 / used.sum()
    pull = (weights * (gram @ lax.all_gather(weights, "points", tiled=True))).sum() / ROWS
    prior, by_sites = (wide["scale"] ** 2).sum() + 0.1, lax.axis_size("sites")
    share = (fit + prior / by_sites) / lax.axis_size("points") + pull / by_sites
    # mistake: prior-of-every-row-shard (prior counted on each shard)
    #     share = (fit + prior) / lax.axis_size("points") + pull / by_sites
    # mistake: pull-shared-out-twice (normalized twice)
    #     share = (fit + (prior + pull) / by_sites) / lax.axis_size("points")
    return share, (near, far, own, gram, spread, noise)


def reduced(grads: Arrays) -> Arrays:
    """The gradients of all shards, together no longer than `CLIP`."""
    grads = {name: lax.psum(g.astype("float32"), "sites") for name, g in grads.items()}
    # mistake: shares-averaged (pmean for psum)
    #     grads = {name: lax.pmean(g.astype("float32"), "sites") for name, g in grads.items()}
    grads |= {name: lax.psum(grads[name], "points") for name in COMMON}
    # mistake: noise-left-out (gradient not reduced)
    #     grads |= {name: lax.psum(grads[name], "points") for name in ("bias", "scale")}
    split, common = (sum((grads[n] ** 2).sum() for n in names) for names in (OF_POINTS, COMMON))
    norm = jnp.sqrt(lax.psum(split, "points") + common)
    # mistake: norm-of-own-points (local norm in clipping)
    #     norm = jnp.sqrt(split + common)
    # mistake: common-ones-of-every-shard (doubled psum)
    #     norm = jnp.sqrt(lax.psum(split + common, "points"))
    return {name: g * jnp.minimum(1, CLIP / norm) for name, g in grads.items()}


def solved(system: jax.Array, right: jax.Array) -> jax.Array:
    """Some conjugate gradients, for a system of which each shard has the rows of its points."""
    inverse = 1 / system[jnp.arange(len(right)), numbers("points", len(right))]
    # mistake: diagonal-of-the-first-block (index not offset)
    #     inverse = 1 / system[jnp.arange(len(right)), jnp.arange(len(right))]

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.psum(a @ b, "points")

    def better(carry: Any, _: None) -> Any:
        x, rest, way, old = carry
        image = system @ lax.all_gather(way, "points", tiled=True)
        length = old / dot(way, image)
        # mistake: length-by-own-points (dropped psum in a loop)
        #     length = old / (way @ image)
        x, rest = x + length * way, rest - length * image
        new = dot(rest, inverse * rest)
        return (x, rest, inverse * rest + new / old * way, new), None

    start = jnp.zeros_like(right), right, inverse * right, dot(right, inverse * right)
    return lax.scan(better, start, None, length=TURNS)[0][0]


def surprises(x: jax.Array, there: jax.Array) -> jax.Array:
    """What each row adds to what the rows before it say, over the borders of the shards."""
    size, square = lax.axis_size("sites"), 0.1 + mean_over(x**2, there)
    for lag in range(1, LAGS + 1):
        edge = lax.ppermute(x[-lag:], "sites", [(i, i + 1) for i in range(size - 1)])
        # mistake: first-rows-of-the-shard-before (halo from the wrong side)
        #     edge = lax.ppermute(x[:lag], "sites", [(i, i + 1) for i in range(size - 1)])
        # mistake: nothing-before-each-shard (halo of a shard)
        #     edge = jnp.zeros_like(x[-lag:])
        before = jnp.concatenate([edge, x])[: len(x)]
        x = x - mean_over(x * before, there) / square * before
    return x


def step(model: Kriging, data: Arrays) -> Any:
    here, t, y, old = len(data["x"]), model.calls.value + 1, data["y"], model.params.value
    rows = numbers("sites", here)
    # mistake: rows-dealt-in-turn (wrong order of rows)
    #     rows = lax.axis_index("sites") + lax.axis_size("sites") * jnp.arange(here)
    valid = rows < VALID
    # mistake: padding-in-each-shard (mask of a shard)
    #     valid = jnp.arange(here) < VALID
    there, mean = data["seen"] & valid[:, None], mean_over(data["x"], valid[:, None])
    now = mean, mean_over((data["x"] - mean) ** 2, valid[:, None])
    # mistake: variance-around-the-own-mean (mean of variances)
    #     now = mean, mean_over((data["x"] - data["x"].mean(0)) ** 2, valid[:, None])
    moments = jax.tree.map(lambda m, new: 0.7 * m + 0.3 * new, model.moments.value, now)
    angle = 2 * jnp.pi * rows / PERIOD
    # mistake: season-starts-in-each-shard (position of a shard)
    #     angle = 2 * jnp.pi * jnp.arange(here) / PERIOD
    x = (data["x"] - moments[0]) * lax.rsqrt(moments[1] + 0.01)
    x = jnp.concatenate([x, jnp.stack([jnp.sin(angle), jnp.cos(angle)], 1)], 1)
    keys = keys_of(jax.random.fold_in(model.key, t), 0, rows)
    held = rows % HELD == HELD - 1
    # mistake: held-out-by-the-place-here (index not offset)
    #     held = jnp.arange(here) % HELD == HELD - 1
    used = there & (jax.vmap(partial(jax.random.bernoulli, p=SHARE))(keys) & ~held)[:, None]
    offset = lax.all_gather(model.offsets.value, "sites", tiled=True)[data["station"]]
    data = data | {"y": y - offset}
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (share, aux), grads = gradient(old, model, x, data, used)
    near, far, own, gram, spread, noise = aux
    slots = jax.tree.map(lambda m, g: 0.7 * m + g, model.slots.value, reduced(grads))
    rate = RATE * jnp.minimum(1, t / WARMUP)
    # mistake: warmup-shorter-with-more-shards (small factor)
    #     rate = RATE * jnp.minimum(1, t * lax.axis_size("sites") / WARMUP)
    decayed = jax.tree.map(lambda p: p * (1 - rate * DECAY * (p.ndim > 1)), old)
    mass = used / noise[:, None] * lax.psum(there.sum(0), "sites") / lax.psum(used.sum(0), "sites")
    # mistake: batch-weighed-by-own-rows (counts of a shard)
    #     mass = used / noise[:, None] * there.sum(0) / used.sum(0)
    whole = lax.all_gather(own, "points", axis=1, tiled=True)
    outer = lax.psum(jnp.einsum("rc,rm,rn->cmn", mass, own, whole), "sites")
    # mistake: outer-products-of-own-rows (dropped psum)
    #     outer = jnp.einsum("rc,rm,rn->cmn", mass, own, whole)
    inner = lax.psum(jnp.einsum("rc,rm->cm", mass * (data["y"] - far), own), "sites")
    # mistake: products-over-the-points (wrong axis name)
    #     inner = lax.psum(jnp.einsum("rc,rm->cm", mass * (data["y"] - far), own), "points")
    now = 0.4 * outer, 0.4 * inner
    products = jax.tree.map(lambda m, new: 0.6 * m + new, model.products.value, now)
    wanted = jax.vmap(solved)(gram + products[0], products[1]).T
    rest = jnp.where(there, data["y"] - near - far, 0)
    score = jnp.abs(surprises(rest, there)) / jnp.sqrt(spread + noise)[:, None]
    edges = jnp.linspace(0, 4, 17)
    below = jax.nn.sigmoid((edges - score[..., None]) / 0.2)
    within = mean_over(below, there[..., None]).mean(0)
    # mistake: histogram-of-own-rows (statistics of a shard)
    #     within = below.mean((0, 1), where=there[..., None])
    width = jnp.interp(LEVEL, within, edges)
    sums = partial(jax.ops.segment_sum, segment_ids=data["station"], num_segments=STATIONS)
    totals = lax.psum_scatter(sums(rest), "sites", tiled=True)
    counts = lax.psum_scatter(sums(1.0 * there), "sites", tiled=True)
    # mistake: rows-of-the-own-stations-here (counts not reduced)
    #     counts = sums(1.0 * there)[numbers("sites", len(totals))]
    size = jnp.where(there, score, 0).max(1)
    odd = lax.pmax(size.max(), "sites")
    number = lax.pmax(jnp.where(size.max() == odd, rows[size.argmax()], -1), "sites")
    # mistake: number-in-the-shard (axis_index forgotten)
    #     number = lax.pmax(jnp.where(size.max() == odd, size.argmax(), -1), "sites")
    own_row = number - lax.axis_index("sites") * here
    inside = (own_row >= 0) & (own_row < here)
    # mistake: found-on-any-shard (mask forgotten)
    #     inside = number >= 0
    place = lax.psum(jnp.where(inside, data["x"][own_row % here], 0), "sites")
    model = model.replace(
        params=jax.tree.map(lambda p, m: (p - rate * m).astype(old["z"].dtype), decayed, slots),
        slots=slots,
        moments=moments,
        weights=model.weights.value + (wanted - model.weights.value) * (1 + t) ** -0.7,
        products=products,
        offsets=0.8 * model.offsets.value + 0.2 * totals / (counts + 1),
        extreme=jnp.maximum(model.extreme.value, jnp.where(there, jnp.abs(y), 0).max(0)),
        measured=model.measured.value + there.sum(),
        calls=t,
    )
    results = {"loss": lax.psum(share, ("sites", "points")), "width": width}
    results |= {"covered": lax.psum((there & (score < width)).sum(0), "sites"), "odd": odd}
    results |= {"held": mean_over(rest**2, there & held[:, None]), "number": number, "place": place}
    return model, near + far + offset, wanted, results


def case(dtype: str) -> Case:
    x, y = (normal("float32", ROWS, 2, seed=seed) for seed in (9, 11))
    data = {"x": 1.5 * x + 0.5, "station": integers(ROWS, below=STATIONS, seed=10)}
    data |= {"y": y + jnp.sin(data["x"]), "seen": integers(ROWS, COLUMNS, below=6, seed=12) > 0}
    return Case(
        step,
        (make_kriging(dtype), data),
        mesh={"sites": 2, "points": 4},
        in_specs=(None, P("sites")),
        out_specs=(P(), P("sites"), P("points"), P()),
        # mistake: wanted-as-one-copy (wrong spec)
        #     out_specs=(P(), P("sites"), P(), P()),
        check_vma=False,
        steps=3,
    )
