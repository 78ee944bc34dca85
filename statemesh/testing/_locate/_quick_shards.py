"""Splitting, joining and reducing over shards, by NumPy."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from .._program._jaxprs import names_of
from .._program._stacked import Axes, Scope, Stacked, as_names
from ._flat import Step


REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "psum": np.sum,
    "psum_invariant": np.sum,
    "pmax": np.max,
    "pmin": np.min,
}
GATHERS = ("all_gather", "all_gather_invariant", "reduce_scatter")


def split(value: Stacked, step: Step) -> Stacked:
    """What `Scope.split` gives."""
    shape, names, at = list(value.x.shape[: len(value.axes)]), list(value.axes), []
    at = list(range(len(value.axes)))
    for size, entry in zip(value.shape, _entries(step, len(value.shape)), strict=True):
        for name in entry:
            names.append(name)
            at.append(len(shape))
            shape.append(step.scope.sizes[name])
        shape.append(size // math.prod(step.scope.shape(entry)))
    found = dict(zip(names, at, strict=True))
    axes = step.scope.in_order(names)
    x = np.moveaxis(
        np.asarray(value.x).reshape(shape), [found[name] for name in axes], range(len(axes))
    )
    return Stacked(x, axes)


def joined(value: Stacked, step: Step) -> Stacked:
    """What `Scope.joined` gives, of the first copy along the axes that the spec leaves out."""
    entries = _entries(step, len(value.shape))
    used = {name for entry in entries for name in entry}
    outer = step.around.sizes
    x = np.asarray(value.x)
    at = tuple(slice(None) if name in used or name in outer else 0 for name in value.axes)
    x, axes = x[at], [name for name in value.axes if name in used or name in outer]
    missing = [name for name in step.scope.in_order(used) if name not in axes]
    lead = step.scope.shape(missing)
    x = np.broadcast_to(x, (*lead, *x.shape))
    axes = [*missing, *axes]
    first = [name for name in axes if name not in used]
    order, shape = [axes.index(name) for name in first], list(step.scope.shape(first))
    for dim, (size, entry) in enumerate(zip(value.shape, entries, strict=True)):
        order += [*map(axes.index, entry), len(axes) + dim]
        shape.append(size * math.prod(step.scope.shape(entry)))
    return Stacked(x.transpose(order).reshape(shape), tuple(first))


def _entries(step: Step, rank: int) -> list[Axes]:
    spec = step.spec or ()
    return [as_names(entry) for entry in (*spec, *[None] * (rank - len(spec)))]


def over_shards(step: Step, values: Sequence[Stacked]) -> list[Stacked] | None:
    """The results of a reduction over shards."""
    params, scope = step.eqn.params, step.scope
    names = names_of(step.eqn)
    numbers = any(isinstance(name, int) for name in params["axes"])
    if params.get("axis_index_groups") is not None or numbers or not {*names} <= {*scope.sizes}:
        return None
    return [_reduced(step.name, value, names, scope) for value in values]


def _reduced(name: str, value: Stacked, names: Sequence[Hashable], scope: Scope) -> Stacked:
    over = tuple(i for i, axis in enumerate(value.axes) if axis in names)
    x = REDUCTIONS[name](value.x, axis=over) if over else value.x
    if name.startswith("psum"):
        # What all shards have alike is summed as often as there are shards.
        x = x * math.prod(scope.sizes[axis] for axis in names if axis not in value.axes)
    x = np.asarray(x).astype(value.x.dtype, copy=False)
    return Stacked(x, tuple(axis for axis in value.axes if axis not in names))


def gathered(step: Step, values: Sequence[Stacked]) -> list[Stacked] | None:
    """The results of a gathering from all shards, or of a sum of which each shard keeps a part."""
    params, scope, names = step.eqn.params, step.scope, names_of(step.eqn)
    if (
        params.get("axis_index_groups") is not None
        or len(names) != 1
        or names[0] not in scope.sizes
    ):
        return None
    (name,) = names
    run = _scattered if step.name == "reduce_scatter" else _gathered
    return [run(step, value, name) for value in values]


def _gathered(step: Step, value: Stacked, name: Hashable) -> Stacked:
    size, d = step.scope.sizes[name], step.eqn.params["all_gather_dimension"]
    axes = tuple(axis for axis in value.axes if axis != name)
    if name in value.axes:
        x = np.moveaxis(value.x, value.axes.index(name), len(axes) + d)
    else:
        one = np.expand_dims(value.x, len(axes) + d)
        x = np.repeat(one, size, len(axes) + d)
    if step.eqn.params["tiled"]:
        at = len(axes) + d
        x = x.reshape((*x.shape[:at], size * x.shape[at + 1], *x.shape[at + 2 :]))
    return Stacked(x, axes)


def _scattered(step: Step, value: Stacked, name: Hashable) -> Stacked:
    size, d = step.scope.sizes[name], step.eqn.params["scatter_dimension"]
    total = _reduced("psum", value, [name], step.scope)
    at, shape = len(total.axes) + d, total.x.shape
    left = (size, shape[at] // size) if step.eqn.params["tiled"] else (size,)
    x = total.x.reshape((*shape[:at], *left, *shape[at + 1 :]))
    axes = step.scope.in_order((*total.axes, name))
    return Stacked(np.moveaxis(x, at, axes.index(name)), axes)
