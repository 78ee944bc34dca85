"""Step 4: written states on their way out, each merged by its own policy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .._base import errors
from .._base._compat import tree_util
from .._base._specs import Placement
from .._base._types import AxisName, Leaf
from .._model._state import State
from .._model._values import Write, reduced
from ._origins import Entered, leaves_of


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
    filled: State = tree_util.tree_structure(state).unflatten(leaves)
    return filled
