"""Step 4: written states on their way out, each merged by its own policy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .._base import errors
from .._base._compat import tree_util
from .._base._specs import Placement
from .._base._types import AxisName, Leaf
from .._model._state import State
from ._origins import Entered, leaves_of


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A written state on its way from the function to the outputs."""

    state: State
    entered: Entered | None
    declared: Any
    path: str
    placements: list[Placement]


def left(state: State, old: State | None, over: Sequence[tuple[AxisName, ...]]) -> State:
    """The state as it leaves, each leaf merged over its own axes."""
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
    filled: State = tree_util.tree_structure(state).unflatten(leaves)
    return filled
