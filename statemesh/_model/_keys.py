"""Keys of every implementation: how one becomes several, the same on a mesh, in lanes and without either.

What `jax.random` promises of threefry keys it does not promise of others. Under `jax.vmap` it draws from the
first of several `rbg` keys, splits the first of several `unsafe_rbg` keys, and folds numbers into these in no
order; and it has no `philox` program for several devices. Keys of all these are taken for seeds of threefry,
which makes the new keys.
"""

import jax
import jax.numpy as jnp

from .._axes._mesh_and_lanes import refuse_in_lanes
from .._base import errors
from .._base._types import Array, ArrayLike


_THREEFRY = frozenset({"threefry2x32", "threefry4x32"})
# Of these, too, `jax.vmap` draws the numbers of each key that there is.
_KEY_BY_KEY = _THREEFRY | {"philox2x32", "philox4x32"}


def advance(key: Array) -> tuple[Array, Array]:
    """The key that is left after a draw, and the one drawn."""
    rest, drawn = jax.random.split(_seed(key))
    return _of(rest, key), _of(drawn, key)


def several(key: Array, num: int) -> Array:
    """A drawn key as `num` keys."""
    seeds = jax.random.split(_seed(key), num)
    return seeds if _is_threefry(key) else jax.vmap(lambda seed: _of(seed, key))(seeds)


def folded(key: Array, number: ArrayLike) -> Array:
    """A key of its own for each number."""
    return _of(jax.random.fold_in(_seed(key), number), key)


def for_rows(key: Array, rows: Array) -> Array:
    """A threefry key for each row's number: `jax.vmap` draws from each what that one alone would give."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(_seed(key), rows)


def drawable(key: Array, what: str) -> Array:
    """`key`, which the caller will draw from.

    **Raises:** `StatemeshError` in lanes that have a key each, where `jax.vmap` would draw from the first.
    """
    impl = jax.random.key_impl(key)
    if impl in _KEY_BY_KEY:
        return key
    single: Array = refuse_in_lanes(key, lambda: errors.drawn_in_lanes(what, impl))
    return single


def as_of(key: Array, like: Array) -> Array:
    """`key` as one of another's implementation."""
    return key if key.dtype == like.dtype else _of(_seed(key), like)


def words(key: Array) -> Array:
    """The numbers that a key is, as one row."""
    return jax.random.key_data(key).ravel()


def from_words(row: Array, like: Array) -> Array:
    """The key that is these numbers, of the implementation of another."""
    shape = jax.random.key_data(like).shape
    return jax.random.wrap_key_data(row.reshape(shape), impl=jax.random.key_impl(like))


def _is_threefry(key: Array) -> bool:
    return jax.random.key_impl(key) in _THREEFRY


def _seed(key: Array) -> Array:
    """A threefry key that stands for `key`: itself, or one that all of its words go into."""
    if _is_threefry(key):
        return key
    row = words(key)
    first = jnp.pad(row, (0, max(0, 2 - len(row))))[:2]
    seed = jax.random.wrap_key_data(first, impl="threefry2x32")
    for k in range(2, len(row)):
        seed = jax.random.fold_in(seed, row[k])
    return seed


def _of(seed: Array, key: Array) -> Array:
    """What a seed stands for among the keys of `key`'s implementation."""
    if _is_threefry(key):
        return seed
    return from_words(jax.random.bits(seed, (len(words(key)),), jnp.uint32), key)
