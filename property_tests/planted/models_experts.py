"""A decoder with a split vocabulary and split experts, dropout, load statistics and Adam."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
WIDTH, WORDS, EXPERTS, CAPACITY = 4, 8, 4, 1.5


class Decoder(sm.Module):
    table: sm.ParamState
    gate: sm.ParamState
    experts: sm.ParamState
    slots: sm.State
    slots_of_experts: sm.State
    load: sm.BatchState
    rng: sm.RandomState
    steps: sm.State


def make_decoder(dtype: str) -> Decoder:
    table, experts = (
        normal(dtype, WORDS, WIDTH, seed=1),
        normal(dtype, EXPERTS, WIDTH, WIDTH, seed=3),
    )
    gate = normal(dtype, WIDTH, EXPERTS, seed=2)
    zeros = jax.tree.map(jnp.zeros_like, gate)
    split = jax.tree.map(jnp.zeros_like, (table, experts))
    return Decoder(
        table=sm.ParamState(table, spec=P("model")),
        gate=sm.ParamState(gate),
        experts=sm.ParamState(experts, spec=P("model")),
        slots=sm.State((zeros, zeros)),
        slots_of_experts=sm.State((split, split), spec=P("model")),
        load=sm.BatchState(jnp.zeros(EXPERTS, dtype), reduce="mean"),
        rng=sm.RandomState(jax.random.key(0)),
        steps=sm.State(0),
    )


def embedded(table: jax.Array, tokens: jax.Array) -> Any:
    own = tokens - lax.axis_index("model") * len(table)
    # mistake: first-word-forgotten (axis_index forgotten)
    #     own = tokens
    inside = (own >= 0) & (own < len(table))
    # mistake: last-word-twice (off by one)
    #     inside = (own >= 0) & (own <= len(table))
    found = table[jnp.clip(own, 0, len(table) - 1)]
    found = jnp.where(inside[:, None], found, 0)
    # mistake: mask-of-own-words-forgotten (mask forgotten)
    #     found = found * 1
    return lax.psum(found, "model")
    # mistake: embedding-averaged (pmean for psum)
    #     return lax.pmean(found, "model")


def dropped(rng: sm.RandomState, x: jax.Array) -> tuple[jax.Array, sm.RandomState]:
    keys, rng = rng.rows(len(x), "data")
    # mistake: dropout-alike (shared key)
    #     keys, rng = rng.rows(len(x))
    # mistake: dropout-of-each-expert-shard (wrong axis name)
    #     keys, rng = rng.rows(len(x), "model")
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
    return jnp.where(keep, x / 0.8, 0), rng


def routed(probs: jax.Array) -> jax.Array:
    """One expert for each token, while it has room, with its probability as weight."""
    chosen = jax.nn.one_hot(probs.argmax(-1), EXPERTS, dtype=jnp.int32)
    counts = lax.all_gather(chosen.sum(0), "data")
    earlier = jnp.arange(len(counts)) < lax.axis_index("data")
    before = jnp.where(earlier[:, None], counts, 0).sum(0)
    # mistake: places-of-a-shard (row index not offset)
    #     before = 0
    place = jnp.cumsum(chosen, 0) - chosen + before
    room = int(CAPACITY * len(probs) * lax.axis_size("data") / EXPERTS)
    # mistake: room-of-a-shard (capacity of a shard)
    #     room = int(CAPACITY * len(probs) / EXPERTS)
    return jnp.where((chosen > 0) & (place < room), probs, 0)


def mixed(experts: jax.Array, weights: jax.Array, x: jax.Array) -> Any:
    first = lax.axis_index("model") * len(experts)
    # mistake: first-expert-forgotten (axis_index forgotten)
    #     first = 0
    # mistake: first-expert-of-the-rows (wrong axis name)
    #     first = lax.axis_index("data") * len(experts)
    own = lax.dynamic_slice_in_dim(weights, first, len(experts), 1)
    out = jnp.einsum("te,td,edf->tf", own, x, experts)
    return lax.psum(out, "model")
    # mistake: experts-averaged (pmean for psum)
    #     return lax.pmean(out, "model")


def loss_fn(model: Decoder, tokens: jax.Array, target: jax.Array) -> tuple[jax.Array, Decoder]:
    x = embedded(model.table.value, tokens)
    probs = jax.nn.softmax(x @ model.gate.value)
    x, rng = dropped(model.rng, x)
    weights = routed(probs)
    x = x + mixed(model.experts.value, weights, x)
    logits = lax.all_gather(x @ model.table.value.T, "model", axis=1, tiled=True)
    logits = lax.pmean(logits, "model")
    each = -jax.nn.log_softmax(logits)[jnp.arange(len(x)), target]
    # mistake: no-next-token (wrong formula)
    #     unseen: one device is asked for the same token too
    #     each = -jax.nn.log_softmax(logits)[jnp.arange(len(x)), tokens]
    used = (weights > 0).astype(x.dtype).mean(0)
    balance = (lax.pmean(used, "data") * lax.pmean(probs.mean(0), "data")).sum()
    # mistake: balance-of-a-shard (mean of products)
    #     balance = lax.pmean((used * probs.mean(0)).sum(), "data")
    load = 0.9 * model.load.value + 0.1 * used
    # mistake: load-summed (psum for pmean)
    #     load = 0.9 * model.load.value + 0.1 * lax.psum(used, "data")
    return each.mean() + balance, model.replace(rng=rng, load=load)


def clipped(split: list[jax.Array], whole: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """All gradients, no longer than one together."""
    squares = lax.psum(sum((g**2).sum() for g in split), "model") + (whole**2).sum()
    # mistake: norm-of-a-shard (local norm in clipping)
    #     squares = lax.pmax(sum((g**2).sum() for g in split), "model") + (whole**2).sum()
    # mistake: gate-counted-on-every-shard (doubled psum)
    #     squares = lax.psum(sum((g**2).sum() for g in split) + (whole**2).sum(), "model")
    factor = jnp.minimum(1, 0.3 * lax.rsqrt(squares))
    return [g * factor for g in split], whole * factor


def adam(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array, t: jax.Array) -> list[jax.Array]:
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    tiny = 1e-3
    # mistake: epsilon-grows-with-shards (small factor)
    #     tiny = 1e-3 * lax.axis_size("data") ** 2
    direction = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.99**t)) + tiny)
    return [(p - 0.05 * direction).astype(p.dtype), m.astype(p.dtype), v.astype(p.dtype)]


def step(model: Decoder, tokens: jax.Array, target: jax.Array) -> tuple[jax.Array, Decoder]:
    gradient = sm.value_and_grad(loss_fn, axis_name="data")
    # mistake: gradients-summed (psum for pmean)
    #     gradient = sm.value_and_grad(loss_fn, axis_name="data", reduce="sum")
    (loss, model), grads = gradient(model, tokens, target)
    split, gate = clipped([grads.table.value, grads.experts.value], grads.gate.value)
    t = model.steps.value + 1
    # mistake: steps-counted-on-every-shard (count of the mesh)
    #     t = model.steps.value + lax.axis_size("data")
    (m1, m2), (v1, v2) = model.slots_of_experts.value
    table, m1, v1 = adam(model.table.value, split[0], m1, v1, t)
    experts, m2, v2 = adam(model.experts.value, split[1], m2, v2, t)
    m3, v3 = model.slots.value
    gate, m3, v3 = adam(model.gate.value, gate, m3, v3, t)
    model = model.replace(table=table, experts=experts, gate=gate, steps=t, slots=(m3, v3))
    return loss, model.replace(slots_of_experts=((m1, m2), (v1, v2)))
    # mistake: second-slot-is-the-old (state not returned)
    #     unseen: one device returns the old one too
    #     return loss, model.replace(slots_of_experts=((m1, m2), model.slots_of_experts.value[1]))


def case(dtype: str) -> Case:
    return Case(
        step,
        (make_decoder(dtype), integers(16, below=WORDS), integers(16, below=WORDS, seed=1)),
        mesh={"data": 2, "model": 2},
        in_specs=(None, P("data"), P("data")),
        out_specs=P(),
    )
