"""What a value on shards is of the value on one device."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np

from .._program._numbers import distances, equal, is_key, numbers
from .._program._stacked import MappedAxes, Stacked
from .._types import Numbers
from ._evaluate import on_all_shards


# What a value is along a mesh axis: the same on every shard; the parts of an array axis, also such as have
# the edges of their neighbours; what gives the whole value when the shards' values are summed, averaged or so
# on; whole on one shard only.
Kind: TypeAlias = Literal[
    "equal", "parts", "overlapping", "sum", "mean", "max", "min", "turned", "one"
]
# The name of a mesh axis, what a value is along it, and which array axis is in parts.
Along: TypeAlias = tuple[str, Kind, int]
Kinds: TypeAlias = frozenset[str]

# The kinds that are tried together. What is likely comes first: it is cheap, and a rare relation may hold by
# accident.
_PARTS = frozenset(("equal", "parts", "overlapping"))
_PARTIAL = _PARTS | {"sum", "mean", "max", "min"}
_MOVED = frozenset(("equal", "turned"))
_MULTIPLE = _PARTS | {"sum", "mean"}
_ONE = _PARTS | {"one"}

# Double precision leaves this much of the differences that are no mistakes.
_RELATIVE = 1e-8
_OF_LARGEST = 1e-9
_OF_OPERANDS = 1e-12
# The same of narrower dtypes, in roundoffs, and what it is at most.
_NARROW = 512
_MOST = 0.05
# Numbers like -1e9 mark what is masked.
_MASKS = 1e6
# The logarithm of how unlikely an accident has to be.
_TELLING = math.log(500)


@dataclasses.dataclass(frozen=True)
class Relation:
    """What a value on shards is of the value on one device.

    **Attributes:**

    - `kinds`: what the value is along each mesh axis.
    - `factor`: what the value is a multiple of: 1 for the value itself.
    """

    kinds: tuple[Along, ...] = ()
    factor: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether shards have the very numbers that one device has, each its part or all of them."""
        return self.factor == 1 and all(kind in _PARTS for _, kind, _ in self.kinds)

    @property
    def is_partial(self) -> bool:
        """Whether shards have a part of a sum or the like, or a multiple."""
        partial = ("sum", "mean", "max", "min")
        return self.factor != 1 or any(kind in partial for _, kind, _ in self.kinds)


def whole(value: Stacked) -> Numbers:
    """The value of a program on one device, without mesh axes."""
    x = numbers(value.x)
    return x.reshape(x.shape[len(value.axes) :])


def tolerated(want: Numbers, operands: float, unit: float) -> Numbers:
    """By how much each number of two computations in double precision may differ.

    **Arguments:**

    - `operands`: the largest number that the value was made from.
    - `unit`: the roundoff of the dtype, where that is not double precision.
    """
    if want.dtype.kind not in "fc":
        return np.asarray(0.0)
    size = np.where(np.isfinite(want), np.abs(want), 0.0)
    if unit:
        return min(_NARROW * unit, _MOST) * np.maximum(size, max(largest(want), 1e-30))
    return _RELATIVE * size + _OF_LARGEST * largest(want) + _OF_OPERANDS * operands


def largest(x: Numbers) -> float:
    """The largest number, but for those that stand for infinity in masks."""
    if x.dtype.kind not in "fc":
        return 0.0
    finite = np.abs(x[np.isfinite(x)])
    usual = finite[finite < _MASKS]
    return float((usual if usual.size else finite).max(initial=0.0))


def relation(
    value: Stacked, want: Numbers, scope: MappedAxes, operands: float, unit: float
) -> Relation | None:
    """The relation of a value on shards to the value on one device, if there is one.

    **Arguments:**

    - `want`: the value on one device.
    - `operands`: the largest number that the value was made from.
    - `unit`: the roundoff of the dtype, where that is not double precision.
    """
    names = [name for name in value.axes if scope.sizes[name] > 1]
    x, lead = numbers(value.x), len(value.axes)
    if x.shape[lead:] != want.shape:
        # What is the same on all shards can still be the part of each.
        names = [name for name, size in scope.sizes.items() if size > 1]
        x, lead = on_all_shards(value, scope), len(scope.sizes)
    x = x.reshape((*scope.shape(names), *x.shape[lead:]))
    limit = tolerated(want, operands, unit)
    tried = (_PARTS, _PARTIAL, *(() if is_key(value.x) else (_MOVED, _MULTIPLE, _ONE)))
    for kinds in tried:
        for way, array in _ways(x, list(map(str, names)), want, kinds, max(1e-10, 64 * unit)):
            if array.shape != want.shape:
                continue
            factor = _factor(array, want, scope) if kinds is _MULTIPLE else 1.0
            if factor is None:
                continue
            if np.all(distances(array / factor if factor != 1 else array, want) <= limit):
                return Relation(way, factor)
    return None


def _factor(x: Numbers, want: Numbers, scope: MappedAxes) -> float | None:
    """The product of sizes of mesh axes, or one over it, that one array is of another."""
    if not want.size or want.dtype.kind not in "fc":
        return None
    at = np.unravel_index(int(np.argmax(np.where(np.isfinite(want), np.abs(want), 0))), want.shape)
    if want[at] == 0 or not np.isfinite(x[at]):
        return None
    ratio = float(np.real(x[at] / want[at]))
    sizes = list(scope.sizes.values())
    for count in range(1, len(sizes) + 1):
        for some in itertools.combinations(sizes, count):
            for factor in (math.prod(some), 1 / math.prod(some)):
                if factor != 1 and abs(ratio - factor) <= 1e-6 * factor:
                    return float(factor)
    return None


def _ways(
    x: Numbers, names: Sequence[str], want: Numbers, kinds: Kinds, unit: float
) -> Iterator[tuple[tuple[Along, ...], Numbers]]:
    """The arrays that shards' values may be parts of, and what the values then are along each mesh axis.

    **Arguments:**

    - `names`: the mesh axes in front of the array.
    - `kinds`: what is tried.
    - `unit`: by how much copies may differ that are equal.
    """
    if not names:
        yield (), x
        return
    # Where several mesh axes split one array axis, the last named is the innermost as a rule.
    for pick in (len(names) - 1, 0) if len(names) > 1 else (0,):
        name, rest = names[pick], [*names[:pick], *names[pick + 1 :]]
        for kind, axis, merged in _merged(np.moveaxis(x, pick, 0), len(rest), want, kinds, unit):
            for way, array in _ways(merged, rest, want, kinds, unit):
                yield ((name, kind, axis), *way), array


def stride(size: int, goal: int, count: int) -> int | None:
    """How far parts of an axis are apart, of which so many make a whole; `None` if such parts do not.

    That is less than their size where they have edges of their neighbours too, as stencils read them. On one
    device the whole has edges as well.
    """
    step, rest = divmod(goal - size, count - 1)
    return step if not rest and 0 < step <= size else None


def _merged(
    x: Numbers, rest: int, want: Numbers, kinds: Kinds, unit: float
) -> Iterator[tuple[Kind, int, Numbers]]:
    """The ways to merge the first axis of an array into the others, of which `rest` are mesh axes."""
    local, shape = x.shape[1 + rest :], want.shape
    n, left = x.shape[0], math.prod(shape) // max(math.prod(local), 1)
    if len(local) == len(shape) and left % n == 0:
        for d, (size, goal) in enumerate(zip(local, shape, strict=True)):
            if size and size < goal and goal % (size * n) == 0:
                blocks, at = np.moveaxis(x, 0, rest + d), rest + d
                joined = (*blocks.shape[:at], n * size, *blocks.shape[at + 2 :])
                # All parts are in their places, or went from shard to shard.
                shifts = range(1, n) if "turned" in kinds else (0,) if "parts" in kinds else ()
                for shift in shifts:
                    kind: Kind = "turned" if shift else "parts"
                    yield kind, d, np.roll(blocks, shift, at).reshape(joined)
    elif len(local) + 1 == len(shape):
        for d in range(len(shape)):
            if shape[d] == n:
                yield "parts", d, np.moveaxis(x, 0, rest + d)
    if len(local) == len(shape) and "overlapping" in kinds:
        for d, (size, goal) in enumerate(zip(local, shape, strict=True)):
            step = stride(size, goal, n)
            if step is not None and step < size:
                blocks = np.moveaxis(x, rest + 1 + d, -1)
                if _are_alike(blocks[:-1, ..., step:], blocks[1:, ..., : size - step], unit):
                    overlaid = np.concatenate([*blocks[:-1, ..., :step], blocks[-1]], -1)
                    yield "overlapping", d, np.moveaxis(overlaid, -1, rest + d)
    if len(local) != len(shape) or (left == n and rest == 0):
        return
    same = bool(np.all(equal(x, x[:1])))
    if same or (x.dtype.kind in "fc" and _are_alike(x, x[:1], unit)):
        yield "equal", 0, x[0]
    # Equal parts of a sum are, in other words, a multiple of the whole. Of integers they are its sum.
    if "sum" in kinds and (x.dtype.kind in "iu" or (x.dtype.kind in "fc" and not same)):
        yield "sum", 0, x.sum(0, dtype=x.dtype)
    if same:
        return
    if "mean" in kinds and x.dtype.kind in "fc":
        yield "mean", 0, x.mean(0)
    # Of truths these are whether any shard's is true, and whether all are.
    if "max" in kinds and x.dtype.kind in "fiub":
        yield "max", 0, x.max(0)
        yield "min", 0, x.min(0)
    if "one" in kinds and x.shape[1:] == shape and _is_telling(x, want):
        nearest = distances(x, want).argmin(0)
        yield "one", 0, np.take_along_axis(x, nearest[None], 0)[0]


def _is_telling(x: Numbers, want: Numbers) -> bool:
    """Whether hardly each number is that of some shard by accident."""
    if x.dtype.kind in "iu" and want.size:
        different = 1.0 + max(x.max(), want.max()) - min(x.min(), want.min())
        return want.size * math.log(different / len(x)) > _TELLING
    return x.dtype.kind == "f"


def _are_alike(a: Numbers, b: Numbers, unit: float) -> bool:
    """Whether numbers are copies, but for rounding."""
    if a.dtype.kind in "fc":
        return bool(np.allclose(a, b, rtol=unit, atol=0, equal_nan=True))
    return bool(np.all(equal(a, b)))
