"""Sequence parallel: causal ring attention with positions, the next token across the edges, a masked loss."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
WIDTH, WORDS = 4, 6


class Layer(sm.Module):
    table: sm.ParamState
    qkv: sm.ParamState
    out: sm.ParamState


def make_layer(dtype: str) -> Layer:
    return Layer(
        table=sm.ParamState(normal(dtype, WORDS, WIDTH, seed=1)),
        qkv=sm.ParamState(normal(dtype, 3, WIDTH, WIDTH, seed=2)),
        out=sm.ParamState(normal(dtype, WIDTH, WORDS, seed=3)),
    )


def positions(length: int) -> jax.Array:
    first = lax.axis_index("seq") * length
    # mistake: first-position-forgotten (axis_index forgotten)
    #     first = 0
    # mistake: first-position-off-by-one (off by one)
    #     first = lax.axis_index("seq") * (length - 1)
    return first + jnp.arange(length)


def with_positions(x: jax.Array) -> jax.Array:
    angle = positions(x.shape[1])[:, None] * jnp.array([1.0, 0.3, 0.1, 0.03])
    # mistake: angles-of-a-shard (row index not offset)
    #     angle = jnp.arange(x.shape[1])[:, None] * jnp.array([1.0, 0.3, 0.1, 0.03])
    return x + jnp.sin(angle).astype(x.dtype)


def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Exact causal attention: the keys and values go round once, the softmax is kept up on the way."""
    n, me, length = lax.axis_size("seq"), lax.axis_index("seq"), q.shape[1]
    onward = [(i, (i + 1) % n) for i in range(n)]
    # mistake: passed-over-the-neighbour (wrong ppermute neighbour)
    #     onward = [(i, (i + 2) % n) for i in range(n)]
    # mistake: passed-backward (wrong ppermute neighbour)
    #     onward = [(i, (i - 1) % n) for i in range(n)]
    high = jnp.full(q.shape[:2], -1e4, q.dtype)
    total, mixed = jnp.zeros(q.shape[:2], q.dtype), jnp.zeros_like(q)
    rounds = n
    # mistake: last-round-left-out (off by one)
    #     rounds = max(n - 1, 1)
    for passed in range(rounds):
        source = (me - passed) % n
        # mistake: source-not-followed (stale value)
        #     source = me
        scores = jnp.einsum("bte,bse->bts", q, k) * WIDTH**-0.5
        here, there = me * length + jnp.arange(length), source * length + jnp.arange(length)
        seen = here[:, None] >= there[None, :]
        # mistake: causal-in-each-part (mask forgotten)
        #     seen = (here[:, None] >= there[None, :]) | (source != me)
        scores = jnp.where(seen, scores, -1e4)
        higher = jnp.maximum(high, scores.max(-1))
        shrink = jnp.exp(high - higher)
        # mistake: total-not-rescaled (statistics of a shard)
        #     shrink = jnp.where(passed == 0, jnp.exp(high - higher), 1)
        weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
        total = total * shrink + weights.sum(-1)
        mixed = mixed * shrink[..., None] + jnp.einsum("bts,bse->bte", weights, v)
        high = higher
        # mistake: highest-of-the-last-round (stale value)
        #     high = scores.max(-1)
        k, v = (lax.ppermute(moved, "seq", onward) for moved in (k, v))
        # mistake: values-stay (ppermute forgotten)
        #     k = lax.ppermute(k, "seq", onward)
    return mixed / total[..., None]


def shifted(tokens: jax.Array) -> jax.Array:
    """The next token of each position, the last of a part from the next shard."""
    n = lax.axis_size("seq")
    edge = lax.ppermute(tokens[:, :1], "seq", [((i + 1) % n, i) for i in range(n)])
    # mistake: next-token-of-the-own-part (ppermute forgotten)
    #     edge = tokens[:, :1]
    # mistake: edge-from-the-other-side (wrong ppermute neighbour)
    #     edge = lax.ppermute(tokens[:, :1], "seq", [(i, (i + 1) % n) for i in range(n)])
    return jnp.concatenate([tokens[:, 1:], edge], 1)


def loss(layer: Layer, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = with_positions(layer.table.value[tokens])
    q, k, v = jnp.einsum("btd,pde->pbte", x, layer.qkv.value)
    logits = jax.nn.log_softmax((x + ring_attention(q, k, v)) @ layer.out.value)
    target = shifted(tokens)
    last = positions(tokens.shape[1]) == tokens.shape[1] * lax.axis_size("seq") - 1
    # mistake: last-of-each-part (mask of a shard)
    #     last = jnp.arange(tokens.shape[1]) == tokens.shape[1] - 1
    counted = (target > 0) & ~last
    each = jnp.where(counted, -jnp.take_along_axis(logits, target[..., None], -1)[..., 0], 0)
    total, count = lax.psum(each.sum(), "seq"), lax.psum(counted.sum(), "seq")
    # mistake: mean-over-all-places (count of a shard)
    #     total, count = lax.psum(each.sum(), "seq"), counted.sum() * lax.axis_size("seq")
    return total / count.astype(total.dtype), logits
    # mistake: mean-of-means (mean of means)
    #     return lax.pmean(each.sum() / counted.sum().astype(total.dtype), "seq"), logits


def case(dtype: str) -> Case:
    return Case(
        loss,
        (make_layer(dtype), integers(2, 16, below=WORDS)),
        mesh={"seq": 4},
        in_specs=(None, P(None, "seq")),
        # mistake: tokens-not-split (wrong spec)
        #     in_specs=(None, P()),
        out_specs=(P(), P(None, "seq")),
        check_vma=False,
        steps=1,
        gradients=True,
    )
