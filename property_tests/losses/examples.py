"""Fixed losses that together touch every part of the gradient's reduction. Each is a check to call.

Each makes its mapping again, so that it runs the engine as a mutant has changed it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import statemesh as sm

from ..base.arrays import Array
from ..base.models import mesh_of
from ..programs import INT, Axes, Branch, Case, Leaf, MeshShape, Slot, Spec
from .calls import mapping_of
from .checks import check_loss
from .layers import WIDTH, Layer, LossCase, LossValues


ROWS = 8
X, Y = ("x",), ("y",)
LINE, GRID = MeshShape((2,), explicit=True), MeshShape((2, 2))


def loss_of(
    mesh: MeshShape,
    params: tuple[Leaf, ...],
    layers: tuple[Layer, ...],
    rows: Axes,
    *,
    arrays: tuple[int, ...] = (),
    **given: Any,
) -> LossCase:
    """A loss. By default all parameters are trained and `axis_names` are the axes of the rows.

    The parameters at `arrays` are outside States.
    """
    slots = tuple(
        Slot("array" if k in arrays else "ParamState", (leaf,), None, k not in arrays)
        for k, leaf in enumerate(params)
    )
    running, counter = (
        Slot("BatchState", (Leaf((WIDTH,)),), "mean", True),
        Slot("State", (Leaf((), INT),)),
    )
    lead: Spec = ((),) if given.get("around") == "vmap" else ()
    leaf = Leaf((*[2] * len(lead), ROWS, WIDTH), spec=(*lead, rows, ()))
    count = len(params)
    tree = Branch("dict", (Branch("layer", tuple(range(count))), "relu", count + 1, count))
    case = Case(mesh, 2, (leaf,), (*slots, running, counter), tree, (), (), ())
    return LossCase(case, layers, rows, **{"trained": (True,) * count, "axis_names": rows, **given})


def values_for(loss: LossCase) -> LossValues:
    def filled(leaf: Leaf, start: float) -> Array:
        numbers = np.cos(start + np.arange(np.prod(leaf.shape))).reshape(leaf.shape)
        return np.asarray(
            numbers + 1j * numbers[::-1] if leaf.dtype == "complex64" else numbers, leaf.dtype
        )

    params = [filled(leaf, 1.0 + k) for k, leaf in enumerate(loss.params)]
    return LossValues(params, filled(loss.case.inputs[0], 0.5), 1.0)


def vector(*axes: str, dtype: str = "float32") -> Leaf:
    return Leaf((WIDTH,), dtype, (axes,))


def matrix(inner: Axes, outer: Axes) -> Leaf:
    return Leaf((WIDTH, WIDTH), spec=(inner, outer))


# Rows split over x, parts of a matrix over y, a parameter that is gathered, and one for each shard.
MIXED = loss_of(
    GRID,
    (
        matrix(Y, ()),
        vector("x"),
        vector(),
        Leaf((2, WIDTH), spec=(X, ())),
        vector(dtype="complex64"),
    ),
    (
        Layer("scale", 4),
        Layer("dense", 0, (True, False), "remat"),
        Layer("scale", 1),
        Layer("center"),
        Layer("block", 3),
        Layer("shift", 2),
        Layer("penalty", 1),
    ),
    X,
    arrays=(2,),
    aux=True,
)
# The loss is the same everywhere over y, and `axis_name` names y nevertheless.
SHARED = loss_of(
    GRID,
    (matrix((), Y), vector()),
    (Layer("dense", 0, (False, True)), Layer("scale", 1)),
    X,
    axis_names=("y", "x"),
)
# A sum. To it some parameters contribute the same on all shards.
SUM = loss_of(
    GRID,
    (vector(), vector("x"), vector()),
    (Layer("scale", 0), Layer("penalty", 1), Layer("penalty", 2)),
    ("x", "y"),
    reduce="sum",
)
# The function reduces over x itself, and y needs no reduction. One parameter is not trained.
OWN = loss_of(
    GRID,
    (vector(), matrix(Y, ()), vector()),
    (Layer("scale", 0), Layer("dense", 1, (True, False)), Layer("shift", 2)),
    X,
    inner_axes=X,
    trained=(True, True, False),
)
DESCENT = loss_of(
    GRID,
    (matrix(Y, ()), vector("x"), vector()),
    (Layer("dense", 0, (True, False)), Layer("shift", 1), Layer("scale", 2, (False,), "cond")),
    X,
    around="scan",
)
LANES = loss_of(
    LINE,
    (vector("x"), vector(), Leaf((2, WIDTH), spec=(X, ()))),
    (Layer("shift", 0), Layer("scale", 1, (False,), "scan"), Layer("block", 2), Layer("center")),
    X,
    lane="x",
    arrays=(1,),
)
LANES_SUM = loss_of(
    LINE, (vector(), vector()), (Layer("scale", 0), Layer("penalty", 1)), X, reduce="sum", lane="x"
)
# Each lane computes a part of one loss.
LANES_SHARED = loss_of(
    LINE,
    (matrix(X, ()), vector()),
    (Layer("scale", 1), Layer("dense", 0, (True, False))),
    (),
    lane="x",
)
LANES_INSIDE = loss_of(LINE, (vector(),), (Layer("scale", 0),), X, lane="x", around="vmap")
LANES_DESCENT = loss_of(
    LINE,
    (vector(), vector("x")),
    (Layer("scale", 0), Layer("shift", 1)),
    X,
    lane="x",
    around="scan",
)
APART = loss_of(
    LINE,
    (vector(), Leaf((2, WIDTH), spec=(X, ()))),
    (Layer("scale", 0), Layer("block", 1)),
    X,
    axis_names=(),
    lane="x",
    without_collectives=True,
    separate=True,
)
BOTH = loss_of(
    GRID,
    (vector(), vector("x"), Leaf((2, WIDTH), spec=(Y, ()))),
    (Layer("scale", 0), Layer("shift", 1), Layer("block", 2)),
    ("y", "x"),
    axis_names=("x", "y"),
    lane="y",
    without_collectives=True,
)


def loss(case: LossCase, how: str) -> Callable[[], None]:
    return lambda: check_loss(case, values_for(case), how, mapped=mapping_of(case, how))


def moved_states() -> None:
    """States that a loss returns in exchanged positions still merge with their own old values."""

    def loss_fn(model: Any, x: jax.Array) -> Any:
        w, (first, second) = model
        first, second = first.set(first.value + x.sum()), second.set(second.value - x.sum())
        return (w * x).sum(), (w, [second, first])

    states = [sm.State(1.0, reduce="sum"), sm.State(5.0, reduce="sum")]
    step = sm.value_and_grad(loss_fn, axis_name="x")
    specs = (PartitionSpec(), PartitionSpec("x"))
    call = sm.shard_map(lambda m, x: step(m, x)[0][1], mesh_of(LINE), specs, PartitionSpec())
    _, (second, first) = call((jnp.ones(()), states), np.arange(4.0, dtype=np.float32))
    assert (float(first.value), float(second.value)) == (7.0, -1.0)


def summed_again() -> None:
    """A sum over shards of gradients that are already reduced is refused."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        grads, _ = sm.grad(lambda w, x: ((w * x).mean(), w), axis_name="x")(w, x)
        return jax.lax.psum(grads, "x")

    specs = (PartitionSpec(), PartitionSpec("x"))
    with pytest.raises(sm.StatemeshError, match="already reduced"):
        sm.shard_map(step, mesh_of(LINE), specs, PartitionSpec())(jnp.ones(()), np.ones(4))


def lanes_differ() -> None:
    """Gradients of parameters that each lane has for itself are known to differ."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        return sm.grad(lambda w, x: ((w * x).mean(), w), axis_name="x")(w, x)[0]

    for transform in (sm.vmap2, sm.pmap2):
        with pytest.raises(sm.BatchAxisError):
            transform(step, axis_name="x", out_axes=None)(jnp.ones(2), np.ones((2, 3)))


def losses_differ() -> None:
    """Losses that differ over an axis which `axis_name` does not name are refused."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        return sm.grad(lambda w, x: ((w * x).mean(), w))(w, x)[0]

    specs = (PartitionSpec(), PartitionSpec("x"))
    with pytest.raises(sm.StatemeshError, match="all shards there share one copy of"):
        sm.shard_map(step, mesh_of(LINE), specs, PartitionSpec())(jnp.ones(()), np.ones(4))


def gradient_of_gradient() -> None:
    """A gradient at a point that is itself a gradient. What is split is still known to be split."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        descend = sm.grad(lambda w, x: ((w**2 * x).mean(), w), axis_name="x")
        return descend(descend(w, x)[0], x)[0]

    w, x = np.array([1.0, 2.0], np.float32), np.array([[3.0, 4.0], [5.0, 8.0]], np.float32)
    wanted = w * x.mean(axis=1) ** 2  # Of the mean of two lanes' losses, twice.
    for transform in (sm.pmap2, sm.vmap2):
        np.testing.assert_allclose(transform(step, axis_name="x")(w, x), wanted, rtol=1e-6)


CHECKS: dict[str, Callable[[], None]] = {
    "moved states": moved_states,
    "summed again": summed_again,
    "lanes differ": lanes_differ,
    "losses differ": losses_differ,
    "gradient of gradient": gradient_of_gradient,
    "mixed, unchecked": loss(MIXED, "unchecked"),
    "mixed, checked": loss(MIXED, "checked"),
    "sum, unchecked": loss(SUM, "unchecked"),
    "sum, checked": loss(SUM, "checked"),
    "lanes' descent, pmap2": loss(LANES_DESCENT, "pmap2"),
    "own, checked": loss(OWN, "checked"),
    "lanes, vmap2": loss(LANES, "vmap2"),
    "lanes, pmap2": loss(LANES, "pmap2"),
    "lanes' sum, vmap2": loss(LANES_SUM, "vmap2"),
    "lanes' sum, pmap2": loss(LANES_SUM, "pmap2"),
    "lanes' parts, vmap2": loss(LANES_SHARED, "vmap2"),
    "lanes' parts, pmap2": loss(LANES_SHARED, "pmap2"),
    "lanes around vmap, vmap2": loss(LANES_INSIDE, "vmap2"),
    "lanes around vmap, pmap2": loss(LANES_INSIDE, "pmap2"),
    "lanes separate, vmap2": loss(APART, "vmap2"),
    "lanes separate, pmap2": loss(APART, "pmap2"),
    "lanes on shards, checked": loss(BOTH, "checked"),
    "lanes on shards, unchecked": loss(BOTH, "unchecked"),
    "own, unchecked": loss(OWN, "unchecked"),
    "shared, checked": loss(SHARED, "checked"),
    "shared, unchecked": loss(SHARED, "unchecked"),
    "descent, checked": loss(DESCENT, "checked"),
    "descent, unchecked": loss(DESCENT, "unchecked"),
    "lanes' descent, vmap2": loss(LANES_DESCENT, "vmap2"),
}
