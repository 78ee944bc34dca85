"""Which arguments of a traced program its results continue, by the links in it."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from ._base import _jaxprs as jaxprs
from ._base._links import REBUILT, link_made


# Numbers of arguments: none where nothing is known, several where it may be any of them.
Sources: TypeAlias = frozenset[int]
_NOTHING: Sources = frozenset()


def continued(jaxpr: Any) -> list[Sources]:
    """For each result of a jaxpr the arguments that it may continue."""
    known: dict[Any, Sources] = {var: frozenset([i]) for i, var in enumerate(jaxpr.invars)}

    def sources(atom: Any) -> Sources:
        return _NOTHING if jaxprs.is_literal(atom) else known.get(atom, _NOTHING)

    for eqn in jaxpr.eqns:
        found = _results(eqn, [sources(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, found, strict=True))
    return [sources(atom) for atom in jaxpr.outvars]


def _results(eqn: Any, operands: Sequence[Sources]) -> Sequence[Sources]:
    if (link := link_made(eqn)) is not None:
        new, old = operands
        # A `cond` that returns one state or another is rebuilt as the one that its first branch returns.
        return [old | new if link == REBUILT else old]
    match jaxprs.control_flow(eqn):
        case ("call", jaxpr):
            return _through(jaxpr, operands)
        case ("cond", branches):
            found = [_through(branch, operands[1:]) for branch in branches]
            return [_union(each) for each in zip(*found, strict=True)]
        case ("while", _, body, cond_consts, body_consts):
            first = cond_consts + body_consts
            return _loop(body, operands[cond_consts:first], operands[first:], ())
        case ("scan", body, consts, carries):
            last = consts + carries
            carry = _loop(body, operands[:consts], operands[consts:last], operands[last:])
            return [*carry, *[_NOTHING] * (len(eqn.outvars) - carries)]
    inner = jaxprs.jaxprs_of(eqn)
    if [(len(j.invars), len(j.outvars)) for j in inner] == [(len(operands), len(eqn.outvars))]:
        return _through(inner[0], operands)
    if len(eqn.outvars) == 1 and jaxprs.forwards(eqn):
        return [_union(operands)]
    return [_NOTHING] * len(eqn.outvars)


def _through(jaxpr: Any, operands: Sequence[Sources]) -> list[Sources]:
    """The results of an inner jaxpr, in numbers of the outer one's arguments."""
    return [_union(operands[i] for i in inner) for inner in continued(jaxpr)]


def _loop(
    body: Any, consts: Sequence[Sources], carry: Sequence[Sources], scanned: Sequence[Sources]
) -> list[Sources]:
    """What a loop carries, after any number of rounds."""
    inner = continued(body)[: len(carry)]
    found = list(carry)
    while True:
        operands = [*consts, *found, *scanned]
        grown = [
            old | _union(operands[i] for i in of) for old, of in zip(found, inner, strict=True)
        ]
        if grown == found:
            return found
        found = grown


def _union(several: Iterable[Sources]) -> Sources:
    return _NOTHING.union(*several)
