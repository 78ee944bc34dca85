"""Models that are trained with Adam: a transformer, a CNN with BatchNorm and a deep perceptron."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax


Model: TypeAlias = Literal["transformer", "cnn", "mlp"]
Arrays: TypeAlias = dict[str, Any]
# The mean over all devices of what each of them has.
Mean: TypeAlias = Callable[[Any], Any]
Loss: TypeAlias = Callable[[Arrays, Arrays, jax.Array, jax.Array, Mean], tuple[jax.Array, Arrays]]

LAYERS, WIDTH, HEADS, TOKENS, WORDS = 4, 256, 4, 64, 64
CHANNELS, PIXELS, CLASSES = (16, 32, 32), 16, 10
DEPTH, NARROW = 50, 32
MOMENTUM = 0.9

# Where a gradient is zero but for rounding, an `eps` of the usual size would make steps of it.
OPTIMIZER = optax.adam(1e-3, eps=1e-4)


@dataclasses.dataclass(frozen=True)
class Training:
    """A model: its loss, the first parameters and running statistics, and a batch for all devices."""

    loss: Loss
    params: Arrays
    statistics: Arrays
    batch: tuple[np.ndarray, np.ndarray]


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """The RMS norm (Zhang and Sennrich, 2019)."""
    return scale * x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def _transformer(p: Arrays, stats: Arrays, x: jax.Array, y: jax.Array, mean: Mean) -> Any:
    del mean
    rows, tokens = x.shape
    h = jax.nn.one_hot(x, WORDS) @ p["words"] + p["places"]
    causal = np.tri(tokens, dtype=bool)
    for k in range(LAYERS):
        qkv = _scaled(h, p[f"{k}.attend"]) @ p[f"{k}.qkv"]
        q, key, v = jnp.split(qkv.reshape(rows, tokens, 3 * HEADS, WIDTH // HEADS), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, key) / np.sqrt(WIDTH // HEADS)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        read = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, tokens, WIDTH)
        h = h + read @ p[f"{k}.out"]
        h = h + jax.nn.relu(_scaled(h, p[f"{k}.think"]) @ p[f"{k}.up"]) @ p[f"{k}.down"]
    logs = jax.nn.log_softmax(h @ p["head"])
    return -(logs * jax.nn.one_hot(y, WORDS)).sum(-1).mean(), stats


def _cnn(p: Arrays, stats: Arrays, x: jax.Array, y: jax.Array, mean: Mean) -> Any:
    new = {}
    for k in range(len(CHANNELS)):
        x = jax.lax.conv_general_dilated(
            *(x, p[f"{k}.kernel"], (1, 1), "SAME"), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        first, second = mean((x.mean((0, 1, 2)), jnp.square(x).mean((0, 1, 2))))
        for name, of_batch in (("mean", first), ("square", second)):
            old = stats[f"{k}.{name}"]
            new[f"{k}.{name}"] = MOMENTUM * old + (1 - MOMENTUM) * jax.lax.stop_gradient(of_batch)
        x = (x - first) * jax.lax.rsqrt(second - jnp.square(first) + 1e-3)
        x = jax.nn.relu(x * p[f"{k}.scale"] + p[f"{k}.shift"])
    logs = jax.nn.log_softmax(x.mean((1, 2)) @ p["head"])
    return -(logs * jax.nn.one_hot(y, CLASSES)).sum(-1).mean(), new


def _mlp(p: Arrays, stats: Arrays, x: jax.Array, y: jax.Array, mean: Mean) -> Any:
    del mean
    for k in range(DEPTH):
        x = jnp.tanh(x @ p[f"{k:02}.weight"] + p[f"{k:02}.bias"])
    return ((x - y) ** 2).mean(), stats


@functools.cache
def training(model: Model) -> Training:
    """A model by its name."""
    numbers = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (numbers.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)

    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, np.float32)

    p: dict[str, np.ndarray] = {}
    stats: dict[str, np.ndarray] = {}
    if model == "transformer":
        p = {"words": normal(WORDS, WIDTH), "places": normal(TOKENS, WIDTH)}
        p["head"] = normal(WIDTH, WORDS)
        for k in range(LAYERS):
            p |= {f"{k}.attend": ones(WIDTH), f"{k}.qkv": normal(WIDTH, 3 * WIDTH)}
            p |= {f"{k}.out": normal(WIDTH, WIDTH), f"{k}.think": ones(WIDTH)}
            p |= {f"{k}.up": normal(WIDTH, 4 * WIDTH), f"{k}.down": normal(4 * WIDTH, WIDTH)}
        text = numbers.integers(0, WORDS, (16, TOKENS + 1)).astype(np.int32)
        return Training(_transformer, p, stats, (text[:, :-1], text[:, 1:]))
    if model == "cnn":
        p["head"] = normal(CHANNELS[-1], CLASSES)
        for k, (before, channels) in enumerate(zip((3, *CHANNELS), CHANNELS, strict=False)):
            p |= {f"{k}.kernel": normal(3, 3, before, channels), f"{k}.scale": ones(channels)}
            p[f"{k}.shift"] = 0 * ones(channels)
            stats |= {f"{k}.mean": 0 * ones(channels), f"{k}.square": ones(channels)}
        labels = numbers.integers(0, CLASSES, 64).astype(np.int32)
        return Training(_cnn, p, stats, (normal(64, PIXELS, PIXELS, 3), labels))
    for k in range(DEPTH):
        p |= {f"{k:02}.weight": normal(NARROW, NARROW), f"{k:02}.bias": 0 * ones(NARROW)}
    return Training(_mlp, p, stats, (normal(64, NARROW), normal(64, NARROW)))
