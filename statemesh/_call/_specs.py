"""Step 2, specs: one placement for every leaf, from prefix trees of specs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from .._base import _errors as errors
from .._base._errors import (
    BatchAxisError,
    SpecError,
    error_listing,
    filter_str,
    node_str,
)
from .._base._specs import PerShard, Placement, canonical, is_axis, is_spec, mentioned, written_axes
from .._base._trees import is_state, path_str
from .._base._types import (
    AxisName,
    KeyPath,
    Leaf,
    PyTree,
    PyTreeDef,
    SpecTree,
    StateSpecs,
)
from .._jax._compat import tree_util
from .._state._filters import OfType, first_matches, to_predicate
from .._state._state import State


def _prefix_mismatch(bad: Sequence[tuple[str, object, str, object]]) -> SpecError:
    return error_listing(
        SpecError,
        "specs must be a tree prefix of what they place",
        _prefix_items(bad, "placed by `state_in_specs`, `state_out_specs` or their own `spec`"),
        "One spec stands for a whole subtree: P() or P('axis') in its place fits anything.",
    )


def _axes_prefix_mismatch(bad: Sequence[tuple[str, object, str, object]]) -> BatchAxisError:
    return error_listing(
        BatchAxisError,
        "axes must be a tree prefix of what they map",
        _prefix_items(bad, "mapped by `state_in_axes` and `state_out_axes`"),
        "One axis stands for a whole subtree: 0 or None in its place fits anything.",
    )


def _prefix_items(bad: Sequence[tuple[str, object, str, object]], how: str) -> list[str]:
    return [
        f"{what} = {prefix!r} reaches into the State {root}; States are {how}"
        if is_state(tree)
        else f"{what} is {node_str(prefix)}, but {root} is {node_str(tree)}"
        for what, prefix, root, tree in bad
    ]


Mismatch: TypeAlias = tuple[str, PyTree, str, PyTree]
"""What messages call a node of a prefix tree, that node, and the same of the tree that it does not fit."""


@dataclasses.dataclass(frozen=True)
class Entries:
    """A kind of leaf of prefix trees, and the errors for another leaf and for a prefix that does not fit."""

    is_entry: Callable[[object], bool]
    not_one: Callable[[str, object], Exception]
    mismatch: Callable[[list[Mismatch]], Exception]


SPECS = Entries(is_spec, errors.not_a_spec, _prefix_mismatch)
AXES = Entries(is_axis, errors.not_an_axis, _axes_prefix_mismatch)


def broadcast_prefix(
    entries: Entries, prefix: PyTree, tree: PyTree, what: str, root: str
) -> list[Leaf]:
    """One entry for each leaf of `tree`, a State counting as one leaf.

    **Arguments:**

    - `entries`: what the leaves of `prefix` are.
    - `prefix`: a tree prefix of `tree`.
    - `what`, `root`: how messages name the two, such as `in_specs[0]` and `model`.

    **Raises:** the error of `entries` that lists every place where `prefix` is no prefix.
    """
    # Not `jax.tree.broadcast`: it rebuilds the nodes of `tree` with other leaves, which some classes refuse.
    found, structure = tree_util.tree_flatten(
        prefix, is_leaf=lambda node: is_state(node) or entries.is_entry(node)
    )
    if all(map(entries.is_entry, found)):
        with contextlib.suppress(ValueError):
            pairs = zip(found, structure.flatten_up_to(tree), strict=True)
            return [e for e, part in pairs for _ in tree_util.tree_leaves(part, is_leaf=is_state)]
    raise entries.mismatch(list(_mismatches(entries, prefix, tree, what, root)))


def _mismatches(
    entries: Entries, prefix: PyTree, tree: PyTree, what: str, root: str
) -> Iterator[Mismatch]:
    """The places where `prefix` is no prefix of `tree`."""
    if entries.is_entry(prefix):
        return
    if tree_util.all_leaves([prefix]):
        raise entries.not_one(what, prefix)
    kids, node = _one_level(prefix)
    tree_kids, tree_node = _one_level(tree)
    if is_state(tree) or node != tree_node:
        yield what, prefix, root, tree
        return
    for (key, kid), (tree_key, tree_kid) in zip(kids, tree_kids, strict=True):
        yield from _mismatches(
            entries, kid, tree_kid, path_str(key, what), path_str(tree_key, root)
        )


def broadcast_specs(prefix: SpecTree, tree: PyTree, what: str, root: str) -> list[SpecTree]:
    """One spec for each leaf of `tree`, a State counting as one leaf."""
    return broadcast_prefix(SPECS, prefix, tree, what, root)


def broadcast_axes(prefix: PyTree, tree: PyTree, what: str, root: str) -> list[int | None]:
    """One axis, or `None`, for each leaf of `tree`, a State counting as one leaf."""
    return broadcast_prefix(AXES, prefix, tree, what, root)


def _one_level(tree: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], PyTreeDef]:
    """The children of a node with their keys, and the node without them."""
    return tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


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

    def state(
        self, placement: str, spec: SpecTree, path: str, state: State, own: Sequence[Placement]
    ) -> None:
        """A state for which `spec` stands, and where it goes."""
        if isinstance(spec, PartitionSpec) and mentioned(spec):
            known = self._states.setdefault((placement, id(spec)), [])
            if any(one.spec != canonical(spec) for one in own):
                known.append((placement, spec, path, state))

    def array(self, placement: str, spec: SpecTree) -> None:
        """An array that goes where `spec` says."""
        self._of_arrays.add((placement, id(spec)))

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
