"""Sums of narrow floats, which are taken in float32 and come back in their own dtype."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


AnyArray: TypeAlias = Any
"""An array of JAX's or of NumPy's, traced or not: a leaf of a user's tree may be any of them."""


def is_narrow(dtype: DTypeLike) -> bool:
    """Whether a dtype is one of floats with fewer digits than float32."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize < 4


def widened(x: AnyArray) -> AnyArray:
    """`x`, in float32 where its floats are narrower."""
    return x.astype(jnp.float32) if is_narrow(x.dtype) else x


def before_sum(x: AnyArray, divisor: int) -> AnyArray:
    """What is summed in place of `x`, where the sum is to be divided.

    A narrow float is divided before: the sum of the largest numbers of bfloat16 would be too large for
    float32 too, while their mean is not.
    """
    return x if not is_narrow(x.dtype) else widened(x) / divisor


def after_sum(total: AnyArray, dtype: DTypeLike, divisor: int) -> AnyArray:
    """The sum of what `before_sum` made of arrays of this dtype, divided and in the dtype again."""
    if is_narrow(dtype):
        return total.astype(dtype)
    # Not `/`, which takes several times as long to trace.
    return total if divisor == 1 else jax.lax.div(total, np.asarray(divisor, total.dtype))
