"""Step 3: a user's function over trees as a pure function over one shard's arrays."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .._arguments import Arguments, Unit
from .._base import _compat as compat
from .._base import errors
from .._base._specs import Placement
from .._base._types import NO_AXES, AxisName, Fun, Leaf
from .._leave._leave import Arrived, leave
from .._leave._origins import Entered, leaves_of, links_for
from .._leave._policies import checked_state
from .._leave._rules import LeavingRules
from .._leave._varying import VaryingAxes
from .._model._kinds import ParamState
from .._model._origin import mark_origin
from .._model._state import State
from .._write_back import WriteBack


@dataclasses.dataclass(frozen=True, slots=True)
class PerShardInput:
    """An array that every instance gets its part of.

    **Attributes:**

    - `position`: its position among the leaves of the arguments.
    - `placement`: where it lies.
    - `fresh`: whether it is a new array inside, which never comes back as it went in.
    - `stays`: whether it stands in a Module and leaves with its placement again when it is not written.
    """

    position: int
    placement: Placement
    fresh: bool
    stays: bool


class PerShardRun:
    """One per-shard run of a function: states enter, the function is called, results leave.

    **Arguments:**

    - `fun`: the user's function.
    - `arguments`: the structure of its arguments.
    - `template`: the leaves of the arguments, the static ones filled in.
    - `changing`: where in `template` the objects stand that may be others at the next call.
    - `inputs`: one for each array that an instance gets.
    - `leaving`: where results go.
    - `sizes`: the sizes of the mesh's axes.
    - `donating`: whether the memory of written states is given up.
    """

    def __init__(
        self,
        fun: Fun,
        arguments: Arguments,
        template: list[Leaf],
        changing: Sequence[int],
        inputs: Sequence[PerShardInput],
        leaving: LeavingRules,
        sizes: Mapping[AxisName, int],
        donating: bool,
    ) -> None:
        self.fun = fun
        self.arguments = arguments
        self.template = template
        self.changing = changing
        self.inputs = inputs
        self.leaving = leaving
        self.sizes = sizes
        self.donating = donating
        self.input_at = {one.position: k for k, one in enumerate(inputs)}

    def hold(self, changing: Sequence[Leaf]) -> None:
        """Replace the objects that may be others at each call."""
        for position, leaf in zip(self.changing, changing, strict=True):
            self.template[position] = leaf

    def __call__(
        self, shards: Sequence[Leaf], varying: VaryingAxes
    ) -> tuple[list[Leaf], WriteBack]:
        """The program's outputs, and how the result is put together."""
        leaves = list(self.template)
        arrived: dict[int, Arrived] = {}
        for k, (one, shard) in enumerate(zip(self.inputs, shards, strict=True)):
            x = leaves[one.position] = one.placement.take(shard)
            # One array may be given twice. In a Module it stays, whatever it is elsewhere.
            if (one.stays or not one.fresh) and not (id(x) in arrived and arrived[id(x)].stays):
                arrived[id(x)] = Arrived(one.placement, None if one.fresh else k, one.stays)
        varying.start(
            [leaves[one.position] for one in self.inputs],
            [one.placement.axis_names for one in self.inputs],
        )
        entering = self._entered(leaves, varying)
        entered = iter(entering)
        units: list[Leaf] = []
        for unit in self.arguments.flat_units():
            if unit.kind is None:
                units += [leaves[position] for position in unit.positions]
            else:
                units.append(next(entered).seen)
        try:
            result = varying.run(
                self._run,
                units,
                links_for(entering),
                any(one.old.needs_old for one in entering),
            )
        except (TypeError, ValueError) as error:
            if (text := self._hint(error, entering, leaves)) is None:
                raise
            raise type(error)(text) from error
        given = [leaves[position] for position in self.changing]
        tied, donating = self.arguments.tied, self.donating
        return leave(result, entering, arrived, self.leaving, varying, given, tied, donating)

    def _run(self, *units: Leaf) -> Any:
        args, kwargs = self.arguments.unit_def.unflatten(units)
        return self.fun(*args, **kwargs)

    def _entered(self, leaves: Sequence[Leaf], varying: VaryingAxes) -> list[Entered]:
        """The states of the arguments as the function sees them."""
        units = self.arguments.states()
        olds = [unit.treedef.unflatten([leaves[p] for p in unit.positions]) for unit in units]
        inputs = [tuple(self.input_at[p] for p in unit.positions) for unit in units]
        placements = [tuple(self.inputs[k].placement for k in ks) for ks in inputs]

        def enter_all(*olds: State) -> list[State]:
            return [self._enter(*one) for one in zip(units, olds, placements, strict=True)]

        seen = varying.call(enter_all, olds)
        entered: list[Entered] = []
        for unit, old, new, own, ks in zip(units, olds, seen, placements, inputs, strict=True):
            mark = object()
            new = mark_origin(new, mark)
            entered.append(Entered(mark, unit.path, unit.keys, old, new, own, ks))
        return entered

    def _enter(self, unit: Unit, old: State, placements: Sequence[Placement]) -> State:
        try:
            seen: object = old.enter(self._same_over(placements))
        except errors.StatemeshError as error:
            raise type(error)(f"{unit.path}: {error}") from None
        return checked_state(seen, old, "enter")

    def _hint(
        self, error: Exception, entered: Sequence[Entered], leaves: Sequence[Leaf]
    ) -> str | None:
        """The text of `error` with a hint, if a part of a parameter, or a replicated state, met other data.

        Only for errors that JAX raised about shapes, and only when the sizes say that a state was
        left whole where data was split; and for those about the types of what a loop carries.
        """
        if type(error) not in (TypeError, ValueError) or not compat.raised_by_jax(error):
            return None
        if components := compat.typed_apart(error):
            return self._type_hint(str(error), components, entered)
        if parts := self._parts_met(str(error), entered):
            axes = NO_AXES.union(*(where.axis_names for _, _, where in parts))
            names = [name for name in self.leaving.axis_names if name in axes]
            shown = [(path, part, where.written) for path, part, where in parts]
            return errors.with_gather_hint(str(error), shown, names)
        split = [
            (unit.path, leaves[position], where.spec)
            for unit in self.arguments.flat_units()
            for position in unit.positions
            if (where := self._placement_at(position)) is not None
            if where.axis_names and where.axis is None
        ]
        hints = [
            errors.WholeState(one.path, one.old, path, part, spec)
            for one in entered
            for path, part, spec in split
            if any(_whole_met_part(x, part, spec, self.sizes) for x in _whole(one))
        ]
        return errors.with_hint(str(error), hints) if hints else None

    def _parts_met(
        self, text: str, entered: Sequence[Entered]
    ) -> list[tuple[str, Leaf, Placement]]:
        """The parts of parameters with a split axis whose length here and as a whole JAX's message names."""
        named = set(map(int, re.findall(r"\d+", text)))
        return [
            (one.path, part, where)
            for one in entered
            if isinstance(one.old, ParamState)
            for part, where in zip(leaves_of(one.old), one.placements, strict=True)
            if where.axis is None
            for length, names in zip(part.shape, where.axes, strict=False)
            if names and {length, length * math.prod(self.sizes[name] for name in names)} <= named
        ]

    def _type_hint(
        self, text: str, components: Sequence[tuple[str, str]], entered: Sequence[Entered]
    ) -> str | None:
        """The text with a hint, if what JAX names are states that enter the same on every shard."""
        same = [(one, self._same_over(one.placements)) for one in entered]
        same = [(one, axes) for one, axes in same if axes]
        # JAX uses the names of the inner function, so only the ends of the paths agree.
        ends = tuple(end for end in (_last_step(path) for path, _ in components) if end)
        named = [(one, axes) for one, axes in same if ends and one.path.endswith(ends)]
        if not named:
            # A State that is carried by itself has no path in it. One with a policy is likelier meant.
            forms = {form for _, form in components}
            fitting = [(one, axes) for one, axes in same if forms.intersection(_forms(one))]
            named = [(one, axes) for one, axes in fitting if one.old.reduce is not None] or fitting
        states = [(one.path, one.old, axes) for one, axes in named]
        return errors.with_type_hint(text, states) if states else None

    def _same_over(self, placements: Sequence[Placement]) -> tuple[AxisName, ...]:
        """The mapped axes over which every instance gets the same state."""
        apart = NO_AXES.union(*(where.axis_names for where in placements))
        return tuple(name for name in self.leaving.axis_names if name not in apart)

    def _placement_at(self, position: int) -> Placement | None:
        k = self.input_at.get(position)
        return None if k is None else self.inputs[k].placement


def _last_step(path: str) -> str:
    return "".join(re.findall(r"\.\w+$|\[[^\]]*\]$", path))


def _forms(one: Entered) -> list[str]:
    """The dtypes and shapes of a state's arrays, as JAX writes them."""
    return [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in leaves_of(one.seen)]


def _whole(one: Entered) -> list[Leaf]:
    pairs = zip(leaves_of(one.old), one.placements, strict=True)
    return [x for x, where in pairs if not where.axis_names]


def _whole_met_part(
    whole: Leaf, part: Leaf, spec: PartitionSpec, sizes: Mapping[AxisName, int]
) -> bool:
    """Whether some axis of `whole` is as long as a split axis of `part` was before the split."""
    for size, names in zip(part.shape, spec.partitions, strict=False):
        if names is None:
            continue
        several = names if isinstance(names, tuple) else (names,)
        parts = 1
        for name in several:
            parts *= sizes[name]
        if parts > 1 and size * parts in whole.shape:
            return True
    return False
