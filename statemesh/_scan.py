"""`jax.lax.scan` for models: leaves that are not arrays stay outside of the loop."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._base import _errors as errors
from ._base._checks import check_flag, count, is_shaped
from ._base._errors import StructureError, error_listing, kind_str
from ._base._trees import (
    REMOVED,
    describe,
    fun_name,
    is_removed,
    is_state,
    is_state_or_removed,
    path_str,
    positional_names,
)
from ._base._types import NUMBERS
from ._call._arguments import alike, inside_modules
from ._jax._compat import tree_util


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """`jax.lax.scan` for models: the carry may have leaves that are not arrays.

    Functions, strings and the like, and numbers in Modules, are the same at every step and come back as they
    are, whether they stand in `init`, in `xs` or in a result `y`. A State must leave a step with the
    structure, shapes and dtypes with which it entered.

    **Arguments:**

    - `f`: one step, `(carry, x) -> (carry, y)`.
    - `init`: the first carry: a model, a state, any pytree.
    - `xs`: a pytree of arrays whose leading axis is scanned over; `None` for none.
    - `length`: the number of steps, where `xs` does not give it.
    - `reverse`, `unroll`: as for `jax.lax.scan`.

    **Returns:** the last carry, and every `y` stacked.

    **Raises:** `StructureError` for a step that changes a state's shape, dtype or structure, or a leaf that
    is not an array; it names the path. What `f` and JAX raise comes through unchanged.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> class Cell(sm.Module):
        ...     hidden: sm.HiddenState
        ...     activation: object
        ...     def __call__(self, x):
        ...         hidden = self.activation(self.hidden.value + x)
        ...         return hidden, self.replace(hidden=hidden)
        >>> def step(cell, x):
        ...     y, cell = cell(x)
        ...     return cell, y
        >>> cell = Cell(sm.HiddenState(0.0), jax.nn.relu)
        >>> cell, ys = sm.scan(step, cell, jnp.array([1.0, -3.0, 2.0]))
        >>> ys, cell.hidden.value
        (Array([1., 0., 2.], dtype=float32), Array(2., dtype=float32))

        ```
    """
    if not callable(f):
        raise errors.not_callable("scan", f)
    check_flag("scan", "reverse", reverse)
    if length is not None:
        length = count(
            "scan", "length", length, "an int, 0 or more: the number of steps, as in length=10"
        )
    if not isinstance(unroll, bool):
        unroll = count(
            "scan", "unroll", unroll, "an int, 1 or more, or True for all steps, as in unroll=4"
        )
    first, fixed = _parted(init)
    rows, fixed_rows = _parted(xs)
    fixed_ys: list[Any] = []

    @functools.wraps(f)
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        returned = f(_joined(carry, fixed), _joined(x, fixed_rows))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"scan: {fun_name(f)} must return (carry, y), but returned {kind_str(returned)}. If nothing "
                "is to be stacked, write `return carry, None`."
            )
        _check(f, init, returned[0])
        y, other = _parted(returned[1])
        fixed_ys[:] = [other]
        return _parted(returned[0])[0], y

    last, ys = jax.lax.scan(step, first, rows, length, reverse=reverse, unroll=unroll)
    return _joined(last, fixed), _joined(ys, fixed_ys[0]) if fixed_ys else ys


def _parted(tree: Any) -> tuple[Any, Any]:
    """The tree with its states and arrays only, and the tree with the rest. States stay the same objects."""
    leaves, treedef = tree_util.tree_flatten(tree, is_leaf=is_state)
    carried = list(map(_is_carried, leaves, inside_modules(tree)))
    arrays = [x if hit else REMOVED for x, hit in zip(leaves, carried, strict=True)]
    others = [REMOVED if hit else x for x, hit in zip(leaves, carried, strict=True)]
    return treedef.unflatten(arrays), treedef.unflatten(others)


def _is_carried(leaf: Any, in_module: bool) -> bool:
    return is_state(leaf) or is_shaped(leaf) or (type(leaf) in NUMBERS and not in_module)


def _joined(arrays: Any, fixed: Any) -> Any:
    leaves, treedef = tree_util.tree_flatten(arrays, is_leaf=is_state_or_removed)
    others = tree_util.tree_leaves(fixed, is_leaf=is_state_or_removed)
    pairs = zip(leaves, others, strict=True)
    return treedef.unflatten([y if is_removed(x) else x for x, y in pairs])


def _check(f: Callable[..., Any], before: Any, after: Any) -> None:
    """Refuse a step that changes what a loop cannot change, by paths that the user knows.

    JAX would refuse it too, by the paths of leaves inside a State.
    """
    (root,) = positional_names(f, 1)
    old, _ = tree_util.tree_flatten_with_path(before, is_leaf=is_state)
    new, _ = tree_util.tree_flatten_with_path(after, is_leaf=is_state)
    if [keys for keys, _ in old] != [keys for keys, _ in new]:
        known, returned = ([path_str(keys, root) for keys, _ in flat] for flat in (old, new))
        missing = [f"{path} is missing" for path in known if path not in returned]
        added = [f"{path} is new" for path in returned if path not in known]
        raise error_listing(
            StructureError,
            f"scan: {fun_name(f)} returned a carry whose structure is not that of the carry it was given",
            [*missing, *added],
            "Create everything that the loop carries before the loop.",
        )
    changed = [
        f"{path_str(keys, root)}: was {describe(x)}, is {describe(y)}"
        for (keys, x), (_, y), hit in zip(old, new, inside_modules(before), strict=True)
        if not _goes_on(x, y, hit)
    ]
    if changed:
        raise error_listing(
            StructureError,
            f"scan: {fun_name(f)} returned a carry with other states, or with other leaves that are not "
            "arrays, than it was given",
            changed,
            "The carry must keep its form through all steps. Write states with `state.set(...)`. Make a "
            "number that changes an array before the loop: `jnp.asarray(...)`.",
        )


def _goes_on(old: Any, new: Any, in_module: bool) -> bool:
    """Whether `new` may take the place of `old` in the carry. For plain arrays JAX words the error well."""
    if is_state(old):
        return is_state(new) and _form(old) == _form(new)
    if _is_carried(old, in_module):
        return not is_state(new) and _is_carried(new, in_module)
    return alike(old, new)


def _form(state: Any) -> Any:
    leaves, treedef = tree_util.tree_flatten(state)
    return treedef, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]
