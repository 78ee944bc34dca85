"""Right programs whose results are mostly rounding, or that leave the range of their dtype on the way."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import normal, right, rows


ALL = ("float32", "bfloat16", "float16")


@right(*ALL, out=P())
def one_minus_a_unit_vector(x: jax.Array) -> Any:
    """Zero but for rounding."""
    length = jnp.sqrt(lax.psum((x**2).sum(), "data"))
    return 1 - lax.psum(((x / length) ** 2).sum(), "data")


@right(*ALL, out=P())
def cosine_of_equal_vectors(x: jax.Array) -> Any:
    total = lax.psum((x * x).sum(0), "data")
    return jnp.arccos(jnp.clip(total / (jnp.sqrt(total) * jnp.sqrt(total)), -0.999, 0.999))


@right(*ALL)
def centred_twice(x: jax.Array) -> Any:
    """The mean of what is centred is zero but for rounding."""
    x = x - lax.pmean(x.mean(0), "data")
    return x, lax.pmean(x.mean(0), "data") + 0 * x


@right("float32", values=lambda dtype: rows(dtype) + 10_000)
def variance_by_the_mean_of_squares(x: jax.Array) -> Any:
    mean, squares = lax.pmean(x.mean(0), "data"), lax.pmean((x**2).mean(0), "data")
    return x * 0 + (squares - mean**2)


@right(*ALL, values=lambda dtype: rows(dtype) + 300)
def variance_by_two_passes_far_from_zero(x: jax.Array) -> Any:
    mean = lax.pmean(x.mean(0), "data")
    return (x - mean) * lax.rsqrt(lax.pmean(((x - mean) ** 2).mean(0), "data") + 1)


@right(*ALL, out=P())
def two_formulas_of_a_variance(x: jax.Array) -> Any:
    """Their difference is rounding."""
    mean = lax.pmean(x.mean(0), "data")
    return (lax.pmean((x**2).mean(0), "data") - mean**2) - lax.pmean(
        ((x - mean) ** 2).mean(0), "data"
    )


@right("bfloat16", "float16", values=lambda dtype: jnp.abs(normal(dtype, 256, 2)), out=P())
def long_sums(x: jax.Array) -> Any:
    return lax.psum(x.sum(0), "data")


@right("bfloat16", "float16", values=lambda dtype: jnp.abs(normal(dtype, 64, 2)), out=P())
def sums_one_by_one(x: jax.Array) -> Any:
    """Each summand is rounded to the dtype."""
    start = lax.pcast(jnp.zeros(2, x.dtype), "data", to="varying")
    return lax.psum(lax.scan(lambda total, row: (total + row, None), start, x)[0], "data")


@right("float32", values=lambda dtype: rows(dtype) * jnp.array([1.0, 1e6, 1e-6]), out=P())
def columns_of_all_sizes(x: jax.Array) -> Any:
    return lax.psum((x @ jnp.ones((3, 2), x.dtype)).sum(0), "data")


@right("float32", "float16", values=lambda dtype: rows(dtype) * 200)
def logsumexp_of_large_values(x: jax.Array) -> Any:
    high = lax.pmax(lax.stop_gradient(x).max(0), "data")
    return x - high - jnp.log(lax.psum(jnp.exp(x - high).sum(0), "data"))


@right(*ALL, out=P())
def division_by_what_is_nearly_zero(x: jax.Array) -> Any:
    rest = lax.psum((x - lax.pmean(x.mean(0), "data")).sum(0), "data")
    return 1 / (jnp.abs(rest) + 1e-3)


@right(*ALL, values=lambda dtype: rows(dtype).at[3].set(0))
def rsqrt_at_zero(x: jax.Array) -> Any:
    squares = (x**2).sum(1, keepdims=True)
    return jnp.where(squares > 0, x * lax.rsqrt(jnp.where(squares > 0, squares, 1)), 0)


@right(*ALL, values=lambda dtype: rows(dtype).at[3].set(0))
def guarded_zero_by_zero(x: jax.Array) -> Any:
    """The derivative of what is not chosen is NaN on every mesh."""
    return jnp.where(x != 0, x / x, 1) + lax.pmean(x.mean(), "data")


@right(*ALL, values=lambda dtype: rows(dtype).at[::5].set(jnp.nan), out=P())
def masked_rows_of_nan(x: jax.Array) -> Any:
    there = ~jnp.isnan(x)
    count = lax.psum(there.sum(0), "data")
    return lax.psum(jnp.where(there, x, 0).sum(0), "data") / count.astype(x.dtype)


@right(*ALL)
def nan_wherever_a_row_is_negative(x: jax.Array) -> Any:
    return jnp.sqrt(x) + lax.pmean(x.mean(), "data")


@right("float32", "bfloat16")
def softmax_with_a_large_negative_mask(x: jax.Array) -> Any:
    allowed = jnp.arange(3) < 2
    logits = jnp.where(allowed, x, -1e9)
    return jnp.concatenate([logits, jax.nn.softmax(logits)], 1) + lax.pmean(x.mean(), "data")


@right(*ALL)
def softmax_with_an_infinite_mask(x: jax.Array) -> Any:
    logits = jnp.where(jnp.arange(3) < 2, x, -jnp.inf)
    return logits, jax.nn.softmax(logits) * lax.pmean(x.mean(), "data")


@right("float32", steps=3, values=lambda dtype: jax.nn.sigmoid(normal(dtype, 8, 3)))
def logistic_map(x: jax.Array) -> Any:
    """Chaos: what differs by a last digit differs by everything after thirty rounds."""
    shared = lax.pmean(x.mean(0), "data")
    for _ in range(30):
        shared = 3.9 * shared * (1 - shared)
    return x + shared


@right("float32", out=P())
def chaos_of_a_sum(x: jax.Array) -> Any:
    """The digits behind the first are all that is left."""
    total = 1e5 * lax.psum(x.sum(0), "data")
    return jnp.sin(total)


@right(*ALL, out=P())
def online_softmax(x: jax.Array) -> Any:
    """The sum is rescaled for each new maximum, as in ring attention."""
    n = lax.axis_size("data")
    high, total, moved = x.max(0), jnp.exp(x - x.max(0)).sum(0), x
    for _ in range(n - 1):
        moved = lax.ppermute(moved, "data", [(i, (i + 1) % n) for i in range(n)])
        higher = jnp.maximum(high, moved.max(0))
        total = total * jnp.exp(high - higher) + jnp.exp(moved - higher).sum(0)
        high = higher
    return lax.pmean(high + jnp.log(total), "data")


@right(*ALL, out=P())
def sum_around_a_ring(x: jax.Array) -> Any:
    """Each shard adds in an order of its own."""
    n, total = lax.axis_size("data"), x.sum(0)
    moved = total
    for _ in range(n - 1):
        moved = lax.ppermute(moved, "data", [(i, (i + 1) % n) for i in range(n)])
        total = total + moved
    return lax.pmean(total, "data")


@right("float32", "bfloat16", out=P())
def merged_as_by_welford(x: jax.Array) -> Any:
    means, squares = (
        lax.all_gather(part, "data") for part in (x.mean(0), ((x - x.mean(0)) ** 2).sum(0))
    )
    mean, total, count = means[0], squares[0], len(x)
    for other, square in zip(means[1:], squares[1:], strict=True):
        delta = other - mean
        total = total + square + delta**2 * (count * len(x) / (count + len(x)))
        mean = mean + delta * (len(x) / (count + len(x)))
        count += len(x)
    return lax.pmean(mean, "data"), lax.pmean(total, "data")


@right(*ALL)
def running_sums_over_shards(x: jax.Array) -> Any:
    totals = lax.all_gather(x.sum(0), "data")
    earlier = jnp.arange(len(totals)) < lax.axis_index("data")
    return jnp.cumsum(x, 0) + jnp.where(earlier[:, None], totals, 0).sum(0)


def total(dtype: str) -> sm.State:
    return sm.State(jnp.asarray(1e6, dtype), reduce="sum")


@right("float32", model=total, values=lambda dtype: normal(dtype, 16) / 3, steps=3)
def running_total_that_is_large(total: sm.State, x: jax.Array) -> Any:
    """Every shard's small part is added to a million."""
    return x, total.set(total.value + x.sum())


@right("float16", values=lambda dtype: jnp.full((16, 2), 30_000, dtype), out=P())
def mean_near_the_end_of_the_range(x: jax.Array) -> Any:
    """No sum of two of these numbers can be written down; the parts of the mean can."""
    return lax.psum((x / (len(x) * lax.axis_size("data"))).sum(0), "data")


@right("float32", values=lambda dtype: rows(dtype) * 1e-20, out=P())
def squares_below_the_range(x: jax.Array) -> Any:
    """Each square is a subnormal number, or none."""
    return jnp.sqrt(lax.psum((x**2).sum(0), "data") + 1e-12)
