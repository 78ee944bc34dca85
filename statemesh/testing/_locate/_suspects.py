"""The lines that lead to a wrong result, with what speaks for each."""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np

from .._program._lines import SourceLine, line_of_gradient
from .._program._literals import COMPARISONS
from .._program._numbers import is_inexact, numbers
from ._compare import Comparison, right_values
from ._graph import Node, Round, needed, step_of


# Operations that give for a part what only the part knows: those that count or sort, and those that
# rearrange.
OF_ORDER = (
    *("iota", "cumsum", "cumlogsumexp", "cumprod", "cummax", "cummin", "sort", "top_k"),
    *("argmax", "argmin", "reduce_window_sum"),
)
_OF_A_PART = (
    *OF_ORDER,
    *("slice", "dynamic_slice", "concatenate", "pad", "rev", "gather", "entry"),
)

# These reduce over shards; in checked programs they have longer names.
REDUCTIONS = ("psum", "pmax", "pmin")

# The primitives that sum over shards.
SUMS = ("psum", "psum_invariant")

# So many calls of a function are looked at one by one.
_MOST_CALLS = 4

Callers: TypeAlias = tuple[SourceLine, ...]

# What speaks for a line:
# - "first": of values that are right, or parts of them, it makes one that is neither;
# - "reduced": the same, by a reduction over shards that gets another kind of partial results;
# - "unshaped": the same, but what one device has cannot be the parts of it;
# - "unsure": the same, but it reads what differs because of the index of a shard, or gives positions in the
#   shard's own part; or of each number only one shard has what one device has;
# - "unmasked": of each number only one shard has what one device has, and a sum over shards reads the others;
# - "related": it makes partial results and multiples only;
# - "derivative": it asks for derivatives, and they are multiples as they come out;
# - "index": it makes only what differs because of the index of a shard;
# - "after": what it reads is wrong already;
# - "other": it makes what one device has.
Evidence: TypeAlias = Literal[
    "first",
    "reduced",
    "unshaped",
    "unsure",
    "unmasked",
    "related",
    "derivative",
    "index",
    "after",
    "other",
]
# By itself it tells nothing.
_UNTOLD: Sequence[Evidence] = ("unsure", "related", "index", "after")


@dataclasses.dataclass(frozen=True, eq=False)
class Suspect:
    """The nodes of one line that make values which lead to a wrong result.

    **Attributes:**

    - `line`: the line; `None` where there is no line of the user's.
    - `transposed`: whether the nodes are those of the line's derivative.
    - `nodes`: in the order of the program.
    - `values`: what they make that other lines use.
    - `evidence`: what speaks for the line.
    """

    line: SourceLine | None
    transposed: bool
    nodes: Sequence[Node]
    values: Sequence[int]
    evidence: Evidence


def suspects_of(comparison: Comparison) -> list[Suspect]:
    """The lines that lead to wrong results, in the order of the program; those of derivatives come first."""
    values = _wrong_values(comparison)
    nodes = [node for node in comparison.mesh.nodes if not values.isdisjoint(node.results)]
    lines = _lines(nodes)
    by_line: dict[tuple[SourceLine | None, bool], list[Node]] = {}
    for node in nodes:
        by_line.setdefault((lines[node], node.transposed), []).append(node)
    readers = readers_of(comparison)
    suspects, ends = [], {*comparison.mesh.results}
    after = _after_wrong_rounds(comparison, values, readers)
    natural = _natural(comparison, nodes, values)
    forward: dict[SourceLine | None, list[Node]] = collections.defaultdict(list)
    for node in comparison.mesh.nodes:
        if not node.transposed:
            forward[node.line].append(node)
    for (line, transposed), group in by_line.items():
        # What leads to nothing wrong may read on the same line what does.
        here = {*group} if transposed else {*group, *forward[line]}
        results_here = values.intersection(x for node in group for x in node.results)
        handed_on = sorted(x for x in results_here if x in ends or not readers[x] <= here)
        if line is not None and not transposed:
            # A line that runs outside of a loop too has made what comes in.
            handed_on += [x for x in values if comparison.origins.get(x) == line]
        # What a round makes of what came in wrong may look as if it were the first.
        own = [x for x in group if x not in after]
        evidence = _evidence(comparison, [x for x in own if x not in natural], handed_on)
        if evidence in ("first", "unshaped") and (call := _wrong_call(comparison, group)):
            line, evidence = call, "first"
        elif evidence in _UNTOLD and _is_unmasked(comparison, handed_on, readers):
            evidence = "unmasked"
        elif evidence in ("index", "after") and (call := _other_call(comparison, own, natural)):
            suspects.append(Suspect(call, transposed, group, handed_on, "unsure"))
        suspects.append(Suspect(line, transposed, group, handed_on, evidence))
    earlier = _of_rounds_before(comparison, values, {line for line, _ in by_line})
    return [*earlier, *_gradients(comparison, values, readers), *suspects]


def _natural(
    comparison: Comparison, nodes: Sequence[Node], wrong: set[int]
) -> dict[Node, set[Callers]]:
    """The nodes that make something unrelated in other calls or rounds too, where it leads to nothing wrong.

    So it is naturally other than on one device, or right only where other lines run it: those come with it.
    """
    found: dict[Hashable, set[tuple[Callers, Hashable]]] = {}
    for node in comparison.mesh.nodes:
        if wrong.isdisjoint(node.results) and is_first(comparison, node):
            found.setdefault(step_of(node), set()).add((node.callers, node.rounds))
    elsewhere = {
        node: found.get(step_of(node), set()) - {(node.callers, node.rounds)} for node in nodes
    }
    return {node: {callers for callers, _ in there} for node, there in elsewhere.items() if there}


def _other_call(
    comparison: Comparison, nodes: Sequence[Node], natural: Mapping[Node, set[Callers]]
) -> SourceLine | None:
    """The line that alone runs a function which makes what is naturally other, and leads to nothing wrong."""
    first = [x for x in nodes if x in natural and is_first(comparison, x)]
    wrong = {x.callers for x in first}
    if len(wrong) != 1:
        return None
    (path,) = wrong
    return _call_alone(path, set().union(*(natural[x] for x in first)))


def _of_rounds_before(
    comparison: Comparison, values: Collection[int], known: Collection[SourceLine | None]
) -> Iterator[Suspect]:
    """The lines that made partial results in the round before, and make nothing wrong in this one."""
    come_in: dict[SourceLine, list[int]] = {}
    for x, line in comparison.origins.items():
        if x in values and line is not None and line not in known:
            come_in.setdefault(line, []).append(x)
    for line, made in come_in.items():
        nodes = [x for x in comparison.mesh.nodes if x.line == line and not x.transposed]
        if nodes:
            yield Suspect(line, False, nodes, made, "related")


def _gradients(
    comparison: Comparison, values: set[int], readers: Mapping[int, set[Node]]
) -> list[Suspect]:
    """The lines that ask for derivatives which are multiples as they come out.

    What is missing then stands after the line or is an option of the call, so that no step of the program
    shows it. Parts of a sum are no such evidence: in right programs a later line makes them whole.
    """
    found = []
    for line, nodes in by_gradient(comparison).items():
        makers = {
            x: node
            for node in nodes
            for x in node.results
            if x in values and not all(y.transposed for y in readers[x])
        }
        if makers and all(is_multiple(comparison, x) for x in makers):
            suspect = Suspect(line, False, list(makers.values()), list(makers), "derivative")
            found.append(suspect)
    return found


def by_gradient(comparison: Comparison) -> dict[SourceLine, list[Node]]:
    """The nodes of derivatives, by the line that asks for them."""
    found: dict[SourceLine, list[Node]] = {}
    for node in comparison.mesh.nodes:
        line = line_of_gradient(node.eqn) if node.transposed else None
        if line is not None:
            found.setdefault(line, []).append(node)
    return found


def is_multiple(comparison: Comparison, value: int) -> bool:
    known = comparison.relations[value]
    return known is not None and known.factor != 1


def _is_part_of_sum(comparison: Comparison, value: int) -> bool:
    known = comparison.relations[value]
    kinds = [kind for _, kind, _ in known.kinds] if known and known.factor == 1 else []
    return "sum" in kinds and "mean" not in kinds


def is_of_one(comparison: Comparison, value: int) -> bool:
    """Whether of each number only one shard has what one device has."""
    known = comparison.relations[value]
    return known is not None and any(kind == "one" for _, kind, _ in known.kinds)


def readers_of(comparison: Comparison) -> dict[int, set[Node]]:
    """The nodes that read each value."""
    readers: dict[int, set[Node]] = collections.defaultdict(set)
    for node in comparison.mesh.nodes:
        for x in node.operands:
            readers[x].add(node)
    return readers


def of_first_wrong_round(comparison: Comparison) -> Comparison | None:
    """The program up to the first round of an opened loop that makes something wrong of what is right.

    Its results are what that round hands on. Where rounds have led from one wrong value to the next, hardly
    anything puts the results of the program right, or all that one can say of a line is that it comes after
    something wrong.
    """
    wrong = _wrong_values(comparison)
    for _, inside, handed_on in _rounds(comparison, readers_of(comparison)):
        made = {x for node in inside for x in node.results}
        read = wrong & {x for node in inside for x in node.operands} - made
        # A loop may read the numbers of a shard's own rows, which are as they should be.
        if not all(x in comparison.indices or comparison.is_whole(x) for x in read):
            continue
        known = [x for x in handed_on if comparison.is_number(x) and x in comparison.wants]
        if any(x in wrong and comparison.is_unrelated(x) for x in known):
            return comparison.with_results(known, next(iter(inside)).scope)
    return None


def _rounds(
    comparison: Comparison, readers: Mapping[int, set[Node]]
) -> Iterator[tuple[int, set[Node], list[int]]]:
    """The rounds of opened loops, by where they end: the loop, the nodes, and the values handed on.

    A round ends before another that it is a part of.
    """
    ends, by_round = {*comparison.mesh.results}, dict[tuple[Round, ...], set[Node]]()
    for node in reversed(comparison.mesh.nodes):
        for depth in range(1, len(node.rounds) + 1):
            by_round.setdefault(node.rounds[:depth], set()).add(node)
    for rounds, inside in reversed(by_round.items()):
        made = sorted(x for node in inside for x in node.results)
        yield rounds[-1].loop, inside, [x for x in made if x in ends or not readers[x] <= inside]


def _after_wrong_rounds(
    comparison: Comparison, wrong: Collection[int], readers: Mapping[int, set[Node]]
) -> set[Node]:
    """The nodes of rounds that come after one that hands on something wrong."""
    loops, after = set[int](), set[Node]()
    for loop, inside, handed_on in _rounds(comparison, readers):
        if loop in loops:
            after |= inside
        elif any(x in wrong and comparison.is_unrelated(x) for x in handed_on):
            loops.add(loop)
    return after


def _wrong_values(comparison: Comparison) -> set[int]:
    """The values that lead to wrong results and are more than the parts of those of one device."""
    values, innocent = set[int](), _innocent(comparison)
    ends = zip(comparison.mesh.results, comparison.right, strict=True)
    queue = [operand for operand, right in ends if not right]
    while queue:
        value = queue.pop()
        if value not in values:
            values.add(value)
            maker = comparison.maker.get(value)
            read = {x for x in maker.operands if not comparison.is_plain(x)} if maker else set()
            queue += read - innocent if maker and maker.transposed else read
    return values


def _innocent(comparison: Comparison) -> set[int]:
    """What is in another order than on one device, and leads forward to what is right, as in a ring.

    A derivative reads it too, and may be wrong for other reasons.
    """
    forward = [node for node in comparison.mesh.nodes if not node.transposed]
    ends, right, wrong, read = {*comparison.mesh.results}, set[int](), set[int](), set[int]()
    for node in reversed(forward):
        read.update(node.operands)
        for x in node.results:
            if comparison.is_plain(x):
                # Truths may be right by accident.
                right.update([] if comparison.is_truth(x) else node.operands)
            else:
                wrong.update(node.operands if x in ends or x in wrong else [])
                right.update(node.operands if x in right else [])
    innocent = {x for x in right - wrong - ends if comparison.relations[x] is None}
    for node in forward:
        # What only a derivative reads.
        if not innocent.isdisjoint(node.operands) and read.isdisjoint(node.results):
            innocent.update(x for x in node.results if x not in ends)
    return innocent


def _lines(nodes: Sequence[Node]) -> dict[Node, SourceLine | None]:
    """The line of each node; for nodes of libraries, which have none, the line that first uses it."""
    lines: dict[Node, SourceLine | None] = {node: node.line for node in nodes}
    reader: dict[int, Node] = {}
    for node in reversed(nodes):
        if lines[node] is None:
            uses = [lines[reader[x]] for x in node.results if x in reader]
            lines[node] = next((line for line in uses if line is not None), None)
        for x in node.operands:
            reader[x] = node
    return lines


def _is_unmasked(
    comparison: Comparison, values: Sequence[int], readers: Mapping[int, set[Node]]
) -> bool:
    """Whether shards sum values of which one shard has each number, and the others have any.

    They should have zeros, so that what makes the values is wrong, not the sum.
    """
    return any(
        node.name in SUMS and is_of_one(comparison, x) and is_first(comparison, node)
        for x in values
        for node in readers[x]
    )


def _evidence(comparison: Comparison, nodes: Sequence[Node], values: Sequence[int]) -> Evidence:
    first = [node for node in nodes if is_first(comparison, node)]
    if first:
        is_unsure = all(
            not comparison.positions.isdisjoint(node.operands) or _is_of_a_part(comparison, node)
            for node in first
        )
        if is_unsure:
            return "unsure"
        if any(_is_reduction_of_partial(comparison, node) for node in first):
            return "reduced"
        return "first" if _is_shaped(comparison, first, values) else "unshaped"
    if all(comparison.relations[x] is not None for x in _of_first_calls(comparison, values)):
        # Where each shard has some of the numbers, it may have the others of a right line too.
        return "unsure" if any(is_of_one(comparison, x) for x in values) else "related"
    return "index" if comparison.positions.issuperset(values) else "after"


def _of_first_calls(comparison: Comparison, values: Sequence[int]) -> Sequence[int]:
    """What the calls before the first wrong one make of a line, if they make partial results; else all.

    The wrong ones read what the partial results have led to.
    """
    known: dict[Hashable, list[int]] = {}
    for x in values:
        maker = comparison.maker.get(x)
        known.setdefault(maker and (maker.callers, maker.rounds), []).append(x)
    related = [
        all(comparison.relations[x] is not None for x in of_call) for of_call in known.values()
    ]
    calls = [*itertools.takewhile(lambda each: each[0], zip(related, known.values(), strict=True))]
    partial = [x for _, of_call in calls for x in of_call if not comparison.is_plain(x)]
    return partial or values


def _wrong_call(comparison: Comparison, nodes: Sequence[Node]) -> SourceLine | None:
    """The line that calls the function of these nodes with arrays of another shape than its other calls.

    Or with another number.
    """
    first = next(node for node in nodes if is_first(comparison, node))
    is_unshaped = any(_is_unshaped(comparison, x) for x in first.results)
    if first.line is None or not (is_unshaped or _has_own_number(comparison, first)):
        return None
    alike = [x for x in comparison.mesh.nodes if x.line == first.line]
    unrelated = [x for x in alike if any(map(comparison.is_unrelated, x.results))]
    wrong = {x.callers for x in unrelated if x.transposed == first.transposed}
    right = {x.callers for x in alike if x.transposed == first.transposed} - wrong
    if len(wrong) != 1 or not right:
        return None
    (path,) = wrong
    return _call_alone(path, right)


def _has_own_number(comparison: Comparison, node: Node) -> bool:
    """Whether a node reads another number of the program's text than in the other calls of its line."""
    constants, read = comparison.mesh.constants, dict[Callers, list[list[bytes | None]]]()
    for x in comparison.mesh.nodes:
        if step_of(x) == step_of(node):
            given = [
                numbers(comparison.values[y].x).tobytes() if y in constants else None
                for y in x.operands
            ]
            read.setdefault(x.callers, []).append(given)
    here = read.pop(node.callers)
    others = [*read.values()]
    return bool(others) and all(x == others[0] != here for x in others)


def _call_alone(path: Callers, others: Collection[Callers]) -> SourceLine | None:
    """The innermost of the lines around a line that are others in other calls."""
    return next(
        (line for k, line in enumerate(path) if any(x[k : k + 1] != (line,) for x in others)), None
    )


def of_single_calls(suspect: Suspect) -> Iterator[Suspect]:
    """What a line makes in each of several calls of its function, with the lines that call it."""
    paths = list(dict.fromkeys(node.callers for node in suspect.nodes))
    for path in paths[:_MOST_CALLS] if len(paths) > 1 and not suspect.transposed else ():
        line = _call_alone(path, [x for x in paths if x != path])
        nodes = [node for node in suspect.nodes if node.callers == path]
        made = {x for node in nodes for x in node.results}
        values = [x for x in suspect.values if x in made]
        if line is not None and values:
            yield Suspect(line, False, nodes, values, suspect.evidence)


def call_to_blame(comparison: Comparison, suspect: Suspect) -> SourceLine | None:
    """The last line that calls the function of a suspect, where its other calls make the like and are right.

    So the suspect's own line is right: what makes its values whole is missing where it is called.
    """
    alike = [
        node
        for node in comparison.mesh.nodes
        if node.line == suspect.line and node.transposed == suspect.transposed
    ]
    read_here, leads = {x for node in alike for x in node.operands}, _wrong_values(comparison)
    wrong = [node.callers for node in suspect.nodes]
    # What these hand on leads to no wrong result, and is more than the parts of one device's. Where a sum is
    # missing, the function cannot have it if it is also given what all shards have.
    lacks_sum = all(_is_part_of_sum(comparison, x) for x in suspect.values)
    right = {
        node.callers
        for node in alike
        if leads.isdisjoint(node.results)
        and any((lacks_sum or comparison.differs(x)) and x not in read_here for x in node.results)
    } - {*wrong}
    return _call_alone(wrong[-1], right)


def of_the_others(comparison: Comparison, suspect: Suspect) -> Suspect | None:
    """The line that makes whole what a line makes besides its wrong values, as parts of a sum or multiples.

    Who makes all gradients means there and forgets one has made the mistake there.
    """
    wrong, made = _wrong_values(comparison), set[int]()
    of_derivative = suspect.evidence == "derivative"
    # In another call of its function a line has other readers.
    callers = {node.callers for node in suspect.nodes}
    for node in comparison.mesh.nodes:
        line = line_of_gradient(node.eqn) if of_derivative and node.transposed else node.line
        is_alike = node.transposed == (of_derivative or suspect.transposed)
        if line == suspect.line and is_alike and (of_derivative or node.callers in callers):
            made.update({*node.results} - wrong)
    here, found = {*suspect.nodes}, set[SourceLine]()
    for node in comparison.mesh.nodes:
        is_later = node not in here and not node.transposed and node.line != suspect.line
        if not any(x in made and comparison.differs(x) for x in node.operands) or not is_later:
            continue
        if all(map(comparison.is_plain, node.results)):
            found.update([node.line] if node.line else [])
        else:
            made.update({*node.results} - wrong)
    if len(found) != 1:
        return None
    return Suspect(found.pop(), False, suspect.nodes, suspect.values, "other")


def is_first(comparison: Comparison, node: Node) -> bool:
    """Whether a node makes something unrelated of what is related."""
    makes = any(map(comparison.is_unrelated, node.results))
    if node.name in COMPARISONS and all(map(comparison.is_plain, node.operands)):
        # Of floats that are those of one device, rounding alone makes another truth.
        avals: list[Any] = [var.aval for var in node.eqn.invars]
        return makes and not any(is_inexact(aval.dtype) for aval in avals)
    read = [x for x in node.operands if comparison.is_unrelated(x)]
    if node in comparison.operands:
        # A loop may read the numbers of a shard's own rows, which are as they should be.
        read = [x for x in read if not comparison.is_whole(x)]
    return makes and not read


def is_wrong_before(comparison: Comparison, nodes: Sequence[Node]) -> bool:
    """Whether anything unrelated leads to what nodes make, besides what they make themselves."""
    made = [x for node in nodes for x in node.results]
    before = {*needed(comparison.mesh.nodes, made)} - {*nodes}
    return any(comparison.is_unrelated(x) for node in before for x in node.results)


def _is_reduction_of_partial(comparison: Comparison, node: Node) -> bool:
    relations = [comparison.relations[x] for x in node.operands]
    # What is too large everywhere was made so before.
    partial = any(known and known.is_partial and known.factor == 1 for known in relations)
    return node.name.startswith(REDUCTIONS) and partial


def _is_shaped(comparison: Comparison, first: Sequence[Node], values: Sequence[int]) -> bool:
    """Whether somebody knows what all values should be, in one of the calls or rounds of these nodes."""
    known: dict[Hashable, bool] = {}
    for x in values:
        maker = comparison.maker.get(x)
        where = None if maker is None else (maker.callers, maker.rounds)
        known[where] = known.get(where, True) and not _is_unshaped(comparison, x)
    here = {(node.callers, node.rounds) for node in first} & known.keys()
    return any(known[x] for x in here) if here else all(known.values())


def _is_unshaped(comparison: Comparison, value: int) -> bool:
    """Whether nobody knows what an unrelated value should be."""
    is_known = next(right_values(comparison, value), None) is not None
    return comparison.is_unrelated(value) and not is_known


def _is_of_a_part(comparison: Comparison, node: Node) -> bool:
    """Whether a node naturally gives something else for a part, such as positions in it."""
    relations = [comparison.relations[x] for x in node.operands]
    return node.name in _OF_A_PART and all(known is None or known.is_plain for known in relations)


def others(comparison: Comparison, suspects: Sequence[Suspect]) -> list[Suspect]:
    """The lines of whole numbers and truths that are those of one device.

    They may be wrong all the same: shards may all have what the first of them should have.
    """
    lines = {node.line for suspect in suspects for node in suspect.nodes}
    by_line: dict[SourceLine, list[Node]] = {}
    for node in comparison.mesh.nodes:
        dtype = getattr(node.eqn.outvars[0].aval, "dtype", np.dtype(float))
        is_whole = any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, jnp.integer))
        if node.line and node.line not in lines and is_whole and not node.transposed:
            by_line.setdefault(node.line, []).append(node)
    return [Suspect(line, False, nodes, [], "other") for line, nodes in by_line.items()]
