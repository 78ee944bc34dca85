"""The rules of `pmap2` and `vmap2`: leaves enter and results leave by axis."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._base import _errors as errors
from .._base._checks import check_lane_name
from .._base._errors import (
    BatchAxisError,
    StatemeshError,
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
from ._arguments import Call, Input, Unit
from ._devices import Devices, check_global_shapes
from ._lanes import AxesOfMap, Lanes, Layout, choose_axes, fits, is_size
from ._origins import Entered, values
from ._rules import Diverged, Mistakes, Rules, roots
from ._specs import UNDECLARED, broadcast_axes


_AXIS_ON_BOTH_SIDES = (
    "state_out_axes={0: filter}, and state_in_axes={0: filter} from the next call on"
)


def is_single(state: State) -> bool:
    """Whether a state's value is made of scalars: one key, not one for each lane."""
    return all(not np.ndim(x) for x in values(state))


def _from_start(axis: int | None, x: Leaf) -> int | None:
    return None if axis is None else axis % (np.ndim(x) + 1)


POLICIES = ("raise", "warn", "ignore", "auto")


@dataclasses.dataclass(frozen=True)
class AxisRules(Rules):
    """The axes of a `pmap2` or a `vmap2`.

    **Attributes:**

    - `carrier`: what the lanes run on: devices, or one `vmap`.
    - `state_in`, `state_out`: filters, each with its axis.
    - `unexpected`: what becomes of an undeclared state to which lanes wrote different values.
    - `fed`, `replicated`: known in the rules of one call: the paths of undeclared states of which each lane
        gets its own entry, and of states that are declared to enter without a lane axis.
    """

    transform: str
    carrier: Lanes | Devices
    in_axes: AxisTree
    out_axes: AxisTree
    axis_name: Any
    axis_size: Size | None
    state_in: Sequence[tuple[Filter, int | None]]
    state_out: Sequence[tuple[Filter, int | None]]
    unexpected: str = "raise"
    global_shapes: tuple[tuple[int, ...] | None, ...] | None = None
    fed: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()

    what = "in_axes"

    @property
    def names(self) -> tuple[AxisName, ...]:
        return (self.axis_name,)

    @property
    def has_own_mesh(self) -> bool:
        return self.carrier.has_mesh

    @property
    def looks_ahead(self) -> bool:
        return self.unexpected == "auto"

    @property
    def by_shape(self) -> bool:
        return self.looks_ahead or self.carrier.has_mesh

    def check(self) -> None:
        if self.unexpected not in POLICIES:
            raise errors.unknown_choice("unexpected_out_state_mapping", self.unexpected, POLICIES)
        size = self.axis_size
        if size is not None and not is_size(size):
            raise bad_axis_size("axis_size", size)
        check_lane_name(self.transform, self.axis_name)
        if self.has_own_mesh and not isinstance(self.axis_name, str):
            expected = (
                "a string, as in axis_name='data': JAX has no other names for the axes of devices"
            )
            raise errors.invalid_argument(self.transform, "axis_name", self.axis_name, expected)
        for filter, _ in (*self.state_in, *self.state_out):
            to_predicate(filter)
        self.carrier.check(self.transform)

    def check_traced(self, name: str, leaves: Sequence[Leaf]) -> None:
        if self.has_own_mesh and explicit.explicit_around(leaves):
            raise BatchAxisError(
                f"{name}: pmap2 runs on a mesh of its own, and JAX cannot mix its results with arrays on "
                "Explicit mesh axes during a trace. Call it outside the trace; or call it outside "
                "`jax.set_mesh` and on arrays that do not lie on such a mesh; or use shard_map, which runs "
                "on the mesh that is set."
            )

    def on_one_device(self) -> "AxisRules":
        return dataclasses.replace(self, carrier=self.carrier.on_one_device(), global_shapes=None)

    def after(self, fed: frozenset[str]) -> "AxisRules":
        return dataclasses.replace(self, fed=fed)

    def placement(self, axis: int | None, ndim: int) -> Placement:
        """The placement of an array of so many axes that has its lanes on this one."""
        return self.carrier.placement(self.axis_name, axis, ndim)

    def resolve(self, name: str, call: Call) -> tuple[list[Input], Layout, "AxisRules"]:
        entering, replicated = self._axes(name, call)
        leaves = call.leaves
        mapped = [(unit.path, axis, leaves[p]) for unit, p, axis, _ in entering if axis is not None]
        layout = self.carrier.bind(name, self.axis_name, mapped, self.axis_size, self.looks_ahead)
        if self.global_shapes is not None:
            axes = {position: axis for _, position, axis, _ in entering}
            lanes = layout.sizes[self.axis_name]
            check_global_shapes(name, self.global_shapes, call, axes, lanes)
        inputs = [
            unit.input(p, leaves[p], self.placement(axis, np.ndim(leaves[p])), placed_by)
            for unit, p, axis, placed_by in entering
        ]
        return inputs, layout, dataclasses.replace(self, replicated=replicated)

    def _axes(
        self, name: str, call: Call
    ) -> tuple[list[tuple[Unit, int, int | None, str]], frozenset[str]]:
        """Each leaf that becomes an input: its unit, its position, its axis and what says so.

        And the paths of the states that are declared to have no axis.
        """
        state_axes = iter(choose_axes(self.state_in, call.named(), "state_in_axes"))
        entering: list[tuple[Unit, int, int | None, str]] = []
        replicated: set[str] = set()
        of_states: dict[str, list[tuple[str, int, str, State]]] = {}
        of_arrays: set[str] = set()
        of_map = self.in_axes if isinstance(self.in_axes, AxesOfMap) else None
        first = 0 if of_map is None else -1
        for unit, node, entry, entry_name in call.with_entries(
            self.in_axes, self.what, 0, broadcast_axes, first
        ):
            if unit.kind is not None:
                declared = next(state_axes)
                if declared is None:
                    replicated.add(unit.path)
                axis, placed_by = self._for_entering(unit.path, node, declared)
                if entry is not None and entry != axis:
                    of_states.setdefault(entry_name, []).append(
                        (entry_name, entry, unit.path, node)
                    )
                for k, position in enumerate(unit.positions):
                    own_axis = axis if k < len(values(node)) else None
                    entering.append((unit, position, own_axis, placed_by))
            elif unit.shaped or (unit.number and not unit.in_module and entry is not None):
                entering.append((unit, unit.positions[0], entry, entry_name))
                if entry is not None:
                    of_arrays.add(entry_name)
        bad = [
            state
            for entry_name, states in of_states.items()
            if entry_name not in of_arrays
            for state in states
        ]
        # The default stands for every argument, and so does the one axis of a `Map`.
        if bad and not (of_map.one_for_all if of_map else self.in_axes == 0):
            lanes = f"say which States have lanes: state_in_axes={{{bad[0][1]}: filter}}"
            if of_map is not None:
                lanes = "keep States that have lanes in the module of the Map"
            raise error_listing(
                BatchAxisError,
                f"{name}: in_axes maps arrays outside of States, so these axes would map nothing",
                [
                    f"{entry} = {axis} stands for {path}, a {type(state).__name__}"
                    for entry, axis, path, state in bad
                ],
                f"Write None there, and {lanes}. A RandomState needs neither, because each lane draws from a "
                "stream of its own.",
            )
        return entering, frozenset(replicated)

    def _for_entering(self, path: str, state: State, declared: Any) -> tuple[int | None, str]:
        """The axis with which a state enters, and what says so."""
        if state.always_replicated and is_single(state):
            # One key serves all lanes: each gets its own stream of it.
            return 0 if declared is UNDECLARED and path in self.fed else None, "its kind"
        if declared is not UNDECLARED:
            return declared, f"state_in_axes[{declared}]"
        if path in self.fed:
            return 0, "unexpected_out_state_mapping='auto'"
        return None, "default"

    def entries(self, result: PyTree, root: str) -> list[Leaf]:
        return broadcast_axes(self.out_axes, result, "out_axes", root)

    def declared(self, result: PyTree, root: str) -> list[Leaf]:
        return choose_axes(self.state_out, roots(result, root), "state_out_axes")

    def for_array(self, entry: Leaf, x: Leaf, path: str, mistakes: Mistakes) -> Placement:
        return self._checked(entry, x, path, mistakes)

    def stays(self, array: Input) -> bool:
        """What all lanes share stays: with one axis more at each call, no model could be fed back."""
        return array.in_module and array.placement.axis is None

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

    def refuse(self, name: str, mistakes: Mistakes) -> None:
        if mistakes.axes:
            raise error_listing(
                BatchAxisError,
                f"{name}: results have too few axes for where their lanes should go",
                [
                    f"{path}: {describe(x)} in each lane, with lanes to go on axis {axis}"
                    for path, axis, x in mistakes.axes
                ],
                "With the lanes a result has one axis more than in each lane; 0 always fits.",
            )
        if mistakes.conflicts:
            raise error_listing(
                BatchAxisError,
                f"{name}: states enter on one axis and leave on another",
                [
                    f"{path}: {describe(state)} enters on axis {into} but leaves on axis {out}"
                    for path, state, into, out in mistakes.conflicts
                ],
                "A state leaves on the axis that state_in_axes gives it: leave it out of state_out_axes, or "
                "give it the same axis there.",
            )
        if mistakes.diverged:
            to_none = [
                write
                for write in mistakes.diverged
                if write.declared is None
                or (write.declared is UNDECLARED and write.path in self.replicated)
            ]
            raise _lanes_diverged(name, to_none or mistakes.diverged, bool(to_none))
        if mistakes.varying:
            raise error_listing(
                BatchAxisError,
                f"{name}: out_axes=None is for results that are the same in all lanes, but",
                [
                    f"{write.path}: {describe(write.value)} differs between lanes"
                    for write in mistakes.varying
                ],
                f"Reduce it, as with {_pmean('value', mistakes.varying[0].axis_names[0])}, or give it an "
                "axis: out_axes=0.",
            )
        if mistakes.stacked and self.unexpected == "warn":
            text = listed(
                f"{name}: lanes wrote different values to states without a declared axis, and these were "
                "stacked on axis 0",
                [path for path, _ in mistakes.stacked],
                "Declare it: state_out_axes={0: filter}.",
            )
            warnings.warn(text, stacklevel=2)

    def _checked(self, axis: int | None, x: Leaf, path: str, mistakes: Mistakes) -> Placement:
        """The placement with the lanes on this axis; a mistake where the array has no such axis."""
        ndim = np.ndim(x) + 1
        if axis is not None and not fits(axis, ndim):
            mistakes.axes.append((path, axis, x))
            axis = None
        return self.placement(axis, ndim)


def _lanes_diverged(name: str, bad: Sequence[Diverged], declared_none: bool) -> BatchAxisError:
    axis = bad[0].axis_names[0]
    if merged := [write for write in bad if write.state.needs_old]:
        return _policies_diverged(name, merged, axis)
    items = [f"{write.path}: {describe(write.state)}" for write in bad]
    if declared_none:
        head = "states that state_out_axes declares to be the same in all (axis None)"
        advice = (
            f"Reduce the value, as with {_pmean('value', axis)}; or declare how writes are merged, "
            "State(value, reduce='mean'); or give the states an axis: state_out_axes={0: filter}. A "
            "NonBatchState cannot have an axis: use another kind of state."
        )
    else:
        head = "states without a declared axis"
        advice = (
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
        advice,
    )


def _policies_diverged(name: str, bad: Sequence[Diverged], axis: AxisName) -> BatchAxisError:
    """States whose policy has merged the writes, and gave a value that still differs."""
    shown = "without a name" if axis in (UNNAMED, UNNAMED_DEVICES) else repr(axis)
    policies = [policy_name(write.state) for write in bad]
    return error_listing(
        BatchAxisError,
        f"{name}: the policies of these states gave values that differ between lanes ({shown}), but one copy "
        "is kept",
        first_items(
            [
                f"{write.path}: {describe(write.state)}: {policy} returned it, but must return the same "
                "value in every lane"
                for write, policy in zip(bad, policies, strict=True)
            ]
        ),
        listed(
            "Mend it",
            [
                f"reduce it in {policy}, as with jax.lax.psum(value, axis_names)"
                for policy in policies
            ],
            f"Or keep one value per lane: {_AXIS_ON_BOTH_SIDES}.",
        ),
    )


def _pmean(value: str, axis: AxisName) -> str:
    """Code that reduces over lanes; if they have no name, it gives them one."""
    if axis in (UNNAMED, UNNAMED_DEVICES):
        return f"jax.lax.pmean({value}, 'lanes') with axis_name='lanes'"
    return f"jax.lax.pmean({value}, {axis!r})"


def bad_axis_size(what: str, size: object) -> StatemeshError:
    return StatemeshError(f"{what}={size!r} is not a positive int.")
