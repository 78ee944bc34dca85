"""Errors of the mesh that a call runs on."""

from collections.abc import Iterable, Sequence
from typing import Any

from .._paths import describe
from .._types import AxisName
from ._classes import SpecError
from ._text import axis_types_str, mesh_str, quoted


def not_a_mesh(mesh: Any) -> TypeError:
    return TypeError(
        f"mesh must be a jax.sharding.Mesh, got {mesh!r} of type {type(mesh).__name__}. Make one with "
        "`jax.make_mesh((jax.device_count(),), ('x',))`."
    )


def empty_mesh(mesh: Any, what: str = "shard_map") -> SpecError:
    return SpecError(
        f"{what} requires a non-empty mesh, but {mesh} has no devices. Make one with "
        "`jax.make_mesh((jax.device_count(),), ('x',))`."
    )


def no_mesh() -> SpecError:
    return SpecError(
        "no mesh: shard_map was given none, and none is set. The context mesh cannot be empty where `mesh` "
        "is left out. Pass `mesh=...`, or call inside `with jax.set_mesh(mesh):`."
    )


def mesh_differs_from_context(given: Any, context: Any) -> SpecError:
    return SpecError(
        f"shard_map was given {mesh_str(given)} {axis_types_str(given)}, but the mesh that is set is "
        f"{mesh_str(context)} {axis_types_str(context)}. Leave `mesh` out to use the one that is set, or "
        "call outside of `jax.set_mesh`."
    )


def unsharded_inside(taken: Sequence[AxisName]) -> SpecError:
    names = ", ".join(map(repr, taken))
    return SpecError(
        "`unsharded` runs on a mesh of one device, so it cannot be called inside another mapped call, which "
        f"has taken {names}. Call it outside of that one."
    )


def unsharded_traced(mesh: Any) -> SpecError:
    return SpecError(
        f"`unsharded` runs on a mesh of one device, but {mesh_str(mesh)} is set, and JAX takes no other one "
        "while something is traced. Where shard_map was given a mesh, call it outside of `jax.set_mesh`; "
        "where it was given none, inside `with jax.set_mesh(mesh):` of a mesh of one device."
    )


def abstract_mesh_outside_trace(mesh: Any) -> SpecError:
    return SpecError(
        f"{mesh_str(mesh)} is an AbstractMesh, which has no devices to run on. Please pass `jax.Array`s with "
        "a `NamedSharding` as input to `shard_map` when passing `AbstractMesh` to the mesh argument, or pass "
        "a `jax.sharding.Mesh`."
    )


def other_mesh_of_input(x: Any, there: Any, mesh: Any) -> SpecError:
    return SpecError(
        f"Mesh shape of the input {describe(x)}, which lies on {mesh_str(there)}, does not match the mesh "
        f"shape passed to shard_map: {mesh_str(mesh)}, an AbstractMesh, whose devices are to be those of "
        "the arguments."
    )


def unknown_axis_names(unknown: Sequence[AxisName], mesh: Any) -> SpecError:
    return SpecError(
        f"axis_names has {quoted(unknown)}, but the axes of {mesh_str(mesh)} are "
        f"{quoted(mesh.axis_names)}."
    )


def mesh_partly_taken(given: Any, taken: Iterable[AxisName]) -> SpecError:
    left = [name for name in given.axis_names if name not in frozenset(taken)]
    return SpecError(
        f"shard_map was given {mesh_str(given)} to map over all of it, but an enclosing shard_map already "
        f"maps over {quoted(taken)}: the context mesh, which has these taken, should match the mesh passed "
        f"to shard_map. Leave `mesh` out, or name the axes that are meant: axis_names={{{quoted(left)}}}."
    )


def axis_of_vmap(taken: Sequence[AxisName], mesh: Any) -> SpecError:
    return SpecError(
        f"an operand of the jax.vmap around is split over {quoted(taken)} of {mesh_str(mesh)}, so that its "
        "lanes are spread over that axis: jax.shard_map requires axis_names to be a subset of the others. "
        "Leave `axis_names` out to map over those, or lay the operand out otherwise."
    )


def axis_taken(again: Sequence[AxisName], mesh: Any) -> SpecError:
    return SpecError(
        f"axis_names has {quoted(again)}, which an enclosing shard_map already maps over on "
        f"{mesh_str(mesh)}. Name other axes."
    )


def no_axes_left(mesh: Any) -> SpecError:
    return SpecError(
        f"an enclosing shard_map already maps over every axis of {mesh_str(mesh)}. Give the outer one "
        "`axis_names`, so that some are left."
    )


def bad_auto(auto: Iterable[AxisName], mesh: Any) -> SpecError:
    return SpecError(
        f"auto={sorted(map(str, auto))} must be some, not all, of the axes of {mesh_str(mesh)}."
    )


def cannot_infer(mesh: Any) -> TypeError:
    return TypeError(
        f"in_specs can be left out only on a mesh of Explicit axes; this is {mesh_str(mesh)} "
        f"{axis_types_str(mesh)}. Write in_specs=..., one entry for each positional argument."
    )
