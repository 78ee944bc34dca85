"""What the shards of a mapped call have in common of a random stream, and what of it leaves."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .._axes._mesh_and_lanes import all_varying, first_of, pmax
from .._base._types import Array, AxisName, Leaf
from . import _keys as keys


# Far from the small numbers that give the keys of a `split`.
_UNEVEN_DRAWS = 0x0DD0DD0D


@partial(
    jax.tree_util.register_dataclass, data_fields=["key", "was_set"], meta_fields=["axis_names"]
)
@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A stream that all shards of one call advance in step with their own.

    **Arguments:**

    - `key`: the first shard's own, as long as keys are only drawn.
    - `was_set`: whether a key was set, so that only the first shard has the one that comes of it. NumPy's
        own `bool` while that is known; an array after a `cond` or a `scan`.
    - `axis_names`: the axes that the shards are along.
    """

    key: Leaf
    was_set: Leaf
    axis_names: tuple[AxisName, ...]

    def drawn(self) -> "Line":
        """After one draw."""
        return dataclasses.replace(self, key=keys.advance(self.key)[0])

    def written(self) -> "Line":
        """After a key was set."""
        return dataclasses.replace(self, was_set=np.True_)


def known(was_set: Leaf, value: bool) -> bool:
    """Whether it is sure to be `value`."""
    return isinstance(was_set, np.bool_) and bool(was_set) is value


def synchronized(own: Array, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """The lines with the first shard's key, for all shards, where a key was set."""
    if not any(known(line.was_set, True) for line in lines):
        return lines
    made = []
    for line in lines:
        own = keys.from_words(first_of(keys.words(own), line.axis_names), own)
        made.append(dataclasses.replace(line, key=own))
    return tuple(made)


def left(
    own: Array,
    lines: Sequence[Line],
    entered: Array,
    old: Array,
    outer: Sequence[Line],
    axis_names: tuple[AxisName, ...],
) -> tuple[Array, tuple[Line, ...]]:
    """What leaves shards that may not have drawn alike: the first shard's key, and the lines around.

    Where that might give a number twice it is a key off the line. It takes one reduction.

    **Arguments:**

    - `own`: the key that this shard goes on with.
    - `lines`: those of this call and of the calls around, the innermost first.
    - `entered`: the key that this shard began with.
    - `old`: the key that came in, before it was each shard's own.
    - `outer`: the lines of the calls around as they came in.
    - `axis_names`: the axes that are left.
    """
    rows = [keys.words(line.key) for line in lines]
    first = jnp.where(jax.lax.axis_index(axis_names) == 0, keys.words(own), 0)
    moved = jnp.ravel(~_equal(own, entered)).astype(jnp.uint32)
    # The largest of each word and the smallest, what the first shard has, and whether any has moved.
    parts = [*rows, *(~row for row in rows), first, moved]
    joined = pmax(all_varying(jnp.concatenate(parts), axis_names), axis_names)
    found = jnp.split(joined, np.cumsum([len(part) for part in parts])[:-1])
    count = len(rows)
    even = [jnp.all(a == ~b) for a, b in zip(found[:count], found[count : 2 * count], strict=True)]
    key, any_moved = keys.from_words(found[-2], own), found[-1][0] != 0
    # If the first shard stays where it was, others would draw again what they drew in this call.
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
    """`key` where all is well, else a key off the line of `before`."""
    return jnp.where(even, key, keys.as_of(keys.folded(before, _UNEVEN_DRAWS), key))
