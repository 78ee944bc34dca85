"""Mappings of one function with equal declarations share their compiled programs."""

import dataclasses
import types
import weakref
from collections.abc import Hashable
from typing import Any

import jax

from .._base._types import Leaf, PyTree
from ._axis_rules import AxisRules
from ._cache import make_room
from ._declared import Declared
from ._on_devices import Devices
from ._pipeline import Pipeline


# Pipelines kept for one function: the oldest go first.
_KEPT = 16

_pipelines: "weakref.WeakKeyDictionary[Any, dict[Hashable, Pipeline]]" = weakref.WeakKeyDictionary()

# Types whose values are compared by value, never change, and keep no function alive.
_PLAIN = (int, str, type, types.NoneType, types.EllipsisType, types.CodeType, jax.Device)


def shared_pipeline(declared: Declared) -> Pipeline:
    """The pipeline of an equal declaration of the same function, or a new one.

    A function is the same if it is the same object, as under `jax.jit`, and has the same code. What is
    declared with objects that may change, or that may keep the function alive, has a pipeline of its own.
    """
    fun = declared.fun
    if not isinstance(fun, types.FunctionType):
        return Pipeline(declared)
    try:
        key = _key((fun.__code__, declared.name, declared.rules, declared.donate))
    except TypeError:
        return Pipeline(declared)
    alike = _pipelines.setdefault(fun, {})
    found = alike.get(key)
    if found is not None:
        return found
    make_room(alike, _KEPT)
    return alike.setdefault(key, Pipeline(dataclasses.replace(declared, fun=_Weak(fun))))


class _Weak:
    """A function that can be called without being kept alive. Its mappings keep it alive."""

    def __init__(self, fun: types.FunctionType) -> None:
        self._fun = weakref.ref(fun)

    @property
    def __wrapped__(self) -> Any:
        return self._fun()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        return self.__wrapped__(*args, **kwargs)


def _key(value: Leaf) -> Hashable:
    """A key that is equal for equal values of the same types.

    **Raises:** `TypeError` for what is not plain.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | frozenset):
        return type(value), *map(_key, value)
    if isinstance(value, AxisRules | Devices):
        return tuple(_key(getattr(value, field.name)) for field in dataclasses.fields(value))
    raise TypeError(value)
