"""The five steps of a call: partition, resolve, call, leave, write back.

A call finds the program that was compiled for its like (steps 1 and 2, done once), lays its arrays
out, runs the program (steps 3 and 4 were traced into it) and writes back.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from .._arguments import Arguments, Call, check_arity
from .._base import _compat as compat
from .._base import _frames as frames
from .._base import errors
from .._base._arrays import is_shaped
from .._base._compat import tree_util
from .._base._types import Leaf, PyTree, PyTreeDef
from .._resolve._lanes import OtherShapes
from .._resolve._placement import check_valued, is_deleted
from . import _watch as watch
from ._cache import Cache, CompiledEntry
from ._declared import Declared
from ._one_dispatch import LikeBefore, OneDispatch, Refused
from ._program import Program
from ._rules import Context
from ._stages import Lowered


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
        # What follows runs at every call, besides the compiled program's own dispatch: each line is
        # a check that cannot be left out, in the quickest form there is.
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
        leaves, treedef = _flatten((args, kwargs))
        last = self._last
        if (
            last is None
            or last.types != list(map(type, leaves))
            or last.treedef != treedef
            or last.hash != hash(treedef)
            or last.context is not _context()
            or _trace(()) is not compat.TOP_LEVEL
            or (last.set_mesh is not None and last.set_mesh is not _set_mesh())
            or (last.statics and not last.same_statics(leaves))
        ):
            return self._first(Call(args, kwargs, leaves), treedef)
        given = last.inputs(leaves) if last.statics else leaves
        held = last.program.hold(leaves) if last.changing else ()
        try:
            ready, shown = last.concrete(given)
            outputs, back = last.compiled(args, kwargs, given, ready)
        except OtherShapes:
            return self._first(Call(args, kwargs, leaves), treedef)
        except (RuntimeError, ValueError):
            # Looking for them before the run would cost more than all of the checks above.
            last.program.layout.check_alive(given)
            raise
        if shown is not given:
            shown = last.program.layout.returned(given, shown, back.forwarded)
        elif last.one_dispatch is not None and last.set_mesh is None:
            self._again = last.one_dispatch.again(args, kwargs, refused=again)
        return back.filled(outputs, shown, held)

    def _first(self, call: Call, treedef: PyTreeDef) -> Any:
        """A call unlike the last one: the first of its kind, or one that is traced."""
        self._check_valued(call)
        leaves, rules = call.leaves, self.declared.rules
        top = _trace(()) is compat.TOP_LEVEL
        eager = (top or compat.runs_at_once()) and not any(map(compat.is_tracer, leaves))
        entry = self._entry(call, treedef, traced=not eager)
        program = entry.program
        held = program.hold(leaves)
        other_mesh = compat.context_mesh() is not None and rules.has_own_mesh
        around = program.binding.context(traced=not eager) if other_mesh else nullcontext()
        inputs = program.arrays(leaves)
        recorded = not eager and compat.under_jit()
        if program.unhashable and not recorded:
            self._warn(program)
        if not (recorded or entry.agreed):
            program.agree(leaves)
            entry.agreed = True
        if eager:
            ready, shown = entry.concrete(inputs)
            with around:
                outputs, back = entry.checked_run(call.args, call.kwargs, inputs, ready)
            if rules.cacheable and top and not other_mesh and not program.unhashable:
                self._last = entry
                entry.set_mesh = _set_mesh() if rules.takes_set_mesh else None
            self._cache.keep(entry)
            shown = program.layout.returned(inputs, shown, back.forwarded)
            return back.filled(outputs, shown, held)
        rules.check_traced(self.declared.name, leaves)
        given: Sequence[Leaf] = program.layout.traced(inputs, recorded)
        try:
            with around:
                outputs, back = entry.traced_run(given, recorded)
        except jax.errors.UnexpectedTracerError as error:
            raise errors.old_tracer(self.declared.name, program.tracer_paths(given)) from error
        self._cache.keep(entry)
        outputs = watch.seen(program, call, outputs, back)
        if not recorded:
            given = program.layout.returned(inputs, given, back.forwarded)
        return back.filled(outputs, given, held)

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
            text = errors.retraced(self.declared.name, new)
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
        program.hold(leaves)
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
        program.hold(call.leaves)
        given = program.arrays(call.leaves)
        inputs = program.layout.abstract(given)
        around = functools.partial(self._around, program)
        with around():
            entry.check_program(inputs)
            traced: jax.stages.Traced = entry.traces.trace(*inputs)
        self._cache.keep(entry)
        moved, rivals = program.layout.to_move(given), self._cache.rivals(entry)
        return Inspected(call, entry, traced, moved, rivals, around)

    def _around(self, program: Program) -> AbstractContextManager[Any]:
        """The context of a call that is not traced: its own mesh, where another one is set."""
        other_mesh = compat.context_mesh() is not None and self.declared.rules.has_own_mesh
        return program.binding.context(traced=False) if other_mesh else nullcontext()

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
        placed: tuple[Any, ...] = treedef.unflatten(leaves)[0]
        return placed

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
