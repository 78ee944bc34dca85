"""Step 4 for `pmap2` and `vmap2`: results leave by axis."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._base import errors
from .._base._prefix import broadcast_axes
from .._base._specs import Placement
from .._base._types import AxisTree, Filter, Leaf, PyTree
from .._model._state import State
from .._resolve._lanes import choose_axes, fits
from .._resolve._specs import UNDECLARED
from ._origins import Entered, values
from ._rules import LeavingRules, Mistakes, roots


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

    def stays(self, where: Placement) -> bool:
        """What all lanes share stays: with one axis more at each call, no model could be fed back."""
        return where.axis is None

    def for_state(
        self, state: State, entered: Entered | None, declared: Any, path: str, mistakes: Mistakes
    ) -> list[Placement]:
        leaves = values(state)
        into = [] if entered is None else [where.axis for where in entered.placements]
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
            raise errors.no_such_out_axis(self.fun_name, mistakes.axes)
        if mistakes.conflicts:
            raise errors.lane_axis_conflict(self.fun_name, mistakes.conflicts)
        to_none: list[errors.Diverged] = []
        undeclared: list[errors.Diverged] = []
        for one in mistakes.diverged:
            at_none = one.declared is None or (
                one.declared is UNDECLARED and one.path in self.replicated
            )
            (to_none if at_none else undeclared).append(one)
        if found := to_none or undeclared:
            raise errors.lanes_diverged(self.fun_name, found, declared_none=bool(to_none))
        if mistakes.varying:
            raise errors.lanes_vary(self.fun_name, mistakes.varying)
        if mistakes.stacked and self.unexpected == "warn":
            paths = [path for path, _ in mistakes.stacked]
            warnings.warn(errors.lanes_stacked(self.fun_name, paths), stacklevel=2)

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
