"""An ensemble Kalman filter on a ring of points: members over one axis, points over the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
MEMBERS, POINTS, SEEN, WINDOWS, STEPS, UNITS, FEATURES, OUT = 16, 24, 8, 3, 3, 4, 4, 1
BOTH, GRID, FLAT = ("members", "space"), P("members", "space"), P(("space", "members"))
COURANT, MIXING, DAMPING, FORCING, RADIUS, ERROR, LIMIT = 0.4, 0.1, 0.05, 0.15, 4.0, 0.1, 25.0
RELAX, KEPT, ENOUGH, PRIOR, LONGEST, DECAY, RATE = 0.6, 0.2, 0.55, 20, 1.5, 0.02, 0.3
Arrays = dict[str, jax.Array]


class Filter(sm.Module):
    ensemble: sm.HiddenState
    net: sm.ParamState
    slots: sm.State
    climate: sm.BatchState
    inflation: sm.State
    ranks: sm.State
    rejected: sm.State
    worst: sm.State
    cycles: sm.State
    rng: sm.RandomState


def make_filter(dtype: str) -> Filter:
    wave = jnp.sin(2 * jnp.pi * jnp.arange(POINTS) / POINTS)
    net = {"first": normal(dtype, FEATURES, UNITS, seed=1) / 2, "bias": jnp.zeros(UNITS, dtype)}
    net["second"] = normal(dtype, UNITS, seed=2) / 2
    return Filter(
        ensemble=sm.HiddenState(wave + 0.7 * normal("float32", MEMBERS, POINTS, seed=3), spec=GRID),
        net=sm.ParamState(net),
        slots=sm.State(jax.tree.map(lambda p: jnp.zeros(p.shape, "float32"), net)),
        climate=sm.BatchState(wave / 2, spec=P("space")),
        inflation=sm.State(jnp.ones(())),
        ranks=sm.State(jnp.zeros(MEMBERS + 1, "int32"), reduce="sum"),
        # mistake: ranks-of-one-shard (policy forgotten)
        #     ranks=sm.State(jnp.zeros(MEMBERS + 1, "int32")),
        rejected=sm.State(0, reduce="sum"),
        # mistake: rejected-by-the-strictest-shard (wrong policy)
        #     rejected=sm.State(0, reduce="max"),
        worst=sm.State((jnp.zeros(()), 0)),
        cycles=sm.State(0),
        rng=sm.RandomState(jax.random.key(4)),
    )


def neighbours(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each point the value at its left and the one at its right, around the ring."""
    n = lax.axis_size("space")
    last = lax.ppermute(x[..., -1:], "space", [(i, (i + 1) % n) for i in range(n)])
    # mistake: first-point-sent-on (halo from the wrong side)
    #     last = lax.ppermute(x[..., :1], "space", [(i, (i + 1) % n) for i in range(n)])
    first = lax.ppermute(x[..., :1], "space", [((i + 1) % n, i) for i in range(n)])
    # mistake: right-end-meets-own-left (halo of a shard)
    #     first = x[..., :1]
    return jnp.concatenate([last, x[..., :-1]], -1), jnp.concatenate([x[..., 1:], first], -1)


def places(here: int) -> jax.Array:
    return lax.axis_index("space") * here + jnp.arange(here)
    # mistake: places-by-the-members (wrong axis name)
    #     return lax.axis_index("members") * here + jnp.arange(here)
    # mistake: places-dealt-in-turn (wrong order of parts)
    #     return lax.axis_index("space") + lax.axis_size("space") * jnp.arange(here)


def own(x: jax.Array, axis: str) -> jax.Array:
    here = x.shape[-1] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * here, here, -1)
    # mistake: parts-begin-by-the-mesh (wrong offset)
    #     return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * lax.axis_size(axis), here, -1)


def distance(a: jax.Array, b: jax.Array, ring: int) -> jax.Array:
    apart = jnp.abs(a[:, None] - b)
    return jnp.minimum(apart, ring - apart)


def moments(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The mean of all members, how each differs from it, and their variance."""
    mean = lax.pmean(x.mean(0), "members")
    squares = lax.psum(((x - mean) ** 2).sum(0), "members")
    # mistake: squares-around-own-mean (mean of variances)
    #     squares = lax.psum(((x - x.mean(0)) ** 2).sum(0), "members")
    return mean, x - mean, squares / (len(x) * lax.axis_size("members") - 1)
    # mistake: one-less-on-each-shard (small factor)
    #     return mean, x - mean, squares / ((len(x) - 1) * lax.axis_size("members"))


def noise_of(keys: jax.Array, use: Any, numbers: jax.Array) -> jax.Array:
    """A normal number for each member and each of the numbers."""
    folded = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    folds = folded(keys, numbers + use * POINTS)
    return jax.vmap(jax.vmap(lambda key: jax.random.normal(key)))(folds)


def forecast(x: jax.Array, climate: jax.Array, wind: jax.Array, keys: jax.Array) -> jax.Array:
    """Some steps with the wind; the tendencies are as narrow as the wind is."""
    dt = COURANT / lax.pmax(wind.max(), "space")
    # mistake: step-by-own-wind (dropped pmax)
    #     dt = COURANT / wind.max()

    def one(now: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        slow = now.astype(wind.dtype)
        left, right = neighbours(slow)
        carried = neighbours(wind * slow)[0] - wind * slow
        # mistake: carried-around-the-shard (shift without neighbours)
        #     carried = jnp.roll(wind * slow, 1, -1) - wind * slow
        change = dt * carried + MIXING * (left - 2 * slow + right)
        noise = FORCING * noise_of(keys, number, places(x.shape[1]))
        # mistake: forcing-by-own-places (point index not offset)
        #     noise = FORCING * noise_of(keys, number, jnp.arange(x.shape[1]))
        return now + change.astype("float32") + DAMPING * (climate - now) + noise, None

    return lax.scan(one, x, jnp.arange(STEPS))[0]


@jax.custom_vjp
def over_space(x: jax.Array) -> jax.Array:
    """The sum over the shards of space, used alike on all of them: its derivative counts once."""
    return lax.psum(x, "space")


def over_space_bwd(_: None, g: jax.Array) -> tuple[jax.Array]:
    return (g,)
    # mistake: cotangents-of-all-shards-summed (gradient reduced twice)
    #     return (lax.psum(g, "space"),)


over_space.defvjp(lambda x: (over_space(x), None), over_space_bwd)


def bias_of(net: Arrays, x: jax.Array) -> jax.Array:
    """What the network believes the forecast is wrong by, at each point of each member."""
    mean = lax.pmean(x.mean(), BOTH)
    # mistake: features-around-the-mean-of-members (missing axis)
    #     mean = lax.pmean(x.mean(), "members")
    deviation = jnp.sqrt(lax.pmean(((x - mean) ** 2).mean(), BOTH))
    # mistake: deviations-averaged (mean of deviations)
    #     deviation = lax.pmean(jnp.sqrt(((x - mean) ** 2).mean()), BOTH)
    left, right = neighbours((x - mean) / deviation)
    turn = 2 * jnp.pi * places(x.shape[1]) / POINTS
    # mistake: one-turn-for-each-shard (count of a shard)
    #     turn = 2 * jnp.pi * places(x.shape[1]) / x.shape[1]
    waves = [jnp.broadcast_to(wave, x.shape) for wave in (jnp.sin(turn), jnp.cos(turn))]
    features = jnp.stack([left, right, *waves], -1).astype(net["first"].dtype)
    out = (jnp.tanh(features @ net["first"] + net["bias"]) @ net["second"]).astype("float32")
    for _ in range(2):
        # mistake: smoothed-once-for-each-shard (count of the mesh)
        #     for _ in range(lax.axis_size("space")):
        left, right = neighbours(out)
        out = out / 2 + (left + right) / 4
    return out


def loss_fn(net: Arrays, x: jax.Array, hat: jax.Array, y: jax.Array, ok: jax.Array) -> Any:
    """This shard's share: its members' innovations, by its points."""
    cost = jnp.sqrt(1 + (y - over_space((x - bias_of(net, x)) @ hat)) ** 2) - 1
    loss = jnp.where(ok, cost, 0).sum() / (ok.sum() * len(x) * lax.axis_size("members"))
    # mistake: cost-by-own-members (count of a shard)
    #     loss = jnp.where(ok, cost, 0).sum() / (ok.sum() * len(x))
    squares = sum((p.astype("float32") ** 2).sum() for p in net.values())
    return loss + DECAY * squares / (lax.axis_size("members") * lax.axis_size("space")), loss
    # mistake: decay-once-for-each-part (factor of the shards forgotten)
    #     return loss + DECAY * squares / lax.axis_size("members"), loss


def learned(model: Filter, *about: jax.Array) -> tuple[Arrays, Arrays, jax.Array]:
    """The network after a step, the optimizer's slots and the loss."""
    net, cycle = model.net.value, model.cycles.value
    (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(net, *about)
    grads = jax.tree.map(lambda g: lax.psum(g.astype("float32"), BOTH), grads)
    # mistake: gradients-of-own-points (missing axis)
    #     grads = jax.tree.map(lambda g: lax.psum(g.astype("float32"), "members"), grads)
    slots = jax.tree.map(lambda m, g: 0.7 * m + g, model.slots.value, grads)
    rate = RATE / jnp.sqrt(1.0 + cycle)
    # mistake: rate-grows-with-the-members (rate scaled by the mesh)
    #     rate = RATE * lax.axis_size("members") / jnp.sqrt(1.0 + cycle)
    net = jax.tree.map(lambda p, m: (p.astype("float32") - rate * m).astype(p.dtype), net, slots)
    return net, slots, lax.psum(loss, "members")


def gain_of(x: jax.Array, seen: jax.Array, where: jax.Array, ok: jax.Array) -> jax.Array:
    """How much each observation that is used moves each of this shard's points."""
    (_, apart, _), (_, others, _) = moments(x), moments(seen)
    free = len(x) * lax.axis_size("members") - 1
    rows = lax.psum_scatter(others.T @ others, "members", tiled=True) / free
    near = jnp.exp(-((distance(own(where, "members"), where, POINTS) / RADIUS) ** 2))
    # mistake: rows-tapered-like-the-first (axis_index forgotten)
    #     near = jnp.exp(-((distance(where[: len(rows)], where, POINTS) / RADIUS) ** 2))
    total = jnp.where(ok[:, None] & ok, lax.all_gather(rows * near, "members", tiled=True), 0)
    cross = lax.psum(apart.T @ others, "members") / free
    # mistake: covariance-averaged (pmean for psum)
    #     cross = lax.pmean(apart.T @ others, "members") / free
    near = jnp.exp(-((distance(places(x.shape[1]), where, POINTS) / RADIUS) ** 2))
    # mistake: ring-of-own-points (period of a shard)
    #     near = jnp.exp(-((distance(places(x.shape[1]), where, x.shape[1]) / RADIUS) ** 2))
    total += jnp.diag(jnp.where(ok, ERROR, 1))
    return jnp.linalg.solve(total, (jnp.where(ok, cross, 0) * near).T)


def analysed(x: jax.Array, seen: jax.Array, gain: jax.Array, y: jax.Array, keys: Any) -> Any:
    """The members moved to perturbed observations and spread again, the outermost ones reset."""
    noise = noise_of(keys, STEPS, jnp.arange(len(y)))
    change = (y + ERROR**0.5 * (noise - lax.pmean(noise.mean(0), "members")) - seen) @ gain
    # mistake: perturbations-centred-on-each-shard (statistics of a shard)
    #     change = (y + ERROR**0.5 * (noise - noise.mean(0)) - seen) @ gain
    norm = jnp.sqrt(lax.psum((change**2).sum(), BOTH))
    # mistake: length-of-own-points (local norm in clipping)
    #     norm = jnp.sqrt(lax.psum((change**2).sum(), "members"))
    # mistake: lengths-added (reduction after a nonlinearity)
    #     norm = lax.psum(jnp.sqrt((change**2).sum()), BOTH)
    old, (mean, apart, new) = moments(x)[2], moments(x + change * jnp.minimum(1, LONGEST / norm))
    x = mean + apart * (1 - RELAX + RELAX * jnp.sqrt(old / new))
    _, apart, variance = moments(x)
    far = lax.psum((apart**2 / variance).sum(1), "space")
    # mistake: far-on-own-points (dropped psum)
    #     far = (apart**2 / variance).sum(1)
    everyone = lax.all_gather(far, "members", tiled=True)
    (_, outer), (_, inner) = lax.top_k(everyone, OUT), lax.top_k(-everyone, OUT)
    number = lax.axis_index("members") * len(x) + jnp.arange(len(x))
    # mistake: members-of-the-first-shard (row index not offset)
    #     number = jnp.arange(len(x))
    source = jnp.arange(len(everyone)).at[outer].set(inner)[number]
    return (1 - KEPT) * lax.all_gather(x, "members", tiled=True)[source] + KEPT * x, norm


def step(model: Filter, given: Arrays) -> Any:
    cycle, old, (worst, place) = model.cycles.value, model.inflation.value, model.worst.value
    wind = lax.all_gather(given["wind"], "members", tiled=True)
    where, y = given["where"], given["value"][cycle % WINDOWS]
    where, y = lax.all_gather((where, y), "space", tiled=True)
    keys, rng = model.rng.rows(len(model.ensemble.value), "members")
    # mistake: rows-without-their-axis (shared key)
    #     keys, rng = model.rng.rows(len(model.ensemble.value))
    # mistake: keys-split-on-each-shard (key of a shard)
    #     keys, rng = model.rng.split(len(model.ensemble.value))
    x = forecast(model.ensemble.value, model.climate.value, wind, keys)
    hat = jnp.maximum(1 - distance(places(x.shape[1]), where, POINTS), 0)
    mean, _, variance = moments(over_space(x @ hat))
    ok = (y - mean) ** 2 < LIMIT * (variance + ERROR)
    net, slots, loss = learned(model, x, hat, y, ok)
    x = x - bias_of(net, x)
    centre, apart, _ = moments(x)
    x = centre + jnp.sqrt(old) * apart
    seen = over_space(x @ hat)
    mean, _, variance = moments(seen)
    here, own_y, own_ok, near = (own(a, "space") for a in (seen, y, ok, mean))
    everyone = lax.all_gather(here, "members", tiled=True)
    # mistake: only-own-members-compared (all_gather forgotten)
    #     everyone = here
    pairs = lax.pmean(jnp.abs(here[:, None] - everyone).mean((0, 1)), "members")
    score = lax.pmean(jnp.abs(here - own_y).mean(0), "members") - pairs / 2
    rank = lax.psum((here < own_y).sum(0), "members")
    # mistake: rank-among-own-members (ranks of a shard)
    #     rank = (here < own_y).sum(0)
    squares = (own_y - near) ** 2, own(variance, "space") + ERROR
    over, under = (jnp.where(own_ok, a, 0).sum() for a in squares)
    wanted = lax.psum(over, "space") / lax.psum(under, "space")
    # mistake: ratios-averaged (mean of ratios)
    #     wanted = lax.pmean(over / under, "space")
    count = lax.psum(own_ok.sum(), "space")
    # mistake: used-ones-of-a-shard (counts not reduced)
    #     count = own_ok.sum()
    inflation = old + count / (count + PRIOR) * (jnp.clip(wanted, 0.1, 4) - old)
    inflation = jnp.where(count > ENOUGH * len(y), inflation, old)
    # mistake: enough-in-own-part (branch on a local value)
    #     inflation = jnp.where(own_ok.mean() > ENOUGH, inflation, old)
    size = jnp.where(own_ok, jnp.abs(own_y - here), 0)
    high, (row, column) = size.max(), jnp.unravel_index(size.argmax(), size.shape)
    at = (row + lax.axis_index("members") * len(x)) * len(y) + column
    at += lax.axis_index("space") * len(own_y)
    # mistake: observation-after-as-many-shards (wrong offset)
    #     at += lax.axis_index("space") * lax.axis_size("space")
    largest = lax.pmax(high, BOTH)
    # mistake: largest-of-own-members (missing axis)
    #     largest = lax.pmax(high, "space")
    at = lax.pmin(jnp.where(high == largest, at, MEMBERS * SEEN), BOTH)
    x, norm = analysed(x, seen, gain_of(x, seen, where, ok), y, keys)
    few = lax.all_to_all(x, "members", 1, 0, tiled=True)
    median = lax.top_k(few.T, len(few) // 2 + 1)[0][:, -2:].mean(1)
    model = model.replace(
        ensemble=x,
        net=net,
        slots=slots,
        climate=model.climate.value + (moments(x)[0] - model.climate.value) / (cycle + 4),
        inflation=inflation,
        ranks=model.ranks.value.at[rank].add(own_ok.astype("int32")),
        rejected=model.rejected.value + (~own_ok).sum(),
        worst=(jnp.maximum(worst, largest), jnp.where(largest > worst, at, place)),
        cycles=cycle + 1,
        rng=rng,
    )
    by_observation = jnp.where(own_ok, jnp.stack([own_y - near, score]), 0)
    return model, by_observation, median, {"loss": loss, "norm": norm, "wanted": wanted}


def case(dtype: str) -> Case:
    where = jnp.asarray([1.3, 5.6, 7.2, 10.7, 13.4, 16.8, 19.3, 22.6])
    value = [
        [9.74, 1.27, 10.59, 0.46, -0.3, -0.93, 0.75, -0.13],
        [0.98, 10.99, 0.47, 9.8, -0.38, -0.3, 8.37, 0.4],
        [0.8, 0.92, 10.57, 10.08, -0.18, 0.05, 0.09, 0.81],
    ]
    given = {"where": where, "value": jnp.asarray(value)}
    given["wind"] = 0.6 + abs(normal(dtype, POINTS, seed=6)) / 4
    return Case(
        step,
        (make_filter(dtype), given),
        mesh={"members": 4, "space": 2},
        in_specs=(None, {"where": P("space"), "value": P(None, "space"), "wind": FLAT}),
        # mistake: wind-in-parts-of-members (wrong spec)
        #     in_specs=(None, {"where": P("space"), "value": P(None, "space"), "wind": P(BOTH)}),
        out_specs=(P(), P(None, "space"), FLAT, P()),
        # mistake: median-in-parts-of-members (wrong spec)
        #     out_specs=(P(), P(None, "space"), P(BOTH), P()),
        check_vma=False,
        steps=3,
    )
