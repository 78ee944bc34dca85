"""Survival by a deep proportional hazards model: patients over one axis, units over the other."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
PATIENTS, VALID, COVARIATES, UNITS, HOSPITALS, STRATA, FOLDS = 24, 21, 8, 8, 12, 2, 5
KEEP, CLIP, RIDGE, LASSO, RATE, EDGES = 0.75, 0.4, 0.05, 0.3, 0.2, (0.0, 2.5, 4.5, 6.5, 8.5, 11.5)
# Follow-up in order, with ties and with padding at the end; what each ended with; the strata.
TIMES = [1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6, 7, 8, 8, 9, 9, 10, 11, 99, 99, 99]
EVENTS = [1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1]
STRATUM = [0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0]
SPECS = {name: P("features") for name in ("first", "shift", "gain", "second")}
SPECS |= {"bias": P(), "frailty": P("patients")}
# mistake: frailty-by-the-features (wrong spec)
#     SPECS |= {"bias": P(), "frailty": P("features")}
Arrays = dict[str, jax.Array]


class Survival(sm.Module):
    params: sm.ParamState
    slots: sm.State
    moments: sm.BatchState
    burden: sm.State
    worst: sm.State
    events: sm.State
    trend: sm.State
    calls: sm.State
    key: Any


def make_model(dtype: str) -> Survival:
    shapes = {"first": (COVARIATES, UNITS), "shift": (UNITS,), "gain": (UNITS,)}
    shapes |= {"second": (UNITS, len(EDGES)), "bias": (len(EDGES),), "frailty": (HOSPITALS,)}
    params = {name: normal(dtype, *s, seed=i) / 3 for i, (name, s) in enumerate(shapes.items())}
    zeros, some = jax.tree.map(lambda p: jnp.zeros(p.shape), params), jnp.ones(COVARIATES)
    return Survival(
        params=sm.ParamState(params, spec=SPECS),
        slots=sm.State(zeros, spec=SPECS),
        moments=sm.BatchState((4 * some, 0 * some, 4 * some), spec=P("features")),
        burden=sm.State(jnp.zeros(HOSPITALS), spec=P("patients")),
        worst=sm.State((jnp.zeros(()), -1)),
        events=sm.State(0, reduce="sum"),
        # mistake: events-of-the-worst-shard (wrong reduction)
        #     events=sm.State(0, reduce="max"),
        trend=sm.State(0.0),
        calls=sm.State(0),
        key=jax.random.key(3),
    )


def numbers_of(here: int) -> jax.Array:
    return lax.axis_index("patients") * here + jnp.arange(here)


def everyone(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, "patients", tiled=True)


def before(x: jax.Array) -> jax.Array:
    """For each patient the sum over all earlier ones, those of earlier shards too."""
    totals = lax.all_gather(x.sum(0), "patients")
    earlier = jnp.arange(len(totals)) < lax.axis_index("patients")
    # mistake: own-total-counted-as-earlier (off by one)
    #     earlier = jnp.arange(len(totals)) <= lax.axis_index("patients")
    return jnp.cumsum(x, 0) - x + earlier.astype(x.dtype) @ totals
    # mistake: sums-start-anew-on-a-shard (prefix of the shards forgotten)
    #     return jnp.cumsum(x, 0) - x


@jax.custom_vjp
def joined(part: jax.Array) -> jax.Array:
    """The sum over the units' shards; each has the whole derivative of it already."""
    return lax.psum(part, "features")
    # mistake: outputs-of-own-units (dropped psum)
    #     return part


def _joined_back(_: None, g: jax.Array) -> tuple[jax.Array]:
    return (g,)
    # mistake: derivative-joined-too (gradient reduced twice)
    #     return (lax.psum(g, "features"),)


joined.defvjp(lambda part: (joined(part), None), _joined_back)


def keys_of(model: Survival, use: int, here: int) -> jax.Array:
    key = jax.random.fold_in(model.key, 2 * model.calls.value + use)
    # mistake: key-of-the-units (key of a shard)
    #     key = jax.random.fold_in(model.key, model.calls.value + use + lax.axis_index("features"))
    return jax.vmap(lambda one: jax.random.fold_in(key, one))(numbers_of(here))
    # mistake: keys-by-the-place-in-the-shard (row index not offset)
    #     return jax.vmap(lambda one: jax.random.fold_in(key, one))(jnp.arange(here))


def merged(moments: Any, x: jax.Array, known: jax.Array) -> Any:
    """Count, mean and sum of squares around it of all that was ever known."""
    old, mean, squares = moments
    new = lax.psum(known.sum(0), "patients").astype("float32")
    centre = lax.psum(jnp.where(known, x, 0).sum(0), "patients") / new
    # mistake: mean-of-the-means (mean of means)
    #     centre = lax.pmean(jnp.where(known, x, 0).sum(0) / known.sum(0), "patients")
    around = lax.psum(jnp.where(known, (x - centre) ** 2, 0).sum(0), "patients")
    # mistake: squares-averaged (pmean for psum)
    #     around = lax.pmean(jnp.where(known, (x - centre) ** 2, 0).sum(0), "patients")
    count, change = old + new, centre - mean
    squares = squares + around + change**2 * old * new / count
    return count, mean + change * new / count, squares


def network(params: Arrays, x: jax.Array, drop: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The risk score and the logits of the hazards of all intervals."""
    part = (x.astype(params["first"].dtype) @ params["first"]).astype("float32")
    hidden = lax.psum_scatter(part, "features", scatter_dimension=1, tiled=True) + params["shift"]
    # mistake: first-units-on-every-shard (axis_index forgotten)
    #     hidden = lax.psum(part, "features")[:, : len(params["shift"])] + params["shift"]
    mean = lax.pmean(hidden.mean(1, keepdims=True), "features")
    variance = lax.pmean(((hidden - mean) ** 2).mean(1, keepdims=True), "features")
    # mistake: variance-within-a-shard (mean of variances)
    #     variance = lax.pmean(hidden.var(1, keepdims=True), "features")
    hidden = jax.nn.silu((hidden - mean) * lax.rsqrt(variance + 0.01) * (1 + params["gain"]))
    start, units = lax.axis_index("features") * hidden.shape[1], hidden.shape[1]
    # mistake: dropped-like-the-first-units (unit index not offset)
    #     start, units = 0, hidden.shape[1]
    hidden = jnp.where(lax.dynamic_slice_in_dim(drop, start, units, 1), 0, hidden / KEEP)
    out = (hidden.astype(params["second"].dtype) @ params["second"]).astype("float32")
    out = joined(out) + params["bias"]
    # mistake: bias-of-every-shard (bias added before the psum)
    #     out = joined(out + params["bias"])
    return out[:, 0], out[:, 1:]


def partial_likelihood(score: jax.Array, weight: jax.Array, c: Arrays) -> Any:
    """This shard's part, with the ties as Efron has them; and the cumulative hazard."""
    died, strata = c["event"] & (weight > 0), jax.nn.one_hot(c["stratum"], STRATA)
    centre = lax.pmax(lax.stop_gradient(score).max(), "patients")
    # mistake: centre-of-own-scores (dropped pmax)
    #     centre = lax.stop_gradient(score).max()
    risk, dead = weight * jnp.exp(score - centre), died.astype("float32")[:, None] * strata
    first = jnp.searchsorted(everyone(c["time"]), c["time"])
    # mistake: ties-found-in-the-shard (position in the shard)
    #     first = jnp.searchsorted(c["time"], c["time"])
    later = lax.psum(risk @ strata, "patients") - before(risk[:, None] * strata)
    # mistake: later-ones-of-the-shard (dropped psum)
    #     later = risk @ strata - before(risk[:, None] * strata)
    ties = jax.ops.segment_sum(jnp.stack([risk[:, None] * dead, dead], 1), first, PATIENTS)
    tied, deaths = lax.psum(ties, "patients")[first, :, c["stratum"]].T
    # mistake: ties-end-with-the-shard (dropped psum)
    #     tied, deaths = ties[first, :, c["stratum"]].T
    earlier = before(dead)
    # mistake: ranks-start-anew-on-a-shard (prefix of the shards forgotten)
    #     earlier = jnp.cumsum(dead, 0) - dead
    rank = (earlier * strata).sum(1) - everyone(earlier)[first, c["stratum"]]
    sets = everyone(later)[first, c["stratum"]] - rank / jnp.maximum(deaths, 1) * tied
    sets = jnp.where(died, sets, 1)
    total = jnp.where(died, weight * (score - centre - jnp.log(sets)), 0).sum()
    steps = (weight / sets)[:, None] * dead
    hazard = ((before(steps) + steps) * strata).sum(1) * jnp.exp(-centre)
    return -total / lax.psum(died.sum(), "patients"), hazard
    # mistake: by-the-deaths-here (count of a shard)
    #     return -total / died.sum(), hazard


def by_intervals(logits: jax.Array, weight: jax.Array, held: jax.Array, c: Arrays) -> Any:
    """This shard's part of the loss of the hazards, the Brier scores, and who is alive when."""
    time, number, edges = c["time"], numbers_of(len(held)), jnp.asarray(EDGES)
    left = jnp.maximum(c["valid"] - number, 1)
    # mistake: left-among-own-patients (count of a shard)
    #     left = len(number) - jnp.arange(len(number))
    factors = 1 - jnp.where(~c["event"] & (number < c["valid"]), 1 / left, 0)
    parts = lax.all_gather(factors.prod(), "patients")
    earlier = jnp.arange(len(parts)) < lax.axis_index("patients")
    curve = jnp.cumprod(factors) * jnp.where(earlier, parts, 1).prod()
    places = jnp.searchsorted(everyone(time), edges, side="right") - 1

    def body(alive: jax.Array, now: Any) -> Any:
        logit, start, end, certain = now
        inside, died = weight * (time > start), c["event"] & (time <= end)
        count = lax.psum(inside.sum(), "patients")
        # mistake: inside-on-this-shard (counts not reduced)
        #     count = inside.sum() + 0.1
        loss = (inside * (jax.nn.softplus(logit) - died * logit)).sum() / count
        alive = alive * jax.nn.sigmoid(-logit)
        gone = jnp.where(c["event"], alive**2 / curve, 0)
        missed = (held * jnp.where(time > end, (1 - alive) ** 2 / certain, gone)).sum()
        brier = lax.psum(missed, "patients") / lax.psum(held.sum(), "patients")
        # mistake: brier-score-of-the-shards (mean of ratios)
        #     brier = lax.pmean(missed / held.sum(), "patients")
        return alive, (loss, brier, alive)

    steps = logits.T, edges[:-1], edges[1:], everyone(curve)[places[1:]]
    _, (losses, briers, alive) = lax.scan(body, jnp.ones_like(weight), steps)
    return losses.mean(), briers, alive.T


def loss_fn(params: Arrays, x: jax.Array, drop: jax.Array, weights: Any, c: Arrays) -> Any:
    """This shard's share of the loss: the shares of all patients' shards add up to it."""
    score, logits = network(params, x, drop)
    own = params["frailty"].astype("float32")
    score = score + everyone(own)[c["hospital"]]
    likelihood, hazard = partial_likelihood(score, weights[0], c)
    intervals, briers, alive = by_intervals(logits, weights[0], weights[1], c)
    share = likelihood + intervals + RIDGE * (own**2).sum()
    # mistake: ridge-on-every-shard (gradient reduced twice)
    #     share = likelihood + intervals + RIDGE * (everyone(own) ** 2).sum()
    return share, (score, hazard, briers, alive)


def reduced(grads: Arrays) -> tuple[Arrays, jax.Array]:
    """The gradients of all patients, together no longer than `CLIP`, and how long they were."""
    own = {name: g.astype("float32") for name, g in grads.items()}
    # Each hospital's gradient is summed where its frailty was gathered.
    grads = lax.psum(own, "patients") | {"frailty": own["frailty"]}
    # mistake: gradients-averaged (pmean for psum)
    #     grads = lax.pmean(own, "patients") | {"frailty": own["frailty"]}
    # mistake: frailty-summed-again (doubled psum)
    #     grads = lax.psum(own, "patients")
    parts = {name: (g**2).sum() for name, g in grads.items()}
    bias, frailty = parts.pop("bias"), lax.psum(parts.pop("frailty"), "patients")
    # mistake: norm-of-own-hospitals (local norm in clipping)
    #     bias, frailty = parts.pop("bias"), parts.pop("frailty")
    norm = jnp.sqrt(lax.psum(sum(parts.values()), "features") + bias + frailty)
    # mistake: bias-once-for-each-shard (doubled psum)
    #     norm = jnp.sqrt(lax.psum(sum(parts.values()) + bias, "features") + frailty)
    return jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), grads), norm


def mean_survival(died: jax.Array, c: Arrays) -> jax.Array:
    """The area under the curve of all patients, by Nelson and Aalen."""
    steps = died / jnp.maximum(c["valid"] - numbers_of(len(died)), 1)
    both = jnp.stack([before(steps) + steps, c["time"]], 1)
    pairs = [(i, i + 1) for i in range(lax.axis_size("patients") - 1)]
    last = lax.ppermute(both[-1:], "patients", pairs)
    # mistake: first-patient-handed-on (halo from the wrong side)
    #     last = lax.ppermute(both[:1], "patients", pairs)
    hazard, start = jnp.concatenate([last, both[:-1]]).T
    area = jnp.where(c["time"] < TIMES[VALID], jnp.exp(-hazard) * (c["time"] - start), 0).sum()
    return lax.psum(area, "patients")


def step(model: Survival, c: Arrays) -> Any:
    t, params, number = model.calls.value + 1, model.params.value, numbers_of(len(c["time"]))
    there, out = number < c["valid"], number % FOLDS == t % FOLDS
    # mistake: folds-of-the-shard (row index not offset)
    #     there, out = number < c["valid"], jnp.arange(len(number)) % FOLDS == t % FOLDS
    x, known, died = c["x"].astype("float32"), c["known"] & there[:, None], c["event"] & there
    count, mean, squares = moments = merged(model.moments.value, x, known)
    x = jnp.where(known, (x - mean) * lax.rsqrt(squares / count + 0.01), 0)
    drawn = 0.2 + jax.vmap(jax.random.exponential)(keys_of(model, 1, len(number)))
    weights = jnp.where(there & ~out, drawn, 0), (there & out).astype("float32")
    drop = partial(jax.random.bernoulli, p=1 - KEEP, shape=(UNITS,))
    drops = jax.vmap(drop)(keys_of(model, 0, len(number)))
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (share, (score, hazard, briers, alive)), grads = gradient(params, x, drops, weights, c)
    grads, norm = reduced(grads)
    deaths = model.events.value + lax.psum(died.sum(), "patients")
    # mistake: rate-by-the-deaths-here (stale value)
    #     deaths = model.events.value + died.sum()
    slots = jax.tree.map(lambda m, g: 0.8 * m + g, model.slots.value, grads)
    rate = RATE * lax.rsqrt(1 + deaths / PATIENTS)
    new = jax.tree.map(lambda p, m: p.astype("float32") - rate * m, params, slots)
    lengths = jnp.sqrt(lax.psum((new["first"] ** 2).sum(0), "features") + 1e-6)
    # mistake: lengths-of-own-covariates (norm of a shard)
    #     lengths = jnp.sqrt((new["first"] ** 2).sum(0) + 1e-6)
    new["first"] *= jnp.maximum(0, 1 - rate * LASSO / lengths)
    new["frailty"] -= lax.pmean(new["frailty"].mean(), "patients")
    # mistake: frailty-around-own-hospitals (statistics of a shard)
    #     new["frailty"] -= new["frailty"].mean()
    residual = jnp.where(there, jnp.abs(died - hazard * jnp.exp(score)), 0)
    top, before_now = lax.pmax(residual.max(), "patients"), model.worst.value
    whose = jnp.where(residual == top, number, PATIENTS).min()
    # mistake: worst-in-the-shard (argmax of a shard)
    #     whose = residual.argmax()
    worst = jnp.where(top > before_now[0], lax.pmin(whose, "patients"), before_now[1])
    table = jax.ops.segment_sum(died.astype("float32"), c["hospital"], HOSPITALS)
    model = model.replace(
        params=jax.tree.map(lambda p, n: n.astype(p.dtype), params, new),
        slots=slots,
        moments=moments,
        burden=model.burden.value + lax.psum_scatter(table, "patients", tiled=True),
        worst=(jnp.maximum(before_now[0], top), worst),
        events=model.events.value + died.sum(),
        trend=0.9 * model.trend.value + 0.1 * lax.psum(share, "patients"),
        # mistake: trend-of-the-shares (reduction forgotten)
        #     trend=0.9 * model.trend.value + 0.1 * share,
        calls=t,
    )
    others, later = everyone(score), everyone(jnp.where(there, c["time"], 0))
    # mistake: pairs-within-a-shard (all_gather forgotten)
    #     others, later = score, jnp.where(there, c["time"], 0)
    pairs = died[:, None] & (c["time"][:, None] < later)
    agree = jnp.where(pairs, jax.nn.sigmoid(2 * (score[:, None] - others)), 0)
    index = lax.psum(agree.sum(), "patients") / lax.psum(pairs.sum(), "patients")
    values = {"norm": norm, "briers": briers, "index": index, "mean": mean_survival(died, c)}
    size = jnp.sqrt((new["first"] ** 2).sum(1))
    return model, (score, hazard, residual), alive, size / lax.pmax(size.max(), "features"), values
    # mistake: importance-among-own-covariates (dropped pmax)
    #     return model, (score, hazard, residual), alive, size / size.max(), values


def case(dtype: str) -> Case:
    later, both, one = jnp.arange(PATIENTS)[:, None] / 16, P("patients", "features"), P("patients")
    cohort = {"x": (normal("float32", PATIENTS, COVARIATES, seed=7) + later).astype(dtype)}
    cohort["known"] = integers(PATIENTS, COVARIATES, below=5, seed=8) > 0
    cohort["hospital"] = integers(PATIENTS, below=HOSPITALS, seed=9)
    cohort |= {"time": jnp.asarray(TIMES, "float32"), "event": jnp.asarray(EVENTS, bool)}
    cohort |= {"stratum": jnp.asarray(STRATUM), "valid": jnp.asarray(VALID)}
    specs = dict.fromkeys(cohort, one) | {"x": both, "known": both, "valid": P()}
    return Case(
        step,
        (make_model(dtype), cohort),
        mesh={"patients": 2, "features": 4},
        in_specs=(None, specs),
        out_specs=(P(), one, one, P("features"), P()),
        # mistake: importance-as-one-copy (wrong spec)
        #     out_specs=(P(), one, one, P(), P()),
        check_vma=False,
        steps=3,
    )
