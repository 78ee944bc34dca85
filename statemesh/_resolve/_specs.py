"""Step 2, specs: one placement for every leaf."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from .._base import errors
from .._base._nodes import is_state
from .._base._prefix import broadcast_specs
from .._base._specs import PerShard, canonical, is_spec, mentioned, written_axes
from .._base._types import AxisName, Leaf, SpecTree, StateSpecs
from .._base.errors import filter_str
from .._model._filters import OfType, first_matches, to_predicate
from .._model._state import State


@dataclasses.dataclass(frozen=True, slots=True)
class SpecPlacement:
    """Where one leaf lies on the mesh, and which array axis, if any, shards see it without.

    **Attributes:**

    - `written`: the spec as the user wrote it. One with more entries than an array has axes is a mistake,
        whatever the entries.
    - `axes`: the mesh axes that split each array axis, one entry for each of the spec's.
    - `axis_names`: all of these: the axes over which the leaf's parts are kept apart.
    """

    spec: PartitionSpec = dataclasses.field(init=False)
    written: PartitionSpec = dataclasses.field(compare=False)
    axis: int | None = None
    axes: tuple[tuple[AxisName, ...], ...] = dataclasses.field(init=False, compare=False)
    axis_names: frozenset[AxisName] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", canonical(self.written))
        object.__setattr__(self, "axes", written_axes(self.written))
        object.__setattr__(self, "axis_names", mentioned(self.spec))

    def take(self, shard: Leaf) -> Any:
        """What the shard sees of its part."""
        return shard if self.axis is None else jax.lax.squeeze(shard, (self.axis,))

    def put(self, value: Leaf) -> Any:
        """The part that a shard's value becomes."""
        return value if self.axis is None else jax.lax.expand_dims(value, (self.axis,))


Placements: TypeAlias = Sequence[SpecPlacement]
REPLICATED = SpecPlacement(PartitionSpec())


def placement(spec: PartitionSpec | PerShard | None) -> SpecPlacement:
    """The placement that a spec asks for; `None` asks for none."""
    if spec is None:
        return REPLICATED
    if isinstance(spec, PerShard):
        return SpecPlacement(PartitionSpec(spec.axis_names), axis=0)
    return SpecPlacement(spec)


def own_placements(state: State, spec: SpecTree, path: str) -> list[SpecPlacement]:
    """One placement for each leaf of a state's value, from a spec or a prefix tree of specs."""
    specs = broadcast_specs(spec, state.value, f"the spec of {path}", f"{path}.value")
    return [_for_kind(state, one) for one in specs]


def _for_kind(state: State, spec: SpecTree) -> SpecPlacement:
    if state.always_replicated and not isinstance(spec, PerShard):
        return REPLICATED
    return placement(spec)


class OfStates:
    """Finds specs that place nothing: they split arrays, but stand for States only, which go elsewhere."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, int], list[tuple[str, PartitionSpec, str, State]]] = {}
        self._of_arrays: set[tuple[str, int]] = set()

    def state(self, where: str, spec: SpecTree, path: str, state: State, own: Placements) -> None:
        """A state for which `spec` stands, and where it goes."""
        if isinstance(spec, PartitionSpec) and mentioned(spec):
            known = self._states.setdefault((where, id(spec)), [])
            if any(one.spec != canonical(spec) for one in own):
                known.append((where, spec, path, state))

    def array(self, where: str, spec: SpecTree) -> None:
        """An array that goes where `spec` says."""
        self._of_arrays.add((where, id(spec)))

    def bad(self) -> list[tuple[str, PartitionSpec, str, State]]:
        return [
            one
            for key, states in self._states.items()
            if key not in self._of_arrays
            for one in states
        ]


def check_state_specs(state_specs: StateSpecs, what: str) -> None:
    """Refuse what is no filter, and specs for a kind that every shard has whole."""
    for filter, spec in state_specs.items() if isinstance(state_specs, Mapping) else ():
        kind = filter.type if isinstance(filter, OfType) else filter
        to_predicate(filter)
        if isinstance(kind, type) and getattr(kind, "always_replicated", False):
            for one in jax.tree_util.tree_leaves(spec, is_leaf=is_spec):
                if isinstance(one, PartitionSpec) and mentioned(one):
                    raise errors.always_replicated(f"{kind.__name__} in {what}", one)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The spec of one state, and the entry that it is from; `UNDECLARED` where nothing mentions the state."""

    spec: SpecTree
    entry: str = ""


def choose_specs(
    state_specs: StateSpecs, roots: Sequence[tuple[str, Any]], what: str
) -> list[Leaf]:
    """What `state_in_specs` or `state_out_specs` says for each state of the roots, in order.

    **Returns:** specs, with `UNDECLARED` for the states that it does not mention.
    """
    return [choice.spec for choice in choices(state_specs, roots, what)]


def choices(state_specs: StateSpecs, roots: Sequence[tuple[str, Any]], what: str) -> list[Choice]:
    """The same, with the entry that each spec is from."""
    listed = [
        state
        for _, tree in roots
        for state in jax.tree_util.tree_leaves(tree, is_leaf=is_state)
        if is_state(state)
    ]
    if isinstance(state_specs, Mapping):
        entries = [Choice(spec, f"{what}[{filter_str(f)}]") for f, spec in state_specs.items()]
        hits = [hit for found in first_matches([*state_specs], roots, what) for hit in found]
        return [UNMENTIONED if hit is None else entries[hit] for hit in hits]
    if state_specs is None:
        return [UNMENTIONED] * len(listed)
    # One spec for all states means arrays that can be sharded, not keys.
    bare = Choice(state_specs, what)
    return [UNMENTIONED if state.always_replicated else bare for state in listed]


class _Undeclared:
    def __repr__(self) -> str:
        return "UNDECLARED"


UNDECLARED = _Undeclared()
UNMENTIONED = Choice(UNDECLARED)
