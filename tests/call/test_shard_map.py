"""The contract of `shard_map` for specs, states, static leaves, placement and its result."""

import contextlib
import inspect
import itertools
import unittest.mock
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import elsewhere, make_mesh


pytestmark = pytest.mark.usefixtures("each_kind")


X = np.arange(16, dtype=np.float32)
AUTO_AND_EXPLICIT = (AxisType.Auto, AxisType.Explicit)


# How it is made


def test_method_decorator() -> None:
    class Layer(sm.Module):
        w: sm.ParamState

        @sm.shard_map(mesh=make_mesh(), in_specs=(P(), P("x")), out_specs=(P("x"), P()))
        def step(self, x: jax.Array) -> tuple[jax.Array, "Layer"]:
            """One step."""
            return x * self.w.value, self.replace(w=self.w.value + 1)

    layer = Layer(sm.ParamState(2.0))
    y, after = layer.step(X)
    np.testing.assert_array_equal(y, X * 2)
    assert float(after.w.value) == 3.0
    assert float(after.step.unsharded(X)[1].w.value) == 4.0
    assert layer.step.__doc__ == "One step."
    assert list(inspect.signature(layer.step).parameters) == ["x"]
    assert list(inspect.signature(Layer.step).parameters) == ["self", "x"]
    np.testing.assert_array_equal(layer.step.lower(X).compile()(X)[0], X * 2)
    assert len(layer.step.place(X)) == 1
    assert isinstance(Layer.step, sm.StatefulMapping)


def test_inferred_specs_on_explicit_axes() -> None:
    mesh = make_mesh("8", AxisType.Explicit)
    x = jax.device_put(X, NamedSharding(mesh, P("x")))

    def fun(s: sm.State, x: jax.Array, y: jax.Array) -> Any:
        assert x.shape == (2,) and y.shape == (16,)
        return x + 1, s.set(s.value + 1)

    call = sm.shard_map(fun, mesh, out_specs=(P("x"), P()))
    y, s = call(sm.State(0), x, X)
    np.testing.assert_array_equal(y, X + 1)
    assert int(s.value) == 1
    y, s = jax.jit(call)(s, x, X)
    assert int(s.value) == 2


# Where states are, and where they go


def test_spec_of_a_state_may_be_a_prefix_tree() -> None:
    value = {"k": X, "v": {"a": X, "b": jnp.zeros(3)}}
    spec = {"k": P("x"), "v": P()}
    shapes = []

    def fun(s: sm.State) -> Any:
        shapes.append(jax.tree.map(jnp.shape, s.value))
        return s.set(jax.tree.map(lambda x: x + 1, s.value))

    for state, given in ((sm.State(value, spec=spec), None), (sm.State(value), {...: spec})):
        after = sm.shard_map(fun, make_mesh(), (P(),), P(), state_in_specs=given)(state)
        assert shapes.pop() == {"k": (2,), "v": {"a": (16,), "b": (3,)}}
        np.testing.assert_array_equal(after.value["k"], X + 1)


def test_state_out_specs_apply_to_written_states_only() -> None:
    def fun(read: sm.State, written: sm.State, rng: sm.RandomState) -> Any:
        _, rng = rng.split()
        mine = jax.lax.axis_index("x")
        part = jax.lax.dynamic_slice(written.value, (2 * mine,), (2,))
        return read, written.replace(value=part), rng

    call = sm.shard_map(fun, make_mesh(), (P(), P(), P()), P(), state_out_specs=P("x"))
    scalar = sm.State(5.0)
    read, written, rng = call(scalar, sm.State(X), sm.RandomState(jax.random.key(0)))
    assert read.value.shape == ()
    np.testing.assert_array_equal(written.value, X)
    assert rng.key.shape == ()


# PerShard


def test_per_shard() -> None:
    def fun(count: sm.State, both: sm.State) -> Any:
        assert count.value.shape == (3,)
        count = count.set(count.value + jax.lax.axis_index("x"))
        return count, both.set(both.value + jax.lax.axis_index(("x", "y")))

    by_filter = {sm.BatchState: sm.PerShard("x", "y")}
    call = sm.shard_map(fun, make_mesh("4x2"), P(), P(), state_in_specs=by_filter)
    states: Any = (
        sm.State(np.zeros((4, 3), np.int32), spec=sm.PerShard("x")),
        sm.BatchState(np.zeros(8, np.int32)),
    )
    for _ in range(2):
        states = call(*states)
    np.testing.assert_array_equal(states[0].value, np.arange(4)[:, None] * np.full(3, 2))
    np.testing.assert_array_equal(states[1].value, 2 * np.arange(8))


# Static leaves and numbers


def test_static_leaves_stay_what_they_are() -> None:
    class Net(sm.Module):
        linear: eqx.nn.Linear
        act: Any
        name: str
        dtype: Any
        depth: int
        nothing: None

    def fun(net: Net, x: jax.Array) -> Any:
        assert net.name == "net" and net.dtype is jnp.float32 and net.nothing is None
        assert type(net.depth) is int
        return net.act(jax.vmap(net.linear)(x)) * net.depth, net, "text", None

    net = Net(eqx.nn.Linear(2, 3, key=jax.random.key(0)), jnp.abs, "net", jnp.float32, 3, None)
    x = X.reshape(8, 2)
    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), (P("x"), P(), None, None))
    y, after, text, none = call(net, x)
    np.testing.assert_allclose(y, abs(jax.vmap(net.linear)(jnp.asarray(x))) * 3, rtol=1e-5)
    assert after.act is jnp.abs and after.depth == 3 and after.dtype is jnp.float32
    assert after.linear.in_features == 2 and text == "text" and none is None


def test_numbers_are_traced_by_themselves_and_static_under_none() -> None:
    seen = []

    def fun(a: Any, b: Any, c: Any, *, d: Any) -> Any:
        seen.append([isinstance(v, jax.Array) for v in (a, b["k"], c, d)])
        return a + b["k"] + c + d

    call = sm.shard_map(fun, make_mesh(), (P(), P(), None), P())
    assert int(call(1, {"k": 2}, 3, d=4)) == 10
    assert int(call(5, {"k": 2}, 3, d=4)) == 14
    assert seen == [[True, True, False, False]]
    assert int(call(1, {"k": 2}, 4, d=4)) == 11
    assert len(seen) == 2
    # A scalar of NumPy is an array, too.
    assert [float(call(a, {"k": 2}, 4, d=4)) for a in (np.float32(0.5), np.float32(1))] == [
        10.5,
        11,
    ]
    assert len(seen) == 3


# Placement


@pytest.mark.parametrize("is_set", [False, True])
def test_inputs_are_placed_from_anywhere(is_set: bool) -> None:
    mesh, x = make_mesh(), X.reshape(8, 2)
    call = sm.shard_map(lambda s, x: (x + s.value, s), mesh, (P(), P("x")), (P("x"), P()))
    state = sm.State(jax.device_put(x, jax.devices()[-1]), spec=P("x"))
    for given in elsewhere(x).values():
        for _ in range(2):
            with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
                y, after = call(state, given)
            np.testing.assert_array_equal(y, 2 * x)
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
            assert after.value.sharding == NamedSharding(mesh, P("x"))
        # The original is still there.
        np.testing.assert_array_equal(given, x)


@pytest.mark.parametrize("kinds", [*itertools.product(AUTO_AND_EXPLICIT, repeat=2)], ids=str)
def test_inside_jit_values_are_laid_out_on_axes_of_every_type(kinds: Any) -> None:
    mesh = make_mesh("4x2", *kinds)
    call = sm.shard_map(lambda s, x: (x + s.value, s), mesh, (P(), P("x")), (P("x"), P()))
    state = sm.place(sm.State(X, spec=P("x")), mesh)
    for given in (X, *(jax.device_put(X, NamedSharding(mesh, P(n))) for n in (None, "y"))):
        y, after = jax.jit(call)(state, given)
        np.testing.assert_array_equal(y, 2 * X)
        np.testing.assert_array_equal(after.value, X)
    wide = sm.shard_map(lambda x: x, mesh, P(("x", "y")), P(("x", "y")))
    for given in (X, jax.device_put(X, NamedSharding(mesh, P(("y", "x"))))):
        np.testing.assert_array_equal(jax.jit(wide)(given), X)


def test_closed_over_states_are_constants() -> None:
    w = sm.State(jax.device_put(np.float32(2), jax.devices()[3]))
    call = sm.shard_map(lambda x: x * w.value, make_mesh(), P("x"), P("x"))
    np.testing.assert_array_equal(call(X), X * 2)


# Errors inside the function


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exceptions_come_through_and_the_model_is_untouched(error: type[BaseException]) -> None:
    raised: BaseException | None = error("boom")
    state = sm.State(jnp.arange(16.0))

    def fun(s: sm.State, x: jax.Array) -> Any:
        s.set(s.value * 2)
        if raised is not None:
            raise raised
        return x

    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), P("x"))
    with pytest.raises(error) as info:
        call(state, X)
    assert info.value is raised
    np.testing.assert_array_equal(state.value, np.arange(16.0))
    assert isinstance(state.value.sharding, SingleDeviceSharding)
    # The call works after an error.
    raised = None
    np.testing.assert_array_equal(call(state, X), X)


def test_what_has_every_attribute_is_a_function_too() -> None:
    fun = unittest.mock.Mock(return_value=jnp.ones(()))
    mapped = sm.shard_map(fun, make_mesh(), P("x"), P())
    assert float(mapped(np.ones(8, np.float32))) == 1
    assert mapped.__name__ == "Mock"
