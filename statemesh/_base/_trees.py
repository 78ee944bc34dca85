"""Trees: the nodes by which every layer knows a state, and key paths as the user would type them."""

import functools
import inspect
from collections.abc import Callable

import equinox as eqx
import jax

from ._types import KeyPath, Leaf, PyTree


class StateNode:
    """The base of `State`, by which modules below `State` recognize one."""

    __slots__ = ()

    def _one_line(self) -> str:
        raise NotImplementedError


def is_state(node: object) -> bool:
    """Whether `node` is a `State` (of any kind).

    **Arguments:**

    - `node`: anything.

    **Returns:** a `bool`; of use as an `is_leaf`.

    !!! example

        ```python
        >>> import jax, statemesh as sm
        >>> tree = {"w": sm.ParamState(1.0), "n": 3}
        >>> jax.tree.map(type, tree, is_leaf=sm.is_state)["w"].__name__
        'ParamState'

        ```
    """
    return isinstance(node, StateNode)


class PackedNode:
    """The base of `Packed`, by which modules below `Packed` recognize one."""

    __slots__ = ()

    buffers: tuple[Leaf, ...]

    def unpack(self) -> PyTree:
        raise NotImplementedError


def is_packed(node: object) -> bool:
    return isinstance(node, PackedNode)


def is_state_or_packed(node: object) -> bool:
    return isinstance(node, StateNode | PackedNode)


def has_packed(tree: PyTree) -> bool:
    return any(map(is_packed, jax.tree.leaves(tree, is_leaf=is_state_or_packed)))


def unpacked(tree: PyTree) -> PyTree:
    """The tree with every `Packed` replaced by its model. A tree without any is returned itself."""
    if not has_packed(tree):
        return tree
    model = lambda node: node.unpack() if isinstance(node, PackedNode) else node
    return jax.tree.map(model, tree, is_leaf=is_state_or_packed)


@jax.tree_util.register_static
class Removed:
    """Stands where `partition` took a leaf away.

    It is a node without leaves, so that tree functions pass over it. `None` would not do, because models hold
    it as a value.
    """

    # Not a dataclass, which Equinox would print in its own way.
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Removed)

    def __hash__(self) -> int:
        return hash(Removed)

    def __repr__(self) -> str:
        return "Removed"


REMOVED = Removed()


def is_removed(node: object) -> bool:
    return isinstance(node, Removed)


def is_state_or_removed(node: object) -> bool:
    return isinstance(node, StateNode | Removed)


def path_str(path: KeyPath, root: str = "") -> str:
    """`root` followed by `path`; without a root the leading dot goes."""
    return (root + jax.tree_util.keystr(path)).removeprefix(".")


def positional_names(fun: Callable[..., PyTree], count: int) -> list[str]:
    """The names that `fun` gives its first `count` positional arguments."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    single = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in single]
    # `*args` has all that are left; they are numbered in it.
    rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    first = len(names) if rest else 0
    names += [f"{rest[0] if rest else 'args'}[{i - first}]" for i in range(len(names), count)]
    return names[:count]


def fun_name(fun: PyTree) -> str:
    """The name of a function, for messages and compiled programs."""
    while isinstance(fun, functools.partial | eqx.Partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def describe(value: PyTree) -> str:
    """A value as messages show it: arrays by dtype and shape, all else by `repr`.

    It does not read arrays, so that it never waits for one to be computed.
    """
    leaves, treedef = jax.tree_util.tree_flatten(value)
    if jax.tree_util.treedef_is_leaf(treedef) and leaves:
        return describe_leaf(leaves[0])
    shown = jax.tree_util.tree_unflatten(treedef, [Bare(describe_leaf(x)) for x in leaves])
    return shown._one_line() if isinstance(shown, StateNode) else repr(shown)


class Bare:
    """A string that prints without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def clipped(text: str, most: int) -> str:
    """A text of so many characters at most."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def describe_leaf(leaf: Leaf) -> str:
    """`float32[2,3]` for an array, `repr` for the rest."""
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or shape is None:
        return clipped(repr(leaf), 80)
    return f"{dtype}[{','.join(map(str, shape))}]"
