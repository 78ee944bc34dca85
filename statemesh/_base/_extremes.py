"""The largest and the smallest of shards' values, as `jax.numpy` has them of an array's.

`jax.lax.pmax` and `pmin` have no derivative. What they make of NaN is left to the device, as is which of the
two zeros is the larger: on CPUs an all-reduce drops NaN.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ._types import AxisName
from ._wide import widened


def largest(x: Any, axis_names: Sequence[AxisName]) -> Any:
    """The largest over mesh axes; NaN if there is one."""
    names = tuple(axis_names)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return _of_floats(x, names, True) if is_float else jax.lax.pmax(x, names)


def smallest(x: Any, axis_names: Sequence[AxisName]) -> Any:
    """The smallest over mesh axes; NaN if there is one."""
    names = tuple(axis_names)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return _of_floats(x, names, False) if is_float else jax.lax.pmin(x, names)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _of_floats(x: Any, names: tuple[AxisName, ...], high: bool) -> Any:
    # One reduction of as many bits, of integers, about which devices agree.
    wide = widened(x)
    number = jnp.dtype(f"int{jnp.finfo(wide.dtype).bits}")
    bits = jax.lax.bitcast_convert_type(wide, number)
    ends = jnp.iinfo(number)
    ranks = jnp.where(jnp.isnan(wide), ends.max if high else ends.min, _turned(bits))
    found = (jax.lax.pmax if high else jax.lax.pmin)(ranks, names)
    return jax.lax.bitcast_convert_type(_turned(found), wide.dtype).astype(x.dtype)


@_of_floats.defjvp
def _(names: tuple[AxisName, ...], high: bool, primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    found = _of_floats(x, names, high)
    # As JAX has it for an array: those that share the extreme share the derivative, and that of NaN is NaN.
    wide = widened(tangent)
    hit = (x == found).astype(wide.dtype)
    share = hit / jax.lax.psum(hit, names)
    return found, jax.lax.psum(wide * share, names).astype(x.dtype)


def _turned(bits: Any) -> Any:
    """The bits of floats as integers in the same order, those of NaN at the ends; and the way back."""
    # Of negative floats all bits but the sign count downwards.
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)
