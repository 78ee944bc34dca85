"""Changes of whole numbers, positions in a shard's own part, and truths."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from .._program._jaxprs import names_of
from .._program._literals import COMPARISONS
from .._program._numbers import numbers
from .._program._stacked import MappedAxes
from .._types import Numbers
from ._compare import Comparison, right_values
from ._graph import Node, needed
from ._reruns import Change, Changes, Read, constant, results_on_all_shards
from ._suspects import Suspect, is_wrong_before
from ._trials import Trial, moved


# Offsets are tried for so many lengths of arrays.
_MOST_LENGTHS = 4
# So many ways to split an array are tried.
_MOST_CHOICES = 3
# What to add to the bound of a comparison of whole numbers, so that the bound itself is in or out.
_BOUNDS = {"lt": 1, "le": -1, "gt": -1, "ge": 1}
_OPPOSITE = ("add", "sub")
# What makes trials of nodes of one kind gives their cost, the changes, and the change in words.
Changed: TypeAlias = Iterator[tuple[float, Changes, str]]


def of_indices(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> Changed:
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


def of_whole_numbers(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> Changed:
    """Truths of another shard; numbers off by one or by the index of a shard."""
    values, scope = [node.results[0] for node in nodes], nodes[0].scope
    aval: Any = nodes[0].eqn.outvars[0].aval
    if aval.dtype == bool:
        if nodes[0].name in _BOUNDS and _is_signed(nodes[0].eqn.invars[1].aval):
            with_bound = functools.partial(_with_other_bound, comparison)
            changes = {x: Change(functools.partial(with_bound, x)) for x in values}
            yield 0.25, changes, ""
        for at, size in enumerate(scope.sizes.values()):
            for shift in range(1, size):
                yield 0, {x: moved(x, at, shift) for x in values}, ""
    elif _is_signed(aval):
        # The remainder of a negative number adds too, and chooses then.
        chosen = {x for y in comparison.mesh.nodes if y.name == "select_n" for x in y.operands}
        counted_on = [x for x in values if x in comparison.positions and x not in chosen]
        if nodes[0].name in _OPPOSITE and counted_on:
            # Who counts shards may count the wrong way, as around a ring.
            opposite = functools.partial(_opposite, comparison)
            yield 0.25, {x: Change(functools.partial(opposite, x)) for x in counted_on}, ""
        # Those without a sign are bits of random numbers, as a rule.
        # Who counts from 0 does so on purpose.
        cost = 0.25 * (nodes[0].name == "iota")
        for summand in (1, -1):
            yield cost, {x: _increased(x, np.asarray(summand)) for x in values}, ""
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


def _is_signed(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.signedinteger)


def _with_other_bound(comparison: Comparison, value: int, read: Read) -> Numbers:
    """A comparison of whole numbers with the bound inside if it is outside, and the other way round."""
    node = comparison.maker[value]
    number, bound = map(read, node.operands)
    return results_on_all_shards(comparison, node, [number, bound + _BOUNDS[node.name]])[0]


def _opposite(comparison: Comparison, value: int, read: Read) -> Numbers:
    """The difference of what is added, and the other way round."""
    node = comparison.maker[value]
    a, b = map(read, node.operands)
    return results_on_all_shards(comparison, node, [a, -b])[0]


def of_operands(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> Changed:
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


def of_counts(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """A count that the line names, with the number of shards times as much or less, in its derivative too."""
    by_count: dict[int, list[int]] = {}
    for x, count in _constants_of(comparison, suspect.nodes).items():
        by_count.setdefault(count, []).append(x)
    for count, values in by_count.items():
        readers = [x for x in comparison.mesh.nodes if not {*values}.isdisjoint(x.operands)]
        scope = readers[0].scope
        if any(node.scope != scope for node in readers):
            continue
        shape = tuple(scope.sizes.values())
        others = [count * size for size in shape]
        others += [count // size for size in shape if count % size == 0]
        for other in dict.fromkeys(others):
            change = dataclasses.replace(constant(np.full(shape, other)), scope=scope)
            for changed in [values] if len(values) == 1 else [values, *([x] for x in values)]:
                yield Trial(suspect, dict.fromkeys(changed, change), 1)


def _constants_of(comparison: Comparison, nodes: Sequence[Node]) -> dict[int, int]:
    """The whole numbers beyond one that nodes of one line name, by their values."""
    lines = {node.line for node in nodes}
    read = {x for node in comparison.mesh.nodes if node.line in lines for x in node.operands}
    found = {}
    for x in sorted(read & comparison.mesh.constants.keys()):
        number = numbers(comparison.values[x].x)
        # By a count, a mean divides floats.
        if number.dtype.kind in "iuf" and number.size == 1:
            count = float(number.flat[0])
            if count.is_integer() and count > 1:
                found[x] = int(count)
    return found


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


def of_positions(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """The whole numbers that one device has, as positions in a shard's own part of an array.

    A position outside of the part is its length, or stays negative or too large. A constant of the line is
    that length where it is the length of the whole array on one device.
    """
    if suspect.transposed or not suspect.nodes:
        return
    # In all calls of the line: positions that are wrong can give the right row by accident.
    nodes, handed_on = _of_all_calls(comparison, suspect)
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


def _of_all_calls(comparison: Comparison, suspect: Suspect) -> tuple[list[Node], list[int]]:
    """The nodes of a line, and what they make that other lines read."""
    nodes = [x for x in comparison.mesh.nodes if x.line == suspect.line and not x.transposed]
    read_here = {x for node in nodes for x in node.operands}
    return nodes, [x for node in nodes for x in node.results if x not in read_here]


def of_truths(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """The truths that one device has, only for the positions in a shard's own part of an array.

    The positions are whole numbers that the line reads. On one device they are those in the whole array.
    """
    nodes, handed_on = _of_all_calls(comparison, suspect)
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
