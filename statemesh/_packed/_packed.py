"""`Packed`: a model whose states lie in a few buffers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from .._base import _compat as compat
from .._base._compat import tree_util
from .._base._paths import path_str
from .._model._state import State
from ._contents import Contents, Slot


@jax.tree_util.register_pytree_with_keys_class
class Packed:
    """A model whose states' arrays lie in a few buffers, one for each dtype and set of mesh axes.

    `pack` makes one. It stands wherever a mapped call takes the model: the function sees the model, and the
    call returns a `Packed` where the function returns one of the same structure. A call costs by the array,
    so that a thousand small states cost little more than one.

    **Attributes:**

    - `buffers`: the arrays.
    - `states`: a mapping from the path of each packed state, as `statemesh.states` names it, to the State; to
        look one up costs a part of a buffer.
    - `beside`: what is not packed, by path: random states, arrays outside of States, static leaves.
    """

    __slots__ = ("__weakref__", "_contents", "_rest", "buffers")

    def __init__(self, buffers: Sequence[Any], rest: Sequence[Any], contents: Contents) -> None:
        self.buffers = tuple(buffers)
        self._rest = tuple(rest)
        self._contents = contents

    def unpack(self) -> Any:
        """The model, bit for bit as it was packed or as calls have left it.

        **Returns:** the model. Its arrays lie on the mesh as their placements say.
        """
        groups = self._contents.groups
        arrays = [
            [group.array(buffer, slot) for slot in group.slots]
            for group, buffer in zip(groups, map(_on_host, self.buffers), strict=True)
        ]
        for group, buffer, own in zip(groups, self.buffers, arrays, strict=True):
            if isinstance(buffer, jax.Array) and not compat.is_tracer(buffer):
                own[:] = jax.device_put(own, [_target(buffer, slot) for slot in group.slots])
        return self._contents.model(arrays, self._rest)

    @property
    def states(self) -> "Mapping[str, State]":
        return _States(self)

    @property
    def beside(self) -> dict[str, Any]:
        paths = _unit_paths(self._contents.unit_def)
        left = [path for path, one in zip(paths, self._contents.states, strict=True) if one is None]
        return dict(zip(left, self._rest, strict=True))

    def __repr__(self) -> str:
        return f"Packed({len(self.states)} states in {len(self.buffers)} arrays, {len(self._rest)} beside)"

    def tree_flatten_with_keys(self) -> tuple[Any, Contents]:
        kids = jax.tree_util.GetAttrKey("buffers"), self.buffers
        rest = jax.tree_util.GetAttrKey("beside"), self._rest
        return (kids, rest), self._contents

    def tree_flatten(self) -> tuple[Any, Contents]:
        return (self.buffers, self._rest), self._contents

    @classmethod
    def tree_unflatten(cls, contents: Contents, children: Any) -> "Packed":
        new = object.__new__(cls)
        new.buffers, new._rest = children
        new._contents = contents
        return new


class _States(Mapping[str, State]):
    """The packed states by path, each made where it is looked up."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed
        contents = packed._contents
        paths = _unit_paths(contents.unit_def)
        pairs = zip(paths, contents.states, strict=True)
        self._at = {path: one for path, one in pairs if one is not None}

    def __getitem__(self, path: str) -> State:
        structure, places = self._at[path]
        groups, buffers = self._packed._contents.groups, self._packed.buffers
        arrays = [groups[g].array(buffers[g], groups[g].slots[k]) for g, k in places]
        found: State = structure.unflatten(arrays)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


def _unit_paths(unit_def: Any) -> list[str]:
    marked = unit_def.unflatten([_LEAF] * unit_def.num_leaves)
    flat, _ = tree_util.tree_flatten_with_path(marked)
    return [path_str(keys) for keys, _ in flat]


_LEAF = object()


def _on_host(buffer: Any) -> Any:
    return buffer if compat.is_tracer(buffer) else np.asarray(buffer)


def _target(buffer: Any, slot: Slot) -> Any:
    sharding = buffer.sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, slot.where.spec)
    return sharding
