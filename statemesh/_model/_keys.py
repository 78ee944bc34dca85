"""Keys of every implementation, split and folded alike on a mesh, in lanes and without either.

`jax.random` promises this of threefry keys only. Under `jax.vmap` it draws from the first of several `rbg`
keys, and splits the first of several `unsafe_rbg` keys. It has no `philox` program for several devices. So we
make a threefry key of every other key, let threefry make the new keys, and convert these back.
"""

import jax
import jax.numpy as jnp

from .._axes._mesh_and_lanes import refuse_in_lanes
from .._base import _compat as compat
from .._base import errors
from .._base._types import Array, ArrayLike


_THREEFRY = frozenset({"threefry2x32", "threefry4x32"})
# From these, too, `jax.vmap` draws for each key its own numbers.
_KEY_BY_KEY = _THREEFRY | {"philox2x32", "philox4x32"}


def again(key: Array) -> Array:
    """`key`, to make another key of than it was made into already.

    The numbers that we fold in keep these apart. JAX cannot know that: where it checks that no key is used
    twice, we tell it.
    """
    return jax.random.clone(key) if compat.key_reuse_checked() else key


def advance(key: Array) -> tuple[Array, Array]:
    """The key that remains after a draw, and the key that is drawn."""
    rest, drawn = jax.random.split(_seed(key))
    return _of(rest, key), _of(drawn, key)


def several(key: Array, num: int) -> Array:
    """`num` keys made of a drawn key."""
    seeds = jax.random.split(_seed(key), num)
    return seeds if _is_threefry(key) else jax.vmap(lambda seed: _of(seed, key))(seeds)


def folded(key: Array, number: ArrayLike) -> Array:
    """A key of its own for each number."""
    return _of(jax.random.fold_in(_seed(key), number), key)


def for_rows(key: Array, rows: Array) -> Array:
    """A threefry key for each row number. Under `jax.vmap` each gives the numbers it gives by itself."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(_seed(key), rows)


def drawable(key: Array, what: str) -> Array:
    """`key`, if the caller may draw from it.

    **Raises:** `StatemeshError` in lanes with a key each, if `jax.vmap` would draw from the first one only.
    """
    impl = jax.random.key_impl(key)
    if impl in _KEY_BY_KEY:
        return key
    single: Array = refuse_in_lanes(key, lambda: errors.drawn_in_lanes(what, impl))
    return single


def as_of(key: Array, like: Array) -> Array:
    """`key`, converted to the implementation of `like`."""
    return key if key.dtype == like.dtype else _of(_seed(key), like)


def words(key: Array) -> Array:
    """The numbers that a key consists of, as one row."""
    return jax.random.key_data(key).ravel()


def from_words(row: Array, like: Array) -> Array:
    """The key that consists of these numbers, of the implementation of `like`."""
    shape = jax.random.key_data(like).shape
    key: Array = jax.random.wrap_key_data(row.reshape(shape), impl=jax.random.key_impl(like))
    return key


def _is_threefry(key: Array) -> bool:
    return jax.random.key_impl(key) in _THREEFRY


def _seed(key: Array) -> Array:
    """A threefry key made of `key`: itself, or one into which all of its words are folded."""
    if _is_threefry(key):
        return key
    row = words(key)
    first = jnp.pad(row, (0, max(0, 2 - len(row))))[:2]
    seed: Array = jax.random.wrap_key_data(first, impl="threefry2x32")
    for k in range(2, len(row)):
        seed = jax.random.fold_in(seed, row[k])
    return seed


def _of(seed: Array, key: Array) -> Array:
    """The key of `key`'s implementation that is made of a threefry key."""
    if _is_threefry(key):
        return seed
    return from_words(jax.random.bits(seed, (len(words(key)),), jnp.uint32), key)
