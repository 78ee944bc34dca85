"""Evolution strategies: members of a population over one axis, the rows that judge them over the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
PAIRS, ROWS, WIDTH, ELITE = 12, 20, 6, 3


class Search(sm.Module):
    mean: sm.ParamState
    momentum: sm.State
    spread: sm.State
    best: sm.State
    generation: sm.State
    key: Any


def make_search(dtype: str) -> Search:
    return Search(
        mean=sm.ParamState(normal(dtype, WIDTH, seed=1)),
        momentum=sm.State(jnp.zeros(WIDTH, dtype)),
        spread=sm.State(jnp.asarray(0.5, dtype)),
        best=sm.State((jnp.asarray(-100.0, "float32"), jnp.zeros(WIDTH, dtype))),
        generation=sm.State(0),
        key=jax.random.key(0),
    )


def noise_of(search: Search) -> jax.Array:
    """Of each pair of this shard: a pair's noise depends on its number and the generation only."""
    here = PAIRS // lax.axis_size("members")
    pair = lax.axis_index("members") * here + jnp.arange(here)
    # mistake: pair-in-the-shard (row index not offset)
    #     pair = jnp.arange(here)
    # mistake: pair-by-the-rows (wrong axis name)
    #     pair = lax.axis_index("data") * here + jnp.arange(here)
    # mistake: pairs-overlap (off by one)
    #     pair = lax.axis_index("members") * (here - 1) + jnp.arange(here)
    key = jax.random.fold_in(search.key, search.generation.value)
    # mistake: key-of-the-rows (key of a shard)
    #     key = jax.random.fold_in(search.key, search.generation.value + 100 * lax.axis_index("data"))
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(pair)
    # mistake: keys-split-in-the-shard (shared key)
    #     keys = jax.random.split(key, here)
    shape, dtype = search.mean.value.shape, search.mean.value.dtype
    return jax.vmap(lambda key: jax.random.normal(key, shape, dtype))(keys)


def fitness_of(members: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    """The less the mean squared error over all rows, and the shorter, the fitter."""
    missed = (jnp.tanh(members @ x.T) - y).astype("float32")
    error = lax.pmean((missed**2).mean(1), "data")
    # mistake: error-of-these-rows (statistics of a shard)
    #     error = (missed**2).mean(1)
    # mistake: errors-summed (psum for pmean)
    #     error = lax.psum((missed**2).mean(1), "data")
    # mistake: error-over-the-members (wrong axis name)
    #     error = lax.pmean((missed**2).mean(1), "members")
    return -error - 0.01 * (members.astype("float32") ** 2).sum(1)


def ranked(fitness: jax.Array) -> jax.Array:
    """The rank of each of these members among all, from -1/2 to 1/2."""
    everyone = lax.all_gather(fitness, "members", tiled=True)
    # mistake: everyone-is-here (all_gather forgotten)
    #     everyone = jnp.tile(fitness, lax.axis_size("members"))
    rank = (fitness[:, None] > everyone).sum(1)
    # mistake: rank-among-those-here (ranks of a shard)
    #     rank = (fitness[:, None] > fitness).sum(1)
    return rank / (len(everyone) - 1) - 0.5
    # mistake: divided-by-those-here (count of a shard)
    #     return rank / (len(fitness) - 1) - 0.5


def improved(search: Search, members: jax.Array, fitness: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best member of all generations."""
    most, parameters = search.best.value
    highest = lax.pmax(fitness.max(), "members")
    # mistake: highest-here (dropped pmax)
    #     highest = fitness.max()
    # mistake: highest-of-the-mean (pmean for pmax)
    #     highest = lax.pmean(fitness.max(), "members")
    leads = fitness.max() == highest
    # mistake: first-shard-leads (wrong owner)
    #     leads = lax.axis_index("members") == 0
    leader = members[fitness.argmax()]
    leader = lax.psum(jnp.where(leads, leader, 0), "members")
    # mistake: leaders-of-all-shards (mask forgotten)
    #     leader = lax.psum(leader, "members")
    return jnp.maximum(most, highest), jnp.where(highest > most, leader, parameters)
    # mistake: leader-of-the-shard-that-improved (statistics of a shard)
    #     return jnp.maximum(most, highest), jnp.where(fitness.max() > most, leader, parameters)


def elite_of(members: jax.Array, fitness: jax.Array) -> jax.Array:
    """The mean of the best members of this generation."""
    scores = lax.all_gather(fitness, "members", tiled=True)
    everyone = lax.all_gather(members, "members", tiled=True)
    # mistake: members-in-another-order (wrong order of parts)
    #     everyone = jnp.swapaxes(lax.all_gather(members, "members"), 0, 1).reshape(-1, WIDTH)
    _, chosen = lax.top_k(scores, ELITE)
    # mistake: elite-of-a-shard (top-k of a shard)
    #     _, chosen = lax.top_k(fitness, ELITE)
    return everyone[chosen].mean(0)
    # mistake: elite-among-those-here (wrong rows)
    #     return members[chosen % len(members)].mean(0)


def step(
    search: Search, x: jax.Array, y: jax.Array
) -> tuple[Search, jax.Array, jax.Array, dict[str, jax.Array]]:
    mean, spread = search.mean.value, search.spread.value
    noise = noise_of(search)
    members = jnp.concatenate([mean + spread * noise, mean - spread * noise])
    fitness = fitness_of(members, x, y)
    up, down = jnp.split(ranked(fitness), 2)
    direction = lax.psum((up - down).astype(noise.dtype) @ noise, "members")
    # mistake: direction-of-these-members (dropped psum)
    #     direction = (up - down).astype(noise.dtype) @ noise
    # mistake: direction-averaged (pmean for psum)
    #     direction = lax.pmean((up - down).astype(noise.dtype) @ noise, "members")
    # mistake: direction-of-every-row-shard (doubled psum)
    #     direction = lax.psum((up - down).astype(noise.dtype) @ noise, ("members", "data"))
    slope = direction / (2 * PAIRS * spread)
    # mistake: slope-by-the-pairs-here (normalized twice)
    #     slope = direction / (2 * PAIRS * lax.axis_size("members") * spread)
    momentum = 0.8 * search.momentum.value + slope
    # mistake: momentum-by-the-shards (small factor)
    #     momentum = 0.8 ** lax.axis_size("members") * search.momentum.value + slope
    better = lax.psum((fitness > fitness_of(mean[None], x, y)).sum(), "members") / (2 * PAIRS)
    # mistake: better-of-these-members (count of a shard)
    #     better = (fitness > fitness_of(mean[None], x, y)).sum() / (2 * PAIRS)
    average = lax.pmean(fitness.mean(), "members")
    # mistake: average-here (statistics of a shard)
    #     average = fitness.mean()
    variance = lax.pmean(((fitness - average) ** 2).mean(), "members")
    # mistake: variance-of-each-shard (mean of variances)
    #     variance = lax.pmean(fitness.var(), "members")
    search = search.replace(
        mean=mean + 0.5 * momentum,
        momentum=momentum,
        spread=(spread * jnp.exp(0.5 * (better - 0.2))).astype(spread.dtype),
        best=improved(search, members, fitness),
        generation=search.generation.value + 1,
        # mistake: generations-by-the-shards (count of the mesh)
        #     generation=search.generation.value + lax.axis_size("members"),
    )
    numbers = {"deviation": jnp.sqrt(variance), "elite": elite_of(members, fitness)}
    return search, fitness[: len(noise)], jnp.tanh(x @ mean), numbers


def case(dtype: str) -> Case:
    return Case(
        step,
        (make_search(dtype), normal(dtype, ROWS, WIDTH, seed=2), normal(dtype, ROWS, seed=3)),
        mesh={"members": 2, "data": 2},
        in_specs=(None, P("data"), P("data")),
        # mistake: rows-over-the-members (wrong spec)
        #     in_specs=(None, P("members"), P("members")),
        out_specs=(P(), P("members"), P("data"), P()),
        check_vma=False,
        steps=3,
    )
