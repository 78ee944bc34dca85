"""Gradients in the losses of gradients, and losses of single shards, in every kind of map.

The reference is `plain`, which sees the rows of one shard at a time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.grad.test_grad import KINDS, SHARDS, WAYS, X, check, plain, some_ways
from tests.helpers import assert_says, make_mesh, slow


W = jnp.array([0.3, -0.6, 0.9])
RATE = 0.2


def fit(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.sin(x @ w) - 0.5) ** 2), w


def fit_again(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.cos(x @ w)), w


def shards() -> list[Any]:
    return np.split(X, SHARDS)


def mean_of(fun: Callable[..., Any]) -> Any:
    """The mean of what `fun` makes of each shard's rows."""
    each_shard = [fun(rows) for rows in shards()]
    return jax.tree.map(lambda *each: jnp.mean(jnp.stack(each), 0), *each_shard)


# Tasks: the loss is taken at parameters after steps of this shard alone.


def adapted(vag: Any, w: Any, x: Any) -> Any:
    _, grads = vag(fit)(w, x)
    return w - RATE * grads


def after_one(vag: Any, w: Any, x: Any) -> Any:
    return fit_again(adapted(vag, w, x), x)[0], w


def after_some(vag: Any, w: Any, x: Any) -> Any:
    def step(w: Any, _: Any) -> Any:
        return adapted(vag, w, x), None

    return fit_again(jax.lax.scan(jax.checkpoint(step), w, None, 3)[0], x)[0], w


def of_third_order(vag: Any, w: Any, x: Any) -> Any:
    _, grads = vag(functools.partial(after_one, vag))(w, x)
    return fit(w - RATE * grads, x)[0], w


def from_zeros(vag: Any, w: Any, x: Any) -> Any:
    """Steps on a parameter that all shards share at first and that is not differentiated outside."""

    def biased(bias: Any, x: Any) -> Any:
        return jnp.mean((jnp.sin(x @ w) + bias - 0.5) ** 2), bias

    bias = jnp.zeros(())
    _, grads = vag(biased)(bias, x)
    return biased(bias - RATE * grads, x)[0], w


def all_tasks(vag: Any, axis_name: Any, w: Any, x: Any) -> Any:
    losses = [functools.partial(task, vag) for task in (after_some, of_third_order, from_zeros)]
    results = [vag(loss, axis_name=axis_name)(w, x) for loss in losses]
    return [(loss, grads) for (loss, _), grads in results]


@functools.cache
def wanted_tasks() -> Any:
    return mean_of(lambda rows: all_tasks(plain, None, W, rows))


@some_ways
def test_tasks(way: str) -> None:
    results = WAYS[way](lambda w, x: all_tasks(sm.value_and_grad, "x", w, x), W, X)
    check(results, wanted_tasks(), 1e-4)


def penalised(vag: Any, w: Any, x: Any) -> Any:
    """A loss that contains the length of the gradient over all rows."""

    def loss(w: Any, x: Any) -> Any:
        (loss, _), grads = vag(fit, axis_name="x")(w, x)
        return loss + jnp.sum(grads**2), w

    return vag(loss, axis_name="x")(w, x)


@some_ways
def test_one_reduced_over_an_axis_in_the_loss_of_one_reduced_over_it(way: str) -> None:
    step = functools.partial(penalised, sm.value_and_grad)
    if way != "check":
        check(WAYS[way](step, W, X), penalised(plain, W, X), 1e-4)
        return
    # Types say that parameters are cast, not whether they are equal.
    text = (
        "value_and_grad: inside the loss of another value_and_grad over 'x', it cannot reduce over the "
        "same axes: there each shard has its own parameters, which may differ. Leave axis_name out "
        "inside, for the gradient of this shard's own loss."
    )
    assert_says(lambda: WAYS[way](step, W, X), sm.StatemeshError, text)


# Derivatives around the map.


def of_both_modes(run: Callable[..., Any], vag: Any) -> Any:
    """Derivatives around the map, and forward mode inside it, of a step with a gradient in its loss."""

    def inside(w: Any, x: Any) -> Any:
        def slopes(w: Any) -> Any:
            return vag(functools.partial(after_one, vag), axis_name="x")(w, x)[1]

        return jax.jvp(slopes, (w,), (jnp.ones_like(w),))

    def around(w: Any) -> Any:
        value, along = run(inside, w, X)
        return value @ jnp.array([1.0, -2.0, 3.0]) + along @ value

    return jax.value_and_grad(around)(W)


@functools.cache
def wanted_of_both_modes() -> Any:
    def run(fun: Any, w: Any, x: Any) -> Any:
        return mean_of(lambda rows: fun(w, rows))

    return jax.jit(lambda: of_both_modes(run, plain))()


@pytest.mark.slow
@some_ways
def test_derivatives_around_gradients_of_gradients(way: str) -> None:
    check(of_both_modes(WAYS[way], sm.value_and_grad), wanted_of_both_modes(), 1e-3)


# Losses that differ over an axis that is not named.


EACH = np.stack([W + k for k in range(SHARDS)])


def centred(w: Any, x: Any) -> Any:
    """A loss that subtracts the mean over all shards' rows, through which no gradient of a parameter goes."""
    mean = jax.lax.pmean(jnp.mean(x, 0), "x")
    scale = jax.lax.psum(jax.lax.stop_gradient(w), "x")
    return jnp.mean(((x - mean) @ (w * scale) - 0.5) ** 2), w


def centred_here(w: Any, x: Any) -> Any:
    return jnp.mean(((x - X.mean(0)) @ (w * EACH.sum(0)) - 0.5) ** 2), w


@some_ways
def test_what_shards_exchange_without_a_gradient_leaves_each_its_own(way: str) -> None:
    def step(w: Any, x: Any) -> Any:
        (value, _), grads = sm.value_and_grad(jax.checkpoint(centred))(w.reshape(3), x)
        return value[None], grads[None]

    if way in ("vmap2", "pmap2"):
        transform = sm.vmap2 if way == "vmap2" else sm.pmap2
        results = transform(step, axis_name="x")(EACH, np.stack(shards()))
        results = jax.tree.map(lambda x: x[:, 0], results)
    else:
        mesh, checked = make_mesh("4", KINDS[way == "check"]), way == "check"
        mapped = sm.shard_map(step, mesh, P("x"), P("x"), check_vma=checked)
        results = jax.tree.map(np.asarray, mapped(EACH, X))
    for k, rows in enumerate(shards()):
        (value, _), grads = plain(centred_here)(jnp.asarray(EACH[k]), rows)
        check(jax.tree.map(lambda x, k=k: x[k], results), (value, grads), 1e-4)


@pytest.mark.parametrize("checked", [True, slow(False)])
def test_parameters_of_each_shard_whose_parts_lie_on_another_axis(checked: bool) -> None:
    """The loss, after steps of its own, of units that are joined over "y"; nothing is reduced over "x"."""

    def after(w: Any, x: Any) -> Any:
        slopes = jax.checkpoint(lambda w: sm.grad(fit_parts)(w, x)[0])
        return fit_parts(w - RATE * slopes(w), x)[0], w

    def fit_parts(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.sin(jax.lax.psum(x @ w, "y")) - 0.5) ** 2), w

    def step(w: Any, x: Any) -> Any:
        (value, _), grads = sm.value_and_grad(after)(w[0], x)
        return value[None], grads[None]

    def of_one_device(w: Any, x: Any) -> Any:
        return fit(adapted(plain, w, x), x)[0], w

    width = 4
    w = np.cos(np.arange(4.0 * width, dtype=np.float32)).reshape(4, width)
    x = np.sin(np.arange(8.0 * width, dtype=np.float32)).reshape(8, width)
    parts = P("x", "y")
    mapped = sm.shard_map(
        step, make_mesh("4x2", KINDS[checked]), parts, (P("x"), parts), check_vma=checked
    )
    values, grads = jax.tree.map(np.asarray, mapped(w, x))
    for k, rows in enumerate(np.split(x, 4)):
        (value, _), slopes = plain(of_one_device)(jnp.asarray(w[k]), rows)
        check((values[k], grads[k]), (value, slopes), 1e-4)
