"""An explanation as a line and tables of texts, alike rows folded into one."""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from .._base._types import AxisName
from .._base.errors import axes_argument
from ._bytes import bytes_str
from ._records import Collective, LeafRow, Memory, ResultRow


@runtime_checkable
class Explained(Protocol):
    """What a summary and tables are made of."""

    @property
    def name(self) -> str: ...

    @property
    def sizes(self) -> Mapping[AxisName, int]: ...

    @property
    def bytes(self) -> int: ...

    @property
    def leaves(self) -> Sequence[LeafRow]: ...

    @property
    def results(self) -> Sequence[ResultRow]: ...

    @property
    def collectives(self) -> Sequence[Collective]: ...

    @property
    def memory(self) -> Memory | None: ...


@dataclasses.dataclass(frozen=True)
class Section:
    """A table: its title, the heads of its columns, and its rows."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


_MOVED = "; * is laid out anew before the call runs"
# More rows than these are counted and not shown.
_MOST = 30

Row = TypeVar("Row", LeafRow, ResultRow, Collective)


def summary(one: Explained) -> str:
    """What matters most, in one line."""
    where = ", ".join(f"{name}={size}" for name, size in one.sizes.items())
    parts = [f"{one.name} on Mesh({where})" if where else f"{one.name} on one device"]
    held = sum(row.bytes for row in one.leaves)
    moved = sum(row.moved for row in one.leaves)
    real = [row for row in one.collectives if row.compiled != "removed"]
    parts.append(f"{bytes_str(held)} of arguments a device")
    if moved:
        parts.append(f"{bytes_str(moved)} to move first")
    unknown = " and more" if any(row.unknown_loop for row in real) else ""
    parts.append(f"{len(real)} collectives" if len(real) != 1 else "1 collective")
    if real:
        parts.append(f"{bytes_str(one.bytes)}{unknown} sent")
    if one.memory is not None:
        parts.append(f"peak {bytes_str(one.memory.peak)}")
    return ", ".join(parts)


def sections(one: Explained) -> list[Section]:
    """The tables, in each of them the largest first."""
    moved = any(row.moved for row in one.leaves)
    found = [
        Section(
            f"Arguments, for each device{_MOVED if moved else ''}",
            ("bytes", "leaf", "array", "part", "enters", "leaves"),
            [
                (
                    _whole(_times(count, bytes_str(row.bytes)) + (" *" if row.moved else "")),
                    f"{path} {_whole(row.kind)}",
                    _array(row.dtype, row.shape),
                    _dims(row.shard_shape),
                    f"{_whole(row.enters)} ({_placed_by(row)})",
                    row.leaves,
                )
                for row, path, count in folded(one.leaves, lambda row: row.path)
            ],
        ),
        Section(
            "New results, for each device",
            ("bytes", "leaf", "array", "part", "leaves"),
            [
                (
                    _whole(_times(count, bytes_str(row.bytes))),
                    f"{path} {_whole(row.kind)}",
                    _array(row.dtype, row.shape),
                    _dims(row.shard_shape),
                    _whole(row.leaves),
                )
                for row, path, count in folded(one.results, lambda row: row.path)
            ],
        ),
        Section(
            "Collectives",
            ("sent", "operation", "over", "times", "arrays", "cause", "compiled"),
            [
                (
                    _whole(_times(count, bytes_str(row.bytes))),
                    row.operation,
                    str(axes_argument(row.axes)) if row.axes else "?",
                    _whole(_runs(row)),
                    _arrays(row.arrays),
                    f"{cause}, {row.line}" if row.line else cause,
                    row.compiled,
                )
                for row, cause, count in folded(one.collectives, lambda row: row.cause)
            ],
        ),
    ]
    if one.memory is not None:
        found.append(_memory(one.memory))
    return [_shortened(_without_empty_columns(section)) for section in found if section.rows]


def _placed_by(row: LeafRow) -> str:
    return f"{row.placed_by}: {row.whole}" if row.whole else row.placed_by


def _shortened(section: Section) -> Section:
    """A table with a last row in the place of all that are too many."""
    more = len(section.rows) - _MOST
    if more < 2:
        return section
    last = ["", f"and {more} more", *[""] * (len(section.heads) - 2)]
    return Section(section.title, section.heads, [*section.rows[:_MOST], last])


def _without_empty_columns(section: Section) -> Section:
    """A table without the columns in which nothing stands."""
    kept = [k for k in range(len(section.heads)) if any(row[k] for row in section.rows)]
    return Section(
        section.title,
        [section.heads[k] for k in kept],
        [[row[k] for k in kept] for row in section.rows],
    )


def _memory(memory: Memory) -> Section:
    rows = [
        ("peak", memory.peak),
        ("set aside in all", memory.allocated),
        ("arguments", memory.arguments),
        ("results", memory.results),
        ("temporaries", memory.temporaries),
        ("donated", memory.donated),
    ]
    shown = [(bytes_str(size), what) for what, size in rows]
    return Section("Memory of a device, by XLA's account", ("bytes", "what"), shown)


def folded(rows: Sequence[Row], text: Callable[[Row], str]) -> list[tuple[Row, str, int]]:
    """Rows that differ only in numbers in brackets as one, with how many they are; the largest first.

    **Arguments:**

    - `text`: the text of a row in which these numbers stand.
    """
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        pattern = re.sub(r"\[\d+\]", "[*]", text(row))
        alike = tuple(_alike(row))
        groups.setdefault((pattern, alike), []).append(row)
    found = [(group[0], _common(map(text, group)), len(group)) for group in groups.values()]
    return sorted(found, key=lambda one: -one[0].bytes * one[2])


def _alike(row: LeafRow | ResultRow | Collective) -> Iterable[object]:
    """What of a row has to be the same in rows that are folded."""
    varying = ("path", "cause", "instructions")
    return [getattr(row, f.name) for f in dataclasses.fields(row) if f.name not in varying]


def _common(texts: Iterable[str]) -> str:
    """Texts that differ in numbers in brackets as one, with the first and the last number."""
    several = list(texts)
    if len(several) == 1:
        return several[0]
    columns = list(zip(*(re.findall(r"\[(\d+)\]", text) for text in several), strict=True))
    spans = iter(_span([int(number) for number in column]) for column in columns)
    return re.sub(r"\[\d+\]", lambda _: next(spans), several[0])


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"[{low}]" if low == high else f"[{low}..{high}]"


def _times(count: int, text: str) -> str:
    return text if count == 1 else f"{count} x {text}"


def _runs(row: Collective) -> str:
    unknown = " x ?" if row.unknown_loop else ""
    return f"{row.times}{unknown}" + (" or 0" if row.branch else "")


def _array(dtype: str, shape: Sequence[int]) -> str:
    return f"{_short(dtype)}[{_dims(shape)}]"


def _dims(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def _short(dtype: str) -> str:
    """The name of a dtype as JAX shortens it: `f32` for `float32`."""
    return re.sub(r"^(b?)(f|i|u)(?:loat|nt|int)(?=\d)", r"\1\2", dtype)


def _whole(text: str) -> str:
    """A text that is not broken at its spaces."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _arrays(arrays: Sequence[str]) -> str:
    arrays = [_short(one) for one in arrays]
    shown = list(dict.fromkeys(arrays))
    more = [f"{len(shown) - 2} more"] if len(shown) > 2 else []
    return ", ".join([*(_times(arrays.count(one), one) for one in shown[:2]), *more])
