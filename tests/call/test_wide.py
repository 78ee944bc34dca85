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
SPECS = ((P(), P("x")), P())


def on_mesh(fun: Any, check_vma: bool = True) -> Any:
    return sm.shard_map(fun, jax.make_mesh((N,), ("x",)), *SPECS, check_vma=check_vma)


def in_lanes(fun: Any, by: Any) -> Any:
    def lane(model: Any, x: Any) -> Any:
        return fun(model, x[None])

    return by(lane, in_axes=(None, 0), out_axes=None, axis_name="x")


WAYS: dict[str, Callable[[Any], Any]] = {
    "mesh": on_mesh,
    "unchecked": lambda fun: on_mesh(fun, check_vma=False),
    "pmap2": lambda fun: in_lanes(fun, sm.pmap2),
    "vmap2": lambda fun: in_lanes(fun, sm.vmap2),
}
DTYPES = ("float16", "bfloat16")


def most_of(dtype: Any) -> float:
    # NumPy's own does not know bfloat16.
    info: Callable[..., Any] = jnp.finfo
    return float(info(dtype).max)


@pytest.fixture(params=WAYS)
def way(request: Any) -> Any:
    return WAYS[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
def test_states(way: Any, dtype: Any) -> None:
    most = most_of(dtype)
    # One after another the sums of the second are beyond the dtype, and the last one all together.
    rows = np.array([[most] * N, [1e4, 5e4] * 2 + [-1e4, -5e4] * 2, [most / 2] * N]).T

    def fun(states: Any, x: Any) -> Any:
        return {how: s.set(s.value + x[0]) for how, s in states.items()}

    old = np.array([0, 2048, 0], dtype)
    states = {how: sm.State(jnp.asarray(old), reduce=how) for how in ("mean", "sum")}
    after = way(fun)(states, jnp.asarray(rows, dtype))
    expected = {"mean": [most, 2048, np.asarray(most / 2, dtype)], "sum": [np.inf, 2048, np.inf]}
    for how, state in after.items():
        assert state.value.dtype == jnp.dtype(dtype)
        values = np.asarray(state.value).astype(np.float64)
        np.testing.assert_array_equal(values, expected[how], err_msg=how)


@pytest.mark.parametrize("dtype", [DTYPES[0], slow(DTYPES[1])])
def test_losses_and_gradients(way: Any, dtype: Any) -> None:
    most = most_of(dtype)

    def loss(w: Any, x: Any) -> Any:
        return w * x[0], w

    def fun(w: Any, x: Any) -> Any:
        means = sm.value_and_grad(loss, axis_name="x")(w, x[:, 0])
        sums = sm.value_and_grad(loss, axis_name="x", reduce="sum")(w, x[:, 1])
        return [(value, grad) for ((value, _), grad) in (means, sums)]

    rows = np.array([[most] * N, [1e4, 5e4] * 2 + [-1e4, -5e4] * 2]).T
    results = way(fun)(jnp.ones((), dtype), jnp.asarray(rows, dtype))
    assert {x.dtype for x in jax.tree.leaves(results)} == {jnp.dtype(dtype)}
    values = np.asarray(jax.tree.map(float, results))
    np.testing.assert_array_equal(values, [[most] * 2, [0, 0]])


@pytest.mark.parametrize("check", [True, False])
def test_one_reduction_as_before(check: bool) -> None:
    def loss(model: Any, x: Any) -> Any:
        return (x.sum() * model["a"].sum() * model["b"]).astype(jnp.float16), model

    def fun(model: Any, x: Any) -> Any:
        ((value, _), grads) = sm.value_and_grad(loss, axis_name="x")(model, x)
        return value, grads

    call: Any = on_mesh(fun, check)
    model = {"a": np.ones(3, np.float16), "b": np.float16(1)}
    text = call.lower(model, np.ones(N, np.float16)).compile().as_text()
    assert text.count(" all-reduce(") == 1
