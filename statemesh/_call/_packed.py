"""`pack`: the states of a model in a few buffers, which every mapped call takes in its place."""

import dataclasses
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from operator import is_
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._axes._joined import taken_apart, written_end_to_end
from .._base import _errors as errors
from .._base._errors import (
    SpecError,
    StructureError,
    error_listing,
    first_paths,
    sizes_str,
    spec_str,
)
from .._base._specs import Placement, SpecPlacement
from .._base._trees import (
    PackedNode,
    describe,
    has_packed,
    is_state,
    is_state_or_packed,
    path_str,
    unpacked,
)
from .._base._types import AnyMesh, AxisName, Dtype, Leaf, PyTree, PyTreeDef, StateSpecs
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax._compat import tree_util
from .._state._state import ParamState, State
from ._agreement import check_same_arrays
from ._arguments import Call, Input, check_valued
from ._layout import placed_states, shardings, traced_onto
from ._mesh_and_specs import check_mesh, check_specs, manual_names, mesh_for_traced
from ._per_shard import Instance
from ._tracing import VaryingAxes
from ._write_back import Forwarded, Output, WriteBack


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of one array of a state in a buffer.

    **Attributes:**

    - `path`: the path of the state.
    - `shape`: the shape of the whole array.
    - `placement`: the placement of the array.
    - `part`: the shape of a shard's part of the array.
    """

    path: str
    shape: tuple[int, ...]
    placement: SpecPlacement
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
    - `slots`: of the arrays, which lie end to end in each shard's part of the buffer.
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
    def starts(self) -> list[int]:
        """The index in a shard's part of the buffer at which each array begins, and the part's length."""
        return list(accumulate((slot.size for slot in self.slots), initial=0))

    @property
    def shape(self) -> tuple[int, ...]:
        return (math.prod(self.counts) * self.starts[-1],)

    def split(self, part: Leaf) -> list[Leaf]:
        """A shard's parts of the arrays, taken out of its part of the buffer."""
        self.check(part, (self.starts[-1],))
        return taken_apart(part, [slot.part for slot in self.slots])

    def check(self, buffer: Leaf, shape: tuple[int, ...]) -> None:
        """Refuse a buffer, or a shard's part of one, of another shape."""
        if np.shape(buffer) != shape:
            raise StructureError(
                f"Packed: the buffer with {first_paths([slot.path for slot in self.slots])} is "
                f"{describe(buffer)}, but was packed with shape {shape}, in which the states have their "
                "positions. Change shapes in the model, and pack the model anew."
            )

    def array(self, buffer: Leaf, number: int) -> PyTree:
        """One whole array, taken out of the buffer."""
        slot = self.slots[number]
        here = slice(self.starts[number], self.starts[number + 1])
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
        rows = buffer.reshape(math.prod(self.counts), self.starts[-1])[:, here]
        sizes, order = self._folds(slot)
        folded = rows.reshape([sizes[k] for k in order])
        back = sorted(range(len(order)), key=order.__getitem__)
        return folded.transpose(back).reshape(slot.shape)

    def buffer(self, arrays: Sequence[Leaf], mesh: AnyMesh | None) -> PyTree:
        """The buffer, made of whole arrays and laid out on a mesh, if it is known."""
        if mesh is not None and any(map(compat.is_tracer, arrays)):
            mesh = mesh_for_traced(mesh, arrays)
            specs = [slot.placement.spec for slot in self.slots]
            laid_out = [
                traced_onto(jnp.asarray(x), NamedSharding(mesh, spec), frozenset(mesh.axis_names))
                for x, spec in zip(arrays, specs, strict=True)
            ]
            # Each shard joins its own parts: JAX does not split or merge dimensions over Explicit axes.
            out_specs = self.placement.spec
            join = jax.shard_map(
                written_end_to_end, mesh=mesh, in_specs=(specs,), out_specs=out_specs
            )
            return join(laid_out)
        if mesh is not None:
            arrays = [np.asarray(x) for x in jax.device_get(list(arrays))]
        folds = map(self._folds, self.slots)
        folded = [
            x.reshape(sizes).transpose(order)
            for x, (sizes, order) in zip(arrays, folds, strict=True)
        ]
        if isinstance(mesh, Mesh):
            # Shard by shard, so that the host never holds a second copy of everything.
            def part(index: Any) -> np.ndarray:
                number = (index[0].start or 0) // max(self.starts[-1], 1)
                shard = np.unravel_index(number, self.counts)
                return np.concatenate([x[shard].reshape(-1) for x in folded], dtype=self.dtype)

            target = NamedSharding(mesh, self.placement.spec)
            return jax.make_array_from_callback(self.shape, target, part, dtype=self.dtype)
        shards = math.prod(self.counts)
        rows = [x.reshape(shards, slot.size) for x, slot in zip(folded, self.slots, strict=True)]
        return jnp.concatenate(rows, axis=1, dtype=self.dtype).reshape(-1)

    def _folds(self, slot: Slot) -> tuple[list[int], list[int]]:
        """How to reshape and transpose a whole array so that the shards come first.

        **Returns:** the sizes after each axis is split into the mesh axes that split it and the rest; and the
        order of axes that brings the mesh axes to the front, as in the buffer.
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
        return sizes, [*(at[name] for name in self.names), *rest]


PackedState: TypeAlias = tuple[PyTreeDef, tuple[tuple[int, int], ...]]
"""The structure of a State, and the numbers of the group and the slot of each of its arrays."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a packed model.

    **Attributes:**

    - `root`: the type of the model.
    - `unit_def`: the structure of the model, with a State as one leaf (a unit).
    - `states`: for each unit how its State is packed; `None` for a unit that is not.
    - `groups`: the arrays in each buffer.
    - `sizes`: the names and sizes of the axes of the mesh for which it is packed.
    """

    root: type
    unit_def: PyTreeDef
    states: tuple[PackedState | None, ...]
    groups: tuple[Group, ...]
    sizes: tuple[tuple[AxisName, int], ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.unit_def, self.groups, self.sizes))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # Every call compares contents, and nearly always an object with itself.
        return self is other or (
            isinstance(other, Contents)
            and (self.unit_def, self.states, self.groups, self.sizes)
            == (other.unit_def, other.states, other.groups, other.sizes)
        )

    def model(self, arrays: Sequence[Sequence[Leaf]], rest: Sequence[Leaf]) -> PyTree:
        """The model, made of the arrays of each group and of the units that are not packed."""
        others = iter(rest)
        units = [
            next(others)
            if state is None
            else state[0].unflatten([arrays[g][k] for g, k in state[1]])
            for state in self.states
        ]
        return self.unit_def.unflatten(units)

    def arrays(self, model: PyTree) -> tuple[list[list[Leaf]], list[Leaf]]:
        """The arrays of each group in a model of this structure, and its units that are not packed."""
        arrays: list[list[Leaf]] = [[None] * len(group.slots) for group in self.groups]
        rest: list[Leaf] = []
        units = tree_util.tree_leaves(model, is_leaf=is_state)
        for unit, state in zip(units, self.states, strict=True):
            if state is None:
                rest.append(unit)
                continue
            for (g, k), leaf in zip(state[1], tree_util.tree_leaves(unit), strict=True):
                arrays[g][k] = leaf
        return arrays, rest

    def part(self, groups: Sequence[bool], rest: Sequence[bool]) -> "Contents":
        """The contents of a model of which parts are missing: gradients have `None` for what is not trained.

        **Arguments:**

        - `groups`, `rest`: for each buffer, and for each unit that is not packed, whether it is there.
        """
        if all(groups) and all(rest):
            return self
        number = {g: k for k, g in enumerate(np.flatnonzero(groups).tolist())}
        others = iter(rest)
        units: list[Leaf] = []
        states: list[PackedState | None] = []
        for state in self.states:
            arrays = state and [A_LEAF if g in number else None for g, _ in state[1]]
            if not (any(arrays) if arrays else next(others)):
                units.append(None)
                continue
            units.append(A_LEAF)
            if state and arrays:
                structure = tree_util.tree_structure(state[0].unflatten(arrays))
                places = tuple((number[g], k) for g, k in state[1] if g in number)
                state = structure, places
            states.append(state)
        unit_def = tree_util.tree_structure(self.unit_def.unflatten(units))
        present = tuple(self.groups[g] for g in number)
        return Contents(self.root, unit_def, tuple(states), present, self.sizes)

    @property
    def paths(self) -> list[str]:
        """The path of each unit."""
        marked = self.unit_def.unflatten([A_LEAF] * self.unit_def.num_leaves)
        return [path_str(keys) for keys, _ in tree_util.tree_flatten_with_path(marked)[0]]


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

    def _refilled(self, buffers: Sequence[Leaf], rest: Sequence[Leaf]) -> "Packed":
        """A `Packed` with other values for the parts that are there."""
        values = iter([*buffers, *rest])
        old = self.buffers, self._rest
        new = [[x if x is None else next(values) for x in parts] for parts in old]
        return Packed(new[0], new[1], self._contents)

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
    def _present_contents(self) -> Contents:
        """The contents of the parts that are there."""
        groups, rest = ([x is not None for x in parts] for parts in (self.buffers, self._rest))
        return self._contents.part(groups, rest)

    def _present(self) -> tuple[Contents, list[Leaf], list[Leaf]]:
        """The contents, buffers and other units that are there."""
        buffers, rest = (
            [x for x in parts if x is not None] for parts in (self.buffers, self._rest)
        )
        return self._present_contents, buffers, rest

    @property
    def states(self) -> "_States":
        return _States(self)

    @property
    def rest(self) -> dict[str, PyTree]:
        contents, _, rest = self._present()
        units = zip(contents.paths, contents.states, strict=True)
        paths = [path for path, state in units if state is None]
        return dict(zip(paths, rest, strict=True))

    def __repr__(self) -> str:
        contents, buffers, rest = self._present()
        packed = sum(state is not None for state in contents.states)
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
        units = zip(contents.paths, contents.states, strict=True)
        self._states = {path: state for path, state in units if state is not None}

    def __getitem__(self, path: str) -> State:
        structure, places = self._states[path]
        groups, buffers = self._groups, self._buffers
        for g in dict.fromkeys(g for g, _ in places):
            groups[g].check(buffers[g], groups[g].shape)
        return structure.unflatten([groups[g].array(buffers[g], k) for g, k in places])

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def with_models(tree: PyTree, arrays_of: Callable[[Group, Leaf], list[Leaf]]) -> PyTree:
    """A tree with every `Packed` replaced by its model, whose arrays `arrays_of` makes of each buffer."""
    if not has_packed(tree):
        return tree
    model = lambda node: node._model(arrays_of) if isinstance(node, Packed) else node
    return tree_util.tree_map(model, tree, is_leaf=is_state_or_packed)


def shapes_of(group: Group, buffer: Leaf) -> list[Leaf]:
    """The shapes and dtypes of the arrays in a buffer."""
    return [jax.ShapeDtypeStruct(slot.shape, buffer.dtype) for slot in group.slots]


def members(tree: PyTree) -> list[list[int]]:
    """For each unit of a tree the numbers of the units of the unpacked tree that it consists of.

    A unit is a State, or a leaf outside of any State. A buffer consists of all States with an array in it.
    """
    members: list[list[int]] = []
    start = 0
    for node in tree_util.tree_leaves(tree, is_leaf=is_state_or_packed):
        if not isinstance(node, Packed):
            members.append([start])
            start += 1
            continue
        contents = node._present_contents
        of_buffers: list[list[int]] = [[] for _ in contents.groups]
        rest: list[list[int]] = []
        for number, state in enumerate(contents.states, start):
            if state is None:
                rest.append([number])
            for g in {g for g, _ in state[1]} if state else ():
                of_buffers[g].append(number)
        members += of_buffers + rest
        start += len(contents.states)
    return members


def _arrays(group: Group, buffer: Leaf) -> list[Leaf]:
    group.check(buffer, group.shape)

    def arrays(buffer: Leaf) -> list[Leaf]:
        return [group.array(buffer, k) for k in range(len(group.slots))]

    if compat.is_tracer(buffer):
        return arrays(buffer)
    if not isinstance(buffer, jax.Array):
        return arrays(np.asarray(buffer))
    here = buffer.sharding
    targets = [
        NamedSharding(here.mesh, slot.placement.spec) if isinstance(here, NamedSharding) else here
        for slot in group.slots
    ]
    if buffer.is_fully_addressable or buffer.is_fully_replicated:
        return list(jax.device_put(arrays(np.asarray(buffer)), targets))
    # No host has all of it, so that the devices of all processes take it apart.
    return list(jax.jit(arrays, out_shardings=targets)(buffer))


# Packed models with equal contents share one object, so that calls compare contents by identity.
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
    if has_packed(model):
        expected = "a model that is not packed yet, as in pack(packed.unpack(), mesh)"
        raise errors.invalid_argument("pack", "model", model, expected)
    units = [
        (path, node, placements if _is_packable(node) else None)
        for path, node, placements in placed_states(model, "model", state_specs)
    ]
    arrays = [
        (path, x, placement)
        for path, node, placements in units
        if placements is not None
        for x, placement in zip(tree_util.tree_leaves(node), placements, strict=True)
    ]
    named = [(path, x) for path, x, _ in arrays]
    shardings("pack", named, [placement for _, _, placement in arrays], mesh)
    check_valued("pack", named)
    check_same_arrays("pack", mesh, named)
    # The arrays in each buffer, by what they have in common.
    buffers: dict[tuple[Dtype, frozenset[AxisName], bool], list[tuple[Slot, Leaf]]] = {}
    states: list[PackedState | None] = []
    for path, node, placements in units:
        if placements is None:
            states.append(None)
            continue
        leaves, structure = tree_util.tree_flatten(node)
        places = []
        for x, placement in zip(leaves, placements, strict=True):
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            key = dtype, placement.axis_names, isinstance(node, ParamState)
            inside = buffers.setdefault(key, [])
            places.append((list(buffers).index(key), len(inside)))
            shown = path.removeprefix("model").removeprefix(".")
            inside.append((_slot(shown, np.shape(x), placement, mesh), x))
        states.append((structure, tuple(places)))
    groups = tuple(
        _group(dtype, [slot for slot, _ in inside], mesh) for (dtype, *_), inside in buffers.items()
    )
    unit_def = tree_util.tree_structure(model, is_leaf=is_state)
    contents = Contents(type(model), unit_def, tuple(states), groups, tuple(mesh.shape.items()))
    contents = _known.setdefault(contents, contents)
    return Packed(
        [
            group.buffer([x for _, x in inside], mesh)
            for group, inside in zip(groups, buffers.values(), strict=True)
        ],
        [node for _, node, placements in units if placements is None],
        contents,
    )


def _slot(path: str, shape: tuple[int, ...], placement: SpecPlacement, mesh: AnyMesh) -> Slot:
    part = NamedSharding(mesh, placement.spec).shard_shape(shape)
    return Slot(path, shape, placement, part)


def _group(dtype: Dtype, slots: Sequence[Slot], mesh: AnyMesh) -> Group:
    axes = slots[0].placement.axis_names
    names = tuple(name for name in mesh.axis_names if name in axes)
    return Group(dtype, names, tuple(mesh.shape[name] for name in names), tuple(slots))


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
    contents, buffers, _ = packed._present()
    arrays, rest = contents.arrays(new)
    before, _ = contents.arrays(old)
    pairs = zip(arrays, before, strict=True)
    same = [all(map(is_, *pair)) for pair in pairs]
    each = zip(contents.groups, buffers, arrays, same, strict=True)
    buffers = [
        buffer if is_same else group.buffer(inside, _mesh_of(buffer))
        for group, buffer, inside, is_same in each
    ]
    return packed._refilled(buffers, rest)


def _mesh_of(buffer: Leaf) -> AnyMesh | None:
    """The mesh of a buffer. It is `None`, because unknown, for a buffer that is traced on Auto axes."""
    if explicit.is_explicitly_typed(buffer) and compat.is_tracer(buffer):
        return jax.typeof(buffer).sharding.mesh
    sharding = None if compat.is_tracer(buffer) else getattr(buffer, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _is_packable(node: PyTree) -> bool:
    """Whether `node` is a State with arrays of numbers only, which a buffer can hold."""
    if not is_state(node) or node.always_replicated:
        return False
    leaves = tree_util.tree_leaves(node)
    return bool(leaves) and all(
        hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in leaves
    )


def packed_placements(tree: PyTree) -> list[Sequence[SpecPlacement] | None]:
    """For each unit of the unpacked tree the placements with which its arrays are packed.

    A unit is a State, or a leaf outside of any State. It is `None` for one that is not packed.
    """
    placements: list[Sequence[SpecPlacement] | None] = []
    for node in tree_util.tree_leaves(tree, is_leaf=is_state_or_packed):
        if not isinstance(node, Packed):
            placements.append(None)
            continue
        contents = node._present_contents
        slots = [group.slots for group in contents.groups]
        for state in contents.states:
            placements.append(state and [slots[g][k].placement for g, k in state[1]])
    return placements


def repack(packed: Packed, model: PyTree, mesh: Mesh) -> Packed:
    """Pack a model of the same structure as `packed` is, for a mesh.

    **Raises:** `SpecError` for placements that do not fit the mesh.
    """
    old = packed._contents
    slots = [slot for group in old.groups for slot in group.slots]
    named = [(f"the spec of {slot.path}", slot.placement.spec) for slot in slots]
    check_specs(named, mesh, manual_names(mesh, ()))

    def on_mesh(slot: Slot) -> Slot:
        shape = slot.shape
        if slot.placement.axis is not None:
            # The first axis has an entry for each shard.
            shape = (math.prod(mesh.shape[name] for name in slot.placement.axes[0]), *shape[1:])
        return _slot(slot.path, shape, slot.placement, mesh)

    groups = tuple(_group(x.dtype, [*map(on_mesh, x.slots)], mesh) for x in old.groups)
    contents = dataclasses.replace(old, groups=groups, sizes=tuple(mesh.shape.items()))
    packed = Packed(packed.buffers, packed._rest, _known.setdefault(contents, contents))
    there, _, _ = packed._present()
    arrays, rest = there.arrays(model)
    pairs = zip(there.groups, arrays, strict=True)
    return packed._refilled([group.buffer(inside, mesh) for group, inside in pairs], rest)


def _fixed_packed(attribute: str) -> AttributeError:
    return AttributeError(
        f"Packed is immutable; cannot assign to `{attribute}`. Its values change in a mapped call, by "
        "`jax.tree.map`, or in the model: `packed.unpack()`."
    )


# How a call takes a `Packed`: its models are what the function sees.

RunInstance: TypeAlias = Callable[[Sequence[Leaf], VaryingAxes], tuple[list[Leaf], WriteBack]]
"""Runs one instance on its parts of the inputs; returns its outputs and how the result is put together."""


@dataclasses.dataclass(frozen=True, slots=True)
class _At:
    """The source of an unpacked leaf: a leaf of the arguments, or one array in a buffer."""

    position: int
    group: Group | None = None
    slot: int = 0


class Packing:
    """A call's arguments with each `Packed` replaced by its model. Calls without any have no `Packing`.

    **Arguments:**

    - `call`: the arguments.

    **Attributes:**

    - `origins`: for each leaf of the unpacked arguments what it is.
    - `models`: what is packed, without arrays, and its contents.
    - `placements`: that of each unpacked input, once the inputs are placed.
    - `sources`: what each unpacked input is.
    - `numbers`: the number of the input that each unpacked input is, or is in.
    """

    def __init__(self, call: Call) -> None:
        marked = call.treedef.unflatten(map(_At, range(len(call.leaves))))
        nodes = tree_util.tree_leaves(marked, is_leaf=is_state_or_packed)
        self.models = [(n, n._present_contents) for n in nodes if isinstance(n, Packed)]
        self.origins: list[_At] = tree_util.tree_leaves(with_models(marked, _marks))

    def unpacked(self, call: Call) -> Call:
        """The arguments unpacked. In the place of an array in a buffer stands its shape."""
        return Call(call.fun, *with_models((call.args, call.kwargs), shapes_of))

    def place(
        self, name: str, unpacked: Sequence[Input], sizes: Mapping[Any, int], call: Call
    ) -> list[Input]:
        """A record of each input of the call: of a buffer in place of its arrays.

        **Raises:** `SpecError` for what was packed for other sizes of the mesh, or for other placements.
        """
        self.placements = [x.placement for x in unpacked]
        self.sources = [self.origins[x.position] for x in unpacked]
        for _, contents in self.models:
            packed = dict(contents.sizes)
            used = {axis for group in contents.groups for axis in group.names}
            if any(sizes.get(axis) != packed[axis] for axis in used):
                raise SpecError(
                    f"{name}: a model is packed for a mesh with {sizes_str(packed) or 'no axes'}, but this "
                    f"call is on {sizes_str(sizes) or 'no axes'}. Pack it for the mesh of this call: "
                    "statemesh.pack(packed.unpack(), mesh)."
                )
        moved: list[str] = []
        placed: dict[int, tuple[Placement, str]] = {}
        for x, at in zip(unpacked, self.sources, strict=True):
            placement = x.placement
            if at.group is not None:
                placement = _of_buffer(at.group, x.placement)
                packed_for = at.group.slots[at.slot].placement
                if not _lies(packed_for, x.placement):
                    moved.append(
                        f"{x.path}: packed with {spec_str(packed_for.spec)}, but this call has "
                        f"{spec_str(x.placement.spec)}"
                    )
            placed[at.position] = placement, x.placed_by
        if moved:
            raise error_listing(
                SpecError,
                f"{name}: these states are packed with other specs than this call has for them",
                moved,
                "Give statemesh.pack the same specs: pack(model, mesh, state_specs=...) as in "
                "state_in_specs.",
            )
        inputs = [
            unit.input(position, call.leaves[position], *placed[position])
            for unit in call.flat_units()
            for position in unit.positions
            if position in placed
        ]
        numbers = {x.position: k for k, x in enumerate(inputs)}
        self.numbers = [numbers[at.position] for at in self.sources]
        return inputs

    def around(self, instance: Instance) -> RunInstance:
        """An instance that takes parts of buffers, and returns models packed again.

        A model is packed again if it has the structure of a packed argument.
        """

        def run(parts: Sequence[Leaf], varying: VaryingAxes) -> tuple[list[Leaf], WriteBack]:
            unpacked = self._split(parts)
            joining = _Joining(self, unpacked, *instance(unpacked, varying))
            return joining.outputs, joining.back

        return run

    def _split(self, parts: Sequence[Leaf]) -> Sequence[Leaf]:
        """The part of each unpacked input, from an instance's parts of the inputs."""
        split: dict[int, list[Leaf]] = {}
        unpacked: list[Leaf] = []
        for at, number in zip(self.sources, self.numbers, strict=True):
            if at.group is not None and number not in split:
                split[number] = at.group.split(parts[number])
            unpacked.append(parts[number] if at.group is None else split[number][at.slot])
        return unpacked


def _marks(group: Group, at: _At) -> list[_At]:
    return [_At(at.position, group, k) for k in range(len(group.slots))]


def _lies(packed: Placement, wanted: Placement) -> bool:
    """Whether an array has the placement that it was packed for; all replicated placements are one."""
    return packed == wanted or not (packed.axis_names or wanted.axis_names)


def _of_buffer(group: Group, placement: Placement) -> Placement:
    """The placement of a buffer one of whose arrays is placed so.

    Lanes place what is whole in their own way.
    """
    return group.placement if group.names or isinstance(placement, SpecPlacement) else placement


# An array of an instance, its placement, and the paths of the written states that it belongs to.
_Placed: TypeAlias = tuple[Any, Placement, Sequence[str]]


class _Joining:
    """The outputs of one instance, with models joined into buffers.

    **Attributes:**

    - `outputs`, `back`: the outputs, and how the result is put together.
    """

    def __init__(
        self, packing: Packing, unpacked: Sequence[Leaf], outputs: list[Leaf], back: WriteBack
    ) -> None:
        paths: list[list[str]] = [[] for _ in outputs]
        for index, path in back.written:
            paths[index].append(path)
        self.packing = packing
        self.inputs: list[_Placed] = [
            (x, placement, ()) for x, placement in zip(unpacked, packing.placements, strict=True)
        ]
        self.unjoined: list[_Placed] = list(zip(outputs, back.placements, paths, strict=True))
        self.joined: list[_Placed] = []
        result = tree_util.tree_map(
            self._node, back.result, is_leaf=lambda node: self._like(node) is not None
        )
        numbers = packing.numbers
        self.outputs = [x for x, *_ in self.joined]
        self.back = WriteBack(
            result,
            [placement for _, placement, _ in self.joined],
            list(dict.fromkeys(numbers[k] for k in back.rewritten)),
            [(k, path) for k, (*_, paths) in enumerate(self.joined) for path in paths],
            [(path, tuple(numbers[k] for k in ks)) for path, ks in back.stacked],
            back.merged,
        )

    def _node(self, node: PyTree) -> Any:
        like = self._like(node)
        if like is None:
            return self._leaf(node)
        packed, contents = like
        sources, units = contents.arrays(node)
        rest = [tree_util.tree_map(self._leaf, unit) for unit in units]
        buffers = [self._buffer(*pair) for pair in zip(contents.groups, sources, strict=True)]
        return packed._refilled(buffers, rest)

    def _like(self, node: PyTree) -> tuple[Packed, Contents] | None:
        """The packed argument as which a node of the result can be packed: one of its structure."""
        for packed, contents in self.packing.models:
            if type(node) is contents.root and self._fits(node, contents):
                return packed, contents
        return None

    def _fits(self, node: PyTree, contents: Contents) -> bool:
        units, structure = tree_util.tree_flatten(node, is_leaf=is_state)
        if structure != contents.unit_def:
            return False
        for unit, packed in zip(units, contents.states, strict=True):
            if packed is None:
                continue
            leaves, treedef = tree_util.tree_flatten(unit)
            if treedef != packed[0]:
                return False
            for (g, k), source in zip(packed[1], leaves, strict=True):
                if not isinstance(source, Output | Forwarded):
                    return False
                group = contents.groups[g]
                slot = group.slots[k]
                x, placement, _ = self._array(source)
                if (x.shape, x.dtype) != (slot.part, group.dtype):
                    return False
                if not _lies(slot.placement, placement):
                    return False
        return True

    def _array(self, source: Output | Forwarded) -> _Placed:
        """An array of the unpacked result."""
        return (self.unjoined if isinstance(source, Output) else self.inputs)[source.index]

    def _buffer(self, group: Group, sources: Sequence[Leaf]) -> Output | Forwarded:
        """A buffer of the result: the one that came in, if none of its arrays was written."""
        packing = self.packing
        numbers = [source.index for source in sources if isinstance(source, Forwarded)]
        slots = [packing.sources[k].slot for k in numbers if packing.sources[k].group is group]
        whole = {packing.numbers[k] for k in numbers}
        if slots == list(range(len(sources))) and len(whole) == 1:
            return Forwarded(whole.pop())
        parts, placements, paths = zip(*map(self._array, sources), strict=True)
        placement = _of_buffer(group, placements[0])
        return self._emit(written_end_to_end(parts), placement, [*chain(*paths)])

    def _leaf(self, source: Leaf) -> Any:
        """A leaf of the result that is in no buffer."""
        if not isinstance(source, Output | Forwarded):
            return source
        packing = self.packing
        if isinstance(source, Forwarded) and packing.sources[source.index].group is None:
            return Forwarded(packing.numbers[source.index])
        return self._emit(*self._array(source))

    def _emit(self, x: Leaf, placement: Placement, paths: Sequence[str]) -> Output:
        self.joined.append((x, placement, paths))
        return Output(len(self.joined) - 1)
