"""Many arrays reduced over mesh axes by few collectives, narrow floats in float32, and extremes."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from .._base._types import AxisName
from .._jax import _compat as compat
from .._jax._jaxprs import Rule


AnyArray: TypeAlias = Any
"""A JAX or NumPy array, traced or not: a leaf of a user's tree may be either."""


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


Item = TypeVar("Item")

# So many arrays are put end to end by one operation. With more of them XLA compiles each such operation anew,
# even where it has just compiled the same one; with fewer there are more loops to run.
_FUSED = 8


def end_to_end(arrays: Sequence[AnyArray]) -> AnyArray:
    """Arrays as one of one dimension."""
    flat = [reshaped(x, (x.size,)) for x in arrays]
    return _concatenated(flat)


def _concatenated(flat: Sequence[AnyArray]) -> AnyArray:
    if len(flat) > _FUSED:
        flat = jax.lax.optimization_barrier(list(map(_concatenated, _few(flat))))
        return _concatenated(flat)
    return jax.lax.concatenate(flat, 0) if len(flat) > 1 else flat[0]


def written_end_to_end(arrays: Sequence[AnyArray]) -> AnyArray:
    """The same, where the result is an output of the program: a few arrays at a time are written into it."""
    pieces = [_concatenated([reshaped(x, (x.size,)) for x in few]) for few in _few(arrays)]
    if len(pieces) == 1:
        return pieces[0]
    whole = jnp.zeros(sum(piece.size for piece in pieces), pieces[0].dtype)
    for piece, start in zip(pieces, _starts([piece.size for piece in pieces]), strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece, (start,))
    return whole


def taken_apart(
    whole: AnyArray, shapes: Sequence[tuple[int, ...]], at_once: int = _FUSED
) -> list[AnyArray]:
    """The arrays of these shapes that lie end to end.

    **Arguments:**

    - `at_once`: so many of them are taken by one operation. Results of a program are best taken one by one,
        since each is a loop of its own; of what is read by other loops there are fewer with several at once.
    """
    pieces = _split(whole, tuple(map(math.prod, shapes)), at_once)
    return [reshaped(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def reshaped(x: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    return x if x.shape == shape else jax.lax.reshape(x, shape)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _split(whole: AnyArray, sizes: tuple[int, ...], at_once: int) -> list[AnyArray]:
    if len(sizes) <= _FUSED:
        return list(jax.lax.split(whole, sizes))
    few = _few(sizes, at_once)
    totals = list(map(sum, few))
    pieces: list[AnyArray] = []
    for start, total, its_sizes in zip(_starts(totals), totals, few, strict=True):
        part = jax.lax.dynamic_slice(whole, (start,), (total,))
        pieces += jax.lax.split(part, its_sizes) if len(its_sizes) > 1 else [part]
    return pieces


@_split.defjvp
def _(sizes: tuple[int, ...], at_once: int, primals: Any, tangents: Any) -> Any:
    # The transpose of `split` is one concatenation. That of many slices is a sum of as many whole arrays.
    (whole,), (tangent,) = primals, tangents
    return _split(whole, sizes, at_once), list(jax.lax.split(tangent, sizes))


def _starts(sizes: Sequence[int]) -> list[AnyArray]:
    # JAX counts signed numbers below zero from the end, with three more operations for each.
    starts = [np.uint32(start) for start in accumulate(sizes[:-1], initial=0)]
    return jax.lax.optimization_barrier(starts)


def _few(items: Sequence[Item], at_once: int = _FUSED) -> list[Sequence[Item]]:
    return [items[k : k + at_once] for k in range(0, len(items), at_once)]


# A collective of one array over mesh axes, which reduces each element by itself.
Collective: TypeAlias = Callable[[AnyArray, tuple[AxisName, ...]], AnyArray]

# In bytes. An array of this size goes alone: its copies cost more than a collective.
LARGE = 2**17
_BUCKET = 4 * LARGE


def together(
    collective: Collective, arrays: Sequence[AnyArray], axis_names: Sequence[AxisName]
) -> list[AnyArray]:
    """Each array reduced over mesh axes, those of one dtype in one collective for each bucket.

    **Arguments:**

    - `collective`: a sum, or for integers any.
    - `arrays`: they vary over all of the axes, or over none.
    """
    names = tuple(axis_names)
    if not compat.under_jit():
        # Each operation runs by itself: then fewer of them are quicker.
        return [collective(x, names) for x in arrays]

    def reduce(like: Sequence[AnyArray]) -> Sequence[AnyArray]:
        return _several(collective, names, like) if len(like) > 1 else [collective(like[0], names)]

    return by_groups(reduce, arrays, alike(arrays))


def alike(arrays: Sequence[AnyArray]) -> Iterable[list[int]]:
    """The numbers of the arrays of each type: of one dtype, which vary over the same axes."""
    groups: dict[Hashable, list[int]] = {}
    for k, x in enumerate(arrays):
        groups.setdefault((x.dtype, compat.varying(x)), []).append(k)
    return groups.values()


def by_groups(
    run: Callable[[Sequence[AnyArray]], Sequence[AnyArray]],
    arrays: Sequence[AnyArray],
    groups: Iterable[Sequence[int]],
) -> list[AnyArray]:
    """What `run` makes of each group of arrays, in the order of the arrays.

    **Arguments:**

    - `groups`: the numbers of the arrays in each group. What is in none stays as it is.
    """
    results = list(arrays)
    for at in groups:
        for k, x in zip(at, run([arrays[k] for k in at]) if at else (), strict=True):
            results[k] = x
    return results


def _several(
    collective: Collective, names: tuple[AxisName, ...], arrays: Sequence[AnyArray]
) -> list[AnyArray]:
    @custom_vmap
    def run(*arrays: AnyArray) -> list[AnyArray]:
        if math.prod(map(jax.lax.axis_size, names)) == 1:
            # One device sends nothing, so that copies to put arrays end to end would save nothing.
            return [collective(x, names) for x in arrays]
        reduce = partial(_as_one, lambda x: collective(x, names))
        return by_groups(reduce, arrays, in_buckets(arrays))

    def rule(_: int, batched: Sequence[bool], *arrays: AnyArray) -> Any:
        groups = [[k for k, hit in enumerate(batched) if hit == wanted] for wanted in (True, False)]
        reduce = partial(together, collective, axis_names=names)
        return by_groups(reduce, arrays, groups), list(batched)

    run.def_vmap(Rule(rule, joins=True))
    if not jnp.issubdtype(arrays[0].dtype, jnp.inexact):
        return run(*arrays)

    # JAX cannot transpose a `custom_vmap` function: https://github.com/jax-ml/jax/pull/25259 says why.
    @jax.custom_jvp
    def linear(*arrays: AnyArray) -> list[AnyArray]:
        return list(run(*arrays))

    @linear.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return linear(*primals), [collective(x, names) for x in tangents]

    return list(linear(*arrays))


def in_buckets(arrays: Sequence[AnyArray]) -> Iterator[list[int]]:
    """The numbers of the arrays that are reduced as one."""
    bucket: list[int] = []
    size = 0
    for k, x in enumerate(arrays):
        bytes_of_x = x.size * x.dtype.itemsize
        if bytes_of_x >= LARGE:
            yield [k]
            continue
        if size + bytes_of_x > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(k)
        size += bytes_of_x
    if bucket:
        yield bucket


def _as_one(
    collective: Callable[[AnyArray], AnyArray], arrays: Sequence[AnyArray]
) -> list[AnyArray]:
    """What a collective makes of arrays that are put end to end."""
    if len(arrays) == 1:
        return [collective(arrays[0])]
    return taken_apart(collective(end_to_end(arrays)), [x.shape for x in arrays], at_once=1)


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
    def reduce(like: Sequence[AnyArray]) -> Sequence[Array]:
        if _is_float(like[0]):
            return _of_shards(tuple(like), names, joined)
        return together(joined, like, names)

    groups = [[k for k, x in enumerate(arrays) if _is_float(x) is hit] for hit in (True, False)]
    return by_groups(reduce, arrays, groups)


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
    extremes = _of_shards(arrays, names, joined)
    total = lambda x: jax.lax.psum(x, names)
    triples = zip(arrays, extremes, along, strict=True)
    return extremes, [_derivative(x, extreme, t, total) for x, extreme, t in triples]


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
    value = _of_entries(x, extreme)
    return value, _derivative(x, value, tangent, lambda x: jnp.sum(x, 0))


def _derivative(
    x: AnyArray, extreme: Array, tangent: Array, total: Callable[[Array], Array]
) -> Array:
    """The derivative: all values that are the extreme share it, as in JAX, and so do all that are NaN."""
    wide = widened(tangent)
    hit = (x == extreme) | (jnp.isnan(x) & jnp.isnan(extreme))
    share = wide / total(hit.astype(wide.dtype))
    return total(jnp.where(hit, share, 0)).astype(x.dtype)


def _turned(bits: Array) -> Array:
    """The bits of floats as integers in the same order, with NaN at the ends; and the way back."""
    # The bits of negative floats, without the sign, count downwards.
    return jnp.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)
