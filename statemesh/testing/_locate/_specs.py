"""The specs that give results another length on a mesh."""

import math
from collections.abc import Sequence

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
    inputs, nodes = comparison.mesh.inputs, comparison.mesh.nodes
    split = {x: node.spec for node in nodes if node.kind == "split" for x in node.operands}
    read = {x for node in nodes for x in node.operands}
    in_specs = {x: split.get(x) or PartitionSpec() for x in inputs if x in read}
    # What each spec costs for each result that it explains, and what is shown.
    specs: dict[str, list[tuple[int, Place]]] = {}
    ends = zip(comparison.mesh.results, *comparison.ends, results, strict=True)
    for operand, result, single, path in ends:
        join = comparison.maker.get(operand)
        got, want = result.x.shape, single.x.shape
        unequal = [d for d in range(len(want)) if len(got) == len(want) and got[d] != want[d]]
        if join is None or join.kind != "join" or len(unequal) != 1 or not math.prod(want):
            continue
        (d,) = unequal
        # A result is too long where its spec names axes that no argument's spec names, and too short where
        # an argument's spec names axes that its own does not.
        is_short = got[d] < want[d]
        own_axes = as_names(join.spec[d]) if d < len(join.spec) else ()
        axes = tuple(join.scope.sizes) if is_short else own_axes
        # Where each shard has the whole result, only putting it together is wrong.
        is_out = is_short or (bool(join.operands) and comparison.is_plain(join.operands[0]))
        explaining = [("out_specs", path, join.spec, int(not is_out))]
        for x, name in zip(inputs, arguments, strict=True):
            spec = in_specs.get(x)
            if spec is None or want[d] not in comparison.values[x].x.shape:
                continue
            if is_short != {*names_of_spec(spec)}.isdisjoint(axes):
                explaining.append(("in_specs", name, spec, int(is_out)))
        for which, name, spec, cost in explaining:
            source = f"{which} of {name}: {words.typed(spec)}"
            length = words.RESULT_LENGTH.format(d)
            place = Place("", 0, source, length, got=str(got[d]), want=str(want[d]), shards="")
            specs.setdefault(source, []).append((cost, place))
    order = sorted(specs.values(), key=lambda each: (-len(each), min(cost for cost, _ in each)))
    return [each[0][1] for each in order]
