"""The rules of `shard_map`: leaves enter and results leave by `PartitionSpec`."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._base import _errors as errors
from .._base._checks import is_shaped
from .._base._errors import (
    Diverged,
    DivergedStateError,
    RankMismatch,
    SpecError,
    Varying,
    _Mesh,
    _rank_item,
    axes_argument,
    error_listing,
    first_items,
    listed,
    mesh_str,
    mesh_with_types_str,
    policy_name,
    quoted,
    spec_str,
)
from .._base._specs import PerShard, Placement, is_spec, restricted
from .._base._trees import describe, is_state, path_str
from .._base._types import (
    NUMBERS,
    AnyMesh,
    AxisName,
    Leaf,
    PyTree,
    SpecTree,
    StateSpecs,
)
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax._compat import tree_util
from .._state._state import State
from ._arguments import Arguments, Call
from ._instances import OnMesh, OnOwnMesh
from ._mesh import (
    by_fields,
    check_specs,
    lies_on_a_mesh,
    manual_names,
    mesh_for_traced,
    mesh_of_arrays,
    one_device_mesh,
    resolve_mesh,
)
from ._origins import Entered, values
from ._rules import LeavingRules, Mistakes, Resolved, ReturnedUnit, Stacked, roots
from ._specs import (
    REPLICATED,
    UNDECLARED,
    OfStates,
    broadcast_specs,
    check_state_specs,
    choices,
    choose_specs,
    own_placements,
    placement,
)


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
            raise _none_for_array(path, x)
        return placement(entry)

    def stays(self, placement: Placement) -> bool:
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

    def check_entries(self, units: Sequence[ReturnedUnit]) -> None:
        of_states, depth = OfStates(), 0 if is_spec(self.out_specs) else 1
        for one in units:
            placement = f"out_specs{jax.tree_util.keystr(one.keys[:depth])}"
            if one.placements is not None:
                path = path_str(one.keys, f"{self.fun_name}(...)")
                of_states.state(placement, one.entry, path, one.node, one.placements)
            elif is_shaped(one.node) or type(one.node) in NUMBERS:
                of_states.array(placement, one.entry)
        if bad := of_states.bad():
            raise errors.specs_of_states(self.fun_name, "out_specs", "state_out_specs", bad)

    def auxiliary(self) -> Placement:
        return REPLICATED

    def fallback(self, declared: Any, x: Leaf, path: str) -> Placement | None:
        """None: the author has to write a spec."""
        return None

    def refuse(self, mistakes: Mistakes) -> None:
        if mistakes.diverged:
            raise _diverged(self.fun_name, mistakes.diverged)
        if mistakes.rank:
            raise _out_rank(self.fun_name, mistakes.rank)
        if mistakes.varying:
            raise _out_varies(self.fun_name, mistakes.varying)


@dataclasses.dataclass(frozen=True)
class SpecRules:
    """The mesh and the specs of a `shard_map`.

    **Attributes:**

    - `one_device`: whether calls run on a mesh of one device, which has the names of the other's axes.
    - `only_shapes`: whether calls are only traced, so that the mesh needs no devices.
    """

    mesh: AnyMesh | None
    in_specs: SpecTree
    out_specs: SpecTree
    state_in_specs: StateSpecs
    state_out_specs: StateSpecs
    check_vma: bool
    axis_names: frozenset[AxisName]
    one_device: bool = False
    only_shapes: bool = False

    what = "in_specs"

    @property
    def entries_in(self) -> Any:
        return self.in_specs

    @property
    def cacheable(self) -> bool:
        return not (self.in_specs is compat.INFER or isinstance(self.mesh, AbstractMesh))

    @property
    def has_own_mesh(self) -> bool:
        return self.one_device

    @property
    def takes_set_mesh(self) -> bool:
        return self.mesh is None

    def __reduce__(self) -> tuple[PyTree, ...]:
        return by_fields(self)

    def check(self) -> None:
        mesh = self.mesh
        if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
            raise errors.not_a_mesh(mesh)
        for what in ("in_specs", "out_specs"):
            for path, spec in _flat_specs(getattr(self, what)):
                if isinstance(spec, PerShard):
                    raise _per_shard_for_array(what + jax.tree_util.keystr(path), spec)
        for what in ("state_in_specs", "state_out_specs"):
            check_state_specs(getattr(self, what), what)
        # A function may be mapped where there are no devices, if it is not called.
        if mesh is not None and not mesh.empty:
            self.check_specs(mesh, manual_names(mesh, self.axis_names))

    def check_specs(self, mesh: Mesh | AbstractMesh, names: Sequence[AxisName]) -> None:
        """Refuse specs that do not fit the mesh."""
        named = [("out_specs", self.out_specs)]
        if self.in_specs is not compat.INFER:
            named.insert(0, ("in_specs", self.in_specs))
        for what in ("state_in_specs", "state_out_specs"):
            given = getattr(self, what)
            if isinstance(given, Mapping):
                named += [(f"{what}[{errors.filter_str(f)}]", spec) for f, spec in given.items()]
            else:
                named.append((what, given))
        check_specs(named, mesh, names)

    def context(self, call: Call, traced: bool) -> "SpecContext":
        leaves = call.leaves
        mesh = self._mesh(leaves, traced)
        if traced:
            mesh = mesh_for_traced(mesh, leaves)
        names = manual_names(mesh, self.axis_names)
        if traced and names and explicit.has_explicit_axes(mesh):
            left = explicit.left_by_vmap(mesh, names)
            if self.axis_names and left != names:
                raise _axis_of_vmap([name for name in names if name not in left], mesh)
            names = left
        if self.in_specs is not compat.INFER:
            return SpecContext(self, mesh, names, self.in_specs, ())
        inferred = _inferred(mesh, names, call.args)
        return SpecContext(self, mesh, names, inferred, tuple(tree_util.tree_leaves(inferred)))

    def check_traced(self, name: str, leaves: Sequence[Leaf]) -> None:
        """Nothing: the context already refused arguments that do not fit the mesh."""

    def has_devices(self, leaves: Sequence[Leaf]) -> bool:
        return not isinstance(self.mesh, AbstractMesh) or lies_on_a_mesh(leaves)

    def of_shapes(self) -> "SpecRules":
        return dataclasses.replace(self, only_shapes=True)

    def on_one_device(self) -> "SpecRules":
        return dataclasses.replace(self, one_device=True)

    def _mesh(self, leaves: Sequence[Leaf], traced: bool) -> Mesh | AbstractMesh:
        if self.one_device:
            return one_device_mesh(self.mesh, traced)
        recorded = traced and compat.under_jit()
        mesh = resolve_mesh(self.mesh, self.axis_names, recorded)
        # Inside another mapped call the mesh has no devices, and needs none.
        needs_devices = not (self.only_shapes or recorded or compat.manual_axes(mesh))
        if isinstance(mesh, AbstractMesh) and needs_devices:
            mesh = mesh_of_arrays(mesh, leaves)
        return mesh


@dataclasses.dataclass(frozen=True, eq=False)
class SpecContext:
    """The specs of one call, and its mesh.

    **Attributes:**

    - `rules`: what the author declared.
    - `names`: the mesh axes that the call maps over.
    - `in_specs`: the declared ones, or those that the arguments' types carry.
    - `inferred`: the latter.
    """

    rules: SpecRules
    mesh: Mesh | AbstractMesh
    names: tuple[AxisName, ...]
    in_specs: SpecTree
    inferred: tuple[PartitionSpec, ...]

    looks_ahead = False

    @property
    def key(self) -> Hashable:
        return self.mesh, self.names, self.inferred

    def after(self, stacked: Sequence[Stacked], lanes: int | None) -> None:
        """No spec depends on what the function writes."""

    def resolve(self, name: str, arguments: Arguments, call: Call) -> Resolved:
        rules, mesh, names = self.rules, self.mesh, self.names
        if not names:
            raise _no_axes_left(mesh)
        rules.check_specs(mesh, names)
        placements, placed_by = self._placements(name, arguments, call)
        paths = arguments.paths()
        named = [(f"the spec of {paths[p]}", placement.spec) for p, placement in placements.items()]
        check_specs(named, mesh, names)
        binding = OnOwnMesh if rules.one_device else OnMesh
        leaving = LeaveBySpec(name, names, rules.out_specs, rules.state_out_specs)
        return Resolved(
            placements, placed_by, binding(mesh, names, rules.check_vma), leaving, by_shape=False
        )

    def _placements(
        self, name: str, arguments: Arguments, call: Call
    ) -> tuple[dict[int, Placement], dict[int, str]]:
        """The placement of every input by its position, and what says so."""
        named = arguments.named(call.args, call.kwargs)
        declared = iter(choices(self.rules.state_in_specs, named, "state_in_specs"))
        placements: dict[int, Placement] = {}
        placed_by: dict[int, str] = {}
        what = "shard_map in_specs"
        of_states = OfStates()
        each = arguments.with_entries(named, self.in_specs, what, None, broadcast_specs)
        for unit, node, spec, entry in each:
            if unit.kind is not None:
                chosen = next(declared)
                undeclared = chosen.spec is UNDECLARED
                own = own_placements(node, node.spec if undeclared else chosen.spec, unit.path)
                of_states.state(entry.removeprefix("shard_map "), spec, unit.path, node, own)
                entry = _own_reason(node) if undeclared else chosen.entry
                own += [REPLICATED] * (len(unit.positions) - len(own))
                placements.update(zip(unit.positions, own, strict=True))
                placed_by.update(dict.fromkeys(unit.positions, entry))
            elif unit.shaped or (unit.number and not unit.in_module and spec is not None):
                of_states.array(entry.removeprefix("shard_map "), spec)
                placements[unit.positions[0]] = placement(spec)
                inferred = entry.endswith("]") and self.rules.in_specs is compat.INFER
                placed_by[unit.positions[0]] = (
                    "its type" if inferred else entry.removeprefix("shard_map ")
                )
        if bad := of_states.bad():
            raise errors.specs_of_states(name, "in_specs", "state_in_specs", bad)
        return placements, placed_by


def _own_reason(state: State) -> str:
    """What says where a state lies that no entry mentions."""
    if state.spec is not None:
        return "its own spec"
    return "its kind" if state.always_replicated else "default"


def _flat_specs(specs: SpecTree) -> list[tuple[Any, Any]]:
    if specs is compat.INFER:
        return []
    return jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]


def _inferred(
    mesh: Mesh | AbstractMesh, names: Sequence[AxisName], args: tuple[PyTree, ...]
) -> tuple[PyTree, ...]:
    """The specs that the types of the arguments carry, as Explicit axes make them."""
    if not explicit.explicit_axes(mesh).issuperset(names):
        raise _cannot_infer(mesh)

    wanted = frozenset(names)

    def spec_of(x: Leaf) -> PartitionSpec:
        if not explicit.is_explicitly_typed(x):
            return PartitionSpec()
        return restricted(explicit.type_of(x).sharding.spec, wanted)

    return tuple(jax.tree.map(spec_of, arg, is_leaf=is_state) for arg in args)


def _diverged(name: str, bad: Sequence[Diverged]) -> DivergedStateError:
    if merged := [one for one in bad if one.state.needs_old]:
        return _policies_diverged(name, merged)
    axes = bad[0].axis_names
    own = quoted(axes)
    scatter = (
        "\nA parameter that `gather` made whole goes back to its parts, in its own dtype: return "
        "`sm.scatter(whole, model)`."
    )
    return error_listing(
        DivergedStateError,
        f"{name}: shards wrote different values to states that keep one copy",
        first_items([f"{one.item}, which keeps one copy" for one in bad]),
        "Mend it in one of three ways:\n"
        f"  1. reduce the value yourself: state.set(jax.lax.pmean(value, {axes_argument(axes)!r}));\n"
        "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
        "function;\n"
        f"  3. keep one value per shard: State(value, spec=sm.PerShard({own})), or a spec that names "
        f"{own}, as in state_out_specs." + scatter * any(one.is_new_parameter for one in bad),
    )


def _policies_diverged(name: str, bad: Sequence[Diverged]) -> DivergedStateError:
    """States whose policy has merged the writes, and gave a value that still differs."""
    items, mends = [], []
    for one in bad:
        if one.state.reduce == "sum":
            axes = quoted(one.axis_names)
            items.append(
                f"{one.item}: reduce='sum' adds the increments to the old value, which entered "
                f"split over {axes}"
            )
            mends.append(
                "let it leave as it entered; or write what the shards' values become, as in "
                "reduce=lambda old, new, axis_names: jax.lax.psum(new, axis_names)"
            )
        else:
            own, axis = policy_name(one.state), axes_argument(one.axis_names)
            items.append(
                f"{one.item}: {own} returned it, but must return the same value on every shard"
            )
            mends.append(
                f"reduce it in {own}, as with jax.lax.psum(value, {axis!r}) or "
                f"jax.lax.all_gather(value, {axis!r}, to='invarying')"
            )
    head = (
        f"{name}: the policies of these states gave values that differ between shards, but one copy is "
        "kept"
    )
    return error_listing(DivergedStateError, head, first_items(items), listed("Mend it", mends))


def _out_varies(name: str, bad: Sequence[Varying]) -> SpecError:
    axes = bad[0].axis_names
    return error_listing(
        SpecError,
        f"{name}: out_specs require replication, but these results vary",
        [
            f"{one.path}: {describe(one.value)} varies over {quoted(one.axis_names)} but its out_spec is "
            f"{spec_str(one.spec)}"
            for one in bad
        ],
        f"Reduce it, as with jax.lax.psum(value, {axes_argument(axes)!r}), or name {quoted(axes)} in "
        "out_specs to join the shards' parts.",
    )


def _axis_of_vmap(taken: Sequence[AxisName], mesh: _Mesh) -> SpecError:
    return SpecError(
        f"an enclosing jax.vmap maps over an array that is split over {quoted(taken)} of {mesh_str(mesh)}, "
        "so its lanes use up that mesh axis. Leave `axis_names` out to map over the other axes, or split the "
        "array differently."
    )


def _no_axes_left(mesh: _Mesh) -> SpecError:
    return SpecError(
        f"an enclosing shard_map already maps over every axis of {mesh_str(mesh)}. Give the outer one "
        "`axis_names` that leave some axes free."
    )


def _cannot_infer(mesh: _Mesh) -> TypeError:
    return TypeError(
        f"in_specs can be left out only on a mesh of Explicit axes; this is {mesh_with_types_str(mesh)}. "
        "Write in_specs=..., one entry for each positional argument."
    )


def _per_shard_for_array(placement: str, spec: Any) -> SpecError:
    axes = spec_str(PartitionSpec(*spec.axis_names))
    return SpecError(
        f"{placement} is {spec!r}, which can only place States. Use {axes} for an array; for a State write "
        f"state_in_specs={{...: {spec!r}}} or State(value, spec={spec!r})."
    )


def _out_rank(name: str, bad: Sequence[RankMismatch]) -> SpecError:
    return error_listing(
        SpecError,
        f"{name}: results have fewer axes than their specs have entries",
        map(_rank_item, bad),
        "Keep an axis, as with jnp.sum(x, keepdims=True) or x[None], or use P() for a value that is "
        "the same on every shard.",
    )


def _none_for_array(path: str, value: object) -> SpecError:
    return SpecError(
        f"{path} is {describe(value)}, but its out_spec is None, which only fits results without arrays "
        "outside States. Write P() or P('axis')."
    )
