"""Policy gradients: environments over one axis, the hidden units of actor and critic over the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
TIME, ENVIRONMENTS, FEATURES, UNITS, ACTIONS, HARD = 6, 8, 4, 8, 2, 3
EXPLORED, DISCOUNT, TRACE, CLIP, DIVERGENCE, LONGEST = 0.5, 0.9, 0.8, 0.2, 0.5, 3.2
OF_UNITS = {"hidden": P(None, "model"), "heads": P("model")}
COMMON = {"gain": P(), "bias": P(), "log_std": P()}
Arrays = dict[str, jax.Array]


class Agent(sm.Module):
    params: sm.ParamState
    slots: sm.State
    moments: sm.State
    baseline: sm.State
    largest: sm.State
    caution: sm.State
    episodes: sm.State
    updates: sm.State
    key: Any


def make_agent(dtype: str) -> Agent:
    params = {"gain": jnp.ones(FEATURES, dtype), "log_std": jnp.full(ACTIONS, -0.75, dtype)}
    params["hidden"] = normal(dtype, FEATURES, UNITS, seed=1) / 2
    params["heads"] = normal(dtype, UNITS, ACTIONS + 1, seed=2) / 8
    params["bias"] = normal(dtype, ACTIONS + 1, seed=3) / 8
    one, features = jnp.ones((), "float32"), jnp.ones(FEATURES, "float32")
    slots = jax.tree.map(lambda p: jnp.zeros(p.shape, "float32"), params)
    return Agent(
        params=sm.ParamState(params, spec=OF_UNITS | COMMON),
        slots=sm.State(slots, spec=OF_UNITS | COMMON),
        moments=sm.State((4 * one, 0 * features, 4 * features)),
        baseline=sm.State(jnp.zeros(ENVIRONMENTS, "float32"), spec=P("data")),
        # mistake: baseline-by-the-units (wrong spec)
        #     baseline=sm.State(jnp.zeros(ENVIRONMENTS, "float32"), spec=P("model")),
        largest=sm.State(one),
        caution=sm.State(one),
        episodes=sm.State(0, reduce="sum"),
        # mistake: episodes-of-the-luckiest-shard (wrong reduction)
        #     episodes=sm.State(0, reduce="max"),
        updates=sm.State(0),
        key=jax.random.key(0),
    )


def noise_of(agent: Agent, here: int) -> jax.Array:
    """Of all steps of this shard's environments."""
    number = lax.axis_index("data") * here + jnp.arange(here)
    # mistake: number-in-the-shard (row index not offset)
    #     number = jnp.arange(here)
    key = jax.random.fold_in(agent.key, agent.updates.value)
    # mistake: key-of-the-units (key of a shard)
    #     key = jax.random.fold_in(agent.key, agent.updates.value + 50 * lax.axis_index("model"))
    keys = jax.vmap(lambda one: jax.random.fold_in(key, one))(number)
    # mistake: keys-split-on-each-shard (shared key)
    #     keys = jax.random.split(key, here)
    return jax.vmap(lambda one: jax.random.normal(one, (TIME, ACTIONS)), out_axes=1)(keys)


def merged(moments: tuple[jax.Array, ...], seen: jax.Array) -> tuple[jax.Array, ...]:
    """The count, mean and sum of squared distances of all observations, those of this call too."""
    old, mean, squares = moments
    rows = seen.reshape(-1, FEATURES).astype("float32")
    new = len(rows) * lax.axis_size("data")
    # mistake: observations-of-a-shard (count of a shard)
    #     new = len(rows)
    centre = lax.pmean(rows.mean(0), "data")
    around = lax.psum(((rows - centre) ** 2).sum(0), "data")
    # mistake: squares-averaged (pmean for psum)
    #     around = lax.pmean(((rows - centre) ** 2).sum(0), "data")
    # mistake: squares-around-the-own-centre (mean of variances)
    #     around = lax.psum(((rows - rows.mean(0)) ** 2).sum(0), "data")
    count, change = old + new, centre - mean
    squares = squares + around + change**2 * old * new / count
    return count, mean + change * new / count, squares


def means_and_values(params: Arrays, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = jnp.tanh((x * params["gain"]) @ params["hidden"])
    out = lax.psum(hidden @ params["heads"], "model") + params["bias"]
    # mistake: heads-of-own-units (dropped psum)
    #     out = hidden @ params["heads"] + params["bias"]
    # mistake: bias-of-every-shard (bias added before the psum)
    #     out = lax.psum(hidden @ params["heads"] + params["bias"], "model")
    out = out.astype("float32")
    return out[..., :ACTIONS], out[..., ACTIONS]


def advantages_of(values: jax.Array, rewards: jax.Array, going: jax.Array) -> jax.Array:
    """Of each step, what it gives more than was expected, with less and less of later surprises."""

    def back(later: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        value, following, reward, going = now
        reward = reward - lax.pmean(reward.mean(), "data")
        # mistake: reward-above-the-own-mean (statistics of a shard)
        #     reward = reward - reward.mean()
        surprise = reward + DISCOUNT * going * following - value
        later = surprise + DISCOUNT * TRACE * going * later
        # mistake: trace-by-the-shards (small factor)
        #     later = surprise + DISCOUNT * TRACE ** lax.axis_size("data") * going * later
        return later, later

    steps = values[:-1], values[1:], rewards, going
    return lax.scan(back, jnp.zeros_like(values[0]), steps, reverse=True)[1]


def loss_fn(params: Arrays, batch: Arrays, largest: jax.Array, caution: jax.Array) -> Any:
    """The derivative of the first result is, summed over the units' shards, that of the loss."""
    means, values = means_and_values(params, batch["x"])
    log_std = params["log_std"].astype("float32")
    likely = (-(((batch["actions"] - means) / jnp.exp(log_std)) ** 2) / 2 - log_std).sum(-1)
    advantages = batch["advantages"]
    mean = lax.pmean(advantages.mean(), "data")
    # mistake: advantages-summed (psum for pmean)
    #     mean = lax.psum(advantages.mean(), "data")
    deviation = jnp.sqrt(lax.pmean(((advantages - mean) ** 2).mean(), "data"))
    # mistake: deviations-averaged (mean of deviations)
    #     deviation = lax.pmean(jnp.sqrt(((advantages - mean) ** 2).mean()), "data")
    ratio, better = jnp.exp(likely - batch["likely"]), (advantages - mean) / (deviation + 0.01)
    gain = jnp.minimum(ratio * better, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * better).mean()
    near = batch["values"] + jnp.clip(values - batch["values"], -CLIP, CLIP)
    missed = jnp.maximum(jnp.abs(values - batch["goals"]), jnp.abs(near - batch["goals"])) / largest
    apart = (ratio - 1 - likely + batch["likely"]).mean()
    loss = (missed**2).mean() - gain + caution * apart - 0.01 * log_std.sum()
    # mistake: missed-by-all-environments (normalized twice)
    #     loss = (missed**2).sum() / TIME / ENVIRONMENTS - gain + caution * apart - 0.01 * log_std.sum()
    return loss / lax.axis_size("model"), (loss, apart)
    # mistake: derivative-of-every-shard (gradient reduced twice)
    #     return loss, (loss, apart)


def reduced(grads: Arrays) -> Arrays:
    """The gradients of all environments, together no longer than `LONGEST`."""
    grads = {name: g.astype("float32") for name, g in grads.items()}
    grads |= {name: lax.psum(grads[name], "model") for name in COMMON}
    # mistake: gain-of-own-units (dropped psum)
    #     grads |= {name: lax.psum(grads[name], "model") for name in ("bias", "log_std")}
    grads = lax.pmean(grads, "data")
    # mistake: gradients-of-own-environments (gradient not reduced)
    #     grads = dict(grads)
    # mistake: gradients-over-the-units (wrong axis name)
    #     grads = lax.pmean(grads, "model")
    own, common = (sum((grads[name] ** 2).sum() for name in names) for names in (OF_UNITS, COMMON))
    squares = lax.psum(own, "model") + common
    # mistake: norm-of-own-units (local norm in clipping)
    #     squares = own + common
    # mistake: common-ones-of-every-shard (doubled psum)
    #     squares = lax.psum(own + common, "model")
    return jax.tree.map(lambda g: g * jnp.minimum(1, LONGEST * lax.rsqrt(squares)), grads)


def hardest(score: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of all environments surprise most, and how they began."""
    everyone = lax.all_gather(score, "data", tiled=True)
    # mistake: scores-interleaved (wrong order of parts)
    #     everyone = lax.all_gather(score, "data").T.reshape(-1)
    _, chosen = lax.top_k(everyone, HARD)
    # mistake: hardest-of-a-shard (top-k of a shard)
    #     _, chosen = lax.top_k(score, HARD)
    own = chosen - lax.axis_index("data") * len(score)
    # mistake: first-environment-forgotten (axis_index forgotten)
    #     own = chosen
    inside = (own >= 0) & (own < len(score))
    # mistake: first-of-the-next-too (off by one)
    #     inside = (own >= 0) & (own <= len(score))
    found = starts[jnp.clip(own, 0, len(score) - 1)]
    return chosen, lax.psum(jnp.where(inside[:, None], found, 0), "data")
    # mistake: starts-of-every-shard (mask forgotten)
    #     return chosen, lax.psum(found, "data")


def step(agent: Agent, rollout: Arrays) -> tuple[Agent, jax.Array, Arrays]:
    params, caution, over = agent.params.value, agent.caution.value, rollout["over"]
    count, mean, squares = merged(agent.moments.value, rollout["seen"])
    x = ((rollout["seen"] - mean) * lax.rsqrt(squares / count + 0.01)).astype(params["gain"].dtype)
    _, values = means_and_values(params, x)
    noise = noise_of(agent, over.shape[1])
    actions, likely = rollout["played"] + EXPLORED * noise, -(noise**2 / 2 + jnp.log(EXPLORED))
    rewards = rollout["rewards"] - 0.1 * (actions**2).sum(-1)
    advantages = advantages_of(values, rewards - agent.baseline.value, 1.0 - over)
    goals = values[:-1] + advantages
    highest = lax.pmax(jnp.abs(goals).max(), "data")
    # mistake: highest-of-own-environments (dropped pmax)
    #     highest = jnp.abs(goals).max()
    # mistake: highest-on-average (pmean for pmax)
    #     highest = lax.pmean(jnp.abs(goals).max(), "data")
    largest = jnp.maximum(agent.largest.value, highest)
    batch = {"x": x[:-1], "actions": actions, "likely": likely.sum(-1), "goals": goals}
    batch |= {"values": values[:-1], "advantages": advantages}
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (_, (loss, own_apart)), grads = gradient(params, batch, largest, caution)
    slots = jax.tree.map(lambda m, g: 0.8 * m + g, agent.slots.value, reduced(grads))
    seen = agent.episodes.value + lax.psum(over.sum(), "data")
    # mistake: episodes-of-the-others-later (stale value)
    #     seen = agent.episodes.value + over.sum()
    rate, apart = 0.05 / (1 + 0.05 * seen), lax.pmean(own_apart, "data")
    caution = jnp.where(apart > DIVERGENCE, caution * 1.5, caution / 1.5)
    # mistake: caution-by-the-own-environments (branch on a local value)
    #     caution = jnp.where(own_apart > DIVERGENCE, caution * 1.5, caution / 1.5)
    agent = agent.replace(
        params=jax.tree.map(lambda p, m: (p - rate * m).astype(p.dtype), params, slots),
        slots=slots,
        moments=(count, mean, squares),
        baseline=0.9 * agent.baseline.value + 0.1 * rewards.mean(0),
        largest=largest,
        caution=caution,
        episodes=agent.episodes.value + over.sum(),
        updates=agent.updates.value + 1,
    )
    chosen, starts = hardest(jnp.abs(advantages).mean(0), x[0])
    numbers = {"loss": lax.pmean(loss, "data"), "apart": apart, "hard": chosen, "starts": starts}
    return agent, advantages, numbers


def case(dtype: str) -> Case:
    rollout = {
        "seen": normal(dtype, TIME + 1, ENVIRONMENTS, FEATURES, seed=4) + 0.5,
        "played": normal("float32", TIME, ENVIRONMENTS, ACTIONS, seed=5) / 4,
        "rewards": normal("float32", TIME, ENVIRONMENTS, seed=12),
        "over": normal("float32", TIME, ENVIRONMENTS, seed=7) > 0.8,
    }
    return Case(
        step,
        (make_agent(dtype), rollout),
        mesh={"data": 2, "model": 2},
        in_specs=(None, P(None, "data")),
        # mistake: environments-over-the-units (wrong spec)
        #     in_specs=(None, P(None, "model")),
        out_specs=(P(), P(None, "data"), P()),
        # mistake: advantages-over-the-units (wrong spec)
        #     out_specs=(P(), P(None, "model"), P()),
        check_vma=False,
        steps=3,
    )
