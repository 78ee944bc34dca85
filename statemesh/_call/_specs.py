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
    spec_str,
    typed_str,
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
from .._state._state import State, always_replicated


def not_an_axis(entry: str, axis: object) -> TypeError:
    return TypeError(
        f"{entry} is {typed_str(axis)}, not an axis. Use an int (negative ones count from the end), or None "
        "for what all lanes share."
    )


@dataclasses.dataclass(frozen=True)
class Entries:
    """A kind of leaf of prefix trees, and the errors for another leaf and for a prefix that does not fit.

    **Attributes:**

    - `head`, `for_states`, `remedy`: the words of the latter error.
    """

    is_entry: Callable[[object], bool]
    not_one: Callable[[str, object], Exception]
    error: type[Exception]
    head: str
    for_states: str
    remedy: str


SPECS = Entries(
    is_spec,
    errors.not_a_spec,
    SpecError,
    "specs must be a tree prefix of what they place",
    "placed by `state_in_specs`, `state_out_specs` or their own `spec`",
    "One spec stands for a whole subtree: P() or P('axis') in its place fits anything.",
)
AXES = Entries(
    is_axis,
    not_an_axis,
    BatchAxisError,
    "axes must be a tree prefix of what they map",
    "mapped by `state_in_axes` and `state_out_axes`",
    "One axis stands for a whole subtree: 0 or None in its place fits anything.",
)


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
    leaves, structure = tree_util.tree_flatten(
        prefix, is_leaf=lambda node: is_state(node) or entries.is_entry(node)
    )
    if all(map(entries.is_entry, leaves)):
        with contextlib.suppress(ValueError):
            pairs = zip(leaves, structure.flatten_up_to(tree), strict=True)
            return [e for e, part in pairs for _ in tree_util.tree_leaves(part, is_leaf=is_state)]
    items = list(_mismatches(entries, prefix, tree, what, root))
    raise error_listing(entries.error, entries.head, items, entries.remedy)


def _mismatches(
    entries: Entries, prefix: PyTree, tree: PyTree, what: str, root: str
) -> Iterator[str]:
    """The places where `prefix` is no prefix of `tree`, in words."""
    if entries.is_entry(prefix):
        return
    if tree_util.all_leaves([prefix]):
        raise entries.not_one(what, prefix)
    if is_state(tree):
        yield f"{what} = {prefix!r} reaches into the State {root}; States are {entries.for_states}"
        return
    kids, node = _one_level(prefix)
    tree_kids, tree_node = _one_level(tree)
    if node != tree_node:
        yield f"{what} is {node_str(prefix)}, but {root} is {node_str(tree)}"
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
    whole = state.always_replicated
    return [REPLICATED if whole and not isinstance(x, PerShard) else placement(x) for x in specs]


class OfStates:
    """Finds specs that place nothing: they split arrays, but stand for States only, which go elsewhere."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, int], list[tuple[str, PartitionSpec, str, State]]] = {}
        self._of_arrays: set[tuple[str, int]] = set()

    def state(
        self,
        placement: str,
        spec: SpecTree,
        path: str,
        state: State,
        placements: Sequence[Placement],
    ) -> None:
        """A state for which `spec` stands, and where it goes."""
        if isinstance(spec, PartitionSpec) and mentioned(spec):
            known = self._states.setdefault((placement, id(spec)), [])
            if any(x.spec != canonical(spec) for x in placements):
                known.append((placement, spec, path, state))

    def array(self, placement: str, spec: SpecTree) -> None:
        """An array that goes where `spec` says."""
        self._of_arrays.add((placement, id(spec)))

    def bad(self) -> list[tuple[str, PartitionSpec, str, State]]:
        bad = [states for key, states in self._states.items() if key not in self._of_arrays]
        return [state for states in bad for state in states]


def check_state_specs(state_specs: StateSpecs, what: str) -> None:
    """Refuse what is no filter, and specs for a kind that every shard has whole."""
    for filter, spec in state_specs.items() if isinstance(state_specs, Mapping) else ():
        kind = filter.type if isinstance(filter, OfType) else filter
        to_predicate(filter)
        if isinstance(kind, type) and getattr(kind, "always_replicated", False):
            for leaf in jax.tree_util.tree_leaves(spec, is_leaf=is_spec):
                if isinstance(leaf, PartitionSpec) and mentioned(leaf):
                    raise always_replicated(f"{kind.__name__} in {what}", leaf)


# The spec of a state, and the entry that it is from; `UNDECLARED` where nothing mentions the state.
Choice: TypeAlias = tuple[SpecTree, str]
UNDECLARED: SpecTree = object()
UNMENTIONED: Choice = UNDECLARED, ""


def choose_specs(
    state_specs: StateSpecs, roots: Sequence[tuple[str, Any]], what: str
) -> list[Leaf]:
    """What `state_in_specs` or `state_out_specs` says for each state of the roots, in order.

    **Returns:** specs, with `UNDECLARED` for the states that it does not mention.
    """
    return [spec for spec, _ in choices(state_specs, roots, what)]


def choices(state_specs: StateSpecs, roots: Sequence[tuple[str, Any]], what: str) -> list[Choice]:
    """The same, with the entry that each spec is from."""
    if isinstance(state_specs, Mapping):
        entries = [(spec, f"{what}[{filter_str(f)}]") for f, spec in state_specs.items()]
        matches = first_matches([*state_specs], roots, what)
        hits = [hit for of_root in matches for hit in of_root]
        return [UNMENTIONED if hit is None else entries[hit] for hit in hits]
    nodes = jax.tree_util.tree_leaves([tree for _, tree in roots], is_leaf=is_state)
    states = [node for node in nodes if is_state(node)]
    # One spec for all states means arrays that can be sharded, not keys.
    bare = UNMENTIONED if state_specs is None else (state_specs, what)
    return [UNMENTIONED if state.always_replicated else bare for state in states]


def specs_of_states(
    name: str, what: str, option: str, bad: Sequence[tuple[str, PartitionSpec, str, object]]
) -> SpecError:
    items = [
        f"{entry} = {spec_str(spec)} stands for {path}, a {type(state).__name__}"
        for entry, spec, path, state in bad
    ]
    spec = spec_str(bad[0][1])
    return error_listing(
        SpecError,
        f"{name}: {what} places arrays outside of States, so these specs would place nothing",
        items,
        f"Write None there, and say where States go: {option}={{...: {spec}}} or State(value, spec={spec}). "
        "A RandomState needs neither, because each shard draws from a stream of its own.",
    )
