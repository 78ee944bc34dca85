"""What a compiled program exchanges and holds, by the text that XLA writes, and the explanation of a call.

The text has no names of arrays. What an instruction exchanges is found in the traced program by the operation
and the frames that its metadata name. JAX's cache on disk returns programs with the metadata of other files:
then the operation and the size of an array have to do.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .._base._errors import first_paths
from .._base._types import AxisName
from .._jax import _jaxprs as jaxprs
from .._jax._frames import Frame, user_line
from ._explanation import (
    NO_AXIS,
    OWN_SPEC,
    Collective,
    Explanation,
    LeafRow,
    Memory,
    ResultRow,
    bytes_str,
    device_numbers,
)
from ._traced import (
    OPCODES,
    Mapped,
    Part,
    Runs,
    TracedCollective,
    sent,
    traced_collectives,
)


Groups = list[tuple[int, ...]]


def groups_in(text: str, devices: int) -> Groups:
    """The groups of devices that exchange in an instruction. It may name none: then all are in one group."""
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", text):
        return _linked(re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        return groups_over(sizes, re.findall(r"'([^']*)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        dims, whole = ([*map(int, text.split(","))] for text in iota.groups()[:2])
        numbers = np.arange(math.prod(whole)).reshape(whole)
        if iota[3] is not None:
            numbers = numbers.transpose([*map(int, iota[3].split(","))])
        return [tuple(group) for group in numbers.reshape(dims[0], -1).tolist()]
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


def groups_over(shape: Mapping[AxisName, int], over: Sequence[AxisName]) -> Groups:
    """The numbers of the devices that exchange over these axes of a mesh."""
    groups = device_numbers(shape, [name for name in shape if name not in over])
    return [tuple(group) for group in groups.tolist()]


def axes_exchanged(
    groups: Sequence[Sequence[int]], shape: Mapping[AxisName, int]
) -> tuple[AxisName, ...] | None:
    """The mesh axes over which groups of devices exchange; `None` where no axes make these groups."""
    wanted = {frozenset(group) for group in groups if len(group) > 1}
    names = [name for name, size in shape.items() if size > 1]
    for count in range(len(names) + 1):
        for over in itertools.combinations(names, count):
            exchanging = groups_over(shape, over) if over else []
            if {frozenset(group) for group in exchanging} == wanted:
                return over
    return None


# These return one result for each operand.
_VARIADIC = ("all-reduce", "all-gather", "reduce-scatter")

_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
# A shape has spaces too, but no word with a bracket comes after one of them.
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<result>.*?) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?P<names>\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")

# One instruction of the text, as `_INSTRUCTION` takes it apart.
_Line: TypeAlias = re.Match[str]


# Where something of a compiled program comes from: the traced operation and its frames.
Source: TypeAlias = tuple[str, tuple[Frame, ...]]
# One array that an instruction exchanges, and where it comes from.
Element: TypeAlias = tuple[Part, Source]


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """A collective of the compiled program.

    **Attributes:**

    - `name`, `opcode`: as in the text.
    - `elements`: what it exchanges: several where XLA merged collectives.
    - `groups`: the devices that exchange with each other, by their number on the mesh.
    - `runs`: how often it runs.
    """

    name: str
    opcode: str
    elements: tuple[Element, ...]
    groups: Groups
    runs: Runs

    def sent(self, part: Part) -> int:
        """The bytes of one of its arrays that a device sends in a call."""
        return self.runs.times * sent(self.opcode, _largest(self.groups), part.bytes)


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
        computation: list[_Line] | None = None
        for line in text.splitlines():
            if (head := _HEAD.match(line)) and not line.startswith("HloModule"):
                computation = self.computations.setdefault(head["name"], [])
                if head["entry"]:
                    self.entry = head["name"]
            elif line.startswith("}"):
                computation = None
            elif computation is None:
                self.head.append(line)
            elif instruction := _INSTRUCTION.match(line):
                computation.append(instruction)

    def instructions(self) -> list[Instruction]:
        """Every collective of the program."""
        runs = self._runs()
        return [
            self._instruction(line, opcode, lines, runs.get(name, Runs(0)))
            for name, lines in self.computations.items()
            for line in lines
            if (opcode := line["opcode"].removesuffix("-start")) in OPCODES.values()
        ]

    def parameters(self) -> list[tuple[str, int]]:
        """The name and the bytes of each argument of the program, in its order."""
        lines = {
            int(line["rest"].partition(")")[0]): line
            for line in self.computations.get(self.entry, [])
            if line["opcode"] == "parameter"
        }
        return [
            (self.source(line)[0], sum(part.bytes for part in parts_of(line["result"])))
            for _, line in sorted(lines.items())
        ]

    def results(self) -> list[int]:
        """The bytes of each result of the program."""
        layout = re.search(r"entry_computation_layout=\{.*?->(.*?)\}(?:, \w+=|$)", self.head[0])
        return [part.bytes for part in parts_of(layout[1])] if layout else []

    def source(self, line: _Line) -> Source:
        """Where an instruction comes from, by its metadata."""
        rest = line["rest"]
        op_name, frame, file = _OP_NAME.search(rest), _FRAME_ID.search(rest), _SOURCE.search(rest)
        frames: tuple[Frame, ...] = ()
        if frame:
            frames = self._frames.get(int(frame[1]), ())
        elif file:
            frames = ((file[1], int(file[2] or 0)),)
        return op_name[1] if op_name else "", frames

    def _instruction(
        self, line: _Line, opcode: str, lines: Sequence[_Line], runs: Runs
    ) -> Instruction:
        groups, parts = groups_in(line["rest"], self.devices), _exchanged(line, opcode)
        # What takes the results of a merged collective apart tells where each of them comes from.
        taken = re.compile(rf"%?{re.escape(line['name'])}\), index=(\d+)")
        sources = {
            int(index[1]): self.source(other)
            for other in lines
            if len(parts) > 1 and other["opcode"] == "get-tuple-element"
            if (index := taken.search(other["rest"]))
        }
        source = self.source(line)
        elements = [
            (_operand(opcode, part, _largest(groups)), sources.get(k, source))
            for k, part in enumerate(parts)
        ]
        return Instruction(line["name"], opcode, tuple(elements), groups, runs)

    @functools.cached_property
    def _frames(self) -> dict[int, tuple[Frame, ...]]:
        """The frames of each `stack_frame_id`, the innermost first."""
        tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        for line in self.head:
            if re.fullmatch(r"[A-Z]\w+", line.strip()):
                table = tables.setdefault(line.strip(), {})
            elif row := re.match(r"(\d+) (.*)", line):
                table[int(row[1])] = row[2]
        files = {k: row.strip('"') for k, row in tables.get("FileNames", {}).items()}
        places: dict[int, Frame] = {}
        for k, place in tables.get("FileLocations", {}).items():
            places[k] = files.get(_number("file_name_id", place), ""), _number("line", place)
        stacks = tables.get("StackFrames", {})
        # Releases count the parents of frames from 0 or from 1; the first frame has none.
        first = _number("parent_frame_id", stacks[min(stacks)]) if stacks else 0
        frames: dict[int, tuple[Frame, ...]] = {0: ()}
        for k in sorted(stacks):
            parent = _number("parent_frame_id", stacks[k]) - first
            frame = places.get(_number("file_location_id", stacks[k]), ("", 0))
            frames[k] = (frame, *frames.get(parent, ()))
        return frames

    def _runs(self) -> dict[str, Runs]:
        """How often each computation runs, from the program's entry on."""
        total: dict[str, Runs] = {}

        def visit(name: str, runs: Runs) -> None:
            before = total.get(name, Runs(0))
            total[name] = Runs(
                before.times + runs.times,
                before.unknown_loop or runs.unknown_loop,
                before.branch or runs.branch,
            )
            for line in self.computations.get(name, []):
                inner = runs
                if line["opcode"] == "conditional":
                    inner = runs.in_branch()
                elif line["opcode"] == "while":
                    trips = _TRIPS.search(line["rest"])
                    inner = runs.in_loop(int(trips[1]) if trips else None)
                for called in _CALLED.finditer(line["rest"]):
                    for inner_name in re.findall(r"%?([\w.\-]+)", called["names"]):
                        visit(inner_name, inner)

        visit(self.entry, Runs())
        return total


def _largest(groups: Groups) -> int:
    return max(map(len, groups), default=1)


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
    parts = parts_of(line["result"])
    if line["opcode"] != opcode and opcode in ("all-gather", "collective-permute"):
        # What it starts carries the operands too.
        counted = [part for part in parts if part.dtype != "u32" or part.shape]
        parts = counted[len(counted) // 2 :]
    if opcode in _VARIADIC or len(parts) < 2:
        return parts
    total = sum(part.bytes for part in parts)
    return [Part(parts[0].dtype, (len(parts), *parts[0].shape), total)]


def _operand(opcode: str, result: Part, size: int) -> Part:
    """What a device gives, by what it gets."""
    if opcode == "all-gather":
        return dataclasses.replace(result, bytes=result.bytes // size)
    if opcode == "reduce-scatter":
        return dataclasses.replace(result, bytes=result.bytes * size)
    return result


def _number(name: str, row: str) -> int:
    number = re.search(rf"\b{name}=(\d+)", row)
    return int(number[1]) if number else 0


def matched(
    traced: Sequence[TracedCollective],
    instructions: Sequence[Instruction],
    sizes: Mapping[AxisName, int],
) -> list[Collective]:
    """Every collective of the trace with what became of it, then those that XLA added."""
    # For each traced collective what the compiled program exchanges for it, and for each instruction the
    # traced ones that it does.
    exchanged: list[list[tuple[Instruction, Part]]] = [[] for _ in traced]
    done: dict[str, set[int]] = {}
    added: list[Collective] = []
    for instruction in instructions:
        foreign = []
        for element in instruction.elements:
            k = _best(traced, instruction, element, exchanged)
            if k is None:
                foreign.append(element)
            else:
                exchanged[k].append((instruction, _as_wide(traced[k], element[0])))
                done.setdefault(instruction.name, set()).add(k)
        if foreign:
            added.append(_added(instruction, foreign, sizes))
    return [_done(*pair, done) for pair in zip(traced, exchanged, strict=True)] + added


def _best(
    traced: Sequence[TracedCollective],
    instruction: Instruction,
    element: Element,
    exchanged: Sequence[Sequence[object]],
) -> int | None:
    """The number of the traced collective that an array of the compiled program belongs to, if any."""
    array, (op_name, frames) = element
    operations = set(re.split(r"[/():]", op_name))
    alike = [k for k, collective in enumerate(traced) if collective.primitive in operations]

    def fits(k: int) -> tuple[bool, bool]:
        """Whether it has room for one more array, and an operand of this size."""
        parts, size = traced[k].parts, _as_wide(traced[k], array).bytes
        return len(exchanged[k]) < len(parts), any(part.bytes == size for part in parts)

    near = [k for k in alike if _same(frames, traced[k].frames)]
    if not near and (line := user_line(frames)):
        near = [k for k in alike if traced[k].record.line == line]
    if not near:
        # JAX's cache on disk finds a program whatever its lines: these may be of another file, or moved.
        near = [k for k in alike if all(fits(k))]
    # One line may have several; each has room for as many arrays as it has operands. Loops over one function
    # are told apart by their turns.
    rank = lambda k: (*fits(k), traced[k].record.times == instruction.runs.times)
    return max(near, key=rank, default=None)


def _same(some: Sequence[Frame], others: Sequence[Frame]) -> bool:
    """Whether two lists of frames agree as far as both go."""
    common = min(len(some), len(others))
    return common > 0 and some[:common] == others[:common]


def _as_wide(traced: TracedCollective, part: Part) -> Part:
    """An array of the compiled program, with the bytes that it has in the trace.

    On a CPU XLA exchanges `bfloat16` as `float32`.
    """
    sizes = [operand.bytes for operand in traced.parts]
    if part.bytes not in sizes:
        width = bytes_of(part.dtype, (1,))
        for operand, size in zip(traced.parts, sizes, strict=True):
            if math.prod(operand.shape) * width == part.bytes:
                return dataclasses.replace(part, bytes=size)
    return part


def _done(
    traced: TracedCollective,
    exchanged: Sequence[tuple[Instruction, Part]],
    done: Mapping[str, set[int]],
) -> Collective:
    """A collective of the trace, with what the compiled program has of it."""
    if not exchanged:
        return dataclasses.replace(traced.record, bytes=0, compiled="removed")
    instructions = {instruction.name: instruction for instruction, _ in exchanged}
    others = len(set().union(*(done[name] for name in instructions))) - 1
    opcodes = {instruction.opcode for instruction in instructions.values()}
    opcodes -= {OPCODES.get(traced.record.operation)}
    compiled = f"as {', '.join(sorted(opcodes))}" if opcodes else "as traced"
    if others:
        compiled = f"merged with {others} other{'s' * (others > 1)}"
    runs = [instruction.runs for instruction in instructions.values()]
    times = sum(instruction.runs.times for instruction, _ in exchanged)
    return dataclasses.replace(
        traced.record,
        times=-(-times // len(traced.parts)),
        unknown_loop=any(each.unknown_loop for each in runs),
        branch=any(each.branch for each in runs),
        bytes=sum(instruction.sent(part) for instruction, part in exchanged),
        compiled=compiled,
        instructions=tuple(instructions),
    )


def _added(
    instruction: Instruction, elements: Sequence[Element], sizes: Mapping[AxisName, int]
) -> Collective:
    """What XLA exchanges on its own."""
    _, (_, frames) = elements[0]
    return Collective(
        operation=instruction.opcode,
        axes=axes_exchanged(instruction.groups, sizes) or (),
        **dataclasses.asdict(instruction.runs),
        bytes=sum(instruction.sent(part) for part, _ in elements),
        arrays=tuple(str(part) for part, _ in elements),
        cause="XLA's own",
        line=user_line(frames),
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
    parameters = text.parameters()
    constants = len(parameters) - len(arguments)
    # What JAX calls an input may be the name in another program, which it took from its cache on disk.
    named = [name or "constants" for name, _ in parameters[: max(constants, 0)]]
    paths = [*named, *arguments] if constants >= 0 else [name for name, _ in parameters]
    sizes = text.results()
    sources = results if len(results) == len(sizes) else ["results"] * len(sizes)
    allocated = int(
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )
    return Memory(
        arguments=int(stats.argument_size_in_bytes),
        results=int(stats.output_size_in_bytes),
        temporaries=int(stats.temp_size_in_bytes),
        donated=int(stats.alias_size_in_bytes),
        peak=int(getattr(stats, "peak_memory_in_bytes", 0)) or allocated,
        allocated=allocated,
        by_argument=_summed(paths, [size for _, size in parameters]),
        by_result=_summed(sources, sizes),
        result_table=int(stats.output_size_in_bytes) - sum(sizes),
    )


def _summed(paths: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """The bytes of each path, which may stand there several times."""
    total: Counter[str] = Counter()
    for path, size in zip(paths, sizes, strict=True):
        total[path] += size
    return dict(total)


# A copy on every device is large from here on, in bytes.
_LARGE_COPY = 16 * 2**20
# What is laid out at each call is worth a word from here on.
_WORTH_MOVING = 2**20


def advice(
    leaves: Sequence[LeafRow],
    sizes: Mapping[AxisName, int],
    donates_in_vain: bool,
    changing_statics: Sequence[str],
) -> list[str]:
    """A sentence or two for each thing that the author can surely improve."""
    count = math.prod(sizes.values())
    texts = []
    for row in leaves:
        whole = row.shape == row.shard_shape and row.kind not in ("array", "NumPy array", "number")
        if count > 1 and whole and row.bytes >= _LARGE_COPY:
            texts.append(
                f"{row.path} is copied to each of {count} devices, {bytes_str(row.bytes)} on each. "
                "Give it a spec that splits it."
            )
    # Smaller ones than any that is split are kept whole anyway.
    split = [row for row in leaves if row.placed_by == OWN_SPEC and any(row.split)]
    least = min((math.prod(row.shape) for row in split), default=0)
    odd = [row for row in leaves if row.whole.startswith(NO_AXIS)]
    odd = [row for row in odd if math.prod(row.shape) >= least]
    if odd:
        paths = first_paths([row.path for row in odd], " and ")
        total = bytes_str(sum(row.bytes for row in odd))
        texts.append(
            f"{paths}: {total} stay whole on each of {count} devices, because {odd[0].whole}. "
            "Pad an axis to a multiple, so that `fsdp` can split it."
        )
    # What comes from the host has to be moved, and what comes back is laid out from then on.
    moved = [row for row in leaves if row.kind == "array" and row.leaves == "not returned"]
    moved = [row for row in moved if row.moved >= _WORTH_MOVING]
    if moved:
        paths = first_paths([row.path for row in moved], " and ")
        total = bytes_str(sum(row.moved for row in moved))
        texts.append(
            f"{paths}: {total} are laid out on each device at each call that gets them like this. "
            f"Call {moved[0].call}.place once, and pass what it returns."
        )
    if donates_in_vain:
        texts.append(
            "donate gives nothing up: no result has the shape, dtype and placement of a donated argument."
        )
    if changing_statics:
        texts.append(
            f"{', '.join(changing_statics)}: a call was compiled anew for each value of it. "
            "Pass it as an array, or as an object that compares equal."
        )
    return texts


def explanation_of(
    *,
    name: str,
    sizes: Mapping[AxisName, int],
    leaves: Sequence[LeafRow],
    results: Sequence[ResultRow],
    jaxpr: Any,
    compiled: Any,
    arguments: Sequence[str],
    outputs: Sequence[str],
    calls: Sequence[Mapped],
    donates_in_vain: bool = False,
    changing_statics: Sequence[str] = (),
) -> Explanation:
    """The explanation of a call.

    **Arguments:**

    - `name`: of the function.
    - `sizes`: the sizes of the mesh's axes.
    - `leaves`, `results`: the records of its leaves.
    - `jaxpr`, `compiled`: its program; `None` where nothing is compiled.
    - `arguments`, `outputs`: the paths of the program's inputs and outputs.
    - `calls`: the mapped calls that it makes.
    - `donates_in_vain`: whether the author gives memory up that nothing can take.
    - `changing_statics`: the paths of static leaves for which several programs were compiled already.
    """
    traced = traced_collectives(jaxpr, calls)
    collectives, memory = [collective.record for collective in traced], None
    if compiled is not None:
        text = CompiledText(compiled.as_text())
        collectives = matched(traced, text.instructions(), sizes)
        # JAX leaves out the inputs that the program does not read.
        read = zip(arguments, jaxprs.inputs_read(jaxpr), strict=True)
        memory = memory_of(compiled, text, [path for path, is_read in read if is_read], outputs)
    return Explanation(
        name=name,
        sizes=sizes,
        leaves=leaves,
        results=results,
        collectives=collectives,
        memory=memory,
        advice=advice(leaves, sizes, donates_in_vain, changing_statics),
    )
