"""Placements, and what a `PartitionSpec` says of mesh axes."""

import dataclasses
from typing import Any, ClassVar, TypeAlias

import jax
from jax.sharding import PartitionSpec

from ._checks import check_named_once
from ._types import Axes, AxisName, Leaf, is_axis_name


class PerShard:
    """A placement: one independent value per shard.

    Outside the mapped call the state's value has a leading axis as long as the named mesh axes
    together; inside, each shard sees its own entry without that axis. It stands wherever a
    state's spec may.

    **Arguments:**

    - `axis_names`: the mesh axes over which each shard has a value of its own, major to minor.

    **Raises:** `TypeError` when no axis is named, or something that is no name; `StatemeshError` when one is
    named twice.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> sm.PerShard("data")
        PerShard('data')

        ```
    """

    __slots__ = ("axis_names",)

    axis_names: tuple[AxisName, ...]

    def __init__(self, *axis_names: AxisName) -> None:
        flat: list[AxisName] = []
        for name in axis_names:
            flat.extend(name if isinstance(name, tuple) else (name,))
        if not flat:
            raise TypeError("PerShard names no mesh axis. Write PerShard('data').")
        for name in flat:
            if not is_axis_name(name):
                kind = type(name).__name__
                raise TypeError(
                    f"PerShard names {name!r} of type {kind}, which is no mesh axis. Write PerShard('data')."
                )
        check_named_once("PerShard", "axis_names", flat)
        object.__setattr__(self, "axis_names", tuple(flat))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"PerShard is immutable; cannot set {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return PerShard, self.axis_names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerShard) and self.axis_names == other.axis_names

    def __hash__(self) -> int:
        return hash((PerShard, self.axis_names))

    def __repr__(self) -> str:
        return f"PerShard({', '.join(map(repr, self.axis_names))})"


def is_spec(node: object) -> bool:
    """Whether `node` is a spec. `None` is one: it means "not sharded"."""
    return node is None or isinstance(node, PartitionSpec | PerShard)


def is_axis(node: object) -> bool:
    """Whether `node` is the axis of an array, as in `in_axes`. `None` is one: it means "not mapped"."""
    return node is None or type(node) is int


def spec_axes(spec: PartitionSpec) -> tuple[tuple[AxisName, ...], ...]:
    """The mesh axes of each array axis, trailing unsharded axes dropped."""
    entries = list(written_axes(spec))
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def written_axes(spec: PartitionSpec) -> tuple[tuple[AxisName, ...], ...]:
    """The mesh axes of each array axis that `spec` has an entry for."""
    return tuple(() if e is None else e if isinstance(e, tuple) else (e,) for e in spec.partitions)


def mentioned(spec: PartitionSpec) -> frozenset[AxisName]:
    """Every mesh axis that `spec` names: those that split an array axis, and those it is unreduced over."""
    return frozenset(name for names in spec_axes(spec) for name in names) | spec.unreduced


def only(spec: PartitionSpec, names: Axes) -> PartitionSpec:
    """`spec` without all other mesh axes, in its shortest spelling."""
    return canonical(restricted(spec, names))


def restricted(spec: PartitionSpec, names: Axes) -> PartitionSpec:
    """`spec` without all other mesh axes, with as many entries as it has."""
    kept = [tuple(name for name in axis if name in names) for axis in written_axes(spec)]
    entries = tuple(entry_of(axis) for axis in kept)
    unreduced, reduced = spec.unreduced & names, spec.reduced & names
    if (
        unreduced == spec.unreduced
    ):  # `update` also keeps the kind of reduction, which newer releases have.
        return spec.update(partitions=entries, reduced=reduced)
    return PartitionSpec(*entries, unreduced=unreduced, reduced=reduced)


def canonical(spec: PartitionSpec) -> PartitionSpec:
    """The shortest spelling of `spec`, the one that compiled outputs carry."""
    return spec.update(partitions=tuple(map(entry_of, spec_axes(spec))))


def entry_of(names: tuple[AxisName, ...]) -> AxisName | tuple[AxisName, ...] | None:
    """The entry of a spec for an array axis that these mesh axes split, in its shortest spelling."""
    return None if not names else names[0] if len(names) == 1 else names


@dataclasses.dataclass(frozen=True, slots=True)
class SpecPlacement:
    """The placement of one leaf on a mesh.

    **Attributes:**

    - `spec`: the spec in its shortest spelling.
    - `written`: the spec as the user wrote it. One with more entries than an array has axes is a mistake,
        whatever the entries.
    - `axis`: the array axis that shards see the leaf without; `None` if there is none.
    - `axes`: the mesh axes that split each array axis, one entry for each of the spec's.
    - `axis_names`: all of these: the axes over which the leaf's parts are kept apart.
    """

    spec: PartitionSpec = dataclasses.field(init=False)
    written: PartitionSpec = dataclasses.field(compare=False)
    axis: int | None = None
    axes: tuple[tuple[AxisName, ...], ...] = dataclasses.field(init=False, compare=False)
    axis_names: frozenset[AxisName] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", canonical(self.written))
        object.__setattr__(self, "axes", written_axes(self.written))
        object.__setattr__(self, "axis_names", mentioned(self.spec))

    def take(self, shard: Leaf) -> Any:
        """What the shard sees of its part."""
        return shard if self.axis is None else jax.lax.squeeze(shard, (self.axis,))

    def put(self, value: Leaf) -> Any:
        """The part that a shard's value becomes."""
        return value if self.axis is None else jax.lax.expand_dims(value, (self.axis,))


@dataclasses.dataclass(frozen=True, slots=True)
class LanePlacement:
    """The axis of one leaf that `vmap` takes away inside; `None` where all lanes share it.

    **Attributes:**

    - `axis_names`: the axis over which the leaf's parts are kept apart, if any.
    """

    axis: int | None
    axis_names: frozenset[AxisName]

    # These belong to a placement on a mesh.
    spec: ClassVar[Any] = None
    written: ClassVar[Any] = None
    axes: ClassVar[tuple[()]] = ()

    def take(self, part: Leaf) -> Any:
        """What the lane sees of its part: `vmap` has taken the axis away."""
        return part

    def put(self, value: Leaf) -> Any:
        """The part that a lane's value becomes: `vmap` will add the axis."""
        return value


Placement: TypeAlias = SpecPlacement | LanePlacement
"""The placement of one leaf: on a mesh, or over lanes. Both classes have the same attributes."""
