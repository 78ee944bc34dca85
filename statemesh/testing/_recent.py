"""A cache that keeps the entries that were used last."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar


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
