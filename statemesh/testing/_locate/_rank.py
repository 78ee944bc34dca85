"""The places at which values stop being those of one device, the likeliest first."""

import dataclasses
from collections.abc import Iterator, Sequence

from . import _words as words
from ._compare import Comparison, inside, lines_of_carry
from ._graph import Node
from ._interventions import Mended, Mender, Trial, confirmed
from ._lines import Line
from ._located import Place
from ._suspects import Group, Suspects


@dataclasses.dataclass(frozen=True)
class _Tried:
    """A line, and what comes of putting it right.

    **Attributes:**

    - `number`: its place among the lines.
    - `has_run`: whether the program has run with right values there.
    - `with_derivative`: whether the line's derivative was put right with it.
    """

    group: Group
    mended: Mended
    number: int
    has_run: bool = True
    with_derivative: bool = False


def places(found: Comparison, most: int = 3) -> tuple[list[Place], str | None]:
    """The likeliest places, and what puts all results right if that is sure."""
    suspects = Suspects(found)
    groups = suspects.groups()
    gradients = suspects.handed_over()
    mender = Mender(found)
    tried = [one for one in _tried(mender, groups) if one.group.line is not None]
    if gradients and (mended := mender.try_right(gradients)) and mended.all:
        tried = [_Tried(gradients, mended, -1), *tried]
    tried = _with_derivatives(mender, tried)
    sure = any(one.mended.all and one.mended.plain and one.group.is_sure for one in tried)
    is_sure = sure and found.matched
    good = confirmed(
        found, mender, [one.group for one in tried], None if is_sure else suspects.others()
    )
    chosen: dict[Line | None, Group] = {}
    if good.first and not is_sure:
        chosen[good.first.group.line] = good.first.group
    for one in _in_order(suspects, tried, found.matched) if tried else ():
        chosen.setdefault(one.group.line, one.group)
    if not chosen:
        return [], None
    first, *_ = chosen.values()
    cause = good.cause(first)
    made: list[Place] = []
    # After a cause nothing is left to explain.
    for group in [*chosen.values()][: 2 if cause else most]:
        deeper, why = _deeper(found, suspects, group, most)
        if deeper and group is first:
            cause = why
        trial = good.first if good.first and good.first.group is group else None
        made += deeper or [_place(found, group, trial, mender)]
    unique = {(place.file, place.line): place for place in reversed(made)}
    kept = [place for place in made if unique[place.file, place.line] is place]
    return kept[:most], cause


def _tried(mender: Mender, groups: Sequence[Group]) -> Iterator[_Tried]:
    done = False
    for number, group in enumerate(groups):
        # Lines after one that puts everything right would do so too.
        mended = None if done else mender.try_right(group)
        yield _Tried(group, mended or Mended(), number, mended is not None)
        done = done or bool(mended and mended.all and mended.plain and not group.is_partial)


def _with_derivatives(mender: Mender, tried: Sequence[_Tried]) -> list[_Tried]:
    """Where a line is wrong and its derivative too, only both together put all right."""
    if any(one.mended.all for one in tried):
        return [*tried]
    backward = {one.group.line: one.group for one in tried if one.group.transposed}
    found = []
    for one in tried:
        other = backward.get(one.group.line)
        if other is None or one.group.transposed:
            found.append(one)
            continue
        both = dataclasses.replace(one.group, values=[*one.group.values, *other.values])
        mended = mender.try_right(both) or Mended()
        if mended.all:
            one = dataclasses.replace(one, mended=mended, with_derivative=True)
        found.append(one)
    return found


def _in_order(suspects: Suspects, tried: Sequence[_Tried], matched: bool) -> Iterator[_Tried]:
    """The likeliest first."""
    # Where a line is wrong and its derivative too, no line by itself puts all right.
    mending = [one for one in tried if one.mended.all] or [one for one in tried if one.mended.right]
    # Where a value is no longer related to that on one device.
    breaking = [one for one in mending if not one.group.is_partial]
    # A line that picks by the index of a shard may well make what one device has not.
    breaking.sort(key=lambda one: not (one.mended.plain or one.group.is_sure))
    firsts = [one for one in tried if one.group.is_first]
    firsts.sort(key=lambda one: (not one.group.is_sure, -one.mended.right, one.number))
    if not breaking or not breaking[0].group.is_first:
        # What is wrong happens before the line that can be put right.
        end = breaking[0].number if breaking else len(tried)
        # Unless right values there are of no use.
        earlier = [
            one
            for one in firsts
            if one.group.is_sure and one.number < end and not (one.has_run and not one.mended.right)
        ]
        breaking = [*sorted(earlier, key=lambda one: one.number)[:1], *breaking, *firsts]
    # Where a partial result comes from that is used as if it were whole, or a multiple.
    partial = [one for one in mending if one.group.is_partial and not one.group.transposed]
    origins = suspects.origins(breaking[0].group) if breaking else []
    yield from [one for one in mending if one.number < 0 or one.with_derivative]
    yield from [one for one in partial if one.group.is_multiple][:1]
    yield from [one for one in partial if one.group.line in origins and one.mended.plain][:1]
    yield from breaking[:1]
    yield from partial[:1]
    if not matched:
        # One device moves nothing, so that moves are never compared.
        yield from [one for one in tried if one.group.moves][:1]
    yield from breaking[1:2]
    yield from firsts[:2]
    if not any(one.group.is_sure for one in firsts):
        # The index itself may be mistaken.
        yield from [one for one in tried if one.group.is_index][:1]
    first = (breaking or partial or tried)[0]
    lines = suspects.readers(first.group)[:1]
    using = [one for one in tried if one.group.line in lines]
    yield from using
    yield from firsts
    lines = [line for one in using for line in suspects.readers(one.group)[:1]]
    yield from [one for one in tried if one.group.line in lines]
    if not any(one.mended.all and one.mended.plain for one in tried):
        yield from sorted(tried, key=lambda one: -one.mended.right)


def _deeper(
    found: Comparison, suspects: Suspects, group: Group, most: int
) -> tuple[list[Place], str | None]:
    """The places inside a loop or branch that is the first of a line."""
    node = next((node for node in group.nodes if node in found.operands), None)
    if node is None or node not in suspects.first:
        return [], None
    within = inside(found, node)
    if within is None:
        lines = lines_of_carry(found, node)
        whole = _place(found, dataclasses.replace(group, nodes=[node]), None, None)
        return [_inside_of(whole, line) for line in lines[: most - 1]] + [whole] * bool(lines), None
    made, reason = places(within.found, most)
    if within.round is not None:
        made = [dataclasses.replace(place, step=within.round) for place in made]
    return made, reason


def _inside_of(place: Place, line: Line) -> Place:
    """A line inside of a loop."""
    return dataclasses.replace(place, file=line.file, line=line.number, source=line.source)


def _shown(found: Comparison, group: Group) -> tuple[Node, int]:
    """The node and the value that show best what is off."""
    unrelated = [
        (node, x)
        for node in group.nodes
        for x in node.results
        if x in found.kept and found.relations[x] is None and x not in found.indices
    ]
    # Of what is related but partial, what the line hands on.
    related = [
        (node, x)
        for node in reversed(group.nodes)
        for x in node.results
        if x in found.kept and x in group.values
    ]
    both = [*unrelated, *related]
    return next(iter(both), (group.nodes[0], group.nodes[0].results[0]))


def _place(found: Comparison, group: Group, trial: Trial | None, mender: Mender | None) -> Place:
    node, value = _shown(found, group)
    assert group.line is not None
    got = want = shards = note = ""
    if value in found.kept and value not in found.indices:
        got, want, shards = words.numbers(found, value)
    elif trial and mender:
        # What the change makes is right.
        value, change = next(iter(trial.changes.items()))
        before, after = mender.reruns.both(value, change)
        got, want, shards = words.two_values(
            before, after, list((change.scope or found.scopes[value]).sizes)
        )
    known = found.relations.get(value)
    if known is not None:
        note = words.partial(known)
    return Place(
        file=group.line.file,
        line=group.line.number,
        source=group.line.source,
        operation=words.operation(node),
        got=got,
        want=want,
        shards=shards,
        note=note,
    )
