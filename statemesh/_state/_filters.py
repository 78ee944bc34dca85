"""Filters, which pick states: small frozen values that compare and hash by their arguments."""

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias

import jax
from jax.tree_util import keystr

from .._base._checks import takes
from .._base._errors import StructureError, error_listing, filter_str, invalid_argument
from .._base._trees import describe, fun_name, is_state, path_str, unpacked
from .._base._types import Class, Filter, Fun, KeyPath, LaneName, Name, PyTree


Predicate: TypeAlias = Callable[[KeyPath, object], bool]


class _Named:
    """The base of the named filters."""

    def bind(self, tree: PyTree) -> "Predicate":
        """This filter as a predicate for the states of `tree`."""
        return self

    def __call__(self, path: KeyPath, state: object) -> bool:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class OfType(_Named):
    """States of a kind.

    **Arguments:**

    - `type`: a subclass of `State`, compared by `isinstance`.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> tree = {"w": sm.ParamState(1.0), "n": sm.State(0, tag="counter"), "h": [sm.HiddenState(0.0)]}
        >>> sorted(sm.states(tree, sm.filters.OfType(sm.ParamState)))
        ["['w']"]

        ```
    """

    type: Class

    def __post_init__(self) -> None:
        if not isinstance(self.type, type):
            expected = "a class, as in OfType(sm.ParamState)"
            raise invalid_argument("OfType", "type", self.type, expected)

    def __call__(self, path: KeyPath, state: object) -> bool:
        return isinstance(state, self.type)

    def __repr__(self) -> str:
        return f"OfType({self.type.__name__})"


@dataclasses.dataclass(frozen=True, slots=True)
class WithTag(_Named):
    """States that carry a tag.

    **Arguments:**

    - `tag`: one of the strings given to the state as `tag`.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> tree = {"w": sm.ParamState(1.0), "n": sm.State(0, tag="counter"), "h": [sm.HiddenState(0.0)]}
        >>> sorted(sm.states(tree, sm.filters.WithTag("counter")))
        ["['n']"]

        ```
    """

    tag: Name

    def __post_init__(self) -> None:
        if not isinstance(self.tag, str):
            expected = (
                "a string, as in WithTag('slow'); for several write [WithTag('a'), WithTag('b')]"
            )
            raise invalid_argument("WithTag", "tag", self.tag, expected)

    def __call__(self, path: KeyPath, state: object) -> bool:
        return self.tag in getattr(state, "tag", ())

    def __repr__(self) -> str:
        return f"WithTag({self.tag!r})"


@dataclasses.dataclass(frozen=True, slots=True)
class PathContains(_Named):
    """States whose path has a step of this name.

    **Arguments:**

    - `key`: an attribute's name, a dictionary's key or an index.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> tree = {"w": sm.ParamState(1.0), "n": sm.State(0, tag="counter"), "h": [sm.HiddenState(0.0)]}
        >>> sorted(sm.states(tree, sm.filters.PathContains("h")))
        ["['h'][0]"]

        ```
    """

    key: LaneName

    def __post_init__(self) -> None:
        if not isinstance(self.key, Hashable):
            raise invalid_argument(
                "PathContains",
                "key",
                self.key,
                "the name of a field, the key of a dictionary or an index, as in PathContains('encoder')",
            )

    def __call__(self, path: KeyPath, state: object) -> bool:
        return any(keystr((step,), simple=True) == str(self.key) for step in path)

    def __repr__(self) -> str:
        return f"PathContains({self.key!r})"


@dataclasses.dataclass(frozen=True, slots=True)
class Where(_Named):
    """States picked by their position in the tree, as `equinox.tree_at` picks.

    **Arguments:**

    - `where`: a function of the tree that returns a node of it, or several.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> tree = {"w": sm.ParamState(1.0), "n": sm.State(0, tag="counter"), "h": [sm.HiddenState(0.0)]}
        >>> sorted(sm.states(tree, sm.filters.Where(lambda tree: tree["h"][0])))
        ["['h'][0]"]

        ```
    """

    where: Fun

    def __post_init__(self) -> None:
        if not callable(self.where):
            expected = "a function of the tree, as in Where(lambda model: model.encoder)"
            raise invalid_argument("Where", "where", self.where, expected)

    def bind(self, tree: PyTree) -> Predicate:
        marked = jax.tree_util.tree_map_with_path(
            lambda path, leaf: _Spot(path), unpacked(tree), is_leaf=is_state
        )
        try:
            spots = jax.tree_util.tree_leaves(self.where(marked))
        except (AttributeError, KeyError, IndexError, TypeError):
            # This tree has no such node: the filter may mean another argument.
            spots = []
        picked = {spot.path for spot in spots if isinstance(spot, _Spot)}
        return lambda path, state: path in picked

    def __call__(self, path: KeyPath, state: object) -> bool:
        raise TypeError(
            "Where picks states by position, for which it needs the tree: write `to_predicate(filter, tree)`."
        )


class _Spot:
    """What `Where` puts in place of the state at a path, to see which ones its function picks."""

    def __init__(self, path: KeyPath) -> None:
        self.path = path


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class _Combined(_Named):
    """A filter made of others."""

    filters: tuple[Predicate, ...]

    def __init__(self, *filters: Filter) -> None:
        object.__setattr__(self, "filters", tuple(_named(f) for f in filters))

    def bind(self, tree: PyTree) -> Predicate:
        bound = [_bind(f, tree) for f in self.filters]
        return lambda path, state: self._joined(f(path, state) for f in bound)

    def __call__(self, path: KeyPath, state: object) -> bool:
        return self._joined(f(path, state) for f in self.filters)

    def _joined(self, hits: Iterator[bool]) -> bool:
        """Whether the whole filter matches, of whether each of its filters does."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.filters))})"


class Any(_Combined):
    """States that at least one of the filters matches.

    **Arguments:**

    - `filters`: filters of any form.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> tree = {"w": sm.ParamState(1.0), "n": sm.State(0, tag="counter"), "h": [sm.HiddenState(0.0)]}
        >>> sorted(sm.states(tree, sm.filters.Any(sm.ParamState, "counter")))
        ["['n']", "['w']"]

        ```
    """

    __slots__ = ()

    def _joined(self, hits: Iterator[bool]) -> bool:
        return any(hits)


class All(_Combined):
    """States that every one of the filters matches.

    **Arguments:**

    - `filters`: filters of any form.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> tree = {"w": sm.ParamState(1.0), "n": sm.State(0, tag="counter"), "h": [sm.HiddenState(0.0)]}
        >>> sorted(sm.states(tree, sm.filters.All(sm.State, "counter")))
        ["['n']"]

        ```
    """

    __slots__ = ()

    def _joined(self, hits: Iterator[bool]) -> bool:
        return all(hits)


class Not(_Combined):
    """States that the filter does not match.

    **Arguments:**

    - `filter`: a filter of any form.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> tree = {"w": sm.ParamState(1.0), "n": sm.State(0, tag="counter"), "h": [sm.HiddenState(0.0)]}
        >>> sorted(sm.states(tree, sm.filters.Not("counter")))
        ["['h'][0]", "['w']"]

        ```
    """

    __slots__ = ()

    def __init__(self, filter: Filter) -> None:
        super().__init__(filter)

    def _joined(self, hits: Iterator[bool]) -> bool:
        return not next(hits)


@dataclasses.dataclass(frozen=True, slots=True)
class Everything(_Named):
    """Every state.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> sm.filters.to_predicate(...) == sm.filters.Everything()
        True

        ```
    """

    def __call__(self, path: KeyPath, state: object) -> bool:
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Nothing(_Named):
    """No state.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> sm.filters.to_predicate(None) == sm.filters.Nothing()
        True

        ```
    """

    def __call__(self, path: KeyPath, state: object) -> bool:
        return False


class Perhaps(_Combined):
    """States that the filter matches. It is no error if there are none."""

    __slots__ = ()

    def _joined(self, hits: Iterator[bool]) -> bool:
        return next(hits)


def to_predicate(filter: Filter, tree: PyTree = None) -> Predicate:
    """A filter of any form as a function `(path, state) -> bool`.

    **Arguments:**

    - `filter`: a type (by `isinstance`), a string (a tag), `...` or `True`, `None` or `False`, a
        function `(path, state) -> bool`, a list or tuple of filters (any of them), or one of the
        named classes.
    - `tree`: the tree whose states are asked about; only `Where` needs it.

    **Returns:** a function of a key path (as `jax.tree_util` gives them) and a state.

    **Raises:** `TypeError` for anything else.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> is_counter = sm.filters.to_predicate("counter")
        >>> is_counter((), sm.State(0, tag="counter")), is_counter((), sm.State(0))
        (True, False)

        ```
    """
    named = _named(filter)
    return named if tree is None else _bind(named, tree)


def _named(filter: Filter) -> Predicate:
    if isinstance(filter, _Named):
        return filter
    if isinstance(filter, type):
        return OfType(filter)
    if isinstance(filter, str):
        return WithTag(filter)
    if filter is ... or filter is True:
        return Everything()
    if filter is None or filter is False:
        return Nothing()
    if isinstance(filter, list | tuple):
        return Any(*filter)
    if callable(filter):
        if not takes(filter, 2):
            raise TypeError(
                f"the filter {fun_name(filter)}{inspect.signature(filter)} cannot be called with a path and "
                "a state. Write a function `(path, state) -> bool`, as in "
                "`lambda path, state: state.value.ndim == 2`."
            )
        return filter
    raise TypeError(
        f"{filter!r} is not a filter. Use a type, a tag (string), `...`, None, a function `(path, state) -> "
        "bool`, a list of filters, or a class of statemesh.filters."
    )


def _bind(predicate: Predicate, tree: PyTree) -> Predicate:
    return predicate.bind(tree) if isinstance(predicate, _Named) else predicate


def first_matches(
    filters: Sequence[Filter], roots: Sequence[tuple[str, PyTree]], what: str
) -> list[int | None]:
    """For each state of the roots, in order, the index of the first filter that matches it.

    **Raises:** `StructureError` for a filter that matches no state of any root; `Everything`, `Nothing` and
    `Perhaps` may.
    """
    named = [_named(f) for f in filters]
    idle = [not isinstance(f, Everything | Nothing | Perhaps) for f in named]
    matches: list[int | None] = []
    states: list[tuple[str, object]] = []
    for root, tree in roots:
        bound = [_bind(f, tree) for f in named]
        for path, state in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]:
            if not is_state(state):
                continue
            states.append((path_str(path, root), state))
            hits = [i for i, predicate in enumerate(bound) if predicate(path, state)]
            for i in hits:
                idle[i] = False
            matches.append(hits[0] if hits else None)
    if any(idle):
        unmatched = ", ".join(
            filter_str(f) for f, is_idle in zip(filters, idle, strict=True) if is_idle
        )
        head = f"{what}: no state matches {unmatched}. "
        if not states:
            raise StructureError(f"{head}There are no states.")
        items = [f"{path}: {describe(state)}" for path, state in states]
        raise error_listing(StructureError, f"{head}The states are", items)
    return matches
