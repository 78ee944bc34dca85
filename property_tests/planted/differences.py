"""How far a case is from one device, without the check's judgement: a mistake must change something."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import statemesh as sm

from .case import Case


def difference(case: Case) -> float:
    """The largest relative distance of a result on the mesh from the same result on one device.

    Over all calls, gradients and copies on devices. It is infinite where a dtype, a shape, a structure or the
    place of a NaN differs.
    """
    sizes = tuple(case.mesh.values())
    many = _results(
        case, Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple(case.mesh))
    )
    one = _results(
        case, Mesh(np.array(jax.devices()[:1]).reshape([1] * len(sizes)), tuple(case.mesh))
    )
    structures: list[Any] = [jax.tree.structure(many), jax.tree.structure(one)]
    if structures[0] != structures[1]:
        return np.inf
    return max(map(_distance, jax.tree.leaves(many), jax.tree.leaves(one)))


def _results(case: Case, mesh: Mesh) -> list[Any]:
    mapped = sm.shard_map(
        case.fun, mesh, in_specs=case.in_specs, out_specs=case.out_specs, check_vma=case.check_vma
    )
    args, found = case.args, []
    if case.gradients:
        found.append(
            jax.grad(lambda floats: _weighted(mapped(*_join(args, floats))))(_floats(args))
        )
    for _ in range(case.steps):
        results = mapped(*args)
        found.append(jax.block_until_ready(results))
        parts = results if isinstance(results, tuple) else (results,)
        fed = {jax.tree.structure(part): part for part in parts if sm.states(part)}
        args = tuple(fed.get(jax.tree.structure(arg), arg) for arg in args)
    return found


def _floats(args: Any) -> list[Any]:
    return [leaf if _inexact(leaf) else None for leaf in jax.tree.leaves(args)]


def _join(args: Any, floats: list[Any]) -> Any:
    leaves: list[Any] = jax.tree.leaves(args)
    structure: Any = jax.tree.structure(args)
    return structure.unflatten(
        [leaf if one is None else one for leaf, one in zip(leaves, floats, strict=True)]
    )


def _inexact(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _weighted(results: Any) -> jax.Array:
    """One number in which every result counts, each entry differently."""
    leaves = [leaf.astype("float32") for leaf in jax.tree.leaves(results) if _inexact(leaf)]
    weights = [1 + jnp.sin(jnp.arange(leaf.size)).reshape(leaf.shape) for leaf in leaves]
    total = jnp.zeros(())
    for weight, leaf in zip(weights, leaves, strict=True):
        total += (weight * leaf).sum()
    return total


def _distance(many: jax.Array, one: jax.Array) -> float:
    if many.shape != one.shape or many.dtype != one.dtype or _weak(many) != _weak(one):
        return np.inf
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        many, one = jax.random.key_data(many), jax.random.key_data(one)
    right = np.asarray(one).astype("float64")
    return max(
        _relative(np.asarray(copy.data).astype("float64"), right[copy.index])
        for copy in many.addressable_shards
    )


def _weak(value: jax.Array) -> bool:
    """Keys have no such attribute."""
    return bool(getattr(value, "weak_type", False))


def _relative(found: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    if (np.isnan(found) != np.isnan(right)).any() or (np.isinf(found) != np.isinf(right)).any():
        return np.inf
    there = np.isfinite(right)
    largest = np.abs(right[there]).max(initial=1e-9)
    return float(np.abs(found[there] - right[there]).max(initial=0) / largest)
