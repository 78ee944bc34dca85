"""`pmap2` only: the device of each lane, static and donated arguments, and the compiled program."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import compiles, counted, elsewhere, make_mesh


X = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)


def equal(result: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


def rows_on(array: jax.Array) -> dict[int, Any]:
    """The rows that each device holds, by the device's number."""
    return {shard.device.id: np.asarray(shard.data) for shard in array.addressable_shards}


def accumulate(s: sm.State, x: Any) -> Any:
    return x * 2, s.set(s.value + x)


SUMS: Any = {"in_axes": (None, 0), "out_axes": (0, None), "state_in_axes": {0: ...}}


# Devices


@pytest.mark.parametrize("numbers", [(0, 1, 2), (5, 2, 7), (7, 6, 5, 4, 3, 2, 1, 0)], ids=str)
def test_lanes_go_to_the_devices_in_their_order(numbers: tuple[int, ...]) -> None:
    devices = [jax.devices()[i] for i in numbers]
    x = X[: len(numbers)]
    state = sm.State(x)
    call = sm.pmap2(accumulate, devices=devices, **SUMS)
    for _ in range(2):
        y, state = call(state, x)
        assert list(y.sharding.mesh.devices.flat) == devices
    for result, expected in ((y, x * 2), (state.value, 3 * x)):
        equal(result, expected)
        held = rows_on(result)
        assert sorted(held) == sorted(numbers)
        for lane, number in enumerate(numbers):
            equal(held[number], expected[lane : lane + 1])


def test_fewer_lanes_take_the_first_devices() -> None:
    call = sm.pmap2(lambda x: x + 1, devices=jax.devices()[::-1])
    assert sorted(rows_on(call(X[:2]))) == [6, 7]
    assert sorted(rows_on(call(X[:3]))) == [5, 6, 7]
    assert sorted(rows_on(call(X[:2]))) == [6, 7]
    assert sorted(rows_on(sm.pmap2(lambda x: x + 1)(X[:2]))) == [0, 1]


def test_one_lane() -> None:
    y, state = sm.pmap2(accumulate, **SUMS)(sm.State(X[:1]), X[:1])
    equal(y, X[:1] * 2)
    equal(state.value, X[:1] * 2)


@pytest.mark.parametrize("devices", [None, 4])
def test_backend(devices: int | None) -> None:
    given = None if devices is None else jax.devices()[:devices]
    y = sm.pmap2(lambda x: x * 2, backend="cpu", devices=given)(X[:4])
    equal(y, X[:4] * 2)
    assert {device.platform for device in y.devices()} == {"cpu"}


def test_where_nothing_is_mapped_every_device_is_a_lane() -> None:
    def fun(s: sm.State) -> Any:
        return jax.lax.axis_index("i"), s.set(s.value + jax.lax.psum(1, "i"))

    y, after = sm.pmap2(fun, "i", in_axes=None, out_axes=(0, None))(sm.State(0))
    equal(y, np.arange(8))
    assert int(after.value) == 8
    y, after = sm.pmap2(fun, "i", in_axes=None, out_axes=(0, None), axis_size=3)(sm.State(0))
    equal(y, np.arange(3))
    assert int(after.value) == 3
    two = sm.pmap2(fun, "i", in_axes=None, out_axes=(0, None), devices=jax.devices()[:2])
    assert int(two(sm.State(0))[1].value) == 2


def test_what_all_lanes_share_is_on_every_device() -> None:
    def fun(s: sm.State, x: Any) -> Any:
        return s.set(s.value + jax.lax.pmean(x, "i"))

    after = sm.pmap2(fun, "i", in_axes=(None, 0))(sm.State(np.zeros(3, np.float32)), X)
    held = rows_on(after.value)
    assert sorted(held) == list(range(8))
    for copy in held.values():
        np.testing.assert_allclose(copy, X.mean(0), rtol=1e-6)


@pytest.mark.parametrize("where", elsewhere(X))
@pytest.mark.parametrize("context", [None, AxisType.Auto, AxisType.Explicit], ids=str)
def test_arrays_are_taken_from_wherever_they_lie(where: str, context: Any) -> None:
    x = elsewhere(X)[where]
    call = sm.pmap2(accumulate, devices=jax.devices()[::-1], **SUMS)
    if context is not None:
        with jax.set_mesh(make_mesh("8", context)):
            y, state = call(sm.State(x), x)
    else:
        y, state = call(sm.State(x), x)
    equal(y, X * 2)
    equal(state.value, X * 2)
    equal(x, X)


# Static arguments


@pytest.mark.parametrize("static", [1, (1,), [-2]], ids=str)
def test_static_arguments_are_part_of_the_signature(static: Any) -> None:
    def fun(x: Any, how: Any, y: Any) -> Any:
        return how(x) if callable(how) else x + y if how == ("add", 1) else x

    body, count = counted(fun)
    call = sm.pmap2(body, static_broadcasted_argnums=static)
    for how, expected, traces in [
        (("add", 1), X + X, 1),
        (("add", 1), X + X, 1),
        (("keep", 1), X, 2),
        (jnp.square, X**2, 3),
        (("add", 1), X + X, 3),
    ]:
        equal(call(X, how, X), expected)
        assert count.times == traces


def test_static_arguments_of_equal_value_and_other_type_are_not_the_same() -> None:
    body, count = counted(lambda x, n: x * n if isinstance(n, float) else x)
    call = sm.pmap2(body, static_broadcasted_argnums=1)
    equal(call(X, 2.0), X * 2)
    equal(call(X, 2), X)
    assert count.times == 2


def test_a_static_number_is_no_tracer() -> None:
    def fun(x: Any, times: int) -> Any:
        assert type(times) is int
        for _ in range(times):
            x = x + 1
        return x

    call = sm.pmap2(fun, in_axes=(0, None), static_broadcasted_argnums=1)
    equal(call(X, 3), X + 3)
    equal(call.unsharded(X, 4), X + 4)
    assert call.place(X, 5)[1] == 5
    assert call.lower(X, 2).compile().as_text()


def test_static_beside_states_and_donation() -> None:
    def fun(s: sm.State, how: str, x: Any) -> Any:
        return s.set(s.value + x if how == "add" else s.value - x)

    call = sm.pmap2(
        fun,
        in_axes=(None, None, 0),
        static_broadcasted_argnums=(1,),
        donate_argnums=(0,),
        state_in_axes={0: ...},
    )
    state, how, x = call.place(sm.State(X), "add", X)
    after = call(state, how, x)
    equal(after.value, 2 * X)
    assert state.value.is_deleted()
    equal(call(after, "subtract", x).value, X)


# Donation


def model() -> Any:
    return {"n": sm.State(X), "read": sm.ParamState(X + 1), "w": jnp.asarray(X)}


def tick(m: Any, x: Any) -> Any:
    return x * 2 + m["read"].value, {**m, "n": m["n"].set(m["n"].value + x)}


@pytest.mark.parametrize("donate", [(), 0, (0,), (0, 1), [-1]], ids=str)
def test_donation_gives_up_the_arguments_it_names(donate: Any) -> None:
    body, count = counted(tick)
    given = {i % 2 for i in ([donate] if isinstance(donate, int) else donate)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call = sm.pmap2(
            body,
            donate_argnums=donate,
            in_axes=({"n": None, "read": None, "w": 0}, 0),
            state_in_axes={0: ...},
        )
        m, x = call.place(model(), X)
        y, after = call(m, x)
        jax.block_until_ready((y, after))
    assert count.times == 1
    equal(y, X * 3 + 1)
    equal(after["n"].value, 2 * X)
    assert m["n"].value.is_deleted() == (0 in given)
    assert x.is_deleted() == (1 in given)
    # An argument that is only read is never donated.
    assert after["read"].value is m["read"].value
    assert after["w"] is m["w"]
    equal(after["w"], X)
    if 0 in given:
        with pytest.raises(sm.StatemeshError, match=r"given up .*\n  - args\[0\]\['n'\]"):
            call(m, jnp.asarray(X))
    _, after = call(after, jnp.asarray(X))
    equal(after["n"].value, 3 * X)
    assert count.times == 1


def test_donation_spares_an_original_that_had_to_move() -> None:
    call = sm.pmap2(accumulate, donate_argnums=0, **SUMS)
    state = sm.State(jnp.asarray(X))
    after = call(state, X)[1]
    equal(after.value, 2 * X)
    equal(state.value, X)


# The compiled program


def test_jax_pmap_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("jax.pmap was called")

    monkeypatch.setattr(jax, "pmap", refuse)
    equal(sm.pmap2(lambda x: x + 1)(X), X + 1)


def test_results_fed_back_are_not_moved() -> None:
    call = sm.pmap2(accumulate, devices=jax.devices()[::-1], **SUMS)
    y, state = call(sm.State(X), X)
    again = call.place(state, y)
    assert again[0].value is state.value
    assert again[1] is y


def test_other_lanes_devices_and_shapes_one_after_another() -> None:
    body, count = counted(accumulate)
    call = sm.pmap2(body, **SUMS)
    shapes = [(8, 3), (4, 3), (8, 3), (8, 2), (4, 3)]
    for shape in shapes:
        x = np.ones(shape, np.float32)
        y, state = call(sm.State(x), x)
        equal(y, 2 * x)
        equal(state.value, 2 * x)
        assert len(y.devices()) == shape[0]
    assert count.times == 3
    with compiles() as seen:
        for shape in shapes:
            x = np.ones(shape, np.float32)
            jax.block_until_ready(call(sm.State(x), x))
    assert (count.times, seen.times) == (3, 0)


@pytest.mark.parametrize("how", ["by position", "by keyword", "decorator"])
def test_axis_name_may_be_given_in_every_way(how: str) -> None:
    def fun(x: Any) -> Any:
        return x - jax.lax.pmean(x, "rows")

    call = {
        "by position": lambda: sm.pmap2(fun, "rows"),
        "by keyword": lambda: sm.pmap2(fun, axis_name="rows"),
        "decorator": lambda: sm.pmap2(axis_name="rows")(fun),
    }[how]()
    np.testing.assert_allclose(call(X), X - X.mean(0), rtol=1e-6)
    assert call(X).sharding.spec == P("rows")


def test_a_partial_and_a_bound_method_may_be_mapped() -> None:
    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, x: Any) -> Any:
            return x * self.by

        def method(self, x: Any, y: Any) -> Any:
            return x * self.by + y

    equal(sm.pmap2(Scale(2.0))(X), X * 2)
    equal(sm.pmap2(functools.partial(Scale(2.0).method, y=1.0))(X), X * 2 + 1)
