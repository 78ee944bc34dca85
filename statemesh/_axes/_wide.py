"""Sums of narrow floats, which are taken in float32 and come back in their own dtype."""

from typing import Any

import jax.numpy as jnp


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is one of floats with fewer digits than float32."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 4


def widened(x: Any) -> Any:
    """`x`, in float32 where its floats are narrower."""
    return x.astype(jnp.float32) if is_narrow(x.dtype) else x


def before_sum(x: Any, divisor: int) -> Any:
    """What is to be summed of `x`, where that sum is to be divided.

    A narrow float is divided already, so that the mean of the largest of bfloat16, whose sum is beyond
    float32 too, is what it should be.
    """
    return x if not is_narrow(x.dtype) else widened(x) / divisor


def after_sum(total: Any, dtype: Any, divisor: int) -> Any:
    """The sum, divided and in its dtype, of what `before_sum` made of arrays of that dtype."""
    if is_narrow(dtype):
        return total.astype(dtype)
    return total if divisor == 1 else total / divisor
