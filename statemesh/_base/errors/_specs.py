"""Errors of specs, and of arrays that do not fit their specs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from .._paths import describe
from .._types import AxisName, PerShard, is_state, written_axes
from ._classes import BatchAxisError, SpecError
from ._text import bullets, mesh_str, node_str, quoted, spec_str


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


def not_a_spec(where: str, spec: Any) -> TypeError:
    return TypeError(
        f"{where} is {spec!r} of type {type(spec).__name__}, not a spec. Use P('axis'), P(), None, or for "
        "a state sm.PerShard('axis')."
    )


def per_shard_for_array(where: str, spec: PerShard) -> SpecError:
    axes = spec_str(PartitionSpec(*spec.axis_names))
    return SpecError(
        f"{where} is {spec!r}, which places States only. Use {axes} for an array; for a State write "
        f"state_in_specs={{...: {spec!r}}} or State(value, spec={spec!r})."
    )


def unknown_axes(
    unknown: Sequence[tuple[str, Any, Sequence[AxisName]]], mesh: Any, names: Sequence[AxisName]
) -> SpecError:
    items = [f"{where} refers to {quoted(bad)}: {spec_str(spec)}" for where, spec, bad in unknown]
    left = [name for name in mesh.axis_names if name not in names]
    there = f"The axes to map over are {quoted(names)} of {mesh_str(mesh)}"
    also = f"; {quoted(left)} is not mapped over" if left else ""
    if any(PartitionSpec.UNCONSTRAINED in bad for _, _, bad in unknown):
        also += ". A call that is mapped has to know how each axis is split: write None for one that is not"
    return SpecError(f"specs name axes that there are not:\n{bullets(items)}\n{there}{also}.")


def axis_twice(twice: Sequence[tuple[str, Any, Sequence[AxisName]]]) -> SpecError:
    items = [f"{where} = {spec_str(spec)} has {quoted(bad)} twice" for where, spec, bad in twice]
    return SpecError(f"a mesh axis can split one array axis only:\n{bullets(items)}")


def prefix_mismatch(bad: Sequence[tuple[str, Any, str, Any]]) -> SpecError:
    return SpecError(
        "specs must be a tree prefix of what they place:\n"
        + _prefix_lines(bad, "placed by `state_in_specs`, `state_out_specs` or their own `spec`")
        + "\nOne spec stands for a whole subtree: P() or P('axis') in its place fits anything."
    )


def axes_prefix_mismatch(bad: Sequence[tuple[str, Any, str, Any]]) -> BatchAxisError:
    return BatchAxisError(
        "axes must be a tree prefix of what they map:\n"
        + _prefix_lines(bad, "mapped by `state_in_axes` and `state_out_axes`")
        + "\nOne axis stands for a whole subtree: 0 or None in its place fits anything."
    )


def _prefix_lines(bad: Sequence[tuple[str, Any, str, Any]], how: str) -> str:
    return bullets(
        f"{what} = {prefix!r} reaches into the State {root}; States are {how}"
        if is_state(tree)
        else f"{what} is {node_str(prefix)}, but {root} is {node_str(tree)}"
        for what, prefix, root, tree in bad
    )


def shapes(what: str, bad: Sequence[ShapeMismatch], mesh: Any) -> SpecError:
    return SpecError(
        f"{what}: arrays do not fit their specs on {mesh_str(mesh)}:\n"
        + bullets(_shape_line(one, mesh) for one in bad)
        + "\nPad the array, choose another spec, or, to replicate it, consider using an in_specs entry of "
        "`P()`."
    )


def _shape_line(one: ShapeMismatch, mesh: Any) -> str:
    shown = f"{one.path}: {describe(one.value)} with spec {spec_str(one.spec)}"
    axes = written_axes(one.spec)
    if one.dim is None:
        if one.per_shard:
            return f"{shown} (PerShard) is a scalar; it needs a leading axis of one entry per shard"
        return _rank_line(one.path, one.value, one.spec)
    size, names = np.shape(one.value)[one.dim], axes[one.dim]
    sizes = [mesh.shape[name] for name in names if name in mesh.shape]
    parts = int(np.prod(sizes, dtype=int))
    product = " * ".join(map(str, sizes)) + (f" = {parts}" if len(sizes) > 1 else "")
    if one.per_shard:
        return (
            f"{shown} (PerShard): axis {one.dim} has size {size}, one entry per shard is {product}"
        )
    return (
        f"{shown}: axis {one.dim} has size {size}, not divisible by {quoted(names)} of size {product} "
        f"({size} % {parts} = {size % parts})"
    )


def out_rank(name: str, bad: Sequence[RankMismatch]) -> SpecError:
    items = [_rank_line(one.path, one.value, one.spec) for one in bad]
    return SpecError(
        f"{name}: results have fewer axes than their specs have entries:\n{bullets(items)}\n"
        "Keep an axis, as with jnp.sum(x, keepdims=True) or x[None], or use P() for a value that is the "
        "same on every shard."
    )


def _rank_line(path: str, value: Any, spec: PartitionSpec) -> str:
    return (
        f"{path}: {describe(value)}, which has rank {np.ndim(value)}, with spec {spec_str(spec)}, which has "
        f"length {len(spec.partitions)}"
    )


def none_for_array(path: str, value: Any) -> SpecError:
    return SpecError(
        f"{path} is {describe(value)}, but its out_spec is None, which fits only what holds no array "
        "outside of States. Write P() or P('axis')."
    )
