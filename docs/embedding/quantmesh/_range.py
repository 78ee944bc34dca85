"""`Range`: between which values activations have been."""

from collections.abc import Hashable

import jax
import jax.numpy as jnp

import statemesh as sm


class Range(sm.BatchState[dict[str, jax.Array]]):
    """The lowest and the highest value of each channel so far; what shards have seen becomes one range."""

    __slots__ = ()

    @classmethod
    def empty(cls, channels: int) -> "Range":
        """The range of no values."""
        return cls({"low": jnp.full(channels, jnp.inf), "high": jnp.full(channels, -jnp.inf)})

    def leave(self, old: "Range | None", axis_names: tuple[Hashable, ...]) -> "Range":
        """The range of the values of all shards."""
        low, high = self.value["low"], self.value["high"]
        return self.set({"low": sm.pmin(low, axis_names), "high": sm.pmax(high, axis_names)})
