"""The part of a random stream that the shards of a mapped call share, and the key that leaves the call."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .._axes._mesh_and_lanes import (
    MICROBATCHES,
    all_varying,
    first_of,
    inside_microbatches,
    pmax,
    shard_index,
)
from .._base import errors
from .._base._types import Array, AxisName, Leaf, SeveralAxes
from . import _keys as keys


# Far from the small numbers from which `split` makes its keys.
_UNEVEN_DRAWS = 0x0DD0DD0D


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "was_set", "number"],
    meta_fields=["axis_names", "count"],
)
@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A random stream that is the same on all shards of one call. Each draw of a shard advances it too.

    **Arguments:**

    - `key`: the key of the first shard, as long as keys are only drawn.
    - `was_set`: whether the user set a key, so that only the first shard knows the key that follows. A NumPy
        `bool` while that is known; an array after a `cond` or a `scan`.
    - `axis_names`: the mapped axes of the call.
    - `number`, `count`: of a microbatch its number, and how many there are. Shards have an `axis_index`.
    """

    key: Leaf
    was_set: Leaf
    axis_names: tuple[AxisName, ...]
    number: Leaf = None
    count: int = 1

    def drawn(self) -> "Line":
        """This line after one draw."""
        return dataclasses.replace(self, key=keys.advance(keys.again(self.key))[0])

    def written(self) -> "Line":
        """This line after a key was set."""
        return dataclasses.replace(self, was_set=np.True_)


def known(was_set: Leaf, value: bool) -> bool:
    """Whether `was_set` is known while tracing, and is `value`."""
    return isinstance(was_set, np.bool_) and bool(was_set) is value


def synchronized(own: Array, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """The lines, with the first shard's key on all shards if a key was set."""
    if not any(known(line.was_set, True) for line in lines):
        return lines
    made = []
    for line in lines:
        if line.axis_names == (MICROBATCHES,):
            # No key was set inside: all microbatches began with this one, and drew alike.
            own = line.key
        else:
            own = keys.from_words(first_of(keys.words(own), line.axis_names), own)
        made.append(dataclasses.replace(line, key=own))
    return tuple(made)


def row_numbers(what: str, n: int, axis_name: SeveralAxes, lines: Sequence[Line]) -> Leaf:
    """The numbers in the global array of the `n` rows that a shard, or a microbatch of a shard, holds."""
    rows = shard_index(what, axis_name) * n + jnp.arange(n)
    line = next((line for line in lines if line.axis_names == (MICROBATCHES,)), None)
    if line is None:
        if inside_microbatches():
            raise errors.rows_of_stranger(what)
        return rows
    if known(line.was_set, True):
        raise errors.rows_of_set_key(what)
    # A microbatch holds every `count`-th row of the global array, from row `number` on.
    return rows * line.count + line.number


def left(
    own: Array,
    lines: Sequence[Line],
    entered: Array,
    old: Array,
    outer: Sequence[Line],
    axis_names: tuple[AxisName, ...],
) -> tuple[Array, tuple[Line, ...]]:
    """The key that leaves a call whose shards may have drawn different numbers of times, and the outer lines.

    It is the first shard's key. If that key might give a number twice, a key aside from the line leaves
    instead. All of this takes one reduction.

    **Arguments:**

    - `own`: the key with which this shard would go on.
    - `lines`: the lines of this call and of the calls around it, the innermost first.
    - `entered`: the key with which this shard began.
    - `old`: the key that came into the call, before the shard was folded into it.
    - `outer`: the lines of the calls around it, as they came in.
    - `axis_names`: the mapped axes that this call leaves.
    """
    rows = [keys.words(line.key) for line in lines]
    first = jnp.where(jax.lax.axis_index(axis_names) == 0, keys.words(own), 0)
    moved = jnp.ravel(~_equal(own, entered)).astype(jnp.uint32)
    # One maximum finds the largest and the smallest of each word, the first shard's key, and whether any
    # shard has drawn.
    parts = [*rows, *(~row for row in rows), first, moved]
    (joined,) = pmax([all_varying(jnp.concatenate(parts), axis_names)], axis_names)
    found = jnp.split(joined, np.cumsum([len(part) for part in parts])[:-1])
    count = len(rows)
    even = [jnp.all(a == ~b) for a, b in zip(found[:count], found[count : 2 * count], strict=True)]
    key, any_moved = keys.from_words(found[-2], own), found[-1][0] != 0
    # If the first shard has not drawn but another one has, that one would draw the same numbers again.
    fit = even[0] & ~(any_moved & _equal(key, old))
    around = []
    for line, row, same, before in zip(lines[1:], found[1:], even[1:], outer, strict=False):
        common = _unless(same, keys.from_words(row, line.key), before.key)
        was_set = line.was_set if known(line.was_set, False) else np.True_
        around.append(dataclasses.replace(line, key=common, was_set=was_set))
    return _unless(fit, key, old), tuple(around)


def _equal(a: Array, b: Array) -> Array:
    if a.dtype != b.dtype:
        return jnp.zeros((), bool)
    return jnp.all(keys.words(a) == keys.words(b))


def _unless(even: Array, key: Array, before: Array) -> Array:
    """`key` where `even`, else a key aside from the line of `before`."""
    other = keys.as_of(keys.folded(keys.again(before), _UNEVEN_DRAWS), key)
    return keys.again(jnp.where(even, keys.again(key), other))
