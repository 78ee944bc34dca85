"""Digests: a few bytes for a value, the same in every process."""

import hashlib
import re

import jax
import numpy as np

from ._arrays import is_key
from ._types import Leaf


SIZE = 16


def digest(data: bytes) -> bytes:
    """The digest of some bytes."""
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


def of_printed(value: object) -> bytes:
    """The digest of the words with which a value and its type are printed.

    Not of where objects lie in memory. And not of the order of words where a set may be printed: sets of
    strings have another one in each process.
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", f"{type(value).__qualname__} {value!r}")
    words = re.findall(r"\w+|[^\w\s]", text)
    return digest("\n".join(sorted(words) if "{" in text else words).encode())
