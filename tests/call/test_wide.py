"""Means and sums of narrow floats: taken in float32, the same on devices and in lanes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import slow


N = 8


def on_mesh(fun: Any, check_vma: bool) -> Any:
    mesh = jax.make_mesh((N,), ("x",))
    return sm.shard_map(fun, mesh, (P(), P("x")), P(), check_vma=check_vma)


def in_lanes(fun: Any, by: Any) -> Any:
    def lane(model: Any, x: Any) -> Any:
        return fun(model, x[None])

    return by(lane, in_axes=(None, 0), out_axes=None, axis_name="x")


WAYS: dict[str, Callable[[Any], Any]] = {
    "mesh": lambda fun: on_mesh(fun, True),
    "unchecked": lambda fun: on_mesh(fun, False),
    "pmap2": lambda fun: in_lanes(fun, sm.pmap2),
    "vmap2": lambda fun: in_lanes(fun, sm.vmap2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float16", slow("bfloat16")])
def test_states_losses_and_gradients(way: str, dtype: Any) -> None:
    # NumPy's own does not know bfloat16.
    info: Callable[..., Any] = jnp.finfo
    most = float(info(dtype).max)
    # One after another the sums of the second are beyond the dtype, and the last one all together.
    rows = np.array([[most] * N, [1e4, 5e4] * 2 + [-1e4, -5e4] * 2, [most / 2] * N]).T

    def loss(w: Any, x: Any) -> Any:
        return w * x[0], w

    def fun(model: Any, x: Any) -> Any:
        states, w = model
        means = sm.value_and_grad(loss, axis_name="x")(w, x[:, 0])
        sums = sm.value_and_grad(loss, axis_name="x", reduce="sum")(w, x[:, 1])
        after = {how: s.set(s.value + x[0]) for how, s in states.items()}
        return after, [(value, grad) for ((value, _), grad) in (means, sums)]

    old = jnp.asarray(np.array([0, 2048, 0], dtype))
    states = {how: sm.State(old, reduce=how) for how in ("mean", "sum")}
    after, results = WAYS[way](fun)((states, jnp.ones((), dtype)), jnp.asarray(rows, dtype))
    assert {x.dtype for x in jax.tree.leaves((after, results))} == {jnp.dtype(dtype)}
    expected = {"mean": [most, 2048, np.asarray(most / 2, dtype)], "sum": [np.inf, 2048, np.inf]}
    for how, state in after.items():
        values = np.asarray(state.value).astype(np.float64)
        np.testing.assert_array_equal(values, expected[how], err_msg=how)
    np.testing.assert_array_equal(jax.tree.map(float, results), [(most, most), (0, 0)])


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_reduction_as_before(check_vma: bool) -> None:
    def loss(model: Any, x: Any) -> Any:
        return (x.sum() * model["a"].sum() * model["b"]).astype(jnp.float16), model

    def fun(model: Any, x: Any) -> Any:
        ((value, _), grads) = sm.value_and_grad(loss, axis_name="x")(model, x)
        return value, grads

    model = {"a": np.ones(3, np.float16), "b": np.float16(1)}
    text = on_mesh(fun, check_vma).lower(model, np.ones(N, np.float16)).compile().as_text()
    assert text.count(" all-reduce(") == 1
