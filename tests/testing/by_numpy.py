"""The two interpreters of `locate`: NumPy, and the replay for what NumPy has no operation for."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from statemesh.testing._locate._evaluate import Evaluator, in_numpy, results_by_numpy
from statemesh.testing._locate._graph import graph_of
from statemesh.testing._program._literals import Exact
from statemesh.testing._program._stacked import MappedAxes, Stacked
from statemesh.testing._program._trace import NO_MESH


def compare_by_numpy(closed: Any, arrays: Sequence[Any], scope: MappedAxes, wide: bool) -> set[str]:
    """Run a program node by node. What NumPy computes must be what the replay computes.

    **Returns:** the names of the operations that were compared.
    """
    compared: set[Any] = set()
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
            types = [
                # Only lengths of one are special.
                (tuple(n == 1 for n in value.x.shape), str(value.x.dtype), value.axes)
                for value in operands
            ]
            # An operation that is the same as one before would give the same.
            key = node.name, str(node.eqn.params), str(types)
            if key in compared:
                continue
            compared.add(key)
            by_jax = evaluator.results_by_jax(node, operands)
            for result, other in zip(node.results, by_jax, strict=True):
                assert_same(known[result], other, node.scope, wide)
    return {name for name, *_ in compared}


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
