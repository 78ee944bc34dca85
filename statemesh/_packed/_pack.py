"""`pack`: put a model's states into a few buffers."""

import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from operator import is_
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._base import _compat as compat
from .._base import _explicit as explicit
from .._base import errors
from .._base._compat import tree_util
from .._base._nodes import is_packed, is_state, is_state_or_packed, unpacked
from .._base._paths import path_str
from .._base._types import AnyMesh, AxisName, Dtype, KeyPath, Leaf, PyTree, PyTreeDef, StateSpecs
from .._model._kinds import ParamState
from .._resolve._agreement import array_passed, check_alike
from .._resolve._mesh import check_mesh, check_specs, manual_names, mesh_for_traced
from .._resolve._placement import check_shapes, check_valued, is_own, traced_onto
from .._resolve._specs import (
    UNDECLARED,
    SpecPlacement,
    check_state_specs,
    choose_specs,
    own_placements,
)
from ._contents import Contents, Group, Slot
from ._packed import Packed


# Packed models with equal contents share one object, so that calls compare contents by identity.
_Key: TypeAlias = tuple[Dtype, frozenset[AxisName], bool]
_known: "weakref.WeakValueDictionary[Hashable, Contents]" = weakref.WeakValueDictionary()


def pack(model: PyTree, mesh: AnyMesh, *, state_specs: StateSpecs = None) -> Packed:
    """Put the arrays of a model's states into a few buffers, laid out on a mesh.

    **Arguments:**

    - `model`: any pytree with States.
    - `mesh`: the mesh of the calls that will take it.
    - `state_specs`: the placements of the States: one spec, or `{filter: spec}`, as in `state_in_specs` of
        these calls. A state that no filter matches is placed by its own `spec`, or replicated without one.

    **Returns:** a `Packed`, to pass to calls in place of the model. A `RandomState`, arrays outside of States
    and static leaves are not packed; `rest` holds them.

    **Raises:** `SpecError` for specs that do not fit the states or the mesh; `TypeError` for a model that is
    packed already.

    The states in one buffer are written together: if a call writes one of them, it returns a new buffer, and
    `donate='states'` gives up the old one. A call refuses a `Packed` with a state for which it has another
    placement.

    !!! example

        ```python
        >>> import jax, numpy as np, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> model = {f"s{k}": sm.State(np.float32(k), reduce="mean") for k in range(1000)}
        >>> packed = sm.pack(model, mesh)
        >>> packed
        Packed(1000 states in 1 arrays, 0 not packed)
        >>> def step(model, x):
        ...     return x, jax.tree.map(lambda value: 2 * value, model)
        >>> step = sm.shard_map(step, mesh, in_specs=(None, P("x")), out_specs=(P("x"), P()))
        >>> _, packed = step(packed, np.ones(4))
        >>> float(packed.states["['s7']"].value), float(packed.unpack()["s7"].value)
        (14.0, 14.0)

        ```
    """
    check_mesh("pack", mesh)
    if any(map(is_packed, tree_util.tree_leaves(model, is_leaf=is_state_or_packed))):
        raise errors.invalid_argument("pack", "model", model)
    check_state_specs(state_specs, "state_specs")
    names = manual_names(mesh, ())
    flat, unit_def = tree_util.tree_flatten_with_path(model, is_leaf=is_state)
    wheres = _placements(model, flat, state_specs)
    packed = _packed_arrays(flat, wheres)
    check_specs([(f"the spec of {path}", where.spec) for path, _, where in packed], mesh, names)
    paths, placements = [path for path, _, _ in packed], [where for _, _, where in packed]
    check_shapes(paths, [x for _, x, _ in packed], placements, mesh, "pack")
    check_valued("pack", [(path, x) for path, x, _ in packed])
    found: dict[_Key, list[tuple[Slot, Leaf]]] = {}
    at: list[tuple[PyTreeDef, list[tuple[_Key, int]]] | None] = []
    rest: list[Leaf] = []
    for (keys, node), own_wheres in zip(flat, wheres, strict=True):
        if own_wheres is None:
            rest.append(node)
            at.append(None)
            continue
        arrays, structure = tree_util.tree_flatten(node)
        places = []
        for x, where in zip(arrays, own_wheres, strict=True):
            kind = jax.dtypes.canonicalize_dtype(x.dtype)
            key: _Key = kind, where.axis_names, isinstance(node, ParamState)
            own = found.setdefault(key, [])
            start = own[-1][0].start + own[-1][0].size if own else 0
            part = part_of(np.shape(x), where, mesh)
            own.append((Slot(path_str(keys), np.shape(x), where, start, part), x))
            places.append((key, len(own) - 1))
        at.append((structure, places))
    number = {key: g for g, key in enumerate(found)}
    groups = []
    for (common, axes, _), own in found.items():
        ordered = tuple(name for name in names if name in axes)
        counts = tuple(mesh.shape[name] for name in ordered)
        groups.append(Group(common, ordered, counts, tuple(slot for slot, _ in own)))
    states = tuple(one and (one[0], tuple((number[key], k) for key, k in one[1])) for one in at)
    contents = Contents(type(model), unit_def, states, tuple(groups), tuple(mesh.shape.items()))
    contents = known(contents)
    if isinstance(mesh, Mesh) and mesh.is_multi_process:
        check_alike("pack", mesh, [array_passed(path, x) for path, x, _ in packed if is_own(x)])
    arrays_of = [[x for _, x in own] for own in found.values()]
    buffers = [buffer_of(g, own, mesh) for g, own in zip(contents.groups, arrays_of, strict=True)]
    return Packed(buffers, rest, contents)


def packed_as(tree: PyTree, like: PyTree) -> PyTree:
    """A tree with its models packed like those of `like`, which has the same structure when it is unpacked.

    A buffer stays the one in `like` if none of its arrays is a new one.
    """
    old = unpacked(like)
    if old is like:
        return tree
    leaves, structure = tree_util.tree_flatten(like, is_leaf=is_state_or_packed)
    parts = zip(leaves, structure.flatten_up_to(tree), structure.flatten_up_to(old), strict=True)
    return structure.unflatten(
        [_repacked(x, new, old) if isinstance(x, Packed) else new for x, new, old in parts]
    )


def _repacked(packed: Packed, new: PyTree, old: PyTree) -> Packed:
    contents, present, _ = packed._present()
    arrays, rest = contents.arrays(new)
    before, _ = contents.arrays(old)
    buffers = []
    for group, buffer, own, then in zip(contents.groups, present, arrays, before, strict=True):
        if all(map(is_, own, then)):
            buffers.append(buffer)
            continue
        mesh = _mesh_of(buffer)
        buffers.append(group.buffer(own) if mesh is None else buffer_of(group, own, mesh))
    return Packed.of(buffers, rest, packed._form)


def _mesh_of(buffer: Leaf) -> AnyMesh | None:
    """The mesh of a buffer. It is `None`, because unknown, for a buffer that is traced on Auto axes."""
    if explicit.is_explicitly_typed(buffer) and compat.is_tracer(buffer):
        mesh: AnyMesh = jax.typeof(buffer).sharding.mesh
        return mesh
    sharding = None if compat.is_tracer(buffer) else getattr(buffer, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _placements(
    model: PyTree, flat: Sequence[tuple[KeyPath, PyTree]], state_specs: StateSpecs
) -> list[Sequence[SpecPlacement] | None]:
    """For each unit of the model the placements of its arrays; `None` for a unit that is not packed."""
    declared = iter(choose_specs(state_specs, [("model", model)], "state_specs"))
    found: list[Sequence[SpecPlacement] | None] = []
    for keys, node in flat:
        chosen = next(declared) if is_state(node) else UNDECLARED
        if not _is_packable(node):
            found.append(None)
            continue
        spec = node.spec if chosen is UNDECLARED else chosen
        found.append(own_placements(node, spec, path_str(keys, "model")))
    return found


def _packed_arrays(
    flat: Sequence[tuple[KeyPath, PyTree]], wheres: Sequence[Sequence[SpecPlacement] | None]
) -> list[tuple[str, Leaf, SpecPlacement]]:
    """The arrays that go into buffers, each with its path and placement."""
    return [
        (path_str(keys, "model"), x, where)
        for (keys, node), own in zip(flat, wheres, strict=True)
        if own is not None
        for x, where in zip(tree_util.tree_leaves(node), own, strict=True)
    ]


def _is_packable(node: PyTree) -> bool:
    """Whether `node` is a State with arrays of numbers only, which a buffer can hold."""
    if not is_state(node) or node.always_replicated:
        return False
    leaves = tree_util.tree_leaves(node)
    return bool(leaves) and all(
        hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in leaves
    )


def known(contents: Contents) -> Contents:
    """The one object for all equal contents."""
    return _known.setdefault(contents, contents)


def part_of(shape: tuple[int, ...], where: SpecPlacement, mesh: AnyMesh) -> tuple[int, ...]:
    """The shape of a shard's part of an array."""
    counts = [math.prod(mesh.shape[name] for name in names) for names in where.axes]
    counts += [1] * (len(shape) - len(counts))
    return tuple(size // count for size, count in zip(shape, counts, strict=True))


def buffer_of(group: Group, arrays: Sequence[Leaf], mesh: AnyMesh) -> PyTree:
    """The buffer of a group, made of whole arrays and laid out on a mesh."""
    if any(map(compat.is_tracer, arrays)):
        return _traced_buffer(group, [jnp.asarray(x) for x in arrays], mesh)
    host = [np.asarray(x) for x in jax.device_get(list(arrays))]
    if isinstance(mesh, AbstractMesh):
        starts = (shard * group.size for shard in range(math.prod(group.counts)))
        return jnp.asarray(np.concatenate([group.gathered(host, start) for start in starts]))
    where = NamedSharding(mesh, group.where.spec)
    # Shard by shard, so that the host never holds a second copy of everything.
    indices: Mapping[jax.Device, PyTree] = where.addressable_devices_indices_map(group.shape)
    parts = [
        jax.device_put(group.gathered(host, index[0].start or 0), device)
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(group.shape, where, parts, dtype=group.dtype)


def _traced_buffer(group: Group, arrays: Sequence[Leaf], mesh: AnyMesh) -> PyTree:
    mesh = mesh_for_traced(mesh, arrays)
    specs = [slot.where.spec for slot in group.slots]
    laid = [
        traced_onto(x, NamedSharding(mesh, spec), frozenset(mesh.axis_names))
        for x, spec in zip(arrays, specs, strict=True)
    ]
    # Each shard joins its own parts, because JAX does not split or merge dimensions over Explicit axes.
    return jax.shard_map(group.join, mesh=mesh, in_specs=(specs,), out_specs=group.where.spec)(laid)
