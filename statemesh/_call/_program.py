"""Steps 1, 2 and 3 put together for one signature: a pure function over arrays."""

import functools
from collections.abc import Sequence
from operator import is_
from typing import Any

from .._arguments import Arguments
from .._base import _compat as compat
from .._base import errors
from .._base._tokens import Unknowable, may_change, token
from .._base._types import Place
from .._exit import Exit
from .._resolve._agreement import Passed, static_passed, structure_passed
from .._write_back import WriteBack
from ._declared import Declared
from ._packing import Packing, Repacking
from ._pure import Instance


class Program:
    """A mapped call with one tree structure, one set of static leaves and one mesh.

    Calling it with the inputs' arrays gives the outputs and how the result is put together. It is
    pure, and traces the user's function once each time it is itself traced.

    **Arguments:**

    - `declared`: what the author declared.
    - `args`, `kwargs`: the arguments of the first such call. Their arrays are not kept.
    - `leaves`: the leaves of `(args, kwargs)`.
    - `ground`: what the rules found the call to stand on.
    - `traced`: whether the call is being recorded or transformed. Its jaxpr is to be the one that JAX's own
        map leaves, where what comes back as it went in is a result too; but for arguments with states, and
        for what leaves as it came whatever is declared.
    """

    def __init__(
        self,
        declared: Declared,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        ground: Any,
        traced: bool,
    ) -> None:
        self.declared = declared
        rules = declared.rules
        if isinstance(declared.donate, tuple):
            bad = [i for i in declared.donate if not -len(args) <= i < len(args)]
            if bad:
                raise errors.bad_argnums("donate_argnums", bad, len(args))
        packing = Packing(declared.fun, args, kwargs, leaves)
        arguments = packing.arguments
        try:
            placed, self.binding, rules = rules.resolve(
                declared.name, arguments, packing.args, packing.kwargs, packing.leaves, ground
            )
        except errors.StatemeshError:
            # Of no arguments it cannot be said how many lanes they have; that one is missing can.
            self._check_signature(arguments)
            raise
        packing.check(declared.name, placed, self.binding.sizes)
        inputs = packing.inputs(placed)
        self.inputs = sorted(inputs)
        self.given = given = packing.given
        paths = given.paths()
        self.statics_at = [i for i in range(len(leaves)) if i not in inputs]
        self.statics = [leaves[i] for i in self.statics_at]
        # Objects that may have been changed since are compared at every call, by what is in them.
        self.changing = [i for i in self.statics_at if may_change(leaves[i])]
        self.fixed_at = [i for i in self.statics_at if i not in self.changing]
        self.fixed = [leaves[i] for i in self.fixed_at]
        self.tokens = self.tokens_of(leaves)
        self.changing_tokens = self._tokens_at(self.changing, leaves)
        keeps_weak = {
            p
            for unit in given.flat_units()
            if unit.kind is None and not unit.in_module
            for p in unit.positions
        }
        stateful = {
            p for unit in given.flat_units() if unit.kind is not None for p in unit.positions
        }
        self.layout = self.binding.layout(
            declared.name,
            [paths[p] for p in self.inputs],
            [inputs[p] for p in self.inputs],
            [type(leaves[p]) for p in self.inputs],
            [p not in keeps_weak for p in self.inputs],
            [p in stateful for p in self.inputs],
            donating=declared.donate != "none",
        )
        self.repacking = Repacking(packing, placed, {p: k for k, p in enumerate(self.inputs)})
        unpacked = list(enumerate(zip(sorted(placed), self.repacking.inputs, strict=True)))
        in_models = {p for units in arguments.with_states() for u in units for p in u.positions}
        staying = {
            unit.positions[0]
            for unit in arguments.flat_units()
            if unit.kind is None and unit.in_module and unit.positions[0] in placed
            if rules.leaves_as_it_came(placed[unit.positions[0]])
        }
        self.instance = Instance(
            declared.fun,
            arguments,
            [None if i in placed else leaf for i, leaf in enumerate(packing.leaves)],
            [packing.positions.index(i) for i in self.changing],
            sorted(placed),
            self.repacking.places,
            frozenset(
                k
                for k, (position, source) in unpacked
                if source in self.layout.fresh
                or (traced and position not in in_models and position not in staying)
            ),
            frozenset(k for k, (position, _) in unpacked if position in staying),
            Exit(
                declared.name,
                rules,
                self.binding.axis_names,
                arguments.tied,
                declared.donate != "none",
            ),
            self.binding.sizes,
        )
        self.__name__ = self.__qualname__ = declared.name

    def _check_signature(self, given: Arguments) -> None:
        declared, keywords = self.declared, given.names[given.positional :]
        errors.check_signature(declared.fun, declared.name, given.positional, keywords)

    def arrays(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The program's inputs among all leaves."""
        return [leaves[i] for i in self.inputs]

    def tokens_of(self, leaves: Sequence[Any]) -> list[Any]:
        """What the static leaves are compared by.

        **Raises:** `StructureError` for one that can be compared by nothing.
        """
        return self._tokens_at(self.statics_at, leaves)

    def _tokens_at(self, positions: Sequence[int], leaves: Sequence[Any]) -> list[Any]:
        try:
            return [token(leaves[position]) for position in positions]
        except Unknowable as error:
            raise self._unknowable(leaves) from error

    def _unknowable(self, leaves: Sequence[Any]) -> errors.StatemeshError:
        paths, bad = self.given.paths(), []
        for position in self.statics_at:
            try:
                token(leaves[position])
            except Unknowable as error:
                bad.append((paths[position], leaves[position], error.value))
        return errors.unknowable_statics(self.declared.name, bad)

    def same_statics(self, leaves: Sequence[Any]) -> bool:
        """Whether the static leaves are those of this program, and have not been changed."""
        if not all(map(is_, map(leaves.__getitem__, self.fixed_at), self.fixed)):
            return False
        return not self.changing or self._tokens_at(self.changing, leaves) == self.changing_tokens

    @functools.cached_property
    def texts(self) -> dict[int, str]:
        """The static leaves as they are now, by position, for messages."""
        return {i: repr(leaf) for i, leaf in zip(self.statics_at, self.statics, strict=True)}

    def changing_of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The static leaves that may be other objects at each call."""
        return [leaves[position] for position in self.changing]

    def hold(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Let the function have the objects of this call if it is traced again.

        They have the content of those of an earlier call, which their owner may have changed since.

        **Returns:** these objects.
        """
        changing = self.changing_of(leaves)
        for position, leaf in zip(self.instance.changing, changing, strict=True):
            self.instance.template[position] = leaf
        return changing

    def agree(self, leaves: Sequence[Any]) -> None:
        """Refuse arguments that other processes have otherwise, where they all have to have the same."""

        def passed() -> list[Passed]:
            paths = self.given.paths()
            statics = [static_passed(paths[i], leaves[i]) for i in self.statics_at]
            return [structure_passed(self.given.treedef, [*paths.values()]), *statics]

        self.layout.agree(self.arrays(leaves), passed)

    def given_up(self, how: Any, back: WriteBack) -> Sequence[int]:
        """The inputs whose memory `how` gives up: of written states, of all, or of some arguments."""
        if how == "states":
            return sorted(set(back.rewritten))
        if how == "all":
            return range(len(self.inputs))
        # Keyword arguments come after the positional ones, and have no number.
        given = self.given.units[: self.given.positional]
        positions = {p for i in how for unit in given[i] for p in unit.positions}
        return [k for k, p in enumerate(self.inputs) if p in positions]

    def tracer_paths(self, arrays: Sequence[Any]) -> list[str]:
        """Which inputs are being traced."""
        pairs = zip(self.layout.paths, arrays, strict=True)
        return [path for path, x in pairs if compat.is_tracer(x)]

    def __call__(self, *flat_args: Any) -> tuple[list[Any], WriteBack]:
        self.layout.check(flat_args)
        self._check_signature(self.given)
        found: list[WriteBack] = []

        def run(*parts: Any) -> tuple[list[Any], Sequence[Place]]:
            own = self.repacking.split(parts)
            outputs, back = self.instance(own, self.binding.varying())
            outputs, back = self.repacking.join(own, outputs, back)
            found[:] = [back]
            return outputs, back.places

        outputs = self.binding.call(run, self.declared.name, self.layout, flat_args)
        return outputs, found[0]
