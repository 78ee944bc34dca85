"""`Quantize`: activations of few levels."""

from collections.abc import Hashable

import jax
import jax.numpy as jnp

import statemesh as sm

from ._range import Range


class Quantize(sm.Module):
    """Round activations to `2 ** bits` levels between the lowest and the highest value of earlier calls.

    Each number goes up or down at random, the likelier the nearer, so that means are kept. Gradients pass as
    if nothing was rounded. The first call finds the range and rounds nothing.

    **Arguments:**

    - `channels`: the size of the last axis of the activations.
    - `key`: a key of `jax.random.key`.
    - `bits`: those of the integer that the activations will be.
    - `axis_name`: the mesh axes over which the rows are split. Outside any mapped call it means one shard.
    """

    range: Range
    rng: sm.RandomState
    bits: int = sm.field(static=True)
    axis_name: Hashable = sm.field(static=True)

    def __init__(
        self, channels: int, key: jax.Array, *, bits: int = 8, axis_name: Hashable = None
    ) -> None:
        self.range = Range.empty(channels)
        self.rng = sm.RandomState(key)
        self.bits = bits
        self.axis_name = axis_name

    def __call__(self, x: jax.Array) -> tuple[jax.Array, "Quantize"]:
        """`(y, layer)`: `x`, whose first axis has the rows, rounded, and a range that is widened by it."""
        low, high = self.range.value["low"], self.range.value["high"]
        known = high > low
        step = jnp.where(known, high - low, 1) / (2**self.bits - 1)
        keys, rng = self.rng.rows(len(x), self.axis_name)
        draws = jax.vmap(lambda key: jax.random.uniform(key, x.shape[1:]))(keys)
        rounded = low + jnp.floor((jnp.clip(x, low, high) - low) / step + draws) * step
        change = jnp.where(known, jnp.minimum(rounded, high) - x, 0)
        rows = x.reshape(-1, x.shape[-1])
        seen = {"low": jnp.minimum(low, rows.min(0)), "high": jnp.maximum(high, rows.max(0))}
        seen = jax.lax.stop_gradient(seen)
        return x + jax.lax.stop_gradient(change), self.replace(range=seen, rng=rng)
