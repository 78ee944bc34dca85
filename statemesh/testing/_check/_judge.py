"""Which numbers differ by more than rounding explains: from the reference, and between copies on devices."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .. import _errors as errors
from .._errors import short
from .._program._numbers import (
    CLEAR,
    FEW_RUNS,
    HEAVY_TAIL,
    MANY_RUNS,
    NARROWER,
    Rounding,
    allowed,
    always,
    distances,
    equal,
    flushed,
    is_key,
    is_numeric,
    least,
    numbers,
)
from .._program._stacked import names_of_spec
from .._types import Numbers
from ._programs import Chain


@dataclasses.dataclass(frozen=True)
class ResultLeaf:
    """A leaf of a result. If it is static, it has no numbers.

    **Attributes:**

    - `number`: its number in the result.
    - `path`: its path as the user would type it.
    - `array`: the leaf as it was returned, or the type of an array.
    - `value`: the numbers of the array, also where it holds keys.
    """

    number: int
    path: str
    array: Any
    value: Numbers

    @property
    def dtype(self) -> Any:
        """Of a number of Python it is the dtype that JAX gives it."""
        return self.array.dtype if hasattr(self.array, "dtype") else jnp.result_type(self.array)

    @cached_property
    def parts(self) -> list[tuple[dict[Hashable, int], tuple[slice, ...]]]:
        """For each shard its coordinates and its part; empty for an array that lies on no mesh."""
        sharding = getattr(self.array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            return []
        has = sharding.devices_indices_map(self.array.shape)
        return [
            (dict(zip(sharding.mesh.axis_names, at, strict=True)), has[device])
            for at, device in np.ndenumerate(sharding.mesh.devices)
        ]


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """An array that differs from the reference.

    **Attributes:**

    - `leaf`: the array, where it lies on the mesh, or its type, with its numbers.
    - `want`: the numbers of the reference.
    - `allowed`: how far rounding may bring each number from the reference.
    - `rounding`: whose rounding that is.
    """

    leaf: ResultLeaf
    want: Numbers
    allowed: Numbers
    rounding: Rounding

    @property
    def same_shape(self) -> bool:
        return bool(self.leaf.value.shape == self.want.shape)

    @cached_property
    def deviation(self) -> Numbers:
        """The difference between each number and the reference; zero where rounding explains it."""
        difference = distances(self.leaf.value, self.want)
        return np.where(difference > self.allowed, difference, 0.0)

    @cached_property
    def worst(self) -> tuple[int, ...]:
        """The index of the largest difference, the first of those that are as large but for rounding."""
        largest = self.deviation >= self.deviation.max() * (1 - 1e-6)
        return tuple(map(int, np.unravel_index(int(np.argmax(largest)), self.want.shape)))

    @cached_property
    def shards(self) -> list[str]:
        """The shards that hold the number with the largest difference."""
        parts, shape = self.leaf.parts, self.want.shape
        return [errors.axes_str(at) for at, index in parts if _covers(index, self.worst, shape)]

    @cached_property
    def off_shards(self) -> list[str]:
        """The shards that hold a number that is off."""
        parts = self.leaf.parts
        return [errors.axes_str(at) for at, index in parts if self.deviation[index].any()]

    @cached_property
    def size(self) -> float:
        """The largest difference in parts of the largest number of the reference."""
        if not self.same_shape:
            return math.inf
        known = np.abs(self.want[np.isfinite(np.abs(self.want))])
        largest = float(known.max(initial=0.0))
        off = float(np.max(self.deviation, initial=0.0))
        return off / largest if largest else math.inf

    @property
    def is_off_and_finite(self) -> bool:
        """Whether a number is off that is neither infinite nor NaN."""
        return bool((np.isfinite(self.leaf.value) & (self.deviation > 0)).any())

    def differs_from(self, other: Numbers) -> bool:
        """Whether a number is off that is not NaN in the reference, or that differs from this one too."""
        if not self.same_shape or other.shape != self.want.shape:
            return True
        rounding = 1e-6 if self.rounding == "double" else 1e-3
        as_other = np.isclose(self.leaf.value, other, rtol=rounding, atol=0.0)
        return bool(((self.deviation > 0) & ~(np.isnan(self.want) & as_other)).any())


@dataclasses.dataclass
class Judge:
    """Compares results with those of the reference, and remembers what rounding left unseen.

    **Attributes:**

    - `tolerance`: the largest difference relative to the largest number of an array, if one is given.
    - `left_out`: the numbers of the leaves that are not compared.
    - `exact`: the numbers of the leaves to which `tolerance` does not apply.
    - `unclear`: in double precision and in the program's own dtypes, for each path the count of numbers that
        are not judged, since rounding alone may change them by more than a few per cent.
    - `judged`: for each path and each mesh whether a number of it was ever judged. NaN and infinities are no
        numbers here: what leaves its range agrees with all else that does.
    """

    tolerance: float | None = None
    left_out: Collection[int] = ()
    exact: Collection[int] = ()
    unclear: dict[Rounding, dict[str, int]] = dataclasses.field(
        default_factory=lambda: {"double": {}, "own": {}}
    )
    judged: dict[tuple[str, str], bool] = dataclasses.field(default_factory=dict)

    @property
    def never_judged(self) -> list[str]:
        """The paths of the results of which on some mesh no number was ever judged."""
        return list(dict.fromkeys(path for (path, _), judged in self.judged.items() if not judged))

    def compare(
        self,
        rounding: Rounding,
        step: int,
        leaves: Sequence[ResultLeaf],
        chains: tuple[Chain, Chain],
        place: str = "",
    ) -> list[Mismatch]:
        """The arrays of a call that differ from those of the reference.

        **Arguments:**

        - `rounding`: whether double precision is compared, or the dtypes of the program.
        - `leaves`: the results of the call.
        - `chains`: the calls on the mesh, and those of the reference.
        - `place`: the mesh, if every number that is off there is a mistake.
        """
        mismatches = []
        any_hidden = False

        def note(leaf: ResultLeaf, finite: Numbers, judged: Numbers) -> None:
            if place and finite.any():
                key = leaf.path, place
                self.judged[key] = bool(judged.any()) or self.judged.get(key, False)

        for leaf, want in zip(leaves, chains[1].exact[step].numbers, strict=False):
            if leaf.number in self.left_out or not is_numeric(leaf.array):
                continue
            if leaf.value.shape != want.shape:
                mismatches.append(Mismatch(leaf, want, np.zeros(want.shape), rounding))
                continue
            difference, finite = _distances(rounding, leaf, want), np.isfinite(want)
            if self.tolerance is not None and leaf.number not in self.exact:
                limit = _tolerated(self.tolerance, want, difference)
            elif (
                self.tolerance is None
                and not (difference > always(rounding, leaf.dtype, want)).any()
            ):
                note(leaf, finite, finite)
                continue
            else:
                limit = _by_noise(rounding, step, leaf, want, difference, chains)
                hidden = _unclear(want, difference, limit - flushed(rounding, leaf.dtype))
                note(leaf, finite, finite & ~hidden)
                if count := int(hidden.sum()):
                    any_hidden = True
                    counts = self.unclear[rounding]
                    counts[leaf.path] = max(count, counts.get(leaf.path, 0))
                # Of a number of which rounding leaves nothing it may leave NaN. What it is divided by may be
                # anything, so that some runs do not show how far it may go.
                limit = np.where(hidden, HEAVY_TAIL * limit, limit)
                limit = np.where(hidden & ~np.isfinite(difference), np.inf, limit)
            if (difference > limit).any():
                mismatches.append(Mismatch(leaf, want, limit, rounding))
        if rounding == "own" and any_hidden:
            # In narrow dtypes the rest of what cancels may be zero, of which no run with noise knows. A
            # derivative there is NaN.
            return [x for x in mismatches if not x.same_shape or x.is_off_and_finite]
        return mismatches


def excused(
    mismatches: Sequence[Mismatch], again: Callable[[], Sequence[Numbers]]
) -> list[Mismatch]:
    """The mismatches in the dtypes of the program without those that the reference has in its dtypes too.

    **Arguments:**

    - `again`: gives the results of the reference in its own dtypes. It is called only where something is off:
        what the reference makes of its own dtypes too, such as an overflow, is not.
    """
    if not mismatches or any(not mismatch.same_shape for mismatch in mismatches):
        return list(mismatches)
    other, still = again(), []
    for mismatch in mismatches:
        want = other[mismatch.leaf.number]
        if want.shape == mismatch.want.shape:
            limit = np.where(mismatch.deviation > 0, mismatch.allowed, np.inf)
            mismatch = dataclasses.replace(mismatch, want=want, allowed=limit)
        if mismatch.deviation.any():
            still.append(mismatch)
    return still


def _by_noise(
    rounding: Rounding,
    step: int,
    leaf: ResultLeaf,
    want: Numbers,
    difference: Numbers,
    chains: tuple[Chain, Chain],
) -> Numbers:
    """What rounding allows, as the fewest runs show that clear the numbers.

    The noise of the mesh costs a compile, so that of the reference comes first.
    """
    mesh, reference = chains
    limit: Numbers = 0.0
    for runs, both in ((FEW_RUNS, False), (FEW_RUNS, True), (MANY_RUNS, True)):
        moved = reference.moved(rounding, runs)[step][leaf.number]
        if both and moved.size:
            on_mesh = mesh.moved(rounding, runs)[step][leaf.number]
            typical = np.median(moved + least(rounding, leaf.dtype, want))
            # What a narrower dtype rounds is a mistake. In double precision a mesh has rounded constants.
            if rounding == "double" or not np.median(on_mesh) > NARROWER * typical:
                moved = on_mesh + moved
        limit = allowed(rounding, leaf.dtype, want, moved)
        if not (difference > limit).any():
            break
    return limit


def _tolerated(tolerance: float, want: Numbers, difference: Numbers) -> Numbers:
    """The differences that the user's `tolerance` allows."""
    if want.dtype.kind == "b":
        # Of booleans so many may differ.
        few = (difference > 0).mean() <= tolerance if difference.size else True
        return np.full(want.shape, 1.0 if few else 0.0)
    finite = np.abs(np.where(np.isfinite(want), want, 0))
    return np.full(want.shape, tolerance * float(finite.max(initial=0)))


def _distances(rounding: Rounding, leaf: ResultLeaf, want: Numbers) -> Numbers:
    got, difference = leaf.value, distances(leaf.value, want)
    if rounding == "double" or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return difference
    # What is larger than the dtype can hold is infinite in it.
    largest = float(jnp.finfo(leaf.dtype).max)  # type: ignore[no-untyped-call]
    over = np.isinf(got) & (np.abs(want) > largest) & (np.sign(got) == np.sign(want))
    return np.where(over, 0.0, difference)


def _unclear(want: Numbers, difference: Numbers, limit: Numbers) -> Numbers:
    """Which numbers are not judged."""
    if want.dtype.kind in "biu":
        return (difference > 0) & np.isinf(limit)
    size = np.nan_to_num(np.abs(want), posinf=0.0)
    known = size[np.isfinite(np.abs(want))]
    typical = float(np.median(known)) if known.size else 0.0
    return limit > CLEAR * np.maximum(size, typical)


def _covers(index: tuple[slice, ...], at: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a part of an array has a number."""
    sides = zip(index, at, shape, strict=False)
    return all(k in range(*part.indices(side)) for part, k, side in sides)


# Copies of one part of an array on several devices, which must be equal


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
    holders = [shard for shard in shards if _covers(shard.index, at, array.shape)]
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
