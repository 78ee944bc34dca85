"""Checks of arguments that several functions share, and what counts as an array."""

import functools
import inspect
import operator
from collections.abc import Hashable, Iterable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from . import _errors as errors
from ._errors import StatemeshError, quoted, typed_str
from ._trees import fun_name
from ._types import NUMBERS, AxisName, AxisNames, Fun, Leaf, Size, flat_names, is_axis_name


def is_masked(x: object) -> bool:
    """Whether `x` is a NumPy array with a mask, which JAX would silently drop."""
    return isinstance(x, np.ma.MaskedArray)


def is_array(x: object) -> bool:
    """Whether `x` is a JAX array, or a NumPy array that JAX can take: one of numbers, not of strings.

    **Raises:** `TypeError` for a masked array.
    """
    if isinstance(x, np.ndarray | np.generic):
        if is_masked(x):
            raise errors.masked("an array", [("it", x)])
        return bool(jnp.issubdtype(x.dtype, np.number) or x.dtype == np.bool_)
    return isinstance(x, jax.Array)


def is_array_or_number(x: object) -> bool:
    """Whether `x` is an array or a Python number, of which an array can be made."""
    return is_array(x) or isinstance(x, NUMBERS)


def is_shaped(x: object) -> bool:
    """Whether `x` is an array, stands for one that is not computed, or refers to one."""
    # JAX does not count references as arrays, not even traced ones.
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct | jax.Ref | jax.core.Tracer)


def is_inexact(x: Leaf) -> bool:
    """Whether `x` is an array of floats or complex numbers, which can be differentiated, or stands for it."""
    return is_shaped(x) and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def is_key(x: object) -> bool:
    """Whether `x` is a typed key, or an array of them."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


_KINDS = (
    (inspect.iscoroutinefunction, "an async function"),
    (inspect.isasyncgenfunction, "an async generator function"),
    (inspect.isgeneratorfunction, "a generator function"),
)


def check_function(transform: str, fun: object) -> None:
    """Refuse what cannot be traced: an object that is no function, or a function that a call does not run."""
    if not callable(fun):
        raise errors.not_callable(transform, fun)
    while isinstance(fun, functools.partial | eqx.Partial):
        fun = fun.func
    for is_kind, kind in _KINDS:
        if is_kind(fun) or is_kind(type(fun).__call__):
            raise TypeError(
                f"{transform}: {fun_name(fun)} is {kind}: a call of it gives no values, only something that "
                "is still to run. JAX traces a function once, from its arguments to its results: write "
                "`def` without `async`, and `return` the values without `yield`."
            )


def takes(fun: Fun, count: int) -> bool:
    """Whether a function can be called with so many positional arguments, as far as Python can tell."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def positions(what: str, argument: str, value: object) -> tuple[int, ...]:
    """One position of an argument, or several, as a tuple."""
    try:
        several = tuple(value) if isinstance(value, Iterable) else (value,)
        if not any(isinstance(position, bool) for position in several):
            return tuple(map(operator.index, several))
    except TypeError:
        pass
    expected = f"the position of an argument, or several, numbered from 0, as in {argument}=(0,)"
    raise errors.invalid_argument(what, argument, value, expected)


def check_lane_name(what: str, name: object) -> None:
    """Refuse what collectives would not take for the name of one axis."""
    if not isinstance(name, Hashable):
        raise TypeError(f"axis_name={typed_str(name)} cannot be hashed. Use a string.")
    if not is_axis_name(name):
        expected = (
            "a string, as in axis_name='data'; a number is the position of an array's axis, and a tuple is "
            "several names"
        )
        raise errors.invalid_argument(what, "axis_name", name, expected)


_NAMES = "a string, or a tuple of several, as in axis_name=('data', 'model')"


def check_names(what: str, names: object) -> None:
    """Refuse what is neither an axis name, nor a tuple of different ones, nor `None`."""
    several = flat_names(names)
    if not all(map(is_axis_name, several)):
        raise errors.invalid_argument(what, "axis_name", names, _NAMES)
    check_named_once(what, "axis_name", several)


def required_names(what: str, names: object) -> tuple[AxisName, ...]:
    """One axis name, or a tuple of several, as a tuple that is not empty."""
    check_names(what, names)
    if not flat_names(names):
        raise errors.invalid_argument(what, "axis_name", names, _NAMES)
    return flat_names(names)


def check_named_once(what: str, argument: str, names: Sequence[AxisName]) -> None:
    """Refuse an axis that is named more than once."""
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise StatemeshError(
            f"{what}: {argument} names {quoted(repeated)} more than once, in {tuple(names)!r}. Name each "
            "axis once."
        )


def axis_names(what: str, value: AxisNames, argument: str, expected: str) -> frozenset[AxisName]:
    """One name of a mesh axis, or several, as a set."""
    try:
        names = (value,) if isinstance(value, str) else tuple(value)
        check_named_once(what, argument, names)
    except TypeError:
        raise errors.invalid_argument(what, argument, value, expected) from None
    return frozenset(names)


def count(what: str, argument: str, value: Size, expected: str) -> int:
    """A number that must not be negative, as an int."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise errors.invalid_argument(what, argument, value, expected)
    if operator.index(value) < 0:
        raise StatemeshError(f"{what}: {argument} is {value}, but must be {expected}.")
    return operator.index(value)


def check_flag(what: str, argument: str, value: object) -> None:
    """Refuse what is neither `True` nor `False`."""
    if not isinstance(value, bool | np.bool_):
        raise errors.invalid_argument(what, argument, value, "True or False")


def check_text(what: str, argument: str, value: object, expected: str) -> None:
    """Refuse what is neither a string nor `None`."""
    if value is not None and not isinstance(value, str):
        raise errors.invalid_argument(what, argument, value, expected)


def tags(what: str, value: object) -> frozenset[str]:
    """One tag, or several, as a set. `None` gives the empty set."""
    if value is None or isinstance(value, str):
        return frozenset() if value is None else frozenset([value])
    several = tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(tag, str) for tag in several):
        expected = "a string or several, as in tag='slow' or tag=('slow', 'encoder')"
        raise errors.invalid_argument(what, "tag", value, expected)
    return frozenset(several)
