"""The values of a tree by path: what a checkpoint holds."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import inside_modules
from .._base._arrays import is_shaped
from .._base._compat import tree_util
from .._base._nodes import is_state
from .._base._paths import describe_leaf, path_str
from .._base._types import NUMBERS, Leaf, PyTree
from .._model._state import State
from .._resolve._specs import SpecPlacement, own_placements
from . import _errors as errors


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """An array of a tree, or a Python number outside of any Module.

    **Attributes:**

    - `path`: as the user would type it after the tree's name. That of a State stands for its value.
    - `position`: that among the leaves of the tree.
    - `state`, `where`: for an array in a State, this State; and its placement, if the State has a spec or is
        packed.
    - `packed`: whether it goes into a buffer of a packed model.
    """

    path: str
    position: int
    leaf: Leaf
    state: State | None = None
    where: SpecPlacement | None = None
    packed: bool = False

    @property
    def is_array(self) -> bool:
        return is_shaped(self.leaf)

    @property
    def per_shard(self) -> bool:
        """Whether the first axis has an entry for each shard."""
        return self.where is not None and self.where.axis is not None

    @property
    def form(self) -> "Form":
        if not self.is_array:
            return Form(type(self.leaf).__name__, ())
        dtype = self.leaf.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return Form(str(dtype), tuple(np.shape(self.leaf)), self.is_array)


@dataclasses.dataclass(frozen=True)
class Form:
    """The dtype and shape of an array, or the type of a number."""

    dtype: str
    shape: tuple[int, ...]
    is_array: bool = False

    def __str__(self) -> str:
        return describe_leaf(self) if self.is_array else self.dtype


def values(
    call: str, tree: PyTree, packed: Sequence[Sequence[SpecPlacement] | None]
) -> list[Value]:
    """The arrays and numbers of a tree in order. Numbers in a Module are static, and no values.

    **Arguments:**

    - `call`: the name of the call, for its error.
    - `tree`: without any `Packed` in it.
    - `packed`: for each of its units the placements of its arrays in a `Packed`; `None` if it is in none.

    **Raises:** `StructureError` for different values with one path.
    """
    found: list[Value] = []
    position = 0
    flat = tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]
    for (keys, node), in_module, placed in zip(flat, inside_modules(tree), packed, strict=True):
        path = path_str(keys) or "value"
        if not is_state(node):
            if is_shaped(node) or (type(node) in NUMBERS and not in_module):
                found.append(Value(path, position, node))
            position += 1
            continue
        inner = tree_util.tree_flatten_with_path(node.value)[0]
        wheres: Sequence[SpecPlacement | None] = [None] * len(inner)
        if placed is not None:
            wheres = placed
        elif node.spec is not None:
            wheres = own_placements(node, node.spec, path)
        for k, ((keys, leaf), where) in enumerate(zip(inner, wheres, strict=True)):
            one = Value(path_str(keys, path), position + k, leaf, node, where, placed is not None)
            found.append(one)
        position += len(tree_util.tree_leaves(node))
    forms: dict[str, list[Form]] = {}
    for value in found:
        forms.setdefault(value.path, []).append(value.form)
    if several := [pair for pair in forms.items() if len(pair[1]) > 1]:
        raise errors.one_path(call, several)
    return found
