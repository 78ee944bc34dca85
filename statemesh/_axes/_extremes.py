"""The largest and the smallest of shards' and lanes' values: NaN if there is one, and with a derivative.

`jax.lax.pmax` and `pmin` have no derivative. Their all-reduce of floats leaves it to the device what becomes
of NaN, which CPUs drop, and which of the two zeros is the larger. `jnp.max` and `jnp.min` have a derivative,
but leave it to the compiler what that is where the extreme is NaN.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._base._types import AxisName
from ._wide import AnyArray, widened


# The operands of a function of one array, or their tangents.
_One: TypeAlias = tuple[Array]


def largest(x: AnyArray, axis_names: Sequence[AxisName]) -> Array:
    """The largest over mesh axes."""
    return _on_mesh(x, tuple(axis_names), jax.lax.pmax)


def smallest(x: AnyArray, axis_names: Sequence[AxisName]) -> Array:
    """The smallest over mesh axes."""
    return _on_mesh(x, tuple(axis_names), jax.lax.pmin)


def largest_entry(x: AnyArray) -> Array:
    """The largest along the first axis."""
    return _of_entries(x, jnp.max) if _is_float(x) else jnp.max(x, 0)


def smallest_entry(x: AnyArray) -> Array:
    """The smallest along the first axis."""
    return _of_entries(x, jnp.min) if _is_float(x) else jnp.min(x, 0)


def _is_float(x: AnyArray) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _on_mesh(x: AnyArray, names: tuple[AxisName, ...], joined: Callable[..., Array]) -> Array:
    return _of_shards(x, names, joined) if _is_float(x) else joined(x, names)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _of_shards(x: AnyArray, names: tuple[AxisName, ...], joined: Callable[..., Array]) -> Array:
    # All devices agree about the order of integers: so the bits are reduced, as integers in the same order.
    wide = widened(x)
    bits = jax.lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}")
    ends = np.iinfo(bits.dtype)
    end = ends.max if joined is jax.lax.pmax else ends.min
    found = joined(jnp.where(jnp.isnan(wide), end, _turned(bits)), names)
    return jax.lax.bitcast_convert_type(_turned(found), wide.dtype).astype(x.dtype)


@_of_shards.defjvp
def _(
    names: tuple[AxisName, ...], joined: Callable[..., Array], primals: _One, tangents: _One
) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    found = _of_shards(x, names, joined)
    return found, _derivative(x, found, tangent, lambda x: jax.lax.psum(x, names))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _of_entries(x: AnyArray, extreme: Callable[..., Array]) -> Array:
    return extreme(x, 0)


@_of_entries.defjvp
def _(extreme: Callable[..., Array], primals: _One, tangents: _One) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    found = _of_entries(x, extreme)
    return found, _derivative(x, found, tangent, lambda x: jnp.sum(x, 0))


def _derivative(
    x: AnyArray, found: Array, tangent: Array, total: Callable[[Array], Array]
) -> Array:
    """The derivative: all values that are the extreme share it, as in JAX, and so do all that are NaN."""
    wide = widened(tangent)
    hit = (x == found) | (jnp.isnan(x) & jnp.isnan(found))
    share = wide / total(hit.astype(wide.dtype))
    return total(jnp.where(hit, share, 0)).astype(x.dtype)


def _turned(bits: Array) -> Array:
    """The bits of floats as integers in the same order, with NaN at the ends; and the way back."""
    # The bits of negative floats, without the sign, count downwards.
    return jnp.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)
