"""Step 2 for `pmap2` and `vmap2`: leaves enter by axis."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._arguments import Arguments, Call, Unit
from .._base import _explicit as explicit
from .._base import errors
from .._base._checks import check_lane_name
from .._base._prefix import broadcast_axes
from .._base._types import AxisTree, Filter, Leaf, Size
from .._leave._axis_rules import LeaveByAxis, is_single
from .._leave._origins import values
from .._model._filters import to_predicate
from .._model._state import State
from .._resolve._lanes import AxesOfMap, choose_axes, is_size
from .._resolve._processes import check_global_shapes
from .._resolve._specs import UNDECLARED
from ._binding import Carrier
from ._rules import Resolved, Stacked


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
            raise errors.own_mesh_among_explicit(name)

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
            raise errors.axes_of_states(name, bad, of_map is not None)
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
