"""The values of a program on a mesh beside those of the program on one device."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._program._jaxprs import Jaxpr, opened
from .._program._noise import roundoff
from .._program._stacked import Scope, Stacked
from .._types import AnyLeaf, Numbers
from ._evaluate import Evaluator, Values, as_numbers, last_reads, on_all_shards
from ._graph import Constant, Graph, Node, Operand, graph_of, pairs
from ._lines import Line, callers_of
from ._relations import Relation, largest, relation, unequal_copies, whole


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

    - `maker`: the node that makes each value of the program on the mesh.
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
    - `matched`: whether each node of the one program belongs to one of the other.
    """

    def __init__(
        self,
        mesh: Graph,
        one: Graph,
        scope: Scope,
        given: tuple[Values, Values],
        wide: bool,
    ) -> None:
        self.mesh, self.one, self.scope, self.given = mesh, one, scope, given
        self.wide = wide
        self.evaluators = Evaluator(mesh, wide), Evaluator(one, wide)
        self.pairs = pairs(mesh.nodes, one.nodes)
        self.matched = len(self.pairs) == len(mesh.nodes) == len(one.nodes)
        self.scopes = dict.fromkeys(mesh.inputs, scope)
        self.scopes |= {x: node.around for node in mesh.nodes for x in node.results}
        self.maker = mesh.maker()
        depths = [len(callers_of(node.eqn)) for node in mesh.nodes if node.line is not None]
        self.depth = min(depths, default=0)
        self._partners = {mesh.nodes[a]: one.nodes[b] for a, b in self.pairs.items()}
        self.relations: dict[int, Relation | None] = {}
        self.indices: set[int] = set()
        self.positions: set[int] = set()
        self.kept: dict[int, Pair] = {}
        self.operands: dict[Node, tuple[list[Stacked], list[Stacked]]] = {}
        self.lengths: set[int] = set()
        self._bytes = 0
        self._sizes: dict[int, float] = {}
        # For values of the program on the mesh what they are on one device, as long as a node may need it.
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

    def partner(self, node: Node) -> Node | None:
        """The node of the program on one device that belongs to a node."""
        return self._partners.get(node)

    def _run(self) -> None:
        position = 0
        last = last_reads(self.mesh), last_reads(self.one)
        for i, node in enumerate(self.mesh.nodes):
            self.evaluators[0].run_node(node, self._known[0])
            end = self.pairs[i] + 1 if i in self.pairs else position
            for other in self.one.nodes[position:end]:
                self.evaluators[1].run_node(other, self._known[1])
            self._step(node, self.partner(node))
            for known, reads, done in zip(self._known, last, (i, end - 1), strict=True):
                for x in [x for x in known if reads.get(x, -1) <= done]:
                    del known[x]
            self._wants = {x: want for x, want in self._wants.items() if last[0].get(x, -1) > i}
            position = end
        for other in self.one.nodes[position:]:
            self.evaluators[1].run_node(other, self._known[1])

    def _step(self, node: Node, other: Node | None) -> None:
        by_index = self._is_index(node)
        operands = 0.0
        if other is not None:
            operands = max([self._size(x) for x in other.operands], default=0.0)
        for k, x in enumerate(node.results):
            value = self._known[0][x]
            want = whole(self._known[1][other.results[k]]) if other is not None else None
            if other is None:
                want = self._unneeded(node)
            if want is not None:
                self._wants[x] = want
            self._relate(x, value, want, node.around, operands)
            known = self.relations[x]
            if by_index and not (known and known.is_plain):
                # That one shard has the index 0, or that the least is 0, is no relation.
                self.relations[x] = None
                self.indices.add(x)
                if node.name == "axis_index" or self.positions.intersection(node.inputs):
                    self.positions.add(x)
            if node.kind == "split":
                self.lengths.update(value.x.shape[len(value.axes) :])
            if node.kind == "join" and unequal_copies(
                self.value(node.operands[0], 0), node.spec, self.unit(value)
            ):
                self.relations[x] = None
                self._keep(x, value, want, node.around)
        differs = any(self.relations[x] is None for x in node.results)
        if differs and node.name in _LOOPS and other is not None and len(self.operands) < 8:
            self.operands[node] = (
                [self.value(x, 0) for x in node.operands],
                [self.value(x, 1) for x in other.operands],
            )

    def _unneeded(self, node: Node) -> Numbers | None:
        """What one device has in the place of a division by the number of shards, which it does not need."""
        if len(node.inputs) != 1 or len(node.results) != 1 or node.name not in ("div", "mul"):
            return None
        return self._wants.get(node.inputs[0])

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

    def _is_index(self, node: Node) -> bool:
        """Whether results are made from the index of a shard, or from constants, and so may differ."""
        constants = bool(node.operands) and not node.inputs
        if node.name == "axis_index" or constants:
            return True
        if not any(x in self.indices for x in node.inputs):
            return False
        if node.name in _RANDOM:
            # A state gives each shard keys of its own. Keys that the user makes so are another matter.
            return node.name in _OF_KEYS and not node.is_own
        others = [x for x in node.inputs if x not in self.indices]
        return all(as_numbers(self._known[0][x].x).dtype.kind in "biu" for x in others)

    def _results(self) -> list[Result]:
        found = []
        for a, b in zip(self.mesh.results, self.one.results, strict=True):
            got, want = self.value(a, 0), whole(self.value(b, 1))
            known = self.relations.get(a, Relation()) if isinstance(a, int) else Relation()
            # A node without a partner may give the right result.
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


def inside(found: Comparison, node: Node) -> Inside | None:
    """What happens inside a node of a comparison, if it is a loop or branch into which one can look."""
    other = found.partner(node)
    if other is None or node not in found.operands:
        return None
    mesh, one = found.operands[node]
    if node.name == "cond":
        branches = [_branch(a, values) for a, values in ((node, mesh), (other, one))]
        if branches[0] is None or branches[0] != branches[1]:
            return None
        bodies = [a.eqn.params["branches"][branches[0]] for a in (node, other)]
        given = [_all_shards(mesh[1:], node.scope), _all_shards(one[1:], other.scope)]
        return _as_inside(bodies, given, (node.scope, other.scope), node.line, None, found.wide)
    loops = [_loop(a, values) for a, values in ((node, mesh), (other, one))]
    if len(loops[0].rounds) != len(loops[1].rounds):
        return None
    return _first_round(loops, (node.scope, other.scope), node.line, found)


def _branch(node: Node, values: Sequence[Stacked]) -> int | None:
    """The number of the branch that all shards take."""
    taken = {int(k) for k in whole_numbers(values[0])}
    count = len(node.eqn.params["branches"])
    return min(max(taken.pop(), 0), count - 1) if len(taken) == 1 else None


def whole_numbers(value: Stacked) -> list[Any]:
    return list(jax.device_get(value.x).reshape(-1))


def _loop(node: Node, values: Sequence[Stacked]) -> _Loop:
    params = node.eqn.params
    if node.name == "while":
        first = params["cond_nconsts"] + params["body_nconsts"]
        consts = values[params["cond_nconsts"] : first]
        return _Loop(params["body_jaxpr"], consts, values[first:], (), range(_MOST_ROUNDS))
    inner = opened(params["jaxpr"])
    # What is scanned over has one axis more outside than inside; what is carried has as many.
    carries = _with_equal_ranks(node.eqn.outvars, inner.outvars)
    first = _with_equal_ranks(node.eqn.invars, inner.invars) - carries
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
    return [scope.spread(value, scope.sizes) for value in values]


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
        self._program = graph_of(loop.body, scope, line)
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
        for node in self._program.nodes:
            self._evaluator.run_node(node, known)
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
    mesh, one = (graph_of(body, scope, line) for body, scope in zip(bodies, scopes, strict=True))
    values = _named(mesh, given[0]), _named(one, given[1])
    found = Comparison(mesh, one, scopes[0], values, wide)
    return None if all(result.right for result in found.results) else Inside(found, number)


def _named(program: Graph, given: Sequence[Stacked]) -> Values:
    return dict(zip(program.inputs, given, strict=True))


def lines_of_carry(found: Comparison, node: Node) -> list[Line]:
    """The lines in a loop that make nothing but those of its results that differ.

    That tells something where the loop has more rounds on a mesh, so that rounds cannot be compared.
    """
    other = found.partner(node)
    if other is None or node.name not in ("scan", "while") or node not in found.operands:
        return []
    loops = [
        _loop(a, values) for a, values in zip((node, other), found.operands[node], strict=True)
    ]
    if node.name == "scan" and len(loops[0].rounds) == len(loops[1].rounds):
        return []
    program = graph_of(loops[0].body, node.scope, node.line)
    wrong = {k for k, x in enumerate(node.results) if found.relations[x] is None}
    return [line for line in lines_inside(program, wrong) if line != node.line]


def lines_inside(program: Graph, wrong: Collection[int]) -> list[Line]:
    """The lines of a program on which only these of its results depend, in order.

    For a loop that runs more often on a mesh than on one device, so that its values cannot be compared.
    """
    needed: list[set[int]] = [set(), set()]
    for k, result in enumerate(program.results):
        if isinstance(result, int):
            needed[k in wrong].add(result)
    lines = []
    for node in reversed(program.nodes):
        is_needed = [bool(values.intersection(node.results)) for values in needed]
        for values, here in zip(needed, is_needed, strict=True):
            if here:
                values.update(node.inputs)
        if is_needed == [False, True] and node.line is not None:
            lines.append(node.line)
    return list(dict.fromkeys(reversed(lines)))


@dataclasses.dataclass(frozen=True, eq=False)
class Right:
    """What shards may have to have: so many times their parts of what one device has."""

    numbers: Numbers
    factor: float


def right_values(found: Comparison, value: int) -> Iterator[Right]:
    """What shards may have to have, the likeliest first: what one device has, its parts, parts of a sum."""
    pair = found.kept[value]
    if pair.want is None:
        return
    known = found.relations[value]
    if known is not None and known.factor != 1:
        yield Right(pair.got / known.factor, known.factor)
    scope = found.scopes[value]
    sizes = list(scope.sizes.values())
    ways = list(_placements(pair.want.shape, pair.got.shape[len(sizes) :], sizes))
    # Most values are split as others are.
    names = list(map(str, scope.sizes))
    ways.sort(
        key=lambda way: -sum(found.splits.get((n, d), 0) for n, d in zip(names, way, strict=True))
    )
    plain = [(_split(pair.want, way, sizes, pair.got.shape[len(sizes) :]), way) for way in ways[:3]]
    yield from (Right(numbers, 1.0) for numbers, _ in plain)
    if pair.want.dtype.kind not in "fc":
        return
    for numbers, way in plain[:1]:
        rest = math.prod(size for size, at in zip(sizes, way, strict=True) if at is None)
        count = rest if rest > 1 else math.prod(sizes)
        if count > 1:
            yield Right(numbers / count, 1 / count)
            yield Right(numbers * count, float(count))


def _placements(
    whole: tuple[int, ...], local: tuple[int, ...], sizes: Sequence[int]
) -> Iterator[tuple[int | None, ...]]:
    """For each mesh axis the array axis that it may split, or none."""
    if len(whole) != len(local):
        return
    for way in itertools.product([None, *range(len(whole))], repeat=len(sizes)):
        parts = [1] * len(whole)
        for at, size in zip(way, sizes, strict=True):
            if at is not None:
                parts[at] *= size
        fits = all(n == m * part for n, m, part in zip(whole, local, parts, strict=True))
        if fits and all(at is None or size > 1 for at, size in zip(way, sizes, strict=True)):
            yield way


def _split(
    x: Numbers, way: Sequence[int | None], sizes: Sequence[int], local: tuple[int, ...]
) -> Numbers:
    made = np.empty((*sizes, *local), x.dtype)
    for index in np.ndindex(*sizes):
        start = [0] * len(local)
        for at, size, i in zip(way, sizes, index, strict=True):
            if at is not None:
                start[at] = start[at] * size + i
        made[index] = x[tuple(slice(s * n, (s + 1) * n) for s, n in zip(start, local, strict=True))]
    return made
