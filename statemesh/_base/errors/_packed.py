"""Errors of packed models."""

from collections.abc import Mapping, Sequence

from .._paths import describe
from .._types import AxisName
from ._classes import SpecError, StructureError
from ._text import error_listing, first_paths, sizes_str, spec_str


def other_buffer(paths: Sequence[str], buffer: object, shape: tuple[int, ...]) -> StructureError:
    return StructureError(
        f"Packed: the buffer with {first_paths(paths)} is {describe(buffer)}, but was packed with shape "
        f"{shape}, in which the states have their positions. Change shapes in the model, and pack the model "
        "anew."
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
        f"{name}: a model is packed for a mesh with {sizes_str(packed) or 'no axes'}, but this call is on "
        f"{sizes_str(sizes) or 'no axes'}. Pack it for the mesh of this call: "
        "statemesh.pack(packed.unpack(), mesh)."
    )


def packed_with_other_specs(name: str, found: Sequence[tuple[str, object, object]]) -> SpecError:
    return error_listing(
        SpecError,
        f"{name}: these states are packed with other specs than this call has for them",
        [
            f"{path}: packed with {spec_str(packed)}, but this call has {spec_str(needed)}"
            for path, packed, needed in found
        ],
        "Give statemesh.pack the same specs: pack(model, mesh, state_specs=...) as in state_in_specs.",
    )
