"""Q-learning over environments that are split: replay buffers, normalized rewards, a target network."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
LENGTH, ACTIONS = 4, 3


def merged(
    old: tuple[jax.Array, ...], new: tuple[jax.Array, ...], axes: object
) -> tuple[jax.Array, ...]:
    """The count, mean and sum of squared distances of all rewards, from those of each shard."""
    (n0, mean0, m0), (n1, mean1, m1) = old, new
    count = lax.psum(n1 - n0, axes) + n0
    # mistake: old-count-of-every-shard (doubled psum)
    #     count = lax.psum(n1, axes)
    total = lax.psum(n1 * mean1 - n0 * mean0, axes) + n0 * mean0
    mean = total / count
    # mistake: mean-of-means (mean of means)
    #     mean = lax.pmean(mean1, axes)
    squares = lax.psum(m1 + n1 * mean1**2 - m0 - n0 * mean0**2, axes) + m0 + n0 * mean0**2
    return count, mean, squares - count * mean**2
    # mistake: spread-of-each-shard (mean of variances)
    #     return count, mean, lax.psum(m1 - m0, axes) + m0


class Agent(sm.Module):
    weights: sm.ParamState
    target: sm.State
    seen: sm.HiddenState
    rewards: sm.HiddenState
    position: sm.State
    statistics: sm.State
    highest: sm.State
    rng: sm.RandomState


def make_agent(dtype: str) -> Agent:
    weights, one = normal(dtype, 4, ACTIONS, seed=1), jnp.ones((), "float32")
    return Agent(
        weights=sm.ParamState(weights),
        target=sm.State(weights * 0.9),
        seen=sm.HiddenState(normal(dtype, 8, LENGTH, 4, seed=2), spec=P("data")),
        rewards=sm.HiddenState(normal(dtype, 8, LENGTH, seed=3), spec=P("data")),
        position=sm.State(0),
        statistics=sm.State((one * 2, one * 0.5, one), reduce=merged),
        highest=sm.State(jnp.zeros((), dtype), reduce="max"),
        rng=sm.RandomState(jax.random.key(0)),
    )


def remembered(agent: Agent, x: jax.Array, reward: jax.Array) -> Agent:
    at = agent.position.value % LENGTH
    # mistake: place-of-the-shard (wrong branch on axis_index)
    #     at = (agent.position.value + lax.axis_index("data")) % LENGTH
    count, mean, squares = agent.statistics.value
    own = reward.astype("float32")
    after = count + len(own)
    difference = own.mean() - mean
    squares = squares + own.var() * len(own) + difference**2 * count * len(own) / after
    return agent.replace(
        seen=agent.seen.value.at[:, at].set(x),
        rewards=agent.rewards.value.at[:, at].set(reward),
        position=agent.position.value + 1,
        # mistake: position-by-its-rows (count of a shard)
        #     position=agent.position.value + len(x),
        statistics=(after, mean + difference * len(own) / after, squares),
        highest=jnp.maximum(agent.highest.value, reward.max()),
        # mistake: highest-of-the-mean (pmean for pmax)
        #     highest=jnp.maximum(agent.highest.value, lax.pmean(reward.max(), "data")),
    )


def sampled(agent: Agent) -> tuple[jax.Array, jax.Array, Agent]:
    """A memory of each environment, at random."""
    keys, rng = agent.rng.rows(len(agent.rewards.value), "data")
    # mistake: memories-alike (shared key)
    #     keys, rng = agent.rng.rows(len(agent.rewards.value))
    memories = LENGTH
    # mistake: fewer-memories-on-more-shards (branch on the mesh)
    #     memories = LENGTH - (lax.axis_size("data") > 1)
    pick = jax.vmap(lambda key: jax.random.randint(key, (), 0, memories))(keys)
    rows = jnp.arange(len(pick))
    return agent.seen.value[rows, pick], agent.rewards.value[rows, pick], agent.replace(rng=rng)


def importance(error: jax.Array) -> Any:
    """The weight of each memory, the largest of all 1."""
    chance = jnp.abs(error) + 0.1
    chance = chance / lax.psum(chance.sum(), "data")
    # mistake: chances-of-a-shard (dropped psum)
    #     chance = chance / chance.sum()
    weight = chance**-0.5
    return weight / lax.pmax(weight.max(), "data")
    # mistake: largest-weight-of-a-shard (dropped pmax)
    #     return weight / weight.max()
    # mistake: largest-weight-of-the-sum (psum for pmax)
    #     return weight / lax.psum(weight.max(), "data")


def step(agent: Agent, x: jax.Array, reward: jax.Array) -> tuple[dict[str, jax.Array], Agent]:
    agent = remembered(agent, x, reward)
    seen, rewards, agent = sampled(agent)
    centre = lax.pmean(rewards.mean(), "data")
    # mistake: centre-of-a-shard (statistics of a shard)
    #     centre = rewards.mean()
    spread = jnp.sqrt(lax.pmean(((rewards - centre) ** 2).mean(), "data")) + 0.01
    # mistake: mean-of-deviations (mean of deviations)
    #     spread = lax.pmean(jnp.sqrt(((rewards - centre) ** 2).mean()), "data") + 0.01
    goal = (rewards - centre) / spread + 0.9 * (seen @ agent.target.value).max(1)

    def loss_of(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        error = (seen @ weights)[:, 0] - goal
        return (importance(lax.stop_gradient(error)) * error**2).mean(), error
        # mistake: loss-averaged-inside (gradient reduced twice)
        #     return lax.pmean((importance(lax.stop_gradient(error)) * error**2).mean(), "data"), error

    # The check makes the gradient of what all shards share the sum over shards.
    grads, error = jax.grad(loss_of, has_aux=True)(agent.weights.value)
    grads = grads / lax.axis_size("data")
    # mistake: gradients-summed (psum for pmean)
    #     grads = grads * 1
    # mistake: gradients-summed-again (gradient reduced twice)
    #     grads = lax.psum(grads, "data") / lax.axis_size("data")
    # mistake: gradients-divided-twice (gradient reduced twice)
    #     grads = grads / lax.axis_size("data") ** 2
    weights = agent.weights.value - 0.1 * grads
    target = 0.9 * agent.target.value + 0.1 * weights
    # mistake: target-by-the-shards (small factor)
    #     target = 0.9 ** lax.axis_size("data") * (agent.target.value - weights) + weights
    explore = lax.psum((jnp.abs(error) > 0.5).sum(), "data") / (8 * 1.0)
    # mistake: explored-of-a-shard (count of a shard)
    #     explore = lax.pmean((jnp.abs(error) > 0.5).sum(), "data") / (8 * 1.0)
    agent = agent.replace(weights=weights, target=target)
    return {"error": error, "explore": jnp.full_like(error, explore)}, agent


def case(dtype: str) -> Case:
    return Case(
        step,
        (make_agent(dtype), normal(dtype, 8, 4, seed=4), normal(dtype, 8, seed=5)),
        mesh={"data": 4},
        in_specs=(None, P("data"), P("data")),
        out_specs=P("data"),
        steps=3,
    )
