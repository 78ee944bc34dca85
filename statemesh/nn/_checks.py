"""Checks of arguments that several layers share, and the step of a running value."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp

from .._base import _compat as compat
from .._base import errors
from .._base._arrays import is_array_or_number, is_shaped
from .._base._compat import tree_util
from .._base._paths import path_str
from .._base._types import Leaf, PyTree


def check_number(
    layer: str, argument: str, value: object, fits: Callable[[Any], bool], expected: str
) -> None:
    """Refuse a setting that is no real number, or not in its range."""
    if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
        raise errors.bad_setting(layer, argument, value, expected)


def check_sizes(layer: str, **sizes: object) -> None:
    """Refuse sizes that are not positive ints."""
    for argument, size in sizes.items():
        check_int(layer, argument, size, "a positive int", least=1)


def check_int(
    layer: str, argument: str, value: object, expected: str, least: int | float = -math.inf
) -> None:
    """Refuse a value that is not an int, or that is below `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise errors.bad_setting(layer, argument, value, expected)


def check_floating(layer: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise errors.not_floating(layer, x)


def check_numeric(layer: str, what: str, tree: PyTree) -> None:
    """Refuse a tree, which the user calls `what`, with leaves that are neither arrays nor numbers."""
    for path, leaf in tree_util.tree_flatten_with_path(tree)[0]:
        if not is_numeric(leaf):
            raise errors.not_numeric(layer, path_str(path, what), leaf)


def is_numeric(leaf: Leaf) -> bool:
    """Whether it is a number, or an array or the shape of one."""
    return is_array_or_number(leaf) or is_shaped(leaf)


def check_alike(layer: str, what: str, old: PyTree, new: PyTree) -> None:
    """Refuse `new`, which the user calls `what`, unless it has the arrays and shapes of `old`."""
    then, now = (
        {path_str(path, what): leaf for path, leaf in tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (old, new)
    )
    if bad := [
        (path, then.get(path), now.get(path))
        for path in {**then, **now}
        if path not in then
        or path not in now
        or not is_numeric(now[path])
        or jnp.shape(then[path]) != jnp.shape(now[path])
    ]:
        raise errors.values_differ(layer, what, bad)


def in_inference(layer: PyTree) -> bool:
    """Whether the layer is in inference. It cannot be traced, because it decides what is computed."""
    if compat.is_tracer(layer.inference):
        raise errors.inference_is_traced(type(layer).__name__)
    return bool(layer.inference)


def moved(old: PyTree, new: PyTree, rate: Leaf) -> PyTree:
    """A running value, moved by `rate` of the way to a new one.

    At a rate of 1 nothing of the old value is left, neither its rounding nor a NaN, and at 0 nothing of the
    new one.
    """
    way = new - old
    # `new - old` is not finite where one of them is infinite, or where the dtype cannot hold the difference.
    step = jnp.where(jnp.isfinite(way), old + way * rate, old * (1 - rate) + new * rate)
    return jnp.where(rate == 1, new, jnp.where(rate == 0, old, step))
