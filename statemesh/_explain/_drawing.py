"""A picture of which device holds which part of which leaf, as SVG."""

import dataclasses
import html
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence

from .._base._types import AxisName
from ._records import LeafRow
from ._sections import folded


_CELL = 22
_LABELS = 300
_ROW_GAP = 14
# More parts along one axis are not drawn, but counted.
_MOST = 16


@dataclasses.dataclass(frozen=True, repr=False)
class Drawing:
    """A picture. A notebook shows it.

    **Attributes:**

    - `svg`: the picture as SVG.
    """

    svg: str

    def save(self, path: str | pathlib.Path) -> None:
        """Write the picture to a file.

        **Arguments:**

        - `path`: the file, which ends in `.svg`.
        """
        pathlib.Path(path).write_text(self.svg)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<picture of {self.svg.count('<g>')} leaves>"


def drawing_of(leaves: Sequence[LeafRow], sizes: Mapping[AxisName, int]) -> Drawing:
    """One rectangle for each leaf, or for several alike, cut as the leaf is, with devices in each part."""
    parts: list[str] = []
    top, width = _ROW_GAP, 0
    for row, path, _ in folded(leaves, lambda row: row.path):
        drawn, size = _leaf(row, path, sizes, top)
        parts.append(drawn)
        top += max(size[1], _CELL) + _ROW_GAP
        width = max(width, _LABELS + size[0] + 60)
    return Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'font-family="monospace" font-size="11">{"".join(parts)}</svg>'
    )


def _leaf(
    row: LeafRow, path: str, sizes: Mapping[AxisName, int], top: int
) -> tuple[str, tuple[int, int]]:
    """The label and the parts of a leaf, and how wide and high they are."""
    split = [names for names in row.split if names] or [()]
    across = split[-1] if len(split) > 1 else ()
    down = tuple(name for names in split[: len(split) - len(across and [0])] for name in names)
    rows, columns = _count(down, sizes), _count(across, sizes)
    drawn = min(rows, _MOST), min(columns, _MOST)
    wide = _CELL * 4 if columns == 1 else _CELL * 3
    cells = [
        _cell(_LABELS + j * wide, top + i * _CELL, wide, _holders(i, j, down, across, sizes))
        for i, j in itertools.product(*map(range, drawn))
    ]
    more = [f"{n} parts" for n, shown in zip((rows, columns), drawn, strict=True) if n > shown]
    text = f"{path} {row.dtype}[{','.join(map(str, row.shape))}] {row.enters} {' '.join(more)}"
    label = f'<text x="8" y="{top + 15}">{html.escape(text.strip())}</text>'
    return f"<g>{label}{''.join(cells)}</g>", (drawn[1] * wide, drawn[0] * _CELL)


def _count(names: Sequence[AxisName], sizes: Mapping[AxisName, int]) -> int:
    return math.prod(sizes[name] for name in names)


def _holders(
    i: int,
    j: int,
    down: Sequence[AxisName],
    across: Sequence[AxisName],
    sizes: Mapping[AxisName, int],
) -> list[int]:
    """The numbers of the devices that hold the part in this row and this column."""
    at = {**_position(i, down, sizes), **_position(j, across, sizes)}
    own = [[at[name]] if name in at else range(size) for name, size in sizes.items()]
    return [_number(place, sizes) for place in itertools.product(*own)]


def _position(
    k: int, names: Sequence[AxisName], sizes: Mapping[AxisName, int]
) -> dict[AxisName, int]:
    """Where on the mesh the part of this number lies; the last name counts fastest."""
    found: dict[AxisName, int] = {}
    for name in reversed(names):
        k, found[name] = divmod(k, sizes[name])
    return found


def _number(place: Sequence[int], sizes: Mapping[AxisName, int]) -> int:
    number = 0
    for k, size in zip(place, sizes.values(), strict=True):
        number = number * size + k
    return number


def _cell(left: int, top: int, wide: int, devices: Sequence[int]) -> str:
    hue = devices[0] * 47 % 360
    return (
        f'<rect x="{left}" y="{top}" width="{wide}" height="{_CELL}" stroke="#444" '
        f'fill="hsl({hue},60%,82%)"/>'
        f'<text x="{left + 4}" y="{top + 15}">{_spans(devices)}</text>'
    )


def _spans(numbers: Sequence[int]) -> str:
    """Numbers as ranges: `0-3`, `0,4`; the first few of many."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in found]
    return ",".join(texts[:3]) + (",…" if len(texts) > 3 else "")
