"""The kinds of state that say how long a value lives and what it is for."""

from .._base._types import Value
from ._state import State


class ShortTermState(State[Value]):
    """State that is meaningful for a short while: one sequence, one episode, one batch.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> position = sm.ShortTermState(0)
        >>> int(position.set(position.value + 1).value)
        1

        ```
    """

    __slots__ = ()


class HiddenState(ShortTermState[Value]):
    """The hidden value of a recurrent layer.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def step(hidden, x):
        ...     return hidden.set(0.5 * hidden.value + x)
        >>> step = sm.vmap2(step, in_axes=(None, 0), out_axes=0, state_in_axes=sm.HiddenState)
        >>> step(sm.HiddenState(jnp.zeros(3)), jnp.arange(3.0)).value
        Array([0., 1., 2.], dtype=float32)

        ```
    """

    __slots__ = ()


class NonBatchState(ShortTermState[Value]):
    """State that is never given a lane axis: it stays replicated where others are distributed.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> class Filter(sm.Module):
        ...     table: sm.NonBatchState | None = None
        ...     last: sm.HiddenState | None = None
        ...     def init_state(self):
        ...         table = sm.NonBatchState(jnp.arange(3.0))
        ...         return self.replace(table=table, last=sm.HiddenState(0.0))
        >>> made, _ = sm.vmap2_new_states(Filter(), {}, axis_size=4)
        >>> made.table.value.shape, made.last.value.shape
        ((3,), (4,))

        ```
    """

    __slots__ = ()


class LongTermState(State[Value]):
    """State that lives as long as the model: parameters and statistics.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> model = {"w": sm.ParamState(1.0), "mean": sm.BatchState(0.0), "h": sm.HiddenState(0.0)}
        >>> kept, _ = sm.partition(model, sm.LongTermState)
        >>> sorted(sm.states(kept))
        ["['mean']", "['w']"]

        ```
    """

    __slots__ = ()


class ParamState(LongTermState[Value]):
    """Parameters: what training changes along its gradients.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> def loss(w, x):
        ...     return (w.value * x).sum(), w
        >>> _, gradient = sm.value_and_grad(loss)(sm.ParamState(2.0), jnp.arange(3.0))
        >>> float(gradient.value)
        3.0

        ```
    """

    __slots__ = ()


class BatchState(LongTermState[Value]):
    """Statistics gathered from batches, such as a running mean.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> def step(mean, x):
        ...     return mean.set(x.mean())
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> step = sm.shard_map(step, mesh, in_specs=(None, P("data")), out_specs=P())
        >>> float(step(sm.BatchState(0.0, reduce="mean"), jnp.arange(16.0)).value)
        7.5

        ```
    """

    __slots__ = ()
