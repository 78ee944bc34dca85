"""On which arguments each result of a traced program depends, and from which it draws random numbers."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ._jaxprs import Equation, Jaxpr, draws, is_draw, is_literal, opened


# The numbers of the arguments of the whole program that a value depends on.
Sources: TypeAlias = frozenset[int]
NONE: Sources = frozenset()


def sources_of(jaxpr: Jaxpr) -> list[Sources]:
    """The numbers of the arguments that each result depends on other than by drawing from them."""
    jaxpr = opened(jaxpr)
    return _flow(jaxpr, [frozenset([k]) for k in range(len(jaxpr.invars))])[0]


def drawn_arguments(jaxpr: Jaxpr) -> frozenset[int]:
    """The numbers of the arguments that are, or hold, keys from which the program draws.

    In a loop whose carries change their places, an argument too many can be named.
    """
    jaxpr = opened(jaxpr)
    _, drawn = _flow(jaxpr, [frozenset([k]) for k in range(len(jaxpr.invars))])
    return drawn


def _flow(jaxpr: Jaxpr, given: Sequence[Sources]) -> tuple[list[Sources], Sources]:
    """What each result depends on, up to the numbers that are drawn; and what is drawn from."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    drawn = NONE
    for eqn in jaxpr.eqns:
        sources = [NONE if is_literal(x) else known.get(x, NONE) for x in eqn.invars]
        if is_draw(eqn):
            drawn = drawn.union(*sources)
            continue
        results, more = _through(eqn, sources)
        drawn |= more
        known.update(zip(eqn.outvars, results, strict=True))
    outs = [NONE if is_literal(x) else known.get(x, NONE) for x in jaxpr.outvars]
    return outs, drawn


def _through(eqn: Equation, sources: list[Sources]) -> tuple[list[Sources], Sources]:
    every = NONE.union(*sources)
    inner = [
        opened(one)
        for value in eqn.params.values()
        for one in (value if isinstance(value, tuple) else (value,))
        if hasattr(one, "eqns")
    ]
    if not inner:
        return [every] * len(eqn.outvars), NONE
    unknown = every if any(map(draws, inner)) else NONE
    # A branch gets all operands but the first; what is called, or scanned, gets all.
    operands = sources[1:] if eqn.primitive.name == "cond" else sources
    outs, drawn = [NONE] * len(eqn.outvars), NONE
    for jaxpr in inner:
        if len(jaxpr.invars) != len(operands) or len(jaxpr.outvars) != len(outs):
            return [every] * len(outs), unknown
        if eqn.primitive.name == "scan":
            operands = _carried(eqn, jaxpr, operands)
        results, more = _flow(jaxpr, operands)
        outs, drawn = [a | b for a, b in zip(outs, results, strict=True)], drawn | more
    return outs, drawn


def _carried(eqn: Equation, jaxpr: Jaxpr, operands: list[Sources]) -> list[Sources]:
    """What the operands of a scan depend on once its carries have gone round."""
    # What is looped over has one axis more outside; versions of JAX store the count of carries differently.
    count = _with_equal_ranks(eqn.outvars, jaxpr.outvars)
    first = _with_equal_ranks(eqn.invars, jaxpr.invars) - count
    while True:
        results, _ = _flow(jaxpr, operands)
        carries = [
            a | b for a, b in zip(operands[first : first + count], results[:count], strict=True)
        ]
        new = [*operands[:first], *carries, *operands[first + count :]]
        if new == operands:
            return new
        operands = new


def _with_equal_ranks(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(np.ndim(x.aval) == np.ndim(y.aval) for x, y in pairs)
