"""The first line whose numbers differ in a bit between a call on a mesh and one on one device."""

from collections.abc import Iterator, Mapping, Sequence

import jax

from .._program._lines import SourceLine
from .._program._numbers import is_numpy
from .._program._stacked import MappedAxes
from .._program._trace import NO_MESH, is_array_or_type, on_one_device, trace_exactly
from .._types import Fun, Numbers, PyTree, tree_util
from ._compare import Comparison, compare, right_values
from ._evaluate import Evaluator, in_numpy
from ._graph import graph_of


def line_in_bits(
    mapped: Fun, reference: Fun, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> SourceLine | None:
    """The line, in the dtypes of the programs, each of whose operations runs by itself.

    Partial results are left out: one device has no such numbers. `None` where all others are equal.
    """
    arrays = jax.tree.map(lambda x: jax.numpy.asarray(x) if is_numpy(x) else x, (args, kwargs))
    leaves, treedef = tree_util.tree_flatten(arrays)
    traces = [trace_exactly(fun, treedef, leaves) for fun in (mapped, reference)]
    placed = jax.tree.leaves(jax.tree.map(on_one_device, arrays))
    inputs = [in_numpy(x) for x in placed if is_array_or_type(x)]
    mesh, single = (
        Evaluator(graph_of(traced.closed, MappedAxes()), False, traced.exact) for traced in traces
    )
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
        comparison = compare((mesh, single), MappedAxes(), (inputs, inputs))
        return next(_lines(comparison), None)


def _lines(comparison: Comparison) -> Iterator[SourceLine]:
    for node in comparison.mesh.nodes:
        for value in node.results:
            known = comparison.relations[value]
            is_partial = known is not None and not known.is_plain
            if node.line is None or is_partial or value not in comparison.values:
                continue
            wants = list(right_values(comparison, value))
            if wants and not any(_same_bits(comparison.got(value), want) for want in wants):
                yield node.line


def _same_bits(got: Numbers, want: Numbers) -> bool:
    return got.shape == want.shape and got.tobytes() == want.astype(got.dtype).tobytes()
