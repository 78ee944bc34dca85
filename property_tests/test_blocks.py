"""With blocks, random programs have the same bits on 1, 2 and 8 devices, however XLA writes them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .base.settings import fewer


jnp: Any = jax.numpy
few = fewer(1 / 10)

# Of rows and a matrix new rows.
Layer: TypeAlias = Callable[[Any, Any], Any]


def small(x: Any, axis: int | None = -1) -> Any:
    """A mean of squares that is not zero, which others are divided by."""
    return (x**2).mean(axis, keepdims=True) + 1e-3


# XLA writes many of these in several ways, or merges them with others.
LAYERS: dict[str, Layer] = {
    "dense": lambda h, w: h @ w,
    "tanh": lambda h, w: jnp.tanh(h),
    "gate": lambda h, w: jax.nn.sigmoid(h @ w) * h,
    "gelu": lambda h, w: jax.nn.gelu(h),
    "over a root": lambda h, w: h / jnp.sqrt(small(h)),
    "by rsqrt": lambda h, w: h * jax.lax.rsqrt(small(h)),
    "over a norm of parameters": lambda h, w: h / jnp.linalg.norm(w),
    "over a sum of columns": lambda h, w: h / (jnp.abs(h).sum(0, keepdims=True) + 1),
    "over a deviation": lambda h, w: h / jnp.sqrt(small(h, None)),
    "by a root to the power of -3": lambda h, w: h * (jnp.abs(w).sum() + 1) ** -1.5,
    "by a square's reciprocal": lambda h, w: h * small(h, 0) ** -2,
    "softmax": lambda h, w: jax.nn.softmax(h),
    "less its logarithm": lambda h, w: h - jax.nn.logsumexp(h, -1, keepdims=True),
    "attention": lambda h, w: jax.nn.softmax(h @ h.T / jnp.sqrt(6.0)) @ h,
    "chosen": lambda h, w: jnp.where(h > 0, h / (w.max() + 3), h / (jnp.abs(w).max() + 1)),
    "cumulated": lambda h, w: jnp.cumsum(h, 0) / 7,
    "sorted": lambda h, w: jnp.sort(h),
    "each row": lambda h, w: jax.lax.map(lambda row: row / (jnp.abs(row).sum() + 1), h),
    "row after row": lambda h, w: jax.lax.scan(
        lambda c, row: (c * 0.9 + row, (c + row) / jnp.sqrt(small(c))[0]), jnp.zeros(6), h
    )[1],
    "without derivative": lambda h, w: jax.lax.stop_gradient(h / jnp.sqrt(small(h, None))),
}
WAYS = ("once", "added", "recomputed", "recomputed and merged", "looped")

NUMBERS = np.random.default_rng(0)
X = (NUMBERS.normal(size=(64, 6)) * 10.0 ** NUMBERS.integers(-2, 2, (64, 6))).astype(np.float32)
W = NUMBERS.normal(size=(2, 6, 6)).astype(np.float32)


def composed(names: Sequence[str], way: str) -> Layer:
    def layers(h: Any, w: Any) -> Any:
        for k, name in enumerate(names):
            new = LAYERS[name](h, w[k % 2])
            h = h + new if way == "added" else new
        return h

    match way:
        case "recomputed":
            return jax.checkpoint(layers)
        case "recomputed and merged":
            return jax.checkpoint(layers, prevent_cse=False)
        case "looped":
            return lambda h, w: jax.lax.scan(lambda h, _: (layers(h, w), None), h, None, 2)[0]
    return layers


def bits(size: int, model: Layer) -> list[bytes]:
    """Those of the loss and the gradient on a mesh of so many devices."""

    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(model(x, w)) ** 2), w

    mesh = jax.make_mesh((size,), ("x",), devices=jax.devices()[:size])
    step = sm.value_and_grad(loss_fn, axis_name="x", blocks=8)
    (loss, _), grads = sm.shard_map(step, mesh, (P(), P("x")), ((P(), P()), P()))(W, X)
    return [np.asarray(x).tobytes() for x in (loss, grads)]


@few
@example(["over a root", "attention", "softmax"], "looped")
@example(["by a root to the power of -3", "cumulated"], "recomputed and merged")
@given(st.lists(st.sampled_from([*LAYERS]), min_size=1, max_size=5), st.sampled_from(WAYS))
def test_random_programs_have_the_same_bits(names: list[str], way: str) -> None:
    model = composed(names, way)
    assert bits(1, model) == bits(2, model) == bits(8, model)
