"""The values of a program on a mesh beside those of the program on one device, also inside loops."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jax.sharding import PartitionSpec

from .._program._jaxprs import Jaxpr, counts_of_scan
from .._program._numbers import numbers, roundoff
from .._program._stacked import Scope, Stacked
from .._types import Numbers
from ._evaluate import Evaluator, Values, on_all_shards
from ._graph import Constant, Graph, Node, Operand, graph_of, pairs
from ._relations import Relation, largest, relation, unequal_copies, whole


Evaluators: TypeAlias = tuple[Evaluator, Evaluator]

# What is kept of the program on the mesh, and of the values that differ, in bytes. The others are let go.
_MOST_BYTES = 2**28
# So many loops and branches can be looked into.
_MOST_LOOPS = 8
# A mistake shows in the first rounds.
_MOST_ROUNDS = 32

_LOOPS = ("scan", "while", "cond")
# Numbers that these make are no positions.
_OF_KEYS = ("random_fold_in", "random_split", "random_wrap", "random_unwrap")
_RANDOM = ("random_bits", "random_wrap", "random_fold_in", "random_split", "random_seed")


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """A value of which shards have not simply their part.

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
    """Two programs, side by side. `compare` runs them and fills it.

    **Arguments:**

    - `evaluators`: of the program on a mesh, and of that on one device.
    - `scope`: the mesh axes around the programs.

    **Attributes:**

    - `mesh`, `single`: the two graphs.
    - `maker`: the node that makes each value of the program on the mesh.
    - `matched`: whether each node of the one program belongs to one of the other.
    - `partners`: for nodes of the program on the mesh the numbers of those that belong to them.
    - `scopes`: the mesh axes over which each value may differ.
    - `values`: those of the program on the mesh, as far as they are kept.
    - `relations`: what each value of the program on the mesh is of that on one device.
    - `differences`: the values that are not simply those of one device.
    - `indices`: the values that differ because they are made from the index of a shard.
    - `positions`: those of them that are not made from constants only.
    - `operands`: those of loops and branches whose results differ, in both programs.
    - `lengths`: the lengths of what shards have of arrays that are split.
    - `results`: the results.
    - `ends`: the same as the values of each program.
    """

    def __init__(self, evaluators: Evaluators, scope: Scope) -> None:
        self.evaluators, self.scope = evaluators, scope
        self.mesh, self.single = (evaluator.graph for evaluator in evaluators)
        self.maker = self.mesh.maker()
        self.partners = pairs(self.mesh.nodes, self.single.nodes)
        self.matched = len(self.partners) == len(self.mesh.nodes) == len(self.single.nodes)
        self.scopes = dict.fromkeys(self.mesh.inputs, scope)
        self.scopes |= {x: node.around for node in self.mesh.nodes for x in node.results}
        self.values: Values = {}
        self.relations: dict[int, Relation | None] = {}
        self.differences: dict[int, Difference] = {}
        self.indices: set[int] = set()
        self.positions: set[int] = set()
        self.operands: dict[Node, tuple[list[Stacked], list[Stacked]]] = {}
        self.lengths: set[int] = set()
        self.results: list[Result] = []
        self.ends: list[list[Stacked]] = []

    def partner(self, node: Node) -> Node | None:
        """The node of the program on one device that belongs to a node."""
        number = self.partners.get(node)
        return None if number is None else self.single.nodes[number]

    def unit(self, value: Stacked) -> float:
        """The roundoff of a value; 0 where floats are in double precision."""
        return 0.0 if self.evaluators[0].wide else roundoff(value.x.dtype)

    def is_plain(self, value: int) -> bool:
        """Whether shards have of a value the numbers that one device has, each its part or all of them."""
        known = self.relations[value]
        return known is not None and known.is_plain

    def is_unrelated(self, value: int) -> bool:
        return self.relations[value] is None and value not in self.indices

    def is_right(self, known: Relation | None) -> bool:
        """Whether a result with this relation is one that it should have."""
        # Around loops there are mesh axes, and what is carried may be anything that is related.
        return known is not None and (known.is_plain or bool(self.scope.sizes))

    def judge(self, number: int, value: Stacked) -> bool:
        """Whether a result of another run is right."""
        want = self.results[number].want
        return self.is_right(relation(value, want, self.scope, 0.0, self.unit(value)))

    def has_unequal_copies(self, join: Node, value: Stacked) -> bool:
        """Whether shards have different values of a result of which a device keeps its own copy."""
        return unequal_copies(value, join.spec, self.unit(value))


def compare(
    evaluators: Evaluators, scope: Scope, inputs: Sequence[Sequence[Stacked]]
) -> Comparison:
    """Run two programs side by side and relate their values.

    **Arguments:** those of `Comparison`, and

    - `inputs`: the values that come into each.
    """
    comparison = Comparison(evaluators, scope)
    _Run(comparison, inputs).run()
    return comparison


class _Run:
    """Runs both programs of a comparison."""

    def __init__(self, comparison: Comparison, inputs: Sequence[Sequence[Stacked]]) -> None:
        self.comparison = comparison
        graphs = comparison.mesh, comparison.single
        self.known = [
            dict(zip(g.inputs, xs, strict=True)) for g, xs in zip(graphs, inputs, strict=True)
        ]
        self.last_reads = [_last_reads(graph) for graph in graphs]
        # What has been kept, in bytes: of the program on the mesh, and of differences.
        self.kept_values = self.kept_differences = 0
        # For values of the program on the mesh what they are on one device, as long as a node may need it.
        self.wants: dict[int, Numbers] = {}
        self.sizes: dict[int, float] = {}

    def run(self) -> None:
        comparison, (on_mesh, on_single) = self.comparison, self.known
        comparison.values.update(on_mesh)
        for a, b in zip(comparison.mesh.inputs, comparison.single.inputs, strict=True):
            self.relate(a, on_mesh[a], whole(on_single[b]), comparison.scope, 0.0)
        position = 0
        for i, node in enumerate(comparison.mesh.nodes):
            comparison.evaluators[0].run_node(node, on_mesh)
            end = comparison.partners.get(node, position - 1) + 1
            self.run_single(position, end)
            self.step(node, comparison.partner(node))
            self.forget(0, i)
            self.forget(1, end - 1)
            self.wants = {
                x: want for x, want in self.wants.items() if self.last_reads[0].get(x, -1) > i
            }
            position = end
        self.run_single(position, len(comparison.single.nodes))
        comparison.results = list(self.results())
        comparison.ends = [
            [self.value(x, side) for x in evaluator.graph.results]
            for side, evaluator in enumerate(comparison.evaluators)
        ]

    def run_single(self, start: int, end: int) -> None:
        for node in self.comparison.single.nodes[start:end]:
            self.comparison.evaluators[1].run_node(node, self.known[1])

    def forget(self, side: int, done: int) -> None:
        """Let values go that no later node reads."""
        known, last = self.known[side], self.last_reads[side]
        for x in [x for x in known if last.get(x, -1) <= done]:
            del known[x]

    def value(self, operand: Operand, side: int) -> Stacked:
        return self.comparison.evaluators[side].operand(operand, self.known[side])

    def step(self, node: Node, partner: Node | None) -> None:
        """Relate what a node has made to what its partner has made."""
        comparison = self.comparison
        by_index = self.is_index(node)
        operands = max([self.size(x) for x in partner.operands], default=0.0) if partner else 0.0
        for k, x in enumerate(node.results):
            value = self.known[0][x]
            want = whole(self.known[1][partner.results[k]]) if partner else self.unneeded(node)
            if want is not None:
                self.wants[x] = want
            self.relate(x, value, want, node.around, operands)
            self.kept_values += value.x.nbytes
            if self.kept_values <= _MOST_BYTES:
                comparison.values[x] = value
            if by_index and not comparison.is_plain(x):
                # That one shard has the index 0, or that the least is 0, is no relation.
                comparison.relations[x] = None
                comparison.indices.add(x)
                if node.name == "axis_index" or comparison.positions.intersection(node.inputs):
                    comparison.positions.add(x)
            if node.kind == "split":
                comparison.lengths.update(value.shape)
            if node.kind == "join" and comparison.has_unequal_copies(
                node, self.value(node.operands[0], 0)
            ):
                comparison.relations[x] = None
                self.keep(x, value, want, node.around)
        is_loop = node.name in _LOOPS and len(comparison.operands) < _MOST_LOOPS
        if is_loop and partner and any(comparison.relations[x] is None for x in node.results):
            comparison.operands[node] = (
                [self.value(x, 0) for x in node.operands],
                [self.value(x, 1) for x in partner.operands],
            )

    def unneeded(self, node: Node) -> Numbers | None:
        """What one device has in the place of a division by the number of shards, which it does not need."""
        if len(node.inputs) != 1 or len(node.results) != 1 or node.name not in ("div", "mul"):
            return None
        return self.wants.get(node.inputs[0])

    def relate(
        self, x: int, value: Stacked, want: Numbers | None, scope: Scope, operands: float
    ) -> None:
        comparison = self.comparison
        comparison.relations[x] = (
            None if want is None else relation(value, want, scope, operands, comparison.unit(value))
        )
        if not comparison.is_plain(x):
            self.keep(x, value, want, scope)

    def keep(self, x: int, value: Stacked, want: Numbers | None, scope: Scope) -> None:
        got = on_all_shards(value, scope)
        self.kept_differences += got.nbytes
        if self.kept_differences <= _MOST_BYTES:
            self.comparison.differences[x] = Difference(got, want)

    def size(self, operand: Operand) -> float:
        """The largest number of a value on one device."""
        if isinstance(operand, Constant):
            return largest(numbers(self.value(operand, 1).x))
        if operand not in self.sizes:
            self.sizes[operand] = largest(numbers(self.known[1][operand].x))
        return self.sizes[operand]

    def is_index(self, node: Node) -> bool:
        """Whether results are made from the index of a shard, or from constants, and so may differ."""
        indices = self.comparison.indices
        if node.name == "axis_index" or (node.operands and not node.inputs):
            return True
        if indices.isdisjoint(node.inputs):
            return False
        if node.name in _RANDOM:
            # A state gives each shard keys of its own. Keys that the user makes so are another matter.
            return node.name in _OF_KEYS and not node.is_own
        others = [self.known[0][x].x for x in node.inputs if x not in indices]
        return all(numbers(x).dtype.kind in "biu" for x in others)

    def results(self) -> Iterator[Result]:
        comparison = self.comparison
        for a, b in zip(comparison.mesh.results, comparison.single.results, strict=True):
            got, single = self.value(a, 0), self.value(b, 1)
            difference = comparison.differences.get(a) if isinstance(a, int) else None
            # A node without a partner may give the right result.
            is_lone = difference is not None and difference.want is None
            if is_lone or isinstance(a, Constant):
                unit = comparison.unit(got)
                known = relation(got, whole(single), comparison.scope, 0.0, unit)
            else:
                known = comparison.relations[a]
            if got.x.dtype != single.x.dtype:
                known = None
            is_index = bool(comparison.scope.sizes) and a in comparison.indices
            yield Result(got, whole(single), comparison.is_right(known) or is_index)


def _last_reads(graph: Graph) -> Mapping[int, int]:
    """For each value the number of the last node that reads it."""
    last: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        last |= dict.fromkeys(node.inputs, i)
    results = [x for x in graph.results if isinstance(x, int)]
    return last | dict.fromkeys(results, len(graph.nodes))


# What shards should have


def right_values(comparison: Comparison, value: int) -> Iterator[tuple[Numbers, float]]:
    """What shards may have to have, the likeliest first: what one device has, its parts, parts of a sum.

    With each comes what it is a multiple of: 1 for the value of one device itself.
    """
    difference, known = comparison.differences[value], comparison.relations[value]
    got, want, scope = difference.got, difference.want, comparison.scopes[value]
    if want is None:
        return
    if known is not None and known.factor != 1:
        yield got / known.factor, known.factor
    # Most values are split as others are.
    usual = collections.Counter(
        (name, axis)
        for other in comparison.relations.values()
        for name, kind, axis in (other.kinds if other else ())
        if kind == "parts"
    )
    splits = list(_splits(want.shape, got.shape[len(scope.sizes) :], scope))
    splits.sort(key=lambda split: -sum(usual[str(name), axis] for name, axis in split.items()))
    plain = []
    for split in splits[:3]:
        entries = [tuple(name for name in split if split[name] == d) for d in range(want.ndim)]
        parts = scope.split(Stacked(want), PartitionSpec(*entries))
        plain.append(on_all_shards(parts, scope))
        yield plain[-1], 1.0
    if want.dtype.kind in "fc" and plain:
        sizes = [size for name, size in scope.sizes.items() if name not in splits[0]]
        count = math.prod(sizes)
        count = count if count > 1 else math.prod(scope.sizes.values())
        if count > 1:
            yield plain[0] / count, 1 / count
            yield plain[0] * count, float(count)


def _splits(
    shape: Sequence[int], local: Sequence[int], scope: Scope
) -> Iterator[dict[Hashable, int]]:
    """The ways to split an array into parts of a shape: for mesh axes the array axis that each splits."""
    if len(shape) != len(local):
        return
    for axes in itertools.product([None, *range(len(shape))], repeat=len(scope.sizes)):
        both = zip(scope.sizes, axes, strict=True)
        split = {name: axis for name, axis in both if axis is not None}
        parts = [1] * len(shape)
        for name, axis in split.items():
            parts[axis] *= scope.sizes[name]
        fits = all(n == m * part for n, m, part in zip(shape, local, parts, strict=True))
        if fits and all(scope.sizes[name] > 1 for name in split):
            yield split


# Inside of loops and branches


@dataclasses.dataclass
class _Loop:
    """A loop on one side. A branch is a loop of one round, which has no number."""

    body: Jaxpr
    scope: Scope
    consts: Sequence[Stacked]
    carry: Sequence[Stacked] = ()
    scanned: Sequence[Stacked] = ()
    rounds: Sequence[int | None] = (None,)

    def inputs(self, number: int | None) -> list[Stacked]:
        """What comes into a round, with a copy for each shard, so that all rounds have the same shapes."""
        axes = tuple(self.scope.sizes)
        spread = [self.scope.spread(x, axes) for x in (*self.consts, *self.carry, *self.scanned)]
        first = len(spread) - len(self.scanned)
        at = (*[slice(None)] * len(axes), number)
        return [*spread[:first], *(Stacked(value.x[at], axes) for value in spread[first:])]


def inside(comparison: Comparison, node: Node) -> tuple[Comparison, int | None] | None:
    """The branch, or the first round of a loop, that makes something unrelated; `None` if one cannot look.

    With a round comes its number.
    """
    partner = comparison.partner(node)
    if partner is None or node not in comparison.operands:
        return None
    sides = list(zip((node, partner), comparison.operands[node], strict=True))
    if node.name == "cond":
        taken = [_taken(side, operands[0]) for side, operands in sides]
        if taken[0] is None or taken[0] != taken[1]:
            return None
        loops = [
            _Loop(side.eqn.params["branches"][taken[0]], side.scope, operands[1:])
            for side, operands in sides
        ]
    else:
        loops = [_loop(side, operands) for side, operands in sides]
    if len(loops[0].rounds) != len(loops[1].rounds):
        return None
    wide = comparison.evaluators[0].wide
    mesh, single = (Evaluator(graph_of(loop.body, loop.scope, node.line), wide) for loop in loops)
    for number in loops[0].rounds[:_MOST_ROUNDS]:
        within = compare((mesh, single), node.scope, [loop.inputs(number) for loop in loops])
        if not all(result.right for result in within.results):
            return within, number
        for loop, values in zip(loops, within.ends, strict=True):
            loop.carry = values[: len(loop.carry)]
    return None


def _taken(node: Node, which: Stacked) -> int | None:
    """The number of the branch that all shards take."""
    taken = {*np.asarray(which.x).flat}
    last = len(node.eqn.params["branches"]) - 1
    return min(max(int(taken.pop()), 0), last) if len(taken) == 1 else None


def _loop(node: Node, operands: Sequence[Stacked]) -> _Loop:
    params = node.eqn.params
    if node.name == "while":
        of_condition = params["cond_nconsts"]
        first = of_condition + params["body_nconsts"]
        return _Loop(
            params["body_jaxpr"],
            node.scope,
            operands[of_condition:first],
            operands[first:],
            rounds=range(_MOST_ROUNDS),
        )
    first, carries = counts_of_scan(node.eqn)
    rounds = range(params["length"])
    return _Loop(
        params["jaxpr"],
        node.scope,
        operands[:first],
        operands[first : first + carries],
        operands[first + carries :],
        rounds[::-1] if params["reverse"] else rounds,
    )
