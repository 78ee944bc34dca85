"""`GRUCell`: the one of Equinox, with its hidden value in a state."""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from .._base._checks import check_flag
from .._base._errors import StatemeshError
from .._base._types import Array, Dtype, Leaf, SpecTree
from .._state._module import Module, field
from .._state._state import HiddenState
from ._running import bad_shape, check_sizes


G = TypeVar("G", bound="GRUCell")


class GRUCell(Module):
    """A gated recurrent unit that keeps its hidden value from one call to the next.

    It is `equinox.nn.GRUCell`, whose weights are the parameters, and a `HiddenState`.

    **Arguments:**

    - `input_size`: the size of an input.
    - `hidden_size`: the size of the hidden value.
    - `key`: for the weights, as in `equinox.nn.GRUCell`.
    - `use_bias`, `dtype`: as there. The hidden value has the dtype of the weights.
    - `spec`: the placement of the hidden value, such as `P("data")` for rows that are split over "data".

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> cell = sm.nn.GRUCell(3, 4, key=jax.random.key(0)).init_state(batch_size=2)
        >>> y, cell = cell(jnp.ones((2, 3)))
        >>> y.shape
        (2, 4)

        ```

    Source: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", 2014.
    """

    cell: eqx.nn.GRUCell
    hidden: HiddenState | None
    spec: SpecTree = field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        key: Leaf,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        spec: SpecTree = None,
    ) -> None:
        check_flag("GRUCell", "use_bias", use_bias)
        check_sizes("GRUCell", input_size=input_size, hidden_size=hidden_size)
        # It is checked as a State checks it, here and not only when the hidden value is made.
        HiddenState(0.0, spec=spec)
        self.cell = eqx.nn.GRUCell(input_size, hidden_size, bool(use_bias), dtype, key=key)
        self.hidden = None
        self.spec = spec

    def init_state(self: G, batch_size: int | None = None) -> G:
        """The cell with a hidden value of zeros.

        **Arguments:**

        - `batch_size`: how many rows it has; `None` for one row, without an axis for rows.

        **Returns:** the cell, its hidden value of shape `(batch_size, hidden_size)` or `(hidden_size,)`.
        """
        if batch_size is not None:
            check_sizes("GRUCell", batch_size=batch_size)
        rows = () if batch_size is None else (batch_size,)
        zeros = jnp.zeros((*rows, self.cell.hidden_size), self.cell.weight_hh.dtype)
        return self.replace(hidden=HiddenState(zeros, spec=self.spec))

    def __call__(self: G, x: Leaf) -> tuple[jax.Array, G]:
        """Take one step.

        **Arguments:**

        - `x`: the inputs, of shape `(batch_size, input_size)`, or `(input_size,)` for one row.

        **Returns:** `(hidden, cell)`: the new hidden value, and the cell that keeps it.

        **Raises:** `StatemeshError` where there is no hidden value yet, or inputs of another shape.
        """
        if self.hidden is None:
            raise StatemeshError(
                "GRUCell has no hidden value yet. Make it with `init_state(batch_size)`, or those of a "
                "whole model with `model.init_all_states(batch_size=...)`."
            )
        x, hidden = jnp.asarray(x), self.hidden.value
        if x.shape != (wanted := (*hidden.shape[:-1], self.cell.input_size)):
            why = f"the hidden value is of shape {hidden.shape}"
            raise bad_shape("GRUCell", "x", x, f"of shape {wanted}", why)
        step: Callable[..., Array] = self.cell
        for _ in hidden.shape[:-1]:
            step = jax.vmap(step)
        new = step(x, hidden).astype(hidden.dtype)
        return new, self.replace(hidden=new)

    def reset(self: G) -> G:
        """The cell at the start of a sequence: its hidden value, if it has one, zero."""
        if self.hidden is None:
            return self
        return self.replace(hidden=jnp.zeros_like(self.hidden.value))
