"""From a traced call to its explanation: it is compiled where there are devices, and never run."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from .._base._types import AxisName
from ._advice import advice
from ._explanation import Explanation
from ._hlo import CompiledText
from ._matched import as_traced, matched
from ._memory import memory_of
from ._records import LeafRow, ResultRow
from ._traced import traced_collectives


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """What is known of a call before it is compiled.

    **Attributes:**

    - `name`: of the function.
    - `mesh`: the mesh that it runs on, if it runs on one.
    - `sizes`: the sizes of the mesh's axes.
    - `jaxpr`: its program.
    - `lower`: lowers the program; `None` for a call that runs without being compiled.
    - `leaves`, `results`: the records of its leaves.
    - `arguments`, `outputs`: the paths of the program's inputs and outputs.
    - `merged`: for each output the paths of the states that a policy merges into it.
    - `donates_in_vain`: whether the author gives memory up that nothing can take.
    - `changing_statics`: the paths of static leaves for which several programs were compiled already.
    """

    name: str
    mesh: Mesh | AbstractMesh | None
    sizes: Mapping[AxisName, int]
    jaxpr: Any
    lower: Callable[[], Any] | None
    leaves: Sequence[LeafRow]
    results: Sequence[ResultRow]
    arguments: Sequence[str]
    outputs: Sequence[str]
    merged: Sequence[Collection[str]]
    donates_in_vain: bool = False
    changing_statics: Sequence[str] = ()


def explanation_of(call: TracedCall) -> Explanation:
    """The explanation of a call."""
    traced = traced_collectives(call.jaxpr, call.merged, {})
    if call.lower is None or isinstance(call.mesh, AbstractMesh):
        collectives, memory = as_traced(traced), None
    else:
        compiled = call.lower().compile()
        devices = 1 if call.mesh is None else call.mesh.size
        text = CompiledText(compiled.as_text(), devices)
        collectives = matched(traced, text.instructions(), call.sizes)
        memory = memory_of(compiled, text, call.arguments, call.outputs)
    return Explanation(
        name=call.name,
        sizes=call.sizes,
        leaves=call.leaves,
        results=call.results,
        collectives=collectives,
        memory=memory,
        advice=advice(call.leaves, call.sizes, call.donates_in_vain, call.changing_statics),
    )
