"""A function on a mesh and its gradient, kept together with its compiled programs."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, TypeAlias, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

import statemesh as sm

from .. import _errors as errors
from .._program._doubled import Doubled, compile_fast
from .._program._noise import is_inexact
from .._recent import Recent
from .._static_keys import is_hashable, static_key
from .._types import AnyLeaf, Fun, PyTree, PyTreeDef, tree_util
from ._values import path_of


AnyMesh: TypeAlias = Mesh | AbstractMesh


def is_mapped(fun: Fun) -> TypeGuard[sm.StatefulMapping]:
    """Whether a function is what `shard_map`, `pmap2` or `vmap2` returned."""
    return isinstance(fun, sm.StatefulMapping)


def remapped(fun: sm.StatefulMapping, mesh: AnyMesh) -> sm.StatefulMapping:
    """A function that is mapped already, with its own specs on another mesh.

    **Raises:** `StatemeshError` for what `pmap2` and `vmap2` return, which have no mesh of named axes.
    """
    return fun.on_mesh(mesh)


def check_specs(fun: Fun, given: Mapping[str, Any]) -> None:
    """Refuse specs beside a function that has its own, and a function without any.

    **Arguments:**

    - `given`: the arguments that are part of a mapping, by name; `None` or `...` for one that is not given.

    **Raises:** `TypeError` that names them.
    """
    if is_mapped(fun):
        if several := [name for name, value in given.items() if value not in (None, ...)]:
            raise errors.specs_given_twice(getattr(fun, "__name__", "fun"), several)
    elif missing := [name for name in ("in_specs", "out_specs") if given.get(name, ...) is ...]:
        raise errors.specs_missing(getattr(fun, "__name__", type(fun).__name__), missing)


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is differentiated by what.

    **Attributes:**

    - `of`: the numbers of the leaves of the results.
    - `by`: the numbers of the leaves of the arguments.
    - `constant`: the numbers of the leaves of the results that have no derivative.
    """

    of: tuple[int, ...] = ()
    by: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.of and self.by)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithGradient:
    """The results of a call, and the gradient."""

    results: PyTree
    gradient: list[Any]


def selection(args: PyTree, results: PyTree) -> Selection:
    """All arrays of floats, except in the states of Optax.

    What an optimizer makes of a slot that is zero has no derivative.

    **Arguments:**

    - `args`: the tuple of the positional arguments and the dictionary of the others.
    """
    return Selection(_inexact(results), _inexact(args))


def _inexact(tree: PyTree) -> tuple[int, ...]:
    is_slots: Callable[[object], bool] = lambda x: type(x).__module__.partition(".")[0] == "optax"
    found, number = [], 0
    for node in tree_util.tree_leaves(tree, is_leaf=is_slots):
        for x in tree_util.tree_leaves(node):
            if not is_slots(node) and _is_inexact(x):
                found.append(number)
            number += 1
    return tuple(found)


def _is_inexact(x: AnyLeaf) -> bool:
    return hasattr(x, "dtype") and is_inexact(x.dtype)


def results_of(made: PyTree) -> PyTree:
    """The results of a call, without the gradient if that is there."""
    return made.results if isinstance(made, WithGradient) else made


def learns(args: PyTree, written: Callable[[int], bool]) -> bool:
    """Whether a call changes parameters: a training step, whose derivative nobody takes.

    **Arguments:**

    - `written`: whether a call gives a new value for a leaf of the arguments, by its number.
    """
    number = 0
    is_state: Callable[[object], bool] = lambda x: isinstance(x, sm.State)
    for node in tree_util.tree_leaves(args, is_leaf=is_state):
        for _ in tree_util.tree_leaves(node):
            if isinstance(node, sm.ParamState) and written(number):
                return True
            number += 1
    return False


def with_gradient(call: Fun, selected: Selection) -> Fun:
    """A function that gives the results of a call and the gradient."""

    def both(*args: PyTree, **kwargs: PyTree) -> WithGradient:
        leaves, treedef = tree_util.tree_flatten((args, kwargs))
        rest: list[PyTree] = []

        def total(chosen: Sequence[AnyLeaf]) -> tuple[jax.Array, PyTree]:
            filled = list(leaves)
            for number, x in zip(selected.by, chosen, strict=True):
                filled[number] = x
            again, named = treedef.unflatten(filled)
            result = call(*again, **named)
            found = tree_util.tree_leaves(result)
            arrays, statics = eqx.partition(result, eqx.is_array)
            rest[:] = [statics]
            return sum(
                (_weighted(found[k]) for k in selected.of if k < len(found)), jnp.float32(0)
            ), arrays

        value, pull, arrays = jax.vjp(total, [leaves[k] for k in selected.by], has_aux=True)
        (gradient,) = pull(jnp.ones_like(value))
        return WithGradient(eqx.combine(arrays, rest[0]), gradient)

    both.__name__ = getattr(call, "__name__", type(call).__name__)
    return both


def _weighted(x: jax.Array) -> jax.Array:
    """The sum of all entries, each with its own weight."""
    weights = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    wide = x if jnp.issubdtype(x.dtype, jnp.complexfloating) else x.astype(np.float32)
    return jnp.real(wide * weights).sum().astype(np.float32)


def gradient_paths(args: PyTree, selected: Selection) -> list[str]:
    """The paths by which the gradient is taken."""
    flat, _ = tree_util.tree_flatten_with_path(args)
    return [f"the gradient by {path_of(flat[k][0])}" for k in selected.by]


def with_constants(fun: Fun, numbers: Sequence[int]) -> Fun:
    """The function of shards with these leaves of its results taken for constants."""

    def held(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, treedef = tree_util.tree_flatten(fun(*args, **kwargs))
        for k in numbers:
            leaves[k] = jax.lax.stop_gradient(leaves[k])
        return treedef.unflatten(leaves)

    held.__name__ = getattr(fun, "__name__", type(fun).__name__)
    return held


def differentiable(selected: Selection, traces: Callable[[Selection], Any]) -> Selection:
    """The selection without the results that have no derivative.

    **Arguments:**

    - `traces`: traces the call with its gradient. It raises where there is none.

    **Raises:** what `traces` raises, if no result has a derivative.
    """
    try:
        traces(selected)
        return selected
    except Exception:  # Raised again below, unless some results have a derivative.
        refused = set()
        for one in selected.of:
            others = tuple(k for k in selected.of if k != one)
            with contextlib.suppress(Exception):
                traces(Selection((one,), selected.by, others))
                continue
            refused.add(one)
        left = tuple(k for k in selected.of if k not in refused)
        if not left or not refused:
            raise
    found = Selection(left, selected.by, tuple(sorted(refused)))
    traces(found)
    return found


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
