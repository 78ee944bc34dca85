"""Mesh axes and lanes alike: over which of them values differ, and collectives over both.

JAX types what varies over a mesh axis, and says nothing of what is batched by `vmap`. Its collectives over a
lane axis fail inside a checked `shard_map`. The rule of a `custom_vmap` knows the one and can do the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from . import _compat as compat
from ._compat import tree_util
from ._types import AxisName


Axes = frozenset[AxisName]


def varying_over(values: Sequence[Any], axis_names: Sequence[AxisName]) -> list[Axes]:
    """For each array the axes among `axis_names` over which it may differ."""
    meshes, lanes = _apart(axis_names)
    found = [compat.varying(x) & frozenset(meshes) for x in values]
    for name in lanes:
        batched = _batched(values, name)
        found = [axes | {name} if hit else axes for axes, hit in zip(found, batched, strict=True)]
    return found


def pmean(x: Any, axis_names: Sequence[AxisName]) -> Any:
    """`jax.lax.pmean`."""
    return _collective(x, axis_names, jax.lax.pmean, lambda x: jnp.mean(x, 0))


def psum(x: Any, axis_names: Sequence[AxisName]) -> Any:
    """`jax.lax.psum`."""
    return _collective(x, axis_names, jax.lax.psum, lambda x: jnp.sum(x, 0, dtype=x.dtype))


def pmax(x: Any, axis_names: Sequence[AxisName]) -> Any:
    """`jax.lax.pmax`."""
    return _collective(x, axis_names, jax.lax.pmax, lambda x: jnp.max(x, 0))


def pmin(x: Any, axis_names: Sequence[AxisName]) -> Any:
    """`jax.lax.pmin`."""
    return _collective(x, axis_names, jax.lax.pmin, lambda x: jnp.min(x, 0))


def all_varying(value: Any, axis_names: Sequence[AxisName]) -> Any:
    """`value` with the leaves that vary over some of the mesh axes typed as varying over all.

    JAX reduces a leaf over mesh axes only if it varies over all of them or none.
    """
    meshes, _ = _apart(axis_names)

    def one(x: Any) -> Any:
        still = tuple(name for name in meshes if name not in compat.varying(x))
        some = 0 < len(still) < len(meshes)
        return jax.lax.pcast(x, still, to="varying") if some else x

    return jax.tree.map(one, value)


def call_policy(
    policy: Callable[..., Any], before: Any, value: Any, axis_names: tuple[AxisName, ...]
) -> Any:
    """What a user's policy makes of `value`; its collectives may be over lanes anywhere.

    Inside a checked `shard_map` JAX cannot type a collective over lanes. There the policy is traced in a
    thread of its own, which knows the axis and no check, and what it does is replayed.
    """
    meshes, lanes = _apart(axis_names)
    if not lanes or not compat.inside_checked_shard_map():
        return policy(before, all_varying(value, axis_names), axis_names)
    leaves, treedef = tree_util.tree_flatten((before, value))
    sizes = [(name, jax.lax.axis_size(name)) for name in (*lanes, *meshes)]
    structures: list[Any] = []

    def flat(*leaves: Any) -> Any:
        out, structure = tree_util.tree_flatten(policy(*treedef.unflatten(leaves), axis_names))
        structures.append(structure)
        return out

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    replay = compat.traced_apart(flat, types, sizes)
    # What was traced without types does not make its operands vary alike.
    union = Axes().union(*map(compat.varying, leaves))
    alike = [
        jax.lax.pcast(x, still, to="varying") if (still := tuple(union - compat.varying(x))) else x
        for x in leaves
    ]
    return structures[0].unflatten(replay(*alike))


def _apart(axis_names: Sequence[AxisName]) -> tuple[tuple[AxisName, ...], tuple[AxisName, ...]]:
    """The mesh axes among the names, and the lanes."""
    taken = compat.manual_axes(jax.sharding.get_abstract_mesh())
    meshes = tuple(name for name in axis_names if name in taken)
    return meshes, tuple(name for name in axis_names if name not in taken)


def _batched(values: Sequence[Any], name: AxisName) -> list[bool]:
    """Which values differ between the lanes called `name`."""
    if not values:
        return []
    found: list[bool] = []

    @custom_vmap
    def look(values: Any, lane: Any) -> Any:
        return jnp.zeros(())

    def rule(_: int, batched: Any, values: Any, lane: Any) -> Any:
        found.extend(batched[0])
        return jnp.zeros(()), False

    look.def_vmap(rule)
    # The lane's own number is batched over it, so that these lanes' rule comes first, whatever else
    # the values are batched over.
    look([_without_gradient(x) for x in values], jax.lax.axis_index(name))
    return found


def _without_gradient(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _collective(
    x: Any,
    axis_names: Sequence[AxisName],
    over_mesh: Callable[..., Any],
    over_lanes: Callable[[Any], Any],
) -> Any:
    meshes, lanes = _apart(axis_names)
    for name in lanes:

        @custom_vmap
        def reduced(x: Any, lane: Any) -> Any:
            return x

        def rule(count: int, batched: Any, x: Any, lane: Any) -> Any:
            whole = x if batched[0] else jnp.broadcast_to(x, (count, *x.shape))
            return over_lanes(whole), False

        reduced.def_vmap(rule)
        x = reduced(x, jax.lax.axis_index(name))
    return over_mesh(x, meshes) if meshes else x
