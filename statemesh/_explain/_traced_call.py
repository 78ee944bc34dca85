"""From a traced call to its explanation: it is compiled where there are devices, and never run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._base import _jaxprs as jaxprs
from .._base._types import AxisName
from ._advice import advice
from ._explanation import Explanation
from ._hlo import CompiledText
from ._matched import as_traced, matched
from ._memory import memory_of
from ._records import LeafRow, ResultRow
from ._traced import Mapped, traced_collectives


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
