"""The five steps of a call: partition, resolve, call, leave, write back.

A call finds the program that was compiled for its like (steps 1 and 2, done once), lays its arrays
out, runs the program (steps 3 and 4 were traced into it) and writes back.
"""

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from .._axes._differing import check_summed, check_sums, has_gradients, has_varying
from .._base import _errors as errors
from .._base._checks import is_shaped
from .._base._errors import (
    _HASHABLE,
    _typed,
    error_listing,
    listed,
)
from .._base._types import Leaf, PyTree, PyTreeDef
from .._jax import _compat as compat
from .._jax import _frames as frames
from .._jax._compat import Equation, tree_util
from .._jax._dataflow import names_inside, shard_map_equation, shard_map_recorded
from ._agreement import Traced
from ._arguments import Arguments, Call, check_arity
from ._lanes import OtherShapes
from ._placement import check_valued, is_deleted
from ._program import (
    DonatingProgram,
    LikeBefore,
    Lowered,
    OneDispatch,
    Program,
    Refused,
    Result,
)
from ._rules import Context, Declared, Outside
from ._write_back import WriteBack


# Looks at a mapped call: its program, its arguments, what that made, and how the result is put together. It
# returns what is to stand for what the call made.
Look: TypeAlias = Callable[[Program, Call, list[Leaf], WriteBack], list[Leaf]]

_watching: contextvars.ContextVar[Look | None] = contextvars.ContextVar("watching", default=None)


@contextlib.contextmanager
def watching(look: Look) -> Iterator[None]:
    """Look at each mapped call that is traced while the context is open.

    The call is over afterwards: who keeps its arrays keeps tracers of a trace that ends.
    """
    token = _watching.set(look)
    try:
        yield
    finally:
        _watching.reset(token)


def seen(program: Program, call: Call, outputs: list[Leaf], back: WriteBack) -> list[Leaf]:
    """What a mapped call has made, as it goes on if anyone is watching."""
    look = _watching.get()
    return outputs if look is None else look(program, call, outputs, back)


# Programs kept for one tree structure. Static leaves can make a new key at every call; the programs whose
# last use is longest ago go first.
_KEPT = 256

Key = TypeVar("Key")
Value = TypeVar("Value")
# Takes the inputs; returns them as the program takes them, and as they come back when they are not written.
LayOut = Callable[[Sequence[Leaf]], tuple[Sequence[Leaf], Sequence[Leaf]]]
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


# Bound once, which saves looking up an attribute at every call.
_flatten = tree_util.default_registry.flatten
_context = jax.sharding.get_abstract_mesh
_set_mesh = jax.sharding.get_mesh
_trace = compat.current_trace


@dataclasses.dataclass(frozen=True)
class Inspected:
    """A call that was traced and not run.

    **Attributes:**

    - `call`: its arguments.
    - `entry`: the entry with which it would run.
    - `traced`: its program.
    - `moved`: the inputs that it would lay out anew before it runs.
    - `rivals`: the entries of calls that differ from it only in static leaves.
    - `around`: makes the context in which it would be compiled.
    """

    call: Call
    entry: CompiledEntry
    traced: jax.stages.Traced
    moved: Sequence[int]
    rivals: Sequence[CompiledEntry]
    around: Callable[[], AbstractContextManager[Any]]


class Pipeline:
    """A mapped call: what was declared, and the programs that were compiled for it."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self._cache = Cache()
        # The entry of the last eager call, tried first.
        self._last: CompiledEntry | None = None
        # The program of the last calls, if the next one may be one dispatch of JAX's.
        self._again: OneDispatch | None = None
        # The paths that a warning has named.
        self._warned: set[str] = set()

    def call(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Any:
        """Run the five steps.

        What follows runs at every call, besides the compiled program's own dispatch: each line is a check
        that cannot be left out, in the quickest form there is.
        """
        # A shortcut through all five: JAX itself finds out whether this call is like the last ones.
        again = self._again
        if again is not None:
            try:
                outputs, back = again.jitted(args, kwargs, LikeBefore())
            except Refused:
                self._again = None
            except (RuntimeError, ValueError):
                again.check_alive(_flatten((args, kwargs))[0])
                raise
            else:
                given = tree_util.tree_leaves((args, kwargs)) if back.forwarded else ()
                return back.filled(outputs, given)

        # 1. Partition. Which leaves are of states, which other arrays and which static follows from the tree
        # and the types, so that a call like the last one needs no more than these.
        leaves, treedef = _flatten((args, kwargs))

        # 2. Resolve: find the program in which each leaf has its placement, and lay the arrays out.
        entry = self._last
        lay_out: LayOut | None = None
        run: Compiled | None = None
        if (
            entry is None
            or entry.types != list(map(type, leaves))
            or entry.treedef != treedef
            or entry.hash != hash(treedef)
            or entry.context is not _context()
            or _trace(()) is not compat.TOP_LEVEL
            or (entry.set_mesh is not None and entry.set_mesh is not _set_mesh())
            or (entry.statics and not entry.same_statics(leaves))
        ):
            call = Call(args, kwargs, leaves)
            self._check_valued(call)
            top = _trace(()) is compat.TOP_LEVEL
            if not (top or compat.runs_at_once()) or any(map(compat.is_tracer, leaves)):
                return self._call_traced(call, treedef)
            entry, lay_out, run = self._first(call, treedef, top)
        given = entry.inputs(leaves) if entry.statics else leaves
        try:
            ready, shown = (lay_out or entry.concrete)(given)
            # 3. Call the function on every shard, and 4. let what it wrote leave: both are in the program.
            outputs, back = (run or entry.compiled)(args, kwargs, given, ready)
        except OtherShapes:
            if run is not None:  # The program was found for these shapes.
                raise
            self._last = None
            return self.call(args, kwargs)
        except (RuntimeError, ValueError):
            # Looking for them before the run would cost more than all of the checks above.
            entry.program.layout.check_alive(given)
            raise

        # 5. Write back.
        if (
            shown is given
            and entry is self._last
            and entry.one_dispatch is not None
            and entry.set_mesh is None
        ):
            self._again = entry.one_dispatch.again(args, kwargs, given, (outputs, back), again)
        result = entry.program.write_back(given, shown, outputs, back)
        if run is not None and entry.program.unhashable:
            back.forget()
        return result

    def _first(
        self, call: Call, treedef: PyTreeDef, top: bool
    ) -> tuple[CompiledEntry, LayOut, Compiled]:
        """The entry for a call unlike the last one, and how it is laid out and run this time.

        **Arguments:**

        - `top`: whether nothing is being traced. Else the call runs at once in spite of a trace around it.
        """
        entry = self._entry(call, treedef)
        program, rules = entry.program, self.declared.rules
        other_mesh = self._other_mesh
        if program.unhashable:
            self._warn(program)
        self._agree(entry, call)

        def lay_out(given: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
            with self._around(program):
                return entry.concrete(given)

        def run(
            args: tuple[PyTree, ...],
            kwargs: dict[str, PyTree],
            given: Sequence[Leaf],
            ready: Sequence[Leaf],
        ) -> Result:
            with self._around(program):
                result = entry.checked_run(args, kwargs, given, ready)
            if rules.cacheable and top and not other_mesh and not program.unhashable:
                self._last = entry
                entry.set_mesh = _set_mesh() if rules.takes_set_mesh else None
            self._cache.keep(entry)
            return result

        return entry, lay_out, run

    def _call_traced(self, call: Call, treedef: PyTreeDef) -> Any:
        """The same five steps where arguments are traced, or the call itself is."""
        name, recorded = self.declared.name, compat.under_jit()
        entry = self._entry(call, treedef, traced=True)
        program = entry.program
        if not recorded:
            if program.unhashable:
                self._warn(program)
            self._agree(entry, call)
        self.declared.rules.check_traced(name, call.leaves)
        inputs = program.arrays(call.leaves)
        given = program.layout.traced(inputs, recorded)
        try:
            with self._around(program, traced=True):
                outputs, back = entry.traced_run(given, recorded)
        except jax.errors.UnexpectedTracerError as error:
            raise _old_tracer(name, program.tracer_paths(given)) from error
        self._cache.keep(entry)
        outputs = seen(program, call, outputs, back)
        # What is recorded goes into a jaxpr, which lays out nothing.
        return program.write_back(given if recorded else inputs, given, outputs, back)

    @property
    def _other_mesh(self) -> bool:
        """Whether another mesh is set than the one that calls run on."""
        return compat.context_mesh() is not None and self.declared.rules.has_own_mesh

    def _around(self, program: Program, traced: bool = False) -> AbstractContextManager[Any]:
        """The context of a call: its own mesh, where another one is set."""
        return program.binding.context(traced) if self._other_mesh else nullcontext()

    def _agree(self, entry: CompiledEntry, call: Call) -> None:
        """Refuse, once, what another process passes differently."""
        if not entry.agreed:
            entry.program.agree(call.leaves)
            entry.agreed = True

    def _check_valued(self, call: Call) -> None:
        """Refuse what cannot be computed with: shapes without values, arrays whose memory was given up."""
        if any(isinstance(x, jax.ShapeDtypeStruct) or is_deleted(x) for x in call.leaves):
            paths = self._paths(call)
            check_valued(self.declared.name, [(paths[k], x) for k, x in enumerate(call.leaves)])

    def _warn(self, program: Program) -> None:
        """Say once for each path why every call is traced. What is recorded is traced once anyway."""
        new = [(path, value) for path, value in program.unhashable if path not in self._warned]
        if new:
            self._warned.update(path for path, _ in new)
            text = _retraced(self.declared.name, new)
            warnings.warn(text, errors.RetracedWarning, stacklevel=frames.stacklevel())

    def _paths(self, call: Call) -> dict[int, str]:
        return Arguments(self.declared.fun, call.args, call.kwargs).paths()

    def _entry(self, call: Call, treedef: PyTreeDef, traced: bool = False) -> CompiledEntry:
        """The entry for a call: one that is there, or a new one."""
        declared, rules = self.declared, self.declared.rules
        check_arity(declared.name, rules.what, rules.entries_in, len(call.args))
        context = rules.context(call, traced)
        mesh = jax.sharding.get_abstract_mesh()
        key = (treedef, tuple(map(type, call.leaves)), mesh, traced, context.key)
        entry = self._cache.find(key, call.leaves)
        if entry is None:
            program = self._program(call, context, traced)
            entry = CompiledEntry(declared, program, call.leaves, treedef, key)
        entry.context = mesh
        return entry

    def _program(self, call: Call, context: Context, traced: bool) -> Program:
        program = Program(self.declared, call, context, traced)
        if not context.looks_ahead:
            return program
        # The function is traced once beforehand, because its rules depend on what it writes.
        other = context.after(*program.stacked(call.leaves))
        return program if other is None else Program(self.declared, call, other, traced)

    def lower(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        complete: Callable[[tuple[PyTree, ...]], tuple[PyTree, ...]],
    ) -> Lowered:
        """The call of these arguments, or of others with their shapes and dtypes, lowered."""
        args, kwargs = jax.tree.map(_described, (complete(args), kwargs))
        leaves, treedef = tree_util.tree_flatten((args, kwargs))
        entry = self._entry(Call(args, kwargs, leaves), treedef)
        program = entry.program
        inputs = program.layout.abstract(program.arrays(leaves))
        return Lowered(entry.lowered(inputs), program, treedef, complete)

    def inspect(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Inspected:
        """The call of these arguments, traced as the call itself would trace it.

        What it would compile is kept: the call that follows finds it.
        """
        leaves, treedef = tree_util.tree_flatten((args, kwargs))
        call = Call(args, kwargs, leaves)
        if gone := [k for k, x in enumerate(leaves) if is_deleted(x)]:
            paths = self._paths(call)
            check_valued(self.declared.name, [(paths[k], leaves[k]) for k in gone])
        shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        if shapes or not self.declared.rules.has_devices(leaves):
            return self._of_shapes._inspected(call, treedef)
        return self._inspected(call, treedef)

    def _inspected(self, call: Call, treedef: PyTreeDef) -> Inspected:
        entry = self._entry(call, treedef)
        program = entry.program
        given = program.arrays(call.leaves)
        inputs = program.layout.abstract(given)
        around = functools.partial(self._around, program)
        with around():
            entry.check_program(inputs)
            traced: jax.stages.Traced = entry.traces.trace(*inputs)
        self._cache.keep(entry)
        moved, rivals = program.layout.to_move(given), self._cache.rivals(entry)
        return Inspected(call, entry, traced, moved, rivals, around)

    @functools.cached_property
    def _of_shapes(self) -> "Pipeline":
        """The same call where only shapes are known."""
        return Pipeline(dataclasses.replace(self.declared, rules=self.declared.rules.of_shapes()))

    def place(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> tuple[PyTree, ...]:
        """The arguments, laid out as the call wants them."""
        leaves, treedef = tree_util.tree_flatten((args, kwargs))
        call = Call(args, kwargs, leaves)
        self._check_valued(call)
        if traced := [k for k, x in enumerate(leaves) if compat.is_tracer(x)]:
            paths = self._paths(call)
            raise errors.place_traced(f"{self.declared.name}.place", [paths[k] for k in traced])
        program = self._entry(call, treedef).program
        given = program.arrays(leaves)
        ready, shown = program.layout.concrete(given)
        if program.binding.outside is not None:
            ready = shown
        moved = [k for k, x in enumerate(given) if shown[k] is not x]
        ready = program.layout.returned(given, ready, moved)
        for position, x in zip(program.positions, ready, strict=True):
            leaves[position] = x
        return treedef.unflatten(leaves)[0]

    @functools.cached_property
    def on_one_device(self) -> "Pipeline":
        """The same call on a mesh of one device, which keeps what it has compiled too."""
        rules = self.declared.rules.on_one_device()
        return Pipeline(dataclasses.replace(self.declared, rules=rules, donate="none"))


def _described(leaf: Leaf) -> Any:
    """A leaf as a `jax.ShapeDtypeStruct`, if it has no more than a shape and a dtype."""
    if is_shaped(leaf) or isinstance(leaf, type):
        return leaf
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _retraced(name: str, bad: Sequence[tuple[str, object]]) -> str:
    return listed(
        f"{name}: these arguments are not arrays and cannot be hashed, so a change in them would go unseen. "
        "Each call traces and compiles the function anew",
        _typed(bad),
        _HASHABLE + "pass the values that the function uses as arrays.",
    )


def _old_tracer(name: str, paths: Sequence[str]) -> Exception:
    return error_listing(
        jax.errors.UnexpectedTracerError,
        f"{name}: a traced value outlived its trace. These arguments are traced",
        paths,
        "Return values from the traced function instead of keeping them: a model that is written inside "
        "`jax.jit` or `jax.grad` leaves it as a result.",
    )
