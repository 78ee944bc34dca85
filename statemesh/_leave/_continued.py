"""Which arguments of a traced program its results continue, by the links in it."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from .._axes._dataflow import Dataflow
from .._base import _jaxprs as jaxprs
from .._base._compat import Equation, Jaxpr
from .._base._links import REBUILT, link_made


# Numbers of arguments: none where nothing is known, several where it may be any of them.
Sources: TypeAlias = frozenset[int]
_NOTHING: Sources = frozenset()


class _Continued(Dataflow[Sources]):
    """The arguments that a value may continue."""

    nothing = _NOTHING

    def join(self, facts: Iterable[Sources]) -> Sources:
        return _NOTHING.union(*facts)

    def own_rule(self, eqn: Equation, given: Sequence[Sources]) -> Sequence[Sources] | None:
        if (link := link_made(eqn)) is None:
            return None
        new, old = given
        # A `cond` that returns one state or another is rebuilt as the one that its first branch returns.
        return [old | new if link == REBUILT else old]

    def plain(self, eqn: Equation, given: Sequence[Sources]) -> Sequence[Sources]:
        inner = jaxprs.jaxprs_of(eqn)
        if [(len(j.invars), len(j.outvars)) for j in inner] == [(len(given), len(eqn.outvars))]:
            return self.through(inner[0], given)
        if len(eqn.outvars) == 1 and jaxprs.forwards(eqn):
            return [self.join(given)]
        return [_NOTHING] * len(eqn.outvars)

    def stacked(self, part: Sources) -> Sources:
        return _NOTHING


def continued(jaxpr: Jaxpr) -> list[Sources]:
    """For each result of a jaxpr the arguments that it may continue."""
    return _Continued().through(jaxpr, [frozenset([i]) for i in range(len(jaxpr.invars))])
