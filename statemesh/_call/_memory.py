"""Which arrays share memory, so that none is given up twice, or with what it was moved from."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
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
        self._runs: list[tuple[Refs, int]] = []
        self._most = 32
        self.number = 0

    def add(self, arrays: Sequence[Leaf]) -> tuple[Refs, int]:
        """Remember arrays.

        **Returns:** references to them, and their number.
        """
        self.number += 1
        run: tuple[Refs, int] = list(map(weakref.ref, arrays)), self.number
        self._runs.append(run)
        if len(self._runs) > self._most:
            self._forget()
        return run

    def _forget(self) -> None:
        """Forget what has died."""
        alive = [([ref for ref in refs if ref() is not None], n) for refs, n in self._runs]
        self._runs = [run for run in alive if run[0]]
        self._most = max(32, 2 * len(self._runs))

    def numbers(self, arrays: Sequence[Leaf]) -> list[int]:
        """The serial number of each array; 0 for one that no program made."""
        self._forget()
        # Only the living have an identity of their own.
        numbers = {id(ref()): number for refs, number in self._runs for ref in refs}
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
        count = Counter(sizes)
        wanted = {sizes[k] for k in donated if sizes[k] and count[sizes[k]] > 1}
        self.compared = [k for k, size in enumerate(sizes) if size in wanted]
        # There are none, or several: a donated input is compared only if another one has its size.
        self._pick = itemgetter(*self.compared) if self.compared else None
        # What no program made and none took, found apart from all others, and the last number by then.
        self._apart: tuple[Refs, int] = [], 0
        # What the program made last, and its number.
        self._last_run: tuple[Refs, int] = [], 0
        # Picks what was compared last from what the program had made and then from what was apart.
        self._order: Any = None

    def __call__(self, arrays: Sequence[Leaf]) -> Sequence[Leaf]:
        """The arrays, with a copy of each donated one that shares memory with another."""
        if self._pick is None:
            return arrays
        compared = self._pick(arrays)
        if self._fed_back(compared) or self._known(compared):
            return arrays
        lies = {k: memory(arrays[k]) for k in self.compared}
        times = Counter(part for parts in lies.values() for part in parts)
        shared = {k for k, parts in lies.items() if any(times[part] > 1 for part in parts)}
        if shared:
            return [copied(x) if k in shared & self.donated else x for k, x in enumerate(arrays)]
        each = zip(self.compared, compared, UNSHARED.numbers(compared), strict=True)
        left = [weakref.ref(x) for k, x, n in each if not n and k not in self.donated]
        self._apart = left, UNSHARED.number
        return arrays

    def _fed_back(self, compared: Sequence[Leaf]) -> bool:
        """Whether these are what the program made last and what was apart, in the order of last time.

        It says nothing that `_known` would not say, and says it in one pass in C.
        """
        order, (outputs, number), (left, before) = self._order, self._last_run, self._apart
        if order is None or number <= before:
            return False
        try:
            expected = order([*outputs, *left])
        except IndexError:  # Another thread has put in fewer meanwhile.
            return False
        return all(map(is_, map(call, expected), compared))

    def _known(self, compared: Sequence[Leaf]) -> bool:
        """Whether nothing has to be looked up: that would wait for what is being computed.

        So it is where programs made all of these, or the others are those of last time and all that
        programs made was made since.
        """
        if len(set(map(id, compared))) < len(compared):
            return False
        numbers = UNSHARED.numbers(compared)
        others = [x for x, n in zip(compared, numbers, strict=True) if not n]
        left, before = self._apart
        if others and (
            len(others) != len(left)
            or any(0 < n <= before for n in numbers)
            or not all(ref() is x for ref, x in zip(left, others, strict=True))
        ):
            return False
        outputs, number = self._last_run
        if set(numbers) <= {0, number}:
            # The next call, if it takes the like, asks in the quickest way.
            known = [*(ref() for ref in outputs), *others]
            place = {id(x): k for k, x in enumerate(known) if x is not None}
            self._order = itemgetter(*[place[id(x)] for x in compared])
        return True

    def keep(self, outputs: Sequence[Leaf]) -> None:
        """Remember what the program has made."""
        if self.compared:
            self._last_run = UNSHARED.add(outputs)


def memory(x: Leaf) -> frozenset[tuple[Any, int]]:
    """The address at which each part of `x` begins, with its device."""
    if not isinstance(x, jax.Array) or x.is_deleted():
        return frozenset()
    return frozenset(
        (part.device, part.data.unsafe_buffer_pointer()) for part in x.addressable_shards
    )
