"""Over which mapped axes the values of a traced program may differ.

Inside a checked `shard_map` JAX's types say so, but some of its rules lose it: those of `sort`, of callbacks,
of a `cond` or a loop whose predicate differs between shards. So a value differs where its type says so, and
also where the program shows it. Where nothing is typed, the program alone shows it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from .._base import _compat as compat
from .._base import _jaxprs as jaxprs
from .._base._compat import ClosedJaxpr, Equation, Jaxpr, Operand
from .._base._types import NO_AXES, Axes, AxisName
from ._dataflow import Body, Dataflow
from ._reduction import Pending


class Differing(Dataflow[Axes]):
    """The axes over which a value may differ, whatever its type says."""

    nothing = NO_AXES

    def join(self, facts: Iterable[Axes]) -> Axes:
        return NO_AXES.union(*facts)

    def plain(self, eqn: Equation, given: Sequence[Axes]) -> Sequence[Axes]:
        return [
            self.made(eqn, self.join(given[k] for k in operands))
            for operands in jaxprs.operands_of_results(eqn)
        ]

    def made(self, eqn: Equation, given: Axes) -> Axes:
        """The same of a plain equation's result, given all axes of the operands that it depends on."""
        if jaxprs.made_varying(eqn):  # In a program with types: the value stays as it is.
            return given
        joined, spread = jaxprs.collective(eqn)
        if not given & spread and jaxprs.permutes_all(eqn):
            return given
        return (given - joined - _joined_unseen(eqn)) | spread

    def own_rule(self, eqn: Equation, given: Sequence[Axes]) -> Sequence[Axes] | None:
        if (pending := _pending(eqn)) is not None:
            return pending.results_differ(given)
        body = jaxprs.mapped_by_rule(eqn)
        return None if body is None else self.through(body, given)

    def result(self, var: Operand, fact: Axes) -> Axes:
        # The parts of a sum that is still to be added up leave as the one sum.
        return fact - compat.unreduced_type(var.aval)

    def chosen(
        self, predicate: Operand, of_predicate: Axes, results: list[Axes], same: Sequence[bool]
    ) -> list[Axes]:
        pairs = zip(results, same, strict=True)
        return [axes if one else axes | of_predicate for axes, one in pairs]


@dataclasses.dataclass(frozen=True)
class _Whole:
    """Marks an axis over which a value comes of what an `all_gather` made whole there."""

    axis_name: AxisName


class Gathered(Differing):
    """The axes over which a value may differ; and by marks those over which it comes of an `all_gather`.

    A value that has the mark of an axis, and does not differ over it, is one value on all shards although its
    type says that it may differ. So is what a cast typed, but that cast is the word of whoever wrote it.
    """

    def made(self, eqn: Equation, given: Axes) -> Axes:
        gathered = jaxprs.gathered_by(eqn)
        # The types of what other collectives join say that it is the same.
        joined = NO_AXES if jaxprs.made_varying(eqn) else jaxprs.collective(eqn)[0] - gathered
        left = super().made(eqn, given) - frozenset(map(_Whole, joined))
        return left | frozenset(map(_Whole, gathered))


def whole_over(fact: Axes) -> Axes:
    """The axes over which a value that `Gathered` knows of is the same because it was gathered."""
    return frozenset(one.axis_name for one in fact if isinstance(one, _Whole)) - fact


class Recorded:
    """The axes over which values may differ that are being recorded into a program with types.

    It walks back from a value along the equations that made it, and knows those that it has walked.
    """

    def __init__(self, walk: Differing | None = None) -> None:
        self._walk = Differing() if walk is None else walk
        # By the identity of the equation, which is kept: another one could get its identity.
        self._results: dict[int, tuple[Equation, Sequence[Axes]]] = {}

    def of(self, x: Any) -> Axes:
        """The axes over which `x` may differ, by what made it; by its type if that is not recorded."""
        value = compat.recorded_value(x)
        # Not by recursion: a program may be longer than Python's stack is deep.
        stack = [value]
        while stack:
            made = compat.made_by(stack[-1])
            if made is None or id(made[0]) in self._results:
                stack.pop()
                continue
            eqn, _ = made
            if unknown := [operand for operand in eqn.invars if self._fact(operand) is None]:
                stack += unknown
                continue
            given = [self._fact(operand) or NO_AXES for operand in eqn.invars]
            found, _ = self._walk.equation(eqn, given)
            axes = list(map(self._walk.result, eqn.outvars, found))
            self._results[id(eqn)] = eqn, axes
        # A `vmap` that spreads its lanes over a mesh axis takes that axis out of the types of what it maps.
        return (self._fact(value) or NO_AXES) - (_typed(value) - _typed(x))

    def _fact(self, x: Any) -> Axes | None:
        """What is known of a value; `None` before its equation was walked."""
        made = compat.made_by(x)
        if made is None:
            # An input has the right type, and a constant has no axes.
            return _typed(x)
        eqn, result = made
        return self._results[id(eqn)][1][result] if id(eqn) in self._results else None


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


def _joined_unseen(eqn: Equation) -> Axes:
    """The axes over which code that no jaxpr shows makes equal what differs, by its types alone."""
    if not jaxprs.is_opaque(eqn):
        return NO_AXES
    typed = NO_AXES.union(*map(_typed, eqn.invars))
    return typed - NO_AXES.union(*map(_typed, eqn.outvars))


def _typed(x: Any) -> Axes:
    return compat.varying_type(getattr(x, "aval", None))
