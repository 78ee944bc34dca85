"""The reference of losses: their values on whole arrays, in NumPy or `jax.numpy`.

It knows no shards. Only `weights` knows how often all shards together count each part.
"""

import dataclasses
from typing import Any

import numpy as np

from ..base.arrays import Array
from ..programs import Axes
from .layers import TIMES, Layer, LossCase, LossValues, Numpy, dense, penalty_of, real, row_losses


@dataclasses.dataclass(frozen=True)
class Weights:
    """How often the loss of each row, and the penalty, count in the loss."""

    row: float
    penalty: float


def weights(loss: LossCase) -> Weights:
    """What all reductions together count."""
    size = loss.mesh.size
    shared = tuple(name for name in loss.inner_axes if name not in loss.rows)
    row, penalty = 1.0, 1.0
    if loss.local == "mean":
        row /= loss.count // size(loss.rows)
    if loss.inner_reduce == "mean":
        row /= size(tuple(name for name in loss.inner_axes if name in loss.rows))
    else:
        row *= size(shared)
        penalty *= size(loss.inner_axes)
    if loss.reduce == "mean":
        row /= size(tuple(name for name in loss.rows if name not in loss.inner_axes))
    else:
        penalty *= size(loss.axis_names)
    return Weights(row, penalty)


def largest(loss: LossCase) -> float:
    """The loss, and the size of its gradient, if each row's is one."""
    each = weights(loss)
    return max(1.0, each.row * loss.count + each.penalty)


def rate(loss: LossCase) -> float:
    """The step size of gradient descent."""
    return 0.1 / largest(loss)


def forward(loss: LossCase, values: LossValues, np: Numpy = np) -> tuple[Any, Any, Any]:
    """The loss of each row, the penalty, and the last features."""
    penalty, x = 0.0, values.x
    for layer in loss.layers:
        w: Any = None if layer.param is None else real(values.params[layer.param])
        if layer.op in ("penalty", "idle"):
            penalty = penalty + (penalty_of(w) if layer.op == "penalty" else 0.0)
            continue
        each = w if layer.control == "layers" else [w] * (TIMES if layer.control == "scan" else 1)
        for one in each:
            y = _through(loss, layer, x, one, np)
            x = 0.5 * y if layer.control == "cond" and values.flag <= 0 else y
    return row_losses(x, np), penalty, x


def value(loss: LossCase, values: LossValues, np: Numpy = np) -> Any:
    """The loss of all rows."""
    rows, penalty, _ = forward(loss, values, np)
    each = weights(loss)
    return each.row * rows.sum() + each.penalty * penalty


def _through(loss: LossCase, layer: Layer, x: Any, w: Any, np: Numpy) -> Any:
    match layer.op:
        case "dense":
            return np.tanh(dense(x, w))
        case "scale":
            return x * w
        case "shift" | "rows":
            return x + w
        case "block":
            assert layer.param is not None
            return x + w[blocks(loss, loss.params[layer.param].spec[0])]
        case "center":
            return x - x.mean(-2, keepdims=True)
        case "softplus":
            return np.logaddexp(x, 0.0)
        case op:
            return getattr(np, op)(x)


def blocks(loss: LossCase, axes: Axes) -> Array:
    """For each row, the index along `axes` of the shard that has it."""
    shards = np.arange(loss.count) // (loss.count // loss.mesh.size(loss.rows))
    sizes = [loss.mesh.size((name,)) for name in loss.rows]
    at = dict(zip(loss.rows, np.unravel_index(shards, sizes) if sizes else (), strict=True))
    index = np.zeros(loss.count, np.int64)
    for name in axes:
        index = index * loss.mesh.size((name,)) + at[name]
    return index
