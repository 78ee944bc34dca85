"""Over which mapped axes the values of a traced program may differ.

Inside a checked `shard_map` JAX's types say so, but for one thing: a `cond` or a loop whose predicate differs
between shards gives results that differ too, and JAX types them by what its branches return alone. Where
nothing is typed, the walk follows all of it from the arguments on.
"""

from collections.abc import Iterable, Sequence

from .._base import _compat as compat
from .._base import _jaxprs as jaxprs
from .._base._compat import ClosedJaxpr, Equation, Jaxpr, Operand
from .._base._types import NO_AXES, Axes, AxisName
from ._dataflow import Body, Dataflow
from ._reduction import Pending


class Differing(Dataflow[Axes]):
    """The axes over which a value may differ, in a program without types."""

    nothing = NO_AXES

    def join(self, facts: Iterable[Axes]) -> Axes:
        return NO_AXES.union(*facts)

    def plain(self, eqn: Equation, given: Sequence[Axes]) -> Sequence[Axes]:
        return [self.made(eqn, self.join(given))] * len(eqn.outvars)

    def made(self, eqn: Equation, given: Axes) -> Axes:
        """The same of a plain equation's results, given all axes of its operands."""
        if jaxprs.made_varying(eqn):  # In a program with types: the value stays as it is.
            return given
        joined, spread = jaxprs.collective(eqn)
        if not given & spread and jaxprs.permutes_all(eqn):
            return given
        return (given - joined) | spread

    def own_rule(self, eqn: Equation, given: Sequence[Axes]) -> Sequence[Axes] | None:
        pending = _pending(eqn)
        return None if pending is None else pending.results_differ(given)

    def chosen(
        self, predicate: Operand, of_predicate: Axes, results: list[Axes], same: Sequence[bool]
    ) -> list[Axes]:
        pairs = zip(results, same, strict=True)
        return [axes if one else axes | of_predicate for axes, one in pairs]


class _Hidden(Differing):
    """The axes over which a value may differ beyond those of its type."""

    def made(self, eqn: Equation, given: Axes) -> Axes:
        # What a collective reduces over, its operand was typed to vary over, and its result is not.
        typed = NO_AXES.union(*map(_typed, eqn.invars))
        return given - (typed - NO_AXES.union(*map(_typed, eqn.outvars)))

    def chosen(
        self, predicate: Operand, of_predicate: Axes, results: list[Axes], same: Sequence[bool]
    ) -> list[Axes]:
        return super().chosen(predicate, of_predicate | _typed(predicate), results, same)

    def result(self, var: Operand, fact: Axes) -> Axes:
        return fact - _typed(var)


class _Crossing(Differing):
    """Whether a value comes of the arguments; and the axes over which such a value crosses."""

    def __init__(self) -> None:
        self.crossed: set[AxisName] = set()

    def made(self, eqn: Equation, given: Axes) -> Axes:
        self.crossed.update(jaxprs.exchanged_by(eqn) if given else ())
        return given

    def own_rule(self, eqn: Equation, given: Sequence[Axes]) -> Sequence[Axes] | None:
        if (pending := _pending(eqn)) is None:
            return None
        self.crossed.update(pending.reduced_over if any(given) else ())
        return given[-(len(given) // 2) :]


def hidden_axes(jaxpr: Jaxpr) -> list[Axes]:
    """For each result of one shard's typed program, the axes over which it may differ beyond its type's."""
    return _Hidden().through(jaxpr, [NO_AXES] * len(jaxpr.invars))


def all_axes(jaxpr: Jaxpr, given: Sequence[Axes]) -> list[Axes]:
    """For each result of one instance's program, the axes over which it may differ.

    **Arguments:**

    - `given`: the same of its arguments.
    """
    return Differing().through(jaxpr, given)


def crossed(jaxpr: Jaxpr) -> Axes:
    """The axes over which what comes of a jaxpr's arguments passes from one instance to another."""
    walk = _Crossing()
    # Any axis will do to tell what comes of them.
    walk.through(jaxpr, [frozenset([""])] * len(jaxpr.invars))
    return frozenset(walk.crossed)


def settled(closed: ClosedJaxpr, given: Sequence[Axes], own: Axes) -> ClosedJaxpr:
    """A closed jaxpr without types in which what was `Pending` is decided.

    **Arguments:**

    - `closed`: the program of one instance.
    - `given`: the axes over which its arguments may differ.
    - `own`: the axes that are followed. What is pending over others waits for who knows of them.
    """
    return jaxprs.with_open(closed, _settled(jaxprs.open_jaxpr(closed), given, own))


def _settled(jaxpr: Jaxpr, given: Sequence[Axes], own: Axes) -> Jaxpr:
    if not _has_pending(jaxpr, own):
        return jaxpr
    walk = Differing()
    known: dict[Operand, Axes] = dict(zip(jaxpr.invars, given, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        operands = [walk.fact(known, atom) for atom in eqn.invars]
        results, bodies = walk.equation(eqn, operands)
        known.update(zip(eqn.outvars, results, strict=True))
        eqns.append(_settled_equation(eqn, operands, bodies, own))
    return jaxprs.with_equations(jaxpr, eqns)


def _settled_equation(
    eqn: Equation, operands: Sequence[Axes], bodies: Sequence[Body[Axes]], own: Axes
) -> Equation:
    pending = _pending(eqn)
    if pending is not None:
        return jaxprs.calling(pending.decided(operands), eqn) if pending.is_over(own) else eqn
    new = {id(body): _settled(body, given, own) for body, given in bodies}
    if jaxprs.with_own_derivative(eqn) and any(_is_own(e, own) for e in bodies[0][0].eqns):
        # What has been decided has the derivatives of what it is.
        (body,) = new.values()
        return jaxprs.calling(jaxprs.runs(body), eqn)
    return jaxprs.with_jaxprs(eqn, new)


def _pending(eqn: Equation) -> Pending | None:
    return getattr(jaxprs.rule_of(eqn), "pending", None)


def _is_own(eqn: Equation, own: Axes) -> bool:
    pending = _pending(eqn)
    return pending is not None and pending.is_over(own)


def _has_pending(jaxpr: Jaxpr, own: Axes) -> bool:
    return any(_is_own(eqn, own) for eqn in jaxprs.equations(jaxpr))


def _typed(atom: Operand) -> Axes:
    return compat.varying_type(atom.aval)
