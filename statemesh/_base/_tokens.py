"""Tokens: what static values are compared by, which is their type, their hash and `==`."""

import dataclasses
import enum
import types
from collections.abc import Hashable
from typing import Any

import numpy as np

from ._types import Leaf


class _Same:
    """A value, equal to others of its type that say so.

    The hash is taken once: an object whose hash changes later counts as another value.
    """

    __slots__ = ("hash", "value")

    def __init__(self, value: object) -> None:
        self.value = value
        self.hash = hash(value)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self.hash != other.hash:
            return False
        mine, theirs = self.value, other.value
        return mine is theirs or _equal(mine, theirs)


def _equal(value: Leaf, other: Leaf) -> bool:
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:  # Whatever a user's own `__eq__` raises, or the truth of what it returns.
        return False


def token(value: Leaf) -> Hashable:
    """The token of a static value: equal for values of one type that are equal and have one hash.

    **Raises:** `TypeError` for a value that cannot be hashed.
    """
    kind: Any = type(value)
    if isinstance(value, float):  # nan is not equal to itself, and -0.0 is to 0.0
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return kind, value.dtype, value.tobytes()
    if kind is tuple:
        return kind, *map(token, value)
    if not is_hashable(value):
        raise TypeError(f"unhashable type: {type(value).__name__!r}")
    # Equal fields may still compute otherwise: 1 and 1.0, 0.0 and -0.0.
    return kind, _Same(value), *[token(part) for part in _compared(value) if is_hashable(part)]


def _compared(value: Leaf) -> list[object]:
    """What a frozen dataclass is compared by."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is None or not (parameters.frozen and parameters.eq):
        return []
    return [getattr(value, field.name) for field in dataclasses.fields(value) if field.compare]


def is_hashable(value: object) -> bool:
    try:
        hash(value)
    except Exception:  # Whatever a user's own `__hash__` raises.
        return False
    return True


def may_change(value: object) -> bool:
    """Whether an object may have another hash later, or has none.

    A hash written in C stays, and so does that of a container which cannot be changed, if its parts' do.
    """
    if not is_hashable(value):
        return True
    if isinstance(value, tuple | frozenset):
        return any(map(may_change, value))
    if parts := _compared(value):
        return any(map(may_change, parts))
    in_c = isinstance(type(value).__hash__, types.WrapperDescriptorType)
    return not (in_c or isinstance(value, enum.Enum))


def alike(value: Leaf, other: Leaf) -> bool:
    """Whether two static values are equal now. Those that cannot be hashed are compared by `==` alone."""
    try:
        return value is other or token(value) == token(other)
    except TypeError:
        return _equal(value, other)
