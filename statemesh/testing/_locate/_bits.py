"""The first line whose numbers differ in a bit between a call on a mesh and one on one device."""

from collections.abc import Iterator, Mapping, Sequence

import jax

from .._program._lines import SourceLine
from .._program._trace import NO_MESH, on_one_device
from .._types import Fun, Numbers, PyTree
from ._compare import Comparison, both_traced, compare_traced, right_values


def line_in_bits(
    mapped: Fun, reference: Fun, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> SourceLine | None:
    """The line, in the dtypes of the programs, each of whose operations runs by itself.

    Partial results are left out: one device has no such numbers. `None` where all others are equal.
    """
    arrays, traces = both_traced(mapped, reference, (args, kwargs))
    placed = jax.tree.map(on_one_device, arrays)
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
        return next(_lines(compare_traced(traces, placed, wide=False)), None)


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
