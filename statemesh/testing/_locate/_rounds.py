"""Loops whose rounds have nodes of their own: trials with other rounds, and with values that go on."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np

from .._program._jaxprs import aligned, names_of
from .._program._lines import SourceLine, loops_around
from .._types import Numbers
from ._compare import Comparison
from ._graph import Node
from ._reruns import Change, Changes, Read, results_on_all_shards, same_as
from ._suspects import Suspect
from ._trials import Trial, moved


# So many loops are looked at.
_MOST_LOOPS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class _Loop:
    """A `for` or `while` statement that was unrolled, or a loop of JAX that was opened.

    **Attributes:**

    - `line`: where the statement begins, or what runs the loop.
    - `rounds`: the nodes of each round.
    """

    line: SourceLine
    rounds: Sequence[Sequence[Node]]

    @functools.cached_property
    def makers(self) -> Mapping[int, Node]:
        """The node that makes each value inside."""
        return {x: node for nodes in self.rounds for node in nodes for x in node.results}

    @functools.cached_property
    def later(self) -> Mapping[int, int]:
        """For values of a round those of the next round in their place."""
        later: dict[int, int] = {}
        for before, after in itertools.pairwise(self.rounds):
            kinds = [[_kind(node) for node in nodes] for nodes in (before, after)]
            for a, b in aligned(*kinds).items():
                later.update(zip(before[a].results, after[b].results, strict=True))
        return later

    @functools.cached_property
    def earlier(self) -> Mapping[int, int]:
        """For values of a round those of the round before in their place."""
        return {after: before for before, after in self.later.items()}

    def before(self, value: int, count: int) -> int | None:
        """The value in the place of this one so many rounds before, if there is one."""
        known: int | None = value
        for _ in range(count):
            known = None if known is None else self.earlier.get(known)
        return known

    def first(self, value: int) -> int:
        """The value in the place of this one in the first round that has one."""
        while value in self.earlier:
            value = self.earlier[value]
        return value


def of_rounds(comparison: Comparison) -> Iterator[Trial]:
    """Trials for the loops of which each round has nodes of its own."""
    for calls, back in _loops(comparison):
        lengths = [list(_of_another_length(comparison, loop)) for loop in calls]
        yield from _of_all_runs(lengths)
        repeated = [loop for loop in calls if len(loop.rounds) > 1]
        for trials_of in (_of_values_that_go_on, _of_values_that_move):
            yield from _of_all_runs([list(trials_of(comparison, loop)) for loop in repeated])
        # A function may run in its own derivative too.
        lengths += (list(_of_another_length(comparison, loop)) for loop in back)
        if back and len({*map(len, lengths)}) == 1:
            yield from map(_together, zip(*lengths, strict=True))


def _of_all_runs(each: Sequence[Sequence[Trial]]) -> Iterator[Trial]:
    """The trials of the runs of a loop, together where all runs have the same."""
    if len({*map(len, each)}) == 1:
        yield from map(_together, zip(*each, strict=True))
    else:
        yield from itertools.chain(*each)


def _together(trials: Sequence[Trial]) -> Trial:
    """One trial of what changes in each run of a loop."""
    first = trials[0]
    nodes = [node for trial in trials for node in trial.suspect.nodes]
    values = [x for trial in trials for x in trial.suspect.values]
    changes = dict(collections.ChainMap(*(dict(trial.changes) for trial in trials)))
    suspect = dataclasses.replace(first.suspect, nodes=nodes, values=values)
    return dataclasses.replace(first, suspect=suspect, changes=changes)


def _loops(comparison: Comparison) -> list[tuple[list[_Loop], list[_Loop]]]:
    """The runs of each loop, and those in derivatives."""
    back, nodes = [
        [x for x in comparison.mesh.nodes if x.transposed is is_back] for is_back in (True, False)
    ]
    of_back = [run for runs in _of_jax(back).values() for run in runs]
    loops = []
    for line, runs in [*_of_python(nodes).items(), *_of_jax(nodes).items()][:_MOST_LOOPS]:
        kinds = _names(runs[0])
        alike = [run for run in of_back if _names(run) == kinds]
        loops.append(([_Loop(line, run) for run in runs], [_Loop(line, run) for run in alike]))
    return loops


def _names(run: Sequence[Sequence[Node]]) -> list[list[str]]:
    """What runs in each round of a loop."""
    return [[node.name for node in nodes] for nodes in run]


def _of_python(nodes: Sequence[Node]) -> dict[SourceLine, list[list[list[Node]]]]:
    """The rounds of each run of the loops that Python has unrolled."""
    # What a function has made that JAX has traced once has the lines of its first call.
    times = collections.Counter((id(node.eqn), node.rounds) for node in nodes)
    # For each run of a loop the nodes with the number of the statement in its body; none where that is
    # unknown.
    by_run: dict[tuple[SourceLine, Hashable], list[tuple[Node, int | None]]] = {}
    # A file is searched once for each of its lines.
    around = functools.cache(loops_around)
    for node in nodes:
        if times[id(node.eqn), node.rounds] > 1:
            for those in by_run.values():
                those.append((node, None))
        elif node.line is not None:
            lines = (node.line, *node.callers)
            for k, line in enumerate(lines):
                for loop, number in around(line).items():
                    # A loop of JAX inside is a part of the round.
                    outer = tuple(x for x in node.rounds if x.line not in lines[: k + 1])
                    run = loop, (lines[k + 1 :], outer)
                    by_run.setdefault(run, []).append((node, number))
    found: dict[SourceLine, list[list[list[Node]]]] = {}
    for (line, _), numbered in by_run.items():
        rounds: list[list[Node]] = [[]]
        before = 0
        last = max(k for k, (_, statement) in enumerate(numbered) if statement is not None)
        for node, statement in numbered[: last + 1]:
            if statement is not None and statement < before:
                rounds.append([])
            before = before if statement is None else statement
            rounds[-1].append(node)
        found.setdefault(line, []).append(rounds)
    return found


def _of_jax(nodes: Sequence[Node]) -> dict[SourceLine, list[list[list[Node]]]]:
    """The rounds of each run of the loops of JAX that the graph has opened."""
    by_run: dict[tuple[SourceLine, int], dict[int, list[Node]]] = {}
    for node in nodes:
        for loop, line, number in node.rounds:
            if line is not None:
                by_run.setdefault((line, loop), {}).setdefault(number, []).append(node)
    found: dict[SourceLine, list[list[list[Node]]]] = {}
    for (line, _), rounds in by_run.items():
        if len(rounds) > 1:
            found.setdefault(line, []).append([*rounds.values()])
    return found


def _kind(node: Node) -> Hashable:
    return node.name, node.line, *(str(var.aval) for var in node.eqn.outvars)


# Another number of rounds


def _of_another_length(comparison: Comparison, loop: _Loop) -> Iterator[Trial]:
    """One round more or less, none, and as many as there are shards along a mesh axis."""
    inside = {*loop.makers.values()}
    readers = [node for node in comparison.mesh.nodes if node not in inside]
    read = {*comparison.mesh.results, *(x for node in readers for x in node.operands)}
    come_out = sorted({x for node in loop.rounds[-1] for x in node.results} & read)
    if any(node.kind == "stack" and {*node.operands} <= loop.makers.keys() for node in readers):
        # An array of what each round makes would have another length too.
        return
    if not come_out or not all(comparison.is_number(x) for x in come_out):
        return
    suspect = Suspect(loop.line, False, loop.rounds[-1], come_out, "other")
    length, sizes = len(loop.rounds), {*loop.rounds[0][0].scope.sizes.values()} - {1}
    # Who passes something on from shard to shard needs a round less than there are shards.
    counts = {count for size in sizes for count in (size, size - 1)}
    for later in [loop.later] if length > 1 else _carried(comparison, loop, come_out):
        rounds = _NextRounds(comparison, loop, later)
        for more in sorted({1, *(count - length for count in counts if count > length)}):
            if rounds.is_known:
                changes = {x: Change(rounds.after(x, more), inside=inside) for x in come_out}
                yield Trial(suspect, changes, 0)
    if length == 1:
        return
    fewer = sorted({1, *(length - count for count in counts if count < length)})
    before = [{x: loop.before(x, count) for x in come_out} for count in fewer]
    for of_values in (*before, {x: _before_all(loop, x) for x in come_out}):
        known = [x for x in of_values.values() if x is not None]
        if len(known) == len(come_out):
            same = [same_as(x, inside) for x in known]
            yield Trial(suspect, dict(zip(come_out, same, strict=True)), 0)


def _carried(
    comparison: Comparison, loop: _Loop, come_out: Sequence[int]
) -> Iterator[Mapping[int, int]]:
    """What may come into a single round in the place of what it hands on, with that."""

    def form(x: int) -> Hashable:
        return comparison.values[x].shape, comparison.values[x].x.dtype, comparison.scopes[x]

    read = {x for node in loop.rounds[0] for x in node.operands} - loop.makers.keys()
    for x in filter(comparison.is_number, sorted(read) if len(come_out) == 1 else ()):
        if form(x) == form(come_out[0]):
            yield {x: come_out[0]}


def _before_all(loop: _Loop, value: int) -> int | None:
    """What comes into the first round where the others read a value of the round before."""
    value = loop.first(value)
    for node in loop.rounds[1]:
        of_first = loop.makers.get(loop.earlier.get(node.results[0], -1))
        if of_first is not None and value in node.operands:
            return of_first.operands[node.operands.index(value)]
    return None


class _NextRounds:
    """The rounds that would come after the last one.

    **Attributes:**

    - `is_known`: whether all that it reads is known.
    """

    def __init__(self, comparison: Comparison, loop: _Loop, later: Mapping[int, int]) -> None:
        self._comparison, self._loop, self._later = comparison, loop, later
        last = [node for nodes in loop.rounds[-2:] for node in nodes]
        self._makers = {x: node for node in last for x in node.results}
        self.is_known = all(comparison.is_number(x) for node in last for x in node.operands)

    def after(self, value: int, count: int) -> Callable[[Read], Numbers]:
        """What gives the value of the round so many rounds later, in the place of one of the last round."""

        def made(read: Read) -> Numbers:
            for number in range(1, count + 1):
                read = functools.partial(self._next, read, number, {})
            return read(value)

        return made

    def _next(self, read: Read, number: int, known: dict[int, Numbers], value: int) -> Numbers:
        """The value of the next round, where `read` gives those of the round before that one.

        **Arguments:**

        - `number`: that of the next round, counted from the last one.
        - `known`: those that were made for it already.
        """
        node = self._makers.get(value)
        if value in self._later or node is None:
            return read(self._later.get(value, value))
        if value not in known:
            next_ = functools.partial(self._next, read, number, known)
            operands = [self._operand(node, k, next_, number) for k in range(len(node.operands))]
            known |= zip(
                node.results, results_on_all_shards(self._comparison, node, operands), strict=True
            )
        return known[value]

    def _operand(self, node: Node, k: int, read: Read, number: int) -> Numbers:
        """An operand in a later round. A constant changes as it did since the round before the last."""
        x, constants = node.operands[k], self._comparison.mesh.constants
        before = self._makers.get(self._loop.earlier.get(node.results[0], -1))
        if before is not None and {x, before.operands[k]} <= constants.keys():
            # This way truths have a difference too.
            return (1 + number) * read(x) - number * read(before.operands[k])
        return read(x)


def _rows(loop: _Loop) -> Iterator[list[Node]]:
    """The nodes that are in the same place of each round."""
    for first in loop.rounds[0]:
        row = [first]
        while row[-1].results[0] in loop.later:
            row.append(loop.makers[loop.later[row[-1].results[0]]])
        if len(row) == len(loop.rounds):
            yield row


# Values that are the same in all rounds


def _of_values_that_go_on(comparison: Comparison, loop: _Loop) -> Iterator[Trial]:
    """What a line made in the round before, in the place of what comes in from outside in each round."""
    for row in _rows(loop):
        first = row[0]
        for k, x in enumerate(first.operands if first.kind == "run" else ()):
            is_alike = str(first.eqn.invars[k].aval) == str(first.eqn.outvars[0].aval)
            stays = all(node.operands[k : k + 1] == (x,) for node in row)
            if is_alike and stays and x not in loop.makers and comparison.is_number(x):
                changes = {
                    node.results[0]: _with_operand(comparison, node, k, before.results[0])
                    for before, node in itertools.pairwise(row)
                }
                yield Trial(Suspect(first.line, False, row, [*changes], "other"), changes, 1)


def _with_operand(comparison: Comparison, node: Node, k: int, value: int) -> Change:
    """What a node makes if it reads another value."""
    operands = [*node.operands]
    operands[k] = value
    return Change(
        lambda read: results_on_all_shards(comparison, node, list(map(read, operands)))[0]
    )


def _of_values_that_move(comparison: Comparison, loop: _Loop) -> Iterator[Trial]:
    """What comes in from outside in each round, as if it went from shard to shard as others do in a ring."""
    moves = [node for nodes in loop.rounds for node in nodes if node.name == "ppermute"]
    if not moves or len(names := names_of(moves[0].eqn)) != 1:
        return
    at = [*moves[0].scope.sizes].index(names[0])
    for row in _rows(loop):
        # What each round adds to stays behind, as if it belonged to the shard.
        if all(x.results[0] in y.operands for x, y in itertools.pairwise(row)):
            for shift in (1, -1):
                turned = {
                    x: moved(x, at, shift)
                    for node in row
                    for x in node.results
                    if comparison.is_number(x)
                }
                yield Trial(Suspect(moves[0].line, False, moves, [], "other"), turned, 1)
    # The nodes that read such a value, with the numbers of their rounds: for the first result of the first
    # of them, and the value.
    reading: dict[tuple[int, int], list[tuple[int, Node]]] = {}
    for number, nodes in enumerate(loop.rounds):
        for node in nodes:
            for x in {*node.operands} - loop.makers.keys() - comparison.mesh.constants.keys():
                if comparison.is_number(x):
                    place = loop.first(node.results[0]), x
                    reading.setdefault(place, []).append((number, node))
    for (_, x), readers in reading.items():
        is_index = comparison.is_whole(x)
        for shift in (1, -1):
            changes: Changes = {
                y: _with_moved(comparison, node, k, x, shift * number, at)
                for number, node in readers
                for k, y in enumerate(node.results)
            }
            nodes = [node for _, node in readers]
            # An array stays where it is because nobody moves it; an index because a line reads it.
            if not is_index:
                yield Trial(Suspect(moves[0].line, False, moves, [], "other"), changes, 0)
            yield Trial(Suspect(nodes[0].line, False, nodes, [], "other"), changes, 0)


def _with_moved(
    comparison: Comparison, node: Node, k: int, value: int, shift: int, at: int
) -> Change:
    """A result of a node if it reads of a value what other shards have."""

    def make(read: Read) -> Numbers:
        operands = [np.roll(read(x), shift, at) if x == value else read(x) for x in node.operands]
        return results_on_all_shards(comparison, node, operands)[k]

    return Change(make, node.scope)
