"""Tensor parallel: a block of attention and MLP split by heads and hidden units, and a split vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
WIDTH, HEADS, HIDDEN, WORDS = 8, 4, 16, 12


class Block(sm.Module):
    qkv: sm.ParamState
    out: sm.ParamState
    out_bias: sm.ParamState
    up: sm.ParamState
    up_bias: sm.ParamState
    down: sm.ParamState
    down_bias: sm.ParamState
    words: sm.ParamState


def make_block(dtype: str) -> Block:
    return Block(
        qkv=sm.ParamState(normal(dtype, 3, HEADS, WIDTH, 2, seed=1) / 3, spec=P(None, "model")),
        out=sm.ParamState(normal(dtype, HEADS, 2, WIDTH, seed=2) / 3, spec=P("model")),
        out_bias=sm.ParamState(normal(dtype, WIDTH, seed=3)),
        up=sm.ParamState(normal(dtype, WIDTH, HIDDEN, seed=4) / 3, spec=P(None, "model")),
        up_bias=sm.ParamState(normal(dtype, HIDDEN, seed=5), spec=P("model")),
        down=sm.ParamState(normal(dtype, HIDDEN, WIDTH, seed=6) / 4, spec=P("model")),
        down_bias=sm.ParamState(normal(dtype, WIDTH, seed=7)),
        words=sm.ParamState(normal(dtype, WIDTH, WORDS, seed=8), spec=P(None, "model")),
    )


def attention(block: Block, x: jax.Array) -> Any:
    q, k, v = jnp.einsum("btd,phde->pbhte", x, block.qkv.value)
    scores = jnp.einsum("bhte,bhse->bhts", q, k) * 2**-0.5
    mixed = jnp.einsum("bhts,bhse->bhte", jax.nn.softmax(scores), v)
    part = jnp.einsum("bhte,hed->btd", mixed, block.out.value)
    return lax.psum(part, "model") + block.out_bias.value
    # mistake: heads-not-summed (dropped psum)
    #     return part + block.out_bias.value
    # mistake: heads-averaged (pmean for psum)
    #     return lax.pmean(part, "model") + block.out_bias.value
    # mistake: heads-summed-over-rows (wrong axis name)
    #     return lax.psum(part, "data") + block.out_bias.value
    # mistake: out-bias-of-every-shard (bias added before the psum)
    #     return lax.psum(part + block.out_bias.value, "model")
    # mistake: gradient-of-own-heads (gradient not reduced)
    #     return lax.stop_gradient(lax.psum(part, "model") - part) + part + block.out_bias.value


def twice(part: jax.Array) -> jax.Array:
    """Nothing, with a gradient that is added where there are several shards."""
    return (lax.axis_size("model") - 1) * (part - lax.stop_gradient(part))


def mlp(block: Block, x: jax.Array) -> Any:
    hidden = jax.nn.gelu(x @ block.up.value + block.up_bias.value)
    part = hidden @ block.down.value
    # mistake: hidden-scaled-by-the-shards (small factor)
    #     part = hidden @ block.down.value * (1 + 1e-4 * (lax.axis_size("model") - 1))
    return lax.psum(part, "model") + block.down_bias.value
    # mistake: hidden-summed-over-all (wrong axis name)
    #     return lax.psum(part, ("data", "model")) + block.down_bias.value
    # mistake: down-bias-of-every-shard (bias added before the psum)
    #     return lax.psum(part + block.down_bias.value, "model")
    # mistake: gradient-summed-twice (gradient reduced twice)
    #     return lax.psum(part, "model") + twice(part) + block.down_bias.value


def negative_log_likelihood(logits: jax.Array, target: jax.Array) -> Any:
    """Of targets in a vocabulary of which each shard has a part."""
    high = lax.pmax(lax.stop_gradient(logits).max(-1, keepdims=True), "model")
    # mistake: largest-of-a-shard (statistics of a shard)
    #     high = lax.stop_gradient(logits).max(-1, keepdims=True)
    total = lax.psum(jnp.exp(logits - high).sum(-1), "model")
    # mistake: softmax-of-a-shard (dropped psum)
    #     total = jnp.exp(logits - high).sum(-1)
    own = target - lax.axis_index("model") * logits.shape[-1]
    # mistake: first-word-forgotten (axis_index forgotten)
    #     own = target
    # mistake: first-word-of-the-rows (wrong axis name)
    #     own = target - lax.axis_index("data") * logits.shape[-1]
    inside = (own >= 0) & (own < logits.shape[-1])
    # mistake: last-word-left-out (off by one)
    #     inside = (own >= 0) & (own < logits.shape[-1] - (lax.axis_size("model") > 1))
    picked = jnp.take_along_axis(
        logits - high, jnp.clip(own, 0, logits.shape[-1] - 1)[..., None], -1
    )
    chosen = lax.psum(jnp.where(inside, picked[..., 0], 0), "model")
    # mistake: mask-of-own-words-forgotten (mask forgotten)
    #     chosen = lax.psum(picked[..., 0], "model")
    return jnp.log(total) - chosen


def loss(block: Block, x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x + attention(block, x)
    x = x + mlp(block, x)
    # mistake: mlp-without-the-residual (wrong formula)
    #     unseen: the formula is wrong on one device too
    #     x = mlp(block, x)
    each = negative_log_likelihood(x @ block.words.value, target)
    return lax.pmean(each.mean(), "data"), each
    # mistake: losses-summed (psum for pmean)
    #     return lax.psum(each.mean(), "data"), each


def case(dtype: str) -> Case:
    return Case(
        loss,
        (make_block(dtype), normal(dtype, 4, 6, WIDTH), integers(4, 6, below=WORDS)),
        mesh={"data": 2, "model": 2},
        in_specs=(None, P("data"), P("data")),
        # mistake: rows-over-the-heads-axis (wrong spec)
        #     in_specs=(None, P("model"), P("model")),
        out_specs=(P(), P("data")),
        check_vma=False,
        steps=1,
        gradients=True,
    )
