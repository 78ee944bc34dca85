"""Losses as plain data, and what they are of whole arrays: one description for NumPy and for shards.

Nothing here knows JAX or statemesh. A loss is a chain of layers over rows of features, a number for each
row, and a penalty. What is written here knows nothing of shards but how many times they count each part.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..base.arrays import Array
from ..programs import Axes, Case, Leaf, MeshShape


# Every array has so many features: whatever the mesh, they can be split over all of it.
WIDTH = 8
TIMES = 3
# numpy or jax.numpy.
Numpy: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Layer:
    """One step of a loss.

    **Attributes:**

    - `op`: `'dense'`, `'scale'`, `'shift'`, `'rows'` (a number for each row), `'block'` (a vector for the
        rows of each shard), `'center'`, `'tanh'`, `'sin'`, `'softplus'`, `'penalty'`, or `'idle'` (its
        parameter has no part in the loss).
    - `param`: the number of its parameter.
    - `parts`: for each of the parameter's last axes, whether a shard computes with its own part of it and
        the results are joined; else a split axis is gathered first.
    - `control`: `'plain'`, or what it stands in: `'scan'` (several times), `'layers'` (a scan over the
        parameter's first axis), `'cond'`, `'remat'` or `'jit'`.
    """

    op: str
    param: int | None = None
    parts: tuple[bool, ...] = ()
    control: str = "plain"

    def __str__(self) -> str:
        parts = f", parts={self.parts}" if any(self.parts) else ""
        inside = f" in {self.control}" if self.control != "plain" else ""
        return f"{self.op}({'' if self.param is None else f's{self.param}'}{parts}){inside}"


@dataclasses.dataclass(frozen=True, repr=False)
class LossCase:
    """A loss of a model on a mesh, and what is done with its gradient.

    **Attributes:**

    - `case`: the mesh, the input's rows, and the model: its first slots are the parameters, then come a
        running mean and a counter. It has no program.
    - `layers`: the loss.
    - `rows`: the mesh axes that split the rows, major to minor.
    - `local`: what a shard takes of its rows' losses: `'mean'` or `'sum'`.
    - `own`, `own_op`: the axes over which the function reduces the loss itself, by `'mean'` or `'sum'`.
    - `named`, `reduce`: `axis_name` and `reduce`, as given.
    - `trained`: which parameters are differentiated.
    - `lane`: the axis, the mesh's last, that is one of lanes.
    - `quiet`: the function has no collectives over it.
    - `apart`: each lane has a loss of its own.
    - `around`: what the gradient is taken in: `'plain'`, `'jit'`, `'remat'`, `'cond'`, `'scan'` (steps of
        gradient descent), or `'vmap'` (over an axis of the input).
    - `aux`: whether the rows' losses are returned beside the loss.
    """

    case: Case
    layers: tuple[Layer, ...]
    rows: Axes = ()
    local: str = "mean"
    own: Axes = ()
    own_op: str = "mean"
    named: Axes = ()
    reduce: str = "mean"
    trained: tuple[bool, ...] = ()
    lane: str | None = None
    quiet: bool = False
    apart: bool = False
    around: str = "plain"
    aux: bool = False

    @property
    def mesh(self) -> MeshShape:
        return self.case.mesh

    @property
    def params(self) -> tuple[Leaf, ...]:
        return tuple(slot.leaves[0] for slot in self.case.slots[: len(self.trained)])

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.case.inputs[0].shape[-2]

    @property
    def chosen(self) -> list[int]:
        """The numbers of the trained parameters."""
        return [k for k, trained in enumerate(self.trained) if trained]

    @property
    def alone(self) -> Axes:
        """The axes along which each instance has a loss of its own."""
        return (self.lane,) if self.apart and self.lane else ()

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[2:]}
        plain = {f.name: f.default for f in dataclasses.fields(self)[2:]}
        said = ", ".join(f"{k}={value!r}" for k, value in given.items() if value != plain[k])
        lines = [f"Loss on {self.mesh} of {self.case.tree}", f"  x: {self.case.inputs[0]}"]
        lines += [f"  s{k}: {self.case.slots[k]}" for k in range(len(self.trained))]
        lines += [f"  {layer}" for layer in self.layers]
        return "\n".join([*lines, f"  {said}"])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclasses.dataclass(frozen=True)
class Weights:
    """How often each row's loss, and the penalty, count in the loss."""

    row: float
    penalty: float


def weights(loss: LossCase) -> Weights:
    """What all reductions together make of the shards' losses."""
    size = loss.mesh.size
    shared = tuple(name for name in loss.own if name not in loss.rows)
    row, penalty = 1.0, 1.0
    if loss.local == "mean":
        row /= loss.count // size(loss.rows)
    if loss.own_op == "mean":
        row /= size(tuple(name for name in loss.own if name in loss.rows))
    else:
        row *= size(shared)
        penalty *= size(loss.own)
    if loss.reduce == "mean":
        row /= size(tuple(n for n in loss.rows if n not in (*loss.own, *loss.alone)))
    else:
        penalty *= size(loss.named)
    return Weights(row, penalty)


def largest(loss: LossCase) -> float:
    """What a loss comes to, and its gradient, where each row's is one."""
    each = weights(loss)
    return max(1.0, each.row * loss.count + each.penalty)


def rate(loss: LossCase) -> float:
    """How far a step of gradient descent goes."""
    return 0.1 / largest(loss)


def forward(
    loss: LossCase, params: Sequence[Any], x: Any, flag: float, np: Numpy = np
) -> tuple[Any, Any, Any]:
    """The loss of each row, the penalty, and the last features."""
    penalty = 0.0
    for layer in loss.layers:
        w: Any = None if layer.param is None else real(params[layer.param])
        if layer.op in ("penalty", "idle"):
            penalty = penalty + (penalty_of(w) if layer.op == "penalty" else 0.0)
            continue
        each = w if layer.control == "layers" else [w] * (TIMES if layer.control == "scan" else 1)
        for one in each:
            y = _through(loss, layer, x, one, np)
            x = 0.5 * y if layer.control == "cond" and flag <= 0 else y
    return row_losses(x, np), penalty, x


def value(
    loss: LossCase,
    params: Sequence[Any],
    x: Any,
    flag: float,
    lane: int | None = None,
    np: Numpy = np,
) -> Any:
    """The loss, of all rows or of one lane's."""
    rows, penalty, _ = forward(loss, params, x, flag, np)
    if lane is not None:
        assert loss.rows[0] == loss.lane
        size = loss.count // loss.mesh.size((loss.lane,))
        rows = rows[lane * size : (lane + 1) * size]
    each = weights(loss)
    return each.row * rows.sum() + each.penalty * penalty


def real(w: Any) -> Any:
    """A parameter as the layers use it, whatever its dtype is."""
    if np.issubdtype(w.dtype, np.complexfloating):
        return w.real + 0.5 * w.imag**2
    return w.astype(np.float32) if w.dtype == "bfloat16" else w


def penalty_of(w: Any) -> Any:
    return 0.1 * (w**2).sum()


def row_losses(x: Any, np: Numpy) -> Any:
    return ((x + np.cos(np.arange(WIDTH, dtype=x.dtype))) ** 2).mean(-1)


def dense(x: Any, w: Any) -> Any:
    return x @ w / 4


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
    """For each row, the place along `axes` of the shard that has it."""
    shards = np.arange(loss.count) // (loss.count // loss.mesh.size(loss.rows))
    sizes = [loss.mesh.size((name,)) for name in loss.rows]
    at = dict(zip(loss.rows, np.unravel_index(shards, sizes) if sizes else (), strict=True))
    place = np.zeros(loss.count, np.int64)
    for name in axes:
        place = place * loss.mesh.size((name,)) + at[name]
    return place
