"""Fine-tuning by low-rank adapters of a frozen, split network; their optimizer is split over the rows."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
ROWS, REAL, FEATURES, HIDDEN, CLASSES, RANK = 24, 19, 6, 8, 4, 2
HISTORY, LEVELS, SMOOTHING, CLIP, RATE, DECAY, WARMUP = 4, 127, 0.1, 0.3, 0.1, 0.1, 4


class Adapters(NamedTuple):
    """What is trained: `b` is split over the hidden units, the others are not."""

    a: jax.Array
    b: jax.Array
    bias: jax.Array


class Tuned(sm.Module):
    up: sm.LongTermState
    down: sm.LongTermState
    a: sm.ParamState
    b: sm.ParamState
    bias: sm.ParamState
    slots: sm.State
    slots_of_b: sm.State
    teacher: sm.State
    highest: sm.State
    loss: sm.State
    seen: sm.State
    calls: sm.State
    updates: sm.State
    key: Any


def make_tuned(dtype: str) -> Tuned:
    a, b = normal(dtype, FEATURES, RANK, seed=3), normal(dtype, RANK, HIDDEN, seed=4)
    zeros, zeros_of_b = jnp.zeros(FEATURES * RANK + CLASSES), jnp.zeros((RANK, HIDDEN))
    columns = P(None, "model")
    return Tuned(
        up=sm.LongTermState(normal(dtype, FEATURES, HIDDEN, seed=1) / 2, spec=columns),
        down=sm.LongTermState(normal(dtype, HIDDEN, CLASSES, seed=2) / 2, spec=P("model")),
        a=sm.ParamState(a),
        b=sm.ParamState(b, spec=columns),
        bias=sm.ParamState(jnp.zeros(CLASSES, dtype)),
        slots=sm.State((zeros, zeros), spec=P("data")),
        slots_of_b=sm.State((zeros_of_b, zeros_of_b), spec=columns),
        teacher=sm.State((a.astype("float32"), b.astype("float32")), spec=(P(), columns)),
        highest=sm.State(jnp.full(HISTORY, 2.0)),
        # mistake: history-split-by-the-rows (wrong spec)
        #     highest=sm.State(jnp.full(HISTORY, 2.0), spec=P("data")),
        loss=sm.State(jnp.ones(())),
        seen=sm.State(0, reduce="sum"),
        # mistake: seen-by-the-busiest-shard (wrong policy)
        #     seen=sm.State(0, reduce="max"),
        calls=sm.State(0),
        updates=sm.State(0),
        key=jax.random.key(8),
    )


def left_out(tuned: Tuned, x: jax.Array) -> jax.Array:
    """Rows with some features left out: which ones depends on the call and the row's number only."""
    number = lax.axis_index("data") * len(x) + jnp.arange(len(x))
    # mistake: number-in-the-shard (row index not offset)
    #     number = jnp.arange(len(x))
    # mistake: numbers-overlap (off by one)
    #     number = lax.axis_index("data") * (len(x) - 1) + jnp.arange(len(x))
    key = jax.random.fold_in(tuned.key, tuned.calls.value)
    # mistake: key-of-the-units (key of a shard)
    #     key = jax.random.fold_in(tuned.key, tuned.calls.value + 100 * lax.axis_index("model"))
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(number)
    # mistake: keys-split-in-the-shard (shared key)
    #     keys = jax.random.split(key, len(x))
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.6, (FEATURES,)))(keys)
    return jnp.where(keep, x, 0)


def quantised(hidden: jax.Array, highest: jax.Array) -> jax.Array:
    """Rounded to so many levels up to the highest; the gradient passes as if it were not."""
    level = jnp.round(jnp.clip(hidden.astype("float32") / highest, -1, 1) * LEVELS)
    return hidden + lax.stop_gradient((level * highest / LEVELS).astype(hidden.dtype) - hidden)


def loss_of(params: Adapters, tuned: Tuned, x: jax.Array, labels: jax.Array) -> Any:
    """This shard's share: the gradient through a psum is that of the sum over all shards."""
    low = left_out(tuned, x) @ params.a
    # Where all features of a row are left out this has no gradient: that update is skipped.
    low = low / (jnp.sqrt((low**2).sum(1, keepdims=True)) + 0.1)
    hidden = jax.nn.gelu(x @ tuned.up.value + low @ params.b)
    part = quantised(hidden, tuned.highest.value.max()) @ tuned.down.value
    logits = lax.psum(part, "model") + params.bias
    # mistake: logits-of-own-units (dropped psum)
    #     logits = part + params.bias
    # mistake: bias-of-every-part (bias added before the psum)
    #     logits = lax.psum(part + params.bias, "model")
    target = (1 - SMOOTHING) * jax.nn.one_hot(labels, CLASSES) + SMOOTHING / CLASSES
    each = -(target * jax.nn.log_softmax(logits.astype("float32"))).sum(1)
    each = jnp.where(labels >= 0, each, 0)
    count = lax.psum((labels >= 0).sum(), "data")
    # mistake: count-of-own-rows (count of a shard)
    #     count = (labels >= 0).sum()
    # mistake: count-of-every-copy (doubled psum)
    #     count = lax.psum((labels >= 0).sum(), ("data", "model"))
    loss = each.sum() / count
    return loss / lax.axis_size("model"), (loss, each, hidden)
    # mistake: share-of-every-copy (gradient reduced twice)
    #     return loss, (loss, each, hidden)


def reduced(grads: Adapters) -> tuple[jax.Array, jax.Array]:
    """This shard's slice of what is not split, one after the other, and the gradient of its part of `b`."""
    whole = jnp.concatenate([grads.a.ravel(), grads.bias]).astype("float32")
    whole = lax.psum(whole, "model")
    # mistake: units-averaged (pmean for psum)
    #     whole = lax.pmean(whole, "model")
    own = lax.psum_scatter(whole, "data", tiled=True)
    # mistake: scattered-after-a-sum (gradient reduced twice)
    #     own = lax.psum_scatter(lax.psum(whole, "data"), "data", tiled=True)
    # mistake: averaged-though-a-share (normalized twice)
    #     own = lax.psum_scatter(whole, "data", tiled=True) / lax.axis_size("data")
    of_b = lax.psum(grads.b.astype("float32"), "data")
    # mistake: b-of-own-rows (gradient of a shard)
    #     of_b = grads.b.astype("float32")
    return own, of_b


def adam(p: jax.Array, g: jax.Array, slots: Any, t: jax.Array) -> Any:
    m, v = 0.9 * slots[0] + 0.1 * g, 0.99 * slots[1] + 0.01 * g**2
    direction = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.99**t)) + 0.01)
    rate = RATE * jnp.minimum(1, t / WARMUP)
    # mistake: warm-in-fewer-updates (count of the mesh)
    #     rate = RATE * jnp.minimum(1, t * lax.axis_size("data") / WARMUP)
    return p - rate * (direction + DECAY * p), (m, v)
    # mistake: decay-on-every-shard (small factor)
    #     return p - rate * (direction + DECAY / lax.axis_size("data") * p), (m, v)


def new_slice(whole: jax.Array, own: jax.Array, tuned: Tuned, t: jax.Array) -> Any:
    """All of what is not split after each shard has updated its slice, and this shard's slots."""
    first = lax.axis_index("data") * len(own)
    # mistake: slice-of-the-next-shard (slice of another shard)
    #     first = (lax.axis_index("data") + 1) % lax.axis_size("data") * len(own)
    # mistake: slice-by-the-units (wrong axis name)
    #     first = lax.axis_index("model") * len(own)
    old = lax.dynamic_slice_in_dim(whole, first, len(own))
    new, slots = adam(old, own, tuned.slots.value, t)
    return lax.all_gather(new, "data", tiled=True), slots
    # mistake: slices-interleaved (wrong order of parts)
    #     return lax.all_gather(new, "data", axis=1).ravel(), slots
    # mistake: other-slices-are-old (stale value)
    #     return lax.dynamic_update_slice_in_dim(whole, new, first, 0), slots


def step(tuned: Tuned, x: jax.Array, labels: jax.Array) -> Any:
    params = Adapters(tuned.a.value, tuned.b.value, tuned.bias.value)
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    (_, (share, each, hidden)), grads = gradient(params, tuned, x, labels)
    finite_here = jnp.stack([jnp.isfinite(g).all() for g in grads]).all()
    finite = lax.pmin(finite_here.astype("int32"), ("data", "model")) > 0
    # mistake: finite-on-this-shard (local finite check)
    #     finite = finite_here
    # mistake: finite-for-these-rows (wrong axis name)
    #     finite = lax.pmin(finite_here.astype("int32"), "model") > 0
    own, of_b = reduced(jax.tree.map(lambda g: jnp.where(finite, g, 0), grads))
    squares = lax.psum((own**2).sum(), "data") + lax.psum((of_b**2).sum(), "model")
    # mistake: norm-of-own-slice (norm of a shard)
    #     squares = (own**2).sum() + lax.psum((of_b**2).sum(), "model")
    # mistake: b-counted-with-every-slice (doubled psum)
    #     squares = lax.psum((own**2).sum() + lax.psum((of_b**2).sum(), "model"), "data")
    norm = jnp.sqrt(squares)
    factor = jnp.minimum(1, CLIP / (norm + 1e-3))
    t = tuned.updates.value + 1
    whole = jnp.concatenate([params.a.ravel(), params.bias]).astype("float32")
    whole, slots = new_slice(whole, factor * own, tuned, t)
    b, slots_of_b = adam(params.b.astype("float32"), factor * of_b, tuned.slots_of_b.value, t)
    a, bias = whole[: FEATURES * RANK].reshape(FEATURES, RANK), whole[FEATURES * RANK :]
    teacher = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, tuned.teacher.value, (a, b))
    loss = lax.psum(share, "data")
    # mistake: mean-of-means (mean of means)
    #     loss = lax.pmean(each.sum() / (labels >= 0).sum(), "data")
    largest = lax.pmax(jnp.abs(hidden).max(), ("data", "model"))
    # mistake: largest-of-own-units (missing axis)
    #     largest = lax.pmax(jnp.abs(hidden).max(), "data")
    # mistake: largest-on-average (pmean for pmax)
    #     largest = lax.pmean(jnp.abs(hidden).max(), ("data", "model"))
    activity = lax.pmean(hidden.astype("float32").mean(0), "data")
    # mistake: activity-of-own-rows (statistics of a shard)
    #     activity = hidden.astype("float32").mean(0)
    # mistake: activity-summed (psum for pmean)
    #     activity = lax.psum(hidden.astype("float32").mean(0), "data")
    trained = {"a": a.astype(x.dtype), "b": b.astype(x.dtype), "bias": bias.astype(x.dtype)}
    trained |= {"slots": slots, "slots_of_b": slots_of_b, "teacher": teacher, "updates": t}
    before = {name: getattr(tuned, name).value for name in trained}
    tuned = tuned.replace(
        **jax.tree.map(partial(jnp.where, finite), trained, before),
        highest=tuned.highest.value.at[tuned.calls.value % HISTORY].set(largest.astype("float32")),
        loss=0.9 * tuned.loss.value + 0.1 * loss,
        seen=tuned.seen.value + (labels >= 0).sum(),
        calls=tuned.calls.value + 1,
    )
    return tuned, each, activity, {"loss": loss, "norm": norm}


def case(dtype: str) -> Case:
    labels = jnp.where(jnp.arange(ROWS) < REAL, integers(ROWS, below=CLASSES, seed=6), -1)
    return Case(
        step,
        (make_tuned(dtype), normal(dtype, ROWS, FEATURES, seed=5), labels),
        mesh={"data": 4, "model": 2},
        in_specs=(None, P("data"), P("data")),
        # mistake: rows-over-the-units (wrong spec)
        #     in_specs=(None, P("model"), P("model")),
        out_specs=(P(), P("data"), P("model"), P()),
        check_vma=False,
        steps=3,
    )
