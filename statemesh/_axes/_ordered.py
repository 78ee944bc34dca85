"""Sums whose order does not depend on the mesh, so that their bits do not either.

Rounding depends on the order in which numbers are added, and `jax.lax.psum` adds in another order on each
number of devices. Here the order is a binary tree over blocks of rows, neighbours first. Every shard holds as
many blocks as any other, in the order of the rows, and the numbers of blocks and of shards are powers of two.
So each shard's sum is a branch of that tree, and all meshes add up branches alike.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .._base._types import AxisName
from .._jax import _compat as compat
from ._joined import AnyArray, alike, by_groups, end_to_end, in_buckets, taken_apart, together


# In numbers. Of fewer every shard gets those of all others, in one collective instead of two.
_FEW = 1024


def sum_of_entries(x: AnyArray) -> AnyArray:
    """The sum along the first axis, whose length is a power of two."""
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def sums_over_shards(arrays: Sequence[AnyArray], axis_names: Sequence[AxisName]) -> list[AnyArray]:
    """The sum of each array over mesh axes, the same on all shards. Small arrays of one dtype go together."""
    names = tuple(axis_names)
    buckets = [
        [at[k] for k in bucket]
        for at in alike(arrays)
        for bucket in in_buckets([arrays[k] for k in at])
    ]

    def of_bucket(bucket: Sequence[AnyArray]) -> list[AnyArray]:
        return taken_apart(_sum(end_to_end(bucket), names), [x.shape for x in bucket], at_once=1)

    return by_groups(of_bucket, arrays, buckets)


def _sum(flat: AnyArray, names: tuple[AxisName, ...]) -> AnyArray:
    """The sum of an array of one dimension over mesh axes."""
    count = math.prod(map(jax.lax.axis_size, names))
    if flat.size < _FEW or count == 1:
        return sum_of_entries(gathered(flat[None], names))
    # A shard sends as many bytes as in an all-reduce: each piece once to the shard that adds it up, and the
    # sum of its own piece to all.
    rows = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
    return gathered(sum_of_rows(rows, names), names)[: flat.size]


def sum_of_rows(rows: AnyArray, names: tuple[AxisName, ...]) -> AnyArray:
    """Of the sum over mesh axes the row of this shard's number."""
    return sum_of_entries(jax.lax.all_to_all(rows, names, 0, 0, tiled=True))


def gathered(x: AnyArray, names: tuple[AxisName, ...]) -> AnyArray:
    """The arrays of all shards, joined along the first axis. Types, where checked, say that all have it."""
    if compat.varying(x).issuperset(names):
        return jax.lax.all_gather(x, names, tiled=True, to="invarying")
    return jax.lax.all_gather(x, names, tiled=True)


# What is summed over blocks, and what is kept of each, given the block's number.
Block: TypeAlias = Callable[[AnyArray], tuple[list[AnyArray], list[AnyArray]]]
Join: TypeAlias = Callable[[list[AnyArray], list[AnyArray]], list[AnyArray]]


def in_turn(
    block: Block, join: Join, count: int, start: list[AnyArray], first: AnyArray = 0
) -> tuple[list[AnyArray], list[AnyArray]]:
    """What blocks give one after the other: the sums, and what is kept along a new first axis.

    A loop over both branches stands in each loop over both larger ones. So a block is compiled once, and one
    sum for each level of the tree is held.

    **Arguments:**

    - `join`: the sums of two branches from those of each.
    - `count`: how many blocks there are, a power of two.
    - `start`: sums that change none that are joined to them.
    - `first`: the number of the first block.
    """
    if count == 1:
        sums, kept = block(first)
        return sums, [x[None] for x in kept]
    half = count // 2

    def branch(before: list[AnyArray], number: AnyArray) -> tuple[list[AnyArray], list[AnyArray]]:
        sums, kept = in_turn(block, join, half, start, first + number * half)
        return join(before, sums), kept

    sums, kept = jax.lax.scan(branch, start, jnp.arange(2))
    return sums, [x.reshape(count, *x.shape[2:]) for x in kept]


class Sums(NamedTuple):
    """How gradients and losses are summed over shards or lanes.

    **Attributes:**

    - `over_shards`: of arrays the sum of each over mesh axes.
    - `of_rows`: of an array of rows this shard's row of the sum over mesh axes.
    - `along`: this shard's part of the sum over mesh axes, which is split along an axis of the array.
    - `of_entries`: the sum along the first axis.
    """

    over_shards: Callable[[Sequence[AnyArray], Sequence[AxisName]], list[AnyArray]]
    of_rows: Callable[[AnyArray, tuple[AxisName, ...]], AnyArray]
    along: Callable[[AnyArray, tuple[AxisName, ...], int], AnyArray]
    of_entries: Callable[[AnyArray], AnyArray]


def _sum_along(x: AnyArray, names: tuple[AxisName, ...], axis: int) -> AnyArray:
    count = math.prod(map(jax.lax.axis_size, names))
    front = jnp.moveaxis(x, axis, 0)
    part = sum_of_rows(front.reshape(count, -1), names)
    return jnp.moveaxis(part.reshape(-1, *front.shape[1:]), 0, axis)


IN_ORDER = Sums(sums_over_shards, sum_of_rows, _sum_along, sum_of_entries)
AT_ONCE = Sums(
    partial(together, jax.lax.psum),
    jax.lax.psum_scatter,
    lambda x, names, axis: jax.lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True),
    lambda x: jnp.sum(x, 0, dtype=x.dtype),
)
