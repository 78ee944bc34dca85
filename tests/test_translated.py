"""The documented examples of the system that statemesh re-imagines, with explicit state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted


n = 8


@pytest.fixture
def mesh() -> Any:
    return jax.make_mesh((n,), ("x",))


def test_replicated_weight_times_sharded_data(mesh: Any) -> None:
    def fun(w: sm.State, data: jax.Array) -> Any:
        return data * w.value

    f = sm.shard_map(fun, mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    data = jnp.arange(2 * n, dtype=jnp.float32)
    np.testing.assert_array_equal(f(sm.State(3.0), data), 3 * np.arange(2 * n))


@pytest.mark.parametrize("how", ["state_in_specs", "own spec"])
def test_per_shard_buffer(mesh: Any, how: str) -> None:
    def accumulate(buffer: sm.State, data: jax.Array) -> tuple[jax.Array, sm.State]:
        return data, buffer.set(buffer.value + data)

    given = P("x") if how == "state_in_specs" else None
    f = sm.shard_map(accumulate, mesh, (P(), P("x")), (P("x"), P()), state_in_specs=given)
    buffer = sm.State(jnp.zeros(2 * n), spec=None if given else P("x"))
    _, after = f(buffer, jnp.ones(2 * n))
    np.testing.assert_array_equal(after.value, np.ones(2 * n))
    np.testing.assert_array_equal(buffer.value, np.zeros(2 * n))


def test_global_sum(mesh: Any) -> None:
    def global_sum(data: jax.Array) -> Any:
        return jax.lax.psum(jnp.sum(data, keepdims=True), axis_name="x")

    f = sm.shard_map(global_sum, mesh, in_specs=(P("x"),), out_specs=P())
    total = f(jnp.arange(2 * n, dtype=jnp.float32))
    np.testing.assert_array_equal(total, [np.arange(2 * n).sum()])


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_wrapped_once_called_often(mesh: Any, how: str) -> None:
    fun, count = counted(lambda bias, data: data + bias.value)
    f = sm.shard_map(fun, mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    call = jax.jit(f) if how == "jit" else f
    x = np.arange(2 * n, dtype=np.float32)
    bias = sm.State(5.0)
    np.testing.assert_array_equal(call(bias, x), x + 5)
    np.testing.assert_array_equal(call(bias.set(100.0), x), x + 100)
    assert count.times == 1


def test_two_axes() -> None:
    mesh = jax.make_mesh((n // 2, 2), ("data", "model"))
    f = sm.shard_map(
        lambda data: data + 1.0, mesh, in_specs=(P("data", "model"),), out_specs=P("data", "model")
    )
    np.testing.assert_array_equal(f(jnp.ones((n // 2, 2))), np.full((n // 2, 2), 2))
