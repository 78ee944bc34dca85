"""Steps 1, 2 and 3 put together for one call: a pure function over arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._arguments import Arguments, Call
from .._base import _compat as compat
from .._base import _jaxprs as jaxprs
from .._base import errors
from .._base._specs import Placement
from .._base._types import Leaf, PyTree
from .._resolve._agreement import Passed, static_passed, structure_passed
from .._resolve._inputs import Input
from .._write_back import WriteBack
from ._declared import Declared
from ._packing import Packing, Repacking
from ._per_shard import PerShardInput, PerShardRun
from ._rules import Context, Stacked
from ._statics import Statics, has_unhashable_node, unhashable


class Program:
    """A mapped call with one tree structure, one set of static leaves and one mesh.

    Calling it with the inputs' arrays gives the outputs and how the result is put together. It is
    pure, and traces the user's function once each time it is itself traced.

    **Arguments:**

    - `declared`: what the author declared.
    - `call`: the arguments of the first such call. Their arrays are not kept.
    - `context`: the rules as they stand for the call.
    - `traced`: whether the call is being recorded or transformed. Its jaxpr is then the one that JAX's own
        map leaves: what comes back as it went in is an output too. Arguments with states are excepted, and
        what leaves as it came whatever is declared.
    """

    def __init__(self, declared: Declared, call: Call, context: Context, traced: bool) -> None:
        self.declared = declared
        self.__name__ = self.__qualname__ = declared.name
        _check_argnums(declared.donate, len(call.args))
        packing = Packing(declared.fun, call)
        try:
            self.resolved = context.resolve(declared.name, packing.arguments, packing.call)
        except errors.StatemeshError:
            # A missing argument is a better reason than one that follows from it, such as no lanes.
            self._check_signature(packing.arguments)
            raise
        placements, self.binding = self.resolved.placements, self.resolved.binding
        packing.check(declared.name, placements, self.binding.sizes)
        self.given = packing.given
        inputs = _inputs(packing.given, packing.inputs(placements), call.leaves)
        self.positions = [one.position for one in inputs]
        own = set(self.positions)
        static_at = [i for i in range(len(call.leaves)) if i not in own]
        self.statics = Statics(static_at, call.leaves)
        # Nothing can tell whether a later call has the same of these, so no call runs this program again.
        self.unhashable: list[tuple[str, PyTree]] = []
        if self.statics.tokens is None or has_unhashable_node(packing.arguments.treedef):
            self.unhashable = unhashable(packing.arguments, packing.call)
        donating = declared.donate != "none"
        self.layout = self.binding.layout(declared.name, inputs, donating)
        self.repacking = Repacking(
            packing, placements, {position: k for k, position in enumerate(self.positions)}
        )
        self.run = PerShardRun(
            declared.fun,
            packing.arguments,
            [None if i in placements else leaf for i, leaf in enumerate(packing.call.leaves)],
            [packing.positions.index(i) for i in self.statics.changing],
            self._per_shard_inputs(packing, traced),
            self.resolved.leaving,
            self.binding.sizes,
            donating,
        )

    def _per_shard_inputs(self, packing: Packing, traced: bool) -> list[PerShardInput]:
        arguments, resolved = packing.arguments, self.resolved
        in_models = {p for units in arguments.with_states() for u in units for p in u.positions}
        stays = {
            unit.positions[0]
            for unit in arguments.flat_units()
            if unit.kind is None and unit.in_module and unit.positions[0] in resolved.placements
            if resolved.leaving.stays(resolved.placements[unit.positions[0]])
        }
        return [
            PerShardInput(
                position,
                resolved.placements[position],
                source in self.layout.fresh
                or (traced and position not in in_models and position not in stays),
                position in stays,
            )
            for position, source in zip(
                sorted(resolved.placements), self.repacking.inputs, strict=True
            )
        ]

    def _check_signature(self, given: Arguments) -> None:
        declared, keywords = self.declared, given.names[given.positional :]
        errors.check_signature(declared.fun, declared.name, given.positional, keywords)

    def arrays(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """The program's inputs among all leaves."""
        return [leaves[i] for i in self.positions]

    def hold(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """Let the function have the objects of this call if it is traced again.

        They have the content of those of an earlier call, which their owner may have changed since.

        **Returns:** these objects.
        """
        changing = self.statics.changing_of(leaves)
        self.run.hold(changing)
        return changing

    def agree(self, leaves: Sequence[Leaf]) -> None:
        """Refuse what another process passes differently, where all of them have to pass the same."""

        def passed() -> list[Passed]:
            paths = self.given.paths()
            statics = [static_passed(paths[i], leaves[i]) for i in self.statics.positions]
            return [structure_passed(self.given.treedef, [*paths.values()]), *statics]

        self.layout.agree(self.arrays(leaves), passed)

    def stacked(self, leaves: Sequence[Leaf]) -> tuple[list[Stacked], int | None]:
        """The states that lanes write although nobody declared it, and the number of lanes.

        The function is traced to find them.
        """
        arrays = self.arrays(leaves)
        traced = jax.jit(self).trace(*self.layout.abstract(arrays))
        back: WriteBack = traced.out_info[1]
        read = jaxprs.inputs_read(traced.jaxpr)
        stacked = [
            Stacked(path, [np.shape(arrays[k]) for k in inputs], any(read[k] for k in inputs))
            for path, inputs in back.stacked
        ]
        return stacked, self.binding.count(self.declared.name, self.layout, arrays)

    def given_up(self, how: Any, back: WriteBack) -> Sequence[int]:
        """The inputs whose memory `how` gives up: of written states, of all, or of some arguments."""
        if how == "states":
            return sorted(set(back.rewritten))
        if how == "all":
            return range(len(self.positions))
        # Keyword arguments come after the positional ones, and have no number.
        given = self.given.units[: self.given.positional]
        positions = {p for i in how for unit in given[i] for p in unit.positions}
        return [k for k, p in enumerate(self.positions) if p in positions]

    def tracer_paths(self, arrays: Sequence[Leaf]) -> list[str]:
        """The paths of the inputs that are being traced."""
        pairs = zip(self.layout.inputs, arrays, strict=True)
        return [one.path for one, x in pairs if compat.is_tracer(x)]

    def __call__(self, *flat_args: Leaf) -> tuple[list[Leaf], WriteBack]:
        self.layout.check(flat_args)
        self._check_signature(self.given)
        found: list[WriteBack] = []

        def run(*parts: Leaf) -> tuple[list[Leaf], Sequence[Placement]]:
            own = self.repacking.split(parts)
            outputs, back = self.run(own, self.binding.varying())
            outputs, back = self.repacking.join(own, outputs, back)
            found[:] = [back]
            return outputs, back.placements

        outputs = self.binding.call(run, self.declared.name, self.layout, flat_args)
        return outputs, found[0]


def _check_argnums(donate: Any, count: int) -> None:
    if isinstance(donate, tuple) and (bad := [i for i in donate if not -count <= i < count]):
        raise errors.bad_argnums("donate_argnums", bad, count)


def _inputs(
    arguments: Arguments, placements: Mapping[int, Placement], leaves: Sequence[Leaf]
) -> list[Input]:
    """A record of each input, in the order of their positions."""
    return [
        Input(
            position,
            unit.path,
            placements[position],
            type(leaves[position]),
            # An array outside states and Modules keeps its weak type, as under JAX's own maps.
            strong=unit.kind is not None or unit.in_module,
            stateful=unit.kind is not None,
        )
        for unit in arguments.flat_units()
        for position in unit.positions
        if position in placements
    ]
