"""Which arrays share memory, so that none is given up twice, or with what it was moved from."""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import call, is_, itemgetter
from typing import Any, TypeAlias

import jax

from .._base._types import Leaf


def copied(x: jax.Array) -> jax.Array:
    """`x` in memory of its own, on the devices where it lies."""
    return jax.device_put(x, x.sharding, may_alias=False)


Refs: TypeAlias = Sequence[Callable[[], Any]]


class Unshared:
    """Arrays of which no two share memory: those that programs have made, each with the number of its run.

    They are known as long as somebody else holds them. Other threads may add some meanwhile: what is lost
    then is taken for an array that no program made, whose memory is looked up.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Refs] = {}
        self._most = 32
        self._numbers = itertools.count(1)

    def now(self) -> int:
        """A number greater than that of each run so far, and smaller than that of each later one."""
        return next(self._numbers)

    def add(self, arrays: Sequence[Leaf], instead_of: int = 0) -> tuple[Refs, int]:
        """Remember arrays, and forget those of the run that has this number.

        **Returns:** references to them, and their number.
        """
        number, refs = self.now(), list(map(weakref.ref, arrays))
        self._runs.pop(instead_of, None)
        self._runs[number] = refs
        if len(self._runs) > self._most:
            self._forget()
        return refs, number

    def _forget(self) -> None:
        """Forget what has died."""
        for number, refs in [*self._runs.items()]:
            if all(ref() is None for ref in refs):
                self._runs.pop(number, None)
        self._most = max(32, 2 * len(self._runs))

    def numbers(self, arrays: Sequence[Leaf]) -> list[int]:
        """The serial number of each array; 0 for one that no program made."""
        self._forget()
        # Only the living have an identity of their own.
        numbers = {id(ref()): n for n, refs in [*self._runs.items()] for ref in refs}
        return [numbers.get(id(x), 0) for x in arrays]


UNSHARED = Unshared()


class Spared:
    """A program's inputs at each call, in memory of their own where they are given up.

    Two arrays may share memory without being one object: what was moved and what it was moved from, an
    array and a part of it, a key and its data. To give up one would take it away from the other.

    **Arguments:**

    - `donated`: which inputs the program gives up.
    - `sizes`: of the part of each input that a device holds, in bytes. Only where these are equal can two
        inputs share memory.
    """

    def __init__(self, donated: Sequence[int], sizes: Sequence[int]) -> None:
        self.donated = frozenset(donated)
        self.sizes = sizes
        count = Counter(sizes)
        wanted = {sizes[k] for k in donated if sizes[k] and count[sizes[k]] > 1}
        self.compared = [k for k, size in enumerate(sizes) if size in wanted]
        # There are none, or several: a donated input is compared only if another one has its size.
        self._pick: Any = itemgetter(*self.compared) if self.compared else None
        # What was compared last and is not given up, when these shared memory with nothing.
        self._apart: tuple[Refs, int] = [], 0
        # What the program made last, and its number.
        self._last_run: tuple[Refs, int] = [], 0
        # Picks what was compared last from what the program had made and then from what is not given up.
        self._order: Any = None
        # What it picks from these now.
        self._expected: Refs | None = None

    def __call__(self, arrays: Sequence[Leaf]) -> Sequence[Leaf]:
        """The arrays, with a copy of each donated one that shares memory with another."""
        if self.fed_back(arrays):
            return arrays
        # To look at memory waits for what is being computed. So only what may share it with an unknown array.
        unknown = {self.sizes[k] for k in self._unknown(arrays)}
        lies = {k: memory(arrays[k]) for k in self.compared if self.sizes[k] in unknown}
        times = Counter(part for parts in lies.values() for part in parts)
        shared = {k for k, parts in lies.items() if any(times[part] > 1 for part in parts)}
        if shared:
            return [copied(x) if k in shared & self.donated else x for k, x in enumerate(arrays)]
        left = [arrays[k] for k in self.compared if k not in self.donated]
        refs, _ = self._apart
        if len(refs) != len(left) or not all(map(is_, map(call, refs), left)):
            refs, _ = self._apart = list(map(weakref.ref, left)), UNSHARED.now()
        # If the next call takes the like of these, it will be enough to compare identities.
        outputs, _ = self._last_run
        place = {id(ref()): k for k, ref in enumerate([*outputs, *refs])}
        order = [place.get(id(x)) for x in self._pick(arrays)]
        is_found = None not in order and len(set(order)) == len(order)
        self._order = itemgetter(*order) if is_found else None
        return arrays

    def fed_back(self, arrays: Sequence[Leaf]) -> bool:
        """Whether these are what the program made last and what was apart, in the order of last time.

        It says nothing that `_unknown` would not say, and says it in one pass in C.
        """
        if self._pick is None:
            return True
        expected = self._expected
        return expected is not None and all(map(is_, map(call, expected), self._pick(arrays)))

    def _unknown(self, arrays: Sequence[Leaf]) -> list[int]:
        """The compared inputs that may share memory with others.

        Those that programs made share none, nor do those that are not given up and were found apart, and what
        programs made since.
        """
        left, before = self._apart
        compared = self._pick(arrays)
        apart = {id(ref()) for ref in left}
        since = before if any(id(x) in apart for x in compared) else 0
        times = Counter(map(id, compared))
        return [
            k
            for k, x, number in zip(
                self.compared, compared, UNSHARED.numbers(compared), strict=True
            )
            if times[id(x)] > 1 or not (id(x) in apart or number > since)
        ]

    def keep(self, outputs: Sequence[Leaf], again: bool = False) -> None:
        """Remember what the program has made.

        **Arguments:**

        - `again`: whether it took what it had made before, which is forgotten then.
        """
        if self._pick is None:
            return
        # What is apart was found so before the run: other threads see its outputs only after this.
        (left, _), (_, last) = self._apart, self._last_run
        refs, _ = self._last_run = UNSHARED.add(outputs, last if again else 0)
        self._expected = None
        if self._order is not None:
            # Another thread may have put in fewer meanwhile.
            with suppress(IndexError):
                self._expected = self._order([*refs, *left])


def memory(x: Leaf) -> frozenset[tuple[Any, int]]:
    """The address at which each part of `x` begins, with its device."""
    if not isinstance(x, jax.Array) or x.is_deleted():
        return frozenset()
    return frozenset(
        (part.device, part.data.unsafe_buffer_pointer()) for part in x.addressable_shards
    )
