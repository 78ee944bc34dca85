"""Step 5: put what was written, what was not, and what is static into the result's tree."""

import dataclasses
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import jax

from .._base._specs import Placement
from .._base._trees import is_state
from .._base._types import AxisName, Leaf, PyTree
from .._jax._compat import tree_util
from .._state._state import State, is_plain, rebuild_plain


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A leaf that the program computes."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Forwarded:
    """A leaf that comes back as the array that went in."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """A leaf that is no array."""

    value: Leaf


# The path of a state, the name of the policy that merged its writes, and the axes that it merged over.
Merged: TypeAlias = tuple[str, str, tuple[AxisName, ...]]


@jax.tree_util.register_static
class WriteBack:
    """What tracing found out about the result: its tree, and where each of its leaves comes from.

    It rides out of `jax.jit` as a node without leaves, so that a call that is already compiled gets
    it back without tracing anything.

    **Arguments:**

    - `result`: the result's tree with `Output`, `Forwarded` and `Static` as leaves.
    - `placements`: where each of the program's outputs goes.
    - `rewritten`: the inputs that leaves of written states came from, for donation.
    - `written`: the outputs that are leaves of written states, with the states' paths.
    - `stacked`: paths and inputs of states that lanes wrote without a declared axis.
    - `merged`: for each state that a policy merged its path, the policy's name and the axes.

    **Attributes:**

    - `forwarded`: which inputs come back as they are.
    """

    def __init__(
        self,
        result: PyTree,
        placements: Sequence[Placement],
        rewritten: Sequence[int],
        written: Sequence[tuple[int, str]],
        stacked: Sequence[tuple[str, tuple[int, ...]]],
        merged: Sequence[Merged] = (),
    ) -> None:
        self.result = result
        sources = tree_util.tree_leaves(result, is_leaf=is_source)
        self.placements = tuple(placements)
        self.rewritten = tuple(rewritten)
        self.written = tuple(written)
        self.stacked = tuple(dict.fromkeys(stacked))
        self.merged = tuple(merged)
        self.forwarded = frozenset(s.index for s in sources if isinstance(s, Forwarded))
        units, treedef = tree_util.tree_flatten(
            result, is_leaf=lambda node: is_source(node) or _is_plain(node)
        )
        self._unflatten = treedef.unflatten
        # Most states are one array and metadata. Those are put together all at once; everything
        # else takes its leaf as it is. Both steps are one pass in C over a table: outputs, then
        # arguments, then statics; the rest, then plain states. Often they stand like that already.
        plain = [i for i, unit in enumerate(units) if is_state(unit)]
        rest = [i for i, unit in enumerate(units) if not is_state(unit)]
        self._first = len(rest)
        self._kinds = [type(units[i]) for i in plain]
        self._metas = [units[i]._meta.plain for i in plain]
        self._statics: list[Leaf] = []
        places: list[int] = []
        statics = sum(isinstance(source, Static) for source in sources)
        for unit in units:
            match unit.value if is_state(unit) else unit:
                case Output(index):
                    places.append(index)
                case Forwarded(index):
                    places.append(len(self.placements) + index)
                case Static(value):
                    # They stand last in the table, whose length is known only at the call.
                    places.append(len(self._statics) - statics)
                    self._statics.append(value)
        self._pick = picker([places[i] for i in (*rest, *plain)], len(self.placements))
        unit_at = {i: k for k, i in enumerate((*rest, *plain))}
        self._order = picker([unit_at[i] for i in range(len(units))], len(units))

    def forget(self) -> None:
        """Let the static leaves go once no call runs the program again. JAX may keep this for long."""
        self.result, self._statics = None, []

    def filled(self, outputs: Sequence[Leaf], arguments: Sequence[Leaf] = ()) -> Any:
        """The result's tree.

        **Arguments:**

        - `outputs`: what the program made.
        - `arguments`: its inputs; they may be left out if none is forwarded.
        """
        picked = outputs
        if self._pick is not None:
            picked = self._pick([*outputs, *arguments, *self._statics])
        first = self._first
        states = rebuild_plain(self._kinds, self._metas, picked[first:])
        units = [*picked[:first], *states]
        return self._unflatten(units if self._order is None else self._order(units))


def is_source(node: object) -> bool:
    return isinstance(node, Output | Forwarded | Static)


def _is_plain(node: object) -> bool:
    return isinstance(node, State) and is_plain(type(node)) and is_source(node.value)


def picker(indices: list[int], count: int) -> Any:
    """What picks items of a table; `None` if it would pick these `count`, the first ones, in their order."""
    if indices == list(range(count)):
        return None
    match indices:
        case []:
            return lambda table: ()
        case [index]:
            return lambda table: (table[index],)
        case _:
            return itemgetter(*indices)
