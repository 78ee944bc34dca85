"""Gradients that are summed over shards a second time, found in a traced program.

`value_and_grad` names each gradient that it has reduced. From there on the walk follows it through whatever
only scales it by a constant. A sum over an axis along which it is the same makes it too large, unless it is
divided by the number of shards, before or after: then it is a mean, which changes nothing.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from .._base import _jaxprs as jaxprs
from .._base import errors
from .._base._compat import Equation, Operand
from .._base._types import NO_AXES, Axes, AxisName
from ._dataflow import Dataflow
from ._differing import Differing
from ._equations import divisor, sizes_mapped, split_over
from ._reduction import GRADIENT, SUMMAND


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """A reduced gradient up to a constant factor, or a sum of such over shards.

    **Attributes:**

    - `name`: the one that `value_and_grad` has given it.
    - `differs`: the axes over which it may differ.
    - `divisors`: the whole numbers by which it has been divided, and their products.
    - `summed`: the axes over which it has been summed again.
    - `used`: whether anything else was made of that sum, so that no division can still make it a mean.
    """

    name: str
    differs: Axes
    divisors: frozenset[int] = frozenset()
    summed: Axes = NO_AXES
    used: bool = False


_Gradients: TypeAlias = frozenset[_Gradient]
_NONE: _Gradients = frozenset()


def has_gradients(names: Iterable[str]) -> bool:
    """Whether `value_and_grad` has reduced any gradient in a program that gives these names."""
    return any(name.startswith(GRADIENT) for name in names)


def check_sums(name: str, mapped: Equation) -> None:
    """Refuse a program of one shard that sums a gradient a second time.

    **Arguments:**

    - `name`: what the message calls the function.
    - `mapped`: the equation of its `shard_map`.

    **Raises:** `StatemeshError` that names each such gradient.
    """
    if found := summed_twice(mapped):
        raise errors.reduced_twice(name, found)


def summed_twice(mapped: Equation) -> list[tuple[str, AxisName]]:
    """The gradients of which the results hold a sum over an axis along which they were the same.

    Each by its name, with the axis.

    **Arguments:**

    - `mapped`: the equation of a `shard_map`.
    """
    body = jaxprs.open_jaxpr(mapped.params["jaxpr"])
    named = _Named()
    named.through(body, split_over(mapped))
    walk = _Sums(named.found, sizes_mapped(mapped))
    results = walk.join(walk.through(body, [_NONE] * len(body.invars)))
    return sorted({(one.name, axis) for one in results for axis in one.summed}, key=str)


class _Named(Differing):
    """It remembers over which axes the named gradients differ."""

    def __init__(self) -> None:
        self.found: dict[Operand, Axes] = {}

    def result(self, var: Operand, fact: Axes) -> Axes:
        fact = super().result(var, fact)
        # One variable stands for several values where a jaxpr is run by several equations.
        self.found[var] = self.found.get(var, NO_AXES) | fact
        return fact


class _Sums(Dataflow[_Gradients]):
    """The gradients that a value may be, and the sums that have gone into it.

    **Arguments:**

    - `differ`: the axes over which variables may differ.
    - `sizes`: of the axes that are mapped over.
    """

    nothing = _NONE

    def __init__(self, differ: Mapping[Operand, Axes], sizes: Mapping[AxisName, int]) -> None:
        self.differ = differ
        self.sizes = sizes
        self.total = math.prod(sizes.values())

    def join(self, facts: Iterable[_Gradients]) -> _Gradients:
        return _NONE.union(*facts)

    def plain(self, eqn: Equation, given: Sequence[_Gradients]) -> Sequence[_Gradients]:
        if _is_named(eqn):
            var = eqn.outvars[0]
            return [frozenset([_Gradient(eqn.params["name"], self.differ[var])])]
        if jaxprs.is_sum(eqn):
            over = frozenset(self.sizes) & jaxprs.collective(eqn)[0]
            return [self._summed(each, over) for each in given]
        by = divisor(eqn)
        if by is None or jaxprs.name_given(eqn) == SUMMAND:
            inner = [self.through(j, [_NONE] * len(j.invars)) for j in jaxprs.jaxprs_of(eqn)]
            made = self.join([*given, *map(self.join, inner)])
            used = frozenset(dataclasses.replace(one, used=True) for one in made if one.summed)
            return [used] * len(eqn.outvars)
        return [self._divided(self.join(given), by)]

    def _summed(self, given: _Gradients, over: Axes) -> _Gradients:
        found = set()
        for one in given:
            again = over - one.differs
            if one.summed:
                found.add(dataclasses.replace(one, used=True))
            elif not self._is_mean(one.divisors, again):
                found.add(dataclasses.replace(one, summed=again))
        return frozenset(found)

    def _divided(self, given: _Gradients, by: int) -> _Gradients:
        found = set()
        for one in given:
            products = {by * other for other in one.divisors | {1}}
            # No other number can ever be the one that makes a mean; so a loop does not go on for ever.
            kept = one.divisors | {k for k in products if k > 1 and self.total % k == 0}
            if one.used or not (one.summed and self._is_mean(kept, one.summed)):
                found.add(dataclasses.replace(one, divisors=kept))
        return frozenset(found)

    def _is_mean(self, divisors: frozenset[int], axes: Axes) -> bool:
        count = math.prod(self.sizes[axis] for axis in axes)
        return count == 1 or count in divisors


def _is_named(eqn: Equation) -> bool:
    return (jaxprs.name_given(eqn) or "").startswith(GRADIENT)
