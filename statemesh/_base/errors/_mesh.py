"""Errors of the mesh that a call runs on."""

from collections.abc import Iterable, Sequence

from jax.sharding import AbstractMesh, Mesh

from .._paths import describe
from .._types import AxisName
from ._classes import SpecError
from ._text import mesh_str, mesh_with_types_str, quoted, typed_str


_Mesh = Mesh | AbstractMesh
_MAKE_ONE = "Make one with `jax.make_mesh((jax.device_count(),), ('x',))`."


def not_a_mesh(mesh: object) -> TypeError:
    return TypeError(f"mesh must be a jax.sharding.Mesh, got {typed_str(mesh)}. {_MAKE_ONE}")


def empty_mesh(mesh: _Mesh, what: str = "shard_map") -> SpecError:
    return SpecError(f"{what} requires a non-empty mesh, but {mesh} has no devices. {_MAKE_ONE}")


def no_mesh() -> SpecError:
    return SpecError(
        "no mesh: shard_map was given none, and none is set. Pass `mesh=...`, or call inside "
        "`with jax.set_mesh(mesh):`."
    )


def mesh_differs_from_context(given: _Mesh, context: _Mesh) -> SpecError:
    return SpecError(
        f"shard_map was given {mesh_with_types_str(given)}, but the mesh that is set is "
        f"{mesh_with_types_str(context)}. Leave `mesh` out to use the mesh that is set, or call outside "
        "`jax.set_mesh`."
    )


def unsharded_inside(taken: Sequence[AxisName]) -> SpecError:
    return SpecError(
        "`unsharded` runs on a mesh of one device, so it cannot be called inside another mapped call, which "
        f"maps over {quoted(taken)} already. Call it outside that call."
    )


def unsharded_traced(mesh: _Mesh) -> SpecError:
    return SpecError(
        f"`unsharded` runs on a mesh of one device, but {mesh_str(mesh)} is set, and JAX allows no other "
        "mesh during a trace. If shard_map was given a mesh, call `unsharded` outside `jax.set_mesh`; if it "
        "was given none, call it inside `with jax.set_mesh(mesh):` with a mesh of one device."
    )


def abstract_mesh_outside_trace(mesh: _Mesh) -> SpecError:
    return SpecError(
        f"{mesh_str(mesh)} is an AbstractMesh, which has no devices to run on. Pass arrays that lie on a "
        "mesh with these axes, as jax.device_put(x, NamedSharding(mesh, P())) puts them, or give shard_map a "
        "jax.sharding.Mesh."
    )


def other_mesh_of_input(x: object, found: _Mesh, mesh: _Mesh) -> SpecError:
    return SpecError(
        f"an argument, {describe(x)}, lies on {mesh_str(found)}, but shard_map was given the AbstractMesh "
        f"{mesh_str(mesh)}, which takes its devices from the arguments. Put the arguments on a mesh with "
        "these axes, or give shard_map the mesh that they lie on."
    )


def unknown_axis_names(unknown: Sequence[AxisName], mesh: _Mesh) -> SpecError:
    return SpecError(
        f"axis_names has {quoted(unknown)}, but the axes of {mesh_str(mesh)} are {quoted(mesh.axis_names)}."
    )


def mesh_partly_taken(given: _Mesh, taken: Iterable[AxisName]) -> SpecError:
    taken = list(taken)
    left = [name for name in given.axis_names if name not in taken]
    return SpecError(
        f"shard_map was given {mesh_str(given)} to map over all its axes, but an enclosing shard_map already "
        f"maps over {quoted(taken)}. Leave `mesh` out, or name the axes that are left: "
        f"axis_names={{{quoted(left)}}}."
    )


def axis_of_vmap(taken: Sequence[AxisName], mesh: _Mesh) -> SpecError:
    return SpecError(
        f"an enclosing jax.vmap maps over an array that is split over {quoted(taken)} of {mesh_str(mesh)}, "
        "so its lanes use up that mesh axis. Leave `axis_names` out to map over the other axes, or split the "
        "array differently."
    )


def axis_taken(again: Sequence[AxisName], mesh: _Mesh) -> SpecError:
    return SpecError(
        f"axis_names has {quoted(again)}, which an enclosing shard_map already maps over on "
        f"{mesh_str(mesh)}. Name other axes."
    )


def no_axes_left(mesh: _Mesh) -> SpecError:
    return SpecError(
        f"an enclosing shard_map already maps over every axis of {mesh_str(mesh)}. Give the outer one "
        "`axis_names` that leave some axes free."
    )


def bad_auto(auto: Iterable[AxisName], mesh: _Mesh) -> SpecError:
    return SpecError(
        f"auto={sorted(map(str, auto))} must be some, but not all, of the axes of {mesh_str(mesh)}."
    )


def cannot_infer(mesh: _Mesh) -> TypeError:
    return TypeError(
        f"in_specs can be left out only on a mesh of Explicit axes; this is {mesh_with_types_str(mesh)}. "
        "Write in_specs=..., one entry for each positional argument."
    )
