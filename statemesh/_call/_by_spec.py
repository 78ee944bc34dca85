"""Where leaves go by `PartitionSpec`: the rules of `shard_map`."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._arguments import Arguments
from .._base import _compat as compat
from .._base import _errors as errors
from .._base import _explicit as explicit
from .._base._compat import tree_util
from .._base._prefix import broadcast_specs
from .._base._stored import by_fields
from .._base._types import (
    AnyMesh,
    AxisName,
    PerShard,
    Place,
    StateSpecs,
    is_spec,
    is_state,
    restricted,
)
from .._exit import Wrong
from .._leave import roots
from .._match import Entered, values
from .._model._state import State
from .._resolve._mesh import (
    check_specs,
    manual_names,
    mesh_for_traced,
    mesh_of_arrays,
    one_device_mesh,
    resolve_mesh,
)
from .._resolve._specs import (
    REPLICATED,
    UNSAID,
    check_state_specs,
    choose_specs,
    own_placements,
    placement,
)
from ._binding import Binding, OnMesh, OnOwnMesh


@dataclasses.dataclass(frozen=True)
class BySpec:
    """What `shard_map` was told of specs and mesh; `one_device`: in place of the mesh, one of its names."""

    mesh: AnyMesh | None
    in_specs: Any
    out_specs: Any
    state_in_specs: StateSpecs
    state_out_specs: StateSpecs
    check_vma: bool
    axis_names: frozenset[AxisName]
    one_device: bool = False

    what = "in_specs"

    @property
    def entries_in(self) -> Any:
        return self.in_specs

    @property
    def steady(self) -> bool:
        return not (self.in_specs is compat.INFER or isinstance(self.mesh, AbstractMesh))

    @property
    def has_own_mesh(self) -> bool:
        return self.one_device

    @property
    def takes_set_mesh(self) -> bool:
        return self.mesh is None

    def __reduce__(self) -> tuple[Any, ...]:
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
        # Code that is not called may have been made where there are no devices.
        if mesh is not None and not mesh.empty:
            self._check_specs(mesh, manual_names(mesh, self.axis_names))

    def _check_specs(self, mesh: Mesh | AbstractMesh, names: Sequence[AxisName]) -> None:
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

    def ground(
        self, args: tuple[Any, ...], leaves: Sequence[Any], traced: bool
    ) -> tuple["BySpec", Hashable]:
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
            return self, (mesh, names, ())
        inferred = _inferred(mesh, names, args)
        told = dataclasses.replace(self, in_specs=inferred)
        return told, (mesh, names, tuple(tree_util.tree_leaves(inferred)))

    def check_traced(self, name: str, leaves: Sequence[Any]) -> None:
        """Nothing: what does not fit the mesh was refused when that was found."""

    def _mesh(self, leaves: Sequence[Any], traced: bool) -> Mesh | AbstractMesh:
        if self.one_device:
            return one_device_mesh(self.mesh, traced)
        recorded = traced and compat.under_jit()
        mesh = resolve_mesh(self.mesh, self.axis_names, recorded)
        # The mesh of a mapped call around has no devices; nor needs it any.
        if isinstance(mesh, AbstractMesh) and not (recorded or compat.manual_axes(mesh)):
            mesh = mesh_of_arrays(mesh, leaves)
        return mesh

    def resolve(
        self,
        name: str,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        ground: Any,
    ) -> tuple[dict[int, Place], Binding, "BySpec"]:
        mesh, names, _ = ground
        if not names:
            raise errors.no_axes_left(mesh)
        self._check_specs(mesh, names)
        placements = self._arriving(arguments, args, kwargs)
        paths = {p: unit.path for unit in arguments.flat_units() for p in unit.positions}
        named = [(f"the spec of {paths[p]}", where.spec) for p, where in placements.items()]
        check_specs(named, mesh, names)
        binding = OnOwnMesh if self.one_device else OnMesh
        return placements, binding(mesh, names, self.check_vma), self

    def _arriving(
        self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, Place]:
        named = arguments.named(args, kwargs)
        said = iter(choose_specs(self.state_in_specs, named, "state_in_specs"))
        placements: dict[int, Place] = {}
        what = f"shard_map {self.what}"
        each = arguments.with_entries(named, self.in_specs, what, None, broadcast_specs)
        for unit, node, spec in each:
            if unit.kind is not None:
                chosen = next(said)
                own = own_placements(node, node.spec if chosen is UNSAID else chosen, unit.path)
                own += [REPLICATED] * (len(unit.positions) - len(own))
                placements.update(zip(unit.positions, own, strict=True))
            elif unit.shaped or (unit.number and not unit.in_module and spec is not None):
                placements[unit.positions[0]] = placement(spec)
        return placements

    def key(self, arrays: Sequence[Any]) -> Hashable:
        """Nothing: whatever the shapes, the specs are the same."""
        return ()

    def reconsidered(self, program: Any, arrays: Sequence[Any]) -> "BySpec":
        """The same: no spec depends on what the function does."""
        return self

    def alone(self) -> "BySpec":
        return dataclasses.replace(self, one_device=True)

    def entries(self, result: Any, root: str) -> list[Any]:
        return broadcast_specs(self.out_specs, result, "shard_map out_specs", root)

    def said(self, result: Any, root: str) -> list[Any]:
        return choose_specs(self.state_out_specs, roots(result, root), "state_out_specs")

    def for_array(self, entry: Any, x: Any, path: str, wrong: Wrong) -> Place:
        if entry is None:
            raise errors.none_for_array(path, x)
        return placement(entry)

    def leaves_as_it_came(self, where: Place) -> bool:
        """Never: of arrays a spec says what it says to JAX."""
        return False

    def for_state(
        self, state: State, entered: Entered | None, said: Any, path: str, wrong: Wrong
    ) -> list[Place]:
        if said is not UNSAID:
            return [*own_placements(state, said, path)]
        if entered is not None:
            own = list(entered.placements)
            structure = tree_util.tree_structure
            if structure(state.value) == structure(entered.seen.value):
                return own
            # `replace` has changed the structure, and nothing says which leaf is which.
            if len(set(own)) == 1:
                return own * len(values(state))
        return [*own_placements(state, state.spec, path)]

    def beside(self) -> Place:
        return REPLICATED

    def otherwise(self, said: Any, x: Any, path: str) -> Place | None:
        """Nowhere: a spec is asked for."""
        return None

    def refuse(self, fun_name: str, wrong: Wrong) -> None:
        if wrong.diverged:
            raise errors.diverged(fun_name, wrong.diverged)
        if wrong.rank:
            raise errors.out_rank(fun_name, wrong.rank)
        if wrong.varying:
            raise errors.out_varies(fun_name, wrong.varying)


def _flat_specs(specs: Any) -> list[tuple[Any, Any]]:
    if specs is compat.INFER:
        return []
    return jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]


def _inferred(
    mesh: Mesh | AbstractMesh, names: Sequence[AxisName], args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The specs that the types of the arguments carry, as Explicit axes make them."""
    if not explicit.explicit_axes(mesh).issuperset(names):
        raise errors.cannot_infer(mesh)

    wanted = frozenset(names)

    def spec_of(x: Any) -> PartitionSpec:
        if not explicit.is_explicitly_typed(x):
            return PartitionSpec()
        return restricted(explicit.type_of(x).sharding.spec, wanted)

    return tuple(jax.tree.map(spec_of, arg, is_leaf=is_state) for arg in args)
