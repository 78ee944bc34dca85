"""Which lines, put right, put the results right: found by running the program with other values there."""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from .._emulate._stacked import Scope
from .._types import Numbers
from ._comparison import Comparison, Pair
from ._relations import relation
from ._suspects import Group
from ._values import Points


# More would take too long to compile and to run.
_MOST_VALUES = 120
_MOST_GROUPS = 40


@dataclasses.dataclass(frozen=True)
class Mended:
    """What comes of other values at a line.

    **Attributes:**

    - `right`: how many of the results are right.
    - `all`: whether all are.
    """

    right: int
    all: bool


class Mender:
    """The program on a mesh, run with other values at some lines.

    **Arguments:**

    - `found`: the comparison.
    - `groups`: the lines, the likeliest first.
    """

    def __init__(self, found: Comparison, groups: Sequence[Group]) -> None:
        self._found = found
        self._scopes = {
            x: step.around for group in groups for step in group.steps for x in step.results
        }
        chosen: list[int] = []
        for group in groups[:_MOST_GROUPS]:
            values = [x for x in group.values if x in found.kept]
            if len(chosen) + len(values) <= _MOST_VALUES:
                chosen += values
        self.points = set(chosen)
        self._like = {x: (found.kept[x].got.shape, found.kept[x].got.dtype) for x in chosen}
        self._program = Points(found.evaluators[0], found.mesh, found.given[0], chosen)
        self._broken = [not result.right for result in found.results]

    def try_right(self, group: Group) -> Mended:
        """The results where a line makes what it makes on one device."""
        best = Mended(0, False)
        values = [x for x in group.values if x in self.points]
        if len(values) < len(group.values) or not values:
            return best
        choices = [list(right_values(self._found.kept[x], self._scopes[x])) for x in values]
        for k in range(max(map(len, choices))):
            if not all(choices):
                return best
            tried = {x: choice[min(k, len(choice) - 1)] for x, choice in zip(values, choices, strict=True)}
            now = self.run(tried)
            if now.right > best.right:
                best = now
            if best.all:
                break
        return best

    def run(self, replaced: Mapping[int, Numbers]) -> Mended:
        """The results with other values."""
        made = self._program.results(replaced, self._like)
        scope, found = self._found.scope, self._found
        right = [
            found.is_right(relation(value, result.want, scope, 0.0))
            for value, result in zip(made, found.results, strict=True)
        ]
        count = sum(now and broken for now, broken in zip(right, self._broken, strict=True))
        return Mended(count, all(right))


def right_values(pair: Pair, scope: Scope) -> Iterator[Numbers]:
    """What shards may have to have, given what one device has: the same, its parts, or parts of a sum."""
    if pair.want is None:
        return
    sizes = list(scope.sizes.values())
    local = pair.got.shape[len(sizes) :]
    ways = list(itertools.islice(_placements(pair.want.shape, local, sizes), 3))
    for factor in ("one", "part", "times") if pair.want.dtype.kind in "fc" else ("one",):
        for way in ways:
            rest = math.prod(size for size, at in zip(sizes, way, strict=True) if at is None)
            if factor != "one" and rest == 1 and way is not ways[0]:
                continue
            parts = _split(pair.want, way, sizes, local)
            total = math.prod(sizes) if rest == 1 else rest
            scale = {"one": 1.0, "part": 1 / total, "times": float(total)}[factor]
            yield parts if factor == "one" else parts * scale


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
        if all(n == m * part for n, m, part in zip(whole, local, parts, strict=True)):
            if not any(at is not None and size == 1 for at, size in zip(way, sizes, strict=True)):
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


def reduced(pair: Pair, scope: Scope) -> Iterator[tuple[str, Hashable, Numbers]]:
    """What a value would be if it were reduced over a mesh axis: the collective, the axis, the value."""
    for at, (name, size) in enumerate(scope.sizes.items()):
        if size == 1 or pair.got.dtype.kind not in "fc":
            continue
        for collective, reduce in (("psum", np.sum), ("pmean", np.mean), ("pmax", np.max)):
            whole = reduce(pair.got, axis=at, keepdims=True)
            if not np.array_equal(whole, pair.got.take([0], at)):
                yield collective, name, np.broadcast_to(whole, pair.got.shape)


