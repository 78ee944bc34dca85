"""A particle filter: particles over one axis, tracked objects over the other, ancestors from all shards."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


# Not in narrow dtypes: there, rounding alone makes a particle descend from another one.
DTYPES = ("float32",)
OBJECTS, PARTICLES, WIDTH = 4, 32, 2
EDGE, NOISE, ROUGHNESS, ENOUGH = 2.0, 0.3, 0.5, 0.6


class Tracker(sm.Module):
    particles: sm.State
    log_weights: sm.State
    evidence: sm.State
    bias: sm.State
    best: sm.State
    best_score: sm.State
    drawn: sm.State
    lost: sm.State
    key: Any


def make_tracker(dtype: str) -> Tracker:
    each = P("objects", "particles")
    return Tracker(
        particles=sm.State(normal(dtype, OBJECTS, PARTICLES, WIDTH, seed=1), spec=each),
        log_weights=sm.State(normal(dtype, OBJECTS, PARTICLES, seed=2) / 2, spec=each),
        evidence=sm.State(jnp.zeros(OBJECTS, dtype), spec=P("objects")),
        bias=sm.State(jnp.zeros((), dtype)),
        best=sm.State(jnp.zeros((OBJECTS, WIDTH), dtype), spec=P("objects")),
        best_score=sm.State(jnp.full(OBJECTS, -9, dtype), spec=P("objects")),
        drawn=sm.State(0),
        lost=sm.State(0, reduce="sum"),
        # mistake: lost-on-a-shard (reduction forgotten)
        #     lost=sm.State(0),
        key=jax.random.key(0),
    )


def own_numbers(axis: str, own: int) -> Any:
    """The numbers of this shard's particles, or of its objects, among all."""
    return lax.axis_index(axis) * own + jnp.arange(own)
    # mistake: numbers-of-a-shard (row index not offset)
    #     return jnp.arange(own)
    # mistake: numbers-by-the-size (wrong offset)
    #     return lax.axis_index(axis) * lax.axis_size(axis) + jnp.arange(own)


def noise(key: jax.Array, like: jax.Array) -> jax.Array:
    """Normal numbers that depend on the numbers of the object and of the particle only."""
    objects, particles = own_numbers("objects", len(like)), own_numbers("particles", like.shape[1])
    # mistake: objects-by-the-other-axis (wrong axis name)
    #     objects, particles = own_numbers("particles", len(like)), own_numbers("particles", like.shape[1])
    number = objects[:, None] * PARTICLES + particles
    # mistake: objects-apart-by-a-shard (count of a shard)
    #     number = objects[:, None] * like.shape[1] + particles
    keys = jax.vmap(jax.vmap(lambda one: jax.random.fold_in(key, one)))(number)
    return jax.vmap(jax.vmap(lambda one: jax.random.normal(one, like.shape[2:], like.dtype)))(keys)
    # mistake: noise-alike (shared key)
    #     return jax.random.normal(key, like.shape, like.dtype)


def moved(particles: jax.Array, shocks: jax.Array) -> jax.Array:
    """By the speed, which is pulled to the middle and shaken."""
    place, speed = particles[..., 0], particles[..., 1]
    speed = 0.8 * speed - 0.1 * place
    return jnp.stack([place + 0.5 * speed, speed], -1) + NOISE * shocks


def normalized(log_weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights that sum to one over all shards, and the logarithm of what they summed to."""
    high = lax.pmax(log_weights.max(1), "particles")
    # mistake: highest-of-own-particles (local max in log-sum-exp)
    #     high = log_weights.max(1)
    total = lax.psum(jnp.exp(log_weights - high[:, None]).sum(1), "particles")
    # mistake: total-of-own-particles (dropped psum)
    #     total = jnp.exp(log_weights - high[:, None]).sum(1)
    # mistake: total-averaged (pmean for psum)
    #     total = lax.pmean(jnp.exp(log_weights - high[:, None]).sum(1), "particles")
    evidence = high + jnp.log(total)
    # mistake: logarithms-averaged (reduction after a nonlinearity)
    #     evidence = lax.pmean(jax.nn.logsumexp(log_weights, 1), "particles")
    return log_weights - evidence[:, None], evidence


def moments(particles: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weighted mean and the covariance, without its bias, and how many even weights would do as well."""
    weighted = (weights[..., None] * particles).sum(1)
    mean = lax.psum(weighted, "particles")
    # mistake: mean-of-means (mean of means)
    #     mean = lax.pmean(weighted / weights.sum(1)[:, None], "particles")
    apart = particles - mean[:, None]
    # mistake: apart-from-own-mean (statistics of a shard)
    #     apart = particles - (weighted / weights.sum(1)[:, None])[:, None]
    squares = lax.psum((weights**2).sum(1), "particles")
    around = lax.psum(jnp.einsum("op,opi,opj->oij", weights, apart, apart), "particles")
    # mistake: covariance-over-both-axes (wrong axis name)
    #     around = lax.psum(jnp.einsum("op,opi,opj->oij", weights, apart, apart), ("particles", "objects"))
    return mean, around / (1 - squares)[:, None, None], 1 / squares


def crowding(particles: jax.Array) -> Any:
    """The mean logarithm of the density that all particles together have where each of them is."""
    size = lax.axis_size("particles")
    visiting, near = particles, jnp.zeros(particles.shape[:2], particles.dtype)
    for _ in range(size):
        # mistake: last-shard-not-visited (off by one in a loop)
        #     for _ in range(size - 1):
        gaps = ((particles[:, :, None] - visiting[:, None]) ** 2).sum(-1)
        near = near + jnp.exp(-2 * gaps).sum(2)
        visiting = lax.ppermute(visiting, "particles", [(i, (i + 1) % size) for i in range(size)])
        # mistake: visited-by-the-next-only (stale value)
        #     visiting = lax.ppermute(particles, "particles", [(i, (i + 1) % size) for i in range(size)])
    density = near / (size * particles.shape[1])
    return lax.pmean(jnp.log(density + 0.01).mean(1), "particles")
    # mistake: crowding-summed (psum for pmean)
    #     return lax.psum(jnp.log(density + 0.01).mean(1), "particles")


def ancestors_of(key: jax.Array, weights: jax.Array) -> jax.Array:
    """Systematic: for evenly spaced points, with one start for an object, whose weight each lies in."""
    cumulative = jnp.cumsum(weights, 1)
    totals = lax.all_gather(cumulative[:, -1], "particles")
    earlier = jnp.arange(len(totals)) < lax.axis_index("particles")
    # mistake: earlier-with-own (off by one)
    #     earlier = jnp.arange(len(totals)) <= lax.axis_index("particles")
    before = (earlier[:, None] * totals).sum(0)
    # mistake: only-the-shard-before (wrong offset)
    #     before = jnp.where(earlier.any(), totals[lax.axis_index("particles") - 1], 0)
    edges = lax.all_gather(cumulative + before[:, None], "particles", axis=1, tiled=True)
    starts = jax.random.uniform(key, (OBJECTS, 1), weights.dtype)
    # mistake: starts-of-each-shard (key of a shard)
    #     starts = jax.random.uniform(jax.random.fold_in(key, lax.axis_index("particles")), (OBJECTS, 1))
    start = starts[own_numbers("objects", len(weights))]
    points = start + own_numbers("particles", weights.shape[1])
    found = jax.vmap(jnp.searchsorted)(edges, points / edges.shape[1])
    # mistake: spaced-by-a-shard (count of a shard)
    #     found = jax.vmap(jnp.searchsorted)(edges, points / weights.shape[1])
    return jnp.minimum(found, PARTICLES - 1)


def roughened(particles: jax.Array, shocks: jax.Array) -> jax.Array:
    """Shaken as far as the neighbours on both sides are apart; the last is a neighbour of the first."""
    size = lax.axis_size("particles")
    left = lax.ppermute(particles[:, -1:], "particles", [(i, (i + 1) % size) for i in range(size)])
    # mistake: left-from-the-right (ppermute in the wrong direction)
    #     left = lax.ppermute(particles[:, -1:], "particles", [((i + 1) % size, i) for i in range(size)])
    right = lax.ppermute(particles[:, :1], "particles", [((i + 1) % size, i) for i in range(size)])
    # mistake: right-of-a-shard (halo of a shard)
    #     right = particles[:, :1]
    around = jnp.concatenate([left, particles, right], 1)
    return particles + ROUGHNESS * jnp.abs(around[:, 2:] - around[:, :-2]) * shocks


def best_of(scores: jax.Array, particles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The likeliest particle of each object, and its score."""
    own, high = scores.argmax(1)[:, None, None], lax.all_gather(scores.max(1), "particles")
    mine = (high.argmax(0) == lax.axis_index("particles"))[:, None]
    # mistake: owner-among-the-objects (wrong axis name)
    #     mine = (high.argmax(0) == lax.axis_index("objects"))[:, None]
    best = jnp.take_along_axis(particles, own, 1)[:, 0]
    return lax.psum(jnp.where(mine, best, 0), "particles"), high.max(0)
    # mistake: best-of-a-shard (local argmax)
    #     return best, high.max(0)


def step(tracker: Tracker, seen: jax.Array) -> tuple[Tracker, jax.Array, dict[str, jax.Array]]:
    key, moving, starting, shaking = jax.random.split(tracker.key, 4)
    particles = moved(tracker.particles.value, noise(moving, tracker.particles.value))
    scores = -2 * jnp.log1p((particles[..., 0] + tracker.bias.value - seen[:, None]) ** 2)
    best, score = best_of(scores, particles)
    log_weights, evidence = normalized(tracker.log_weights.value + scores)
    weights = jnp.exp(log_weights)
    mean, covariance, effective = moments(particles, weights)
    few = effective < ENOUGH * PARTICLES
    # mistake: few-for-a-shard (count of a shard)
    #     few = effective < ENOUGH * weights.shape[1]
    ancestors = ancestors_of(starting, weights)
    everyone = lax.all_gather(particles, "particles", axis=1, tiled=True)
    # mistake: ancestors-from-own-shard (all_gather forgotten)
    #     everyone = jnp.tile(particles, (1, lax.axis_size("particles"), 1))
    # mistake: everyone-interleaved (wrong order of parts)
    #     everyone = lax.all_gather(particles, "particles", axis=2).reshape(len(seen), -1, WIDTH)
    taken = jnp.take_along_axis(everyone, ancestors[..., None], 1)
    fresh = roughened(taken, noise(shaking, taken))
    bias = lax.pmean((seen - mean[:, 0]).mean(), "objects")
    # mistake: bias-of-own-objects (statistics of a shard)
    #     bias = (seen - mean[:, 0]).mean()
    better = score > tracker.best_score.value
    tracker = tracker.replace(
        particles=jnp.where(few[:, None, None], fresh, particles),
        log_weights=jnp.where(few[:, None], -jnp.log(PARTICLES), log_weights),
        evidence=tracker.evidence.value + evidence,
        # mistake: evidence-of-every-shard (doubled psum)
        #     evidence=tracker.evidence.value + lax.psum(evidence, "particles"),
        bias=0.9 * tracker.bias.value + 0.1 * bias,
        best=jnp.where(better[:, None], best, tracker.best.value),
        best_score=jnp.maximum(score, tracker.best_score.value),
        drawn=tracker.drawn.value + PARTICLES * lax.psum(few.sum(), "objects"),
        # mistake: drawn-for-own-objects (counts not reduced)
        #     drawn=tracker.drawn.value + PARTICLES * few.sum(),
        lost=tracker.lost.value + (jnp.abs(particles[..., 0]) > EDGE).sum(),
        key=key,
    )
    near = crowding(particles)
    return tracker, ancestors, {"mean": mean, "spread": covariance, "even": effective, "near": near}


def case(dtype: str) -> Case:
    return Case(
        step,
        (make_tracker(dtype), normal(dtype, OBJECTS, seed=3)),
        mesh={"particles": 4, "objects": 2},
        in_specs=(None, P("objects")),
        out_specs=(P(), P("objects", "particles"), P("objects")),
        # mistake: ancestors-of-the-first-shard (wrong spec)
        #     out_specs=(P(), P("objects"), P("objects")),
        check_vma=False,
        steps=3,
    )
