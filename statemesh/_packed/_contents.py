"""The contents of a packed model: which array of which state is where in which buffer."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._axes._end_to_end import taken_apart, written_end_to_end
from .._base import _compat as compat
from .._base import _explicit as explicit
from .._base import errors
from .._base._compat import tree_util
from .._base._nodes import is_state
from .._base._types import AxisName, Dtype, Leaf, PyTree, PyTreeDef
from .._resolve._specs import SpecPlacement


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of one array of a state in a buffer.

    **Attributes:**

    - `path`: the path of the state.
    - `shape`: the shape of the whole array.
    - `where`: the placement of the array.
    - `start`: the index in a shard's part of the buffer at which the shard's part of the array begins.
    - `part`: the shape of a shard's part of the array.
    """

    path: str
    shape: tuple[int, ...]
    where: SpecPlacement
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
    def where(self) -> SpecPlacement:
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
            raise errors.other_buffer([slot.path for slot in self.slots], buffer, shape)

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
                in_specs=self.where.spec,
                out_specs=slot.where.spec,
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
            for name in slot.where.axes[dim] if dim < len(slot.where.axes) else ():
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
