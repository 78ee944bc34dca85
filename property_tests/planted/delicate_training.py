"""Right training steps and models with states that tempt the check."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import statemesh as sm

from .case import normal, right, rows


class Norm(sm.Module):
    """A layer with a bias, and the slots of an optimizer."""

    weights: sm.ParamState
    bias: sm.ParamState
    first: sm.State
    second: sm.State
    steps: sm.State


def make_norm(dtype: str) -> Norm:
    weights, zeros = normal(dtype, 3, 4, seed=1), jnp.zeros(4, dtype)
    slots = (jnp.zeros_like(weights), zeros)
    return Norm(
        weights=sm.ParamState(weights),
        bias=sm.ParamState(zeros),
        first=sm.State(slots),
        second=sm.State(slots),
        steps=sm.State(0),
    )


def norm_loss(net: Norm, x: jax.Array) -> tuple[jax.Array, Norm]:
    """The norm takes the bias away again: its gradient is zero but for rounding."""
    h = x @ net.weights.value + net.bias.value
    mean = lax.pmean(h.mean(0), "data")
    var = lax.pmean(((h - mean) ** 2).mean(0), "data")
    return (jnp.tanh((h - mean) * lax.rsqrt(var + 1e-5)) ** 3).mean(), net


def gradients(net: Norm, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    (loss, _), grads = sm.value_and_grad(norm_loss, axis_name="data")(net, x)
    return loss, (grads.weights.value, grads.bias.value)


def stepped(net: Norm, steps: list[jax.Array]) -> Norm:
    weights, bias = net.weights.value - steps[0], net.bias.value - steps[1]
    return net.replace(weights=weights, bias=bias, steps=net.steps.value + 1)


@right("float32", "bfloat16", model=make_norm)
def bias_before_a_norm_with_adam(net: Norm, x: jax.Array) -> Any:
    """Adam makes a step of full length of what is rounding."""
    loss, grads = gradients(net, x)
    first = [0.9 * m + 0.1 * g for m, g in zip(net.first.value, grads, strict=True)]
    second = [0.99 * v + 0.01 * g**2 for v, g in zip(net.second.value, grads, strict=True)]
    steps = [0.01 * m / (jnp.sqrt(v) + 1e-8) for m, v in zip(first, second, strict=True)]
    return x * loss, stepped(net, steps).replace(first=tuple(first), second=tuple(second))


@right("float32", "bfloat16", model=make_norm)
def bias_before_a_norm_with_adagrad(net: Norm, x: jax.Array) -> Any:
    loss, grads = gradients(net, x)
    second = [v + g**2 for v, g in zip(net.second.value, grads, strict=True)]
    steps = [0.01 * g * lax.rsqrt(v + 1e-12) for g, v in zip(grads, second, strict=True)]
    return x * loss, stepped(net, steps).replace(second=tuple(second))


@right("float32", model=make_norm)
def bias_before_a_norm_with_sign_descent(net: Norm, x: jax.Array) -> Any:
    loss, grads = gradients(net, x)
    return x * loss, stepped(net, [0.01 * jnp.sign(g) for g in grads])


@right("float32", "bfloat16", model=make_norm)
def bias_before_a_norm_clipped_by_the_norm(net: Norm, x: jax.Array) -> Any:
    """Each array is made as long as one, also that which is rounding."""
    loss, grads = gradients(net, x)
    steps = [0.01 * g / (jnp.sqrt((g**2).sum()) + 1e-12) for g in grads]
    return x * loss, stepped(net, steps)


class Meter(sm.Module):
    largest: sm.State
    smallest: sm.State


def make_meter(dtype: str) -> Meter:
    far = jnp.full(3, 100, dtype)
    return Meter(largest=sm.State(-far, reduce="max"), smallest=sm.State(far, reduce="min"))


@right("float32", "bfloat16", model=make_meter)
def extremes_in_states(meter: Meter, x: jax.Array) -> Any:
    """JAX has no derivative of a maximum over shards."""
    largest = jnp.maximum(meter.largest.value, x.max(0))
    smallest = jnp.minimum(meter.smallest.value, x.min(0))
    return x * 2, meter.replace(largest=largest, smallest=smallest)


def make_rng(dtype: str) -> sm.RandomState:
    del dtype
    return sm.RandomState(jax.random.key(0))


@right("float32", "bfloat16", "float16", model=make_rng)
def dropout_by_rows(rng: sm.RandomState, x: jax.Array) -> Any:
    keys, rng = rng.rows(len(x), "data")
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
    return jnp.where(keep, x / 0.8, 0), rng


@right("float32", model=make_rng)
def keys_folded_by_rows(rng: sm.RandomState, x: jax.Array) -> Any:
    """By hand, with the number of the row among all."""
    row = lax.axis_index("data") * len(x) + jnp.arange(len(x))
    keys = jax.vmap(lambda r: jax.random.fold_in(jax.random.key(7), r))(row)
    return x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys), rng


def make_average(dtype: str) -> sm.BatchState:
    return sm.BatchState(jnp.zeros(3, dtype), reduce="mean")


@right("float32", "bfloat16", "float16", model=make_average, steps=3)
def average_of_centred_numbers(average: sm.BatchState, x: jax.Array) -> Any:
    """What is kept is rounding and no more."""
    x = x - lax.pmean(x.mean(0), "data")
    return x, average.set(0.9 * average.value + 0.1 * x.mean(0))


def make_scale(dtype: str) -> sm.ParamState:
    return sm.ParamState(jnp.ones(3, dtype))


@right("float32", model=make_scale, values=lambda dtype: rows(dtype) * 0)
def gradient_of_a_root_at_zero(scale: sm.ParamState, x: jax.Array) -> Any:
    """Infinite times zero: NaN on every mesh."""

    def loss(scale: sm.ParamState) -> tuple[jax.Array, sm.ParamState]:
        return jnp.sqrt(((x * scale.value) ** 2).mean(0)).sum(), scale

    grads, _ = sm.grad(loss, axis_name="data")(scale)
    return x, scale.set(scale.value - 0.1 * grads.value)


@right("float32", "bfloat16", model=make_scale)
def learning_at_the_minimum(scale: sm.ParamState, x: jax.Array) -> Any:
    """The gradient vanishes, and is divided by its own length."""

    def loss(scale: sm.ParamState) -> tuple[jax.Array, sm.ParamState]:
        return ((x * scale.value - x) ** 2).mean(), scale

    grads, _ = sm.grad(loss, axis_name="data")(scale)
    length = jnp.sqrt((grads.value**2).sum() + 1e-12)
    return x, scale.set(scale.value - 0.1 * grads.value / length)


@right("float32", model=make_scale, steps=3)
def power_iteration(scale: sm.ParamState, x: jax.Array) -> Any:
    """The sign of the vector is kept, its direction converges."""
    vector = scale.value
    for _ in range(5):
        vector = lax.psum(x.T @ (x @ vector), "data")
        vector = vector / jnp.sqrt((vector**2).sum())
    return x @ vector, scale.set(vector)
