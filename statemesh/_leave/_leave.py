"""Step 4: take the result of an instance apart.

Written states are merged by their own policies and checked; arrays are checked against their specs.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .._arguments import inside_modules
from .._axes._dataflow import sources
from .._axes._mesh_and_lanes import one_copy
from .._base import errors
from .._base._arrays import is_shaped
from .._base._compat import tree_util
from .._base._nodes import is_state
from .._base._paths import path_str
from .._base._specs import Placement
from .._base._types import NO_AXES, NUMBERS, Axes, AxisName, Leaf, PyTree
from .._model._kinds import ParamState
from .._model._state import State
from .._model._values import strong
from .._write_back import Forwarded, Given, Merged, Output, Static, WriteBack
from ._origins import Entered, find_origins, has_same_leaves, leaves_of, values
from ._policies import Written, all_left, filled
from ._rules import LeavingRules, Mistakes, Unit
from ._varying import VaryingAxes


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """An array that the function was given.

    **Attributes:**

    - `placement`: where it came from.
    - `index`: its number among the program's inputs, if it may come back as it went in.
    - `stays`: whether it stands in a Module and leaves with its placement again when it is not written.
    """

    placement: Placement
    index: int | None
    stays: bool


class _Leaving:
    """Collects the program's outputs, their specs, and every mistake on the way."""

    def __init__(
        self,
        rules: LeavingRules,
        arrived: Mapping[int, Arrived],
        varying: VaryingAxes,
        given: Sequence[Leaf],
    ) -> None:
        self.rules = rules
        # By identity: an array that the function returns as it was given is forwarded.
        self.arrived = arrived
        self.any_stays = any(one.stays for one in arrived.values())
        # Facts about equations that pass these arrays on, kept because several leaves ask for them.
        self.forwarding: dict[int, tuple[Any, list[int | None]]] = {}
        self.varying = varying
        self.given = {id(x): Given(k) for k, x in enumerate(given)}
        self.outputs: list[Leaf] = []
        self.placements: list[Placement] = []
        self.rewritten: list[int] = []
        self.written_at: list[tuple[int, str]] = []
        self.written_paths: set[str] = set()
        self.merged: list[Merged] = []
        self.mistakes = Mistakes()
        # The axes over which each array may differ, by identity. The array is kept with them: another one
        # could get its identity.
        self.seen: dict[int, tuple[Any, Axes]] = {}

    def look(self, values: Iterable[Leaf]) -> None:
        """Find out over which axes these values may differ, for all of them at once."""
        new = {id(x): x for x in values if id(x) not in self.seen and is_shaped(x)}
        over = self.varying.of(list(new.values()))
        for x, axes in zip(new.values(), over, strict=True):
            self.seen[id(x)] = x, axes

    def unmerged(self, x: Leaf, where: Placement) -> Axes:
        """The axes over which `x` may differ although `where` keeps one copy.

        Where nothing tells, all axes that `where` leaves out.
        """
        if not self.may_be_unmerged(where):
            return NO_AXES
        self.look([x])
        return self.seen[id(x)][1] - where.axis_names if id(x) in self.seen else NO_AXES

    def may_be_unmerged(self, where: Placement) -> bool:
        return not where.axis_names.issuperset(self.rules.axis_names)

    def look_at_states(self, writing: Sequence[Written]) -> None:
        """Find out over which axes the leaves of written states differ, if they may be left unmerged."""
        self.look(
            x
            for one in writing
            for x, where in zip(leaves_of(one.state), one.placements, strict=False)
            if self.may_be_unmerged(where)
        )

    def known_unmerged(self, x: Leaf, where: Placement) -> Axes:
        """The axes of `unmerged`, if it is known what varies. Any of them is a mistake."""
        return self.unmerged(x, where) if self.varying.is_known else NO_AXES

    def array(self, x: Leaf, where: Placement, path: str) -> Output | Forwarded:
        """One array on its way out."""
        came = self.arrived.get(id(x))
        if came is not None and came.index is not None and came.placement == where:
            return Forwarded(came.index)
        return self.emit(x, where, path)

    def emit(self, x: Leaf, where: Placement, path: str) -> Output:
        x = where.put(jnp.asarray(x))
        if x.ndim < len(where.axes):
            self.mistakes.rank.append(errors.RankMismatch(path, x, where.written))
        self.outputs.append(x)
        self.placements.append(where)
        return Output(len(self.outputs) - 1)

    def writing(self, state: State, entered: Entered | None, declared: Any, path: str) -> Written:
        """A written state, and where its leaves go."""
        path = path if entered is None else entered.path
        self.written_paths.add(path)
        placements = self.rules.for_state(state, entered, declared, path, self.mistakes)
        return Written(state, entered, declared, path, placements)

    def merge(self, writing: Sequence[Written]) -> list[Written]:
        """Merge what the instances wrote to states, by the states' policies."""

        def leave_all(*pairs: tuple[State, State | None]) -> list[State]:
            return all_left(pairs, over)

        writing = [self.counted_once(one) for one in writing]
        # Once for all leaves before merging and once after, because looking at one leaf costs as much.
        self.look_at_states(writing)
        over = [self.axes_to_merge(one) for one in writing]
        self.merged += filter(None, map(self.merging, writing, over))
        writing = [self.typed_to_merge(*pair) for pair in zip(writing, over, strict=True)]
        pairs = [(one.state, one.entered and one.entered.old) for one in writing]
        merged: list[State] = self.varying.call(leave_all, pairs)
        written: list[Written] = []
        for one, state in zip(writing, merged, strict=True):
            auxiliary = len(leaves_of(state)) - len(one.placements)
            placements = [*one.placements, *[self.rules.auxiliary()] * auxiliary]
            written.append(dataclasses.replace(one, state=state, placements=placements))
        self.look_at_states(written)
        return written

    def merging(self, one: Written, over: Sequence[tuple[AxisName, ...]]) -> Merged | None:
        """Which policy merges a state, and over which axes, if it merges anything."""
        axes = self.rules.in_order(NO_AXES.union(*over))
        reduce = one.state.reduce
        own = type(one.state).leave is State.leave
        if not axes or (reduce is None and own):
            return None
        return one.path, reduce if isinstance(reduce, str) else errors.policy_name(one.state), axes

    def counted_once(self, one: Written) -> Written:
        """Make a value that is the same everywhere one copy, whatever its type says."""
        if not one.state.needs_old:
            return one
        leaves = leaves_of(one.state)
        for k, (x, where) in enumerate(zip(leaves, one.placements, strict=False)):
            if same := self.rules.in_order(self.varying.same_over(x) - where.axis_names):
                leaves[k] = one_copy(x, same)
        return dataclasses.replace(one, state=filled(one.state, leaves))

    def typed_to_merge(self, one: Written, over: Sequence[tuple[AxisName, ...]]) -> Written:
        """Let types say that what is merged differs, where JAX's rules have lost it."""
        if one.state.reduce is None or not any(over):
            return one
        leaves = leaves_of(one.state)
        for k, (x, axes) in enumerate(zip(leaves, over, strict=False)):
            leaves[k] = self.varying.typed_as_varying(x, frozenset(axes))
        return dataclasses.replace(one, state=filled(one.state, leaves))

    def axes_to_merge(self, one: Written) -> list[tuple[AxisName, ...]]:
        """For each leaf the axes over which it is merged.

        A named policy merges each leaf over those that it differs over itself, as it would in a State
        of its own: what is the same everywhere is no sum of its copies. A function sees all leaves.
        """
        pairs = list(zip(leaves_of(one.state), one.placements, strict=False))
        axes = [self.unmerged(x, where) for x, where in pairs]
        if not isinstance(one.state.reduce, str):
            union = NO_AXES.union(*axes)
            axes = [union - where.axis_names for _, where in pairs]
        return [self.rules.in_order(over) for over in axes]

    def state(self, one: Written) -> State:
        """One written state on its way out, `Output`s and `Forwarded`s in place of its arrays."""
        return filled(
            one.state, [self.written(one, k, x) for k, x in enumerate(leaves_of(one.state))]
        )

    def written(self, one: Written, k: int, x: Leaf) -> Output | Forwarded:
        """One leaf of a written state."""
        where, entered = one.placements[k], one.entered
        if still := self.known_unmerged(x, where):
            elsewhere = self.rules.fallback(one.declared, x, one.path)
            if elsewhere is None:
                axes = self.rules.in_order(still)
                is_new = entered is None and isinstance(one.state, ParamState)
                self.mistakes.diverged.append(
                    errors.Diverged(one.path, one.state, axes, where.spec, one.declared, is_new)
                )
            else:
                where = elsewhere
                self.mistakes.stacked.append((one.path, () if entered is None else entered.inputs))
        # Where `replace` has changed the structure there may be more leaves than came in.
        if entered is not None and where in entered.placements[k : k + 1]:
            if x is leaves_of(entered.seen)[k]:
                return Forwarded(entered.inputs[k])
            self.rewritten.append(entered.inputs[k])
        output = self.emit(strong(x), where, one.path)
        self.written_at.append((output.index, one.path))
        return output

    def leaf(self, x: Leaf, entry: Leaf, in_module: bool, path: str) -> Any:
        """One leaf outside any State."""
        if not is_shaped(x) and (type(x) not in NUMBERS or in_module):
            return self.given.get(id(x), Static(x))
        stayed = self.stayed(x) if in_module else None
        if stayed is None:
            where = self.rules.for_array(entry, x, path, self.mistakes)
        else:
            x, where = stayed
        source = self.array(x, where, path)
        if isinstance(source, Forwarded):
            return source
        if still := self.known_unmerged(x, where):
            found = errors.Varying(path, x, self.rules.in_order(still), where.spec)
            self.mistakes.varying.append(found)
        if in_module:
            self.outputs[source.index] = strong(self.outputs[source.index])
        return source

    def stayed(self, x: Leaf) -> tuple[Any, Placement] | None:
        """The array that `x` was when it came in, and its placement, if it leaves as it came."""
        if not self.any_stays:
            return None
        for source in sources(x, self.forwarding):
            came = self.arrived.get(id(source))
            if came is not None and came.stays:
                return source, came.placement
        return None


def leave(
    result: PyTree,
    entered: Sequence[Entered],
    arrived: Mapping[int, Arrived],
    rules: LeavingRules,
    varying: VaryingAxes,
    given: Sequence[Leaf],
    tied: Sequence[Sequence[str]],
    donating: bool,
) -> tuple[list[Leaf], WriteBack]:
    """Take one instance's result apart.

    **Arguments:**

    - `result`: what the function returned.
    - `entered`: the states that it was given.
    - `arrived`: the arrays that it was given, by identity.
    - `rules`: where results go.
    - `varying`: over which axes values differ between instances.
    - `given`: the leaves of its arguments that are no arrays and may be other objects at the next call.
    - `tied`: the paths at which one argument holds the very same State.
    - `donating`: whether the memory of written states is given up.

    **Returns:** the program's outputs, and how the result is put together again.

    **Raises:** `StatemeshError`s for every bad leaf at once.
    """
    flat, treedef = tree_util.tree_flatten_with_path(result, is_leaf=is_state)
    root = f"{rules.fun_name}(...)"
    entries = rules.entries(result, root)
    returned = [(keys, node) for keys, node in flat if is_state(node)]
    origins = iter(find_origins(rules.fun_name, returned, entered, donating))
    declared = iter(rules.declared(result, root))
    leaving = _Leaving(rules, arrived, varying, given)
    parts: list[Leaf] = []
    units: list[Unit] = []
    for (keys, node), entry in zip(flat, entries, strict=True):
        if not is_state(node):
            parts.append(node)
            units.append(Unit(keys, node, entry, None))
            continue
        origin, own = next(origins), next(declared)
        if origin is not None and has_same_leaves(node, origin.seen):
            old = origin.old._with_value(origin.old.value, node._meta)
            parts.append(filled(old, [Forwarded(i) for i in origin.inputs]))
            placements: Sequence[Placement] = origin.placements
        else:
            written_state = leaving.writing(node, origin, own, path_str(keys, root))
            parts.append(written_state)
            placements = written_state.placements
        units.append(Unit(keys, node, entry, placements[: len(values(node))]))
    written = iter(leaving.merge([one for one in parts if isinstance(one, Written)]))
    inside = inside_modules(result)
    for i, ((keys, node), entry, part) in enumerate(zip(flat, entries, parts, strict=True)):
        if isinstance(part, Written):
            parts[i] = leaving.state(next(written))
        elif not is_state(node):
            parts[i] = leaving.leaf(node, entry, inside[i], path_str(keys, root))
    if bad := [paths for paths in tied if leaving.written_paths & set(paths)]:
        raise errors.tied(rules.fun_name, bad)
    rules.refuse(leaving.mistakes)
    rules.check_entries(units)
    back = WriteBack(
        treedef.unflatten(parts),
        leaving.placements,
        leaving.rewritten,
        leaving.written_at,
        leaving.mistakes.stacked,
        leaving.merged,
    )
    return leaving.outputs, back
