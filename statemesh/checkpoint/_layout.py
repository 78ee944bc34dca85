"""Where loaded values go."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._base._compat import concrete_context_mesh
from .._base._specs import only
from .._base._types import Leaf, PyTree
from .._resolve._mesh import check_specs, manual_names
from .._resolve._placement import check_shapes
from .._resolve._specs import SpecPlacement
from ._leaves import Value


def mesh_for(given: Mesh | None, like: PyTree) -> Mesh | None:
    """The mesh given, or that of the context, or that on which arrays of `like` lie."""
    if given is not None:
        return given
    context = concrete_context_mesh()
    if context is not None:
        return context
    named = [here for here in map(_sharding_of, jax.tree.leaves(like)) if here is not None]
    meshes = [here.mesh for here in named if isinstance(here, NamedSharding)]
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def shardings(found: Sequence[Value], mesh: Mesh | None) -> list[Sharding]:
    """The sharding of each array.

    **Raises:** `SpecError` for specs that do not fit the mesh or the arrays.
    """
    if mesh is None:
        single = SingleDeviceSharding(jax.local_devices()[0])
        return [_sharding_of(value.leaf) or single for value in found]
    wheres = [_placement(value, mesh) for value in found]
    named = [
        (f"the spec of {value.path}", where.spec)
        for value, where in zip(found, wheres, strict=True)
    ]
    check_specs(named, mesh, manual_names(mesh, ()))
    # The first axis of a value for each shard becomes what the mesh needs.
    fixed = [pair for pair in zip(found, wheres, strict=True) if not pair[0].per_shard]
    paths, leaves = [value.path for value, _ in fixed], [value.leaf for value, _ in fixed]
    check_shapes(paths, leaves, [where for _, where in fixed], mesh, "load")
    return [NamedSharding(mesh, where.spec) for where in wheres]


def shards(value: Value, mesh: Mesh | None) -> int:
    """How many entries the first axis has of a value for each shard."""
    if mesh is None or value.where is None:
        return int(value.leaf.shape[0])
    return math.prod(mesh.shape[name] for name in value.where.axes[0])


def _placement(value: Value, mesh: Mesh) -> SpecPlacement:
    """That of the state's own spec; else as the array of `like` lies, on the axes that this mesh has."""
    if value.where is not None:
        return value.where
    here = _sharding_of(value.leaf)
    if not isinstance(here, NamedSharding):
        return SpecPlacement(PartitionSpec())
    return SpecPlacement(only(here.spec, frozenset(mesh.axis_names)))


def _sharding_of(leaf: Leaf) -> Sharding | None:
    here = getattr(leaf, "sharding", None)
    return here if isinstance(here, Sharding) else None
