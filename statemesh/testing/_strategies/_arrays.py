"""A strategy for arrays of every dtype that JAX has."""

import functools
import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from jax.typing import DTypeLike

import statemesh as sm

from .. import _errors as errors
from .._errors import check
from .._types import DType
from ._meshes import Draw


Array: TypeAlias = npt.NDArray[Any]
AnyShape: TypeAlias = int | Sequence[int]
# The period of the numbers in an array. It divides no power of two, so that the parts of shards differ.
PERIOD = 7
# The ones of JAX know bfloat16, but have no stubs.
finfo: Any = jnp.finfo
iinfo: Any = jnp.iinfo


def arrays(
    *,
    shape: AnyShape | st.SearchStrategy[AnyShape],
    dtype: DTypeLike | st.SearchStrategy[DTypeLike] = np.float32,
    min_value: int | float = -4,
    max_value: int | float = 4,
) -> st.SearchStrategy[Array]:
    """NumPy arrays that repeat up to seven drawn numbers.

    Seven divides no power of two, so that the parts of different shards differ. Floats are finite and not
    subnormal, since XLA takes subnormal numbers for zero. Shrinks to zeros.

    **Arguments:**

    - `shape`: the shape of the arrays, or a strategy of shapes.
    - `dtype`: a dtype of booleans, integers, floats (`jnp.bfloat16` too) or complex numbers, or a strategy.
    - `min_value`, `max_value`: the smallest and the largest number, as far as the dtype can hold them. For
        complex numbers they bound each part; for booleans they mean nothing.

    **Returns:** a strategy of `numpy.ndarray`.

    **Raises:** `StatemeshError`, when an array is drawn, for a dtype that JAX does not have (64 bits need
    `jax_enable_x64`), and where the dtype has no number from `min_value` to `max_value`.

    !!! example

        ```python
        >>> from hypothesis import find
        >>> from statemesh.testing import arrays
        >>> find(arrays(shape=(2, 3), dtype="int8"), lambda x: x.sum() > 0)
        array([[1, 1, 1],
               [1, 1, 1]], dtype=int8)

        ```
    """
    if not isinstance(shape, st.SearchStrategy):
        _check_shape(shape)
    for argument, number in (("min_value", min_value), ("max_value", max_value)):
        check("arrays", argument, number, Real, "a number")

    @st.composite
    def drawn(draw: Draw) -> Array:
        side_or_sides: Any = draw(shape) if isinstance(shape, st.SearchStrategy) else shape
        sides = (side_or_sides,) if isinstance(side_or_sides, int) else tuple(side_or_sides)
        exact = _checked(draw(dtype) if isinstance(dtype, st.SearchStrategy) else dtype)
        count = max(1, min(PERIOD, math.prod(sides)))
        few = draw(st.lists(_numbers(exact, min_value, max_value), min_size=1, max_size=count))
        return np.resize(np.array(few, exact), sides)

    return drawn()


def _check_shape(shape: object) -> None:
    sides = shape if isinstance(shape, Sequence) else [shape]
    if not all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 0 for n in sides):
        raise errors.bad_keyword(
            "arrays", "shape", shape, "a shape, as in shape=(8, 4), or a strategy"
        )


def _checked(dtype: DTypeLike) -> DType:
    """The dtype, if JAX has it."""
    exact = np.dtype(dtype)
    is_number = exact == np.bool_ or jnp.issubdtype(exact, np.number)
    if not is_number or exact.itemsize > (16 if exact.kind == "c" else 8):
        raise sm.StatemeshError(f"arrays: JAX has no arrays of dtype {exact}.")
    kept = jax.dtypes.canonicalize_dtype(exact)
    if kept != exact:
        raise sm.StatemeshError(
            f"arrays: without jax_enable_x64, JAX makes {kept} of dtype {exact}. Ask for {kept}, or set "
            "jax.config.update('jax_enable_x64', True)."
        )
    return exact


@functools.lru_cache(maxsize=1024)
def _numbers(dtype: DType, least: int | float, most: int | float) -> st.SearchStrategy[Any]:
    """Python numbers from `least` to `most` that the dtype can hold exactly."""
    if dtype == np.bool_:
        return st.booleans()
    if jnp.issubdtype(dtype, np.complexfloating):
        part = _floats(np.empty(0, dtype).real.dtype, least, most)
        return st.builds(complex, part, part)
    return (_floats if jnp.issubdtype(dtype, np.floating) else _integers)(dtype, least, most)


def _integers(dtype: DType, least: int | float, most: int | float) -> st.SearchStrategy[int]:
    info = iinfo(dtype)
    low, high = max(least, info.min), min(most, info.max)
    if not low <= high or math.ceil(low) > math.floor(high):
        raise errors.no_numbers(dtype, least, most)
    return st.integers(math.ceil(low), math.floor(high))


def _floats(dtype: DType, least: int | float, most: int | float) -> st.SearchStrategy[float]:
    low, high = _at_least(dtype, least), -_at_least(dtype, -most)
    if not low <= high:
        raise errors.no_numbers(dtype, least, most)
    tiny = float(finfo(dtype).tiny)

    def held(x: float) -> float:
        """The nearest number that the dtype has. The bounds are such numbers, so it lies between them too."""
        near = float(np.asarray(x).astype(dtype))
        return math.copysign(0.0, near) if abs(near) < tiny else near

    width: Any = 64 if dtype == np.float64 else 32
    any_float = st.floats(low, high, width=width, allow_subnormal=False).map(held)
    # Random draws would hardly find these edge cases.
    rare = [x for x in (-0.0, tiny, -tiny, low, high) if low <= x <= high]
    if low == 0 and math.copysign(1, low) > 0:
        rare.remove(-0.0)
    return st.one_of(any_float, any_float, any_float, st.sampled_from(rare))


def _at_least(dtype: DType, bound: int | float) -> float:
    """The smallest finite number of a dtype that is at least `bound` and not subnormal."""
    info = finfo(dtype)
    largest, tiny = float(info.max), float(info.tiny)
    if not bound <= largest:
        return math.inf
    near = np.asarray(max(bound, -largest)).astype(dtype)
    if float(near) < bound:
        near = np.nextafter(near, np.asarray(largest).astype(dtype))
    number = float(near)
    if 0 < number < tiny:
        return tiny
    return -0.0 if -tiny < number < 0 else number
