"""Which lines, put right, put the results right: found by running the program with other values there."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._types import Numbers
from ._comparison import Comparison
from ._reruns import Change, Reruns, constant
from ._suspects import Group


# So many steps run again to see which line mends the results.
_MOST_STEPS = 20_000


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

    **Attributes:**

    - `broken`: the numbers of the results that are wrong.
    """

    def __init__(self, found: Comparison) -> None:
        self._found = found
        self.reruns = Reruns(found.evaluators[0], found.mesh, found.given[0], found.scopes)
        made_at = {x: i for i, step in enumerate(found.mesh.steps) for x in step.results}
        self._made_at = [made_at.get(x, 0) if isinstance(x, int) else 0 for x in found.mesh.results]
        self.broken = frozenset(k for k, one in enumerate(found.results) if not one.right)

    def try_right(self, group: Group) -> Mended | None:
        """The results where a line makes what it makes on one device; `None` if nobody knows what that is."""
        values = [x for x in group.values if x in self._found.kept]
        if not values or len(values) < len(group.values) or self.reruns.steps_run > _MOST_STEPS:
            return None
        choices = [list(right_values(self._found, x)) for x in values]
        if not all(choices):
            return None
        best = Mended()
        for k in range(max(map(len, choices))):
            chosen = [choice[min(k, len(choice) - 1)] for choice in choices]
            tried = {x: right.numbers for x, right in zip(values, chosen, strict=True)}
            plain = all(right.factor == 1 for right in chosen)
            now = dataclasses.replace(self._run(tried), plain=plain)
            if now.right > best.right:
                best = now
            if best.all:
                break
        return best

    def _run(self, replaced: Mapping[int, Numbers]) -> Mended:
        """The results with other values."""
        changes = {x: constant(numbers) for x, numbers in replaced.items()}
        reached = self.reached(changes)
        again = self.reruns.run(changes)
        right = {k: self._found.judge(k, again.result(k)) for k in sorted(reached)}
        count = sum(right[k] for k in self.broken & reached)
        return Mended(count, self.broken <= reached and all(right.values()))

    def reached(self, changes: Mapping[int, Change]) -> frozenset[int]:
        """The results that may be others after a change."""
        return frozenset[int]().union(*map(self.reruns.reaches, changes))

    def mends(self, changes: Mapping[int, Change]) -> bool:
        """Whether a change puts all results right."""
        reached = self.reached(changes)
        if not self.broken <= reached:
            return False
        again = self.reruns.run(changes)
        # What is wrong first, and of that what is made early: most changes mend nothing.
        order = sorted(reached, key=lambda k: (k not in self.broken, self._made_at[k]))
        return all(self._found.judge(k, again.result(k)) for k in order)


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
    known = found.relations[value]
    if known is not None and known.factor != 1:
        yield Right(pair.got / known.factor, known.factor)
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


def reduced(
    found: Comparison, value: int, reduce: Callable[..., Any], name: Hashable
) -> Numbers | None:
    """What a value is when it is reduced over a mesh axis along which shards have different numbers."""
    got, sizes = found.kept[value].got, list(found.scopes[value].sizes)
    if name not in sizes or got.dtype.kind not in "fc" or is_equal(found, value, name):
        return None
    return np.broadcast_to(reduce(got, axis=sizes.index(name), keepdims=True), got.shape)
