"""Step 3: a user's function over trees as a pure function over one shard's arrays."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._arguments import Arguments, Unit
from .._base import _errors as errors
from .._base._types import AxisName
from .._leave import Exit, leave
from .._match import Entered, leaves_of
from .._model._state import mark_origin
from .._resolve._specs import REPLICATED, Placement
from .._write_back import WriteBack


_JAX = os.path.dirname(jax.__file__) + os.sep


class Instance:
    """One per-shard run of a function: states enter, the function is called, results leave.

    **Arguments:**

    - `fun`: the user's function.
    - `arguments`: their structure.
    - `template`: the arguments' leaves with the static ones filled in.
    - `inputs`: where in `template` each of the program's inputs goes.
    - `placements`: one for each input.
    - `numbers`: which inputs were Python numbers.
    - `axis_names`: the axes mapped over.
    - `exit`: how results leave.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        arguments: Arguments,
        template: Sequence[Any],
        inputs: Sequence[int],
        placements: Sequence[Placement],
        numbers: frozenset[int],
        exit: Exit,
    ) -> None:
        self.fun = fun
        self.arguments = arguments
        self.template = template
        self.inputs = inputs
        self.placements = placements
        self.numbers = numbers
        self.exit = exit
        self.input_at = {position: k for k, position in enumerate(inputs)}

    def __call__(
        self, shards: Sequence[Any], mesh: Mesh | AbstractMesh
    ) -> tuple[list[Any], list[PartitionSpec], WriteBack]:
        """The program's outputs, one spec for each, and how the result is put together."""
        leaves = list(self.template)
        known: dict[int, tuple[int, Placement]] = {}
        for k, (position, shard) in enumerate(zip(self.inputs, shards, strict=True)):
            where = self.placements[k]
            leaves[position] = where.take(shard)
            if k not in self.numbers:
                known[id(leaves[position])] = (k, where)
        entered: list[Entered] = []
        units: list[Any] = []
        for unit in self.arguments.flat_units():
            own = [leaves[position] for position in unit.positions]
            if unit.kind is None:
                units += own
            else:
                entered.append(self._enter(unit, own))
                units.append(entered[-1].seen)
        args, kwargs = self.arguments.unit_def.unflatten(units)
        try:
            result = self.fun(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if (text := self._hint(error, entered, leaves, mesh)) is None:
                raise
            raise type(error)(text) from error
        return leave(result, entered, known, self.exit)

    def _enter(self, unit: Unit, own: list[Any]) -> Entered:
        inputs = tuple(self.input_at[position] for position in unit.positions)
        placements = tuple(self.placements[k] for k in inputs)
        apart = frozenset[AxisName]().union(*(where.axis_names for where in placements))
        old = unit.treedef.unflatten(own)
        mark = object()
        same = tuple(name for name in self.exit.axis_names if name not in apart)
        try:
            seen = mark_origin(old.enter(same), mark)
        except errors.StatemeshError as error:
            raise type(error)(f"{unit.path}: {error}") from None
        return Entered(mark, unit.path, unit.keys, old, seen, placements, inputs)

    def _hint(
        self,
        error: Exception,
        entered: Sequence[Entered],
        leaves: Sequence[Any],
        mesh: Mesh | AbstractMesh,
    ) -> str | None:
        """The text of `error` with a hint, where a whole state met a part of an array.

        Only for errors that JAX raised about shapes, and only when the sizes say that a state was
        left whole where data was split.
        """
        if type(error) not in (TypeError, ValueError) or not _raised_by_jax(error):
            return None
        split = [
            (unit.path, leaves[position], where.spec)
            for unit in self.arguments.flat_units()
            for position in unit.positions
            if (where := self._placement_at(position)).axis_names and where.axis is None
        ]
        hints = [
            errors.WholeState(one.path, one.old, path, part, spec)
            for one in entered
            for path, part, spec in split
            if any(_whole_beside_part(x, part, spec, mesh) for x in _whole(one))
        ]
        return errors.with_hint(str(error), hints) if hints else None

    def _placement_at(self, position: int) -> Placement:
        k = self.input_at.get(position)
        return REPLICATED if k is None else self.placements[k]


def _whole(one: Entered) -> list[Any]:
    pairs = zip(leaves_of(one.old), one.placements, strict=True)
    return [x for x, where in pairs if not where.axis_names]


def _whole_beside_part(
    whole: Any, part: Any, spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> bool:
    """Whether some axis of `whole` is as long as a split axis of `part` was before the split."""
    for size, names in zip(part.shape, tuple(spec), strict=False):
        if names is None:
            continue
        several = names if isinstance(names, tuple) else (names,)
        parts = 1
        for name in several:
            parts *= mesh.shape[name]
        if parts > 1 and size * parts in whole.shape:
            return True
    return False


def _raised_by_jax(error: Exception) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_JAX)
