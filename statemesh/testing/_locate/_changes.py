"""Simple changes of a line: another shard to send to, a count off by one, the index of the shard added."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from .._types import Numbers
from . import _words as words
from ._comparison import Comparison
from ._flat import Step
from ._suspects import Group
from ._values import Points, Read


# What makes a value of the others of the program.
Change: TypeAlias = Callable[[Read], Numbers]

# Each change runs the steps after it once: so many steps in all.
_MOST_STEPS = 8000
_MOST_TRIALS = 48
_MOST_VALUES = 400
# Offsets are tried for so many lengths of arrays.
_MOST_LENGTHS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A change of one line.

    **Attributes:**

    - `changes`: what it makes of values.
    - `is_move`: whether values go to other shards.
    - `words`: the change in words, where no other one does the same; else none.
    """

    group: Group
    changes: dict[int, Change]
    words: str | None = None
    is_move: bool = False


def confirmed(found: Comparison, groups: Sequence[Group]) -> Trial | None:
    """The first simple change of a line that puts all results right."""
    trials = [trial for group in groups if group.line for trial in _trials(found, group)]
    trials = sorted(trials, key=lambda one: not one.is_move)[:_MOST_TRIALS]
    points = list(dict.fromkeys(x for trial in trials for x in trial.changes))
    if not points or len(points) > _MOST_VALUES:
        return None
    program = Points(found.evaluators[0], found.mesh, found.given[0], found.scopes, points)
    trials = trials[: max(_MOST_STEPS // max(program.length, 1), 1)]
    return next((one for one in trials if all(found.judged(program.results(one.changes)))), None)


def _trials(found: Comparison, group: Group) -> Iterator[Trial]:
    if group.transposed:
        return
    # The same operation in each round of a loop is changed in all rounds, also in those that are right.
    kinds: dict[Hashable, list[Step]] = {}
    for step in found.mesh.steps:
        if step.line == group.line and not step.transposed:
            kinds.setdefault((step.name, str(step.eqn.outvars[0].aval)), []).append(step)
    suspects = {*group.steps}
    for steps in kinds.values():
        if not suspects.intersection(steps):
            continue
        name = steps[0].name
        if name == "ppermute":
            yield from _moves(found, group, steps)
        elif name == "axis_index":
            yield from _indices(found, group, steps)
        elif len(steps[0].results) == 1 and steps[0].kind == "run":
            yield from _whole_numbers(found, group, steps)


def _moves(found: Comparison, group: Group, steps: Sequence[Step]) -> Iterator[Trial]:
    """Every shift along the axis, with and without what goes round."""
    name = steps[0].eqn.params["axis_name"]
    names = (name,) if isinstance(name, str) else tuple(name)
    sizes = found.scopes[steps[0].results[0]].sizes
    if len(names) != 1 or names[0] not in sizes:
        return
    at = list(sizes).index(names[0])
    for shift, wraps in itertools.product((1, -1, 0), (True, False)):
        if shift or wraps:
            changes = {
                x: _moved(source, at, shift, wraps)
                for step in steps
                for x, source in zip(step.results, step.inputs, strict=True)
            }
            yield Trial(group, changes, words.moved(names[0], shift, group.line), is_move=True)


def _moved(source: int, at: int, shift: int, wraps: bool) -> Change:
    def change(read: Read) -> Numbers:
        made = np.roll(read(source), shift, at)
        if not wraps:
            edge = [slice(None)] * made.ndim
            edge[at] = slice(0, shift) if shift > 0 else slice(shift, None)
            made[tuple(edge)] = 0
        return made

    return change


def _indices(found: Comparison, group: Group, steps: Sequence[Step]) -> Iterator[Trial]:
    """The index along another axis, or times the length of a part."""
    x = steps[0].results[0]
    sizes = found.scopes[x].sizes
    given = steps[0].eqn.params["axis_name"]
    for name in sizes:
        if name != given and sizes[name] > 1:
            changes = _set(steps, _index(found, x, name))
            yield Trial(group, changes, words.indexed(name, group.line))
    if given in sizes and sizes[given] > 1:
        for length in _lengths(found):
            changes = _set(steps, length * _index(found, x, given))
            yield Trial(group, changes)


def _set(steps: Sequence[Step], numbers: Numbers) -> dict[int, Change]:
    return {x: lambda read: numbers for step in steps for x in step.results}


def _index(found: Comparison, value: int, name: Hashable, rank: int = 0) -> Numbers:
    """The index of each shard along an axis, with all mesh axes in front."""
    sizes = found.scopes[value].sizes
    shape = [size if other == name else 1 for other, size in sizes.items()]
    index = np.arange(sizes[name]).reshape(shape)
    return np.broadcast_to(index, tuple(sizes.values())).reshape((*sizes.values(), *(1,) * rank))


def _lengths(found: Comparison) -> list[int]:
    """The lengths of what shards have of arrays that are split."""
    return sorted(found.lengths - {0, 1})[:_MOST_LENGTHS]


def _whole_numbers(found: Comparison, group: Group, steps: Sequence[Step]) -> Iterator[Trial]:
    """Truths the other way round or of the next shard; numbers off by one or by the index of a shard."""
    values = [step.results[0] for step in steps]
    shown = [x for x in values if x in found.kept]
    if not shown:
        return
    first, sizes = found.kept[shown[0]].got, found.scopes[values[0]].sizes
    if first.dtype == bool:
        yield Trial(group, {x: _inverted(x) for x in values})
        for (at, name), shift in itertools.product(enumerate(sizes), (1, -1)):
            if sizes[name] > 1:
                changes = {x: _moved(x, at, shift, True) for x in values}
                yield Trial(group, changes)
    elif _is_whole_number(steps[0]):
        for summand in (1, -1):
            changes = {x: _increased(x, np.asarray(summand)) for x in values}
            yield Trial(group, changes)
        for name, size in sizes.items():
            lengths = {first.shape[-1]} if first.ndim > len(sizes) else set(_lengths(found))
            for length in sorted(lengths) if size > 1 else ():
                offset = length * _index(found, values[0], name, first.ndim - len(sizes))
                changes = {x: _increased(x, offset) for x in values}
                yield Trial(group, changes, words.offset(length, name, group.line))


def _is_whole_number(step: Step) -> bool:
    """Keys, which are shown as whole numbers, are none."""
    aval: Any = step.eqn.outvars[0].aval
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.integer))


def _inverted(value: int) -> Change:
    return lambda read: ~read(value)


def _increased(value: int, summand: Numbers) -> Change:
    return lambda read: read(value) + summand
