"""The values of a program on a mesh beside those of the program on one device, also inside loops."""

import collections
import copy
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._program._jaxprs import Jaxpr, operands_of_loop
from .._program._lines import SourceLine
from .._program._numbers import distances, is_key, is_numpy, numbers, roundoff
from .._program._stacked import MappedAxes, Stacked, names_of_spec, numpy_of
from .._program._trace import Trace, is_array_or_type, trace_exactly
from .._types import AnyLeaf, Fun, Numbers, PyTree, tree_util
from ._evaluate import Evaluator, Values, in_numpy, on_all_shards
from ._graph import Node, graph_of, needed, pairs, step_of
from ._relations import Relation, largest, relation, stride, tolerated, whole


Evaluators: TypeAlias = tuple[Evaluator, Evaluator]
Origins: TypeAlias = Sequence[SourceLine | None]

# What is kept of the values of both programs, in bytes. Later ones are let go where no node reads them.
_MOST_BYTES = 2**29
# So many loops and branches can be looked into.
_MOST_LOOPS = 8
# A mistake shows in the first rounds.
_MOST_ROUNDS = 32

# What is so small beside the parts of a sum is nothing but rounding.
_VANISHES = 1e-9

_LOOPS = ("scan", "while", "cond")
_RANDOM = ("random_bits", "random_wrap", "random_fold_in", "random_split", "random_seed")


class Comparison:
    """Two programs, side by side. `compare` runs them and fills it.

    **Arguments:**

    - `evaluators`: of the program on a mesh, and of that on one device.
    - `scope`: the mesh axes around the programs.
    - `origins`: for values that come in the lines outside that made them; none for all others.
    - `in_blocks`: whether one device takes over the order in which shards have rows after a reshape.

    **Attributes:**

    - `mesh`, `single`: the two graphs.
    - `maker`: the node that makes each value of the program on the mesh.
    - `matched`: whether each node of the one program belongs to one of the other.
    - `partners`: for nodes of the program on the mesh those of the other that belong to them.
    - `scopes`: the mesh axes over which each value may differ.
    - `values`: those of the program on the mesh, as far as they are kept.
    - `wants`: what they are on one device; none where that program has no value that belongs to it.
    - `pieces`: what shards should have of values that are a part of one that has a counterpart.
    - `relations`: what each value of the program on the mesh is of that on one device.
    - `indices`: the values that differ because they are made from the index of a shard.
    - `positions`: those of them that are not made from constants only.
    - `operands`: those of loops and branches whose results differ, in both programs.
    - `ends`: the results of each program.
    - `right`: which of those on the mesh are right.
    - `reblocked`: whether a reshape gives shards rows in another order than one device.
    """

    def __init__(
        self,
        evaluators: Evaluators,
        scope: MappedAxes,
        origins: Origins,
        *,
        in_blocks: bool = False,
    ) -> None:
        self.evaluators, self.scope, self._in_blocks = evaluators, scope, in_blocks
        self.reblocked = False
        self.mesh, self.single = (evaluator.graph for evaluator in evaluators)
        self.maker = {x: node for node in self.mesh.nodes for x in node.results}
        self.partners = pairs(self.mesh.nodes, self.single.nodes)
        self.matched = len(self.partners) == len(self.mesh.nodes) == len(self.single.nodes)
        self.scopes = dict.fromkeys((*self.mesh.inputs, *self.mesh.constants), scope)
        self.scopes |= {x: node.around for node in self.mesh.nodes for x in node.results}
        self.origins = dict(zip(self.mesh.inputs, origins, strict=True)) if origins else {}
        self._known: tuple[Values, Values] = {}, {}
        self.values = self._known[0]
        self.wants: dict[int, Numbers] = {}
        self.pieces: dict[int, Numbers] = {}
        self.relations: dict[int, Relation | None] = {}
        self.indices: set[int] = set()
        self.positions: set[int] = set()
        self.operands: dict[Node, tuple[list[Stacked], list[Stacked]]] = {}
        self.ends: list[list[Stacked]] = []
        self.right: list[bool] = []
        # After its last reader a value can be let go.
        self._last_readers = [
            {x: node for node in graph.nodes for x in node.operands}
            for graph in (self.mesh, self.single)
        ]
        # What is made of truths only.
        self._of_truths: set[int] = set()
        self._bytes = 0

    # What is known of a value

    def is_plain(self, value: int) -> bool:
        """Whether shards have of a value the numbers that one device has, each its part or all of them."""
        known = self.relations[value]
        return known is not None and known.is_plain

    def is_unrelated(self, value: int) -> bool:
        return self.relations[value] is None and value not in self.indices

    def differs(self, value: int) -> bool:
        """Whether a value is more than the parts of that of one device, and was kept."""
        return not self.is_plain(value) and value in self.values

    def is_number(self, value: int) -> bool:
        """Whether a value was kept, and is no array of keys."""
        return value in self.values and not is_key(self.values[value].x)

    def is_whole(self, value: int) -> bool:
        """Whether a value was kept, and is whole numbers."""
        return self.is_number(value) and numbers(self.values[value].x).dtype.kind in "iu"

    def is_truth(self, value: int) -> bool:
        """Whether a value was kept, and is truths."""
        return self.is_number(value) and numbers(self.values[value].x).dtype.kind == "b"

    def own_lengths(self, node: Node, name: Hashable) -> Iterator[int]:
        """Constants that are the length of a part along a mesh axis; one device has that of the whole."""
        partner = self.partners.get(node)
        for a, b in zip(node.operands, partner.operands, strict=False) if partner else ():
            if a in self.mesh.constants and b in self.single.constants:
                part, all_parts = numbers(self._known[0][a].x), numbers(self._known[1][b].x)
                is_scalar = part.size == all_parts.size == 1 and part.dtype.kind in "iu"
                if is_scalar and 0 < part < all_parts == part * node.scope.sizes[name]:
                    yield int(part)

    def named(self, x: int, y: int) -> tuple[Any, Any]:
        """The numbers that both programs name in the same place; none where they do not."""
        if x not in self.mesh.constants or y not in self.single.constants:
            return None, None
        values = (numbers(known[z].x) for known, z in zip(self._known, (x, y), strict=True))
        a, b = (value.item() if value.shape == () else None for value in values)
        return a, b

    def got(self, value: int) -> Numbers:
        """What shards have, with all mesh axes of the value's scope in front."""
        return on_all_shards(self.values[value], self.scopes[value])

    def is_right(
        self, number: int, values: Mapping[int, Stacked], other: Node | None = None
    ) -> bool:
        """Whether a result of another run is right. One whose copies differ is not.

        **Arguments:**

        - `other`: the node that made it, if it is another one.
        """
        operand, want = self.mesh.results[number], whole(self.ends[1][number])
        join, value = other or self.maker.get(operand), values[operand]
        if (
            join is not None
            and join.kind == "join"
            and self._has_unequal_copies(join, values[join.operands[0]])
        ):
            return False
        if value.x.dtype != self.ends[1][number].x.dtype:
            return False
        return self._is_right_as(
            relation(value, want, self.scope, 0.0, self._unit(value)), value.x.dtype
        )

    def is_plain_as(self, value: int, other: Stacked) -> bool:
        """Whether shards have the numbers of one device where they have another value in a value's place."""
        unit = self._unit(other)
        known = relation(other, self.wants[value], self.scopes[value], 0.0, unit)
        return known is not None and known.is_plain

    def with_results(self, values: Sequence[int], scope: MappedAxes) -> "Comparison":
        """The same comparison, of the program that gives these values.

        **Arguments:**

        - `scope`: the mesh axes over which these may differ.
        """
        other, graph = copy.copy(self), self.mesh
        other.mesh = dataclasses.replace(
            graph, results=tuple(values), nodes=needed(graph.nodes, values)
        )
        other.scope = scope
        wants = [Stacked(self.wants[x]) for x in values]
        other.ends = [[self.values[x] for x in values], wants]
        other.right = [not self.is_unrelated(x) for x in values]
        return other

    def _has_unequal_copies(self, node: Node, value: Stacked) -> bool:
        """Whether shards have different values of what is joined, of which a device keeps its own copy."""
        if node.kind != "join":
            return False
        named, x, unit = names_of_spec(node.spec), numbers(value.x), self._unit(value)
        for at, name in enumerate(value.axes):
            first = np.take(x, [0], at)
            if name not in named and np.any(distances(x, first) > tolerated(first, 0.0, unit)):
                return True
        return False

    def _unit(self, value: Stacked) -> float:
        """The roundoff of a value; 0 where floats are in double precision."""
        return 0.0 if self.evaluators[0].wide else roundoff(value.x.dtype)

    def _is_right_as(self, known: Relation | None, dtype: Any) -> bool:
        """Whether a result with this relation is one that it should have."""
        # Around loops there are mesh axes, and what is carried may be anything that is related. Truths that
        # differ are always related: some shard's is that of one device.
        may_be_partial = bool(self.scope.sizes) and dtype.kind != "b"
        return known is not None and (known.is_plain or may_be_partial)

    # Both programs run

    def run(self, inputs: Sequence[Sequence[Stacked]]) -> None:
        """Run both node by node, and relate what they make."""
        for known, evaluator, xs in zip(self._known, self.evaluators, inputs, strict=True):
            known.update(zip(evaluator.graph.inputs, xs, strict=True))
            known.update(evaluator.constants())
        self.relations.update(dict.fromkeys(self.mesh.constants, Relation()))
        for a, b in zip(self.mesh.inputs, self.single.inputs, strict=True):
            self._relate(a, whole(self._known[1][b]), 0.0)
        single_nodes = iter(self.single.nodes)
        for node in self.mesh.nodes:
            self._run_node(0, node)
            partner = self.partners.get(node)
            while partner is not None:
                single = next(single_nodes)
                self._run_node(1, single)
                if single is partner:
                    break
                self._forget(1, single)
            if partner and node.name == "reshape":
                self._reblock(node, partner)
            self._relate_results(node, partner)
            self._forget(0, node)
            if partner is not None:
                self._forget(1, partner)
        for single in single_nodes:
            self._run_node(1, single)
            self._forget(1, single)
        self.ends = [
            [known[x] for x in graph.results]
            for known, graph in zip(self._known, (self.mesh, self.single), strict=True)
        ]
        self.right = list(map(self._is_right_end, self.mesh.results, *self.ends))
        if not all(self.right):
            self._relate_by_readers()
            for node in reversed(self.mesh.nodes):
                if node.name == "concatenate" and self.is_unrelated(node.results[0]):
                    self._tell_pieces(node)

    def _run_node(self, side: int, node: Node) -> None:
        known = self._known[side]
        self.evaluators[side].run_node(node, known)
        self._bytes += sum(known[x].x.nbytes for x in node.results)

    def _forget(self, side: int, node: Node) -> None:
        """Where too much is kept, let values go that no node after this one reads."""
        if self._bytes > _MOST_BYTES:
            graph = self.evaluators[side].graph
            for x in {*node.operands}.difference(graph.inputs, graph.constants, graph.results):
                if self._last_readers[side][x] is node:
                    del self._known[side][x]

    def _relate_results(self, node: Node, partner: Node | None) -> None:
        """Relate what a node has made to what its partner has made."""
        by_index = self._is_index(node)
        # Where large numbers cancel, what is left is as exact as they are.
        size = max((largest(numbers(self.values[x].x)) for x in node.operands), default=0.0)
        others = {*node.operands}.difference(self.mesh.constants)
        for k, x in enumerate(node.results):
            if self.is_truth(x) or (others and others <= self._of_truths):
                self._of_truths.add(x)
            want = whole(self._known[1][partner.results[k]]) if partner else None
            self._relate(x, want, size)
            if by_index and not self.is_plain(x):
                # That one shard has the index 0, or that the least is 0, is no relation.
                self.relations[x] = None
                self.indices.add(x)
                if node.name == "axis_index" or self.positions.intersection(node.operands):
                    self.positions.add(x)
            is_unequal = node.operands and self._has_unequal_copies(
                node, self.values[node.operands[0]]
            )
            if is_unequal or self._is_by_accident(node, x):
                self.relations[x] = None
        is_loop = node.name in _LOOPS and len(self.operands) < _MOST_LOOPS
        if is_loop and partner and any(self.relations[x] is None for x in node.results):
            self.operands[node] = (
                [self.values[x] for x in node.operands],
                [self._known[1][x] for x in partner.operands],
            )

    def _is_by_accident(self, node: Node, value: int) -> bool:
        """Whether a value made of something unrelated is related because one shard happens to be right.

        Or because it has few different numbers, as shares of truths have.
        """
        known = self.relations[value]
        unrelated = list(filter(self.is_unrelated, node.operands))
        # Of what has no counterpart on one device nobody knows whether it is wrong.
        is_made_wrong = any(self.maker.get(y) in self.partners for y in unrelated)
        if known is None or known.is_plain or not is_made_wrong:
            return False
        kinds = {kind for _, kind, _ in known.kinds}
        if "one" in kinds:
            # Others than the right one should have zeros.
            names = [name for name, kind, _ in known.kinds if kind == "one"]
            at = tuple(map([*map(str, self.scopes[value].sizes)].index, names))
            return bool(np.any((self.got(value) != 0).sum(at) > 1))
        # Distances from a mean sum to nothing, whatever they are.
        most = largest(numbers(self.values[value].x))
        vanishes = largest(self.wants.get(value, np.ones(()))) <= _VANISHES * most
        is_few = value in self._of_truths and not kinds.isdisjoint(("max", "min", "mean"))
        return vanishes or is_few

    def _reblock(self, node: Node, partner: Node) -> None:
        """Give one device the numbers of a reshape in the order of the shards' parts.

        Who takes the rows of a step in chunks has the first rows of each shard in the first chunk, and on one
        device the first rows of all.
        """
        (a, *_), (b,) = partner.operands, partner.results
        whole_x, whole_y = self._known[1][a], self._known[1][b]
        own_x, own_y = self.values[node.operands[0]].shape, self.values[node.results[0]].shape
        before, after = _longer(own_x, whole_x.shape), _longer(own_y, whole_y.shape)
        if before is None or after is None or [*before.values()] != [*after.values()]:
            return
        axes = [*zip(before, after, before.values(), strict=True)]
        joined = _reshaped(whole_x.x.reshape(whole_x.shape), axes, own_y)
        joined = joined.reshape(whole_y.x.shape)
        if np.any(numbers(joined) != numbers(whole_y.x)):
            self.reblocked = True
            if self._in_blocks:
                self._known[1][b] = Stacked(joined, whole_y.axes)

    def _relate(self, x: int, want: Numbers | None, size: float) -> None:
        value, self.relations[x] = self.values[x], None
        if want is not None:
            unit = self._unit(value)
            # Sums over infinities of both signs are no numbers.
            with np.errstate(all="ignore"):
                self.relations[x] = relation(value, want, self.scopes[x], size, unit)
            if self._bytes <= _MOST_BYTES:
                self.wants[x] = want

    def _relate_by_readers(self) -> None:
        """Relate what nodes without a partner make to what is read or returned in its place on one device.

        Where a loop has more rounds in one program than in the other, only what it ends with is known.
        """
        counts = [
            collections.Counter(map(step_of, side.nodes)) for side in (self.mesh, self.single)
        ]
        paired = {step_of(node) for node in self.partners}
        in_rounds = {step for step in paired if counts[0][step] != counts[1][step]}
        known_steps = paired - in_rounds
        read: dict[int, set[int]] = {}
        for node, partner in self.partners.items():
            if len(node.operands) == len(partner.operands):
                for x, y in zip(node.operands, partner.operands, strict=True):
                    maker = self.maker.get(x)
                    if maker is None or step_of(maker) in known_steps:
                        continue
                    if step_of(maker) not in in_rounds or step_of(node) not in in_rounds:
                        read.setdefault(x, set()).add(y)
        for x, y in zip(self.mesh.results, self.single.results, strict=True):
            join = self.maker.get(x)
            read.setdefault(join.operands[0] if join and join.kind == "join" else x, set()).add(y)
        for x, of_partners in read.items():
            maker = self.maker.get(x)
            known = maker is None or x in self.indices or step_of(maker) in known_steps
            if known or x not in self.values or len(of_partners) > 1:
                continue
            if (y := of_partners.pop()) in self._known[1]:
                self._relate(x, whole(self._known[1][y]), 0.0)

    def _tell_pieces(self, node: Node) -> None:
        """Of an array put together from pieces some of which are right, tell the right ones and the others.

        Pieces such as the edges of neighbours have no counterpart on one device, but their whole has.
        """
        (result,), operands = node.results, node.operands
        if not all(x in self.values for x in (result, *operands)):
            return
        scope = self.scopes[result]
        at = len(scope.sizes) + node.eqn.params["dimension"]
        # A constant may be one of the program around.
        got = [on_all_shards(self.values[x], scope) for x in operands]
        ends = np.cumsum([piece.shape[at] for piece in got])[:-1]
        unit = self._unit(self.values[result])

        def is_same(a: Numbers, b: Numbers) -> bool:
            return a.shape == b.shape and bool(np.all(distances(a, b) <= tolerated(b, 0.0, unit)))

        def is_known(x: int, piece: Numbers) -> bool:
            is_alike = self.scopes[x] == scope
            return is_alike and any(is_same(y, piece) for y in right_values(self, x))

        for right in right_values(self, result):
            pieces = np.split(right, ends, at)
            same = list(map(is_same, got, pieces))
            if all(any(is_same(a, b) for b in pieces) for a in got):
                # All of them are right, in another order.
                self.relations.update(dict.fromkeys(operands, Relation()))
                return
            if not any(same):
                # All of them read what is wrong already.
                same = [is_known(x, piece) for x, piece in zip(operands, pieces, strict=True)]
            if any(same) and not all(same):
                for x, a, piece, is_right in zip(operands, got, pieces, same, strict=True):
                    known = self.relations[x]
                    if is_right and is_same(a, piece):
                        self.relations[x] = Relation()
                    elif (
                        not is_right
                        and self.scopes[x] == scope
                        and (known is None or not known.is_partial)
                    ):
                        self.relations[x], self.pieces[x] = None, piece
                return

    def _is_index(self, node: Node) -> bool:
        """Whether results are made from the index of a shard, or from constants, and so may differ."""
        others = {*node.operands}.difference(self.mesh.constants)
        if node.name == "axis_index" or (node.operands and not others):
            return True
        if self.indices.isdisjoint(node.operands):
            return False
        if node.name in _RANDOM:
            # A state gives each shard keys of its own. Keys that the user makes so are another matter.
            return not node.is_own
        whole_numbers = (
            numbers(self.values[x].x).dtype.kind in "biu" for x in others - self.indices
        )
        return all(whole_numbers)

    def _is_right_end(self, operand: int, got: Stacked, single: Stacked) -> bool:
        if operand not in self.wants:
            # A node without a partner may give the right result.
            known = relation(got, whole(single), self.scope, 0.0, self._unit(got))
        else:
            known = self.relations[operand]
        if got.x.dtype != single.x.dtype:
            known = None
        is_index = bool(self.scope.sizes) and operand in self.indices
        return self._is_right_as(known, got.x.dtype) or is_index


def _longer(own: Sequence[int], whole_shape: Sequence[int]) -> dict[int, int] | None:
    """By how many times a whole is longer than a part, for the axes along which it is."""
    if len(own) != len(whole_shape) or 0 in own:
        return None
    longer = {d: n for d, n in enumerate(whole_shape) if n != own[d]}
    is_whole = all(n % own[d] == 0 for d, n in longer.items())
    return {d: n // own[d] for d, n in longer.items()} if is_whole else None


def _reshaped(x: AnyLeaf, axes: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> AnyLeaf:
    """An array whose parts along some axes are reshaped, and then joined along others.

    **Arguments:**

    - `axes`: the axis of the parts, the axis along which they are joined, and how many they are.
    - `shape`: that of a reshaped part.
    """
    if not axes:
        return x.reshape(shape)
    (before, after, count), *others = axes
    numpy = numpy_of(x)
    parts = [_reshaped(part, others, shape) for part in numpy.split(x, count, before)]
    return numpy.concatenate(parts, after)


def compare(
    evaluators: Evaluators,
    scope: MappedAxes,
    inputs: Sequence[Sequence[Stacked]],
    origins: Origins = (),
) -> Comparison:
    """Run two programs side by side and relate their values.

    **Arguments:** those of `Comparison`, and

    - `inputs`: the values that come into each.
    """
    comparison = Comparison(evaluators, scope, origins)
    comparison.run(inputs)
    if all(comparison.right) or not comparison.reblocked:
        return comparison
    # What is computed of each row, or summed over all, is the same in another order.
    other = Comparison(evaluators, scope, origins, in_blocks=True)
    other.run(inputs)
    ends = [[numbers(x.x) for x in each.ends[1]] for each in (comparison, other)]
    alike = [np.all(distances(a, b) <= tolerated(a, 0.0, 0.0)) for a, b in zip(*ends, strict=True)]
    return other if all(alike) else comparison


def both_traced(mapped: Fun, reference: Fun, call: PyTree) -> tuple[PyTree, list[Trace]]:
    """The arguments of a call as arrays, and the two functions traced with them."""
    arrays = jax.tree.map(lambda x: jnp.asarray(x) if is_numpy(x) else x, call)
    leaves, treedef = tree_util.tree_flatten(arrays)
    return arrays, [trace_exactly(fun, treedef, leaves) for fun in (mapped, reference)]


def compare_traced(traces: Sequence[Trace], values: PyTree, *, wide: bool) -> Comparison:
    """Run two traced functions side by side, with x64 enabled and no mesh set.

    **Arguments:**

    - `values`: the arguments of both.
    - `wide`: whether they run in double precision; else in the dtypes of the program.
    """
    inputs = [in_numpy(x) for x in jax.tree.leaves(values) if is_array_or_type(x)]
    mesh, single = (
        Evaluator(graph_of(traced.closed, MappedAxes()), wide, traced.exact) for traced in traces
    )
    return compare((mesh, single), MappedAxes(), (inputs, inputs))


# What shards should have


def right_values(comparison: Comparison, value: int) -> Iterator[Numbers]:
    """What shards may have to have, the likeliest first: what one device has, its parts, parts of a sum."""
    want, scope = comparison.wants.get(value), comparison.scopes[value]
    if value in comparison.pieces:
        yield comparison.pieces[value]
        return
    if want is None:
        return
    got, known = comparison.got(value), comparison.relations[value]
    if known is not None and known.factor != 1:
        yield got / known.factor
    splits = list(_splits(want.shape, got.shape[len(scope.sizes) :], scope))[:3]
    plain = []
    for split in splits:
        entries = [tuple(name for name in split if split[name] == d) for d in range(want.ndim)]
        plain.append(on_all_shards(scope.split(Stacked(want), PartitionSpec(*entries)), scope))
    yield from plain or _overlapping(want, got.shape[len(scope.sizes) :], scope)
    if want.dtype.kind in "fc" and plain:
        sizes = [size for name, size in scope.sizes.items() if name not in splits[0]]
        count = math.prod(sizes or scope.sizes.values())
        yield plain[0] / count
        yield plain[0] * count


def _splits(
    shape: Sequence[int], local: Sequence[int], scope: MappedAxes
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


def _overlapping(want: Numbers, local: Sequence[int], scope: MappedAxes) -> Iterator[Numbers]:
    """The parts of an array, with all mesh axes in front, where these have the edges of their neighbours."""
    sizes = list(scope.sizes.values())
    if len(local) != want.ndim:
        return
    cut = [d for d in range(want.ndim) if local[d] != want.shape[d]]
    several = [at for at, size in enumerate(sizes) if size > 1]
    for axes in itertools.permutations(several, len(cut)):
        both = list(zip(cut, axes, strict=True))
        steps = [stride(local[d], want.shape[d], sizes[at]) for d, at in both]
        if None in steps:
            continue
        parts = []
        for shard in np.ndindex(*sizes):
            starts = [0] * want.ndim
            for (d, at), step in zip(both, steps, strict=True):
                starts[d] = shard[at] * (step or 0)
            ranges = zip(starts, local, strict=True)
            parts.append(want[tuple(slice(start, start + n) for start, n in ranges)])
        yield np.reshape(parts, (*sizes, *local))


# Inside of loops and branches


@dataclasses.dataclass
class _Loop:
    """A loop on one side. A branch is a loop of one round, whose number is that of the branch."""

    body: Jaxpr
    rounds: Sequence[int]
    consts: Sequence[Stacked]
    carry: Sequence[Stacked] = ()
    scanned: Sequence[Stacked] = ()
    condition: Jaxpr | None = None
    of_condition: Sequence[Stacked] = ()


def inside(comparison: Comparison, node: Node) -> tuple[Comparison, int | None] | None:
    """The branch, or the first round of a loop, that makes something unrelated; `None` if one cannot look.

    With a round comes its number. Where a loop goes on in one program only, it is the condition's.
    """
    if node not in comparison.operands:
        return None
    nodes = node, comparison.partners[node]
    loops = list(map(_loop, nodes, comparison.operands[node]))
    rounds = loops[0].rounds
    if not rounds or rounds != loops[1].rounds:
        return None

    def evaluators(jaxprs: Sequence[Jaxpr]) -> Evaluators:
        a, b = (
            Evaluator(graph_of(jaxpr, side.scope, node.line), around.wide, around.exact)
            for jaxpr, side, around in zip(jaxprs, nodes, comparison.evaluators, strict=True)
        )
        return a, b

    lines = _origins(comparison, node.operands)
    is_branch = node.name == "cond"
    consts, carry, scanned = (lines[1:], [], []) if is_branch else operands_of_loop(node.eqn, lines)
    bodies = evaluators([loop.body for loop in loops])
    conditions = [loop.condition for loop in loops if loop.condition is not None]
    of_conditions = evaluators(conditions) if conditions else None
    before: tuple[Comparison, int] | None = None
    for number in rounds[:_MOST_ROUNDS]:
        if of_conditions:
            asked = [
                _spread(side.scope, [*loop.of_condition, *loop.carry])
                for loop, side in zip(loops, nodes, strict=True)
            ]
            within = compare(of_conditions, node.scope, asked)
            if not all(within.right):
                return within, number
            if not np.any(within.ends[1][0].x):
                return None
        inputs = [_inputs(*each, number) for each in zip(loops, nodes, strict=True)]
        within = compare(bodies, node.scope, inputs, [*consts, *carry, *scanned])
        if not all(within.right):
            carried = within.mesh.inputs[len(consts) : len(consts) + len(carry)]
            unrelated = [k for k, x in enumerate(carried) if within.is_unrelated(x)]
            if before and unrelated:
                # What is made from the index of a shard may be anything, until it leads to what is wrong.
                for k in unrelated:
                    before[0].right[k] = False
                return before
            return within, None if is_branch else number
        before = within, number
        carry = _origins(within, within.mesh.results)[: len(carry)]
        for loop, values in zip(loops, within.ends, strict=True):
            loop.carry = values[: len(loop.carry)]
    return None


def _origins(comparison: Comparison, values: Sequence[int]) -> list[SourceLine | None]:
    """The lines that made values which are partial results."""
    makers = [None if comparison.is_plain(x) else comparison.maker.get(x) for x in values]
    outside = [comparison.origins.get(x) for x in values]
    return [maker.line if maker else line for maker, line in zip(makers, outside, strict=True)]


def _loop(node: Node, operands: list[Stacked]) -> _Loop:
    params = node.eqn.params
    if node.name == "cond":
        which, *consts = operands
        last = len(params["branches"]) - 1
        taken = sorted({min(max(int(k), 0), last) for k in np.asarray(which.x).flat})
        # Shards that take several branches cannot be followed.
        return _Loop(params["branches"][taken[0]], taken if len(taken) == 1 else (), consts)
    parts = operands_of_loop(node.eqn, operands)
    if node.name == "while":
        condition, of_condition = params["cond_jaxpr"], operands[: params["cond_nconsts"]]
        rounds = range(_MOST_ROUNDS)
        return _Loop(params["body_jaxpr"], rounds, *parts, condition, of_condition)
    rounds = range(params["length"])
    return _Loop(params["jaxpr"], rounds[::-1] if params["reverse"] else rounds, *parts)


def _inputs(loop: _Loop, node: Node, number: int) -> list[Stacked]:
    """What comes into a round."""
    scope, axes = node.scope, tuple(node.scope.sizes)
    at = (*[slice(None)] * len(axes), number)
    scanned = [Stacked(scope.spread(x, axes).x[at], axes) for x in loop.scanned]
    return _spread(scope, [*loop.consts, *loop.carry]) + scanned


def _spread(scope: MappedAxes, values: Sequence[Stacked]) -> list[Stacked]:
    """The values with a copy for each shard, so that all rounds have the same shapes."""
    return [scope.spread(x, tuple(scope.sizes)) for x in values]
