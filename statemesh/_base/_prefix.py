"""Prefix trees: one spec for a whole subtree."""

from typing import Any

import jax

from . import _errors as errors
from ._paths import path_str
from ._types import is_spec, is_state


def broadcast_specs(prefix: Any, tree: Any, what: str, root: str) -> list[Any]:
    """One spec for each leaf of `tree`, a State counting as one leaf.

    **Arguments:**

    - `prefix`: a tree prefix of `tree` whose leaves are specs.
    - `what`, `root`: how messages name the two, such as `in_specs[0]` and `model`.

    **Raises:** `SpecError` listing every place where `prefix` is no prefix.
    """
    specs: list[Any] = []
    bad: list[tuple[str, Any, str, Any]] = []
    _walk(prefix, tree, what, root, specs, bad)
    if bad:
        raise errors.prefix_mismatch(bad)
    return specs


def _walk(
    prefix: Any,
    tree: Any,
    what: str,
    root: str,
    specs: list[Any],
    bad: list[tuple[str, Any, str, Any]],
) -> None:
    if is_spec(prefix):
        specs.extend([prefix] * len(jax.tree_util.tree_leaves(tree, is_leaf=is_state)))
        return
    if jax.tree_util.all_leaves([prefix]):
        raise errors.not_a_spec(what, prefix)
    kids, node = _one_level(prefix)
    tree_kids, tree_node = _one_level(tree)
    if is_state(tree) or node != tree_node:
        bad.append((what, prefix, root, tree))
        return
    for (key, kid), (tree_key, tree_kid) in zip(kids, tree_kids, strict=True):
        _walk(kid, tree_kid, path_str(key, what), path_str(tree_key, root), specs, bad)


def _one_level(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
