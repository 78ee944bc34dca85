"""Gradients that are summed over shards a second time, found in a program whose values are typed."""

from typing import Any

from ._base import _compat as compat
from ._base._reduction import GRADIENT
from ._base._types import NO_AXES, Axes, AxisName


def summed_twice(jaxpr: Any) -> list[tuple[str, AxisName]]:
    """The gradients of which a sum is taken over an axis where `value_and_grad` has made them the same.

    Each by its name, with the axis. A mean of them changes nothing, and is let through.
    """
    found: list[tuple[str, AxisName]] = []
    # What is a gradient up to a constant factor, and the axes over which it was typed as varying anew.
    known: dict[Any, tuple[str, Axes]] = {}
    for eqn in jaxpr.eqns:
        for inner in compat.jaxprs_of(eqn):
            found += summed_twice(inner)
        name = compat.name_given(eqn) or ""
        if name.startswith(GRADIENT):
            known[eqn.outvars[0]] = name, NO_AXES
            continue
        operands = [v for v in eqn.invars if not compat.is_literal(v)]
        if compat.is_scaling(eqn) and len(operands) == 1 and operands[0] in known:
            name, axes = known[operands[0]]
            known[eqn.outvars[0]] = name, axes | compat.made_varying(eqn)
            continue
        for var, result in zip(eqn.invars, eqn.outvars, strict=False):
            if compat.is_sum(eqn) and not compat.is_literal(var) and var in known:
                name, axes = known[var]
                again = axes & compat.collective(eqn)[0]
                if again and not _is_mean(jaxpr, result):
                    found += [(name, axis) for axis in sorted(again, key=str)]
    return found


def _is_mean(jaxpr: Any, total: Any) -> bool:
    """Whether a sum over shards is divided by a number wherever it is used."""
    users = [eqn for eqn in jaxpr.eqns if any(v is total for v in eqn.invars)]
    return bool(users) and all(compat.is_division_by_number(eqn) for eqn in users)
