"""The nodes by which every layer knows a state, a packed model and a removed leaf."""

import jax

from ._types import Leaf, PyTree


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


def unpacked(tree: PyTree) -> PyTree:
    """The tree with every `Packed` replaced by its model. A tree without any is returned itself."""
    if not any(map(is_packed, jax.tree.leaves(tree, is_leaf=is_state_or_packed))):
        return tree
    one = lambda node: node.unpack() if isinstance(node, PackedNode) else node
    return jax.tree.map(one, tree, is_leaf=is_state_or_packed)


@jax.tree_util.register_static
class Removed:
    """Stands where `partition` took a leaf away.

    It is a node without leaves, so that tree functions pass over it. `None` would not do, because models hold
    it as a value.
    """

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
