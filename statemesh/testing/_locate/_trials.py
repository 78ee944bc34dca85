"""A change of a line that is tried, and what becomes of values."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .._types import Numbers
from ._reruns import Change, Changes, Read
from ._suspects import Suspect


# The reductions that are tried to put the results right.
REDUCED_BY: Mapping[str, Callable[..., Any]] = {"psum": np.sum, "pmean": np.mean, "pmax": np.max}


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A simple change of a line.

    **Attributes:**

    - `changes`: what becomes of values.
    - `cost`: what is likely costs less.
    - `words`: the change in words, where no other one does the same; else none.
    - `is_added`: whether the change adds an operation, which may stand on any line that hands the value on.
    - `is_factor`: whether it multiplies, which may be done on any line before as well.
    - `is_fixed`: whether it gives numbers for these arguments only.
    - `here`: what an author would do at the line itself, in words, where these say more than `words`.
    """

    suspect: Suspect
    changes: Changes
    cost: int | float
    words: str = ""
    is_added: bool = False
    is_factor: bool = False
    is_fixed: bool = False
    here: str = ""


def multiplied(source: int, factor: float) -> Change:
    return Change(lambda read: read(source) * factor)


def reduced_by(source: int, reduce: Callable[..., Any], at: int | tuple[int, ...]) -> Change:
    def make(read: Read) -> Numbers:
        array = read(source)
        return np.broadcast_to(reduce(array, axis=at, keepdims=True), array.shape)

    return Change(make)


def moved(source: int, at: int, shift: int, *, is_open: bool = False) -> Change:
    """What the shard before has; in an open move, zeros on the shard that has none before it."""

    def make(read: Read) -> Numbers:
        array = np.roll(read(source), shift, at)
        if is_open:
            array[(*[slice(None)] * at, 0 if shift > 0 else -1)] = 0
        return array

    return Change(make)
