"""Digests: a few bytes for a value, the same in every process."""

import enum
import functools
import hashlib
from collections.abc import Hashable

import jax
import numpy as np

from ._arrays import is_key
from ._tokens import Same, SameArray, token
from ._types import Leaf


SIZE = 16

_PLAIN = (str, bytes, int, float, complex, type(None), np.dtype, jax.sharding.PartitionSpec)


def digest(text: str | bytes) -> bytes:
    """The digest of a text."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.blake2b(data, digest_size=SIZE).digest()


def of_array(x: Leaf) -> bytes:
    """The digest of an array. This process must hold the whole of it."""
    kind = str(x.dtype)
    if is_key(x):
        x = jax.random.key_data(x)
    host = np.ascontiguousarray(x)
    found = hashlib.blake2b(f"{kind}{host.shape}".encode(), digest_size=SIZE)
    found.update(host.view(np.uint8).data if host.ndim and host.size else host.tobytes())
    return found.digest()


def of_static(value: object) -> bytes:
    """The digest of a static value.

    Some objects have neither a name nor a content that is the same in other processes. They count by their
    type only.
    """
    return digest(_text(token(value)))


def _text(part: Hashable) -> str:
    match part:
        case Same():
            return _named(part.value)
        case SameArray():
            return of_array(part.value).hex() if part.value.is_fully_addressable else "array"
        case tuple():
            return f"({','.join(map(_text, part))})"
        case frozenset():
            return f"{{{','.join(sorted(map(_text, part)))}}}"
        case type():
            return _type_text(part)
        case _ if isinstance(part, _PLAIN):
            return repr(part)
    return _type_text(type(part))


def _type_text(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _named(value: object) -> str:
    kind = _type_text(type(value))
    if isinstance(value, enum.Enum):
        return f"{kind}.{value.name}"
    if isinstance(value, frozenset | tuple) and not isinstance(value, _PLAIN):
        # Sorted, because the order of a set of strings differs between processes.
        return f"{kind}{sorted(_text(token(part)) for part in value)}"
    if isinstance(value, _PLAIN):
        return f"{kind}:{value!r}"
    if isinstance(value, functools.partial):
        parts = value.func, value.args, sorted(value.keywords.items())
        return f"{kind}{_text(token(tuple(parts)))}"
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if isinstance(name, str) else kind
