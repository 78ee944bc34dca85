"""`value_and_grad(..., microbatches=k)`: what all rows at once would give."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import compiles, counted, make_mesh, slow


X = np.sin(np.arange(96, dtype=np.float32)).reshape(32, 3) + 0.5
Y = np.cos(np.arange(32, dtype=np.float32))


def merged_moments(old: Any, new: Any, axis_names: Any) -> Any:
    """Count, mean and M2 of all rows, from those of each instance's own."""
    count = jax.lax.psum(new["count"], axis_names)
    mean = jax.lax.psum(new["count"] * new["mean"], axis_names) / count
    apart = new["m2"] + new["count"] * (new["mean"] - mean) ** 2
    return {"count": count, "mean": mean, "m2": jax.lax.psum(apart, axis_names)}


class Net(sm.Module):
    """A state with each policy."""

    w: sm.ParamState
    v: jax.Array
    mean: sm.State
    total: sm.State
    low: sm.State
    high: sm.State
    moments: sm.State
    steps: sm.State
    unread: sm.LongTermState
    rng: sm.RandomState


def make_net() -> Net:
    return Net(
        sm.ParamState(jnp.array([[0.3, -0.6], [0.9, 0.2], [-0.4, 0.1]])),
        jnp.array([0.7, -1.1]),
        sm.State(jnp.zeros(3), reduce="mean"),
        sm.State(jnp.ones(3), reduce="sum"),
        sm.State(jnp.zeros(3), reduce="min"),
        sm.State(jnp.zeros(3), reduce="max"),
        sm.State({"count": 0.0, "mean": jnp.zeros(3), "m2": jnp.zeros(3)}, reduce=merged_moments),
        sm.State(0),
        sm.LongTermState(jnp.ones(2)),
        sm.RandomState(jax.random.key(5)),
    )


def net_loss(net: Net, x: Any, y: Any) -> Any:
    _, rng = net.rng.split()
    made = jnp.tanh(x @ net.w.value) @ net.v
    mean = x.mean(0)
    new = net.replace(
        mean=mean,
        total=net.total.value + x.sum(0),
        low=jnp.minimum(net.low.value, x.min(0)),
        high=jnp.maximum(net.high.value, x.max(0)),
        moments={"count": 1.0 * len(x), "mean": mean, "m2": ((x - mean) ** 2).sum(0)},
        steps=net.steps.value + 1,
        rng=rng,
    )
    return ((made - y) ** 2).mean(), new


def expected() -> dict[str, Any]:
    """Loss, gradients and states in float64, written out by hand."""
    x, y = X.astype(np.float64), Y.astype(np.float64)
    net = make_net()
    w, v = np.float64(net.w.value), np.float64(net.v)
    hidden = np.tanh(x @ w)
    error = 2 * (hidden @ v - y) / len(x)
    return {
        "loss": ((hidden @ v - y) ** 2).mean(),
        "w": x.T @ ((error[:, None] * v) * (1 - hidden**2)),
        "v": hidden.T @ error,
        "mean": x.mean(0),
        "total": 1 + x.sum(0),
        "low": np.minimum(0, x.min(0)),
        "high": np.maximum(0, x.max(0)),
        "moments": {"count": len(x), "mean": x.mean(0), "m2": len(x) * x.var(0)},
        "steps": 1,
    }


def found(result: Any) -> dict[str, Any]:
    (loss, net), grads = result
    names = ("mean", "total", "low", "high", "moments", "steps")
    states = {name: getattr(net, name).value for name in names}
    return {"loss": loss, "w": grads.w.value, "v": grads.v, **states}


def check(result: Any) -> None:
    got = jax.tree.map(np.asarray, found(result))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-6), got, expected())


def on_mesh(name: str, checked: bool, kind: AxisType) -> Callable[..., Any]:
    def way(step: Any) -> Any:
        mesh = make_mesh(name, kind)
        rows = P(mesh.axis_names)
        return sm.shard_map(step, mesh, (None, rows, rows), P(), check_vma=checked)

    return way


def in_lanes(transform: Any) -> Callable[..., Any]:
    def way(step: Any) -> Any:
        mapped = transform(step, axis_name="x", in_axes=(None, 0, 0), out_axes=None)
        return lambda net, x, y: mapped(net, x.reshape(2, 16, 3), y.reshape(2, 16))

    return way


WAYS: dict[str, Callable[..., Any]] = {
    "unsharded": jax.jit,
    "mesh": on_mesh("2", True, AxisType.Explicit),
    "unchecked": on_mesh("2", False, AxisType.Auto),
    "two axes": on_mesh("4x2", True, AxisType.Explicit),
    "vmap2": in_lanes(sm.vmap2),
    "pmap2": in_lanes(sm.pmap2),
}


@pytest.mark.parametrize(
    "way", ["mesh", "two axes", "vmap2", *map(slow, ("unsharded", "unchecked", "pmap2"))]
)
def test_all_rows_at_once_give_the_same(way: str) -> None:
    names = ("x", "y") if way == "two axes" else "x"
    step = sm.value_and_grad(net_loss, axis_name=names, microbatches=4)
    check(WAYS[way](step)(make_net(), X, Y))


@pytest.mark.parametrize(("mesh", "count"), [("4x2", 2), slow("2", 8)])
def test_a_row_draws_the_same_numbers(mesh: str, count: int) -> None:
    names = make_mesh(mesh).axis_names

    def noise(net: Any, x: Any) -> Any:
        keys, rng = net["rng"].rows(len(x), names)
        drawn = jax.vmap(jax.random.bits)(keys)
        return (net["w"].value * x.sum(), drawn), {**net, "rng": rng}

    net: dict[str, Any] = {"w": sm.ParamState(1.0), "rng": sm.RandomState(jax.random.key(2))}
    wanted, after = net["rng"].rows(len(X))

    def step(net: Any, x: Any) -> Any:
        return sm.value_and_grad(noise, axis_name=names, has_aux=True, microbatches=count)(net, x)

    rows = P(names)
    out_specs = (((P(), P(None, names)), P()), P())
    sharded = sm.shard_map(step, make_mesh(mesh, AxisType.Explicit), (None, rows), out_specs)
    ((_, drawn), new), _ = sharded(net, X)
    # Microbatch `i` holds every `count`-th row from row `i` on.
    np.testing.assert_array_equal(drawn.T.ravel(), jax.vmap(jax.random.bits)(wanted))
    np.testing.assert_array_equal(
        jax.random.key_data(new["rng"].key), jax.random.key_data(after.key)
    )


def test_auxiliary_arrays_are_stacked() -> None:
    def loss(w: Any, x: Any, *, scale: Any) -> Any:
        aux = {"rows": x, "sum": x.sum(), "scale": scale, "one": jnp.ones(2), "name": "a"}
        return ((x.sum() * w * scale), aux), w

    w = jnp.float32(2)
    step = sm.value_and_grad(loss, has_aux=True, microbatches=4)
    ((_, aux), new), _ = step(w, X, scale=jnp.arange(3.0).sum())
    assert new is w
    assert aux["name"] == "a" and aux["one"].shape == (4, 2)
    np.testing.assert_array_equal(aux["rows"], [X[i::4] for i in range(4)])
    np.testing.assert_array_equal(aux["scale"], [3.0] * 4)
    np.testing.assert_allclose(aux["sum"], [X[i::4].sum() for i in range(4)], 1e-5)


def test_narrow_gradients_are_summed_in_float32() -> None:
    def loss(w: Any, x: Any) -> Any:
        return (w * x).sum(), w

    # Each part is below the half of the last digit of bfloat16 at 1.
    x = jnp.array([1.0, *[2.0**-9] * 255], jnp.bfloat16)
    step = sm.value_and_grad(loss, reduce="sum", microbatches=256)
    (value, _), grad = jax.jit(step)(jnp.bfloat16(1), x)
    assert grad.dtype == value.dtype == jnp.bfloat16
    assert float(grad) == float(value) == 1.5


def test_the_function_is_traced_once_and_reduced_once() -> None:
    def value(net: Net, x: Any, y: Any) -> Any:
        return net_loss(net, x, y)[0], net

    loss, traced = counted(value)

    def reductions(count: int | None) -> int:
        step = sm.value_and_grad(loss, axis_name="x", microbatches=count)
        text: str = WAYS["mesh"](step).lower(make_net(), X, Y).compile().as_text()
        return text.count(" all-reduce(")

    assert reductions(8) == reductions(None) > 0
    assert traced.times == 2
    # From the second call on nothing is compiled.
    call, net = WAYS["mesh"](sm.value_and_grad(loss, axis_name="x", microbatches=8)), make_net()
    for _ in range(2):
        (_, net), _ = jax.block_until_ready(call(net, X, Y))
    with compiles() as seen:
        jax.block_until_ready(call(net, X, Y))
    assert seen.times == 0


def test_activations_take_the_memory_of_one_microbatch() -> None:
    def loss(w: Any, x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return (x**2).mean(), w

    w, x = jnp.eye(64), jnp.ones((4096, 64))

    def temporaries(count: int) -> Any:
        compiled = jax.jit(sm.value_and_grad(loss, microbatches=count)).lower(w, x).compile()
        memory: Any = compiled.memory_analysis()
        return memory.temp_size_in_bytes

    one, eight = temporaries(1), temporaries(8)
    assert eight < one / 4


# Gradients in their losses and around them, and arrays that Explicit axes type


RATE = 0.1
W = np.array([0.3, -0.6, 0.9], np.float32)


def fit(w: Any, x: Any, y: Any) -> Any:
    return ((x @ w - y) ** 2).mean(), w


def adapted(w: Any, x: Any, y: Any, **options: Any) -> Any:
    """The loss after one step on these rows."""
    _, grads = sm.value_and_grad(fit, **options)(w, x, y)
    return fit(w - RATE * grads, x, y)[0], w


def assert_wanted(got: Any, count: int) -> None:
    """The mean loss of all microbatches of two shards, each after a step of its own, and its gradient."""
    rows = [part[i::count] for part in np.split(np.arange(len(X)), 2) for i in range(count)]

    def after_a_step(w: Any, x: Any, y: Any) -> Any:
        return fit(w - RATE * jax.grad(lambda w: fit(w, x, y)[0])(w), x, y)[0]

    def mean(w: Any) -> Any:
        return jnp.stack([after_a_step(w, X[part], Y[part]) for part in rows]).mean()

    (loss, _), grads = got
    for a, b in zip((loss, grads), jax.jit(jax.value_and_grad(mean))(W), strict=True):
        np.testing.assert_allclose(a, b, 2e-5, 1e-6)


@pytest.mark.parametrize(("way", "count"), [("mesh", 4), slow("unchecked", 4), slow("pmap2", 2)])
def test_each_microbatch_takes_a_step_of_its_own(way: str, count: int) -> None:
    step = sm.value_and_grad(adapted, axis_name="x", microbatches=count)
    assert_wanted(WAYS[way](step)(W, X, Y), count)


@pytest.mark.slow
def test_a_gradient_around_and_within() -> None:
    def within(w: Any, x: Any, y: Any) -> Any:
        return adapted(w, x, y, microbatches=4)

    # Microbatches within the loss are its rows at once.
    assert_wanted(WAYS["mesh"](sm.value_and_grad(within, axis_name="x"))(W, X, Y), 1)

    def loss(w: Any, x: Any, y: Any) -> Any:
        slopes = jax.vmap(jax.grad(lambda x: jnp.tanh(x @ w)))(x)
        return ((x @ w - y) ** 2).mean() + (slopes**2).mean(), w

    parts = WAYS["mesh"](sm.value_and_grad(loss, axis_name="x", microbatches=4))
    (value, _), grads = parts(W, X, Y)
    around = jax.grad(lambda w: parts(w, X, Y)[0][0])(W)
    (wanted, _), wanted_grads = sm.value_and_grad(loss)(W, X, Y)
    np.testing.assert_allclose(value, wanted, 1e-5)
    for got in (grads, around):
        np.testing.assert_allclose(got, wanted_grads, 1e-4)


# Explicit axes


@pytest.mark.parametrize(("wrap", "count"), [(jax.jit, 4), slow(lambda step: step, 32)])
def test_rows_and_parameters_split_over_explicit_axes_outside_of_any_map(
    wrap: Any, count: int
) -> None:
    """Of 32 parts none can be split over the shards."""
    mesh = make_mesh("2", AxisType.Explicit)

    def loss(w: Any, x: Any, y: Any) -> Any:
        made = x @ w["in"]
        return ((made - y[:, None]) ** 2).mean(), w

    w = {"in": np.outer(W, [1, 2, 3, 4]).astype(np.float32)}
    wanted, wanted_grads = sm.value_and_grad(loss)(w, X, Y)
    put: Any = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, P(*axes)))
    step = wrap(sm.value_and_grad(loss, microbatches=count))
    # JAX refuses a product of two arrays that are split over the same axis.
    rows = step({"in": put(w["in"])}, put(X, "x"), put(Y, "x"))
    units = step({"in": put(w["in"], None, "x")}, put(X), put(Y))
    for (value, _), grads in (rows, units):
        np.testing.assert_allclose(value, wanted[0], 1e-5)
        np.testing.assert_allclose(grads["in"], wanted_grads["in"], 1e-5)
    assert units[1]["in"].sharding.spec == P(None, "x")
