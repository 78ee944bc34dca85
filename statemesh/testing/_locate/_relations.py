"""What a value on shards is of the value on one device."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np
from jax.sharding import PartitionSpec

from .._program._stacked import Scope, Stacked, names_of_spec
from .._types import Numbers
from ._evaluate import as_numbers, is_key, on_all_shards


# What a value is along a mesh axis: the same on every shard; the parts of an array axis; what gives the
# whole value when the shards' values are summed, averaged or so on; whole on one shard only.
Kind: TypeAlias = Literal["equal", "parts", "sum", "mean", "max", "min", "turned", "one"]

# Double precision leaves this much of the differences that are no mistakes.
_RELATIVE = 1e-8
_OF_LARGEST = 1e-9
_OF_OPERANDS = 1e-12
# The same of narrower dtypes, in roundoffs, and what it is at most.
_NARROW = 512
_MOST = 0.05
# Numbers like -1e9 mark what is masked.
_MASKS = 1e6


@dataclasses.dataclass(frozen=True)
class Relation:
    """What a value on shards is of the value on one device.

    **Attributes:**

    - `kinds`: for each mesh axis its name, what the value is along it, and which array axis is in parts.
    - `factor`: what the value is a multiple of: 1 for the value itself.
    """

    kinds: tuple[tuple[str, Kind, int], ...] = ()
    factor: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether shards have the very numbers that one device has, each its part or all of them."""
        return self.factor == 1 and all(kind in ("equal", "parts") for _, kind, _ in self.kinds)


@dataclasses.dataclass(frozen=True)
class _Way:
    """One way to make one array of what shards have."""

    kinds: tuple[tuple[str, Kind, int], ...]
    array: Numbers

    def then(self, name: str, kind: Kind, axis: int, array: Numbers) -> "_Way":
        return _Way((*self.kinds, (name, kind, axis)), array)


def whole(value: Stacked) -> Numbers:
    """The value of a program on one device, without mesh axes."""
    x = as_numbers(value.x)
    return x.reshape(x.shape[len(value.axes) :])


def allowed(want: Numbers, operands: float, unit: float) -> Numbers:
    """By how much each number of two computations in double precision may differ.

    **Arguments:**

    - `operands`: the largest number that the value was made from.
    - `unit`: the roundoff of the dtype, where that is not double precision.
    """
    if unit:
        return np.asarray(min(_NARROW * unit, _MOST) * max(largest(want), 1e-30))
    own = np.where(np.isfinite(want), np.abs(want), 0.0)
    return _RELATIVE * own + _OF_LARGEST * largest(want) + _OF_OPERANDS * operands


def unequal_copies(value: Stacked, spec: PartitionSpec | None, unit: float) -> bool:
    """Whether shards have different values of a result of which any copy is taken.

    **Arguments:**

    - `spec`: how the result is put together.
    - `unit`: the roundoff of the dtype, where that is not double precision.
    """
    named, x = names_of_spec(spec or PartitionSpec()), as_numbers(value.x)
    for at, name in enumerate(value.axes):
        if name in named:
            continue
        first = np.take(x, [0], at)
        same = (x == first) | ((x != x) & (first != first))
        if x.dtype.kind in "fc":
            with np.errstate(invalid="ignore"):
                same |= np.abs(x - first) <= allowed(first, 0.0, unit)
        if not np.all(same):
            return True
    return False


def largest(x: Numbers) -> float:
    """The largest number, but for those that stand for infinity in masks."""
    if x.dtype.kind not in "fc":
        return 0.0
    finite = np.abs(x[np.isfinite(x)])
    usual = finite[finite < _MASKS]
    return float((usual if usual.size else finite).max(initial=0.0))


def relation(
    value: Stacked, want: Numbers, scope: Scope, operands: float, unit: float
) -> Relation | None:
    """The relation of a value on shards to the value on one device, if there is one.

    **Arguments:**

    - `want`: the value on one device.
    - `operands`: the largest number that the value was made from.
    - `unit`: the roundoff of the dtype, where that is not double precision.
    """
    x = as_numbers(value.x)
    names = [name for name in value.axes if scope.sizes[name] > 1]
    if x.shape[len(value.axes) :] != want.shape:
        # What is the same on all shards can still be the part of each.
        x, names = on_all_shards(value, scope), [n for n, size in scope.sizes.items() if size > 1]
        x = x.reshape((*(scope.sizes[n] for n in names), *x.shape[len(scope.sizes) :]))
    else:
        x = x.reshape((*(scope.sizes[n] for n in names), *x.shape[len(value.axes) :]))
    shown = [str(name) for name in names]
    numeric = want.dtype.kind in "fc"
    close = _closeness(want, allowed(want, operands, unit) if numeric else want)
    for depth in range(5 if not is_key(value.x) else 2):
        # What is likely first: it is cheap, and a rare relation may hold by accident.
        if depth == 3 and not numeric:
            continue
        for way in _ways(_Way((), x), shown, want.shape, depth, max(1e-10, 64 * unit)):
            if way.array.shape != want.shape:
                continue
            factor = _factor(way.array, want, scope) if depth == 3 else 1.0
            if factor is not None and close(way.array / factor if factor != 1 else way.array):
                return Relation(way.kinds, factor)
    return None


def _closeness(want: Numbers, limit: Numbers) -> Callable[[Numbers], bool]:
    if want.dtype.kind not in "fc":
        return lambda x: np.array_equal(x, want)

    def close(x: Numbers) -> bool:
        with np.errstate(invalid="ignore"):
            near = np.abs(x - want) <= limit
        return bool(np.all(near | (x == want) | ((x != x) & (want != want))))

    return close


def _factor(x: Numbers, want: Numbers, scope: Scope) -> float | None:
    """The product of sizes of mesh axes, or one over it, that one array is of another."""
    if not want.size:
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
    way: _Way, names: Sequence[str], shape: tuple[int, ...], depth: int, unit: float
) -> Iterator[_Way]:
    """The arrays that shards' values may be parts of.

    **Arguments:**

    - `names`: the mesh axes that are still in front.
    - `depth`: 0 for parts and equal values; 1 also for partial results; 2 for parts in an unusual order; 3 as
        1, for multiples; 4 for values that one shard has.
    - `unit`: by how much copies may differ that are equal.
    """
    if not names:
        yield way
        return
    # Where several mesh axes split one array axis, the last named is the innermost as a rule.
    picks = (len(names) - 1, 0) if len(names) > 1 else (0,)
    for pick in picks:
        name, rest = names[pick], [*names[:pick], *names[pick + 1 :]]
        x = np.moveaxis(way.array, pick, 0)
        local = x.shape[len(names) :]
        for kind, axis, array in _merged(x, len(rest), local, shape, depth, unit):
            yield from _ways(way.then(name, kind, axis, array), rest, shape, depth, unit)


def _merged(
    x: Numbers, rest: int, local: tuple[int, ...], shape: tuple[int, ...], depth: int, unit: float
) -> Iterator[tuple[Kind, int, Numbers]]:
    """The ways to merge the first axis of an array into the others."""
    n, left = x.shape[0], math.prod(shape) // max(math.prod(local), 1)
    if len(local) == len(shape) and left % n == 0:
        for d, (size, goal) in enumerate(zip(local, shape, strict=True)):
            if size and size < goal and goal % (size * n) == 0:
                yield from _parts(x, rest, d, depth)
    elif len(local) + 1 == len(shape):
        for d in range(len(shape)):
            if shape[d] == n:
                yield "parts", d, np.moveaxis(x, 0, rest + d)
    if len(local) != len(shape) or (left == n and rest == 0):
        return
    same = bool(np.all((x == x[:1]) | ((x != x) & (x[:1] != x[:1]))))
    if same or (x.dtype.kind in "fc" and np.allclose(x, x[:1], rtol=unit, atol=0, equal_nan=True)):
        yield "equal", 0, x[0]
    # Equal parts of a sum are, in other words, a multiple of the whole.
    if depth in (1, 3) and (x.dtype.kind in "iu" or (x.dtype.kind in "fc" and not same)):
        yield "sum", 0, x.sum(0, dtype=x.dtype)
    if depth in (1, 3) and x.dtype.kind in "fc" and not same:
        yield "mean", 0, x.mean(0)
    if depth == 1 and x.dtype.kind in "fiu" and not same:
        yield "max", 0, x.max(0)
        yield "min", 0, x.min(0)
    if depth == 4 and not same and x.dtype.kind == "f":
        yield "one", 0, x[0]
        yield "one", 0, x[-1]


def _parts(x: Numbers, rest: int, d: int, depth: int) -> Iterator[tuple[Kind, int, Numbers]]:
    at = rest + d
    n, size = x.shape[0], x.shape[1 + at]
    blocks = np.moveaxis(x, 0, at)
    joined = (*blocks.shape[:at], n * size, *blocks.shape[at + 2 :])
    if depth != 2:
        yield "parts", d, blocks.reshape(joined)
        return
    # Parts of an axis that is an inner one of several that were merged.
    for outer in range(2, size + 1):
        if size % outer == 0:
            split = x.reshape(*x.shape[: 1 + at], outer, size // outer, *x.shape[2 + at :])
            yield "parts", d, np.moveaxis(split, 0, at + 1).reshape(joined)
    # Parts that went from shard to shard.
    for shift in range(1, n):
        yield "turned", d, np.roll(blocks, shift, at).reshape(joined)
