"""Steps 3 and 4: what one instance does: states enter, your function is called, and what it wrote leaves."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .._axes._mesh_and_lanes import PARTS_OF_ROWS, one_copy
from .._base import _errors as errors
from .._base._checks import is_shaped
from .._base._errors import (
    StructureError,
    axes_argument,
    error_listing,
    first_items,
    listed,
    shortened,
    spec_str,
)
from .._base._specs import Placement
from .._base._trees import describe, is_state, path_str
from .._base._types import NO_AXES, NUMBERS, Axes, AxisName, Leaf, PyTree
from .._jax import _compat as compat
from .._jax._compat import tree_util
from .._jax._dataflow import sources
from .._jax._lifting import in_shards
from .._state._state import ParamState, State, mark_origin
from .._state._values import Write, reduced, strong
from ._arguments import Call, Input, inside_modules, opened
from ._layout import rank_item
from ._rules import Declared, Mistakes, Rules, Varying, in_order
from ._tracing import (
    Entered,
    VaryingAxes,
    find_origins,
    has_same_leaves,
    leaves_of,
    links_for,
    values,
)
from ._write_back import Forwarded, Merged, Output, Static, WriteBack


# How JAX's errors begin where a function of a model is differentiated as one of arrays.
_NO_GRADIENT = (
    "grad requires real- or complex",
    "Gradient only defined for scalar-output functions",
)


@dataclasses.dataclass(frozen=True)
class Instance:
    """What one instance does with its part of each array: a shard, or a lane.

    **Attributes:**

    - `declared`: the user's function, and what is declared of it.
    - `call`: its arguments, without their arrays.
    - `template`: the leaves of the arguments, `None` in the place of arrays.
    - `inputs`: one for each array that an instance gets.
    - `rules`: where results go.
    - `sizes`: the sizes of the mesh's axes.
    """

    declared: Declared
    call: Call
    template: Sequence[Leaf]
    inputs: Sequence[Input]
    rules: Rules
    sizes: Mapping[AxisName, int]

    def __call__(self, parts: Sequence[Leaf], varying: VaryingAxes) -> tuple[list[Leaf], WriteBack]:
        """The program's outputs, and how the result is put together."""
        # 3. Each array is taken as the instance sees it, each state enters, and the function is called.
        leaves = list(self.template)
        arrived: dict[int, tuple[int, Input]] = {}
        for number, (source, part) in enumerate(zip(self.inputs, parts, strict=True)):
            x = leaves[source.position] = source.placement.take(part)
            stays = self.rules.stays(source)
            # One array may be given twice. In a Module it stays, whatever it is elsewhere.
            known = id(x) in arrived and self.rules.stays(arrived[id(x)][1])
            if (stays or not source.fresh) and not known:
                arrived[id(x)] = number, source
        varying.start(
            [leaves[source.position] for source in self.inputs],
            [source.placement.axis_names for source in self.inputs],
        )
        entered = self._entered(leaves, varying)
        states = iter(entered)
        units = [
            leaves[unit.positions[0]] if unit.kind is None else next(states).seen
            for unit in self.call.flat_units()
        ]
        needs_old = any(state.old.needs_old for state in entered)
        try:
            result = varying.run(self._run, units, links_for(entered), needs_old)
        except (TypeError, ValueError) as error:
            if (text := self._hint(error, entered, leaves)) is None:
                raise
            raise type(error)(text) from error
        # 4. What it wrote is merged and checked; what it did not write comes back as it went in.
        return self._leave(result, entered, arrived, varying)

    def _entered(self, leaves: Sequence[Leaf], varying: VaryingAxes) -> list[Entered]:
        """The states of the arguments as the function sees them."""
        units = self.call.states()
        olds = [unit.treedef.unflatten([leaves[p] for p in unit.positions]) for unit in units]
        inputs = [tuple(self.input_at[p] for p in unit.positions) for unit in units]
        placements = [
            tuple(self.inputs[number].placement for number in numbers) for numbers in inputs
        ]

        def enter_all(*olds: State) -> list[State]:
            entering = []
            for unit, old, places in zip(units, olds, placements, strict=True):
                try:
                    entering.append(checked_state(old.enter(self._same_over(places)), old, "enter"))
                except errors.StatemeshError as error:
                    raise type(error)(f"{unit.path}: {error}") from None
            return entering

        seen = varying.run(enter_all, olds)
        entered: list[Entered] = []
        for unit, old, new, places, numbers in zip(
            units, olds, seen, placements, inputs, strict=True
        ):
            mark = object()
            new = mark_origin(new, mark)
            entered.append(Entered(mark, unit.path, unit.keys, old, new, places, numbers))
        return entered

    def _run(self, *units: Leaf) -> Any:
        args, kwargs = self.call.unit_def.unflatten(units)
        with in_shards():
            return self.declared.fun(*opened(args), **kwargs)

    def _leave(
        self,
        result: PyTree,
        entered: Sequence[Entered],
        arrived: Mapping[int, tuple[int, Input]],
        varying: VaryingAxes,
    ) -> tuple[list[Leaf], WriteBack]:
        """The program's outputs, and how the result is put together again.

        **Arguments:**

        - `result`: what the function returned.
        - `entered`: the states that it was given.
        - `arrived`: the arrays that it was given, by identity, each with its number among the inputs.
        - `varying`: over which axes values differ between instances.

        **Raises:** `StatemeshError`s for every bad leaf at once.
        """
        name, rules = self.declared.name, self.rules
        flat, treedef = tree_util.tree_flatten_with_path(result, is_leaf=is_state)
        root = f"{name}(...)"
        entries = rules.entries(result, root)
        returned = [(keys, node) for keys, node in flat if is_state(node)]
        donating = self.declared.donate != "none"
        origins = iter(find_origins(name, returned, entered, donating))
        declared = iter(rules.declared(result, root))
        leaving = Leaving(rules, arrived, varying)
        parts: list[Any] = []
        placements: list[Sequence[Placement] | None] = []
        for keys, node in flat:
            if not is_state(node):
                parts.append(node)
                placements.append(None)
                continue
            origin, spec = next(origins), next(declared)
            if origin is not None and has_same_leaves(node, origin.seen):
                # Nobody wrote it.
                old = origin.old._with_value(origin.old.value, node._meta)
                parts.append(filled(old, [Forwarded(number) for number in origin.inputs]))
                placements.append(origin.placements[: len(values(node))])
            else:
                path = path_str(keys, root) if origin is None else origin.path
                places = rules.for_state(node, origin, spec, path, leaving.mistakes)
                parts.append(Written(node, origin, spec, path, places))
                placements.append(places[: len(values(node))])
        writing = [part for part in parts if isinstance(part, Written)]
        merged = iter(leaving.merge(writing))
        inside = inside_modules(result)
        for k, ((keys, node), entry, part) in enumerate(zip(flat, entries, parts, strict=True)):
            if isinstance(part, Written):
                parts[k] = leaving.state(next(merged))
            elif not is_state(node):
                parts[k] = leaving.leaf(node, entry, inside[k], path_str(keys, root))
        written_paths = {written.path for written in writing}
        if bad := [paths for paths in self.call.tied if written_paths.intersection(paths)]:
            raise error_listing(
                StructureError,
                f"{name}: a state that stands in several places was written",
                [f"{' and '.join(paths)} are one State object" for paths in bad],
                "As soon as one is written, each place has a state of its own. Keep the state in one place; "
                "tie what must be in two with `equinox.nn.Shared`, or put copies in: `state.replace()`. For "
                "the slots of an optimizer write `slots = jax.tree.map(lambda x: x, slots)`.",
            )
        rules.refuse(name, leaving.mistakes)
        rules.check_entries(name, flat, entries, placements)
        return leaving.outputs, WriteBack(
            treedef.unflatten(parts),
            leaving.placements,
            leaving.rewritten,
            leaving.written_at,
            leaving.mistakes.stacked,
            leaving.merged,
        )

    @functools.cached_property
    def input_at(self) -> dict[int, int]:
        """The number of each input, by its position."""
        return {source.position: number for number, source in enumerate(self.inputs)}

    def _same_over(self, placements: Sequence[Placement]) -> tuple[AxisName, ...]:
        """The mapped axes over which every instance gets the same state."""
        apart = NO_AXES.union(*(placement.axis_names for placement in placements))
        return tuple(name for name in self.rules.names if name not in apart)

    # What follows words hints for errors.

    def _hint(
        self, error: Exception, entered: Sequence[Entered], leaves: Sequence[Leaf]
    ) -> str | None:
        """The text of `error` with a hint, if a part of a parameter, or a replicated state, met other data.

        JAX must have raised the error, and name both sizes: one of what is whole and one of what is split. Or
        it is about a gradient of a model, or names a state in whose place gradients have nothing.
        """
        if type(error) not in (TypeError, ValueError) or not compat.raised_by_jax(error):
            return None
        text = str(error)
        if text.startswith(_NO_GRADIENT) and any(unit.kind for unit in self.call.flat_units()):
            return (
                f"{text}\n\nHint: sm.value_and_grad takes a function of a model that returns "
                "`(loss, model)`. It differentiates the parameters alone, and with `axis_name` it reduces "
                "their gradients over shards: `(loss, model), grads = sm.value_and_grad(loss_fn, "
                "axis_name='x')(model, x)`."
            )
        if "NoneType" in text and re.search(r"<class 'statemesh\.\S+State'>", text):
            return (
                f"{text}\n\nHint: gradients have None in the place of what is not trained. Give an optimizer "
                "the same part of the model: `slots = optimizer.init(sm.trainable(model))`, and where it "
                "needs the weights, `optimizer.update(grads, slots, sm.trainable(model))`."
            )
        parts = [
            (unit, leaves[position], source.placement)
            for unit in self.call.flat_units()
            for position in unit.positions
            if position in self.input_at
            and (source := self.inputs[self.input_at[position]]).placement.axis is None
            and source.placement.axis_names
        ]

        def split_axes(part: Leaf, placement: Placement) -> list[tuple[int, int]]:
            """The length of each split axis, here and as a whole."""
            return [
                (length, length * math.prod(self.sizes[name] for name in names))
                for length, names in zip(part.shape, placement.axes, strict=False)
                if names
            ]

        named = set(map(int, re.findall(r"\d+", text)))
        params = [
            (unit.path, part, placement)
            for unit, part, placement in parts
            if unit.kind is not None and issubclass(unit.kind, ParamState)
            if any(named.issuperset(lengths) for lengths in split_axes(part, placement))
        ]
        if params:
            axes = NO_AXES.union(*(placement.axis_names for _, _, placement in params))
            items = [
                f"{path} is {describe(part)}, a part by its spec {spec_str(placement.written)}"
                for path, part, placement in params
            ]
            return f"{text}\n\n" + listed(
                "Hint: each shard holds a part of these parameters",
                first_items(items),
                "Make them whole before they are used, as parameters that fsdp has split are: "
                f"`model = sm.gather(model, {axes_argument(in_order(self.rules, axes))!r})`.",
            )
        met = [
            (state, unit.path, part, placement)
            for state in entered
            for unit, part, placement in parts
            if any(
                not placed.axis_names
                and whole > length
                and whole in x.shape
                and named.issuperset((length, whole))
                for length, whole in split_axes(part, placement)
                for x, placed in zip(leaves_of(state.old), state.placements, strict=True)
            )
        ]
        if not met:
            return None
        items = [
            f"{state.path} ({shortened(state.old.value)}) is whole on every shard, but {path}, split by "
            f"{spec_str(placement.spec)}, is {describe(part)} there"
            for state, path, part, placement in met
        ]
        spec = spec_str(met[0][3].spec)
        return f"{text}\n\n" + listed(
            "Hint: a replicated state met sharded data",
            first_items(list(dict.fromkeys(items))),
            f"To split the state like the data, write state_in_specs={spec} (or {{filter: {spec}}}), or give "
            f"the state its own spec={spec}.",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A written state on its way from the function to the outputs."""

    state: State
    entered: Entered | None
    declared: Any
    path: str
    placements: list[Placement]

    def mapped(self, fun: Callable[[Any, Any], Any], others: Sequence[Any]) -> "Written":
        """The state, its leaves changed by a function of each leaf and something else."""
        leaves = leaves_of(self.state)
        leaves[: len(others)] = map(fun, leaves, others)
        return dataclasses.replace(self, state=filled(self.state, leaves))


class Leaving:
    """Collects the program's outputs, their placements, and every mistake on the way."""

    def __init__(
        self, rules: Rules, arrived: Mapping[int, tuple[int, Input]], varying: VaryingAxes
    ) -> None:
        self.rules = rules
        # By identity: an array that the function returns as it was given is forwarded.
        self.arrived = arrived
        self.any_stays = any(rules.stays(source) for _, source in arrived.values())
        # Facts about equations that pass these arrays on, kept because several leaves ask for them.
        self.forwarding: dict[int, tuple[Any, list[int | None]]] = {}
        self.varying = varying
        self.outputs: list[Leaf] = []
        self.placements: list[Placement] = []
        self.rewritten: list[int] = []
        self.written_at: list[tuple[int, str]] = []
        self.merged: list[Merged] = []
        self.mistakes = Mistakes()
        # The axes over which each array may differ, by identity. The array is kept with them: another one
        # could get its identity.
        self.seen: dict[int, tuple[Any, Axes]] = {}

    def merge(self, writing: Sequence[Written]) -> list[Written]:
        """Merge what the instances wrote to states, by the states' policies."""
        # A value that is the same everywhere counts once, whatever its type says.
        writing = [
            written.mapped(self._one_copy, written.placements)
            if written.state.needs_old
            else written
            for written in writing
        ]
        # Once for all leaves before merging and once after, because looking at one leaf costs as much.
        self._look_at_states(writing)
        over = [self._axes_to_merge(written) for written in writing]
        for written, axes_of_leaves in zip(writing, over, strict=True):
            axes = in_order(self.rules, NO_AXES.union(*axes_of_leaves))
            reduce = written.state.reduce
            if axes and not (reduce is None and type(written.state).leave is State.leave):
                policy = reduce if isinstance(reduce, str) else errors.policy_name(written.state)
                self.merged.append((written.path, policy, axes))
        # JAX's rules may have lost that what is merged differs.
        writing = [
            written.mapped(
                lambda x, axes: self.varying.typed_as_varying(x, frozenset(axes)), axes_of_leaves
            )
            if written.state.reduce is not None and any(axes_of_leaves)
            else written
            for written, axes_of_leaves in zip(writing, over, strict=True)
        ]

        pairs = [(written.state, written.entered and written.entered.old) for written in writing]
        states: list[State] = self.varying.run(functools.partial(_all_left, over), pairs)
        merged: list[Written] = []
        for written, state in zip(writing, states, strict=True):
            auxiliary = len(leaves_of(state)) - len(written.placements)
            placements = [*written.placements, *[self.rules.auxiliary()] * auxiliary]
            merged.append(dataclasses.replace(written, state=state, placements=placements))
        self._look_at_states(merged)
        return merged

    def _one_copy(self, x: Leaf, placement: Placement) -> Leaf:
        same = in_order(self.rules, self.varying.same_over(x) - placement.axis_names)
        return one_copy(x, same) if same else x

    def _axes_to_merge(self, written: Written) -> list[tuple[AxisName, ...]]:
        """For each leaf the axes over which it is merged.

        A named policy merges each leaf over those that it differs over itself, as it would in a State
        of its own: what is the same everywhere is no sum of its copies. A function sees all leaves.
        """
        pairs = list(zip(leaves_of(written.state), written.placements, strict=False))
        axes = [self._unmerged(x, placement) for x, placement in pairs]
        if not isinstance(written.state.reduce, str):
            union = NO_AXES.union(*axes)
            axes = [union - placement.axis_names for _, placement in pairs]
        return [in_order(self.rules, names) for names in axes]

    def state(self, written: Written) -> State:
        """One written state on its way out, `Output`s and `Forwarded`s in place of its arrays."""
        leaves = enumerate(leaves_of(written.state))
        return filled(written.state, [self._written(written, k, x) for k, x in leaves])

    def _written(self, written: Written, k: int, x: Leaf) -> Output | Forwarded:
        """One leaf of a written state."""
        placement, entered = written.placements[k], written.entered
        if still := self._mistaken(x, placement):
            elsewhere = self.rules.fallback(written.declared, x, written.path)
            if elsewhere is None:
                is_new = entered is None and isinstance(written.state, ParamState)
                self.mistakes.diverged.append(
                    Varying(
                        written.path,
                        written.state,
                        in_order(self.rules, still),
                        placement.spec,
                        written.declared,
                        is_new,
                    )
                )
            else:
                placement = elsewhere
                inputs = () if entered is None else entered.inputs
                self.mistakes.stacked.append((written.path, inputs))
        # Where `replace` has changed the structure there may be more leaves than came in.
        if entered is not None and placement in entered.placements[k : k + 1]:
            if x is leaves_of(entered.seen)[k]:
                return Forwarded(entered.inputs[k])
            self.rewritten.append(entered.inputs[k])
        output = self._emit(strong(x), placement, written.path)
        self.written_at.append((output.index, written.path))
        return output

    def leaf(self, x: Leaf, entry: Leaf, in_module: bool, path: str) -> Any:
        """One leaf outside any State."""
        if not is_shaped(x) and (type(x) not in NUMBERS or in_module):
            return Static(x)
        came = self._stayed(x) if in_module and self.any_stays else None
        if came is None:
            placement = self.rules.for_array(entry, x, path, self.mistakes)
        else:
            x, placement = came
        number, source = self.arrived.get(id(x), (0, None))
        if source is not None and not source.fresh and source.placement == placement:
            return Forwarded(number)
        output = self._emit(x, placement, path)
        if still := self._mistaken(x, placement):
            axes = in_order(self.rules, still)
            self.mistakes.varying.append(Varying(path, x, axes, placement.spec))
        if in_module:
            self.outputs[output.index] = strong(self.outputs[output.index])
        return output

    def _stayed(self, x: Leaf) -> tuple[Any, Placement] | None:
        """The array that `x` was when it came in, and its placement, if it leaves as it came."""
        for origin in sources(x, self.forwarding):
            _, source = self.arrived.get(id(origin), (0, None))
            if source is not None and self.rules.stays(source):
                return origin, source.placement
        return None

    def _emit(self, x: Leaf, placement: Placement, path: str) -> Output:
        x = placement.put(jnp.asarray(x))
        if x.ndim < len(placement.axes):
            self.mistakes.rank.append(rank_item(path, x, placement.written))
        self.outputs.append(x)
        self.placements.append(placement)
        return Output(len(self.outputs) - 1)

    def _look(self, values: Iterable[Leaf]) -> None:
        """Find out over which axes these values may differ, for all of them at once."""
        new = {id(x): x for x in values if id(x) not in self.seen and is_shaped(x)}
        over = self.varying.of(list(new.values()))
        for x, axes in zip(new.values(), over, strict=True):
            self.seen[id(x)] = x, axes

    def _look_at_states(self, writing: Sequence[Written]) -> None:
        self._look(
            x
            for written in writing
            for x, placement in zip(leaves_of(written.state), written.placements, strict=False)
            if self._may_be_unmerged(placement)
        )

    def _may_be_unmerged(self, placement: Placement) -> bool:
        return not placement.axis_names.issuperset(self.rules.names)

    def _unmerged(self, x: Leaf, placement: Placement) -> Axes:
        """The axes over which `x` may differ although `placement` keeps one copy.

        Where nothing tells, all axes that `placement` leaves out.
        """
        if not self._may_be_unmerged(placement):
            return NO_AXES
        self._look([x])
        return self.seen[id(x)][1] - placement.axis_names if id(x) in self.seen else NO_AXES

    def _mistaken(self, x: Leaf, placement: Placement) -> Axes:
        """The axes of `_unmerged`, if it is known what varies. Any of them is a mistake."""
        return self._unmerged(x, placement) if self.varying.is_known else NO_AXES


def _all_left(
    over: Sequence[Sequence[tuple[AxisName, ...]]], *pairs: tuple[State, State | None]
) -> list[State]:
    """States as they leave, each leaf merged over its own axes. Named policies merge all of theirs together.

    **Arguments:**

    - `over`: for each state the axes over which each of its leaves is merged.
    - `pairs`: each state, and as it came in; `None` for one made inside.
    """
    writes = {
        k: Write(
            state.value,
            None if old is None else old.value,
            str(state.reduce),
            names,
            state.name or type(state).__name__,
        )
        for k, ((state, old), names) in enumerate(zip(pairs, over, strict=True))
        if any(names) and isinstance(state.reduce, str)
        if all(_leave_of(type(state), axis_names) is State.leave for axis_names in names)
    }
    merged = dict(zip(writes, reduced(list(writes.values())), strict=True))
    return [
        state._with_value(merged[k]) if k in merged else _left(state, old, names)
        for k, ((state, old), names) in enumerate(zip(pairs, over, strict=True))
    ]


def _leave_of(kind: type[State], axis_names: tuple[AxisName, ...]) -> Callable[..., State]:
    """How states of a kind leave. Some merge microbatches in another way than shards."""
    overrides = kind._of_microbatches is not State._of_microbatches
    return kind._of_microbatches if overrides and axis_names in PARTS_OF_ROWS else kind.leave


def _left(state: State, old: State | None, over: Sequence[tuple[AxisName, ...]]) -> State:
    """The state as it leaves, by its kind's own way."""
    states = {
        names: checked_state(_leave_of(type(state), names)(state, old, names), state, "leave")
        for names in dict.fromkeys(over or [()])
    }
    first, *others = states.values()
    if not others:
        return first
    leaves = leaves_of(first)
    for k, names in enumerate(over):
        leaves[k] = leaves_of(states[names])[k]
    return filled(first, leaves)


def checked_state(returned: object, state: State, method: str) -> State:
    """The state that a kind's `enter` or `leave` returned; an error for anything else."""
    if not isinstance(returned, State):
        name = f"{type(state).__name__}.{method}"
        raise errors.method_returned(name, returned, "a State", "return self.set(value)")
    return returned


def filled(state: State, leaves: list[Leaf]) -> State:
    return tree_util.tree_structure(state).unflatten(leaves)
