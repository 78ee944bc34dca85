"""Results that are longer or shorter on a mesh: a spec that names too many mesh axes, or too few."""

import math
from collections.abc import Iterator, Sequence

from jax.sharding import PartitionSpec

from .._program._stacked import as_names
from . import _words as words
from ._compare import Comparison
from ._located import Place


def wrong_specs(found: Comparison, results: Sequence[str], arguments: Sequence[str]) -> list[Place]:
    """The specs of the first result that has another length, the likeliest first.

    **Arguments:**

    - `results`, `arguments`: the paths of the arrays.
    """
    maker = found.mesh.maker()
    places: list[list[Place]] = []
    for result, operand, path in zip(found.results, found.mesh.results, results, strict=True):
        join = maker.get(operand) if isinstance(operand, int) else None
        got, want = result.got.x.shape, result.want.shape
        others = [d for d in range(len(want)) if len(got) == len(want) and got[d] != want[d]]
        if join is None or join.spec is None or len(others) != 1 or not math.prod(want):
            continue
        (d,) = others
        names = _names(join.spec, d) if got[d] > want[d] else tuple(join.scope.sizes)
        ins = [
            _place("in_specs", arguments[number], spec, d, got[d], want[d])
            for number, spec in _arguments(found)
            if (not _all_names(spec).isdisjoint(names)) == (got[d] < want[d])
            and want[d] in _lengths(found, number)
        ]
        out = _place("out_specs", path, join.spec, d, got[d], want[d])
        # Where each shard has the whole result, only putting it together is wrong.
        inner = found.relations.get(join.inputs[0]) if join.inputs else None
        is_whole = inner is not None and inner.is_plain
        places.append([out, *ins] if is_whole or got[d] < want[d] else [*ins, out])
    # An argument makes several results too long.
    places.sort(key=lambda some: some[0].source.startswith("out"))
    if len(places) > 1 and len(places[0]) > 1:
        places[0].sort(key=lambda one: one.source)
    return places[0] if places else []


def _place(what: str, path: str, spec: PartitionSpec, d: int, got: int, want: int) -> Place:
    source = f"{what} of {path}: {words.spec(spec)}"
    length = words.RESULT_LENGTH.format(d)
    return Place("", 0, source, length, got=str(got), want=str(want), shards="")


def _arguments(found: Comparison) -> Iterator[tuple[int, PartitionSpec]]:
    """The numbers of the arguments, and how each is split."""
    split = {x: node.spec for node in found.mesh.nodes if node.kind == "split" for x in node.inputs}
    read = {x for node in found.mesh.nodes for x in node.inputs}
    for number, x in enumerate(found.mesh.inputs):
        if x in read:
            yield number, split.get(x) or PartitionSpec()


def _lengths(found: Comparison, number: int) -> set[int]:
    value = found.given[0][found.mesh.inputs[number]]
    return {*value.x.shape[len(value.axes) :]}


def _names(spec: PartitionSpec, d: int) -> tuple[object, ...]:
    return as_names(spec[d]) if d < len(spec) else ()


def _all_names(spec: PartitionSpec) -> set[object]:
    return {name for entry in spec for name in as_names(entry)}
