"""The values that lead to a wrong result, and the lines that made them."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ._compare import Comparison
from ._graph import Node
from ._lines import Line


# Operations that give for a part what only the part knows.
_OF_A_PART = (
    *(
        "iota",
        "cumsum",
        "cumlogsumexp",
        "cumprod",
        "cummax",
        "cummin",
        "sort",
        "top_k",
        "argmax",
        "argmin",
    ),
    *("slice", "dynamic_slice", "concatenate", "pad", "rev", "gather", "reduce_window_sum"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The nodes of one line that make values which lead to a wrong result.

    **Attributes:**

    - `line`: the line; `None` where there is no line of the user's.
    - `transposed`: whether the nodes are those of the line's derivative.
    - `nodes`: in the order of the program.
    - `values`: what they make that other lines use.
    - `is_first`: whether one of them makes of values that are right, or parts of them, one that is neither.
    - `is_sure`: whether such a one reads no value that differs because of the index of a shard, and gives no
        positions in the shard's own part.
    - `is_partial`: whether all that they make is partial results, or multiples.
    - `is_multiple`: whether there are multiples among it.
    - `is_index`: whether all of it differs because of the index of a shard.
    """

    line: Line | None
    transposed: bool
    nodes: Sequence[Node]
    values: Sequence[int]
    is_first: bool
    is_sure: bool
    is_partial: bool
    is_multiple: bool
    is_index: bool = False

    @property
    def moves(self) -> bool:
        """Whether the line moves values between shards."""
        return any(node.name in ("ppermute", "all_to_all") for node in self.nodes)


class Suspects:
    """What leads to the wrong results of a comparison.

    **Attributes:**

    - `nodes`: the nodes, in the order of the program.
    - `first`: those that make something unrelated of what is related.
    """

    def __init__(self, found: Comparison) -> None:
        self._found = found
        self._maker = found.mesh.maker()
        self._values: set[int] = set()
        wrong = [
            operand
            for operand, result in zip(found.mesh.results, found.results, strict=True)
            if not result.right and isinstance(operand, int)
        ]
        self._walk(wrong)
        self.nodes = [node for node in found.mesh.nodes if self._values.intersection(node.results)]
        self.first = [node for node in self.nodes if self._is_first(node)]

    def _is_suspect(self, value: int) -> bool:
        """Whether shards have something else than their part of the value on one device."""
        known = self._found.relations[value]
        return known is None or not known.is_plain

    def is_unrelated(self, value: int) -> bool:
        return self._found.relations[value] is None and value not in self._found.indices

    def _walk(self, values: list[int]) -> None:
        while values:
            value = values.pop()
            if value in self._values:
                continue
            self._values.add(value)
            if value in self._maker:
                values += [x for x in self._maker[value].inputs if self._is_suspect(x)]

    def _is_first(self, node: Node) -> bool:
        makes = any(self.is_unrelated(x) for x in node.results)
        return makes and not any(self.is_unrelated(x) for x in node.inputs)

    def _is_of_a_part(self, node: Node) -> bool:
        """Whether a node naturally gives something else for a part, such as positions in it."""
        relations = [self._found.relations[x] for x in node.inputs]
        return node.name in _OF_A_PART and all(one is None or one.is_plain for one in relations)

    def origins(self, group: Group) -> list[Line | None]:
        """The lines at which partial results and multiples begin that a line uses as if they were whole."""
        # A collective may well be given parts.
        nodes = [node for node in group.nodes if self._is_first(node) and not node.is_collective]
        queue, seen, found = [x for node in nodes for x in node.inputs], set(), []
        while queue:
            value = queue.pop()
            known, maker = self._found.relations[value], self._maker.get(value)
            if value in seen or known is None or known.is_plain or maker is None:
                continue
            seen.add(value)
            queue += maker.inputs
            before = [self._found.relations[x] for x in maker.inputs]
            if not maker.transposed and all(one is None or one.is_plain for one in before):
                found.append(maker.line)
        return found

    def readers(self, group: Group) -> list[Line]:
        """The lines that use first what a line makes."""
        lines = [node.line for node in self.nodes if {*group.values} & {*node.inputs}]
        return [line for line in lines if line is not None and line != group.line]

    def groups(self) -> list[Group]:
        """The suspects by line, in the order of the program."""
        lines = self._lines()
        nodes: dict[tuple[Line | None, bool], list[Node]] = {}
        for node in self.nodes:
            nodes.setdefault((lines[node], node.transposed), []).append(node)
        made = {key: {x for node in group for x in node.results} for key, group in nodes.items()}
        readers: dict[int, list[Node]] = {}
        for node in self._found.mesh.nodes:
            for x in node.inputs:
                readers.setdefault(x, []).append(node)
        results = {x for x in self._found.mesh.results if isinstance(x, int)}
        found = []
        for key, group in nodes.items():
            inside = {id(node) for node in group}
            values = [
                x
                for x in sorted(made[key] & self._values)
                if x in results or any(id(node) not in inside for node in readers.get(x, ()))
            ]
            known = [self._found.relations[x] for x in values]
            first = [node for node in group if self._is_first(node)]
            sure = [node for node in first if not self._is_of_a_part(node)]
            positions = self._found.positions
            found.append(
                Group(
                    *key,
                    nodes=group,
                    values=values,
                    is_first=bool(first),
                    is_sure=any(not positions.intersection(node.inputs) for node in sure),
                    is_partial=all(one is not None for one in known),
                    is_multiple=any(one is not None and one.factor != 1 for one in known),
                    is_index=bool(values) and positions.issuperset(values),
                )
            )
        return found

    def others(self) -> list[Group]:
        """The lines of whole numbers and truths that are those of one device.

        They may be wrong all the same: shards may all have what the first of them should have.
        """
        suspects = {node.line for node in self.nodes}
        nodes: dict[Line, list[Node]] = {}
        for node in self._found.mesh.nodes:
            dtype = getattr(node.eqn.outvars[0].aval, "dtype", np.dtype(float))
            is_whole = any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, jnp.integer))
            if node.line and node.line not in suspects and is_whole and not node.transposed:
                nodes.setdefault(node.line, []).append(node)
        return [Group(line, False, made, [], *[False] * 4) for line, made in nodes.items()]

    def handed_over(self) -> Group | None:
        """The gradients that are partial results, or multiples, at the line that first uses one."""
        lines = self._lines()
        nodes, values = [], set()
        for node in self.nodes:
            made = [x for x in node.inputs if x in self._values and x in self._maker]
            gradients = [x for x in made if self._maker[x].transposed and not node.transposed]
            if gradients and lines[node] is not None:
                nodes.append(node)
                values.update(gradients)
        known = [self._found.relations[x] for x in values]
        if not nodes or any(one is None for one in known):
            return None
        multiple = any(one is not None and one.factor != 1 for one in known)
        return Group(lines[nodes[0]], False, nodes, sorted(values), False, False, True, multiple)

    def _lines(self) -> dict[Node, Line | None]:
        """The line of each suspect; for nodes of libraries, which have none, the line that first uses it."""
        lines: dict[Node, Line | None] = {node: node.line for node in self.nodes}
        reader: dict[int, Node] = {}
        for node in reversed(self.nodes):
            if lines[node] is None:
                uses = [reader[x] for x in node.results if x in reader]
                lines[node] = next((lines[use] for use in uses if lines[use] is not None), None)
            for x in node.inputs:
                reader[x] = node
        return lines
