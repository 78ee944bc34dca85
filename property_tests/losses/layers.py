"""Losses as plain data, and the arithmetic that whole arrays and shards share.

Nothing here knows JAX or statemesh. A loss is a chain of layers over rows of features, a number for each row,
and a penalty.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..base.arrays import widen
from ..programs import Axes, Case, Leaf, MeshShape


# The number of features of every array. Every mesh can split them over all of its axes.
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
    - `parts`: for each of the parameter's last axes, whether a shard computes with its own part and the
        results are joined. Otherwise a split axis is gathered first.
    - `control`: `'plain'`, or what the layer runs in: `'scan'` (several times), `'layers'` (a scan over the
        parameter's first axis), `'cond'`, `'remat'` or `'jit'`.
    """

    op: str
    param: int | None = None
    parts: tuple[bool, ...] = ()
    control: str = "plain"


@dataclasses.dataclass(frozen=True)
class LossCase:
    """A loss of a model on a mesh, and how its gradient is taken.

    **Attributes:**

    - `case`: the mesh, the input's rows, and the model. Its first slots are the parameters, then come a
        running mean and a counter. It has no program.
    - `layers`: the loss.
    - `rows`: the mesh axes that split the rows, major to minor.
    - `local`: what a shard takes of its rows' losses: `'mean'` or `'sum'`.
    - `inner_axes`, `inner_reduce`: the axes over which the function itself reduces the loss, and how.
    - `axis_names`, `reduce`: the options `axis_name` and `reduce`.
    - `as_tuple`: whether a single axis name is given as a tuple of one.
    - `trained`: which parameters are differentiated.
    - `around`: what surrounds the gradient: `'plain'`, `'jit'`, `'remat'`, `'cond'`, `'scan'` (steps of
        gradient descent), or `'vmap'` (over an axis of the input).
    - `aux`: whether the rows' losses are returned with the loss.
    """

    case: Case
    layers: tuple[Layer, ...]
    rows: Axes = ()
    local: str = "mean"
    inner_axes: Axes = ()
    inner_reduce: str = "mean"
    axis_names: Axes = ()
    as_tuple: bool = False
    reduce: str = "mean"
    trained: tuple[bool, ...] = ()
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


@dataclasses.dataclass(frozen=True)
class LossValues:
    """What a loss is computed from."""

    params: Sequence[Any]
    x: Any
    flag: float

    def widened(self) -> "LossValues":
        """The same values in the precision of the reference."""
        return LossValues(list(map(widen, self.params)), widen(self.x), self.flag)


def real(w: Any) -> Any:
    """A parameter as floats that the layers can use."""
    if np.issubdtype(w.dtype, np.complexfloating):
        return w.real + 0.5 * w.imag**2
    return w.astype(np.float32) if w.dtype == "bfloat16" else w


def penalty_of(w: Any) -> Any:
    return 0.1 * (w**2).sum()


def row_losses(x: Any, np: Numpy) -> Any:
    return ((x + np.cos(np.arange(WIDTH, dtype=x.dtype))) ** 2).mean(-1)


def dense(x: Any, w: Any) -> Any:
    return x @ w / 4
