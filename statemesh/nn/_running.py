"""Running statistics, and how those that several microbatches have written become one."""

import dataclasses

import jax
import jax.numpy as jnp

from .._axes._mesh_and_lanes import meshes_and_lanes, psum
from .._base._types import Array, AxisName, PyTree, Reduce, SpecTree, Tags, Text
from .._model._kinds import BatchState, LongTermState, ShortTermState
from .._model._meta import Meta
from .._model._state import State
from .._model._values import Write, reduced


class RunningMean(ShortTermState):
    """A weight, and the mean of all values that came with a weight."""

    __slots__ = ()

    def _of_microbatches(self, old: State | None, axis_names: tuple[AxisName, ...]) -> State:
        if old is None:
            return self
        before, after = old.value, self.value
        weight = before["weight"] + _summed(after["weight"] - before["weight"], axis_names)

        def mean(old: Array, new: Array) -> Array:
            moved: Array = _summed((new - old) * _along(after["weight"], new), axis_names)
            return old + moved / _along(jnp.where(weight > 0, weight, 1), new)

        means = jax.tree.map(mean, before["mean"], after["mean"])
        return self.set({"weight": weight, "mean": means})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Momentum:
    """The share of running statistics that each batch keeps."""

    kept: float


class AveragedWeights(LongTermState):
    """Averages of weights, which all shards share.

    Inside the loss of a `value_and_grad` JAX types weights, and what comes of them, as if shards differed.
    The mean over shards has the right type. Lanes that differ have weights of their own, and are not merged.
    """

    __slots__ = ()

    @property
    def needs_old(self) -> bool:
        """No: averages are not added up."""
        return False

    def leave(self, old: State | None, axis_names: tuple[AxisName, ...]) -> State:
        meshes, _ = meshes_and_lanes(axis_names)
        if self.reduce is not None or not meshes:
            return State.leave(self, old, axis_names)
        over = [meshes] * len(jax.tree.leaves(self.value))
        (mean,) = reduced([Write(self.value, None, "mean", over, type(self).__name__)])
        return self.set(mean)


class MovingStatistics(BatchState):
    """A count, and a mean and a variance that move towards those of each batch.

    Microbatches move them together as one batch of all their rows would. How far the mean of each has moved
    tells its own mean, by the momentum, if each has moved it once.
    """

    __slots__ = ("_momentum",)

    _momentum: Momentum

    children = ("value", "_momentum")

    def __init__(
        self,
        value: PyTree,
        *,
        momentum: float = 0.99,
        name: Text = None,
        tag: Tags = None,
        spec: SpecTree = None,
        reduce: Reduce = None,
        _momentum: PyTree = None,
        _meta: Meta | None = None,
    ) -> None:
        super().__init__(value, name=name, tag=tag, spec=spec, reduce=reduce, _meta=_meta)
        _set_momentum(self, Momentum(momentum) if _meta is None else _momentum)

    def _of_microbatches(self, old: State | None, axis_names: tuple[AxisName, ...]) -> State:
        if old is None:
            return self
        before, after = old.value, self.value
        own = _along(after["count"] - before["count"], after["mean"])
        total = _summed(own, axis_names)

        def mean(x: Array) -> Array:
            return _summed(jnp.where(own > 0, x * own, 0), axis_names) / jnp.maximum(total, 1)

        moved = mean(after["mean"])
        rate = 1 - self._momentum.kept
        # The variance of all rows is the mean of the microbatches' variances, and how far apart their means
        # are.
        apart = mean((after["mean"] - moved) ** 2) / rate if rate else 0
        new = {"mean": moved, "var": mean(after["var"]) + apart}
        made = {name: jnp.where(total > 0, x, before[name]) for name, x in new.items()}
        return self.set({"count": before["count"] + total.reshape(before["count"].shape), **made})


_set_momentum = MovingStatistics.__dict__["_momentum"].__set__


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
        first, last = (_along(each["count"], each["mean"]) for each in (before, after))
        own = last - first
        total = first + _summed(own, axis_names)
        whole = jnp.maximum(total, 1)
        shift = (after["mean"] - before["mean"]) * last
        mean = before["mean"] + _summed(shift, axis_names) / whole
        # The statistics of the rows of this microbatch alone, from those with the earlier rows.
        own_mean = before["mean"] + shift / jnp.maximum(own, 1)
        share = first * own / jnp.maximum(last, 1)
        m2 = before["var"] * first
        own_m2 = after["var"] * last - m2 - share * (own_mean - before["mean"]) ** 2
        m2 = m2 + first * (before["mean"] - mean) ** 2
        m2 = m2 + _summed(own_m2 + own * (own_mean - mean) ** 2, axis_names)
        var = jnp.where(total > 0, m2 / whole, before["var"])
        return self.set({"count": total.reshape(before["count"].shape), "mean": mean, "var": var})


def _summed(x: Array, axis_names: tuple[AxisName, ...]) -> Array:
    total: Array
    (total,) = psum([x], axis_names)
    return total


def _along(number: Array, x: Array) -> Array:
    """A number, in the shape in which it multiplies `x`. Layers that are stacked have one each."""
    along: Array = number.reshape(number.shape + (1,) * (x.ndim - number.ndim))
    return along
