"""Step 2, meshes: which mesh a call runs on, what its axes are called, and how it is stored."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._base import _errors as errors
from .._base._errors import (
    _MAKE_ONE,
    SpecError,
    StatemeshError,
    _Mesh,
    error_listing,
    mesh_str,
    mesh_with_types_str,
    quoted,
    spec_str,
)
from .._base._specs import PerShard, is_spec, spec_axes
from .._base._trees import describe
from .._base._types import Axes, AxisName, Leaf, PyTree
from .._jax import _compat as compat
from .._jax import _explicit as explicit


_MeshForm: TypeAlias = tuple[tuple[int, ...], tuple[str, ...], tuple[AxisType, ...]]
"""The shape, axis names and axis types of a mesh."""


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A row of devices, or a mesh of them."""

    platform: str
    numbers: tuple[int, ...]
    mesh: _MeshForm | None

    def found(self) -> PyTree:
        """The same devices of this process's JAX."""
        there = {device.id: device for device in jax.devices(self.platform)}
        if missing := [number for number in self.numbers if number not in there]:
            raise _devices_not_here(self.platform, missing, sorted(there))
        devices = [there[number] for number in self.numbers]
        if self.mesh is None:
            return tuple(devices)
        shape, names, types = self.mesh
        return Mesh(np.array(devices).reshape(shape), names, axis_types=types)


def by_fields(value: Leaf) -> tuple[Leaf, ...]:
    """The result of `__reduce__` for a dataclass of which a field may hold a mesh or devices."""
    fields = {f.name: _stored(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return _remade, (type(value), fields)


def _remade(cls: type, fields: dict[str, object]) -> PyTree:
    found = {k: v.found() if isinstance(v, _Stored) else v for k, v in fields.items()}
    return cls(**found)


def _stored(value: object) -> PyTree:
    if isinstance(value, Mesh) and not value.empty:
        shape = value.devices.shape
        return _of(value.devices.flat, (shape, value.axis_names, value.axis_types))
    if isinstance(value, tuple) and value and all(isinstance(x, jax.Device) for x in value):
        return _of(value, None)
    return value


def _of(
    devices: Iterable[jax.Device],
    mesh: _MeshForm | None,
) -> _Stored:
    several = list(devices)
    return _Stored(several[0].platform, tuple(device.id for device in several), mesh)


def resolve_mesh(
    given: Mesh | AbstractMesh | None, axis_names: Axes, recorded: bool
) -> Mesh | AbstractMesh:
    """The mesh that was given, or the one of the context.

    **Arguments:**

    - `given`: the mesh that the user named, if any.
    - `axis_names`: the axes that the user named; empty for all.
    - `recorded`: whether the call is recorded into a jaxpr rather than run. What runs, if only in an eager
        transformation, needs devices: those of the mesh that is set.

    **Raises:** `SpecError` when there is no mesh, or the two differ.
    """
    context = compat.context_mesh()
    mesh: Mesh | AbstractMesh
    if given is not None and given.empty:
        raise _empty_mesh(given)
    if given is None:
        if context is None:
            raise _no_mesh()
        mesh = context
    elif context is None or given.abstract_mesh == context:
        mesh = given
    elif (taken := compat.manual_axes(context)) and dict(given.shape) == dict(context.shape):
        # Inside another mapped call the context says which axes that call has taken.
        if not axis_names and taken < frozenset(context.axis_names):
            raise _mesh_partly_taken(given, taken)
        mesh = context
    else:
        raise _mesh_differs_from_context(given, context)
    if recorded or isinstance(mesh, Mesh):
        return mesh
    there = compat.concrete_context_mesh()
    # Inside another mapped call, the mesh that is set does not show the axes that the call has taken.
    return mesh if there is None or there.abstract_mesh != mesh else there


def one_device_mesh(given: Mesh | AbstractMesh | None, traced: bool) -> Mesh:
    """A mesh of one device with the names of the one that was given, or else of the context's.

    **Raises:** `SpecError` when there is no mesh, inside a mapped call, or where JAX takes no other mesh than
    the one that is set.
    """
    context = compat.context_mesh()
    if given is not None and given.empty:
        raise _empty_mesh(given)
    mesh = context if given is None else given
    if mesh is None:
        raise _no_mesh()
    if taken := compat.manual_axes(context):
        raise _unsharded_inside(sorted(taken, key=str))
    if traced and context is not None and context.size > 1:
        raise _unsharded_traced(context)
    # A device of this process, which could not read arrays on others.
    local = mesh.local_devices if isinstance(mesh, Mesh) else jax.local_devices()
    devices = np.array(local[:1]).reshape((1,) * len(mesh.axis_names))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def check_mesh(what: str, mesh: Any) -> None:
    """Refuse anything but a mesh that has devices."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise errors.not_a_mesh(mesh)
    if mesh.empty:
        raise _empty_mesh(mesh, what)


def mesh_of_arrays(mesh: AbstractMesh, leaves: Sequence[Leaf]) -> Mesh:
    """The devices of an abstract mesh: those on which the arguments of a call lie.

    Of one that an eager transformation traces, its concrete value.

    **Raises:** `SpecError` when none lies on such a mesh, or one on another.
    """
    found: list[Mesh] = []
    for leaf in map(compat.concrete_value, leaves):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            there = leaf.sharding.mesh
            if there.abstract_mesh != mesh:
                raise _other_mesh_of_input(leaf, there, mesh)
            if isinstance(there, Mesh):
                found.append(there)
    if not found:
        raise _abstract_mesh_outside_trace(mesh)
    return found[0]


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
        raise _unknown_axis_names(unknown, mesh)
    taken = compat.manual_axes(mesh)
    if again := [name for name in mesh.axis_names if name in wanted & taken]:
        raise _axis_taken(again, mesh)
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
    unknown: list[tuple[str, Any, list[AxisName]]] = []
    twice: list[tuple[str, Any, list[AxisName]]] = []
    for what, specs in named:
        for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]:
            placement = what + jax.tree_util.keystr(path)
            if not is_spec(spec):
                raise errors.not_a_spec(placement, spec)
            used = _names_in(spec)
            if strangers := [name for name in used if name not in names]:
                unknown.append((placement, spec, strangers))
            if repeated := [name for name in dict.fromkeys(used) if used.count(name) > 1]:
                twice.append((placement, spec, repeated))
    if unknown:
        raise _unknown_axes(unknown, mesh, names)
    if twice:
        raise _axis_twice(twice)


def _names_in(spec: PartitionSpec | PerShard | None) -> list[AxisName]:
    if spec is None:
        return []
    if isinstance(spec, PerShard):
        return list(spec.axis_names)
    return [name for axis in spec_axes(spec) for name in axis]


def _devices_not_here(
    platform: str, missing: Sequence[int], present: Sequence[int]
) -> StatemeshError:
    return StatemeshError(
        f"This was pickled with {platform} devices numbered {list(missing)}, but this process has "
        f"{list(present)}. Make the mesh here and map the function over it; or leave the mesh out, and set "
        "it with jax.set_mesh(mesh)."
    )


def _empty_mesh(mesh: _Mesh, what: str = "shard_map") -> SpecError:
    return SpecError(f"{what} requires a non-empty mesh, but {mesh} has no devices. {_MAKE_ONE}")


def _no_mesh() -> SpecError:
    return SpecError(
        "no mesh: shard_map was given none, and none is set. Pass `mesh=...`, or call inside "
        "`with jax.set_mesh(mesh):`."
    )


def _mesh_differs_from_context(given: _Mesh, context: _Mesh) -> SpecError:
    return SpecError(
        f"shard_map was given {mesh_with_types_str(given)}, but the mesh that is set is "
        f"{mesh_with_types_str(context)}. Leave `mesh` out to use the mesh that is set, or call outside "
        "`jax.set_mesh`."
    )


def _unsharded_inside(taken: Sequence[AxisName]) -> SpecError:
    return SpecError(
        "`unsharded` runs on a mesh of one device, so it cannot be called inside another mapped call, which "
        f"maps over {quoted(taken)} already. Call it outside that call."
    )


def _unsharded_traced(mesh: _Mesh) -> SpecError:
    return SpecError(
        f"`unsharded` runs on a mesh of one device, but {mesh_str(mesh)} is set, and JAX allows no other "
        "mesh during a trace. If shard_map was given a mesh, call `unsharded` outside `jax.set_mesh`; if it "
        "was given none, call it inside `with jax.set_mesh(mesh):` with a mesh of one device."
    )


def _abstract_mesh_outside_trace(mesh: _Mesh) -> SpecError:
    return SpecError(
        f"{mesh_str(mesh)} is an AbstractMesh, which has no devices to run on. Pass arrays that lie on a "
        "mesh with these axes, as jax.device_put(x, NamedSharding(mesh, P())) puts them, or give shard_map a "
        "jax.sharding.Mesh."
    )


def _other_mesh_of_input(x: object, found: _Mesh, mesh: _Mesh) -> SpecError:
    return SpecError(
        f"an argument, {describe(x)}, lies on {mesh_str(found)}, but shard_map was given the AbstractMesh "
        f"{mesh_str(mesh)}, which takes its devices from the arguments. Put the arguments on a mesh with "
        "these axes, or give shard_map the mesh that they lie on."
    )


def _unknown_axis_names(unknown: Sequence[AxisName], mesh: _Mesh) -> SpecError:
    return SpecError(
        f"axis_names has {quoted(unknown)}, but the axes of {mesh_str(mesh)} are {quoted(mesh.axis_names)}."
    )


def _mesh_partly_taken(given: _Mesh, taken: Iterable[AxisName]) -> SpecError:
    taken = list(taken)
    left = [name for name in given.axis_names if name not in taken]
    return SpecError(
        f"shard_map was given {mesh_str(given)} to map over all its axes, but an enclosing shard_map already "
        f"maps over {quoted(taken)}. Leave `mesh` out, or name the axes that are left: "
        f"axis_names={{{quoted(left)}}}."
    )


def _axis_taken(again: Sequence[AxisName], mesh: _Mesh) -> SpecError:
    return SpecError(
        f"axis_names has {quoted(again)}, which an enclosing shard_map already maps over on "
        f"{mesh_str(mesh)}. Name other axes."
    )


def _unknown_axes(
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
    items = [
        f"{placement} refers to {quoted(own)}: {spec_str(spec)}" for placement, spec, own in unknown
    ]
    return error_listing(SpecError, f"specs name axes {lacking}", items, mend)


def _axis_twice(twice: Sequence[tuple[str, object, Sequence[AxisName]]]) -> SpecError:
    items = [
        f"{placement} = {spec_str(spec)} has {quoted(bad)} twice" for placement, spec, bad in twice
    ]
    return error_listing(SpecError, "a mesh axis can split only one axis of an array", items)
