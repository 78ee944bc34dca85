"""A traced program as one list of nodes: calls and short loops are opened, the others stay single nodes."""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

from .._program._backward import is_handed_on, is_of_backward
from .._program._collective_rules import RULES
from .._program._jaxprs import (
    CALLS,
    Equation,
    Jaxpr,
    aligned,
    all_equations,
    called,
    interpreted,
    is_identity,
    new_axes,
    opened,
    operands_of_call,
    operands_of_loop,
)
from .._program._lines import SourceLine, by_statemesh, callers_of, is_transposed, line_of
from .._program._stacked import MappedAxes, names_of_spec


# These hand their operand on, besides those that say where a value lies.
_NAMES = ("name", "copy", "copy_p")
_WHOLE = PartitionSpec()
# A loop of more rounds stays one node, and so does one whose rounds have more equations together.
_MOST_ROUNDS = 16
_MOST_EQUATIONS = 2_000


class Round(NamedTuple):
    """A round of a loop that was opened.

    **Attributes:**

    - `loop`: the number of the loop in its graph.
    - `line`: the user's line that runs the loop.
    - `number`: that of the round.
    """

    loop: int
    line: SourceLine | None
    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One node of a flat program.

    **Attributes:**

    - `kind`: an equation that runs, an array that a `shard_map` splits, parts that it joins, an entry of an
        array that a loop gets in one round, or the entries that it has made, as one array.
    - `eqn`: the equation, the `shard_map`, or the loop.
    - `operands`, `results`: the numbers of the values that it reads and makes.
    - `scope`: the mesh axes over which it runs.
    - `around`: the mesh axes over which its results may differ: where parts are joined, those around the
        `shard_map`.
    - `line`: the user's line: of the equation, or of the innermost call around it that has one.
    - `callers`: the user's lines around that line, the innermost first.
    - `transposed`: whether it belongs to a backward pass.
    - `caller`: the name of the outermost function of a library that it belongs to.
    - `is_own`: whether the user's code runs it, with no library in between but JAX.
    - `spec`: how an array is split or joined.
    - `rounds`: those of the opened loops around it, the outermost first.
    """

    kind: Literal["run", "split", "join", "entry", "stack"]
    eqn: Equation
    operands: tuple[int, ...]
    results: tuple[int, ...]
    scope: MappedAxes
    around: MappedAxes
    line: SourceLine | None
    callers: tuple[SourceLine, ...]
    transposed: bool
    caller: str = ""
    is_own: bool = True
    spec: PartitionSpec = _WHOLE
    rounds: tuple[Round, ...] = ()

    @property
    def name(self) -> str:
        return self.eqn.primitive.name if self.kind == "run" else self.kind


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A flat program.

    **Attributes:**

    - `jaxpr`: what it was made from.
    - `inputs`: the numbers of the values that come in.
    - `results`: of those that go out.
    - `constants`: the values that are a part of the program: arrays and literals.
    - `nodes`: the nodes on which a result depends, or what the user's own lines reduce or gather.
    """

    jaxpr: Jaxpr
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    constants: Mapping[int, Any]
    nodes: tuple[Node, ...]


def graph_of(jaxpr: Jaxpr, scope: MappedAxes, around: SourceLine | None = None) -> Graph:
    """The flat program of a jaxpr.

    **Arguments:**

    - `scope`: the mesh axes around it.
    - `around`: the user's line that runs it.
    """
    flattening = _Flattening()
    inputs = flattening.new(len(opened(jaxpr).invars))
    results = flattening.run(jaxpr, inputs, _Around(scope, around))
    # A reduction that nothing reads may be the one that a line should read.
    unread = [
        x for node in flattening.nodes if node.line and node.name in RULES for x in node.results
    ]
    nodes = needed(flattening.nodes, [*results, *unread])
    return Graph(jaxpr, tuple(inputs), tuple(results), flattening.constants, nodes)


def needed(nodes: Sequence[Node], results: Iterable[int]) -> tuple[Node, ...]:
    """The nodes on which some values depend."""
    values, kept = {*results}, []
    for node in reversed(nodes):
        if not values.isdisjoint(node.results):
            values.update(node.operands)
            kept.append(node)
    return tuple(reversed(kept))


@dataclasses.dataclass(frozen=True)
class _Around:
    """What runs the equations of a jaxpr: mesh axes, lines of the user, a function of a library, loops."""

    scope: MappedAxes
    line: SourceLine | None
    callers: tuple[SourceLine, ...] = ()
    transposed: bool = False
    caller: str = ""
    rounds: tuple[Round, ...] = ()


class _Flattening:
    """The nodes that have been met so far."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[int, Any] = {}
        self._numbers = itertools.count()

    def new(self, count: int) -> list[int]:
        return list(itertools.islice(self._numbers, count))

    def _constant(self, value: Any) -> int:
        (number,) = self.new(1)
        self.constants[number] = value
        return number

    def run(self, jaxpr: Jaxpr, inputs: Sequence[int], around: _Around) -> list[int]:
        # A jaxpr that is no closed one has the values of its constants among its inputs.
        consts = [self._constant(x) for x in getattr(jaxpr, "consts", ())]

        def literal(atom: Any) -> int:
            return self._constant(atom)

        def run(eqn: Equation, operands: list[int]) -> Sequence[int]:
            return self._equation(eqn, operands, around)

        return interpreted(opened(jaxpr), [*consts, *inputs], literal, run)

    def _equation(self, eqn: Equation, operands: Sequence[int], around: _Around) -> Sequence[int]:
        name, scope, line = eqn.primitive.name, around.scope, line_of(eqn)
        callers = around.callers if line is None else callers_of(eqn)
        outer = () if around.line is None else (around.line, *around.callers)
        if line is not None and outer[-1:] != (line, *callers)[-1:]:
            # JAX has traced a function apart, and knows the lines inside of it only.
            callers += outer
        transposed = (around.transposed or is_transposed(eqn)) and not is_of_backward(eqn)
        if is_identity(eqn) or (name in _NAMES and not is_handed_on(eqn)):
            return operands
        if name == "shard_map":
            return self._shard_map(eqn, operands, around)
        if name in CALLS:
            # Without a line of the user's inside, the call is a library's.
            caller = around.caller or str(eqn.params.get("name", ""))
        else:
            caller = around.caller if line is None else ""
        known = line or around.line
        inside = _Around(scope, known, callers, transposed, caller, around.rounds)
        if name in CALLS:
            return self.run(called(eqn), operands_of_call(eqn, operands), inside)
        if name == "scan" and _is_short(eqn):
            return self._scan(eqn, operands, inside)
        results, is_own = tuple(self.new(len(eqn.outvars))), not by_statemesh(eqn)
        fields = eqn, tuple(operands), results, scope, scope, known, callers, transposed, caller
        self.nodes.append(Node("run", *fields, is_own, rounds=around.rounds))
        return results

    def _scan(self, eqn: Equation, operands: Sequence[int], around: _Around) -> list[int]:
        params, (loop,) = eqn.params, self.new(1)
        consts, carry, scanned = operands_of_loop(eqn, operands)
        made: dict[int, Sequence[int]] = {}

        def step(kind: Literal["entry", "stack"], xs: Sequence[int], around: _Around) -> int:
            results, scope = self.new(1), around.scope
            fields = eqn, tuple(xs), tuple(results), scope, scope, None, around.callers
            node = Node(kind, *fields, around.transposed, is_own=False, rounds=around.rounds)
            self.nodes.append(node)
            return results[0]

        for k in sorted(range(params["length"]), reverse=params["reverse"]):
            rounds = (*around.rounds, Round(loop, around.line, k))
            inside = dataclasses.replace(around, rounds=rounds)
            entries = [step("entry", [x], inside) for x in scanned]
            results = self.run(params["jaxpr"], [*consts, *carry, *entries], inside)
            carry, made[k] = results[: len(carry)], results[len(carry) :]
        stacked = zip(*(made[k] for k in range(params["length"])), strict=True)
        return [*carry, *(step("stack", xs, around) for xs in stacked)]

    def _shard_map(self, eqn: Equation, operands: Sequence[int], around: _Around) -> list[int]:
        outer, params, transposed = around.scope, eqn.params, is_transposed(eqn)
        scope = MappedAxes({**outer.sizes, **new_axes(eqn)}, outer.indices)

        def moved(kind: Literal["split", "join"], x: int, spec: PartitionSpec) -> int:
            if kind == "split" and not names_of_spec(spec):
                return x
            (result,) = self.new(1)
            after = outer if kind == "join" else scope
            fields = eqn, (x,), (result,), scope, after
            self.nodes.append(Node(kind, *fields, None, (), transposed, spec=spec))
            return result

        inputs = [moved("split", x, s) for x, s in zip(operands, params["in_specs"], strict=True)]
        results = self.run(params["jaxpr"], inputs, dataclasses.replace(around, scope=scope))
        return [moved("join", x, s) for x, s in zip(results, params["out_specs"], strict=True)]


def _is_short(eqn: Equation) -> bool:
    """Whether a loop is opened into its rounds."""
    length = eqn.params["length"]
    count = sum(1 for _ in all_equations(opened(eqn.params["jaxpr"])))
    return 0 < length <= _MOST_ROUNDS and length * count <= _MOST_EQUATIONS


def pairs(mesh: Sequence[Node], single: Sequence[Node]) -> dict[Node, Node]:
    """For nodes of the program on a mesh, the same nodes of the program on one device.

    The programs are nearly the same. Where they are not, because the code looks at the size of an axis, these
    are the longest runs of nodes that both have.
    """
    same = aligned([_key(node) for node in mesh], [_key(node) for node in single])
    if 2 * len(same) < min(len(mesh), len(single)):
        # The other program was written in other lines.
        same = aligned([_kind(node) for node in mesh], [_kind(node) for node in single])
    return {mesh[a]: single[b] for a, b in sorted(same.items())}


def step_of(node: Node) -> Hashable:
    """What a node has in common with those of the same step in other calls and rounds."""
    return node.name, node.line, node.transposed


def _key(node: Node) -> Hashable:
    return _kind(node), node.line, node.transposed, node.caller


def _kind(node: Node) -> Hashable:
    avals: list[Any] = [var.aval for var in node.eqn.outvars] if node.kind == "run" else []
    return node.name, *((str(aval.dtype), len(aval.shape)) for aval in avals)
