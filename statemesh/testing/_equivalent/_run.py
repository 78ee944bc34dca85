"""What is run to be compared: calls in a row, a model that moves to another mesh, gradients."""

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


# A function of the arguments that gives the results first, then the new models.
Call: TypeAlias = Callable[..., Any]


def carried(args: Sequence[Any], result: Any) -> int:
    """How many of the first arguments come back as the last results."""
    results = as_results(result)
    for count in range(min(len(args), len(results)), 0, -1):
        pairs = zip(args[:count], results[len(results) - count :], strict=True)
        if all(_is_new(old, new) for old, new in pairs):
            return count
    return 0


def as_results(result: Any) -> tuple[Any, ...]:
    return result if type(result) is tuple else (result,)


def _is_new(old: Any, new: Any) -> bool:
    """Whether one tree may take the other's place. A bare array is not taken for a model."""
    structure: Any = jax.tree.structure
    if structure(old) != structure(new) or structure(old) == structure(0):
        return False
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(np.shape(a) == np.shape(b) for a, b in pairs if eqx.is_array_like(b))


def in_a_row(call: Call, args: Sequence[Any], steps: int, carry: int) -> list[Any]:
    """The results of calls, each of which gets what the one before gave back."""
    given, found = tuple(args), []
    for _ in range(steps):
        # One at a time: with many calls under way collectives of older versions of JAX can lock up.
        result = jax.block_until_ready(call(*given))
        found.append(result)
        given = fed_back(given, result, carry)
    return found


def fed_back(args: Sequence[Any], result: Any, carry: int) -> tuple[Any, ...]:
    results = as_results(result)
    return (*results[len(results) - carry :], *args[carry:])


def moving(first: Call, second: Call, args: Sequence[Any], steps: int, carry: int) -> list[Any]:
    """The same, with what is fed back saved halfway, loaded, and used by another call."""
    before = in_a_row(first, args, steps // 2, carry)
    given = fed_back(args, before[-1], carry)
    given = (*map(saved, given[:carry]), *args[carry:])
    return before + in_a_row(second, given, steps - steps // 2, carry)


def saved(tree: Any) -> Any:
    """A tree whose arrays were written to a file and read from it."""
    return jax.tree.map(lambda x: _through_file(x) if eqx.is_array(x) else x, tree)


def _through_file(x: Any) -> Any:
    file = io.BytesIO()
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = np.asarray(jax.random.key_data(x) if is_key else x)
    # As bytes: of bfloat16 and the like NumPy's format knows nothing.
    np.save(file, data.reshape(-1).view(np.uint8))
    file.seek(0)
    loaded = np.load(file).view(data.dtype).reshape(data.shape)
    if is_key:
        return jax.random.wrap_key_data(loaded, impl=jax.random.key_impl(x))
    return jnp.asarray(loaded)


def gradient(call: Call, args: Sequence[Any]) -> Any:
    """Of a number that every entry of the results has its own part in, by every inexact array."""
    inexact, rest = eqx.partition(tuple(args), eqx.is_inexact_array)

    def results(inexact: Any) -> list[Any]:
        found = jax.tree.leaves(call(*eqx.combine(inexact, rest)))
        return [x for x in found if eqx.is_inexact_array(x)]

    found, pull = jax.vjp(results, inexact)
    return pull([_weights(x) for x in found])[0]


def _weights(x: Any) -> Any:
    part = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    return jax.device_put(np.asarray(part, x.dtype), x.sharding)
