"""Right programs with jumps: thresholds, ties, orders, rounding to whole numbers, signs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .case import integers, normal, right, rows


ALL = ("float32", "bfloat16", "float16")


def equal_numbers(dtype: str) -> jax.Array:
    return jnp.full((16, 3), 0.1, dtype)


def few_numbers(dtype: str) -> jax.Array:
    """Many of them equal."""
    return (integers(16, 3, below=3) / 10).astype(dtype)


def gathered(x: jax.Array) -> Any:
    return lax.pmean(lax.all_gather(x, "data", tiled=True), "data")


@right(*ALL, values=equal_numbers)
def threshold_at_a_mean_of_equal_numbers(x: jax.Array) -> Any:
    return jnp.where(x > lax.pmean(x.mean(0), "data"), 1, 0)


@right(*ALL)
def threshold_at_a_mean(x: jax.Array) -> Any:
    return jnp.where(x > lax.pmean(x.mean(0), "data"), x, 0)


@right("bfloat16", "float16", values=lambda dtype: jnp.abs(normal(dtype, 64, 2)), out=P())
def floor_of_a_sum(x: jax.Array) -> Any:
    return jnp.floor(lax.psum(x.sum(0), "data"))


@right("float32", values=equal_numbers, out=P())
def floor_at_a_whole_number(x: jax.Array) -> Any:
    """Sixteen tenths are 1.6, and ten times that is 16, or a little less."""
    return jnp.floor(10 * lax.psum(x.sum(0), "data"))


@right(*ALL)
def quantized_by_the_largest(x: jax.Array) -> Any:
    scale = 127 / lax.pmax(lax.stop_gradient(jnp.abs(x)).max(), "data")
    return jnp.round(x * scale) / scale


@right(*ALL)
def quantized_by_the_mean(x: jax.Array) -> Any:
    scale = lax.pmean(jnp.abs(x).mean(), "data") / 10
    return jnp.round(x / scale) * scale


@right("float32", "bfloat16")
def int8_by_the_mean(x: jax.Array) -> Any:
    scale = lax.pmean(jnp.abs(x).mean(), "data") / 30
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)


@right(*ALL, values=few_numbers, out=P())
def top_of_equal_scores(x: jax.Array) -> Any:
    """The first of equal numbers wins, wherever it lies."""
    values, index = lax.top_k(gathered(x[:, 0]), 4)
    return values, index


@right("float32", "bfloat16", out=P())
def top_of_nearly_equal_sums(x: jax.Array) -> Any:
    """Of the same numbers in two orders: equal but for rounding."""
    return jnp.argmax(lax.psum(jnp.cumsum(jnp.stack([x[:, 0], x[::-1, 0]], 1), 0)[-1], "data"))


@right(*ALL, values=few_numbers, out=P())
def sorted_with_ties(x: jax.Array) -> Any:
    order = jnp.argsort(gathered(x[:, 0]), stable=True)
    return order, gathered(x[:, 1])[order]


@right("float32", "bfloat16", values=lambda dtype: normal(dtype, 16, 4) / 100)
def routing_near_ties(x: jax.Array) -> Any:
    """To the expert of the highest score, all scores being nearly the same."""
    scores = 1 + (x - lax.pmean(x.mean(0), "data")) / 100
    best = jnp.argmax(scores, 1)
    return jnp.take_along_axis(x, best[:, None], 1), best


@right(*ALL, out=P())
def sign_of_what_is_zero(x: jax.Array) -> Any:
    """As in sign descent, where a gradient is zero but for rounding."""
    return jnp.sign(lax.psum((x - lax.pmean(x.mean(0), "data")).sum(0), "data"))


@right(*ALL, values=lambda dtype: jnp.abs(rows(dtype)))
def clipped_at_the_boundary(x: jax.Array) -> Any:
    """What is normalized to length one is clipped at one."""
    x = x / jnp.sqrt(lax.psum((x**2).sum(), "data"))
    length = jnp.sqrt(lax.psum((x**2).sum(), "data"))
    return x * jnp.minimum(1, 1 / length)


@right(*ALL, values=lambda dtype: rows(dtype) + 0.5)
def relu_of_what_is_centred(x: jax.Array) -> Any:
    """A constant column lies on the kink."""
    x = x.at[:, 1].set(1 / 3)
    return jax.nn.relu(x - lax.pmean(x.mean(0), "data"))


@right("float32", out=P())
def bins_with_an_edge_at_the_mean(x: jax.Array) -> Any:
    """How many numbers lie in each of four bins."""
    x = jnp.round(lax.stop_gradient(x) * 4) / 4
    center = lax.pmean(x.mean(), "data")
    which = jnp.clip(jnp.floor((x - center) * 2) + 2, 0, 3).astype(jnp.int32)
    return lax.psum(jnp.bincount(which.ravel(), length=4), "data")


@right("int32", values=lambda dtype: integers(16, 3, below=100, dtype=dtype), out=P())
def whole_division_of_sums(x: jax.Array) -> Any:
    return lax.psum(x.sum(0), "data") // lax.psum(x.shape[0], "data"), lax.psum(
        x.sum(0), "data"
    ) % 7


@right("int32", values=lambda dtype: integers(16, 3, below=2**31 - 1, dtype=dtype), out=P())
def sums_that_wrap_around(x: jax.Array) -> Any:
    """The remainder is the same in every order."""
    return lax.psum(x.sum(0), "data")


@right(*ALL, values=few_numbers, out=P())
def largest_of_equal_numbers(x: jax.Array) -> Any:
    """The derivative could go to each of them."""
    return gathered(x).max(0)


@right("float32", "bfloat16", out=P())
def median_between_two(x: jax.Array) -> Any:
    ordered = jnp.sort(gathered(x), axis=0)
    return (ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2


@right("float32", out=P())
def rounds_until_it_converges(x: jax.Array) -> Any:
    """Newton's method for the root of a sum of squares, and how many rounds it took."""
    goal = lax.psum((lax.stop_gradient(x) ** 2).sum(), "data")

    def rough(state: tuple[jax.Array, jax.Array]) -> Any:
        return jnp.abs(state[0] ** 2 - goal) > 1e-4 * goal

    def better(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return (state[0] + goal / state[0]) / 2, state[1] + 1

    return lax.while_loop(rough, better, (goal, jnp.int32(0)))
