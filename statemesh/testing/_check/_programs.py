"""A function on a mesh, the reference and their gradients, kept together with their compiled programs."""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

import statemesh as sm

from .. import _errors as errors
from .._caches import Recent, is_hashable, static_key
from .._program._doubled import Called, Doubled, Wide, compile_fast, widened
from .._program._numbers import is_inexact
from .._types import AnyLeaf, Fun, PyTree, tree_util
from . import _report as report
from ._feedback import path_of
from ._judge import Chain, Feed, doubled_chain


AnyMesh: TypeAlias = Mesh | AbstractMesh
# Positional arguments and keyword arguments.
Args: TypeAlias = tuple[tuple[PyTree, ...], dict[str, PyTree]]
Entry = TypeVar("Entry")


# What is kept


# Each entry keeps compiled programs alive.
_kept: Recent[Any] = Recent(128)


def kept(key: Hashable | None, make: Callable[..., Entry], *parts: Any) -> Entry:
    """What `make` makes of these parts: for equal parts the same object, whose programs are compiled already.

    **Arguments:**

    - `key`: whatever else it depends on; `None` where that cannot be known.
    """
    if key is None or not is_hashable(parts):
        return make(*parts)
    entry: Entry = _kept.get((make, key, parts), lambda: make(*parts))
    return entry


@jax.tree_util.register_static
class StaticLeaves:
    """The leaves of a tree that are no arrays, made hashable."""

    def __init__(self, tree: PyTree) -> None:
        self.tree = tree
        leaves, structure = jax.tree.flatten(tree)
        self.key = structure, tuple(static_key(x) for x in leaves)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticLeaves) and self.key == other.key


# The gradient that is compared: of a weighted sum of all results, by the arrays of the arguments


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


def results_of(returned: PyTree) -> PyTree:
    """The results of a call, without the gradient if that is there."""
    return returned.results if isinstance(returned, WithGradient) else returned


def inexact_leaves(tree: PyTree) -> tuple[int, ...]:
    """The numbers of the leaves that are arrays of floats, except in the states of Optax.

    What an optimizer makes of a slot that is zero has no derivative.
    """
    is_slots: Callable[[object], bool] = lambda x: type(x).__module__.partition(".")[0] == "optax"
    inexact = [
        not is_slots(node) and hasattr(x, "dtype") and is_inexact(x.dtype)
        for node in tree_util.tree_leaves(tree, is_leaf=is_slots)
        for x in tree_util.tree_leaves(node)
    ]
    return tuple(number for number, hit in enumerate(inexact) if hit)


def learns(args: PyTree, is_written: Callable[[int], bool]) -> bool:
    """Whether a call changes parameters: a training step, whose derivative nobody takes.

    **Arguments:**

    - `is_written`: whether a call gives a new value for a leaf of the arguments, by its number.
    """
    is_state: Callable[[object], bool] = lambda x: isinstance(x, sm.State)
    nodes = tree_util.tree_leaves(args, is_leaf=is_state)
    owners = [node for node in nodes for _ in tree_util.tree_leaves(node)]
    return any(isinstance(x, sm.ParamState) and is_written(k) for k, x in enumerate(owners))


def with_gradient(call: Fun, selected: Selection) -> Fun:
    """A function that gives the results of a call and, if anything is selected, the gradient."""
    if not selected:
        return call

    def both(*args: PyTree, **kwargs: PyTree) -> WithGradient:
        leaves, treedef = tree_util.tree_flatten((args, kwargs))
        rest: list[PyTree] = []

        def total(chosen: Sequence[AnyLeaf]) -> tuple[jax.Array, PyTree]:
            filled = list(leaves)
            for number, x in zip(selected.by, chosen, strict=True):
                filled[number] = x
            again, named = treedef.unflatten(filled)
            result = call(*again, **named)
            outputs = tree_util.tree_leaves(result)
            arrays, statics = eqx.partition(result, eqx.is_array)
            rest[:] = [statics]
            weighted = (_weighted(outputs[k]) for k in selected.of if k < len(outputs))
            return sum(weighted, jnp.float32(0)), arrays

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
        for number in selected.of:
            others = tuple(k for k in selected.of if k != number)
            with contextlib.suppress(Exception):
                traces(Selection((number,), selected.by, others))
                continue
            refused.add(number)
        left = tuple(k for k in selected.of if k not in refused)
        if not left or not refused:
            raise
    without = Selection(left, selected.by, tuple(sorted(refused)))
    traces(without)
    return without


def _with_constants(fun: Fun, numbers: Sequence[int]) -> Fun:
    """The function of shards with these leaves of its results taken for constants."""

    def held(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, treedef = tree_util.tree_flatten(fun(*args, **kwargs))
        for k in numbers:
            leaves[k] = jax.lax.stop_gradient(leaves[k])
        return treedef.unflatten(leaves)

    held.__name__ = getattr(fun, "__name__", type(fun).__name__)
    return held


# The reference


def chained(call: Fun, args: Args, steps: int, feed: Feed) -> list[PyTree]:
    """The results of calls, each of which gets what the call before returned."""
    results = []
    for _ in range(steps):
        # One call at a time: in older versions of JAX the collectives of several running calls can lock up.
        results.append(jax.block_until_ready(call(*args[0], **args[1])))
        args = feed(args, results[-1])
    return results


@dataclasses.dataclass(frozen=True)
class Reference:
    """What gives the right results: the function on one device, or another function.

    **Attributes:**

    - `what`: the name of the function in messages.
    - `compiled`: the function in its own dtypes.
    - `doubled`: the function in double precision; `None` for one that JAX cannot trace, such as one of NumPy,
        which has only the results that it gives.
    """

    what: str
    compiled: Fun
    doubled: Doubled | None = None

    def form(self, types: PyTree, args: Args) -> PyTree:
        """The results of the first call. There may be types in the place of arrays."""
        if self.doubled is None:
            return self.compiled(*args[0], **args[1])
        return self.doubled.of(types).trace.form

    def chain(self, args: Args, steps: int, feed: Feed) -> Chain:
        if self.doubled is None:
            results = chained(self.compiled, args, steps, feed)
            return Chain([Called(Wide(None, None), Wide(result, result)) for result in results])
        return doubled_chain(self.doubled, widened(args), feed, steps, noisy=True)


def unsharded_reference(what: str, fun: Fun, selected: Selection) -> Reference:
    """A function without a mesh."""
    call = with_gradient(fun, selected)
    return Reference(what, within_jit(call), Doubled(call))


def within_jit(call: Fun) -> Fun:
    """The call inside `jax.jit`."""
    # JAX would keep the programs for all static values that were ever given.
    programs: Recent[Fun] = Recent()

    def program(statics: PyTree) -> Fun:
        def whole(arrays: PyTree) -> PyTree:
            args, kwargs = eqx.combine(arrays, statics)
            result, rest = eqx.partition(call(*args, **kwargs), eqx.is_array)
            return result, StaticLeaves(rest)

        return jax.jit(whole, compiler_options=compile_fast())

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        arrays, statics = eqx.partition((args, kwargs), eqx.is_array)
        result, rest = programs.get(StaticLeaves(statics), lambda: program(statics))(arrays)
        return eqx.combine(result, rest.tree)

    return run


# The function on a mesh


def mesh_of(mesh: object) -> AnyMesh:
    """The mesh itself, or a mesh with the given sizes."""
    if isinstance(mesh, AnyMesh):
        return mesh
    if not isinstance(mesh, Mapping):
        raise TypeError(
            f"meshes: {mesh!r} is a {type(mesh).__name__}. Give a list of jax.sharding.Mesh, or of the "
            "sizes "
            'of their axes: meshes=[{"x": 2}, {"x": 4, "y": 2}].'
        )
    sizes = tuple(mesh.values())
    devices = jax.devices()
    count = int(np.prod(sizes))
    if count > len(devices):
        raise sm.StatemeshError(
            f"meshes: {errors.axes_str(mesh)} needs {count} devices, and JAX has {len(devices)}. Simulate "
            f"them: statemesh.testing.set_devices({count}) in the first lines of conftest.py; or emulate "
            "the mesh on one device with statemesh.testing.emulate."
        )
    shaped = np.array(devices[:count]).reshape(sizes)
    return Mesh(shaped, tuple(mesh), axis_types=(AxisType.Auto,) * len(sizes))


class FunctionOnMesh:
    """A function on a mesh.

    **Arguments:**

    - `specs`: further arguments of `shard_map`; `None` for a function that is mapped already.
    """

    def __init__(self, fun: Fun, mesh: AnyMesh, specs: StaticLeaves | None) -> None:
        self.fun, self.mesh = fun, mesh
        self.specs: Mapping[str, PyTree] | None = None if specs is None else specs.tree
        # What `pmap2` and `vmap2` return has no mesh of named axes, and is refused.
        self.mapped = fun.on_mesh(mesh) if isinstance(fun, sm.StatefulMapping) else self._map(fun)
        self._programs: Recent[Programs] = Recent()

    def _map(self, fun: Fun) -> sm.StatefulMapping:
        if self.specs is None:
            # No other function can take the place of the one that a mapping was made from.
            raise NotImplementedError
        return sm.shard_map(fun, self.mesh, **self.specs)

    @property
    def label(self) -> str:
        return f"on mesh {errors.axes_str(dict(self.mesh.shape))}"

    @property
    def has_devices(self) -> bool:
        return isinstance(self.mesh, Mesh)

    def programs(self, selected: Selection) -> "Programs":
        """The programs that give the results and, if anything is selected, the gradient."""

        def new() -> Programs:
            if not selected.constant:
                return Programs(self.mesh, self.mapped, selected)
            mapped = self._map(_with_constants(self.fun, selected.constant))
            return Programs(self.mesh, mapped, selected)

        return self._programs.get(selected, new)


class Programs:
    """The programs of a mapped function, with the gradient if one is selected.

    **Attributes:**

    - `doubled`: the function in double precision.
    """

    def __init__(self, mesh: AnyMesh, mapped: sm.StatefulMapping, selected: Selection) -> None:
        self._mesh, self._mapped, self._selected = mesh, mapped, selected
        call = with_gradient(mapped, selected)
        self.doubled = Doubled(call, self._context)
        self._jitted = within_jit(call)

    def jitted(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the function inside `jax.jit`."""
        with self._context():
            return self._jitted(*args, **kwargs)

    @cached_property
    def unsharded(self) -> Reference:
        """The function on one device."""
        return unsharded_reference(report.ONE_DEVICE, self._mapped.unsharded, self._selected)

    def _context(self) -> AbstractContextManager[object]:
        # JAX can make zero gradients with Explicit axes in their type only where the mesh is set.
        if not self._selected or AxisType.Explicit not in self._mesh.axis_types:
            return contextlib.nullcontext()
        if isinstance(self._mesh, Mesh):
            return jax.set_mesh(self._mesh)
        return jax.sharding.use_abstract_mesh(self._mesh)
