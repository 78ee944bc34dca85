"""Decoding, one token a call: a cache split over positions, a recurrent state split over features."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
WIDTH, LENGTH, ROWS = 4, 8, 3


class Cache(sm.Module):
    keys: sm.HiddenState
    values: sm.HiddenState
    hidden: sm.HiddenState
    position: sm.State
    rng: sm.RandomState


class Weights(sm.Module):
    qkv: sm.ParamState
    recur: sm.ParamState
    enter: sm.ParamState


def make_cache(dtype: str) -> Cache:
    zeros = jnp.zeros((ROWS, LENGTH, WIDTH), dtype)
    return Cache(
        keys=sm.HiddenState(zeros, spec=P(None, "seq")),
        values=sm.HiddenState(zeros, spec=P(None, "seq")),
        hidden=sm.HiddenState(normal(dtype, ROWS, 2 * WIDTH, seed=4) / 2, spec=P(None, "seq")),
        position=sm.State(2),
        rng=sm.RandomState(jax.random.key(0)),
    )


def make_weights(dtype: str) -> Weights:
    return Weights(
        qkv=sm.ParamState(normal(dtype, 3, WIDTH, WIDTH, seed=1)),
        recur=sm.ParamState(normal(dtype, 2 * WIDTH, 2 * WIDTH, seed=2) / 2, spec=P(None, "seq")),
        enter=sm.ParamState(normal(dtype, WIDTH, 2 * WIDTH, seed=3), spec=P(None, "seq")),
    )


def written(cached: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    """With the new entry, on the shard that has its position."""
    length, here = cached.shape[1], lax.axis_index("seq")
    slot, mine = position % length, position // length == here
    # mistake: written-on-every-shard (mask forgotten)
    #     slot, mine = position % length, True
    # mistake: slot-before-the-last (off by one)
    #     slot, mine = (position + (length < 8)) % length, position // length == here
    # mistake: owner-by-turns (wrong owner)
    #     slot, mine = position % length, position % lax.axis_size("seq") == here
    # mistake: slot-of-the-whole (row index not offset)
    #     slot, mine = jnp.minimum(position, length - 1), position // length == here
    return jnp.where(mine, cached.at[:, slot].set(new), cached)


def attended(q: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array) -> Any:
    """Over the positions so far, of all shards."""
    length = keys.shape[1]
    at = lax.axis_index("seq") * length + jnp.arange(length)
    # mistake: positions-of-a-shard (row index not offset)
    #     at = jnp.arange(length)
    scores = jnp.where(at <= position, jnp.einsum("be,bse->bs", q, keys) / 2, -1e4)
    # mistake: all-slots-seen (mask forgotten)
    #     unseen: one device sees the empty slots too
    #     scores = jnp.einsum("be,bse->bs", q, keys) / 2
    high = lax.pmax(scores.max(1), "seq")
    # mistake: highest-of-a-shard (statistics of a shard)
    #     high = scores.max(1)
    weights = jnp.exp(scores - high[:, None])
    total = lax.psum(weights.sum(1), "seq")
    # mistake: softmax-of-a-shard (dropped psum)
    #     total = weights.sum(1)
    mixed = lax.psum(jnp.einsum("bs,bse->be", weights, values), "seq")
    # mistake: mixed-of-a-shard (dropped psum)
    #     mixed = jnp.einsum("bs,bse->be", weights, values)
    return mixed / total[:, None]


def recurrent(weights: Weights, hidden: jax.Array, x: jax.Array) -> jax.Array:
    """This shard's features, from the features of all."""
    whole = lax.all_gather(hidden, "seq", axis=1, tiled=True)
    # mistake: features-of-the-neighbour-first (wrong order of parts)
    #     whole = jnp.roll(lax.all_gather(hidden, "seq", axis=1, tiled=True), hidden.shape[1], 1)
    # mistake: features-repeated (all_gather forgotten)
    #     whole = jnp.tile(hidden, (1, lax.axis_size("seq")))
    gate = jax.nn.sigmoid(lax.psum(hidden.sum(1), "seq"))[:, None]
    # mistake: gate-of-a-shard (dropped psum)
    #     gate = jax.nn.sigmoid(hidden.sum(1))[:, None]
    new = jnp.tanh(whole @ weights.recur.value + x @ weights.enter.value)
    return gate * hidden + (1 - gate) * new


def decode(cache: Cache, weights: Weights, x: jax.Array) -> tuple[Cache, jax.Array]:
    position = cache.position.value
    q, k, v = jnp.einsum("bd,pde->pbe", x, weights.qkv.value)
    keys = written(cache.keys.value, k, position)
    values = written(cache.values.value, v, position)
    out = attended(q, keys, values, position)
    # mistake: attends-to-the-old-values (stale value)
    #     unseen: one device attends to the old ones too
    #     out = attended(q, keys, cache.values.value, position)
    key, rng = cache.rng.split()
    noise = jax.vmap(lambda row: jax.random.normal(jax.random.fold_in(key, row)))(
        jnp.arange(len(x))
    )
    # The first shard draws for all of them.
    noise = lax.psum(jnp.where(lax.axis_index("seq") == 0, noise, 0), "seq")
    # mistake: noise-of-every-shard (key of a shard)
    #     noise = noise + 0
    hidden = recurrent(weights, cache.hidden.value, x)
    pooled = lax.psum(hidden.sum(1), "seq") / (2 * WIDTH)
    # mistake: pooled-of-means (psum for pmean)
    #     pooled = lax.psum(hidden.mean(1), "seq")
    cache = cache.replace(keys=keys, values=values, hidden=hidden)
    # mistake: keys-not-returned (state not returned)
    #     unseen: one device forgets the new keys too
    #     cache = cache.replace(values=values, hidden=hidden)
    cache = cache.replace(rng=rng, position=position + 1)
    # mistake: position-by-the-shards (count of the mesh)
    #     cache = cache.replace(rng=rng, position=position + lax.axis_size("seq"))
    return cache, out + (pooled + noise)[:, None].astype(out.dtype)


def case(dtype: str) -> Case:
    return Case(
        decode,
        (make_cache(dtype), make_weights(dtype), normal(dtype, ROWS, WIDTH)),
        mesh={"seq": 4},
        in_specs=(None, None, P()),
        out_specs=P(),
        check_vma=False,
        steps=3,
    )
