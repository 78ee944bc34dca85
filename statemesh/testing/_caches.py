"""A cache with a bound, and hashable keys that stand for static values in the keys of caches."""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar


def is_hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def equal_values(a: Any, b: Any) -> bool:
    """Whether two objects are equal by their own `__eq__`."""
    try:
        return bool(a == b)
    except Exception:  # An `__eq__` of the user's may raise anything.
        return False


class _Key:
    """A value with its own `__eq__`, except that it always equals itself."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = type(value), hash(value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Key) or self.key != other.key:
            return False
        return self.value is other.value or equal_values(self.value, other.value)


def static_key(x: Any) -> Hashable | None:
    """A key that is equal for equal values of one type.

    A value without a hash is known by its pickle. A value that cannot be pickled either may have changed by
    the next call: its key is `None`.
    """
    if isinstance(x, float):  # nan is not equal to itself, and -0.0 is to 0.0
        return type(x), x.hex()
    if is_hashable(x):
        return _Key(x)
    try:
        return type(x), pickle.dumps(x)
    except Exception:  # Pickling may raise whatever a part of the value raises.
        return None


Entry = TypeVar("Entry")


class Recent(Generic[Entry]):
    """The entries that were used last, such as compiled programs.

    **Arguments:**

    - `most`: how many are kept. A compiled program holds megabytes, and a Python number that is drawn anew
        asks for a new one.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def get(self, key: Hashable, new: Callable[[], Entry]) -> Entry:
        """The entry of a key. If there is none, `new` makes it."""
        entry = self._entries.pop(key, None) or new()
        self._entries[key] = entry
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)
        return entry

    def forget(self, key: Hashable) -> None:
        self._entries.pop(key, None)
