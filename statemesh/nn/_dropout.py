"""`Dropout`: masks that are the same on any number of devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._base._checks import check_flag, check_names
from .._base._types import Array, Leaf, SeveralAxes
from .._state._module import Module, field
from .._state._random import RandomState
from ._running import check_floating, check_has_axis, check_int, check_number, in_inference


class Dropout(Module):
    """Dropout: sets entries to 0 at random, and divides the others by the share that is kept.

    `RandomState.rows` makes the mask of a row from the row's number in the global batch. So the mask is bit
    for bit the same on any mesh, unsharded, and one row at a time in lanes.

    **Arguments:**

    - `rate`: the probability that an entry is set to 0; at least 0 and below 1.
    - `key`: a typed key, as `jax.random.key(seed)` makes, of any implementation.
    - `axis_name`: the mesh axes and lanes over which the rows are split: one name, or several from major to
        minor. Outside any mapped call they mean one shard. No other axis of `x` may be split, because its
        parts would get the same mask.
    - `row_axis`: the axis of the rows, as the layer sees `x`. `None`: `x` is one row, as in a `vmap2` over
        the rows; `axis_name` then tells which row.
    - `inference`: whether to return `x` unchanged. `equinox.nn.inference_mode` flips it.

    **Raises:** `StatemeshError` for a `rate` outside its range; `TypeError` for a key that is not typed.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> dropout = sm.nn.Dropout(0.5, jax.random.key(0), axis_name="data")
        >>> y, dropout = dropout(jnp.ones((2, 6)))
        >>> sorted(set(y.ravel().tolist()))
        [0.0, 2.0]

        ```

    Source: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014.
    """

    rng: RandomState
    inference: bool
    rate: float = field(static=True)
    axis_name: SeveralAxes = field(static=True)
    row_axis: int | None = field(static=True)

    def __init__(
        self,
        rate: float,
        key: Leaf,
        *,
        axis_name: SeveralAxes = None,
        row_axis: int | None = 0,
        inference: bool = False,
    ) -> None:
        check_flag("Dropout", "inference", inference)
        check_number("Dropout", "rate", rate, lambda rate: 0 <= rate < 1, "at least 0 and below 1")
        if row_axis is not None:
            check_int("Dropout", "row_axis", row_axis, "an int, or None for one row")
        self.rng = RandomState(key)
        self.inference = inference
        self.rate = rate
        check_names("Dropout", axis_name)
        self.axis_name = axis_name
        self.row_axis = row_axis

    def __call__(self, x: Leaf) -> tuple[jax.Array, "Dropout"]:
        """Drop entries of `x`.

        **Arguments:**

        - `x`: a floating array; of any shape if it is one row, else with a `row_axis`.

        **Returns:** `(y, layer)`: `y` in the shape and dtype of `x`, and the layer with an advanced stream.
        With a `rate` of 0 and in inference, `x` itself and the very layer.

        **Raises:** `StatemeshError` where `x` has no `row_axis`, and for an axis name that is not bound
        inside a mapped call.
        """
        x = jnp.asarray(x)
        check_floating("Dropout", x)
        if in_inference(self) or self.rate == 0:
            return x, self
        mask, rng = self._mask(x)
        return jnp.where(mask, x / (1 - self.rate), 0), self.replace(rng=rng)

    def _mask(self, x: jax.Array) -> tuple[jax.Array, RandomState]:
        axis, shape = self.row_axis, list(x.shape)
        if axis is None:
            (key,), rng = self.rng.rows(1, self.axis_name)
            return jax.random.bernoulli(key, 1 - self.rate, x.shape), rng
        check_has_axis("Dropout", "row_axis", axis, x)
        keys, rng = self.rng.rows(shape.pop(axis), self.axis_name)
        draw: Callable[..., Array] = jax.vmap(
            lambda key: jax.random.bernoulli(key, 1 - self.rate, shape), out_axes=axis
        )
        return draw(keys), rng
