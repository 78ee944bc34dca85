"""The rules of `shard_map`: leaves enter and results leave by `PartitionSpec`."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._base import _errors as errors
from .._base._checks import is_shaped
from .._base._errors import (
    DivergedStateError,
    SpecError,
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
    KeyPath,
    Leaf,
    PyTree,
    SpecTree,
    StateSpecs,
)
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax._compat import tree_util
from .._state._state import State
from ._arguments import Call, Input
from ._lanes import Layout
from ._layout import OnMesh
from ._mesh import (
    by_fields,
    check_specs,
    lies_on_a_mesh,
    manual_names,
    mesh_for_traced,
    mesh_of_arrays,
    not_a_mesh,
    one_device_mesh,
    resolve_mesh,
)
from ._origins import Entered, values
from ._rules import Diverged, Mistakes, Rules, roots
from ._specs import (
    REPLICATED,
    UNDECLARED,
    OfStates,
    SpecPlacement,
    broadcast_specs,
    check_state_specs,
    choices,
    choose_specs,
    own_placements,
    placement,
    specs_of_states,
)


@dataclasses.dataclass(frozen=True)
class SpecRules(Rules):
    """The mesh and the specs of a `shard_map`.

    **Attributes:**

    - `one_device`: whether calls run on a mesh of one device, which has the names of the other's axes.
    - `only_shapes`: whether calls are only traced, so that the mesh needs no devices.
    - `names`, `inferred`: known in the rules of one call: the mesh axes that the call maps over, and the
        specs that its arguments' types carry, where the author left out `in_specs`. `mesh` is the call's mesh
        then.
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
    names: tuple[AxisName, ...] = ()
    inferred: tuple[PyTree, ...] | None = None

    what = "in_specs"

    @property
    def cacheable(self) -> bool:
        return not (self.in_specs is compat.INFER or isinstance(self.mesh, AbstractMesh))

    @property
    def has_own_mesh(self) -> bool:
        return self.one_device

    @property
    def takes_set_mesh(self) -> bool:
        return self.mesh is None

    @property
    def key(self) -> Hashable:
        return self.mesh, self.names, tuple(tree_util.tree_leaves(self.inferred))

    def __reduce__(self) -> tuple[PyTree, ...]:
        return by_fields(self)

    def check(self) -> None:
        mesh = self.mesh
        if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
            raise not_a_mesh(mesh)
        for what in ("in_specs", "out_specs"):
            specs = getattr(self, what)
            flat = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]
            for path, spec in [] if specs is compat.INFER else flat:
                if isinstance(spec, PerShard):
                    axes = spec_str(PartitionSpec(*spec.axis_names))
                    raise SpecError(
                        f"{what}{jax.tree_util.keystr(path)} is {spec!r}, which can only place States. Use "
                        f"{axes} for an array; for a State write state_in_specs={{...: {spec!r}}} or "
                        f"State(value, spec={spec!r})."
                    )
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
            specs = getattr(self, what)
            if isinstance(specs, Mapping):
                named += [(f"{what}[{errors.filter_str(f)}]", spec) for f, spec in specs.items()]
            else:
                named.append((what, specs))
        check_specs(named, mesh, names)

    def for_call(self, call: Call, traced: bool) -> "SpecRules":
        mesh = self._mesh(call.leaves, traced)
        if traced:
            mesh = mesh_for_traced(mesh, call.leaves)
        names = manual_names(mesh, self.axis_names)
        if traced and names and explicit.has_explicit_axes(mesh):
            left = explicit.left_by_vmap(mesh, names)
            if self.axis_names and left != names:
                raise SpecError(
                    "an enclosing jax.vmap maps over an array that is split over "
                    f"{quoted([name for name in names if name not in left])} of {mesh_str(mesh)}, so its "
                    "lanes use up that mesh axis. Leave `axis_names` out to map over the other axes, or "
                    "split the array differently."
                )
            names = left
        infers = self.in_specs is compat.INFER
        inferred = _inferred(mesh, names, call.args) if infers else None
        return dataclasses.replace(self, mesh=mesh, names=names, inferred=inferred)

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

    def resolve(self, name: str, call: Call) -> tuple[list[Input], Layout, "SpecRules"]:
        mesh, names = self.mesh, self.names
        assert mesh is not None
        if not names:
            raise SpecError(
                f"an enclosing shard_map already maps over every axis of {mesh_str(mesh)}. Give the outer "
                "one `axis_names` that leave some axes free."
            )
        self.check_specs(mesh, names)
        inputs = self._inputs(name, call)
        check_specs([(f"the spec of {x.path}", x.placement.spec) for x in inputs], mesh, names)
        return inputs, OnMesh(name, mesh, names, self.check_vma), self

    def _inputs(self, name: str, call: Call) -> list[Input]:
        """A record of each leaf that becomes an input."""
        declared = iter(choices(self.state_in_specs, call.named(), "state_in_specs"))
        in_specs = self.in_specs if self.inferred is None else self.inferred
        inputs: list[Input] = []
        of_states = OfStates()
        each = call.with_entries(in_specs, "shard_map in_specs", None, broadcast_specs)
        for unit, node, spec, entry in each:
            entry_name = entry.removeprefix("shard_map ")
            placements: list[SpecPlacement] = []
            if unit.kind is not None:
                chosen, placed_by = next(declared)
                if chosen is UNDECLARED:
                    chosen, placed_by = node.spec, _own_reason(node)
                placements = own_placements(node, chosen, unit.path)
                of_states.state(entry_name, spec, unit.path, node, placements)
                placements += [REPLICATED] * (len(unit.positions) - len(placements))
            elif unit.shaped or (unit.number and not unit.in_module and spec is not None):
                of_states.array(entry_name, spec)
                placements = [placement(spec)]
                by_type = entry.endswith("]") and self.inferred is not None
                placed_by = "its type" if by_type else entry_name
            else:
                continue
            for position, chosen_placement in zip(unit.positions, placements, strict=True):
                inputs.append(
                    unit.input(position, call.leaves[position], chosen_placement, placed_by)
                )
        if bad := of_states.bad():
            raise specs_of_states(name, "in_specs", "state_in_specs", bad)
        return inputs

    def entries(self, result: PyTree, root: str) -> list[Leaf]:
        return broadcast_specs(self.out_specs, result, "shard_map out_specs", root)

    def declared(self, result: PyTree, root: str) -> list[Leaf]:
        return choose_specs(self.state_out_specs, roots(result, root), "state_out_specs")

    def for_array(self, entry: Leaf, x: Leaf, path: str, mistakes: Mistakes) -> Placement:
        if entry is None:
            raise SpecError(
                f"{path} is {describe(x)}, but its out_spec is None, which only fits results without arrays "
                "outside States. Write P() or P('axis')."
            )
        return placement(entry)

    def for_state(
        self, state: State, entered: Entered | None, declared: Any, path: str, mistakes: Mistakes
    ) -> list[Placement]:
        if declared is not UNDECLARED:
            return [*own_placements(state, declared, path)]
        if entered is not None:
            as_entered = list(entered.placements)
            structure = tree_util.tree_structure
            if structure(state.value) == structure(entered.seen.value):
                return as_entered
            # `replace` has changed the structure, and nothing says which leaf is which.
            if len(set(as_entered)) == 1:
                return as_entered * len(values(state))
        return [*own_placements(state, state.spec, path)]

    def check_entries(
        self,
        name: str,
        flat: Sequence[tuple[KeyPath, Any]],
        entries: Sequence[Leaf],
        placements: Sequence[Sequence[Placement] | None],
    ) -> None:
        of_states, depth = OfStates(), 0 if is_spec(self.out_specs) else 1
        for (keys, node), entry, of_state in zip(flat, entries, placements, strict=True):
            entry_name = f"out_specs{jax.tree_util.keystr(keys[:depth])}"
            if of_state is not None:
                of_states.state(entry_name, entry, path_str(keys, f"{name}(...)"), node, of_state)
            elif is_shaped(node) or type(node) in NUMBERS:
                of_states.array(entry_name, entry)
        if bad := of_states.bad():
            raise specs_of_states(name, "out_specs", "state_out_specs", bad)

    def auxiliary(self) -> Placement:
        return REPLICATED

    def refuse(self, name: str, mistakes: Mistakes) -> None:
        if mistakes.diverged:
            raise _diverged(name, mistakes.diverged)
        if mistakes.rank:
            raise error_listing(
                SpecError,
                f"{name}: results have fewer axes than their specs have entries",
                mistakes.rank,
                "Keep an axis, as with jnp.sum(x, keepdims=True) or x[None], or use P() for a value that is "
                "the same on every shard.",
            )
        if mistakes.varying:
            axes = mistakes.varying[0].axis_names
            raise error_listing(
                SpecError,
                f"{name}: out_specs require replication, but these results vary",
                [
                    f"{x.path}: {describe(x.value)} varies over {quoted(x.axis_names)} but its out_spec is "
                    f"{spec_str(x.spec)}"
                    for x in mistakes.varying
                ],
                f"Reduce it, as with jax.lax.psum(value, {axes_argument(axes)!r}), or name {quoted(axes)} in "
                "out_specs to join the shards' parts.",
            )


def _own_reason(state: State) -> str:
    """What says where a state lies that no entry mentions."""
    if state.spec is not None:
        return "its own spec"
    return "its kind" if state.always_replicated else "default"


def _inferred(
    mesh: Mesh | AbstractMesh, names: Sequence[AxisName], args: tuple[PyTree, ...]
) -> tuple[PyTree, ...]:
    """The specs that the types of the arguments carry, as Explicit axes make them."""
    if not explicit.explicit_axes(mesh).issuperset(names):
        raise TypeError(
            f"in_specs can be left out only on a mesh of Explicit axes; this is {mesh_with_types_str(mesh)}. "
            "Write in_specs=..., one entry for each positional argument."
        )

    wanted = frozenset(names)

    def spec_of(x: Leaf) -> PartitionSpec:
        if not explicit.is_explicitly_typed(x):
            return PartitionSpec()
        return restricted(explicit.type_of(x).sharding.spec, wanted)

    return tuple(jax.tree.map(spec_of, arg, is_leaf=is_state) for arg in args)


def _diverged(name: str, bad: Sequence[Diverged]) -> DivergedStateError:
    if merged := [write for write in bad if write.state.needs_old]:
        return _policies_diverged(name, merged)
    axes = bad[0].axis_names
    names = quoted(axes)
    scatter = (
        "\nA parameter that `gather` made whole goes back to its parts, in its own dtype: return "
        "`sm.scatter(whole, model)`."
    )
    return error_listing(
        DivergedStateError,
        f"{name}: shards wrote different values to states that keep one copy",
        first_items([f"{write.item}, which keeps one copy" for write in bad]),
        "Mend it in one of three ways:\n"
        f"  1. reduce the value yourself: state.set(jax.lax.pmean(value, {axes_argument(axes)!r}));\n"
        "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a "
        "function;\n"
        f"  3. keep one value per shard: State(value, spec=sm.PerShard({names})), or a spec that names "
        f"{names}, as in state_out_specs." + scatter * any(write.is_new_parameter for write in bad),
    )


def _policies_diverged(name: str, bad: Sequence[Diverged]) -> DivergedStateError:
    """States whose policy has merged the writes, and gave a value that still differs."""
    items, advice = [], []
    for write in bad:
        if write.state.reduce == "sum":
            axes = quoted(write.axis_names)
            items.append(
                f"{write.item}: reduce='sum' adds the increments to the old value, which entered "
                f"split over {axes}"
            )
            advice.append(
                "let it leave as it entered; or write what the shards' values become, as in "
                "reduce=lambda old, new, axis_names: jax.lax.psum(new, axis_names)"
            )
        else:
            policy, axis = policy_name(write.state), axes_argument(write.axis_names)
            items.append(
                f"{write.item}: {policy} returned it, but must return the same value on every shard"
            )
            advice.append(
                f"reduce it in {policy}, as with jax.lax.psum(value, {axis!r}) or "
                f"jax.lax.all_gather(value, {axis!r}, to='invarying')"
            )
    head = (
        f"{name}: the policies of these states gave values that differ between shards, but one copy is "
        "kept"
    )
    return error_listing(DivergedStateError, head, first_items(items), listed("Mend it", advice))
