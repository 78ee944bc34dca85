"""From a traced call to its explanation: compiled where there are devices, and never run."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .._base._types import AxisName
from .._jax import _jaxprs as jaxprs
from ._explanation import Collective, Explanation, LeafRow, Memory, ResultRow, bytes_str
from ._traced import Frame, Mapped, Part, TracedCollective, sent, traced_collectives, user_line


Groups = list[tuple[int, ...]]


def groups_in(text: str, devices: int) -> Groups:
    """The groups that an instruction names; one of all devices where it names none."""
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", text):
        return _linked(re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text):
        return _mesh_groups(mesh[1], mesh[2])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota_groups(*iota.groups())
    if listed := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", text):
        return [tuple(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", listed[1])]
    return [tuple(range(devices))]


def _linked(pairs: Sequence[tuple[str, str]]) -> Groups:
    """The devices that a permutation links, in groups."""
    groups: list[set[int]] = []
    for pair in pairs:
        ends = set(map(int, pair))
        joined = [group for group in groups if group & ends]
        groups = [group for group in groups if not group & ends]
        groups.append(ends.union(*joined))
    return [tuple(sorted(group)) for group in groups]


def _mesh_groups(sizes: str, over: str) -> Groups:
    shape: dict[AxisName, int] = {
        name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", sizes)
    }
    return groups_over(shape, re.findall(r"'([^']*)'", over))


def groups_over(shape: Mapping[AxisName, int], over: Sequence[AxisName]) -> Groups:
    """The numbers of the devices that exchange over these axes of a mesh."""
    names, sizes = list(shape), list(shape.values())
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    at = [names.index(name) for name in over]
    moved = np.moveaxis(numbers, at, range(numbers.ndim - len(at), numbers.ndim))
    size = math.prod(sizes[k] for k in at)
    return [tuple(group) for group in moved.reshape(-1, size).tolist()]


def _iota_groups(dims: str, reshaped: str, order: str | None) -> Groups:
    whole = tuple(map(int, reshaped.split(",")))
    numbers = np.arange(math.prod(whole)).reshape(whole)
    if order is not None:
        numbers = numbers.transpose(tuple(map(int, order.split(","))))
    groups = numbers.reshape(tuple(map(int, dims.split(","))))
    return [tuple(group) for group in groups.reshape(len(groups), -1).tolist()]


def axes_of(
    groups: Sequence[Sequence[int]], shape: Mapping[AxisName, int]
) -> tuple[AxisName, ...] | None:
    """The mesh axes over which groups of devices exchange; `None` where no axes make these groups."""
    wanted = {frozenset(group) for group in groups if len(group) > 1}
    names = [name for name, size in shape.items() if size > 1]
    for count in range(len(names) + 1):
        for over in itertools.combinations(names, count):
            made = groups_over(shape, over) if over else []
            if {frozenset(group) for group in made} == wanted:
                return over
    return None


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


# What XLA calls the operations of JAX.
_OPCODES = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "pbroadcast": "collective-broadcast",
}


def as_traced(traced: Sequence[TracedCollective]) -> list[Collective]:
    """The collectives of a program that is not compiled."""
    return [
        _record(one, one.times, one.unknown_loop, one.branch, one.bytes, "", ()) for one in traced
    ]


def matched(
    traced: Sequence[TracedCollective],
    instructions: Sequence[Instruction],
    sizes: Mapping[AxisName, int],
) -> list[Collective]:
    """Every collective of the trace with what became of it, then those that XLA added."""
    does: dict[int, list[tuple[Instruction, Element]]] = {k: [] for k in range(len(traced))}
    done_by: dict[str, set[int]] = {}
    own: dict[str, list[Element]] = {}
    candidates = _Candidates(traced)
    for instruction in instructions:
        for element in instruction.elements:
            k = candidates.best(instruction, element, does)
            if k is None:
                own.setdefault(instruction.name, []).append(element)
            else:
                does[k].append((instruction, element))
                done_by.setdefault(instruction.name, set()).add(k)
    found = [_compiled(one, does[k], done_by) for k, one in enumerate(traced)]
    return found + [_own(one, own[one.name], sizes) for one in instructions if one.name in own]


class _Candidates:
    """The traced collectives, to find the one that an array of the compiled program belongs to."""

    def __init__(self, traced: Sequence[TracedCollective]) -> None:
        self.traced = traced
        self.by_frame: dict[Frame | None, list[int]] = {}
        self.by_line: dict[str, list[int]] = {}
        for k, one in enumerate(traced):
            self.by_frame.setdefault(next(iter(one.frames), None), []).append(k)
            self.by_line.setdefault(one.line, []).append(k)

    def best(
        self, instruction: Instruction, element: Element, does: Mapping[int, Sequence[object]]
    ) -> int | None:
        """The number of the one that it belongs to, if any.

        **Arguments:**

        - `does`: the arrays that were found to belong to each.
        """
        source = element.source
        operations = set(re.split(r"[/():]", source.op_name))
        found = self._of(operations, self.by_frame.get(next(iter(source.frames), None), ()))
        found = [k for k in found if _same(source.frames, self.traced[k].frames)]
        if not found and (line := user_line(source.frames)):
            found = self._of(operations, self.by_line.get(line, ()))
        if not found:
            # JAX's cache on disk finds a program whatever its lines: these may be of another file, or moved.
            found = self._of(operations, range(len(self.traced)))
            found = [k for k in found if self._fits(k, element, does) == (True, True)]
        # One line may have several; each has room for as many arrays as it has operands. Loops over one
        # function are told apart by their turns.
        return max(
            found,
            key=lambda k: (
                *self._fits(k, element, does),
                self.traced[k].times == instruction.times,
            ),
            default=None,
        )

    def _of(self, operations: set[str], numbers: Sequence[int]) -> list[int]:
        return [k for k in numbers if self.traced[k].primitive in operations]

    def _fits(
        self, k: int, element: Element, does: Mapping[int, Sequence[object]]
    ) -> tuple[bool, bool]:
        parts, size = self.traced[k].parts, _as_wide(self.traced[k], element).part.bytes
        return len(does[k]) < len(parts), any(one.bytes == size for one in parts)


def _same(some: Sequence[Frame], others: Sequence[Frame]) -> bool:
    """Whether two lists of frames agree as far as both go."""
    common = min(len(some), len(others))
    return common > 0 and some[:common] == others[:common]


def _compiled(
    one: TracedCollective,
    done: Sequence[tuple[Instruction, Element]],
    done_by: Mapping[str, set[int]],
) -> Collective:
    if not done:
        return _record(one, one.times, one.unknown_loop, one.branch, 0, "removed", ())
    instructions = {instruction.name: instruction for instruction, _ in done}
    runs = sum(instruction.times for instruction, _ in done)
    others = len(set().union(*(done_by[name] for name in instructions))) - 1
    opcodes = sorted({i.opcode for i in instructions.values()} - {_OPCODES.get(one.operation)})
    if others:
        compiled = f"merged with {others} other{'s' * (others > 1)}"
    else:
        compiled = f"as {', '.join(opcodes)}" if opcodes else "as traced"
    return _record(
        one,
        -(-runs // len(one.parts)),
        any(instruction.unknown_loop for instruction in instructions.values()),
        any(instruction.branch for instruction in instructions.values()),
        sum(instruction.sent(_as_wide(one, element)) for instruction, element in done),
        compiled,
        tuple(instructions),
    )


def _as_wide(one: TracedCollective, element: Element) -> Element:
    """An array of the compiled program, with the bytes that it has in the trace.

    On a CPU XLA exchanges `bfloat16` as `float32`.
    """
    size, width = element.part.bytes, bytes_of(element.part.dtype, (1,))
    if any(part.bytes == size for part in one.parts):
        return element
    traced = next((part for part in one.parts if math.prod(part.shape) * width == size), None)
    if traced is None:
        return element
    return dataclasses.replace(element, part=dataclasses.replace(element.part, bytes=traced.bytes))


def _record(
    one: TracedCollective,
    times: int,
    unknown_loop: bool,
    branch: bool,
    sent: int,
    compiled: str,
    instructions: tuple[str, ...],
) -> Collective:
    return Collective(
        operation=one.operation,
        axes=one.axes,
        times=times,
        unknown_loop=unknown_loop,
        branch=branch,
        bytes=sent,
        arrays=tuple(map(str, one.parts)),
        cause=one.cause,
        line=one.line,
        compiled=compiled,
        instructions=instructions,
    )


def _own(
    instruction: Instruction, elements: Sequence[Element], sizes: Mapping[AxisName, int]
) -> Collective:
    return Collective(
        operation=instruction.opcode,
        axes=axes_of(instruction.groups, sizes) or (),
        times=instruction.times,
        unknown_loop=instruction.unknown_loop,
        branch=instruction.branch,
        bytes=sum(map(instruction.sent, elements)),
        arrays=tuple(str(element.part) for element in elements),
        cause="XLA's own",
        line=user_line(elements[0].source.frames),
        compiled="XLA's own",
        instructions=(instruction.name,),
    )


def memory_of(
    compiled: Any, text: CompiledText, arguments: Sequence[str], results: Sequence[str]
) -> Memory | None:
    """What a device needs for a call; `None` where XLA does not tell.

    **Arguments:**

    - `arguments`: the paths of the inputs that the program reads. Others come first, for its constants.
    - `results`: the paths of the program's outputs.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    by_argument: dict[str, int] = {}
    parameters = text.parameters()
    constants = len(parameters) - len(arguments)
    # What JAX calls an input may be the name in another program, which it took from its cache on disk.
    named = [name or "constants" for name, _ in parameters[: max(constants, 0)]]
    paths = [*named, *arguments] if constants >= 0 else [name for name, _ in parameters]
    for path, (_, size) in zip(paths, parameters, strict=True):
        by_argument[path] = by_argument.get(path, 0) + size
    made = text.results()
    sources = results if len(results) == len(made) else ["results"] * len(made)
    by_result: dict[str, int] = {}
    for path, size in zip(sources, made, strict=True):
        by_result[path] = by_result.get(path, 0) + size
    taken = int(stats.argument_size_in_bytes)
    given = int(stats.output_size_in_bytes)
    temporaries = int(stats.temp_size_in_bytes)
    donated = int(stats.alias_size_in_bytes)
    allocated = taken + given + temporaries - donated
    peak = int(getattr(stats, "peak_memory_in_bytes", 0))
    return Memory(
        arguments=taken,
        results=given,
        temporaries=temporaries,
        donated=donated,
        peak=peak or allocated,
        allocated=allocated,
        by_argument=by_argument,
        by_result=by_result,
        result_table=given - sum(made),
    )


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


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """What is known of a call before it is compiled.

    **Attributes:**

    - `name`: of the function.
    - `sizes`: the sizes of the mesh's axes.
    - `jaxpr`: its program.
    - `compile`: compiles the program; `None` for a call that runs without being compiled.
    - `leaves`, `results`: the records of its leaves.
    - `arguments`, `outputs`: the paths of the program's inputs and outputs.
    - `calls`: the mapped calls that it makes.
    - `has_devices`: whether there are devices to compile it for.
    - `donates_in_vain`: whether the author gives memory up that nothing can take.
    - `changing_statics`: the paths of static leaves for which several programs were compiled already.
    """

    name: str
    sizes: Mapping[AxisName, int]
    jaxpr: Any
    compile: Callable[[], Any] | None
    leaves: Sequence[LeafRow]
    results: Sequence[ResultRow]
    arguments: Sequence[str]
    outputs: Sequence[str]
    calls: Sequence[Mapped]
    has_devices: bool = True
    donates_in_vain: bool = False
    changing_statics: Sequence[str] = ()


def explanation_of(call: TracedCall) -> Explanation:
    """The explanation of a call."""
    traced = traced_collectives(call.jaxpr, call.calls)
    if call.compile is None or not call.has_devices:
        collectives, memory = as_traced(traced), None
    else:
        compiled = call.compile()
        text = CompiledText(compiled.as_text())
        collectives = matched(traced, text.instructions(), call.sizes)
        memory = memory_of(compiled, text, _read(call), call.outputs)
    return Explanation(
        name=call.name,
        sizes=call.sizes,
        leaves=call.leaves,
        results=call.results,
        collectives=collectives,
        memory=memory,
        advice=advice(call.leaves, call.sizes, call.donates_in_vain, call.changing_statics),
    )


def _read(call: TracedCall) -> list[str]:
    """The paths of the inputs that the program reads. JAX leaves out the others when it compiles."""
    read = jaxprs.inputs_read(call.jaxpr)
    return [path for path, hit in zip(call.arguments, read, strict=True) if hit]
