"""Errors of modules, filters, `partition` and `combine`."""

from collections.abc import Sequence

from .._paths import describe
from ._classes import StructureError
from ._text import error_listing, filter_str, quoted, shortened


def unknown_fields(owner: str, unknown: Sequence[str], known: Sequence[str]) -> StructureError:
    return StructureError(
        f"{owner}.replace got {quoted(unknown)}; the fields of {owner} are {quoted(known)}."
    )


def unused_init_arguments(module: str, unused: Sequence[str]) -> TypeError:
    return TypeError(
        f"{module}.init_all_states got {quoted(unused)}, which no `init_state` in it takes. Add the argument "
        "to the signature of the `init_state` that needs it."
    )


def not_a_filter(filter: object) -> TypeError:
    return TypeError(
        f"{filter!r} is not a filter. Use a type, a tag (string), `...`, None, a function "
        "`(path, state) -> bool`, a list of filters, or a class of statemesh.filters."
    )


def where_needs_tree() -> TypeError:
    return TypeError(
        "Where picks states by position, for which it needs the tree: write `to_predicate(filter, tree)`."
    )


def filter_matches_nothing(
    what: str, unmatched: Sequence[object], states: Sequence[tuple[str, object]]
) -> StructureError:
    head = f"{what}: no state matches {', '.join(map(filter_str, unmatched))}. "
    if not states:
        return StructureError(f"{head}There are no states.")
    items = [f"{path}: {describe(state)}" for path, state in states]
    return error_listing(StructureError, f"{head}The states are", items)


def combine_nothing() -> StructureError:
    return StructureError("combine needs at least one tree: `combine(*partition(tree, filter))`.")


def combine_structures(k: int, path: str, first: object, other: object) -> StructureError:
    where = f"at `{path.removeprefix('.')}`" if path else "at the root"
    return StructureError(
        f"combine: trees 0 and {k} have different structures {where}.\n"
        f"  tree 0: {shortened(first)}\n  tree {k}: {shortened(other)}\n"
        "All parts of one `partition` have the same structure. Did anything but `set` change a part?"
    )


def combine_disagrees(
    several: Sequence[tuple[str, Sequence[object]]], none: Sequence[str]
) -> StructureError:
    items = [
        f"`{path}` is in {len(found)} trees: {', '.join(map(shortened, found))}"
        for path, found in several
    ]
    items += [f"`{path}` is in none of the trees" for path in none]
    return error_listing(StructureError, "combine: each leaf must be in exactly one tree", items)
