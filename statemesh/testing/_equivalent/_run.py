"""The runs that are compared: chained calls, a model that moves to another mesh, gradients."""

import io
from collections.abc import Sequence
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._types import Fun, PyTree, tree_util


# A function that returns its outputs first, then the new models.
Call: TypeAlias = Fun


def carried(args: Sequence[PyTree], result: PyTree) -> int:
    """The number of first arguments that come back as the last results."""
    results = as_results(result)
    for count in range(min(len(args), len(results)), 0, -1):
        pairs = zip(args[:count], results[len(results) - count :], strict=True)
        if all(_is_new(old, new) for old, new in pairs):
            return count
    return 0


def as_results(result: PyTree) -> tuple[PyTree, ...]:
    return result if type(result) is tuple else (result,)


def _is_new(old: PyTree, new: PyTree) -> bool:
    """Whether a tree may replace the old one. A bare array does not count as a model."""
    structure = tree_util.tree_structure
    if structure(old) != structure(new) or structure(old) == structure(0):
        return False
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(np.shape(a) == np.shape(b) for a, b in pairs if eqx.is_array_like(b))


def chained_calls(call: Call, args: Sequence[PyTree], steps: int, carry: int) -> list[PyTree]:
    """The results of calls, each of which gets the models that the call before returned."""
    given, found = tuple(args), []
    for _ in range(steps):
        # One call at a time: in older versions of JAX the collectives of several running calls can lock up.
        result = jax.block_until_ready(call(*given))
        found.append(result)
        given = fed_back(given, result, carry)
    return found


def fed_back(args: Sequence[PyTree], result: PyTree, carry: int) -> tuple[PyTree, ...]:
    results = as_results(result)
    return (*results[len(results) - carry :], *args[carry:])


def calls_with_a_move(
    first: Call, second: Call, args: Sequence[PyTree], steps: int, carry: int
) -> list[PyTree]:
    """The same, but halfway the models are saved, loaded, and passed to another function."""
    before = chained_calls(first, args, steps // 2, carry)
    given = fed_back(args, before[-1], carry)
    given = (*map(saved, given[:carry]), *args[carry:])
    return before + chained_calls(second, given, steps - steps // 2, carry)


def saved(tree: PyTree) -> PyTree:
    """A tree whose arrays were written to a file and read from it."""
    return jax.tree.map(lambda x: _through_file(x) if eqx.is_array(x) else x, tree)


def _through_file(x: jax.Array) -> jax.Array:
    file = io.BytesIO()
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = np.asarray(jax.random.key_data(x) if is_key else x)
    # As bytes: the format of NumPy does not know bfloat16 and the like.
    np.save(file, data.reshape(-1).view(np.uint8))
    file.seek(0)
    loaded = np.load(file).view(data.dtype).reshape(data.shape)
    if is_key:
        key: jax.Array = jax.random.wrap_key_data(loaded, impl=jax.random.key_impl(x))
        return key
    return jnp.asarray(loaded)


def gradient(call: Call, args: Sequence[PyTree]) -> PyTree:
    """The gradient, by every inexact array, of a sum that gives every entry of the results its own weight."""
    inexact, rest = eqx.partition(tuple(args), eqx.is_inexact_array)

    def results(inexact: PyTree) -> list[jax.Array]:
        found = jax.tree.leaves(call(*eqx.combine(inexact, rest)))
        return [x for x in found if eqx.is_inexact_array(x)]

    found, pull = jax.vjp(results, inexact)
    return pull([_weights(x) for x in found])[0]


def _weights(x: jax.Array) -> jax.Array:
    part = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    placed: jax.Array = jax.device_put(np.asarray(part, x.dtype), x.sharding)
    return placed
