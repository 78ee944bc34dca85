"""What most likely made a leaf wrong, told from how it is wrong."""

import itertools
import math
from collections.abc import Hashable
from typing import Any

import numpy as np

from .. import _errors as errors
from . import _report as report
from ._compare import Finding
from ._probe import Probe


def guess(finding: Finding, probe: Probe) -> str | None:
    """A cause, in words; `None` where nothing is known that fails so."""
    if not finding.same_shape:
        return _by_shape(finding)
    finding = probe.findings.get(finding.number, finding)
    if finding.got.torn:
        return report.guess_torn(finding.got.torn)
    if finding.got.value.dtype.kind not in "iuf":
        return None
    for rule in (_kept, _times, _moved, _edges):
        if said := rule(finding):
            return said
    return _by_probe(finding, probe) or _some_right(finding)


def _by_shape(finding: Finding) -> str | None:
    got, want = finding.got.value.shape, finding.want.shape
    if len(got) != len(want):
        return None
    other = [d for d, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    if len(other) == 1:
        a, b = got[other[0]], want[other[0]]
        if a > b and a % b == 0 and (names := _names_of(finding, a // b)):
            return report.guess_longer(other[0], a // b, names)
        if a < b and b % a == 0 and (names := _names_of(finding, b // a)):
            return report.guess_shorter(other[0], b // a, names)
    return None


def _names_of(finding: Finding, times: int) -> list[tuple[Hashable, ...]]:
    """The mesh axes that so many shards may be those of, the fewest axes first."""
    sizes = {name: size for name, size in finding.sizes.items() if size > 1}
    some = itertools.chain.from_iterable(
        itertools.combinations(sizes, k) for k in range(1, len(sizes) + 1)
    )
    return [names for names in some if math.prod(sizes[name] for name in names) == times]


def _kept(finding: Finding) -> str | None:
    before = finding.before
    if before is None or before.shape != finding.want.shape:
        return None
    stays = not _apart(finding, finding.got.value, before).any()
    return report.guess_kept() if stays else None


def _apart(finding: Finding, a: Any, b: Any) -> Any:
    """Which numbers differ by more than rounding."""
    return np.abs(a.astype(np.float64) - b.astype(np.float64)) > finding.allowed


def _times(finding: Finding) -> str | None:
    """So many times what it should be, or what is added to it is."""
    got, want = finding.got.value, finding.want
    starts = [np.zeros_like(want, dtype=np.float64)]
    if finding.before is not None and finding.before.shape == want.shape:
        starts.append(finding.before.astype(np.float64))
    for start in starts:
        if times := _ratio(finding, got - start, want - start):
            added = start is not starts[0]
            for n in (times, 1 / times):
                whole = round(n)
                if (
                    whole > 1
                    and abs(n - whole) < 1e-3 * whole
                    and (names := _names_of(finding, whole))
                ):
                    return report.guess_times(whole, n == times, names, added)
    return None


def _ratio(finding: Finding, got: Any, want: Any) -> float | None:
    """What one is of the other, where that is the same number everywhere."""
    # A quotient of numbers that are hardly more than rounding says nothing.
    clear = np.abs(want) > 100 * finding.allowed
    if not clear.any() or _apart(finding, got, np.zeros_like(want))[want == 0].any():
        return None
    largest = np.unravel_index(int(np.argmax(np.abs(want))), want.shape)
    ratio = float(got[largest] / want[largest])
    spread = max(1.0, abs(ratio))
    far = np.abs(got - ratio * want) > 4 * spread * finding.allowed + 1e-6 * np.abs(want) * spread
    return None if far.any() or ratio <= 0 or abs(ratio - 1) < 1e-3 else ratio


def _blocks(finding: Finding, value: Any) -> list[Any]:
    """Each shard's part, once."""
    kept = {str(index): value[index] for _, index in finding.got.parts}
    return list(kept.values())


def _moved(finding: Finding) -> str | None:
    """Every part is right, but in another's place."""
    got, want = _blocks(finding, finding.got.value), _blocks(finding, finding.want)
    count = len(want)
    if count < 2 or not all(_apart(finding, want[0], other).any() for other in want[1:]):
        return None
    came = [
        next((j for j in range(count) if not _apart(finding, got[i], want[j]).any()), None)
        for i in range(count)
    ]
    if None in came or sorted(map(int, came)) != list(range(count)):  # type: ignore[arg-type]
        return None
    shifts = {(i - int(j)) % count for i, j in enumerate(came) if j is not None}
    return report.guess_shifted(shifts.pop()) if len(shifts) == 1 else report.guess_exchanged()


def _by_probe(finding: Finding, probe: Probe) -> str | None:
    """What is wrong, or not, where all shards have the same."""
    if probe.twins is None:
        return None
    got, want = (leaves[finding.number] for leaves in probe.twins)
    if got.shape != finding.want.shape or got.shape != want.shape:
        return None
    right = not _apart(finding, got, want).any()
    if right:
        return report.guess_statistic() if not finding.split else report.guess_own_mean()
    alike, apart = _blocks(finding, got), _blocks(finding, want)
    if len(alike) > 1:
        same = not any(_apart(finding, alike[0], other).any() for other in alike[1:])
        differ = any(_apart(finding, apart[0], other).any() for other in apart[1:])
        if same and differ:
            return report.guess_key() if probe.draws else report.guess_rows()
    if (times := _ratio(finding, got, want)) is not None:
        for n in (times, 1 / times):
            if round(n) > 1 and (names := _names_of(finding, round(n))):
                return report.guess_own_sum(names)
    return None


def _edges(finding: Finding) -> str | None:
    """Only what lies next to another shard's part is off."""
    wrong = finding.wrong()
    for d, count in finding.split.items():
        size = wrong.shape[d] // count
        rows = np.nonzero(wrong.any(tuple(k for k in range(wrong.ndim) if k != d)))[0] % size
        if size > 1 and rows.size and (np.all(rows == 0) or np.all(rows == size - 1)):
            return report.guess_edges(d)
    return None


def _some_right(finding: Finding) -> str | None:
    wrong = finding.wrong()
    right = [errors.axes_str(at) for at, index in finding.got.parts if not wrong[index].any()]
    return report.guess_some(right[0]) if len(right) == 1 and finding.split else None
