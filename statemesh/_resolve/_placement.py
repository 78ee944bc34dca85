"""Step 2, arrays: check them against their specs and lay them out on the mesh."""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._arguments import is_shaped
from .._base import _compat as compat
from .._base import _explicit as explicit
from .._base import errors
from .._base._compat import tree_util
from .._base._frames import without_own_frames
from .._base._paths import path_str
from .._base._prefix import broadcast_specs
from .._base._types import (
    AnyMesh,
    AxisName,
    Leaf,
    Placement,
    PyTree,
    SpecTree,
    StateSpecs,
    canonical,
    is_packed,
    is_state,
    is_state_or_packed,
    only,
    spec_axes,
)
from .._model._values import strong
from ._agreement import array_passed, check_alike
from ._buffers import apart
from ._mesh import check_mesh, check_specs, manual_names
from ._specs import (
    UNDECLARED,
    SpecPlacement,
    check_state_specs,
    choose_specs,
    own_placements,
    placement,
)


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
            wrong = shape[dim] != parts if where.axis == dim else shape[dim] % parts
            if wrong:
                found = errors.ShapeMismatch(path, leaf, where.written, dim, where.axis is not None)
                bad.append(found)
    if bad:
        raise errors.shapes(what, bad, mesh)


def lies_right(x: jax.Array, target: NamedSharding, names: frozenset[AxisName]) -> bool:
    """Whether `x` need not be moved.

    On axes that the call does not map over an array may lie as it likes; on Explicit axes its type
    has to agree too.
    """
    here = x.sharding
    if here == target:
        return True
    mesh = target.mesh
    if names < frozenset(mesh.axis_names):
        if not isinstance(here, NamedSharding) or here.mesh != mesh:
            return False
        return only(here.spec, names) == target.spec
    if explicit.has_explicit_axes(mesh) or explicit.is_explicitly_typed(x):
        return False
    return here.is_equivalent_to(target, x.ndim)


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
    told = explicit.explicit_part(target)
    if typed:
        here = jax.typeof(x).sharding.spec
        if only(here, names) == only(told.spec, names):
            return x
        told = told.update(
            spec=_beside(told.spec, only(here, frozenset(target.mesh.axis_names) - names))
        )
    elif told.spec == PartitionSpec():
        return x
    return jax.sharding.reshard(x, told)


def _beside(spec: PartitionSpec, other: PartitionSpec) -> PartitionSpec:
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


@without_own_frames
def place(
    tree: PyTree, mesh: AnyMesh, specs: SpecTree = None, *, state_specs: StateSpecs = None
) -> Any:
    """Put a tree onto a mesh the way a mapped call wants it.

    **Arguments:**

    - `tree`: any pytree. The buffers of a `Packed` in it lie right already, and stay.
    - `mesh`: the mesh.
    - `specs`: a spec, or a prefix tree of specs, for the arrays outside States; left out, they are
        replicated.
    - `state_specs`: where the States go: one spec, or `{filter: spec}`. A state that it does not
        mention goes by its own `spec`, else it is replicated.

    **Returns:** the tree, its arrays on the mesh. Arrays that already lie right are not touched, and
    leaves that are not arrays stay as they are. What is moved shares no memory with what it was moved
    from, so that one may be donated without the other.

    **Raises:** `SpecError` for specs that do not fit the tree, its arrays or the mesh, and for a mesh without
    devices; `TypeError` for arrays that are traced: there a mapped call lays its arguments out itself.

    !!! example

        ```python
        >>> import jax, numpy as np, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> model = sm.place({"w": sm.ParamState(np.ones(4))}, mesh, state_specs=P("x"))
        >>> model["w"].value.sharding.spec == P("x")
        True

        ```
    """
    check_mesh("place", mesh)
    if isinstance(mesh, AbstractMesh):
        raise errors.invalid_argument("place", "mesh", mesh)
    check_state_specs(state_specs, "state_specs")
    names = manual_names(mesh, ())
    check_specs([("specs", specs)], mesh, names)
    flat, _ = tree_util.tree_flatten_with_path(tree, is_leaf=is_state)
    said = iter(choose_specs(state_specs, [("tree", tree)], "state_specs"))
    nodes = tree_util.tree_leaves(tree, is_leaf=is_state_or_packed)
    packed = {id(buffer) for node in nodes if is_packed(node) for buffer in node.buffers}
    paths: list[str] = []
    leaves: list[Leaf] = []
    placements: list[SpecPlacement | None] = []
    for (keys, node), spec in zip(flat, broadcast_specs(specs, tree, "specs", "tree"), strict=True):
        path = path_str(keys, "tree")
        own = tree_util.tree_leaves(node)
        if is_state(node):
            chosen = next(said)
            wheres = own_placements(node, node.spec if chosen is UNDECLARED else chosen, path)
            placements += wheres
        else:
            moves = is_shaped(node) and id(node) not in packed
            placements += [placement(spec) if moves else None] * len(own)
        leaves += own
        paths += [path] * len(own)
    chosen_at = [i for i, where in enumerate(placements) if where is not None]
    wheres = [where for where in placements if where is not None]
    arrays = [leaves[i] for i in chosen_at]
    named = [(f"the spec of {paths[i]}", w.spec) for i, w in zip(chosen_at, wheres, strict=True)]
    check_specs(named, mesh, names)
    check_shapes([paths[i] for i in chosen_at], arrays, wheres, mesh, "place")
    check_concrete("place", [paths[i] for i in chosen_at], arrays)
    targets = [NamedSharding(mesh, where.spec) for where in wheres]
    if mesh.is_multi_process:
        pairs = zip(chosen_at, arrays, strict=True)
        check_alike("place", mesh, [array_passed(paths[i], x) for i, x in pairs if is_own(x)])
    for i, x, target in zip(chosen_at, arrays, targets, strict=True):
        if not isinstance(x, jax.Array):
            leaves[i] = onto(apart(x, target), target)
        elif x.sharding != target:
            same = x.sharding.is_equivalent_to(target, x.ndim)
            leaves[i] = onto(strong(x) if same else apart(strong(x), target), target)
    return tree_util.tree_structure(tree).unflatten(leaves)
