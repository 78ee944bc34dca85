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
from operator import is_
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from .._axes._differing import check_gradients
from .._base import _errors as errors
from .._base._checks import is_shaped
from .._base._errors import error_listing, listed
from .._base._types import Leaf, PyTree, Sharding
from .._jax import _compat as compat
from .._jax import _frames as frames
from .._jax import _jaxprs as jaxprs
from .._jax._compat import Equation, tree_util
from .._jax._dataflow import shard_map_equation, shard_map_recorded
from ._arguments import Call, arity, tokens_at
from ._lanes import OtherShapes
from ._placement import check_valued, is_deleted, place_traced
from ._program import (
    ANY_CALL,
    MAKE_HASHABLE,
    DonatingProgram,
    LikeBefore,
    Lowered,
    Program,
    Refused,
    Result,
    typed_items,
)
from ._rules import Declared
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


# Programs kept for one tree structure. Static leaves can make a new key at every call; the programs whose
# last use is longest ago go first.
_KEPT = 256

Key = TypeVar("Key")
Value = TypeVar("Value")

# So often a call like the last ones may be refused before we stop asking. JAX forgets programs when it is
# told to, and when it has very many of them.
_REFUSALS = 3


class CompiledEntry:
    """A program as calls run it: it is compiled and checked once, and knows which calls it fits.

    Where all leaves are arrays, `jax.jit` takes the arguments of the call as they are, as trees (`by_trees`).
    It flattens them, compares their structure, shapes, dtypes and placements with those of earlier calls, and
    runs what it compiled, all in C++.

    **Arguments:**

    - `program`: the program.
    - `call`: the arguments of the first such call.
    - `key`: what the program depends on besides static leaves.
    """

    def __init__(self, program: Program, call: Call, key: Hashable) -> None:
        declared = program.declared
        self.program = program
        self.key = key
        self.tokens = _tokens(program, call.leaves)
        self.inputs = program.arrays
        self.concrete = program.layout.concrete
        self.statics = program.statics.values
        self.same_statics = program.statics.same
        self.types = list(map(type, call.leaves))
        self.treedef = call.treedef
        # JAX holds trees of different dataclasses for equal, but their hashes differ.
        self.hash = hash(call.treedef)
        self.context: Any = None
        # The mesh that was set, with its devices, where the call takes that one.
        self.set_mesh: Any = None
        # Whether other processes, if there are any, were found to pass the same.
        self.agreed = False
        # The backward pass of an eager `jax.vjp` may be recorded. No layer of ours goes into its jaxpr.
        self.plain = jax.jit(program, inline=compat.INLINED)
        # A function that runs eagerly may have no program, and that of a `vmap` shows no sums over lanes.
        self.checked = not (declared.jit and program.binding.sizes)
        donating = declared.donate != "none"
        # What is lowered, and what runs: functions of the inputs.
        self.jitted: Any = DonatingProgram(program) if donating else self.plain
        self.runs: Any = self.jitted if declared.jit else program
        self.by_trees: Any = program.by_trees() if declared.jit and not donating else None
        self.outside = program.binding.outside
        self._refusals = 0
        self._calls_back: bool | None = None

    def run(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        arrays: Sequence[Leaf],
        ready: Sequence[Leaf],
    ) -> Result:
        """Run the program, and compile it if need be.

        **Arguments:**

        - `arrays`: the inputs among the leaves of `(args, kwargs)`.
        - `ready`: the same, laid out.
        """
        result: Result
        if self.by_trees is None:
            result = self.runs(*ready)
            if self.outside is None:
                return result
            outputs, back = result
            return self.outside(outputs, back.placements), back
        if ready is not arrays:
            # To rebuild a model takes longer than to look at its leaves, and most often only the data moved.
            trees, stop = [], 0
            args_def, kwargs_def = self.treedef.children()
            structures = [*args_def.children(), kwargs_def]
            for tree, structure in zip((*args, kwargs), structures, strict=True):
                start, stop = stop, stop + structure.num_leaves
                moved = ready[start:stop]
                stays = all(map(is_, moved, arrays[start:stop]))
                trees.append(tree if stays else structure.unflatten(moved))
            *args_laid_out, kwargs = trees
            args = tuple(args_laid_out)
        result = self.by_trees(args, kwargs, ANY_CALL)
        return result

    def checked_run(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        arrays: Sequence[Leaf],
        ready: Sequence[Leaf],
    ) -> Result:
        """Run the program, which is checked once before."""
        if not compat.jit_disabled():
            self.check_program(ready)
            return self.run(args, kwargs, arrays, ready)
        # What the function prints and where it stops belong to its run, so that the trace comes after it.
        result = self.run(args, kwargs, arrays, ready)
        with jax.disable_jit(False), suppress(*compat.NEEDS_VALUES):
            self.check_program(ready)
        return result

    def traced_run(self, inputs: Sequence[Leaf], recorded: bool) -> Result:
        """Run the program on traced inputs, and check it once.

        Where nothing is recorded (an eager `grad` or `vmap`) the compiled program is transformed. Where a
        jaxpr is, no layer of ours goes into it.
        """
        if not (self.checked or recorded):
            traced = self.program.layout.traced_alike(lambda: self.plain.trace(*inputs))
            self._check(shard_map_equation(traced.jaxpr))
        run = self.program if recorded or not self.program.declared.jit else self.plain
        outputs, back = run(*inputs)
        if not self.checked:
            self._check(shard_map_recorded(outputs))
        return outputs, back

    def traced(self, inputs: Sequence[Leaf]) -> jax.stages.Traced:
        """The program of these inputs, which the call that follows finds."""
        traced: jax.stages.Traced
        if self.by_trees is None:
            traced = self.jitted.trace(*inputs)
        else:
            traced = self.by_trees.trace(*self.treedef.unflatten(inputs), ANY_CALL)
        return traced

    def lowered(self, inputs: Sequence[Leaf]) -> jax.stages.Lowered:
        """The program, lowered and checked once."""
        if not self.checked:
            self._check(shard_map_equation(self.jitted.trace(*inputs).jaxpr))
        lowered: jax.stages.Lowered = self.jitted.lower(*inputs)
        return lowered

    def check_program(self, inputs: Sequence[Leaf]) -> None:
        """Refuse, once, gradients that the traced program sums a second time, or not at all.

        JAX remembers the trace, so that the call that follows does not trace again.
        """
        if not self.checked:
            traced = self.program.layout.traced_alike(lambda: self.traced(inputs))
            self._check(shard_map_equation(traced.jaxpr))

    def _check(self, equation: Equation | None) -> None:
        # What the user's own transformations leave of the program may hold no `shard_map`.
        if equation is not None:
            check_gradients(self.program.declared.name, equation)
        self.checked = True

    def is_quick(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        arrays: Sequence[Leaf],
        result: Result,
        refused: bool,
    ) -> bool:
        """Whether JAX alone is to run the next call, after one in which nothing had to be moved.

        **Arguments:**

        - `args`, `kwargs`, `arrays`: of that call, and their leaves.
        - `result`: what it gave.
        - `refused`: whether JAX was to run it, and refused.
        """
        if compat.jit_disabled():
            return False
        self._refusals += refused
        if self._calls_back is None:
            # A callback of the user's, which may run on the calling thread, may trace functions of its own.
            equations = jaxprs.equations(self.by_trees.trace(args, kwargs, ANY_CALL).jaxpr)
            self._calls_back = any(map(jaxprs.calls_back, equations))
        if self._refusals >= _REFUSALS or self._calls_back:
            return False
        # A kind of call that is refused once takes a slower way through JAX from then on. So we wait until
        # results that are fed back are laid out under the same name: on Explicit axes `P()` comes back as
        # `P(None, None)`.
        outputs, back = result
        return _layouts([outputs[k] for k, _ in back.written]) <= _layouts(arrays)


def _layouts(arrays: Sequence[Leaf]) -> set[tuple[int, Sharding]]:
    return {(x.ndim, x.sharding) for x in arrays if isinstance(x, jax.Array)}


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
    by_shape = program.rules.by_shape
    shapes = tuple(map(np.shape, program.arrays(leaves))) if by_shape else ()
    tokens = tokens_at(program.statics.positions, leaves)
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
        # By the tree, the types and the mesh of a call, which settle the static leaves; then by these.
        self._entries: dict[Hashable, dict[tuple[PyTree, ...], CompiledEntry]] = {}
        # The entry of the last eager call, tried first.
        self._last: CompiledEntry | None = None
        # The same, if `jax.jit` alone may run the next call.
        self._quick: CompiledEntry | None = None
        # The paths that a warning has named.
        self._warned: set[str] = set()

    def call(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Any:
        """Run the five steps.

        What follows runs at every call, besides the compiled program's own dispatch: each line is a check
        that cannot be left out, in the quickest form there is.
        """
        # A shortcut through all five: `jax.jit` itself finds out whether this call is like the last ones.
        quick = self._quick
        if quick is not None:
            try:
                outputs, back = quick.by_trees(args, kwargs, LikeBefore())
            except Refused:
                self._quick = None
            except (RuntimeError, ValueError):
                quick.program.layout.check_alive(_flatten((args, kwargs))[0])
                raise
            else:
                inputs = tree_util.tree_leaves((args, kwargs)) if back.forwarded else ()
                return back.filled(outputs, inputs)

        # 1. Partition. Which leaves are of states, which other arrays and which static follows from the tree
        # and the types, so that a call like the last one needs no more than these.
        leaves, treedef = _flatten((args, kwargs))

        # 2. Resolve: find the program in which each leaf has its placement, and lay the arrays out.
        entry = self._last
        is_new = (
            entry is None
            or entry.types != list(map(type, leaves))
            or entry.treedef != treedef
            or entry.hash != hash(treedef)
            or entry.context is not _context()
            or _trace(()) is not compat.TOP_LEVEL
            or (entry.set_mesh is not None and entry.set_mesh is not _set_mesh())
            or (entry.statics and not entry.same_statics(leaves))
        )
        if entry is None or is_new:
            call = Call(self.declared.fun, args, kwargs, (leaves, treedef))
            self._check_valued(call)
            at_once = _trace(()) is compat.TOP_LEVEL or compat.runs_at_once()
            traced = not at_once or any(map(compat.is_tracer, leaves))
            entry = self._entry(call, traced)
            if not (traced and compat.under_jit()):
                self._warn_and_agree(entry, call)
            if traced:
                return self._call_traced(entry, call)
        arrays = entry.inputs(leaves) if entry.statics else leaves
        try:
            if is_new:
                with self._around(entry.program):
                    ready, shown = entry.concrete(arrays)
                    outputs, back = entry.checked_run(args, kwargs, arrays, ready)
                self._keep(entry)
            else:
                ready, shown = entry.concrete(arrays)
                # 3. Call the function on every shard, and 4. let what it wrote leave: the program does both.
                outputs, back = entry.run(args, kwargs, arrays, ready)
        except OtherShapes:
            if is_new:  # The program was found for these shapes.
                raise
            self._last = None
            return self.call(args, kwargs)
        except (RuntimeError, ValueError):
            # Looking for them before the run would cost more than all of the checks above.
            entry.program.layout.check_alive(arrays)
            raise

        # 5. Write back.
        if (
            shown is arrays
            and entry is self._last
            and entry.by_trees is not None
            and entry.set_mesh is None
        ):
            is_quick = entry.is_quick(args, kwargs, arrays, (outputs, back), quick is entry)
            self._quick = entry if is_quick else None
        result = entry.program.write_back(arrays, shown, outputs, back)
        if is_new and entry.program.unhashable:
            back.forget()
        return result

    def _call_traced(self, entry: CompiledEntry, call: Call) -> Any:
        """Steps 2 to 5 where arguments are traced, or the call itself is."""
        name, program, recorded = self.declared.name, entry.program, compat.under_jit()
        self.declared.rules.check_traced(name, call.leaves)
        arrays = program.arrays(call.leaves)
        ready = program.layout.traced(arrays, recorded)
        try:
            with self._around(program, traced=True):
                outputs, back = entry.traced_run(ready, recorded)
        except jax.errors.UnexpectedTracerError as error:
            raise error_listing(
                jax.errors.UnexpectedTracerError,
                f"{name}: a traced value outlived its trace. These arguments are traced",
                program.tracer_paths(ready),
                "Return values from the traced function instead of keeping them: a model that is written "
                "inside `jax.jit` or `jax.grad` leaves it as a result.",
            ) from error
        self._remember(entry)
        look = _watching.get()
        if look is not None:
            outputs = look(program, call, outputs, back)
        # What is recorded goes into a jaxpr, which lays out nothing.
        return program.write_back(ready if recorded else arrays, ready, outputs, back)

    def _entry(self, call: Call, traced: bool = False) -> CompiledEntry:
        """The entry for a call: one that is there, or a new one."""
        declared, rules = self.declared, self.declared.rules
        entries, positional = rules.entries_in, call.positional
        if isinstance(entries, tuple | list) and len(entries) != positional:
            raise arity(declared.name, rules.what, len(entries), positional)
        rules = rules.for_call(call, traced)
        mesh = jax.sharding.get_abstract_mesh()
        key = (call.treedef, tuple(map(type, call.leaves)), mesh, traced, rules.key)
        alike = self._entries.get(key, {})
        entry: CompiledEntry | None = None
        # The list is made in one step, because other threads put entries in and take some out meanwhile.
        for known in [*alike.values()][:1]:
            tokens = _tokens(known.program, call.leaves)
            entry = None if tokens is None else alike.get(tokens)
        if entry is None:
            program = Program(declared, call, rules, traced)
            # With `looks_ahead` the function is traced once beforehand: its rules depend on what it writes.
            if rules.looks_ahead and (fed := program.fed_to_lanes(call.leaves)):
                program = Program(declared, call, rules.after(fed), traced)
            entry = CompiledEntry(program, call, key)
        entry.context = mesh
        return entry

    def _keep(self, entry: CompiledEntry) -> None:
        """Keep an entry whose call went through, and try it first at the next call if that may be like it."""
        rules = self.declared.rules
        may_be_last = rules.cacheable and not entry.program.unhashable and not self._other_mesh
        if may_be_last and _trace(()) is compat.TOP_LEVEL:
            self._last = entry
            entry.set_mesh = _set_mesh() if rules.takes_set_mesh else None
        self._remember(entry)

    def _remember(self, entry: CompiledEntry) -> None:
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

    @property
    def _other_mesh(self) -> bool:
        """Whether another mesh is set than the one that calls run on."""
        return compat.context_mesh() is not None and self.declared.rules.has_own_mesh

    def _around(self, program: Program, traced: bool = False) -> AbstractContextManager[Any]:
        """The context of a call: its own mesh, where another one is set."""
        return program.binding.context(traced) if self._other_mesh else nullcontext()

    def _check_valued(self, call: Call) -> None:
        """Refuse what cannot be computed with: shapes without values, arrays whose memory was given up."""
        if any(isinstance(x, jax.ShapeDtypeStruct) or is_deleted(x) for x in call.leaves):
            paths = call.paths()
            check_valued(self.declared.name, [(paths[k], x) for k, x in enumerate(call.leaves)])

    def _warn_and_agree(self, entry: CompiledEntry, call: Call) -> None:
        """Say, once for each path, why every call is traced: what is recorded is traced once anyway.

        And refuse, once, what another process passes differently.
        """
        unhashable = entry.program.unhashable
        if new := [(path, value) for path, value in unhashable if path not in self._warned]:
            self._warned.update(path for path, _ in new)
            text = listed(
                f"{self.declared.name}: these arguments are not arrays and cannot be hashed, so a change in "
                "them would go unseen. Each call traces and compiles the function anew",
                typed_items(new),
                MAKE_HASHABLE + "pass the values that the function uses as arrays.",
            )
            warnings.warn(text, errors.RetracedWarning, stacklevel=frames.stacklevel())
        if not entry.agreed:
            entry.program.agree(call.leaves)
            entry.agreed = True

    def lower(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        complete: Callable[[tuple[PyTree, ...]], tuple[PyTree, ...]],
    ) -> Lowered:
        """The call of these arguments, or of others with their shapes and dtypes, lowered."""
        args, kwargs = jax.tree.map(_described, (complete(args), kwargs))
        call = Call(self.declared.fun, args, kwargs)
        entry = self._entry(call)
        program = entry.program
        inputs = program.layout.abstract(program.arrays(call.leaves))
        return Lowered(entry.lowered(inputs), program, call.treedef, complete)

    def inspect(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Inspected:
        """The call of these arguments, traced as the call itself would trace it.

        What it would compile is kept: the call that follows finds it.
        """
        call = Call(self.declared.fun, args, kwargs)
        if gone := [k for k, x in enumerate(call.leaves) if is_deleted(x)]:
            paths = call.paths()
            check_valued(self.declared.name, [(paths[k], call.leaves[k]) for k in gone])
        shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in call.leaves)
        has_devices = not shapes and self.declared.rules.has_devices(call.leaves)
        pipeline = self if has_devices else self._of_shapes
        entry = pipeline._entry(call)
        program = entry.program
        arrays = program.arrays(call.leaves)
        inputs = program.layout.abstract(arrays)
        around = functools.partial(pipeline._around, program)
        with around():
            entry.check_program(inputs)
            traced = entry.traced(inputs)
        pipeline._remember(entry)
        alike = [*pipeline._entries.get(entry.key, {}).values()]
        rivals = [other for other in alike if other is not entry]
        return Inspected(call, entry, traced, program.layout.to_move(arrays), rivals, around)

    @functools.cached_property
    def _of_shapes(self) -> "Pipeline":
        """The same call where only shapes are known."""
        return Pipeline(dataclasses.replace(self.declared, rules=self.declared.rules.of_shapes()))

    def place(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> tuple[PyTree, ...]:
        """The arguments, laid out as the call wants them."""
        call = Call(self.declared.fun, args, kwargs)
        leaves = [*call.leaves]
        self._check_valued(call)
        if traced := [k for k, x in enumerate(leaves) if compat.is_tracer(x)]:
            paths = call.paths()
            raise place_traced(f"{self.declared.name}.place", [paths[k] for k in traced])
        program = self._entry(call).program
        arrays = program.arrays(leaves)
        ready, shown = program.layout.concrete(arrays)
        if program.binding.outside is not None:
            ready = shown
        moved = [k for k, x in enumerate(arrays) if shown[k] is not x]
        ready = program.layout.returned(arrays, ready, moved)
        for position, x in zip(program.positions, ready, strict=True):
            leaves[position] = x
        return call.treedef.unflatten(leaves)[0]

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
