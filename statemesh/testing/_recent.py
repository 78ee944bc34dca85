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

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, new: Callable[[], Entry]) -> Entry:
        """The entry of a key. If there is none, `new` makes it."""
        if key not in self._entries:
            self._entries[key] = new()
        self._entries.move_to_end(key)
        if len(self._entries) > _KEPT:
            self._entries.popitem(last=False)
        return self._entries[key]
