"""A traced program as one list of nodes: calls are opened, loops and branches stay single nodes."""

import dataclasses
import difflib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from jax.sharding import PartitionSpec

from .._program._jaxprs import (
    CALLS,
    Atom,
    Equation,
    Jaxpr,
    called,
    is_identity,
    is_literal,
    new_axes,
    opened,
    operands_of_call,
)
from .._program._stacked import Scope, names_of_spec
from ._lines import Line, by_statemesh, is_transposed, line_of


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A number or an array that is a part of the program."""

    value: Any


# The number of a value, or a constant.
Operand: TypeAlias = int | Constant

_COLLECTIVES = (
    *("psum", "psum_invariant", "pmax", "pmin", "reduce_scatter"),
    *("all_gather", "all_gather_invariant", "all_to_all", "ppermute"),
)

# These hand their operand on, besides those that say where a value lies.
_NAMES = ("name", "copy", "copy_p")


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One node of a flat program.

    **Attributes:**

    - `kind`: an equation that runs, an array that a `shard_map` splits, or parts that it joins.
    - `eqn`: the equation, or the `shard_map`.
    - `operands`, `results`: the values that it reads and makes.
    - `scope`: the mesh axes over which it runs.
    - `line`: the user's line: of the equation, or of the innermost call around it that has one.
    - `transposed`: whether it belongs to a backward pass.
    - `caller`: the name of the outermost function of a library that it belongs to.
    - `is_own`: whether the user's code runs it, with no library in between but JAX.
    - `spec`: how an array is split or joined.
    - `outer`: where parts are joined, the mesh axes around the `shard_map`.
    """

    kind: Literal["run", "split", "join"]
    eqn: Equation
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    scope: Scope
    line: Line | None
    transposed: bool
    caller: str = ""
    is_own: bool = True
    spec: PartitionSpec | None = None
    outer: Scope | None = None

    @property
    def around(self) -> Scope:
        """The mesh axes over which its results may differ."""
        return self.scope if self.outer is None else self.outer

    @property
    def name(self) -> str:
        return self.eqn.primitive.name if self.kind == "run" else self.kind

    @property
    def is_collective(self) -> bool:
        """Whether it combines what shards have."""
        return self.name in _COLLECTIVES

    @property
    def inputs(self) -> list[int]:
        """The operands that are no constants."""
        return [x for x in self.operands if isinstance(x, int)]


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A flat program.

    **Attributes:**

    - `jaxpr`: what it was made from.
    - `inputs`: the numbers of the values that come in.
    - `results`: what goes out.
    - `nodes`: the nodes on which a result depends.
    """

    jaxpr: Jaxpr
    inputs: tuple[int, ...]
    results: tuple[Operand, ...]
    nodes: tuple[Node, ...]

    def maker(self) -> dict[int, Node]:
        """The node that makes each value."""
        return {value: node for node in self.nodes for value in node.results}


def graph_of(jaxpr: Jaxpr, scope: Scope, around: Line | None = None) -> Graph:
    """The flat program of a jaxpr.

    **Arguments:**

    - `scope`: the mesh axes around it.
    - `around`: the user's line that runs it.
    """
    flattening = _Flattening()
    inner = opened(jaxpr)
    inputs = flattening.new(len(inner.invars))
    results = tuple(flattening.run(jaxpr, inputs, scope, _Around(around)))
    nodes = needed(flattening.nodes, results)
    return Graph(jaxpr, tuple(inputs), results, nodes)


def needed(nodes: Sequence[Node], results: Iterable[Operand]) -> tuple[Node, ...]:
    wanted = {x for x in results if isinstance(x, int)}
    kept = []
    for node in reversed(nodes):
        if wanted.intersection(node.results):
            wanted.update(node.inputs)
            kept.append(node)
    return tuple(reversed(kept))


@dataclasses.dataclass(frozen=True)
class _Around:
    """What calls the equations of a jaxpr."""

    line: Line | None = None
    transposed: bool = False
    caller: str = ""


class _Flattening:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._count = 0

    def new(self, count: int) -> list[int]:
        self._count += count
        return list(range(self._count - count, self._count))

    def run(
        self, jaxpr: Jaxpr, given: Sequence[Operand], scope: Scope, around: _Around
    ) -> Iterator[Operand]:
        inner = opened(jaxpr)
        consts = [Constant(x) for x in getattr(jaxpr, "consts", ())]
        # A jaxpr that is no closed one has the values of its constants among what is given.
        known: dict[Any, Operand] = dict(
            zip([*inner.constvars, *inner.invars], [*consts, *given], strict=True)
        )

        def operand(atom: Atom) -> Operand:
            if is_literal(atom):
                aval: Any = atom.aval
                return Constant(np.asarray(atom.val, aval.dtype))
            return known[atom]

        for eqn in inner.eqns:
            made = self._equation(eqn, [operand(atom) for atom in eqn.invars], scope, around)
            known.update(zip(eqn.outvars, made, strict=True))
        return (operand(atom) for atom in inner.outvars)

    def _equation(
        self, eqn: Equation, operands: list[Operand], scope: Scope, around: _Around
    ) -> list[Operand]:
        name = eqn.primitive.name
        if is_identity(eqn) or name in _NAMES:
            return operands
        line = line_of(eqn)
        transposed = around.transposed or is_transposed(eqn)
        if name in CALLS:
            # Without a line of the user's inside, the call is a library's.
            caller = around.caller or str(eqn.params.get("name", ""))
            inside = _Around(line or around.line, transposed, caller)
            given = operands_of_call(eqn, operands)
            return list(self.run(called(eqn), given, scope, inside))
        if name == "shard_map":
            return self._shard_map(eqn, operands, scope, around)
        caller = around.caller if line is None else ""
        results = self.new(len(eqn.outvars))
        made = Node(
            kind="run",
            eqn=eqn,
            operands=tuple(operands),
            results=tuple(results),
            scope=scope,
            line=line or around.line,
            transposed=transposed,
            caller=caller,
            is_own=not by_statemesh(eqn),
        )
        self.nodes.append(made)
        return list(results)

    def _shard_map(
        self, eqn: Equation, operands: list[Operand], scope: Scope, around: _Around
    ) -> list[Operand]:
        inside = Scope({**scope.sizes, **new_axes(eqn)}, scope.indices)
        params, transposed = eqn.params, is_transposed(eqn)

        def moved(kind: Literal["split", "join"], x: Operand, spec: PartitionSpec) -> Operand:
            if kind == "split" and not names_of_spec(spec):
                return x
            (result,) = self.new(1)
            outer = scope if kind == "join" else None
            node = Node(
                kind, eqn, (x,), (result,), inside, None, transposed, spec=spec, outer=outer
            )
            self.nodes.append(node)
            return result

        split = [moved("split", x, s) for x, s in zip(operands, params["in_specs"], strict=True)]
        made = self.run(params["jaxpr"], split, inside, around)
        return [moved("join", x, s) for x, s in zip(made, params["out_specs"], strict=True)]


def pairs(mesh: Sequence[Node], one: Sequence[Node]) -> dict[int, int]:
    """For nodes of the program on a mesh, the numbers of the same nodes of the program on one device.

    The programs are nearly the same. Where they are not, because the code looks at the size of an axis, these
    are the longest runs of nodes that both have.
    """
    found = _longest([_key(node) for node in mesh], [_key(node) for node in one])
    if 2 * len(found) >= min(len(mesh), len(one)):
        return found
    # The other program was written in other lines.
    return _longest([_kind(node) for node in mesh], [_kind(node) for node in one])


def _longest(left: Sequence[Hashable], right: Sequence[Hashable]) -> dict[int, int]:
    """The numbers of equal keys, in order."""
    start = 0
    while start < min(len(left), len(right)) and left[start] == right[start]:
        start += 1
    end = 0
    while end < min(len(left), len(right)) - start and left[-1 - end] == right[-1 - end]:
        end += 1
    found = {i: i for i in range(start)}
    found |= {len(left) - k: len(right) - k for k in range(1, end + 1)}
    numbers: dict[Hashable, int] = {}
    middle = [
        [numbers.setdefault(key, len(numbers)) for key in keys[start : len(keys) - end]]
        for keys in (left, right)
    ]
    for block in difflib.SequenceMatcher(
        None, middle[0], middle[1], autojunk=False
    ).get_matching_blocks():
        for k in range(block.size):
            found[start + block.a + k] = start + block.b + k
    return found


def _key(node: Node) -> Hashable:
    return _kind(node), node.line, node.transposed, node.caller


def _kind(node: Node) -> Hashable:
    def kind(var: Any) -> Hashable:
        return str(var.aval.dtype), len(var.aval.shape)

    return node.name, tuple(map(kind, node.eqn.outvars)) if node.kind == "run" else ()
