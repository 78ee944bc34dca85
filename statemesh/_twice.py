"""Gradients that are summed over shards a second time, found in a program whose values are typed."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ._base import _jaxprs as jaxprs
from ._base._reduction import GRADIENT
from ._base._types import NO_AXES, Axes, AxisName


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """A value that is a reduced gradient, up to a constant factor."""

    name: str
    factor: float = 1.0
    # The axes over which it was typed as varying anew.
    axes: Axes = NO_AXES


def summed_twice(jaxpr: Any, sizes: Mapping[AxisName, int]) -> list[tuple[str, AxisName]]:
    """The gradients of which a sum is taken over an axis where `value_and_grad` has made them the same.

    Each by its name, with the axis. A sum that is divided by the number of shards is a mean: it changes
    nothing, and is let through.

    **Arguments:**

    - `jaxpr`: what one shard runs.
    - `sizes`: of the mesh axes.
    """
    search = _Search(sizes)
    search.through(jaxpr, [None] * len(jaxpr.invars))
    return list(dict.fromkeys(search.found))


class _Search:
    def __init__(self, sizes: Mapping[AxisName, int]) -> None:
        self.sizes = sizes
        self.found: list[tuple[str, AxisName]] = []

    def through(self, jaxpr: Any, given: Sequence[_Gradient | None]) -> list[_Gradient | None]:
        """Which results are gradients, given which arguments are."""
        known: dict[Any, _Gradient | None] = dict(zip(jaxpr.invars, given, strict=True))

        def gradient(atom: Any) -> _Gradient | None:
            return None if jaxprs.is_literal(atom) else known.get(atom)

        for eqn in jaxpr.eqns:
            operands = [gradient(atom) for atom in eqn.invars]
            if jaxprs.is_sum(eqn):
                for one, total in zip(operands, eqn.outvars, strict=False):
                    if one is not None:
                        self._look(one, jaxprs.collective(eqn)[0], jaxpr, total)
            else:
                known.update(zip(eqn.outvars, self._results(eqn, operands), strict=True))
        return [gradient(atom) for atom in jaxpr.outvars]

    def _results(
        self, eqn: Any, operands: Sequence[_Gradient | None]
    ) -> Sequence[_Gradient | None]:
        name = jaxprs.name_given(eqn) or ""
        if name.startswith(GRADIENT):
            return [_Gradient(name)]
        nothing: list[_Gradient | None] = [None] * len(eqn.outvars)
        match jaxprs.control_flow(eqn):
            case ("call", body) | ("scan", body, _, _):
                return self.through(body, operands)
            case ("cond", branches):
                first, *_ = [self.through(branch, operands[1:]) for branch in branches]
                return first
        for inner in jaxprs.jaxprs_of(eqn):
            self.through(inner, [None] * len(inner.invars))
        factor, ones = jaxprs.scaling(eqn), [one for one in operands if one is not None]
        if factor is None or not ones:
            return nothing
        axes = ones[0].axes | jaxprs.made_varying(eqn)
        return [dataclasses.replace(ones[0], factor=ones[0].factor * factor, axes=axes)]

    def _look(self, one: _Gradient, over: Axes, jaxpr: Any, total: Any) -> None:
        again = sorted(one.axes & over, key=str)
        count = math.prod(self.sizes[axis] for axis in again) * one.factor
        if again and not _is_one(count) and not self._is_mean(jaxpr, total, count):
            self.found += [(one.name, axis) for axis in again]

    def _is_mean(self, jaxpr: Any, total: Any, count: float) -> bool:
        """Whether `count` times a gradient becomes that gradient wherever it is used."""
        users = [eqn for eqn in jaxpr.eqns if any(v is total for v in eqn.invars)]
        factors = [jaxprs.scaling(eqn) for eqn in users]
        return bool(users) and all(
            factor is not None
            and (
                _is_one(count * factor)
                or (factor == 1 and self._is_mean(jaxpr, eqn.outvars[0], count))
            )
            for eqn, factor in zip(users, factors, strict=True)
        )


def _is_one(factor: float) -> bool:
    # Numbers in a program are rounded, to as few digits as bfloat16 has.
    return math.isclose(abs(factor), 1, rel_tol=1e-2)
