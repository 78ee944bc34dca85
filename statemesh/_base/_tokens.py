"""Tokens: hashable stand-ins for static values, equal for equal values, that never change."""

import dataclasses
import enum
import types
from collections.abc import Hashable, Iterable, Mapping, Sequence

import jax
import numpy as np

from ._arrays import is_key
from ._types import Leaf


class Unknowable(Exception):
    """A value that can neither be hashed nor taken apart."""

    def __init__(self, value: object) -> None:
        super().__init__(type(value).__name__)
        self.value = value


class Same:
    """A value that can be hashed, equal to others of its type that say so.

    The hash is taken once: an object whose hash changes later counts as another value.
    """

    __slots__ = ("hash", "value")

    def __init__(self, value: object) -> None:
        self.value = value
        self.hash = hash(value)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self.hash != other.hash:
            return False
        mine, theirs = self.value, other.value
        if mine is theirs:
            return True
        if type(mine) is not type(theirs):
            return False
        try:
            return bool(mine == theirs)
        except Exception:  # Whatever a user's own `__eq__` raises, or the truth of what it returns.
            return False


class SameArray:
    """An array in a static value, equal to others of the same content."""

    __slots__ = ("key", "value")

    def __init__(self, value: jax.Array) -> None:
        self.value = value
        self.key = value.shape, value.dtype, getattr(value, "weak_type", False), value.sharding

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameArray) or self.key != other.key:
            return False
        if self.value is other.value:
            return True
        try:
            return self._bytes() == other._bytes()
        except RuntimeError:  # It is deleted, or on other processes' devices.
            return False

    def _bytes(self) -> bytes:
        x = self.value
        if is_key(x):
            x = jax.random.key_data(x)
        return np.asarray(x).tobytes()


def token(value: object) -> Hashable:
    """The token of a static value.

    Numbers and hashable values are compared by type and value. All others are compared by their content:
    attributes, items, and whatever pickling would keep.

    **Raises:** `Unknowable` for a value that is neither hashable nor can be taken apart.
    """
    return _token(value, {})


def may_change(value: object) -> bool:
    """Whether an object may have another value later.

    An object with a hash written in C does not change, and neither does a frozen dataclass. An object with
    its own `__hash__` may have another hash later. One that cannot be hashed is meant to be changed.
    """
    kind = type(value)
    try:
        hash(value)
    except Exception:  # Whatever a user's own `__hash__` raises.
        return True
    if isinstance(kind.__hash__, types.WrapperDescriptorType) or isinstance(value, enum.Enum):
        return False
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is None or not parameters.frozen


def _token(value: Leaf, above: Mapping[int, int]) -> Hashable:
    # `above` numbers the objects that contain this one, by `id` and from the outside: an object may contain
    # itself.
    kind: object = type(value)
    if isinstance(value, float):  # nan is not equal to itself, and -0.0 is to 0.0
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return kind, value.dtype, value.tobytes()
    if isinstance(value, jax.Array):
        # A tracer has no value to compare, so it equals only itself.
        traced = isinstance(value, jax.core.Tracer)
        return kind, _ByIdentity(value) if traced else SameArray(value)
    if id(value) in above:
        return kind, above[id(value)]
    if kind is tuple:
        return kind, _tokens(value, _inside(value, above))
    if kind is slice:
        return kind, _tokens([value.start, value.stop, value.step], above)
    try:
        same = Same(value)
    except Exception:  # Whatever a user's own `__hash__` raises.
        return kind, *_content(value, _inside(value, above))
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.eq:
        return kind, same
    try:
        # Equal fields may still differ: 1 and 1.0, 0.0 and -0.0. If the class is not frozen, the object that
        # we keep may have changed since, so we keep its content.
        compared = _compared_fields if parameters.frozen else _content
        return kind, same if parameters.frozen else None, *compared(value, _inside(value, above))
    except Unknowable:  # A field that neither `==` nor the hash looks at.
        return kind, same


def _inside(value: object, above: Mapping[int, int]) -> Mapping[int, int]:
    return {**above, id(value): len(above)}


class _ByIdentity:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.value is other.value


def _tokens(values: Iterable[object], inside: Mapping[int, int]) -> tuple[Hashable, ...]:
    return tuple([_token(value, inside) for value in values])


def _compared_fields(value: Leaf, inside: Mapping[int, int]) -> Sequence[Hashable]:
    """The fields of a dataclass that `==` compares."""
    names = [field.name for field in dataclasses.fields(value) if field.compare]
    return _tokens([getattr(value, name, None) for name in names], inside)


def _content(value: Leaf, inside: Mapping[int, int]) -> Sequence[Hashable]:
    """The content of an object."""
    kind = type(value)
    if kind is list:
        return _tokens(value, inside)
    if kind is dict:
        return _tokens([part for item in value.items() for part in item], inside)
    if kind is types.MappingProxyType:
        return _content(dict(value), inside)
    if kind in (set, frozenset):
        return (frozenset(_tokens(value, inside)),)
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.dtype, value.shape, value.tobytes()
    return _taken_apart(value, inside)


def _taken_apart(value: Leaf, inside: Mapping[int, int]) -> Sequence[Hashable]:
    """The content of an object as `copy` sees it; all its attributes too if its class defines how to copy."""
    kind = type(value)
    parts: list[Hashable] = []
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # It cannot be copied, and its class may raise anything.
        reduced = None
    if isinstance(reduced, str):
        parts.append((reduced, _ByIdentity(value)))
    elif reduced is not None:
        made, state, *items = (*reduced, None, None, None)[:5][1:]
        parts += [_token(reduced[0], inside), _tokens(made, inside), _state(state, inside)]
        parts += [None if one is None else _tokens(one, inside) for one in items]
    own_ways = any(
        getattr(kind, name) is not getattr(object, name)
        for name in ("__reduce_ex__", "__reduce__", "__getstate__")
    )
    if reduced is None or own_ways:
        attributes = _attributes(value)
        if reduced is None and attributes is None:
            raise Unknowable(value)
        parts.append(_state(attributes, inside))
    return parts


def _state(state: object, inside: Mapping[int, int]) -> Hashable:
    """Attributes, regardless of the order in which they were set."""
    if type(state) is dict:
        return frozenset([_tokens(item, inside) for item in state.items()])
    if type(state) is tuple:
        return tuple([_state(part, inside) for part in state])
    return _token(state, inside)


def _attributes(value: object) -> dict[str, object] | None:
    """The attributes in an object's `__dict__` and slots; `None` if it has neither."""
    slots = {
        name: slot
        for cls in type(value).__mro__
        for name, slot in vars(cls).items()
        if isinstance(slot, types.MemberDescriptorType)
    }
    found: dict[str, object] = {}
    for name, slot in slots.items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # The slot is empty.
            continue
    try:
        return {**found, **vars(value)}
    except TypeError:
        return found if slots else None
