"""What the author of a mapped call declared."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from .._base import _compat as compat
from .._base import _errors as errors
from .._base._types import AnyMesh, AxisName, Donate, Fun, PerShard, StateSpecs, is_spec
from .._model._filters import to_predicate
from .._resolve._mesh import check_specs, manual_names


@dataclasses.dataclass(frozen=True)
class Declared:
    """The arguments of `shard_map`, checked as far as they can be without a call."""

    fun: Fun
    name: str
    mesh: AnyMesh | None
    in_specs: Any
    out_specs: Any
    state_in_specs: StateSpecs
    state_out_specs: StateSpecs
    check_vma: bool
    axis_names: frozenset[AxisName]
    donate: Donate
    jit: bool


DONATE = ("none", "states", "all")


def check_declared(declared: Declared) -> None:
    """Refuse at construction whatever no call could make right."""
    if not callable(declared.fun):
        raise errors.not_callable(declared.fun)
    if declared.donate not in DONATE:
        raise errors.unknown_donate(declared.donate, DONATE)
    if declared.in_specs is None:
        raise errors.in_specs_none()
    mesh = declared.mesh
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise errors.not_a_mesh(mesh)
    for what in ("in_specs", "out_specs"):
        for path, spec in _flat_specs(getattr(declared, what)):
            if isinstance(spec, PerShard):
                raise errors.per_shard_for_array(what + jax.tree_util.keystr(path), spec)
    for what in ("state_in_specs", "state_out_specs"):
        given = getattr(declared, what)
        if isinstance(given, Mapping):
            for filter in given:
                to_predicate(filter)
    if mesh is not None:
        if mesh.empty:
            raise errors.empty_mesh(mesh)
        check_declared_specs(declared, mesh, manual_names(mesh, declared.axis_names))


def check_declared_specs(
    declared: Declared, mesh: Mesh | AbstractMesh, names: Sequence[Any]
) -> None:
    """Refuse specs that do not fit the mesh."""
    named = [("out_specs", declared.out_specs)]
    if declared.in_specs is not compat.INFER:
        named.insert(0, ("in_specs", declared.in_specs))
    for what in ("state_in_specs", "state_out_specs"):
        given = getattr(declared, what)
        if isinstance(given, Mapping):
            named += [(f"{what}[{errors.filter_str(f)}]", spec) for f, spec in given.items()]
        else:
            named.append((what, given))
    check_specs(named, mesh, names)


def _flat_specs(specs: Any) -> list[tuple[Any, Any]]:
    if specs is compat.INFER:
        return []
    return jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]
