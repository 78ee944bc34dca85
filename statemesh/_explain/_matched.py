"""The collectives of the trace and those of the compiled program, as one list."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from .._base._types import AxisName
from ._frames import Frame, user_line
from ._groups import axes_of
from ._hlo import Element, Instruction, bytes_of
from ._records import Collective
from ._traced import TracedCollective


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
