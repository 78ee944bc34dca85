"""The programs that a mapped call has compiled, and what a call must look like to be run by one of them."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import jax
import numpy as np

from .._axes._equations import names_inside, shard_map_equation, shard_map_recorded
from .._axes._summed_twice import check_sums, has_gradients
from .._axes._unsummed import check_summed, has_varying
from .._base import _compat as compat
from .._base._compat import Equation
from .._base._types import Leaf, PyTree, PyTreeDef
from .._resolve._agreement import Traced
from .._write_back import WriteBack
from ._binding import Outside
from ._declared import Declared
from ._donate import DonatingProgram
from ._one_dispatch import OneDispatch, Result
from ._program import Program


# Programs kept for one tree structure. Static leaves can make a new key at every call; the programs whose
# last use is longest ago go first.
_KEPT = 256

Key = TypeVar("Key")
Value = TypeVar("Value")
# Takes the arguments, the inputs among their leaves, and the inputs as they were laid out.
Compiled = Callable[[tuple[PyTree, ...], dict[str, PyTree], Sequence[Leaf], Sequence[Leaf]], Result]


class CompiledEntry:
    """One compiled program, and what a call must look like to be run by it."""

    def __init__(
        self,
        declared: Declared,
        program: Program,
        leaves: Sequence[Leaf],
        treedef: PyTreeDef,
        key: Hashable,
    ) -> None:
        self.program = program
        self.key = key
        self.tokens = _tokens(program, leaves)
        self.inputs = program.arrays
        self.concrete = program.layout.concrete
        self.statics = program.statics.values
        self.same_statics = program.statics.same
        self.changing = program.statics.changing
        self.types = list(map(type, leaves))
        self.treedef = treedef
        # JAX holds trees of different dataclasses for equal, but their hashes differ.
        self.hash = hash(treedef)
        self.context: Any = None
        # The mesh that was set, with its devices, where the call takes that one.
        self.set_mesh: Any = None
        # Whether other processes, if there are any, were found to pass the same.
        self.agreed = False
        # The backward pass of an eager `jax.vjp` may be recorded. No layer of ours goes into its jaxpr.
        self.plain = jax.jit(program, inline=compat.INLINED)
        # A function that runs eagerly may have no program, and that of a `vmap` shows no sums over lanes.
        self.program_checked = not (declared.jit and program.binding.sizes)
        # Functions of the inputs, to look at and to lower. The first is what the calls run.
        self.traces: Any = self.plain
        self.lowers: Any = self.plain
        if donating := declared.donate != "none":
            self.traces = self.lowers = DonatingProgram(program, declared.donate)
        run: Callable[..., Result] = self.lowers if declared.jit else program
        if program.binding.outside is not None:
            run = _brought_out(run, program.binding.outside)
        self.compiled: Compiled = _of_inputs(run)
        self.one_dispatch: OneDispatch | None = None
        if declared.jit and not donating and OneDispatch.fits(program):
            self.traces = self.compiled = self.one_dispatch = OneDispatch(program, treedef)

    def checked_run(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        given: Sequence[Leaf],
        ready: Sequence[Leaf],
    ) -> Result:
        """Run the program, which is checked once before."""
        if not compat.jit_disabled():
            self.check_program(ready)
            return self.compiled(args, kwargs, given, ready)
        # What the function prints and where it stops belong to its run, so that the trace comes after it.
        result = self.compiled(args, kwargs, given, ready)
        with jax.disable_jit(False), suppress(*compat.NEEDS_VALUES):
            self.check_program(ready)
        return result

    def check_program(self, arrays: Sequence[Leaf]) -> None:
        """Refuse, once, gradients that the traced program sums a second time, or not at all.

        JAX remembers the trace, so that the call that follows does not trace again.
        """
        if self.program_checked:
            return
        traced = self._traced_alike(self.traces, arrays)
        self._check(shard_map_equation(traced.jaxpr))

    def lowered(self, arrays: Sequence[Leaf]) -> jax.stages.Lowered:
        """The program, lowered and checked once."""
        if not self.program_checked:
            self._check(shard_map_equation(self.lowers.trace(*arrays).jaxpr))
        lowered: jax.stages.Lowered = self.lowers.lower(*arrays)
        return lowered

    def traced_run(self, given: Sequence[Leaf], recorded: bool) -> tuple[list[Leaf], WriteBack]:
        """Run the program on traced inputs, and check it once.

        Where nothing is recorded (an eager `grad` or `vmap`) the compiled program is transformed. Where a
        jaxpr is, no layer of ours goes into it.
        """
        run = self.program if recorded or not self.program.declared.jit else self.plain
        if self.program_checked:
            return run(*given)
        if recorded:
            outputs, back = run(*given)
            equation = shard_map_recorded(outputs)
        else:
            equation = shard_map_equation(self._traced_alike(self.plain, given).jaxpr)
            outputs, back = run(*given)
        self._check(equation)
        return outputs, back

    def _traced_alike(self, program: Any, arrays: Sequence[Leaf]) -> Traced:
        return self.program.layout.traced_alike(lambda: program.trace(*arrays))

    def _check(self, equation: Equation | None) -> None:
        # What the user's own transformations leave of the program may hold no `shard_map`.
        if equation is not None:
            names = names_inside(equation)
            if has_varying(names):
                check_summed(equation)
            if has_gradients(names):
                check_sums(self.program.declared.name, equation)
        self.program_checked = True


def _of_inputs(run: Callable[..., Result]) -> Compiled:
    def call(
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        given: Sequence[Leaf],
        ready: Sequence[Leaf],
    ) -> Result:
        del args, kwargs, given
        return run(*ready)

    return call


def _brought_out(run: Callable[..., Result], outside: Outside) -> Callable[..., Result]:
    def call(*arrays: Leaf) -> Result:
        outputs, back = run(*arrays)
        return outside(outputs, back.placements), back

    return call


class Cache:
    """Compiled entries by the tree, the types and the mesh of a call, then by its static leaves.

    The first settle which leaves are static.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, dict[tuple[Any, ...], CompiledEntry]] = {}

    def find(self, key: Hashable, leaves: Sequence[Leaf]) -> CompiledEntry | None:
        """The entry for a call with these leaves, if there is one."""
        alike = self._entries.get(key, {})
        # The list is made in one step, because other threads put entries in and take some out meanwhile.
        for known in [*alike.values()][:1]:
            tokens = _tokens(known.program, leaves)
            return None if tokens is None else alike.get(tokens)
        return None

    def keep(self, entry: CompiledEntry) -> None:
        """Keep an entry whose call went through.

        Not before: what is refused while tracing may depend on objects that are no part of the key. And not
        one of a call with which no later call can be compared.
        """
        if entry.program.unhashable or entry.tokens is None:
            return
        alike = self._entries.setdefault(entry.key, {})
        # Other threads do the same meanwhile, so each of these steps is one that cannot fail.
        alike.pop(entry.tokens, None)
        make_room(alike, _KEPT)
        alike[entry.tokens] = entry

    def rivals(self, entry: CompiledEntry) -> list[CompiledEntry]:
        """The entries of calls that differ only in what `_tokens` gives: in static leaves."""
        return [one for one in [*self._entries.get(entry.key, {}).values()] if one is not entry]


def make_room(entries: dict[Key, Value], most: int) -> None:
    """Drop the oldest entries, so that one more makes no more than `most`.

    Other threads may do the same meanwhile, so each step is one that cannot fail.
    """
    if len(entries) >= most:
        for oldest in [*entries][: len(entries) - most + 1]:
            entries.pop(oldest, None)


def _tokens(program: Program, leaves: Sequence[Leaf]) -> tuple[PyTree, ...] | None:
    """What a program depends on besides types: the static leaves, and shapes where the rules say so.

    `None` if it cannot be compared.
    """
    by_shape = program.resolved.by_shape
    shapes = tuple(map(np.shape, program.arrays(leaves))) if by_shape else ()
    tokens = program.statics.tokens_of(leaves)
    return None if tokens is None else (shapes, *tokens)
