"""Microbatches with gradients in their losses and around them, and of arrays that Explicit axes type."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import compiles, make_mesh, slow
from tests.grad.test_microbatches import WAYS, X, check, make_net, net_loss


RATE = 0.1
W = np.array([0.3, -0.6, 0.9], np.float32)
Y = np.cos(np.arange(32, dtype=np.float32))


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
    ("way", "count"),
    [
        ("mesh", 4),
        slow("unsharded", 8),
        slow("unchecked", 4),
        slow("vmap2", 2),
        slow("pmap2", 1),
    ],
)
def test_each_microbatch_takes_a_step_of_its_own(way: str, count: int) -> None:
    step = sm.value_and_grad(adapted, axis_name="x", microbatches=count)
    assert_wanted(WAYS[way](step)(W, X, Y), 1 if way == "unsharded" else 2, count)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mesh", "unchecked", "unsharded"])
def test_microbatches_within_the_loss_are_its_rows_at_once(way: str) -> None:
    def loss(w: Any, x: Any, y: Any) -> Any:
        return adapted(w, x, y, microbatches=4)

    step = sm.value_and_grad(loss, axis_name="x")
    assert_wanted(WAYS[way](step)(W, X, Y), 1 if way == "unsharded" else 2, 1)


@pytest.mark.slow
def test_a_gradient_outside_of_the_mapped_call() -> None:
    def loss(w: Any, count: int | None) -> Any:
        step = sm.value_and_grad(fit, axis_name="x", microbatches=count)
        return WAYS["mesh"](lambda w, x, y: step(w, x, y)[0][0])(w, X, Y)

    at_once, in_parts = (jax.grad(loss)(W, count) for count in (None, 4))
    np.testing.assert_allclose(in_parts, at_once, 2e-5, 1e-6)


@pytest.mark.slow
def test_a_penalty_on_the_gradient_by_each_row() -> None:
    def loss(w: Any, x: Any, y: Any) -> Any:
        slopes = jax.vmap(jax.grad(lambda x: jnp.tanh(x @ w)))(x)
        return ((x @ w - y) ** 2).mean() + (slopes**2).mean(), w

    got = WAYS["mesh"](sm.value_and_grad(loss, axis_name="x", microbatches=4))(W, X, Y)
    (value, _), grads = sm.value_and_grad(loss)(W, X, Y)
    np.testing.assert_allclose(got[0][0], value, 1e-5)
    np.testing.assert_allclose(got[1], grads, 1e-4)


# Explicit axes


@pytest.mark.parametrize("is_set", [False, slow(True)])
@pytest.mark.parametrize(
    ("mesh", "checked", "count"),
    [("2", True, 4), slow("2", False, 8), slow("4x2", True, 4)],
)
def test_on_a_mesh_of_explicit_axes(mesh: str, checked: bool, count: int, is_set: bool) -> None:
    explicit = make_mesh(mesh, AxisType.Explicit)
    names = explicit.axis_names
    step = sm.value_and_grad(net_loss, axis_name=names, microbatches=count)
    mapped = sm.shard_map(step, explicit, (None, P(names), P(names)), P(), check_vma=checked)
    with jax.set_mesh(explicit) if is_set else contextlib.nullcontext():
        check(mapped(make_net(), X, Y))


@pytest.mark.parametrize("count", [4, slow(32)])
@pytest.mark.parametrize("wrap", [slow(lambda step: step), jax.jit], ids=["eager", "jit"])
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


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mesh", "pmap2"])
def test_from_the_second_call_on_nothing_is_compiled(way: str) -> None:
    step = WAYS[way](sm.value_and_grad(net_loss, axis_name="x", microbatches=2))
    net = make_net()
    for _ in range(2):
        (_, net), _ = jax.block_until_ready(step(net, X, Y))
    with compiles() as seen:
        jax.block_until_ready(step(net, X, Y))
    assert seen.times == 0
