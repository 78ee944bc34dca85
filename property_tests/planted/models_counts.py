"""Whole numbers only: what a pipeline of tokens counts, numbers and packs, rows split over devices."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers


DTYPES = ("int32",)
WORDS, CAPACITY = 8, 20


class Book(sm.Module):
    words: sm.State
    rows: sm.State
    longest: sm.State
    shortest: sm.State
    first_free: sm.State


def make_book() -> Book:
    return Book(
        words=sm.State(jnp.zeros(WORDS, jnp.int32), reduce="sum"),
        rows=sm.State(0),
        longest=sm.State(0, reduce="max"),
        shortest=sm.State(1000, reduce="min"),
        first_free=sm.State(0),
    )


def before_this_shard(count: jax.Array) -> jax.Array:
    """The sum of the counts of all shards in front of this one."""
    counts = lax.all_gather(count, "data")
    here = lax.axis_index("data")
    # mistake: shard-index-forgotten (axis_index forgotten)
    #     here = 0
    return jnp.where(jnp.arange(len(counts)) < here, counts, 0).sum()
    # mistake: own-count-included (off by one)
    #     return jnp.where((jnp.arange(len(counts)) <= here) & (len(counts) > 1), counts, 0).sum()


def numbered(tokens: jax.Array) -> jax.Array:
    """A number for each row, counted over all shards, made unlike its neighbours'."""
    index = lax.axis_index("data") * len(tokens) + jnp.arange(len(tokens))
    # mistake: row-not-offset (row index not offset)
    #     index = jnp.arange(len(tokens))
    # mistake: row-offset-by-the-shards (row index not offset)
    #     index = lax.axis_index("data") * lax.axis_size("data") + jnp.arange(len(tokens))
    # mistake: row-offset-of-old (stale constant)
    #     index = lax.axis_index("data") * 8 + jnp.arange(len(tokens))
    return (index * 7919 + 13) % 104729


def packed(lengths: jax.Array) -> jax.Array:
    """Where each row starts when all rows lie in one long line; -1 where the line is full."""
    ends = jnp.cumsum(lengths)
    starts = ends - lengths + before_this_shard(lengths.sum())
    # mistake: starts-of-a-shard (row index not offset)
    #     starts = ends - lengths
    room = CAPACITY * lax.axis_size("data") * len(lengths) // 4
    # mistake: capacity-of-a-shard (capacity of a shard)
    #     room = CAPACITY * len(lengths) // 4
    return jnp.where(starts + lengths <= room, starts, -1)


def fullest(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The word that occurs most, the first of them where several do, and how often."""
    total = lax.psum(words, "data")
    # mistake: words-of-a-shard (dropped psum)
    #     total = words
    # mistake: words-averaged (pmean for psum)
    #     total = lax.psum(words, "data") // lax.axis_size("data")
    return jnp.argmax(total), total.max()


def step(book: Book, tokens: jax.Array) -> tuple[Book, dict[str, jax.Array]]:
    used = tokens > 0
    lengths = used.sum(1)
    words = jnp.bincount(tokens.ravel(), length=WORDS)
    word, often = fullest(words)
    rows = len(tokens) * lax.axis_size("data")
    # mistake: rows-of-a-shard (count of a shard)
    #     rows = len(tokens)
    mean_length = 1000 * lax.psum(lengths.sum(), "data") // rows
    # mistake: mean-rounded-on-each-shard (mean of means)
    #     mean_length = lax.psum(1000 * lengths.sum() // rows, "data")
    longest = lax.pmax(lengths.max(), "data")
    # mistake: longest-of-a-shard (dropped pmax)
    #     longest = lengths.max()
    starts = packed(lengths)
    out = {
        "numbers": numbered(tokens),
        "starts": starts,
        "padding": longest - lengths,
        "above_mean": 1000 * lengths - mean_length,
        "has_fullest": (tokens == word).sum(1) * often,
        "parity": lax.psum(lengths.sum(), "data") % 2 + jnp.zeros_like(lengths),
        # mistake: parities-summed (psum in the wrong place)
        #     "parity": lax.psum(lengths.sum() % 2, "data") + jnp.zeros_like(lengths),
    }
    book = book.replace(
        words=book.words.value + words,
        # mistake: words-counted-twice (doubled psum)
        #     words=book.words.value + lax.psum(lax.psum(words, "data"), "data"),
        rows=book.rows.value + rows,
        longest=jnp.maximum(book.longest.value, lengths.max()),
        shortest=jnp.minimum(book.shortest.value, lengths.min()),
        # mistake: shortest-is-the-longest (wrong reduction)
        #     shortest=jnp.minimum(book.shortest.value, lax.pmax(lengths.min(), "data")),
        first_free=lax.pmax((starts + lengths).max(), "data"),
        # mistake: free-of-the-sum (psum for pmax)
        #     first_free=lax.psum((starts + lengths).max(), "data"),
    )
    return book, out


def case(dtype: str) -> Case:
    tokens = integers(24, 6, below=WORDS, dtype=dtype) * integers(
        24, 6, below=2, seed=1, dtype=dtype
    )
    return Case(
        step,
        (make_book(), tokens),
        mesh={"data": 4},
        in_specs=(None, P("data")),
        # mistake: rows-not-split (wrong spec)
        #     in_specs=(None, P()),
        out_specs=(P(), P("data")),
    )
