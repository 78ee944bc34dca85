"""Over which mapped axes the values of a traced program may differ.

JAX's types say it inside a checked `shard_map`, but for one thing: a `cond`, or a loop, whose predicate
differs between shards gives results that do, and JAX types them by what its branches return alone. Where
nothing is typed, all of it is followed from the arguments on.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ._base import _compat as compat
from ._base import _jaxprs as jaxprs
from ._base._reduction import Pending
from ._base._types import NO_AXES, Axes, AxisName


def hidden_axes(jaxpr: Any, given: Sequence[Axes]) -> list[Axes]:
    """For each result of a typed jaxpr, the axes over which it may differ beyond those of its type.

    **Arguments:**

    - `jaxpr`: the program of one shard.
    - `given`: the same of its arguments.
    """
    return _Walk(_typed, _untouched_by_types).through(jaxpr, given)


def all_axes(jaxpr: Any, given: Sequence[Axes]) -> list[Axes]:
    """For each result of a jaxpr without types, the axes over which it may differ.

    **Arguments:**

    - `jaxpr`: the program of one instance.
    - `given`: the same of its arguments.
    """
    return _Walk(_no_types, _by_collectives).through(jaxpr, given)


def forwarded(jaxpr: Any, *, own_derivatives: bool = True) -> list[int | None]:
    """For each result of a jaxpr the argument whose value it is, if it is one unchanged.

    `own_derivatives`: through functions with a derivative of their own too, whose value may be that of the
    argument while its gradient is not.
    """
    known: dict[Any, int | None] = {var: i for i, var in enumerate(jaxpr.invars)}

    def source(atom: Any) -> int | None:
        return None if jaxprs.is_literal(atom) else known.get(atom)

    for eqn in jaxpr.eqns:
        for var, k in zip(eqn.outvars, _forwarding(eqn, own_derivatives), strict=True):
            known[var] = None if k is None else source(eqn.invars[k])
    return [source(var) for var in jaxpr.outvars]


def sources(x: Any, seen: dict[int, tuple[Any, list[int | None]]]) -> Iterator[Any]:
    """A value that is being traced, and all that it was, unchanged, before it came out of whatever runs other
    jaxprs: a `jit`, a `checkpoint`, a loop that carried it along.

    **Arguments:**

    - `x`: the value; of any other thing there is no more than itself.
    - `seen`: what earlier calls found of equations: empty at first.
    """
    yield x
    while (made := compat.made_by(x)) is not None:
        eqn, result = made
        if id(eqn) not in seen:
            seen[id(eqn)] = eqn, _forwarding(eqn, own_derivatives=False)
        operand = seen[id(eqn)][1][result]
        if operand is None:
            return
        yield (x := eqn.invars[operand])


def _forwarding(eqn: Any, own_derivatives: bool) -> list[int | None]:
    """For each result of an equation the operand that it is, if it is one unchanged."""
    if jaxprs.made_varying(eqn):
        return [0]
    if not own_derivatives and jaxprs.with_own_derivative(eqn):
        return [None] * len(eqn.outvars)
    match jaxprs.control_flow(eqn):
        case ("call", jaxpr):
            return forwarded(jaxpr, own_derivatives=own_derivatives)
        case ("cond", branches):
            first, *others = (
                forwarded(branch, own_derivatives=own_derivatives) for branch in branches
            )
            same = [k if all(k == o[i] for o in others) else None for i, k in enumerate(first)]
            return [None if k is None else 1 + k for k in same]
        case ("scan", body, consts, carry):
            own = range(consts, consts + carry)
            pairs = zip(forwarded(body, own_derivatives=own_derivatives), own, strict=False)
            kept = [k if k == mine else None for k, mine in pairs]
            return [*kept, *[None] * (len(eqn.outvars) - carry)]
    return [None] * len(eqn.outvars)


def crossed(jaxpr: Any) -> Axes:
    """The axes over which what comes of a jaxpr's arguments passes from one instance to another."""
    found: set[AxisName] = set()

    def plain(eqn: Any, seen: Axes) -> Axes:
        found.update(jaxprs.exchanged_by(eqn) if seen else ())
        return seen

    def pending(one: Pending, seen: Sequence[Axes]) -> Sequence[Axes]:
        found.update(one.reduced_over if any(seen) else ())
        return seen[-(len(seen) // 2) :]

    # Any axis will do to tell what comes of them.
    _Walk(_no_types, plain, pending).through(jaxpr, [frozenset([""])] * len(jaxpr.invars))
    return frozenset(found)


def _no_types(var: Any) -> Axes:
    return NO_AXES


def settled(closed: Any, given: Sequence[Axes], own: Axes) -> Any:
    """A closed jaxpr without types in which what was `Pending` is decided.

    **Arguments:**

    - `closed`: the program of one instance.
    - `given`: the axes over which its arguments may differ.
    - `own`: the axes that are followed. What is pending over others waits for who knows of them.
    """
    return jaxprs.with_open(closed, _settled(jaxprs.open_jaxpr(closed), given, own))


def _settled(jaxpr: Any, given: Sequence[Axes], own: Axes) -> Any:
    if not _has_pending(jaxpr, own):
        return jaxpr
    walk = _Walk(_no_types, _by_collectives)
    known: dict[Any, Axes] = dict(zip(jaxpr.invars, given, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        operands = [_known(known, var) for var in eqn.invars]
        results, bodies = walk.equation(eqn, operands)
        known.update(zip(eqn.outvars, results, strict=True))
        eqns.append(_settled_equation(eqn, operands, bodies, own))
    return jaxprs.with_equations(jaxpr, eqns)


def _settled_equation(
    eqn: Any, operands: Sequence[Axes], bodies: Sequence["_Body"], own: Axes
) -> Any:
    pending = _pending(eqn)
    if pending is not None:
        return jaxprs.calling(pending.decided(operands), eqn) if pending.is_over(own) else eqn
    new = {id(body): _settled(body, given, own) for body, given in bodies}
    if jaxprs.with_own_derivative(eqn) and any(_is_own(e, own) for e in bodies[0][0].eqns):
        # What has been decided has the derivatives of what it is.
        (body,) = new.values()
        return jaxprs.calling(jaxprs.runs(body), eqn)
    return jaxprs.with_jaxprs(eqn, new)


def _pending(eqn: Any) -> Pending | None:
    return getattr(jaxprs.rule_of(eqn), "pending", None)


def _is_own(eqn: Any, own: Axes) -> bool:
    pending = _pending(eqn)
    return pending is not None and pending.is_over(own)


def _has_pending(jaxpr: Any, own: Axes) -> bool:
    return any(_is_own(eqn, own) for eqn in jaxprs.equations(jaxpr))


def _untouched_by_types(eqn: Any, seen: Axes) -> Axes:
    # What a collective reduces over, its operand was typed to vary over, and its result is not.
    typed = NO_AXES.union(*map(_typed, eqn.invars))
    return seen - (typed - NO_AXES.union(*map(_typed, eqn.outvars)))


def _by_collectives(eqn: Any, seen: Axes) -> Axes:
    if jaxprs.made_varying(eqn):  # In a program with types: the value stays as it is.
        return seen
    joined, spread = jaxprs.collective(eqn)
    if not seen & spread and jaxprs.permutes_all(eqn):
        return seen
    return (seen - joined) | spread


def _by_pending(one: Pending, given: Sequence[Axes]) -> Sequence[Axes]:
    return one.results_differ(given)


def _typed(var: Any) -> Axes:
    return compat.varying_type(var.aval)


# A jaxpr, and the axes over which its arguments may differ.
_Body: TypeAlias = tuple[Any, list[Axes]]


@dataclasses.dataclass(frozen=True)
class _Walk:
    """A walk along a jaxpr.

    **Arguments:**

    - `typed`: the axes that a variable's type tells, which are not followed.
    - `plain`: what a plain equation makes of all axes of its operands.
    - `pending`: what a reduction that is pending makes of those of its operands.
    """

    typed: Callable[[Any], Axes]
    plain: Callable[[Any, Axes], Axes]
    pending: Callable[[Pending, Sequence[Axes]], Sequence[Axes]] = _by_pending

    def through(self, jaxpr: Any, given: Sequence[Axes]) -> list[Axes]:
        known: dict[Any, Axes] = dict(zip(jaxpr.invars, given, strict=True))
        for eqn in jaxpr.eqns:
            found, _ = self.equation(eqn, [_known(known, var) for var in eqn.invars])
            for var, axes in zip(eqn.outvars, found, strict=True):
                known[var] = axes - self.typed(var)
        return [_known(known, var) for var in jaxpr.outvars]

    def equation(self, eqn: Any, given: list[Axes]) -> tuple[Sequence[Axes], list[_Body]]:
        """What it makes of the axes of its operands; and the jaxprs that it runs, with those of theirs."""
        if (pending := _pending(eqn)) is not None:
            return self.pending(pending, given), []
        match jaxprs.control_flow(eqn):
            case ("cond", branches):
                found = self._cond(branches, given[0] | self.typed(eqn.invars[0]), given[1:])
                return found, [(branch, given[1:]) for branch in branches]
            case ("while", cond, body, cond_consts, body_consts):
                return self._while(cond, body, cond_consts, body_consts, given)
            case ("scan", body, consts, carry):
                return self._scan(body, consts, carry, given)
            case ("call", jaxpr):
                return self.through(jaxpr, given), [(jaxpr, given)]
        return [self.plain(eqn, NO_AXES.union(*given))] * len(eqn.outvars), []

    def _cond(self, branches: Sequence[Any], predicate: Axes, given: list[Axes]) -> list[Axes]:
        results = zip(*(self.through(branch, given) for branch in branches), strict=True)
        chosen = [
            predicate if len(set(sources)) > 1 or None in sources else NO_AXES
            for sources in zip(*map(_sources, branches), strict=True)
        ]
        return [NO_AXES.union(axes, *each) for axes, each in zip(chosen, results, strict=True)]

    def _while(
        self, cond: Any, body: Any, cond_consts: int, body_consts: int, given: list[Axes]
    ) -> tuple[list[Axes], list[_Body]]:
        first = cond_consts + body_consts
        carry = given[first:]
        kept = [source == body_consts + i for i, source in enumerate(_sources(body))]
        while True:
            of_cond = [*given[:cond_consts], *carry]
            of_body = [*given[cond_consts:first], *carry]
            (stop,) = self.through(cond, of_cond)
            stop |= self.typed(cond.outvars[0])
            after = self.through(body, of_body)
            grown = [
                old if same else old | new | stop
                for old, new, same in zip(carry, after, kept, strict=True)
            ]
            if grown == carry:
                return carry, [(cond, of_cond), (body, of_body)]
            carry = grown

    def _scan(
        self, body: Any, consts: int, carries: int, given: list[Axes]
    ) -> tuple[list[Axes], list[_Body]]:
        carry = given[consts : consts + carries]
        while True:
            of_body = [*given[:consts], *carry, *given[consts + carries :]]
            after = self.through(body, of_body)
            grown = [old | new for old, new in zip(carry, after[:carries], strict=True)]
            if grown == carry:
                return [*carry, *after[carries:]], [(body, of_body)]
            carry = grown


def _known(known: Mapping[Any, Axes], atom: Any) -> Axes:
    # A literal cannot be a key.
    return NO_AXES if jaxprs.is_literal(atom) else known.get(atom, NO_AXES)


def _sources(jaxpr: Any) -> list[int | None]:
    """For each result the argument that it is, if it is one as it came in."""
    numbers = {var: i for i, var in enumerate(jaxpr.invars)}
    return [None if jaxprs.is_literal(v) else numbers.get(v) for v in jaxpr.outvars]
