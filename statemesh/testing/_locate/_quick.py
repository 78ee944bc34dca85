"""The most frequent operations by NumPy, which runs them once in less time than they take to compile."""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from .._program._numbers import promoted
from .._program._stacked import Axes, Stacked
from .._types import Numbers
from ._flat import Step
from ._quick_indices import INDEXED
from ._quick_shards import GATHERS, REDUCTIONS, gathered, joined, over_shards, split


_logistic: Callable[[Numbers], Numbers] = lambda x: 1 / (1 + np.exp(-x))

# Operations on each number. NumPy does with integers and infinities what XLA does.
_EACH: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "stop_gradient": lambda x: x,
    "square": np.square,
    "copy": lambda x: x,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}
_EACH_FLOAT: Mapping[str, Callable[..., Any]] = {
    "div": np.divide,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "one_minus_square": lambda x: 1 - x * x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": _logistic,
    "pow": np.power,
    "is_finite": np.isfinite,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
}
_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "reduce_sum": np.sum,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_and": np.all,
    "reduce_or": np.any,
}

_NONE = np.dtype(object)

# From the array of one operand, the number of mesh axes in front, and the step.
_One: TypeAlias = Callable[[Numbers, int, Step], Any]


def _reshape(x: Numbers, count: int, step: Step) -> Any:
    return x.reshape((*x.shape[:count], *_shape(step)))


def _broadcast_in_dim(x: Numbers, count: int, step: Step) -> Any:
    shape = _shape(step)
    inner = [1] * len(shape)
    for size, at in zip(x.shape[count:], step.eqn.params["broadcast_dimensions"], strict=True):
        inner[at] = size
    lead = x.shape[:count]
    return np.broadcast_to(x.reshape((*lead, *inner)), (*lead, *shape))


def _transpose(x: Numbers, count: int, step: Step) -> Any:
    return x.transpose((*range(count), *(count + d for d in step.eqn.params["permutation"])))


def _slice(x: Numbers, count: int, step: Step) -> Any:
    params = step.eqn.params
    strides = params["strides"] or (1,) * len(params["start_indices"])
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[(*(slice(None),) * count, *(slice(a, b, c) for a, b, c in bounds))]


def _integer_pow(x: Numbers, count: int, step: Step) -> Any:
    del count
    y = step.eqn.params["y"]
    return x**y if y >= 0 else 1 / x**-y


def _same(x: Numbers, count: int, step: Step) -> Any:
    del count, step
    return x


def _rev(x: Numbers, count: int, step: Step) -> Any:
    return np.flip(x, tuple(count + d for d in step.eqn.params["dimensions"]))


_SINGLE: Mapping[str, _One] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "slice": _slice,
    "integer_pow": _integer_pow,
    "convert_element_type": _same,
    "rev": _rev,
}


def quick(step: Step, values: Sequence[Stacked], wide: bool) -> list[Stacked] | None:
    """The results of a step by NumPy; `None` where it takes JAX.

    **Arguments:**

    - `wide`: whether floats are in double precision.
    """
    if not all(_is_plain(value.x) for value in values):
        return None
    if step.kind != "run":
        return [split(values[0], step) if step.kind == "split" else joined(values[0], step)]
    name = step.name
    dtype = _dtype(step.eqn.outvars[0].aval, wide)
    if dtype.kind not in "biuf":
        return None
    if name == "iota":
        return [Stacked(_iota(step).astype(dtype))]
    xs = [np.asarray(value.x) for value in values]
    given = [Stacked(x, value.axes) for x, value in zip(xs, values, strict=True)]
    with np.errstate(all="ignore"):
        if step.name == "unstack":
            return _unstacked(given[0], step)
        if name in REDUCTIONS:
            return over_shards(step, given)
        if name in GATHERS:
            return gathered(step, given)
        if len(step.results) != 1 or not _is_known(name, step, xs):
            return None
        made = INDEXED[name](step, given) if name in INDEXED else _made(name, step, given)
    if made is None:
        return None
    return [Stacked(np.asarray(made.x).astype(dtype, copy=False), made.axes)]


def _dtype(aval: Any, wide: bool) -> Any:
    if not hasattr(aval, "dtype") or jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return _NONE
    return np.dtype(promoted(aval.dtype) if wide else aval.dtype)


def _is_plain(x: Any) -> bool:
    return not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) and x.dtype.kind in "biuf"


def _is_known(name: str, step: Step, xs: Sequence[Numbers]) -> bool:
    floats = all(x.dtype.kind == "f" for x in xs)
    if name == "convert_element_type":
        # XLA and NumPy make other integers of numbers that are too large.
        return not floats or promoted(step.eqn.params["new_dtype"]).kind == "f"
    if name in ("integer_pow", *_EACH_FLOAT):
        return floats
    if name in (*_REDUCTIONS, *INDEXED):
        return all(x.size for x in xs)
    return name in _EACH or name in _SINGLE or name in ("select_n", "dot_general", "concatenate")


def _made(name: str, step: Step, values: Sequence[Stacked]) -> Stacked | None:
    axes = step.scope.union(values)
    if name in _SINGLE:
        return Stacked(_SINGLE[name](values[0].x, len(axes), step), axes)
    if name in _REDUCTIONS:
        over = tuple(len(axes) + d for d in step.eqn.params["axes"])
        return Stacked(_REDUCTIONS[name](values[0].x, axis=over), axes)
    xs = [_aligned(value, axes) for value in values]
    if name == "dot_general":
        return Stacked(_dot(xs, len(axes), step), axes)
    if name == "concatenate":
        lead = step.scope.shape(axes)
        wide = [np.broadcast_to(x, (*lead, *x.shape[len(axes) :])) for x in xs]
        return Stacked(np.concatenate(wide, len(axes) + step.eqn.params["dimension"]), axes)
    if name == "select_n":
        return _select(_of_one_rank(xs, len(axes)), axes)
    each = _EACH.get(name) or _EACH_FLOAT[name]
    return Stacked(each(*_of_one_rank(xs, len(axes))), axes)


def _aligned(value: Stacked, axes: Sequence[Hashable]) -> Numbers:
    """The array with axes of size one where it has no copy for each shard."""
    x: Numbers = value.x
    lead = iter(x.shape)
    sizes = [next(lead) if name in value.axes else 1 for name in axes]
    return x.reshape((*sizes, *value.shape))


def _of_one_rank(xs: Sequence[Numbers], count: int) -> list[Numbers]:
    """The arrays with axes of size one where a number meets an array."""
    rank = max(x.ndim for x in xs)
    return [x.reshape((*x.shape[:count], *(1,) * (rank - x.ndim), *x.shape[count:])) for x in xs]


def _select(xs: Sequence[Numbers], axes: Axes) -> Stacked | None:
    which, *cases = xs
    return (
        Stacked(np.where(which.astype(bool), cases[1], cases[0]), axes) if len(cases) == 2 else None
    )


def _dot(xs: Sequence[Numbers], count: int, step: Step) -> Numbers:
    (left, right), (left_batch, right_batch) = step.eqn.params["dimension_numbers"]
    letters = iter(range(100))
    lead = [next(letters) for _ in range(count)]
    a = [next(letters) for _ in range(xs[0].ndim - count)]
    b = [next(letters) for _ in range(xs[1].ndim - count)]
    for i, j in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
        b[j] = a[i]
    batch = [a[i] for i in left_batch]
    rest = [k for i, k in enumerate(a) if i not in (*left, *left_batch)]
    rest += [k for j, k in enumerate(b) if j not in (*right, *right_batch)]
    return np.einsum(xs[0], [*lead, *a], xs[1], [*lead, *b], [*lead, *batch, *rest], optimize=True)


def _shape(step: Step) -> tuple[int, ...]:
    aval: Any = step.eqn.outvars[0].aval
    return tuple(map(operator.index, aval.shape))


def _iota(step: Step) -> Numbers:
    params, shape = step.eqn.params, _shape(step)
    along = [1] * len(shape)
    along[params["dimension"]] = -1
    counted = np.arange(shape[params["dimension"]]).reshape(along)
    return np.broadcast_to(counted, shape)


def _unstacked(value: Stacked, step: Step) -> list[Stacked]:
    at = len(value.axes) + step.eqn.params["axis"]
    return [Stacked(x, value.axes) for x in np.moveaxis(value.x, at, 0)]
