"""The operations that NumPy has, on the arrays of all shards at once.

To compile an operation takes XLA longer than NumPy needs to run it a thousand times on the few numbers of a
test. A test runs the equations of all planted models both ways and expects the same numbers.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, SupportsInt, TypeAlias

import numpy as np
from jax.lax import GatherScatterMode

from .._types import Numbers
from ._jaxprs import Equation, names_of
from ._numbers import promoted
from ._stacked import Axes, MappedAxes, Stacked


# From the parameters of an equation, the number of leading axes that are mesh axes, and the operands.
_Rule: TypeAlias = Callable[..., Any]
_Params: TypeAlias = Mapping[str, Any]


def _as(x: Numbers, dtype: Any) -> Numbers:
    """In another dtype. Of complex numbers that become real NumPy would warn."""
    is_real = x.dtype.kind == "c" and np.dtype(dtype).kind != "c"
    return (x.real if is_real else x).astype(dtype, copy=False)


def operands_for_numpy(eqn: Equation, values: Sequence[Stacked], axes: Axes) -> list[Numbers]:
    """The operands of an equation as NumPy's arrays, whose first axes are the mesh axes `axes`.

    An operand that is the same along one of them has one entry there. Where an operation takes numbers one by
    one, a single number has as many axes as the arrays that it meets.
    """
    each = eqn.primitive.name in _ON_EACH_NUMBER
    rank = max((len(value.shape) for value in values), default=0)
    return [_aligned(value, axes, rank if each else len(value.shape)) for value in values]


def by_numpy(
    eqn: Equation, xs: Sequence[Numbers], lanes: int, *, wide: bool
) -> Callable[..., list[Numbers]] | None:
    """What computes the results of an equation by NumPy; `None` where it takes JAX.

    **Arguments:**

    - `xs`: the operands, of `operands_for_numpy`.
    - `lanes`: how many of their axes are mesh axes.
    - `wide`: whether floats are in double precision.
    """
    name, results = eqn.primitive.name, [var.aval for var in eqn.outvars]
    # Without a dtype a result may be a token or a reference.
    dtypes = [getattr(result, "dtype", None) for result in results]
    if not dtypes or not all(
        map(is_number, [promoted(d) if wide and d is not None else d for d in dtypes])
    ):
        return None
    dtypes = list(map(promoted, dtypes)) if wide else dtypes
    if not _is_computed_alike(eqn, xs, dtypes[0], wide):
        return None
    each = _ON_EACH_NUMBER.get(name)
    rule = each or functools.partial(_ON_ONE_SHARD[name], eqn.params, lanes)
    several = eqn.primitive.multiple_results

    def run(*xs: Numbers) -> list[Numbers]:
        results = rule(*xs) if several else [rule(*xs)]
        pairs = zip(results, dtypes, strict=True)
        return [_as(np.asarray(x), dtype) for x, dtype in pairs]

    return run


def collects_by_numpy(eqn: Equation, scope: MappedAxes) -> bool:
    """Whether NumPy computes a collective: over all shards along axes of this scope."""
    names = {*names_of(eqn)}
    return bool(names) and names <= {*scope.sizes} and not eqn.params.get("axis_index_groups")


def is_number(dtype: Any) -> bool:
    """Whether NumPy computes with a dtype."""
    # The kind of bfloat16 and of other narrow dtypes, with which it cannot compute, is V.
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf"


def _is_computed_alike(eqn: Equation, xs: Sequence[Numbers], dtype: Any, wide: bool) -> bool:
    """Whether NumPy does with these operands what XLA does."""
    name = eqn.primitive.name
    floats = all(x.dtype.kind == "f" for x in xs)
    if name in _OF_FLOATS:
        return floats
    if name in ("div", "rem") and not floats:
        return bool(np.all(xs[1] != 0))
    if name in ("shift_left", "shift_right_logical"):
        return dtype.kind == "u" and bool(np.all(xs[1] < 8 * dtype.itemsize))
    if name == "bitcast_convert_type":
        return xs[0].dtype.kind in "iu" and eqn.params["new_dtype"].itemsize == xs[0].dtype.itemsize
    if name == "reduce_precision":
        return wide
    if name == "convert_element_type" and floats and dtype.kind != "f":
        # XLA and NumPy make other integers of numbers that are too large.
        return bool(np.all(np.abs(xs[0]) < 2**31)) and dtype.kind != "u"
    if name == "dot_general" and any(x.dtype != dtype for x in xs):
        return False
    if name == "pad":
        return all(min(counts) >= 0 == counts[2] for counts in eqn.params["padding_config"])
    # Of no numbers NumPy has no largest.
    return all(x.size for x in xs) and (name in _ON_EACH_NUMBER or name in _ON_ONE_SHARD)


def _aligned(value: Stacked, axes: Axes, rank: int) -> Numbers:
    """The array with axes of size one for mesh axes that it lacks, and where a number meets an array."""
    lead = iter(value.x.shape)
    sizes = [next(lead) if name in value.axes else 1 for name in axes]
    return value.x.reshape((*sizes, *(1,) * (rank - len(value.shape)), *value.shape))


def _within(axes: Sequence[SupportsIndex], lanes: int) -> tuple[int, ...]:
    # The derivatives of JAX have axes that are NumPy's integers.
    return tuple(operator.index(axis) + lanes for axis in axes)


def _lane_by_lane(rule: _Rule) -> _Rule:
    """A rule that knows one shard, run for each."""

    def each(params: _Params, lanes: int, *xs: Numbers) -> Numbers:
        shape = np.broadcast_shapes(*(x.shape[:lanes] for x in xs))
        flat = [np.broadcast_to(x, (*shape, *x.shape[lanes:])) for x in xs]
        results = [rule(params, *(x[at] for x in flat)) for at in np.ndindex(shape)]
        return np.stack(results).reshape((*shape, *results[0].shape))

    return each


def _broadcast_in_dim(params: _Params, lanes: int, x: Numbers) -> Numbers:
    lead, inner = x.shape[:lanes], [1] * len(params["shape"])
    for size, at in zip(x.shape[lanes:], params["broadcast_dimensions"], strict=True):
        inner[at] = size
    return np.broadcast_to(x.reshape((*lead, *inner)), (*lead, *params["shape"]))


def _reshape(params: _Params, lanes: int, x: Numbers) -> Numbers:
    if params["dimensions"] is not None:
        x = x.transpose(*range(lanes), *_within(params["dimensions"], lanes))
    return x.reshape((*x.shape[:lanes], *params["new_sizes"]))


def _transpose(params: _Params, lanes: int, x: Numbers) -> Numbers:
    return x.transpose(*range(lanes), *_within(params["permutation"], lanes))


def _slice(params: _Params, lanes: int, x: Numbers) -> Numbers:
    starts, strides = params["start_indices"], params["strides"]
    parts = map(slice, starts, params["limit_indices"], strides or [1] * len(starts))
    return x[(*[slice(None)] * lanes, *parts)]


def _concatenate(params: _Params, lanes: int, *xs: Numbers) -> Numbers:
    shape = np.broadcast_shapes(*(x.shape[:lanes] for x in xs))
    same = [np.broadcast_to(x, (*shape, *x.shape[lanes:])) for x in xs]
    return np.concatenate(same, params["dimension"] + lanes)


def _stack(params: _Params, lanes: int, *xs: Numbers) -> Numbers:
    axis = params["axis"] + lanes
    return _concatenate(
        {"dimension": params["axis"]}, lanes, *(np.expand_dims(x, axis) for x in xs)
    )


def _pad(params: _Params, lanes: int, x: Numbers, value: Numbers) -> Numbers:
    config = [(0, 0)] * lanes + [(low, high) for low, high, _ in params["padding_config"]]
    shape = np.broadcast_shapes(x.shape[:lanes], value.shape[:lanes])
    sizes = [sum(both) + size for both, size in zip(config[lanes:], x.shape[lanes:], strict=True)]
    one = value.reshape((*value.shape[:lanes], *[1] * len(sizes)))
    result = np.array(np.broadcast_to(one, (*shape, *sizes)))
    parts = [
        slice(low, low + n) for (low, _), n in zip(config, (*shape, *x.shape[lanes:]), strict=True)
    ]
    result[tuple(parts)] = x
    return result


def _split(params: _Params, lanes: int, x: Numbers) -> list[Numbers]:
    return np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"] + lanes)


def _unstack(params: _Params, lanes: int, x: Numbers) -> list[Numbers]:
    return list(np.moveaxis(x, params["axis"] + lanes, 0))


def _cumsum(params: _Params, lanes: int, x: Numbers) -> Numbers:
    axis = params["axis"] + lanes
    if not params["reverse"]:
        return np.cumsum(x, axis)
    return np.flip(np.cumsum(np.flip(x, axis), axis), axis)


def _integer_pow(params: _Params, lanes: int, x: Numbers) -> Numbers:
    y = params["y"]
    return x**y if y >= 0 else 1 / x**-y


def _dot_general(params: _Params, lanes: int, x: Numbers, y: Numbers) -> Numbers:
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    # The sides are matrices, after the mesh axes and the batch.
    a, of_x = _matrices(x, lanes, left_batch, left, is_left=True)
    b, of_y = _matrices(y, lanes, right_batch, right, is_left=False)
    batch = [x.shape[lanes + axis] for axis in left_batch]
    product = np.matmul(a, b)
    return product.reshape((*product.shape[:lanes], *batch, *of_x, *of_y))


def _matrices(
    x: Numbers, lanes: int, batch: Sequence[int], summed: Sequence[int], *, is_left: bool
) -> tuple[Numbers, list[int]]:
    """Matrices for a product, and the sizes of the axes that it keeps."""
    kept = [axis for axis in range(x.ndim - lanes) if axis not in (*batch, *summed)]
    order = (*batch, *kept, *summed) if is_left else (*batch, *summed, *kept)
    x = x.transpose(*range(lanes), *_within(order, lanes))
    shape = dict(zip(order, x.shape[lanes:], strict=True))
    size: Callable[[Iterable[int]], int] = lambda axes: math.prod(shape[axis] for axis in axes)
    sides = (size(kept), size(summed)) if is_left else (size(summed), size(kept))
    x = x.reshape((*x.shape[:lanes], size(batch), *sides))
    return x, [shape[axis] for axis in kept]


def _part(x: Numbers, starts: Sequence[Numbers], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Where a part of an array is. One that sticks out is moved inside, as XLA does."""
    limits = np.subtract(x.shape, sizes)
    firsts = [min(max(int(first), 0), limit) for first, limit in zip(starts, limits, strict=True)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def _dynamic_slice(params: _Params, x: Numbers, *starts: Numbers) -> Numbers:
    return x[_part(x, starts, params["slice_sizes"])]


def _dynamic_update_slice(params: _Params, x: Numbers, new: Numbers, *starts: Numbers) -> Numbers:
    result = x.copy()
    result[_part(x, starts, new.shape)] = new
    return result


def _gather(params: _Params, x: Numbers, indices: Numbers) -> Numbers:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    windows = [(k, size) for k, size in enumerate(sizes) if k not in gone]
    places, inside = _places(x, indices, numbers.start_index_map, batching, windows, params["mode"])
    result = x[places]
    if not inside.all():
        result = np.where(inside, result, _fill(params["fill_value"], x.dtype))
    first = indices.ndim - 1
    return np.moveaxis(result, range(first, result.ndim), numbers.offset_dims)


def _fill(value: Any, dtype: Any) -> Any:
    """What a gather gives for an index that the array does not have."""
    if value is not None:
        return value
    if dtype.kind == "f":
        return np.nan
    limits = np.iinfo(dtype if dtype.kind != "b" else np.uint8)
    return limits.max if dtype.kind != "i" else limits.min


def _scatter(
    update: np.ufunc | None, params: _Params, x: Numbers, indices: Numbers, updates: Numbers
) -> Numbers:
    numbers, first = params["dimension_numbers"], indices.ndim - 1
    updates = np.moveaxis(updates, numbers.update_window_dims, range(first, updates.ndim))
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    batching = zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    )
    kept = [k for k in range(x.ndim) if k not in gone]
    windows = list(zip(kept, updates.shape[first:], strict=True))
    of_operand = numbers.scatter_dims_to_operand_dims
    places, inside = _places(x, indices, of_operand, batching, windows, params["mode"])
    inside = np.broadcast_to(inside, updates.shape)
    places, result = tuple(place[inside] for place in places), x.copy()
    if update is None:
        result[places] = updates[inside]
    else:
        update.at(result, places, updates[inside])
    return result


def _places(
    x: Numbers,
    indices: Numbers,
    of_operand: Sequence[SupportsInt],
    batching: Iterable[tuple[int, int]],
    windows: Sequence[tuple[int, int]],
    mode: GatherScatterMode,
) -> tuple[tuple[Numbers, ...], Numbers]:
    """Where the numbers of all windows are in an array: for each of its axes an array of indices.

    **Arguments:**

    - `of_operand`: the axes of the array that the last axis of `indices` is about.
    - `batching`: pairs of an axis of the array and one of `indices`, which go along with each other.
    - `windows`: the other axes that a window has, each with its size there.

    **Returns:** also which of the windows lie inside of the array.
    """
    batch = indices.shape[:-1]
    sizes = dict(windows)
    starts = {int(axis): indices[..., k].astype(np.int64) for k, axis in enumerate(of_operand)}
    inside = np.ones(batch, bool)
    for axis, start in starts.items():
        last = x.shape[axis] - sizes.get(axis, 1)
        inside &= (start >= 0) & (start <= last)
        starts[axis] = np.clip(start, 0, last)
    if mode is not GatherScatterMode.FILL_OR_DROP:
        inside = np.ones(batch, bool)
    for axis, along in batching:
        starts[axis] = np.indices(batch, sparse=True)[along]
    shape = (*batch, *sizes.values())
    places = []
    for axis in range(x.ndim):
        start = starts.get(axis, np.zeros((), np.int64))
        start = np.broadcast_to(start, batch).reshape((*batch, *[1] * len(sizes)))
        if axis in sizes:
            within = [1] * len(shape)
            within[len(batch) + list(sizes).index(axis)] = sizes[axis]
            start = start + np.arange(sizes[axis]).reshape(within)
        places.append(np.broadcast_to(start, shape))
    return tuple(places), inside.reshape((*batch, *[1] * len(sizes)))


def _divide(x: Numbers, y: Numbers) -> Numbers:
    # That of whole numbers rounds towards zero.
    return np.divide(x, y) if x.dtype.kind == "f" else (x - np.fmod(x, y)) // y


def _select(which: Numbers, *cases: Numbers) -> Numbers:
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(which.astype(int), cases)


def _reducing(reduce: Callable[..., Any]) -> _Rule:
    return lambda params, lanes, x: reduce(x, axis=_within(params["axes"], lanes))


# What a scatter does with the numbers that are there. JAX has two spellings of most names.
_UPDATES: Mapping[str, np.ufunc | None] = {
    "": None,
    **dict.fromkeys(("-add", "_add"), np.add),
    **dict.fromkeys(("-sub", "_sub"), np.subtract),
    **dict.fromkeys(("-mul", "_mul"), np.multiply),
    **dict.fromkeys(("-min", "_min"), np.minimum),
    **dict.fromkeys(("-max", "_max"), np.maximum),
}
_NAMED_ALIKE = (
    *("exp", "exp2", "log", "log1p", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh"),
    *("sqrt", "floor", "ceil"),
)
# With integers and infinities, NumPy does in the others what XLA does.
_OF_FLOATS = (*_NAMED_ALIKE, "pow", "rsqrt", "logistic", "is_finite", "integer_pow")
_ON_EACH_NUMBER: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _NAMED_ALIKE},
    "sign": np.sign,
    "div": _divide,
    "rem": np.fmod,
    "shift_left": np.left_shift,
    "shift_right_logical": np.right_shift,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "is_finite": np.isfinite,
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
    "square": np.square,
    "one_minus_square": lambda x: (1 - x) * (1 + x),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": _select,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "name": lambda x: x,
    "stop_gradient": lambda x: x,
    # The result is given its dtype in any case.
    "convert_element_type": lambda x: x,
}
_ON_ONE_SHARD: Mapping[str, _Rule] = {
    "integer_pow": _integer_pow,
    "reduce_precision": lambda params, lanes, x: x,
    "reshape": _reshape,
    "squeeze": lambda params, lanes, x: x.squeeze(_within(params["dimensions"], lanes)),
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "rev": lambda params, lanes, x: np.flip(x, _within(params["dimensions"], lanes)),
    "slice": _slice,
    "stack": _stack,
    "split": _split,
    "unstack": _unstack,
    "pad": _pad,
    "iota": lambda params, lanes: np.indices(params["shape"])[params["dimension"]],
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "reduce_sum": _reducing(np.sum),
    "reduce_max": _reducing(np.max),
    "reduce_min": _reducing(np.min),
    "reduce_and": _reducing(np.bitwise_and.reduce),
    "reduce_or": _reducing(np.bitwise_or.reduce),
    "cumsum": _cumsum,
    "argmax": lambda params, lanes, x: x.argmax(*_within(params["axes"], lanes)),
    "argmin": lambda params, lanes, x: x.argmin(*_within(params["axes"], lanes)),
    "bitcast_convert_type": lambda params, lanes, x: x.view(params["new_dtype"]),
    "gather": _lane_by_lane(_gather),
    **{
        f"scatter{mark}": _lane_by_lane(functools.partial(_scatter, update))
        for mark, update in _UPDATES.items()
    },
    "dynamic_slice": _lane_by_lane(_dynamic_slice),
    "dynamic_update_slice": _lane_by_lane(_dynamic_update_slice),
}
