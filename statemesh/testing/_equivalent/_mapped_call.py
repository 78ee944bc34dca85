"""A function on a mesh, kept together with its compiled programs."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import statemesh as sm

from .. import _errors as errors
from .._static_keys import is_hashable, static_key
from .._types import AnyLeaf, Fun, PyTree, PyTreeDef
from ._run import Call, gradient


def mesh_of(given: object) -> Mesh:
    """The mesh itself, or a mesh with the given sizes."""
    if isinstance(given, Mesh):
        return given
    if not isinstance(given, Mapping):
        raise errors.not_a_mesh(given)
    sizes = tuple(given.values())
    devices = jax.devices()
    count = int(np.prod(sizes))
    if count > len(devices):
        raise errors.mesh_too_large(given, count, len(devices))
    shaped = np.array(devices[:count]).reshape(sizes)
    return Mesh(shaped, tuple(given), axis_types=(AxisType.Auto,) * len(sizes))


@dataclasses.dataclass(frozen=True)
class MappedCall:
    """A function on a mesh."""

    mesh: Mesh
    mapped: sm.StatefulMapping
    jitted: Call

    @property
    def where(self) -> str:
        return f"on mesh {errors.axes_str(dict(self.mesh.shape))}"

    def gradient(self, *args: PyTree) -> PyTree:
        """The gradient of a call."""
        # JAX can make zero gradients with Explicit axes in their type only where the mesh is set.
        typed = AxisType.Explicit in self.mesh.axis_types
        with jax.set_mesh(self.mesh) if typed else contextlib.nullcontext():
            # Placed first, because the gradient of an untouched argument lies where the argument lies.
            return gradient(self.mapped, self.mapped.place(*args))


def mapped_call(fun: Fun, mesh: Mesh, specs: tuple[PyTree, ...]) -> MappedCall:
    """A function on a mesh. Equal arguments get the same object, whose programs are compiled already."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=lambda x: x is None)
    key = fun, mesh, tuple(leaves), structure
    return _cached_call(*key) if is_hashable(key) else _new_call(*key)


def _new_call(
    fun: Fun, mesh: Mesh, leaves: tuple[AnyLeaf, ...], structure: PyTreeDef
) -> MappedCall:
    ins, outs, state_ins, state_outs, check_vma = structure.unflatten(leaves)
    mapped: sm.StatefulMapping = sm.shard_map(
        fun,
        mesh,
        ins,
        outs,
        state_in_specs=state_ins,
        state_out_specs=state_outs,
        check_vma=check_vma,
    )
    return MappedCall(mesh, mapped, within_jit(mapped))


# The cache is bounded, because each entry keeps compiled programs alive.
_cached_call = functools.lru_cache(maxsize=64)(_new_call)


def within_jit(call: Call) -> Call:
    """The call inside `jax.jit`."""

    @functools.partial(jax.jit, static_argnums=1)
    def whole(arrays: PyTree, statics: _Statics) -> PyTree:
        result, rest = eqx.partition(call(*eqx.combine(arrays, statics.tree)), eqx.is_array)
        return result, _Statics(rest)

    def run(*args: PyTree) -> PyTree:
        arrays, statics = eqx.partition(args, eqx.is_array)
        result, rest = whole(arrays, _Statics(statics))
        return eqx.combine(result, rest.tree)

    return run


@jax.tree_util.register_static
class _Statics:
    """The leaves of a tree that are no arrays, made hashable."""

    def __init__(self, tree: PyTree) -> None:
        self.tree = tree
        leaves, structure = jax.tree.flatten(tree)
        # A leaf whose value cannot be known is never equal to another.
        self.key = structure, tuple(static_key(x) or object() for x in leaves)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Statics) and self.key == other.key
