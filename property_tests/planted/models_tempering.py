"""Parallel tempering of a regression: chains over one axis, rows and units over the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
LADDERS, LEVELS, ROWS, PRESENT, FEATURES, UNITS, DRAWS, LEAPS = 2, 8, 32, 27, 4, 8, 2, 3
CHAINS, FREEDOM, WIDTH, FADE, PRIOR, TRUST = LADDERS * LEVELS, 4.0, 2.0, 0.96, 20, 0.25
WANTED, GAIN, RATE, CLIP, HALF_LIFE = 0.8, 0.5, 0.1, 3.0, 40
SPECS = {"inner": P(None, "rows"), "outer": P("rows"), "bias": P()}
Arrays = dict[str, jax.Array]


class Sampler(sm.Module):
    walk: sm.HiddenState
    tuning: sm.State
    surrogate: sm.ParamState
    slots: sm.State
    scale: sm.BatchState
    best: sm.State
    accepted: sm.State
    worst: sm.State
    draws: sm.State
    rng: sm.RandomState


def make_sampler(dtype: str) -> Sampler:
    theta, one = normal("float32", CHAINS, FEATURES, seed=1) / 2, jnp.ones(())
    walk = {"theta": theta, "mean": 0 * theta, "around": 0 * theta, "likely": jnp.zeros(CHAINS)}
    params = {"inner": normal(dtype, FEATURES, UNITS, seed=2) / 2, "bias": jnp.ones((), dtype)}
    params["outer"] = normal(dtype, UNITS, seed=3) / 2
    slots = jax.tree.map(lambda p: jnp.zeros(p.shape, "float32"), params)
    return Sampler(
        walk=sm.HiddenState(walk | {"walker": jnp.arange(CHAINS)}, spec=P("chains")),
        tuning=sm.State((jnp.full(LEVELS, -1.5), jnp.full(LEVELS - 1, -0.9))),
        surrogate=sm.ParamState(params, spec=SPECS),
        slots=sm.State(slots, spec=SPECS),
        scale=sm.BatchState((-20 * one, 8 * one)),
        best=sm.State((-1000 * one, theta[0])),
        accepted=sm.State(0, reduce="sum"),
        # mistake: accepted-of-one-shard (missing policy)
        #     accepted=sm.State(0),
        worst=sm.State(0 * one, reduce="max"),
        # mistake: worst-on-average (wrong policy)
        #     worst=sm.State(0 * one, reduce="mean"),
        draws=sm.State(0),
        rng=sm.RandomState(jax.random.key(4)),
    )


def numbered(here: int, axis: str) -> jax.Array:
    """The numbers of this shard's chains, or of its rows, among all."""
    return lax.axis_index(axis) * here + jnp.arange(here)
    # mistake: number-in-the-shard (axis_index forgotten)
    #     return jnp.arange(here)
    # mistake: dealt-in-turn (wrong order of rows)
    #     return lax.axis_index(axis) + lax.axis_size(axis) * jnp.arange(here)


def partner(x: jax.Array, lower: Any) -> jax.Array:
    """What the chain after each lower one has, and before each other; zero at the ends."""
    size, lower = lax.axis_size("chains"), jnp.reshape(lower, (-1,) + (1,) * (x.ndim - 1))
    before = lax.ppermute(x[-1:], "chains", [(i, i + 1) for i in range(size - 1)])
    # mistake: first-of-the-shard-before (halo from the wrong side)
    #     before = lax.ppermute(x[:1], "chains", [(i, i + 1) for i in range(size - 1)])
    after = lax.ppermute(x[:1], "chains", [(i + 1, i) for i in range(size - 1)])
    # mistake: after-from-the-shard-before (wrong ppermute neighbour)
    #     after = lax.ppermute(x[:1], "chains", [(i, i + 1) for i in range(size - 1)])
    return jnp.where(lower, jnp.concatenate([x[1:], after]), jnp.concatenate([before, x[:-1]]))


def by_level(x: jax.Array) -> jax.Array:
    """The mean of each level over both ladders."""
    return lax.all_gather(x, "chains", tiled=True).reshape(LADDERS, LEVELS).mean(0)
    # mistake: chains-gathered-crosswise (wrong order of parts)
    #     return lax.all_gather(x, "chains").T.reshape(LADDERS, LEVELS).mean(0)


def prepared(x: jax.Array, y: jax.Array, present: jax.Array) -> Arrays:
    """Standardized features, what was measured, and weights: older rows count less."""
    wide, there = x.astype("float32"), present[:, None]
    count = lax.psum(present.sum(), "rows")
    # mistake: rows-of-a-shard-counted (count of a shard)
    #     count = present.sum()
    mean = lax.psum(jnp.where(there, wide, 0).sum(0), "rows") / count
    squares = lax.psum(jnp.where(there, (wide - mean) ** 2, 0).sum(0), "rows") / count
    # mistake: variance-around-the-own-mean (mean of variances)
    #     squares = lax.pmean(wide.var(0, where=there), "rows")
    age = PRESENT - 1.0 - numbered(len(x), "rows")
    # mistake: age-by-the-chains (wrong axis name)
    #     age = PRESENT - 1.0 - numbered(len(x), "chains")
    x = ((wide - mean) * lax.rsqrt(squares + 0.01)).astype(x.dtype)
    return {"x": x, "y": y.astype("float32"), "weight": jnp.where(present, FADE**age, 0)}


def missed(theta: jax.Array, data: Arrays) -> jax.Array:
    return data["y"] - (theta.astype(data["x"].dtype) @ data["x"].T).astype("float32")


@jax.custom_vjp
def log_likelihood(theta: jax.Array, data: Arrays) -> jax.Array:
    """Of each chain, for all shards' rows, with errors of Student's t."""
    terms = -(FREEDOM + 1) / 2 * jnp.log1p(missed(theta, data) ** 2 / FREEDOM)
    return lax.psum((terms * data["weight"]).sum(1), "rows")
    # mistake: likelihood-of-own-rows (dropped psum)
    #     return (terms * data["weight"]).sum(1)
    # mistake: likelihood-averaged (pmean for psum)
    #     return lax.pmean((terms * data["weight"]).sum(1), "rows")


def backward(saved: tuple[jax.Array, Arrays], by: jax.Array) -> tuple[jax.Array, None]:
    apart = missed(*saved)
    pull = saved[1]["weight"] * (FREEDOM + 1) * apart / (FREEDOM + apart**2)
    slope = by[:, None] * (pull @ saved[1]["x"].astype("float32"))
    return lax.psum(slope, "rows"), None
    # mistake: slope-of-own-rows (derivative of a shard)
    #     return slope, None
    # mistake: slope-summed-over-the-chains (wrong axis name)
    #     return lax.psum(slope, "chains"), None


log_likelihood.defvjp(lambda *args: (log_likelihood(*args), args), backward)


def density(theta: jax.Array, likely: jax.Array, beta: Any) -> jax.Array:
    """The logarithm of the tempered posterior, up to a constant."""
    return beta * likely - (theta**2).sum(1) / (2 * WIDTH**2)


def units(params: Arrays, theta: jax.Array) -> jax.Array:
    hidden = jnp.tanh(theta @ params["inner"].astype("float32"))
    return hidden @ params["outer"].astype("float32")


def misfit(params: Arrays, theta: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The derivative of the first is, summed over the units' shards, that of this shard's loss."""
    guess = lax.psum(units(params, theta), "rows") + params["bias"].astype("float32")
    # mistake: bias-of-both-halves (bias added before the psum)
    #     guess = lax.psum(units(params, theta) + params["bias"].astype("float32"), "rows")
    loss = ((guess - target) ** 2).mean()
    # mistake: misfit-by-all-chains (normalized twice)
    #     loss = ((guess - target) ** 2).sum() / CHAINS
    return loss / lax.axis_size("rows"), loss
    # mistake: derivative-of-both-halves (gradient reduced twice)
    #     return loss, loss


def reduced(grads: Arrays) -> tuple[Arrays, jax.Array]:
    """The gradients of all chains, together no longer than `CLIP`, and how long they were."""
    grads = {name: lax.pmean(g.astype("float32"), "chains") for name, g in grads.items()}
    # mistake: gradients-of-own-chains (gradient not reduced)
    #     grads = {name: g.astype("float32") for name, g in grads.items()}
    grads["bias"] = lax.psum(grads["bias"], "rows")
    # mistake: bias-by-the-mean-half (pmean for psum)
    #     grads["bias"] = lax.pmean(grads["bias"], "rows")
    squares = {name: (g**2).sum() for name, g in grads.items()}
    norm = jnp.sqrt(lax.psum(squares["inner"] + squares["outer"], "rows") + squares["bias"])
    # mistake: norm-of-own-units (local norm in clipping)
    #     norm = jnp.sqrt(squares["inner"] + squares["outer"] + squares["bias"])
    return {name: g * jnp.minimum(1, CLIP / norm) for name, g in grads.items()}, norm


def exchanged(walk: Arrays, beta: jax.Array, noise: jax.Array, odd: jax.Array) -> Any:
    """Some neighbours change places; also how likely that was, for the lower one of each pair."""
    number = numbered(len(beta), "chains")
    lower, level = number % 2 == odd, number % LEVELS
    inside = jnp.where(lower, level < LEVELS - 1, level > 0)
    # mistake: ladders-end-with-the-shard (wrong mask)
    #     inside = (level > 0) & (jnp.arange(len(beta)) + lower < len(beta))
    noise = jnp.where(lower, noise, partner(noise, lower))
    mine = {name: walk[name] for name in ("theta", "likely", "walker")}
    other = {name: partner(x, lower) for name, x in mine.items()}
    change = (beta - partner(beta, lower)) * (other["likely"] - mine["likely"])
    swap = inside & (noise < change)
    new = {name: jnp.where(swap, other[name].T, x.T).T for name, x in mine.items()}
    return walk | new, jnp.where(inside & lower, jnp.exp(jnp.minimum(change, 0)), 0)


def sampled(sampler: Sampler, keys: jax.Array, beta: jax.Array, data: Arrays) -> Any:
    """Walk and moments after all draws, and what was seen at each of them."""
    walk, past, params = sampler.walk.value, sampler.draws.value, sampler.surrogate.value
    total = PRIOR + past * len(keys) * lax.axis_size("chains")
    # mistake: mass-by-the-chains-here (count of a shard)
    #     total = PRIOR + past * len(keys)
    inverse = (lax.psum(walk["around"].sum(0), "chains") + PRIOR) / total
    # mistake: mass-of-own-chains (dropped psum)
    #     inverse = (walk["around"].sum(0) + PRIOR) / total
    step = jnp.exp(sampler.tuning.value[0])[numbered(len(keys), "chains") % LEVELS][:, None]
    # mistake: steps-of-the-first-levels (index without offset)
    #     step = jnp.exp(sampler.tuning.value[0])[jnp.arange(len(keys)) % LEVELS][:, None]

    def force(theta: jax.Array) -> jax.Array:
        part = (1 - TRUST) * beta
        known = jax.grad(lambda t: density(t, log_likelihood(t, data), part).sum())(theta)
        own = jax.grad(lambda t: units(params, t).sum())(theta)
        # mistake: force-through-the-sum (gradient reduced twice)
        #     own = jax.grad(lambda t: lax.psum(units(params, t), "rows").sum())(theta)
        learned = sampler.scale.value[1] * lax.psum(own, "rows")
        # mistake: force-of-own-units (dropped psum)
        #     learned = sampler.scale.value[1] * own
        return known + TRUST * beta[:, None] * learned

    def leap(_: Any, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        theta = now[0] + step * inverse * now[1]
        return theta, now[1] + step * force(theta)

    def draw(walk: Arrays, turn: jax.Array) -> Any:
        three = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, turn), 3))(keys)
        push = jax.vmap(lambda key: jax.random.normal(key, (FEATURES,)))(three[:, 0])
        old, push = walk["theta"], push * lax.rsqrt(inverse)
        theta, pushed = lax.fori_loop(0, LEAPS, leap, (old, push + step / 2 * force(old)))
        pushed, likely = pushed - step / 2 * force(theta), log_likelihood(theta, data)
        gain = density(theta, likely, beta) - density(old, walk["likely"], beta)
        gain += (inverse * (push**2 - pushed**2)).sum(1) / 2
        logs = -jax.vmap(jax.vmap(jax.random.exponential))(three[:, 1:])
        taken = logs[:, 0] < gain
        walk["theta"] = jnp.where(taken[:, None], theta, old)
        walk["likely"] = jnp.where(taken, likely, walk["likely"])
        walk, chance = exchanged(walk, beta, logs[:, 1], turn % 2)
        change, count = walk["theta"] - walk["mean"], past + turn + 1.0
        walk["mean"] = walk["mean"] + change / count
        walk["around"] = walk["around"] + change * (walk["theta"] - walk["mean"])
        return walk, (taken, gain, chance, walk["likely"])

    start = walk | {"likely": log_likelihood(walk["theta"], data)}
    return lax.scan(draw, start, jnp.arange(DRAWS))


def reported(walk: Arrays, likely: jax.Array, beta: jax.Array, count: jax.Array) -> Arrays:
    """The evidence by both ladders, and how far the coldest chains are apart for their widths."""
    after, next_beta = partner(likely, True), partner(beta, True)
    # mistake: trapezoids-of-own-levels (shift without neighbours)
    #     after, next_beta = jnp.roll(likely, -1), jnp.roll(beta, -1)
    level = numbered(len(beta), "chains") % LEVELS
    area = jnp.where(level < LEVELS - 1, (beta - next_beta) * (likely + after) / 2, beta * likely)
    evidence = lax.psum(area.sum(), "chains") / LADDERS
    # mistake: evidence-by-the-shards (pmean for psum)
    #     evidence = lax.pmean(area.sum(), "chains") / LADDERS
    mean, around = (jnp.where(level == 0, walk[name].T, 0).T for name in ("mean", "around"))
    centre = lax.psum(mean.sum(0), "chains") / LADDERS
    # mistake: centre-of-own-chains (statistics of a shard)
    #     centre = mean.sum(0) / LADDERS
    apart = jnp.where(level == 0, (mean - centre).T, 0) ** 2
    between = lax.psum(apart.sum(1), "chains") / (LADDERS - 1)
    within = lax.psum(around.sum(0), "chains") / LADDERS / (count - 1) + 0.1
    return {"evidence": evidence, "apart": jnp.sqrt((count - 1) / count + between / within)}


def best_of(score: jax.Array, theta: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The highest score of all chains, where that is, and the number of the chain."""
    top, number = lax.pmax(score.max(), "chains"), numbered(len(score), "chains")
    chain = lax.pmin(jnp.where(score == top, number, CHAINS).min(), "chains")
    # mistake: chain-by-its-place-here (argmax of a shard)
    #     chain = score.argmax()
    place = lax.psum(jnp.where((number == chain)[:, None], theta, 0).sum(0), "chains")
    # mistake: place-on-average (pmean for psum)
    #     place = lax.pmean(jnp.where((number == chain)[:, None], theta, 0).sum(0), "chains")
    return top, place, chain


def step(sampler: Sampler, x: jax.Array, y: jax.Array, present: jax.Array) -> Any:
    data, number = prepared(x, y, present), numbered(len(sampler.walk.value["theta"]), "chains")
    (log_step, gaps), old = sampler.tuning.value, sampler.surrogate.value
    beta = jnp.exp(-jnp.cumsum(jnp.pad(jnp.exp(gaps), (1, 0))))[number % LEVELS]
    keys, rng = sampler.rng.rows(len(number), "chains")
    # mistake: keys-of-the-rows (wrong axis name)
    #     keys, rng = sampler.rng.rows(len(number), "rows")
    # mistake: keys-split-on-each-shard (key of a shard)
    #     keys, rng = sampler.rng.split(len(number))
    walk, (taken, gain, swapping, likely) = sampled(sampler, keys, beta, data)
    score, place, chain = best_of(density(walk["theta"], walk["likely"], 1.0), walk["theta"])
    row_keys, rng = rng.rows(len(y), "rows")
    # mistake: same-noise-for-both-halves (shared key)
    #     row_keys, rng = rng.rows(len(y))
    replicas = -missed(place[None], data | {"y": -jax.vmap(jax.random.normal)(row_keys)})[0]
    target = (walk["likely"] - sampler.scale.value[0]) / sampler.scale.value[1]
    grads, loss = jax.grad(misfit, has_aux=True)(old, walk["theta"], target)
    grads, norm = reduced(grads)
    slots = jax.tree.map(lambda m, g: 0.8 * m + g, sampler.slots.value, grads)
    new = lax.pmean(likely.mean(), "chains")
    width = jnp.sqrt(lax.pmean(((likely - new) ** 2).mean(), "chains"))
    # mistake: deviations-averaged (mean of deviations)
    #     width = lax.pmean(likely.std(), "chains")
    keep = 0.5 ** (likely.size * lax.axis_size("chains") / HALF_LIFE)
    # mistake: half-life-in-chains-of-a-shard (count of a shard)
    #     keep = 0.5 ** (likely.size / HALF_LIFE)
    rates, better = by_level(swapping.sum(0))[:-1], score > sampler.best.value[0]
    log_step = log_step + GAIN * (by_level(jnp.exp(jnp.minimum(gain, 0)).mean(0)) - WANTED)
    sampler = sampler.replace(
        walk=walk,
        tuning=(log_step, gaps + GAIN * (rates - rates.mean())),
        surrogate=jax.tree.map(lambda p, m: (p - RATE * m).astype(p.dtype), old, slots),
        slots=slots,
        scale=jax.tree.map(lambda a, b: b + keep * (a - b), sampler.scale.value, (new, width)),
        best=lax.cond(better, lambda: (score, place), lambda: sampler.best.value),
        accepted=sampler.accepted.value + taken.sum(),
        worst=jnp.maximum(sampler.worst.value, jnp.abs(gain).max()),
        draws=sampler.draws.value + DRAWS,
        rng=rng,
    )
    numbers = {"loss": lax.pmean(loss, "chains"), "norm": norm, "chain": chain, "rates": rates}
    numbers |= reported(walk, likely.mean(0), beta, sampler.draws.value)
    return sampler, (walk["walker"], gain), replicas, numbers


def case(dtype: str) -> Case:
    x = normal(dtype, ROWS, FEATURES, seed=6) + 0.5
    y = (x @ jnp.asarray([1, -0.5, 0.25, 0.75], dtype) + normal(dtype, ROWS, seed=7)).astype(dtype)
    return Case(
        step,
        (make_sampler(dtype), x, y, jnp.arange(ROWS) < PRESENT),
        mesh={"chains": 4, "rows": 2},
        in_specs=(None, P("rows"), P("rows"), P("rows")),
        # mistake: rows-over-the-chains (wrong spec)
        #     in_specs=(None, P("chains"), P("chains"), P("chains")),
        out_specs=(P(), (P("chains"), P(None, "chains")), P("rows"), P()),
        # mistake: replicas-as-one-copy (wrong spec)
        #     out_specs=(P(), (P("chains"), P(None, "chains")), P(), P()),
        check_vma=False,
        steps=3,
    )
