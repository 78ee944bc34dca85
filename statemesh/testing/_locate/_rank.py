"""The lines at which values stop being those of one device, the likeliest first.

There is one list of interventions: right values at each line that leads to a wrong result, and simple changes
of lines that put all results right. Each has a cost: of what speaks for it, and of the results that stay
wrong. Lines are ordered by the least cost of their interventions, and then by their place in the program.

The costs are fitted to the planted models (`property_tests/planted`), on halves of all mistakes; the other
halves judge them. On plateaus the simpler value was taken: most costs may be one more or less, and nothing
changes.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from .._program._stacked import Axes, as_names
from . import _words as words
from ._compare import Comparison, inside, right_values
from ._graph import Node
from ._interventions import Mended, Reruns, Trial, cause, mending
from ._lines import Line
from ._located import Place
from ._suspects import Evidence, Group, groups, is_first, others


# A report names so many.
MOST_PLACES = 3

_COST_OF_EVIDENCE: Mapping[Evidence, int] = {
    "first": 1,
    "unsure": 2,
    "related": 1,
    "index": 5,
    "after": 4,
}
# A mistake in a line shows in its derivative too.
_COST_OF_DERIVATIVE = 1
# Not all results are known to be right with right values at the line: some stay wrong, or the values were not
# tried, because nobody knows them or those at an earlier line put all results right. And no result is.
_COST_OF_WRONG, _COST_OF_ALL_WRONG = 3, 6


@dataclasses.dataclass(frozen=True)
class _Intervention:
    """Right values at a line, or a simple change of it.

    **Attributes:**

    - `position`: of the line in the program.
    """

    group: Group
    cost: int
    position: int


def places(comparison: Comparison) -> tuple[list[Place], str | None]:
    """The likeliest places, and what puts all results right if that is sure."""
    reruns, suspects = Reruns(comparison), groups(comparison)
    tried = [(group, mended) for group, mended in _tried(reruns, suspects) if group.line]
    lines = [group for group, _ in tried]
    is_sure = comparison.matched and any(
        mended and mended.all and mended.plain and group.evidence == "first"
        for group, mended in tried
    )
    trials = mending(reruns, lines, None if is_sure else others(comparison, suspects))
    interventions = [
        _Intervention(group, _cost(group, mended), position)
        for position, (group, mended) in enumerate(tried)
    ]
    if not is_sure:
        # Lines that lead to no wrong result come last.
        position = {group: k for k, group in enumerate(lines)}
        interventions += [
            _Intervention(trial.group, trial.cost, position.get(trial.group, len(lines)))
            for trial in trials
        ]
    by_line: dict[Line | None, Group] = {}
    for intervention in sorted(interventions, key=lambda x: (x.cost, x.position)):
        by_line.setdefault(intervention.group.line, intervention.group)
    if not by_line:
        return [], None
    likeliest = list(by_line.values())
    reason = cause(comparison, likeliest[0], trials)
    shown: dict[tuple[str, int], Place] = {}
    # After a cause nothing is left to explain.
    for group in likeliest[: 2 if reason else MOST_PLACES]:
        deeper, reason_inside = _places_inside(comparison, group)
        if deeper and not shown:
            reason = reason_inside
        trial = next((trial for trial in trials if trial.group.line == group.line), None)
        for place in deeper or [_place(reruns, group, trial)]:
            shown.setdefault((place.file, place.line), place)
    return list(shown.values())[:MOST_PLACES], reason


def _tried(reruns: Reruns, suspects: Sequence[Group]) -> Iterator[tuple[Group, Mended | None]]:
    """What comes of right values at each line; `None` where they were not tried."""
    done = False
    for group in suspects:
        # Right values at a line after one that puts everything right would do so too.
        mended = None if done else reruns.try_right(group)
        yield group, mended
        is_right = mended is not None and mended.all and mended.plain
        done = done or (is_right and group.evidence != "related")


def _cost(group: Group, mended: Mended | None) -> int:
    cost = _COST_OF_EVIDENCE[group.evidence] + _COST_OF_DERIVATIVE * group.transposed
    if mended and mended.all:
        return cost
    return cost + (_COST_OF_WRONG if mended is None or mended.right else _COST_OF_ALL_WRONG)


def _places_inside(comparison: Comparison, group: Group) -> tuple[list[Place], str | None]:
    """The places inside a loop or branch in which values stop being related."""
    loops = [node for node in group.nodes if node in comparison.operands]
    within = inside(comparison, loops[0]) if loops and is_first(comparison, loops[0]) else None
    if within is None:
        return [], None
    likeliest, reason = places(within[0])
    if within[1] is not None:
        likeliest = [dataclasses.replace(place, step=within[1]) for place in likeliest]
    return likeliest, reason


def _place(reruns: Reruns, group: Group, trial: Trial | None) -> Place:
    comparison = reruns.comparison
    node, value = _shown(comparison, group)
    assert group.line is not None
    got = want = shards = ""
    difference = comparison.differences.get(value)
    if difference is not None and value not in comparison.indices:
        right, names = (
            next(right_values(comparison, value), None),
            list(comparison.scopes[value].sizes),
        )
        if right is None:
            got, want = words.shapes(difference.got.shape[len(names) :], difference.want)
        else:
            got, want, shards = words.numbers(difference.got, right[0], names)
    elif trial:
        # What the change makes is right.
        value, change = next(iter(trial.changes.items()))
        before, after = reruns.both(value, change)
        names = list((change.scope or comparison.scopes[value]).sizes)
        got, want, shards = words.numbers(before, after, names)
    known = comparison.relations.get(value)
    return Place(
        file=group.line.file,
        line=group.line.number,
        source=group.line.source,
        operation=words.operation(node),
        got=got,
        want=want,
        shards=shards,
        note=words.partial(known) if known else "",
    )


def _shown(comparison: Comparison, group: Group) -> tuple[Node, int]:
    """The node and the value that show best what is off."""
    values = [
        (node, x) for node in group.nodes for x in node.results if x in comparison.differences
    ]
    # Or else, of what is related but partial, what the line hands on.
    unrelated = [(node, x) for node, x in values if comparison.is_unrelated(x)]
    related = [(node, x) for node, x in reversed(values) if x in group.values]
    return next(iter([*unrelated, *related]), (group.nodes[0], group.nodes[0].results[0]))


# Specs of results and arguments


def wrong_specs(
    comparison: Comparison, results: Sequence[str], arguments: Sequence[str]
) -> list[Place]:
    """The specs that give results another length on a mesh, the likeliest first.

    They are ordered by how many results each explains, by cost, and by their place among the specs.

    **Arguments:**

    - `results`, `arguments`: the paths of the arrays.
    """
    explained = collections.Counter[str]()
    costs: dict[str, int] = {}
    shown: dict[str, Place] = {}
    in_specs = list(_in_specs(comparison))
    for result, operand, path in zip(
        comparison.results, comparison.mesh.results, results, strict=True
    ):
        join = comparison.maker.get(operand) if isinstance(operand, int) else None
        got, want = result.got.x.shape, result.want.shape
        unequal = [d for d in range(len(want)) if len(got) == len(want) and got[d] != want[d]]
        if join is None or join.spec is None or len(unequal) != 1 or not math.prod(want):
            continue
        (d,) = unequal
        # A result is too long where its spec names axes that no argument's spec names, and too short where
        # an argument's spec names axes that its own does not.
        is_short = got[d] < want[d]
        named = tuple(join.scope.sizes) if is_short else _names(join.spec)[d]
        # Where each shard has the whole result, only putting it together is wrong.
        is_whole = bool(join.inputs) and comparison.is_plain(join.inputs[0])
        specs = [("out_specs", path, join.spec, 0 if is_short or is_whole else 1)]
        for number, spec in in_specs:
            names_one = not {*itertools.chain(*_names(spec).values())}.isdisjoint(named)
            value = comparison.values[comparison.mesh.inputs[number]]
            if names_one == is_short and want[d] in value.shape:
                specs.append(
                    ("in_specs", arguments[number], spec, 1 if is_short or is_whole else 0)
                )
        for which, name, spec, cost in specs:
            source = f"{which} of {name}: {words.typed(spec)}"
            length = words.RESULT_LENGTH.format(d)
            explained[source] += 1
            costs[source] = min(cost, costs.get(source, cost))
            place = Place("", 0, source, length, got=str(got[d]), want=str(want[d]), shards="")
            shown.setdefault(source, place)
    order = sorted(shown, key=lambda source: (-explained[source], costs[source]))
    return [shown[source] for source in order]


def _in_specs(comparison: Comparison) -> Iterator[tuple[int, PartitionSpec]]:
    """The numbers of the arguments, and how each is split."""
    nodes = comparison.mesh.nodes
    split = {x: node.spec for node in nodes if node.kind == "split" for x in node.inputs}
    read = {x for node in nodes for x in node.inputs}
    for number, x in enumerate(comparison.mesh.inputs):
        if x in read:
            yield number, split.get(x) or PartitionSpec()


def _names(spec: PartitionSpec) -> collections.defaultdict[int, Axes]:
    """The mesh axes that split each axis of an array."""
    names = {d: as_names(entry) for d, entry in enumerate(spec)}
    return collections.defaultdict(tuple, names)
