"""Errors of modules, filters, `partition` and `combine`."""

from collections.abc import Sequence
from typing import Any

from .._paths import describe
from ._classes import StructureError
from ._text import bullets, filter_str, quoted, shortened


def unknown_fields(module: str, unknown: Sequence[str], known: Sequence[str]) -> StructureError:
    return StructureError(
        f"{module}.replace got {quoted(unknown)}; the fields of {module} are {quoted(known)}."
    )


def unused_init_arguments(module: str, unused: Sequence[str]) -> TypeError:
    return TypeError(
        f"{module}.init_all_states got {quoted(unused)}, which no `init_state` in it takes. Name the "
        "argument in the signature of the `init_state` that needs it."
    )


def not_a_filter(filter: Any) -> TypeError:
    return TypeError(
        f"{filter!r} is not a filter. Use a type, a tag (string), `...`, None, a function "
        "`(path, state) -> bool`, a list of filters, or a class of statemesh.filters."
    )


def where_needs_tree() -> TypeError:
    return TypeError(
        "Where picks by position and needs the tree: write `to_predicate(filter, tree)`."
    )


def filter_matches_nothing(
    what: str, idle: Sequence[Any], states: Sequence[tuple[str, Any]]
) -> StructureError:
    there = bullets(f"{path}: {describe(state)}" for path, state in states) or "  (none)"
    return StructureError(
        f"{what}: no state matches {', '.join(map(filter_str, idle))}. The states there are:\n{there}"
    )


def combine_nothing() -> StructureError:
    return StructureError("combine needs at least one tree: `combine(*partition(tree, filter))`.")


def combine_structures(k: int, path: str, first: Any, other: Any) -> StructureError:
    where = f"at `{path.removeprefix('.')}`" if path else "at the root"
    return StructureError(
        f"combine: trees 0 and {k} differ in structure {where}.\n"
        f"  tree 0: {shortened(first)}\n  tree {k}: {shortened(other)}\n"
        "Parts of one `partition` have one structure; was a part changed by more than `set`?"
    )


def combine_disagrees(
    several: Sequence[tuple[str, Sequence[Any]]], none: Sequence[str]
) -> StructureError:
    items = [
        f"`{path}` is in {len(found)} trees: {', '.join(map(shortened, found))}"
        for path, found in several
    ]
    items += [f"`{path}` is in none of the trees" for path in none]
    return StructureError(f"combine: each leaf must be in exactly one tree.\n{bullets(items)}")
