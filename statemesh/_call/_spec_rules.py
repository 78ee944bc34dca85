"""Step 2 for `shard_map`: leaves enter by `PartitionSpec`."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._arguments import Arguments, Call
from .._base import _compat as compat
from .._base import _explicit as explicit
from .._base import errors
from .._base._compat import tree_util
from .._base._nodes import is_state
from .._base._prefix import broadcast_specs
from .._base._specs import PerShard, Placement, is_spec, restricted
from .._base._stored import by_fields
from .._base._types import AnyMesh, AxisName, Leaf, PyTree, SpecTree, StateSpecs
from .._leave._spec_rules import LeaveBySpec
from .._model._state import State
from .._resolve._mesh import (
    check_specs,
    lies_on_a_mesh,
    manual_names,
    mesh_for_traced,
    mesh_of_arrays,
    one_device_mesh,
    resolve_mesh,
)
from .._resolve._specs import (
    REPLICATED,
    UNDECLARED,
    OfStates,
    check_state_specs,
    choices,
    own_placements,
    placement,
)
from ._on_mesh import OnMesh, OnOwnMesh
from ._rules import Resolved, Stacked


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
                    raise errors.per_shard_for_array(what + jax.tree_util.keystr(path), spec)
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
                raise errors.axis_of_vmap([name for name in names if name not in left], mesh)
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
            raise errors.no_axes_left(mesh)
        rules.check_specs(mesh, names)
        placements, placed_by = self._placements(name, arguments, call)
        paths = arguments.paths()
        named = [(f"the spec of {paths[p]}", where.spec) for p, where in placements.items()]
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
        raise errors.cannot_infer(mesh)

    wanted = frozenset(names)

    def spec_of(x: Leaf) -> PartitionSpec:
        if not explicit.is_explicitly_typed(x):
            return PartitionSpec()
        return restricted(explicit.type_of(x).sharding.spec, wanted)

    return tuple(jax.tree.map(spec_of, arg, is_leaf=is_state) for arg in args)
