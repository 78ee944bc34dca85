"""An explanation: what it records, and how it is told in text, tables and a picture."""

import dataclasses
import html
import itertools
import math
import pathlib
import re
import textwrap
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from .._base._errors import axes_argument, counted, first_items, sizes_str
from .._base._types import AxisName


def bytes_str(count: int) -> str:
    """A number of bytes with its unit: `12 B`, `3.4 MiB`."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"


# Who placed a leaf, where its state's own spec did.
OWN_SPEC = "its own spec"
# How the reason begins for which a parameter stays whole that cannot be split.
NO_AXIS = "no axis is divisible by"


@dataclasses.dataclass(frozen=True, slots=True)
class LeafRow:
    """A leaf of the arguments of a call.

    **Attributes:**

    - `path`: its path, as one would type it.
    - `kind`: the type of its State, else `array`, `NumPy array` or `number`.
    - `dtype`, `shape`, `shard_shape`: its type, its shape, and the shape of the part that a device holds.
    - `enters`: where it lies: a spec or a lane axis.
    - `split`: the mesh axes that split each of its axes, as far as any do.
    - `placed_by`: what says so: an entry as the author wrote it, `its own spec`, `its kind` or `default`.
    - `leaves`: how it leaves: `untouched`, `not returned`, or that it is written, where, and which policy
        merges it over which axes.
    - `bytes`: what each device holds of it.
    - `moved`: what the call must lay out on each device before it runs.
    - `call`: the name of the mapped function.
    - `whole`: why a state stays whole whose own spec has an entry for each axis and names no mesh axis, as
        `fsdp` writes it: `no axis is divisible by x=4`, or `kept whole` where it could be split, as one that
        is smaller than `min_size`. Empty for all others.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    enters: str
    split: tuple[tuple[AxisName, ...], ...]
    placed_by: str
    leaves: str
    bytes: int
    moved: int
    call: str
    whole: str


@dataclasses.dataclass(frozen=True, slots=True)
class ResultRow:
    """An array that a call makes and that is no leaf of its arguments, written.

    **Attributes:**

    - `path`: its path in the result.
    - `kind`, `dtype`, `shape`, `shard_shape`: as for a leaf of the arguments.
    - `leaves`: where it lies.
    - `bytes`: what each device holds of it.
    - `call`: the name of the mapped function.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    leaves: str
    bytes: int
    call: str


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """An exchange between devices.

    **Attributes:**

    - `operation`: JAX's name for it, or XLA's where XLA added it.
    - `axes`: the mesh axes over which devices exchange.
    - `times`: how often it runs in a call, loops multiplied out.
    - `unknown_loop`: whether it stands in a loop of which nobody knows how often it runs. `times` and `bytes`
        are then those of one turn.
    - `branch`: whether it stands in a branch of a `cond`, and may not run.
    - `bytes`: what a device sends in a call, as rings send it.
    - `arrays`: its operands on a device, by dtype and shape.
    - `cause`: the policy of which state, the gradient of which parameter, your code, or `XLA's own`.
    - `line`: the user's line, `file:line`; empty where there is none.
    - `compiled`: what the compiled program has of it: `as traced`, `merged with …`, `removed`, `XLA's own`;
        empty where nothing is compiled.
    - `instructions`: the instructions of the compiled program that do it.
    """

    operation: str
    axes: tuple[AxisName, ...]
    times: int
    unknown_loop: bool
    branch: bool
    bytes: int
    arrays: tuple[str, ...]
    cause: str
    line: str
    compiled: str
    instructions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a device needs for a call, by XLA's account.

    **Attributes:**

    - `arguments`, `results`, `temporaries`: the bytes of each.
    - `donated`: the bytes of arguments that results take over.
    - `peak`: the most that is held at once, as XLA tells it. Of a CPU it leaves temporaries out.
    - `allocated`: what is set aside in all: arguments, results and temporaries, less what is donated.
    - `by_argument`: the bytes of each argument, by its path. Those that the program does not read have none.
    - `by_result`: the bytes of each result, by its path.
    - `result_table`: the part of `results` that holds where the results are.
    """

    arguments: int
    results: int
    temporaries: int
    donated: int
    peak: int
    allocated: int
    by_argument: Mapping[str, int]
    by_result: Mapping[str, int]
    result_table: int


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


def summary(explanation: "Explanation") -> str:
    """What matters most, in one line."""
    mesh = sizes_str(explanation.sizes)
    held = sum(row.bytes for row in explanation.leaves)
    moved = sum(row.moved for row in explanation.leaves)
    kept = [row for row in explanation.collectives if row.compiled != "removed"]
    parts = [
        f"{explanation.name} on {f'Mesh({mesh})' if mesh else 'one device'}",
        f"{bytes_str(held)} of arguments a device",
    ]
    if moved:
        parts.append(f"{bytes_str(moved)} to move first")
    parts.append(counted(len(kept), "collective"))
    if kept:
        unknown = " and more" if any(row.unknown_loop for row in kept) else ""
        parts.append(f"{bytes_str(explanation.bytes)}{unknown} sent")
    if explanation.memory is not None:
        parts.append(f"peak {bytes_str(explanation.memory.peak)}")
    return ", ".join(parts)


def sections(explanation: "Explanation") -> list[Section]:
    """The tables, in each of them the largest first."""
    moved = any(row.moved for row in explanation.leaves)
    tables = [
        Section(
            f"Arguments, for each device{_MOVED if moved else ''}",
            ("bytes", "leaf", "array", "part", "enters", "leaves"),
            [
                (
                    size + _whole(" *" * bool(row.moved)),
                    f"{path} {_whole(row.kind)}",
                    *_array(row),
                    f"{_whole(row.enters)} ({row.placed_by}{row.whole and f': {row.whole}'})",
                    row.leaves,
                )
                for row, path, size in _folded_bytes(explanation.leaves, "path")
            ],
        ),
        Section(
            "New results, for each device",
            ("bytes", "leaf", "array", "part", "leaves"),
            [
                (size, f"{path} {_whole(row.kind)}", *_array(row), _whole(row.leaves))
                for row, path, size in _folded_bytes(explanation.results, "path")
            ],
        ),
        Section(
            "Collectives",
            ("sent", "operation", "over", "times", "arrays", "cause", "compiled"),
            [
                (
                    size,
                    row.operation,
                    str(axes_argument(row.axes)) if row.axes else "?",
                    _whole(f"{row.times}{' x ?' * row.unknown_loop}{' or 0' * row.branch}"),
                    _arrays(row.arrays),
                    cause + (row.line and f", {row.line}"),
                    row.compiled,
                )
                for row, cause, size in _folded_bytes(explanation.collectives, "cause")
            ],
        ),
    ]
    if (memory := explanation.memory) is not None:
        sizes = {
            "peak": memory.peak,
            "set aside in all": memory.allocated,
            "arguments": memory.arguments,
            "results": memory.results,
            "temporaries": memory.temporaries,
            "donated": memory.donated,
        }
        rows = [(bytes_str(size), what) for what, size in sizes.items()]
        tables.append(Section("Memory of a device, by XLA's account", ("bytes", "what"), rows))
    return [_shortened(_without_empty_columns(table)) for table in tables if table.rows]


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


def _folded_bytes(rows: Sequence[Row], name: str) -> Iterator[tuple[Row, str, str]]:
    """As `folded`, with the bytes of each row as text."""
    for row, text, count in folded(rows, name):
        yield row, text, _whole(_times(count, bytes_str(row.bytes)))


def folded(rows: Sequence[Row], name: str) -> list[tuple[Row, str, int]]:
    """Rows that differ only in numbers in brackets as one, with how many they are; the largest first.

    **Arguments:**

    - `name`: of the attribute in whose text these numbers stand.
    """
    varying = ("path", "cause", "instructions")
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        pattern = re.sub(r"\[\d+\]", "[*]", getattr(row, name))
        fields = [f.name for f in dataclasses.fields(row) if f.name not in varying]
        same = tuple(getattr(row, field) for field in fields)
        groups.setdefault((pattern, same), []).append(row)
    texts = [_common([getattr(row, name) for row in group]) for group in groups.values()]
    firsts = [
        (group[0], text, len(group)) for group, text in zip(groups.values(), texts, strict=True)
    ]
    return sorted(firsts, key=lambda first: -first[0].bytes * first[2])


def _common(texts: Sequence[str]) -> str:
    """Texts that differ in numbers in brackets as one, with the first and the last number."""
    columns = zip(*(map(int, re.findall(r"\[(\d+)\]", text)) for text in texts), strict=True)
    ends = [(min(numbers), max(numbers)) for numbers in columns]
    spans = iter([f"[{low}]" if low == high else f"[{low}..{high}]" for low, high in ends])
    return re.sub(r"\[\d+\]", lambda _: next(spans), texts[0])


def _times(count: int, text: str) -> str:
    return text if count == 1 else f"{count} x {text}"


def _array(row: LeafRow | ResultRow) -> tuple[str, str]:
    """The whole array and the part of it that a device holds."""
    whole, part = (",".join(map(str, shape)) for shape in (row.shape, row.shard_shape))
    return f"{_short(row.dtype)}[{whole}]", part


def _short(dtype: str) -> str:
    """The name of a dtype as JAX shortens it: `f32` for `float32`."""
    return re.sub(r"^(b?)(f|i|u)(?:loat|nt|int)(?=\d)", r"\1\2", dtype)


def _whole(text: str) -> str:
    """A text that is not broken at its spaces."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _arrays(arrays: Sequence[str]) -> str:
    counts = Counter(map(_short, arrays))
    return ", ".join(first_items([_times(n, text) for text, n in counts.items()], 2))


WIDTH = 100
_GAP = "  "
# No column gets narrower than this.
_NARROWEST = 8


def _table(section: Section) -> str:
    rows = [section.heads, *section.rows]
    widths = _widths(rows)
    lines = [section.title]
    for row in rows:
        for texts in itertools.zip_longest(*map(_wrapped, row, widths), fillvalue=""):
            padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
            line = (_GAP + _GAP.join(padded)).rstrip()
            lines.append(line.replace("\N{NO-BREAK SPACE}", " "))
    return "\n".join(lines)


def _steps(word: str) -> list[str]:
    """The parts of a word between which it may be broken if it has to: the steps of a path."""
    return re.split(r"(?=\.[A-Za-z_])|(?=\[)", word)


def _wrapped(cell: str, width: int) -> Iterator[str]:
    """The lines of a cell. It is broken at spaces, then at the steps of a path, then anywhere."""
    line = ""
    for word in cell.split(" "):
        if line and len(line) + 1 + len(word) <= width:
            line += f" {word}"
            continue
        if line:
            yield line
        line = ""
        for step in _steps(word):
            while len(line) + len(step) > width:
                if not line:
                    line, step = step[:width], step[width:]
                yield line
                line = ""
            line += step
    yield line


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The widths of the columns: the widest give way until all fit, those that break at spaces first."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [[word for cell in column for word in cell.split(" ")] for column in columns]
    steps = [[step for word in column for step in _steps(word)] for column in words]
    room = WIDTH - len(_GAP) * len(widths)
    for least in (_longest(words), _longest(steps), [_NARROWEST] * len(widths)):
        while sum(widths) > room:
            spare = [(width, k) for k, width in enumerate(widths) if width > least[k]]
            if not spare:
                break
            widths[max(spare)[1]] -= 1
    return [max(1, width) for width in widths]


def _longest(columns: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in columns]


def _tags(tag: str, texts: Iterable[str]) -> str:
    """An element of HTML for each text."""
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


_CELL = 22
_LABELS = 300
_ROW_GAP = 14
# More parts along one axis are not drawn, but counted.
_MOST_DRAWN = 16


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


def _holders(row: LeafRow, sizes: Mapping[AxisName, int]) -> np.ndarray:
    """The numbers of the devices that hold each part of a leaf: by row, by column, and in their order.

    The last axis of several that is split runs across, all before it down.
    """
    split = [names for names in row.split if names]
    across = split.pop() if len(split) > 1 else ()
    down = [name for names in split for name in names]
    columns = math.prod(sizes[name] for name in across)
    numbers = device_numbers(sizes, [*down, *across])
    return numbers.reshape(-1, columns, numbers.shape[-1])


def device_numbers(sizes: Mapping[AxisName, int], names: Sequence[AxisName]) -> np.ndarray:
    """The numbers of a mesh's devices, a row for each place on the axes of these names."""
    order = [*names, *(name for name in sizes if name not in names)]
    numbers = np.arange(math.prod(sizes.values())).reshape([*sizes.values()])
    numbers = numbers.transpose([[*sizes].index(name) for name in order])
    return numbers.reshape(math.prod(sizes[name] for name in names), -1)


def _cell(left: int, top: int, wide: int, devices: Sequence[int]) -> str:
    hue = devices[0] * 47 % 360
    return (
        f'<rect x="{left}" y="{top}" width="{wide}" height="{_CELL}" stroke="#444" '
        f'fill="hsl({hue},60%,82%)"/>'
        f'<text x="{left + 4}" y="{top + 15}">{_spans(devices)}</text>'
    )


def _spans(numbers: Sequence[int]) -> str:
    """Numbers as ranges: `0-3`, `0,4`; the first few of many."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return ",".join(texts[:3]) + (",…" if len(texts) > 3 else "")


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What a call lays where, moves, reduces and holds.

    `print` shows it as text of at most 100 columns, a notebook as tables.

    **Attributes:**

    - `name`: of the function.
    - `sizes`: the sizes of the mesh's axes.
    - `leaves`: a record for each array and number of the arguments: `path`, `kind`, `dtype`, `shape`,
        `shard_shape`, `enters`, `split`, `placed_by`, `leaves`, `bytes`, `moved`, `call` and `whole`.
    - `results`: a record for each array that the call makes, other than written leaves of the arguments:
        `path`, `kind`, `dtype`, `shape`, `shard_shape`, `leaves`, `bytes` and `call`.
    - `collectives`: a record for each exchange between devices: `operation`, `axes`, `times`,
        `unknown_loop`, `branch`, `bytes`, `arrays`, `cause`, `line`, `compiled` and `instructions`.
    - `memory`: what a device needs, by XLA's account: `arguments`, `results`, `temporaries`, `donated`,
        `peak`, `allocated`, `by_argument`, `by_result` and `result_table`. `None` where nothing was compiled.
    - `advice`: what the author can surely improve, one text each.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> def mean(x):
        ...     return jax.lax.pmean(x.mean(), "data")
        >>> mesh = AbstractMesh((8,), ("data",))
        >>> mean = sm.shard_map(mean, mesh, in_specs=P("data"), out_specs=P())
        >>> explanation = mean.explain(jnp.ones(16))
        >>> [(row.path, row.shape, row.shard_shape) for row in explanation.leaves]
        [('x', (16,), (2,))]
        >>> explanation.collectives[0].axes, explanation.bytes
        (('data',), 7)

        ```
    """

    name: str
    sizes: Mapping[AxisName, int]
    leaves: Sequence[LeafRow]
    results: Sequence[ResultRow]
    collectives: Sequence[Collective]
    memory: Memory | None
    advice: Sequence[str]

    @property
    def bytes(self) -> int:
        """The bytes that a device sends in a call, as far as loops are known."""
        return sum(row.bytes for row in self.collectives)

    def to_dict(self) -> dict[str, Any]:
        """All of it as dictionaries, lists, texts and numbers.

        **Returns:** a dictionary that `json.dumps` takes.
        """
        return {
            "name": self.name,
            "sizes": {str(name): size for name, size in self.sizes.items()},
            "bytes": self.bytes,
            "leaves": [
                {**dataclasses.asdict(row), "split": [[*map(str, names)] for names in row.split]}
                for row in self.leaves
            ],
            "results": [dataclasses.asdict(row) for row in self.results],
            "collectives": [
                {**dataclasses.asdict(row), "axes": [str(axis) for axis in row.axes]}
                for row in self.collectives
            ],
            "memory": None if self.memory is None else dataclasses.asdict(self.memory),
            "advice": list(self.advice),
        }

    def draw(self) -> Drawing:
        """Show which device holds which part of which leaf of the arguments.

        **Returns:** a picture, which a notebook shows. It has its text in `svg`, and `save(path)`.
        """
        # A rectangle for each leaf, or for several alike, cut as the leaf is, with the devices in each part.
        parts: list[str] = []
        top, width = _ROW_GAP, 0
        for row, path, _ in folded(self.leaves, "path"):
            holders = _holders(row, self.sizes)
            rows, columns = holders.shape[:2]
            shown = holders[:_MOST_DRAWN, :_MOST_DRAWN].tolist()
            wide = _CELL * 4 if columns == 1 else _CELL * 3
            cells = [
                _cell(_LABELS + j * wide, top + i * _CELL, wide, devices)
                for i, line in enumerate(shown)
                for j, devices in enumerate(line)
            ]
            more = [f"{count} parts" for count in (rows, columns) if count > _MOST_DRAWN]
            shape = ",".join(map(str, row.shape))
            text = f"{path} {row.dtype}[{shape}] {row.enters} {' '.join(more)}".strip()
            label = f'<text x="8" y="{top + 15}">{html.escape(text)}</text>'
            parts.append(f"<g>{label}{''.join(cells)}</g>")
            top += len(shown) * _CELL + _ROW_GAP
            width = max(width, _LABELS + len(shown[0]) * wide + 60)
        return Drawing(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
            f'font-family="monospace" font-size="11">{"".join(parts)}</svg>'
        )

    def __str__(self) -> str:
        parts = [textwrap.fill(summary(self), WIDTH, subsequent_indent="  ")]
        parts += map(_table, sections(self))
        if self.advice:
            fill = textwrap.TextWrapper(WIDTH, initial_indent="- ", subsequent_indent="  ").fill
            parts.append("\n".join(["Advice", *map(fill, self.advice)]))
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{html.escape(summary(self))}</b></p>"]
        for section in sections(self):
            head, *rows = (
                f"<tr>{_tags(tag, cells)}</tr>"
                for tag, cells in [("th", section.heads), *(("td", row) for row in section.rows)]
            )
            parts.append(
                f"<table>{_tags('caption', [section.title])}"
                f"<thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
            )
        if self.advice:
            parts.append(f"<p><b>Advice</b></p><ul>{_tags('li', self.advice)}</ul>")
        return f'<div class="statemesh-explanation">{"".join(parts)}</div>'
