"""NumPy arrays of the references. Nothing here knows JAX or statemesh."""

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt


Array: TypeAlias = npt.NDArray[Any]
EPS = float(np.finfo(np.float32).eps)


@dataclasses.dataclass(frozen=True)
class Global:
    """A global array, and how far single precision may be from it."""

    value: Array
    error: float = 0.0


@dataclasses.dataclass(frozen=True)
class Values:
    """What a case is run on: the values of its slots, for each call the gain and the inputs, and a seed."""

    slots: list[list[Array]]
    calls: list[tuple[float, list[Array]]]
    seed: int = 0


def wide_dtype(x: Any) -> type[Any]:
    """The dtype in which a reference computes with `x`."""
    if np.issubdtype(x.dtype, np.integer):
        return np.int64
    return np.complex128 if np.issubdtype(x.dtype, np.complexfloating) else np.float64


def widen(value: npt.ArrayLike) -> Array:
    """An array in the dtype in which a reference computes."""
    x = np.asarray(value)
    return x.astype(wide_dtype(x))


def aligned(x: Array) -> Array:
    """A copy of `x` whose memory JAX on a CPU may use without another copy."""
    room = np.empty(x.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy: Array = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy
