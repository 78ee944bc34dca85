"""Where leaves of arguments are: their paths, and the nodes that hold them."""

from collections.abc import Callable

import jax

from .._types import AnyLeaf, PyTree, tree_util


def path_of(keys: tuple[AnyLeaf, ...]) -> str:
    """The path of an argument as the user would type it, from its path in the pair of all arguments."""
    return f"{('args', 'kwargs')[keys[0].idx]}{jax.tree_util.keystr(keys[1:])}"


def owners(tree: PyTree, is_owner: Callable[[object], bool]) -> list[PyTree]:
    """For each leaf of a tree the node of a kind that it is in, or the leaf itself."""
    nodes = tree_util.tree_leaves(tree, is_leaf=is_owner)
    return [node for node in nodes for _ in tree_util.tree_leaves(node)]


def is_within(path: str, outer: str) -> bool:
    """Whether a path leads to a tree, or to a part of it."""
    return path == outer or (path.startswith(outer) and path[len(outer)] in ".[")
