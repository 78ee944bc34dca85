"""A function on a mesh, kept together with its compiled programs."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import statemesh as sm

from .. import _errors as errors
from .._program._doubled import Doubled, compile_fast
from .._recent import Recent
from .._static_keys import is_hashable, static_key
from .._types import AnyLeaf, Fun, PyTree, PyTreeDef
from ._adapted import AnyMesh, is_mapped, remapped
from ._gradients import Selection, with_constants, with_gradient


def mesh_of(given: object) -> AnyMesh:
    """The mesh itself, or a mesh with the given sizes."""
    if isinstance(given, AnyMesh):
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
class OnMesh:
    """A function on a mesh.

    **Attributes:**

    - `make`: maps a function of shards over the mesh.
    - `mapped`: the mapped function.
    - `specs`: its in specs and out specs, if they are known.
    """

    fun: Fun
    mesh: AnyMesh
    make: Callable[[Fun], sm.StatefulMapping]
    mapped: sm.StatefulMapping
    specs: tuple[PyTree, PyTree] | None = None
    _selected: dict[Selection, "Programs"] = dataclasses.field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"on mesh {errors.axes_str(dict(self.mesh.shape))}"

    @property
    def has_devices(self) -> bool:
        return isinstance(self.mesh, Mesh)

    def programs(self, selected: Selection) -> "Programs":
        """The programs that give the results and, if anything is selected, the gradient."""
        if selected not in self._selected:
            held = with_constants(self.fun, selected.constant) if selected.constant else self.fun
            mapped = self.make(held) if selected.constant else self.mapped
            self._selected[selected] = Programs(self.mesh, mapped, selected)
        return self._selected[selected]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a mapped function, with the gradient if one is selected."""

    mesh: AnyMesh
    mapped: sm.StatefulMapping
    selected: Selection

    @cached_property
    def doubled(self) -> Doubled:
        """The function in double precision."""
        return Doubled(selected(self.mapped, self.selected), self._context)

    @cached_property
    def jitted(self) -> Fun:
        """The function inside `jax.jit`."""
        run = within_jit(selected(self.mapped, self.selected))

        def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
            with self._context():
                return run(*args, **kwargs)

        return call

    @cached_property
    def unsharded(self) -> "Unsharded":
        """The function on one device."""
        return Unsharded(self.mapped.unsharded, self.selected)

    def _context(self) -> AbstractContextManager[object]:
        # JAX can make zero gradients with Explicit axes in their type only where the mesh is set.
        if not self.selected or AxisType.Explicit not in self.mesh.axis_types:
            return contextlib.nullcontext()
        if isinstance(self.mesh, Mesh):
            return jax.set_mesh(self.mesh)
        return jax.sharding.use_abstract_mesh(self.mesh)


class Unsharded:
    """The programs of a function without a mesh, with the gradient if one is selected."""

    def __init__(self, fun: Fun, chosen: Selection) -> None:
        self.doubled = Doubled(selected(fun, chosen))
        self.compiled = within_jit(selected(fun, chosen))


def selected(call: Fun, chosen: Selection) -> Fun:
    return with_gradient(call, chosen) if chosen else call


def on_mesh(fun: Fun, key: Hashable | None, mesh: AnyMesh, specs: Mapping[str, PyTree]) -> OnMesh:
    """A function on a mesh. Equal arguments get the same object, whose programs are compiled already.

    **Arguments:**

    - `key`: whatever else the function depends on; `None` where that cannot be known.
    - `specs`: further arguments of `shard_map`; empty for a function that is mapped already.
    """
    leaves, structure = jax.tree.flatten(dict(specs), is_leaf=lambda x: x is None)
    full = fun, key, mesh, tuple(leaves), structure
    return _cached(*full) if key is not None and is_hashable(full) else _new(*full)


def _new(
    fun: Fun, key: Hashable, mesh: AnyMesh, leaves: tuple[AnyLeaf, ...], structure: PyTreeDef
) -> OnMesh:
    del key
    specs = structure.unflatten(leaves)
    if is_mapped(fun):
        mapped = remapped(fun, mesh)
        return OnMesh(fun, mesh, lambda other: _refused(other, mapped), mapped)
    make: Callable[[Fun], sm.StatefulMapping] = lambda fun: sm.shard_map(fun, mesh, **specs)
    return OnMesh(fun, mesh, make, make(fun), (specs["in_specs"], specs["out_specs"]))


def _refused(fun: Fun, mapped: sm.StatefulMapping) -> sm.StatefulMapping:
    raise NotImplementedError(f"{fun} cannot take the place of the function of {mapped}")


# The caches are bounded, because each entry keeps compiled programs alive.
_cached = functools.lru_cache(maxsize=64)(_new)


def unsharded_programs(fun: Fun, key: Hashable | None, chosen: Selection) -> Unsharded:
    """The programs of a function that is not mapped. Equal arguments get the same object.

    **Arguments:**

    - `key`: as for `on_mesh`.
    """
    known = key is not None and is_hashable(fun)
    return _cached_unsharded(fun, key, chosen) if known else Unsharded(fun, chosen)


@functools.lru_cache(maxsize=64)
def _cached_unsharded(fun: Fun, key: Hashable, chosen: Selection) -> Unsharded:
    del key
    return Unsharded(fun, chosen)


def within_jit(call: Fun) -> Fun:
    """The call inside `jax.jit`."""
    # JAX would keep the programs for all static values that were ever given.
    programs: Recent[Fun] = Recent()

    def program(statics: PyTree) -> Fun:
        def whole(arrays: PyTree) -> PyTree:
            args, kwargs = eqx.combine(arrays, statics)
            result, rest = eqx.partition(call(*args, **kwargs), eqx.is_array)
            return result, _Statics(rest)

        return jax.jit(whole, compiler_options=compile_fast())

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        arrays, statics = eqx.partition((args, kwargs), eqx.is_array)
        result, rest = programs.get(_Statics(statics), lambda: program(statics))(arrays)
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
