"""Which part of an array a shard has: slices, counted out by hand."""

import math
from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

import statemesh as sm

from . import _errors as errors


# Where a shard is: its place on every axis of the mesh, by name.
Place: TypeAlias = dict[Hashable, int]


class Part:
    """Which part of a whole array a shard has, by a spec.

    **Arguments:**

    - `shape`: that of the whole array, or of a part.
    """

    def __init__(
        self,
        name: str,
        path: str,
        shape: tuple[int, ...],
        spec: Any,
        sizes: Mapping[Hashable, int],
        of_whole: bool = True,
    ) -> None:
        self.per_shard = isinstance(spec, sm.PerShard)
        if self.per_shard:
            entries: list[Any] = [spec.axis_names]
        else:
            entries = list(spec or ())
        as_tuples = [_names(entry) for entry in entries]
        self.sizes = sizes
        self.names = {axis for entry in as_tuples for axis in entry}
        if unknown := self.names - {*sizes}:
            raise errors.loop_axes(name, path, spec, sorted(map(str, unknown)), sizes)
        if self.per_shard and not of_whole:
            shape = (1, *shape)
        if len(as_tuples) > len(shape):
            raise errors.loop_rank(name, path, spec, shape)
        self.entries = as_tuples + [()] * (len(shape) - len(as_tuples))
        self.counts = [math.prod(sizes[axis] for axis in entry) for entry in self.entries]
        if of_whole:
            for dim, (size, count) in enumerate(zip(shape, self.counts, strict=True)):
                if size % count or (self.per_shard and dim == 0 and size != count):
                    raise errors.loop_size(name, path, spec, dim, size, count)
            self.shape = shape
        else:
            self.shape = tuple(n * k for n, k in zip(shape, self.counts, strict=True))

    def at(self, place: Place) -> tuple[Any, ...]:
        """The index of a shard's part."""
        index: list[Any] = []
        for size, count, entry in zip(self.shape, self.counts, self.entries, strict=True):
            k = 0
            for axis in entry:
                k = k * self.sizes[axis] + place[axis]
            step = size // count
            index.append(slice(k * step, (k + 1) * step))
        if self.per_shard:
            index[0] = index[0].start
        return tuple(index)


def _names(entry: Any) -> tuple[Hashable, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def place_str(place: Mapping[Hashable, int]) -> str:
    """A place, for messages."""
    return ", ".join(f"{axis}={at}" for axis, at in place.items())
