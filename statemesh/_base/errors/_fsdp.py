"""Errors of parameters that are split over a data axis."""

from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from .._paths import describe
from .._types import AxisName
from ._classes import SpecError, StatemeshError, StructureError
from ._text import (
    axes_argument,
    error_listing,
    first_items,
    first_paths,
    listed,
    mesh_str,
    quoted,
    spec_str,
    typed_str,
)


def fsdp_unknown_axes(unknown: Sequence[AxisName], mesh: Mesh | AbstractMesh) -> SpecError:
    return SpecError(
        f"fsdp: no axis is called {quoted(unknown)}; the axes of {mesh_str(mesh)} are "
        f"{quoted(mesh.axis_names)}."
    )


def fsdp_bad_number(what: str, given: object) -> TypeError | ValueError:
    kind = ValueError if type(given) is int else TypeError
    return kind(f"fsdp: {what} must be 0 or a larger int, got {typed_str(given)}.")


def fsdp_packed() -> StructureError:
    return StructureError(
        "fsdp: the arrays of a Packed lie in buffers already. Write "
        "`sm.pack(sm.fsdp(packed.unpack(), mesh, axis_name), mesh)`."
    )


def fsdp_no_parameters() -> StructureError:
    return StructureError(
        "fsdp: the model has no parameters: no ParamState, and no array of floats outside States."
    )


def not_gathered(what: str) -> TypeError:
    return TypeError(
        f"{what} was applied to a parameter of which each shard holds a part. Make the layer's parameters "
        "whole before you call it: `layer = sm.gather(layer, axis_name)`, with the axis that fsdp was given."
    )


def with_gather_hint(
    text: str, parts: Sequence[tuple[str, object, object]], names: Sequence[AxisName]
) -> str:
    items = [
        f"{path} is {describe(part)}, a part by its spec {spec_str(spec)}"
        for path, part, spec in parts
    ]
    name = axes_argument(names)
    return f"{text}\n\n" + listed(
        "Hint: each shard holds a part of these parameters",
        first_items(items),
        "Make them whole before they are used, as parameters that fsdp has split are: "
        f"`model = sm.gather(model, {name!r})`.",
    )


def gather_whole(names: Sequence[AxisName], whole: Sequence[tuple[str, object]]) -> StructureError:
    name = axes_argument(names)
    return error_listing(
        StructureError,
        f"gather over {name!r}: these parameters are whole already",
        [f"{path}: {describe(unit)}, without a spec" for path, unit in whole],
        f"Let `model = sm.fsdp(model, mesh, {name!r})` split the model before the mapped call, and gather "
        "each parameter once.",
    )


def gather_major(names: Sequence[AxisName], bad: Sequence[tuple[str, object]]) -> StatemeshError:
    name = axes_argument(names)
    return error_listing(
        StatemeshError,
        f"gather over {name!r}: other mesh axes split the parts of these parameters further",
        [f"{path}: {spec_str(spec)}" for path, spec in bad],
        f"Name {quoted(names)} last in its entry, or in an entry of its own.",
    )


def gather_replicated(
    names: Sequence[AxisName], bad: Sequence[tuple[str, object]]
) -> StatemeshError:
    name = axes_argument(names)
    return error_listing(
        StatemeshError,
        f"gather over {name!r}: each shard already has the whole of these parameters, although their specs "
        "split them",
        [f"{path}: {spec_str(spec)}" for path, spec in bad],
        "Leave them out of state_in_specs, so that they enter the call by their own specs.",
    )


def gather_in_lanes(name: AxisName) -> StatemeshError:
    return StatemeshError(
        f"gather: {name!r} is an axis of lanes, and specs split parameters over mesh axes only. Call the "
        f"function by `sm.shard_map` on a mesh with an axis {name!r}."
    )


def scatter_structure(missing: Sequence[str], extra: Sequence[str]) -> StructureError:
    items = []
    if missing:
        items.append(f"only the model before has {first_paths(missing)}")
    if extra:
        items.append(f"only the gathered model has {first_paths(extra)}")
    return error_listing(
        StructureError,
        "scatter: the two models have different structures",
        items or ["their leaves are in another order"],
        "Pass the model that was given to gather, and what its layers made of the gathered one.",
    )
