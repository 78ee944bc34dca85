"""Simple changes of a line, each of which may put all results right."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from .._program._collective_rules import RULES
from .._program._jaxprs import names_of
from .._program._lines import SourceLine, returns, uses_of
from .._program._literals import COMPARISONS
from .._program._numbers import numbers
from .._program._stacked import MappedAxes
from .._types import Numbers
from ._compare import Comparison, right_values
from ._evaluate import on_all_shards
from ._graph import Node, needed
from ._reruns import Change, Changes, Read, constant, results_on_all_shards, same_as
from ._suspects import REDUCTIONS, SUMS, Suspect, by_gradient, is_first, is_wrong_before


# Offsets are tried for so many lengths of arrays.
_MOST_LENGTHS = 4
# So many numbers that differ on one device are tried.
_MOST_NUMBERS = 8
# So many ways to split an array are tried.
_MOST_CHOICES = 3

# The reductions that are tried to put the results right.
_REDUCTIONS: Mapping[str, Callable[..., Any]] = {"psum": np.sum, "pmean": np.mean, "pmax": np.max}
# How far a value moves between shards, with the words for it.
_SHIFTS = {1: "a move to the next shard", -1: "a move to the shard before", 0: "no move"}
_LEFT_OUT = ("add", "sub", "mul", "max", "min", "or", "and", "select_n")


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A simple change of a line.

    **Attributes:**

    - `changes`: what becomes of values.
    - `cost`: what is likely costs less.
    - `words`: the change in words, where no other one does the same; else none.
    - `is_added`: whether the change adds an operation, which may stand on any line that hands the value on.
    - `is_factor`: whether it multiplies, which may be done on any line before as well.
    - `is_fixed`: whether it gives numbers for these arguments only.
    - `here`: what an author would do at the line itself, in words, where these say more than `words`.
    """

    suspect: Suspect
    changes: Changes
    cost: int | float
    words: str = ""
    is_added: bool = False
    is_factor: bool = False
    is_fixed: bool = False
    here: str = ""


def reductions(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """Values that a line makes, reduced over a mesh axis or multiplied by its size."""
    yield from _reductions_of(comparison, suspect, suspect.values)
    if suspect.evidence == "after" and not suspect.transposed:
        yield from _reductions_of(comparison, suspect, _of_all_calls(comparison, suspect))
    if suspect.evidence == "first" and not suspect.transposed:
        # The parts of a sum to which the line itself adds what is whole.
        calls = _calls(comparison, suspect.line)
        here = {x for node in suspect.nodes for x in node.results}
        read = {
            (key, k)
            for call in calls
            for key, node in call.items()
            for k, x in enumerate(node.operands)
            if x in here and is_first(comparison, node)
        }
        inner = {call[key].operands[k] for call in calls for key, k in read if key in call}
        yield from _reductions_of(comparison, suspect, sorted(inner))


def _of_all_calls(comparison: Comparison, suspect: Suspect) -> list[int]:
    """What a line makes in each call of its function where some calls make parts of a sum or the like.

    Nobody knows what the others make: they read what the first ones have led to.
    """
    calls = _calls(comparison, suspect.line)
    for call in calls if len(calls) > 1 else ():
        partial = [
            key
            for key, node in call.items()
            if any(x in suspect.values and _is_partial(comparison, x) for x in node.results)
        ]
        if partial:
            alike = [one[key] for one in calls for key in partial if key in one]
            return [x for node in alike for x in node.results]
    return []


def _calls(comparison: Comparison, line: SourceLine | None) -> list[dict[Hashable, Node]]:
    """The nodes of a line in each call of its function, and each round of a loop, by what they are there."""
    calls: dict[Hashable, dict[Hashable, Node]] = {}
    for node in comparison.mesh.nodes:
        if node.line == line and not node.transposed:
            call = calls.setdefault((node.callers, node.rounds), {})
            call[node.name, sum(x.name == node.name for x in call.values())] = node
    return [*calls.values()]


def _is_partial(comparison: Comparison, value: int) -> bool:
    known = comparison.relations[value]
    return known is not None and known.is_partial


def _reductions_of(
    comparison: Comparison, suspect: Suspect, values: Sequence[int]
) -> Iterator[Trial]:
    is_known = all(comparison.differs(x) and comparison.is_number(x) for x in values)
    if not values or not is_known:
        return
    arrays, scope = {x: comparison.got(x) for x in values}, comparison.scopes[values[0]]
    kinds = {array.dtype.kind for array in arrays.values()}
    if not kinds <= {*"fciu"} or any(comparison.scopes[x] != scope for x in values):
        return
    is_float = kinds <= {*"fc"}
    # A line with a collective of its own may have the wrong one.
    is_added = not any(node.name in RULES for node in suspect.nodes)
    # What is missing in a derivative stands after it as a rule, where it comes out.
    cost = int(suspect.transposed)
    for at, (name, size) in enumerate(scope.sizes.items()):
        equal = [
            np.allclose(array, array.take([0], at), rtol=1e-10, atol=0, equal_nan=True)
            for array in arrays.values()
        ]
        # What a line after it reduces along the same axis is not what lacks a reduction.
        of_reduction = cost + 0.5 * all(_is_reduced(comparison, x, name) for x in arrays)
        # One reduction that is missing is likelier than several.
        of_reduction += 0.25 * (len(arrays) > 1)
        for collective, reduce in _REDUCTIONS.items() if not any(equal) else ():
            if collective == "pmean" and not is_float:
                continue
            changes = {x: reduced_by(x, reduce, at) for x in arrays}
            words = f"with jax.lax.{collective}(..., {name!r})"
            # Who reduces along other axes has forgotten this one, unless other calls of the line are right.
            is_forgotten = _has_reduction(suspect, collective) and _is_all(comparison, suspect)
            yield Trial(suspect, changes, of_reduction - 0.25 * is_forgotten, words, True)
        if not any(equal):
            changes = {x: reduced_by(x, _last, at) for x in arrays}
            words = f"with what the last shard along {name!r} has"
            yield Trial(suspect, changes, cost + 1, words, True)
        for factor in (float(size), 1 / size) if size > 1 and all(equal) and is_float else ():
            changes = {x: _multiplied(x, factor) for x in arrays}
            scaled = "multiplied" if factor > 1 else "divided"
            words = f"{scaled} by the number of shards, {size},"
            # A sum in the place of a mean is likelier than a factor that is missing.
            of_factor = cost + 0.5 * is_added
            here = _other_mean(comparison, suspect, values, name, is_mean=factor > 1)
            yield Trial(suspect, changes, of_factor, words, is_added, is_factor=True, here=here)


def _other_mean(
    comparison: Comparison,
    suspect: Suspect,
    values: Sequence[int],
    name: Hashable,
    *,
    is_mean: bool,
) -> str:
    """In words, a sum where a line makes means over an axis, or the other way round; else empty."""
    makers = [comparison.maker.get(x) for x in values]
    if is_mean:
        # A mean is a sum, divided by the number of shards after it.
        divided = [node.operands[0] for node in makers if node and node.name == "div"]
        makers = [comparison.maker.get(x) for x in divided]
    wrong, right = ("pmean", "psum") if is_mean else ("psum", "pmean")
    is_written = suspect.line is not None and wrong in suspect.line.source
    sums = [node for node in makers if node and node.line == suspect.line and node.name in SUMS]
    if len(sums) < len(values) or not is_written or any(names_of(x.eqn) != (name,) for x in sums):
        return ""
    return f"with jax.lax.{right} instead of jax.lax.{wrong}"


def _has_reduction(suspect: Suspect, collective: str) -> bool:
    """Whether a line reduces by this collective; a mean is a sum with a factor."""
    name = "psum" if collective == "pmean" else collective
    return any(node.name.startswith(name) for node in suspect.nodes)


def _is_all(comparison: Comparison, suspect: Suspect) -> bool:
    """Whether all calls of a line lead to a wrong result."""
    wrong = {node.callers for node in suspect.nodes}
    return all(node.callers in wrong for node in comparison.mesh.nodes if node.line == suspect.line)


def _is_reduced(comparison: Comparison, value: int, name: Hashable) -> bool:
    """Whether all that reads a value reduces it along a mesh axis."""
    readers = [node for node in comparison.mesh.nodes if value in node.operands]
    return bool(readers) and all(
        node.name.startswith(REDUCTIONS) and name in names_of(node.eqn) for node in readers
    )


def unreduced(comparison: Comparison) -> Iterator[Trial]:
    """Lines without their sums or means over shards, in their derivatives too.

    What a sum too many makes is right on every shard. Only a derivative, or a later sum, is too large by it.
    """
    sums: dict[SourceLine, list[Node]] = {}
    for node in comparison.mesh.nodes:
        if node.line is not None and node.name in SUMS and names_of(node.eqn):
            sums.setdefault(node.line, []).append(node)
    for line, nodes in sums.items():
        suspect = Suspect(line, False, nodes, [x for node in nodes for x in node.results], "other")
        for is_mean in (False, True):
            # A mean is a sum, divided by the number of shards after it.
            changes = {
                x: _multiplied(source, _count_of_shards(node) if is_mean else 1.0)
                for node in nodes
                for x, source in zip(node.results, node.operands, strict=True)
            }
            yield Trial(suspect, changes, 0)


def _count_of_shards(node: Node) -> float:
    """Over how many shards a node reduces."""
    return float(math.prod(node.scope.sizes[name] for name in names_of(node.eqn)))


def _multiplied(source: int, factor: float) -> Change:
    return Change(lambda read: read(source) * factor)


def _last(array: Numbers, axis: int, keepdims: bool) -> Numbers:
    """What the last shard has, as a reduction of NumPy's; the axis is kept."""
    return array.take([-1], axis)


def reduced_by(source: int, reduce: Callable[..., Any], at: int | tuple[int, ...]) -> Change:
    def make(read: Read) -> Numbers:
        array = read(source)
        return np.broadcast_to(reduce(array, axis=at, keepdims=True), array.shape)

    return Change(make)


def simple_changes(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """Other simple changes of a line."""
    if suspect.transposed:
        return
    # The same operation in each round of a loop is changed in all rounds, also in those that are right.
    kinds: dict[Hashable, list[Node]] = {}
    for node in comparison.mesh.nodes:
        if node.line == suspect.line and not node.transposed:
            kinds.setdefault(_changed_together(node), []).append(node)
    for nodes in kinds.values():
        first = nodes[0]
        if {*suspect.nodes}.isdisjoint(nodes) or first.kind != "run" or len(first.results) != 1:
            continue
        for make in _OF_COLLECTIVES.get(first.name, _OF_OTHERS):
            for cost, changes, text in make(comparison, suspect, nodes):
                yield Trial(suspect, changes, cost, text)
    yield from _added_apart(comparison, suspect)
    yield from _added_inside(comparison, suspect)
    yield from _counts(comparison, suspect)
    yield from _positions(comparison, suspect)
    yield from _truths(comparison, suspect)


def _changed_together(node: Node) -> Hashable:
    """What nodes of a line have in common that are changed in the same way."""
    if node.name == "ppermute":
        # A tree moves as a whole.
        return node.name, tuple(node.eqn.params["perm"]), names_of(node.eqn)
    return node.name, str(node.eqn.outvars[0].aval)


# What makes trials of nodes of one kind gives their cost, the changes, and the change in words.
_Changed: TypeAlias = Iterator[tuple[int, Changes, str]]


def _other_reductions(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """Another reduction over the same shards."""
    names, sizes = names_of(nodes[0].eqn), list(nodes[0].scope.sizes)
    alike = all(names_of(node.eqn) == names and len(node.operands) == 1 for node in nodes)
    if not names or not alike or not {*names} <= {*sizes}:
        return
    at = tuple(map(sizes.index, names))
    shown = names[0] if len(names) == 1 else names
    others: Mapping[str, Callable[..., Any]] = {**_REDUCTIONS, "pmin": np.min}
    for name, reduce in others.items():
        # A mean is a sum with a factor, which is tried for all values.
        is_sum = nodes[0].name in SUMS and name in ("psum", "pmean")
        if not is_sum and not nodes[0].name.startswith(name):
            changes = {node.results[0]: reduced_by(node.operands[0], reduce, at) for node in nodes}
            yield 0, changes, f"with jax.lax.{name}(..., {shown!r})"


def _moves(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """A move to the next shard or the one before, round the ring or up to its end, and none."""
    names, sizes = names_of(nodes[0].eqn), nodes[0].scope.sizes
    if len(names) != 1 or names[0] not in sizes:
        return
    at = list(sizes).index(names[0])
    # Derivatives go the other way. A function may be a part of its own.
    moves = [x for x in comparison.mesh.nodes if x.transposed or x.line == suspect.line]
    back = [x for x in moves if x not in nodes and any(_is_back(x, node) for node in nodes)]
    for shift, move in _SHIFTS.items():
        for is_open in (False, True) if shift else (False,):
            changes = {
                x: moved(source, at, way, is_open=is_open)
                for some, way in ((nodes, shift), (back, -shift))
                for node in some
                for x, source in zip(node.results, node.operands, strict=True)
            }
            yield 0, changes, f"with {move} along {names[0]!r}"


def _is_back(node: Node, move: Node) -> bool:
    """Whether a node moves alike values between shards the other way."""
    if node.name != move.name or node.scope != move.scope:
        return False
    (there, names), (back, others) = ((x.eqn.params["perm"], names_of(x.eqn)) for x in (move, node))
    is_alike = str(node.eqn.outvars[0].aval) == str(move.eqn.outvars[0].aval)
    return is_alike and names == others and {(b, a) for a, b in there} == {*back}


def moved(source: int, at: int, shift: int, *, is_open: bool = False) -> Change:
    """What the shard before has; in an open move, zeros on the shard that has none before it."""

    def make(read: Read) -> Numbers:
        array = np.roll(read(source), shift, at)
        if is_open:
            array[(*[slice(None)] * at, 0 if shift > 0 else -1)] = 0
        return array

    return Change(make)


def _indices(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """The index along another axis, or times the length of a part."""
    (name,), scope = names_of(nodes[0].eqn)[:1], nodes[0].scope
    values = [node.results[0] for node in nodes]
    # Another line has given an axis that the line does not name.
    source = suspect.line.source if suspect.line else ""
    is_named = any(f"{mark}{name}{mark}" in source for mark in ("'", '"'))
    for other, size in scope.sizes.items():
        if other != name and size > 1:
            changes = dict.fromkeys(values, constant(_index(scope, other)))
            yield 0, changes, f"with jax.lax.axis_index({other!r})" if is_named else ""
    for length in _lengths(comparison) if name in scope.sizes else ():
        yield 1, dict.fromkeys(values, constant(length * _index(scope, name))), ""


def _index(scope: MappedAxes, name: Hashable, rank: int = 0) -> Numbers:
    """The index of each shard along an axis, with all mesh axes in front of axes of size one."""
    sizes = tuple(scope.sizes.values())
    return np.indices(sizes)[list(scope.sizes).index(name)].reshape((*sizes, *[1] * rank))


def _lengths(comparison: Comparison) -> list[int]:
    """The lengths of what shards have of arrays that are split."""
    split = [x for node in comparison.mesh.nodes if node.kind == "split" for x in node.results]
    lengths = {n for x in split if x in comparison.values for n in comparison.values[x].shape}
    return sorted(lengths - {0, 1})[:_MOST_LENGTHS]


def _whole_numbers(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """Truths of another shard; numbers off by one or by the index of a shard."""
    values, scope = [node.results[0] for node in nodes], nodes[0].scope
    aval: Any = nodes[0].eqn.outvars[0].aval
    if aval.dtype == bool:
        for at, size in enumerate(scope.sizes.values()):
            for shift in range(1, size):
                yield 0, {x: moved(x, at, shift) for x in values}, ""
    elif jnp.issubdtype(aval.dtype, jnp.integer):
        for summand in (1, -1):
            yield 0, {x: _increased(x, np.asarray(summand)) for x in values}, ""
        indices = [node for node in suspect.nodes if node.name == "axis_index"]
        counted = {name for node in indices for name in names_of(node.eqn)}
        is_multiple = nodes[0].name == "mul" and suspect.evidence == "index" and not aval.shape
        for name, _, offset in _offsets(comparison, scope, 0) if is_multiple else ():
            if name in counted:
                yield 1, dict.fromkeys(values, constant(offset)), ""
        lengths = {*aval.shape[-1:], *_constants_of(comparison, nodes).values()}
        for name, length, offset in _offsets(comparison, scope, len(aval.shape), lengths):
            cost = int(length not in lengths)
            yield cost, {x: _increased(x, offset) for x in values}, _added(length, name)


def _operands(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """Whole numbers that a line reads, with the index of a shard times the length of a part less or more."""
    scope, constants = nodes[0].scope, comparison.mesh.constants
    results_here = {x for node in suspect.nodes for x in node.results}
    for k, operand in enumerate(nodes[0].operands):
        aval: Any = nodes[0].eqn.invars[k].aval
        operands = {node.operands[k] for node in nodes}
        readers = [x for x in comparison.mesh.nodes if not operands.isdisjoint(x.operands)]
        is_compared = operand in constants and nodes[0].name in COMPARISONS and not aval.shape
        # Positions in a part, where those in the whole array should go to other shards.
        is_gathered = nodes[0].name.startswith("all_gather")
        is_given = operand not in {*constants, *results_here, *comparison.indices}
        # A line may add a number to an array, and then one to a number.
        is_alike = {str(node.eqn.invars[k].aval) for node in nodes} == {str(aval)}
        is_whole = jnp.issubdtype(aval.dtype, jnp.integer)
        if not is_whole or not is_alike or any(x.scope != scope for x in readers):
            continue
        for name, length, offset in _offsets(comparison, scope, len(aval.shape)):
            if is_compared or is_gathered:
                yield 1, {x: _increased(x, offset, scope) for x in operands}, ""
            elif is_given and length > 1:
                changes = {x: _increased(x, -offset, scope) for x in operands}
                yield 1, changes, _added(-length, name)
                if any(node.kind == "join" for node in readers):
                    # It may leave as it is, and be read in another form.
                    yield 1, _read_as(comparison, readers, operands, -offset), ""


def _added_apart(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """What a line adds to a sum over shards, summed too."""
    nodes = [x for x in comparison.mesh.nodes if x.line == suspect.line and not x.transposed]
    for node in nodes:
        sizes = [*node.scope.sizes]
        if node.name not in SUMS or not {*names_of(node.eqn)} <= {*sizes}:
            continue
        at = tuple(map(sizes.index, names_of(node.eqn)))
        for reader in [x for x in nodes if x.name in ("add", "sub")]:
            # Next to an array there may be a number, which is the same on all shards.
            is_array_each = len({str(var.aval) for var in reader.eqn.invars}) == 1
            if at and is_array_each and node.results[0] in reader.operands:
                summed = functools.partial(_with_sums, reader, node.results[0], at)
                yield Trial(suspect, {reader.results[0]: Change(summed, node.scope)}, 0)


def _added_inside(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """What shards have all of, added to what a line sums over shards: added to the sum instead."""
    nodes = [x for x in comparison.mesh.nodes if x.line == suspect.line and not x.transposed]
    sums = [x for x in nodes if x.name in SUMS and len(x.operands) == 1]
    made = [comparison.maker.get(node.operands[0]) for node in sums]
    if not sums or not all(x is not None and x.line == suspect.line for x in made):
        return
    for k in (0, 1):
        changes: dict[int, Change] = {}
        for node, maker in zip(sums, made, strict=True):
            sizes, names = [*node.scope.sizes], names_of(node.eqn)
            alike = maker is not None and maker.name == "add" and {*names} <= {*sizes}
            if maker is None or not alike or not names:
                return
            parts, whole = maker.operands[1 - k], maker.operands[k]
            summed = functools.partial(_sum_and, parts, whole, tuple(map(sizes.index, names)))
            changes[node.results[0]] = Change(summed, node.scope)
        yield Trial(suspect, changes, 0)


def _sum_and(parts: int, whole: int, at: tuple[int, ...], read: Read) -> Numbers:
    """The sum of what all shards have of one value, and another value added to it."""
    return read(parts).sum(at, keepdims=True) + read(whole)


def _with_sums(node: Node, total: int, at: tuple[int, ...], read: Read) -> Numbers:
    """A sum or difference of what all shards have together; one operand, `total`, is that already."""
    a, b = (read(x) if x == total else read(x).sum(at, keepdims=True) for x in node.operands)
    return a + b if node.name == "add" else a - b


def _counts(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """A count that the line names, with the number of shards times as much or less."""
    for x, count in _constants_of(comparison, suspect.nodes).items():
        readers = [node for node in comparison.mesh.nodes if x in node.operands]
        scope = readers[0].scope
        if any(node.scope != scope for node in readers):
            continue
        shape = tuple(scope.sizes.values())
        others = [count * size for size in shape]
        others += [count // size for size in shape if count % size == 0]
        for other in dict.fromkeys(others):
            array = np.full(shape, other)
            changes = {x: dataclasses.replace(constant(array), scope=scope)}
            yield Trial(suspect, changes, 1)


def _constants_of(comparison: Comparison, nodes: Sequence[Node]) -> dict[int, int]:
    """The whole numbers beyond one that nodes of one line name, by their values."""
    lines = {node.line for node in nodes}
    read = {x for node in comparison.mesh.nodes if node.line in lines for x in node.operands}
    found = {}
    for x in sorted(read & comparison.mesh.constants.keys()):
        number = numbers(comparison.values[x].x)
        if number.dtype.kind in "iu" and number.size == 1 and number.flat[0] > 1:
            found[x] = int(number.flat[0])
    return found


def of_gradients(comparison: Comparison, suspects: Sequence[Suspect]) -> Iterator[Trial]:
    """The lines that first read gradients which are parts of a sum or mean over shards, with what they lack.

    What makes gradients whole often runs on all of them in one line. Where that line is missing, only those
    that read them are left.
    """
    later = [node for node in comparison.mesh.nodes if not node.transposed and node.line]
    read_later = {x for node in later for x in node.operands}
    of_derivatives = {x for suspect in suspects if suspect.transposed for x in suspect.values}
    gradients = sorted(of_derivatives & read_later)
    lacking = [_lacking(comparison, x) for x in gradients]
    for name in set.intersection(*map(set, lacking)) if len(gradients) > 1 else ():
        kinds = {of_each[name] for of_each in lacking}
        words = f"with jax.lax.{kinds.pop()}(..., {name!r})" if len(kinds) == 1 else ""
        changes = {
            x: reduced_by(x, _REDUCTIONS[of_each[name]], [*comparison.scopes[x].sizes].index(name))
            for x, of_each in zip(gradients, lacking, strict=True)
        }
        reading = [node for node in later if not changes.keys().isdisjoint(node.operands)]
        by_line = {node.line: node for node in reversed(reading)}
        for cost, line in enumerate([*reversed(by_line)][:2]):
            suspect = Suspect(line, False, [by_line[line]], gradients, "other")
            yield Trial(suspect, changes, cost, words, is_added=True)


def _lacking(comparison: Comparison, value: int) -> dict[str, str]:
    """For the mesh axes along which a value is a part of a sum or mean, what reduces it."""
    known = comparison.relations[value]
    if known is None or known.factor != 1 or not comparison.is_number(value):
        return {}
    return {name: f"p{kind}" for name, kind, _ in known.kinds if kind in ("sum", "mean")}


def of_losses(comparison: Comparison) -> Iterator[Trial]:
    """The last lines of losses, with all gradients multiplied or divided by the number of shards.

    A loss that all shards have is a sum of equal shares, where a derivative is summed over them.
    """
    later = [node for node in comparison.mesh.nodes if not node.transposed]
    read_later = {x for node in later for x in node.operands}
    for backward in by_gradient(comparison).values():
        line = next((node.line for node in backward if node.line), None)
        come_out = [x for node in backward for x in node.results if x in read_later]
        if line is None or not come_out or not all(map(comparison.is_number, come_out)):
            continue
        last = line if returns(line) else next(iter(uses_of(line)), line)
        suspect = Suspect(last, False, backward[:1], come_out, "other")
        for size in {size for size in backward[0].scope.sizes.values() if size > 1}:
            for factor in (1 / size, float(size)):
                changes = {x: _multiplied(x, factor) for x in come_out}
                yield Trial(suspect, changes, 0.75)


def of_one_device(comparison: Comparison) -> Iterator[Trial]:
    """Floats that several lines name, such as a share, as on one device wherever they are read."""
    # For each number, and the one in its place, the values and the nodes that first read them.
    found: dict[tuple[float, float], dict[int, Node]] = {}
    for node in comparison.mesh.nodes:
        partner = comparison.partners.get(node)
        for x, y in zip(node.operands, partner.operands, strict=False) if partner else ():
            got, want = comparison.named(x, y)
            is_other = isinstance(got, float) and isinstance(want, float) and got != want
            if is_other and node.line is not None and not _is_of_mean(comparison, node):
                found.setdefault((got, want), {}).setdefault(x, node)
    for (_, want), readers in itertools.islice(found.items(), _MOST_NUMBERS):
        first = next((node for node in readers.values() if not node.transposed), None)
        # Of one line, what it makes is tried.
        if first is not None and len({node.line for node in readers.values()}) > 1:
            changes = {}
            for x, node in readers.items():
                everywhere = np.full(tuple(node.scope.sizes.values()), want)
                changes[x] = dataclasses.replace(constant(everywhere), scope=node.scope)
            yield Trial(Suspect(first.line, False, [first], [*changes], "other"), changes, 0.25)


def _is_of_mean(comparison: Comparison, node: Node) -> bool:
    """Whether a node makes a mean of a sum over shards. Who divides by their number means to."""
    makers = [comparison.maker.get(x) for x in node.operands]
    return node.name == "div" and any(x is not None and x.name in SUMS for x in makers)


def at_hand(comparison: Comparison) -> Iterator[Trial]:
    """Lines that read what a shard has, with what an earlier line has made of it together with the others."""
    nodes = comparison.mesh.nodes
    for k, node in enumerate(nodes):
        is_one_each = len(node.operands) == len(node.results)
        if node.name not in RULES or node.line is None or node.transposed or not is_one_each:
            continue
        together = dict(zip(node.operands, node.results, strict=True))
        for reader in nodes[k + 1 :]:
            own = together.keys() & {*reader.operands}
            if not own or reader.line in (None, node.line) or reader.kind != "run":
                continue
            if not reader.transposed and (changes := _with(comparison, reader, together)):
                suspect = Suspect(reader.line, False, [reader], reader.results, "other")
                yield Trial(suspect, changes, -0.5)


def _with(comparison: Comparison, node: Node, others: Mapping[int, int]) -> Changes | None:
    """What a node makes of other values; `None` if that has another shape."""

    def make(number: int, read: Read) -> Numbers:
        given = [read(others.get(x, x)) for x in node.operands]
        return results_on_all_shards(comparison, node, given)[number]

    if any(others.get(x, x) not in comparison.values for x in (*node.operands, *node.results)):
        return None
    scope = node.scope
    changes = {
        x: Change(functools.partial(make, number), scope) for number, x in enumerate(node.results)
    }
    try:
        for x, change in changes.items():
            made = change.made(lambda y: on_all_shards(comparison.values[y], scope))
            if made.shape != on_all_shards(comparison.values[x], scope).shape:
                return None
    except Exception:  # NumPy or JAX may raise any error for shapes that a node was not made for.
        return None
    return changes


def _read_as(
    comparison: Comparison, readers: Sequence[Node], operands: Collection[int], summand: Numbers
) -> Changes:
    """What nodes make where they read whole numbers with something added."""

    def make(node: Node, number: int, read: Read) -> Numbers:
        given = [
            (read(x) + summand).astype(read(x).dtype) if x in operands else read(x)
            for x in node.operands
        ]
        return results_on_all_shards(comparison, node, given)[number]

    return {
        x: Change(functools.partial(make, node, number), node.scope)
        for node in readers
        if node.kind == "run"
        for number, x in enumerate(node.results)
    }


def _offsets(
    comparison: Comparison, scope: MappedAxes, rank: int, lengths: Collection[int] = ()
) -> Iterator[tuple[Hashable, int, Numbers]]:
    """The index of each shard along an axis, times the length of a part."""
    for name, size in scope.sizes.items():
        for length in sorted({1, *lengths, *_lengths(comparison)}) if size > 1 else ():
            yield name, length, length * _index(scope, name, rank)


def _added(length: int, name: Hashable) -> str:
    times = {1: "", -1: "-"}.get(length, f"{length} * ")
    return f"with {times}jax.lax.axis_index({name!r}) added"


def _left_out(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> _Changed:
    """One operand in the place of what is made of two."""
    aval = str(nodes[0].eqn.outvars[0].aval)
    for k in range(len(nodes[0].operands) if nodes[0].name in _LEFT_OUT else 0):
        # A line that is called several times may broadcast another operand each time.
        if all(str(node.eqn.invars[k].aval) == aval for node in nodes):
            yield 1, {node.results[0]: same_as(node.operands[k]) for node in nodes}, ""


def _positions(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """The whole numbers that one device has, as positions in a shard's own part of an array.

    A position outside of the part is its length, or stays negative or too large. A constant of the line is
    that length where it is the length of the whole array on one device.
    """
    if suspect.transposed or not suspect.nodes:
        return
    # In all calls of the line: positions that are wrong can give the right row by accident.
    nodes = [x for x in comparison.mesh.nodes if x.line == suspect.line and not x.transposed]
    read_here = {x for node in nodes for x in node.operands}
    handed_on = [x for node in nodes for x in node.results if x not in read_here]
    if is_wrong_before(comparison, nodes):
        # Right positions put right what was wrong before.
        return
    scope = suspect.nodes[0].scope
    for name in [name for name, size in scope.sizes.items() if size > 1]:
        masked, all_numbers = dict[int, Change](), dict[int, Change]()
        for x in handed_on:
            want, here = _whole_numbers_wanted(comparison, x), needed(nodes, [x])
            lengths = {n for node in here for n in comparison.own_lengths(node, name)}
            if want is None or len(lengths) != 1 or comparison.scopes[x] != scope:
                continue
            (n,) = lengths
            own = want - n * _index(scope, name, want.ndim - len(scope.sizes))
            all_numbers[x] = constant(own)
            masked[x] = constant(np.where((own >= 0) & (own < n), own, n))
        if masked:
            yield Trial(suspect, all_numbers, 1, is_fixed=True)
            # A line without a choice leaves the masking to a later line.
            is_later = all(node.name != "select_n" for node in nodes)
            yield Trial(suspect, masked, 1 + is_later, is_fixed=True)


def _truths(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """The truths that one device has, only for the positions in a shard's own part of an array.

    The positions are whole numbers that the line reads. On one device they are those in the whole array.
    """
    nodes = [x for x in comparison.mesh.nodes if x.line == suspect.line and not x.transposed]
    read_here = {x for node in nodes for x in node.operands}
    handed_on = [x for node in nodes for x in node.results if x not in read_here]
    # For each of the truths what shards may have to have, each with the positions on which it depends.
    wanted: dict[int, list[tuple[Numbers, Numbers]]] = {}
    for x in filter(comparison.is_number, handed_on):
        truths = [*right_values(comparison, x)]
        if truths and truths[0].dtype.kind == "b":
            read = {y for node in needed(nodes, [x]) for y in node.operands} & comparison.indices
            at = [
                p
                for y in sorted(read)
                if comparison.is_whole(y)
                for p in right_values(comparison, y)
            ]
            pairs = itertools.product(truths, at)
            wanted[x] = [(truth, p) for truth, p in pairs if truth.shape == p.shape]
    scopes = [comparison.scopes[x] for x in wanted]
    if not wanted or any(scope != scopes[0] for scope in scopes):
        return
    for choice in itertools.islice(zip(*wanted.values(), strict=False), _MOST_CHOICES):
        for name, length, _ in _offsets(comparison, scopes[0], 0):
            changes = {}
            for x, (truth, at) in zip(wanted, choice, strict=True):
                own = at - length * _index(scopes[0], name, at.ndim - len(scopes[0].sizes))
                changes[x] = constant(truth & (own >= 0) & (own < length))
            yield Trial(suspect, changes, 1, is_fixed=True)


def _whole_numbers_wanted(comparison: Comparison, value: int) -> Numbers | None:
    """The whole numbers that shards would have as on one device; `None` if nobody knows them."""
    if not comparison.is_number(value):
        return None
    right = next(right_values(comparison, value), None)
    return right if right is not None and right.dtype.kind in "iu" else None


def _increased(value: int, summand: Numbers, scope: MappedAxes | None = None) -> Change:
    return Change(lambda read: read(value) + summand, scope)


_OF_COLLECTIVES = {
    "ppermute": [_moves],
    "axis_index": [_indices],
    **{name: [_other_reductions] for name in (*SUMS, "pmax", "pmin")},
}
_OF_OTHERS = [_whole_numbers, _operands, _left_out]
