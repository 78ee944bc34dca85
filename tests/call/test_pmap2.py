"""`pmap2` only: the device of each lane, static and donated arguments, and the compiled program."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted, elsewhere, make_mesh


X = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
equal = np.testing.assert_array_equal


def rows_on(array: jax.Array) -> dict[int, Any]:
    """The rows that each device holds, by the device's number."""
    return {shard.device.id: np.asarray(shard.data) for shard in array.addressable_shards}


def accumulate(s: sm.State, x: Any) -> Any:
    return x * 2, s.set(s.value + x)


SUMS: Any = {"in_axes": (None, 0), "out_axes": (0, None), "state_in_axes": {0: ...}}


# Devices


@pytest.mark.parametrize("numbers", [(5, 2, 7), (7, 6, 5, 4, 3, 2, 1, 0)], ids=str)
def test_lanes_go_to_the_devices_in_their_order(numbers: tuple[int, ...]) -> None:
    devices = [jax.devices()[i] for i in numbers]
    x = X[: len(numbers)]
    state = sm.State(x)
    call = sm.pmap2(accumulate, devices=devices, **SUMS)
    for _ in range(2):
        y, state = call(state, x)
        assert list(y.sharding.mesh.devices.flat) == devices
    again = call.place(state, y)
    assert again[0].value is state.value and again[1] is y
    for result, expected in ((y, x * 2), (state.value, 3 * x)):
        equal(result, expected)
        held = rows_on(result)
        assert sorted(held) == sorted(numbers)
        for lane, number in enumerate(numbers):
            equal(held[number], expected[lane : lane + 1])


def test_fewer_lanes_take_the_first_devices() -> None:
    call = sm.pmap2(lambda x: x + 1, devices=jax.devices()[::-1])
    for lanes in (2, 3, 2, 1):
        assert sorted(rows_on(call(X[:lanes]))) == list(range(8 - lanes, 8))
    assert sorted(rows_on(sm.pmap2(lambda x: x + 1, backend="cpu")(X[:2]))) == [0, 1]


def test_where_nothing_is_mapped_every_device_is_a_lane() -> None:
    def fun(s: sm.State) -> Any:
        return jax.lax.axis_index("i"), s.set(s.value + jax.lax.psum(1, "i"))

    options: list[tuple[int, Any]] = [
        (8, {}),
        (3, {"axis_size": 3}),
        (2, {"devices": jax.devices()[:2]}),
    ]
    for lanes, asked in options:
        y, after = sm.pmap2(fun, "i", in_axes=None, out_axes=(0, None), **asked)(sm.State(0))
        equal(y, np.arange(lanes))
        # What all lanes share is on every device.
        held = rows_on(after.value)
        assert sorted(held) == list(range(lanes)) and set(map(int, held.values())) == {lanes}


@pytest.mark.parametrize("context", [None, AxisType.Explicit], ids=str)
def test_arrays_are_taken_from_wherever_they_lie(context: Any) -> None:
    call = sm.pmap2(accumulate, devices=jax.devices()[::-1], **SUMS)
    for place, x in elsewhere(X).items():
        mesh = (
            contextlib.nullcontext() if context is None else jax.set_mesh(make_mesh("8", context))
        )
        with mesh:
            y, state = call(sm.State(x), x)
        np.testing.assert_array_equal(y, X * 2, err_msg=place)
        np.testing.assert_array_equal(state.value, X * 2, err_msg=place)
        equal(x, X)


# Static arguments


def test_static_arguments_are_part_of_the_signature() -> None:
    def fun(x: Any, how: Any, y: Any) -> Any:
        if isinstance(how, float):
            return x * how
        return how(x) if callable(how) else x + y if how == ("add", 1) else x

    body, count = counted(fun)
    call = sm.pmap2(body, static_broadcasted_argnums=[-2])
    for how, expected, traces in [
        (("add", 1), X + X, 1),
        (("add", 1), X + X, 1),
        (2.0, X * 2, 2),
        # An equal value of another type is another argument.
        (2, X, 3),
        (jnp.square, X**2, 4),
        (("add", 1), X + X, 4),
    ]:
        equal(call(X, how, X), expected)
        assert count.times == traces
    # The same function, mapped again, runs what was compiled.
    equal(sm.pmap2(body, static_broadcasted_argnums=[-2])(X, 2.0, X), X * 2)
    assert count.times == 4
    equal(call.unsharded(X, 3, X), X)
    assert call.place(X, 5, X)[1] == 5


# Donation


def model() -> Any:
    return {"n": sm.State(X), "read": sm.ParamState(X + 1), "w": jnp.asarray(X)}


def tick(m: Any, x: Any) -> Any:
    return x * 2 + m["read"].value, {**m, "n": m["n"].set(m["n"].value + x)}


@pytest.mark.parametrize("donate", [0, [-1]], ids=str)
def test_donation_gives_up_the_arguments_it_names(donate: Any) -> None:
    body, count = counted(tick)
    given = {i % 2 for i in ([donate] if isinstance(donate, int) else donate)}
    axes = ({"n": None, "read": None, "w": 0}, 0)
    call = sm.pmap2(body, donate_argnums=donate, in_axes=axes, state_in_axes={0: ...})
    m, x = call.place(model(), X)
    y, after = call(m, x)
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
    # An original that had to move is spared.
    rows = jnp.asarray(X)
    _, after = call(after, rows)
    equal(after["n"].value, 3 * X)
    equal(rows, X)
    assert count.times == 1


# Where another mesh is set, or arrays are placed elsewhere


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
DATA = np.arange(4, dtype=np.float32)


def step(total: sm.State, x: jax.Array) -> Any:
    return x * jax.lax.axis_index("i"), total.set(total.value + x)


def mapped(transform: Any, fun: Any = step) -> Any:
    return transform(fun, axis_name="i", in_axes=(None, 0))


def loss(call: Any, x: Any) -> Any:
    out, total = call(sm.State(1.0, reduce="sum"), x)
    return (out**2).sum() + total.value


def data(place: str, mesh: Any) -> Any:
    if place == "host":
        return DATA
    if place == "elsewhere":
        return jax.device_put(DATA, jax.devices()[5])
    return jax.device_put(DATA, NamedSharding(mesh, P("x")))


@pytest.mark.parametrize(("kind", "is_set"), [("explicit", True), ("auto", False)])
def test_pmap2_runs_on_its_own_mesh(kind: str, is_set: bool) -> None:
    mesh = make_mesh("4", KINDS[kind])
    body, count = counted(step)
    call, total = mapped(sm.pmap2, body), sm.State(1.0, reduce="sum")
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        for number, place in enumerate(("host", "placed", "host", "elsewhere", "placed"), 1):
            out, total = call(total, data(place, mesh))
            np.testing.assert_array_equal(out, np.arange(4) * DATA)
            assert float(total.value) == 1 + number * DATA.sum()
            assert out.sharding.mesh.axis_names == ("i",)
    # Arrays of NumPy and of JAX are two signatures, wherever they lie.
    assert count.times == 2


@pytest.mark.parametrize("is_set", [True, False])
def test_pmap2_is_traced_among_auto_axes(is_set: bool) -> None:
    mesh = make_mesh("4", AxisType.Auto)
    call = mapped(sm.pmap2)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        x = jnp.asarray(data("placed", mesh))
        out, total = jax.jit(call)(sm.State(1.0, reduce="sum"), x)
        np.testing.assert_array_equal(out, np.arange(4) * DATA)
        assert float(total.value) == 1 + DATA.sum()
        grad = jax.grad(lambda x: loss(call, x))
        np.testing.assert_allclose(grad(x), jax.jit(grad)(x))
        np.testing.assert_allclose(grad(x), 2 * np.arange(4) ** 2 * DATA + 1)


TEXT = (
    "step: pmap2 runs on a mesh of its own, and JAX cannot mix its results with arrays on Explicit mesh "
    "axes during a trace. Call it outside the trace; or call it outside `jax.set_mesh` and on arrays that "
    "do not lie on such a mesh; or use shard_map, which runs on the mesh that is set."
)


@pytest.mark.parametrize(("is_set", "place"), [(True, "host"), (False, "placed")])
def test_pmap2_is_not_traced_among_explicit_axes(is_set: bool, place: str) -> None:
    mesh = make_mesh("4", AxisType.Explicit)
    call, x = mapped(sm.pmap2), jnp.asarray(data(place, mesh))
    around = jax.set_mesh(mesh) if is_set else contextlib.nullcontext()
    with around:
        for traced in (jax.jit(call), jax.grad(lambda s, x: loss(call, x), 1)):
            with pytest.raises(sm.BatchAxisError) as raised:
                traced(sm.State(1.0, reduce="sum"), x)
            assert str(raised.value) == TEXT


def test_vmap2_runs_where_its_arguments_lie() -> None:
    mesh = make_mesh("4", AxisType.Explicit)
    call, x = mapped(sm.vmap2), data("placed", mesh)
    with jax.set_mesh(mesh):
        out, total = call(sm.State(1.0, reduce="sum"), x)
    np.testing.assert_array_equal(out, np.arange(4) * DATA)
    assert float(total.value) == 1 + DATA.sum()


# Global shapes in one process, which has all lanes: they are the shapes of the arguments


def of_three(x: Any, y: Any, z: Any) -> Any:
    return jnp.sum(x) + y * jax.tree.leaves(z)[0]


def test_global_shapes_that_fit_change_nothing() -> None:
    # That of what all lanes share is its own shape.
    shapes: Any = ([3, np.int64(8)], (8,), (2,)), ([3, 8], None, None)
    args = np.arange(24).reshape(3, 8), np.arange(8), {"z": jnp.arange(2)}
    expected = args[0].sum(0)[:, None] + args[1][:, None] * np.arange(2)
    for global_shapes in (*shapes, None):
        mapped = sm.pmap2(of_three, in_axes=(-1, 0, None), global_arg_shapes=global_shapes)
        np.testing.assert_array_equal(mapped(*args), expected)


def test_shapes_are_checked_at_every_call_also_of_a_state() -> None:
    double = sm.pmap2(lambda s: s.set(s.value * 2), state_in_axes=..., global_arg_shapes=((8, 3),))
    x = jnp.arange(24).reshape(8, 3)
    state = double(double(sm.State(x)))
    with pytest.raises(sm.BatchAxisError, match=r"State\(int32\[8,2\]\) here"):
        double(sm.State(x[:, :2]))
    np.testing.assert_array_equal(double(state).value, x * 8)
