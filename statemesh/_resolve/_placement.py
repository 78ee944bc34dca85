"""Step 2, arrays: check them against their specs and lay them out on the mesh."""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._base import _compat as compat
from .._base import _explicit as explicit
from .._base import errors
from .._base._specs import Placement, canonical, only, spec_axes
from .._base._types import Axes, AxisName, Leaf


def check_shapes(
    paths: Sequence[str],
    leaves: Sequence[Leaf],
    placements: Sequence[Placement],
    mesh: Mesh | AbstractMesh,
    what: str,
) -> None:
    """Refuse arrays whose rank or sizes do not fit their specs.

    `what` says in the error what they were given to.

    **Raises:** `SpecError` listing every such array with the arithmetic.
    """
    bad: list[errors.ShapeMismatch] = []
    for path, leaf, where in zip(paths, leaves, placements, strict=True):
        if not where.axes:
            continue
        shape = np.shape(leaf)
        if len(where.axes) > len(shape):
            bad.append(
                errors.ShapeMismatch(path, leaf, where.written, None, where.axis is not None)
            )
            continue
        for dim, names in enumerate(where.axes):
            parts = math.prod(mesh.shape[n] for n in names if n in mesh.shape)
            misfits = shape[dim] != parts if where.axis == dim else shape[dim] % parts
            if misfits:
                found = errors.ShapeMismatch(path, leaf, where.written, dim, where.axis is not None)
                bad.append(found)
    if bad:
        raise errors.shapes(what, bad, mesh)


def is_laid_out(x: jax.Array, target: NamedSharding, names: Axes) -> bool:
    """Whether `x` lies on the mesh of `target` as its spec says, with however many entries either is spelled.

    JAX's results on Explicit axes have a spec with an entry for each axis of the array. On mesh axes that are
    not in `names` an array may lie as it likes.
    """
    here = x.sharding
    if here == target:
        return True
    if not isinstance(here, NamedSharding) or here.mesh != target.mesh:
        return False
    if here.memory_kind != target.memory_kind:
        return False
    return bool(only(here.spec, names) == canonical(target.spec))


def lies_right(x: jax.Array, target: NamedSharding, names: Axes) -> bool:
    """Whether `x` need not be moved.

    On axes that the call does not map over an array may lie as it likes; on Explicit axes its type
    has to agree too.
    """
    if is_laid_out(x, target, names):
        return True
    mesh = target.mesh
    if names < frozenset(mesh.axis_names):
        return False
    if explicit.has_explicit_axes(mesh) or explicit.is_explicitly_typed(x):
        return False
    return x.sharding.is_equivalent_to(target, x.ndim)


def traced_onto(x: Leaf, target: NamedSharding, names: frozenset[AxisName]) -> Any:
    """A traced value laid out, where the mesh's axes are Explicit and its type says otherwise.

    On Auto axes there is nothing to do: the compiler lays it out. On those that the call does not map over
    it stays as it lies.
    """
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return x
    typed = explicit.is_explicitly_typed(x)
    if not explicit.has_explicit_axes(target.mesh):
        return explicit.off_explicit_axes(x, target.mesh) if typed else x
    typed_target = explicit.explicit_part(target)
    if typed:
        here = jax.typeof(x).sharding.spec
        if only(here, names) == only(typed_target.spec, names):
            return x
        typed_target = typed_target.update(
            spec=_combined(typed_target.spec, only(here, frozenset(target.mesh.axis_names) - names))
        )
    elif typed_target.spec == PartitionSpec():
        return x
    return jax.sharding.reshard(x, typed_target)


def _combined(spec: PartitionSpec, other: PartitionSpec) -> PartitionSpec:
    """A spec that splits each axis as one does, and its parts as another does."""
    pairs = zip_longest(spec_axes(spec), spec_axes(other), fillvalue=())
    return canonical(spec.update(partitions=tuple(a + b for a, b in pairs)))


def onto(x: Leaf, target: NamedSharding) -> jax.Array:
    """`x` on the mesh of `target`, whose devices may be those of several processes.

    Every process has the same `x` then.
    """
    if not (target.mesh.is_multi_process and is_own(x)):
        put: jax.Array = jax.device_put(x, target)
        return put
    if not isinstance(x, jax.Array):
        x = np.asarray(x, jax.dtypes.canonicalize_dtype(np.result_type(x)))
    indices = target.addressable_devices_indices_map(x.shape)
    parts = jax.device_put([x[index] for index in indices.values()], [*indices])
    return jax.make_array_from_single_device_arrays(x.shape, target, parts, dtype=x.dtype)


def is_own(x: Leaf) -> bool:
    """Whether every process has an `x` of its own: of the host, or on devices of its own."""
    if compat.is_tracer(x):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def check_concrete(what: str, paths: Sequence[str], arrays: Sequence[Leaf]) -> None:
    """Refuse arrays that cannot be moved: traced ones, those given up, and shapes without values."""
    found = list(zip(paths, arrays, strict=True))
    if traced := [path for path, x in found if compat.is_tracer(x)]:
        raise errors.place_traced(what, traced)
    check_valued(what, found)


def check_valued(what: str, found: Sequence[tuple[str, Any]]) -> None:
    """Refuse what has a shape and no value."""
    if bare := [path for path, x in found if isinstance(x, jax.ShapeDtypeStruct)]:
        raise errors.shapes_given(what, bare)
    if gone := [path for path, x in found if is_deleted(x)]:
        raise errors.deleted(what, gone)


def is_deleted(x: Leaf) -> bool:
    """Whether it is an array whose memory was given up."""
    return isinstance(x, jax.Array) and not compat.is_tracer(x) and x.is_deleted()
