"""Step 4: how what a shard returns leaves it.

Written states are merged by their own policies and checked; arrays are checked against their specs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._arguments import inside_modules, is_shaped
from ._base import _compat as compat
from ._base import _errors as errors
from ._base._compat import tree_util
from ._base._paths import path_str
from ._base._prefix import broadcast_specs
from ._base._types import NUMBERS, AxisName, StateSpecs, is_state
from ._match import Entered, leaves_of, match, values
from ._model._state import State
from ._model._values import strong
from ._resolve._specs import (
    REPLICATED,
    UNSAID,
    Placement,
    choose_specs,
    own_placements,
    placement,
)
from ._write_back import Forwarded, Output, Static, WriteBack


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """How results leave: what the user declared, and what the mapped axes are."""

    fun_name: str
    out_specs: Any
    state_out_specs: StateSpecs
    axis_names: tuple[AxisName, ...]
    check_vma: bool
    # Paths of the arguments that hold one and the same State object.
    tied: Sequence[Sequence[str]] = ()
    # Whether written states' buffers are given up.
    donating: bool = False

    def unmerged(self, value: Any, where: Placement) -> frozenset[AxisName]:
        """The axes over which `value` may differ although `where` keeps one copy.

        Without the check there is nothing to know it from: all axes that `where` leaves out.
        """
        over = frozenset(self.axis_names) - where.axis_names
        return over & compat.varying(value) if self.check_vma else over

    def in_order(self, axis_names: frozenset[AxisName]) -> tuple[AxisName, ...]:
        return tuple(name for name in self.axis_names if name in axis_names)


class _Leaving:
    """Collects the program's outputs, their specs, and every mistake on the way."""

    def __init__(self, exit: Exit, known: dict[int, tuple[int, Placement]]) -> None:
        self.exit = exit
        # The arrays the function was given, by identity: returned as they are, they are forwarded.
        self.known = known
        self.outputs: list[Any] = []
        self.specs: list[PartitionSpec] = []
        self.rewritten: list[int] = []
        self.written_at: list[tuple[int, str]] = []
        self.diverged: list[errors.Diverged] = []
        self.varying: list[errors.Varying] = []
        self.rank: list[errors.RankMismatch] = []
        self.written_paths: set[str] = set()

    def array(self, x: Any, where: Placement, path: str) -> Output | Forwarded:
        """One array on its way out."""
        index, came_from = self.known.get(id(x), (None, None))
        if index is not None and came_from == where and where.axis is None:
            return Forwarded(index)
        return self.emit(x, where, path)

    def emit(self, x: Any, where: Placement, path: str) -> Output:
        x = where.put(jnp.asarray(x))
        if x.ndim < len(where.axes):
            self.rank.append(errors.RankMismatch(path, x, where.spec))
        self.outputs.append(x)
        self.specs.append(where.spec)
        return Output(len(self.outputs) - 1)

    def state(self, state: State, entered: Entered | None, said: Any, path: str) -> State:
        """One state on its way out: the same state with `Output`s and `Forwarded`s for arrays."""
        if entered is not None and _untouched(state, entered):
            old = entered.old._with_value(entered.old.value, state._meta)
            return _filled(old, [Forwarded(i) for i in entered.inputs])
        path = path if entered is None else entered.path
        self.written_paths.add(path)
        places = _places(state, entered, said, path)
        merged = self.merged(state, None if entered is None else entered.old, places)
        # What a kind keeps beside its value lies like a key: the same everywhere.
        places += [REPLICATED] * (len(leaves_of(merged)) - len(places))
        return _filled(
            merged,
            [
                self.written(x, p, entered, k, merged, path)
                for k, (x, p) in enumerate(zip(leaves_of(merged), places, strict=True))
            ],
        )

    def merged(self, state: State, old: State | None, places: Sequence[Placement]) -> State:
        """The shards' writes as one state, each leaf merged over the axes that its place leaves out."""
        pairs = zip(leaves_of(state), places, strict=False)
        axes = frozenset[AxisName]().union(*(self.exit.unmerged(x, p) for x, p in pairs))
        over = [self.exit.in_order(axes - where.axis_names) for where in places]
        done = {names: state.leave(old, names) for names in dict.fromkeys(over or [()])}
        first, *others = done.values()
        if not others:
            return first
        leaves = leaves_of(first)
        for k, names in enumerate(over):
            leaves[k] = leaves_of(done[names])[k]
        return _filled(first, leaves)

    def written(
        self, x: Any, where: Placement, entered: Entered | None, k: int, state: State, path: str
    ) -> Output | Forwarded:
        """One leaf of a written state."""
        if self.exit.check_vma and (still := self.exit.unmerged(x, where)):
            found = errors.Diverged(path, state, self.exit.in_order(still), where.spec)
            self.diverged.append(found)
        if entered is not None and where == entered.placements[k]:
            if x is leaves_of(entered.seen)[k]:
                return Forwarded(entered.inputs[k])
            self.rewritten.append(entered.inputs[k])
        output = self.emit(strong(x), where, path)
        self.written_at.append((output.index, path))
        return output

    def leaf(self, x: Any, spec: Any, in_module: bool, path: str) -> Any:
        """One leaf outside any State."""
        if not is_shaped(x) and (type(x) not in NUMBERS or in_module):
            return Static(x)
        if spec is None:
            raise errors.none_for_array(path, x)
        where = placement(spec)
        source = self.array(x, where, path)
        if isinstance(source, Forwarded):
            return source
        value = self.outputs[source.index]
        if self.exit.check_vma and (still := self.exit.unmerged(value, where)):
            found = errors.Varying(path, x, self.exit.in_order(still), where.spec)
            self.varying.append(found)
        if in_module:
            self.outputs[source.index] = strong(value)
        return source

    def raise_errors(self) -> None:
        tied = [paths for paths in self.exit.tied if self.written_paths & set(paths)]
        if tied:
            raise errors.tied(self.exit.fun_name, tied)
        if self.diverged:
            raise errors.diverged(self.exit.fun_name, self.diverged)
        if self.rank:
            raise errors.out_rank(self.exit.fun_name, self.rank)
        if self.varying:
            raise errors.out_varies(self.exit.fun_name, self.varying)


def leave(
    result: Any,
    entered: Sequence[Entered],
    known: dict[int, tuple[int, Placement]],
    exit: Exit,
) -> tuple[list[Any], list[PartitionSpec], WriteBack]:
    """Take one instance's result apart.

    **Arguments:**

    - `result`: what the function returned.
    - `entered`: the states that it was given.
    - `known`: by `id`, each array that it was given: its index among the inputs, its placement.
    - `exit`: how results leave.

    **Returns:** the program's outputs, one spec for each, and how the result is put together again.

    **Raises:** `DivergedStateError`, `SpecError`: every bad leaf at once.
    """
    flat, treedef = tree_util.tree_flatten_with_path(result, is_leaf=is_state)
    root = f"{exit.fun_name}(...)"
    specs = broadcast_specs(exit.out_specs, result, "out_specs", root)
    returned = [(keys, node) for keys, node in flat if is_state(node)]
    origins = iter(match(exit.fun_name, returned, entered, exit.donating))
    said = iter(choose_specs(exit.state_out_specs, _roots(result, root), "state_out_specs"))
    leaving = _Leaving(exit, known)
    parts = []
    for (keys, node), spec, in_module in zip(flat, specs, inside_modules(result), strict=True):
        path = path_str(keys, root)
        if is_state(node):
            parts.append(leaving.state(node, next(origins), next(said), path))
        else:
            parts.append(leaving.leaf(node, spec, in_module, path))
    leaving.raise_errors()
    back = WriteBack(treedef.unflatten(parts), leaving.specs, leaving.rewritten, leaving.written_at)
    return leaving.outputs, leaving.specs, back


def _roots(result: Any, root: str) -> list[tuple[str, Any]]:
    if type(result) is tuple:
        return [(f"{root}[{i}]", part) for i, part in enumerate(result)]
    return [(root, result)]


def _untouched(state: State, entered: Entered) -> bool:
    mine, theirs = leaves_of(state), leaves_of(entered.seen)
    return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))


def _places(state: State, entered: Entered | None, said: Any, path: str) -> list[Placement]:
    if said is not UNSAID:
        return own_placements(state, said, path)
    if entered is not None and len(values(state)) <= len(entered.placements):
        return list(entered.placements)
    return own_placements(state, state.spec, path)


def _filled(state: State, leaves: list[Any]) -> State:
    filled: State = tree_util.tree_structure(state).unflatten(leaves)
    return filled
