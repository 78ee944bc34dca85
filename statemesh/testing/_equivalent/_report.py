"""The words of a failed check: where results differ, and the probable cause."""

import math
from collections.abc import Hashable, Sequence

from .. import _errors as errors
from .._emulate._promises import Broken
from ._feedback import FeedBack
from ._mismatch import Mismatch


UNREDUCED = (
    "    Probably: an unreduced output. Reduce it inside (jax.lax.psum, pmean), let a state's `reduce` do "
    "it, or name the axes in the out spec."
)
UNEVEN = "    Some shards would wait in these collectives for others that never come."

# What results are compared with.
ONE_DEVICE = "the function on one device"
UNSHARDED = "the unsharded function"
EMULATED = "what emulate gives"

WITH_OTHER_VALUES = "With other values the results differ too:"

# The calls with other values than the given ones.
GENERIC = "with generic values"
LARGE = "with large values"
NAN = "with one NaN"


def not_equivalent(
    name: str, failed: Sequence[str], agreed: Sequence[str], fed_back: FeedBack | None
) -> AssertionError:
    good = f"\n\nIt agrees {', '.join(agreed)}." if agreed else ""
    chained = f"\n\nFrom call to call {fed_back.describe()}." if fed_back else ""
    head = f"{name}: the calls do not agree.\n\n"
    return AssertionError(head + "\n\n".join(failed) + good + chained)


def failed_call(where: str, against: str, leaves: Sequence[str]) -> str:
    head = f"{where[0].upper()}{where[1:]}compared with {against}:"
    return "\n".join([head, *leaves])


def mismatch(one: Mismatch, cause: str | None) -> str:
    """A line on an array that is off, and the probable cause."""
    shape = ",".join(map(str, one.got.shape))
    head = f"  - {one.leaf.path}: {one.leaf.dtype}[{shape}]"
    probably = f"\n    Probably: {cause}" if cause else ""
    if not one.same_shape:
        return f"{head}, of shape {one.got.shape}, should be {one.want.shape}.{probably}"
    return f"{head}, {_off(one)}.{probably}"


def _off(one: Mismatch) -> str:
    at = one.worst
    got, want, allowed = one.got[at].item(), one.want[at].item(), float(one.allowed[at])
    index = f" at {list(at)}" if at else ""
    if not (math.isfinite(abs(got)) and math.isfinite(abs(want))):
        off = f"{_short(got)}{index}, should be {_short(want)}"
    else:
        amount = float(one.deviation[at])
        off = f"off by {amount:.4g}{index}, where it is {_short(got)} and should be {_short(want)}"
    if not one.leaf.parts:
        there = ""
    elif len(one.shards) == len(one.leaf.parts):
        there = ", on every shard"
    else:
        there = f", on shard {' and '.join(one.shards)}"
    return f"{off}{there} ({_rounding(one, allowed)})"


def _rounding(one: Mismatch, allowed: float) -> str:
    if one.want.dtype.kind in "biu" or not allowed:
        return "none is allowed"
    # Rounded up coarsely, since more digits would pretend to more than is known.
    double = one.rounding == "double"
    coarse = 3 if double else 1
    power = math.ceil(math.log10(allowed) / coarse) * coarse
    return f"1e{power:+03d} would be rounding{' in double precision' if double else ''}"


def broken_promises(found: Sequence[Broken]) -> list[str]:
    """Lines on results that are promised to be the same on several shards, and differ."""
    lines = [
        errors.uneven_line(one.control, one.collectives, one.unequal)
        if one.control
        else errors.unequal_line(one.unequal)
        for one in found
    ]
    if not found:
        return []
    return [*lines, UNEVEN if found[0].control else UNREDUCED]


def _short(x: object) -> str:
    return f"{x:.6g}" if isinstance(x, float | complex) else str(x)


def guess_longer(axis: int, times: int, names: Sequence[Sequence[Hashable]]) -> str:
    return (
        f"axis {axis} is {times} times as long, once for each shard along {_or(names)}: an in spec leaves "
        "out the axis over which the argument is meant to be split, or an out spec names it although every "
        "shard has the whole result."
    )


def guess_shorter(axis: int, times: int, names: Sequence[Sequence[Hashable]]) -> str:
    return (
        f"axis {axis} is one of {times} parts: the out spec leaves {_or(names)} out, over which the result "
        "is split."
    )


def guess_unchanged() -> str:
    return "it came back as it went in: the new value is computed and not returned."


def guess_factor(times: int, more: bool, names: Sequence[Sequence[Hashable]], added: bool) -> str:
    what = "what is added to it" if added else "it"
    if more:
        return (
            f"{what} is {times} times too much: reduced twice over {_or(names)}, or summed over it although "
            "every shard has the same (a gradient is reduced already; an in spec leaves the axis out)."
        )
    return (
        f"{what} is 1/{times} of what it should be: not reduced over {_or(names)}, or pmean where psum is "
        "meant."
    )


def guess_shifted(by: int) -> str:
    return (
        f"every shard has what belongs to the one {by} before it, counted around: a ppermute sends to the "
        "wrong neighbour."
    )


def guess_permuted() -> str:
    return "the parts of the shards are right, but in another order: the axis names of a spec are exchanged."


def guess_statistic() -> str:
    return (
        "right where all shards have the same rows: a statistic of each shard is averaged although that of "
        "all rows is no average (a mean of variances). Average what the formula sums: the mean and the mean "
        "of squares."
    )


def guess_own_mean() -> str:
    return (
        "right where all shards have the same rows: it depends on a statistic of the shard's own rows where "
        "that of all rows is meant (a pmean is missing), or on an average of such (a mean of variances)."
    )


def guess_own_sum(names: Sequence[Sequence[Hashable]]) -> str:
    return (
        f"a sum over the shard's own part is used where that over all is meant: jax.lax.psum over "
        f"{_or(names)} is missing, or there twice."
    )


def guess_key() -> str:
    return (
        "every shard draws the same random numbers: a key is shared. Draw from rng.rows(n, axis_name), one "
        "key for each row whatever the mesh."
    )


def guess_rows() -> str:
    return (
        "every shard counts its rows from 0: add jax.lax.axis_index(axis_name) * the number of rows of a "
        "shard."
    )


def guess_edges(axis: int) -> str:
    return (
        f"only entries at the edge of a shard's part of axis {axis} are wrong: what comes from the next "
        "shard is another one's (ppermute, off by one)."
    )


def guess_some(shard: str) -> str:
    return f"only shard {shard} is right: the others do not get what it has (psum or all_gather is missing)."


def _or(names: Sequence[Sequence[Hashable]]) -> str:
    return " or ".join(" and ".join(map(repr, some)) for some in names)
