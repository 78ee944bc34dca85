"""Running statistics, and how those that several microbatches have written become one."""

import jax
import jax.numpy as jnp

from .._axes._mesh_and_lanes import psum
from .._base._types import Array, AxisName
from .._model._kinds import BatchState, ShortTermState
from .._model._state import State


class RunningMean(ShortTermState):
    """A weight, and the mean of all values that came with a weight."""

    __slots__ = ()

    def _of_microbatches(self, old: State | None, axis_names: tuple[AxisName, ...]) -> State:
        if old is None:
            return self
        before, after = old.value, self.value
        weight = before["weight"] + _summed(after["weight"] - before["weight"], axis_names)

        def mean(old: Array, new: Array) -> Array:
            moved: Array = _summed((new - old) * after["weight"], axis_names)
            return old + moved / jnp.where(weight > 0, weight, 1)

        means = jax.tree.map(mean, before["mean"], after["mean"])
        return self.set({"weight": weight, "mean": means})


class MovingStatistics(BatchState):
    """A count, and a mean and a variance that move towards those of each batch.

    Microbatches move them to the means of what each would have made of them.
    """

    __slots__ = ()

    def _of_microbatches(self, old: State | None, axis_names: tuple[AxisName, ...]) -> State:
        if old is None:
            return self
        before, after = old.value, self.value
        added = after["count"] - before["count"]
        total = _summed(added, axis_names)

        def moved(old: Array, new: Array) -> Array:
            shift: Array = _summed((new - old) * added, axis_names)
            return old + shift / jnp.maximum(total, 1)

        means = {name: moved(before[name], after[name]) for name in ("mean", "var")}
        return self.set({"count": before["count"] + total, **means})


class ExactStatistics(BatchState):
    """The count, mean and biased variance of all values.

    Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979.
    """

    __slots__ = ()

    def _of_microbatches(self, old: State | None, axis_names: tuple[AxisName, ...]) -> State:
        if old is None:
            return self
        before, after = old.value, self.value
        own = after["count"] - before["count"]
        total = before["count"] + _summed(own, axis_names)
        whole = jnp.maximum(total, 1)
        shift = (after["mean"] - before["mean"]) * after["count"]
        mean = before["mean"] + _summed(shift, axis_names) / whole
        # The statistics of the rows of this microbatch alone, from those with the earlier rows.
        own_mean = before["mean"] + shift / jnp.maximum(own, 1)
        share = before["count"] * own / jnp.maximum(after["count"], 1)
        m2 = before["var"] * before["count"]
        own_m2 = after["var"] * after["count"] - m2 - share * (own_mean - before["mean"]) ** 2
        m2 = m2 + before["count"] * (before["mean"] - mean) ** 2
        m2 = m2 + _summed(own_m2 + own * (own_mean - mean) ** 2, axis_names)
        var = jnp.where(total > 0, m2 / whole, before["var"])
        return self.set({"count": total, "mean": mean, "var": var})


def _summed(x: Array, axis_names: tuple[AxisName, ...]) -> Array:
    total: Array
    (total,) = psum([x], axis_names)
    return total
