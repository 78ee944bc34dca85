"""A cache that keeps the entries that were used last."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar


Entry = TypeVar("Entry")

# A compiled program holds megabytes, and a Python number that is drawn anew asks for a new one.
_KEPT = 16


class Recent(Generic[Entry]):
    """The entries that were used last, such as compiled programs."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def get(self, key: Hashable, new: Callable[[], Entry]) -> Entry:
        """The entry of a key. If there is none, `new` makes it."""
        entry = self._entries.pop(key, None) or new()
        self._entries[key] = entry
        if len(self._entries) > _KEPT:
            self._entries.popitem(last=False)
        return entry

    def forget(self, key: Hashable) -> None:
        self._entries.pop(key, None)
