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
from jax.typing import DTypeLike

from .._base._types import AxisName
from ._joined import by_groups, together
from ._wide import AnyArray, widened


# The operands of a function of one array, or their tangents.
_One: TypeAlias = tuple[Array]
# Those of a function of several.
_Several: TypeAlias = tuple[AnyArray, ...]


def largest(arrays: Sequence[AnyArray], axis_names: Sequence[AxisName]) -> list[Array]:
    """The largest of each array over mesh axes."""
    return _on_mesh(arrays, tuple(axis_names), jax.lax.pmax)


def smallest(arrays: Sequence[AnyArray], axis_names: Sequence[AxisName]) -> list[Array]:
    """The smallest of each array over mesh axes."""
    return _on_mesh(arrays, tuple(axis_names), jax.lax.pmin)


def largest_entry(x: AnyArray) -> Array:
    """The largest along the first axis."""
    return _of_entries(x, jnp.max) if _is_float(x) else jnp.max(x, 0)


def smallest_entry(x: AnyArray) -> Array:
    """The smallest along the first axis."""
    return _of_entries(x, jnp.min) if _is_float(x) else jnp.min(x, 0)


def _is_float(x: AnyArray) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _on_mesh(
    arrays: Sequence[AnyArray], names: tuple[AxisName, ...], joined: Callable[..., Array]
) -> list[Array]:
    def one(own: Sequence[AnyArray]) -> Sequence[Array]:
        if _is_float(own[0]):
            return _of_shards(tuple(own), names, joined)
        return together(joined, own, names)

    groups = [[k for k, x in enumerate(arrays) if _is_float(x) is hit] for hit in (True, False)]
    return by_groups(one, arrays, groups)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _of_shards(
    arrays: _Several, names: tuple[AxisName, ...], joined: Callable[..., Array]
) -> list[Array]:
    # All devices agree about the order of integers: so the bits are reduced, as integers in the same order.
    ordered = [_ordered(widened(x), joined is jax.lax.pmax) for x in arrays]
    pairs = zip(together(joined, ordered, names), arrays, strict=True)
    return [_float_of(bits, widened(x).dtype).astype(x.dtype) for bits, x in pairs]


@_of_shards.defjvp
def _(
    names: tuple[AxisName, ...],
    joined: Callable[..., Array],
    primals: tuple[_Several],
    tangents: tuple[_Several],
) -> tuple[list[Array], list[Array]]:
    (arrays,), (along,) = primals, tangents
    made = _of_shards(arrays, names, joined)
    total = lambda x: jax.lax.psum(x, names)
    triples = zip(arrays, made, along, strict=True)
    return made, [_derivative(x, found, tangent, total) for x, found, tangent in triples]


def _ordered(x: Array, upwards: bool) -> Array:
    """The bits of floats as integers in the same order, with NaN at the end that is looked for."""
    bits = jax.lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    ends = np.iinfo(bits.dtype)
    return jnp.where(jnp.isnan(x), ends.max if upwards else ends.min, _turned(bits))


def _float_of(bits: Array, dtype: DTypeLike) -> Array:
    return jax.lax.bitcast_convert_type(_turned(bits), dtype)


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
