"""Simple changes of a line: another shard to send to, a count off by one, the index of the shard added."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._program._stacked import Scope, Stacked
from .._types import Numbers
from . import _words as words
from ._comparison import Comparison
from ._flat import Operand, Step
from ._mend import is_equal, reduced
from ._reruns import Change, Read, Reruns, constant
from ._suspects import Group
from ._values import on_all_shards


# Offsets are tried for so many lengths of arrays.
_MOST_LENGTHS = 4
# The reductions that are tried to put the results right.
REDUCTIONS: Mapping[str, Callable[..., Any]] = {"psum": np.sum, "pmean": np.mean, "pmax": np.max}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_LEFT_OUT = ("add", "sub", "mul", "max", "min", "or", "and", "select_n")


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A change of one line.

    **Attributes:**

    - `changes`: what it makes of values.
    - `order`: what is likely is tried before what is not.
    - `words`: the change in words, where no other one does the same; else none.
    - `is_added`: whether the change adds an operation, which may stand on any line that hands the value on.
    """

    group: Group
    changes: Mapping[int, Change]
    order: int
    words: str = ""
    is_added: bool = False


def reductions(found: Comparison, group: Group, values: Sequence[int]) -> Iterator[Trial]:
    """Values that a line makes, reduced over a mesh axis or multiplied by its size."""
    if not values or not all(x in found.kept for x in values):
        return
    for name, size in found.scopes[values[0]].sizes.items():
        for collective, reduce in REDUCTIONS.items():
            made = {x: reduced(found, x, reduce, name) for x in values}
            changed = {x: constant(new) for x, new in made.items() if new is not None}
            if len(changed) == len(values):
                yield Trial(group, changed, 1, words.reduced(collective, name), True)
        # A line with a collective of its own may have the wrong one.
        is_added = not any(step.is_collective for step in group.steps)
        if size > 1 and all(is_equal(found, x, name) for x in values):
            for factor in (size, 1 / size):
                changed = {x: constant(found.kept[x].got * factor) for x in values}
                yield Trial(group, changed, 1, words.scaled(size, factor > 1), is_added)


def reductions_inside(found: Comparison, group: Group) -> Iterator[Trial]:
    """The same of what only the line itself uses."""
    for x in [x for step in group.steps for x in step.results if x not in group.values]:
        yield from reductions(found, group, [x])


def changes(found: Comparison, group: Group, reruns: Reruns) -> Iterator[Trial]:
    """Other simple changes of a line."""
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
            yield from _operands(found, group, steps, reruns)
            if name in _LEFT_OUT:
                yield from _left_out(found, group, steps)


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
            made = {
                x: _moved(source, at, shift, wraps)
                for step in steps
                for x, source in zip(step.results, step.inputs, strict=True)
            }
            yield Trial(group, made, 0, words.moved(names[0], shift))


def _moved(source: int, at: int, shift: int, wraps: bool) -> Change:
    def change(read: Read) -> Numbers:
        made = np.roll(read(source), shift, at)
        if not wraps:
            edge = [slice(None)] * made.ndim
            edge[at] = slice(0, shift) if shift > 0 else slice(shift, None)
            made[tuple(edge)] = 0
        return made

    return Change(change, (source,))


def _indices(found: Comparison, group: Group, steps: Sequence[Step]) -> Iterator[Trial]:
    """The index along another axis, or times the length of a part."""
    x = steps[0].results[0]
    sizes = found.scopes[x].sizes
    given = steps[0].eqn.params["axis_name"]
    for name in sizes:
        if name != given and sizes[name] > 1:
            made = _set(steps, _index(found, x, name))
            yield Trial(group, made, 1, words.indexed(name))
    if given in sizes and sizes[given] > 1:
        for length in _lengths(found):
            made = _set(steps, length * _index(found, x, given))
            yield Trial(group, made, 2)


def _set(steps: Sequence[Step], numbers: Numbers) -> dict[int, Change]:
    return {x: constant(numbers) for step in steps for x in step.results}


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
    """Truths the other way round or of another shard; numbers off by one or by the index of a shard."""
    values, sizes = [step.results[0] for step in steps], found.scopes[steps[0].results[0]].sizes
    aval: Any = steps[0].eqn.outvars[0].aval
    if aval.dtype == bool:
        yield Trial(group, {x: _inverted(x) for x in values}, 1)
        for at, name in enumerate(sizes):
            for shift in range(1, sizes[name]):
                yield Trial(group, {x: _moved(x, at, shift, True) for x in values}, 1)
    elif jnp.issubdtype(aval.dtype, jnp.integer):
        for summand in (1, -1):
            made = {x: _increased(x, np.asarray(summand)) for x in values}
            yield Trial(group, made, 1)
        for name, length, offset in _offsets(found, values[0], aval.shape):
            made = {x: _increased(x, offset) for x in values}
            yield Trial(group, made, 1, words.offset(length, name))


def _offsets(
    found: Comparison, value: int, shape: Sequence[int]
) -> Iterator[tuple[Hashable, int, Numbers]]:
    """The index of each shard along an axis, times the length of a part."""
    for name, size in found.scopes[value].sizes.items():
        lengths = {*shape[-1:]} or {1, *_lengths(found)}
        for length in sorted(lengths) if size > 1 else ():
            yield name, length, length * _index(found, value, name, len(shape))


def _operands(
    found: Comparison, group: Group, steps: Sequence[Step], reruns: Reruns
) -> Iterator[Trial]:
    """Whole numbers that a line is given, less the index of a shard times the length of a part."""
    made_here = {x for step in group.steps for x in step.results}
    for k, operand in enumerate(steps[0].operands):
        aval: Any = steps[0].eqn.invars[k].aval
        if not jnp.issubdtype(aval.dtype, jnp.integer):
            continue
        value = steps[0].results[0]
        if isinstance(operand, int):
            if operand in made_here or operand in found.indices:
                continue
            given = {x for step in steps for x in step.operands[k : k + 1] if isinstance(x, int)}
            readers = [step for step in found.mesh.steps if not given.isdisjoint(step.inputs)]
            if any(step.scope != steps[0].scope for step in readers):
                continue
            for name, length in itertools.product(found.scopes[value].sizes, _lengths(found)):
                offset = -length * _index(found, value, name, len(aval.shape))
                changed = {x: _increased(x, offset, found.scopes[value]) for x in given}
                yield Trial(group, changed, 2, words.offset(-length, name))
        elif steps[0].name in _COMPARISONS and not aval.shape:
            for _, _, offset in _offsets(found, value, ()):
                changed = {step.results[0]: _compared(step, k, offset, reruns) for step in steps}
                yield Trial(group, changed, 2)


def _compared(step: Step, at: int, offset: Numbers, reruns: Reruns) -> Change:
    """A comparison with another constant."""

    def operand(k: int, x: Operand, read: Read) -> Stacked:
        if isinstance(x, int):
            return Stacked(read(x), tuple(step.scope.sizes))
        fixed = reruns.evaluator.operand(x, {})
        return Stacked(fixed.x + offset, tuple(step.scope.sizes)) if k == at else fixed

    def change(read: Read) -> Numbers:
        operands = [operand(k, x, read) for k, x in enumerate(step.operands)]
        (made,) = reruns.evaluator.step(step, operands)
        return on_all_shards(made, step.scope)

    return Change(change, tuple(step.inputs))


def _left_out(found: Comparison, group: Group, steps: Sequence[Step]) -> Iterator[Trial]:
    """One operand in the place of what is made of two."""
    aval = steps[0].eqn.outvars[0].aval
    for k, var in enumerate(steps[0].eqn.invars):
        operands = [step.operands[k] for step in steps]
        if str(var.aval) != str(aval) or not all(isinstance(x, int) for x in operands):
            continue
        made = {
            step.results[0]: _same(x)
            for step, x in zip(steps, operands, strict=True)
            if isinstance(x, int)
        }
        yield Trial(group, made, 3)


def _same(source: int) -> Change:
    return Change(lambda read: read(source), (source,))


def _inverted(value: int) -> Change:
    return Change(lambda read: ~read(value))


def _increased(value: int, summand: Numbers, scope: Scope | None = None) -> Change:
    return Change(lambda read: read(value) + summand, scope=scope)
