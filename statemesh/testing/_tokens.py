"""What stands for a static value in the key of what is kept."""

from collections.abc import Hashable
from typing import Any


def has_hash(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def token(x: Any) -> Hashable:
    """Something that is equal for equal values of one type; by identity where they have no hash."""
    if isinstance(x, float):  # nan is not equal to itself, and -0.0 is to 0.0
        return type(x), x.hex()
    return type(x), x if has_hash(x) else id(x)
