"""Errors of specs, and of arrays that do not fit their specs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._nodes import is_state
from .._paths import describe
from .._types import AxisName, flat_names
from ._classes import BatchAxisError, SpecError
from ._text import counted, error_listing, mesh_str, node_str, quoted, spec_str, typed_str


@dataclasses.dataclass(frozen=True)
class ShapeMismatch:
    """An argument that its spec does not fit: its rank (`dim` is `None`), or the size of one axis."""

    path: str
    value: Any
    spec: PartitionSpec
    dim: int | None
    per_shard: bool


@dataclasses.dataclass(frozen=True)
class RankMismatch:
    """A returned array with fewer axes than its spec has entries."""

    path: str
    value: Any
    spec: PartitionSpec


def not_a_spec(where: str, spec: object) -> TypeError:
    return TypeError(
        f"{where} is {typed_str(spec)}, not a spec. Use P('axis'), P(), None, or for a state "
        "sm.PerShard('axis')."
    )


def per_shard_for_array(where: str, spec: Any) -> SpecError:
    axes = spec_str(PartitionSpec(*spec.axis_names))
    return SpecError(
        f"{where} is {spec!r}, which can only place States. Use {axes} for an array; for a State write "
        f"state_in_specs={{...: {spec!r}}} or State(value, spec={spec!r})."
    )


def specs_of_states(
    name: str, what: str, option: str, bad: Sequence[tuple[str, PartitionSpec, str, object]]
) -> SpecError:
    items = [
        f"{where} = {spec_str(spec)} stands for {path}, a {type(state).__name__}"
        for where, spec, path, state in bad
    ]
    spec = spec_str(bad[0][1])
    return error_listing(
        SpecError,
        f"{name}: {what} places arrays outside of States, so these specs would place nothing",
        items,
        f"Write None there, and say where States go: {option}={{...: {spec}}} or State(value, spec={spec}). "
        "A RandomState needs neither, because each shard draws from a stream of its own.",
    )


def unknown_axes(
    unknown: Sequence[tuple[str, object, Sequence[AxisName]]],
    mesh: Mesh | AbstractMesh,
    names: Sequence[AxisName],
) -> SpecError:
    bad = [name for _, _, names_of_one in unknown for name in names_of_one]
    left = [name for name in mesh.axis_names if name not in names]
    lacking = (
        "that the call does not map over" if set(bad) & set(left) else "the mesh does not have"
    )
    mend = f"The axes to map over are {quoted(names)} of {mesh_str(mesh)}"
    mend += f"; {quoted(left)} is not mapped over." if left else "."
    if PartitionSpec.UNCONSTRAINED in bad:
        mend += (
            " A mapped call must know how each axis is split: write None for one that is not split."
        )
    items = [f"{where} refers to {quoted(own)}: {spec_str(spec)}" for where, spec, own in unknown]
    return error_listing(SpecError, f"specs name axes {lacking}", items, mend)


def axis_twice(twice: Sequence[tuple[str, object, Sequence[AxisName]]]) -> SpecError:
    items = [f"{where} = {spec_str(spec)} has {quoted(bad)} twice" for where, spec, bad in twice]
    return error_listing(SpecError, "a mesh axis can split only one axis of an array", items)


def prefix_mismatch(bad: Sequence[tuple[str, object, str, object]]) -> SpecError:
    return error_listing(
        SpecError,
        "specs must be a tree prefix of what they place",
        _prefix_items(bad, "placed by `state_in_specs`, `state_out_specs` or their own `spec`"),
        "One spec stands for a whole subtree: P() or P('axis') in its place fits anything.",
    )


def axes_prefix_mismatch(bad: Sequence[tuple[str, object, str, object]]) -> BatchAxisError:
    return error_listing(
        BatchAxisError,
        "axes must be a tree prefix of what they map",
        _prefix_items(bad, "mapped by `state_in_axes` and `state_out_axes`"),
        "One axis stands for a whole subtree: 0 or None in its place fits anything.",
    )


def _prefix_items(bad: Sequence[tuple[str, object, str, object]], how: str) -> list[str]:
    return [
        f"{what} = {prefix!r} reaches into the State {root}; States are {how}"
        if is_state(tree)
        else f"{what} is {node_str(prefix)}, but {root} is {node_str(tree)}"
        for what, prefix, root, tree in bad
    ]


def shapes(what: str, bad: Sequence[ShapeMismatch], mesh: Mesh | AbstractMesh) -> SpecError:
    return error_listing(
        SpecError,
        f"{what}: arrays do not fit their specs on {mesh_str(mesh)}",
        [_shape_item(one, mesh) for one in bad],
        "Pad the array, choose another spec, or write P() to replicate it.",
    )


def _shape_item(one: ShapeMismatch, mesh: Mesh | AbstractMesh) -> str:
    shown = f"{one.path}: {describe(one.value)} with spec {spec_str(one.spec)}"
    if one.dim is None:
        if one.per_shard:
            return (
                f"{shown} (PerShard) is a scalar; it needs a leading axis with one entry per shard"
            )
        return _rank_item(one)
    size, names = np.shape(one.value)[one.dim], flat_names(one.spec.partitions[one.dim])
    sizes = [mesh.shape[name] for name in names if name in mesh.shape]
    parts = int(np.prod(sizes, dtype=int))
    product = " * ".join(map(str, sizes)) + (f" = {parts}" if len(sizes) > 1 else "")
    if one.per_shard:
        return f"{shown} (PerShard): axis {one.dim} has size {size}, but needs one entry per shard, {product}"
    return (
        f"{shown}: axis {one.dim} has size {size}, not divisible by {quoted(names)} of size {product} "
        f"({size} % {parts} = {size % parts})"
    )


def _rank_item(one: ShapeMismatch | RankMismatch) -> str:
    entries = counted(len(one.spec.partitions), "entry", "entries")
    return (
        f"{one.path}: {describe(one.value)} has rank {np.ndim(one.value)}, but its spec "
        f"{spec_str(one.spec)} has {entries}"
    )


def out_rank(name: str, bad: Sequence[RankMismatch]) -> SpecError:
    return error_listing(
        SpecError,
        f"{name}: results have fewer axes than their specs have entries",
        map(_rank_item, bad),
        "Keep an axis, as with jnp.sum(x, keepdims=True) or x[None], or use P() for a value that is "
        "the same on every shard.",
    )


def none_for_array(path: str, value: object) -> SpecError:
    return SpecError(
        f"{path} is {describe(value)}, but its out_spec is None, which only fits results without arrays "
        "outside States. Write P() or P('axis')."
    )
