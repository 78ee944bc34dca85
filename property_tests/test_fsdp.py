"""Split parameters train as on one device, however the axes are named and wherever they are gathered."""

import dataclasses
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import SHAPES, make_mesh

from .base.settings import fewer


ROWS = 16


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model is split and gathered.

    **Attributes:**

    - `mesh`, `explicit`: the name of the mesh, and whether its axes are Explicit.
    - `split`, `gathered`: the axis names as `fsdp` and `gather` get them, the same ones in some order.
    - `outside`: whether the model is gathered before the gradient, not in the loss, and then cast. Each shard
        may take its own part of such a gradient (ZeRO-2), which is reduced.
    """

    mesh: str
    explicit: bool
    split: Any
    gathered: Any
    outside: bool
    check_vma: bool
    microbatches: int | None


@st.composite
def ways(draw: st.DrawFn) -> Way:
    mesh = draw(st.sampled_from(["1", "4", "8", "4x2", "2x2x2"]))
    names = SHAPES[mesh][1]
    split = tuple(draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))
    gathered = tuple(draw(st.permutations(split)))

    def spelled(names: tuple[str, ...]) -> Any:
        return names[0] if len(names) == 1 and draw(st.booleans()) else names

    return Way(
        mesh,
        draw(st.booleans()),
        spelled(split),
        spelled(gathered),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([None, 1, 2])),
    )


def loss_of(whole: Any, x: Any) -> Any:
    out = jnp.tanh(x @ whole["w"].value) * whole["scale"] + whole["odd"].value.sum()
    return ((out + x @ whole["apart"].value) ** 2).mean()


def params(split: Any = ()) -> dict[str, Any]:
    """The last is split already, along each of its axes by one axis of the mesh."""
    apart = P(*split[:2]) if isinstance(split, tuple) and len(split) > 1 else None
    return {
        "w": sm.ParamState(jnp.sin(jnp.arange(128.0)).reshape(8, 16)),
        "scale": jnp.cos(jnp.arange(16.0)),
        "odd": sm.ParamState(jnp.arange(3.0) / 7),
        "apart": sm.ParamState(jnp.sin(jnp.arange(128.0)).reshape(8, 16), spec=apart),
        "steps": sm.State(0),
    }


@cache
def wanted(seed: int) -> Any:
    """The loss and its gradients, in the order of the model's leaves."""

    trained = {name: leaf for name, leaf in params().items() if name != "steps"}
    return jax.value_and_grad(lambda model: loss_of(model, rows(seed)))(trained)


def rows(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(ROWS, 8)).astype(np.float32)


@cache
def mapped(way: Way) -> tuple[Any, Any]:
    mesh = make_mesh(way.mesh, AxisType.Explicit if way.explicit else AxisType.Auto)
    model = sm.fsdp(params(way.split), mesh, way.split, min_size=4)

    def loss_fn(model: Any, x: Any) -> Any:
        whole = model if way.outside else sm.gather(model, way.gathered)
        loss = loss_of(whole, x)
        whole = {**whole, "steps": whole["steps"].set(whole["steps"].value + 1)}
        return loss, whole if way.outside else sm.scatter(whole, model)

    def step(model: Any, x: Any) -> Any:
        seen = model
        if way.outside:
            seen = jax.tree.map(lambda x: x * 1, sm.gather(model, way.gathered))
        gradients = sm.value_and_grad(
            loss_fn, axis_name=SHAPES[way.mesh][1], microbatches=way.microbatches
        )
        (loss, new), grads = gradients(seen, x)
        return loss, sm.scatter(new, model) if way.outside else new, grads

    names = SHAPES[way.mesh][1]
    return model, sm.shard_map(step, mesh, (None, P(names)), P(), check_vma=way.check_vma)


@fewer(0.12)  # Each example compiles a program of its own.
@given(way=ways(), seed=st.integers(0, 3))
@example(Way("4x2", True, ("x", "y"), ("y", "x"), False, True, None), 0)
@example(Way("4", True, "x", "x", True, True, 2), 0)
def test_gradients_are_those_of_one_device(way: Way, seed: int) -> None:
    model, call = mapped(way)
    loss, new, grads = jax.block_until_ready(call(model, rows(seed)))
    expected_loss, expected = wanted(seed)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    assert new["steps"].value == 1
    structure: Any = jax.tree.structure
    assert structure(new) == structure(model)
    for name in ("w", "apart"):
        np.testing.assert_array_equal(new[name].value, model[name].value)
    if not way.outside:
        # Each device holds its share of every parameter that can be split.
        names = way.split if isinstance(way.split, tuple) else (way.split,)
        parts = math.prod(make_mesh(way.mesh).shape[name] for name in names)
        grad = grads["w"].value
        assert grad.addressable_shards[0].data.size * parts == grad.size
