"""Which lines, put right, put the results right: found by running the program with other values there."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._types import Numbers
from ._comparison import Comparison
from ._suspects import Group
from ._values import Points, Read


# More would take too long to compile and to run.
_MOST_VALUES = 120
_MOST_GROUPS = 40

# The reductions that are tried to put the results right.
REDUCTIONS: Mapping[str, Callable[..., Any]] = {"psum": np.sum, "pmean": np.mean, "pmax": np.max}


@dataclasses.dataclass(frozen=True)
class Mended:
    """What comes of other values at a line.

    **Attributes:**

    - `right`: how many of the results are right.
    - `all`: whether all are.
    - `plain`: whether the other values were those of one device, and no multiples of them.
    """

    right: int = 0
    all: bool = False
    plain: bool = False


class Mender:
    """The program on a mesh, run with other values at some lines.

    **Arguments:**

    - `found`: the comparison.
    - `groups`: the lines, the likeliest first.
    """

    def __init__(self, found: Comparison, groups: Sequence[Group]) -> None:
        self._found = found
        chosen: list[int] = []
        for group in groups[:_MOST_GROUPS]:
            values = [x for x in group.values if x in found.kept]
            if len(chosen) + len(values) <= _MOST_VALUES:
                chosen += values
        self.points = set(chosen)
        self._program = Points(
            found.evaluators[0], found.mesh, found.given[0], found.scopes, chosen
        )
        self._broken = [not result.right for result in found.results]

    def try_right(self, group: Group) -> Mended:
        """The results where a line makes what it makes on one device."""
        best = Mended()
        values = [x for x in group.values if x in self.points]
        if len(values) < len(group.values) or not values:
            return best
        choices = [list(right_values(self._found, x)) for x in values]
        if not all(choices):
            return best
        for k in range(max(map(len, choices))):
            chosen = [choice[min(k, len(choice) - 1)] for choice in choices]
            tried = {x: right.numbers for x, right in zip(values, chosen, strict=True)}
            plain = all(right.factor == 1 for right in chosen)
            now = dataclasses.replace(self.run(tried), plain=plain)
            if now.right > best.right:
                best = now
            if best.all:
                break
        return best

    def run(self, replaced: Mapping[int, Numbers]) -> Mended:
        """The results with other values."""
        changes = {x: _constant(numbers) for x, numbers in replaced.items()}
        right = self._found.judged(self._program.results(changes))
        count = sum(now and broken for now, broken in zip(right, self._broken, strict=True))
        return Mended(count, all(right))


def _constant(numbers: Numbers) -> Callable[[Read], Numbers]:
    return lambda read: numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Right:
    """What shards may have to have: so many times their parts of what one device has."""

    numbers: Numbers
    factor: float


def right_values(found: Comparison, value: int) -> Iterator[Right]:
    """What shards may have to have, the likeliest first: what one device has, its parts, parts of a sum."""
    pair = found.kept[value]
    if pair.want is None:
        return
    scope = found.scopes[value]
    sizes = list(scope.sizes.values())
    ways = list(_placements(pair.want.shape, pair.got.shape[len(sizes) :], sizes))
    # Most values are split as others are.
    names = list(map(str, scope.sizes))
    ways.sort(
        key=lambda way: -sum(found.splits.get((n, d), 0) for n, d in zip(names, way, strict=True))
    )
    plain = [(_split(pair.want, way, sizes, pair.got.shape[len(sizes) :]), way) for way in ways[:3]]
    yield from (Right(numbers, 1.0) for numbers, _ in plain)
    if pair.want.dtype.kind not in "fc":
        return
    for numbers, way in plain[:1]:
        rest = math.prod(size for size, at in zip(sizes, way, strict=True) if at is None)
        count = rest if rest > 1 else math.prod(sizes)
        if count > 1:
            yield Right(numbers / count, 1 / count)
            yield Right(numbers * count, float(count))


def _placements(
    whole: tuple[int, ...], local: tuple[int, ...], sizes: Sequence[int]
) -> Iterator[tuple[int | None, ...]]:
    """For each mesh axis the array axis that it may split, or none."""
    if len(whole) != len(local):
        return
    for way in itertools.product([None, *range(len(whole))], repeat=len(sizes)):
        parts = [1] * len(whole)
        for at, size in zip(way, sizes, strict=True):
            if at is not None:
                parts[at] *= size
        fits = all(n == m * part for n, m, part in zip(whole, local, parts, strict=True))
        if fits and all(at is None or size > 1 for at, size in zip(way, sizes, strict=True)):
            yield way


def _split(
    x: Numbers, way: Sequence[int | None], sizes: Sequence[int], local: tuple[int, ...]
) -> Numbers:
    made = np.empty((*sizes, *local), x.dtype)
    for index in np.ndindex(*sizes):
        start = [0] * len(local)
        for at, size, i in zip(way, sizes, index, strict=True):
            if at is not None:
                start[at] = start[at] * size + i
        made[index] = x[tuple(slice(s * n, (s + 1) * n) for s, n in zip(start, local, strict=True))]
    return made


def is_equal(found: Comparison, value: int, name: Hashable) -> bool:
    """Whether all shards along a mesh axis have the same numbers."""
    got, sizes = found.kept[value].got, list(found.scopes[value].sizes)
    if name not in sizes or got.dtype.kind not in "fc":
        return False
    first = got.take([0], sizes.index(name))
    return bool(np.allclose(got, first, rtol=1e-10, atol=0, equal_nan=True))


def reduced(found: Comparison, value: int, collective: str, name: Hashable) -> Numbers | None:
    """What a value is when it is reduced over a mesh axis along which shards have different numbers."""
    got, sizes = found.kept[value].got, list(found.scopes[value].sizes)
    if name not in sizes or got.dtype.kind not in "fc" or is_equal(found, value, name):
        return None
    at = sizes.index(name)
    return np.broadcast_to(REDUCTIONS[collective](got, axis=at, keepdims=True), got.shape)
