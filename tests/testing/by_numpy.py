"""The two interpreters of `locate`: NumPy, and the replay for what NumPy has no operation for."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from statemesh.testing._locate._evaluate import Evaluator, in_numpy, results_by_numpy
from statemesh.testing._locate._graph import Node, graph_of
from statemesh.testing._program._literals import Exact
from statemesh.testing._program._stacked import MappedAxes, Stacked
from statemesh.testing._program._trace import NO_MESH


# What was compared in this process: an operation that is the same would give the same.
_COMPARED: set[Any] = set()
# Lengths in the parameters of operations.
_LENGTHS = ("shape", "new_sizes", "sizes")


def compare_by_numpy(closed: Any, arrays: Sequence[Any], scope: MappedAxes, wide: bool) -> set[str]:
    """Run a program node by node. What NumPy computes must be what the replay computes.

    **Returns:** the names of the operations that were compared, here or before.
    """
    names: set[str] = set()
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
        graph = graph_of(closed, scope)
        evaluator = Evaluator(graph, wide, Exact())
        values = [evaluator.arithmetic.value(x) for x in arrays]
        known = dict(zip(graph.inputs, map(in_numpy, values), strict=True))
        known |= evaluator.constants()
        for node in graph.nodes:
            operands = [known[x] for x in node.operands]
            evaluator.run_node(node, known)
            if node.kind != "run" or results_by_numpy(node, operands, wide) is None:
                continue
            names.add(node.name)
            if (key := _kind(node, operands, wide)) in _COMPARED:
                continue
            _COMPARED.add(key)
            by_jax = evaluator.results_by_jax(node, operands)
            for result, other in zip(node.results, by_jax, strict=True):
                assert_same(known[result], other, node.scope, wide)
    return names


def _kind(node: Node, operands: Sequence[Stacked], wide: bool) -> Hashable:
    """What makes an operation another one. Of lengths only those of one are special."""
    axes = [*node.scope.sizes]
    types = [
        (tuple(n == 1 for n in value.x.shape), str(value.x.dtype), *map(axes.index, value.axes))
        for value in operands
    ]
    params = {name: x for name, x in node.eqn.params.items() if name not in _LENGTHS}
    results = [tuple(n == 1 for n in getattr(var.aval, "shape", ())) for var in node.eqn.outvars]
    return node.name, wide, str(params), str(types), str(results)


def assert_same(result: Stacked, other: Stacked, scope: MappedAxes, wide: bool) -> None:
    assert result.x.dtype == other.x.dtype
    # One of the two may have a copy for each shard where the other has one for all.
    names = {*result.axes, *other.axes}
    x, y = (scope.spread(value, names).x for value in (result, other))
    if x.dtype.kind != "f":
        np.testing.assert_array_equal(x, y)
    else:
        largest = np.abs(y[np.isfinite(y)]).max(initial=1)
        roundoff = 1e-14 if wide else 1e-3
        np.testing.assert_allclose(x, y, rtol=100 * roundoff, atol=roundoff * float(largest))
