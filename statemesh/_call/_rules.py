"""Steps 2 and 4, the rules: where arguments enter and results leave, by `PartitionSpec` or by axis."""

import dataclasses
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._base import _errors as errors
from .._base._checks import check_function, check_lane_name, is_shaped
from .._base._errors import (
    BatchAxisError,
    DivergedStateError,
    SpecError,
    StatemeshError,
    axes_argument,
    error_listing,
    filter_str,
    first_items,
    listed,
    mesh_str,
    mesh_with_types_str,
    policy_name,
    quoted,
    spec_str,
    specs_str,
)
from .._base._specs import PerShard, Placement, SpecPlacement, is_spec, restricted
from .._base._trees import describe, is_state, path_str
from .._base._types import (
    NUMBERS,
    UNNAMED,
    UNNAMED_DEVICES,
    AnyMesh,
    Axes,
    AxisName,
    AxisTree,
    Filter,
    Fun,
    KeyPath,
    Leaf,
    PyTree,
    Size,
    SpecTree,
    StateSpecs,
)
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax._compat import tree_util
from .._state._filters import to_predicate
from .._state._state import State
from ._arguments import Call, Input, Unit
from ._lanes import (
    AxesOfMap,
    Devices,
    Lanes,
    Layout,
    check_global_shapes,
    choose_axes,
    fits,
    is_size,
)
from ._layout import OnMesh
from ._mesh_and_specs import (
    REPLICATED,
    UNDECLARED,
    OfStates,
    broadcast_axes,
    broadcast_specs,
    by_fields,
    check_specs,
    check_state_specs,
    choices,
    choose_specs,
    lies_on_a_mesh,
    manual_names,
    mesh_for_traced,
    mesh_of_arrays,
    not_a_mesh,
    one_device_mesh,
    own_placements,
    placement,
    resolve_mesh,
    specs_of_states,
)
from ._tracing import Entered, values


@dataclasses.dataclass(frozen=True)
class Varying:
    """A returned array, or a written state, that varies over `axis_names`, which `spec` does not mention.

    **Attributes:**

    - `declared`: for a state the spec or axis that `state_out_specs` or `state_out_axes` declares.
    - `is_new_parameter`: whether it is a parameter that continues none of the arguments, as `gather` makes
        them.
    """

    path: str
    value: Any
    axis_names: tuple[AxisName, ...]
    spec: PartitionSpec | None
    declared: Any = None
    is_new_parameter: bool = False

    @property
    def item(self) -> str:
        axes = quoted(self.axis_names)
        return f"{self.path}: {describe(self.value)} varies over {axes} but leaves with {spec_str(self.spec)}"


@dataclasses.dataclass(slots=True)
class Mistakes:
    """Every mistake found in a result, and which states were stacked without being declared."""

    # Written states, and arrays outside States.
    diverged: list[Varying] = dataclasses.field(default_factory=list)
    varying: list[Varying] = dataclasses.field(default_factory=list)
    # What is said of arrays that have fewer axes than their specs have entries.
    rank: list[str] = dataclasses.field(default_factory=list)
    # The path, the declared axis and the array, which has no such axis.
    axes: list[tuple[str, int, Any]] = dataclasses.field(default_factory=list)
    # The path, the state, the axis it entered with and the one it is declared to leave with.
    conflicts: list[tuple[str, Any, int | None, int | None]] = dataclasses.field(
        default_factory=list
    )
    # The paths of undeclared states that lanes wrote differently, and the numbers of their inputs.
    stacked: list[tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=list)


def roots(result: PyTree, root: str) -> Sequence[tuple[str, Any]]:
    """The parts of a result, each with its path, as filters see them."""
    if type(result) is tuple:
        return [(f"{root}[{i}]", part) for i, part in enumerate(result)]
    return [(root, result)]


@dataclasses.dataclass(frozen=True)
class SpecRules:
    """What the author of a `shard_map` declared: the mesh and the specs.

    `for_call` returns the rules of one call, on the mesh of that call. They give every argument its placement
    (`resolve`), and every result (`for_array`, `for_state`). `AxisRules` has the same methods.

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
    # Whether a call with other shapes resolves differently, and needs another program.
    by_shape: ClassVar[bool] = False
    # Whether resolving needs to know what the function writes.
    looks_ahead: ClassVar[bool] = False

    @property
    def entries_in(self) -> SpecTree:
        """One entry for each positional argument, or one for all."""
        return self.in_specs

    @property
    def cacheable(self) -> bool:
        """Whether calls with equal types and trees always have the same rules."""
        return not (self.in_specs is compat.INFER or isinstance(self.mesh, AbstractMesh))

    @property
    def has_own_mesh(self) -> bool:
        """Whether calls run on a mesh of their own, whichever one is set."""
        return self.one_device

    @property
    def takes_set_mesh(self) -> bool:
        """Whether calls run on the mesh that is set, if any."""
        return self.mesh is None

    @property
    def key(self) -> Hashable:
        """What the program of a call depends on besides its arguments' structure, types and static leaves."""
        return self.mesh, self.names, tuple(tree_util.tree_leaves(self.inferred))

    def as_typed(self) -> list[str]:
        """What the author declared, as messages show it."""
        typed = [] if self.mesh is None else [mesh_str(self.mesh)]
        if self.in_specs is not compat.INFER:
            typed.append(f"in_specs={specs_str(self.in_specs)}")
        typed.append(f"out_specs={specs_str(self.out_specs)}")
        for name in ("state_in_specs", "state_out_specs"):
            if (specs := getattr(self, name)) is not None:
                typed.append(f"{name}={specs_str(specs)}")
        return typed

    def __reduce__(self) -> tuple[PyTree, ...]:
        return by_fields(self)

    def check(self) -> None:
        """Refuse at construction whatever no call could make right."""
        mesh = self.mesh
        if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
            raise not_a_mesh(mesh)
        for what, specs in self._array_specs():
            for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]:
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

    def _array_specs(self) -> list[tuple[str, SpecTree]]:
        named = [("in_specs", self.in_specs), ("out_specs", self.out_specs)]
        return [(what, specs) for what, specs in named if specs is not compat.INFER]

    def check_specs(self, mesh: Mesh | AbstractMesh, names: Sequence[AxisName]) -> None:
        """Refuse specs that do not fit the mesh."""
        named = self._array_specs()
        for what in ("state_in_specs", "state_out_specs"):
            specs = getattr(self, what)
            if isinstance(specs, Mapping):
                named += [(f"{what}[{errors.filter_str(f)}]", spec) for f, spec in specs.items()]
            else:
                named.append((what, specs))
        check_specs(named, mesh, names)

    def check_traced(self, name: str, leaves: Sequence[Leaf]) -> None:
        """Refuse arguments that cannot be used here while something is traced."""

    def for_call(self, call: Call, traced: bool) -> "SpecRules":
        """The rules of this call."""
        if self.one_device:
            mesh: Mesh | AbstractMesh = one_device_mesh(self.mesh, traced)
        else:
            recorded = traced and compat.under_jit()
            mesh = resolve_mesh(self.mesh, self.axis_names, recorded)
            # Inside another mapped call the mesh has no devices, and needs none.
            needs_devices = not (self.only_shapes or recorded or compat.manual_axes(mesh))
            if isinstance(mesh, AbstractMesh) and needs_devices:
                mesh = mesh_of_arrays(mesh, call.leaves)
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

    def after(self, fed: frozenset[str]) -> "SpecRules":
        """The rules once it is known which states lanes get their own entries of, by their paths."""
        return self

    def has_devices(self, leaves: Sequence[Leaf]) -> bool:
        """Whether it is known on which devices a call of these arguments would run."""
        return not isinstance(self.mesh, AbstractMesh) or lies_on_a_mesh(leaves)

    def of_shapes(self) -> "SpecRules":
        """The rules of the same calls where only shapes are known: a mesh without devices is enough."""
        return dataclasses.replace(self, only_shapes=True)

    def on_one_device(self) -> "SpecRules":
        """The rules of the same calls on one device."""
        return dataclasses.replace(self, one_device=True)

    def resolve(self, name: str, call: Call) -> tuple[list[Input], Layout, "Rules"]:
        """A record of each input, where the program runs, and the rules by which results leave."""
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
        """The declared entry of each leaf of the result, a State counting as one leaf."""
        return broadcast_specs(self.out_specs, result, "shard_map out_specs", root)

    def declared(self, result: PyTree, root: str) -> list[Leaf]:
        """What the author declared for each State of the result, or `UNDECLARED`."""
        return choose_specs(self.state_out_specs, roots(result, root), "state_out_specs")

    def for_array(self, entry: Leaf, x: Leaf, path: str, mistakes: Mistakes) -> Placement:
        """The placement of an array outside a State."""
        if entry is None:
            raise SpecError(
                f"{path} is {describe(x)}, but its out_spec is None, which only fits results without arrays "
                "outside States. Write P() or P('axis')."
            )
        return placement(entry)

    def for_state(
        self, state: State, entered: Entered | None, declared: Any, path: str, mistakes: Mistakes
    ) -> list[Placement]:
        """The placement of each leaf of a written state's value."""
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

    def stays(self, array: Input) -> bool:
        """Whether an array outside a State leaves as it entered, whatever is declared, if nobody wrote it.

        By specs it never does: a spec of an array means to statemesh what it means to JAX.
        """
        return False

    def check_entries(
        self,
        name: str,
        flat: Sequence[tuple[KeyPath, Any]],
        entries: Sequence[Leaf],
        placements: Sequence[Sequence[Placement] | None],
    ) -> None:
        """Refuse entries that say nothing.

        **Arguments:**

        - `flat`: the leaves of the result, a State counting as one, with their keys.
        - `entries`: the declared entry of each.
        - `placements`: where the leaves of each State go; `None` for an array.
        """
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
        """The placement of the arrays that a kind of state adds to its value. All shards share one copy."""
        return REPLICATED

    def fallback(self, declared: Any, x: Leaf, path: str) -> Placement | None:
        """The placement of a leaf that varies although its own placement keeps one copy.

        `None` where such a leaf is a mistake.
        """
        return None

    def refuse(self, name: str, mistakes: Mistakes) -> None:
        """Raise the error for the mistakes, if there are any."""
        if merged := [write for write in mistakes.diverged if write.value.needs_old]:
            raise _policies_diverged(name, merged)
        if diverged := mistakes.diverged:
            axes = diverged[0].axis_names
            names = quoted(axes)
            scatter = (
                "\nA parameter that `gather` made whole goes back to its parts, in its own dtype: return "
                "`sm.scatter(whole, model)`."
            )
            raise error_listing(
                DivergedStateError,
                f"{name}: shards wrote different values to states that keep one copy",
                first_items([f"{write.item}, which keeps one copy" for write in diverged]),
                "Mend it in one of three ways:\n"
                f"  1. reduce the value yourself: state.set(jax.lax.pmean(value, {axes_argument(axes)!r}));\n"
                "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', "
                "or a function;\n"
                f"  3. keep one value per shard: State(value, spec=sm.PerShard({names})), or a spec that "
                f"names {names}, as in state_out_specs."
                + scatter
                * any(write.is_new_parameter for write in diverged),
            )
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


def _policies_diverged(name: str, bad: Sequence[Varying]) -> DivergedStateError:
    """States whose policy has merged the writes, and gave a value that still differs."""
    items, advice = [], []
    for write in bad:
        if write.value.reduce == "sum":
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
            policy, axis = policy_name(write.value), axes_argument(write.axis_names)
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


_AXIS_ON_BOTH_SIDES = (
    "state_out_axes={0: filter}, and state_in_axes={0: filter} from the next call on"
)


def is_single(state: State) -> bool:
    """Whether a state's value is made of scalars: one key, not one for each lane."""
    return all(not np.ndim(x) for x in values(state))


def _from_start(axis: int | None, x: Leaf) -> int | None:
    return None if axis is None else axis % (np.ndim(x) + 1)


POLICIES = ("raise", "warn", "ignore", "auto")


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """What the author of a `pmap2` or a `vmap2` declared: the axes. Its methods are those of `SpecRules`.

    **Attributes:**

    - `carrier`: what the lanes run on: devices, or one `vmap`.
    - `state_in`, `state_out`: filters, each with its axis.
    - `unexpected`: what becomes of an undeclared state to which lanes wrote different values.
    - `fed`, `replicated`: known in the rules of one call: the paths of undeclared states of which each lane
        gets its own entry, and of states that are declared to enter without a lane axis.
    """

    transform: str
    carrier: Lanes | Devices
    in_axes: AxisTree
    out_axes: AxisTree
    axis_name: Any
    axis_size: Size | None
    state_in: Sequence[tuple[Filter, int | None]]
    state_out: Sequence[tuple[Filter, int | None]]
    unexpected: str = "raise"
    global_shapes: tuple[tuple[int, ...] | None, ...] | None = None
    fed: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()

    what = "in_axes"
    takes_set_mesh: ClassVar[bool] = False
    cacheable: ClassVar[bool] = True
    key: ClassVar[Hashable] = None

    @property
    def entries_in(self) -> AxisTree:
        return self.in_axes

    @property
    def names(self) -> tuple[AxisName, ...]:
        return (self.axis_name,)

    @property
    def has_own_mesh(self) -> bool:
        return self.carrier.has_mesh

    @property
    def looks_ahead(self) -> bool:
        return self.unexpected == "auto"

    @property
    def by_shape(self) -> bool:
        return self.looks_ahead or self.carrier.has_mesh

    def as_typed(self) -> list[str]:
        """What the author declared, as messages show it."""
        typed = [f"in_axes={specs_str(self.in_axes)}", f"out_axes={specs_str(self.out_axes)}"]
        if self.axis_name not in (UNNAMED, UNNAMED_DEVICES):
            typed.append(f"axis_name={self.axis_name!r}")
        for name, pairs in (("state_in_axes", self.state_in), ("state_out_axes", self.state_out)):
            if pairs:
                entries = (f"{axis}: {filter_str(filter)}" for filter, axis in pairs)
                typed.append(f"{name}={{{', '.join(entries)}}}")
        return typed

    def check(self) -> None:
        if self.unexpected not in POLICIES:
            raise errors.unknown_choice("unexpected_out_state_mapping", self.unexpected, POLICIES)
        size = self.axis_size
        if size is not None and not is_size(size):
            raise bad_axis_size("axis_size", size)
        check_lane_name(self.transform, self.axis_name)
        if self.has_own_mesh and not isinstance(self.axis_name, str):
            expected = (
                "a string, as in axis_name='data': JAX has no other names for the axes of devices"
            )
            raise errors.invalid_argument(self.transform, "axis_name", self.axis_name, expected)
        for filter, _ in (*self.state_in, *self.state_out):
            to_predicate(filter)
        self.carrier.check(self.transform)

    def check_traced(self, name: str, leaves: Sequence[Leaf]) -> None:
        if self.has_own_mesh and explicit.explicit_around(leaves):
            raise BatchAxisError(
                f"{name}: pmap2 runs on a mesh of its own, and JAX cannot mix its results with arrays on "
                "Explicit mesh axes during a trace. Call it outside the trace; or call it outside "
                "`jax.set_mesh` and on arrays that do not lie on such a mesh; or use shard_map, which runs "
                "on the mesh that is set."
            )

    def for_call(self, call: Call, traced: bool) -> "AxisRules":
        return self

    def has_devices(self, leaves: Sequence[Leaf]) -> bool:
        return True

    def of_shapes(self) -> "AxisRules":
        return self

    def on_one_device(self) -> "AxisRules":
        return dataclasses.replace(self, carrier=self.carrier.on_one_device(), global_shapes=None)

    def after(self, fed: frozenset[str]) -> "AxisRules":
        return dataclasses.replace(self, fed=fed)

    def placement(self, axis: int | None, ndim: int) -> Placement:
        """The placement of an array of so many axes that has its lanes on this one."""
        return self.carrier.placement(self.axis_name, axis, ndim)

    def resolve(self, name: str, call: Call) -> tuple[list[Input], Layout, "Rules"]:
        entering, replicated = self._axes(name, call)
        leaves = call.leaves
        mapped = [(unit.path, axis, leaves[p]) for unit, p, axis, _ in entering if axis is not None]
        layout = self.carrier.bind(name, self.axis_name, mapped, self.axis_size, self.looks_ahead)
        if self.global_shapes is not None:
            axes = {position: axis for _, position, axis, _ in entering}
            lanes = layout.sizes[self.axis_name]
            check_global_shapes(name, self.global_shapes, call, axes, lanes)
        inputs = [
            unit.input(p, leaves[p], self.placement(axis, np.ndim(leaves[p])), placed_by)
            for unit, p, axis, placed_by in entering
        ]
        return inputs, layout, dataclasses.replace(self, replicated=replicated)

    def _axes(
        self, name: str, call: Call
    ) -> tuple[list[tuple[Unit, int, int | None, str]], frozenset[str]]:
        """Each leaf that becomes an input: its unit, its position, its axis and what says so.

        And the paths of the states that are declared to have no axis.
        """
        state_axes = iter(choose_axes(self.state_in, call.named(), "state_in_axes"))
        entering: list[tuple[Unit, int, int | None, str]] = []
        replicated: set[str] = set()
        of_states: dict[str, list[tuple[str, int, str, State]]] = {}
        of_arrays: set[str] = set()
        of_map = self.in_axes if isinstance(self.in_axes, AxesOfMap) else None
        first = 0 if of_map is None else -1
        for unit, node, entry, entry_name in call.with_entries(
            self.in_axes, self.what, 0, broadcast_axes, first
        ):
            if unit.kind is not None:
                declared = next(state_axes)
                if declared is None:
                    replicated.add(unit.path)
                axis, placed_by = self._for_entering(unit.path, node, declared)
                if entry is not None and entry != axis:
                    of_states.setdefault(entry_name, []).append(
                        (entry_name, entry, unit.path, node)
                    )
                for k, position in enumerate(unit.positions):
                    # What a kind adds to the value has no lane axis.
                    of_leaf = axis if k < len(values(node)) else None
                    entering.append((unit, position, of_leaf, placed_by))
            elif unit.shaped or (unit.number and not unit.in_module and entry is not None):
                entering.append((unit, unit.positions[0], entry, entry_name))
                if entry is not None:
                    of_arrays.add(entry_name)
        bad = [
            state
            for entry_name, states in of_states.items()
            if entry_name not in of_arrays
            for state in states
        ]
        # The default stands for every argument, and so does the one axis of a `Map`.
        if bad and not (of_map.one_for_all if of_map else self.in_axes == 0):
            lanes = f"say which States have lanes: state_in_axes={{{bad[0][1]}: filter}}"
            if of_map is not None:
                lanes = "keep States that have lanes in the module of the Map"
            raise error_listing(
                BatchAxisError,
                f"{name}: in_axes maps arrays outside of States, so these axes would map nothing",
                [
                    f"{entry} = {axis} stands for {path}, a {type(state).__name__}"
                    for entry, axis, path, state in bad
                ],
                f"Write None there, and {lanes}. A RandomState needs neither, because each lane draws from a "
                "stream of its own.",
            )
        return entering, frozenset(replicated)

    def _for_entering(self, path: str, state: State, declared: Any) -> tuple[int | None, str]:
        """The axis with which a state enters, and what says so."""
        if state.always_replicated and is_single(state):
            # One key serves all lanes: each gets its own stream of it.
            return 0 if declared is UNDECLARED and path in self.fed else None, "its kind"
        if declared is not UNDECLARED:
            return declared, f"state_in_axes[{declared}]"
        if path in self.fed:
            return 0, "unexpected_out_state_mapping='auto'"
        return None, "default"

    def entries(self, result: PyTree, root: str) -> list[Leaf]:
        return broadcast_axes(self.out_axes, result, "out_axes", root)

    def declared(self, result: PyTree, root: str) -> list[Leaf]:
        return choose_axes(self.state_out, roots(result, root), "state_out_axes")

    def for_array(self, entry: Leaf, x: Leaf, path: str, mistakes: Mistakes) -> Placement:
        return self._checked(entry, x, path, mistakes)

    def stays(self, array: Input) -> bool:
        """What all lanes share stays: with one axis more at each call, no model could be fed back."""
        return array.in_module and array.placement.axis is None

    def for_state(
        self, state: State, entered: Entered | None, declared: Any, path: str, mistakes: Mistakes
    ) -> list[Placement]:
        leaves = values(state)
        into = [] if entered is None else [placement.axis for placement in entered.placements]
        if entered is None or all(axis is None for axis in into):
            # One key serves all lanes, however many: it never has a lane axis.
            is_key = entered is not None and state.always_replicated and is_single(state)
            axis = None if declared is UNDECLARED or is_key else declared
            return [self._checked(axis, x, path, mistakes) for x in leaves]
        if len(leaves) > len(into):
            return [self._checked(into[0], x, path, mistakes) for x in leaves]
        if declared is not UNDECLARED and any(
            declared is None or _from_start(declared, x) != _from_start(axis, x)
            for x, axis in zip(leaves, into, strict=False)
        ):
            mistakes.conflicts.append((path, state, into[0], declared))
        placements = list(entered.placements)
        for k, x in enumerate(leaves):
            if into[k] is not None:
                placements[k] = self._checked(into[k], x, path, mistakes)
        return placements

    def check_entries(self, *_: Any) -> None:
        """An axis that stands for States alone is no mistake: the default axis of every result is 0."""

    def auxiliary(self) -> Placement:
        return self.placement(None, 0)

    def fallback(self, declared: Any, x: Leaf, path: str) -> Placement | None:
        """Axis 0, where the author allows it and did not declare the state to be equal in all lanes."""
        if declared is not UNDECLARED or path in self.replicated or self.unexpected == "raise":
            return None
        return self.placement(0, np.ndim(x) + 1)

    def refuse(self, name: str, mistakes: Mistakes) -> None:
        if mistakes.axes:
            raise error_listing(
                BatchAxisError,
                f"{name}: results have too few axes for where their lanes should go",
                [
                    f"{path}: {describe(x)} in each lane, with lanes to go on axis {axis}"
                    for path, axis, x in mistakes.axes
                ],
                "With the lanes a result has one axis more than in each lane; 0 always fits.",
            )
        if mistakes.conflicts:
            raise error_listing(
                BatchAxisError,
                f"{name}: states enter on one axis and leave on another",
                [
                    f"{path}: {describe(state)} enters on axis {into} but leaves on axis {out}"
                    for path, state, into, out in mistakes.conflicts
                ],
                "A state leaves on the axis that state_in_axes gives it: leave it out of state_out_axes, or "
                "give it the same axis there.",
            )
        to_none = [
            write
            for write in mistakes.diverged
            if write.declared is None
            or (write.declared is UNDECLARED and write.path in self.replicated)
        ]
        diverged = to_none or mistakes.diverged
        if merged := [write for write in diverged if write.value.needs_old]:
            raise _lane_policies_diverged(name, merged, self.axis_name)
        if diverged:
            if to_none:
                head = "states that state_out_axes declares to be the same in all (axis None)"
                advice = (
                    f"Reduce the value, as with {self._pmean}; or declare how writes are merged, "
                    "State(value, reduce='mean'); or give the states an axis: state_out_axes={0: filter}. A "
                    "NonBatchState cannot have an axis: use another kind of state."
                )
            else:
                head = "states without a declared axis"
                advice = (
                    "Mend it in one of three ways:\n"
                    f"  1. keep one value per lane: {_AXIS_ON_BOTH_SIDES};\n"
                    "  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', "
                    "'min', or a function;\n"
                    f"  3. reduce the value before it is set, as with {self._pmean}."
                )
            raise error_listing(
                BatchAxisError,
                f"{name}: lanes wrote different values to {head}",
                first_items([f"{write.path}: {describe(write.value)}" for write in diverged]),
                advice,
            )
        if mistakes.varying:
            raise error_listing(
                BatchAxisError,
                f"{name}: out_axes=None is for results that are the same in all lanes, but",
                [
                    f"{write.path}: {describe(write.value)} differs between lanes"
                    for write in mistakes.varying
                ],
                f"Reduce it, as with {self._pmean}, or give it an axis: out_axes=0.",
            )
        if mistakes.stacked and self.unexpected == "warn":
            text = listed(
                f"{name}: lanes wrote different values to states without a declared axis, and these were "
                "stacked on axis 0",
                [path for path, _ in mistakes.stacked],
                "Declare it: state_out_axes={0: filter}.",
            )
            warnings.warn(text, stacklevel=2)

    @property
    def _pmean(self) -> str:
        """Code that reduces a value over the lanes; if they have no name, it gives them one."""
        if self.axis_name in (UNNAMED, UNNAMED_DEVICES):
            return "jax.lax.pmean(value, 'lanes') with axis_name='lanes'"
        return f"jax.lax.pmean(value, {self.axis_name!r})"

    def _checked(self, axis: int | None, x: Leaf, path: str, mistakes: Mistakes) -> Placement:
        """The placement with the lanes on this axis; a mistake where the array has no such axis."""
        ndim = np.ndim(x) + 1
        if axis is not None and not fits(axis, ndim):
            mistakes.axes.append((path, axis, x))
            axis = None
        return self.placement(axis, ndim)


def _lane_policies_diverged(name: str, bad: Sequence[Varying], axis: AxisName) -> BatchAxisError:
    """States whose policy has merged the writes, and gave a value that still differs."""
    shown = "without a name" if axis in (UNNAMED, UNNAMED_DEVICES) else repr(axis)
    policies = [policy_name(write.value) for write in bad]
    return error_listing(
        BatchAxisError,
        f"{name}: the policies of these states gave values that differ between lanes ({shown}), but one copy "
        "is kept",
        first_items(
            [
                f"{write.path}: {describe(write.value)}: {policy} returned it, but must return the same "
                "value in every lane"
                for write, policy in zip(bad, policies, strict=True)
            ]
        ),
        listed(
            "Mend it",
            [
                f"reduce it in {policy}, as with jax.lax.psum(value, axis_names)"
                for policy in policies
            ],
            f"Or keep one value per lane: {_AXIS_ON_BOTH_SIDES}.",
        ),
    )


def bad_axis_size(what: str, size: object) -> StatemeshError:
    return StatemeshError(f"{what}={size!r} is not a positive int.")


Rules: TypeAlias = SpecRules | AxisRules
"""What the author declared, by spec or by axis. Both classes have the same methods."""


def in_order(rules: Rules, axis_names: Axes) -> tuple[AxisName, ...]:
    """These axes, in the order of the mesh."""
    return tuple(name for name in rules.names if name in axis_names)


DONATE = ("none", "states", "all")


@dataclasses.dataclass(frozen=True)
class Declared:
    """The arguments of a mapped call, checked as far as they can be without a call.

    **Attributes:**

    - `transform`: what the author wrote: `shard_map`, `pmap2`, `vmap2`.
    - `rules`: where arguments and results go.
    - `donate`: whose memory is given up: a word, or the positions of arguments.
    - `static`: the positions of arguments that come in boxes, and are constants of the program.
    """

    transform: str
    fun: Fun
    name: str
    rules: Rules
    donate: Any = "none"
    jit: bool = True
    static: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse whatever no call could make right."""
        check_function(self.transform, self.fun)
        self.rules.check()
