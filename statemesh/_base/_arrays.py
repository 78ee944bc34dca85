"""What counts as an array."""

import jax
import jax.numpy as jnp
import numpy as np

from . import errors
from ._types import NUMBERS, Leaf


def is_masked(x: object) -> bool:
    """Whether `x` is an array of NumPy's with a mask, which JAX would drop without a word."""
    return isinstance(x, np.ma.MaskedArray)


def is_array(x: object) -> bool:
    """Whether `x` is an array of JAX's, or one of NumPy's that JAX can take: of numbers, not of strings.

    **Raises:** `TypeError` for a masked array.
    """
    if isinstance(x, np.ndarray | np.generic):
        if is_masked(x):
            raise errors.masked("an array", [("it", x)])
        return bool(jnp.issubdtype(x.dtype, np.number) or x.dtype == np.bool_)
    return isinstance(x, jax.Array)


def is_array_or_number(x: object) -> bool:
    """Whether `x` is an array or a Python number, of which an array can be made."""
    return is_array(x) or isinstance(x, NUMBERS)


def is_shaped(x: object) -> bool:
    """Whether `x` is an array, stands for one that is not computed, or refers to one."""
    # JAX does not count references as arrays, not even traced ones.
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct | jax.Ref | jax.core.Tracer)


def is_inexact(x: Leaf) -> bool:
    """Whether `x` is an array of floats or complex numbers, which can be differentiated, or stands for it."""
    return is_shaped(x) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def is_key(x: object) -> bool:
    """Whether `x` is a typed key, or an array of them."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
