"""The five steps of a call: partition, resolve, call, leave, write back.

A call finds the program that its signature was compiled to (steps 1 and 2, done once), lays its arrays
out, runs the program (steps 3 and 4 were traced into it) and writes back.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax

from .._arguments import Arguments, check_arity, is_shaped
from .._base import _compat as compat
from .._base import _errors as errors
from .._base import _jaxprs as jaxprs
from .._base._compat import tree_util
from .._base._types import NO_AXES
from .._flow import hidden_axes
from .._resolve._lanes import OtherShapes
from .._resolve._placement import check_valued, is_deleted
from .._twice import summed_twice
from .._write_back import WriteBack
from ._binding import Outside
from ._declared import Declared
from ._donate import DonatingProgram
from ._program import Program
from ._stages import Lowered


# Programs kept for one mapped call. Static leaves can make a new signature at every call; those whose last
# use is longest ago go first.
_KEPT = 256


# Bound once: an attribute less to look up at every call.
_flatten = tree_util.default_registry.flatten
_context = jax.sharding.get_abstract_mesh
_set_mesh = jax.sharding.get_mesh
_trace = compat.current_trace


class Signature:
    """One program, compiled, and what a call must look like to be run by it."""

    def __init__(
        self, declared: Declared, program: Program, leaves: Sequence[Any], treedef: Any
    ) -> None:
        self.program = program
        self.inputs = program.arrays
        self.concrete = program.layout.concrete
        self.statics = program.statics
        self.changing = program.changing
        self.types = list(map(type, leaves))
        self.treedef = treedef
        # Whether other processes, if there are any, were found to have the same.
        self.agreed = False
        # JAX holds trees of different dataclasses for equal, but their hashes differ.
        self.hash = hash(treedef)
        self.context: Any = None
        # The mesh that was set, with its devices, where the call takes that one.
        self.set_mesh: Any = None
        # Where the pipeline keeps it once a call has gone through.
        self.key: tuple[Any, tuple[Any, ...]] = (None, ())
        # The backward pass of an eager `jax.vjp` may be recorded, with no layer of ours in the jaxpr.
        self.plain = jax.jit(program, inline=compat.INLINED)
        # Without JAX's check there are no types that something could escape.
        self.program_seen = not (program.binding.check_vma and declared.jit)
        self.lowers: Any = self.plain
        if declared.donate != "none":
            self.lowers = DonatingProgram(program, declared.donate)
        self.compiled: Callable[..., tuple[list[Any], WriteBack]] = self.lowers
        if not declared.jit:
            self.compiled = program
        outside = program.binding.outside
        if outside is not None:
            self.compiled = _brought_out(self.compiled, outside)

    def same_statics(self, leaves: Sequence[Any]) -> bool:
        return self.program.same_statics(leaves)

    def check_program(self, arrays: Sequence[Any]) -> None:
        """Refuse, once, what the traced program shows and JAX's types let through.

        Writes that a branch makes differ between shards; gradients that are summed a second time.

        JAX remembers the trace, so that the call that follows does not trace again.
        """
        if self.program_seen:
            return
        traced = self.lowers.trace(*arrays)
        body = jaxprs.shard_map_body(traced.jaxpr)
        if body is not None:
            if again := summed_twice(body, self.program.binding.sizes):
                raise errors.reduced_twice(self.program.declared.name, again)
            back: WriteBack = traced.out_info[1]
            hidden = hidden_axes(body, [NO_AXES] * len(body.invars))
            found = [
                (path, axes, back.places[i].spec)
                for i, path in back.written
                if (
                    axes := self.program.instance.exit.in_order(
                        hidden[i] - back.places[i].axis_names
                    )
                )
            ]
            if found:
                raise errors.diverged_in_branch(self.program.declared.name, found)
        self.program_seen = True


class Pipeline:
    """A mapped call: what was declared, and a program for each signature it has met."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        # By tree, types and mesh, which settle which leaves are static; then by what those are.
        self._programs: dict[Any, dict[Any, Signature]] = {}
        # The signature of the last eager call, tried first.
        self._last: Signature | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # What follows runs at every call, beside the compiled program's own dispatch: each line is
        # a check that cannot be left out, in the quickest form there is.
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
            return self._other(leaves, treedef, args, kwargs)
        given = last.inputs(leaves) if last.statics else leaves
        held = last.program.hold(leaves) if last.changing else ()
        try:
            ready, shown = last.concrete(given)
            outputs, back = last.compiled(*ready)
        except OtherShapes:
            return self._other(leaves, treedef, args, kwargs)
        except (RuntimeError, ValueError):
            # To look beforehand would cost more than all of the checks above.
            last.program.layout.check_alive(given)
            raise
        if shown is not given:
            shown = last.program.layout.returned(given, shown, back.forwarded())
        return back(outputs, shown, held)

    def _other(
        self, leaves: list[Any], treedef: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._check_valued(leaves, args, kwargs)
        top = _trace(()) is compat.TOP_LEVEL
        eager = (top or compat.runs_at_once()) and not any(map(compat.is_tracer, leaves))
        recorded = not eager and compat.under_jit()
        signature = self._signature(leaves, treedef, args, kwargs, traced=not eager)
        held = signature.program.hold(leaves)
        other_mesh = compat.context_mesh() is not None and self.declared.rules.has_own_mesh
        around = (
            signature.program.binding.context(traced=not eager) if other_mesh else nullcontext()
        )
        program = signature.program
        inputs = program.arrays(leaves)
        if not (recorded or signature.agreed):
            program.agree(leaves)
            signature.agreed = True
        if eager:
            ready, shown = signature.concrete(inputs)
            with around:
                signature.check_program(ready)
                outputs, back = signature.compiled(*ready)
            self._keep(signature)
            if self.declared.rules.steady and top and not other_mesh:
                self._last = signature
                signature.set_mesh = _set_mesh() if self.declared.rules.takes_set_mesh else None
            shown = program.layout.returned(inputs, shown, back.forwarded())
            return back(outputs, shown, held)
        self.declared.rules.check_traced(self.declared.name, leaves)
        given: Sequence[Any] = program.layout.traced(inputs, recorded)
        # Where nothing is recorded (an eager `grad` or `vmap`) the compiled program is transformed;
        # where a jaxpr is, no layer of ours goes into it.
        call = program if recorded or not self.declared.jit else signature.plain
        try:
            with around:
                outputs, back = call(*given)
        except jax.errors.UnexpectedTracerError as error:
            raise errors.old_tracer(self.declared.name, program.tracer_paths(given)) from error
        self._keep(signature)
        if not recorded:
            given = program.layout.returned(inputs, given, back.forwarded())
        return back(outputs, given, held)

    def _check_valued(
        self, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse what cannot be computed with: shapes without values, arrays whose memory was given up."""
        if any(isinstance(x, jax.ShapeDtypeStruct) or is_deleted(x) for x in leaves):
            paths = Arguments(self.declared.fun, args, kwargs).paths()
            check_valued(self.declared.name, [(paths[k], x) for k, x in enumerate(leaves)])

    def _signature(
        self,
        leaves: list[Any],
        treedef: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        traced: bool = False,
    ) -> Signature:
        declared = self.declared
        rules = declared.rules
        check_arity(declared.name, rules.what, rules.entries_in, len(args))
        rules, ground = rules.ground(args, leaves, traced)
        if rules is not declared.rules:
            declared = dataclasses.replace(declared, rules=rules)
        context = jax.sharding.get_abstract_mesh()
        key = (treedef, tuple(map(type, leaves)), context, traced, ground)
        alike = self._programs.get(key, {})
        # A list, made in one step: other threads put signatures in and take some out meanwhile.
        for known in [*alike.values()][:1]:
            signature = alike.get(_tokens(known.program, leaves))
            if signature is not None:
                signature.context = context
                return signature
        program = Program(declared, args, kwargs, leaves, ground, traced)
        again = rules.reconsidered(program, program.arrays(leaves))
        if again is not rules:
            declared = dataclasses.replace(declared, rules=again)
            program = Program(declared, args, kwargs, leaves, ground, traced)
        signature = Signature(declared, program, leaves, treedef)
        signature.context = context
        signature.key = (key, _tokens(program, leaves))
        return signature

    def _keep(self, signature: Signature) -> None:
        # Only now: what is refused while tracing may depend on objects that are no part of the key.
        key, statics = signature.key
        alike = self._programs.setdefault(key, {})
        # Other threads do the same meanwhile: so each step is one that cannot fail.
        alike.pop(statics, None)
        if len(alike) >= _KEPT:
            for oldest in [*alike][: len(alike) - _KEPT + 1]:
                alike.pop(oldest, None)
        alike[statics] = signature

    def lower(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        complete: Callable[[tuple[Any, ...]], tuple[Any, ...]],
    ) -> Lowered:
        """The call of these arguments, or of others with their shapes and dtypes, lowered."""
        args, kwargs = jax.tree.map(_described, (complete(args), kwargs))
        leaves, treedef = tree_util.tree_flatten((args, kwargs))
        signature = self._signature(leaves, treedef, args, kwargs)
        program = signature.program
        program.hold(leaves)
        inputs = program.layout.abstract(program.arrays(leaves))
        return Lowered(signature.lowers.lower(*inputs), program, treedef, complete)

    def place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments, laid out as the call wants them."""
        leaves, treedef = tree_util.tree_flatten((args, kwargs))
        self._check_valued(leaves, args, kwargs)
        if traced := [k for k, x in enumerate(leaves) if compat.is_tracer(x)]:
            paths = Arguments(self.declared.fun, args, kwargs).paths()
            raise errors.place_traced(f"{self.declared.name}.place", [paths[k] for k in traced])
        program = self._signature(leaves, treedef, args, kwargs).program
        given = program.arrays(leaves)
        ready, shown = program.layout.concrete(given)
        if program.binding.outside is not None:
            ready = shown
        moved = [k for k, x in enumerate(given) if shown[k] is not x]
        ready = program.layout.returned(given, ready, moved)
        for position, x in zip(program.inputs, ready, strict=True):
            leaves[position] = x
        placed: tuple[Any, ...] = treedef.unflatten(leaves)[0]
        return placed

    @functools.cached_property
    def on_one_device(self) -> "Pipeline":
        """The same call on a mesh of one device, which keeps what it has compiled too."""
        return Pipeline(
            dataclasses.replace(self.declared, rules=self.declared.rules.alone(), donate="none")
        )


def _brought_out(
    compiled: Callable[..., tuple[list[Any], WriteBack]], outside: Outside
) -> Callable[..., tuple[list[Any], WriteBack]]:
    def call(*arrays: Any) -> tuple[list[Any], WriteBack]:
        outputs, back = compiled(*arrays)
        return outside(outputs, back.places), back

    return call


def _described(leaf: Any) -> Any:
    """A leaf that has only a shape and a dtype in the form that JAX has for that."""
    if is_shaped(leaf) or isinstance(leaf, type):
        return leaf
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _tokens(program: Program, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a program depends on beside types: of the inputs, what the rules say, and the static leaves."""
    shapes = program.declared.rules.key(program.arrays(leaves))
    return shapes, *program.tokens_of(leaves)
