"""What stands for a static value in the key of what is kept."""

import pickle
from collections.abc import Hashable
from typing import Any


def is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


class _Equal:
    """A value that is equal to what it says it is, and to itself whatever it says."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = type(value), hash(value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Equal) or self.key != other.key:
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except Exception:  # Whatever a user's own `__eq__` raises.
            return False


def static_key(x: Any) -> Hashable | None:
    """Something that is equal for equal values of one type.

    What has no hash is known by what pickling keeps of it. What cannot be pickled either may be another value
    by the next time: for that there is `None`.
    """
    if isinstance(x, float):  # nan is not equal to itself, and -0.0 is to 0.0
        return type(x), x.hex()
    if is_hashable(x):
        return _Equal(x)
    try:
        return type(x), pickle.dumps(x)
    except Exception:  # Whatever a part of it raises.
        return None
