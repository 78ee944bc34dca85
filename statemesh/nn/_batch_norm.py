"""`BatchNorm`: normalisation by the statistics of the global batch, with running statistics in a state."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._axes._mesh_and_lanes import bound_names, known_same, total
from .._base._checks import check_flag, check_names
from .._base._errors import StatemeshError, counted
from .._base._trees import describe
from .._base._types import AxisName, Dtype, Leaf, PyTree, SeveralAxes
from .._state._module import Module, field
from .._state._state import BatchState, ParamState
from ._running import (
    ExactStatistics,
    MovingStatistics,
    bad_shape,
    check_floating,
    check_has_axis,
    check_int,
    check_number,
    check_sizes,
    in_inference,
    moved,
)


class BatchNorm(Module):
    """Batch normalisation: brings each channel to mean 0 and variance 1, then scales and shifts it.

    In training it uses the mean and biased variance of the whole batch: over every axis of `x` except the
    channels, and over the axes `axis_name`, which may be mesh axes and lanes in any mix. A whole batch, the
    rows of a shard, and single rows in a `vmap2` that names its axis all give the same result.

    `running` keeps the statistics for inference: the `count` of values that each channel had so far, and
    their running `mean` and biased `var`. Those of one batch are merged over shards as count, mean and M2
    (the sum of squared deviations), which loses nothing. The mean of the shards' variances would not be the
    variance of the batch.

    With a `momentum` each batch moves them as in Flax, starting from mean 0 and variance 1:
    `mean = momentum * mean + (1 - momentum) * batch_mean`, and the same for the variance. With
    `momentum=None` they are the exact mean and variance of all values ever seen, whatever the sizes of the
    batches.

    **Arguments:**

    - `size`: the number of channels.
    - `axis_name`: the mesh axes and lanes, one name or several, over which the rows are split. Outside any
        mapped call they mean one shard. Name every axis that splits the rows: else shards write different
        statistics, and the mapped call raises `DivergedStateError`.
    - `channel_axis`: the axis of the channels, as the layer sees `x`.
    - `momentum`: the share of the running mean and variance that each batch keeps. (In PyTorch it is the
        share that is replaced: its `momentum=0.1` is 0.9 here.) `None`: all values ever seen count the same.
    - `eps`: a small number that is added to the variance.
    - `affine`: whether the layer has parameters, a `scale` and a `shift`; else both are `None`.
    - `spec`: the placement of every array with one entry for each channel, if a mesh axis splits the
        channels.
    - `dtype`: the dtype of the parameters, by default JAX's own. Statistics are at least float32.
    - `inference`: whether to normalise by `running` and leave it unchanged. `equinox.nn.inference_mode` flips
        it.

    **Raises:** `StatemeshError` for a `momentum` that is not between 0 and 1, an `eps` that is not above 0,
    and a `size` that is no positive int.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> norm = sm.nn.BatchNorm(2, axis_name="data")
        >>> y, norm = norm(jnp.array([[0.0, 1.0], [2.0, 5.0]]))
        >>> y.round(2)
        Array([[-1., -1.],
               [ 1.,  1.]], dtype=float32)
        >>> mean, var = norm.statistics
        >>> mean.round(2), var.round(2)
        (Array([0.01, 0.03], dtype=float32), Array([1.  , 1.03], dtype=float32))
        >>> norm = norm.with_statistics([1.0, 3.0], [1.0, 4.0])

        ```

    Source: Ioffe and Szegedy, "Batch Normalization", 2015; the merging of M2: Chan, Golub and LeVeque,
    "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """

    running: BatchState
    scale: ParamState | None
    shift: ParamState | None
    inference: bool
    axis_name: SeveralAxes = field(static=True)
    channel_axis: int = field(static=True)
    momentum: float | None = field(static=True)
    eps: float = field(static=True)

    def __init__(
        self,
        size: int,
        *,
        axis_name: SeveralAxes = None,
        channel_axis: int = -1,
        momentum: float | None = 0.99,
        eps: float = 1e-5,
        affine: bool = True,
        spec: PartitionSpec | None = None,
        dtype: Dtype | None = None,
        inference: bool = False,
    ) -> None:
        check_sizes("BatchNorm", size=size)
        check_flag("BatchNorm", "affine", affine)
        check_flag("BatchNorm", "inference", inference)
        check_int("BatchNorm", "channel_axis", channel_axis, "an int")
        if momentum is not None:
            in_range: Callable[[float], bool] = lambda share: 0 <= share <= 1
            check_number("BatchNorm", "momentum", momentum, in_range, "None or from 0 to 1")
        check_number("BatchNorm", "eps", eps, lambda eps: 0 < eps < np.inf, "above 0 and finite")
        ones = jnp.ones(size, dtype)
        wide = jnp.promote_types(ones.dtype, jnp.float32)
        # An array for each: one in two places could not be donated.
        count, mean, var = jnp.zeros((), wide), jnp.zeros(size, wide), jnp.ones(size, wide)
        kind: Callable[..., BatchState] = ExactStatistics
        if momentum is not None:
            kind = functools.partial(MovingStatistics, momentum=momentum)
        self.running = kind(
            {"count": count, "mean": mean, "var": var},
            spec=spec and {"count": PartitionSpec(), "mean": spec, "var": spec},
            # An error about shards that wrote different statistics shows the name, and so the axes.
            name=f"BatchNorm(axis_name={axis_name!r})",
        )
        self.scale = ParamState(ones, spec=spec) if affine else None
        self.shift = ParamState(jnp.zeros_like(ones), spec=spec) if affine else None
        self.inference = inference
        check_names("BatchNorm", axis_name)
        self.axis_name = axis_name
        self.channel_axis = channel_axis
        self.momentum = momentum
        self.eps = eps

    def __call__(self, x: Leaf, where: Leaf = None) -> tuple[jax.Array, "BatchNorm"]:
        """Normalise `x`.

        **Arguments:**

        - `x`: a floating array with the layer's number of channels on `channel_axis`.
        - `where`: which rows count: a boolean array of the shape of the leading axes of `x`, `(rows,)` or
            `(rows, length)`, or `()` for one row. All rows are normalised, but only these enter the
            statistics. A batch in which no row counts adds nothing, and is only scaled and shifted. Inference
            ignores it.

        **Returns:** `(y, layer)`: `y` in the shape and dtype of `x`, and the layer with its `running`
        statistics. In inference before there are any, they are mean 0 and variance 1.

        **Raises:** `StatemeshError` for another number of channels, for no rows, for a row alone where no
        axis is mapped over, for a mask that does not fit, and for an axis name that is not bound inside a
        mapped call.
        """
        x = jnp.asarray(x)
        self._check(x)
        if in_inference(self):
            return self._normalised(x, self.running.value), self
        names = bound_names("BatchNorm", self.axis_name)
        batch = self._of_batch(x, where, names)
        # They are the same on all shards, and need no gradient.
        seen = known_same(batch, names)
        return self._normalised(x, batch), self.replace(running=self._with(seen))

    @property
    def statistics(self) -> tuple[jax.Array, jax.Array]:
        """The running mean and the running, biased variance of each channel, as other libraries keep them."""
        return self.running.value["mean"], self.running.value["var"]

    def with_statistics(self, mean: Leaf, var: Leaf, *, count: Leaf = None) -> "BatchNorm":
        """The layer with other running statistics, such as those of a model of another library.

        **Arguments:**

        - `mean`, `var`: a number for each channel.
        - `count`: of how many values they are. Only `momentum=None` weighs by it, and must have it; left
            out, it stays as it is.

        **Returns:** the layer.

        **Raises:** `StatemeshError` for other shapes than those of the channels, and for no `count` where
        it is needed.
        """
        old = self.running.value
        if count is not None and not isinstance(count, jax.Array | np.ndarray):
            check_number(
                "BatchNorm", "count", count, lambda count: count >= 0, "a number, 0 or more"
            )
        if count is None and self.momentum is None:
            raise StatemeshError(
                "BatchNorm: with momentum=None all values count the same, whenever they were seen, so "
                "with_statistics must know how many values these are of: `with_statistics(mean, var, "
                "count=...)`."
            )
        statistics = {"count": old["count"] if count is None else count, "mean": mean, "var": var}
        for name, x in statistics.items():
            if np.shape(x) != old[name].shape:
                wanted = f"of shape {old[name].shape}"
                why = "one for all" if name == "count" else "one number for each channel"
                raise bad_shape("BatchNorm", name, jnp.asarray(x), wanted, why)
        # Copies: donating the layer must not delete the caller's arrays.
        running = {name: jnp.array(x, old[name].dtype) for name, x in statistics.items()}
        return self.replace(running=running)

    def _check(self, x: jax.Array) -> None:
        check_floating("BatchNorm", x)
        axis, size = self.channel_axis, len(self.running.value["mean"])
        check_has_axis("BatchNorm", "channel_axis", axis, x)
        if x.shape[axis] != size:
            raise StatemeshError(
                f"BatchNorm: x is {describe(x)} with {counted(x.shape[axis], 'channel')} on axis {axis}, but "
                f"the layer holds {size}. Make the layer for as many, or name the axis of the channels by "
                "channel_axis."
            )

    def _of_batch(
        self, x: jax.Array, where: Leaf, names: tuple[AxisName, ...]
    ) -> dict[str, PyTree]:
        """Count, mean and biased variance of the global batch."""
        if not x.size:
            raise StatemeshError(
                f"BatchNorm: x is {describe(x)}, and no rows have no mean. Give every shard at least one "
                "row: if rows do not divide evenly, pad them, and mark with `where` which of them count."
            )
        if x.ndim == 1 and not names:
            raise StatemeshError(
                f"BatchNorm: x is {describe(x)}, a single row, which has no statistics. Give the layer all "
                "rows at once; or name the axis that they are mapped over, in the layer and in the map: "
                "axis_name='rows'."
            )
        axis = self.channel_axis % x.ndim
        others = tuple(i for i in range(x.ndim) if i != axis)
        counts = jnp.ones((), bool) if where is None else jnp.asarray(where)
        lead = counts.ndim
        if counts.dtype != bool or counts.shape != x.shape[:lead] or lead > axis:
            raise StatemeshError(
                f"BatchNorm: where is {describe(counts)}, but must be bool and have the leading axes of x, "
                f"which is {describe(x)} with its channels on axis {self.channel_axis}."
            )
        x = x.astype(jnp.promote_types(x.dtype, self.running.value["mean"].dtype))
        # The number of values of a channel for which one entry of the mask counts.
        each = x.size // x.shape[axis] // counts.size
        counts = counts.reshape(counts.shape + (1,) * (x.ndim - lead))
        of_shard = (counts.sum().astype(x.dtype) * each, jnp.where(counts, x, 0).sum(others))
        count, sums = total(of_shard, names)
        mean = sums / jnp.maximum(count, 1)
        # In a second pass, because the mean of squares minus the square of the mean loses all digits where
        # the mean is large.
        apart = jnp.where(counts, x - self._along(mean, x), 0)
        m2 = total((apart**2).sum(others), names)
        return {
            "count": count,
            "mean": mean,
            "var": jnp.where(count > 0, m2 / jnp.maximum(count, 1), 1),
        }

    def _with(self, new: dict[str, PyTree]) -> dict[str, PyTree]:
        """The running statistics after one more batch."""
        old = self.running.value
        count = old["count"] + new["count"]
        if self.momentum is None:
            rate = new["count"] / jnp.maximum(count, 1)
        else:
            rate = jnp.where(new["count"] > 0, 1 - self.momentum, 0)
        running = {
            "count": count,
            **{name: moved(old[name], new[name], rate) for name in ("mean", "var")},
        }
        if self.momentum is None:
            # Merged like count, mean and M2: the two variances alone do not show how far apart the means are.
            between = (new["mean"] - old["mean"]) ** 2 * rate * (1 - rate)
            running["var"] = running["var"] + jnp.where(rate < 1, between, 0)
        return {name: x.astype(old[name].dtype) for name, x in running.items()}

    def _normalised(self, x: jax.Array, by: dict[str, PyTree]) -> jax.Array:
        y = (x - self._along(by["mean"], x)) * self._along(jax.lax.rsqrt(by["var"] + self.eps), x)
        if self.scale is not None and self.shift is not None:
            y = y * self._along(self.scale.value, x) + self._along(self.shift.value, x)
        return y.astype(x.dtype)

    def _along(self, channels: jax.Array, x: jax.Array) -> jax.Array:
        """One entry for each channel, in the place of the channels of `x`."""
        axis = self.channel_axis % x.ndim
        return jnp.expand_dims(channels, [i for i in range(x.ndim) if i != axis])
