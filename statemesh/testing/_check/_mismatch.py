"""An array that differs from the reference, and where."""

import dataclasses
import math
from functools import cached_property

import numpy as np

from .. import _errors as errors
from .._types import Numbers
from ._chain import Rounding, distances
from ._leaves import Leaf


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """An array that differs from the reference.

    **Attributes:**

    - `number`: the number of the array in the result.
    - `leaf`: the array, where it lies on the mesh, or its type.
    - `got`: its numbers.
    - `want`: the numbers of the reference.
    - `allowed`: how far rounding may bring each number from the reference.
    - `rounding`: whose rounding that is.
    """

    number: int
    leaf: Leaf
    got: Numbers
    want: Numbers
    allowed: Numbers
    rounding: Rounding

    @property
    def same_shape(self) -> bool:
        return bool(self.got.shape == self.want.shape)

    @cached_property
    def deviation(self) -> Numbers:
        """The difference between each number and the reference; zero where rounding explains it."""
        found = distances(self.got, self.want)
        return np.where(found > self.allowed, found, 0.0)

    @cached_property
    def worst(self) -> tuple[int, ...]:
        """The index of the largest difference, the first of those that are as large but for rounding."""
        largest = self.deviation >= self.deviation.max() * (1 - 1e-6)
        return tuple(map(int, np.unravel_index(int(np.argmax(largest)), self.want.shape)))

    @cached_property
    def shards(self) -> list[str]:
        """The shards that hold the number with the largest difference."""
        at = self.worst
        has = [shard for shard, index in self.leaf.parts if _covers(index, at, self.want.shape)]
        return [errors.axes_str(shard) for shard in has]

    @cached_property
    def size(self) -> float:
        """The largest difference in parts of the largest number of the reference."""
        if not self.same_shape:
            return math.inf
        known = np.abs(self.want[np.isfinite(np.abs(self.want))])
        largest = float(known.max(initial=0.0))
        off = float(np.max(self.deviation, initial=0.0))
        return off / largest if largest else math.inf

    def off(self) -> Numbers:
        """Which numbers differ by more than rounding."""
        return self.deviation > 0

    @property
    def is_overflow(self) -> bool:
        """Whether a number is infinite or NaN that is finite in the reference."""
        return bool((~np.isfinite(self.got) & np.isfinite(self.want) & self.off()).any())

    @property
    def is_number_on_one_device(self) -> bool:
        """Whether a number is off that is one in the reference, where NaN may have come to others too."""
        return bool((np.isfinite(self.want) & self.off()).any())


def _covers(index: tuple[slice, ...], at: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(k in range(*s.indices(n)) for s, k, n in zip(index, at, shape, strict=False))
