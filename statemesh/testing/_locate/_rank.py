"""The lines at which values stop being those of one device, the likeliest first.

There is one list of interventions: right values at each line that leads to a wrong result, and simple changes
of lines that put all results right. Each has a cost: of what speaks for it, and of the results that stay
wrong. Lines are ordered by the least cost of their interventions, and then by their place in the program.

The costs are those of 96 settings that name most lines of the planted models (`property_tests/planted`). Each
of six random halves of 200 mistakes chose the same one. Where any of the costs is one more or less, at most
five of the 200 lose their first line. What else could speak for a line, such as that it reads what the
likeliest line makes, or that it moves values between shards, was tried and named no more lines.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from .._program._stacked import as_names, names_of_spec
from . import _words as words
from ._compare import Comparison, inside, right_values
from ._graph import Node
from ._interventions import Mended, Reruns, Trial, cause, mending
from ._lines import Line
from ._located import Place
from ._suspects import Evidence, Suspect, is_first, others, suspects_of


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


def places(comparison: Comparison) -> tuple[list[Place], str | None]:
    """The likeliest places, and what puts all results right if that is sure."""
    reruns, suspects = Reruns(comparison), suspects_of(comparison)
    tried = [(suspect, mended) for suspect, mended in _tried(reruns, suspects) if suspect.line]
    lines = [suspect for suspect, _ in tried]
    is_sure = comparison.matched and any(
        mended and mended.all and mended.plain and suspect.evidence == "first"
        for suspect, mended in tried
    )
    trials = mending(reruns, lines, None if is_sure else others(comparison, suspects))
    # The cost of an intervention, the position of its line in the program, and the line.
    interventions = [(_cost(*each), position, each[0]) for position, each in enumerate(tried)]
    if not is_sure:
        positions = {suspect: position for position, suspect in enumerate(lines)}
        # Lines that lead to no wrong result come last.
        interventions += [
            (trial.cost, positions.get(trial.suspect, len(lines)), trial.suspect)
            for trial in trials
        ]
    by_line: dict[Line | None, Suspect] = {}
    for *_, suspect in sorted(interventions, key=lambda intervention: intervention[:2]):
        by_line.setdefault(suspect.line, suspect)
    if not by_line:
        return [], None
    likeliest = list(by_line.values())
    reason = cause(comparison, likeliest[0], trials)
    shown: dict[tuple[str, int], Place] = {}
    # After a cause nothing is left to explain.
    for suspect in likeliest[: 2 if reason else MOST_PLACES]:
        deeper, reason_inside = _places_inside(comparison, suspect)
        if deeper and not shown:
            reason = reason_inside
        trial = next((trial for trial in trials if trial.suspect.line == suspect.line), None)
        for place in deeper or [_place(reruns, suspect, trial)]:
            shown.setdefault((place.file, place.line), place)
    return list(shown.values())[:MOST_PLACES], reason


def _tried(reruns: Reruns, suspects: Sequence[Suspect]) -> Iterator[tuple[Suspect, Mended | None]]:
    """What comes of right values at each line; `None` where they were not tried."""
    done = False
    for suspect in suspects:
        # Right values at a line after one that puts everything right would do so too.
        mended = None if done else reruns.try_right(suspect)
        yield suspect, mended
        is_right = mended is not None and mended.all and mended.plain
        done = done or (is_right and suspect.evidence != "related")


def _cost(suspect: Suspect, mended: Mended | None) -> int:
    cost = _COST_OF_EVIDENCE[suspect.evidence] + _COST_OF_DERIVATIVE * suspect.transposed
    if mended and mended.all:
        return cost
    return cost + (_COST_OF_WRONG if mended is None or mended.right else _COST_OF_ALL_WRONG)


def _places_inside(comparison: Comparison, suspect: Suspect) -> tuple[list[Place], str | None]:
    """The places inside a loop or branch in which values stop being related."""
    loops = [node for node in suspect.nodes if node in comparison.operands]
    within = inside(comparison, loops[0]) if loops and is_first(comparison, loops[0]) else None
    if within is None:
        return [], None
    likeliest, reason = places(within[0])
    if within[1] is not None:
        likeliest = [dataclasses.replace(place, step=within[1]) for place in likeliest]
    return likeliest, reason


def _place(reruns: Reruns, suspect: Suspect, trial: Trial | None) -> Place:
    comparison = reruns.comparison
    node, value = _shown(comparison, suspect)
    assert suspect.line is not None
    got = want = shards = ""
    if comparison.differs(value) and value not in comparison.indices:
        right = next(right_values(comparison, value), None)
        if right is None:
            got, want = words.shapes(comparison.values[value].shape, comparison.wants.get(value))
        else:
            names = list(comparison.scopes[value].sizes)
            got, want, shards = words.most_off(comparison.got(value), right[0], names)
    elif trial:
        # What the change makes is right.
        value, change = next(iter(trial.changes.items()))
        before, after = reruns.both(value, change)
        names = list((change.scope or comparison.scopes[value]).sizes)
        got, want, shards = words.most_off(before, after, names)
    known = comparison.relations.get(value)
    return Place(
        file=suspect.line.file,
        line=suspect.line.number,
        source=suspect.line.source,
        operation=words.operation(node),
        got=got,
        want=want,
        shards=shards,
        note=words.partial(known) if known else "",
    )


def _shown(comparison: Comparison, suspect: Suspect) -> tuple[Node, int]:
    """The node and the value that show best what is off."""
    values = [(node, x) for node in suspect.nodes for x in node.results if comparison.differs(x)]
    # Or else, of what is related but partial, what the line hands on.
    unrelated = [(node, x) for node, x in values if comparison.is_unrelated(x)]
    related = [(node, x) for node, x in reversed(values) if x in suspect.values]
    return next(iter([*unrelated, *related]), (suspect.nodes[0], suspect.nodes[0].results[0]))


# Specs of results and arguments


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
