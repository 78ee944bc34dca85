"""Simple changes of a line, each of which may put all results right."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._program._collective_rules import RULES
from .._program._jaxprs import names_of
from .._program._lines import SourceLine, line_of_gradient
from .._types import Numbers
from ._compare import Comparison
from ._graph import Node
from ._positions import (
    Changed,
    of_counts,
    of_indices,
    of_operands,
    of_positions,
    of_truths,
    of_whole_numbers,
)
from ._reruns import Change, Read, results_on_all_shards, same_as
from ._suspects import OF_ORDER, REDUCTIONS, SUMS, Suspect, is_first
from ._trials import REDUCED_BY, Trial, moved, multiplied, reduced_by


# How far a value moves between shards, with the words for it.
_SHIFTS = {1: "a move to the next shard", -1: "a move to the shard before", 0: "no move"}
# So many terms of a loss are tried one by one.
_MOST_TERMS = 4
# What cuts a part out of an array.
_CUTTING = ("slice", "dynamic_slice", "squeeze", "reshape")
_LEFT_OUT = ("add", "sub", "mul", "max", "min", "or", "and", "select_n")


def reductions(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """Values that a line makes, reduced over a mesh axis or multiplied by its size."""
    yield from _reductions_of(comparison, suspect, suspect.values)
    if suspect.transposed and len(suspect.values) > 1:
        # Where a loss is a sum of several terms, their derivatives are made of constants only.
        for x in [x for x in suspect.values if x in comparison.indices][:_MOST_TERMS]:
            yield from _reductions_of(comparison, suspect, [x])
    if suspect.evidence in ("after", "related") and not suspect.transposed:
        yield from _reductions_of(comparison, suspect, _of_all_calls(comparison, suspect))
    if suspect.evidence == "related" and not suspect.transposed:
        # What the line itself sums along some axes, before it makes more of it.
        sums = {x for node in suspect.nodes if node.name in SUMS for x in node.results}
        yield from _reductions_of(comparison, suspect, sorted(sums.difference(suspect.values)))
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
        added = {call[key].operands[k] for call in calls for key, k in read if key in call}
        yield from _reductions_of(comparison, suspect, sorted(added))
        yield from _mixed(comparison, suspect)


def _mixed(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """The parts of a sum that earlier lines made, where a line adds what is whole."""
    for node in suspect.nodes:
        partial = [x for x in node.operands if _is_partial(comparison, x)]
        whole = [x for x in node.operands if comparison.is_plain(x)]
        if node.name in ("add", "sub") and len(partial) == len(whole) == 1:
            makers = [comparison.maker.get(x) for x in (*partial, *whole)]
            lines = {maker and maker.line for maker in makers}
            if suspect.line not in lines:
                # What makes both in the same way leaves the difference to this line.
                is_likelier = len(lines) == 1
                for trial in _reductions_of(comparison, suspect, partial):
                    yield dataclasses.replace(trial, cost=trial.cost - 0.25 * is_likelier)


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
    makers = [comparison.maker[x] for x in values if x in comparison.maker]
    is_derived = not suspect.transposed and _is_derived(comparison, makers)
    is_of_order = len(makers) == len(values) and all(x.name in OF_ORDER for x in makers)
    is_of_some = _reads_right_gradients(comparison, suspect)
    for at, (name, size) in enumerate(scope.sizes.items()):
        equal = [
            np.allclose(array, array.take([0], at), rtol=1e-10, atol=0, equal_nan=True)
            for array in arrays.values()
        ]
        # What a line after it reduces along the same axis is not what lacks a reduction, not even where that
        # line computes something before.
        of_reduction = cost + 0.5 * all(_is_reduced(comparison, x, name) for x in arrays)
        of_reduction += all(is_reduced_after(comparison, x, name) for x in arrays)
        # One reduction that is missing is likelier than several.
        of_reduction += 0.25 * (len(arrays) > 1)
        # The derivative of the line is right without it.
        of_reduction += 0.5 * is_derived
        # Nobody sums positions, or sums up to each position, over shards.
        of_reduction += is_of_order
        # What only some gradients lack is missing where they are made.
        of_reduction += 1.25 * is_of_some
        kinds_along = {_along(comparison, x, name) for x in arrays}
        # Parts of an array are no parts of a sum, and maxima have no such derivatives.
        is_split = any(kind in ("parts", "overlapping") for kind, _ in kinds_along)
        for collective, reduce in REDUCED_BY.items() if not any(equal) and not is_split else ():
            if collective == "pmean" and not is_float:
                continue
            if collective == "pmax" and suspect.transposed:
                continue
            changes = {x: reduced_by(x, reduce, at) for x in arrays}
            words = f"with jax.lax.{collective}(..., {name!r})"
            # Who reduces along other axes has forgotten this one, unless other calls of the line are right.
            is_forgotten = _has_reduction(suspect, collective) and _is_all(comparison, suspect)
            # What is a multiple after it lacks something else.
            is_multiple = any(_is_multiple_by(collective, kind, size) for kind in kinds_along)
            of_this = of_reduction - 0.25 * is_forgotten + 0.5 * is_multiple
            yield Trial(suspect, changes, of_this, words, True)
        if not any(equal):
            changes = {x: reduced_by(x, _last, at) for x in arrays}
            words = f"with what the last shard along {name!r} has"
            yield Trial(suspect, changes, cost + 1, words, True)
        for factor in (float(size), 1 / size) if size > 1 and all(equal) and is_float else ():
            changes = {x: multiplied(x, factor) for x in arrays}
            scaled = "multiplied" if factor > 1 else "divided"
            words = f"{scaled} by the number of shards, {size},"
            # A sum in the place of a mean is likelier than a factor that is missing. In a derivative both are
            # the same, and of a mistaken sum the values would differ too.
            of_factor = cost + 0.5 * (is_added or suspect.transposed)
            # A sum that is right for others is meant.
            of_factor += 0.75 * (not is_added and not _is_all(comparison, suspect))
            here = _other_mean(comparison, suspect, values, name, is_mean=factor > 1)
            yield Trial(suspect, changes, of_factor, words, is_added, is_factor=True, here=here)


def _is_derived(comparison: Comparison, nodes: Sequence[Node]) -> bool:
    """Whether the derivative of lines is a part of the program."""
    lines = {node.line for node in nodes}
    return any(node.transposed and node.line in lines for node in comparison.mesh.nodes)


def _reads_right_gradients(comparison: Comparison, suspect: Suspect) -> bool:
    """Whether a line reads several gradients of one derivative, and makes something wrong of some only."""
    here = [x for x in comparison.mesh.nodes if x.line == suspect.line and not x.transposed]
    # For each line that asks for derivatives, whether what is made of each of them is wrong.
    found: dict[SourceLine | None, set[bool]] = {}
    for node in () if suspect.transposed else here:
        for x in node.operands:
            maker = comparison.maker.get(x)
            if maker is not None and maker.transposed:
                line = line_of_gradient(maker.eqn)
                found.setdefault(line, set()).add(node in suspect.nodes)
    return any(len(each) > 1 for each in found.values())


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
    """Whether all calls of a line lead to a wrong result, and all that it reduces over the same axes."""
    nodes = [x for x in comparison.mesh.nodes if x.line == suspect.line and not x.transposed]
    wrong = {node.callers for node in suspect.nodes}
    over = {names_of(node.eqn) for node in suspect.nodes if node.name.startswith(REDUCTIONS)}
    reduced = {x for x in nodes if x.name.startswith(REDUCTIONS) and names_of(x.eqn) in over}
    return reduced <= {*suspect.nodes} and all(node.callers in wrong for node in nodes)


def _along(comparison: Comparison, value: int, name: Hashable) -> tuple[str, float]:
    """What a value is along a mesh axis, and of what it is a multiple; empty where nobody knows it."""
    known = comparison.relations[value]
    kinds = {other: kind for other, kind, _ in known.kinds} if known else {}
    return kinds.get(str(name), ""), known.factor if known else 1.0


def _is_multiple_by(collective: str, along: tuple[str, float], size: int) -> bool:
    """Whether a sum or mean over shards gives a multiple of what one device has."""
    kind, factor = along
    if kind not in ("sum", "mean") or collective not in ("psum", "pmean"):
        return False
    as_other = 1.0 if collective == f"p{kind}" else float(size) if kind == "mean" else 1 / size
    return abs(factor * as_other - 1) > 1e-6


def _is_reduced(comparison: Comparison, value: int, name: Hashable) -> bool:
    """Whether all that reads a value reduces it along a mesh axis."""
    readers = [node for node in comparison.mesh.nodes if value in node.operands]
    return bool(readers) and all(
        node.name.startswith(REDUCTIONS) and name in names_of(node.eqn) for node in readers
    )


def is_reduced_after(comparison: Comparison, value: int, name: Hashable) -> bool:
    """Whether each line that reads a value reduces along a mesh axis what it makes of it."""
    maker, reduced, reading = comparison.maker.get(value), set[Hashable](), set[Hashable]()
    # For what is made of the value, the line and the call that read it, and have computed something of it.
    made: dict[int, Hashable] = {}
    for node in comparison.mesh.nodes:
        here = node.line, node.callers, node.rounds
        if value in node.operands and (maker is None or node.line != maker.line):
            reading.add(here)
            made.update(dict.fromkeys(node.results, here))
        elif any(made.get(x) == here for x in node.operands):
            made.update(dict.fromkeys(node.results, here))
            if node.name.startswith(REDUCTIONS) and name in names_of(node.eqn):
                reduced.add(here)
    return bool(reading) and reading == reduced


def _last(array: Numbers, axis: int, keepdims: bool) -> Numbers:
    """What the last shard has, as a reduction of NumPy's; the axis is kept."""
    return array.take([-1], axis)


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
        if first.name == "axis_index":
            # A function that counts along several axes may name one of them for all.
            for of_call in _by_call(nodes):
                for _, changes, _ in of_indices(comparison, suspect, of_call):
                    yield Trial(suspect, changes, 0.5)
    yield from _added_apart(comparison, suspect)
    yield from _added_inside(comparison, suspect)
    yield from _own_edges(comparison, suspect)
    yield from _own_parts(comparison, suspect)
    yield from of_counts(comparison, suspect)
    yield from of_positions(comparison, suspect)
    yield from of_truths(comparison, suspect)


def _by_call(nodes: Sequence[Node]) -> list[list[Node]]:
    """The nodes of each call of a function, in all rounds of a loop, where there are several calls."""
    counts, found = collections.Counter[Hashable](), dict[Hashable, list[Node]]()
    for node in nodes:
        call = node.callers, counts[node.callers, node.rounds]
        counts[node.callers, node.rounds] += 1
        found.setdefault(call, []).append(node)
    return [*found.values()] if len(found) > 1 else []


def _changed_together(node: Node) -> Hashable:
    """What nodes of a line have in common that are changed in the same way."""
    if node.name == "ppermute":
        # A tree moves as a whole.
        return node.name, tuple(node.eqn.params["perm"]), names_of(node.eqn)
    return node.name, str(node.eqn.outvars[0].aval)


def _other_reductions(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> Changed:
    """Another reduction over the same shards."""
    names, sizes = names_of(nodes[0].eqn), list(nodes[0].scope.sizes)
    alike = all(names_of(node.eqn) == names and len(node.operands) == 1 for node in nodes)
    if not names or not alike or not {*names} <= {*sizes}:
        return
    at = tuple(map(sizes.index, names))
    shown = names[0] if len(names) == 1 else names
    others: Mapping[str, Callable[..., Any]] = {**REDUCED_BY, "pmin": np.min}
    for name, reduce in others.items():
        # A mean is a sum with a factor, which is tried for all values.
        is_sum = nodes[0].name in SUMS and name in ("psum", "pmean")
        if not is_sum and not nodes[0].name.startswith(name):
            changes = {node.results[0]: reduced_by(node.operands[0], reduce, at) for node in nodes}
            yield 0, changes, f"with jax.lax.{name}(..., {shown!r})"


def _moves(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> Changed:
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


def _own_edges(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """A part of a shard's own array, in the place of that of a shard beside it, in the derivative too."""
    # What a derivative adds to those of other uses is not a part of this one.
    here = [x for x in comparison.mesh.nodes if x.line == suspect.line]
    nodes = [node for node in here if node.name != "add_any"]
    read_here = {x for node in nodes for x in node.operands}
    edges, back = (
        [x for node in nodes if node.transposed is side for x in node.results if x not in read_here]
        for side in (False, True)
    )
    scopes = [comparison.scopes[x] for x in (*edges, *back)]
    is_cut = all(node.transposed or node.name in _CUTTING for node in nodes)
    is_known = all(map(comparison.is_number, (*edges, *back)))
    if not (is_cut and edges and is_known) or any(scope != scopes[0] for scope in scopes):
        return
    for at, (name, size) in enumerate(scopes[0].sizes.items()):
        for shift in (1, -1) if size > 1 else ():
            for is_open in (False, True):
                changes = {x: moved(x, at, shift, is_open=is_open) for x in edges}
                changes |= {x: moved(x, at, -shift, is_open=is_open) for x in back}
                yield Trial(suspect, changes, 1, f"with {_SHIFTS[shift]} along {name!r}")


def _own_parts(comparison: Comparison, suspect: Suspect) -> Iterator[Trial]:
    """The part of each shard, where all of them cut the first part out of an array; in the derivative too."""
    here = [x for x in comparison.mesh.nodes if x.line == suspect.line]
    # In all calls of the line, for each mesh axis.
    changes: dict[Hashable, dict[int, Change]] = {}
    for node in [x for x in here if x.name == "slice" and not x.transposed]:
        (array,) = node.operands
        whole, part = (
            getattr(var.aval, "shape", ()) for var in (*node.eqn.invars, *node.eqn.outvars)
        )
        cut = [k for k, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
        is_first_part = len(cut) == 1 and not any(node.eqn.params["start_indices"])
        if not is_first_part or not comparison.is_number(array):
            continue
        # What a derivative puts back.
        back = [
            x.results[0]
            for x in here
            if x.transposed and x.name == "pad" and x.scope == node.scope
            if getattr(x.eqn.outvars[0].aval, "shape", ()) == whole
        ]
        along, length = len(node.scope.sizes) + cut[0], part[cut[0]]
        for at, (name, size) in enumerate(node.scope.sizes.items()):
            if length * size == whole[cut[0]]:
                cut_out = functools.partial(_own_part, array, at, along, length)
                of_axis = changes.setdefault(name, {})
                of_axis[node.results[0]] = Change(cut_out, node.scope)
                for x in back:
                    put_back = functools.partial(_rolled, x, at, along, length)
                    of_axis[x] = Change(put_back, node.scope)
    for name, of_axis in changes.items():
        yield Trial(suspect, of_axis, 1, f"with the part of each shard along {name!r}")


def _own_part(whole: int, at: int, along: int, length: int, read: Read) -> Numbers:
    """Of an array, the part with the number of each shard along a mesh axis."""
    return _rolled(whole, at, along, -length, read).take(range(length), along)


def _rolled(source: int, at: int, along: int, length: int, read: Read) -> Numbers:
    """An array, rolled by the index of each shard along a mesh axis, times a length."""
    array = read(source)
    of_shards = np.split(array, array.shape[at], at)
    rolled = [np.roll(x, i * length, along) for i, x in enumerate(of_shards)]
    return np.concatenate(rolled, at)


def _is_back(node: Node, move: Node) -> bool:
    """Whether a node moves alike values between shards the other way."""
    if node.name != move.name or node.scope != move.scope:
        return False
    (there, names), (back, others) = ((x.eqn.params["perm"], names_of(x.eqn)) for x in (move, node))
    is_alike = str(node.eqn.outvars[0].aval) == str(move.eqn.outvars[0].aval)
    return is_alike and names == others and {(b, a) for a, b in there} == {*back}


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
            at = tuple(map(sizes.index, names))
            summed = functools.partial(_with_whole, comparison, maker, k, at)
            changes[node.results[0]] = Change(summed, node.scope)
        yield Trial(suspect, changes, 0)


def _with_whole(
    comparison: Comparison, node: Node, whole: int, at: tuple[int, ...], read: Read
) -> Numbers:
    """What a node of two operands makes of one that is whole and the sum of the other over shards."""
    given = [read(x) for x in node.operands]
    parts = given[1 - whole]
    given[1 - whole] = np.broadcast_to(parts.sum(at, keepdims=True), parts.shape)
    return results_on_all_shards(comparison, node, given)[0]


def _with_sums(node: Node, total: int, at: tuple[int, ...], read: Read) -> Numbers:
    """A sum or difference of what all shards have together; one operand, `total`, is that already."""
    a, b = (read(x) if x == total else read(x).sum(at, keepdims=True) for x in node.operands)
    return a + b if node.name == "add" else a - b


def _left_out(comparison: Comparison, suspect: Suspect, nodes: Sequence[Node]) -> Changed:
    """One operand in the place of what is made of two."""
    aval = str(nodes[0].eqn.outvars[0].aval)
    for k in range(len(nodes[0].operands) if nodes[0].name in _LEFT_OUT else 0):
        # A line that is called several times may broadcast another operand each time.
        if all(str(node.eqn.invars[k].aval) == aval for node in nodes):
            yield 1, {node.results[0]: same_as(node.operands[k]) for node in nodes}, ""


_OF_COLLECTIVES = {
    "ppermute": [_moves],
    "axis_index": [of_indices],
    **{name: [_other_reductions] for name in (*SUMS, "pmax", "pmin")},
}
_OF_OTHERS = [of_whole_numbers, of_operands, _left_out]
