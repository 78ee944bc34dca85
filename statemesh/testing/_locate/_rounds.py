"""Inside loops and branches: the round in which values first stop being related, and what happens in it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .._program._jaxprs import Jaxpr, opened
from .._program._stacked import Scope, Stacked
from .._types import AnyLeaf
from ._comparison import Comparison
from ._flat import Program, Step, flat
from ._lines import Line
from ._relations import relation, whole
from ._suspects import lines_inside
from ._values import Evaluator, Values, is_key, on_all_shards


# A mistake shows in the first rounds.
_MOST_ROUNDS = 32


@dataclasses.dataclass(frozen=True)
class Inside:
    """What runs inside a loop or branch.

    **Attributes:**

    - `found`: the comparison of one round.
    - `round`: its number; `None` for a branch.
    """

    found: Comparison
    round: int | None


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop on one side."""

    body: Jaxpr
    consts: Sequence[Stacked]
    carry: Sequence[Stacked]
    scanned: Sequence[Stacked]
    rounds: Sequence[int]


def inside(found: Comparison, step: Step) -> Inside | None:
    """What happens inside a step of a comparison, if it is a loop or branch into which one can look."""
    other = found.partner(step)
    if other is None or step not in found.operands:
        return None
    mesh, one = found.operands[step]
    if step.name == "cond":
        branches = [_branch(a, values) for a, values in ((step, mesh), (other, one))]
        if branches[0] is None or branches[0] != branches[1]:
            return None
        bodies = [a.eqn.params["branches"][branches[0]] for a in (step, other)]
        given = [_all_shards(mesh[1:], step.scope), _all_shards(one[1:], other.scope)]
        return _as_inside(bodies, given, (step.scope, other.scope), step.line, None, found.wide)
    loops = [_loop(a, values) for a, values in ((step, mesh), (other, one))]
    if len(loops[0].rounds) != len(loops[1].rounds):
        return None
    return _first_round(loops, (step.scope, other.scope), step.line, found)


def _branch(step: Step, values: Sequence[Stacked]) -> int | None:
    """The number of the branch that all shards take."""
    taken = {int(k) for k in whole_numbers(values[0])}
    count = len(step.eqn.params["branches"])
    return min(max(taken.pop(), 0), count - 1) if len(taken) == 1 else None


def whole_numbers(value: Stacked) -> list[Any]:
    return list(jax.device_get(value.x).reshape(-1))


def _loop(step: Step, values: Sequence[Stacked]) -> _Loop:
    params = step.eqn.params
    if step.name == "while":
        first = params["cond_nconsts"] + params["body_nconsts"]
        consts = values[params["cond_nconsts"] : first]
        return _Loop(params["body_jaxpr"], consts, values[first:], (), range(_MOST_ROUNDS))
    inner = opened(params["jaxpr"])
    # What is scanned over has one axis more outside than inside; what is carried has as many.
    carries = _with_equal_ranks(step.eqn.outvars, inner.outvars)
    first = _with_equal_ranks(step.eqn.invars, inner.invars) - carries
    order = range(params["length"])
    return _Loop(
        params["jaxpr"],
        values[:first],
        values[first : first + carries],
        values[first + carries :],
        order[::-1] if params["reverse"] else order,
    )


def _with_equal_ranks(outer: Sequence[AnyLeaf], inner: Sequence[AnyLeaf]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)


def _all_shards(values: Sequence[Stacked], scope: Scope) -> list[Stacked]:
    """The values with a copy for each shard, so that all rounds have the same shapes."""
    return [
        scope.spread(value, scope.sizes)
        if is_key(value.x)
        else Stacked(on_all_shards(value, scope), tuple(scope.sizes))
        for value in values
    ]


def _first_round(
    loops: Sequence[_Loop], scopes: tuple[Scope, Scope], line: Line | None, around: Comparison
) -> Inside | None:
    """The first round that makes something unrelated."""
    sides = [
        _Side(loop, scope, line, around.wide) for loop, scope in zip(loops, scopes, strict=True)
    ]
    for number in loops[0].rounds[:_MOST_ROUNDS]:
        given = [side.given(number) for side in sides]
        results = [side.run(xs) for side, xs in zip(sides, given, strict=True)]
        for got, want in zip(*results, strict=True):
            if relation(got, whole(want), scopes[0], 0.0, around.unit(got)) is None:
                bodies = [loop.body for loop in loops]
                return _as_inside(bodies, given, scopes, line, number, around.wide)
    return None


class _Side:
    """A loop on one side, run round by round."""

    def __init__(self, loop: _Loop, scope: Scope, line: Line | None, wide: bool) -> None:
        self._scope = scope
        self._program = flat(loop.body, scope, line)
        self._evaluator = Evaluator(self._program, wide)
        self._consts = _all_shards(loop.consts, scope)
        self._carry = _all_shards(loop.carry, scope)
        self._scanned = _all_shards(loop.scanned, scope)

    def given(self, number: int) -> list[Stacked]:
        axes = tuple(self._scope.sizes)
        at = (slice(None),) * len(axes)
        scanned = [Stacked(value.x[(*at, number)], axes) for value in self._scanned]
        return [*self._consts, *self._carry, *scanned]

    def run(self, given: Sequence[Stacked]) -> list[Stacked]:
        """The results of a round, which the next round reads."""
        known = dict(zip(self._program.inputs, given, strict=True))
        for step in self._program.steps:
            self._evaluator.run_step(step, known)
        made = [self._evaluator.operand(x, known) for x in self._program.results]
        made = _all_shards(made, self._scope)
        self._carry = made[: len(self._carry)]
        return made


def _as_inside(
    bodies: Sequence[Jaxpr],
    given: Sequence[Sequence[Stacked]],
    scopes: tuple[Scope, Scope],
    line: Line | None,
    number: int | None,
    wide: bool,
) -> Inside | None:
    mesh, one = (flat(body, scope, line) for body, scope in zip(bodies, scopes, strict=True))
    values = _named(mesh, given[0]), _named(one, given[1])
    found = Comparison(mesh, one, scopes[0], values, wide)
    return None if all(result.right for result in found.results) else Inside(found, number)


def _named(program: Program, given: Sequence[Stacked]) -> Values:
    return dict(zip(program.inputs, given, strict=True))


def lines_of_carry(found: Comparison, step: Step) -> list[Line]:
    """The lines in a loop that make nothing but those of its results that differ.

    That tells something where the loop has more rounds on a mesh, so that rounds cannot be compared.
    """
    other = found.partner(step)
    if other is None or step.name not in ("scan", "while") or step not in found.operands:
        return []
    loops = [
        _loop(a, values) for a, values in zip((step, other), found.operands[step], strict=True)
    ]
    if step.name == "scan" and len(loops[0].rounds) == len(loops[1].rounds):
        return []
    program = flat(loops[0].body, step.scope, step.line)
    wrong = {k for k, x in enumerate(step.results) if found.relations[x] is None}
    return [line for line in lines_inside(program, wrong) if line != step.line]
