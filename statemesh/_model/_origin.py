"""Which entering state a State was made from, as far as it is known."""

from collections.abc import Sequence

import jax

from .._base._compat import tree_util
from .._base._nodes import is_state
from .._base._types import PyTree
from ._state import State, set_origin


def origin(state: State) -> object:
    """The mark that `mark_origin` gave a state; `None` if it has been lost."""
    return getattr(state, "_origin", None)


NEW = object()
"""The mark of a state that continues no other, whatever its path suggests."""


class Unknown:
    """The mark of a state that may continue any of several others.

    **Arguments:**

    - `marks`: the marks of these others, if the program shows which they are; else none.
    """

    __slots__ = ("marks",)

    def __init__(self, marks: tuple[object, ...]) -> None:
        self.marks = marks


def mark_origin(state: State, mark: object) -> State:
    """A copy of `state` that remembers `mark` through `set` and `replace`."""
    new = state._with_value(state.value)
    set_origin(new, mark)
    return new


def states_of(tree: PyTree) -> list[State]:
    """The states of a tree."""
    return [node for node in tree_util.tree_leaves(tree, is_leaf=is_state) if is_state(node)]


def origins(tree: PyTree) -> list[object]:
    """The marks of a tree's states. To be asked before the tree is flattened, which loses them."""
    return list(map(origin, states_of(tree)))


def with_origins(tree: PyTree, marks: Sequence[object]) -> PyTree:
    """`tree` with its states remembering these marks."""
    left = iter(marks)

    def one(node: PyTree) -> PyTree:
        if not is_state(node):
            return node
        mark = next(left)
        return node if mark is None else mark_origin(node, mark)

    return jax.tree.map(one, tree, is_leaf=is_state)
