"""`pack`: the states of a model in a few buffers, which every mapped call takes in its place."""

import dataclasses
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._axes._joined import taken_apart, written_end_to_end
from .._base import _errors as errors
from .._base._errors import (
    StructureError,
    first_paths,
)
from .._base._trees import (
    PackedNode,
    describe,
    is_packed,
    is_state,
    is_state_or_packed,
    path_str,
    unpacked,
)
from .._base._types import AnyMesh, AxisName, Dtype, KeyPath, Leaf, PyTree, PyTreeDef, StateSpecs
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax._compat import tree_util
from .._state._state import ParamState, State
from ._agreement import array_passed, check_alike
from ._mesh import check_mesh, check_specs, manual_names, mesh_for_traced
from ._placement import check_shapes, check_valued, is_own, traced_onto
from ._specs import UNDECLARED, SpecPlacement, check_state_specs, choose_specs, own_placements


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of one array of a state in a buffer.

    **Attributes:**

    - `path`: the path of the state.
    - `shape`: the shape of the whole array.
    - `placement`: the placement of the array.
    - `start`: the index in a shard's part of the buffer at which the shard's part of the array begins.
    - `part`: the shape of a shard's part of the array.
    """

    path: str
    shape: tuple[int, ...]
    placement: SpecPlacement
    start: int
    part: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.part)


@dataclasses.dataclass(frozen=True)
class Group:
    """The arrays in one buffer: all of one dtype, and with parts over the same mesh axes.

    Either all of them are in a `ParamState`, or none is: a buffer is trained as a whole or not at all.

    **Attributes:**

    - `names`: these mesh axes, in the order of the mesh.
    - `counts`: their sizes.
    """

    dtype: Dtype
    names: tuple[AxisName, ...]
    counts: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def placement(self) -> SpecPlacement:
        """The buffer's placement: shard after shard."""
        return SpecPlacement(PartitionSpec(self.names) if self.names else PartitionSpec())

    @cached_property
    def size(self) -> int:
        """The length of a shard's part."""
        return sum(slot.size for slot in self.slots)

    @property
    def shape(self) -> tuple[int, ...]:
        return (math.prod(self.counts) * self.size,)

    def split(self, part: Leaf) -> list[Leaf]:
        """A shard's parts of the arrays, taken out of its part of the buffer."""
        self.check(part, (self.size,))
        return taken_apart(part, [slot.part for slot in self.slots])

    def check(self, buffer: Leaf, shape: tuple[int, ...]) -> None:
        """Refuse a buffer, or a shard's part of one, of another shape."""
        if np.shape(buffer) != shape:
            raise StructureError(
                f"Packed: the buffer with {first_paths([slot.path for slot in self.slots])} is "
                f"{describe(buffer)}, but was packed with shape {shape}, in which the states have their "
                "positions. Change shapes in the model, and pack the model anew."
            )

    def join(self, parts: Sequence[Leaf]) -> PyTree:
        """A shard's part of the buffer, made of its parts of the arrays."""
        return written_end_to_end(parts)

    def gathered(self, arrays: Sequence[np.ndarray], start: int) -> np.ndarray:
        """The shard's part of the buffer that begins at `start`, made of whole arrays."""
        shard = np.unravel_index(start // max(self.size, 1), self.counts) if self.names else ()
        parts = [self._part(x, slot, shard) for x, slot in zip(arrays, self.slots, strict=True)]
        return np.concatenate(parts, dtype=self.dtype)

    def array(self, buffer: Leaf, slot: Slot) -> PyTree:
        """One whole array, taken out of the buffer."""
        here = slice(slot.start, slot.start + slot.size)
        if explicit.is_explicitly_typed(buffer):
            # Each shard takes its own part: JAX does not split or merge dimensions over Explicit axes.
            mesh = (jax.typeof(buffer) if compat.is_tracer(buffer) else buffer).sharding.mesh
            taken: Callable[[Leaf], Leaf] = jax.shard_map(
                lambda part: part[here].reshape(slot.part),
                mesh=mesh,
                in_specs=self.placement.spec,
                out_specs=slot.placement.spec,
            )
            return taken(buffer)
        rows = buffer.reshape(math.prod(self.counts), self.size)[:, here]
        return self._whole(rows, slot)

    def buffer(self, arrays: Sequence[Leaf]) -> PyTree:
        """The buffer, made of whole arrays."""
        rows = [self._rows(x, slot) for x, slot in zip(arrays, self.slots, strict=True)]
        return jnp.concatenate(rows, axis=1, dtype=self.dtype).reshape(-1)

    def _part(self, x: np.ndarray, slot: Slot, shard: tuple[Leaf, ...]) -> np.ndarray:
        """A shard's part of a whole array, flat. Only this part is copied."""
        sizes, order, _ = self._folds(slot)
        part: np.ndarray = np.transpose(np.reshape(x, sizes), order)[shard]
        return part.reshape(-1)

    def _rows(self, x: Leaf, slot: Slot) -> PyTree:
        """The parts of a whole array, one flat row for each shard."""
        sizes, order, _ = self._folds(slot)
        return x.reshape(sizes).transpose(order).reshape(math.prod(self.counts), slot.size)

    def _whole(self, rows: Leaf, slot: Slot) -> PyTree:
        sizes, order, back = self._folds(slot)
        apart = rows.reshape([sizes[k] for k in order]).transpose(back)
        return apart.reshape(slot.shape)

    def _folds(self, slot: Slot) -> tuple[list[int], list[int], list[int]]:
        """How to reshape and transpose a whole array so that the shards come first.

        **Returns:** the sizes after each axis is split into the mesh axes that split it and the rest; the
        order of axes that brings the mesh axes to the front, as in the buffer; and the order that undoes it.
        """
        count = dict(zip(self.names, self.counts, strict=True))
        sizes: list[int] = []
        at: dict[AxisName, int] = {}
        rest: list[int] = []
        for dim, size in enumerate(slot.part):
            for name in slot.placement.axes[dim] if dim < len(slot.placement.axes) else ():
                at[name] = len(sizes)
                sizes.append(count[name])
            rest.append(len(sizes))
            sizes.append(size)
        order = [*(at[name] for name in self.names), *rest]
        return sizes, order, [order.index(k) for k in range(len(order))]


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a packed model.

    **Attributes:**

    - `root`: the type of the model.
    - `unit_def`: the structure of the model, with a State as one leaf (a unit).
    - `states`: for each unit the structure of the State, and the numbers of the group and slot of each of its
        arrays; `None` for a unit that is not packed.
    - `groups`: the arrays in each buffer.
    - `sizes`: the names and sizes of the axes of the mesh for which it is packed.
    """

    root: type
    unit_def: PyTreeDef
    states: tuple[tuple[PyTreeDef, tuple[tuple[int, int], ...]] | None, ...]
    groups: tuple[Group, ...]
    sizes: tuple[tuple[AxisName, int], ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.unit_def, self.groups, self.sizes))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # Every call compares contents, and nearly always an object with itself.
        if self is other:
            return True
        return (
            isinstance(other, Contents)
            and self._hash == other._hash
            and (self.unit_def, self.states, self.groups, self.sizes)
            == (other.unit_def, other.states, other.groups, other.sizes)
        )

    def model(self, arrays: Sequence[Sequence[Leaf]], rest: Sequence[Leaf]) -> PyTree:
        """The model, made of the arrays of each group and of the units that are not packed."""
        others = iter(rest)
        units = [
            next(others) if one is None else one[0].unflatten([arrays[g][k] for g, k in one[1]])
            for one in self.states
        ]
        return self.unit_def.unflatten(units)

    def arrays(self, model: PyTree) -> tuple[list[list[Leaf]], list[Leaf]]:
        """The arrays of each group in a model of this structure, and its units that are not packed."""
        found: list[list[Leaf]] = [[None] * len(group.slots) for group in self.groups]
        rest: list[Leaf] = []
        units = tree_util.tree_leaves(model, is_leaf=is_state)
        for unit, one in zip(units, self.states, strict=True):
            if one is None:
                rest.append(unit)
                continue
            for (g, k), leaf in zip(one[1], tree_util.tree_leaves(unit), strict=True):
                found[g][k] = leaf
        return found, rest

    def members(self) -> list[list[int]]:
        """For each group the numbers of the units that have an array in it."""
        found: list[list[int]] = [[] for _ in self.groups]
        for number, one in enumerate(self.states):
            for g in dict.fromkeys(g for g, _ in one[1]) if one else ():
                found[g].append(number)
        return found


@dataclasses.dataclass(frozen=True)
class Form:
    """A packed model of which parts may be missing: in gradients `None` stands for what is not trained.

    **Attributes:**

    - `contents`: the contents of the whole model.
    - `groups`, `rest`: for each buffer, and for each unit that is not packed, whether it is there.
    """

    contents: Contents
    groups: tuple[bool, ...]
    rest: tuple[bool, ...]

    @cached_property
    def part(self) -> Contents:
        """The contents of the parts that are there."""
        if all(self.groups) and all(self.rest):
            return self.contents
        whole = self.contents
        number = {g: k for k, g in enumerate(np.flatnonzero(self.groups).tolist())}
        rest = iter(self.rest)
        marks: list[Leaf] = []
        states: list[Leaf] = []
        for one in whole.states:
            if one is None:
                kept: tuple[PyTreeDef, tuple[tuple[int, int], ...]] | None = None
                there = next(rest)
            else:
                structure, places = one
                own = [A_LEAF if g in number else None for g, _ in places]
                kept = (
                    tree_util.tree_structure(structure.unflatten(own)),
                    tuple((number[g], k) for g, k in places if g in number),
                )
                there = any(own)
            marks.append(A_LEAF if there else None)
            states += [kept] if there else []
        unit_def = tree_util.tree_structure(whole.unit_def.unflatten(marks))
        groups = tuple(whole.groups[g] for g in number)
        return Contents(whole.root, unit_def, tuple(states), groups, whole.sizes)


A_LEAF = object()
"""A leaf to rebuild a structure with, where only the structure counts."""


@jax.tree_util.register_pytree_with_keys_class
class Packed(PackedNode):
    """A model whose states' arrays lie in a few buffers: one for each dtype and set of mesh axes.

    Parameters have buffers of their own.

    `pack` makes one. Pass it to a mapped call in place of the model. The function sees the model, and the
    call returns a `Packed` if the function returns a model of the same structure. The cost of a call grows
    with the number of arrays, so that a thousand small states cost little more than one. For `states`,
    `partition`, filters and `value_and_grad` it counts as its model. Gradients are a `Packed` too, with
    `None` for what is not trained.

    **Attributes:**

    - `buffers`: the arrays.
    - `states`: a mapping from the path of each packed state, as `statemesh.states` names it, to the State.
        Looking one up copies its part of the buffer.
    - `rest`: what is not packed, by path: random states, arrays outside of States, static leaves.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> packed = sm.pack([sm.State(jnp.full(2, k)) for k in range(100)], mesh)
        >>> len(packed.buffers), packed.states["[7]"].value
        (1, Array([7, 7], dtype=int32))

        ```
    """

    __slots__ = ("__weakref__", "_contents", "_rest", "buffers")

    _rest: tuple[Leaf, ...]
    _contents: Contents

    def __init__(self, buffers: Sequence[Leaf], rest: Sequence[Leaf], contents: Contents) -> None:
        _set(self, tuple(buffers), tuple(rest), contents)

    def __setattr__(self, name: str, value: object) -> None:
        raise _fixed_packed(name)

    def __delattr__(self, name: str) -> None:
        raise _fixed_packed(name)

    def __reduce__(self) -> tuple[object, ...]:
        return Packed, (self.buffers, self._rest, self._contents)

    @classmethod
    def of(cls, buffers: Sequence[Leaf], rest: Sequence[Leaf], form: Form) -> "Packed":
        """A `Packed` of this form, made of the buffers and the other units that are there."""
        own, other = iter(buffers), iter(rest)
        return cls(
            [next(own) if there else None for there in form.groups],
            [next(other) if there else None for there in form.rest],
            form.contents,
        )

    def unpack(self) -> PyTree:
        """The model, bit for bit as it was packed or as calls have left it.

        **Returns:** the model. Its arrays lie on the mesh as their placements say.
        """
        return self._model(_arrays)

    def _model(self, arrays_of: Callable[[Group, Leaf], list[Leaf]]) -> PyTree:
        contents, buffers, rest = self._present()
        pairs = zip(contents.groups, buffers, strict=True)
        return contents.model([arrays_of(*pair) for pair in pairs], rest)

    @property
    def _form(self) -> Form:
        there = [tuple(x is not None for x in some) for some in (self.buffers, self._rest)]
        return Form(self._contents, *there)

    def _present(self) -> tuple[Contents, list[Leaf], list[Leaf]]:
        """The contents, buffers and other units that are there: the missing ones are left out."""
        buffers, rest = ([x for x in some if x is not None] for some in (self.buffers, self._rest))
        return self._form.part, buffers, rest

    @property
    def states(self) -> "_States":
        return _States(self)

    @property
    def rest(self) -> dict[str, PyTree]:
        contents, _, rest = self._present()
        paths = _unit_paths(contents.unit_def)
        left = [path for path, one in zip(paths, contents.states, strict=True) if one is None]
        return dict(zip(left, rest, strict=True))

    def __repr__(self) -> str:
        contents, buffers, rest = self._present()
        packed = sum(one is not None for one in contents.states)
        return f"Packed({packed} states in {len(buffers)} arrays, {len(rest)} not packed)"

    def tree_flatten_with_keys(self) -> tuple[PyTree, Contents]:
        kids = jax.tree_util.GetAttrKey("buffers"), self.buffers
        rest = jax.tree_util.GetAttrKey("rest"), self._rest
        return (kids, rest), self._contents

    def tree_flatten(self) -> tuple[PyTree, Contents]:
        return (self.buffers, self._rest), self._contents

    @classmethod
    def tree_unflatten(cls, contents: Contents, children: PyTree) -> "Packed":
        new = object.__new__(cls)
        buffers, rest = children
        _set(new, buffers, rest, contents)
        return new


def _set(packed: Packed, buffers: Sequence[Leaf], rest: PyTree, contents: Contents) -> None:
    for name, value in (("buffers", buffers), ("_rest", rest), ("_contents", contents)):
        object.__setattr__(packed, name, value)


class _States(Mapping[str, State]):
    """The packed states by path. Each is made when it is looked up."""

    def __init__(self, packed: Packed) -> None:
        contents, self._buffers, _ = packed._present()
        self._groups = contents.groups
        paths = _unit_paths(contents.unit_def)
        pairs = zip(paths, contents.states, strict=True)
        self._at = {path: one for path, one in pairs if one is not None}

    def __getitem__(self, path: str) -> State:
        structure, places = self._at[path]
        groups, buffers = self._groups, self._buffers
        for g in dict.fromkeys(g for g, _ in places):
            groups[g].check(buffers[g], groups[g].shape)
        arrays = [groups[g].array(buffers[g], groups[g].slots[k]) for g, k in places]
        return structure.unflatten(arrays)

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


def with_models(tree: PyTree, arrays_of: Callable[[Group, Leaf], list[Leaf]]) -> PyTree:
    """A tree with every `Packed` replaced by its model, whose arrays `arrays_of` makes of each buffer."""
    if not any(map(is_packed, tree_util.tree_leaves(tree, is_leaf=is_state_or_packed))):
        return tree
    one = lambda node: node._model(arrays_of) if isinstance(node, Packed) else node
    return tree_util.tree_map(one, tree, is_leaf=is_state_or_packed)


def shapes_of(group: Group, buffer: Leaf) -> list[Leaf]:
    """The shapes and dtypes of the arrays in a buffer."""
    return [jax.ShapeDtypeStruct(slot.shape, buffer.dtype) for slot in group.slots]


def members(tree: PyTree) -> list[list[int]]:
    """For each unit of a tree the numbers of the units of the unpacked tree that it consists of.

    A unit is a State, or a leaf outside of any State. A buffer consists of all States with an array in it.
    """
    found: list[list[int]] = []
    start = 0
    for node in tree_util.tree_leaves(tree, is_leaf=is_state_or_packed):
        if not isinstance(node, Packed):
            found.append([start])
            start += 1
            continue
        contents = node._form.part
        unpacked = [[number] for number, one in enumerate(contents.states) if one is None]
        found += [[start + number for number in own] for own in contents.members() + unpacked]
        start += len(contents.states)
    return found


def _arrays(group: Group, buffer: Leaf) -> list[Leaf]:
    group.check(buffer, group.shape)
    if compat.is_tracer(buffer) or not isinstance(buffer, jax.Array):
        return [group.array(_on_host(buffer), slot) for slot in group.slots]
    targets = [_target(buffer, slot) for slot in group.slots]
    if not (buffer.is_fully_addressable or buffer.is_fully_replicated):
        # No host has all of it, so that the devices of all processes take it apart.
        take = lambda buffer: [group.array(buffer, slot) for slot in group.slots]
        return list(jax.jit(take, out_shardings=targets)(buffer))
    source = np.asarray(buffer)
    return list(jax.device_put([group.array(source, slot) for slot in group.slots], targets))


def _unit_paths(unit_def: PyTreeDef) -> list[str]:
    marked = unit_def.unflatten([A_LEAF] * unit_def.num_leaves)
    flat, _ = tree_util.tree_flatten_with_path(marked)
    return [path_str(keys) for keys, _ in flat]


def _on_host(buffer: Leaf) -> PyTree:
    return buffer if compat.is_tracer(buffer) else np.asarray(buffer)


def _target(buffer: Leaf, slot: Slot) -> PyTree:
    sharding = buffer.sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, slot.placement.spec)
    return sharding


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
    check_specs(
        [(f"the spec of {path}", placement.spec) for path, _, placement in packed], mesh, names
    )
    paths, placements = [path for path, _, _ in packed], [placement for _, _, placement in packed]
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
        for x, placement in zip(arrays, own_wheres, strict=True):
            kind = jax.dtypes.canonicalize_dtype(x.dtype)
            key: _Key = kind, placement.axis_names, isinstance(node, ParamState)
            own = found.setdefault(key, [])
            start = own[-1][0].start + own[-1][0].size if own else 0
            part = part_of(np.shape(x), placement, mesh)
            own.append((Slot(path_str(keys), np.shape(x), placement, start, part), x))
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
        return jax.typeof(buffer).sharding.mesh
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
        (path_str(keys, "model"), x, placement)
        for (keys, node), own in zip(flat, wheres, strict=True)
        if own is not None
        for x, placement in zip(tree_util.tree_leaves(node), own, strict=True)
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


def part_of(shape: tuple[int, ...], placement: SpecPlacement, mesh: AnyMesh) -> tuple[int, ...]:
    """The shape of a shard's part of an array."""
    counts = [math.prod(mesh.shape[name] for name in names) for names in placement.axes]
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
    placement = NamedSharding(mesh, group.placement.spec)
    # Shard by shard, so that the host never holds a second copy of everything.
    indices: Mapping[jax.Device, PyTree] = placement.addressable_devices_indices_map(group.shape)
    parts = [
        jax.device_put(group.gathered(host, index[0].start or 0), device)
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(
        group.shape, placement, parts, dtype=group.dtype
    )


def _traced_buffer(group: Group, arrays: Sequence[Leaf], mesh: AnyMesh) -> PyTree:
    mesh = mesh_for_traced(mesh, arrays)
    specs = [slot.placement.spec for slot in group.slots]
    laid = [
        traced_onto(x, NamedSharding(mesh, spec), frozenset(mesh.axis_names))
        for x, spec in zip(arrays, specs, strict=True)
    ]
    # Each shard joins its own parts, because JAX does not split or merge dimensions over Explicit axes.
    return jax.shard_map(group.join, mesh=mesh, in_specs=(specs,), out_specs=group.placement.spec)(
        laid
    )


def packed_placements(tree: PyTree) -> list[Sequence[SpecPlacement] | None]:
    """For each unit of the unpacked tree the placements with which its arrays are packed.

    A unit is a State, or a leaf outside of any State. It is `None` for one that is not packed.
    """
    found: list[Sequence[SpecPlacement] | None] = []
    for node in tree_util.tree_leaves(tree, is_leaf=is_state_or_packed):
        if not isinstance(node, Packed):
            found.append(None)
            continue
        contents = node._form.part
        slots = [group.slots for group in contents.groups]
        found += [one and [slots[g][k].placement for g, k in one[1]] for one in contents.states]
    return found


def repack(packed: Packed, model: PyTree, mesh: Mesh) -> Packed:
    """Pack a model of the same structure as `packed` is, for a mesh.

    **Raises:** `SpecError` for placements that do not fit the mesh.
    """
    form = packed._form
    check_specs(
        [
            (f"the spec of {slot.path}", slot.placement.spec)
            for group in form.contents.groups
            for slot in group.slots
        ],
        mesh,
        manual_names(mesh, ()),
    )
    form = dataclasses.replace(form, contents=known(_for_mesh(form.contents, mesh)))
    arrays, rest = form.part.arrays(model)
    pairs = zip(form.part.groups, arrays, strict=True)
    return Packed.of([buffer_of(group, own, mesh) for group, own in pairs], rest, form)


def _for_mesh(contents: Contents, mesh: Mesh) -> Contents:
    groups = tuple(_group_for(group, mesh) for group in contents.groups)
    return dataclasses.replace(contents, groups=groups, sizes=tuple(mesh.shape.items()))


def _group_for(group: Group, mesh: Mesh) -> Group:
    names = tuple(name for name in mesh.axis_names if name in group.names)
    slots, start = [], 0
    for old in group.slots:
        shape = old.shape
        if old.placement.axis is not None:
            # The first axis has an entry for each shard.
            shape = (math.prod(mesh.shape[name] for name in old.placement.axes[0]), *shape[1:])
        slot = dataclasses.replace(
            old, shape=shape, start=start, part=part_of(shape, old.placement, mesh)
        )
        slots.append(slot)
        start += slot.size
    counts = tuple(mesh.shape[name] for name in names)
    return Group(group.dtype, names, counts, tuple(slots))


def _fixed_packed(attribute: str) -> AttributeError:
    return AttributeError(
        f"Packed is immutable; cannot assign to `{attribute}`. Its values change in a mapped call, by "
        "`jax.tree.map`, or in the model: `packed.unpack()`."
    )
