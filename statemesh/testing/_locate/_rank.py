"""The places at which values stop being those of one device, the likeliest first."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from . import _words as words
from ._comparison import Comparison
from ._flat import Step
from ._lines import Line
from ._located import Place
from ._mend import Mended, Mender, reduced
from ._rounds import inside
from ._suspects import Group, Suspects


@dataclasses.dataclass(frozen=True)
class _Tried:
    """A line, and what comes of putting it right."""

    group: Group
    mended: Mended
    number: int

    @property
    def is_doubtful(self) -> bool:
        """Whether the line makes partial derivatives, which are right as long as they are summed later."""
        return self.group.is_partial and self.group.transposed


def places(found: Comparison, most: int = 3) -> tuple[list[Place], str | None]:
    """The likeliest places, and what puts all results right if that is sure."""
    suspects = Suspects(found)
    groups = suspects.groups()
    order = sorted(range(len(groups)), key=lambda k: (not groups[k].is_first, k))
    mender = Mender(found, [groups[k] for k in order])
    tried = list(_tried(mender, groups))
    tried.sort(key=_likely)
    if not tried:
        return [], None
    first, *others = tried
    # If one line explains all that is wrong, lines further on do so too, and tell nothing.
    others.sort(key=lambda one: (not one.group.is_first, not one.mended.all, one.number))
    seen: list[Line | None] = []
    chosen: list[_Tried] = []
    for one in (first, *others):
        if one.group.line is not None and one.group.line not in seen:
            seen.append(one.group.line)
            chosen.append(one)
    reason = _cause(found, mender, first.group) if first.mended.all else None
    made: list[Place] = []
    for one in chosen[:most]:
        deeper, why = _deeper(found, one.group, most)
        if deeper and one is first:
            reason = why
        made += deeper or [_place(found, one.group)]
    unique = {(place.file, place.line): place for place in reversed(made)}
    kept = [place for place in made if unique[place.file, place.line] is place]
    return kept[:most], reason


def _tried(mender: Mender, groups: Sequence[Group]) -> Iterator[_Tried]:
    done = False
    for number, group in enumerate(groups):
        # Lines after one that puts everything right would do so too.
        mended = Mended(0, False) if done else mender.try_right(group)
        one = _Tried(group, mended, number)
        done = done or (mended.all and not one.is_doubtful)
        yield one


def _likely(one: _Tried) -> tuple[object, ...]:
    mended, group = one.mended, one.group
    return (
        group.line is None,
        not mended.all or one.is_doubtful,
        not group.is_first,
        one.is_doubtful,
        -mended.right,
        one.number,
    ) if not mended.all else (group.line is None, one.is_doubtful, False, False, 0, one.number)


def _deeper(found: Comparison, group: Group, most: int) -> tuple[list[Place], str | None]:
    """The places inside a loop or branch that is the first of a line."""
    step = next((step for step in group.steps if step in found.operands), None)
    within = inside(found, step) if step is not None and _shown(found, group)[0] is step else None
    if within is None:
        return [], None
    made, reason = places(within.found, most)
    if within.round is not None:
        made = [dataclasses.replace(place, step=within.round) for place in made]
    return made, reason


def _shown(found: Comparison, group: Group) -> tuple[Step, int]:
    """The step and the value that show best what is off."""
    unrelated = [
        (step, x)
        for step in group.steps
        for x in step.results
        if x in found.kept and found.relations[x] is None and x not in found.indices
    ]
    related = [(step, x) for step in group.steps for x in step.results if x in found.kept]
    both = [*unrelated, *related]
    return next(iter(both), (group.steps[0], group.steps[0].results[0]))


def _place(found: Comparison, group: Group) -> Place:
    step, value = _shown(found, group)
    assert group.line is not None
    got = want = shards = note = ""
    if value in found.kept:
        got, want, shards = words.numbers(found.kept[value], step.around)
    known = found.relations.get(value)
    if known is not None:
        note = words.partial(known)
    return Place(
        file=group.line.file,
        line=group.line.number,
        source=group.line.source,
        operation=words.operation(step),
        got=got,
        want=want,
        shards=shards,
        note=note,
    )


def _cause(found: Comparison, mender: Mender, group: Group) -> str | None:
    """What puts all results right, if exactly one simple change does."""
    values = [x for x in group.values if x in mender.points]
    if not values:
        return None
    scopes = {x: step.around for step in group.steps for x in step.results}
    confirmed = []
    for at, (name, size) in enumerate(scopes[values[0]].sizes.items()):
        if size == 1:
            continue
        for collective in ("psum", "pmean", "pmax"):
            tried = {}
            for x in values:
                ways = reduced(found.kept[x], scopes[x])
                tried |= {x: new for c, n, new in ways if (c, n) == (collective, name)}
            if len(tried) == len(values) and mender.run(tried).all:
                confirmed.append(words.cause(collective, name))
        del at
        floats = {x: found.kept[x].got for x in values if found.kept[x].got.dtype.kind in "fc"}
        if len(floats) == len(values):
            if mender.run({x: np.asarray(got) / size for x, got in floats.items()}).all:
                confirmed.append(words.too_much(size))
    return confirmed[0] if len(confirmed) == 1 else None
