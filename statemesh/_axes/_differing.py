"""Over which mapped axes values of a traced program may differ, and gradients summed twice or not at all."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, TypeAlias

from jax.ad_checkpoint import checkpoint_name

from .._base._errors import StatemeshError, error_listing
from .._base._specs import written_axes
from .._base._types import NO_AXES, Array, Axes, AxisName
from .._jax import _compat as compat
from .._jax import _jaxprs as jaxprs
from .._jax._compat import ClosedJaxpr, Equation, Jaxpr, Operand
from .._jax._dataflow import Body, DataflowOfSets, divisor
from ._reduction import GRADIENT, SUMMAND, Pending


@dataclasses.dataclass(frozen=True)
class _Whole:
    """Marks an axis over which a value depends on what an `all_gather` made whole there."""

    axis_name: AxisName


class Differing(DataflowOfSets[AxisName]):
    """The axes over which a value may differ, whatever its type says; and marks of what was gathered.

    A value that has the mark of an axis, and does not differ over it, is one value on all shards although its
    type says that it may differ. A value that was cast to vary is one value too, but whoever wrote the cast
    asked for a type that varies.
    """

    def plain(self, eqn: Equation, facts: Sequence[Axes]) -> Sequence[Axes]:
        return [
            self.plain_result(eqn, self.join(facts[k] for k in operands))
            for operands in jaxprs.operands_of_results(eqn)
        ]

    def plain_result(self, eqn: Equation, fact: Axes) -> Axes:
        """What is known of a plain equation's result, from the facts of all operands that it depends on."""
        if jaxprs.made_varying(eqn):  # In a program with types: the value stays as it is.
            return fact
        joined, spread = jaxprs.collective(eqn)
        if not fact & spread and jaxprs.permutes_all(eqn):
            return fact
        # The types of what other collectives join say that it is the same.
        gathered = jaxprs.gathered_by(eqn)
        typed_same = frozenset(map(_Whole, joined - gathered))
        left = fact - joined - _joined_unseen(eqn) - typed_same
        return left | spread | frozenset(map(_Whole, gathered))

    def own_rule(self, eqn: Equation, facts: Sequence[Axes]) -> Sequence[Axes] | None:
        if (pending := _pending(eqn)) is not None:
            return pending.results_differ(facts)
        body = jaxprs.mapped_by_rule(eqn)
        return None if body is None else self.through(body, facts)

    def result(self, var: Operand, fact: Axes) -> Axes:
        # The parts of a sum that is still to be added up leave as the one sum.
        return fact - compat.unreduced_type(var.aval)

    def chosen(
        self, predicate: Operand, of_predicate: Axes, results: list[Axes], same: Sequence[bool]
    ) -> list[Axes]:
        # The types of JAX 0.12 say that the result of a `cond` is the same where only its predicate differs:
        # https://github.com/jax-ml/jax/issues/40823
        pairs = zip(results, same, strict=True)
        return [axes if is_same else axes | of_predicate for axes, is_same in pairs]


def whole_over(fact: Axes) -> Axes:
    """The axes over which a value of which `Differing` knows this is the same because it was gathered."""
    return frozenset(mark.axis_name for mark in fact if isinstance(mark, _Whole)) - fact


class Losing(Differing):
    """A walk that finds where types lose that a value differs.

    **Attributes:**

    - `equations`: those of which a result differs over an axis that its type leaves out, while the types of
        all operands are right; each with those around that run it, the outermost first.
    - `axes`: the axes that are lost.
    - `used`: whether any such result is used as it is. If it is only cast to vary, the types are right again.
    - `in_gradients`: whether anything of the backward pass of a derivative has such a type.
    """

    def __init__(self) -> None:
        self.equations: list[list[Equation]] = []
        self.axes: set[AxisName] = set()
        self.used = False
        self.in_gradients = False
        self._around: list[Equation] = []

    def equation(
        self, eqn: Equation, facts: Sequence[Axes]
    ) -> tuple[Sequence[Axes], Sequence[Body[Axes]]]:
        self._around.append(eqn)
        results, bodies = super().equation(eqn, facts)
        lost = self.lost(eqn.outvars, map(self.result, eqn.outvars, results))
        of_operands = self.lost(eqn.invars, facts)
        if lost:
            self.axes |= lost
            self.in_gradients |= any(map(jaxprs.is_backward, self._around))
            if not of_operands and jaxprs.has_own_types(eqn):
                self.equations.append(list(self._around))
                # A cast of the result comes too late for the gradients of these.
                self.used |= any(lost - _typed(x) for x in eqn.invars if compat.is_inexact_type(x))
        if of_operands and jaxprs.has_own_types(eqn) and not jaxprs.made_varying(eqn):
            self.used = True
        self._around.pop()
        return results, bodies

    @staticmethod
    def lost(values: Iterable[Any], facts: Iterable[Axes]) -> Axes:
        """The axes over which any of these values differs although its type leaves them out."""
        lost = NO_AXES
        for x, fact in zip(values, facts, strict=True):
            # Nearly always the type says it all, and of every value of a program this is asked.
            if fact and (left := fact - _typed(x)) and compat.says_what_varies(x.aval):
                differs = frozenset(axis for axis in left if not isinstance(axis, _Whole))
                lost |= differs - compat.unreduced_type(x.aval)
        return lost


class Recorded:
    """The axes over which values may differ that are being recorded into a program with types.

    It walks back from a value along the equations that made it, and knows those that it has walked.
    """

    def __init__(self) -> None:
        self._walk = Losing()
        # By the identity of the equation, which is kept: another one could get its identity.
        self._results: dict[int, tuple[Equation, Sequence[Axes]]] = {}

    def of(self, x: Any) -> Axes:
        """What `Differing` knows of `x`, by what made it; by its type if that is not recorded."""
        value = compat.recorded_value(x)
        # Not by recursion: a program may be longer than Python's stack is deep.
        stack = [value]
        while stack:
            maker = compat.made_by(stack[-1])
            if maker is None or id(maker[0]) in self._results:
                stack.pop()
                continue
            eqn, _ = maker
            if unknown := [operand for operand in eqn.invars if self._fact(operand) is None]:
                stack += unknown
                continue
            self._walk_along(eqn, [self._fact(operand) or NO_AXES for operand in eqn.invars])
        # A `vmap` that spreads its lanes over a mesh axis takes that axis out of the types of what it maps.
        return (self._fact(value) or NO_AXES) - (_typed(value) - _typed(x))

    def _walk_along(self, eqn: Equation, facts: Sequence[Axes]) -> None:
        results, _ = self._walk.equation(eqn, facts)
        self._results[id(eqn)] = eqn, list(map(self._walk.result, eqn.outvars, results))

    def losing(self, values: Sequence[Any], equations: Sequence[Equation]) -> Losing:
        """Where types lose what differs, in all that made these values and those of earlier calls.

        **Arguments:**

        - `equations`: further ones, in their order. Gradients may have been taken of what made none of the
            values.
        """
        walk = self._walk
        for eqn in equations:
            if id(eqn) not in self._results:
                self._walk_along(eqn, [self.of(operand) for operand in eqn.invars])
        if walk.lost(values, [self.of(x) for x in values]):
            walk.used = True
        return walk

    def _fact(self, x: Any) -> Axes | None:
        """What is known of a value; `None` before its equation was walked."""
        maker = compat.made_by(x)
        if maker is None:
            # An input has the right type, and a constant has no axes.
            return _typed(x)
        eqn, result = maker
        return self._results[id(eqn)][1][result] if id(eqn) in self._results else None


class _Crossing(Differing):
    """Whether a value depends on the arguments; and the axes over which such a value is exchanged."""

    def __init__(self) -> None:
        self.crossed: set[AxisName] = set()

    def plain_result(self, eqn: Equation, fact: Axes) -> Axes:
        self.crossed.update(jaxprs.exchanged_by(eqn) if fact else ())
        return fact

    def own_rule(self, eqn: Equation, facts: Sequence[Axes]) -> Sequence[Axes] | None:
        if (pending := _pending(eqn)) is None:
            return None
        self.crossed.update(pending.reduced_over if any(facts) else ())
        return facts[-(len(facts) // 2) :]


def all_axes(jaxpr: Jaxpr, arguments: Sequence[Axes]) -> list[Axes]:
    """For each result of one instance's program, the axes over which it may differ.

    **Arguments:**

    - `arguments`: the same of the program's arguments.
    """
    facts = Differing().through(jaxpr, arguments)
    return [frozenset(axis for axis in fact if not isinstance(axis, _Whole)) for fact in facts]


def crossed(jaxpr: Jaxpr) -> Axes:
    """The axes over which values that depend on a jaxpr's arguments pass from one instance to another."""
    walk = _Crossing()
    # Any axis serves to mark what depends on them.
    walk.through(jaxpr, [frozenset([""])] * len(jaxpr.invars))
    return frozenset(walk.crossed)


class _Apart(Differing):
    """The axes over which a loop or branch exchanges values that only some instances run."""

    def __init__(self) -> None:
        self.axes: set[AxisName] = set()

    def equation(
        self, eqn: Equation, facts: Sequence[Axes]
    ) -> tuple[Sequence[Axes], Sequence[Body[Axes]]]:
        results, bodies = super().equation(eqn, facts)
        match jaxprs.control_flow(eqn):
            case ("cond", _):
                differs = facts[0]
            case ("while", cond, *_):
                differs = self.join(self.through(cond, bodies[0][1]))
            case _:
                return results, bodies
        for body, _ in bodies:
            self.axes |= differs & jaxprs.exchanged_over(body)
        return results, bodies


def check_exchanges(name: str, mapped: Equation) -> None:
    """Refuse a program whose shards would wait for each other for ever.

    **Arguments:**

    - `name`: what the message calls the function.
    - `mapped`: the equation of its `shard_map`.
    """
    walk = _Apart()
    specs = mapped.params["in_specs"]
    split = [frozenset(axis for axes in written_axes(spec) for axis in axes) for spec in specs]
    walk.through(jaxprs.open_jaxpr(mapped.params["jaxpr"]), split)
    if walk.axes:
        raise error_listing(
            StatemeshError,
            f"{name}: a loop or branch that some shards run and others do not exchanges values between them, "
            "so that they would wait for each other for ever",
            [f"over {axis!r}" for axis in sorted(walk.axes, key=str)],
            "A gradient of a replicated array is summed where it is taken. Cast the array first, outside of "
            "the loop: `jax.lax.pcast(x, axis_name, to='varying')`; and sum what comes out after the loop.",
        )


def settled(closed: ClosedJaxpr, arguments: Sequence[Axes], followed: Axes) -> ClosedJaxpr:
    """A closed jaxpr without types in which what was `Pending` is decided.

    **Arguments:**

    - `closed`: the program of one instance.
    - `arguments`: the axes over which its arguments may differ.
    - `followed`: the axes that are followed. What is pending over others waits for who knows of them.
    """

    def is_followed(eqn: Equation) -> bool:
        pending = _pending(eqn)
        return pending is not None and pending.is_over(followed)

    def in_jaxpr(jaxpr: Jaxpr, facts: Sequence[Axes]) -> Jaxpr:
        if not any(map(is_followed, jaxprs.equations(jaxpr))):
            return jaxpr
        walk = Differing()
        known: dict[Operand, Axes] = dict(zip(jaxpr.invars, facts, strict=True))
        eqns = []
        for eqn in jaxpr.eqns:
            operands = [walk.fact(known, atom) for atom in eqn.invars]
            results, bodies = walk.equation(eqn, operands)
            known.update(zip(eqn.outvars, results, strict=True))
            eqns.append(in_equation(eqn, operands, bodies))
        return jaxprs.with_equations(jaxpr, eqns)

    def in_equation(
        eqn: Equation, operands: Sequence[Axes], bodies: Sequence[Body[Axes]]
    ) -> Equation:
        if (pending := _pending(eqn)) is not None:
            if not pending.is_over(followed):
                return eqn
            return jaxprs.calling(pending.decided(operands), eqn)
        new = {id(body): in_jaxpr(body, facts) for body, facts in bodies}
        if jaxprs.with_own_derivative(eqn) and any(map(is_followed, bodies[0][0].eqns)):
            # What has been decided has the derivatives of what it is.
            (body,) = new.values()
            return jaxprs.calling(jaxprs.runs(body), eqn)
        return jaxprs.with_jaxprs(eqn, new)

    return jaxprs.with_open(closed, in_jaxpr(jaxprs.open_jaxpr(closed), arguments))


def _pending(eqn: Equation) -> Pending | None:
    return jaxprs.rule_of(eqn).pending


def _joined_unseen(eqn: Equation) -> Axes:
    """The axes over which code that no jaxpr shows makes equal what differs, by its types alone."""
    if not jaxprs.is_opaque(eqn):
        return NO_AXES
    typed = NO_AXES.union(*map(_typed, eqn.invars))
    return typed - NO_AXES.union(*map(_typed, eqn.outvars))


def _typed(x: Any) -> Axes:
    return compat.varying_type(getattr(x, "aval", None))


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """A reduced gradient up to a constant factor, or a sum of such over shards.

    **Attributes:**

    - `name`: the one that `value_and_grad` has given it.
    - `differs`: the axes over which it may differ.
    - `divisors`: the whole numbers by which it has been divided, and their products.
    - `summed`: the axes over which it has been summed again.
    - `used`: whether anything else was made of that sum, so that no division can still make it a mean.
    """

    name: str
    differs: Axes
    divisors: frozenset[int] = frozenset()
    summed: Axes = NO_AXES
    used: bool = False


_Gradients: TypeAlias = frozenset[_Gradient]
_NONE: _Gradients = frozenset()


def check_gradients(name: str, mapped: Equation) -> None:
    """Refuse a program of one shard that sums a gradient twice, or that of a gathered parameter not at all.

    **Arguments:**

    - `name`: what the message calls the function.
    - `mapped`: the equation of its `shard_map`.

    **Raises:** `StatemeshError` that names each such gradient or parameter.
    """
    body = jaxprs.open_jaxpr(mapped.params["jaxpr"])
    # Each equation of the body with those that it runs.
    parts = [[eqn, *chain(*map(jaxprs.equations, jaxprs.jaxprs_of(eqn)))] for eqn in body.eqns]
    names = [[jaxprs.name_given(eqn) or "" for eqn in part] for part in parts]
    specs = mapped.params["in_specs"]
    split = [frozenset(axis for axes in written_axes(spec) for axis in axes) for spec in specs]
    sizes = {axis: mapped.params["mesh"].shape[axis] for axis in mapped.params["newly_manual_axes"]}
    if any(label.startswith(_PARAMETER) for label in chain(*names)):
        check_unsummed(body, split, sizes)
    with_gradients = [k for k, part in enumerate(names) if any(map(_is_gradient, part))]
    # Where nothing is summed after the gradients, as in most programs, there is nothing to follow.
    if not with_gradients or not any(map(jaxprs.is_sum, chain(*parts[with_gradients[0] :]))):
        return
    named = _AxisNames()
    named.through(body, split)
    walk = _Sums(named.axes, sizes)
    results = walk.join(walk.through(body, [_NONE] * len(body.invars)))
    twice = sorted({(each.name, axis) for each in results for axis in each.summed}, key=str)
    if twice:
        raise error_listing(
            StatemeshError,
            f"{name}: gradients that value_and_grad has already reduced over shards are summed over them "
            "again, which makes them too large by a factor of the number of shards",
            [f"the {gradient}: over {axis!r}" for gradient, axis in twice],
            "Leave `jax.lax.psum` out; value_and_grad has reduced them once.",
        )


def _is_gradient(label: str) -> bool:
    return label.startswith(GRADIENT)


class _AxisNames(Differing):
    """A walk that remembers over which axes each variable may differ."""

    def __init__(self) -> None:
        self.axes: dict[Operand, Axes] = {}

    def result(self, var: Operand, fact: Axes) -> Axes:
        fact = super().result(var, fact)
        # One variable stands for several values where a jaxpr is run by several equations.
        self.axes[var] = self.axes.get(var, NO_AXES) | fact
        return fact


class _Sums(DataflowOfSets[_Gradient]):
    """The gradients that a value may be, and the sums that have gone into it.

    **Arguments:**

    - `differ`: the axes over which variables may differ.
    - `sizes`: of the axes that are mapped over.
    """

    def __init__(self, differ: Mapping[Operand, Axes], sizes: Mapping[AxisName, int]) -> None:
        self.differ = differ
        self.sizes = sizes
        self.total = math.prod(sizes.values())

    def plain(self, eqn: Equation, facts: Sequence[_Gradients]) -> Sequence[_Gradients]:
        if _is_gradient(jaxprs.name_given(eqn) or ""):
            var = eqn.outvars[0]
            return [frozenset([_Gradient(eqn.params["name"], self.differ[var])])]
        if jaxprs.is_sum(eqn):
            over = frozenset(self.sizes) & jaxprs.collective(eqn)[0]
            return [self._summed(each, over) for each in facts]
        by = divisor(eqn)
        if by is None or jaxprs.name_given(eqn) == SUMMAND:
            inner = [self.through(j, [_NONE] * len(j.invars)) for j in jaxprs.jaxprs_of(eqn)]
            gradients = self.join([*facts, *map(self.join, inner)])
            summed = [gradient for gradient in gradients if gradient.summed]
            used = frozenset(dataclasses.replace(gradient, used=True) for gradient in summed)
            return [used] * len(eqn.outvars)
        return [self._divided(self.join(facts), by)]

    def _summed(self, gradients: _Gradients, over: Axes) -> _Gradients:
        summed = set()
        for gradient in gradients:
            again = over - gradient.differs
            if gradient.summed:
                summed.add(dataclasses.replace(gradient, used=True))
            elif not self._is_mean(gradient.divisors, again):
                summed.add(dataclasses.replace(gradient, summed=again))
        return frozenset(summed)

    def _divided(self, gradients: _Gradients, by: int) -> _Gradients:
        divided = set()
        for gradient in gradients:
            products = {by * other for other in gradient.divisors | {1}}
            # No other number can ever be the one that makes a mean; so a loop does not go on for ever.
            kept = gradient.divisors | {k for k in products if k > 1 and self.total % k == 0}
            if gradient.used or not (gradient.summed and self._is_mean(kept, gradient.summed)):
                divided.add(dataclasses.replace(gradient, divisors=kept))
        return frozenset(divided)

    def _is_mean(self, divisors: frozenset[int], axes: Axes) -> bool:
        count = math.prod(self.sizes[axis] for axis in axes)
        return count == 1 or count in divisors


# In the program the names of these parameters begin so.
_PARAMETER = "parameter that varies by its type: "
# While a function runs without a program: whether it has left the gradient of such a parameter to its shard.
_left: ContextVar[list[bool] | None] = ContextVar("_left", default=None)


def name_varying(param: Array, axes: Sequence[AxisName], whole: Axes, path: str) -> None:
    """Name a parameter whose type varies.

    **Arguments:**

    - `axes`: those over which its type varies and its loss is reduced.
    - `whole`: those of them over which it is known to be one value.
    - `path`: what messages call it.
    """
    if (left := _left.get()) is not None and not whole.issuperset(axes):
        left.append(True)
    for axis in axes if compat.under_jit() else ():
        checkpoint_name(param, _name(axis, axis in whole, path))


@contextmanager
def looking_for_left() -> Iterator[list[bool]]:
    """A context for a function that runs without a program.

    The list in it is filled if the function has to be traced afterwards, so that its program can be checked.
    """
    left: list[bool] = []
    token = _left.set(left)
    try:
        yield left
    finally:
        _left.reset(token)


class _Unsummed(Differing):
    """A walk that finds parameters that are one value, but whose gradient was left to each shard."""

    def __init__(self, sizes: Mapping[AxisName, int], unrecorded: Sequence[Equation]) -> None:
        # The sum over one shard changes nothing.
        self.axes = [axis for axis, size in sizes.items() if size > 1]
        self.unrecorded = {id(eqn) for eqn in unrecorded}
        self.unsummed: dict[tuple[str, AxisName], None] = {}

    def plain_result(self, eqn: Equation, fact: Axes) -> Axes:
        if (name := jaxprs.name_given(eqn) or "").startswith(_PARAMETER):
            for axis in whole_over(fact).intersection(self.axes):
                for known in (False, True) if id(eqn) in self.unrecorded else (False,):
                    if name.startswith(start := _name(axis, known, "")):
                        self.unsummed[name.removeprefix(start), axis] = None
        return super().plain_result(eqn, fact)


def check_unsummed(
    jaxpr: Jaxpr,
    arguments: Sequence[Axes],
    sizes: Mapping[AxisName, int],
    unrecorded: Sequence[Equation] = (),
) -> None:
    """Refuse a program that leaves the gradients of gathered parameters unsummed.

    **Arguments:**

    - `jaxpr`: the program of one shard.
    - `arguments`: the axes over which its arguments may differ.
    - `sizes`: of the axes that are mapped over.
    - `unrecorded`: the equations that stood in no program when they ran, because the function was traced only
        after it had run. There `value_and_grad` did not see how any parameter was made, except inside a `jit`
        or a loop.
    """
    walk = _Unsummed(sizes, unrecorded)
    walk.through(jaxpr, arguments)
    if not walk.unsummed:
        return
    unsummed = sorted(walk.unsummed, key=str)
    axis = unsummed[0][1]
    raise error_listing(
        StatemeshError,
        "value_and_grad does not sum the gradients of these parameters over shards, although all_gather made "
        "them one value on all shards",
        [f"{path}: over {axis!r}" for path, axis in unsummed],
        "Inside `jax.jit`, `jax.checkpoint` and loops, and with jit=False, it does not see how a parameter "
        "was made, whose type says that each shard has its own. Gather inside the function of "
        f"value_and_grad; or write `jax.lax.all_gather(..., {axis!r}, to='invarying')`, of which the type "
        "says that it is one value.",
    )


def _name(axis: AxisName, known: bool, path: str) -> str:
    return f"{_PARAMETER}{'summed' if known else 'not summed'} over {axis!r}: {path}"
