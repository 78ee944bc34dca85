"""`nn.KVCache`: a ring of keys and values, compared with attention over all tokens in NumPy."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_says, compiles, counted, make_mesh


HEADS, DIM, CAPACITY, TOKENS = 2, 4, 8, 19

NUMBERS = np.random.default_rng(0)
Q, K, V = NUMBERS.normal(size=(3, TOKENS, HEADS, DIM)).astype(np.float32)


@eqx.filter_jit
def write(cache: Any, keys: Any, values: Any) -> Any:
    return cache(keys, values)


def cache(**options: Any) -> Any:
    return sm.nn.KVCache(CAPACITY, HEADS, DIM, **options)


def wanted(capacity: int = CAPACITY) -> Any:
    """For each token, its attention to the latest `capacity` tokens."""
    out = np.zeros((TOKENS, HEADS, DIM))
    for t in range(TOKENS):
        seen = slice(max(0, t + 1 - capacity), t + 1)
        scores = np.einsum("hd,thd->ht", Q[t], K[seen], dtype=np.float64)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        out[t] = np.einsum("ht,thd->hd", weights, V[seen])
    return out


WANTED = wanted()


def decode(cache: Any, q: Any, k: Any, v: Any) -> Any:
    """Attention of the next tokens; this shard may hold some of the heads."""
    (keys, values, mask), cache = cache(k, v)
    scores = jnp.where(mask[:, None], jnp.einsum("qhd,thd->qht", q, keys), -jnp.inf)
    return jnp.einsum("qht,thd->qhd", jax.nn.softmax(scores), values), cache


def decode_among_slots(cache: Any, q: Any, k: Any, v: Any) -> Any:
    """The same if each shard holds some of the slots: a softmax over all shards' slots."""
    (keys, values, mask), cache = cache(k, v)
    scores = jnp.where(mask[:, None], jnp.einsum("qhd,thd->qht", q, keys), -jnp.inf)
    weights = jnp.exp(scores - jax.lax.pmax(scores.max(-1, keepdims=True), "x"))
    both = jnp.einsum("qht,thd->qhd", weights, values), weights.sum(-1)
    out, whole = jax.lax.psum(both, "x")
    return out / whole[..., None], cache


def run(call: Any, cache: Any, sizes: list[int]) -> Any:
    """Decode all tokens, in groups of this many."""
    out, start = [], 0
    for n in sizes:
        part = slice(start, start + n)
        y, cache = jax.block_until_ready(call(cache, Q[part], K[part], V[part]))
        out.append(np.asarray(y))
        start += n
    assert start == TOKENS
    return np.concatenate(out), cache


def held(cache: Any) -> tuple[int, ...]:
    """The shape of the keys that one device holds."""
    shape: tuple[int, ...] = cache.slots.value["keys"].addressable_shards[0].data.shape
    return shape


# Several tokens at once, then one at a time, around the ring more than twice.
SIZES = [5, *[1] * (TOKENS - 5)]


@pytest.mark.slow
def test_decoding_attends_to_the_latest_tokens() -> None:
    out, after = run(eqx.filter_jit(decode), cache(), [5, 3, *[1] * (TOKENS - 8)])
    np.testing.assert_allclose(out, WANTED, atol=1e-5)
    assert after.position.value == TOKENS


@pytest.mark.parametrize("axis_name", ["x", None])
def test_slots_and_heads_may_be_split(axis_name: Any) -> None:
    """Slots over all shards and, on a mesh of two axes, heads too; or heads alone."""
    heads = P(None, "y")
    mesh = make_mesh("4x2", AxisType.Explicit)
    body = decode_among_slots if axis_name else decode
    call = sm.shard_map(body, mesh, (None, *[heads] * 3), (heads, P()))
    out, after = run(call, cache(spec=P(axis_name, "y"), axis_name=axis_name), SIZES)
    np.testing.assert_allclose(out, WANTED, atol=1e-5)
    assert held(after) == (CAPACITY // 4 if axis_name else CAPACITY, HEADS // 2, DIM)


@pytest.mark.slow
def test_sequences_of_their_own_lengths_in_lanes() -> None:
    """One sequence is three tokens ahead of the other."""
    made, _ = sm.vmap2_new_states(cache(), {}, axis_size=2)
    one = eqx.filter_jit(decode)
    _, ahead = one(cache(), Q[:3], K[:3], V[:3])
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), ahead, cache())
    over = {0: sm.ShortTermState}
    call = sm.vmap2(decode, in_axes=(None, 0, 0, 0), state_in_axes=over)
    assert repr(sm.states(made)) == repr(sm.states(stacked))
    for t in range(TOKENS - 3):
        rows = [np.stack([x[t + 3 : t + 4], x[t : t + 1]]) for x in (Q, K, V)]
        y, stacked = call(stacked, *rows)
        np.testing.assert_allclose(y[:, 0], WANTED[[t + 3, t]], atol=1e-5)
    np.testing.assert_array_equal(stacked.position.value, [TOKENS, TOKENS - 3])


@pytest.mark.slow
def test_slots_are_a_ring() -> None:
    here, start = cache(), 0
    for n in (8, 5, 5):
        (keys, values, mask), here = write(here, K[start : start + n], V[start : start + n])
        start += n
        for slot in range(CAPACITY):
            token = max(t for t in range(start) if t % CAPACITY == slot)
            np.testing.assert_array_equal(keys[slot], K[token])
            np.testing.assert_array_equal(values[slot], V[token])
            np.testing.assert_array_equal(mask[:, slot], token <= np.arange(start - n, start))
    _, _, mask = write(here.reset(), K[:1], V[:1])[0]
    np.testing.assert_array_equal(mask, [[True] + [False] * 7])
    same = zip(*map(jax.tree.leaves, (here.reset(), cache())), strict=True)
    assert all((a == b).all() for a, b in same)
    # What is written takes the dtype of the cache.
    (keys, values, _), after = write(cache(dtype=jnp.bfloat16), K[:2], V[:2])
    assert keys.dtype == values.dtype == after.slots.value["keys"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(keys[:2], K[:2].astype(jnp.bfloat16))


def test_it_is_traced_once_and_compiled_once_wherever_it_writes() -> None:
    fun, traces = counted(decode_among_slots)
    call = sm.shard_map(fun, make_mesh(), (None, *[P()] * 3), P())
    token = Q[:1], K[:1], V[:1]
    _, here = jax.block_until_ready(call(cache(spec=P("x"), axis_name="x"), *token))
    with compiles() as compiled:
        for _ in range(CAPACITY + 1):
            _, here = jax.block_until_ready(call(here, *token))
    call(here.reset(), *token)
    assert (traces.times, compiled.times) == (1, 0)


def on_mesh(spec: P, axis_name: Any) -> Any:
    fun = lambda cache, k: cache(k, k)[1]
    call = sm.shard_map(fun, make_mesh("4x2"), (None, P()), P())
    return lambda: call(cache(spec=spec, axis_name=axis_name), K[:1])


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: cache()(K[:2], V[:1]),
        "KVCache: values is float32[1,2,4], but must be 2 tokens: keys hold 2.",
    ),
    (
        lambda: cache()(K[:9], V[:9]),
        "KVCache: 9 tokens at once do not fit into a capacity of 8: some would overwrite others. Write "
        "them in several calls.",
    ),
    (
        on_mesh(P("x"), None),
        "KVCache: 2 slots in each of 1 shard (by axis_name) make 2, but the capacity is 8. Name the mesh "
        "axes that split the slots, and no others: KVCache(..., spec=P('data'), axis_name='data').",
    ),
]


@pytest.mark.parametrize(("call", "text"), MISTAKES)
def test_the_text_is_exactly(call: Callable[[], Any], text: str) -> None:
    assert_says(call, sm.StatemeshError, text)
