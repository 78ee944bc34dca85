"""The specs that give results another length on a mesh."""

import math
from collections.abc import Iterator, Sequence

from jax.sharding import PartitionSpec

from .._program._stacked import as_names, names_of_spec
from . import _words as words
from ._compare import Comparison
from ._located import Place


def wrong_specs(
    comparison: Comparison, results: Sequence[str], arguments: Sequence[str]
) -> list[Place]:
    """The specs that give results another length on a mesh, the likeliest first.

    They are ordered by how many results each explains, by cost, and by their place among the specs.

    **Arguments:**

    - `results`, `arguments`: the paths of the arrays.
    """
    # How many results each explains, what it costs, and what is shown.
    specs: dict[str, tuple[int, int, Place]] = {}
    in_specs = list(_in_specs(comparison))
    ends = zip(comparison.results, comparison.mesh.results, results, strict=True)
    for result, operand, path in ends:
        join = comparison.maker.get(operand) if isinstance(operand, int) else None
        got, want = result.got.x.shape, result.want.shape
        unequal = [d for d in range(len(want)) if len(got) == len(want) and got[d] != want[d]]
        if join is None or join.spec is None or len(unequal) != 1 or not math.prod(want):
            continue
        (d,) = unequal
        # A result is too long where its spec names axes that no argument's spec names, and too short where
        # an argument's spec names axes that its own does not.
        is_short = got[d] < want[d]
        own_axes = as_names(join.spec[d]) if d < len(join.spec) else ()
        axes = tuple(join.scope.sizes) if is_short else own_axes
        # Where each shard has the whole result, only putting it together is wrong.
        is_out = is_short or (bool(join.inputs) and comparison.is_plain(join.inputs[0]))
        explaining = [("out_specs", path, join.spec, int(not is_out))]
        for number, spec in in_specs:
            value = comparison.values[comparison.mesh.inputs[number]]
            names_one = not {*names_of_spec(spec)}.isdisjoint(axes)
            if names_one == is_short and want[d] in value.shape:
                explaining.append(("in_specs", arguments[number], spec, int(is_out)))
        for which, name, spec, cost in explaining:
            source, length = (
                f"{which} of {name}: {words.typed(spec)}",
                words.RESULT_LENGTH.format(d),
            )
            place = Place("", 0, source, length, got=str(got[d]), want=str(want[d]), shards="")
            count, least, first = specs.get(source, (0, cost, place))
            specs[source] = count + 1, min(least, cost), first
    order = sorted(specs.values(), key=lambda spec: (-spec[0], spec[1]))
    return [place for *_, place in order]


def _in_specs(comparison: Comparison) -> Iterator[tuple[int, PartitionSpec]]:
    """The numbers of the arguments, and how each is split."""
    nodes = comparison.mesh.nodes
    split = {x: node.spec for node in nodes if node.kind == "split" for x in node.inputs}
    read = {x for node in nodes for x in node.inputs}
    for number, x in enumerate(comparison.mesh.inputs):
        if x in read:
            yield number, split.get(x) or PartitionSpec()
