"""Model-based control: candidate plans over one axis, members of an ensemble over the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
FEATURES, ACTIONS, UNITS, MEMBERS, PLAYERS, SLOTS, BATCH, BINS = 3, 2, 6, 4, 8, 32, 16, 5
CANDIDATES, HORIZON, ROUNDS, ELITES, LATE, EDGE, DISCOUNT = 24, 5, 3, 6, 2, 1.6, 0.9
CAUTION, DISAGREEMENT, ALIKE, LIMITS, CLIP, RATE, WARM = 0.5, 0.4, 0.1, 0.02, 0.15, 0.03, 4
OF_MEMBERS, COMMON = dict.fromkeys(("first", "bias", "second"), P("models")), ("high", "low")
Arrays = dict[str, jax.Array]
Pair = tuple[jax.Array, jax.Array]


class Agent(sm.Module):
    params: sm.ParamState
    target: sm.State
    slots: sm.State
    moments: sm.BatchState
    errors: sm.BatchState
    buffer: sm.State
    written: sm.State
    plan: sm.State
    temperature: sm.State
    episodes: sm.State
    histogram: sm.State
    updates: sm.State
    rng: sm.RandomState
    key: Any


def make_agent(dtype: str) -> Agent:
    params = {"first": normal(dtype, MEMBERS, FEATURES + ACTIONS, UNITS, seed=1) / 2}
    params["second"] = normal(dtype, MEMBERS, UNITS, 2 * FEATURES, seed=2) / 2
    params["bias"] = normal(dtype, MEMBERS, UNITS, seed=3) / 4
    params |= {"high": jnp.full(FEATURES, 0.5, dtype), "low": jnp.full(FEATURES, -3, dtype)}
    wide = jax.tree.map(lambda p: p.astype("float32"), params)
    zeros, specs = jax.tree.map(jnp.zeros_like, wide), OF_MEMBERS | dict.fromkeys(COMMON, P())
    buffer, features = normal(dtype, SLOTS, 2 * FEATURES + ACTIONS, seed=4), jnp.zeros(FEATURES)
    return Agent(
        params=sm.ParamState(params, spec=specs),
        target=sm.State(wide, spec=specs),
        slots=sm.State((zeros, zeros), spec=(specs, specs)),
        moments=sm.BatchState((jnp.asarray(4.0), features, features + 4)),
        errors=sm.BatchState(jnp.zeros(MEMBERS), spec=P("models")),
        buffer=sm.State(buffer / 2, spec=P("plans")),
        # mistake: buffer-by-the-models (wrong spec)
        #     buffer=sm.State(buffer / 2, spec=P("models")),
        written=sm.State(20),
        plan=sm.State((jnp.zeros((HORIZON, ACTIONS)), jnp.full((HORIZON, ACTIONS), 0.6))),
        temperature=sm.State(1.0),
        episodes=sm.State(0, reduce="sum"),
        # mistake: episodes-of-the-busiest-shard (wrong policy)
        #     episodes=sm.State(0, reduce="max"),
        histogram=sm.State(jnp.zeros(BINS, int), reduce="sum"),
        updates=sm.State(0),
        rng=sm.RandomState(jax.random.key(1)),
        key=jax.random.key(2),
    )


def numbers(axis: str, here: int) -> jax.Array:
    """Which rows of the whole array this shard has."""
    return lax.axis_index(axis) * here + jnp.arange(here)
    # mistake: rows-dealt-in-turn (wrong order of rows)
    #     return lax.axis_index(axis) + lax.axis_size(axis) * jnp.arange(here)
    # mistake: members-numbered-by-the-plans (wrong axis name)
    #     return lax.axis_index("plans") * here + jnp.arange(here)


def merged(moments: tuple[jax.Array, ...], seen: jax.Array) -> tuple[jax.Array, ...]:
    """The count, mean and sum of squared distances of all observations, with the new ones."""
    count, mean, squares = moments
    new = len(seen) * lax.axis_size("plans")
    centre = lax.psum(seen.sum(0), "plans") / new
    around = lax.psum(((seen - centre) ** 2).sum(0), "plans")
    # mistake: squares-around-the-own-mean (mean of variances)
    #     around = lax.psum(((seen - seen.mean(0)) ** 2).sum(0), "plans")
    total, change = count + new, centre - mean
    return total, mean + change * new / total, squares + around + change**2 * count * new / total


def replayed(buffer: jax.Array, written: jax.Array, rows: jax.Array, keys: jax.Array) -> Any:
    """The buffer with new rows of all shards, how many were written, and a row for each key."""
    everyone = lax.all_gather(rows, "plans", tiled=True)
    behind = (numbers("plans", len(buffer)) - written) % SLOTS
    # mistake: round-in-each-part (wrong modulus)
    #     behind = (numbers("plans", len(buffer)) - written) % len(buffer)
    buffer = jnp.where(behind[:, None] < len(everyone), everyone[behind], buffer)
    # mistake: only-as-many-as-here (count of a shard)
    #     buffer = jnp.where(behind[:, None] < len(rows), everyone[behind], buffer)
    written = written + len(everyone)
    # mistake: written-by-a-shard (counter of a shard)
    #     written = written + len(rows)
    slots = jax.vmap(lambda key: jax.random.randint(key, (), 0, jnp.minimum(written, SLOTS)))(keys)
    wanted = lax.all_gather(slots, "plans", tiled=True)
    own = wanted - lax.axis_index("plans") * len(buffer)
    inside = (own >= 0) & (own < len(buffer))
    # mistake: first-of-the-next-part-too (off by one)
    #     inside = (own >= 0) & (own <= len(buffer))
    found = jnp.where(inside[:, None], buffer[jnp.clip(own, 0, len(buffer) - 1)], 0)
    return buffer, written, lax.psum_scatter(found, "plans", scatter_dimension=0, tiled=True)
    # mistake: batch-of-the-first-shard (wrong part of a sum)
    #     return buffer, written, lax.psum(found, "plans")[: len(keys)]


@jax.custom_vjp
def copied(x: jax.Array) -> jax.Array:
    """What all members share; its derivative is the sum of theirs."""
    return x


def copied_backward(_: None, by: jax.Array) -> tuple[jax.Array]:
    return (lax.psum(by, "models"),)
    # mistake: shared-ones-by-own-members (dropped psum in a custom derivative)
    #     return (by,)


copied.defvjp(lambda x: (x, None), copied_backward)


def predicted(params: Arrays, x: jax.Array, actions: jax.Array) -> tuple[jax.Array, ...]:
    """By each member, the change of each row and its logarithmic variance; the variances' width."""
    joined = jnp.concatenate([x, jnp.broadcast_to(actions, (*x.shape[:2], ACTIONS))], -1)
    hidden = jax.nn.silu(joined @ params["first"] + params["bias"][:, None])
    mean, spread = jnp.split((hidden @ params["second"]).astype("float32"), 2, -1)
    high, low = (copied(params[name].astype("float32")) for name in COMMON)
    spread = low + jax.nn.softplus(high - jax.nn.softplus(high - spread) - low)
    return mean, spread, (high - low).sum()


def loss_fn(params: Arrays, x: jax.Array, actions: jax.Array, change: Any, mask: Any) -> Any:
    """This shard's share of the loss, and of the misfit of each member here."""
    mean, spread, width = predicted(params, jnp.stack([x] * len(mask)), actions)
    missed = ((mean - change) ** 2 * jnp.exp(-spread) + spread).mean(-1)
    count = lax.psum(mask.sum(1), "plans")
    # mistake: rows-of-a-shard (counts not reduced)
    #     count = mask.sum(1)
    fit = jnp.where(mask, missed, 0).sum(1) / count
    apart = mean - lax.pmean(mean.mean(0), "models")
    # mistake: apart-from-own-members (dropped pmean)
    #     apart = mean - mean.mean(0)
    alike = jnp.exp(-(apart**2).sum(-1)).sum() / BATCH
    width = width / lax.axis_size("plans") / lax.axis_size("models")
    # mistake: limits-once-for-each-row-of-shards (normalized wrongly)
    #     width = width / lax.axis_size("models")
    return (fit.sum() + ALIKE * alike) / MEMBERS + LIMITS * width, fit
    # mistake: mean-of-own-members (count of a shard)
    #     return (fit.sum() + ALIKE * alike) / len(fit) + LIMITS * width, fit


def updated(params: Arrays, grads: Arrays, slots: Any, t: jax.Array) -> Any:
    """The next parameters, of which matrices decay, both slots, and how long the gradient was."""
    grads = {name: lax.psum(g.astype("float32"), "plans") for name, g in grads.items()}
    # mistake: gradients-of-own-rows (gradient not reduced)
    #     grads = {name: g.astype("float32") for name, g in grads.items()}
    # mistake: members-summed-too (reduced over a wrong axis)
    #     grads = {n: lax.psum(g.astype("float32"), ("plans", "models")) for n, g in grads.items()}
    own, common = (sum((grads[n] ** 2).sum() for n in names) for names in (OF_MEMBERS, COMMON))
    norm = jnp.sqrt(lax.psum(own, "models") + common)
    # mistake: norm-of-own-members (local norm in clipping)
    #     norm = jnp.sqrt(own + common)
    # mistake: shared-ones-of-every-shard (doubled psum)
    #     norm = jnp.sqrt(lax.psum(own + common, "models"))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), grads)
    first = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, slots[0], grads)
    second = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, slots[1], grads)
    rate, new = RATE * jnp.minimum(1, t / WARM), {}
    # mistake: rate-by-the-shards (small factor)
    #     rate, new = RATE * jnp.minimum(1, t * lax.axis_size("plans") / WARM), {}
    for name, p in params.items():
        change = first[name] / (1 - 0.8**t) / (jnp.sqrt(second[name] / (1 - 0.9**t)) + 0.003)
        decay = 0.1 * p.astype("float32") if name in ("first", "second") else 0
        new[name] = (p - rate * (change + decay)).astype(p.dtype)
    return new, (first, second), norm


def rolled_out(params: Arrays, start: jax.Array, plans: jax.Array, weight: jax.Array) -> Pair:
    """Each plan's mean return by the worse half of all members, and how far apart they are."""

    def ahead(carry: Pair, now: Pair) -> tuple[Pair, Pair]:
        (x, alive), (actions, discount) = carry, now
        x = x + jnp.tanh(predicted(params, x, actions)[0]) / 2
        centre = lax.psum(jnp.einsum("m,mcf->cf", weight, x), "models")
        spread = jnp.einsum("m,mcf->c", weight, (x - centre) ** 2)
        apart = jnp.sqrt(lax.psum(spread, "models") + 0.01)
        # mistake: deviations-added (reduction after a nonlinearity)
        #     apart = lax.psum(jnp.sqrt(spread + 0.01), "models")
        gain = discount * (1 - (x**2).sum(-1) - 0.2 * (actions**2).sum(-1))
        still = alive & (jnp.abs(centre).max(-1) < EDGE)
        # mistake: alive-by-own-members (mask of a shard)
        #     still = alive & (jnp.abs(x.mean(0)).max(-1) < EDGE)
        return (x, still), (jnp.where(alive, gain, 0), apart)

    x = jnp.broadcast_to(start, (len(weight), len(plans), FEATURES))
    steps = plans.swapaxes(0, 1), DISCOUNT ** jnp.arange(HORIZON)
    _, (gains, apart) = lax.scan(ahead, (x, jnp.ones(len(plans), bool)), steps)
    whole = lax.all_to_all(gains.sum(0), "models", split_axis=1, concat_axis=0, tiled=True)
    worst = jnp.sort(whole, axis=0)[: MEMBERS // 2].mean(0)
    # mistake: half-of-own-members (count of a shard)
    #     worst = jnp.sort(whole, axis=0)[: len(weight) // 2].mean(0)
    return lax.all_gather(worst, "models", tiled=True), apart.mean(0)
    # mistake: candidates-interleaved (wrong order of parts)
    #     return lax.all_gather(worst, "models", axis=1).reshape(-1), apart.mean(0)


def planned(agent: Agent, params: Arrays, start: jax.Array) -> Any:
    """The plan after some rounds; then candidates, scores and disagreements of the last."""
    errors, here = agent.errors.value, CANDIDATES // lax.axis_size("plans")
    weight = jnp.exp(2 * (lax.pmin(errors.min(), "models") - errors))
    # mistake: errors-above-the-own-least (minimum of a shard)
    #     weight = jnp.exp(2 * (errors.min() - errors))
    weight = weight / lax.psum(weight.sum(), "models")
    # mistake: own-weights-sum-to-one (softmax of a shard)
    #     weight = weight / weight.sum()
    key = jax.random.fold_in(agent.key, agent.updates.value)
    # mistake: key-of-the-members (key of a shard)
    #     key = jax.random.fold_in(agent.key, agent.updates.value + 9 * lax.axis_index("models"))
    keys = jax.vmap(lambda one: jax.random.fold_in(key, one))(numbers("plans", here))
    drawn = jax.vmap(lambda one: jax.random.normal(one, (ROUNDS, HORIZON, ACTIONS)))(keys)
    ring = [((i + 1) % lax.axis_size("plans"), i) for i in range(lax.axis_size("plans"))]
    # mistake: ring-the-other-way (wrong ppermute direction)
    #     ring = [(i, (i + 1) % lax.axis_size("plans")) for i in range(lax.axis_size("plans"))]

    def improve(plan: Pair, noise: jax.Array) -> Any:
        x = jnp.clip(plan[0] + plan[1] * noise, -1, 1)
        after = jnp.concatenate([x[1:], lax.ppermute(x[:1], "plans", ring)])
        x = jnp.where(jnp.arange(HORIZON)[:, None] < HORIZON - LATE, x, after)
        worst, apart = rolled_out(params, start, x, weight)
        score = worst - CAUTION * apart
        least = lax.top_k(lax.all_gather(score, "plans", tiled=True), ELITES)[0][-1]
        # mistake: elites-of-a-shard (top-k of a shard)
        #     least = lax.top_k(score, ELITES)[0][-1]
        best = lax.pmax(score.max(), "plans")
        # mistake: best-of-own-candidates (dropped pmax)
        #     best = score.max()
        elite = jnp.where(score >= least, jnp.exp((score - best) / agent.temperature.value), 0)
        elite = elite / lax.psum(elite.sum(), "plans")
        mean = lax.psum(jnp.einsum("c,cha->ha", elite, x), "plans")
        squares = lax.psum(jnp.einsum("c,cha->ha", elite, (x - mean) ** 2), "plans")
        deviation = 0.3 * plan[1] + 0.7 * jnp.sqrt(squares + 0.01)
        return (0.3 * plan[0] + 0.7 * mean, deviation), (x, score, apart)

    plan, rounds = lax.scan(improve, agent.plan.value, drawn.swapaxes(0, 1))
    return plan, *(x[-1] for x in rounds)


def step(agent: Agent, given: Arrays) -> Any:
    seen, played = given["seen"].astype("float32"), given["played"]
    count, mean, squares = merged(agent.moments.value, seen)
    scale = lax.rsqrt(squares / count + 0.01)
    keys, rng = agent.rng.rows(BATCH // lax.axis_size("plans"), "plans")
    # mistake: keys-of-the-first-rows (keys not of global rows)
    #     keys, rng = agent.rng.rows(BATCH // lax.axis_size("plans"))
    new = jnp.concatenate([given["seen"], played, given["then"]], 1)
    buffer, written, batch = replayed(agent.buffer.value, agent.written.value, new, keys)
    before, actions, after = jnp.split(batch, (FEATURES, FEATURES + ACTIONS), 1)
    chance = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (MEMBERS,)))(keys)
    mask = chance.T[numbers("models", len(agent.errors.value))] < 0.7
    # mistake: chances-of-the-first-members (member not offset)
    #     mask = chance.T[: len(agent.errors.value)] < 0.7
    x, change = ((before - mean) * scale).astype(batch.dtype), (after - before) * scale
    params, t = agent.params.value, agent.updates.value + 1
    grads, fit = jax.grad(loss_fn, has_aux=True)(params, x, actions, change, mask)
    fit = lax.psum(fit, "plans")
    # mistake: fit-to-own-rows (estimate of a shard)
    #     fit = fit * lax.axis_size("plans")
    params, slots, norm = updated(params, grads, agent.slots.value, t)
    target = jax.tree.map(lambda a, p: 0.8 * a + 0.2 * p, agent.target.value, params)
    turn = numbers("plans", len(seen)) == agent.updates.value % PLAYERS
    # mistake: turn-of-one-in-each-shard (axis_index forgotten)
    #     turn = jnp.arange(len(seen)) == agent.updates.value % PLAYERS
    start = lax.psum(jnp.where(turn[:, None], (seen - mean) * scale, 0).sum(0), "plans")
    plan, candidates, score, apart = planned(agent, target, start)
    disagreement = lax.pmean(apart.mean(), "plans")
    # mistake: disagreement-on-own-candidates (statistics of a shard)
    #     disagreement = apart.mean()
    mine = lax.axis_index("plans") == lax.all_gather(score.max(), "plans").argmax()
    # mistake: winner-on-the-first-shard (wrong owner)
    #     mine = lax.axis_index("plans") == 0
    best = lax.psum(jnp.where(mine, candidates[score.argmax()], 0), "plans")
    # mistake: plans-of-all-shards (mask forgotten)
    #     best = lax.psum(candidates[score.argmax()], "plans")
    bins = jnp.clip((played.astype("float32") + 1) / 2 * BINS, 0, BINS - 1).astype(int).ravel()
    agent = agent.replace(
        params=params,
        target=target,
        slots=slots,
        moments=(count, mean, squares),
        errors=0.5 * agent.errors.value + 0.5 * fit,
        buffer=buffer,
        written=written,
        plan=(jnp.concatenate([plan[0][1:], 0 * plan[0][:1]]), jnp.maximum(plan[1], 0.3)),
        temperature=agent.temperature.value * jnp.exp(disagreement - DISAGREEMENT),
        episodes=agent.episodes.value + given["over"].sum(),
        histogram=agent.histogram.value + jnp.bincount(bins, length=BINS),
        # mistake: histogram-of-every-model (doubled psum)
        #     histogram=agent.histogram.value + lax.psum(jnp.bincount(bins, length=BINS), "models"),
        updates=t,
        rng=rng,
    )
    return agent, best, score, fit, {"norm": norm, "disagreement": disagreement}


def case(dtype: str) -> Case:
    given = {
        "seen": normal(dtype, PLAYERS, FEATURES, seed=5) + 0.5,
        "played": jnp.tanh(normal(dtype, PLAYERS, ACTIONS, seed=6)),
        "then": normal(dtype, PLAYERS, FEATURES, seed=7) + 0.5,
        "over": normal("float32", PLAYERS, seed=8) > -0.3,
    }
    return Case(
        step,
        (make_agent(dtype), given),
        mesh={"plans": 4, "models": 2},
        in_specs=(None, P("plans")),
        out_specs=(P(), P(), P("plans"), P("models"), P()),
        # mistake: scores-by-the-models (wrong spec)
        #     out_specs=(P(), P(), P("models"), P("models"), P()),
        check_vma=False,
    )
