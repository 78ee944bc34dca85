"""Prefix trees: one spec, or one axis, for a whole subtree."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from . import errors
from ._paths import path_str
from ._types import is_axis, is_spec, is_state


@dataclasses.dataclass(frozen=True)
class Entries:
    """What the leaves of a prefix tree are, and the errors for those that are not, or that do not fit."""

    is_entry: Callable[[Any], bool]
    not_one: Callable[[str, Any], Exception]
    mismatch: Callable[[list[Any]], Exception]


SPECS = Entries(is_spec, errors.not_a_spec, errors.prefix_mismatch)
AXES = Entries(is_axis, errors.not_an_axis, errors.axes_prefix_mismatch)


def broadcast_prefix(entries: Entries, prefix: Any, tree: Any, what: str, root: str) -> list[Any]:
    """One entry for each leaf of `tree`, a State counting as one leaf.

    **Arguments:**

    - `entries`: what the leaves of `prefix` are.
    - `prefix`: a tree prefix of `tree`.
    - `what`, `root`: how messages name the two, such as `in_specs[0]` and `model`.

    **Raises:** the error of `entries` that lists every place where `prefix` is no prefix.
    """
    found: list[Any] = []
    bad: list[tuple[str, Any, str, Any]] = []

    def walk(prefix: Any, tree: Any, what: str, root: str) -> None:
        if entries.is_entry(prefix):
            found.extend([prefix] * len(jax.tree_util.tree_leaves(tree, is_leaf=is_state)))
            return
        if jax.tree_util.all_leaves([prefix]):
            raise entries.not_one(what, prefix)
        kids, node = _one_level(prefix)
        tree_kids, tree_node = _one_level(tree)
        if is_state(tree) or node != tree_node:
            bad.append((what, prefix, root, tree))
            return
        for (key, kid), (tree_key, tree_kid) in zip(kids, tree_kids, strict=True):
            walk(kid, tree_kid, path_str(key, what), path_str(tree_key, root))

    walk(prefix, tree, what, root)
    if bad:
        raise entries.mismatch(bad)
    return found


def broadcast_specs(prefix: Any, tree: Any, what: str, root: str) -> list[Any]:
    """One spec for each leaf of `tree`, a State counting as one leaf."""
    return broadcast_prefix(SPECS, prefix, tree, what, root)


def broadcast_axes(prefix: Any, tree: Any, what: str, root: str) -> list[Any]:
    """One axis, or `None`, for each leaf of `tree`, a State counting as one leaf."""
    return broadcast_prefix(AXES, prefix, tree, what, root)


def _one_level(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
