"""The values of a graph on all shards. All of this runs inside `jax.enable_x64`.

NumPy runs the operations that it has, and the replay the others. This is a second interpreter beside
`_program/_replay.py`, for speed: a replay is compiled as a whole and called often, while `locate` runs single
nodes, once or a few times each. JAX would compile each of them for each shape, which takes far longer than to
run it. A test runs nodes of all planted models both ways and expects the same numbers.
"""

import collections
import functools
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any

import jax
import numpy as np

from .._program._by_numpy import by_numpy, collects_by_numpy, is_number, operands_for_numpy
from .._program._collective_rules import RULES, collective
from .._program._jaxprs import is_literal, nested_equations
from .._program._literals import Exact
from .._program._noise import Promoted
from .._program._numbers import is_key, numbers
from .._program._replay import Frame, Replay, draws_safely
from .._program._stacked import Axes, MappedAxes, Stacked, names_of_spec
from .._program._stepped import Stepped, entry_of, stacked_rounds
from .._types import AnyLeaf, Numbers
from ._graph import Graph, Node


# What is compiled here runs a few times.
_COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# JAX would compile these in each eager run.
_COMPILED = ("scan", "while", "cond", "random_bits", "random_split", "random_fold_in", "sort")
_MOST_COMPILED = 256
# JAX takes about as long to compile a loop as NumPy takes for so many runs of it, round by round.
_RUNS_BY_NUMPY = 8
# A loop of more rounds is compiled at once.
_FEW_ROUNDS = 64

# By the numbers of a graph's values.
Values = dict[int, Stacked]


class Evaluator(Replay):
    """What runs the nodes of a graph.

    **Arguments:**

    - `graph`: the graph.
    - `wide`: whether floats are in double precision; else in their own dtypes.
    - `exact`: the numbers that literals stand for, which double precision uses.
    """

    def __init__(self, graph: Graph, wide: bool, exact: Exact) -> None:
        super().__init__("locate", graph.jaxpr)
        self.graph, self.wide, self.exact = graph, wide, exact
        if wide:
            self.arithmetic = Promoted(exact)
        self._runs: collections.Counter[Node] = collections.Counter()
        self._compiled = functools.lru_cache(_MOST_COMPILED)(self._compile)
        self._chooses = functools.lru_cache(_MOST_COMPILED)(_chooses)

    @functools.cached_property
    def _stepped(self) -> Stepped:
        """What runs loops and branches by NumPy. Few graphs have any."""
        return Stepped("locate", self.graph.jaxpr, self.exact, _FEW_ROUNDS)

    def constants(self) -> Values:
        """Those of the graph."""
        make = self.arithmetic
        return {
            x: in_numpy(make.literal(y) if is_literal(y) else make.value(y))
            for x, y in self.graph.constants.items()
        }

    def run_node(self, node: Node, known: MutableMapping[int, Stacked]) -> None:
        """Add the results of a node to what is known."""
        results = self.results(node, [known[x] for x in node.operands])
        known.update(zip(node.results, results, strict=True))

    def results(self, node: Node, values: Sequence[Stacked]) -> list[Stacked]:
        """The results of a node."""
        rounds = self.wide and id(node.eqn) in self.exact.compared
        by_numpy = None if rounds else results_by_numpy(node, values, self.wide)
        return self.results_by_jax(node, values) if by_numpy is None else by_numpy

    def results_by_jax(self, node: Node, values: Sequence[Stacked]) -> list[Stacked]:
        if node.kind == "split":
            return [node.scope.split(values[0], node.spec)]
        if node.kind == "join":
            return [_joined(values[0], node)]
        if node.kind == "entry":
            return [entry_of(values[0], node.rounds[-1].number)]
        if node.kind == "stack":
            return [stacked_rounds(values, node.scope)]
        if self.wide and (node.name == "cond" or self._is_stepped(node)):
            results = self._stepped.alone(node.eqn, [*values], node.scope)
        elif self.wide and node.name == "scan" and not self._chooses(node):
            # JAX compiles it once for all reruns, though in each other values differ over shards.
            results = self._compiled(node)([node.scope.spread(x, node.scope.sizes) for x in values])
            return [narrowed(in_numpy(value.x, value.axes)) for value in results]
        elif draws_safely(node.eqn):
            params = frozenset(node.eqn.params.items())
            results = _of_keys(node.eqn.primitive, params, (*node.scope.sizes.items(),))(values)
        elif node.name in _COMPILED:
            results = self._compiled(node)(list(values))
        else:
            frame = Frame(node.scope, self.no_differences)
            results = self._equation(node.eqn, list(values), frame)
        return [in_numpy(value.x, value.axes) for value in results]

    def _is_stepped(self, node: Node) -> bool:
        """Whether a node is a loop of few rounds that has not run often yet."""
        if node.name != "scan" or node.eqn.params["length"] > _FEW_ROUNDS:
            return False
        self._runs[node] += 1
        return self._runs[node] <= _RUNS_BY_NUMPY

    def _compile(self, node: Node) -> Callable[[list[Stacked]], list[Stacked]]:
        def run(values: list[Stacked]) -> list[Stacked]:
            return self._equation(node.eqn, values, Frame(node.scope, self.no_differences))

        run.__name__ = f"locate_{node.name}"
        # In narrow dtypes the rounding must be that of a program that is compiled as usual.
        return jax.jit(run, compiler_options=_fast() if self.wide else None)


def _fast() -> dict[str, Any] | None:
    return _COMPILE_FAST if jax.default_backend() == "cpu" else None


@functools.lru_cache(_MOST_COMPILED)
def _of_keys(
    primitive: Any, params: frozenset[tuple[str, Any]], sizes: tuple[tuple[Hashable, int], ...]
) -> Callable[[Sequence[Stacked]], list[Stacked]]:
    """What draws numbers, or makes keys, compiled once for all nodes with such keys."""
    scope = MappedAxes(dict(sizes))

    def drawn(*xs: AnyLeaf) -> list[AnyLeaf]:
        return [primitive.bind(*xs, **dict(params))]

    def run(values: Sequence[Stacked]) -> list[Stacked]:
        return scope.over_axes(drawn, values)

    run.__name__ = f"locate_{primitive.name}"
    return jax.jit(run, compiler_options=_fast())


def _joined(value: Stacked, node: Node) -> Stacked:
    kept = {*names_of_spec(node.spec), *node.around.sizes}
    # Along the axes that the spec leaves out a device keeps its own copy. We keep the first.
    first = tuple(slice(None) if name in kept else 0 for name in value.axes)
    axes = tuple(name for name in value.axes if name in kept)
    return node.scope.joined(Stacked(value.x[first], axes), node.spec)


def _chooses(node: Node) -> bool:
    """Whether a loop has branches or conditions, which shards with equal values go through together."""
    return any(x.primitive.name in ("cond", "while") for x in nested_equations(node.eqn))


def narrowed(value: Stacked) -> Stacked:
    """Without the mesh axes along which copies are equal."""
    x, axes = value.x, list(value.axes)
    for name in value.axes if not is_key(x) else ():
        at = axes.index(name)
        first = x.take([0], at)
        if np.array_equal(np.broadcast_to(first, x.shape), x, equal_nan=x.dtype.kind in "fc"):
            x = first.squeeze(at)
            axes.remove(name)
    return Stacked(x, tuple(axes))


def in_numpy(x: AnyLeaf, axes: Axes = ()) -> Stacked:
    """A value as NumPy's array, unless it is an array of keys."""
    return Stacked(x if is_key(x) else np.asarray(x), axes)


def on_all_shards(value: Stacked, scope: MappedAxes) -> Numbers:
    """The numbers with all mesh axes of the scope in front."""
    return scope.spread(Stacked(numbers(value.x), value.axes), scope.sizes).x


def results_by_numpy(node: Node, values: Sequence[Stacked], wide: bool) -> list[Stacked] | None:
    """The results of a node by NumPy; `None` where it takes JAX.

    **Arguments:**

    - `wide`: whether floats are in double precision.
    """
    scope, eqn = node.scope, node.eqn
    if node.kind != "run" or not all(is_number(value.x.dtype) for value in values):
        return None
    with np.errstate(all="ignore"):
        if node.name in RULES:
            together = collects_by_numpy(eqn, scope)
            return [collective(eqn, value, scope) for value in values] if together else None
        axes = scope.union(values)
        xs = operands_for_numpy(eqn, values, axes)
        run = by_numpy(eqn, xs, len(axes), wide=wide)
        return None if run is None else [Stacked(x, axes) for x in run(*xs)]
