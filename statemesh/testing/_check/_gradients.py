"""The gradient that is compared: of a weighted sum of all results, by the arrays of the arguments."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import statemesh as sm

from .._program._arithmetic import is_inexact
from .._types import AnyLeaf, Fun, PyTree, tree_util
from ._values import path_of


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is differentiated by what.

    **Attributes:**

    - `of`: the numbers of the leaves of the results.
    - `by`: the numbers of the leaves of the arguments.
    - `constant`: the numbers of the leaves of the results that have no derivative.
    """

    of: tuple[int, ...] = ()
    by: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.of and self.by)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithGradient:
    """The results of a call, and the gradient."""

    results: PyTree
    gradient: list[Any]


def selection(args: PyTree, results: PyTree) -> Selection:
    """All arrays of floats, except in the states of Optax.

    What an optimizer makes of a slot that is zero has no derivative.

    **Arguments:**

    - `args`: the tuple of the positional arguments and the dictionary of the others.
    """
    return Selection(_inexact(results), _inexact(args))


def _inexact(tree: PyTree) -> tuple[int, ...]:
    is_slots: Callable[[object], bool] = lambda x: type(x).__module__.partition(".")[0] == "optax"
    found, number = [], 0
    for node in tree_util.tree_leaves(tree, is_leaf=is_slots):
        for x in tree_util.tree_leaves(node):
            if not is_slots(node) and _is_inexact(x):
                found.append(number)
            number += 1
    return tuple(found)


def _is_inexact(x: AnyLeaf) -> bool:
    return hasattr(x, "dtype") and is_inexact(x.dtype)


def results_of(made: PyTree) -> PyTree:
    """The results of a call, without the gradient if that is there."""
    return made.results if isinstance(made, WithGradient) else made


def learns(args: PyTree, written: Callable[[int], bool]) -> bool:
    """Whether a call changes parameters: a training step, whose derivative nobody takes.

    **Arguments:**

    - `written`: whether a call gives a new value for a leaf of the arguments, by its number.
    """
    number = 0
    is_state: Callable[[object], bool] = lambda x: isinstance(x, sm.State)
    for node in tree_util.tree_leaves(args, is_leaf=is_state):
        for _ in tree_util.tree_leaves(node):
            if isinstance(node, sm.ParamState) and written(number):
                return True
            number += 1
    return False


def with_gradient(call: Fun, selected: Selection) -> Fun:
    """A function that gives the results of a call and the gradient."""

    def both(*args: PyTree, **kwargs: PyTree) -> WithGradient:
        leaves, treedef = tree_util.tree_flatten((args, kwargs))
        rest: list[PyTree] = []

        def total(chosen: Sequence[AnyLeaf]) -> tuple[jax.Array, PyTree]:
            filled = list(leaves)
            for number, x in zip(selected.by, chosen, strict=True):
                filled[number] = x
            again, named = treedef.unflatten(filled)
            result = call(*again, **named)
            found = tree_util.tree_leaves(result)
            arrays, statics = eqx.partition(result, eqx.is_array)
            rest[:] = [statics]
            return sum(
                (_weighted(found[k]) for k in selected.of if k < len(found)), jnp.float32(0)
            ), arrays

        value, pull, arrays = jax.vjp(total, [leaves[k] for k in selected.by], has_aux=True)
        (gradient,) = pull(jnp.ones_like(value))
        return WithGradient(eqx.combine(arrays, rest[0]), gradient)

    both.__name__ = getattr(call, "__name__", type(call).__name__)
    return both


def _weighted(x: jax.Array) -> jax.Array:
    """The sum of all entries, each with its own weight."""
    weights = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    wide = x if jnp.issubdtype(x.dtype, jnp.complexfloating) else x.astype(np.float32)
    return jnp.real(wide * weights).sum().astype(np.float32)


def gradient_paths(args: PyTree, selected: Selection) -> list[str]:
    """The paths by which the gradient is taken."""
    flat, _ = tree_util.tree_flatten_with_path(args)
    return [f"the gradient by {path_of(flat[k][0])}" for k in selected.by]


def with_constants(fun: Fun, numbers: Sequence[int]) -> Fun:
    """The function of shards with these leaves of its results taken for constants."""

    def held(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, treedef = tree_util.tree_flatten(fun(*args, **kwargs))
        for k in numbers:
            leaves[k] = jax.lax.stop_gradient(leaves[k])
        return treedef.unflatten(leaves)

    held.__name__ = getattr(fun, "__name__", type(fun).__name__)
    return held


def differentiable(selected: Selection, traces: Callable[[Selection], Any]) -> Selection:
    """The selection without the results that have no derivative.

    **Arguments:**

    - `traces`: traces the call with its gradient. It raises where there is none.

    **Raises:** what `traces` raises, if no result has a derivative.
    """
    try:
        traces(selected)
        return selected
    except Exception:  # Raised again below, unless some results have a derivative.
        refused = set()
        for one in selected.of:
            others = tuple(k for k in selected.of if k != one)
            with contextlib.suppress(Exception):
                traces(Selection((one,), selected.by, others))
                continue
            refused.add(one)
        left = tuple(k for k in selected.of if k not in refused)
        if not left or not refused:
            raise
    found = Selection(left, selected.by, tuple(sorted(refused)))
    traces(found)
    return found
