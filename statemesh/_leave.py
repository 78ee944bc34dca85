"""Step 4: how what a shard returns leaves it.

Written states are merged by their own policies and checked; arrays are checked against their specs.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from ._arguments import inside_modules, is_shaped
from ._base import _errors as errors
from ._base._axes import varying_over
from ._base._compat import tree_util
from ._base._paths import path_str
from ._base._types import NUMBERS, AxisName, Place, is_state
from ._match import Entered, leaves_of, match
from ._model._state import State
from ._model._values import strong
from ._write_back import Forwarded, Output, Static, WriteBack


@runtime_checkable
class Rules(Protocol):
    """What the user declared of results: where arrays and written states go."""

    def entries(self, result: Any, root: str) -> list[Any]:
        """What is declared for each leaf of the result, a State counting as one."""

    def said(self, result: Any, root: str) -> list[Any]:
        """What is declared for each State of the result."""

    def for_array(self, entry: Any, x: Any, path: str, wrong: "Wrong") -> Place:
        """Where an array goes."""

    def for_state(
        self, state: State, entered: Entered | None, said: Any, path: str, wrong: "Wrong"
    ) -> list[Place]:
        """Where each leaf of a written state's value goes."""

    def beside(self) -> Place:
        """Where what a kind keeps beside its value goes: it is the same everywhere, like a key."""

    def otherwise(self, said: Any, x: Any, path: str) -> Place | None:
        """Where a leaf goes that differs where its place keeps one copy; `None` where that is wrong."""

    def refuse(self, fun_name: str, wrong: "Wrong") -> None:
        """Raise the error for what is wrong, if anything is."""


@dataclasses.dataclass(slots=True)
class Wrong:
    """Every mistake found on the way out, and what was put elsewhere than declared."""

    diverged: list[errors.Diverged] = dataclasses.field(default_factory=list)
    varying: list[errors.Varying] = dataclasses.field(default_factory=list)
    rank: list[errors.RankMismatch] = dataclasses.field(default_factory=list)
    # Path, axis and array of what has no such axis; path, state, axis in and axis out.
    axes: list[tuple[str, int, Any]] = dataclasses.field(default_factory=list)
    conflicts: list[tuple[str, Any, int | None, int | None]] = dataclasses.field(
        default_factory=list
    )
    # Path and inputs of the states that lanes wrote unexpectedly.
    stacked: list[tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """How results leave: what the user declared, and what the mapped axes are."""

    fun_name: str
    rules: Rules
    axis_names: tuple[AxisName, ...]
    # Whether it is known which values differ between instances.
    check_vma: bool
    # Paths of the arguments that hold one and the same State object.
    tied: Sequence[Sequence[str]] = ()
    # Whether written states' buffers are given up.
    donating: bool = False

    def in_order(self, axis_names: frozenset[AxisName]) -> tuple[AxisName, ...]:
        return tuple(name for name in self.axis_names if name in axis_names)


class _Leaving:
    """Collects the program's outputs, their specs, and every mistake on the way."""

    def __init__(self, exit: Exit, known: dict[int, tuple[int, Place]]) -> None:
        self.exit = exit
        self.rules = exit.rules
        # The arrays the function was given, by identity: returned as they are, they are forwarded.
        self.known = known
        self.outputs: list[Any] = []
        self.places: list[Place] = []
        self.rewritten: list[int] = []
        self.written_at: list[tuple[int, str]] = []
        self.written_paths: set[str] = set()
        self.wrong = Wrong()
        # Over which axes each array seen may differ, by identity; beside it the array, lest another one
        # take its place.
        self.seen: dict[int, tuple[Any, frozenset[AxisName]]] = {}

    def look(self, values: Iterable[Any]) -> None:
        """Find out over which axes these may differ, of all of them at once."""
        if not self.exit.check_vma:
            return
        new = {id(x): x for x in values if id(x) not in self.seen and is_shaped(x)}
        over = varying_over(list(new.values()), self.exit.axis_names)
        for x, axes in zip(new.values(), over, strict=True):
            self.seen[id(x)] = x, axes

    def unmerged(self, x: Any, where: Place) -> frozenset[AxisName]:
        """The axes over which `x` may differ although `where` keeps one copy.

        Without the check there is nothing to know it from: all axes that `where` leaves out.
        """
        over = frozenset(self.exit.axis_names) - where.axis_names
        if not self.exit.check_vma or not over:
            return over
        self.look([x])
        return over & self.seen[id(x)][1] if id(x) in self.seen else frozenset()

    def array(self, x: Any, where: Place, path: str) -> Output | Forwarded:
        """One array on its way out."""
        index, came_from = self.known.get(id(x), (None, None))
        if index is not None and came_from == where:
            return Forwarded(index)
        return self.emit(x, where, path)

    def emit(self, x: Any, where: Place, path: str) -> Output:
        x = where.put(jnp.asarray(x))
        if x.ndim < len(where.axes):
            self.wrong.rank.append(errors.RankMismatch(path, x, where.spec))
        self.outputs.append(x)
        self.places.append(where)
        return Output(len(self.outputs) - 1)

    def merge(self, state: State, entered: Entered | None, said: Any, path: str) -> "_Written":
        """A written state with what the shards wrote merged by its policy."""
        path = path if entered is None else entered.path
        self.written_paths.add(path)
        places = self.rules.for_state(state, entered, said, path, self.wrong)
        merged = self.merged(state, None if entered is None else entered.old, places)
        places += [self.rules.beside()] * (len(leaves_of(merged)) - len(places))
        return _Written(merged, entered, said, path, places)

    def state(self, one: "_Written") -> State:
        """One written state on its way out, `Output`s and `Forwarded`s in place of its arrays."""
        return _filled(
            one.state, [self.written(one, k, x) for k, x in enumerate(leaves_of(one.state))]
        )

    def merged(self, state: State, old: State | None, places: Sequence[Place]) -> State:
        """The shards' writes as one state, each leaf merged over the axes that its place leaves out."""
        pairs = zip(leaves_of(state), places, strict=False)
        axes = frozenset[AxisName]().union(*(self.unmerged(x, p) for x, p in pairs))
        over = [self.exit.in_order(axes - where.axis_names) for where in places]
        done = {names: state.leave(old, names) for names in dict.fromkeys(over or [()])}
        first, *others = done.values()
        if not others:
            return first
        leaves = leaves_of(first)
        for k, names in enumerate(over):
            leaves[k] = leaves_of(done[names])[k]
        return _filled(first, leaves)

    def written(self, one: "_Written", k: int, x: Any) -> Output | Forwarded:
        """One leaf of a written state."""
        where, entered = one.places[k], one.entered
        if self.exit.check_vma and (still := self.unmerged(x, where)):
            elsewhere = self.rules.otherwise(one.said, x, one.path)
            if elsewhere is None:
                axes = self.exit.in_order(still)
                self.wrong.diverged.append(
                    errors.Diverged(one.path, one.state, axes, where.spec, one.said)
                )
            else:
                where = elsewhere
                self.wrong.stacked.append((one.path, () if entered is None else entered.inputs))
        if entered is not None and where == entered.placements[k]:
            if x is leaves_of(entered.seen)[k]:
                return Forwarded(entered.inputs[k])
            self.rewritten.append(entered.inputs[k])
        output = self.emit(strong(x), where, one.path)
        self.written_at.append((output.index, one.path))
        return output

    def leaf(self, x: Any, entry: Any, in_module: bool, path: str) -> Any:
        """One leaf outside any State."""
        if not is_shaped(x) and (type(x) not in NUMBERS or in_module):
            return Static(x)
        where = self.rules.for_array(entry, x, path, self.wrong)
        source = self.array(x, where, path)
        if isinstance(source, Forwarded):
            return source
        if self.exit.check_vma and (still := self.unmerged(x, where)):
            found = errors.Varying(path, x, self.exit.in_order(still), where.spec)
            self.wrong.varying.append(found)
        if in_module:
            self.outputs[source.index] = strong(self.outputs[source.index])
        return source

    def raise_errors(self) -> None:
        tied = [paths for paths in self.exit.tied if self.written_paths & set(paths)]
        if tied:
            raise errors.tied(self.exit.fun_name, tied)
        self.rules.refuse(self.exit.fun_name, self.wrong)


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """A written state between the merge and the way out."""

    state: State
    entered: Entered | None
    said: Any
    path: str
    places: list[Place]


def leave(
    result: Any,
    entered: Sequence[Entered],
    known: dict[int, tuple[int, Place]],
    exit: Exit,
) -> tuple[list[Any], WriteBack]:
    """Take one instance's result apart.

    **Arguments:**

    - `result`: what the function returned.
    - `entered`: the states that it was given.
    - `known`: by `id`, each array that it was given: its index among the inputs, its placement.
    - `exit`: how results leave.

    **Returns:** the program's outputs, and how the result is put together again.

    **Raises:** `StatemeshError`s for every bad leaf at once.
    """
    flat, treedef = tree_util.tree_flatten_with_path(result, is_leaf=is_state)
    root = f"{exit.fun_name}(...)"
    entries = exit.rules.entries(result, root)
    returned = [(keys, node) for keys, node in flat if is_state(node)]
    origins = iter(match(exit.fun_name, returned, entered, exit.donating))
    said = iter(exit.rules.said(result, root))
    leaving = _Leaving(exit, known)
    # Axes are looked up of all leaves together, before merging and after.
    leaving.look(x for _, node in flat for x in tree_util.tree_leaves(node))
    parts: list[Any] = []
    for keys, node in flat:
        if not is_state(node):
            parts.append(node)
            continue
        origin, declared = next(origins), next(said)
        if origin is not None and _untouched(node, origin):
            old = origin.old._with_value(origin.old.value, node._meta)
            parts.append(_filled(old, [Forwarded(i) for i in origin.inputs]))
        else:
            parts.append(leaving.merge(node, origin, declared, path_str(keys, root)))
    written = [one for one in parts if isinstance(one, _Written)]
    leaving.look(x for one in written for x in leaves_of(one.state))
    inside = inside_modules(result)
    for i, ((keys, node), entry, part) in enumerate(zip(flat, entries, parts, strict=True)):
        if isinstance(part, _Written):
            parts[i] = leaving.state(part)
        elif not is_state(node):
            parts[i] = leaving.leaf(node, entry, inside[i], path_str(keys, root))
    leaving.raise_errors()
    back = WriteBack(
        treedef.unflatten(parts),
        leaving.places,
        leaving.rewritten,
        leaving.written_at,
        leaving.wrong.stacked,
    )
    return leaving.outputs, back


def roots(result: Any, root: str) -> list[tuple[str, Any]]:
    """The parts of a result, each with its path, as filters see them."""
    if type(result) is tuple:
        return [(f"{root}[{i}]", part) for i, part in enumerate(result)]
    return [(root, result)]


def _untouched(state: State, entered: Entered) -> bool:
    mine, theirs = leaves_of(state), leaves_of(entered.seen)
    return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))


def _filled(state: State, leaves: list[Any]) -> State:
    filled: State = tree_util.tree_structure(state).unflatten(leaves)
    return filled
