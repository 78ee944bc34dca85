"""Step 2, meshes: which mesh a call runs on, and what its axes are called."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._base import _compat as compat
from .._base import _explicit as explicit
from .._base import errors
from .._base._specs import PerShard, is_spec, spec_axes
from .._base._types import Axes, AxisName, Leaf


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
        raise errors.empty_mesh(given)
    if given is None:
        if context is None:
            raise errors.no_mesh()
        mesh = context
    elif context is None or given.abstract_mesh == context:
        mesh = given
    elif (taken := compat.manual_axes(context)) and dict(given.shape) == dict(context.shape):
        # Inside another mapped call the context says which axes that call has taken.
        if not axis_names and taken < frozenset(context.axis_names):
            raise errors.mesh_partly_taken(given, taken)
        mesh = context
    else:
        raise errors.mesh_differs_from_context(given, context)
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
        raise errors.empty_mesh(given)
    mesh = context if given is None else given
    if mesh is None:
        raise errors.no_mesh()
    if taken := compat.manual_axes(context):
        raise errors.unsharded_inside(sorted(taken, key=str))
    if traced and context is not None and context.size > 1:
        raise errors.unsharded_traced(context)
    # A device of this process, which could not read arrays on others.
    local = mesh.local_devices if isinstance(mesh, Mesh) else jax.local_devices()
    devices = np.array(local[:1]).reshape((1,) * len(mesh.axis_names))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def check_mesh(what: str, mesh: Any) -> None:
    """Refuse what is no mesh, or one without devices."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise errors.not_a_mesh(mesh)
    if mesh.empty:
        raise errors.empty_mesh(mesh, what)


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
                raise errors.other_mesh_of_input(leaf, there, mesh)
            if isinstance(there, Mesh):
                found.append(there)
    if not found:
        raise errors.abstract_mesh_outside_trace(mesh)
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
        raise errors.unknown_axis_names(unknown, mesh)
    taken = compat.manual_axes(mesh)
    if again := [name for name in mesh.axis_names if name in wanted & taken]:
        raise errors.axis_taken(again, mesh)
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
            where = what + jax.tree_util.keystr(path)
            if not is_spec(spec):
                raise errors.not_a_spec(where, spec)
            used = _names_in(spec)
            if strangers := [name for name in used if name not in names]:
                unknown.append((where, spec, strangers))
            if repeated := [name for name in dict.fromkeys(used) if used.count(name) > 1]:
                twice.append((where, spec, repeated))
    if unknown:
        raise errors.unknown_axes(unknown, mesh, names)
    if twice:
        raise errors.axis_twice(twice)


def _names_in(spec: PartitionSpec | PerShard | None) -> list[AxisName]:
    if spec is None:
        return []
    if isinstance(spec, PerShard):
        return list(spec.axis_names)
    return [name for axis in spec_axes(spec) for name in axis]
