"""The classes of statemesh's errors."""


class StatemeshError(ValueError):
    """Any mistake that statemesh refuses.

    !!! example

        ```python
        >>> import statemesh as sm
        >>> try:
        ...     sm.State(1.0, reduce="median")
        ... except sm.StatemeshError as error:
        ...     print(str(error).split(". ")[0])
        reduce='median' is not a write policy

        ```
    """


class SpecError(StatemeshError):
    """A spec that does not fit its array, its tree or the mesh.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> double = sm.shard_map(lambda x: 2 * x, mesh, in_specs=P("data"), out_specs=P("data"))
        >>> try:
        ...     double(jnp.arange(12.0))
        ... except sm.SpecError as error:
        ...     print("12 % 8 = 4" in str(error))
        True

        ```
    """


class BatchAxisError(StatemeshError):
    """A lane axis that does not fit a state or an array.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> try:
        ...     sm.vmap2(lambda x, y: x + y)(jnp.ones(3), jnp.ones(4))
        ... except sm.BatchAxisError as error:
        ...     print("the number of lanes is not clear" in str(error))
        True

        ```
    """


class DivergedStateError(StatemeshError):
    """A state that keeps one copy, but to which shards wrote different values.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> def step(total, x):
        ...     return total.set(x.sum())
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> step = sm.shard_map(step, mesh, in_specs=(None, P("data")), out_specs=P())
        >>> try:
        ...     step(sm.State(0.0), jnp.ones(16))
        ... except sm.DivergedStateError as error:
        ...     print(str(error).splitlines()[0])
        step: shards wrote different values to states that keep one copy:

        ```
    """


class StructureError(StatemeshError):
    """Trees, values or filters that do not fit each other.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> try:
        ...     sm.State(jnp.zeros(3)).set(jnp.zeros(4))
        ... except sm.StructureError as error:
        ...     print(str(error).splitlines()[0])
        State: the new value has a different shape or dtype:

        ```
    """


class RetracedWarning(UserWarning):
    """An argument makes every call trace and compile the function anew.

    !!! example

        ```python
        >>> import warnings
        >>> import jax.numpy as jnp, statemesh as sm
        >>> class Scaled(sm.Module):
        ...     factors: list = sm.field(static=True)
        >>> scale = sm.vmap2(lambda model, x: x * model.factors[0], in_axes=(None, 0))
        >>> with warnings.catch_warnings(record=True) as shown:
        ...     warnings.simplefilter("always")
        ...     y = scale(Scaled([2.0]), jnp.ones(3))
        >>> shown[0].category is sm.RetracedWarning
        True

        ```
    """
