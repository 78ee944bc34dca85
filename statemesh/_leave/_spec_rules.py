"""Step 4 for `shard_map`: results leave by `PartitionSpec`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .._base import errors
from .._base._arrays import is_shaped
from .._base._compat import tree_util
from .._base._paths import path_str
from .._base._prefix import broadcast_specs
from .._base._specs import Placement, is_spec
from .._base._types import NUMBERS, Leaf, PyTree, SpecTree, StateSpecs
from .._model._state import State
from .._resolve._specs import (
    REPLICATED,
    UNDECLARED,
    OfStates,
    choose_specs,
    own_placements,
    placement,
)
from ._origins import Entered, values
from ._rules import LeavingRules, Mistakes, Unit, roots


@dataclasses.dataclass(frozen=True)
class LeaveBySpec(LeavingRules):
    """`out_specs` and `state_out_specs`."""

    out_specs: SpecTree
    state_out_specs: StateSpecs

    def entries(self, result: PyTree, root: str) -> list[Leaf]:
        return broadcast_specs(self.out_specs, result, "shard_map out_specs", root)

    def declared(self, result: PyTree, root: str) -> list[Leaf]:
        return choose_specs(self.state_out_specs, roots(result, root), "state_out_specs")

    def for_array(self, entry: Leaf, x: Leaf, path: str, mistakes: Mistakes) -> Placement:
        if entry is None:
            raise errors.none_for_array(path, x)
        return placement(entry)

    def stays(self, where: Placement) -> bool:
        """Never: a spec of an array means to statemesh what it means to JAX."""
        return False

    def for_state(
        self, state: State, entered: Entered | None, declared: Any, path: str, mistakes: Mistakes
    ) -> list[Placement]:
        if declared is not UNDECLARED:
            return [*own_placements(state, declared, path)]
        if entered is not None:
            own = list(entered.placements)
            structure = tree_util.tree_structure
            if structure(state.value) == structure(entered.seen.value):
                return own
            # `replace` has changed the structure, and nothing says which leaf is which.
            if len(set(own)) == 1:
                return own * len(values(state))
        return [*own_placements(state, state.spec, path)]

    def check_entries(self, units: Sequence[Unit]) -> None:
        of_states, depth = OfStates(), 0 if is_spec(self.out_specs) else 1
        for one in units:
            where = f"out_specs{jax.tree_util.keystr(one.keys[:depth])}"
            if one.placements is not None:
                path = path_str(one.keys, f"{self.fun_name}(...)")
                of_states.state(where, one.entry, path, one.node, one.placements)
            elif is_shaped(one.node) or type(one.node) in NUMBERS:
                of_states.array(where, one.entry)
        if bad := of_states.bad():
            raise errors.specs_of_states(self.fun_name, "out_specs", "state_out_specs", bad)

    def auxiliary(self) -> Placement:
        return REPLICATED

    def fallback(self, declared: Any, x: Leaf, path: str) -> Placement | None:
        """None: the author has to write a spec."""
        return None

    def refuse(self, mistakes: Mistakes) -> None:
        if mistakes.diverged:
            raise errors.diverged(self.fun_name, mistakes.diverged)
        if mistakes.rank:
            raise errors.out_rank(self.fun_name, mistakes.rank)
        if mistakes.varying:
            raise errors.out_varies(self.fun_name, mistakes.varying)
