"""A flat program that runs again with some values changed: only the steps after them do."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._program._numbers import roundoff
from .._program._stacked import Scope, Stacked
from .._types import AnyLeaf, Numbers
from ._flat import Constant, Operand, Program
from ._relations import unequal_copies
from ._values import Evaluator, Values, is_key, on_all_shards


# What gives a value, with all mesh axes in front.
Read: TypeAlias = Callable[[int], Numbers]

# What is kept of the first run, in bytes. The rest is computed again.
_KEPT = 2**28


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """What becomes of a value.

    **Attributes:**

    - `make`: gives the changed numbers, from what it reads.
    - `reads`: the values it reads, none of them made later than the changed one.
    - `scope`: the mesh axes over which it then may differ, if these are others than before.
    """

    make: Callable[[Read], Numbers]
    reads: tuple[int, ...] = ()
    scope: Scope | None = None


def constant(numbers: Numbers) -> Change:
    """These numbers, whatever the value was."""
    return Change(lambda read: numbers)


class Reruns:
    """A flat program with all its values.

    **Arguments:**

    - `evaluator`, `program`: the program.
    - `given`: the values of its inputs.
    - `scopes`: the mesh axes over which each value may differ.

    **Attributes:**

    - `maker`: the step that makes each value.
    - `steps_run`: how many steps ran again so far.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        program: Program,
        given: Values,
        scopes: Mapping[int, Scope],
    ) -> None:
        self.evaluator, self.program, self.scopes = evaluator, program, scopes
        self.maker = program.maker()
        self.steps_run = 0
        self.known: Values = {**given}
        size, results = 0, {*program.results}
        last = {x: i for i, step in enumerate(program.steps) for x in step.inputs}
        left: set[int] = set()
        for i, step in enumerate(program.steps):
            evaluator.run_step(step, self.known)
            for x in step.results:
                size += _bytes(self.known[x].x)
                if size > _KEPT and x not in results:
                    left.add(x)
            for x in [x for x in left if last.get(x, -1) <= i]:
                left.remove(x)
                del self.known[x]
        self._reached = self._results_after()

    def unit(self, value: Stacked) -> float:
        """The roundoff of a value; 0 where floats are in double precision."""
        return 0.0 if self.evaluator.wide else roundoff(value.x.dtype)

    def reaches(self, value: int) -> frozenset[int]:
        """The numbers of the results that depend on a value."""
        return self._reached.get(value, frozenset())

    def _results_after(self) -> dict[int, frozenset[int]]:
        found: dict[int, frozenset[int]] = {}
        for k, x in enumerate(self.program.results):
            if isinstance(x, int):
                found[x] = found.get(x, frozenset()) | {k}
        for step in reversed(self.program.steps):
            after = frozenset[int]().union(*(found.get(x, ()) for x in step.results))
            for x in step.inputs:
                found[x] = found.get(x, frozenset()) | after
        return found

    def run(self, changes: Mapping[int, Change]) -> "Rerun":
        return Rerun(self, changes)

    def both(self, value: int, change: Change) -> tuple[Numbers, Numbers]:
        """A value, and what becomes of it."""
        scope, again = change.scope or self.scopes[value], self.run({})
        read: Read = lambda x: again.read(x, scope)
        return read(value), change.make(read)


class Rerun:
    """The program with some values changed. Results are computed when they are asked for."""

    def __init__(self, around: Reruns, changes: Mapping[int, Change]) -> None:
        self._around, self._changes = around, changes
        # What depends on a change.
        self._changed = {*changes}
        for step in around.program.steps:
            if not self._changed.isdisjoint(step.inputs):
                self._changed.update(step.results)
        self._known: Values = {}

    def result(self, number: int) -> Stacked | None:
        """A result; `None` if it is one of several copies that differ."""
        wanted = self._around.program.results[number]
        if isinstance(wanted, int):
            self._compute({wanted})
            join = self._around.maker.get(wanted)
            if join and join.kind == "join":
                (operand,) = join.operands
                value = self._value(operand)
                if unequal_copies(value, join.spec, self._around.unit(value)):
                    return None
        return self._value(wanted)

    def _value(self, x: Operand) -> Stacked:
        if isinstance(x, Constant) or x in self._known:
            return self._around.evaluator.operand(x, self._known)
        return self._around.known[x]

    def _is_known(self, x: int) -> bool:
        return x in self._known or (x not in self._changed and x in self._around.known)

    def _compute(self, wanted: Iterable[int]) -> None:
        """Run the steps on which some values depend."""
        around, todo = self._around, []
        left = {x for x in wanted if not self._is_known(x)}
        for step in reversed(around.program.steps):
            if left.isdisjoint(step.results):
                continue
            todo.append(step)
            read = {x for y in step.results if y in self._changes for x in self._changes[y].reads}
            left |= {x for x in (*step.inputs, *read) if not self._is_known(x)}
        for x in around.program.inputs:
            if x in left and x in self._changes:
                self._known[x] = around.known[x]
                self._change(x)
        around.steps_run += len(todo)
        for step in reversed(todo):
            operands = [self._value(x) for x in step.operands]
            made = around.evaluator.step(step, operands)
            self._known.update(zip(step.results, made, strict=True))
            for x in step.results:
                if x in self._changes:
                    self._change(x)

    def _change(self, x: int) -> None:
        """Put what becomes of a value in its place."""
        scope = self._changes[x].scope or self._around.scopes[x]
        numbers = self._changes[x].make(lambda y: self.read(y, scope))
        axes, like = tuple(scope.sizes), self._known[x].x
        if is_key(like):
            impl = jax.random.key_impl(like)
            keys = jax.random.wrap_key_data(jnp.asarray(numbers), impl=impl)
            self._known[x] = Stacked(keys, axes)
        else:
            made = np.asarray(numbers).astype(like.dtype)
            self._known[x] = _narrowed(Stacked(made, axes), self._known[x])

    def read(self, x: int, scope: Scope) -> Numbers:
        """A value with all mesh axes of a scope in front."""
        if not self._is_known(x):
            self._compute({x})
        return on_all_shards(self._value(x), scope)


def _narrowed(value: Stacked, like: Stacked) -> Stacked:
    """Without the mesh axes that the value did not have, where copies are equal.

    What is compiled for these mesh axes then runs again.
    """
    x, axes = value.x, list(value.axes)
    for name in [name for name in axes if name not in like.axes]:
        at = axes.index(name)
        first = x.take([0], at)
        if np.array_equal(np.broadcast_to(first, x.shape), x, equal_nan=x.dtype.kind in "fc"):
            x = first.squeeze(at)
            axes.remove(name)
    return Stacked(x, tuple(axes))


def _bytes(x: AnyLeaf) -> int:
    return int(x.size) * (16 if is_key(x) else int(x.dtype.itemsize))
