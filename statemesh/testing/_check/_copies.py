"""Copies of one part of an array on several devices, which must be equal."""

import itertools
from collections import defaultdict
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from .. import _errors as errors
from .._program._numbers import MANY_RUNS, allowed, distances, equal, is_key, numbers
from .._program._stacked import names_of_spec
from .._types import Numbers
from ._judge import ResultLeaf, covers
from ._programs import Chain
from ._report import short


def unequal_copies(leaf: ResultLeaf, step: int, chains: tuple[Chain, Chain]) -> str | None:
    """A line on the number of which devices hold copies that differ most beyond rounding, if there is one.

    An array has copies where several devices hold the same part of it. Keys are compared by their data. The
    difference is infinite where some copies are NaN and others are not.
    """
    array = leaf.array
    if not isinstance(array, jax.Array):
        return None
    copies: dict[str, list[Any]] = defaultdict(list)
    shards = array.addressable_shards
    for shard in shards:
        copies[repr(shard.index)].append(shard)
    if len(copies) == len(shards):
        return None
    spread = np.zeros(array.shape)
    for same in copies.values():
        # The index of keys has an entry more, for their data.
        part = same[0].index[: array.ndim]
        spread[part] = _spread([numbers(shard.data) for shard in same], array.ndim)
    if not spread.any():
        return None
    limit = np.zeros(array.shape)
    if not is_key(array):  # A key has several numbers, of which none is rounded.
        want = chains[1].exact[step].numbers[leaf.number]
        moved = chains[0].moved("own", MANY_RUNS)[step][leaf.number]
        limit = np.broadcast_to(allowed("own", leaf.dtype, want, moved), array.shape)
    # Where nothing is allowed, a larger spread still exceeds that by more.
    smallest = 1e-12 * float(spread.max(initial=0.0, where=np.isfinite(spread)))
    with np.errstate(divide="ignore", invalid="ignore"):
        times = spread / np.maximum(limit, smallest)
    # An allowance that is NaN allows nothing.
    times = np.where(spread <= limit, 0.0, np.where(np.isnan(times), np.inf, times))
    if not times.any():
        return None
    at = tuple(map(int, np.unravel_index(int(np.argmax(times)), spread.shape)))
    holders = [shard for shard in shards if covers(shard.index, at, array.shape)]
    sides = zip(at, holders[0].index, array.shape, strict=False)
    inside = tuple(k - part.indices(side)[0] for k, part, side in sides)
    held = [(shard.device, numbers(shard.data)[inside]) for shard in holders]
    low, high = max(
        itertools.combinations(held, 2), key=lambda pair: _spread([pair[0][1], pair[1][1]])
    )
    left_out: list[str] = []
    if isinstance(array.sharding, NamedSharding):
        split = names_of_spec(array.sharding.spec)
        left_out = [repr(name) for name in array.sharding.mesh.axis_names if name not in split]
    spec = errors.spec_str(getattr(array.sharding, "spec", None) or ())
    index = f" at {list(at)}" if at else ""
    along = f" along {', '.join(left_out)}" if left_out else ""
    first, second = (
        f"{short(value.tolist())} on shard {_where_on_mesh(array.sharding, device)}"
        for device, value in (low, high)
    )
    rounding = f", {limit[at]:.1g} would be rounding" if limit[at] else ""
    return (
        f"  - {leaf.path}: {errors.array_str(array)} with spec {spec} has one value for all shards{along}, "
        f"but{index} it is {first} and {second} (off by {spread[at]:.4g}{rounding})."
    )


def _spread(copies: list[Numbers], ndim: int = 0) -> Numbers:
    """For each number of an array, or each key, the largest difference between two copies of it."""
    if all(equal(copies[0], other).all() for other in copies):
        return np.zeros(copies[0].shape[:ndim])
    largest = np.max([distances(*pair) for pair in itertools.combinations(copies, 2)], axis=0)
    return largest.max(axis=tuple(range(ndim, largest.ndim)))


def _where_on_mesh(sharding: Any, device: Any) -> str:
    if not isinstance(sharding, NamedSharding):
        return f"device {device.id}"
    (place,) = np.argwhere(sharding.mesh.devices == device)
    return errors.axes_str(dict(zip(sharding.mesh.axis_names, map(int, place), strict=True)))
