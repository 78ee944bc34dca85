"""The traced program of a call, the tree of its results, and arrays as a program on one device takes them."""

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import statemesh as sm

from .._caches import static_key
from .._types import AnyLeaf, Fun, PyTree, PyTreeDef, tree_util
from ._backward import backward_lines
from ._jaxprs import Jaxpr
from ._literals import Exact, exact_literals, has_rounded
from ._numbers import is_key, promoted


# A function that puts an array somewhere else.
Placing: TypeAlias = Callable[[jax.Array], jax.Array]

NO_MESH = AbstractMesh((), ())


def type_of(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type without a sharding, which on Explicit axes is a part of it."""
    weak = bool(getattr(x, "weak_type", False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)


def as_array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def on_one_device(x: Any) -> Any:
    """The array, laid out so that it can meet any other array in one operation."""
    if is_typed(x):
        mesh = jax.typeof(x).sharding.mesh
        auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names)
        return jax.sharding.reshard(x, NamedSharding(auto, PartitionSpec()))
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return x
    if is_key(x):
        data = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def is_typed(x: object) -> bool:
    """Whether the type of a traced value has a sharding over Explicit mesh axes."""
    if not isinstance(x, jax.core.Tracer):
        return False
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and any(kind == AxisType.Explicit for kind in mesh.axis_types)


def placing_like(x: Any) -> Placing | None:
    """The function that puts a cotangent where its primal `x` lies; `None` where it may lie anywhere."""
    if is_typed(x):
        return lambda ct: jax.sharding.reshard(ct, jax.typeof(x).sharding)
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return None
    return lambda ct: jax.device_put(ct, x.sharding)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced call.

    **Attributes:**

    - `closed`: the program from the arrays of the arguments to those of the results.
    - `types`: the tree of the results, with the type of each array in its place.
    - `statics`: the leaves of the results that are no arrays.
    - `paths`: the path of each array of the results, as the user would type it.
    - `exact`: what the literals of the program stand for, where that is asked for.
    """

    closed: Jaxpr
    types: PyTree
    statics: PyTree
    paths: list[str]
    exact: Exact = dataclasses.field(default_factory=Exact)

    def results(self, arrays: Sequence[AnyLeaf]) -> PyTree:
        """The results with these arrays."""
        return eqx.combine(tree_util.tree_structure(self.types).unflatten(arrays), self.statics)

    @property
    def form(self) -> PyTree:
        """The results with types in the place of arrays."""
        return self.results(tree_util.tree_leaves(self.types))


def is_array_or_type(x: object) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def leaf_key(x: AnyLeaf) -> Hashable:
    """What a traced program knows of a leaf of its arguments."""
    if is_array_or_type(x):
        return x.shape, x.dtype, bool(getattr(x, "weak_type", False))
    return static_key(x)


def name_of(fun: Fun) -> str:
    return str(getattr(fun, "__name__", type(fun).__name__))


def weighted_gradient(
    outputs: Callable[[PyTree], tuple[list[jax.Array], PyTree]], primals: PyTree
) -> tuple[Any, PyTree]:
    """The gradient of a weighted sum of all outputs, and what `outputs` returns besides them.

    Each number of an output has a weight of its own, so that none cancels another.
    """
    values, pull, rest = jax.vjp(outputs, primals, has_aux=True)
    weights = [jnp.asarray(np.cos(np.arange(x.size)).reshape(x.shape), x.dtype) for x in values]
    return pull(weights)[0], rest


def trace(mapped: Fun, treedef: PyTreeDef, leaves: Sequence[AnyLeaf]) -> Trace:
    """Trace a call.

    **Arguments:**

    - `treedef`, `leaves`: the tuple of the positional arguments and the dictionary of the others, flattened.
        Arrays are `jax.Array`s or their types.
    """
    arrays, statics = eqx.partition(leaves, is_array_or_type)

    def of(fun: Fun) -> Any:
        def split(arrays: list[AnyLeaf]) -> tuple[PyTree, Fun]:
            args, kwargs = treedef.unflatten(eqx.combine(arrays, statics))
            result, rest = eqx.partition(fun(*args, **kwargs), is_array_or_type)
            # Equinox takes strings of NumPy for arrays. In a function they are hidden from it.
            return result, lambda: rest

        with backward_lines():
            return eqx.filter_make_jaxpr(split)(jax.tree.map(type_of, arrays))

    try:
        closed, (types, _), (_, rest) = of(mapped)
    except sm.BatchAxisError as error:
        if not isinstance(mapped, sm.StatefulMapping) or not error.has_too_many_lanes:
            raise
        closed, (types, _), (_, rest) = of(mapped.unsharded)
    flat, _ = tree_util.tree_flatten_with_path(types)
    paths = [f"{name_of(mapped)}(...){jax.tree_util.keystr(path)}" for path, _ in flat]
    return Trace(closed, types, rest(), paths)


def trace_exactly(mapped: Fun, treedef: PyTreeDef, leaves: Sequence[AnyLeaf]) -> Trace:
    """Trace a call, and find what its literals stand for.

    **Arguments:** those of `trace`.
    """
    traced = trace(mapped, treedef, leaves)
    if not has_rounded(traced.closed):
        return traced
    for integers in (np.int64, np.int32):
        wide = [_wide_type(x, integers) for x in leaves]
        try:
            with warnings.catch_warnings(), jax.enable_x64(True):
                warnings.simplefilter("ignore")  # They were given for the program itself.
                closed = trace(mapped, treedef, wide).closed
        except Exception:  # Of other dtypes than those that it names, a function may say anything.
            continue
        return dataclasses.replace(traced, exact=exact_literals(traced.closed, closed))
    return traced


def _wide_type(x: AnyLeaf, integers: Any) -> AnyLeaf:
    """The type of an array in double precision. Integers are `integers` where they are as JAX makes them."""
    if not is_array_or_type(x):
        return x
    kind = type_of(x)
    dtype = integers if kind.dtype == np.int32 else promoted(kind.dtype)
    return jax.ShapeDtypeStruct(kind.shape, dtype, weak_type=kind.weak_type)
