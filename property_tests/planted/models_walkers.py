"""Variational Monte Carlo: walkers over one axis, the units and orbitals of psi over the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
WALKERS, PARTICLES, SIZE, UNITS, ORBITALS, SWEEPS, BINS = 16, 3, 2, 8, 4, 3, 6
FIRST, SECOND, FEATURES = jnp.array([0, 0, 1]), jnp.array([1, 2, 2]), 9
AIM, BURN_IN, WIDE, TAU, DAMPING, LONGEST, RATE, REACH = 0.5, 2, 1.5, 0.2, 0.1, 0.5, 0.2, 0.75
BOTH, COMMON = ("walkers", "orbitals"), {"gain": P(), "cusp": P()}
OF_UNITS = {"first": P(None, "orbitals"), "shift": P("orbitals"), "head": P("orbitals")}
OF_UNITS |= {"centres": P("orbitals"), "mixing": P("orbitals")}
# mistake: mixing-by-the-walkers (wrong spec)
#     OF_UNITS |= {"centres": P("orbitals"), "mixing": P("walkers")}
SHAPES = {"first": (FEATURES, UNITS), "shift": (UNITS,), "head": (UNITS,)}
SHAPES |= {"centres": (ORBITALS, SIZE), "mixing": (ORBITALS,)}
Tree = dict[str, jax.Array]


def merged(_: Any, new: Any, axis_names: Any) -> Any:
    """The count, mean and sum of squared distances of all shards' radii."""
    count, mean, squares = new
    total = lax.psum(count, axis_names)
    centre = lax.psum(count * mean, axis_names) / total
    return total, centre, lax.psum(squares + count * (mean - centre) ** 2, axis_names)
    # mistake: squares-around-own-means (mean of variances)
    #     return total, centre, lax.psum(squares, axis_names)


class Sampler(sm.Module):
    params: sm.ParamState
    slots: sm.State
    walkers: sm.HiddenState
    control: sm.State
    best: sm.State
    radii: sm.BatchState
    spread: sm.State
    accepted: sm.State
    steepest: sm.State
    calls: sm.State
    key: Any


def make_sampler(dtype: str) -> Sampler:
    params = {"gain": jnp.ones(FEATURES, dtype), "cusp": jnp.asarray(0.25, dtype)}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        params[name] = normal(dtype, *shape, seed=seed) / 3
    wide = {name: p.astype("float32") for name, p in params.items()}
    slots = {name: 0 * p for name, p in wide.items()}, wide
    walkers, zero = normal("float32", WALKERS, PARTICLES, SIZE, seed=6), jnp.zeros((), "float32")
    return Sampler(
        params=sm.ParamState(params, spec=OF_UNITS | COMMON),
        slots=sm.State(slots, spec=(OF_UNITS | COMMON,) * 2),
        walkers=sm.HiddenState(walkers, spec=P("walkers")),
        control=sm.State((zero + 0.5, zero + 4)),
        best=sm.State((zero + 100, jnp.zeros((), "int32"), walkers[0])),
        radii=sm.BatchState((zero, zero, zero), reduce=merged),
        # mistake: radii-averaged (wrong reduction)
        #     radii=sm.BatchState((zero, zero, zero), reduce="mean"),
        spread=sm.State(zero, reduce="mean"),
        # mistake: spread-added-up (wrong reduction)
        #     spread=sm.State(zero, reduce="sum"),
        accepted=sm.State(0, reduce="sum"),
        steepest=sm.State(zero, reduce="max"),
        # mistake: steepest-of-one-shard (missing policy)
        #     steepest=sm.State(zero),
        calls=sm.State(0),
        key=jax.random.key(3),
    )


@jax.custom_vjp
def summed(x: jax.Array) -> jax.Array:
    """The sum over the shards of units, whose derivative each of them has once."""
    return lax.psum(x, "orbitals")


@jax.custom_vjp
def copied(x: jax.Array) -> jax.Array:
    """The same on every shard of units; its derivative is that of all of them."""
    return x


summed.defvjp(lambda x: (summed(x), None), lambda _, by: (copied(by),))
# mistake: derivative-summed-as-well (gradient reduced twice)
#     summed.defvjp(lambda x: (summed(x), None), lambda _, by: (summed(by),))
copied.defvjp(lambda x: (copied(x), None), lambda _, by: (summed(by),))
# mistake: derivative-of-own-units (gradient not reduced)
#     copied.defvjp(lambda x: (copied(x), None), lambda _, by: (copied(by),))
# mistake: second-derivative-of-own-units (derivative of a derivative)
#     copied.defvjp(lambda x: (x, None), lambda _, by: (summed(by),))


def everyone(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, "walkers", tiled=True)
    # mistake: walkers-interleaved (wrong order of parts)
    #     return lax.all_gather(x, "walkers", axis=1).reshape(-1, *x.shape[1:])


def own_part(x: jax.Array) -> jax.Array:
    here = len(x) // lax.axis_size("orbitals")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("orbitals") * here, here)
    # mistake: first-part-for-all (axis_index forgotten)
    #     return lax.dynamic_slice_in_dim(x, 0, here)


def distances(x: jax.Array) -> jax.Array:
    return jnp.sqrt(((x[..., FIRST, :] - x[..., SECOND, :]) ** 2).sum(-1) + 0.1)


def hidden_of(params: Tree, x: jax.Array) -> jax.Array:
    """What this shard's units make of one walker, rounded as the parameters are."""
    seen = copied(jnp.concatenate([x.reshape(-1), distances(x)]) * params["gain"])
    # mistake: gain-after-the-copy (gradient not reduced)
    #     seen = copied(jnp.concatenate([x.reshape(-1), distances(x)])) * params["gain"]
    hidden = jnp.tanh(seen @ params["first"].astype("float32") + params["shift"])
    return hidden.astype(params["first"].dtype).astype("float32")


def log_psi(params: Tree, x: jax.Array) -> jax.Array:
    """The logarithm of one walker's amplitude: a network, a mixture of orbitals and a cusp."""
    network = summed(hidden_of(params, x) @ params["head"].astype("float32"))
    # mistake: network-of-own-units (dropped psum)
    #     network = hidden_of(params, x) @ params["head"].astype("float32")
    apart, near = ((copied(x)[:, None] - params["centres"]) ** 2).sum((0, 2)), distances(x)
    # mistake: orbitals-at-the-bare-place (gradient not reduced)
    #     apart, near = ((x[:, None] - params["centres"]) ** 2).sum((0, 2)), distances(x)
    logs = params["mixing"] - apart / 2
    most = lax.pmax(lax.stop_gradient(logs).max(), "orbitals")
    # mistake: most-of-own-orbitals (dropped pmax)
    #     most = lax.stop_gradient(logs).max()
    mixture = most + jnp.log(summed(jnp.exp(logs - most).sum()))
    # mistake: logarithms-summed (reduction after a nonlinearity)
    #     mixture = most + summed(jnp.log(jnp.exp(logs - most).sum()))
    return network + mixture + (params["cusp"] * near / (1 + near)).sum()


def kinetic(params: Tree, x: jax.Array) -> jax.Array:
    slopes = jax.jacrev(lambda x: (jax.grad(log_psi, argnums=1)(params, x),) * 2, has_aux=True)
    by, slope = slopes(x)
    return -(jnp.trace(by.reshape(x.size, x.size)) + (slope**2).sum()) / 2


def potential(x: jax.Array, number: jax.Array, sites: jax.Array) -> jax.Array:
    """Of a trap, of pairs, of a wave with a twist for each walker, and of charged sites."""
    twist = 2 * jnp.pi * (number + 0.5) / WALKERS
    # mistake: twists-of-own-walkers (count of a shard)
    #     twist = 2 * jnp.pi * (number + 0.5) / len(number)
    site = lax.axis_index("orbitals") * len(sites) + jnp.arange(len(sites))
    # mistake: sites-numbered-on-the-shard (offset forgotten)
    #     site = jnp.arange(len(sites))
    charge = jnp.where(site // 2 % 2 == 0, 1.0, -0.5)
    near = jnp.exp(-((x[:, :, None] - sites) ** 2).sum(-1))
    mine, twist = own_part(x), own_part(twist)
    pairs = (1 / distances(mine)).sum(1) + (mine**2).sum((1, 2)) / 2
    waves = 0.5 * jnp.cos(mine[:, :, 0] + twist[:, None]).sum(1)
    whole = lax.all_gather(pairs + waves, "orbitals", tiled=True)
    return whole + lax.psum((near * charge).sum((1, 2)), "orbitals")


def sampled(sampler: Sampler, number: jax.Array) -> Any:
    """The walkers after some sweeps, the width of their moves, and which were accepted."""
    calls, params, x = sampler.calls.value, sampler.params.value, sampler.walkers.value
    key, amplitudes = jax.random.fold_in(sampler.key, calls), jax.vmap(log_psi, (None, 0))
    keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(number)
    # mistake: keys-split-on-each-shard (shared key)
    #     keys = jax.random.split(key, len(number))
    # mistake: keys-of-the-units (key of a shard)
    #     keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(number + lax.axis_index("orbitals"))

    def sweep(carry: Any, turn: jax.Array) -> Any:
        x, log, width = carry
        now = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, turn)))(keys)
        moved = x + width * jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(now[:, 0])
        new = amplitudes(params, moved)
        taken = jnp.log(jax.vmap(jax.random.uniform)(now[:, 1])) < 2 * (new - log)
        share = lax.pmean(taken.mean(), "walkers")
        # mistake: share-of-own-walkers (statistics of a shard)
        #     share = taken.mean()
        width = jnp.where(calls < BURN_IN, width * jnp.exp(share - AIM), width)
        return (jnp.where(taken[:, None, None], moved, x), jnp.where(taken, new, log), width), taken

    start = x, amplitudes(params, x), sampler.control.value[0]
    (x, _, width), taken = lax.scan(sweep, start, jnp.arange(SWEEPS))
    return x, width, taken


def moved_on(x: jax.Array) -> jax.Array:
    size = lax.axis_size("walkers")
    last = lax.ppermute(x[-1:], "walkers", [(i, (i + 1) % size) for i in range(size)])
    # mistake: last-walker-sent-back (wrong ppermute)
    #     last = lax.ppermute(x[-1:], "walkers", [((i + 1) % size, i) for i in range(size)])
    return jnp.concatenate([last, x[:-1]])


def branched(weights: jax.Array, chance: jax.Array, number: jax.Array) -> jax.Array:
    sums = jnp.cumsum(weights)
    totals = lax.all_gather(sums[-1], "walkers")
    before = jnp.where(jnp.arange(len(totals)) < lax.axis_index("walkers"), totals, 0).sum()
    # mistake: own-total-before-too (off by one)
    #     before = jnp.where(jnp.arange(len(totals)) <= lax.axis_index("walkers"), totals, 0).sum()
    ends = everyone(before + sums)
    # mistake: sums-from-zero-on-each-shard (offset forgotten)
    #     ends = everyone(sums)
    return jnp.minimum(jnp.searchsorted(ends, (number + chance) / WALKERS), WALKERS - 1)


def over_walkers(weight: jax.Array, scores: Tree) -> Tree:
    share = weight / WALKERS
    return {n: lax.psum(jnp.tensordot(share, s, 1), "walkers") for n, s in scores.items()}


def dot(a: Tree, b: Tree) -> Any:
    own, common = (sum((a[n] * b[n]).sum() for n in names) for names in (OF_UNITS, COMMON))
    return lax.psum(own, "orbitals") + common
    # mistake: common-ones-of-every-shard (doubled psum)
    #     return lax.psum(own + common, "orbitals")


def natural(scores: Tree, force: Tree) -> Any:
    def turn(carry: Any, _: None) -> Any:
        x, rest, way, old = carry
        part = over_walkers(jax.vmap(dot, (0, None))(scores, way), scores)
        curved = {n: part[n] + DAMPING * way[n] for n in x}
        far = old / dot(way, curved)
        # mistake: step-of-own-units (dropped psum)
        #     far = old / sum((way[n] * curved[n]).sum() for n in way)
        rest = {n: rest[n] - far * curved[n] for n in x}
        new, x = dot(rest, rest), {n: x[n] + far * way[n] for n in x}
        return (x, rest, {n: rest[n] + new / old * way[n] for n in x}, new), None

    start = {n: 0 * f for n, f in force.items()}, force, force, dot(force, force)
    return lax.scan(turn, start, length=3)[0][0]


def step(sampler: Sampler, sites: jax.Array) -> Any:
    here, calls, params = len(sampler.walkers.value), sampler.calls.value, sampler.params.value
    number = lax.axis_index("walkers") * here + jnp.arange(here)
    # mistake: number-in-the-shard (row index not offset)
    #     number = jnp.arange(here)
    (x, width, taken), trial = sampled(sampler, number), sampler.control.value[1]
    raw = jax.vmap(kinetic, (None, 0))(params, x) + potential(x, number, sites)
    middle = jnp.median(everyone(raw))
    # mistake: medians-averaged (mean of medians)
    #     middle = lax.pmean(jnp.median(raw), "walkers")
    apart = WIDE * lax.pmean(jnp.abs(raw - middle).mean(), "walkers")
    energy = middle + jnp.clip(raw - middle, -apart, apart)
    mean = lax.pmean(energy.mean(), "walkers")
    scores = jax.vmap(jax.grad(log_psi), (None, 0))(params, x)
    scores = {n: s - lax.pmean(s.astype("float32").mean(0), "walkers") for n, s in scores.items()}
    # mistake: scores-around-own-mean (statistics of a shard)
    #     scores = {n: s - s.astype("float32").mean(0) for n, s in scores.items()}
    change = natural(scores, over_walkers(2 * (energy - mean), scores))
    short = jnp.minimum(1, LONGEST / jnp.sqrt(dot(change, change)))
    # mistake: norm-of-own-units (local norm in clipping)
    #     short = jnp.minimum(1, LONGEST / jnp.sqrt(sum((c**2).sum() for c in change.values())))
    momentum = {n: 0.8 * m + short * change[n] for n, m in sampler.slots.value[0].items()}
    rate, keep = RATE / (1 + 0.2 * calls), jnp.where(calls < BURN_IN - 1, 0, 0.7)
    # mistake: decay-by-the-shards (small factor)
    #     rate, keep = RATE / (1 + 0.2 * calls), 0.7 ** (WALKERS // here)
    wide = {n: p.astype("float32") - rate * momentum[n] for n, p in params.items()}
    average = {n: keep * a + (1 - keep) * wide[n] for n, a in sampler.slots.value[1].items()}
    logs = -TAU * (energy - trial)
    most = lax.pmax(logs.max(), "walkers")
    total = lax.psum(jnp.exp(logs - most).sum(), "walkers")
    weights = jnp.exp(logs - most) / total
    # mistake: softmax-of-a-shard (softmax of a shard)
    #     weights = jax.nn.softmax(logs)
    trial = 0.8 * trial + 0.2 * (mean - most - jnp.log(total / WALKERS))
    picks = branched(weights, jax.random.uniform(jax.random.fold_in(sampler.key, -calls)), number)
    rows = moved_on(everyone(x)[picks])
    # mistake: picked-from-own-walkers (index of a shard)
    #     rows = moved_on(x[picks % here])
    lowest = everyone(raw).argmin().astype("int32")
    # mistake: lowest-of-own-walkers (argmin of a shard)
    #     lowest = raw.argmin().astype("int32")
    place = lax.psum(jnp.where((number == lowest)[:, None, None], x, 0).sum(0), "walkers")
    found, best = (lax.pmin(raw.min(), "walkers"), lowest, place), sampler.best.value
    radius, better = jnp.sqrt((x**2).sum(-1)), found[0] < best[0]
    variance = lax.pmean(((energy - mean) ** 2).mean(), "walkers")
    # mistake: variances-averaged (mean of variances)
    #     variance = lax.pmean(energy.var(), "walkers")
    bins = jnp.minimum((distances(own_part(x)) / REACH).astype("int32"), BINS - 1)
    near = lax.psum(jnp.zeros(BINS, "int32").at[bins].add(1), BOTH)
    # mistake: pairs-of-one-part (wrong axes)
    #     near = lax.psum(jnp.zeros(BINS, "int32").at[bins].add(1), "walkers")
    hidden = jax.vmap(hidden_of, (None, 0))(params, x)
    whole = lax.all_to_all(hidden, "orbitals", 0, 1, tiled=True)
    # mistake: own-units-only (dropped all_to_all)
    #     whole = own_part(hidden)
    alike = lax.psum(whole.T @ whole, BOTH) / WALKERS
    sampler = sampler.replace(
        params={n: wide[n].astype(p.dtype) for n, p in params.items()},
        slots=(momentum, average),
        walkers=rows,
        control=(width, trial),
        best=jax.tree.map(lambda a, b: jnp.where(better, a, b), found, best),
        radii=(jnp.asarray(radius.size, "float32"), radius.mean(), radius.var() * radius.size),
        spread=0.9 * sampler.spread.value + 0.1 * jnp.abs(raw - mean).mean(),
        accepted=sampler.accepted.value + taken.sum(),
        # mistake: accepted-shared-among-the-copies (normalized twice)
        #     accepted=sampler.accepted.value + taken.sum() // lax.axis_size("orbitals"),
        steepest=jnp.maximum(sampler.steepest.value, jnp.abs(raw).max()),
        calls=calls + 1,
    )
    numbers = {"mean": mean, "variance": variance, "near": near, "alike": (alike**2).sum()}
    return sampler, (energy, picks), lax.pmean(hidden.mean(0), "walkers"), numbers


def case(dtype: str) -> Case:
    return Case(
        step,
        (make_sampler(dtype), normal("float32", ORBITALS, SIZE, seed=8)),
        mesh={"walkers": 4, "orbitals": 2},
        in_specs=(None, P("orbitals")),
        # mistake: all-sites-on-every-shard (wrong spec)
        #     in_specs=(None, P()),
        out_specs=(P(), P("walkers"), P("orbitals"), P()),
        check_vma=False,
        steps=3,
    )
