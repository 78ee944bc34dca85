"""What each collective does, said of an array that has all shards on its first axis."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ._stacked import Scope, Stacked, as_names


# Of the shards' values, `(n, *shape)`, and the equation's parameters.
Rule: TypeAlias = Callable[[Any, Mapping[str, Any]], Any]


def _psum(x: Any, params: Mapping[str, Any]) -> Any:
    return jnp.sum(x, _with_own_axes(params), dtype=x.dtype)


def _pmax(x: Any, params: Mapping[str, Any]) -> Any:
    return jnp.max(x, _with_own_axes(params))


def _pmin(x: Any, params: Mapping[str, Any]) -> Any:
    return jnp.min(x, _with_own_axes(params))


def _with_own_axes(params: Mapping[str, Any]) -> tuple[int, ...]:
    # Where a collective is over lanes of a `vmap` too, these have become an axis of the array.
    return (0, *(axis + 1 for axis in params["axes"] if isinstance(axis, int)))


def _all_gather(x: Any, params: Mapping[str, Any]) -> Any:
    axis = params["all_gather_dimension"]
    x = jnp.moveaxis(x, 0, axis)
    return _merged(x, axis) if params["tiled"] else x


def _pbroadcast(x: Any, params: Mapping[str, Any]) -> Any:
    return x[params["source"]]


def _reduce_scatter(x: Any, params: Mapping[str, Any]) -> Any:
    total, axis = jnp.sum(x, 0, dtype=x.dtype), params["scatter_dimension"]
    if params["tiled"]:
        total = _parted(total, axis, x.shape[0])
    return jnp.moveaxis(total, axis, 0)


def _ppermute(x: Any, params: Mapping[str, Any]) -> Any:
    sources, targets = np.array(params["perm"], int).reshape(-1, 2).T
    return jnp.zeros_like(x).at[targets].set(x[sources])


def _all_to_all(x: Any, params: Mapping[str, Any]) -> Any:
    # JAX adds and removes axes around the equation where it is not tiled.
    split, concat = params["split_axis"] + 1, params["concat_axis"] + 1
    x = jnp.moveaxis(_parted(x, split, x.shape[0]), split, 1)
    # What shard i keeps for shard j stands at j: the two change places.
    return _merged(jnp.moveaxis(jnp.swapaxes(x, 0, 1), 1, concat), concat)


def _merged(x: Any, axis: int) -> Any:
    """An axis and the one after it made one."""
    size = x.shape[axis] * x.shape[axis + 1]
    return x.reshape(*x.shape[:axis], size, *x.shape[axis + 2 :])


def _parted(x: Any, axis: int, count: int) -> Any:
    """The way back."""
    return x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])


# After which all shards have the same, and after which each has its own.
_JOINING: Mapping[str, Rule] = {
    "psum": _psum,
    "psum_invariant": _psum,
    "pmax": _pmax,
    "pmin": _pmin,
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "pbroadcast": _pbroadcast,
}
_PARTING: Mapping[str, Rule] = {
    "reduce_scatter": _reduce_scatter,
    "ppermute": _ppermute,
    "all_to_all": _all_to_all,
}
RULES: Mapping[str, Rule] = {**_JOINING, **_PARTING}


def names_of(eqn: Any) -> tuple[Hashable, ...]:
    """The axis names over which an equation is a collective."""
    given = eqn.params.get("axes", eqn.params.get("axis_name"))
    return tuple(name for name in as_names(given) if not isinstance(name, int))


def collective(eqn: Any, value: Stacked, scope: Scope) -> Stacked:
    """What a collective makes of one operand."""
    names = names_of(eqn)
    of_equation = RULES[eqn.primitive.name]
    rule: Callable[[Any], Any] = lambda x: of_equation(x, eqn.params)
    joins = eqn.primitive.name in _JOINING
    groups = eqn.params.get("axis_index_groups")
    if groups is not None:
        rule, joins = partial(_in_groups, rule, joins, np.array(groups)), False
    x, rest = scope.flat(value, names)
    for _ in rest:
        rule = jax.vmap(rule, in_axes=1, out_axes=0 if joins else 1)
    return Stacked(rule(x), rest) if joins else scope.unflat(rule(x), names, rest)


def _in_groups(rule: Callable[[Any], Any], joins: bool, groups: Any, x: Any) -> Any:
    """A collective in which each group of shards is for itself; its result, shard by shard."""
    order = groups.reshape(-1)
    made = jax.vmap(rule)(x[order].reshape(*groups.shape, *x.shape[1:]))
    if joins:
        made = jnp.repeat(made[:, None], groups.shape[1], axis=1)
    return made.reshape(len(order), *made.shape[2:])[np.argsort(order)]
