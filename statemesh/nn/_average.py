"""`Average` of metrics, and `EMA` of weights."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .._axes._mesh_and_lanes import bound_names, known_same, total
from .._base._checks import check_flag, check_names
from .._base._trees import is_state, unpacked
from .._base._types import Array, Dtype, Filter, Leaf, PyTree, SeveralAxes
from .._call._packed import packed_as
from .._grad import trained_part
from .._state._module import Module, field
from .._state._state import LongTermState, ShortTermState
from ._running import (
    AveragedWeights,
    RunningMean,
    bad_setting,
    check_number,
    check_numeric,
    check_same_shapes,
    moved,
)


class Average(Module):
    """The weighted mean of all values given to it, such as the losses of an epoch.

    **Arguments:**

    - `example`: a pytree of the shapes and dtypes of the values: arrays, numbers or
        `jax.ShapeDtypeStruct`s. Means are at least float32.
    - `axis_name`: the mesh axes and lanes, one name or several, over which each shard has its own values.
        Outside any mapped call they mean one shard.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> average = sm.nn.Average({"loss": 0.0})
        >>> mean, average = average({"loss": 1.0}, weight=10)
        >>> mean, average = average({"loss": 4.0}, weight=5)
        >>> mean
        {'loss': Array(2., dtype=float32)}

        ```
    """

    running: ShortTermState
    axis_name: SeveralAxes = field(static=True)

    def __init__(self, example: PyTree, *, axis_name: SeveralAxes = None) -> None:
        check_numeric("Average", "example", example)
        shapes = jax.eval_shape(lambda: jax.tree.map(jnp.zeros_like, example))
        means = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x.dtype)), shapes)
        self.running = RunningMean({"weight": 0.0, "mean": means})
        check_names("Average", axis_name)
        self.axis_name = axis_name

    def __call__(self, values: PyTree, weight: Leaf = 1.0) -> tuple[PyTree, "Average"]:
        """Add values.

        **Arguments:**

        - `values`: a pytree like the example: this shard's, such as means over its rows.
        - `weight`: how much they count, a number that is not negative: for means over rows the number of
            these. With 0 they do not count whatever they are. A negative one that is a JAX array makes
            the mean NaN.

        **Returns:** `(mean, layer)`: the mean of all values so far, of all shards; 0 while nothing counts.

        **Raises:** `StructureError` for values that are not like the example; `StatemeshError` for a weight
        that is known to be negative.
        """
        old = self.running.value
        if not isinstance(weight, jax.Array | np.ndarray):
            check_number(
                "Average", "weight", weight, lambda weight: weight >= 0, "a number, 0 or more"
            )
        values = self._checked(values, np.shape(weight))
        names = bound_names("Average", self.axis_name)
        weight = jnp.asarray(weight, old["weight"].dtype)
        weight = jnp.where(weight >= 0, weight, jnp.nan)
        sums = jax.tree.map(lambda x: jnp.where(weight > 0, weight * x, 0), values)
        weight, sums = total((weight, sums), names)
        whole = old["weight"] + weight
        rate = weight / jnp.where(whole > 0, whole, 1)
        divisor = jnp.where(weight > 0, weight, 1)
        mean = jax.tree.map(
            lambda mean, sum: moved(mean, sum / divisor, rate).astype(mean.dtype),
            old["mean"],
            sums,
        )
        running = known_same({"weight": whole, "mean": mean}, names)
        return running["mean"], self.replace(running=running)

    @property
    def mean(self) -> PyTree:
        """The mean of all values so far; 0 while nothing counts."""
        return self.running.value["mean"]

    def reset(self) -> "Average":
        """The layer as it was made, with nothing in it."""
        return self.replace(running=jax.tree.map(jnp.zeros_like, self.running.value))

    def _checked(self, values: PyTree, weight_shape: tuple[int, ...]) -> PyTree:
        """The values as arrays of the dtypes of the means."""
        if weight_shape:
            raise bad_setting("Average", "weight.shape", weight_shape, "that of a number, ()")
        means = self.running.value["mean"]
        check_same_shapes("Average", "values", means, values)
        return jax.tree.map(lambda mean, x: jnp.asarray(x, mean.dtype), means, values)


class EMA(Module):
    """The exponential moving average of a model's weights, after Polyak.

    Each average is a state of its own with the spec of its parameter, so that both lie on a mesh alike.
    Averages are at least float32.

    **Arguments:**

    - `model`: any pytree. The averages start from its values; with `debias` they start from zeros. A `Packed`
        counts as its model. To pack the averages, pack the layer: `pack(ema, mesh)`.
    - `decay`: the share of the averages that each call keeps; above 0 and below 1.
    - `debias`: whether to leave out the model with which the layer is made. The averages are then corrected
        for the zeros they start from, as Adam corrects its moments.
    - `wrt`: which arrays are averaged, as for `value_and_grad`. Left out: every `ParamState` and every
        inexact array outside any State.

    **Raises:** `StatemeshError` for a `decay` outside its range; `StructureError` where there is nothing to
    average.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> ema = sm.nn.EMA({"w": sm.ParamState(0.0)}, decay=0.75)
        >>> averaged, ema = ema({"w": sm.ParamState(4.0)})
        >>> averaged["w"].value
        Array(1., dtype=float32)

        ```

    Source of the correction: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, section 3.
    """

    averages: PyTree
    count: LongTermState | None
    decay: float = field(static=True)
    wrt: Filter = field(static=True)

    def __init__(
        self, model: PyTree, *, decay: float = 0.999, debias: bool = False, wrt: Filter = None
    ) -> None:
        check_flag("EMA", "debias", debias)
        check_number("EMA", "decay", decay, lambda decay: 0 < decay < 1, "above 0 and below 1")
        first: Callable[..., Array] = jnp.zeros_like if debias else jnp.array

        def average(unit: PyTree) -> AveragedWeights:
            value = jax.tree.map(lambda x: first(x, _wide(jnp.result_type(x))), _bare(unit))
            return AveragedWeights(value, spec=unit.spec if is_state(unit) else None)

        self.averages = jax.tree.map(
            average, trained_part("EMA", unpacked(model), wrt), is_leaf=is_state
        )
        self.count = LongTermState(0) if debias else None
        self.decay = decay
        self.wrt = wrt

    def __call__(self, model: PyTree) -> tuple[PyTree, "EMA"]:
        """Add the weights of a model.

        **Arguments:**

        - `model`: a pytree of the structure that the layer was made with.

        **Returns:** `(averaged, layer)`: the model with the averages in place of what is averaged, in the
        dtypes of the model.

        **Raises:** `StructureError` for a model of another structure.
        """
        original, model, new = self._taken(model)
        count, rate = self.count, jnp.asarray(1 - self.decay)
        if count is not None:
            count = count.set(count.value + 1)
            # 1 - decay**count, without losing digits to a decay close to 1.
            rate = rate / -jnp.expm1(count.value * math.log(self.decay))
        averages = self._with(new, lambda old, x: moved(old, x, rate).astype(old.dtype))
        averaged = jax.tree.map(_put, averages, model, is_leaf=_is_unit)
        return packed_as(averaged, original), self.replace(averages=averages, count=count)

    def averaged(self, model: PyTree) -> PyTree:
        """A model with the averages so far in place of its weights, which do not count: to evaluate it.

        **Arguments:**

        - `model`: a pytree of the structure that the layer was made with.

        **Returns:** the model with the averages, in the dtypes of the model; itself where `debias` is on and
        no model has been added.

        **Raises:** `StructureError` for a model of another structure.

        !!! example

            ```python
            >>> import statemesh as sm
            >>> ema = sm.nn.EMA({"w": sm.ParamState(0.0)}, decay=0.75)
            >>> _, ema = ema({"w": sm.ParamState(4.0)})
            >>> ema.averaged({"w": sm.ParamState(9.0)})["w"].value
            Array(1., dtype=float32)

            ```
        """
        original, model, new = self._taken(model)
        averages = self.averages
        if self.count is not None:
            empty = self.count.value == 0
            averages = self._with(new, lambda old, x: jnp.where(empty, x, old))
        return packed_as(jax.tree.map(_put, averages, model, is_leaf=_is_unit), original)

    def _with(self, new: PyTree, fun: Callable[[Array, Array], Array]) -> PyTree:
        """The averages with `fun(average, x)` in place of each, of the weight `x` in its dtype."""

        def step(average: LongTermState, unit: PyTree) -> LongTermState:
            each = lambda old, x: fun(old, jnp.asarray(x, old.dtype))
            return average.set(jax.tree.map(each, average.value, _bare(unit)))

        return jax.tree.map(step, self.averages, new, is_leaf=is_state)

    def _taken(self, model: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """The model as it was given, unpacked, and what is averaged of it."""
        original, model = model, unpacked(model)
        new = trained_part("EMA", model, self.wrt)
        bare = (jax.tree.map(_bare, tree, is_leaf=is_state) for tree in (self.averages, new))
        check_same_shapes("EMA", "model", *bare)
        return original, model, new


def _wide(dtype: Dtype) -> Dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _bare(unit: PyTree) -> PyTree:
    return unit.value if is_state(unit) else unit


def _is_unit(node: PyTree) -> bool:
    return node is None or is_state(node)


def _put(average: LongTermState | None, unit: PyTree) -> PyTree:
    """The unit of the averaged model: the average, or `unit` itself where nothing is averaged."""
    if average is None:
        return unit
    # Within a state, None stands for an integer.
    cast = lambda mean, x: x if mean is None else mean.astype(jnp.result_type(x))
    value = jax.tree.map(cast, average.value, _bare(unit), is_leaf=lambda node: node is None)
    return unit.set(value) if is_state(unit) else value
