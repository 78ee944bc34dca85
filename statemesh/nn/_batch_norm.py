"""`BatchNorm`: normalisation by the statistics of a global batch, and what it keeps of all batches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._base import _errors as errors
from .._base._axes import bound_names, known_same, total
from .._base._types import AxisName
from .._model._kinds import BatchState, ParamState
from .._model._module import Module, field
from ._checks import check_floating, in_inference


class BatchNorm(Module):
    """Batch normalisation: each channel to mean 0 and variance 1, then scaled and shifted.

    In training by the mean and biased variance of the whole batch: over every axis of `x` but that of its
    channels, and over the axes called `axis_name`, mesh axes and lanes in any mix. So it takes a batch at
    once, and the rows of a shard, and one row alone in a `vmap2` that names its axis, and gives the same.

    `running` gathers the statistics of all batches for inference: how many values each channel had, their
    mean, and the sum of their squared deviations from it (M2). These three can be merged without loss,
    whatever the sizes of batches and shards, which means of variances cannot.

    **Arguments:**

    - `size`: the number of channels.
    - `axis_name`: the mesh axes and lanes, one name or several, that rows are split over. Outside any mapped
        call they mean one shard. All shards write the same statistics only if all axes are named that split
        the rows; if not, the mapped call raises `DivergedStateError`.
    - `channel_axis`: the axis of the channels, as the layer sees `x`.
    - `momentum`: how much the past counts: its count is multiplied by `momentum` whenever a batch is added.
        `None`: fully, so that all values ever seen count the same.
    - `eps`: what is added to the variance.
    - `affine`: whether there are a `scale` and a `shift`, the parameters; else both are `None`.
    - `spec`: the placement of whatever has one entry for each channel, where a mesh axis splits these.
    - `dtype`: that of the parameters, by default JAX's own. Statistics are at least float32.
    - `inference`: whether to normalise by `running` and to leave it as it is; flipped by
        `equinox.nn.inference_mode`.

    **Raises:** `StatemeshError` for a `momentum` that is not between 0 and 1.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> norm = sm.nn.BatchNorm(2, axis_name="data")
        >>> y, norm = norm(jnp.array([[0.0, 1.0], [2.0, 5.0]]))
        >>> y.round(2)
        Array([[-1., -1.],
               [ 1.,  1.]], dtype=float32)
        >>> norm.running.value["mean"]
        Array([1., 3.], dtype=float32)

        ```

    Source: Ioffe and Szegedy, "Batch Normalization", 2015; the merging of M2: Chan, Golub and LeVeque,
    "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """

    running: BatchState
    scale: ParamState | None
    shift: ParamState | None
    inference: bool
    axis_name: AxisName = field(static=True)
    channel_axis: int = field(static=True)
    momentum: float | None = field(static=True)
    eps: float = field(static=True)

    def __init__(
        self,
        size: int,
        *,
        axis_name: AxisName = None,
        channel_axis: int = -1,
        momentum: float | None = 0.99,
        eps: float = 1e-5,
        affine: bool = True,
        spec: PartitionSpec | None = None,
        dtype: Any = None,
        inference: bool = False,
    ) -> None:
        if momentum is not None and not 0 <= momentum <= 1:
            raise errors.bad_setting("BatchNorm", "momentum", momentum, "None or from 0 to 1")
        ones = jnp.ones(size, dtype)
        wide = jnp.promote_types(ones.dtype, jnp.float32)
        # An array for each: one in two places could not be donated.
        count, mean, m2 = (jnp.zeros(shape, wide) for shape in ((), size, size))
        self.running = BatchState(
            {"count": count, "mean": mean, "m2": m2},
            spec=spec and {"count": PartitionSpec(), "mean": spec, "m2": spec},
            # In an error about shards that wrote different statistics this is what to look at.
            name=f"BatchNorm(axis_name={axis_name!r})",
        )
        self.scale = ParamState(ones, spec=spec) if affine else None
        self.shift = ParamState(jnp.zeros_like(ones), spec=spec) if affine else None
        self.inference = inference
        self.axis_name = axis_name
        self.channel_axis = channel_axis
        self.momentum = momentum
        self.eps = eps

    def __call__(self, x: Any, where: Any = None) -> tuple[jax.Array, "BatchNorm"]:
        """Normalise `x`.

        **Arguments:**

        - `x`: a floating array with the layer's number of channels on `channel_axis`.
        - `where`: which rows count: a boolean array of the shape of the leading axes of `x`, `(rows,)` or
            `(rows, length)`, or `()` for one row. All rows are normalised, but only these have a part in the
            statistics. A batch in which none counts adds nothing, and is left as it is but for `scale` and
            `shift`. Inference has no use for it.

        **Returns:** `(y, layer)`: `y` in the shape and dtype of `x`, and the layer with its `running`
        statistics. In inference before there are any, they are taken to be mean 0 and variance 1.

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
        # Known to be the same on all shards; its gradient is of use to nobody.
        seen = known_same(batch, names)
        return self._normalised(x, batch), self.replace(running=self._with(seen))

    def _check(self, x: jax.Array) -> None:
        check_floating("BatchNorm", x)
        axis, size = self.channel_axis, len(self.running.value["mean"])
        if not -x.ndim <= axis < x.ndim:
            raise errors.no_such_array_axis("BatchNorm", "channel_axis", axis, x)
        if x.shape[axis] != size:
            raise errors.wrong_channels("BatchNorm", x, axis, size)

    def _of_batch(self, x: jax.Array, where: Any, names: tuple[AxisName, ...]) -> dict[str, Any]:
        """Count, mean and M2 of the global batch."""
        if not x.size:
            raise errors.no_rows("BatchNorm", x)
        if x.ndim == 1 and not names:
            raise errors.row_alone("BatchNorm", x)
        axis = self.channel_axis % x.ndim
        others = tuple(i for i in range(x.ndim) if i != axis)
        counts = jnp.ones((), bool) if where is None else jnp.asarray(where)
        lead = counts.ndim
        if counts.dtype != bool or counts.shape != x.shape[:lead] or lead > axis:
            raise errors.bad_mask("BatchNorm", counts, x, self.channel_axis)
        x = x.astype(jnp.promote_types(x.dtype, self.running.value["mean"].dtype))
        # How many values of a channel an entry of the mask speaks for.
        each = x.size // x.shape[axis] // counts.size
        counts = counts.reshape(counts.shape + (1,) * (x.ndim - lead))
        own = (counts.sum().astype(x.dtype) * each, jnp.where(counts, x, 0).sum(others))
        count, sums = total(own, names)
        mean = sums / jnp.maximum(count, 1)
        # In a second pass: the mean of squares less the square of the mean would lose all digits where
        # the mean is large.
        apart = jnp.where(counts, x - self._along(mean, x), 0)
        return {"count": count, "mean": mean, "m2": total((apart**2).sum(others), names)}

    def _with(self, new: dict[str, Any]) -> dict[str, Any]:
        """The running statistics with those of one more batch."""
        old = self.running.value
        fading = 1 if self.momentum is None else jnp.where(new["count"] > 0, self.momentum, 1)
        kept = fading * old["count"]
        count = kept + new["count"]
        part, apart = new["count"] / jnp.maximum(count, 1), new["mean"] - old["mean"]
        m2 = fading * old["m2"] + new["m2"] + apart**2 * kept * part
        made = {"count": count, "mean": old["mean"] + apart * part, "m2": m2}
        return {name: x.astype(old[name].dtype) for name, x in made.items()}

    def _normalised(self, x: jax.Array, by: dict[str, Any]) -> jax.Array:
        variance = jnp.where(by["count"] > 0, by["m2"] / jnp.maximum(by["count"], 1), 1)
        y = (x - self._along(by["mean"], x)) * self._along(jax.lax.rsqrt(variance + self.eps), x)
        if self.scale is not None and self.shift is not None:
            y = y * self._along(self.scale.value, x) + self._along(self.shift.value, x)
        return y.astype(x.dtype)

    def _along(self, channels: jax.Array, x: jax.Array) -> jax.Array:
        """One entry for each channel, in the place of the channels of `x`."""
        axis = self.channel_axis % x.ndim
        return jnp.expand_dims(channels, [i for i in range(x.ndim) if i != axis])
