"""Changes of what several lines make or read."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._program._backward import is_of_backward
from .._program._collective_rules import RULES
from .._program._jaxprs import names_of
from .._program._lines import SourceLine, line_of_gradient, returns, uses_of
from .._types import Numbers
from ._compare import Comparison
from ._evaluate import on_all_shards
from ._graph import Node, needed
from ._reruns import Change, Changes, Read, constant, results_on_all_shards
from ._suspects import SUMS, Suspect, by_gradient, is_multiple, readers_of
from ._trials import REDUCED_BY, Trial, multiplied, reduced_by


# A loss is made on so many lines, nearest to its end.
_MOST_LINES = 4
# So many numbers that differ on one device are tried.
_MOST_NUMBERS = 8


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
                x: multiplied(source, _count_of_shards(node) if is_mean else 1.0)
                for node in nodes
                for x, source in zip(node.results, node.operands, strict=True)
            }
            yield Trial(suspect, changes, 0)


def _count_of_shards(node: Node) -> float:
    """Over how many shards a node reduces."""
    return float(math.prod(node.scope.sizes[name] for name in names_of(node.eqn)))


def of_gradients(comparison: Comparison, suspects: Sequence[Suspect]) -> Iterator[Trial]:
    """The lines that first read gradients which are parts of a sum or mean over shards, with what they lack.

    What makes gradients whole often runs on all of them in one line. Where that line is missing, only those
    that read them are left.
    """
    of_derivative = {*filter(_is_of_derivative, comparison.mesh.nodes)}
    later = [node for node in comparison.mesh.nodes if node not in of_derivative and node.line]
    read_later = {x for node in later for x in node.operands}
    come_out = {x for node in of_derivative for x in node.results} & read_later
    wrong = {x for suspect in suspects for x in suspect.values}
    for together in _read_together(comparison, come_out, later):
        gradients = sorted(x for x in together & wrong if comparison.is_number(x))
        # Nobody knows gradients that a first step has led to, as the second ones of an adversary.
        known = [x for x in gradients if comparison.relations[x] is not None]
        lacking = [_lacking(comparison, x) for x in known]
        for name in set.intersection(*map(set, lacking)) if known and len(gradients) > 1 else ():
            is_unsure = {x: is_multiple(comparison, x) for x in known}
            of_each = zip(known, lacking, strict=True)
            kinds = {x: kinds[name] for x, kinds in of_each if not is_unsure[x]}
            if not kinds:
                continue
            (only, *others) = sorted({*kinds.values()})
            # What only some gradients lack is missing where these are made.
            are_some = any(
                comparison.relations[x] is not None and name not in _lacking(comparison, x)
                for x in together
            )
            words = f"with jax.lax.{only}(..., {name!r})" if not others else ""
            changes = {}
            for x in gradients:
                # A multiple of a sum is one of a mean too.
                reduce = REDUCED_BY[kinds.get(x, only)]
                changes[x] = reduced_by(x, reduce, [*comparison.scopes[x].sizes].index(name))
            reading = [node for node in later if not changes.keys().isdisjoint(node.operands)]
            by_line = {node.line: node for node in reversed(reading)}
            for cost, line in enumerate([*reversed(by_line)][:2]):
                suspect = Suspect(line, False, [by_line[line]], gradients, "other")
                yield Trial(suspect, changes, cost + 0.5 * are_some, words, is_added=True)


def _is_of_derivative(node: Node) -> bool:
    """Whether a node belongs to a backward pass, or to a backward function of the user's."""
    return node.transposed or is_of_backward(node.eqn)


def _read_together(
    comparison: Comparison, values: Collection[int], later: Sequence[Node]
) -> list[set[int]]:
    """Gradients of one derivative, or of several that the same lines read."""
    groups: dict[SourceLine | None, set[int]] = {}
    for x in values:
        groups.setdefault(line_of_gradient(comparison.maker[x].eqn), set()).add(x)
    found: list[tuple[set[int], set[SourceLine | None]]] = []
    for group in groups.values():
        lines = {node.line for node in later if not group.isdisjoint(node.operands)}
        alike = [x for x in found if not lines.isdisjoint(x[1])]
        found = [x for x in found if x not in alike]
        found.append((group.union(*(x for x, _ in alike)), lines.union(*(x for _, x in alike))))
    return [group for group, _ in found]


def _lacking(comparison: Comparison, value: int) -> dict[str, str]:
    """For the mesh axes along which a value is a part of a sum or mean, what reduces it."""
    known = comparison.relations[value]
    if known is None or not comparison.is_number(value):
        return {}
    return {name: f"p{kind}" for name, kind, _ in known.kinds if kind in ("sum", "mean")}


def of_losses(comparison: Comparison) -> Iterator[Trial]:
    """The last lines of losses, with all gradients multiplied or divided by the number of shards.

    A loss that all shards have is a sum of equal shares, where a derivative is summed over them. Where the
    loss itself is read too, it is multiplied with them.
    """
    later = [node for node in comparison.mesh.nodes if not node.transposed]
    read_later = {x for node in later for x in node.operands}
    for backward in by_gradient(comparison).values():
        line = next((node.line for node in backward if node.line), None)
        come_out = [x for node in backward for x in node.results if x in read_later]
        if line is None or not come_out or not all(map(comparison.is_number, come_out)):
            continue
        last = line if returns(line) else next(iter(uses_of(line)), line)
        tried = [Suspect(last, False, backward[:1], come_out, "other")]
        for line in [*dict.fromkeys(node.line for node in backward)][:_MOST_LINES]:
            nodes = [node for node in later if node.line == line]
            others = {x for node in later if node.line != line for x in node.operands}
            values = [x for node in nodes for x in node.results if x in others]
            if values and all(comparison.differs(x) and comparison.is_number(x) for x in values):
                tried.append(Suspect(line, False, nodes, [*come_out, *values], "other"))
        sizes = {size for size in backward[0].scope.sizes.values() if size > 1}
        for suspect, size in itertools.product(tried, sizes):
            for factor in (1 / size, float(size)):
                changes = {x: multiplied(x, factor) for x in suspect.values}
                yield Trial(suspect, changes, 0.75)


def of_shares(comparison: Comparison) -> Iterator[Trial]:
    """Summands of a loss, and cotangents, that shards have as a whole where each should have a share.

    Or the other way round. A summand changes together with its derivative.
    """
    nodes, readers = comparison.mesh.nodes, readers_of(comparison)
    # What the derivative of each line, and each line of a backward function, hands on.
    back: dict[SourceLine | None, list[int]] = {}
    for node in nodes:
        is_back = _is_of_derivative(node) and node.line
        for x in filter(comparison.is_number, node.results if is_back else ()):
            if any((y.line, y.transposed) != (node.line, node.transposed) for y in readers[x]):
                back.setdefault(node.line, []).append(x)
    tried: list[tuple[Node, list[int]]] = []
    for node in nodes:
        aval: Any = node.eqn.outvars[0].aval
        if is_of_backward(node.eqn):
            tried += [(node, [x]) for x in node.results if x in back.get(node.line, ())]
        elif node.name in ("add", "sub") and not node.transposed and node.line and not aval.shape:
            for x in node.operands:
                maker = comparison.maker.get(x)
                of_line = back.get(maker.line, []) if maker else []
                tried += [(node, [x, *of_line])] if of_line else []
                tried += [(node, [x, y]) for y in of_line if 1 < len(of_line) <= _MOST_LINES]
    for node, values in tried:
        suspect = Suspect(node.line, False, [node], values[:1], "other")
        for size in {size for size in node.scope.sizes.values() if size > 1}:
            for factor in (1 / size, float(size)):
                yield Trial(suspect, {x: multiplied(x, factor) for x in values}, 0.5)


def of_one_device(comparison: Comparison) -> Iterator[Trial]:
    """Numbers that several lines name, such as a share, as on one device wherever they are read."""
    # For each number, and the one in its place, the values and the nodes that first read them.
    found: dict[tuple[int | float, int | float], dict[int, Node]] = {}
    ends = zip(comparison.mesh.results, comparison.right, strict=True)
    # The length of a part may be the same number.
    for node in needed(comparison.mesh.nodes, [x for x, right in ends if not right]):
        partner = comparison.partners.get(node)
        for x, y in zip(node.operands, partner.operands, strict=False) if partner else ():
            got, want = comparison.named(x, y)
            is_number = any(type(got) is type(want) is kind for kind in (int, float))
            is_other = is_number and got != want
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
