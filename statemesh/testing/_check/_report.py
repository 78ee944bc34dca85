"""The words of a failed check: where in the program it goes wrong, and which results are off."""

import math
import re
import textwrap
from collections.abc import Sequence

from .. import _errors as errors
from .._errors import short
from .._program._lines import SourceLine
from .._program._replay import MOST_ROUNDS, BrokenPromise
from ._judge import Mismatch


UNREDUCED = "    Reduce it (jax.lax.psum, pmean), let a state's `reduce` do it, or name its axes in the spec."
LOST = (
    "    The compiled program has lost a reduction: in a `custom_partitioning`, in a `shard_map` without "
    "`check_vma`,\n    or in the partitioner."
)
UNEVEN = "    Some shards would wait in these collectives for others that never come."

# The name and the words of an error at the end of a traceback.
_OF_CALLBACK = re.compile(r"^(\w*(?:Error|Exception): .*)$", re.MULTILINE)

# So many shards are named; the others are counted.
MOST_SHARDS = 2
# So many lines on results that are off; the others are counted.
MOST_RESULTS = 4


def results(shown: Sequence[Mismatch]) -> list[str]:
    """Lines on the results that are off, the largest differences first."""
    return _first([_result(mismatch) for mismatch in shown])


def _first(lines: Sequence[str]) -> list[str]:
    """The first of many lines, and how many more there are."""
    more = len(lines) - MOST_RESULTS
    return [*lines[:MOST_RESULTS], *([f"  and {more} more."] if more > 0 else [])]


def _result(mismatch: Mismatch) -> str:
    shape = ",".join(map(str, mismatch.leaf.value.shape))
    head = f"  - {mismatch.leaf.path}: {mismatch.leaf.dtype}[{shape}]"
    if not mismatch.same_shape:
        return f"{head}, of shape {mismatch.leaf.value.shape}, should be {mismatch.want.shape}."
    return f"{head}, {_off(mismatch)}."


def headline(shown: Sequence[Mismatch]) -> str:
    """The first result that is off, and how many more there are."""
    first, more = shown[0], len(shown) - 1
    if not first.same_shape:
        off = f"of shape {first.leaf.value.shape}, should be {first.want.shape},"
    elif _is_finite(first):
        off = f"off by {float(first.deviation[first.worst]):.4g}"
    else:
        off = f"{short(first.leaf.value[first.worst].item())}, should be "
        off += f"{short(first.want[first.worst].item())},"
    others = f" and {more} more {'is' if more == 1 else 'are'} off" if more else ""
    return f"{first.leaf.path} is {off}{others}"


def layout(mismatch: Mismatch) -> str:
    """How an array lies on the mesh, and on which shards it is off."""
    spec = getattr(getattr(mismatch.leaf.array, "sharding", None), "spec", None)
    if spec is None or not mismatch.same_shape:
        return ""
    off, count = mismatch.off_shards, len(mismatch.leaf.parts)
    shown = " and ".join(off[:MOST_SHARDS])
    some = (
        f"{len(off)} of {count} shards, first on {shown}"
        if len(off) > MOST_SHARDS
        else f"shard {shown}"
    )
    where = "every shard" if len(off) == count else some
    return f" on {where}, with spec {errors.spec_str(spec)},"


def _is_finite(mismatch: Mismatch) -> bool:
    both = mismatch.leaf.value, mismatch.want
    return all(math.isfinite(abs(x[mismatch.worst].item())) for x in both)


def _off(mismatch: Mismatch) -> str:
    at = mismatch.worst
    got, want = mismatch.leaf.value[at].item(), mismatch.want[at].item()
    allowed = float(mismatch.allowed[at])
    index = f" at {list(at)}" if at else ""
    if _is_finite(mismatch):
        amount = float(mismatch.deviation[at])
        off = f"off by {amount:.4g}{index}, where it is {short(got)} and should be {short(want)}"
    else:
        off = f"{short(got)}{index}, should be {short(want)}"
    if not mismatch.leaf.parts:
        there = ""
    elif len(mismatch.shards) == len(mismatch.leaf.parts):
        there = ", on every shard"
    else:
        there = f", on shard {' and '.join(mismatch.shards)}"
    return f"{off}{there} ({_rounding(mismatch, allowed)})"


def _rounding(mismatch: Mismatch, allowed: float) -> str:
    if mismatch.want.dtype.kind in "biu" or not allowed:
        return "none is allowed"
    # Rounded up coarsely, since more digits would pretend to more than is known.
    double = mismatch.rounding == "double"
    coarse = 3 if double else 1
    power = math.ceil(math.log10(allowed) / coarse) * coarse
    return f"1e{power:+03d} would be rounding{' in double precision' if double else ''}"


def broken_promises(promises: Sequence[BrokenPromise]) -> list[str]:
    """Lines on results that are promised to be the same on several shards, and differ."""
    # The results of a call with its gradient are a part of what is traced.
    lines = [promise.text.replace("(...).results", "(...)") for promise in promises]
    return [*_first(lines), UNEVEN if promises[0].is_predicate else UNREDUCED]


def unjudged(path: str) -> str:
    return (
        f"{path}: none of its numbers could be judged on some mesh, because rounding alone may change them "
        "by more than a few per cent, so that what is computed is not tested. Look for a threshold, a tie or "
        "a difference of nearly equal numbers before it, and give arguments that stay clear of these."
    )


def untaken(line: SourceLine | None, unseen: str) -> str:
    return f"{line}: `{line.source if line else ''}`: {unseen}"


def overflow(what: str, label: str, line: str) -> str:
    return (
        f"{what} {label}{f', see {line}' if line else ''}. The program computes in float16, which ends at "
        "65504, and only on the mesh a sum leaves that range. If the data can be so large, sum in float32, "
        "or divide before summing; if it cannot, name the argument in `keep`."
    )


def unended(line: str, label: str) -> str:
    return (
        f"The `while_loop` at {line} was stopped after {MOST_ROUNDS:,} rounds {label}, so that these calls "
        "are not compared on devices, where it may run for ever. Give it a largest number of rounds, and a "
        "tolerance that is relative to its numbers."
    )


def of_error(error: Exception) -> str:
    """An error that the function of the user raises, in one line."""
    # A callback's error in a compiled program stands after a traceback, in the text of JAX's error.
    raised = _OF_CALLBACK.findall(str(error))
    text = raised[-1] if raised else f"{type(error).__name__}: {error}"
    return textwrap.shorten(text.splitlines()[0], 100, placeholder=" ...")


def raised(error: str, label: str) -> str:
    return (
        f"The function raises an error {label}, on one device too, so that these calls are not compared: "
        f"`{error}`. If other values than yours make no sense, name the argument in `keep`."
    )
