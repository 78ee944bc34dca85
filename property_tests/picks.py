"""Filters beside plain predicates that say what each should match."""

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

import statemesh as sm

from .strategies import TAGS
from .trees import KINDS, Path, at, walk


@dataclasses.dataclass(frozen=True)
class Pick:
    """A filter as statemesh takes it, and what it is to match."""

    filter: Any
    matches: Callable[[Path, sm.State], bool]
    # `...` and `Nothing` may match no state.
    may_be_idle: bool = False

    def __repr__(self) -> str:
        return repr(self.filter)


def picks(*, tree: Any) -> st.SearchStrategy[Pick]:
    """Filters of every form, with what there is in `tree` to find."""
    steps = sorted({str(step) for path, _ in walk(tree) for _, step in path})
    nodes = sorted({path[:n] for path, _ in walk(tree) for n in range(len(path) + 1)})
    simple = [
        st.sampled_from([..., True, sm.filters.Everything()]).map(_everything),
        st.sampled_from([None, False, sm.filters.Nothing()]).map(_nothing),
        st.sampled_from([*KINDS.values(), sm.RandomState]).flatmap(_of_type),
        st.sampled_from(TAGS).flatmap(_with_tag),
        st.sampled_from([2, 3]).map(_deep),
    ]
    if steps:
        simple.append(st.sampled_from(steps).map(_path_contains))
    simple.append(st.sampled_from(nodes or [()]).map(_where))
    return st.recursive(st.one_of(simple), _combined, max_leaves=4)


def _everything(filter: Any) -> Pick:
    return Pick(filter, lambda path, state: True, True)


def _nothing(filter: Any) -> Pick:
    return Pick(filter, lambda path, state: False, True)


def _of_type(kind: type[sm.State]) -> st.SearchStrategy[Pick]:
    def matches(path: Path, state: sm.State) -> bool:
        return kind in type(state).__mro__

    return st.sampled_from([Pick(kind, matches), Pick(sm.filters.OfType(kind), matches)])


def _with_tag(tag: str) -> st.SearchStrategy[Pick]:
    def matches(path: Path, state: sm.State) -> bool:
        return tag in state.tag

    return st.sampled_from([Pick(tag, matches), Pick(sm.filters.WithTag(tag), matches)])


def _deep(depth: int) -> Pick:
    def deep(path: Any, state: sm.State) -> bool:
        return len(path) >= depth

    return Pick(deep, deep)


def _path_contains(step: str) -> Pick:
    def matches(path: Path, state: sm.State) -> bool:
        return step in [str(own) for _, own in path]

    return Pick(sm.filters.PathContains(step), matches)


def _where(node: Path) -> Pick:
    def matches(path: Path, state: sm.State) -> bool:
        return path[: len(node)] == node

    return Pick(sm.filters.Where(lambda tree: at(tree, node)), matches)


def _combined(inner: st.SearchStrategy[Pick]) -> st.SearchStrategy[Pick]:
    several = st.lists(inner, max_size=3)
    return st.one_of(
        inner.map(negated),
        st.builds(any_of, several, st.sampled_from([list, tuple, None])),
        several.map(all_of),
    )


def negated(pick: Pick) -> Pick:
    return Pick(sm.filters.Not(pick.filter), lambda path, state: not pick.matches(path, state))


def any_of(parts: list[Pick], form: Callable[[list[Any]], Any] | None = None) -> Pick:
    filters = [part.filter for part in parts]
    return Pick(
        sm.filters.Any(*filters) if form is None else form(filters),
        lambda path, state: any(part.matches(path, state) for part in parts),
    )


def all_of(parts: list[Pick]) -> Pick:
    return Pick(
        sm.filters.All(*[part.filter for part in parts]),
        lambda path, state: all(part.matches(path, state) for part in parts),
    )
