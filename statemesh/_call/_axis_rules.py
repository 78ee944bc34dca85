"""The rules of `pmap2` and `vmap2`: leaves enter and results leave by axis."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._base import _errors as errors
from .._base._checks import check_lane_name
from .._base._errors import (
    BatchAxisError,
    Diverged,
    Varying,
    error_listing,
    first_items,
    listed,
    policy_name,
)
from .._base._specs import Placement
from .._base._trees import describe
from .._base._types import UNNAMED, UNNAMED_DEVICES, AxisName, AxisTree, Filter, Leaf, PyTree, Size
from .._jax import _explicit as explicit
from .._state._filters import to_predicate
from .._state._state import State
from ._arguments import Arguments, Call, Unit
from ._lanes import AxesOfMap, choose_axes, fits, is_size
from ._origins import Entered, values
from ._processes import check_global_shapes
from ._rules import Carrier, LeavingRules, Mistakes, Resolved, Stacked, roots
from ._specs import UNDECLARED, broadcast_axes


_AXIS_ON_BOTH_SIDES = (
    "state_out_axes={0: filter}, and state_in_axes={0: filter} from the next call on"
)


@dataclasses.dataclass(frozen=True)
class LeaveByAxis(LeavingRules):
    """`out_axes`, `state_out_axes` and `unexpected_out_state_mapping`.

    **Attributes:**

    - `placement`: makes the placement of an array with its lanes on an axis, from the axis and the number of
        axes.
    - `replicated`: the paths of states that are declared to enter without a lane axis.
    """

    out_axes: AxisTree
    state_out_axes: Sequence[tuple[Filter, int | None]]
    unexpected: str
    placement: Callable[[int | None, int], Placement]
    replicated: frozenset[str]

    def entries(self, result: PyTree, root: str) -> list[Leaf]:
        return broadcast_axes(self.out_axes, result, "out_axes", root)

    def declared(self, result: PyTree, root: str) -> list[Leaf]:
        return choose_axes(self.state_out_axes, roots(result, root), "state_out_axes")

    def for_array(self, entry: Leaf, x: Leaf, path: str, mistakes: Mistakes) -> Placement:
        return self._checked(entry, x, path, mistakes)

    def stays(self, placement: Placement) -> bool:
        """What all lanes share stays: with one axis more at each call, no model could be fed back."""
        return placement.axis is None

    def for_state(
        self, state: State, entered: Entered | None, declared: Any, path: str, mistakes: Mistakes
    ) -> list[Placement]:
        leaves = values(state)
        into = [] if entered is None else [placement.axis for placement in entered.placements]
        if entered is None or all(axis is None for axis in into):
            # One key serves all lanes, however many: it never has a lane axis.
            one_key = entered is not None and state.always_replicated and is_single(state)
            axis = None if declared is UNDECLARED or one_key else declared
            return [self._checked(axis, x, path, mistakes) for x in leaves]
        if len(leaves) > len(into):
            return [self._checked(into[0], x, path, mistakes) for x in leaves]
        if declared is not UNDECLARED and any(
            declared is None or _from_start(declared, x) != _from_start(axis, x)
            for x, axis in zip(leaves, into, strict=False)
        ):
            mistakes.conflicts.append((path, state, into[0], declared))
        placements = list(entered.placements)
        for k, x in enumerate(leaves):
            if into[k] is not None:
                placements[k] = self._checked(into[k], x, path, mistakes)
        return placements

    def auxiliary(self) -> Placement:
        return self.placement(None, 0)

    def fallback(self, declared: Any, x: Leaf, path: str) -> Placement | None:
        """Axis 0, where the author allows it and did not declare the state to be equal in all lanes."""
        if declared is not UNDECLARED or path in self.replicated or self.unexpected == "raise":
            return None
        return self.placement(0, np.ndim(x) + 1)

    def refuse(self, mistakes: Mistakes) -> None:
        if mistakes.axes:
            raise _no_such_out_axis(self.fun_name, mistakes.axes)
        if mistakes.conflicts:
            raise _lane_axis_conflict(self.fun_name, mistakes.conflicts)
        to_none: list[errors.Diverged] = []
        undeclared: list[errors.Diverged] = []
        for one in mistakes.diverged:
            at_none = one.declared is None or (
                one.declared is UNDECLARED and one.path in self.replicated
            )
            (to_none if at_none else undeclared).append(one)
        if found := to_none or undeclared:
            raise _lanes_diverged(self.fun_name, found, declared_none=bool(to_none))
        if mistakes.varying:
            raise _lanes_vary(self.fun_name, mistakes.varying)
        if mistakes.stacked and self.unexpected == "warn":
            paths = [path for path, _ in mistakes.stacked]
            warnings.warn(_lanes_stacked(self.fun_name, paths), stacklevel=2)

    def _checked(self, axis: int | None, x: Leaf, path: str, mistakes: Mistakes) -> Placement:
        """The placement with the lanes on this axis; a mistake where the array has no such axis."""
        ndim = np.ndim(x) + 1
        if axis is not None and not fits(axis, ndim):
            mistakes.axes.append((path, axis, x))
            axis = None
        return self.placement(axis, ndim)


def is_single(state: State) -> bool:
    """Whether a state's value is made of scalars: one key, not one for each lane."""
    return all(not np.ndim(x) for x in values(state))


def _from_start(axis: int | None, x: Leaf) -> int | None:
    return None if axis is None else axis % (np.ndim(x) + 1)


POLICIES = ("raise", "warn", "ignore", "auto")


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """The axes of a `pmap2` or a `vmap2`.

    **Attributes:**

    - `carrier`: what the lanes run on: devices, or one `vmap`.
    - `state_in`, `state_out`: filters, each with its axis.
    - `unexpected`: what becomes of an undeclared state to which lanes wrote different values.
    """

    transform: str
    carrier: Carrier
    in_axes: AxisTree
    out_axes: AxisTree
    axis_name: Any
    axis_size: Size | None
    state_in: Sequence[tuple[Filter, int | None]]
    state_out: Sequence[tuple[Filter, int | None]]
    unexpected: str = "raise"
    global_shapes: tuple[tuple[int, ...] | None, ...] | None = None

    what = "in_axes"
    cacheable = True
    takes_set_mesh = False

    @property
    def has_own_mesh(self) -> bool:
        return self.carrier.has_mesh

    @property
    def entries_in(self) -> Any:
        return self.in_axes

    def check(self) -> None:
        if self.unexpected not in POLICIES:
            raise errors.unknown_choice("unexpected_out_state_mapping", self.unexpected, POLICIES)
        size = self.axis_size
        if size is not None and not is_size(size):
            raise errors.bad_axis_size("axis_size", size)
        check_lane_name(self.transform, self.axis_name)
        if self.has_own_mesh and not isinstance(self.axis_name, str):
            raise errors.invalid_argument(self.transform, "axis_name of a mesh", self.axis_name)
        for filter, _ in (*self.state_in, *self.state_out):
            to_predicate(filter)
        self.carrier.check(self.transform)

    def check_traced(self, name: str, leaves: Sequence[Leaf]) -> None:
        if self.has_own_mesh and explicit.explicit_around(leaves):
            raise _own_mesh_among_explicit(name)

    def context(self, call: Call, traced: bool) -> "AxisContext":
        return AxisContext(self)

    def has_devices(self, leaves: Sequence[Leaf]) -> bool:
        return True

    def of_shapes(self) -> "AxisRules":
        return self

    def on_one_device(self) -> "AxisRules":
        return dataclasses.replace(self, carrier=self.carrier.on_one_device(), global_shapes=None)


@dataclasses.dataclass(frozen=True, eq=False)
class AxisContext:
    """The axes of one call.

    **Attributes:**

    - `rules`: what the author declared.
    - `fed`: the paths of undeclared states that lanes get their own entries of all the same.
    """

    rules: AxisRules
    fed: frozenset[str] = frozenset()

    # The axes are the same for every call.
    key = None

    @property
    def looks_ahead(self) -> bool:
        return self.rules.unexpected == "auto"

    def after(self, stacked: Sequence[Stacked], lanes: int | None) -> "AxisContext | None":
        """With `'auto'`, lanes get their own entries of a state that has one for each of them already.

        It must be read, and be written differently in each lane.
        """
        fed = [
            one.path for one in stacked if one.read and all(s[:1] == (lanes,) for s in one.shapes)
        ]
        return dataclasses.replace(self, fed=frozenset(fed)) if fed else None

    def resolve(self, name: str, arguments: Arguments, call: Call) -> Resolved:
        rules, carrier = self.rules, self.rules.carrier
        axes, replicated, placed_by = self._axes(name, arguments, call)
        paths, leaves = arguments.paths(), call.leaves
        mapped = [(paths[p], axis, leaves[p]) for p, axis in axes.items() if axis is not None]
        auto = self.looks_ahead
        binding = carrier.bind(name, rules.axis_name, mapped, rules.axis_size, auto)
        if rules.global_shapes is not None:
            lanes = binding.sizes[rules.axis_name]
            check_global_shapes(name, rules.global_shapes, arguments, call.args, axes, lanes)
        placement = functools.partial(carrier.placement, rules.axis_name)
        leaving = LeaveByAxis(
            name,
            (rules.axis_name,),
            rules.out_axes,
            rules.state_out,
            rules.unexpected,
            placement,
            replicated,
        )
        placements = {p: placement(axis, np.ndim(leaves[p])) for p, axis in axes.items()}
        return Resolved(placements, placed_by, binding, leaving, by_shape=auto or carrier.has_mesh)

    def _axes(
        self, name: str, arguments: Arguments, call: Call
    ) -> tuple[dict[int, int | None], frozenset[str], dict[int, str]]:
        """The axis of every input by its position, the paths of the states declared to have none, and what
        says where each input has its axis.
        """
        rules = self.rules
        named = arguments.named(call.args, call.kwargs)
        state_axes = iter(choose_axes(rules.state_in, named, "state_in_axes"))
        found: dict[int, int | None] = {}
        replicated: set[str] = set()
        placed_by: dict[int, str] = {}
        of_states: dict[str, list[tuple[str, int, str, State]]] = {}
        of_arrays: set[str] = set()
        of_map = rules.in_axes if isinstance(rules.in_axes, AxesOfMap) else None
        first = 0 if of_map is None else -1
        each = arguments.with_entries(named, rules.in_axes, rules.what, 0, broadcast_axes, first)
        for unit, node, axis, entry in each:
            if unit.kind is not None:
                declared = next(state_axes)
                if declared is None:
                    replicated.add(unit.path)
                asked, axis = axis, self._entering(unit, node, declared)
                if asked is not None and asked != axis:
                    of_states.setdefault(entry, []).append((entry, asked, unit.path, node))
                own = len(values(node))
                entry = self._reason(unit, node, declared)
                found.update((p, axis if k < own else None) for k, p in enumerate(unit.positions))
            elif unit.shaped or (unit.number and not unit.in_module and axis is not None):
                found[unit.positions[0]] = axis
                if axis is not None:
                    of_arrays.add(entry)
            placed_by.update(dict.fromkeys(unit.positions, entry))
        bad = [one for entry in of_states if entry not in of_arrays for one in of_states[entry]]
        # The default stands for every argument, and so does the one axis of a `Map`.
        if bad and not (of_map.one_for_all if of_map else rules.in_axes == 0):
            raise _axes_of_states(name, bad, of_map is not None)
        return found, frozenset(replicated), placed_by

    def _reason(self, unit: Unit, state: State, declared: Any) -> str:
        if state.always_replicated and is_single(state):
            return "its kind"
        if declared is not UNDECLARED:
            return f"state_in_axes[{declared}]"
        auto = unit.path in self.fed
        return "unexpected_out_state_mapping='auto'" if auto else "default"

    def _entering(self, unit: Unit, state: State, declared: Any) -> int | None:
        if declared is UNDECLARED:
            return 0 if unit.path in self.fed else None
        axis: int | None = declared
        # One key serves all lanes: each gets its own stream of it.
        return None if state.always_replicated and is_single(state) else axis


def _no_such_out_axis(name: str, bad: Sequence[tuple[str, int, object]]) -> BatchAxisError:
    items = [
        f"{path}: {describe(x)} in each lane, with lanes to go on axis {axis}"
        for path, axis, x in bad
    ]
    mend = "With the lanes a result has one axis more than in each lane; 0 always fits."
    return error_listing(
        BatchAxisError,
        f"{name}: results have too few axes for where their lanes should go",
        items,
        mend,
    )


def _axes_of_states(
    name: str, bad: Sequence[tuple[str, int, str, object]], of_map: bool
) -> BatchAxisError:
    items = [
        f"{entry} = {axis} stands for {path}, a {type(state).__name__}"
        for entry, axis, path, state in bad
    ]
    lanes = f"say which States have lanes: state_in_axes={{{bad[0][1]}: filter}}"
    if of_map:
        lanes = "keep States that have lanes in the module of the Map"
    return error_listing(
        BatchAxisError,
        f"{name}: in_axes maps arrays outside of States, so these axes would map nothing",
        items,
        f"Write None there, and {lanes}. A RandomState needs neither, because each lane draws from a stream "
        "of its own.",
    )


def _lane_axis_conflict(
    name: str, bad: Sequence[tuple[str, object, int | None, int | None]]
) -> BatchAxisError:
    items = [
        f"{path}: {describe(state)} enters on axis {into} but leaves on axis {out}"
        for path, state, into, out in bad
    ]
    mend = (
        "A state leaves on the axis that state_in_axes gives it: leave it out of state_out_axes, or give it "
        "the same axis there."
    )
    return error_listing(
        BatchAxisError, f"{name}: states enter on one axis and leave on another", items, mend
    )


def _lanes_diverged(name: str, bad: Sequence[Diverged], declared_none: bool) -> BatchAxisError:
    axis = bad[0].axis_names[0]
    if merged := [one for one in bad if one.state.needs_old]:
        return _policies_diverged(name, merged, axis)
    items = [f"{one.path}: {describe(one.state)}" for one in bad]
    if declared_none:
        head = "states that state_out_axes declares to be the same in all (axis None)"
        mend = (
            f"Reduce the value, as with {_pmean('value', axis)}; or declare how writes are merged, "
            "State(value, reduce='mean'); or give the states an axis: state_out_axes={0: filter}. A "
            "NonBatchState cannot have an axis: use another kind of state."
        )
    else:
        head = "states without a declared axis"
        mend = (
            "Mend it in one of three ways:\n"
            f"  1. keep one value per lane: {_AXIS_ON_BOTH_SIDES};\n"
            "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
            "function;\n"
            f"  3. reduce the value before it is set, as with {_pmean('value', axis)}."
        )
    return error_listing(
        BatchAxisError,
        f"{name}: lanes wrote different values to {head}",
        first_items(items),
        mend,
    )


def _policies_diverged(name: str, bad: Sequence[Diverged], axis: AxisName) -> BatchAxisError:
    """States whose policy has merged the writes, and gave a value that still differs."""
    shown = "without a name" if axis in (UNNAMED, UNNAMED_DEVICES) else repr(axis)
    items = [
        f"{one.path}: {describe(one.state)}: {policy_name(one.state)} returned it, but must return the same "
        "value in every lane"
        for one in bad
    ]
    mends = [
        f"reduce it in {policy_name(one.state)}, as with jax.lax.psum(value, axis_names)"
        for one in bad
    ]
    mend = listed("Mend it", mends, f"Or keep one value per lane: {_AXIS_ON_BOTH_SIDES}.")
    head = (
        f"{name}: the policies of these states gave values that differ between lanes ({shown}), but one copy "
        "is kept"
    )
    return error_listing(BatchAxisError, head, first_items(items), mend)


def _pmean(value: str, axis: AxisName) -> str:
    """Code that reduces over lanes; if they have no name, it gives them one."""
    if axis in (UNNAMED, UNNAMED_DEVICES):
        return f"jax.lax.pmean({value}, 'lanes') with axis_name='lanes'"
    return f"jax.lax.pmean({value}, {axis!r})"


def _lanes_stacked(name: str, paths: Sequence[str]) -> str:
    return listed(
        f"{name}: lanes wrote different values to states without a declared axis, and these were stacked on "
        "axis 0",
        paths,
        "Declare it: state_out_axes={0: filter}.",
    )


def _lanes_vary(name: str, bad: Sequence[Varying]) -> BatchAxisError:
    return error_listing(
        BatchAxisError,
        f"{name}: out_axes=None is for results that are the same in all lanes, but",
        [f"{one.path}: {describe(one.value)} differs between lanes" for one in bad],
        f"Reduce it, as with {_pmean('value', bad[0].axis_names[0])}, or give it an axis: out_axes=0.",
    )


def _own_mesh_among_explicit(name: str) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: pmap2 runs on a mesh of its own, and JAX cannot mix its results with arrays on Explicit "
        "mesh axes during a trace. Call it outside the trace; or call it outside `jax.set_mesh` and on "
        "arrays that do not lie on such a mesh; or use shard_map, which runs on the mesh that is set."
    )
