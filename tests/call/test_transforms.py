"""A mapped call inside and around JAX's transformations, on every mesh, with every way to set the mesh."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh, slow


class Model(sm.Module):
    w: sm.ParamState
    total: sm.State
    buffer: sm.State


def make_model() -> Model:
    return Model(
        sm.ParamState(jnp.arange(1.0, 4.0)),
        sm.State(0.0, reduce="sum"),
        sm.State(jnp.zeros((8, 3)), spec=P("x")),
    )


def step(model: Model, x: jax.Array) -> tuple[jax.Array, Model]:
    y = jnp.sin(x * model.w.value)
    return y, model.replace(
        total=model.total.value + jnp.sum(y), buffer=model.buffer.value + x * model.total.value
    )


def data() -> np.ndarray[Any, Any]:
    return np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


def mapped(mesh: Mesh | None, **kwargs: Any) -> Any:
    return sm.shard_map(step, mesh, in_specs=(P(), P("x")), out_specs=(P("x"), P()), **kwargs)


def check(result: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.fixture(
    params=[slow(("explicit", True)), ("explicit", False), slow(("auto", True))], ids=str
)
def setting(request: pytest.FixtureRequest) -> Any:
    """A mesh, which is set or not."""
    kind, is_set = request.param
    mesh = make_mesh("2x2", KINDS[kind])
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        yield mesh


def loss(call: Callable[..., Any], model: Model, x: Any) -> Any:
    y, after = call(model, x)
    return jnp.sum(y**2) + after.total.value + jnp.sum(after.buffer.value**2)


def test_eager_and_jit(setting: Mesh) -> None:
    call = mapped(setting)
    expected = step(make_model(), jnp.asarray(data()))
    check(jax.jit(call)(make_model(), data()), expected)
    check(jax.jit(call)(*call.place(make_model(), data())), expected)
    check(mapped(setting, jit=False)(make_model(), data()), expected)
    model, plain = make_model(), make_model()
    for _ in range(3):
        y, model = call(model, data())
        y_plain, plain = step(plain, jnp.asarray(data()))
        check((y, model), (y_plain, plain))


@pytest.mark.slow
def test_grad_outside(setting: Mesh) -> None:
    call = mapped(setting)
    expected = jax.grad(lambda m: loss(step, m, jnp.asarray(data())))(make_model())
    placed, x = call.place(make_model(), data())
    check(jax.grad(lambda m: loss(call, m, data()))(make_model()), expected)
    slope = jax.grad(lambda m: loss(call, m, x))
    check(slope(placed), expected)
    check(jax.jit(slope)(placed), expected)
    remat = jax.jit(jax.grad(lambda m: loss(jax.checkpoint(call), m, data())))
    check(remat(make_model()), expected)


def test_scan_and_cond_around(setting: Mesh) -> None:
    call = mapped(setting)
    xs = np.stack([data(), 2 * data(), -data()])
    model, x = call.place(make_model(), data())
    expected = jax.lax.scan(lambda m, x: step(m, x)[::-1], make_model(), jnp.asarray(xs))
    scan: Any = lambda m, xs: jax.lax.scan(lambda m, x: call(m, x)[::-1], m, xs)
    check(scan(model, xs), expected)
    check(jax.jit(scan)(model, xs), expected)

    @jax.jit
    def maybe(flag: bool, model: Model, x: Any) -> Any:
        return jax.lax.cond(flag, lambda m: call(m, x)[1], lambda m: m, model)

    check(maybe(True, model, x), step(make_model(), jnp.asarray(data()))[1])
    check(maybe(False, model, x), make_model())


def test_scan_without_place() -> None:
    call = mapped(make_mesh("8", AxisType.Explicit))
    xs = np.stack([data(), 2 * data(), -data()])
    expected = jax.lax.scan(lambda m, x: step(m, x)[::-1], make_model(), jnp.asarray(xs))
    check(jax.lax.scan(lambda m, x: call(m, x)[::-1], make_model(), xs), expected)


def test_nested_over_other_axes() -> None:
    mesh = make_mesh("4x2", AxisType.Explicit)

    def inner(state: sm.State, x: jax.Array) -> tuple[jax.Array, sm.State]:
        return x + jax.lax.psum(x, "y"), state.set(state.value + jax.lax.psum(x, "y"))

    def outer(state: sm.State, x: jax.Array) -> Any:
        columns = P(None, "y")
        options: Any = {"axis_names": {"y"}, "state_in_specs": P()}
        call = sm.shard_map(inner, mesh, (P(), columns), (columns, P()), **options)
        y, state = call(state, x)
        return jax.lax.psum(jnp.sum(y), "x")[None], state

    call = sm.shard_map(outer, mesh, (P(), P("x")), (P(), P()), axis_names={"x"})
    x = jnp.arange(16.0).reshape(4, 4)
    total, after = jax.jit(call)(sm.State(jnp.zeros((4, 2)), spec=P("x")), x)
    folded = np.asarray(x[:, :2] + x[:, 2:])
    np.testing.assert_allclose(after.value, folded)
    np.testing.assert_allclose(total, [np.sum(np.asarray(x)) + 2 * folded.sum()])


@contextlib.contextmanager
def _set_in(way: str) -> Iterator[tuple[Any, jax.sharding.Sharding | None]]:
    # The mesh that `shard_map` gets, and the placement of an array whose devices must be known.
    mesh = make_mesh("8", AxisType.Explicit if way == "set" else AxisType.Auto)
    if way == "abstract":
        yield mesh.abstract_mesh, NamedSharding(mesh, P("x"))
    elif way == "abstract set":
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield None, NamedSharding(mesh, P("x"))
    else:
        with jax.set_mesh(mesh):
            yield None, None


@pytest.mark.parametrize("way", ["set", "abstract", "abstract set"])
def test_eager_transformations_find_the_devices(way: str) -> None:
    def loss(w: Any, scale: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        total = jax.lax.psum((w.sum() * scale.value * x).sum(), "x")
        return total, scale.set(scale.value + 1)

    w, x = np.ones(2, np.float32), np.arange(8, dtype=np.float32)
    with _set_in(way) as (mesh, lies):
        mapped = sm.shard_map(loss, mesh, (P(), P(), P("x")), (P(), P()))
        if lies is not None:
            x = jax.device_put(x, lies)
        scale = sm.State(np.float32(3))

        def total(w: Any) -> Any:
            return mapped(w, scale, x)[0]

        np.testing.assert_array_equal(jax.grad(total)(w), [84, 84])
        np.testing.assert_array_equal(jax.vjp(total, w)[1](np.float32(1))[0], [84, 84])
        np.testing.assert_array_equal(jax.jvp(total, (w,), (w,))[1], 168)
        np.testing.assert_array_equal(jax.linearize(total, w)[1](w), 168)
        lanes = np.arange(6, dtype=np.float32).reshape(3, 2)
        expected = lanes.sum(axis=1) * 84
        np.testing.assert_array_equal(jax.vmap(total)(lanes), expected)
        np.testing.assert_array_equal(jax.vmap(total, axis_name="lanes")(lanes), expected)
        np.testing.assert_array_equal(jax.vmap(jax.grad(total))(lanes), np.full((3, 2), 84))
        by_x = jax.vmap(lambda k: jax.grad(lambda x: mapped(w, scale, x * k)[0])(x))(w)
        np.testing.assert_array_equal(by_x, np.full((2, 8), 6))
        after = jax.vjp(lambda w: mapped(w, scale, x), w)[0][1]
        assert float(after.value) == 4


def test_compile_time_eval_gives_arrays() -> None:
    mesh, x = make_mesh(), np.arange(8, dtype=np.float32)
    fun = lambda s, x: (x * s.value, s.set(s.value + 1))
    mapped = sm.shard_map(fun, None, (P(), P("x")), (P("x"), P()))

    def outer(y: jax.Array) -> Any:
        with jax.ensure_compile_time_eval():
            for _ in range(2):
                z, s = mapped(sm.State(2.0), x)
                assert float(s.value) == 3
                np.testing.assert_array_equal(z, 2 * x)
        return mapped(sm.State(2.0), y)[0]

    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(outer)(x), 2 * x)
        np.testing.assert_array_equal(mapped(sm.State(2.0), x)[0], 2 * x)


LINE = np.linspace(-1, 1, 8, dtype=np.float32)
JACOBIANS: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "jacfwd": lambda call, x: jax.jacfwd(call)(x),
    "jacrev": lambda call, x: jax.jacrev(call)(x),
    "hessian": lambda call, x: jax.hessian(call)(x),
    "reverse twice": lambda call, x: jax.jacrev(jax.jacrev(call))(x),
    "of a gradient": lambda call, x: jax.jacfwd(jax.grad(lambda x: call(x).sum()))(x),
    "of a tree": lambda call, x: jax.jacrev(lambda tree: call(tree["x"]))({"x": x})["x"],
    "jit": lambda call, x: jax.jit(jax.jacfwd(call))(x),
}


def swirled(x: Any) -> Any:
    return jnp.sin(x) * jnp.roll(x, 1) * x.sum()


def assert_jacobian(how: str, call: Any, x: Any) -> None:
    expected = JACOBIANS[how](lambda x: jax.vmap(swirled)(x.reshape(4, 2)).reshape(8), LINE)
    found = JACOBIANS[how](call, x)
    np.testing.assert_allclose(jax.device_get(found), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_set"), [("explicit", False), slow("auto", True)])
def test_jacobians_of_placed_arrays(kind: str, is_set: bool) -> None:
    mesh = make_mesh("4", KINDS[kind])
    call = sm.shard_map(swirled, mesh, P("x"), P("x"))
    x = jax.device_put(LINE, NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        for how in ("jacfwd", "jacrev") if is_set else JACOBIANS:
            assert_jacobian(how, call, x)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["one device", "other devices", "another order", "other axes"])
def test_jacobians_of_arrays_on_other_devices(where: str) -> None:
    devices, kind = jax.devices(), AxisType.Explicit
    call = sm.shard_map(swirled, make_mesh("4", kind), P("x"), P("x"))
    pairs = Mesh(np.array(devices[:4]).reshape(2, 2), ("a", "b"), axis_types=(kind,) * 2)
    there: dict[str, Any] = {
        "one device": devices[5],
        "other devices": NamedSharding(Mesh(devices[4:], ("x",), axis_types=(kind,)), P("x")),
        "another order": NamedSharding(Mesh(devices[3::-1], ("x",), axis_types=(kind,)), P("x")),
        "other axes": NamedSharding(pairs, P(("b", "a"))),
    }
    x = jax.device_put(LINE, there[where])
    for how in ("jacfwd", "jacrev"):
        assert_jacobian(how, call, x)
    if where in ("one device", "other devices"):
        # A gradient goes back to where its array lies.
        assert jax.grad(lambda x: call(x).sum())(x).sharding.is_equivalent_to(x.sharding, 1)
