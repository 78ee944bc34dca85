"""The program on a mesh runs again with other values at a line, and its results are judged.

The idea is that of delta debugging (Zeller, Isolating cause-effect chains from computer programs, 2002): a
line is the cause where putting it right puts the results right. Either its values become those of one device,
or they become what a simple change of the line would make. Only the nodes after a line run again.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._program._jaxprs import names_of, nested_equations
from .._program._lines import SourceLine, lines_of, loops_around
from .._program._numbers import is_key
from .._program._stacked import MappedAxes, Stacked
from .._types import Numbers
from ._compare import Comparison, right_values
from ._evaluate import Values, narrowed, on_all_shards
from ._graph import Node, needed
from ._suspects import OF_ORDER, REDUCTIONS, Suspect, is_first, is_wrong_before


# So many nodes run again for right values, for simple changes, for specs, and for policies, each. Of a long
# program, right values and changes of its likely lines are tried that take so many runs of the whole.
MOST_NODES = 30_000
_MOST_RUNS = 50

# What gives a value, with all mesh axes in front.
Read: TypeAlias = Callable[[int], Numbers]


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """What becomes of a value.

    **Attributes:**

    - `make`: gives the changed numbers. It may read the value, and what its node reads.
    - `scope`: the mesh axes over which it then may differ, if these are others than before.
    - `inside`: the nodes for which a value stays what it was. The change reads what they do.
    """

    make: Callable[[Read], Numbers]
    scope: MappedAxes | None = None
    inside: Collection[Node] = ()

    def made(self, read: Read) -> Numbers:
        """The changed numbers; those that overflow are infinite, as on devices."""
        with np.errstate(all="ignore"):
            return self.make(read)


Changes: TypeAlias = Mapping[int, Change]
# What becomes of a value, or the node that runs in the place of the one that makes it.
ChangesOrNodes: TypeAlias = Mapping[int, Change | Node]
# Gives the program with other arguments, or `None` where it cannot be run with them.
Again: TypeAlias = Callable[[], "Reruns | None"]


# What these make is one of the values that they read.
_CHOOSING = ("select_n", "join", "stack", "convert_element_type", "reshape")

# How many of the wrong results are right with right values at a line. For all, no other one may be wrong.
Outcome: TypeAlias = Literal["all", "some", "none"]


class Reruns:
    """The program on a mesh, run again with some values changed.

    **Attributes:**

    - `nodes_run`: how many nodes have run so far.
    - `most_nodes`: how many may run for the likely lines.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.nodes_run = comparison, 0
        graph = comparison.mesh
        self.most_nodes = max(MOST_NODES, _MOST_RUNS * len(graph.nodes))
        self._broken = frozenset(k for k, right in enumerate(comparison.right) if not right)
        self._needed = [needed(graph.nodes, [x]) for x in graph.results]
        # For each result the values that it depends on.
        self._sources = [
            {x, *(operand for node in nodes for operand in node.operands)}
            for x, nodes in zip(graph.results, self._needed, strict=True)
        ]

    def judged(self, changes: ChangesOrNodes) -> Iterator[tuple[int, bool]]:
        """The results that a change reaches, and whether each is right."""
        run = _Rerun(self, changes)
        reached = [k for k, xs in enumerate(self._sources) if not xs.isdisjoint(changes)]
        # The wrong ones first, and what is made early.
        for k in sorted(reached, key=lambda k: (k not in self._broken, len(self._needed[k]))):
            yield k, run.is_right(k, self._needed[k])

    @functools.cached_property
    def _loops(self) -> Mapping[SourceLine, Mapping[Node, Changes]]:
        """For lines the loops in which they run too that get something wrong, with what those should give."""
        comparison, found = self.comparison, dict[SourceLine, dict[Node, Changes]]()
        for loop in comparison.operands:
            wrong = list(filter(comparison.differs, loop.results))
            right = [next(right_values(comparison, x), None) for x in wrong]
            known = {x: constant(y) for x, y in zip(wrong, right, strict=True) if y is not None}
            if any(map(comparison.is_unrelated, loop.operands)) and len(known) == len(wrong):
                inside = {x for eqn in nested_equations(loop.eqn) for x in lines_of(eqn)}
                for line in inside.union(*map(loops_around, inside)):
                    found.setdefault(line, {})[loop] = known
        return found

    @functools.cached_property
    def means(self) -> Collection[Node]:
        """The reductions of write policies that a division by the number of shards makes a mean."""
        makers, found = self.comparison.maker, set[Node]()
        for node in self.comparison.mesh.nodes:
            if node.name == "div" and node.line is None and not node.is_own:
                maker = makers.get(node.operands[0])
                while maker is not None and maker.name in ("split", "reshape"):
                    maker = makers.get(maker.operands[0])
                found.update([maker] if maker else [])
        return found

    def everywhere(self, line: SourceLine | None, changes: Changes) -> Changes | None:
        """Changes at a line, with the right results of loops in which it runs too.

        **Returns:** `None` where the changes do not put right what the loops get.
        """
        loops = self._loops.get(line, {}) if line else {}
        unrelated, known = self.comparison.is_unrelated, self.comparison.wants
        run = _Rerun(self, changes)
        for loop in loops:
            given = [x for x in loop.operands if unrelated(x) and x in known]
            if not given or not all(map(run.is_put_right, given)):
                return None
        return dict(collections.ChainMap({**changes}, *map(dict, loops.values())))

    def mends(self, changes: ChangesOrNodes) -> bool:
        """Whether a change puts all results right."""
        return self.reaches_all(changes) and all(right for _, right in self.judged(changes))

    def try_right(self, suspect: Suspect) -> Outcome | None:
        """What comes of right values at a line; `None` if nobody knows these."""
        values, differs = suspect.values, self.comparison.differs
        if not values or not all(map(differs, values)) or self.nodes_run > self.most_nodes:
            return None
        choices = [list(right_values(self.comparison, x)) for x in values]
        if not all(choices):
            return None
        outcome: Outcome = "none"
        for k in range(max(map(len, choices))):
            chosen = [choice[min(k, len(choice) - 1)] for choice in choices]
            changes = dict(zip(values, map(constant, chosen), strict=True))
            found = self._outcome(self.everywhere(suspect.line, changes) or changes)
            if found == "all":
                return found
            outcome = found if found == "some" else outcome
        # Positions in a part, and what is counted or sorted in it, are others than those of one device.
        is_of_order = all(map(self.comparison.is_whole, values)) or self._is_of_order(suspect)
        if (
            outcome == "none"
            and is_of_order
            and not is_wrong_before(self.comparison, suspect.nodes)
        ):
            return None
        return outcome

    def ends_with(self, values: Collection[int]) -> bool:
        """Whether all wrong results are these values, or choices between them and others."""
        ends = {self.comparison.mesh.results[k] for k in self._broken}
        chosen = {*values}
        for node in self.comparison.mesh.nodes:
            if node.name in _CHOOSING and not chosen.isdisjoint(node.operands):
                chosen.update(node.results)
        return ends <= chosen

    def _outcome(self, changes: Changes) -> Outcome:
        """How many of the wrong results are right with a change."""
        is_all, some = self.reaches_all(changes), False
        for number, is_right in self.judged(changes):
            is_all &= is_right
            some |= is_right and number in self._broken
            # The wrong ones come first.
            if not is_all and (some or number not in self._broken):
                break
        return "all" if is_all else "some" if some else "none"

    def reaches_all(self, values: Collection[int]) -> bool:
        """Whether all wrong results depend on these values."""
        return not any(self._sources[k].isdisjoint(values) for k in self._broken)

    def _is_of_order(self, suspect: Suspect) -> bool:
        """Whether the order of a part decides what a line makes."""
        first = [node for node in suspect.nodes if is_first(self.comparison, node)]
        return bool(first) and all(node.name in OF_ORDER for node in first)

    def both(self, value: int, change: Change) -> tuple[Numbers, Numbers]:
        """A value, and what becomes of it."""
        run = _Rerun(self, {})
        run.compute_all(needed(self.comparison.mesh.nodes, [value]))
        read = run.reader(change.scope or self.comparison.scopes[value])
        return read(value), change.made(read)


class _Rerun:
    """One run with some values changed. Results are computed when they are asked for."""

    def __init__(self, around: Reruns, changes: ChangesOrNodes) -> None:
        self._around, self._changes, self._comparison = around, changes, around.comparison
        # The values of this run that are others than those of the first, or were not kept.
        self._new: Values = {}
        self._values = collections.ChainMap(self._new, self._comparison.values)
        # Those that stay for some nodes what they were before a change.
        self._unchanged: Values = {}
        self._done: set[Node] = set()
        for x in changes.keys() - self._comparison.maker.keys():
            self._change(x)

    def is_right(self, number: int, nodes: Sequence[Node]) -> bool:
        """Whether a result is right, which needs these nodes. One whose copies differ is not."""
        self.compute_all(nodes)
        end = self._comparison.mesh.results[number]
        return self._comparison.is_right(number, self._values, self._other_node(end))

    def is_put_right(self, value: int) -> bool:
        """Whether a value is the one that shards should have now."""
        self.compute_all(needed(self._comparison.mesh.nodes, [value]))
        return self._comparison.is_plain_as(value, self._values[value])

    def compute_all(self, nodes: Sequence[Node]) -> None:
        """Compute each node once: a change reads what it changes."""
        for node in nodes:
            if node not in self._done:
                self._done.add(node)
                self.compute(node)

    def compute(self, node: Node) -> None:
        is_kept = all(x in self._comparison.values for x in node.results)
        other = self._other_node(node.results[0])
        if other or not is_kept or not self._new.keys().isdisjoint(node.operands):
            self._around.nodes_run += 1
            results = self._results(other or node)
            self._new.update(zip(node.results, results, strict=True))
        changes = {x: y for x in node.results if isinstance(y := self._changes.get(x), Change)}
        self._unchanged |= {x: self._values[x] for x, change in changes.items() if change.inside}
        for x in node.results:
            self._change(x)

    def _other_node(self, value: int) -> Node | None:
        change = self._changes.get(value)
        return change if isinstance(change, Node) else None

    def _results(self, node: Node) -> list[Stacked]:
        """The results of a node. Those of a write policy come of the axes along which states differ now."""
        evaluator, makers = self._comparison.evaluators[0], self._comparison.maker
        if node.line is not None or node.is_own or not node.name.startswith(REDUCTIONS):
            return evaluator.results(node, [self._value(x, node) for x in node.operands])
        # States of one policy go as one array, though they may differ along other axes now.
        (x,) = node.operands
        together = makers.get(x)
        if together is None or together.is_own or together.name != "concatenate":
            return evaluator.results(self._by_policy(node, x), [self._values[x]])
        parts = [
            evaluator.results(self._by_policy(node, y), [self._values[y]])[0]
            for y in together.operands
        ]
        return evaluator.results(together, parts)

    def _value(self, x: int, node: Node) -> Stacked:
        """What a node reads."""
        change = self._changes.get(x)
        stays = isinstance(change, Change) and node in change.inside
        return (self._unchanged if stays else self._values)[x]

    def _by_policy(self, node: Node, value: int) -> Node:
        """The reduction of a write policy, over the axes along which a value differs now."""
        before, after = self._comparison.values.get(value), self._values[value].axes
        if before is None or before.axes == after:
            return node
        # The mean of equal copies is what each of them is.
        is_mean = node in self._around.means
        kept = [name for name in names_of(node.eqn) if name in after or is_mean]
        names = (*kept, *(name for name in after if name not in before.axes))
        eqn: Any = node.eqn
        return dataclasses.replace(node, eqn=eqn.replace(params={**eqn.params, "axes": names}))

    def reader(self, scope: MappedAxes) -> Read:
        return _reader(self._values, scope)

    def _reader_inside(self, scope: MappedAxes) -> Read:
        """What reads the values that stay what they were, also those that are made later."""

        def read(x: int) -> Numbers:
            self.compute_all(needed(self._comparison.mesh.nodes, [x]))
            return on_all_shards(self._unchanged.get(x, self._values[x]), scope)

        return read

    def _change(self, x: int) -> None:
        """Put what becomes of a value in its place."""
        change = self._changes.get(x)
        if not isinstance(change, Change):
            return
        scope = change.scope or self._comparison.scopes[x]
        read = self._reader_inside(scope) if change.inside else self.reader(scope)
        made, old = change.made(read), self._values[x]
        if is_key(old.x):
            impl = jax.random.key_impl(old.x)
            keys = jax.random.wrap_key_data(jnp.asarray(made), impl=impl)
            self._new[x] = Stacked(keys, tuple(scope.sizes))
            return
        with np.errstate(all="ignore"):
            new = np.asarray(made).astype(old.x.dtype)
        # A write policy does not reduce over axes along which copies are equal.
        self._new[x] = narrowed(Stacked(new, tuple(scope.sizes)))


def constant(array: Numbers) -> Change:
    """These numbers, whatever the value was."""
    return Change(lambda read: array)


def same_as(value: int, inside: Collection[Node] = ()) -> Change:
    """What another value is."""
    return Change(lambda read: read(value), inside=inside)


def _reader(values: Mapping[int, Stacked], scope: MappedAxes) -> Read:
    return lambda x: on_all_shards(values[x], scope)


def results_on_all_shards(
    comparison: Comparison, node: Node, operands: Sequence[Numbers]
) -> list[Numbers]:
    """The results of a node, with all mesh axes in front, as those of its operands."""
    axes = tuple(node.scope.sizes)
    results = comparison.evaluators[0].results(node, [Stacked(x, axes) for x in operands])
    return [node.scope.spread(result, axes).x for result in results]


def runs_of(again: Again | None) -> list[Reruns]:
    """The program with other arguments, as far as it can be run with them."""
    other = again() if again is not None else None
    return [] if other is None else [other]
