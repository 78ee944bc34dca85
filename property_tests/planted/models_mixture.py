"""Online EM for a mixture of Gaussians: rows over one axis, components over the other, running statistics."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
ROWS, COMPONENTS, WIDTH, SMOOTHING = 24, 6, 3, 0.1


class Statistics(NamedTuple):
    """Of each component, for each row: its share, and that share of the row and of its square."""

    counts: jax.Array
    sums: jax.Array
    squares: jax.Array


class Mixture(sm.Module):
    statistics: sm.State
    means: sm.State
    variances: sm.State
    weights: sm.State
    seen: sm.State
    calls: sm.State
    likelihood: sm.State
    worst: sm.State


def make_mixture(dtype: str) -> Mixture:
    means, one = normal(dtype, COMPONENTS, WIDTH, seed=1), jnp.ones(COMPONENTS, dtype)
    variances = jnp.full_like(means, 0.7)
    shares = one / COMPONENTS
    squares = (variances + means**2) / COMPONENTS
    return Mixture(
        statistics=sm.State(Statistics(shares, means / COMPONENTS, squares), spec=P("parts")),
        means=sm.State(means, spec=P("parts")),
        variances=sm.State(variances, spec=P("parts")),
        weights=sm.State(shares, spec=P("parts")),
        seen=sm.State(0),
        calls=sm.State(0),
        likelihood=sm.State(jnp.zeros((), dtype)),
        worst=sm.State(jnp.zeros((), dtype), reduce="max"),
    )


def log_densities(mixture: Mixture, x: jax.Array) -> jax.Array:
    """Of each row under each component of this shard, with the weight of the component."""
    variances = mixture.variances.value
    distances = ((x[:, None] - mixture.means.value) ** 2 / variances).sum(-1)
    volumes = jnp.log(2 * jnp.pi * variances).sum(-1)
    return jnp.log(mixture.weights.value) - (distances + volumes) / 2


def log_sum(scores: jax.Array) -> Any:
    """The logarithm of the summed exponentials, over the components of all shards."""
    high = lax.pmax(scores.max(1), "parts")
    # mistake: highest-of-own-components (local max in log-sum-exp)
    #     high = scores.max(1)
    # mistake: highest-over-the-rows (wrong axis name)
    #     high = lax.pmax(scores.max(1), "data")
    total = lax.psum(jnp.exp(scores - high[:, None]).sum(1), "parts")
    # mistake: total-of-own-components (dropped psum)
    #     total = jnp.exp(scores - high[:, None]).sum(1)
    # mistake: total-over-both-axes (wrong axis name)
    #     total = lax.psum(jnp.exp(scores - high[:, None]).sum(1), ("data", "parts"))
    return high + jnp.log(total)
    # mistake: log-sums-summed (reduction after a nonlinearity)
    #     return lax.psum(jax.nn.logsumexp(scores, 1), "parts")


def assigned(scores: jax.Array) -> Any:
    """The number of each row's likeliest component."""
    own = scores.shape[1]
    index = lax.axis_index("parts") * own + scores.argmax(1)
    # mistake: component-not-offset (row index not offset)
    #     index = scores.argmax(1)
    # mistake: component-offset-by-the-rows (wrong axis name)
    #     index = lax.axis_index("data") * own + scores.argmax(1)
    owner = lax.all_gather(scores.max(1), "parts").argmax(0)
    return lax.psum(jnp.where(lax.axis_index("parts") == owner, index, 0), "parts")
    # mistake: likeliest-of-own-components (local argmax)
    #     return index


def found_in(x: jax.Array, shares: jax.Array) -> Any:
    """The means over all rows, for the components of this shard."""
    own = Statistics(shares.sum(0), shares.T @ x, shares.T @ x**2)
    total = lax.psum(own, "data")
    # mistake: statistics-of-a-shard (dropped psum)
    #     total = own
    # mistake: statistics-averaged (pmean for psum)
    #     total = lax.pmean(own, "data")
    # mistake: statistics-over-the-components (wrong axis name)
    #     total = lax.psum(own, "parts")
    # mistake: counts-not-reduced (counts not reduced)
    #     total = Statistics(own.counts, *lax.psum((own.sums, own.squares), "data"))
    rows = len(x) * lax.axis_size("data")
    # mistake: rows-of-a-shard (count of a shard)
    #     rows = len(x)
    # mistake: rows-of-the-components (wrong axis name)
    #     rows = len(x) * lax.axis_size("parts")
    return jax.tree.map(lambda sums: sums / rows, total)


def spread(x: jax.Array) -> Any:
    """The variance of all rows."""
    centre = lax.pmean(x.mean(0), "data")
    # mistake: centre-of-a-shard (statistics of a shard)
    #     centre = x.mean(0)
    return lax.pmean(((x - centre) ** 2).mean(0), "data")
    # mistake: deviations-averaged (mean of deviations)
    #     return lax.pmean(jnp.sqrt(((x - centre) ** 2).mean(0)), "data") ** 2


def step(mixture: Mixture, x: jax.Array) -> tuple[Mixture, jax.Array, dict[str, jax.Array]]:
    scores = log_densities(mixture, x)
    each = log_sum(scores)
    shares = jnp.exp(scores - each[:, None])
    # mistake: shares-normalized-again (normalized twice)
    #     shares = jax.nn.softmax(scores - each[:, None], 1)
    found = found_in(x, shares)
    rate = ((mixture.calls.value + 2) ** -0.6).astype(x.dtype)
    # mistake: rate-of-all-shards (count of the mesh)
    #     rate = ((mixture.calls.value + 1 + lax.axis_size("data")) ** -0.6).astype(x.dtype)
    old = mixture.statistics.value
    running = jax.tree.map(lambda a, b: a + rate * (b - a), old, found)
    # mistake: found-added-on-every-shard (doubled psum)
    #     running = jax.tree.map(lambda a, b: a + lax.psum(rate * (b - a), "data"), old, found)
    counts, sums, squares = running
    # mistake: statistics-of-the-last-call (stale value)
    #     unseen: one device uses the old ones too
    #     counts, sums, squares = old
    means = sums / counts[:, None]
    variances = squares / counts[:, None] - means**2 + SMOOTHING * spread(x)
    weights = counts / lax.psum(counts.sum(), "parts")
    # mistake: weights-of-own-components (dropped psum)
    #     weights = counts / counts.sum()
    # mistake: weights-by-the-mean (pmean for psum)
    #     weights = counts / lax.pmean(counts.sum(), "parts")
    likelihood = lax.pmean(each.mean(), "data")
    # mistake: likelihoods-summed (psum for pmean)
    #     likelihood = lax.psum(each.mean(), "data")
    rows = len(x) * lax.axis_size("data")
    mixture = mixture.replace(
        statistics=running,
        means=means,
        variances=variances,
        weights=weights,
        seen=mixture.seen.value + rows,
        # mistake: seen-by-both-axes (count of the mesh)
        #     seen=mixture.seen.value + rows * lax.axis_size("parts"),
        calls=mixture.calls.value + 1,
        likelihood=0.9 * mixture.likelihood.value + 0.1 * likelihood,
        worst=jnp.maximum(mixture.worst.value, -each.min()),
        # mistake: worst-of-the-mean (pmean for pmax)
        #     worst=jnp.maximum(mixture.worst.value, lax.pmean(-each.min(), "data")),
    )
    return mixture, shares, {"assigned": assigned(scores), "each": each}


def case(dtype: str) -> Case:
    return Case(
        step,
        (make_mixture(dtype), normal(dtype, ROWS, WIDTH)),
        mesh={"data": 4, "parts": 2},
        in_specs=(None, P("data")),
        # mistake: rows-over-the-components-axis (wrong spec)
        #     in_specs=(None, P("parts")),
        out_specs=(P(), P("data", "parts"), P("data")),
        check_vma=False,
        steps=3,
    )
