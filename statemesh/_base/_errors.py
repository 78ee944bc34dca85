"""Errors: their classes, how messages spell things, and those that several parts raise.

All other errors are worded where they are raised. A message names the argument or state by the path that
the user would type, shows the value, the spec and the mesh, lists every leaf that is refused, and says what
to do instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ._trees import Bare, clipped, describe
from ._types import AxisName


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

    **Attributes:**

    - `has_too_many_lanes`: whether `pmap2` has more lanes than devices, which `vmap2` could run.

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

    has_too_many_lanes = False


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


E = TypeVar("E", bound=Exception)
# What is shown of a value or a tree of specs within a sentence has so many characters at most.
_LONG = 120


def spec_str(spec: object) -> str:
    """A spec as the user would type it."""
    if isinstance(spec, PartitionSpec):
        marked = {"unreduced": spec.unreduced, "reduced": spec.reduced}
        named = [f"{key}={set(names)!r}" for key, names in marked.items() if names]
        return f"P({', '.join([*map(repr, spec.partitions), *named])})"
    return repr(spec)


def specs_str(specs: Any) -> str:
    """A tree of specs, or filters with their specs or axes, as the user would type it."""
    if isinstance(specs, Mapping) and not all(isinstance(key, str) for key in specs):
        each = (f"{filter_str(key)}: {specs_str(spec)}" for key, spec in specs.items())
        return f"{{{', '.join(each)}}}"
    is_spec = lambda node: isinstance(node, PartitionSpec | type)
    as_typed = lambda spec: Bare(
        spec_str(spec) if isinstance(spec, PartitionSpec) else filter_str(spec)
    )
    return clipped(repr(jax.tree.map(as_typed, specs, is_leaf=is_spec)), _LONG)


def filter_str(filter: object) -> str:
    """A filter as the user would type it."""
    if filter is ...:
        return "..."
    return filter.__name__ if isinstance(filter, type) else repr(filter)


def sizes_str(sizes: Mapping[AxisName, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def mesh_str(mesh: Mesh | AbstractMesh) -> str:
    """A mesh by the sizes of its axes."""
    return f"Mesh({sizes_str(mesh.shape)})"


def mesh_with_types_str(mesh: Mesh | AbstractMesh) -> str:
    return f"{mesh_str(mesh)} with axis types ({', '.join(t.name for t in mesh.axis_types)})"


MOST_LISTED = 16
"""A large model may have many leaves that are refused for one reason: so many are shown."""


def listed(head: str, items: Iterable[str], remedy: str = "") -> str:
    """`head`, then each different item on its own line, then what to do instead."""
    # Leaves of one state often give the same line.
    lines = [f"  - {item}" for item in first_items(list(dict.fromkeys(items)), MOST_LISTED)]
    return "\n".join([f"{head}:", *lines, *([remedy] if remedy else [])])


def error_listing(kind: type[E], head: str, items: Iterable[str], remedy: str = "") -> E:
    return kind(listed(head, items, remedy))


def quoted(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def axes_argument(axes: Sequence[AxisName]) -> AxisName:
    """Axis names as collectives take them: one name by itself, several in a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)


def counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def first_items(items: Sequence[str], most: int = 10) -> list[str]:
    """The first items of a list, and how many more there are."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return [*items[:most], *more]


def first_paths(paths: Sequence[str], before_more: str = ", ") -> str:
    """The first three paths, and how many more there are."""
    more = f"{before_more}{len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def shortened(value: object) -> str:
    return clipped(describe(value), _LONG)


def typed_str(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"


def kind_str(value: object) -> str:
    """An array by dtype and shape, anything else by its type."""
    return describe(value) if isinstance(value, jax.Array) else type(value).__name__


def node_str(node: object) -> str:
    """One node of a tree, without what is below it."""
    if isinstance(node, dict):
        return f"a dict with keys {sorted(map(str, node))}"
    if isinstance(node, tuple | list):
        return f"a {type(node).__name__} of {counted(len(node), 'element')}"
    if jax.tree_util.all_leaves([node]):
        return describe(node)
    return f"a {type(node).__name__}"


def policy_name(state: Any) -> str:
    """The function or method that merges the writes to a state, by the name its author gave it."""
    return getattr(state.reduce, "__name__", None) or f"{type(state).__name__}.leave"


_CALLS = {
    "shard_map": "shard_map(fun, mesh, in_specs, out_specs)",
    "explain": "explain(fun, *args)",
    "scan": "scan(f, init, xs)",
    "value_and_grad": "value_and_grad(loss_fn, axis_name='data')",
}


def invalid_argument(what: str, argument: str, value: object, expected: str) -> TypeError:
    """An argument of a type that it cannot have, and what it must be."""
    return TypeError(
        f"{what}: {argument} is {shortened(value)} of type {type(value).__name__}, but must be {expected}."
    )


def unknown_choice(argument: str, value: object, known: Sequence[str]) -> StatemeshError:
    return StatemeshError(f"{argument}={value!r} is not known. Use one of {quoted(known)}.")


def not_callable(transform: str, fun: object) -> TypeError:
    takes = "takes" if transform == "value_and_grad" else "maps"
    return TypeError(
        f"{transform} {takes} a function, got {typed_str(fun)}. The function comes "
        f"first: `{_CALLS.get(transform, f'{transform}(fn, in_axes=0)')}`."
    )


def not_a_spec(entry: str, spec: object) -> TypeError:
    return TypeError(
        f"{entry} is {typed_str(spec)}, not a spec. Use P('axis'), P(), None, or for a state "
        "sm.PerShard('axis')."
    )


def masked(what: str, bad: Sequence[tuple[str, Any]]) -> TypeError:
    """Masked arrays, each with its path."""
    path = bad[0][0]
    return error_listing(
        TypeError,
        f"{what} has a mask, which JAX would drop",
        [f"{path} is a masked array, {x.dtype}{list(x.shape)}" for path, x in bad],
        f"Pass the numbers and the mask as two arrays: `{path}.filled(0)` and "
        f"`numpy.ma.getmaskarray({path})`.",
    )


def method_returned(method: str, returned: object, expected: str, example: str) -> TypeError:
    shown = "None" if returned is None else f"{type(returned).__name__}: {describe(returned)}"
    return TypeError(
        f"{method} returned {shown}. It must return {expected}, as in `{example}`. Is a `return` missing?"
    )
