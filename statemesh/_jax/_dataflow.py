"""Walks along a jaxpr and all jaxprs that it runs, and the equations that they look for."""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from . import _compat as compat
from . import _jaxprs as jaxprs
from ._compat import Equation, Jaxpr, Operand
from ._jaxprs import AnyJaxpr


def shard_map_equation(jaxpr: AnyJaxpr) -> Equation | None:
    """The equation of the `shard_map` in a program that maps something; `None` if there is none."""
    return next((eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"), None)


def shard_map_recorded(outputs: Iterable[Any]) -> Equation | None:
    """The same of a `shard_map` that has just been recorded into an outer jaxpr, by its outputs."""
    # What transforms the recorded program (`grad`, `vmap`) holds the tracer that records it.
    for layer in (layer for x in outputs for layer in compat.layers(x)):
        if (maker := compat.made_by(layer)) is not None:
            return maker[0] if maker[0].primitive.name == "shard_map" else None
    return None


# Primitives whose one result is their one operand but for its sign, dtype, shape or type.
_UNSCALED = (
    "pvary",
    "name",
    "copy",
    "neg",
    "convert_element_type",
    "reshape",
    "broadcast_in_dim",
    "squeeze",
)


def divisor(eqn: Equation) -> int | None:
    """The whole number by which an equation divides its one operand, if it only scales that by a constant.

    1 where the constant is another one, or where the equation changes no more than the dtype, shape or type.
    `None` where it does anything else.
    """
    name = eqn.primitive.name
    literals = [v for v in eqn.invars if isinstance(v, compat.core.Literal)]
    if name in _UNSCALED:
        return 1
    if name not in ("mul", "div") or len(literals) != 1 or np.ndim(literals[0].val) != 0:
        return None
    number = np.asarray(literals[0].val, literals[0].aval.dtype)
    if name == "div" and literals[0] is eqn.invars[0]:
        return None
    factor = abs(complex(number))
    if not factor or not math.isfinite(factor):
        return 1
    whole = round(factor if name == "div" else 1 / factor)
    # Numbers are rounded to the digits of their dtype: so is what they are compared with.
    written = number.dtype.type(whole if name == "div" else 1 / max(whole, 1))
    return whole if whole and written == number else 1


Fact = TypeVar("Fact")

# An inner jaxpr, and what is known of its arguments.
Body: TypeAlias = tuple[Jaxpr, Sequence[Fact]]


class Dataflow(Generic[Fact]):
    """What is known of the results of a jaxpr, given what is known of its arguments.

    The walk knows how the operands of `cond`, `while`, `scan` and calls map to the arguments of the jaxprs
    that these run, and repeats a loop until what is known of its carry no longer changes. A subclass says
    what the facts are.
    """

    # Of literals and constants.
    nothing: Fact

    def join(self, facts: Iterable[Fact]) -> Fact:
        """What is known of a value that may be any of several."""
        raise NotImplementedError

    def plain(self, eqn: Equation, facts: Sequence[Fact]) -> Sequence[Fact]:
        """The facts of the results of an equation that runs no other jaxpr."""
        raise NotImplementedError

    def own_rule(self, eqn: Equation, facts: Sequence[Fact]) -> Sequence[Fact] | None:
        """The same of any equation, before the jaxprs that it runs are looked at; `None` to look at them."""
        return None

    def chosen(
        self, predicate: Operand, of_predicate: Fact, results: list[Fact], same: Sequence[bool]
    ) -> list[Fact]:
        """The results of a `cond` or of a round of a `while`, given what is known of its predicate.

        **Arguments:**

        - `same`: for each result whether it is the same argument whatever the predicate is.
        """
        return results

    def result(self, var: Operand, fact: Fact) -> Fact:
        """What is kept of a fact about a variable."""
        return fact

    def part(self, whole: Fact) -> Fact:
        """The fact about one entry of an array that a `scan` loops over, from that about the array."""
        return whole

    def stacked(self, part: Fact) -> Fact:
        """The fact about an array that a `scan` stacks, from that about the result of one step."""
        return part

    def through(self, jaxpr: Jaxpr, facts: Sequence[Fact]) -> list[Fact]:
        """The facts of a jaxpr's results."""
        known: dict[Operand, Fact] = dict(zip(jaxpr.invars, facts, strict=True))
        for eqn in jaxpr.eqns:
            results, _ = self.equation(eqn, [self.fact(known, atom) for atom in eqn.invars])
            for var, fact in zip(eqn.outvars, results, strict=True):
                known[var] = self.result(var, fact)
        return [self.fact(known, atom) for atom in jaxpr.outvars]

    def fact(self, known: dict[Operand, Fact], atom: Operand) -> Fact:
        # A literal cannot be a key.
        return self.nothing if jaxprs.is_literal(atom) else known.get(atom, self.nothing)

    def equation(
        self, eqn: Equation, facts: Sequence[Fact]
    ) -> tuple[Sequence[Fact], Sequence[Body[Fact]]]:
        """The facts of an equation's results; and the jaxprs that it runs, with those of their arguments."""
        if (results := self.own_rule(eqn, facts)) is not None:
            return results, []
        match jaxprs.control_flow(eqn):
            case ("call", jaxpr):
                return self.through(jaxpr, facts), [(jaxpr, facts)]
            case ("cond", branches):
                return self._cond(eqn.invars[0], branches, facts[0], facts[1:])
            case ("while", cond, body, cond_consts, body_consts):
                return self._while(cond, body, cond_consts, body_consts, facts)
            case ("scan", body, consts, carry):
                return self._scan(body, consts, carry, facts)
        return self.plain(eqn, facts), []

    def _cond(
        self,
        predicate: Operand,
        branches: Sequence[Jaxpr],
        of_predicate: Fact,
        facts: Sequence[Fact],
    ) -> tuple[list[Fact], list[Body[Fact]]]:
        results = zip(*(self.through(branch, facts) for branch in branches), strict=True)
        returned = zip(*map(arguments_returned, branches), strict=True)
        same = [None not in numbers and len(set(numbers)) == 1 for numbers in returned]
        joined = [self.join(each) for each in results]
        chosen = self.chosen(predicate, of_predicate, joined, same)
        return chosen, [(branch, facts) for branch in branches]

    def _while(
        self, cond: Jaxpr, body: Jaxpr, cond_consts: int, body_consts: int, facts: Sequence[Fact]
    ) -> tuple[list[Fact], list[Body[Fact]]]:
        first = cond_consts + body_consts
        carry = list(facts[first:])
        same = [k == body_consts + i for i, k in enumerate(arguments_returned(body))]
        while True:
            of_cond = [*facts[:cond_consts], *carry]
            of_body = [*facts[cond_consts:first], *carry]
            (stop,) = self.through(cond, of_cond)
            after = self.chosen(cond.outvars[0], stop, self.through(body, of_body), same)
            grown = [self.join(pair) for pair in zip(carry, after, strict=True)]
            if grown == carry:
                return carry, [(cond, of_cond), (body, of_body)]
            carry = grown

    def _scan(
        self, body: Jaxpr, consts: int, carries: int, facts: Sequence[Fact]
    ) -> tuple[list[Fact], list[Body[Fact]]]:
        carry = list(facts[consts : consts + carries])
        parts = list(map(self.part, facts[consts + carries :]))
        while True:
            of_body = [*facts[:consts], *carry, *parts]
            after = self.through(body, of_body)
            grown = [self.join(pair) for pair in zip(carry, after[:carries], strict=True)]
            if grown == carry:
                return [*carry, *map(self.stacked, after[carries:])], [(body, of_body)]
            carry = grown


Item = TypeVar("Item", bound=Hashable)


class DataflowOfSets(Dataflow[frozenset[Item]]):
    """A walk that knows a set of each value: of one that may be any of several the sets of all of them."""

    nothing: frozenset[Item] = frozenset()

    def join(self, facts: Iterable[frozenset[Item]]) -> frozenset[Item]:
        return self.nothing.union(*facts)


def arguments_returned(jaxpr: Jaxpr) -> list[int | None]:
    """For each result of a jaxpr the number of the argument that it is, if no equation made it."""
    numbers: dict[Operand, int] = {var: i for i, var in enumerate(jaxpr.invars)}
    return [None if jaxprs.is_literal(v) else numbers.get(v) for v in jaxpr.outvars]


# The number of the argument that a value is; or, in a `scan`, of which other value it is an entry, and how
# many loops stand around it.
_Same: TypeAlias = "int | tuple[_Same, int] | None"


class _Forwarded(Dataflow[_Same]):
    """The number of the argument that a value is, unchanged.

    **Arguments:**

    - `own_derivatives`: whether to look through functions with a derivative of their own too, whose value may
        be that of an argument while its gradient is not.
    """

    nothing = None

    def __init__(self, own_derivatives: bool) -> None:
        self.own_derivatives = own_derivatives
        self.loops = 0

    def join(self, facts: Iterable[_Same]) -> _Same:
        first, *others = set(facts)
        return None if others else first

    def plain(self, eqn: Equation, facts: Sequence[_Same]) -> Sequence[_Same]:
        return facts if jaxprs.made_varying(eqn) else [None] * len(eqn.outvars)

    def own_rule(self, eqn: Equation, facts: Sequence[_Same]) -> Sequence[_Same] | None:
        if self.own_derivatives or not jaxprs.with_own_derivative(eqn):
            return None
        return [None] * len(eqn.outvars)

    def _scan(
        self, body: Jaxpr, consts: int, carries: int, facts: Sequence[_Same]
    ) -> tuple[list[_Same], list[Body[_Same]]]:
        self.loops += 1
        results = super()._scan(body, consts, carries, facts)
        self.loops -= 1
        return results

    def part(self, whole: _Same) -> _Same:
        return None if whole is None else (whole, self.loops)

    def stacked(self, part: _Same) -> _Same:
        # Of this loop, and not of one around it, whose entry is the same at every step.
        return part[0] if isinstance(part, tuple) and part[1] == self.loops else None


def _whole(fact: _Same) -> int | None:
    """The argument that a value outside of all loops is. There no value is an entry of another."""
    return fact if isinstance(fact, int) else None


def forwarded(jaxpr: Jaxpr) -> list[int | None]:
    """For each result of a jaxpr the number of the argument whose value it is, if it is one unchanged."""
    numbers = _Forwarded(own_derivatives=True).through(jaxpr, range(len(jaxpr.invars)))
    return list(map(_whole, numbers))


def sources(x: Any, seen: dict[int, tuple[Any, list[int | None]]]) -> Iterator[Any]:
    """A value that is being traced, and all that it was, unchanged, before it came out of whatever runs other
    jaxprs: a `jit`, a `checkpoint`, a loop that carried it along.

    **Arguments:**

    - `x`: the value. For anything that is not traced it gives that thing alone.
    - `seen`: what earlier calls found of equations: empty at first.
    """
    yield x
    while (maker := compat.made_by(x)) is not None:
        eqn, result = maker
        if id(eqn) not in seen:
            walk = _Forwarded(own_derivatives=False)
            operands, _ = walk.equation(eqn, range(len(eqn.invars)))
            seen[id(eqn)] = eqn, list(map(_whole, operands))
        operand = seen[id(eqn)][1][result]
        if operand is None:
            return
        yield (x := eqn.invars[operand])
