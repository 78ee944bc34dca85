"""What surely can be mended in a call."""

import math
from collections.abc import Mapping, Sequence

from .._base._types import AxisName
from ._bytes import bytes_str
from ._records import LeafRow


# A copy on every device is large from here on, in bytes.
_LARGE = 16 * 2**20
# What is laid out at each call is worth a word from here on.
_WORTH_MOVING = 2**20


def advice(
    leaves: Sequence[LeafRow],
    sizes: Mapping[AxisName, int],
    donates_in_vain: bool,
    changing_statics: Sequence[str],
) -> list[str]:
    """A sentence or two for each thing that surely can be mended."""
    count = math.prod(sizes.values())
    found = []
    for row in leaves:
        whole = row.shape == row.shard_shape and row.kind not in ("array", "NumPy array", "number")
        if count > 1 and whole and row.bytes >= _LARGE:
            found.append(
                f"{row.path} is copied to each of {count} devices, {bytes_str(row.bytes)} on each. "
                "Give it a spec that splits it."
            )
    # Smaller ones than any that is split are kept whole anyway.
    least = min((math.prod(row.shape) for row in leaves if row.splits_itself), default=0)
    odd = [row for row in leaves if row.fits_no_axis and math.prod(row.shape) >= least]
    if odd:
        total = bytes_str(sum(row.bytes for row in odd))
        found.append(
            f"{_paths(odd)}: {total} stay whole on each of {count} devices, because {odd[0].whole}. "
            "Pad an axis to a multiple, so that `fsdp` can split it."
        )
    # What comes from the host has to be moved, and what comes back is laid out from then on.
    moved = [row for row in leaves if row.kind == "array" and row.leaves == "not returned"]
    moved = [row for row in moved if row.moved >= _WORTH_MOVING]
    if moved:
        total = bytes_str(sum(row.moved for row in moved))
        found.append(
            f"{_paths(moved)}: {total} are laid out on each device at each call that gets them like this. "
            f"Call {moved[0].call}.place once, and pass what it returns."
        )
    if donates_in_vain:
        found.append(
            "donate gives nothing up: no result has the shape, dtype and placement of a donated argument."
        )
    if changing_statics:
        found.append(
            f"{', '.join(changing_statics)}: a call was compiled anew for each value of it. "
            "Pass it as an array, or as an object that compares equal."
        )
    return found


def _paths(rows: Sequence[LeafRow]) -> str:
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return ", ".join(row.path for row in rows[:3]) + more
