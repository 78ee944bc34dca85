"""The parts of a tree: every node and leaf, with its path and the numbers of its leaves."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import statemesh as sm

from .._static_keys import is_hashable
from .._types import AnyLeaf, PyTree, tree_util


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A node or a leaf of a tree.

    **Attributes:**

    - `keys`: its key path.
    - `node`: the node itself.
    - `form`: a number that parts of equal structure and equal shapes share.
    - `leaves`: the numbers of its leaves among those of the whole tree.
    - `arrays`: how many of its leaves are arrays or numbers.
    - `depth`: how many nodes stand on top of each other in it; 0 for a leaf.
    - `in_state`: whether it is a State or holds one.
    - `is_named`: whether it, or a part of it, has keys, fields or a class of its own: it is more than tuples
        and lists of arrays.
    """

    keys: tuple[Any, ...]
    node: PyTree
    form: int
    leaves: range
    arrays: int
    depth: int
    in_state: bool
    is_named: bool

    @property
    def path(self) -> str:
        """The path below the root, as one types it."""
        return str(jax.tree_util.keystr(self.keys))


class Forms:
    """The forms of parts: two parts have one number where structures and shapes are equal."""

    def __init__(self) -> None:
        self._hashed: dict[Any, int] = {}
        self._compared: list[tuple[Any, int]] = []
        self._count = 0

    def number(self, form: Any) -> int:
        """The number of a form."""
        if is_hashable(form):
            return self._hashed.setdefault(form, self._next())
        # Static metadata without a hash, such as a list, can be compared only.
        for known, number in self._compared:
            if _equal(known, form):
                return number
        self._compared.append((form, self._next()))
        return self._count

    def _next(self) -> int:
        self._count += 1
        return self._count


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # An `__eq__` of the user's may raise anything.
        return False


def parts_of(node: PyTree, forms: Forms, keys: tuple[Any, ...] = (), start: int = 0) -> list[Part]:
    """All parts of a tree, each before the parts in it. The first is the tree itself.

    **Arguments:**

    - `forms`: numbers the forms; the same one for trees that are compared.
    - `keys`, `start`: the key path of the tree, and the number of its first leaf.
    """
    kids, structure = tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if kids and tree_util.treedef_is_leaf(structure):
        numeric = is_numeric(node)
        form = forms.number(("leaf", np.shape(node), is_key(node)) if numeric else "static")
        return [Part(keys, node, form, range(start, start + 1), int(numeric), 0, False, False)]
    inner: list[list[Part]] = []
    end = start
    for key, kid in kids:
        inner.append(parts_of(kid, forms, (*keys, *key), end))
        end = inner[-1][0].leaves.stop
    heads = [parts[0] for parts in inner]
    own_state = sm.is_state(node) or isinstance(node, sm.Packed)
    own_name = node is not None and type(node) not in (tuple, list)
    whole = Part(
        keys,
        node,
        forms.number((structure, tuple(kid.form for kid in heads))),
        range(start, end),
        sum(kid.arrays for kid in heads),
        1 + max((kid.depth for kid in heads), default=0),
        own_state or any(kid.in_state for kid in heads),
        own_name or any(kid.is_named for kid in heads),
    )
    return [whole, *itertools.chain.from_iterable(inner)]


def is_numeric(x: AnyLeaf) -> bool:
    """Whether a leaf is an array of numbers or keys, what stands for one, or a number."""
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "USOMm"
    return has_shape(x) or isinstance(x, bool | int | float | complex)


def has_shape(x: AnyLeaf) -> bool:
    """Whether a leaf is an array or stands for one. Types such as `np.float32` have a `dtype` too."""
    return hasattr(x, "dtype") and isinstance(getattr(x, "shape", None), tuple)


def is_key(x: AnyLeaf) -> bool:
    return has_shape(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def kind_of(x: AnyLeaf) -> str:
    """The kind of a leaf: `key`, `float`, `complex`, `integer` or `bool`; `static` if it is no array."""
    if not is_numeric(x):
        return "static"
    if is_key(x):
        return "key"
    dtype = x.dtype if has_shape(x) else np.result_type(type(x))
    for kind, name in _KINDS:
        if jnp.issubdtype(dtype, kind):
            return name
    return str(dtype)


_KINDS = (
    (jnp.floating, "float"),
    (jnp.complexfloating, "complex"),
    (jnp.integer, "integer"),
    (jnp.bool_, "bool"),
)


def inner_names(keys: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The ends of a key path that hold a name, the longest first."""
    for start in range(len(keys)):
        if any(_is_name(key) for key in keys[start:]):
            yield keys[start:]


def _is_name(key: Any) -> bool:
    return isinstance(key, jax.tree_util.GetAttrKey) or (
        isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str)
    )
