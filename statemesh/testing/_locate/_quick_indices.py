"""Parts of arrays, running sums and positions, by NumPy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._program._stacked import Stacked
from .._types import Numbers
from ._flat import Step


def _dynamic_slice(step: Step, values: Sequence[Stacked]) -> Stacked:
    array, *starts = values
    axes = step.scope.union(values)
    sizes = step.eqn.params["slice_sizes"]
    whole = _on(array, axes, step)
    made = np.empty((*step.scope.shape(axes), *sizes), whole.dtype)
    for shard, at in _places(step, axes, starts, whole.shape[len(axes) :], sizes):
        made[shard] = whole[shard][at]
    return Stacked(made, axes)


def _dynamic_update_slice(step: Step, values: Sequence[Stacked]) -> Stacked:
    array, new, *starts = values
    axes = step.scope.union(values)
    made, part = _on(array, axes, step).copy(), _on(new, axes, step)
    for shard, at in _places(step, axes, starts, made.shape[len(axes) :], new.shape):
        made[(*shard, *at)] = part[shard]
    return Stacked(made, axes)


def _on(value: Stacked, axes: Any, step: Step) -> Numbers:
    """The array with a copy along each of these mesh axes."""
    sizes = iter(value.x.shape)
    lead = [next(sizes) if name in value.axes else 1 for name in axes]
    x = np.asarray(value.x).reshape((*lead, *value.shape))
    return np.broadcast_to(x, (*step.scope.shape(axes), *value.shape))


def _places(
    step: Step, axes: Any, starts: Sequence[Stacked], shape: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """For each shard the part of its array. Parts that stick out are moved inside, as XLA does."""
    firsts = [_on(start, axes, step) for start in starts]
    for shard in np.ndindex(*step.scope.shape(axes)):
        at = []
        for first, whole, size in zip(firsts, shape, sizes, strict=True):
            k = min(max(int(first[shard]), 0), whole - size)
            at.append(slice(k, k + size))
        yield shard, tuple(at)


def _running(reduce: Callable[..., Any]) -> Callable[[Step, Sequence[Stacked]], Stacked]:
    def run(step: Step, values: Sequence[Stacked]) -> Stacked:
        (value,) = values
        axis = len(value.axes) + step.eqn.params["axis"]
        if not step.eqn.params["reverse"]:
            return Stacked(reduce(value.x, axis=axis), value.axes)
        return Stacked(np.flip(reduce(np.flip(value.x, axis), axis=axis), axis), value.axes)

    return run


def _position(find: Callable[..., Any]) -> Callable[[Step, Sequence[Stacked]], Stacked]:
    def run(step: Step, values: Sequence[Stacked]) -> Stacked:
        (value,) = values
        (axis,) = step.eqn.params["axes"]
        return Stacked(find(value.x, axis=len(value.axes) + axis), value.axes)

    return run


INDEXED: Mapping[str, Callable[[Step, Sequence[Stacked]], Stacked]] = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "cumsum": _running(np.cumsum),
    "argmax": _position(np.argmax),
    "argmin": _position(np.argmin),
}
