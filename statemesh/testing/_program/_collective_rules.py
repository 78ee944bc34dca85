"""What each collective computes, from an array that has all shards on its first axis."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ._jaxprs import Equation, names_of, nested_equations
from ._stacked import MappedAxes, Stacked, numpy_of, vmap


# An array of JAX or of NumPy.
Array: TypeAlias = Any
# From the values of all shards, `(n, *shape)`, and the parameters of the equation.
Params: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[Array, Params], Array]


def _psum(x: Array, params: Params) -> Array:
    return x.sum(_with_own_axes(params), dtype=x.dtype)


def _pmax(x: Array, params: Params) -> Array:
    return x.max(_with_own_axes(params))


def _pmin(x: Array, params: Params) -> Array:
    return x.min(_with_own_axes(params))


def _with_own_axes(params: Params) -> tuple[int, ...]:
    # A collective that is also over lanes of a `vmap` names the axis of the array that holds the lanes.
    return (0, *(axis + 1 for axis in params["axes"] if isinstance(axis, int)))


def _all_gather(x: Array, params: Params) -> Array:
    axis = params["all_gather_dimension"]
    x = numpy_of(x).moveaxis(x, 0, axis)
    return _merged(x, axis) if params["tiled"] else x


def _pbroadcast(x: Array, params: Params) -> Array:
    return x[params["source"]]


def _reduce_scatter(x: Array, params: Params) -> Array:
    total, axis = x.sum(0, dtype=x.dtype), params["scatter_dimension"]
    if params["tiled"]:
        total = _split(total, axis, x.shape[0])
    return numpy_of(x).moveaxis(total, axis, 0)


def _ppermute(x: Array, params: Params) -> Array:
    sources, targets = np.array(params["perm"], int).reshape(-1, 2).T
    source_of = np.full(len(x), -1)
    source_of[targets] = sources
    is_target = (source_of >= 0).reshape(-1, *[1] * (x.ndim - 1))
    return numpy_of(x).where(is_target, x[source_of], x.dtype.type(0))


def _all_to_all(x: Array, params: Params) -> Array:
    # JAX adds and removes axes around the equation where it is not tiled.
    split, concat = params["split_axis"] + 1, params["concat_axis"] + 1
    x = numpy_of(x).moveaxis(_split(x, split, x.shape[0]), split, 1)
    # Shard i keeps at index j what it sends to shard j.
    return _merged(numpy_of(x).moveaxis(x.swapaxes(0, 1), 1, concat), concat)


def _merged(x: Array, axis: int) -> Array:
    """The array with an axis and the one after it merged into one."""
    size = x.shape[axis] * x.shape[axis + 1]
    return x.reshape(*x.shape[:axis], size, *x.shape[axis + 2 :])


def _split(x: Array, axis: int, count: int) -> Array:
    """The array with an axis split into one of size `count` and the rest."""
    return x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])


# After these all shards have the same value.
_UNIFORM: Mapping[str, Rule] = {
    "psum": _psum,
    "psum_invariant": _psum,
    "pmax": _pmax,
    "pmin": _pmin,
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "pbroadcast": _pbroadcast,
}
# After these each shard has a value of its own.
_VARYING: Mapping[str, Rule] = {
    "reduce_scatter": _reduce_scatter,
    "ppermute": _ppermute,
    "all_to_all": _all_to_all,
}
RULES: Mapping[str, Rule] = {**_UNIFORM, **_VARYING}


def nested_collectives(eqn: Equation) -> list[Equation]:
    """The collectives in what an equation runs."""
    return [inner for inner in nested_equations(eqn) if inner.primitive.name in RULES]


def communicating_axes(eqn: Equation) -> frozenset[Hashable]:
    """The axes over which there are collectives in what an equation runs."""
    return frozenset(name for inner in nested_collectives(eqn) for name in names_of(inner))


def collective(eqn: Equation, value: Stacked, scope: MappedAxes) -> Stacked:
    """The result of a collective for one operand."""
    names = names_of(eqn)
    of_equation = RULES[eqn.primitive.name]
    rule: Callable[[jax.Array], jax.Array] = lambda x: of_equation(x, eqn.params)
    uniform = eqn.primitive.name in _UNIFORM
    groups = eqn.params.get("axis_index_groups")
    if groups is not None:
        rule, uniform = partial(_in_groups, rule, uniform, np.array(groups)), False
    x, rest = scope.flat(value, names)
    # The rule knows the values of one shard: it is mapped over the axes along which shards do not meet.
    for _ in rest:
        rule = vmap(rule, in_axes=(1,), out_axes=0 if uniform else 1)
    return Stacked(rule(x), rest) if uniform else scope.unflat(rule(x), names, rest)


def _in_groups(
    rule: Callable[[jax.Array], jax.Array], uniform: bool, groups: npt.NDArray[Any], x: jax.Array
) -> jax.Array:
    """The result, shard by shard, of a collective that each group of shards runs on its own."""
    order = groups.reshape(-1)
    results = jax.vmap(rule)(x[order].reshape(*groups.shape, *x.shape[1:]))
    if uniform:
        results = jnp.repeat(results[:, None], groups.shape[1], axis=1)
    return results.reshape(len(order), *results.shape[2:])[np.argsort(order)]
