"""The values of a program on a mesh beside those of the program on one device."""

import collections
import dataclasses
from collections.abc import Mapping

from .._program._numbers import roundoff
from .._program._stacked import Scope, Stacked
from .._types import Numbers
from ._align import pairs
from ._flat import Constant, Operand, Program, Step
from ._lines import callers_of
from ._relations import Relation, largest, relation, unequal_copies, whole
from ._values import Evaluator, Values, as_numbers, last_reads, on_all_shards


# What is kept of the values that differ, in bytes. The others are let go.
_KEPT = 2**28

_LOOPS = ("scan", "while", "cond")
# Numbers that these make are no positions.
_OF_KEYS = ("random_fold_in", "random_split", "random_wrap", "random_unwrap")
_RANDOM = ("random_bits", "random_wrap", "random_fold_in", "random_split", "random_seed")


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A value on shards, and what it is on one device.

    **Attributes:**

    - `got`: the value, with all mesh axes of its scope in front.
    - `want`: the value on one device; `None` where that program has none that belongs to it.
    """

    got: Numbers
    want: Numbers | None


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A result of both programs."""

    got: Stacked
    want: Numbers
    right: bool


class Comparison:
    """Two programs, run side by side.

    **Arguments:**

    - `mesh`, `one`: the program on a mesh, and on one device.
    - `scope`: the mesh axes around the programs.
    - `given`: the values of the inputs of both.
    - `wide`: whether floats are in double precision.

    **Attributes:**

    - `maker`: the step that makes each value of the program on the mesh.
    - `depth`: how many lines of the user's are around those of the mapped function itself.
    - `relations`: what each value of the program on the mesh is of that on one device.
    - `scopes`: the mesh axes over which each value may differ.
    - `splits`: how many values have a mesh axis in parts of an array axis.
    - `indices`: the values that differ because they are made from the index of a shard.
    - `positions`: those of them that are not made from constants only.
    - `kept`: the values that are not simply those of one device.
    - `operands`: those of loops and branches whose results differ.
    - `lengths`: the lengths of what shards have of arrays that are split.
    - `results`: the results.
    - `matched`: whether each step of the one program belongs to one of the other.
    """

    def __init__(
        self,
        mesh: Program,
        one: Program,
        scope: Scope,
        given: tuple[Values, Values],
        wide: bool,
    ) -> None:
        self.mesh, self.one, self.scope, self.given = mesh, one, scope, given
        self.wide = wide
        self.evaluators = Evaluator(mesh, wide), Evaluator(one, wide)
        self.pairs = pairs(mesh.steps, one.steps)
        self.matched = len(self.pairs) == len(mesh.steps) == len(one.steps)
        self.scopes = dict.fromkeys(mesh.inputs, scope)
        self.scopes |= {x: step.around for step in mesh.steps for x in step.results}
        self.maker = mesh.maker()
        depths = [len(callers_of(step.eqn)) for step in mesh.steps if step.line is not None]
        self.depth = min(depths, default=0)
        self._partners = {mesh.steps[a]: one.steps[b] for a, b in self.pairs.items()}
        self.relations: dict[int, Relation | None] = {}
        self.indices: set[int] = set()
        self.positions: set[int] = set()
        self.kept: dict[int, Pair] = {}
        self.operands: dict[Step, tuple[list[Stacked], list[Stacked]]] = {}
        self.lengths: set[int] = set()
        self._bytes = 0
        self._sizes: dict[int, float] = {}
        # For values of the program on the mesh what they are on one device, as long as a step may need it.
        self._wants: dict[int, Numbers] = {}
        self._known: tuple[Values, Values] = ({**given[0]}, {**given[1]})
        for a, b in zip(mesh.inputs, one.inputs, strict=True):
            if a in given[0]:
                self._relate(a, given[0][a], whole(given[1][b]), scope, 0.0)
        self._run()
        self.results = self._results()
        self.splits: Mapping[tuple[str, int | None], int] = collections.Counter(
            (name, axis)
            for known in self.relations.values()
            for name, kind, axis in (known.kinds if known else ())
            if kind == "parts"
        )

    def value(self, operand: Operand, side: int) -> Stacked:
        return self.evaluators[side].operand(operand, self._known[side])

    def partner(self, step: Step) -> Step | None:
        """The step of the program on one device that belongs to a step."""
        return self._partners.get(step)

    def _run(self) -> None:
        position = 0
        last = last_reads(self.mesh), last_reads(self.one)
        for i, step in enumerate(self.mesh.steps):
            self.evaluators[0].run_step(step, self._known[0])
            end = self.pairs[i] + 1 if i in self.pairs else position
            for other in self.one.steps[position:end]:
                self.evaluators[1].run_step(other, self._known[1])
            self._step(step, self.partner(step))
            for known, reads, done in zip(self._known, last, (i, end - 1), strict=True):
                for x in [x for x in known if reads.get(x, -1) <= done]:
                    del known[x]
            self._wants = {x: want for x, want in self._wants.items() if last[0].get(x, -1) > i}
            position = end
        for other in self.one.steps[position:]:
            self.evaluators[1].run_step(other, self._known[1])

    def _step(self, step: Step, other: Step | None) -> None:
        by_index = self._is_index(step)
        operands = 0.0
        if other is not None:
            operands = max([self._size(x) for x in other.operands], default=0.0)
        for k, x in enumerate(step.results):
            value = self._known[0][x]
            want = whole(self._known[1][other.results[k]]) if other is not None else None
            if other is None:
                want = self._unneeded(step)
            if want is not None:
                self._wants[x] = want
            self._relate(x, value, want, step.around, operands)
            known = self.relations[x]
            if by_index and not (known and known.is_plain):
                # That one shard has the index 0, or that the least is 0, is no relation.
                self.relations[x] = None
                self.indices.add(x)
                if step.name == "axis_index" or self.positions.intersection(step.inputs):
                    self.positions.add(x)
            if step.kind == "split":
                self.lengths.update(value.x.shape[len(value.axes) :])
            if step.kind == "join" and unequal_copies(
                self.value(step.operands[0], 0), step.spec, self.unit(value)
            ):
                self.relations[x] = None
                self._keep(x, value, want, step.around)
        differs = any(self.relations[x] is None for x in step.results)
        if differs and step.name in _LOOPS and other is not None and len(self.operands) < 8:
            self.operands[step] = (
                [self.value(x, 0) for x in step.operands],
                [self.value(x, 1) for x in other.operands],
            )

    def _unneeded(self, step: Step) -> Numbers | None:
        """What one device has in the place of a division by the number of shards, which it does not need."""
        if len(step.inputs) != 1 or len(step.results) != 1 or step.name not in ("div", "mul"):
            return None
        return self._wants.get(step.inputs[0])

    def _relate(
        self, x: int, value: Stacked, want: Numbers | None, scope: Scope, operands: float
    ) -> None:
        found = None if want is None else relation(value, want, scope, operands, self.unit(value))
        self.relations[x] = found
        if found is None or not found.is_plain:
            self._keep(x, value, want, scope)

    def _keep(self, x: int, value: Stacked, want: Numbers | None, scope: Scope) -> None:
        got = on_all_shards(value, scope)
        self._bytes += got.nbytes
        if self._bytes <= _KEPT:
            self.kept[x] = Pair(got, want)

    def _size(self, operand: Operand) -> float:
        """The largest number of a value on one device."""
        if isinstance(operand, Constant):
            return largest(as_numbers(self.value(operand, 1).x))
        if operand not in self._sizes:
            self._sizes[operand] = largest(as_numbers(self._known[1][operand].x))
        return self._sizes[operand]

    def _is_index(self, step: Step) -> bool:
        """Whether results are made from the index of a shard, or from constants, and so may differ."""
        constants = bool(step.operands) and not step.inputs
        if step.name == "axis_index" or constants:
            return True
        if not any(x in self.indices for x in step.inputs):
            return False
        if step.name in _RANDOM:
            # A state gives each shard keys of its own. Keys that the user makes so are another matter.
            return step.name in _OF_KEYS and not step.is_own
        others = [x for x in step.inputs if x not in self.indices]
        return all(as_numbers(self._known[0][x].x).dtype.kind in "biu" for x in others)

    def _results(self) -> list[Result]:
        found = []
        for a, b in zip(self.mesh.results, self.one.results, strict=True):
            got, want = self.value(a, 0), whole(self.value(b, 1))
            known = self.relations.get(a, Relation()) if isinstance(a, int) else Relation()
            # A step without a partner may give the right result.
            is_lone = isinstance(a, int) and a in self.kept and self.kept[a].want is None
            if is_lone or isinstance(a, Constant):
                known = relation(got, want, self.scope, 0.0, self.unit(got))
            if got.x.dtype != self.value(b, 1).x.dtype:
                known = None
            right = self.is_right(known) or (bool(self.scope.sizes) and a in self.indices)
            found.append(Result(got, want, right))
        return found

    def judge(self, number: int, value: Stacked | None) -> bool:
        """Whether a result of another run is right; one whose copies differ is not."""
        if value is None:
            return False
        want = self.results[number].want
        return self.is_right(relation(value, want, self.scope, 0.0, self.unit(value)))

    def unit(self, value: Stacked) -> float:
        """The roundoff of a value; 0 where floats are in double precision."""
        return 0.0 if self.wide else roundoff(value.x.dtype)

    def is_right(self, found: Relation | None) -> bool:
        """Whether a result with this relation is one that it should have."""
        # Around loops there are mesh axes, and what is carried may be anything that is related.
        return found is not None and (found.is_plain or bool(self.scope.sizes))
