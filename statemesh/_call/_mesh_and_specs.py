"""Step 2, meshes and specs: the mesh of a call, and from prefix trees of specs a placement for every leaf."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._base import _errors as errors
from .._base._errors import (
    BatchAxisError,
    SpecError,
    StatemeshError,
    error_listing,
    filter_str,
    mesh_str,
    mesh_with_types_str,
    node_str,
    quoted,
    spec_str,
    typed_str,
)
from .._base._specs import (
    PerShard,
    Placement,
    SpecPlacement,
    canonical,
    is_axis,
    is_spec,
    mentioned,
    spec_axes,
)
from .._base._trees import describe, is_state, path_str
from .._base._types import (
    Axes,
    AxisName,
    KeyPath,
    Leaf,
    PyTree,
    PyTreeDef,
    SpecTree,
    StateSpecs,
)
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax._compat import tree_util
from .._state._filters import OfType, first_matches, to_predicate
from .._state._state import State, always_replicated, states_of


_MAKE_ONE = "Make one with `jax.make_mesh((jax.device_count(),), ('x',))`."


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A row of devices, or a mesh of them: its shape, axis names and axis types."""

    platform: str
    numbers: tuple[int, ...]
    mesh: tuple[tuple[int, ...], tuple[str, ...], tuple[AxisType, ...]] | None

    def restored(self) -> PyTree:
        """The same devices of this process's JAX."""
        present = {device.id: device for device in jax.devices(self.platform)}
        if missing := [number for number in self.numbers if number not in present]:
            raise StatemeshError(
                f"This was pickled with {self.platform} devices numbered {missing}, but this process "
                f"has {sorted(present)}. Make the mesh here and map the function over it; or leave the "
                "mesh out, and set it with jax.set_mesh(mesh)."
            )
        devices = tuple(present[number] for number in self.numbers)
        if self.mesh is None:
            return devices
        shape, names, types = self.mesh
        return Mesh(np.array(devices).reshape(shape), names, axis_types=types)


def by_fields(value: Leaf) -> tuple[Leaf, ...]:
    """The result of `__reduce__` for a dataclass of which a field may hold a mesh or devices."""
    fields = {f.name: _stored(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return _from_fields, (type(value), fields)


def _from_fields(cls: type, fields: dict[str, object]) -> PyTree:
    return cls(**{k: v.restored() if isinstance(v, _Stored) else v for k, v in fields.items()})


def _stored(value: object) -> PyTree:
    devices, mesh = value, None
    if isinstance(value, Mesh) and not value.empty:
        devices = tuple(value.devices.flat)
        mesh = value.devices.shape, value.axis_names, value.axis_types
    if isinstance(devices, tuple) and devices and all(isinstance(x, jax.Device) for x in devices):
        return _Stored(devices[0].platform, tuple(device.id for device in devices), mesh)
    return value


def resolve_mesh(
    declared: Mesh | AbstractMesh | None, axis_names: Axes, recorded: bool
) -> Mesh | AbstractMesh:
    """The mesh that was given, or the one of the context.

    **Arguments:**

    - `declared`: the mesh that the user named, if any.
    - `axis_names`: the axes that the user named; empty for all.
    - `recorded`: whether the call is recorded into a jaxpr rather than run. What runs, if only in an eager
        transformation, needs devices: those of the mesh that is set.

    **Raises:** `SpecError` when there is no mesh, or the two differ.
    """
    mesh, context = _declared_or_set(declared), compat.context_mesh()
    if context is not None and mesh.abstract_mesh != context:
        taken = compat.manual_axes(context)
        if not taken or dict(mesh.shape) != dict(context.shape):
            raise SpecError(
                f"shard_map was given {mesh_with_types_str(mesh)}, but the mesh that is set is "
                f"{mesh_with_types_str(context)}. Leave `mesh` out to use the mesh that is set, or call "
                "outside `jax.set_mesh`."
            )
        if not axis_names and taken < frozenset(context.axis_names):
            left = [name for name in mesh.axis_names if name not in taken]
            raise SpecError(
                f"shard_map was given {mesh_str(mesh)} to map over all its axes, but an enclosing shard_map "
                f"already maps over {quoted(taken)}. Leave `mesh` out, or name the axes that are left: "
                f"axis_names={{{quoted(left)}}}."
            )
        # Inside another mapped call the context says which axes that call has taken.
        mesh = context
    if recorded or isinstance(mesh, Mesh):
        return mesh
    concrete = compat.concrete_context_mesh()
    # Inside another mapped call, the mesh that is set does not show the axes that the call has taken.
    return mesh if concrete is None or concrete.abstract_mesh != mesh else concrete


def one_device_mesh(declared: Mesh | AbstractMesh | None, traced: bool) -> Mesh:
    """A mesh of one device with the names of the one that was given, or else of the context's.

    **Raises:** `SpecError` when there is no mesh, inside a mapped call, or where JAX takes no other mesh than
    the one that is set.
    """
    mesh, context = _declared_or_set(declared), compat.context_mesh()
    if taken := compat.manual_axes(context):
        raise SpecError(
            "`unsharded` runs on a mesh of one device, so it cannot be called inside another mapped call, "
            f"which maps over {quoted(sorted(taken, key=str))} already. Call it outside that call."
        )
    if traced and context is not None and context.size > 1:
        raise SpecError(
            f"`unsharded` runs on a mesh of one device, but {mesh_str(context)} is set, and JAX allows no "
            "other mesh during a trace. If shard_map was given a mesh, call `unsharded` outside "
            "`jax.set_mesh`; if it was given none, call it inside `with jax.set_mesh(mesh):` with a mesh of "
            "one device."
        )
    # A device of this process, which could not read arrays on others.
    local = mesh.local_devices if isinstance(mesh, Mesh) else jax.local_devices()
    devices = np.array(local[:1]).reshape((1,) * len(mesh.axis_names))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _declared_or_set(declared: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    mesh = compat.context_mesh() if declared is None else declared
    if mesh is None:
        raise SpecError(
            "no mesh: shard_map was given none, and none is set. Pass `mesh=...`, or call inside "
            "`with jax.set_mesh(mesh):`."
        )
    if mesh.empty:
        raise _empty_mesh(mesh)
    return mesh


def check_mesh(what: str, mesh: Any) -> None:
    """Refuse anything but a mesh that has devices."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise not_a_mesh(mesh)
    if mesh.empty:
        raise _empty_mesh(mesh, what)


def mesh_of_arrays(mesh: AbstractMesh, leaves: Sequence[Leaf]) -> Mesh:
    """The devices of an abstract mesh: those on which the arguments of a call lie.

    Of one that an eager transformation traces, its concrete value.

    **Raises:** `SpecError` when none lies on such a mesh, or one on another.
    """
    meshes: list[Mesh] = []
    for leaf in map(compat.concrete_value, leaves):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            here = leaf.sharding.mesh
            if here.abstract_mesh != mesh:
                raise SpecError(
                    f"an argument, {describe(leaf)}, lies on {mesh_str(here)}, but shard_map was given the "
                    f"AbstractMesh {mesh_str(mesh)}, which takes its devices from the arguments. Put the "
                    "arguments on a mesh with these axes, or give shard_map the mesh that they lie on."
                )
            if isinstance(here, Mesh):
                meshes.append(here)
    if not meshes:
        raise SpecError(
            f"{mesh_str(mesh)} is an AbstractMesh, which has no devices to run on. Pass arrays that lie on a "
            "mesh with these axes, as jax.device_put(x, NamedSharding(mesh, P())) puts them, or give "
            "shard_map a jax.sharding.Mesh."
        )
    return meshes[0]


def lies_on_a_mesh(leaves: Sequence[Leaf]) -> bool:
    """Whether any of these arrays lies on the devices of a mesh."""
    shardings = [getattr(x, "sharding", None) for x in leaves if isinstance(x, jax.Array)]
    return any(isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh) for s in shardings)


def mesh_for_traced(mesh: Mesh | AbstractMesh, leaves: Sequence[Leaf]) -> Mesh | AbstractMesh:
    """The mesh whose axis types suit traced arguments.

    On Explicit axes a sharding is part of every value's type. Where nothing says that the values
    around the call are typed so (no mesh in context, no such argument), Auto axes let the result
    mix with them, be carried by a scan, and be differentiated outside. In a `jax.vmap` that is not
    recorded they stay as they are: its lanes may be spread over them.
    """
    if isinstance(mesh, AbstractMesh) or not explicit.has_explicit_axes(mesh):
        return mesh
    if compat.context_mesh() is not None:
        return mesh
    typed = any(map(explicit.is_explicitly_typed, leaves))
    if typed and (compat.under_jit() or any(map(compat.is_batched, leaves))):
        return mesh
    return explicit.auto_twin(mesh)


def manual_names(mesh: Mesh | AbstractMesh, axis_names: Iterable[AxisName]) -> tuple[AxisName, ...]:
    """The axes that the call maps over, in the mesh's order."""
    wanted = frozenset(axis_names)
    if unknown := [name for name in wanted if name not in mesh.axis_names]:
        raise SpecError(
            f"axis_names has {quoted(unknown)}, but the axes of {mesh_str(mesh)} are "
            f"{quoted(mesh.axis_names)}."
        )
    taken = compat.manual_axes(mesh)
    if again := [name for name in mesh.axis_names if name in wanted & taken]:
        raise SpecError(
            f"axis_names has {quoted(again)}, which an enclosing shard_map already maps over on "
            f"{mesh_str(mesh)}. Name other axes."
        )
    return tuple(
        name for name in mesh.axis_names if name not in taken and (not wanted or name in wanted)
    )


def check_specs(
    named: Sequence[tuple[str, Any]], mesh: Mesh | AbstractMesh, names: Sequence[AxisName]
) -> None:
    """Refuse specs that name an axis the call does not map over, or one axis twice.

    **Arguments:**

    - `named`: trees of specs, each with what messages call it.

    **Raises:** `SpecError` listing all of them.
    """
    unknown: list[AxisName] = []
    unknown_items: list[str] = []
    twice_items: list[str] = []
    for what, specs in named:
        for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]:
            shown = what + jax.tree_util.keystr(path)
            if not is_spec(spec):
                raise errors.not_a_spec(shown, spec)
            used = _names_in(spec)
            if strangers := [name for name in used if name not in names]:
                unknown += strangers
                unknown_items.append(f"{shown} refers to {quoted(strangers)}: {spec_str(spec)}")
            if repeated := [name for name in dict.fromkeys(used) if used.count(name) > 1]:
                twice_items.append(f"{shown} = {spec_str(spec)} has {quoted(repeated)} twice")
    if unknown:
        left = [name for name in mesh.axis_names if name not in names]
        lacking = "that the call does not map over"
        if set(unknown).isdisjoint(left):
            lacking = "the mesh does not have"
        advice = f"The axes to map over are {quoted(names)} of {mesh_str(mesh)}"
        advice += f"; {quoted(left)} is not mapped over." if left else "."
        if PartitionSpec.UNCONSTRAINED in unknown:
            advice += " A mapped call must know how each axis is split: write None for one that is not split."
        raise error_listing(SpecError, f"specs name axes {lacking}", unknown_items, advice)
    if twice_items:
        raise error_listing(
            SpecError, "a mesh axis can split only one axis of an array", twice_items
        )


def _names_in(spec: PartitionSpec | PerShard | None) -> list[AxisName]:
    if spec is None:
        return []
    if isinstance(spec, PerShard):
        return list(spec.axis_names)
    return [name for axis in spec_axes(spec) for name in axis]


def _empty_mesh(mesh: Mesh | AbstractMesh, what: str = "shard_map") -> SpecError:
    return SpecError(f"{what} requires a non-empty mesh, but {mesh} has no devices. {_MAKE_ONE}")


def not_a_mesh(mesh: object) -> TypeError:
    return TypeError(f"mesh must be a jax.sharding.Mesh, got {typed_str(mesh)}. {_MAKE_ONE}")


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
    not_an_entry: Callable[[str, object], Exception]
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
        raise entries.not_an_entry(what, prefix)
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
        hits = first_matches([*state_specs], roots, what)
        return [UNMENTIONED if hit is None else entries[hit] for hit in hits]
    states = states_of([tree for _, tree in roots])
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
