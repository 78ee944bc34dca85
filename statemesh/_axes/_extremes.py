"""The largest and the smallest of shards' and lanes' values: NaN if there is one, and with a derivative.

`jax.lax.pmax` and `pmin` have none, and an all-reduce of floats leaves it to the device what becomes of NaN,
which CPUs drop, and which of the two zeros is the larger. `jnp.max` and `jnp.min` have one, but what it is
where the extreme is NaN they leave to the compiler.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base._types import AxisName
from ._wide import widened


def largest(x: Any, axis_names: Sequence[AxisName]) -> Any:
    """The largest over mesh axes."""
    return _on_mesh(x, tuple(axis_names), jax.lax.pmax)


def smallest(x: Any, axis_names: Sequence[AxisName]) -> Any:
    """The smallest over mesh axes."""
    return _on_mesh(x, tuple(axis_names), jax.lax.pmin)


def largest_entry(x: Any) -> Any:
    """The largest along the first axis."""
    return _of_entries(x, jnp.max) if _is_float(x) else jnp.max(x, 0)


def smallest_entry(x: Any) -> Any:
    """The smallest along the first axis."""
    return _of_entries(x, jnp.min) if _is_float(x) else jnp.min(x, 0)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _on_mesh(x: Any, names: tuple[AxisName, ...], joined: Callable[..., Any]) -> Any:
    return _of_shards(x, names, joined) if _is_float(x) else joined(x, names)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _of_shards(x: Any, names: tuple[AxisName, ...], joined: Callable[..., Any]) -> Any:
    # One reduction of as many bits, of integers, about which all devices agree.
    wide = widened(x)
    bits = jax.lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}")
    ends = np.iinfo(bits.dtype)
    end = ends.max if joined is jax.lax.pmax else ends.min
    found = joined(jnp.where(jnp.isnan(wide), end, _turned(bits)), names)
    return jax.lax.bitcast_convert_type(_turned(found), wide.dtype).astype(x.dtype)


@_of_shards.defjvp
def _(names: tuple[AxisName, ...], joined: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    found = _of_shards(x, names, joined)
    return found, _derivative(x, found, tangent, lambda x: jax.lax.psum(x, names))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _of_entries(x: Any, extreme: Callable[..., Any]) -> Any:
    return extreme(x, 0)


@_of_entries.defjvp
def _(extreme: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    found = _of_entries(x, extreme)
    return found, _derivative(x, found, tangent, lambda x: jnp.sum(x, 0))


def _derivative(x: Any, found: Any, tangent: Any, total: Callable[[Any], Any]) -> Any:
    """Those that are the extreme share its derivative, as in JAX; so do those that are NaN."""
    wide = widened(tangent)
    hit = (x == found) | (jnp.isnan(x) & jnp.isnan(found))
    share = wide / total(hit.astype(wide.dtype))
    return total(jnp.where(hit, share, 0)).astype(x.dtype)


def _turned(bits: Any) -> Any:
    """The bits of floats as integers in the same order, NaN at the ends; and the way back."""
    # Those of negative floats count downwards, but for the sign.
    return jnp.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)
