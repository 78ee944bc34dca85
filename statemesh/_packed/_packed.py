"""`Packed`: a model whose states lie in a few buffers."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from .._base import _compat as compat
from .._base import errors
from .._base._compat import tree_util
from .._base._nodes import PackedNode, is_packed, is_state_or_packed
from .._base._paths import path_str
from .._base._types import Leaf, PyTree, PyTreeDef
from .._model._state import State
from ._contents import A_LEAF, Contents, Form, Group, Slot


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
        raise errors.fixed_packed(name)

    def __delattr__(self, name: str) -> None:
        raise errors.fixed_packed(name)

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
        found: State = structure.unflatten(arrays)
        return found

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
        return NamedSharding(sharding.mesh, slot.where.spec)
    return sharding
