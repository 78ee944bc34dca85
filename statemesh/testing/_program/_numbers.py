"""The numbers of arrays, and when two of them differ by more than rounding.

Every rule of "more than rounding" stands here, with the reason of its numbers.

- Copies inside one replay (`more_than_rounding`): shards that compute the same from the same numbers.
- A result and the reference (`allowed`): what noise as large as rounding shows that rounding may change.
- Copies on devices are judged by the same allowance as the numbers that they are copies of.
"""

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._types import AnyLeaf, Numbers
from ._stacked import numpy_of


# Whose rounding is meant: that of double precision, or that of the program's own dtypes.
Rounding: TypeAlias = Literal["double", "own"]

# So many times as far as noise moves a number, rounding may. A few runs with noise do not reach the largest
# error: in the program's own dtypes the most of 3 runs and four times as much, which more runs (24) confirm
# before a number counts as off; in double precision, where a mistake is larger by many powers of ten, eight.
_FACTOR: dict[Rounding, float] = {"double": 8.0, "own": 4.0}
# What XLA fuses it may round once more or less, on either side: so many roundoffs are always allowed.
_ALWAYS = 4
# Copies in a replay: of a narrow dtype each may be rounded once. In double precision the same function can be
# off by more, compiled for another shape; what a mistake changes is still far larger.
_OF_COPIES, _OF_DOUBLE_COPIES = 2, 64
# What that does not explain is run so often with noise. Noise moves what is rounding by as much as it is: a
# difference that stays within a part of its size in all of these runs is none.
RUNS_OF_COPIES, FACTOR_OF_COPIES = 8, 4
# The runs with noise: few for every array that differs, many for a number that is off in few.
FEW_RUNS, MANY_RUNS = 3, 24
# A number whose rounding is larger than this part of it is not judged: a mistake of a few per cent could not
# be told from rounding.
CLEAR = 0.05
# Of such a number the runs with noise may not show the largest movement: so many times as much is allowed.
HEAVY_TAIL = 32
# A mesh that rounds so many times as much as the reference uses a narrower dtype: the roundoff of float16 is
# 8,192 times that of float32, and bfloat16's 65,536 times.
NARROWER = 100


def is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def promoted(dtype: Any) -> Any:
    """The dtype that stands for a dtype in double precision."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def roundoff(dtype: Any) -> float:
    """The distance from one to the next number of a dtype; zero for exact dtypes."""
    return float(jnp.finfo(dtype).eps) if is_inexact(dtype) else 0.0  # type: ignore[no-untyped-call]


def has_shape(x: AnyLeaf) -> bool:
    """Whether a leaf is an array or stands for one. Types such as `np.float32` have a `dtype` too."""
    return hasattr(x, "dtype") and isinstance(getattr(x, "shape", None), tuple)


def is_key(x: AnyLeaf) -> bool:
    """Whether a leaf is an array of random keys, or stands for one."""
    return has_shape(x) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def data_of(x: AnyLeaf) -> AnyLeaf:
    """An array, or the integers that keys are, which have an axis more."""
    return jax.random.key_data(x) if is_key(x) else x


def is_numpy(x: object) -> bool:
    """Whether a leaf is an array of NumPy that JAX traces: those of strings or objects are static."""
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "USOMm"


def is_numeric(x: AnyLeaf) -> bool:
    """Whether a leaf is an array of numbers or keys, what stands for one, or a number."""
    is_array = is_numpy(x) or (has_shape(x) and not isinstance(x, np.ndarray | np.generic))
    return is_array or isinstance(x, bool | int | float | complex)


def numbers(x: AnyLeaf) -> Numbers:
    """The numbers of a leaf: floats in double precision, keys as integers, and of what is static none."""
    if not is_numeric(x):
        return np.zeros(0)
    values = np.asarray(data_of(x))
    if jnp.issubdtype(values.dtype, jnp.floating):
        return values.astype(np.float64)  # NumPy cannot subtract bfloat16 and the like.
    return values.astype(np.complex128) if values.dtype.kind == "c" else values


def equal(a: Numbers, b: Numbers) -> Numbers:
    """Which numbers are equal. NaN equals NaN."""
    return (a == b) | ((a != a) & (b != b))


def distances(a: Numbers, b: Numbers) -> Numbers:
    """The differences between numbers; infinite where only one of the two is NaN or infinite."""
    if a.dtype.kind in "biu" and b.dtype.kind in "biu":
        # Large integers that differ may be one number in double precision.
        apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
        return np.where(a == b, 0.0, np.maximum(apart, 1.0))
    with np.errstate(invalid="ignore"):
        difference: Any = np.abs(a - b)
    return np.where(equal(a, b), 0.0, np.where(np.isnan(difference), np.inf, difference))


def more_than_rounding(x: AnyLeaf, first: AnyLeaf) -> AnyLeaf:
    """The differences, in float32, between an array and the first copy; zero where rounding explains them."""
    numpy, same = numpy_of(x), equal(x, first)
    if not is_inexact(x.dtype):
        apart = abs(x.astype(np.float32) - first.astype(np.float32))
        return numpy.where(same, np.float32(0), numpy.maximum(apart, 1))
    difference = numpy.nan_to_num(abs(x - first), nan=np.inf, posinf=np.inf)
    largest = numpy.where(numpy.isfinite(x), abs(x), 0).max()
    eps = roundoff(x.dtype)
    tolerated = largest * eps * (_OF_COPIES if eps > 1e-6 else _OF_DOUBLE_COPIES)
    return numpy.where(same | (difference <= tolerated), 0, difference).astype(np.float32)


def least(rounding: Rounding, dtype: Any, want: Numbers) -> Numbers:
    """The roundoff of each number."""
    unit = roundoff(np.float64) if rounding == "double" else roundoff(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.nan_to_num(unit * np.abs(want.astype(np.complex128)), posinf=0.0, nan=0.0)


def always(rounding: Rounding, dtype: Any, want: Numbers) -> Numbers:
    """What rounding may change wherever a number comes from."""
    return _ALWAYS * least(rounding, dtype, want)


def allowed(rounding: Rounding, dtype: Any, want: Numbers, moved: Numbers) -> Numbers:
    """How far rounding may bring each number from the reference, if noise moves it so far.

    What is computed in integers or booleans from floats may be anything where noise changes it.
    """
    if want.dtype.kind in "biu":
        return np.where(moved > 0, np.inf, 0.0)
    return _FACTOR[rounding] * moved + always(rounding, dtype, want) + flushed(rounding, dtype)


def flushed(rounding: Rounding, dtype: Any) -> float:
    """What is smaller has fewer digits, and XLA may flush it to zero.

    A zero is judged all the same: what is larger would be found.
    """
    if not is_inexact(dtype):
        return 0.0
    kind = np.float64 if rounding == "double" else dtype
    return float(jnp.finfo(kind).tiny)  # type: ignore[no-untyped-call]
