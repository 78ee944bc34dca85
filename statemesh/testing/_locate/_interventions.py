"""Interventions: the program runs again with other values at a line, and its results are judged.

The idea is that of delta debugging (Zeller, Isolating cause-effect chains from computer programs, 2002): a
line is the cause where putting it right puts the results right. Either its values become those of one device,
or they become what a simple change of the line would make. Only the nodes after a line run again.
"""

import builtins
import collections
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._program._collective_rules import RULES
from .._program._jaxprs import names_of
from .._program._lines import SourceLine, callers_of
from .._program._numbers import is_key
from .._program._stacked import MappedAxes, Stacked
from .._types import Numbers
from ._compare import Comparison, right_values
from ._evaluate import Values, on_all_shards
from ._graph import Node, needed
from ._suspects import Suspect


# So many nodes run again for right values, for simple changes, for specs, and for policies, each.
MOST_NODES = 20_000
# Offsets are tried for so many lengths of arrays.
_MOST_LENGTHS = 4
# A cause that may stand at more lines than these is not sure.
_MOST_LINES = 3

# The reductions that are tried to put the results right.
_REDUCTIONS: Mapping[str, Callable[..., Any]] = {"psum": np.sum, "pmean": np.mean, "pmax": np.max}
# The primitives that sum over shards.
_SUMS = ("psum", "psum_invariant")
# How far a value moves between shards, with the words for it.
_SHIFTS = {1: "a move to the next shard", -1: "a move to the shard before", 0: "no move"}
_LEFT_OUT = ("add", "sub", "mul", "max", "min", "or", "and", "select_n")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")

# A call by a bare name.
_CALL = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\(")

# What gives a value, with all mesh axes in front.
Read: TypeAlias = Callable[[int], Numbers]


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """What becomes of a value.

    **Attributes:**

    - `make`: gives the changed numbers. It may read the value, and what its node reads.
    - `scope`: the mesh axes over which it then may differ, if these are others than before.
    """

    make: Callable[[Read], Numbers]
    scope: MappedAxes | None = None

    def made(self, read: Read) -> Numbers:
        """The changed numbers; those that overflow are infinite, as on devices."""
        with np.errstate(all="ignore"):
            return self.make(read)


Changes: TypeAlias = Mapping[int, Change]
# Gives the program with other arguments, or `None` where it cannot be run with them.
Again: TypeAlias = Callable[[], "Reruns | None"]


# How many of the wrong results are right with right values at a line. For all, no other one may be wrong.
Outcome: TypeAlias = Literal["all", "some", "none"]


class Reruns:
    """The program on a mesh, run again with some values changed.

    **Attributes:**

    - `nodes_run`: how many nodes have run so far.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.nodes_run = comparison, 0
        graph = comparison.mesh
        self._broken = frozenset(k for k, right in enumerate(comparison.right) if not right)
        self._needed = [needed(graph.nodes, [x]) for x in graph.results]
        # For each result the values that it depends on.
        self._sources = [
            {x, *(operand for node in nodes for operand in node.operands)}
            for x, nodes in zip(graph.results, self._needed, strict=True)
        ]

    def judged(self, changes: Changes) -> Iterator[tuple[int, bool]]:
        """The results that a change reaches, and whether each is right."""
        run = _Rerun(self, changes)
        reached = [k for k, xs in enumerate(self._sources) if not xs.isdisjoint(changes)]
        # The wrong ones first, and what is made early.
        for k in sorted(reached, key=lambda k: (k not in self._broken, len(self._needed[k]))):
            yield k, run.is_right(k, self._needed[k])

    def mends(self, changes: Changes) -> bool:
        """Whether a change puts all results right."""
        if any(self._sources[k].isdisjoint(changes) for k in self._broken):
            return False
        return all(right for _, right in self.judged(changes))

    def try_right(self, suspect: Suspect) -> Outcome | None:
        """What comes of right values at a line; `None` if nobody knows these."""
        values, differs = suspect.values, self.comparison.differs
        if not values or not all(map(differs, values)) or self.nodes_run > MOST_NODES:
            return None
        choices = [list(right_values(self.comparison, x)) for x in values]
        if not all(choices):
            return None
        outcome: Outcome = "none"
        for k in range(max(map(len, choices))):
            chosen = [choice[min(k, len(choice) - 1)] for choice in choices]
            right = dict(self.judged(dict(zip(values, map(constant, chosen), strict=True))))
            if self._broken <= right.keys() and all(right.values()):
                return "all"
            if any(right[number] for number in self._broken & right.keys()):
                outcome = "some"
        return outcome

    def both(self, value: int, change: Change) -> tuple[Numbers, Numbers]:
        """A value, and what becomes of it."""
        run = _Rerun(self, {})
        for node in needed(self.comparison.mesh.nodes, [value]):
            run.compute(node)
        read = run.reader(change.scope or self.comparison.scopes[value])
        return read(value), change.made(read)


class _Rerun:
    """One run with some values changed. Results are computed when they are asked for."""

    def __init__(self, around: Reruns, changes: Changes) -> None:
        self._around, self._changes, self._comparison = around, changes, around.comparison
        # The values of this run that are others than those of the first, or were not kept.
        self._new: Values = {}
        self._values = collections.ChainMap(self._new, self._comparison.values)
        self._done: set[Node] = set()
        for x in changes.keys() - self._comparison.maker.keys():
            self._change(x)

    def is_right(self, number: int, nodes: Sequence[Node]) -> bool:
        """Whether a result is right, which needs these nodes. One whose copies differ is not."""
        for node in nodes:
            if node not in self._done:
                self._done.add(node)
                self.compute(node)
        return self._comparison.is_right(number, self._values)

    def compute(self, node: Node) -> None:
        is_kept = all(x in self._comparison.values for x in node.results)
        if not is_kept or not self._new.keys().isdisjoint(node.operands):
            self._around.nodes_run += 1
            self._comparison.evaluators[0].run_node(node, self._values)
        for x in node.results:
            self._change(x)

    def reader(self, scope: MappedAxes) -> Read:
        return lambda x: on_all_shards(self._values[x], scope)

    def _change(self, x: int) -> None:
        """Put what becomes of a value in its place."""
        change = self._changes.get(x)
        if change is None:
            return
        scope = change.scope or self._comparison.scopes[x]
        numbers, old = change.made(self.reader(scope)), self._values[x]
        if is_key(old.x):
            impl = jax.random.key_impl(old.x)
            keys = jax.random.wrap_key_data(jnp.asarray(numbers), impl=impl)
            self._new[x] = Stacked(keys, tuple(scope.sizes))
            return
        with np.errstate(all="ignore"):
            new = np.asarray(numbers).astype(old.x.dtype)
        self._new[x] = _narrowed(Stacked(new, tuple(scope.sizes)), old)


def _narrowed(value: Stacked, old: Stacked) -> Stacked:
    """Without the mesh axes that the value did not have, where copies are equal.

    What is compiled for these mesh axes then runs again.
    """
    x, axes = value.x, list(value.axes)
    for name in [name for name in axes if name not in old.axes]:
        at = axes.index(name)
        first = x.take([0], at)
        if np.array_equal(np.broadcast_to(first, x.shape), x, equal_nan=x.dtype.kind in "fc"):
            x = first.squeeze(at)
            axes.remove(name)
    return Stacked(x, tuple(axes))


def constant(numbers: Numbers) -> Change:
    """These numbers, whatever the value was."""
    return Change(lambda read: numbers)


# Simple changes of a line


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A simple change of a line.

    **Attributes:**

    - `changes`: what becomes of values.
    - `cost`: what is likely costs less.
    - `words`: the change in words, where no other one does the same; else none.
    - `is_added`: whether the change adds an operation, which may stand on any line that hands the value on.
    - `is_factor`: whether it multiplies, which may be done on any line before as well.
    """

    suspect: Suspect
    changes: Changes
    cost: int
    words: str = ""
    is_added: bool = False
    is_factor: bool = False


def reductions(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """Values that a line makes, reduced over a mesh axis or multiplied by its size."""
    values = suspect.values
    if not values or not all(map(comparison.differs, values)):
        return
    arrays, scope = {x: comparison.got(x) for x in values}, comparison.scopes[values[0]]
    is_float = all(array.dtype.kind in "fc" for array in arrays.values())
    if not is_float or any(comparison.scopes[x] != scope for x in values):
        return
    # A line with a collective of its own may have the wrong one.
    is_added = not any(node.name in RULES for node in suspect.nodes)
    # What is missing in a derivative stands after it as a rule, where it comes out.
    cost = int(suspect.transposed)
    for at, (name, size) in enumerate(scope.sizes.items()):
        equal = [
            np.allclose(array, array.take([0], at), rtol=1e-10, atol=0, equal_nan=True)
            for array in arrays.values()
        ]
        for collective, reduce in _REDUCTIONS.items() if not any(equal) else ():
            changes = {x: reduced_by(x, reduce, at) for x in arrays}
            yield Trial(suspect, changes, cost, f"with jax.lax.{collective}(..., {name!r})", True)
        if not any(equal):
            changes = {x: reduced_by(x, _last, at) for x in arrays}
            words = f"with what the last shard along {name!r} has"
            yield Trial(suspect, changes, cost + 1, words, True)
        for factor in (float(size), 1 / size) if size > 1 and all(equal) else ():
            changes = {x: _multiplied(x, factor) for x in arrays}
            scaled = "multiplied" if factor > 1 else "divided"
            words = f"{scaled} by the number of shards, {size},"
            yield Trial(suspect, changes, cost, words, is_added, is_factor=True)


def unreduced(comparison: Comparison) -> Iterator[Trial]:
    """Lines without their sums or means over shards, in their derivatives too.

    What a sum too many makes is right on every shard. Only a derivative, or a later sum, is too large by it.
    """
    sums: dict[SourceLine, list[Node]] = {}
    for node in comparison.mesh.nodes:
        if node.line is not None and node.name in _SUMS and names_of(node.eqn):
            sums.setdefault(node.line, []).append(node)
    for line, nodes in sums.items():
        suspect = Suspect(line, False, nodes, [x for node in nodes for x in node.results], "other")
        for is_mean in (False, True):
            # A mean is a sum, divided by the number of shards after it.
            changes = {
                x: _multiplied(source, _count_of_shards(node) if is_mean else 1.0)
                for node in nodes
                for x, source in zip(node.results, node.operands, strict=True)
            }
            yield Trial(suspect, changes, 0)


def _count_of_shards(node: Node) -> float:
    """Over how many shards a node reduces."""
    return float(math.prod(node.scope.sizes[name] for name in names_of(node.eqn)))


def _multiplied(source: int, factor: float) -> Change:
    return Change(lambda read: read(source) * factor)


def _last(array: Numbers, axis: int, keepdims: bool) -> Numbers:
    """What the last shard has, as a reduction of NumPy's; the axis is kept."""
    return array.take([-1], axis)


def reduced_by(source: int, reduce: Callable[..., Any], at: int | tuple[int, ...]) -> Change:
    def make(read: Read) -> Numbers:
        array = read(source)
        return np.broadcast_to(reduce(array, axis=at, keepdims=True), array.shape)

    return Change(make)


def simple_changes(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """Other simple changes of a line."""
    if suspect.transposed:
        return
    # The same operation in each round of a loop is changed in all rounds, also in those that are right.
    kinds: dict[Hashable, list[Node]] = {}
    for node in comparison.mesh.nodes:
        if node.line == suspect.line and not node.transposed:
            kinds.setdefault((node.name, str(node.eqn.outvars[0].aval)), []).append(node)
    for nodes in kinds.values():
        first = nodes[0]
        if {*suspect.nodes}.isdisjoint(nodes) or first.kind != "run" or len(first.results) != 1:
            continue
        for make in _OF_COLLECTIVES.get(first.name, [_whole_numbers, _operands, _left_out]):
            for cost, changes, text in make(comparison, suspect, nodes):
                yield Trial(suspect, changes, cost, text)


# What makes trials of nodes of one kind gives their cost, the changes, and the change in words.
_Changed: TypeAlias = Iterator[tuple[int, Changes, str]]


def _moves(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """A move to the next shard or the one before, and none."""
    names, sizes = names_of(nodes[0].eqn), nodes[0].scope.sizes
    if len(names) != 1 or names[0] not in sizes:
        return
    at = list(sizes).index(names[0])
    for shift, move in _SHIFTS.items():
        changes = {
            x: _moved(source, at, shift)
            for node in nodes
            for x, source in zip(node.results, node.operands, strict=True)
        }
        yield 0, changes, f"with {move} along {names[0]!r}"


def _moved(source: int, at: int, shift: int) -> Change:
    return Change(lambda read: np.roll(read(source), shift, at))


def _indices(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """The index along another axis, or times the length of a part."""
    (name,), scope = names_of(nodes[0].eqn)[:1], nodes[0].scope
    values = [node.results[0] for node in nodes]
    for other, size in scope.sizes.items():
        if other != name and size > 1:
            changes = dict.fromkeys(values, constant(_index(scope, other)))
            yield 0, changes, f"with jax.lax.axis_index({other!r})"
    for length in _lengths(comparison) if name in scope.sizes else ():
        yield 1, dict.fromkeys(values, constant(length * _index(scope, name))), ""


def _index(scope: MappedAxes, name: Hashable, rank: int = 0) -> Numbers:
    """The index of each shard along an axis, with all mesh axes in front of axes of size one."""
    sizes = tuple(scope.sizes.values())
    return np.indices(sizes)[list(scope.sizes).index(name)].reshape((*sizes, *[1] * rank))


def _lengths(comparison: Comparison) -> list[int]:
    """The lengths of what shards have of arrays that are split."""
    split = [x for node in comparison.mesh.nodes if node.kind == "split" for x in node.results]
    lengths = {n for x in split if x in comparison.values for n in comparison.values[x].shape}
    return sorted(lengths - {0, 1})[:_MOST_LENGTHS]


def _whole_numbers(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """Truths of another shard; numbers off by one or by the index of a shard."""
    values, scope = [node.results[0] for node in nodes], nodes[0].scope
    aval: Any = nodes[0].eqn.outvars[0].aval
    if aval.dtype == bool:
        for at, size in enumerate(scope.sizes.values()):
            for shift in range(1, size):
                yield 0, {x: _moved(x, at, shift) for x in values}, ""
    elif jnp.issubdtype(aval.dtype, jnp.integer):
        for summand in (1, -1):
            yield 0, {x: _increased(x, np.asarray(summand)) for x in values}, ""
        indices = [node for node in suspect.nodes if node.name == "axis_index"]
        counted = {name for node in indices for name in names_of(node.eqn)}
        is_multiple = nodes[0].name == "mul" and suspect.evidence == "index" and not aval.shape
        for name, _, offset in _offsets(comparison, scope, 0) if is_multiple else ():
            if name in counted:
                yield 1, dict.fromkeys(values, constant(offset)), ""
        for name, length, offset in _offsets(comparison, scope, len(aval.shape), aval.shape[-1:]):
            yield 0, {x: _increased(x, offset) for x in values}, _added(length, name)


def _operands(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """Whole numbers that a line reads, with the index of a shard times the length of a part less or more."""
    scope, constants = nodes[0].scope, comparison.mesh.constants
    results_here = {x for node in suspect.nodes for x in node.results}
    for k, operand in enumerate(nodes[0].operands):
        aval: Any = nodes[0].eqn.invars[k].aval
        operands = {node.operands[k] for node in nodes}
        readers = (x for x in comparison.mesh.nodes if not operands.isdisjoint(x.operands))
        is_compared = operand in constants and nodes[0].name in _COMPARISONS and not aval.shape
        is_given = operand not in {*constants, *results_here, *comparison.indices}
        if not jnp.issubdtype(aval.dtype, jnp.integer) or any(x.scope != scope for x in readers):
            continue
        for name, length, offset in _offsets(comparison, scope, len(aval.shape)):
            if is_compared:
                yield 1, {x: _increased(x, offset, scope) for x in operands}, ""
            elif is_given and length > 1:
                changes = {x: _increased(x, -offset, scope) for x in operands}
                yield 1, changes, _added(-length, name)


def _offsets(
    comparison: Comparison, scope: MappedAxes, rank: int, lengths: Collection[int] = ()
) -> Iterator[tuple[Hashable, int, Numbers]]:
    """The index of each shard along an axis, times the length of a part."""
    for name, size in scope.sizes.items():
        for length in lengths or [1, *_lengths(comparison)] if size > 1 else ():
            yield name, length, length * _index(scope, name, rank)


def _added(length: int, name: Hashable) -> str:
    times = {1: "", -1: "-"}.get(length, f"{length} * ")
    return f"with {times}jax.lax.axis_index({name!r}) added"


def _left_out(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """One operand in the place of what is made of two."""
    aval = str(nodes[0].eqn.outvars[0].aval)
    for k in range(len(nodes[0].operands) if nodes[0].name in _LEFT_OUT else 0):
        # A line that is called several times may broadcast another operand each time.
        if all(str(node.eqn.invars[k].aval) == aval for node in nodes):
            yield 1, {node.results[0]: _same(node.operands[k]) for node in nodes}, ""


def _same(source: int) -> Change:
    return Change(lambda read: read(source))


def _increased(value: int, summand: Numbers, scope: MappedAxes | None = None) -> Change:
    return Change(lambda read: read(value) + summand, scope)


_OF_COLLECTIVES = {"ppermute": [_moves], "axis_index": [_indices]}


# Which changes put all results right, and whether they tell the cause


def mending(
    reruns: Reruns,
    suspects: Sequence[Suspect],
    others: Sequence[Suspect] | None,
    again: Again | None,
) -> list[Trial]:
    """The trials that put all results right, the likeliest first.

    **Arguments:**

    - `suspects`: the lines that lead to wrong results.
    - `others`: the lines whose values may be wrong though they are those of one device, if any change may
        be tried.
    - `again`: gives the program with other arguments, of which the results have to be right too: a few
        numbers may be right by accident. None inside of loops.
    """
    comparison = reruns.comparison
    trials = [x for suspect in suspects for x in reductions(comparison, suspect)]
    if others is not None:
        trials += unreduced(comparison)
        for suspect in (*suspects, *others):
            trials += simple_changes(comparison, suspect)
    good, most = [], reruns.nodes_run + MOST_NODES
    for trial in sorted(trials, key=lambda x: x.cost):
        if reruns.nodes_run > most:
            break
        if reruns.mends(trial.changes):
            good.append(trial)
    return [trial for trial in good if are_confirmed(trial.changes, again)]


def are_confirmed(changes: Changes, again: Again | None) -> bool:
    """Whether changes put all results right for other arguments too, as far as these can be had."""
    other = again() if again is not None else None
    return other is None or other.mends(changes)


def cause(comparison: Comparison, suspect: Suspect, trials: Sequence[Trial]) -> str | None:
    """The change that puts all results right at a line, if every change that does so anywhere is the same."""
    here = {trial.words for trial in trials if trial.suspect.line == suspect.line}
    if len(here) != 1 or {trial.words for trial in trials} != here or "" in here:
        return None
    lines = {trial.suspect.line for trial in trials}
    if any(_may_be_given(comparison, x) for trial in trials for x in trial.changes):
        return None
    for trial in trials:
        if trial.is_added or trial.is_factor:
            lines |= _before(comparison, trial)
        if trial.is_added:
            lines |= _after(comparison, trial)
    known = sorted(line for line in lines if line is not None)
    if len(known) < len(lines) or len(known) > _MOST_LINES:
        return None
    first, *others = known
    more = [str(line.number) if line.file == first.file else str(line) for line in others]
    return f"{here.pop()} at {' or '.join([str(first), *more])}, all results are right"


def _may_be_given(comparison: Comparison, value: int) -> bool:
    """Whether a literal is added on a line that calls a function, which may have given it."""
    maker = comparison.maker.get(value)
    if maker is None or maker.line is None or not _calls_by_name(maker.line):
        return False
    literals = comparison.mesh.constants.keys()
    nodes = [node for node in comparison.mesh.nodes if value in node.operands or node is maker]
    return any(node.name == "add" and not literals.isdisjoint(node.operands) for node in nodes)


def _calls_by_name(line: SourceLine) -> bool:
    """Whether a line calls a function by its bare name, as those of the user's are called."""
    return any(not hasattr(builtins, name) for name in _CALL.findall(line.source))


def _before(comparison: Comparison, trial: Trial) -> set[SourceLine | None]:
    """The lines before, at which what a change adds can stand as well; a `None` among them is any line."""
    lines: set[SourceLine | None] = {None} if trial.suspect.transposed else set()
    nodes = trial.suspect.nodes
    results_here = {x for node in nodes for x in node.results}
    for x in {x for node in nodes for x in node.operands} - results_here:
        before = comparison.maker.get(x)
        if before is not None and before.transposed:
            # What is missing or too much may as well be in the loss.
            lines.add(None)
        elif before is not None and not comparison.is_plain(x):
            lines.add(before.line)
    return lines


def _after(comparison: Comparison, trial: Trial) -> set[SourceLine | None]:
    """The lines after, at which what a change adds can stand as well.

    There is a `None` among them where the value goes to another function: nobody knows by which lines.
    """
    lines: set[SourceLine | None] = set()
    callers = [callers_of(node.eqn) for node in comparison.mesh.nodes if node.line is not None]
    # How many lines of the user's are around those of the mapped function itself.
    depth = min(map(len, callers), default=0)
    for x in trial.changes:
        around = callers_of(comparison.maker[x].eqn)
        for reader in [node for node in comparison.mesh.nodes if x in node.operands]:
            if reader.kind == "run" and callers_of(reader.eqn) == around:
                lines.add(reader.line)
            elif reader.kind == "run" or len(around) > depth:
                lines.add(None)
    return lines
