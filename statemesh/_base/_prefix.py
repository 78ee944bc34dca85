"""Prefix trees: one spec, or one axis, for a whole subtree."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

from . import errors
from ._compat import tree_util
from ._nodes import is_state
from ._paths import path_str
from ._specs import is_axis, is_spec
from ._types import KeyPath, Leaf, PyTree, PyTreeDef, SpecTree


Mismatch: TypeAlias = tuple[str, PyTree, str, PyTree]
"""What messages call a node of a prefix tree, that node, and the same of the tree that it does not fit."""


@dataclasses.dataclass(frozen=True)
class Entries:
    """A kind of leaf of prefix trees, and the errors for another leaf and for a prefix that does not fit."""

    is_entry: Callable[[object], bool]
    not_one: Callable[[str, object], Exception]
    mismatch: Callable[[list[Mismatch]], Exception]


SPECS = Entries(is_spec, errors.not_a_spec, errors.prefix_mismatch)
AXES = Entries(is_axis, errors.not_an_axis, errors.axes_prefix_mismatch)


def broadcast_prefix(
    entries: Entries, prefix: PyTree, tree: PyTree, what: str, root: str
) -> list[Leaf]:
    """One entry for each leaf of `tree`, a State counting as one leaf.

    **Arguments:**

    - `entries`: what the leaves of `prefix` are.
    - `prefix`: a tree prefix of `tree`.
    - `what`, `root`: how messages name the two, such as `in_specs[0]` and `model`.

    **Raises:** the error of `entries` that lists every place where `prefix` is no prefix.
    """
    # Not `jax.tree.broadcast`: it rebuilds the nodes of `tree` with other leaves, which some classes refuse.
    found, structure = tree_util.tree_flatten(
        prefix, is_leaf=lambda node: is_state(node) or entries.is_entry(node)
    )
    if all(map(entries.is_entry, found)):
        with contextlib.suppress(ValueError):
            pairs = zip(found, structure.flatten_up_to(tree), strict=True)
            return [e for e, part in pairs for _ in tree_util.tree_leaves(part, is_leaf=is_state)]
    raise entries.mismatch(list(_mismatches(entries, prefix, tree, what, root)))


def _mismatches(
    entries: Entries, prefix: PyTree, tree: PyTree, what: str, root: str
) -> Iterator[Mismatch]:
    """The places where `prefix` is no prefix of `tree`."""
    if entries.is_entry(prefix):
        return
    if tree_util.all_leaves([prefix]):
        raise entries.not_one(what, prefix)
    kids, node = _one_level(prefix)
    tree_kids, tree_node = _one_level(tree)
    if is_state(tree) or node != tree_node:
        yield what, prefix, root, tree
        return
    for (key, kid), (tree_key, tree_kid) in zip(kids, tree_kids, strict=True):
        yield from _mismatches(
            entries, kid, tree_kid, path_str(key, what), path_str(tree_key, root)
        )


def broadcast_specs(prefix: SpecTree, tree: PyTree, what: str, root: str) -> list[SpecTree]:
    """One spec for each leaf of `tree`, a State counting as one leaf."""
    return broadcast_prefix(SPECS, prefix, tree, what, root)


def broadcast_axes(prefix: PyTree, tree: PyTree, what: str, root: str) -> list[int | None]:
    """One axis, or `None`, for each leaf of `tree`, a State counting as one leaf."""
    return broadcast_prefix(AXES, prefix, tree, what, root)


def _one_level(tree: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], PyTreeDef]:
    """The children of a node with their keys, and the node without them."""
    flat: tuple[list[tuple[KeyPath, PyTree]], PyTreeDef] = tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    return flat
