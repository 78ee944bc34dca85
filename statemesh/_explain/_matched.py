"""The collectives of the trace and those of the compiled program, as one list."""

from collections.abc import Mapping, Sequence

from .._base._types import AxisName
from ._frames import user_line
from ._groups import axes_of
from ._hlo import Element, Instruction
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
    for instruction in instructions:
        for element in instruction.elements:
            k = _origin(element, traced, does)
            if k is None:
                own.setdefault(instruction.name, []).append(element)
            else:
                does[k].append((instruction, element))
                done_by.setdefault(instruction.name, set()).add(k)
    found = [_compiled(one, does[k], done_by) for k, one in enumerate(traced)]
    return found + [_own(one, own[one.name], sizes) for one in instructions if one.name in own]


def _origin(
    element: Element,
    traced: Sequence[TracedCollective],
    does: Mapping[int, Sequence[object]],
) -> int | None:
    """The number of the traced collective that an array of the compiled program belongs to."""
    source = element.source
    operations = source.op_name.replace("(", "/").replace(")", "/").replace(":", "/").split("/")
    best: tuple[int, bool, bool] | None = None
    chosen: int | None = None
    for k, one in enumerate(traced):
        if one.primitive not in operations:
            continue
        common = min(len(source.frames), len(one.frames))
        same = common > 0 and source.frames[:common] == one.frames[:common]
        line = user_line(source.frames)
        if not same and (not line or line != one.line):
            continue
        room = len(does[k]) < len(one.parts)
        alike = any(part.bytes == element.part.bytes for part in one.parts)
        # One line may have several; each has room for as many arrays as it has operands.
        score = (int(same), room, alike)
        if best is None or score > best:
            best, chosen = score, k
    return chosen


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
        sum(instruction.sent(element) for instruction, element in done),
        compiled,
        tuple(instructions),
    )


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
