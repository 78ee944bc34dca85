"""The values that lead to a wrong result, and the lines that made them."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ._compare import Comparison
from ._graph import Step
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
    """The steps of one line that make values which lead to a wrong result.

    **Attributes:**

    - `line`: the line; `None` where there is no line of the user's.
    - `transposed`: whether the steps are those of the line's derivative.
    - `steps`: in the order of the program.
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
    steps: Sequence[Step]
    values: Sequence[int]
    is_first: bool
    is_sure: bool
    is_partial: bool
    is_multiple: bool
    is_index: bool = False

    @property
    def moves(self) -> bool:
        """Whether the line moves values between shards."""
        return any(step.name in ("ppermute", "all_to_all") for step in self.steps)


class Suspects:
    """What leads to the wrong results of a comparison.

    **Attributes:**

    - `steps`: the steps, in the order of the program.
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
        self.steps = [step for step in found.mesh.steps if self._values.intersection(step.results)]
        self.first = [step for step in self.steps if self._is_first(step)]

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

    def _is_first(self, step: Step) -> bool:
        makes = any(self.is_unrelated(x) for x in step.results)
        return makes and not any(self.is_unrelated(x) for x in step.inputs)

    def _is_of_a_part(self, step: Step) -> bool:
        """Whether a step naturally gives something else for a part, such as positions in it."""
        relations = [self._found.relations[x] for x in step.inputs]
        return step.name in _OF_A_PART and all(one is None or one.is_plain for one in relations)

    def origins(self, group: Group) -> list[Line | None]:
        """The lines at which partial results and multiples begin that a line uses as if they were whole."""
        # A collective may well be given parts.
        steps = [step for step in group.steps if self._is_first(step) and not step.is_collective]
        queue, seen, found = [x for step in steps for x in step.inputs], set(), []
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
        lines = [step.line for step in self.steps if {*group.values} & {*step.inputs}]
        return [line for line in lines if line is not None and line != group.line]

    def groups(self) -> list[Group]:
        """The suspects by line, in the order of the program."""
        lines = self._lines()
        steps: dict[tuple[Line | None, bool], list[Step]] = {}
        for step in self.steps:
            steps.setdefault((lines[step], step.transposed), []).append(step)
        made = {key: {x for step in group for x in step.results} for key, group in steps.items()}
        readers: dict[int, list[Step]] = {}
        for step in self._found.mesh.steps:
            for x in step.inputs:
                readers.setdefault(x, []).append(step)
        results = {x for x in self._found.mesh.results if isinstance(x, int)}
        found = []
        for key, group in steps.items():
            inside = {id(step) for step in group}
            values = [
                x
                for x in sorted(made[key] & self._values)
                if x in results or any(id(step) not in inside for step in readers.get(x, ()))
            ]
            known = [self._found.relations[x] for x in values]
            first = [step for step in group if self._is_first(step)]
            sure = [step for step in first if not self._is_of_a_part(step)]
            positions = self._found.positions
            found.append(
                Group(
                    *key,
                    steps=group,
                    values=values,
                    is_first=bool(first),
                    is_sure=any(not positions.intersection(step.inputs) for step in sure),
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
        suspects = {step.line for step in self.steps}
        steps: dict[Line, list[Step]] = {}
        for step in self._found.mesh.steps:
            dtype = getattr(step.eqn.outvars[0].aval, "dtype", np.dtype(float))
            is_whole = any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, jnp.integer))
            if step.line and step.line not in suspects and is_whole and not step.transposed:
                steps.setdefault(step.line, []).append(step)
        return [Group(line, False, made, [], *[False] * 4) for line, made in steps.items()]

    def handed_over(self) -> Group | None:
        """The gradients that are partial results, or multiples, at the line that first uses one."""
        lines = self._lines()
        steps, values = [], set()
        for step in self.steps:
            made = [x for x in step.inputs if x in self._values and x in self._maker]
            gradients = [x for x in made if self._maker[x].transposed and not step.transposed]
            if gradients and lines[step] is not None:
                steps.append(step)
                values.update(gradients)
        known = [self._found.relations[x] for x in values]
        if not steps or any(one is None for one in known):
            return None
        multiple = any(one is not None and one.factor != 1 for one in known)
        return Group(lines[steps[0]], False, steps, sorted(values), False, False, True, multiple)

    def _lines(self) -> dict[Step, Line | None]:
        """The line of each suspect; for steps of libraries, which have none, the line that first uses it."""
        lines: dict[Step, Line | None] = {step: step.line for step in self.steps}
        reader: dict[int, Step] = {}
        for step in reversed(self.steps):
            if lines[step] is None:
                uses = [reader[x] for x in step.results if x in reader]
                lines[step] = next((lines[use] for use in uses if lines[use] is not None), None)
            for x in step.inputs:
                reader[x] = step
        return lines
