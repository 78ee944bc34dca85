"""Many small arrays put end to end in one, and taken apart again, in programs that compile quickly.

XLA's CPU compiler compiles equal loops once. Loops that begin at different constants are not equal.
So a barrier hides these numbers from it.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._wide import AnyArray


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
    made: list[AnyArray] = []
    for start, total, own in zip(_starts(totals), totals, few, strict=True):
        part = jax.lax.dynamic_slice(whole, (start,), (total,))
        made += jax.lax.split(part, own) if len(own) > 1 else [part]
    return made


@_split.defjvp
def _(sizes: tuple[int, ...], at_once: int, primals: Any, tangents: Any) -> Any:
    # The transpose of `split` is one concatenation. That of many slices is a sum of as many whole arrays.
    (whole,), (tangent,) = primals, tangents
    return _split(whole, sizes, at_once), list(jax.lax.split(tangent, sizes))


def _starts(sizes: Sequence[int]) -> list[AnyArray]:
    # JAX counts signed numbers below zero from the end, with three more operations for each.
    starts = [np.uint32(start) for start in accumulate(sizes[:-1], initial=0)]
    hidden: list[AnyArray] = jax.lax.optimization_barrier(starts)
    return hidden


def _few(items: Sequence[Item], at_once: int = _FUSED) -> list[Sequence[Item]]:
    return [items[k : k + at_once] for k in range(0, len(items), at_once)]
