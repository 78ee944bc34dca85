"""Microbatches with gradients in their losses and around them, and of arrays that Explicit axes type."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import compiles, make_mesh, slow
from tests.grad.test_microbatches import WAYS, X, Y, make_net, net_loss


RATE = 0.1
W = np.array([0.3, -0.6, 0.9], np.float32)


def fit(w: Any, x: Any, y: Any) -> Any:
    return ((x @ w - y) ** 2).mean(), w


def adapted(w: Any, x: Any, y: Any, **options: Any) -> Any:
    """The loss after one step on these rows."""
    _, grads = sm.value_and_grad(fit, **options)(w, x, y)
    return fit(w - RATE * grads, x, y)[0], w


def wanted(shards: int, count: int) -> tuple[Any, Any]:
    """The mean loss of all microbatches, each after a step of its own, and its gradient, in float64."""
    losses, grads = [], []
    rows = [part[i::count] for part in np.split(np.arange(len(X)), shards) for i in range(count)]
    for part in rows:
        x, y = X[part].astype(np.float64), Y[part].astype(np.float64)
        w, n = W.astype(np.float64), len(x)
        w = w - RATE * 2 * x.T @ (x @ w - y) / n
        losses.append(((x @ w - y) ** 2).mean())
        step = np.eye(3) - RATE * 2 * x.T @ x / n
        grads.append(step @ (2 * x.T @ (x @ w - y) / n))
    return np.mean(losses), np.mean(grads, 0)


def assert_wanted(got: Any, shards: int, count: int) -> None:
    (loss, _), grads = got
    for a, b in zip((loss, grads), wanted(shards, count), strict=True):
        np.testing.assert_allclose(a, b, 2e-5, 1e-6)


@pytest.mark.parametrize(
    ("way", "count"), [("mesh", 4), ("unsharded", 8), slow("unchecked", 4), slow("pmap2", 2)]
)
def test_each_microbatch_takes_a_step_of_its_own(way: str, count: int) -> None:
    step = sm.value_and_grad(adapted, axis_name="x", microbatches=count)
    assert_wanted(WAYS[way](step)(W, X, Y), 1 if way == "unsharded" else 2, count)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mesh", "unchecked"])
def test_microbatches_within_the_loss_are_its_rows_at_once(way: str) -> None:
    def loss(w: Any, x: Any, y: Any) -> Any:
        return adapted(w, x, y, microbatches=4)

    step = sm.value_and_grad(loss, axis_name="x")
    assert_wanted(WAYS[way](step)(W, X, Y), 2, 1)


@pytest.mark.slow
def test_a_gradient_around_and_within() -> None:
    def loss(w: Any, x: Any, y: Any) -> Any:
        slopes = jax.vmap(jax.grad(lambda x: jnp.tanh(x @ w)))(x)
        return ((x @ w - y) ** 2).mean() + (slopes**2).mean(), w

    def parts(count: int | None) -> Any:
        step = sm.value_and_grad(loss, axis_name="x", microbatches=count)
        return WAYS["mesh"](lambda w, x, y: step(w, x, y))

    (value, _), grads = parts(4)(W, X, Y)
    around = jax.grad(lambda w: parts(4)(w, X, Y)[0][0])(W)
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


def test_from_the_second_call_on_nothing_is_compiled() -> None:
    step = WAYS["mesh"](sm.value_and_grad(net_loss, axis_name="x", microbatches=2))
    net = make_net()
    for _ in range(2):
        (_, net), _ = jax.block_until_ready(step(net, X, Y))
    with compiles() as seen:
        jax.block_until_ready(step(net, X, Y))
    assert seen.times == 0
