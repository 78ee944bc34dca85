"""A strategy for filters: each is built around a state of a tree that it must match."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import jax
from hypothesis import strategies as st

import statemesh as sm

from .._types import Fun, PyTree
from ._meshes import Draw
from ._trees import KINDS


# One step of a path, as JAX or the class of a node makes it.
Key: TypeAlias = Any
KeyPath: TypeAlias = tuple[Key, ...]
Filter: TypeAlias = Any
# A function that draws one filter.
Form: TypeAlias = Callable[[], Filter]


def filters(*, tree: PyTree) -> st.SearchStrategy[Filter]:
    """Filters of every form, nested up to three deep, for the states of a tree.

    Each filter matches a state of the tree. Only the explicit `None`, `False` and `Nothing()`, which are
    drawn sometimes, match none. For a tree without states, filters are drawn from these and `...`, `True`
    and `Everything()`. Shrinks to `...`.

    **Arguments:**

    - `tree`: the pytree whose states, tags and paths the filters name.

    **Returns:** a strategy of filters. Functions, also those inside `Where`, print as their source code.

    !!! example

        ```python
        >>> from hypothesis import find
        >>> import statemesh as sm
        >>> from statemesh.testing import filters
        >>> tree = {"w": sm.ParamState(1.0), "n": [sm.State(0, tag="count")]}
        >>> find(filters(tree=tree), lambda filter: isinstance(filter, str))
        'count'

        ```
    """
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=sm.is_state)[0]
    found = [PathAndState(tuple(path), unit) for path, unit in flat if sm.is_state(unit)]
    return _filters(found)


@dataclasses.dataclass(frozen=True)
class PathAndState:
    """A state of the tree, and its path."""

    path: KeyPath
    state: sm.State

    @property
    def kinds(self) -> list[type]:
        return [kind for kind in type(self.state).__mro__ if issubclass(kind, sm.State)]

    @property
    def names(self) -> list[Hashable]:
        """The names of the steps of the path."""
        return [_name(step) for step in self.path]

    @property
    def nodes(self) -> list[KeyPath]:
        """The paths of the state and of the nodes above it, as far as Python code can take them."""
        lengths = range(len(self.path) + 1)
        return [self.path[:n] for n in lengths if all(map(_is_typed, self.path[:n]))]


@dataclasses.dataclass(frozen=True)
class PrintableFunction:
    """A function that prints as its source code, and equals other functions with the same source."""

    source: str
    run: Fun = dataclasses.field(compare=False)

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def __repr__(self) -> str:
        return self.source


EVERYTHING = (..., True, sm.filters.Everything())
NOTHING = (None, False, sm.filters.Nothing())


@st.composite
def _filters(draw: Draw, found: Sequence[PathAndState]) -> Filter:
    if not found:
        return draw(st.sampled_from(EVERYTHING + NOTHING))
    # Sometimes a filter that matches everything or nothing. `...` comes first, so that filters shrink to it.
    kind = draw(st.integers(0, 15))
    if kind in (0, 15):
        return draw(st.sampled_from(NOTHING if kind else EVERYTHING))
    return _FilterMaker(draw, found).matching(draw(st.sampled_from(found)), draw(st.integers(0, 3)))


@dataclasses.dataclass(frozen=True)
class _FilterMaker:
    """Draws filters that match a given state, and filters that do not."""

    draw: Draw
    found: Sequence[PathAndState]

    def one_of(self, of: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(of))

    def matching(self, one: PathAndState, deep: int) -> Filter:
        """A filter that matches a state."""
        forms: list[Form] = [
            lambda: self.one_of(EVERYTHING),
            lambda: self.of_type(one.kinds),
            lambda: self.one_of(_functions(one)),
            lambda: _where(self.one_of(one.nodes)),
        ]
        if one.state.tag:
            forms.append(lambda: self.with_tag(one.state.tag))
        if one.path:
            forms.append(lambda: sm.filters.PathContains(self.one_of(one.names)))
        if deep and self.draw(st.booleans()):
            forms = [
                lambda: self.any_of(self.mixed(self.matching, one, deep)),
                lambda: sm.filters.All(*self.several(self.matching, one, deep)),
                lambda: sm.filters.Not(self.not_matching(one, deep - 1)),
            ]
        return self.one_of(forms)()

    def not_matching(self, one: PathAndState, deep: int) -> Filter:
        """A filter that does not match a state. It may match others of the tree."""
        kinds = {kind for other in self.found for kind in other.kinds}.union(KINDS) - {*one.kinds}
        tags = {tag for other in self.found for tag in other.state.tag} - one.state.tag
        names = {str(name): name for other in self.found for name in other.names}
        for name in one.names:
            names.pop(str(name), None)
        nodes = [node for other in self.found for node in other.nodes if node not in one.nodes]
        forms: list[Form] = [
            lambda: self.one_of(NOTHING),
            lambda: self.of_type(sorted(kinds, key=lambda kind: kind.__qualname__)),
            lambda: _as_deep_as(len(one.path) + 1),
        ]
        if tags:
            forms.append(lambda: self.with_tag(tags))
        if names:
            forms.append(lambda: sm.filters.PathContains(self.one_of(list(names.values()))))
        if nodes:
            forms.append(lambda: _where(self.one_of(nodes)))
        if deep and self.draw(st.booleans()):
            forms = [
                lambda: self.any_of(self.several(self.not_matching, one, deep)),
                lambda: sm.filters.All(*self.mixed(self.not_matching, one, deep)),
                lambda: sm.filters.Not(self.matching(one, deep - 1)),
            ]
        return self.one_of(forms)()

    def of_type(self, kinds: Sequence[type]) -> Filter:
        kind = self.one_of(kinds)
        return self.one_of([kind, sm.filters.OfType(kind)])

    def with_tag(self, tags: Iterable[str]) -> Filter:
        tag = self.one_of(sorted(tags))
        return self.one_of([tag, sm.filters.WithTag(tag)])

    def any_of(self, parts: list[Filter]) -> Filter:
        return self.one_of([list, tuple, lambda parts: sm.filters.Any(*parts)])(parts)

    def several(self, form: Fun, one: PathAndState, deep: int) -> list[Filter]:
        """Up to three filters of a form; at least one of those that match."""
        least = 1 if form == self.matching else 0
        return [form(one, deep - 1) for _ in range(self.draw(st.integers(least, 3)))]

    def mixed(self, form: Fun, one: PathAndState, deep: int) -> list[Filter]:
        """A filter of a form, among filters of either form."""
        parts = [form(one, deep - 1)]
        for _ in range(self.draw(st.integers(0, 2))):
            other = self.one_of([self.matching, self.not_matching])(one, deep - 1)
            parts.insert(self.draw(st.integers(0, len(parts))), other)
        return parts


def _functions(one: PathAndState) -> list[PrintableFunction]:
    """Functions that match a state."""
    name, kind = one.state.name, type(one.state)
    return [
        _as_deep_as(len(one.path)),
        PrintableFunction(
            f"lambda path, state: state.name == {name!r}", lambda path, state: state.name == name
        ),
        PrintableFunction(
            f"lambda path, state: type(state) is {kind.__name__}",
            lambda path, state: type(state) is kind,
        ),
    ]


def _as_deep_as(depth: int) -> PrintableFunction:
    source = f"lambda path, state: len(path) >= {depth}"
    return PrintableFunction(source, lambda path, state: len(path) >= depth)


def _where(path: KeyPath) -> sm.filters.Where:
    source = f"lambda tree: tree{jax.tree_util.keystr(tuple(path))}"
    return sm.filters.Where(PrintableFunction(source, lambda tree: reduce(_child, path, tree)))


def _child(node: PyTree, step: Key) -> PyTree:
    if isinstance(step, jax.tree_util.GetAttrKey):
        return getattr(node, step.name)
    return node[_name(step)]


def _is_typed(step: Key) -> bool:
    """Whether Python code can take a step: not where a node only numbers its children."""
    return not isinstance(step, jax.tree_util.FlattenedIndexKey)


def _name(step: Key) -> Any:
    """The name of a step of a path: the name of an attribute, a key, an index."""
    for field in ("name", "key", "idx"):
        if hasattr(step, field):
            return getattr(step, field)
    return str(step)
