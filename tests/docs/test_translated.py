"""Documented examples of brainstate, with explicit state."""

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


# Over devices, and over lanes


TRANSFORMS: dict[str, Any] = {"pmap2": sm.pmap2, "vmap2": sm.vmap2}
CREATE: dict[str, Any] = {"pmap2": sm.pmap2_new_states, "vmap2": sm.vmap2_new_states}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_weights_updated_by_a_delta_per_lane(transform: str) -> None:
    def update(weights: sm.ParamState, delta: jax.Array) -> tuple[jax.Array, sm.ParamState]:
        weights = weights.set(weights.value + delta)
        return weights.value, weights

    f = TRANSFORMS[transform](
        update,
        axis_name="devices",
        in_axes=(None, 0),
        out_axes=0,
        state_in_axes={None: sm.ParamState},
        state_out_axes={0: sm.ParamState},
    )
    deltas = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
    result, weights = f(sm.ParamState(jnp.ones(4)), deltas)
    np.testing.assert_array_equal(result, 1 + deltas)
    np.testing.assert_array_equal(weights.value, 1 + deltas)


class ParallelCounter(sm.Module):
    count: Any = None

    def init_state(self) -> "ParallelCounter":
        return self.replace(count=sm.ShortTermState(jnp.array(0)))


@pytest.mark.parametrize("transform", CREATE)
def test_counter_created_over_all_lanes(transform: str) -> None:
    counter, made = CREATE[transform](ParallelCounter(), {}, axis_size=jax.local_device_count())
    np.testing.assert_array_equal(counter.count.value, np.zeros(jax.local_device_count()))
    assert list(made) == [0]


class ParallelModel(sm.Module):
    rng: sm.RandomState
    weight: Any = None
    bias: Any = None

    def init_state(self, layer_size: int) -> "ParallelModel":
        key, rng = self.rng.split()
        return self.replace(
            rng=rng,
            weight=sm.ParamState(jax.random.normal(key, (layer_size,))),
            bias=sm.ParamState(jnp.zeros(layer_size)),
        )


@pytest.mark.parametrize("transform", CREATE)
def test_parameters_created_on_axis_0(transform: str) -> None:
    model = ParallelModel(sm.RandomState(jax.random.key(0)))
    model, made = CREATE[transform](
        model,
        {"layer_size": 128},
        state_tag="parallel",
        axis_size=n,
        state_out_axes={0: sm.filters.OfType(sm.ParamState)},
    )
    assert model.weight.value.shape == model.bias.value.shape == (n, 128)
    assert len(np.unique(model.weight.value)) > 0.9 * n * 128
    np.testing.assert_array_equal(model.bias.value, np.zeros((n, 128)))
    assert [state.tag for state in made[0]] == [frozenset(["parallel"])] * 2


class MixedModule(sm.Module):
    sharded: Any = None
    replicated: Any = None

    def init_state(self) -> "MixedModule":
        return self.replace(
            sharded=sm.ShortTermState(jnp.array(0)), replicated=sm.NonBatchState(jnp.arange(3))
        )


@pytest.mark.parametrize("transform", CREATE)
def test_one_state_for_each_lane_and_one_for_all(transform: str) -> None:
    module, made = CREATE[transform](MixedModule(), {}, axis_size=n)
    assert module.sharded.value.shape == (n,)
    np.testing.assert_array_equal(module.replicated.value, np.arange(3))
    assert made == {0: [module.sharded], None: [module.replicated]}


class Regression(sm.Module):
    w: Any = None

    def init_state(self) -> "Regression":
        return self.replace(w=sm.ParamState(jnp.zeros(3)))

    def update(self, x: jax.Array) -> Any:
        w = self.w.value + jax.lax.pmean(x.mean(0), "devices")
        return x @ w, self.replace(w=w)


def test_map_over_devices() -> None:
    model = sm.Map(Regression(), init_map_size=n, behavior="pmap", axis_name="devices")
    model = model.init_all_states()
    batch = np.arange(4 * n * 3, dtype=np.float32).reshape(4 * n, 3) / 100
    w: Any = np.zeros(3, np.float32)
    for _ in range(2):
        out, model = model(batch.reshape(n, 4, 3))
        w = w + batch.mean(0)
        np.testing.assert_allclose(out, (batch @ w).reshape(n, 4), rtol=1e-5)
    np.testing.assert_allclose(model.module.w.value, np.tile(w, (n, 1)), rtol=1e-5)
