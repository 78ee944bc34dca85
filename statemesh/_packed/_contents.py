"""What is where in the buffers of a packed model."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._base import _compat as compat
from .._base import _explicit as explicit
from .._base import errors
from .._base._compat import tree_util
from .._base._types import AxisName, Dtype, Leaf, PyTree, PyTreeDef, is_state
from .._resolve._specs import SpecPlacement


_TOGETHER = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where one array of a state is.

    **Attributes:**

    - `path`: of its state.
    - `shape`: of the whole array.
    - `where`: its placement.
    - `start`: where each shard's part begins in a shard's part of the buffer.
    - `part`: the shape of a shard's part.
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
    """What one buffer is made of: arrays of one dtype whose parts are kept apart over the same axes.

    They are either all in a `ParamState` or all in none, so that of a buffer all is trained or nothing.

    **Attributes:**

    - `names`: these axes, in the order of the mesh.
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
        """The arrays' parts, of a shard's part of the buffer."""
        self.check(part, (self.size,))
        # One equation for all of them, where indexing would make three for each.
        pieces = jax.lax.split(part, [slot.size for slot in self.slots])
        pairs = zip(pieces, self.slots, strict=True)
        return [jax.lax.reshape(piece, slot.part) for piece, slot in pairs]

    def check(self, buffer: Leaf, shape: tuple[int, ...]) -> None:
        """Refuse a buffer, or a shard's part of one, in which the arrays cannot be found."""
        if np.shape(buffer) != shape:
            raise errors.other_buffer([slot.path for slot in self.slots], buffer, shape)

    def join(self, parts: Sequence[Leaf]) -> PyTree:
        """A shard's part of the buffer, of the arrays' parts.

        A few at a time are written into it: the compiler puts what computes them and the writing into one
        loop. Of all at once it would make one whose code it takes long to compile; one by one there
        would be a loop for each.
        """
        flat = [jax.lax.reshape(part, (part.size,)) for part in parts]
        few = [flat[k : k + _TOGETHER] for k in range(0, len(flat), _TOGETHER)]
        pieces = [jax.lax.concatenate(some, 0) for some in few]
        if len(pieces) == 1:
            return pieces[0]
        buffer = jnp.zeros(self.size, self.dtype)
        start = 0
        for piece in pieces:
            buffer = jax.lax.dynamic_update_slice(buffer, piece, (start,))
            start += piece.size
        return buffer

    def gathered(self, arrays: Sequence[np.ndarray], start: int) -> np.ndarray:
        """The part of the buffer that starts here, a shard's, of the whole arrays."""
        shard = np.unravel_index(start // max(self.size, 1), self.counts) if self.names else ()
        parts = [self._part(x, slot, shard) for x, slot in zip(arrays, self.slots, strict=True)]
        return np.concatenate(parts, dtype=self.dtype)

    def array(self, buffer: Leaf, slot: Slot) -> PyTree:
        """One whole array, of the buffer."""
        here = slice(slot.start, slot.start + slot.size)
        if explicit.is_explicitly_typed(buffer):
            # JAX does not split and merge dimensions over Explicit axes: each shard takes its own.
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
        """The buffer, of whole arrays."""
        rows = [self._rows(x, slot) for x, slot in zip(arrays, self.slots, strict=True)]
        return jnp.concatenate(rows, axis=1, dtype=self.dtype).reshape(-1)

    def _part(self, x: np.ndarray, slot: Slot, shard: tuple[Leaf, ...]) -> np.ndarray:
        """A shard's part of a whole array, flat. No more than that is copied."""
        sizes, order, _ = self._folds(slot)
        part: np.ndarray = np.transpose(np.reshape(x, sizes), order)[shard]
        return part.reshape(-1)

    def _rows(self, x: Leaf, slot: Slot) -> PyTree:
        """All shards' parts of a whole array, each flat."""
        sizes, order, _ = self._folds(slot)
        return x.reshape(sizes).transpose(order).reshape(math.prod(self.counts), slot.size)

    def _whole(self, rows: Leaf, slot: Slot) -> PyTree:
        sizes, order, back = self._folds(slot)
        apart = rows.reshape([sizes[k] for k in order]).transpose(back)
        return apart.reshape(slot.shape)

    def _folds(self, slot: Slot) -> tuple[list[int], list[int], list[int]]:
        """An array's axes with each split in the mesh axes that split it and what is left.

        **Returns:** their sizes; the order that brings the mesh axes to the front, as the buffer has them;
        and the order that brings them back.
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
    """What is where in a packed model.

    **Attributes:**

    - `root`: the model's type.
    - `unit_def`: its structure, a State being one leaf.
    - `states`: for each unit of it the structure of a packed State and where its arrays are, as numbers of
        groups and slots; `None` for what is left beside.
    - `sizes`: those of the mesh's axes for which it is packed.
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
        # Compared at every call, and nearly always the very same.
        if self is other:
            return True
        return (
            isinstance(other, Contents)
            and self._hash == other._hash
            and (self.unit_def, self.states, self.groups, self.sizes)
            == (other.unit_def, other.states, other.groups, other.sizes)
        )

    def model(self, arrays: Sequence[Sequence[Leaf]], beside: Sequence[Leaf]) -> PyTree:
        """The model, of the arrays of each group and of what is beside."""
        rest = iter(beside)
        units = [
            next(rest) if one is None else one[0].unflatten([arrays[g][k] for g, k in one[1]])
            for one in self.states
        ]
        return self.unit_def.unflatten(units)

    def arrays(self, model: PyTree) -> tuple[list[list[Leaf]], list[Leaf]]:
        """Of a model of this structure the arrays of each group, and what is beside."""
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
    """How much of a packed model there is: as in gradients, where `None` stands for what is not trained.

    **Attributes:**

    - `contents`: of the whole.
    - `groups`, `beside`: for each buffer, and for each thing beside, whether it is there.
    """

    contents: Contents
    groups: tuple[bool, ...]
    beside: tuple[bool, ...]

    @cached_property
    def part(self) -> Contents:
        """What is where in that which there is."""
        if all(self.groups) and all(self.beside):
            return self.contents
        whole = self.contents
        number = {g: k for k, g in enumerate(np.flatnonzero(self.groups).tolist())}
        rest = iter(self.beside)
        marks: list[Leaf] = []
        states: list[Leaf] = []
        for one in whole.states:
            if one is None:
                kept: tuple[PyTreeDef, tuple[tuple[int, int], ...]] | None = None
                there = next(rest)
            else:
                structure, places = one
                own = [_LEAF if g in number else None for g, _ in places]
                kept = (
                    tree_util.tree_structure(structure.unflatten(own)),
                    tuple((number[g], k) for g, k in places if g in number),
                )
                there = any(own)
            marks.append(_LEAF if there else None)
            states += [kept] if there else []
        unit_def = tree_util.tree_structure(whole.unit_def.unflatten(marks))
        groups = tuple(whole.groups[g] for g in number)
        return Contents(whole.root, unit_def, tuple(states), groups, whole.sizes)


_LEAF = object()
