"""Calls in a row in double precision, and how far rounding may move their results."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from .._program._doubled import Doubled, Wide
from .._program._jaxprs import Equation
from .._program._promises import Broken
from .._types import Numbers, PyTree
from ._leaves import leaves_of, numbers


# Whose rounding is meant: that of double precision, or that of the program's own dtypes.
Rounding: TypeAlias = Literal["double", "own"]
# From the arguments and the results of a call to the arguments of the next one.
Feed: TypeAlias = Callable[[PyTree, PyTree], PyTree]

_NOISE: dict[Rounding, tuple[float, float]] = {"double": (1.0, 0.0), "own": (0.0, 1.0)}


@dataclasses.dataclass(frozen=True)
class Step:
    """One of several calls.

    **Attributes:**

    - `given`: the arguments.
    - `results`: the results.
    - `broken`: what is promised to be the same on several shards and is not.
    - `unended`: the loops that were stopped before they had ended.
    """

    given: Wide
    results: Wide
    broken: list[Broken]
    unended: list[Equation]

    @cached_property
    def numbers(self) -> list[Numbers]:
        return [numbers(leaf.array) for leaf in leaves_of("", self.results.values)]


class Chain:
    """Calls in a row in double precision. Each gets what the call before returned.

    **Arguments:**

    - `program`: the function.
    - `args`: the arguments of the first call, and its keyword arguments.
    - `feed`: gives the arguments of the next call.
    - `steps`: the number of calls.
    - `noisy`: whether noise will be wanted, so that the program need not be compiled without.
    - `compared_with`: the function that the results are compared with.
    """

    def __init__(
        self,
        program: Doubled,
        args: Wide,
        feed: Feed,
        steps: int,
        *,
        noisy: bool,
        compared_with: Doubled | None = None,
    ) -> None:
        self.program, self.args, self.feed, self.steps = program, args, feed, steps
        self.compared_with = compared_with
        self.exact = self._run(np.zeros(3) if noisy else None)
        self._moved: dict[Rounding, list[list[Numbers]]] = {}
        self._runs: dict[Rounding, int] = {}
        self._unended: dict[Rounding, list[Equation]] = {}
        # For each call and each promise of the program, by how much copies differ in runs with noise.
        self._promises: dict[tuple[int, int], list[float]] = {}

    def _run(self, noise: Numbers | None) -> list[Step]:
        given, found = self.args, []
        for _ in range(self.steps):
            called = self.program(given, noise, self.compared_with)
            results = called.results
            found.append(Step(given, results, called.broken, called.unended))
            given = Wide(
                self.feed(given.types, results.types), self.feed(given.values, results.values)
            )
        return found

    def moved(self, rounding: Rounding, runs: int) -> list[list[Numbers]]:
        """By how much noise moves each number: the most of so many runs, for each call and array.

        It is infinite where a number becomes NaN or infinite, or is so no longer.
        """
        most = self._moved.setdefault(
            rounding, [[np.zeros(x.shape) for x in step.numbers] for step in self.exact]
        )
        for run in range(self._runs.get(rounding, 0), runs):
            noisy = self._run(np.array([*_NOISE[rounding], run + 1.0]))
            stopped = self._unended.setdefault(rounding, [])
            stopped += [loop for step in noisy for loop in step.unended]
            for step, (exact, other) in enumerate(zip(self.exact, noisy, strict=True)):
                pairs = zip(exact.numbers, other.numbers, strict=True)
                for k, (a, b) in enumerate(pairs):
                    most[step][k] = np.maximum(most[step][k], distances(a, b))
                if rounding == "double":
                    self._note(step, other)
        self._runs[rounding] = max(runs, self._runs.get(rounding, 0))
        return most

    def unended(self, rounding: Rounding) -> list[Equation]:
        """The loops that do not end where operations round."""
        if not self.program.loops(self.args.types):
            return []
        self.moved(rounding, 3)
        return self._unended[rounding]

    def _note(self, step: int, other: Step) -> None:
        for one in other.broken:
            self._promises.setdefault((step, one.number), []).append(one.unequal.amount)

    def broken(self, step: int) -> list[Broken]:
        """The promises that do not hold, where copies differ by more than rounding explains."""
        found = self.exact[step].broken
        if not found:
            return []
        self.moved("double", 8)
        return [one for one in found if not self._is_rounding(step, one)]

    def _is_rounding(self, step: int, one: Broken) -> bool:
        amount = one.unequal.amount
        others = self._promises.get((step, one.number), [])
        # Noise moves what is rounding by as much as it is. A difference that stays is none.
        return bool(others) and max(abs(x - amount) for x in others) * 4 >= amount


def distances(a: Numbers, b: Numbers) -> Numbers:
    """The differences between numbers; infinite where only one of the two is NaN or infinite."""
    if a.dtype.kind in "biu" or b.dtype.kind in "biu":
        return np.abs(a.astype(np.float64) - b.astype(np.float64))
    with np.errstate(invalid="ignore"):
        difference: Any = np.abs(a - b)
    equal = (a == b) | ((a != a) & (b != b))
    return np.where(equal, 0.0, np.where(np.isnan(difference), np.inf, difference))
