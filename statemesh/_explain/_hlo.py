"""The collectives of a compiled program, read from its text."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from ._frames import Frame
from ._groups import groups_in
from ._traced import Part, sent


OPERATIONS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
# These return one result for each operand.
_VARIADIC = ("all-reduce", "all-gather", "reduce-scatter")

_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?P<names>\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")

Shape: TypeAlias = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """Where something of a compiled program comes from: the traced operation and its frames."""

    op_name: str
    frames: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Element:
    """One array that an instruction exchanges, and where it comes from."""

    part: Part
    source: Named


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """A collective of the compiled program.

    **Attributes:**

    - `name`, `opcode`: as in the text.
    - `elements`: what it exchanges: several where XLA merged collectives.
    - `groups`: the devices that exchange with each other, by their number on the mesh.
    - `times`, `unknown_loop`, `branch`: how often it runs, as in `Collective`.
    """

    name: str
    opcode: str
    elements: tuple[Element, ...]
    groups: tuple[tuple[int, ...], ...]
    times: int
    unknown_loop: bool
    branch: bool

    @property
    def size(self) -> int:
        return max((len(group) for group in self.groups), default=1)

    def sent(self, element: Element) -> int:
        """The bytes of one of its arrays that a device sends in a call."""
        return self.times * sent(self.opcode, self.size, element.part.bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Line:
    """One instruction of the text: its result, its opcode and all that follows."""

    name: str
    result: str
    opcode: str
    rest: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Runs:
    """How often a computation runs."""

    times: int = 0
    unknown_loop: bool = False
    branch: bool = False


class CompiledText:
    """A compiled program, as XLA writes it.

    **Arguments:**

    - `text`: its text.
    """

    def __init__(self, text: str) -> None:
        partitions = re.search(r"\bnum_partitions=(\d+)", text)
        self.devices = int(partitions[1]) if partitions else 1
        self.entry = ""
        self.computations: dict[str, list[_Line]] = {}
        self.head: list[str] = []
        own: list[_Line] | None = None
        for line in text.splitlines():
            if (head := _HEAD.match(line)) and not line.startswith("HloModule"):
                own = self.computations.setdefault(head["name"], [])
                if head["entry"]:
                    self.entry = head["name"]
            elif line.startswith("}"):
                own = None
            elif own is None:
                self.head.append(line)
            elif found := _INSTRUCTION.match(line):
                own += _parsed(found["name"], found["rest"])

    def instructions(self) -> list[Instruction]:
        """Every collective of the program."""
        runs = self._runs()
        return [
            self._instruction(line, lines, runs.get(name, _Runs()))
            for name, lines in self.computations.items()
            for line in lines
            if _operation(line.opcode)
        ]

    def parameters(self) -> list[tuple[str, int]]:
        """The name and the bytes of each argument of the program, in its order."""
        found: list[tuple[int, str, int]] = []
        for line in self.computations.get(self.entry, []):
            if line.opcode == "parameter":
                number = int(re.match(r"\s*(\d+)", line.rest)[1])  # type: ignore[index]
                total = sum(part.bytes for part in parts_of(line.result))
                found.append((number, self.source(line.rest).op_name, total))
        return [(name, total) for _, name, total in sorted(found)]

    def results(self) -> list[int]:
        """The bytes of each result of the program."""
        layout = re.search(r"entry_computation_layout=\{.*?->(.*?)\}(?:, \w+=|$)", self.head[0])
        return [part.bytes for part in parts_of(layout[1])] if layout else []

    def source(self, rest: str) -> Named:
        """Where an instruction comes from, by its metadata."""
        op_name, frame, file = _OP_NAME.search(rest), _FRAME_ID.search(rest), _SOURCE.search(rest)
        frames: tuple[Frame, ...] = ()
        if frame:
            frames = self._frames.get(int(frame[1]), ())
        elif file:
            frames = ((file[1], int(file[2] or 0)),)
        return Named(op_name[1] if op_name else "", frames)

    def _instruction(self, line: _Line, lines: Sequence[_Line], runs: _Runs) -> Instruction:
        opcode = _operation(line.opcode) or line.opcode
        parts, source = _exchanged(line, opcode), self.source(line.rest)
        picked = self._picked(line.name, lines) if len(parts) > 1 else {}
        size = max(map(len, groups := groups_in(line.rest, self.devices)), default=1)
        elements = [
            Element(_operand(opcode, part, size), picked.get(k, source))
            for k, part in enumerate(parts)
        ]
        what = line.name, opcode, tuple(elements), tuple(groups)
        return Instruction(*what, runs.times, runs.unknown_loop, runs.branch)

    def _picked(self, name: str, lines: Sequence[_Line]) -> Mapping[int, Named]:
        """Where each result of a merged collective comes from: what takes it out tells."""
        pattern = re.compile(rf"%?{re.escape(name)}\), index=(\d+)")
        return {
            int(found[1]): self.source(line.rest)
            for line in lines
            if line.opcode == "get-tuple-element" and (found := pattern.search(line.rest))
        }

    @functools.cached_property
    def _frames(self) -> dict[int, tuple[Frame, ...]]:
        """The frames of each `stack_frame_id`, the innermost first."""
        tables: dict[str, dict[int, str]] = {}
        own: dict[int, str] = {}
        for line in self.head:
            if re.fullmatch(r"[A-Z]\w+", line.strip()):
                own = tables.setdefault(line.strip(), {})
            elif row := re.match(r"(\d+) (.*)", line):
                own[int(row[1])] = row[2]
        files = {k: row.strip('"') for k, row in tables.get("FileNames", {}).items()}
        places: dict[int, Frame] = {}
        for k, place in tables.get("FileLocations", {}).items():
            places[k] = files.get(_number("file_name_id", place), ""), _number("line", place)
        stacks = tables.get("StackFrames", {})
        # Releases count the parents of frames from 0 or from 1; the first frame has none.
        first = _number("parent_frame_id", stacks[min(stacks)]) if stacks else 0
        found: dict[int, tuple[Frame, ...]] = {0: ()}
        for k in sorted(stacks):
            parent = _number("parent_frame_id", stacks[k]) - first
            frame = places.get(_number("file_location_id", stacks[k]), ("", 0))
            found[k] = (frame, *found.get(parent, ()))
        return found

    def _runs(self) -> dict[str, _Runs]:
        """How often each computation runs, from the program's entry on."""
        found: dict[str, _Runs] = {}

        def visit(name: str, runs: _Runs) -> None:
            before = found.get(name, _Runs())
            found[name] = _Runs(
                before.times + runs.times,
                before.unknown_loop or runs.unknown_loop,
                before.branch or runs.branch,
            )
            for line in self.computations.get(name, []):
                inner = _inside(line, runs)
                for called in _called(line):
                    visit(called, inner)

        visit(self.entry, _Runs(1))
        return found


def _parsed(name: str, rest: str) -> Iterator[_Line]:
    end = _end_of_shape(rest)
    if opcode := _OPCODE.match(rest[end:]):
        yield _Line(name, rest[:end], opcode["opcode"], rest[end + opcode.end() :])


def _end_of_shape(rest: str) -> int:
    if not rest.startswith("("):
        return rest.find(" ")
    depth = 0
    for k, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return k + 1
    return len(rest)


def _operation(opcode: str) -> str | None:
    """The collective that an opcode is, or starts; `None` for any other."""
    name = opcode.removesuffix("-start")
    return name if name in OPERATIONS else None


def _inside(line: _Line, runs: _Runs) -> _Runs:
    if line.opcode == "conditional":
        return dataclasses.replace(runs, branch=True)
    if line.opcode != "while":
        return runs
    trips = _TRIPS.search(line.rest)
    if trips is None:
        return dataclasses.replace(runs, unknown_loop=True)
    return dataclasses.replace(runs, times=runs.times * int(trips[1]))


def _called(line: _Line) -> list[str]:
    return [
        name
        for found in _CALLED.finditer(line.rest)
        for name in re.findall(r"%?([\w.\-]+)", found["names"])
    ]


def parts_of(result: str) -> list[Part]:
    """The arrays of a shape as XLA writes it."""
    return [
        Part(dtype, shape := tuple(map(int, re.findall(r"\d+", dims))), bytes_of(dtype, shape))
        for dtype, dims in _ARRAY.findall(re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", result))
    ]


def bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of an array of a dtype as XLA names it."""
    if dtype in ("token", "opaque"):
        return 0
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    return math.ceil(math.prod(shape) * bits / 8)


def _exchanged(line: _Line, opcode: str) -> list[Part]:
    """The arrays that a collective makes."""
    parts = parts_of(line.result)
    if line.opcode.endswith("-start") and opcode in ("all-gather", "collective-permute"):
        # What it starts carries the operands too.
        counted = [part for part in parts if part.dtype != "u32" or part.shape]
        parts = counted[len(counted) // 2 :]
    if opcode in _VARIADIC or len(parts) < 2:
        return parts
    total = sum(part.bytes for part in parts)
    return [Part(parts[0].dtype, (len(parts), *parts[0].shape), total)]


def _operand(opcode: str, made: Part, size: int) -> Part:
    """What a device gives, by what it gets."""
    if opcode == "all-gather":
        return Part(made.dtype, made.shape, made.bytes // size)
    if opcode == "reduce-scatter":
        return Part(made.dtype, made.shape, made.bytes * size)
    return made


def _number(name: str, row: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", row)
    return int(found[1]) if found else 0
