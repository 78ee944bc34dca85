"""Filters, each with the states that it must match, computed without `statemesh.filters`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from hypothesis import strategies as st

import statemesh as sm
from statemesh.testing import filters

from .trees import Layer, Pair, Path


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
    """Filters of every form, made of what there is in `tree` to find, and of what there is elsewhere."""
    return st.one_of(filters(tree=tree), filters(tree=_elsewhere())).map(plain)


def _elsewhere() -> Any:
    """A tree whose kinds, tags and paths others have in part."""
    pair = Pair(sm.ParamState(0.0, tag="a"), [sm.HiddenState(0.0), sm.BatchState(0.0, name="n")])
    layer = Layer([{"a": sm.NonBatchState(0.0, tag=("a", "b")), "b": sm.LongTermState(0.0)}, pair])
    return Pair(layer, [(sm.ShortTermState(0.0, tag="b"), sm.RandomState(jax.random.key(0)))])


def plain(filter: Any) -> Pick:
    """A filter, interpreted in the plainest way."""
    idle = filter in (..., True, None, False, sm.filters.Everything(), sm.filters.Nothing())
    return Pick(filter, lambda path, state: matches(filter, path, state), idle)


def matches(filter: Any, path: Path, state: sm.State) -> bool:
    """Whether a filter matches a state that stands at a path."""
    if filter is ... or filter is True:
        return True
    if filter is None or filter is False:
        return False
    if isinstance(filter, str):
        return filter in state.tag
    if isinstance(filter, list | tuple):
        return any(matches(part, path, state) for part in filter)
    if isinstance(filter, type) and issubclass(filter, sm.State):
        return filter in type(state).__mro__
    if type(filter).__module__ != type(sm.filters.Everything()).__module__:
        return bool(filter(path, state))
    match type(filter).__name__:
        case "Everything":
            return True
        case "Nothing":
            return False
        case "OfType":
            return filter.type in type(state).__mro__
        case "WithTag":
            return filter.tag in state.tag
        case "PathContains":
            return str(filter.key) in [str(step) for _, step in path]
        case "Where":
            trail = filter.where(Trail())
            return bool(trail.leads_to(path[: len(trail)]))
        case "Any":
            return any(matches(part, path, state) for part in filter.filters)
        case "All":
            return all(matches(part, path, state) for part in filter.filters)
        case "Not":
            return not matches(filter.filters[0], path, state)
        case name:
            raise TypeError(name)


class Trail:
    """What `where` picks of a tree, written down step by step."""

    def __init__(self, *steps: tuple[bool, Any]) -> None:
        self.__steps = steps

    def __getattr__(self, name: str) -> "Trail":
        return Trail(*self.__steps, (True, name))

    def __getitem__(self, key: Any) -> "Trail":
        return Trail(*self.__steps, (False, key))

    def __len__(self) -> int:
        return len(self.__steps)

    def leads_to(self, path: Path) -> bool:
        return self.__steps == tuple((kind == "attribute", step) for kind, step in path)
