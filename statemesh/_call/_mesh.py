"""Step 2, meshes: which mesh a call runs on, what its axes are called, and how it is stored."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._base import _errors as errors
from .._base._errors import (
    SpecError,
    StatemeshError,
    error_listing,
    mesh_str,
    mesh_with_types_str,
    quoted,
    spec_str,
    typed_str,
)
from .._base._specs import PerShard, is_spec, spec_axes
from .._base._trees import describe
from .._base._types import Axes, AxisName, Leaf, PyTree
from .._jax import _compat as compat
from .._jax import _explicit as explicit


_MAKE_ONE = "Make one with `jax.make_mesh((jax.device_count(),), ('x',))`."


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A row of devices, or a mesh of them: its shape, axis names and axis types."""

    platform: str
    numbers: tuple[int, ...]
    mesh: tuple[tuple[int, ...], tuple[str, ...], tuple[AxisType, ...]] | None

    def restored(self) -> PyTree:
        """The same devices of this process's JAX."""
        present = {device.id: device for device in jax.devices(self.platform)}
        if missing := [number for number in self.numbers if number not in present]:
            raise StatemeshError(
                f"This was pickled with {self.platform} devices numbered {missing}, but this process "
                f"has {sorted(present)}. Make the mesh here and map the function over it; or leave the "
                "mesh out, and set it with jax.set_mesh(mesh)."
            )
        devices = tuple(present[number] for number in self.numbers)
        if self.mesh is None:
            return devices
        shape, names, types = self.mesh
        return Mesh(np.array(devices).reshape(shape), names, axis_types=types)


def by_fields(value: Leaf) -> tuple[Leaf, ...]:
    """The result of `__reduce__` for a dataclass of which a field may hold a mesh or devices."""
    fields = {f.name: _stored(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return _from_fields, (type(value), fields)


def _from_fields(cls: type, fields: dict[str, object]) -> PyTree:
    return cls(**{k: v.restored() if isinstance(v, _Stored) else v for k, v in fields.items()})


def _stored(value: object) -> PyTree:
    devices, mesh = value, None
    if isinstance(value, Mesh) and not value.empty:
        devices = tuple(value.devices.flat)
        mesh = value.devices.shape, value.axis_names, value.axis_types
    if isinstance(devices, tuple) and devices and all(isinstance(x, jax.Device) for x in devices):
        return _Stored(devices[0].platform, tuple(device.id for device in devices), mesh)
    return value


def resolve_mesh(
    declared: Mesh | AbstractMesh | None, axis_names: Axes, recorded: bool
) -> Mesh | AbstractMesh:
    """The mesh that was given, or the one of the context.

    **Arguments:**

    - `declared`: the mesh that the user named, if any.
    - `axis_names`: the axes that the user named; empty for all.
    - `recorded`: whether the call is recorded into a jaxpr rather than run. What runs, if only in an eager
        transformation, needs devices: those of the mesh that is set.

    **Raises:** `SpecError` when there is no mesh, or the two differ.
    """
    mesh, context = _declared_or_set(declared), compat.context_mesh()
    if context is not None and mesh.abstract_mesh != context:
        taken = compat.manual_axes(context)
        if not taken or dict(mesh.shape) != dict(context.shape):
            raise SpecError(
                f"shard_map was given {mesh_with_types_str(mesh)}, but the mesh that is set is "
                f"{mesh_with_types_str(context)}. Leave `mesh` out to use the mesh that is set, or call "
                "outside `jax.set_mesh`."
            )
        if not axis_names and taken < frozenset(context.axis_names):
            left = [name for name in mesh.axis_names if name not in taken]
            raise SpecError(
                f"shard_map was given {mesh_str(mesh)} to map over all its axes, but an enclosing shard_map "
                f"already maps over {quoted(taken)}. Leave `mesh` out, or name the axes that are left: "
                f"axis_names={{{quoted(left)}}}."
            )
        # Inside another mapped call the context says which axes that call has taken.
        mesh = context
    if recorded or isinstance(mesh, Mesh):
        return mesh
    concrete = compat.concrete_context_mesh()
    # Inside another mapped call, the mesh that is set does not show the axes that the call has taken.
    return mesh if concrete is None or concrete.abstract_mesh != mesh else concrete


def one_device_mesh(declared: Mesh | AbstractMesh | None, traced: bool) -> Mesh:
    """A mesh of one device with the names of the one that was given, or else of the context's.

    **Raises:** `SpecError` when there is no mesh, inside a mapped call, or where JAX takes no other mesh than
    the one that is set.
    """
    mesh, context = _declared_or_set(declared), compat.context_mesh()
    if taken := compat.manual_axes(context):
        raise SpecError(
            "`unsharded` runs on a mesh of one device, so it cannot be called inside another mapped call, "
            f"which maps over {quoted(sorted(taken, key=str))} already. Call it outside that call."
        )
    if traced and context is not None and context.size > 1:
        raise SpecError(
            f"`unsharded` runs on a mesh of one device, but {mesh_str(context)} is set, and JAX allows no "
            "other mesh during a trace. If shard_map was given a mesh, call `unsharded` outside "
            "`jax.set_mesh`; if it was given none, call it inside `with jax.set_mesh(mesh):` with a mesh of "
            "one device."
        )
    # A device of this process, which could not read arrays on others.
    local = mesh.local_devices if isinstance(mesh, Mesh) else jax.local_devices()
    devices = np.array(local[:1]).reshape((1,) * len(mesh.axis_names))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _declared_or_set(declared: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    mesh = compat.context_mesh() if declared is None else declared
    if mesh is None:
        raise SpecError(
            "no mesh: shard_map was given none, and none is set. Pass `mesh=...`, or call inside "
            "`with jax.set_mesh(mesh):`."
        )
    if mesh.empty:
        raise _empty_mesh(mesh)
    return mesh


def check_mesh(what: str, mesh: Any) -> None:
    """Refuse anything but a mesh that has devices."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise not_a_mesh(mesh)
    if mesh.empty:
        raise _empty_mesh(mesh, what)


def mesh_of_arrays(mesh: AbstractMesh, leaves: Sequence[Leaf]) -> Mesh:
    """The devices of an abstract mesh: those on which the arguments of a call lie.

    Of one that an eager transformation traces, its concrete value.

    **Raises:** `SpecError` when none lies on such a mesh, or one on another.
    """
    meshes: list[Mesh] = []
    for leaf in map(compat.concrete_value, leaves):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            here = leaf.sharding.mesh
            if here.abstract_mesh != mesh:
                raise SpecError(
                    f"an argument, {describe(leaf)}, lies on {mesh_str(here)}, but shard_map was given the "
                    f"AbstractMesh {mesh_str(mesh)}, which takes its devices from the arguments. Put the "
                    "arguments on a mesh with these axes, or give shard_map the mesh that they lie on."
                )
            if isinstance(here, Mesh):
                meshes.append(here)
    if not meshes:
        raise SpecError(
            f"{mesh_str(mesh)} is an AbstractMesh, which has no devices to run on. Pass arrays that lie on a "
            "mesh with these axes, as jax.device_put(x, NamedSharding(mesh, P())) puts them, or give "
            "shard_map a jax.sharding.Mesh."
        )
    return meshes[0]


def lies_on_a_mesh(leaves: Sequence[Leaf]) -> bool:
    """Whether any of these arrays lies on the devices of a mesh."""
    shardings = [getattr(x, "sharding", None) for x in leaves if isinstance(x, jax.Array)]
    return any(isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh) for s in shardings)


def mesh_for_traced(mesh: Mesh | AbstractMesh, leaves: Sequence[Leaf]) -> Mesh | AbstractMesh:
    """The mesh whose axis types suit traced arguments.

    On Explicit axes a sharding is part of every value's type. Where nothing says that the values
    around the call are typed so (no mesh in context, no such argument), Auto axes let the result
    mix with them, be carried by a scan, and be differentiated outside. In a `jax.vmap` that is not
    recorded they stay as they are: its lanes may be spread over them.
    """
    if isinstance(mesh, AbstractMesh) or not explicit.has_explicit_axes(mesh):
        return mesh
    if compat.context_mesh() is not None:
        return mesh
    typed = any(map(explicit.is_explicitly_typed, leaves))
    if typed and (compat.under_jit() or any(map(compat.is_batched, leaves))):
        return mesh
    return explicit.auto_twin(mesh)


def manual_names(mesh: Mesh | AbstractMesh, axis_names: Iterable[AxisName]) -> tuple[AxisName, ...]:
    """The axes that the call maps over, in the mesh's order."""
    wanted = frozenset(axis_names)
    if unknown := [name for name in wanted if name not in mesh.axis_names]:
        raise SpecError(
            f"axis_names has {quoted(unknown)}, but the axes of {mesh_str(mesh)} are "
            f"{quoted(mesh.axis_names)}."
        )
    taken = compat.manual_axes(mesh)
    if again := [name for name in mesh.axis_names if name in wanted & taken]:
        raise SpecError(
            f"axis_names has {quoted(again)}, which an enclosing shard_map already maps over on "
            f"{mesh_str(mesh)}. Name other axes."
        )
    return tuple(
        name for name in mesh.axis_names if name not in taken and (not wanted or name in wanted)
    )


def check_specs(
    named: Sequence[tuple[str, Any]], mesh: Mesh | AbstractMesh, names: Sequence[AxisName]
) -> None:
    """Refuse specs that name an axis the call does not map over, or one axis twice.

    **Arguments:**

    - `named`: trees of specs, each with what messages call it.

    **Raises:** `SpecError` listing all of them.
    """
    unknown: list[AxisName] = []
    unknown_items: list[str] = []
    twice_items: list[str] = []
    for what, specs in named:
        for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]:
            shown = what + jax.tree_util.keystr(path)
            if not is_spec(spec):
                raise errors.not_a_spec(shown, spec)
            used = _names_in(spec)
            if strangers := [name for name in used if name not in names]:
                unknown += strangers
                unknown_items.append(f"{shown} refers to {quoted(strangers)}: {spec_str(spec)}")
            if repeated := [name for name in dict.fromkeys(used) if used.count(name) > 1]:
                twice_items.append(f"{shown} = {spec_str(spec)} has {quoted(repeated)} twice")
    if unknown:
        left = [name for name in mesh.axis_names if name not in names]
        lacking = "that the call does not map over"
        if set(unknown).isdisjoint(left):
            lacking = "the mesh does not have"
        advice = f"The axes to map over are {quoted(names)} of {mesh_str(mesh)}"
        advice += f"; {quoted(left)} is not mapped over." if left else "."
        if PartitionSpec.UNCONSTRAINED in unknown:
            advice += " A mapped call must know how each axis is split: write None for one that is not split."
        raise error_listing(SpecError, f"specs name axes {lacking}", unknown_items, advice)
    if twice_items:
        raise error_listing(
            SpecError, "a mesh axis can split only one axis of an array", twice_items
        )


def _names_in(spec: PartitionSpec | PerShard | None) -> list[AxisName]:
    if spec is None:
        return []
    if isinstance(spec, PerShard):
        return list(spec.axis_names)
    return [name for axis in spec_axes(spec) for name in axis]


def _empty_mesh(mesh: Mesh | AbstractMesh, what: str = "shard_map") -> SpecError:
    return SpecError(f"{what} requires a non-empty mesh, but {mesh} has no devices. {_MAKE_ONE}")


def not_a_mesh(mesh: object) -> TypeError:
    return TypeError(f"mesh must be a jax.sharding.Mesh, got {typed_str(mesh)}. {_MAKE_ONE}")
