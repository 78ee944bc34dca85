"""A strategy for filters: each is built around a state of a tree that it must match."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
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
Drawing: TypeAlias = Callable[[], Filter]


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
    states = [PathAndState(tuple(path), unit) for path, unit in flat if sm.is_state(unit)]

    @st.composite
    def drawn(draw: Draw) -> Filter:
        if not states:
            return draw(st.sampled_from(EVERYTHING + NOTHING))
        # Sometimes a filter that matches everything or nothing. `...` comes first, so that filters shrink to
        # it.
        kind = draw(st.integers(0, 15))
        if kind in (0, 15):
            return draw(st.sampled_from(NOTHING if kind else EVERYTHING))
        return _FilterMaker(draw, states).filter(
            draw(st.sampled_from(states)), draw(st.integers(0, 3))
        )

    return drawn()


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


@dataclasses.dataclass(frozen=True)
class _FilterMaker:
    """Draws filters that match a given state, and filters that do not."""

    draw: Draw
    states: Sequence[PathAndState]

    def one_of(self, of: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(of))

    def filter(self, state: PathAndState, deep: int, matches: bool = True) -> Filter:
        """A filter that matches a state or does not. It may match others of the tree."""
        if deep and self.draw(st.booleans()):
            return self.nested(state, deep - 1, matches)
        tags: AbstractSet[str] = state.state.tag
        whole: tuple[Filter, ...] = EVERYTHING if matches else NOTHING
        if matches:
            kinds, names, nodes = state.kinds, state.names, state.nodes
            functions = _functions(state)
        else:
            others = {kind for other in self.states for kind in other.kinds}.union(KINDS)
            kinds = sorted(others - {*state.kinds}, key=lambda kind: kind.__qualname__)
            tags = {tag for other in self.states for tag in other.state.tag} - tags
            by_text = {str(name): name for other in self.states for name in other.names}
            names = [by_text[text] for text in by_text if text not in map(str, state.names)]
            nodes = [x for other in self.states for x in other.nodes if x not in state.nodes]
            functions = [_as_deep_as(len(state.path) + 1)]
        forms: list[Sequence[Filter]] = [
            whole,
            [x for kind in kinds for x in (kind, sm.filters.OfType(kind))],
            functions,
            [x for tag in sorted(tags) for x in (tag, sm.filters.WithTag(tag))],
            [sm.filters.PathContains(name) for name in names],
            [_where(path) for path in nodes],
        ]
        return self.one_of(self.one_of([form for form in forms if form]))

    def nested(self, state: PathAndState, deep: int, matches: bool) -> Filter:
        """Such a filter of several. Of `Any` one has to match, of `All` every one."""

        def alike() -> list[Filter]:
            count = self.draw(st.integers(int(matches), 3))
            return [self.filter(state, deep, matches) for _ in range(count)]

        def mixed() -> list[Filter]:
            parts = [self.filter(state, deep, matches)]
            for _ in range(self.draw(st.integers(0, 2))):
                other = self.filter(state, deep, self.one_of([True, False]))
                parts.insert(self.draw(st.integers(0, len(parts))), other)
            return parts

        of_any, of_all = (mixed, alike) if matches else (alike, mixed)

        def union() -> Filter:
            parts = of_any()
            return self.one_of([list, tuple, lambda parts: sm.filters.Any(*parts)])(parts)

        forms: list[Drawing] = [
            union,
            lambda: sm.filters.All(*of_all()),
            lambda: sm.filters.Not(self.filter(state, deep, not matches)),
        ]
        return self.one_of(forms)()


def _functions(unit: PathAndState) -> list[PrintableFunction]:
    """Functions that match a state."""
    name, kind = unit.state.name, type(unit.state)
    return [
        _as_deep_as(len(unit.path)),
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
