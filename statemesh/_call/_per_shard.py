"""Steps 3 and 4: one run of the user's function: states enter, it is called, and what it wrote leaves."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._axes._mesh_and_lanes import one_copy
from .._base import _errors as errors
from .._base._checks import is_shaped
from .._base._errors import (
    StructureError,
    axes_argument,
    error_listing,
    first_items,
    listed,
    quoted,
    shortened,
    spec_str,
)
from .._base._specs import Placement
from .._base._trees import describe, is_state, path_str
from .._base._types import NO_AXES, NUMBERS, Axes, AxisName, Fun, Leaf, PyTree
from .._jax import _compat as compat
from .._jax._compat import tree_util
from .._jax._dataflow import sources
from .._state._state import ParamState, State, mark_origin
from .._state._values import Write, reduced, strong
from ._arguments import Arguments, Unit, inside_modules
from ._origins import Entered, find_origins, has_same_leaves, leaves_of, links_for, values
from ._rules import LeavingRules, Mistakes, ReturnedUnit
from ._varying import VaryingAxes
from ._write_back import Forwarded, Merged, Output, Static, WriteBack


@dataclasses.dataclass(frozen=True)
class WholeState:
    """A state that is whole on every shard, and an array of which each shard holds a part."""

    path: str
    state: Any
    part_path: str
    part: object
    spec: PartitionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A written state on its way from the function to the outputs."""

    state: State
    entered: Entered | None
    declared: Any
    path: str
    placements: list[Placement]


def all_left(
    pairs: Sequence[tuple[State, State | None]], over: Sequence[Sequence[tuple[AxisName, ...]]]
) -> list[State]:
    """States as they leave, each leaf merged over its own axes. Named policies merge all of theirs together.

    **Arguments:**

    - `pairs`: each state, and as it came in; `None` for one made inside.
    - `over`: for each state the axes over which each of its leaves is merged.
    """
    triples = [(*pair, names) for pair, names in zip(pairs, over, strict=True)]
    writes = {
        k: Write(
            state.value,
            None if old is None else old.value,
            str(state.reduce),
            names,
            state.name or type(state).__name__,
        )
        for k, (state, old, names) in enumerate(triples)
        if any(names) and type(state).leave is State.leave and isinstance(state.reduce, str)
    }
    merged = dict(zip(writes, reduced(list(writes.values())), strict=True))
    return [
        one[0]._with_value(merged[k]) if k in merged else _left(*one)
        for k, one in enumerate(triples)
    ]


def _left(state: State, old: State | None, over: Sequence[tuple[AxisName, ...]]) -> State:
    """The state as it leaves, by its kind's own way."""
    done = {
        names: checked_state(state.leave(old, names), state, "leave")
        for names in dict.fromkeys(over or [()])
    }
    first, *others = done.values()
    if not others:
        return first
    leaves = leaves_of(first)
    for k, names in enumerate(over):
        leaves[k] = leaves_of(done[names])[k]
    return filled(first, leaves)


def checked_state(made: object, state: State, method: str) -> State:
    """The state that a kind's `enter` or `leave` returned; an error for anything else."""
    if not isinstance(made, State):
        name = f"{type(state).__name__}.{method}"
        raise errors.method_returned(name, made, "a State", "return self.set(value)")
    return made


def filled(state: State, leaves: list[Leaf]) -> State:
    return tree_util.tree_structure(state).unflatten(leaves)


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
    ) -> None:
        self.rules = rules
        # By identity: an array that the function returns as it was given is forwarded.
        self.arrived = arrived
        self.any_stays = any(one.stays for one in arrived.values())
        # Facts about equations that pass these arrays on, kept because several leaves ask for them.
        self.forwarding: dict[int, tuple[Any, list[int | None]]] = {}
        self.varying = varying
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

    def unmerged(self, x: Leaf, placement: Placement) -> Axes:
        """The axes over which `x` may differ although `placement` keeps one copy.

        Where nothing tells, all axes that `placement` leaves out.
        """
        if not self.may_be_unmerged(placement):
            return NO_AXES
        self.look([x])
        return self.seen[id(x)][1] - placement.axis_names if id(x) in self.seen else NO_AXES

    def may_be_unmerged(self, placement: Placement) -> bool:
        return not placement.axis_names.issuperset(self.rules.axis_names)

    def look_at_states(self, writing: Sequence[Written]) -> None:
        """Find out over which axes the leaves of written states differ, if they may be left unmerged."""
        self.look(
            x
            for one in writing
            for x, placement in zip(leaves_of(one.state), one.placements, strict=False)
            if self.may_be_unmerged(placement)
        )

    def known_unmerged(self, x: Leaf, placement: Placement) -> Axes:
        """The axes of `unmerged`, if it is known what varies. Any of them is a mistake."""
        return self.unmerged(x, placement) if self.varying.is_known else NO_AXES

    def array(self, x: Leaf, placement: Placement, path: str) -> Output | Forwarded:
        """One array on its way out."""
        came = self.arrived.get(id(x))
        if came is not None and came.index is not None and came.placement == placement:
            return Forwarded(came.index)
        return self.emit(x, placement, path)

    def emit(self, x: Leaf, placement: Placement, path: str) -> Output:
        x = placement.put(jnp.asarray(x))
        if x.ndim < len(placement.axes):
            self.mistakes.rank.append(errors.RankMismatch(path, x, placement.written))
        self.outputs.append(x)
        self.placements.append(placement)
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
        for k, (x, placement) in enumerate(zip(leaves, one.placements, strict=False)):
            if same := self.rules.in_order(self.varying.same_over(x) - placement.axis_names):
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
        axes = [self.unmerged(x, placement) for x, placement in pairs]
        if not isinstance(one.state.reduce, str):
            union = NO_AXES.union(*axes)
            axes = [union - placement.axis_names for _, placement in pairs]
        return [self.rules.in_order(over) for over in axes]

    def state(self, one: Written) -> State:
        """One written state on its way out, `Output`s and `Forwarded`s in place of its arrays."""
        return filled(
            one.state, [self.written(one, k, x) for k, x in enumerate(leaves_of(one.state))]
        )

    def written(self, one: Written, k: int, x: Leaf) -> Output | Forwarded:
        """One leaf of a written state."""
        placement, entered = one.placements[k], one.entered
        if still := self.known_unmerged(x, placement):
            elsewhere = self.rules.fallback(one.declared, x, one.path)
            if elsewhere is None:
                axes = self.rules.in_order(still)
                is_new = entered is None and isinstance(one.state, ParamState)
                self.mistakes.diverged.append(
                    errors.Diverged(one.path, one.state, axes, placement.spec, one.declared, is_new)
                )
            else:
                placement = elsewhere
                self.mistakes.stacked.append((one.path, () if entered is None else entered.inputs))
        # Where `replace` has changed the structure there may be more leaves than came in.
        if entered is not None and placement in entered.placements[k : k + 1]:
            if x is leaves_of(entered.seen)[k]:
                return Forwarded(entered.inputs[k])
            self.rewritten.append(entered.inputs[k])
        output = self.emit(strong(x), placement, one.path)
        self.written_at.append((output.index, one.path))
        return output

    def leaf(self, x: Leaf, entry: Leaf, in_module: bool, path: str) -> Any:
        """One leaf outside any State."""
        if not is_shaped(x) and (type(x) not in NUMBERS or in_module):
            return Static(x)
        stayed = self.stayed(x) if in_module else None
        if stayed is None:
            placement = self.rules.for_array(entry, x, path, self.mistakes)
        else:
            x, placement = stayed
        source = self.array(x, placement, path)
        if isinstance(source, Forwarded):
            return source
        if still := self.known_unmerged(x, placement):
            found = errors.Varying(path, x, self.rules.in_order(still), placement.spec)
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
    leaving = _Leaving(rules, arrived, varying)
    parts: list[Leaf] = []
    units: list[ReturnedUnit] = []
    for (keys, node), entry in zip(flat, entries, strict=True):
        if not is_state(node):
            parts.append(node)
            units.append(ReturnedUnit(keys, node, entry, None))
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
        units.append(ReturnedUnit(keys, node, entry, placements[: len(values(node))]))
    written = iter(leaving.merge([one for one in parts if isinstance(one, Written)]))
    inside = inside_modules(result)
    for i, ((keys, node), entry, part) in enumerate(zip(flat, entries, parts, strict=True)):
        if isinstance(part, Written):
            parts[i] = leaving.state(next(written))
        elif not is_state(node):
            parts[i] = leaving.leaf(node, entry, inside[i], path_str(keys, root))
    if bad := [paths for paths in tied if leaving.written_paths & set(paths)]:
        raise _tied(rules.fun_name, bad)
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


@dataclasses.dataclass(frozen=True, slots=True)
class PerShardInput:
    """An array that every instance gets its part of.

    **Attributes:**

    - `position`: its position among the leaves of the arguments.
    - `placement`: where it lies.
    - `fresh`: whether it is a new array inside, which never comes back as it went in.
    - `stays`: whether it stands in a Module and leaves with its placement again when it is not written.
    """

    position: int
    placement: Placement
    fresh: bool
    stays: bool


class PerShardRun:
    """One per-shard run of a function: states enter, the function is called, results leave.

    **Arguments:**

    - `fun`: the user's function.
    - `arguments`: the structure of its arguments.
    - `template`: the leaves of the arguments, the static ones filled in.
    - `inputs`: one for each array that an instance gets.
    - `leaving`: where results go.
    - `sizes`: the sizes of the mesh's axes.
    - `donating`: whether the memory of written states is given up.
    """

    def __init__(
        self,
        fun: Fun,
        arguments: Arguments,
        template: list[Leaf],
        inputs: Sequence[PerShardInput],
        leaving: LeavingRules,
        sizes: Mapping[AxisName, int],
        donating: bool,
    ) -> None:
        self.fun = fun
        self.arguments = arguments
        self.template = template
        self.inputs = inputs
        self.leaving = leaving
        self.sizes = sizes
        self.donating = donating
        self.input_at = {one.position: k for k, one in enumerate(inputs)}

    def __call__(
        self, shards: Sequence[Leaf], varying: VaryingAxes
    ) -> tuple[list[Leaf], WriteBack]:
        """The program's outputs, and how the result is put together."""
        leaves = list(self.template)
        arrived: dict[int, Arrived] = {}
        for k, (one, shard) in enumerate(zip(self.inputs, shards, strict=True)):
            x = leaves[one.position] = one.placement.take(shard)
            # One array may be given twice. In a Module it stays, whatever it is elsewhere.
            if (one.stays or not one.fresh) and not (id(x) in arrived and arrived[id(x)].stays):
                arrived[id(x)] = Arrived(one.placement, None if one.fresh else k, one.stays)
        varying.start(
            [leaves[one.position] for one in self.inputs],
            [one.placement.axis_names for one in self.inputs],
        )
        entering = self._entered(leaves, varying)
        entered = iter(entering)
        units: list[Leaf] = []
        for unit in self.arguments.flat_units():
            if unit.kind is None:
                units += [leaves[position] for position in unit.positions]
            else:
                units.append(next(entered).seen)
        try:
            result = varying.run(
                self._run,
                units,
                links_for(entering),
                any(one.old.needs_old for one in entering),
            )
        except (TypeError, ValueError) as error:
            if (text := self._hint(error, entering, leaves)) is None:
                raise
            raise type(error)(text) from error
        tied, donating = self.arguments.tied, self.donating
        return leave(result, entering, arrived, self.leaving, varying, tied, donating)

    def _run(self, *units: Leaf) -> Any:
        args, kwargs = self.arguments.unit_def.unflatten(units)
        return self.fun(*args, **kwargs)

    def _entered(self, leaves: Sequence[Leaf], varying: VaryingAxes) -> list[Entered]:
        """The states of the arguments as the function sees them."""
        units = self.arguments.states()
        olds = [unit.treedef.unflatten([leaves[p] for p in unit.positions]) for unit in units]
        inputs = [tuple(self.input_at[p] for p in unit.positions) for unit in units]
        placements = [tuple(self.inputs[k].placement for k in ks) for ks in inputs]

        def enter_all(*olds: State) -> list[State]:
            return [self._enter(*one) for one in zip(units, olds, placements, strict=True)]

        seen = varying.call(enter_all, olds)
        entered: list[Entered] = []
        for unit, old, new, own, ks in zip(units, olds, seen, placements, inputs, strict=True):
            mark = object()
            new = mark_origin(new, mark)
            entered.append(Entered(mark, unit.path, unit.keys, old, new, own, ks))
        return entered

    def _enter(self, unit: Unit, old: State, placements: Sequence[Placement]) -> State:
        try:
            seen: object = old.enter(self._same_over(placements))
        except errors.StatemeshError as error:
            raise type(error)(f"{unit.path}: {error}") from None
        return checked_state(seen, old, "enter")

    def _hint(
        self, error: Exception, entered: Sequence[Entered], leaves: Sequence[Leaf]
    ) -> str | None:
        """The text of `error` with a hint, if a part of a parameter, or a replicated state, met other data.

        Only for errors that JAX raised about shapes, and only when the sizes say that a state was
        left whole where data was split; and for those about the types of what a loop carries.
        """
        if type(error) not in (TypeError, ValueError) or not compat.raised_by_jax(error):
            return None
        if components := compat.typed_apart(error):
            return self._type_hint(str(error), components, entered)
        if parts := self._parts_met(str(error), entered):
            axes = NO_AXES.union(*(placement.axis_names for _, _, placement in parts))
            names = [name for name in self.leaving.axis_names if name in axes]
            shown = [(path, part, placement.written) for path, part, placement in parts]
            return _with_gather_hint(str(error), shown, names)
        split = [
            (unit.path, leaves[position], placement.spec)
            for unit in self.arguments.flat_units()
            for position in unit.positions
            if (placement := self._placement_at(position)) is not None
            if placement.axis_names and placement.axis is None
        ]
        hints = [
            WholeState(one.path, one.old, path, part, spec)
            for one in entered
            for path, part, spec in split
            if any(_whole_met_part(x, part, spec, self.sizes) for x in _whole(one))
        ]
        return _with_hint(str(error), hints) if hints else None

    def _parts_met(
        self, text: str, entered: Sequence[Entered]
    ) -> list[tuple[str, Leaf, Placement]]:
        """The parts of parameters with a split axis whose length here and as a whole JAX's message names."""
        named = set(map(int, re.findall(r"\d+", text)))
        return [
            (one.path, part, placement)
            for one in entered
            if isinstance(one.old, ParamState)
            for part, placement in zip(leaves_of(one.old), one.placements, strict=True)
            if placement.axis is None
            for length, names in zip(part.shape, placement.axes, strict=False)
            if names and {length, length * math.prod(self.sizes[name] for name in names)} <= named
        ]

    def _type_hint(
        self, text: str, components: Sequence[tuple[str, str]], entered: Sequence[Entered]
    ) -> str | None:
        """The text with a hint, if what JAX names are states that enter the same on every shard."""
        same = [(one, self._same_over(one.placements)) for one in entered]
        same = [(one, axes) for one, axes in same if axes]
        # JAX uses the names of the inner function, so only the ends of the paths agree.
        ends = tuple(end for end in (_last_step(path) for path, _ in components) if end)
        named = [(one, axes) for one, axes in same if ends and one.path.endswith(ends)]
        if not named:
            # A State that is carried by itself has no path in it. One with a policy is likelier meant.
            forms = {form for _, form in components}
            fitting = [(one, axes) for one, axes in same if forms.intersection(_forms(one))]
            named = [(one, axes) for one, axes in fitting if one.old.reduce is not None] or fitting
        states = [(one.path, one.old, axes) for one, axes in named]
        return _with_type_hint(text, states) if states else None

    def _same_over(self, placements: Sequence[Placement]) -> tuple[AxisName, ...]:
        """The mapped axes over which every instance gets the same state."""
        apart = NO_AXES.union(*(placement.axis_names for placement in placements))
        return tuple(name for name in self.leaving.axis_names if name not in apart)

    def _placement_at(self, position: int) -> Placement | None:
        k = self.input_at.get(position)
        return None if k is None else self.inputs[k].placement


def _last_step(path: str) -> str:
    return "".join(re.findall(r"\.\w+$|\[[^\]]*\]$", path))


def _forms(one: Entered) -> list[str]:
    """The dtypes and shapes of a state's arrays, as JAX writes them."""
    return [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in leaves_of(one.seen)]


def _whole(one: Entered) -> list[Leaf]:
    pairs = zip(leaves_of(one.old), one.placements, strict=True)
    return [x for x, placement in pairs if not placement.axis_names]


def _whole_met_part(
    whole: Leaf, part: Leaf, spec: PartitionSpec, sizes: Mapping[AxisName, int]
) -> bool:
    """Whether some axis of `whole` is as long as a split axis of `part` was before the split."""
    for size, names in zip(part.shape, spec.partitions, strict=False):
        if names is None:
            continue
        several = names if isinstance(names, tuple) else (names,)
        parts = 1
        for name in several:
            parts *= sizes[name]
        if parts > 1 and size * parts in whole.shape:
            return True
    return False


def _with_hint(text: str, hints: Sequence[WholeState]) -> str:
    items = [
        f"{h.path} ({shortened(h.state.value)}) is whole on every shard, but {h.part_path}, split by "
        f"{spec_str(h.spec)}, is {describe(h.part)} there"
        for h in hints
    ]
    spec = spec_str(hints[0].spec)
    mend = (
        f"To split the state like the data, write state_in_specs={spec} (or {{filter: {spec}}}), or give the "
        f"state its own spec={spec}."
    )
    return f"{text}\n\n" + listed(
        "Hint: a replicated state met sharded data", first_items(list(dict.fromkeys(items))), mend
    )


def _with_type_hint(text: str, states: Sequence[tuple[str, object, tuple[AxisName, ...]]]) -> str:
    items = [
        f"{path}: {describe(state)} is the same over {quoted(axes)}" for path, state, axes in states
    ]
    path, _, axes = states[0]
    head = (
        "Hint: a loop or branch needs one type for what goes in and what comes out, but shards write "
        "different values in it to states that enter the same on every shard"
    )
    if all(getattr(state, "reduce", None) is not None for _, state, _ in states):
        merged = "; its policy merges it when it leaves"
    else:
        merged = (
            ", and declare how it is merged when it leaves, as in State(value, reduce='mean'), or give it "
            f"a spec that names {quoted(axes)}"
        )
    mend = (
        f"Mark the value as varying before the loop or branch{merged}:\n"
        f"    {path}.set(jax.lax.pcast({path}.value, {axes!r}, to='varying'))"
    )
    return f"{text}\n\n" + listed(head, items, mend)


def _with_gather_hint(
    text: str, parts: Sequence[tuple[str, object, object]], names: Sequence[AxisName]
) -> str:
    items = [
        f"{path} is {describe(part)}, a part by its spec {spec_str(spec)}"
        for path, part, spec in parts
    ]
    name = axes_argument(names)
    return f"{text}\n\n" + listed(
        "Hint: each shard holds a part of these parameters",
        first_items(items),
        "Make them whole before they are used, as parameters that fsdp has split are: "
        f"`model = sm.gather(model, {name!r})`.",
    )


def _tied(name: str, groups: Sequence[Sequence[str]]) -> StructureError:
    return error_listing(
        StructureError,
        f"{name}: a state that stands in several places was written",
        [f"{' and '.join(paths)} are one State object" for paths in groups],
        "As soon as one is written, each place has a state of its own. Keep the state in one place; tie "
        "what must be in two with `equinox.nn.Shared`, or put copies in: `state.replace()`.",
    )
