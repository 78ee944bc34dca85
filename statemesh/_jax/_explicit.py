"""Explicit mesh axes: those whose layout JAX writes into the type of an array."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._base._specs import entry_of, only, written_axes
from .._base._types import Array, Axes, AxisName, ShapedArray
from . import _compat as compat


def explicit_axes(mesh: Mesh | AbstractMesh) -> Axes:
    """The Explicit axes of `mesh`."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind == AxisType.Explicit)


def has_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    return bool(explicit_axes(mesh))


def auto_twin(mesh: Mesh) -> Mesh:
    """The same devices and axis names, with every axis `Auto`."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def explicit_part(sharding: NamedSharding) -> NamedSharding:
    """The part of a sharding that an array's type holds: that on Explicit axes."""
    mesh = sharding.mesh
    return NamedSharding(mesh, only(sharding.spec, explicit_axes(mesh)))


# The result is `Any` because JAX's types of arrays, `ShapedArray` and its like, have no public name.
def type_of(x: object) -> Any:
    """The type of an array, or of the array that a reference refers to; `None` for anything else."""
    if not isinstance(x, jax.Array | jax.Ref | jax.core.Tracer):
        return None
    return compat.referred_type(jax.typeof(x))


def is_explicitly_typed(x: object) -> bool:
    """Whether the type of `x` holds a sharding over Explicit axes."""
    mesh = getattr(getattr(type_of(x), "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and has_explicit_axes(mesh)


def explicit_around(values: Iterable[object]) -> bool:
    """Whether the mesh that is set has Explicit axes, or the type of one of these values has them."""
    mesh = compat.context_mesh()
    return (mesh is not None and has_explicit_axes(mesh)) or any(map(is_explicitly_typed, values))


def zeros_of(kind: Any) -> Array:
    """Zeros of a type, laid out over Explicit axes as it says."""
    zeros = jax.numpy.zeros(kind.shape, kind.dtype)
    mesh = kind.sharding.mesh
    if mesh.empty or not has_explicit_axes(mesh):
        return zeros
    return jax.sharding.reshard(zeros, kind.sharding)


def rows_in_groups(x: Array, count: int) -> Array:
    """An array with its rows in so many groups, of rows that follow one another, along a new first axis.

    It is laid out as the array was, so far as whole groups can be.
    """
    shape = (count, x.shape[0] // count, *x.shape[1:])
    if not is_explicitly_typed(x):
        return x.reshape(shape)
    here = type_of(x).sharding
    first, *rest = written_axes(here.spec)
    fits = count % math.prod(here.mesh.shape[name] for name in first) == 0
    spec = PartitionSpec(*map(entry_of, [first if fits else (), (), *rest]))
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(here.mesh, spec))


def unless_explicit(info: jax.stages.ArgInfo) -> jax.stages.ArgInfo:
    """The description of an argument, without its sharding unless the sharding is a part of its type."""
    kind = compat.argument_type(info)
    if has_explicit_axes(kind.sharding.mesh):
        return info
    return compat.with_argument_type(info, kind.update(sharding=None))


def left_by_vmap(mesh: Mesh | AbstractMesh, names: Sequence[AxisName]) -> tuple[AxisName, ...]:
    """Those of `names` over which no surrounding `vmap` spreads its lanes, so that a map may use them.

    A `vmap` whose operand is split over Explicit axes takes these axes for its lanes. JAX tells which ones it
    has taken only inside a map, so we trace an empty one.
    """
    left: list[AxisName] = []

    def look() -> Array:
        taken = compat.manual_axes(jax.sharding.get_abstract_mesh())
        left.extend(name for name in names if name in taken)
        return jax.numpy.zeros(())

    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))
    return tuple(left)


def off_explicit_axes(x: ShapedArray, mesh: Mesh | AbstractMesh) -> Array:
    """A traced value typed by Explicit axes, replicated on the Auto axes of `mesh`.

    Its cotangent goes back to the layout of `x`, on a mesh that has devices. JAX by itself would use the
    mesh in the type of `x`, which has no devices, and could not run that outside of `jit`.
    """
    here, there = jax.typeof(x).sharding, NamedSharding(mesh, PartitionSpec())
    concrete = getattr(compat.concrete_value(x), "sharding", None)
    if isinstance(concrete, NamedSharding):
        origin = concrete.mesh
    elif isinstance(mesh, Mesh) and mesh.shape == here.mesh.shape:
        origin = Mesh(mesh.devices, mesh.axis_names, axis_types=here.mesh.axis_types)
    else:
        return jax.sharding.reshard(x, there)
    # Between meshes only whole arrays move: a `vmap` adds an axis, which the spec of a layout does not have.
    whole = NamedSharding(origin, PartitionSpec())
    return jax.device_put(jax.sharding.reshard(x, whole), there, src=whole)
