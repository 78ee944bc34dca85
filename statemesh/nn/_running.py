"""Running statistics, merged where several microbatches wrote them, and checks that layers share."""

import dataclasses
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp

from .._axes._mesh_and_lanes import meshes_and_lanes, psum
from .._base._checks import is_array_or_number, is_shaped
from .._base._errors import StatemeshError, StructureError, error_listing, typed_str
from .._base._trees import describe, path_str
from .._base._types import Array, AxisName, Leaf, PyTree, Reduce, SpecTree, Tags, Text
from .._jax import _compat as compat
from .._jax._compat import tree_util
from .._state._state import BatchState, LongTermState, ShortTermState, State
from .._state._values import Meta, Write, reduced


def check_number(
    layer: str,
    argument: str,
    value: object,
    fits: Callable[[Any], bool],
    expected: str,
    kind: type = Real,
) -> None:
    """Refuse a setting that is no number of this kind, or not in its range."""
    if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
        raise bad_setting(layer, argument, value, expected)


def check_sizes(layer: str, **sizes: object) -> None:
    """Refuse sizes that are not positive ints."""
    for argument, size in sizes.items():
        check_number(layer, argument, size, lambda size: size > 0, "a positive int", Integral)


def check_int(layer: str, argument: str, value: object, expected: str) -> None:
    """Refuse a setting that is no int."""
    check_number(layer, argument, value, lambda value: True, expected, Integral)


def check_has_axis(layer: str, argument: str, axis: int, x: jax.Array) -> None:
    if not -x.ndim <= axis < x.ndim:
        raise StatemeshError(
            f"{layer}: {argument}={axis}, but x is {describe(x)} and has no such axis."
        )


def bad_setting(layer: str, argument: str, value: object, expected: str) -> StatemeshError:
    return StatemeshError(f"{layer}: {argument}={value!r}, but it must be {expected}.")


def bad_shape(layer: str, what: str, x: object, expected: str, why: str) -> StatemeshError:
    return StatemeshError(f"{layer}: {what} is {describe(x)}, but must be {expected}: {why}.")


def check_floating(layer: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{layer}: x is {describe(x)}, but must hold floating numbers: `x.astype(jnp.float32)`."
        )


def check_numeric(layer: str, what: str, tree: PyTree) -> None:
    """Refuse a tree, which the user calls `what`, with leaves that are neither arrays nor numbers."""
    for path, leaf in tree_util.tree_flatten_with_path(tree)[0]:
        if not is_numeric(leaf):
            raise StatemeshError(
                f"{layer}: {path_str(path, what)} is {typed_str(leaf)}, but must be an array or a number."
            )


def is_numeric(leaf: Leaf) -> bool:
    """Whether it is a number, or an array or the shape of one."""
    return is_array_or_number(leaf) or is_shaped(leaf)


def check_same_shapes(layer: str, what: str, old: PyTree, new: PyTree) -> None:
    """Refuse `new`, which the user calls `what`, unless it has the arrays and shapes of `old`."""
    then, now = (
        {path_str(path, what): leaf for path, leaf in tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (old, new)
    )
    if bad := [
        f"{path}: was {describe(then[path]) if path in then else 'nothing'}, "
        f"is {describe(now[path]) if path in now else 'nothing'}"
        for path in {**then, **now}
        if path not in then
        or path not in now
        or not is_numeric(now[path])
        or jnp.shape(then[path]) != jnp.shape(now[path])
    ]:
        head = f"{layer}: {what} must hold arrays of the shapes that the layer was made with"
        raise error_listing(StructureError, head, bad)


def in_inference(layer: PyTree) -> bool:
    """Whether the layer is in inference. It cannot be traced, because it decides what is computed."""
    if compat.is_tracer(layer.inference):
        raise TypeError(
            f"{type(layer).__name__}: `inference` is traced here, but must be True or False. jax.jit, scan "
            "and grad trace the Python numbers in a model. Give them only its arrays: `arrays, rest = "
            "equinox.partition(model, equinox.is_array)`, or use equinox.filter_jit."
        )
    return bool(layer.inference)


def moved(old: PyTree, new: PyTree, rate: Leaf) -> PyTree:
    """A running value, moved by `rate` of the way to a new one.

    At a rate of 1 nothing of the old value is left, neither its rounding nor a NaN, and at 0 nothing of the
    new one.
    """
    way = new - old
    # `new - old` is not finite where one of them is infinite, or where the dtype cannot hold the difference.
    step = jnp.where(jnp.isfinite(way), old + way * rate, old * (1 - rate) + new * rate)
    return jnp.where(rate == 1, new, jnp.where(rate == 0, old, step))


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
        count = _along(after["count"] - before["count"], after["mean"])
        total = _summed(count, axis_names)

        def mean(x: Array) -> Array:
            return _summed(jnp.where(count > 0, x * count, 0), axis_names) / jnp.maximum(total, 1)

        moved = mean(after["mean"])
        rate = 1 - self._momentum.kept
        # The variance of all rows is the mean of the microbatches' variances, and how far apart their means
        # are.
        apart = mean((after["mean"] - moved) ** 2) / rate if rate else 0
        new = {"mean": moved, "var": mean(after["var"]) + apart}
        merged = {name: jnp.where(total > 0, x, before[name]) for name, x in new.items()}
        return self.set({"count": before["count"] + total.reshape(before["count"].shape), **merged})


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
        count = last - first
        total = first + _summed(count, axis_names)
        whole = jnp.maximum(total, 1)
        shift = (after["mean"] - before["mean"]) * last
        mean = before["mean"] + _summed(shift, axis_names) / whole
        # The statistics of the rows of this microbatch alone, from those with the earlier rows.
        own_mean = before["mean"] + shift / jnp.maximum(count, 1)
        share = first * count / jnp.maximum(last, 1)
        m2 = before["var"] * first
        own_m2 = after["var"] * last - m2 - share * (own_mean - before["mean"]) ** 2
        m2 = m2 + first * (before["mean"] - mean) ** 2
        m2 = m2 + _summed(own_m2 + count * (own_mean - mean) ** 2, axis_names)
        var = jnp.where(total > 0, m2 / whole, before["var"])
        return self.set({"count": total.reshape(before["count"].shape), "mean": mean, "var": var})


def _summed(x: Array, axis_names: tuple[AxisName, ...]) -> Array:
    total: Array
    (total,) = psum([x], axis_names)
    return total


def _along(number: Array, x: Array) -> Array:
    """A number, in the shape in which it multiplies `x`. Layers that are stacked have one each."""
    return number.reshape(number.shape + (1,) * (x.ndim - number.ndim))
