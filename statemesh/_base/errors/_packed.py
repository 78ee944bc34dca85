"""Errors of packed models."""

from collections.abc import Mapping, Sequence
from typing import Any

from .._paths import describe
from .._types import AxisName
from ._classes import SpecError, StructureError
from ._text import bullets, first_paths, sizes_str, spec_str


def other_buffer(paths: Sequence[str], buffer: Any, shape: tuple[int, ...]) -> StructureError:
    return StructureError(
        f"Packed: the buffer with {first_paths(paths)} is {describe(buffer)}, but was packed with shape "
        f"{shape}, by which states are found in it. Change shapes in the model, and pack that one anew."
    )


def fixed_packed(attribute: str) -> AttributeError:
    return AttributeError(
        f"Packed is immutable; cannot assign to `{attribute}`. Its values change in a mapped call, by "
        "`jax.tree.map`, or in the model: `packed.unpack()`."
    )


def packed_for_other_sizes(
    name: str, packed: Mapping[AxisName, int], sizes: Mapping[AxisName, int]
) -> SpecError:
    return SpecError(
        f"{name}: a model is packed for a mesh with {sizes_str(packed)}, and this call is on "
        f"{sizes_str(sizes)}. Pack it for the mesh that it goes to: statemesh.pack(packed.unpack(), mesh)."
    )


def packed_otherwise(name: str, found: Sequence[tuple[str, Any, Any]]) -> SpecError:
    lines = (
        f"{path}: packed to lie by {spec_str(packed)}, this call wants {spec_str(wanted)}"
        for path, packed, wanted in found
    )
    return SpecError(
        f"{name}: states that are packed to lie otherwise than this call places them:\n{bullets(lines)}\n"
        "Give statemesh.pack the same specs: pack(model, mesh, state_specs=...) as in state_in_specs."
    )
