"""The most likely cause of a mismatch, guessed from how the numbers differ."""

import itertools
import math
from collections.abc import Hashable

import numpy as np

from .. import _errors as errors
from .._types import Numbers
from . import _report as report
from ._mismatch import Mismatch
from ._probe import Probe


def guess(mismatch: Mismatch, probe: Probe) -> str | None:
    """A cause in words; `None` where no known mistake looks like this."""
    if not mismatch.same_shape:
        return _by_shape(mismatch)
    mismatch = probe.mismatches.get(mismatch.number, mismatch)
    pair = mismatch.got, mismatch.want
    if any(x.dtype.kind not in "iuf" or not np.isfinite(x).all() for x in pair):
        return None
    for rule in (_unchanged, _by_a_factor, _permuted, _at_edges):
        if cause := rule(mismatch):
            return cause
    return _by_probe(mismatch, probe) or _one_shard_right(mismatch)


def _by_shape(mismatch: Mismatch) -> str | None:
    got, want = mismatch.got.shape, mismatch.want.shape
    if len(got) != len(want):
        return None
    other = [d for d, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    if len(other) == 1:
        a, b = got[other[0]], want[other[0]]
        if a > b and a % b == 0 and (names := _axes_of_size(mismatch, a // b)):
            return report.guess_longer(other[0], a // b, names)
        if a < b and b % a == 0 and (names := _axes_of_size(mismatch, b // a)):
            return report.guess_shorter(other[0], b // a, names)
    return None


def _axes_of_size(mismatch: Mismatch, times: int) -> list[tuple[Hashable, ...]]:
    """The sets of mesh axes with so many shards, those of the fewest axes first."""
    sizes = {name: size for name, size in mismatch.sizes.items() if size > 1}
    some = itertools.chain.from_iterable(
        itertools.combinations(sizes, k) for k in range(1, len(sizes) + 1)
    )
    return [names for names in some if math.prod(sizes[name] for name in names) == times]


def _unchanged(mismatch: Mismatch) -> str | None:
    before = mismatch.before
    if before is None or before.shape != mismatch.want.shape:
        return None
    stays = not _differs(mismatch, mismatch.got, before).any()
    return report.guess_unchanged() if stays else None


def _differs(mismatch: Mismatch, a: Numbers, b: Numbers) -> Numbers:
    """Which numbers differ by more than rounding."""
    return np.abs(a.astype(np.float64) - b.astype(np.float64)) > mismatch.tolerance


def _by_a_factor(mismatch: Mismatch) -> str | None:
    """The value, or its increment, is a multiple or a fraction of the right one."""
    got, want = mismatch.got, mismatch.want
    starts = [np.zeros_like(want, dtype=np.float64)]
    if mismatch.before is not None and mismatch.before.shape == want.shape:
        starts.append(mismatch.before.astype(np.float64))
    for start in starts:
        if times := _ratio(mismatch, got - start, want - start):
            added = start is not starts[0]
            for n in (times, 1 / times):
                whole = round(n)
                if (
                    whole > 1
                    and abs(n - whole) < 1e-3 * whole
                    and (names := _axes_of_size(mismatch, whole))
                ):
                    return report.guess_factor(whole, n == times, names, added)
    return None


def _ratio(mismatch: Mismatch, got: Numbers, want: Numbers) -> float | None:
    """The ratio of two arrays, where it is the same for all numbers."""
    # The ratio of numbers as small as rounding errors is meaningless.
    clear = np.abs(want) > 100 * mismatch.tolerance
    if not clear.any() or _differs(mismatch, got, np.zeros_like(want))[want == 0].any():
        return None
    largest = np.unravel_index(int(np.argmax(np.abs(want))), want.shape)
    ratio = float(got[largest] / want[largest])
    spread = max(1.0, abs(ratio))
    far = (
        np.abs(got - ratio * want) > 4 * spread * mismatch.tolerance + 1e-6 * np.abs(want) * spread
    )
    # Of a ratio as small as this the inverse is infinite.
    if far.any() or not 1e-300 < ratio < np.inf or abs(ratio - 1) < 1e-3:
        return None
    return ratio


def _blocks(mismatch: Mismatch, value: Numbers) -> list[Numbers]:
    """The different parts that the shards hold."""
    kept = {str(index): value[index] for _, index in mismatch.leaf.parts}
    return list(kept.values())


def _permuted(mismatch: Mismatch) -> str | None:
    """Every part is right, but on the wrong shard."""
    got, want = _blocks(mismatch, mismatch.got), _blocks(mismatch, mismatch.want)
    count = len(want)
    if count < 2 or not all(_differs(mismatch, want[0], other).any() for other in want[1:]):
        return None
    came = [
        next((j for j in range(count) if not _differs(mismatch, got[i], want[j]).any()), None)
        for i in range(count)
    ]
    if None in came or sorted(map(int, came)) != list(range(count)):  # type: ignore[arg-type]
        return None
    shifts = {(i - int(j)) % count for i, j in enumerate(came) if j is not None}
    return report.guess_shifted(shifts.pop()) if len(shifts) == 1 else report.guess_permuted()


def _by_probe(mismatch: Mismatch, probe: Probe) -> str | None:
    """The cause that shows where all shards get the same values."""
    if probe.uniform_results is None:
        return None
    got, want = (leaves[mismatch.number] for leaves in probe.uniform_results)
    if got.shape != mismatch.want.shape or got.shape != want.shape:
        return None
    right = not _differs(mismatch, got, want).any()
    if right:
        return report.guess_statistic() if not mismatch.split else report.guess_own_mean()
    alike, different = _blocks(mismatch, got), _blocks(mismatch, want)
    if len(alike) > 1:
        same = not any(_differs(mismatch, alike[0], other).any() for other in alike[1:])
        differ = any(_differs(mismatch, different[0], other).any() for other in different[1:])
        if same and differ:
            return report.guess_key() if probe.draws else report.guess_rows()
    if (times := _ratio(mismatch, got, want)) is not None:
        for n in (times, 1 / times):
            if round(n) > 1 and (names := _axes_of_size(mismatch, round(n))):
                return report.guess_own_sum(names)
    return None


def _at_edges(mismatch: Mismatch) -> str | None:
    """Only the entries next to the part of another shard are off."""
    off = mismatch.off()
    for d, count in mismatch.split.items():
        size = off.shape[d] // count
        rows = np.nonzero(off.any(tuple(k for k in range(off.ndim) if k != d)))[0] % size
        if size > 1 and rows.size and (np.all(rows == 0) or np.all(rows == size - 1)):
            return report.guess_edges(d)
    return None


def _one_shard_right(mismatch: Mismatch) -> str | None:
    off = mismatch.off()
    right = [errors.axes_str(at) for at, index in mismatch.leaf.parts if not off[index].any()]
    return report.guess_some(right[0]) if len(right) == 1 and mismatch.split else None
