"""The five steps of a call: partition, resolve, call, leave, write back.

A call finds the program that was compiled for its like (steps 1 and 2, done once), lays its arrays
out, runs the program (steps 3 and 4 were traced into it) and writes back.
"""

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias, TypeVar

import jax
from jax.sharding import AbstractMesh

from .._base import _errors as errors
from .._base._checks import is_shaped
from .._base._errors import error_listing, listed
from .._base._types import Leaf, PyTree
from .._jax import _compat as compat
from .._jax import _frames as frames
from .._jax._compat import tree_util
from ._arguments import Call, arity
from ._lanes import OtherShapes
from ._layout import place_traced
from ._program import (
    MAKE_HASHABLE,
    Lowered,
    Program,
    typed_items,
)
from ._rules import Declared
from ._write_back import WriteBack


# A function that gets a mapped call while it is traced: the program, the arguments, the outputs, and how the
# result is put together. It returns the outputs that the call goes on with.
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


def make_room(entries: dict[Key, Value], most: int) -> None:
    """Drop the oldest entries, so that one more makes no more than `most`.

    Other threads may do the same meanwhile, so each step is one that cannot fail.
    """
    if len(entries) >= most:
        for oldest in [*entries][: len(entries) - most + 1]:
            entries.pop(oldest, None)


# Bound once, which saves looking up an attribute at every call.
_flatten = tree_util.default_registry.flatten
_context = jax.sharding.get_abstract_mesh
_set_mesh = jax.sharding.get_mesh
_trace = compat.current_trace


class Pipeline:
    """A mapped call: what was declared, and the programs that were compiled for it."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        # By the tree, the types and the mesh of a call, which settle the static leaves; then by these.
        self._programs: dict[Hashable, dict[tuple[Hashable, ...], Program]] = {}
        # That of the last eager call, tried first.
        self._last: Program | None = None
        # The paths that a warning has named.
        self._warned: set[str] = set()

    def call(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Any:
        """Run the five steps.

        What follows runs at every call, besides the compiled program's own dispatch: each line is a check
        that cannot be left out, in the quickest form there is.
        """
        # A shortcut through all five: JAX itself finds out whether this call is like the last ones.
        program, quick = self._last, None
        if program is not None and program.is_quick:
            quick = program
            if quick.takes_trees and (result := quick.run_again(args, kwargs)) is not None:
                outputs, back = result
                return back.filled(outputs, _flatten((args, kwargs))[0] if back.forwarded else ())

        # 1. Partition. Which leaves are of states, which other arrays and which static follows from the tree
        # and the types, so that a call like the last one needs no more than these.
        leaves, treedef = _flatten((args, kwargs))

        # 2. Resolve: find the program in which each leaf has its placement, and lay the arrays out.
        is_alike = (
            program is not None
            and program.treedef == treedef
            and program.hash == hash(treedef)
            and _trace(()) is compat.TOP_LEVEL
            and (program.set_mesh is None or program.set_mesh is _set_mesh())
            and (not program.statics.positions or program.statics.same(leaves))
        )
        if is_alike and quick is not None and not quick.takes_trees:
            arrays = quick.arrays(leaves)
            if (result := quick.run_again(*arrays)) is not None:
                outputs, back = result
                return back.filled(outputs, arrays if back.forwarded else ())
        is_new = (
            program is None
            or not is_alike
            or program.types != list(map(type, leaves))
            or program.context is not _context()
        )
        if program is None or is_new:
            call = Call(self.declared.fun, args, kwargs, (leaves, treedef))
            call.check_valued(self.declared.name)
            at_once = _trace(()) is compat.TOP_LEVEL or compat.runs_at_once()
            traced = not at_once or any(map(compat.is_tracer, leaves))
            program = self._program(call, traced)
            if not (traced and compat.under_jit()):
                self._warn_and_agree(program, call)
            if traced:
                return self._call_traced(program, call)
        arrays = program.arrays(leaves)
        try:
            if is_new:
                # The check traces the function. A function that runs without compiling is traced after its
                # run: what it prints, and the breakpoints where it stops, are to come from the run.
                uncompiled = compat.jit_disabled()
                with self._around(program):
                    ready, shown = program.layout.concrete(arrays)
                    if not uncompiled:
                        program.check(ready)
                    outputs, back = program.run(args, kwargs, arrays, ready)
                    if uncompiled:
                        with jax.disable_jit(False), suppress(*compat.NEEDS_VALUES):
                            program.check(ready)
                self._keep(program)
            else:
                ready, shown = program.layout.concrete(arrays)
                # 3. Call the function on every shard, and 4. let what it wrote leave: the program does both.
                outputs, back = program.run(args, kwargs, arrays, ready)
        except OtherShapes:
            if is_new:  # The program was found for these shapes.
                raise
            self._last = None
            return self.call(args, kwargs)
        except (RuntimeError, ValueError):
            # Looking for them before the run would cost more than all of the checks above.
            program.check_alive(arrays)
            raise

        # 5. Write back.
        if shown is arrays and program is self._last and not program.is_quick:
            program.settle(arrays, (outputs, back), quick is program)
        result = program.write_back(arrays, shown, outputs, back)
        if is_new and program.unhashable:
            back.forget()
        return result

    def _call_traced(self, program: Program, call: Call) -> Any:
        """Steps 2 to 5 where arguments are traced, or the call itself is."""
        name, recorded = self.declared.name, compat.under_jit()
        self.declared.rules.check_traced(name, call.leaves)
        arrays = program.arrays(call.leaves)
        ready = program.layout.traced(arrays, recorded)
        try:
            with self._around(program, traced=True):
                outputs, back = program.traced_run(ready, recorded)
        except jax.errors.UnexpectedTracerError as error:
            raise error_listing(
                jax.errors.UnexpectedTracerError,
                f"{name}: a traced value outlived its trace. These arguments are traced",
                [
                    x.path
                    for x, array in zip(program.layout.inputs, ready, strict=True)
                    if compat.is_tracer(array)
                ],
                "Return values from the traced function instead of keeping them: a model that is written "
                "inside `jax.jit` or `jax.grad` leaves it as a result.",
            ) from error
        self._remember(program)
        look = _watching.get()
        if look is not None:
            outputs = look(program, call, outputs, back)
        # What is recorded goes into a jaxpr, which lays out nothing.
        return program.write_back(ready if recorded else arrays, ready, outputs, back)

    def _program(self, call: Call, traced: bool = False) -> Program:
        """The program for a call: one that is there, or a new one."""
        declared, rules = self.declared, self.declared.rules
        entries, positional = rules.entries_in, call.positional
        if isinstance(entries, tuple | list) and len(entries) != positional:
            raise arity(declared.name, rules.what, len(entries), positional)
        rules = rules.for_call(call, traced)
        mesh = jax.sharding.get_abstract_mesh()
        key = (call.treedef, tuple(map(type, call.leaves)), mesh, traced, rules.key)
        alike = self._programs.get(key, {})
        program: Program | None = None
        # The list is made in one step, because other threads put programs in and take some out meanwhile.
        for known in [*alike.values()][:1]:
            tokens = known.tokens_of(call.leaves)
            program = None if tokens is None else alike.get(tokens)
        if program is None:
            program = Program(declared, call, rules, traced, key)
            # With `looks_ahead` the function is traced once beforehand: its rules depend on what it writes.
            if rules.looks_ahead and (fed := program.fed_to_lanes(call.leaves)):
                program = Program(declared, call, rules.after(fed), traced, key)
        program.context = mesh
        return program

    def _keep(self, program: Program) -> None:
        """Keep a program whose call went through, and try it first at the next call that may be like it."""
        rules = self.declared.rules
        may_be_last = rules.cacheable and not program.unhashable and not self._other_mesh
        if may_be_last and _trace(()) is compat.TOP_LEVEL:
            self._last = program
            program.set_mesh = _set_mesh() if rules.takes_set_mesh else None
        self._remember(program)

    def _remember(self, program: Program) -> None:
        """Keep a program whose call went through.

        Not before: what is refused while tracing may depend on objects that are no part of the key. And not
        one of a call with which no later call can be compared.
        """
        if program.unhashable or program.tokens is None:
            return
        alike = self._programs.setdefault(program.key, {})
        # Other threads do the same meanwhile, so each of these steps is one that cannot fail.
        alike.pop(program.tokens, None)
        make_room(alike, _KEPT)
        alike[program.tokens] = program

    @property
    def _other_mesh(self) -> bool:
        """Whether another mesh is set than the one that calls run on."""
        return compat.context_mesh() is not None and self.declared.rules.has_own_mesh

    def _around(self, program: Program, traced: bool = False) -> AbstractContextManager[Any]:
        """The context of a call: its own mesh, where another one is set."""
        mesh = program.layout.mesh if self._other_mesh else None
        return nullcontext() if mesh is None else compat.in_mesh(mesh, traced)

    def _warn_and_agree(self, program: Program, call: Call) -> None:
        """Say, once for each path, why every call is traced: what is recorded is traced once anyway.

        And refuse, once, what another process passes differently.
        """
        unhashable = program.unhashable
        if new := [(path, value) for path, value in unhashable if path not in self._warned]:
            self._warned.update(path for path, _ in new)
            text = listed(
                f"{self.declared.name}: these arguments are not arrays and cannot be hashed, so a change in "
                "them would go unseen. Each call traces and compiles the function anew",
                typed_items(new),
                MAKE_HASHABLE + "pass the values that the function uses as arrays.",
            )
            warnings.warn(text, errors.RetracedWarning, stacklevel=frames.stacklevel())
        program.agree(call.leaves)

    def lower(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        complete: Callable[[tuple[PyTree, ...]], tuple[PyTree, ...]],
    ) -> Lowered:
        """The call of these arguments, or of others with their shapes and dtypes, lowered."""
        args, kwargs = jax.tree.map(_described, (complete(args), kwargs))
        call = Call(self.declared.fun, args, kwargs)
        program = self._program(call)
        inputs = program.layout.abstract(program.arrays(call.leaves))
        return Lowered(program.lowered(inputs), program, call.treedef, complete)

    def inspect(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[Call, Program, list[Program], jax.stages.Traced, jax.stages.Compiled | None]:
        """A call that is traced and compiled and not run. The call that follows finds both.

        **Returns:** the call, its program, the programs of calls that differ from it only in static leaves,
        its trace, and what was compiled: nothing where no devices are known, or where the call runs without
        compiling.
        """
        call = Call(self.declared.fun, args, kwargs)
        call.check_valued(self.declared.name, shapes=True)
        shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in call.leaves)
        has_devices = not shapes and self.declared.rules.has_devices(call.leaves)
        pipeline = self if has_devices else self._of_shapes
        program = pipeline._program(call)
        inputs = program.layout.abstract(program.arrays(call.leaves))
        compiled = None
        with pipeline._around(program):
            program.check(inputs)
            traced = program.traced(inputs)
            if self.declared.jit and not isinstance(program.layout.mesh, AbstractMesh):
                compiled = traced.lower().compile()
        pipeline._remember(program)
        alike = [*pipeline._programs.get(program.key, {}).values()]
        rivals = [other for other in alike if other is not program]
        return call, program, rivals, traced, compiled

    @functools.cached_property
    def _of_shapes(self) -> "Pipeline":
        """The same call where only shapes are known."""
        return Pipeline(dataclasses.replace(self.declared, rules=self.declared.rules.of_shapes()))

    def place(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> tuple[PyTree, ...]:
        """The arguments, laid out as the call wants them."""
        call = Call(self.declared.fun, args, kwargs)
        leaves = [*call.leaves]
        call.check_valued(self.declared.name)
        if traced := [k for k, x in enumerate(leaves) if compat.is_tracer(x)]:
            paths = call.paths()
            raise place_traced(f"{self.declared.name}.place", [paths[k] for k in traced])
        program = self._program(call)
        placed = program.layout.placed(program.arrays(leaves))
        for position, x in zip(program.positions, placed, strict=True):
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
