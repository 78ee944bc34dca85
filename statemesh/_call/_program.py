"""A program: steps 1 to 4 of one call as a pure function over arrays, and the ways to run it."""

import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from operator import is_
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._axes._differing import check_exchanges, check_gradients
from .._base import _errors as errors
from .._base._checks import is_inexact, is_key
from .._base._errors import (
    StatemeshError,
    axes_argument,
    error_listing,
    first_items,
    shortened,
    spec_str,
)
from .._base._specs import Placement
from .._base._trees import describe, has_packed, path_str
from .._base._types import NUMBERS, Leaf, PyTree, PyTreeDef, Sharding
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax import _jaxprs as jaxprs
from .._jax import _lifting as lifting
from .._jax._compat import Equation, tree_util
from .._jax._dataflow import shard_map_equation, shard_map_recorded
from .._jax._typed_right import active as typed_right
from .._jax._typed_right import refusing_derivative, typing_right
from ._agreement import (
    check_alike,
    check_placements,
    static_passed,
    structure_passed,
    traced_alike,
)
from ._arguments import Call, Input, Statics, bad_argnums, check_alive, tokens_at, unhashable
from ._lanes import Layout, OtherShapes
from ._layout import OnMesh
from ._memory import Spared
from ._packed import Packing, RunInstance
from ._per_shard import Instance
from ._rules import Declared, Rules
from ._tracing import FromTypes, Lost, TypesLost
from ._write_back import Output, WriteBack, is_source, picker


# So often a call like the last ones may be refused before we stop asking. JAX forgets programs when it is
# told to, and when it has very many of them.
_REFUSALS = 3

MAKE_HASHABLE = "Make the class a @dataclass(frozen=True), use a tuple in place of a list, or "


Result: TypeAlias = tuple[list[Leaf], WriteBack]
"""The outputs of a program, and how the result is put together."""


class Program:
    """A mapped call with one tree structure, one set of static leaves and one mesh, compiled.

    `steps` is the call as a pure function over the inputs' arrays. It gives the outputs and how the result is
    put together, and traces the user's function once each time it is itself traced. It holds no `Program`:
    what was compiled would then live until the next garbage collection.

    A call like an earlier one is one dispatch of JAX's (`run_again`): `jax.jit` compares the shapes, dtypes
    and placements of the arrays with those of earlier calls, and runs what it compiled, all in C++. Where all
    leaves are arrays, and none is given up, it flattens the arguments too, and compares their structure.

    **Arguments:**

    - `declared`: what the author declared.
    - `call`: the arguments of the first such call. Their arrays are not kept.
    - `rules`: those of the call.
    - `traced`: whether the call is being recorded or transformed. Its jaxpr is then the one that JAX's own
        map leaves: what comes back as it went in is an output too. Arguments with states are excepted, and
        what leaves as it came whatever is declared.
    - `key`: what the program depends on besides static leaves and shapes.
    """

    def __init__(
        self, declared: Declared, call: Call, rules: Rules, traced: bool, key: Hashable
    ) -> None:
        self.declared = declared
        self.key = key
        count, donate = call.positional, declared.donate
        if isinstance(donate, tuple) and (bad := [i for i in donate if not -count <= i < count]):
            raise bad_argnums("donate_argnums", bad, count)
        # 1. Partition: the arguments as the function sees them, with models in place of what is packed.
        packing = Packing(call) if has_packed((call.args, call.kwargs)) else None
        seen = call if packing is None else packing.unpacked(call)
        try:
            # 2. Resolve: a placement for each leaf.
            inputs, self.layout, self.rules = rules.resolve(declared.name, seen)
        except errors.StatemeshError:
            # A missing argument is a better reason than one that follows from it, such as no lanes.
            _check_signature(declared, seen)
            raise
        placed, numbers = [*inputs], list(range(len(inputs)))
        if packing is not None:
            placed = packing.place(declared.name, inputs, self.layout.sizes, call)
            numbers = packing.numbers
        self.layout.expect(placed, donate != "none")
        self.positions = [x.position for x in placed]
        self._pick = picker(self.positions, len(call.leaves))
        static_at = sorted(set(range(len(call.leaves))).difference(self.positions))
        self.statics = Statics(static_at, call.leaves)
        # Nothing can tell whether a later call has the same of these, so no call runs this program again.
        self.unhashable = unhashable(seen)
        self.tokens = self.tokens_of(call.leaves)
        in_models = {
            position
            for units in seen.units
            if any(unit.kind is not None for unit in units)
            for unit in units
            for position in unit.positions
        }
        template = list(seen.leaves)
        for k, (x, number) in enumerate(zip(inputs, numbers, strict=True)):
            template[x.position] = None
            is_output = traced and not (x.position in in_models or self.rules.stays(x))
            inputs[k] = dataclasses.replace(x, fresh=is_output or number in self.layout.fresh)
        self.call = call.without_arrays()
        seen = seen.without_arrays()
        self.instance = Instance(declared, seen, template, inputs, self.rules, self.layout.sizes)
        # 3. Call the function on every shard, and 4. let what it wrote leave.
        self.steps = _steps(
            declared,
            seen,
            self.layout,
            self.instance if packing is None else packing.around(self.instance),
        )

        # What a later call is compared with.
        self.types = list(map(type, call.leaves))
        self.treedef = call.treedef
        # JAX holds trees of different dataclasses for equal, but their hashes differ.
        self.hash = hash(call.treedef)
        self.context: Any = None
        # The mesh that was set, with its devices, where the call takes that one.
        self.set_mesh: Any = None

        # How it is compiled. The backward pass of an eager `jax.vjp` may be recorded, and no layer of ours
        # goes into its jaxpr.
        self._of_call = _of_call(self.steps, one_shape=donate != "none")
        self.plain = jax.jit(self._of_call, inline=compat.INLINED)
        self._donors = self._donors_of(call)
        # What `jax.jit` made, and the guard of what is given up: that is known after a trace.
        self._compiled: tuple[Any, Spared] | None = None
        if donate == "none":
            self._compiled = self.plain, Spared((), ())
        # Whether other processes, if there are any, were found to pass the same.
        self.agreed = False
        # A function that runs eagerly may have no program, and that of a `vmap` shows no sums over lanes.
        self.checked = not (declared.jit and self.layout.sizes)
        self._refusals = 0
        kinds = [x.kind for x in self.layout.inputs]
        self._may_be_quick = (
            declared.jit
            and compat.REFUSES_DELETED
            and not self.layout.spread
            and not self.unhashable
            and all(issubclass(kind, jax.Array) or kind in NUMBERS for kind in kinds)
        )
        # Whether JAX alone is to run the next call.
        self.is_quick = False
        # Whether `jax.jit` takes the arguments of the call as they are, and flattens them. Otherwise it takes
        # the arrays among their leaves.
        self.takes_trees = (
            self._may_be_quick
            and donate == "none"
            and not self.statics.positions
            and not rules.takes_set_mesh
        )

    def _donors_of(self, call: Call) -> Sequence[int] | None:
        """The numbers of the inputs that may be given up. `None`: those of written states."""
        donate = self.declared.donate
        if isinstance(donate, str):
            return None if donate == "states" else range(len(self.positions))
        # Keyword arguments come after the positional ones, and have no number.
        units = [unit for i in donate for unit in call.units[: call.positional][i]]
        positions = {position for unit in units for position in unit.positions}
        return [k for k, position in enumerate(self.positions) if position in positions]

    def arrays(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """The inputs among all leaves of a call."""
        return leaves if self._pick is None else self._pick(leaves)

    def check_alive(self, arrays: Sequence[Leaf]) -> None:
        """Refuse inputs whose memory was given up."""
        check_alive(self.declared.name, self.layout.inputs, arrays)

    def tokens_of(self, leaves: Sequence[Leaf]) -> tuple[Hashable, ...] | None:
        """What tells programs of one key apart: the static leaves, and shapes where they matter.

        `None` if they cannot be compared.
        """
        by_shape = self.rules.by_shape or self.declared.donate != "none"
        tokens = tokens_at(self.statics.positions, leaves)
        return None if tokens is None else (self.shapes_of(leaves) if by_shape else (), *tokens)

    def shapes_of(self, leaves: Sequence[Leaf]) -> tuple[PyTree, ...]:
        """The shapes and dtypes of the inputs among all leaves of a call."""
        return _shapes(self.arrays(leaves))

    def run(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        arrays: Sequence[Leaf],
        ready: Sequence[Leaf],
    ) -> Result:
        """Run it, and compile it if need be.

        **Arguments:**

        - `arrays`: the inputs among the leaves of `(args, kwargs)`.
        - `ready`: the same, laid out.
        """
        if not self.declared.jit or compat.jit_disabled():
            outputs, back = self.steps(*ready)
            if isinstance(self.layout, OnMesh) and self.layout.check_vma:
                _check_copies(self.declared.name, outputs, back)
        else:
            compiled, spared = self._compiled or self._compile(ready, ANY_CALL)
            ready = spared(ready)
            if self.takes_trees:
                ready = self._trees(args, kwargs, arrays, ready)
            outputs, back = compiled(*ready, ANY_CALL)
            spared.keep(outputs)
        if self.layout.spread:
            outputs = self.layout.own_parts(outputs, back.placements)
        return outputs, back

    def _trees(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        arrays: Sequence[Leaf],
        ready: Sequence[Leaf],
    ) -> Sequence[PyTree]:
        """The arguments with their arrays laid out."""
        if ready is arrays:
            return args, kwargs
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
        return tuple(args_laid_out), kwargs

    def run_again(self, *operands: PyTree) -> Result | None:
        """Run what was compiled for an earlier call.

        **Arguments:**

        - `operands`: what `jax.jit` takes of the call: its arguments, or the arrays among their leaves.

        **Returns:** `None`, before anything was done, if the call is not like an earlier one, or if memory
        might be given up twice.
        """
        assert self._compiled is not None
        compiled, spared = self._compiled
        if not spared.fed_back(operands):
            return None
        try:
            result: Result = compiled(*operands, LikeBefore())
        except Refused:
            self.is_quick = False
            return None
        except (RuntimeError, ValueError):
            self.check_alive(tree_util.tree_leaves(operands))
            raise
        spared.keep(result[0], again=True)
        return result

    def traced_run(self, inputs: Sequence[Leaf], recorded: bool) -> Result:
        """Run it on traced inputs, and check it once.

        Where nothing is recorded (an eager `grad` or `vmap`) the compiled program is transformed. Where a
        jaxpr is, no layer of ours goes into it.
        """
        if not recorded:
            self._check_trace(lambda: self.plain.trace(*inputs, ANY_CALL))
            if not self.declared.jit:
                # The trace finds what types lose, and `steps` knows it from then on.
                with suppress(*compat.NEEDS_VALUES):
                    self.plain.trace(*inputs, ANY_CALL)
        if recorded or not self.declared.jit:
            outputs, back = self.steps(*inputs)
        else:
            outputs, back = self.plain(*inputs, ANY_CALL)
        if not self.checked:
            self._check(shard_map_recorded(outputs))
        return outputs, back

    def traced(self, inputs: Sequence[Leaf]) -> jax.stages.Traced:
        """The trace for these inputs, which the call that follows finds."""
        compiled, _ = self._compiled or self._compile(inputs, ANY_CALL)
        operands = self.treedef.unflatten(inputs) if self.takes_trees else inputs
        traced: jax.stages.Traced = compiled.trace(*operands, ANY_CALL)
        return traced

    def lowered(self, inputs: Sequence[Leaf]) -> jax.stages.Lowered:
        """What `inputs` are lowered to, checked once."""
        compiled, _ = self._compiled or self._compile(inputs)
        traced: jax.stages.Traced = compiled.trace(*inputs)
        if not self.checked:
            self._check(shard_map_equation(traced.jaxpr))
        return traced.lower()

    def _compile(self, arrays: Sequence[Leaf], *any_call: "LikeBefore") -> tuple[Any, Spared]:
        """What runs a program that gives inputs up.

        Which ones is known only after tracing: what was forwarded or only read is never given up. JAX
        remembers the trace, so that compiling with donation does not trace again.
        """
        outputs, back = self.plain.trace(*arrays, *any_call).out_info
        donated = self._donated(arrays, outputs, back)
        jitted = jax.jit(self._of_call, donate_argnums=donated)
        self._compiled = jitted, spared_by(self.layout, arrays, donated)
        return self._compiled

    def _donated(
        self, arrays: Sequence[Leaf], outputs: Sequence[Leaf], back: WriteBack
    ) -> tuple[int, ...]:
        """The inputs that are given up."""
        # A buffer can become only an output of its own size. JAX would warn of any other.
        room = Counter(
            (x.shape, x.dtype, placement.spec)
            for x, placement in zip(outputs, back.placements, strict=True)
        )
        donated: list[int] = []
        for k in sorted(set(back.rewritten)) if self._donors is None else self._donors:
            if k in back.forwarded or not hasattr(arrays[k], "shape"):
                continue
            like = (arrays[k].shape, arrays[k].dtype, self.layout.inputs[k].placement.spec)
            if room[like] > 0:
                room[like] -= 1
                donated.append(k)
        return tuple(donated)

    def check(self, inputs: Sequence[Leaf]) -> None:
        """Refuse, once, gradients that the traced function sums a second time, or not at all.

        And what another process has traced differently. JAX remembers the trace, so that the call that
        follows does not trace again.
        """
        self._check_trace(lambda: self.traced(inputs))

    def _check_trace(self, trace: Callable[[], jax.stages.Traced]) -> None:
        if not self.checked:
            mesh, name = self.layout.shared, self.declared.name
            traced = trace() if mesh is None else traced_alike(name, mesh, trace)
            self._check(shard_map_equation(traced.jaxpr))

    def _check(self, equation: Equation | None) -> None:
        # What the user's own transformations leave may hold no `shard_map`.
        if equation is not None:
            check_gradients(self.declared.name, equation)
        self.checked = True

    def settle(self, arrays: Sequence[Leaf], result: Result, refused: bool) -> None:
        """Find out whether JAX alone is to run the next call, after one in which nothing had to be moved.

        **Arguments:**

        - `arrays`, `result`: its inputs, and what it gave.
        - `refused`: whether JAX was to run it, and refused.
        """
        if not self._may_be_quick or compat.jit_disabled():
            return
        self._refusals += refused
        if self._refusals >= _REFUSALS:
            return
        # A kind of call that is refused once takes a slower way through JAX from then on. So we wait until
        # results that are fed back are laid out under the same name: on Explicit axes `P()` comes back as
        # `P(None, None)`.
        outputs, back = result
        written = [outputs[k] for k, _ in back.written]
        self.is_quick = _layouts(written) <= _layouts(arrays)

    def write_back(
        self,
        arrays: Sequence[Leaf],
        shown: Sequence[Leaf],
        outputs: Sequence[Leaf],
        back: WriteBack,
    ) -> Any:
        """Step 5: the result of a call.

        **Arguments:**

        - `arrays`, `shown`: the inputs, and as they were laid out.
        - `outputs`, `back`: what the run has given.
        """
        if shown is not arrays:
            shown = self.layout.returned(arrays, shown, back.forwarded)
        return back.filled(outputs, shown)

    def agree(self, leaves: Sequence[Leaf]) -> None:
        """Refuse, once, what another process passes differently, where all of them have to pass the same."""
        name, layout = self.declared.name, self.layout
        if not isinstance(layout, OnMesh) or layout.shared is None or self.agreed:
            return
        paths = self.call.paths()
        passed = [structure_passed(self.call.treedef, [*paths.values()])]
        passed += [static_passed(paths[i], leaves[i]) for i in self.statics.positions]
        passed += layout.passed_alike(self.arrays(leaves))
        check_alike(name, layout.shared, passed)
        check_placements(name, layout.shared, layout.inputs)
        self.agreed = True

    def fed_to_lanes(self, leaves: Sequence[Leaf]) -> frozenset[str]:
        """The paths of undeclared states that have an entry for each lane, are read, and written per lane.

        The function is traced to find them.
        """
        arrays = self.arrays(leaves)
        traced = self.plain.trace(*self.layout.abstract(arrays), ANY_CALL)
        back: WriteBack = traced.out_info[1]
        read = jaxprs.inputs_read(traced.jaxpr)
        lanes = self.layout.count(arrays)
        return frozenset(
            path
            for path, inputs in back.stacked
            if any(read[k] for k in inputs)
            and all(np.shape(arrays[k])[:1] == (lanes,) for k in inputs)
        )


def _check_signature(declared: Declared, call: Call) -> None:
    """Refuse arguments that the function does not take, in the words of Python."""
    try:
        signature = inspect.signature(declared.fun)
    except (TypeError, ValueError):
        return
    keywords = dict.fromkeys(call.names[call.positional :])
    try:
        signature.bind(*[None] * call.positional, **keywords)
    except TypeError as error:
        raise TypeError(
            f"{declared.name}{signature} cannot be called like this: {error}."
        ) from None


def _steps(
    declared: Declared, call: Call, layout: Layout, instance: RunInstance
) -> Callable[..., Result]:
    """Steps 3 and 4 as a pure function over the inputs' arrays."""

    # What a trace has found that JAX's types lose, and whether they are to stay so.
    lost: Lost | None = None
    stay_lost = False

    def steps(*arrays: Leaf) -> Result:
        nonlocal lost, stay_lost
        layout.check(arrays)
        _check_signature(declared, call)
        back: WriteBack | None = None

        def run(*parts: Leaf) -> tuple[list[Leaf], Sequence[Placement]]:
            nonlocal back
            varying = layout.varying()
            if lost is not None and isinstance(varying, FromTypes):
                varying.lost, varying.stay_lost = lost, stay_lost
            outputs, back = instance(parts, varying)
            return outputs, back.placements

        if lost is not None and stay_lost:
            arrays = tuple(_without_derivatives(declared.name, lost, layout.inputs, arrays))
        right = frozenset[Any]() if lost is None or stay_lost else lost.primitives
        typing = typing_right(typed_right() | right) if right else nullcontext()
        try:
            with typing:
                outputs, is_lifted = lifting.with_casts_where_refused(
                    lambda: layout.call(run, arrays)
                )
        except TypesLost as found:
            known = frozenset[Any]() if lost is None else lost.primitives
            lost = dataclasses.replace(found.lost, primitives=known | found.lost.primitives)
            return steps(*arrays)
        except Exception as error:
            if lost is None or stay_lost or isinstance(error, StatemeshError):
                raise
            # A loop may carry what is typed right now and begin with one value, or the user has cast it too.
            stay_lost = True
            try:
                result = steps(*arrays)
                if lost.in_gradients:
                    raise _types_lost(declared.name, lost) from error
            except Exception:  # Whatever it is, the next call begins anew.
                stay_lost = False
                raise
            return result
        if is_lifted and (mapped := shard_map_recorded(outputs)) is not None:
            check_exchanges(declared.name, mapped)
        assert back is not None
        return outputs, back

    steps.__name__ = steps.__qualname__ = declared.name
    return steps


def _without_derivatives(
    name: str, lost: Lost, inputs: Sequence[Input], arrays: Sequence[Leaf]
) -> list[Leaf]:
    """Inputs; JAX would not sum the gradients of those that enter the same where types are lost."""
    return [
        refusing_derivative(x, lambda: _types_lost(name, lost))
        if is_inexact(x) and lost.axes - source.placement.axis_names
        else x
        for x, source in zip(arrays, inputs, strict=True)
    ]


def _types_lost(name: str, lost: Lost) -> StatemeshError:
    axes = axes_argument(sorted(lost.axes, key=str))
    return error_listing(
        StatemeshError,
        f"{name}: gradients would lack the sum over shards, because JAX's types lose that the results of "
        f"these lines differ over {axes!r}",
        lost.lines or sorted(primitive.name for primitive in lost.primitives),
        f"Write `jax.lax.pcast(value, {axes!r}, to='varying')` for all that enters and leaves these calls, "
        "and for the values with which loops begin that carry what they return.",
    )


def _check_copies(name: str, outputs: Sequence[Leaf], back: WriteBack) -> None:
    """Refuse results that are to be one copy, of which devices hold different ones.

    What runs operation by operation has no program that is walked, and JAX's types lose some differences.
    """
    differ = []
    for key_path, source in tree_util.tree_leaves_with_path(back.result, is_leaf=is_source):
        # What is unreduced is the parts of a sum.
        if not isinstance(source, Output) or back.placements[source.index].spec.unreduced:
            continue
        first: dict[str, tuple[jax.Device, bytes]] = {}
        for shard in outputs[source.index].addressable_shards:
            copy = _bytes(shard.data)
            usual, expected = first.setdefault(repr(shard.index), (shard.device, copy))
            if copy != expected:
                spec = spec_str(back.placements[source.index].spec)
                what = f"{path_str(key_path, f'{name}(...)')}: {describe(outputs[source.index])}, spec {spec}"
                differ.append(f"{what}, of which {usual} and {shard.device} hold different copies")
                break
    if differ:
        raise error_listing(
            StatemeshError,
            f"{name}: results that leave as one copy differ between shards",
            first_items(differ),
            "JAX's types say that they are the same, and are all that is known with jit=False or "
            "`jax.disable_jit`. They lose what differs in `jnp.argsort`, in callbacks, and in loops and "
            "branches whose predicate differs. Leave jit=False out: what is compiled is followed whatever "
            "the types say.",
        )


def _bytes(x: jax.Array) -> bytes:
    return np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes()


def _of_call(steps: Callable[..., Result], one_shape: bool) -> Callable[..., Result]:
    """The steps as a function of trees, with a `LikeBefore` after them or not.

    With `one_shape` it takes the shapes that it first met, and refuses others.
    """
    shapes: tuple[PyTree, ...] | None = None

    def of_call(*trees: PyTree) -> Result:
        nonlocal shapes
        if trees and isinstance(trees[-1], LikeBefore):
            if trees[-1] is not ANY_CALL:
                # Under `jax.disable_jit` JAX compares nothing, and calls the function itself.
                raise Refused
            trees = trees[:-1]
        arrays = tree_util.tree_leaves(trees)
        # What is given up depends on shapes. Where they differ `jax.jit` traces anew.
        if one_shape:
            shapes = _shapes(arrays) if shapes is None else shapes
            if shapes != _shapes(arrays):
                raise OtherShapes
        return steps(*arrays)

    of_call.__name__ = of_call.__qualname__ = steps.__name__
    return of_call


def _layouts(arrays: Sequence[Leaf]) -> set[tuple[int, Sharding]]:
    return {(x.ndim, x.sharding) for x in arrays if isinstance(x, jax.Array)}


def _shapes(arrays: Sequence[Leaf]) -> tuple[PyTree, ...]:
    return tuple((jnp.shape(x), jnp.result_type(x)) for x in arrays)


def spared_by(layout: Layout, arrays: Sequence[Leaf], donated: Sequence[int]) -> Spared:
    """The guard that keeps inputs like these from being given up twice."""
    return Spared(donated, [layout.part_size(k, x) for k, x in enumerate(arrays)])


class Refused(Exception):
    """A call is not like an earlier one, and nothing was done."""


class LikeBefore:
    """An argument without leaves. With it JAX refuses a call that is not like an earlier one.

    `jax.jit` flattens the arguments of every call, to compare them with those of earlier calls. If they
    differ, it flattens them again before it does anything else, and we raise `Refused` then. No other error
    can be mistaken for it, and there is no setting that a signal handler could run under.
    """

    __slots__ = ("times",)

    def __init__(self, times: float = 1) -> None:
        self.times = times

    def flatten(self) -> tuple[tuple[()], None]:
        if not self.times:
            raise Refused
        self.times -= 1
        return (), None


# In the place of a `LikeBefore`, with which it shares programs: the call may be unlike all others.
ANY_CALL = LikeBefore(math.inf)
jax.tree_util.register_pytree_node(LikeBefore, LikeBefore.flatten, lambda *_: ANY_CALL)


class Stage:
    """A call before it runs, described by its own arguments and result.

    All else is that of the `jax.stages.Lowered` or `Compiled` in `program`.

    **Attributes:**

    - `program`: what was lowered: a function of the arguments' arrays. What comes back as it went in is no
        output of it.
    - `in_tree`: the structure of `(args, kwargs)`.
    """

    def __init__(
        self,
        program: Any,
        mapped: Program,
        treedef: PyTreeDef,
        complete: Callable[[tuple[PyTree, ...]], tuple[PyTree, ...]],
    ) -> None:
        # `complete` adds to the positional arguments what the mapping binds, such as a method's object.
        self.program = program
        self._complete = complete
        self.in_tree = treedef
        self._mapped = mapped
        # The owner of a static leaf may change it before it is compared.
        self._texts = mapped.statics.texts

    @property
    def args_info(self) -> Any:
        """The arguments, as `(args, kwargs)`, with a `jax.stages.ArgInfo` for each array."""
        mapped, inputs = self._mapped, tree_util.tree_leaves(self.program.args_info)
        inputs = list(map(explicit.unless_explicit, inputs))
        leaves = dict(zip(mapped.statics.positions, mapped.statics.values, strict=True))
        leaves |= dict(zip(mapped.positions, inputs, strict=True))
        return self.in_tree.unflatten([leaves[position] for position in range(len(leaves))])

    @property
    def out_info(self) -> Any:
        """The result, with a `jax.ShapeDtypeStruct` for each array."""
        outputs, back = self.program.out_info
        inputs = tree_util.tree_leaves(self.program.args_info)
        return back.filled(outputs, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs])

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return tree_util.tree_structure(self.out_info)

    def __getattr__(self, name: str) -> Any:
        if name == "program":  # Not there yet: while it is copied.
            raise AttributeError(name)
        return getattr(self.program, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._mapped.declared.name}>"


class Lowered(Stage):
    """A call, lowered."""

    def compile(self, *args: PyTree, **kwargs: PyTree) -> "Compiled":
        """Compile it.

        **Arguments:**

        - `args`, `kwargs`: those of `jax.stages.Lowered.compile`.

        **Returns:** a function of the call's arguments.
        """
        compiled = self.program.compile(*args, **kwargs)
        return Compiled(compiled, self._mapped, self.in_tree, self._complete)


class Compiled(Stage):
    """A call, compiled for arguments like these: called as the function is."""

    @functools.cached_property
    def _spared(self) -> Spared:
        inputs = tree_util.tree_leaves(self.program.args_info)
        donated = [k for k, info in enumerate(inputs) if info.donated]
        return spared_by(self._mapped.layout, inputs, donated)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        mapped, layout, name = self._mapped, self._mapped.layout, self._mapped.declared.name
        leaves, treedef = tree_util.tree_flatten((self._complete(args), kwargs))
        if treedef != self.in_tree:
            raise TypeError(
                f"{name} was compiled for arguments of one tree structure, and called with another.\n"
                f"  compiled for: {self.in_tree}\n  called with: {treedef}\n"
                "Lower it for these arguments, or call the function itself, which compiles anew."
            )
        if mapped.unhashable:
            raise error_listing(
                TypeError,
                f"{name} was compiled for arguments that are not arrays and cannot be hashed, so a change in "
                "them would go unseen",
                typed_items(mapped.unhashable),
                MAKE_HASHABLE + "call the function itself, which traces it anew.",
            )
        if differ := mapped.statics.other_in(leaves):
            raise error_listing(
                TypeError,
                f"{name} was called with other values of arguments that are not arrays than it was compiled "
                "for",
                [f"compiled for {self._texts[p]}, called with {leaves[p]!r}" for p in differ],
                "Lower it for these arguments, or call the function itself, which compiles anew.",
            )
        inputs = [
            x if isinstance(x, jax.Array) or k in layout.fresh else jnp.asarray(x)
            for k, x in enumerate(mapped.arrays(leaves))
        ]
        ready, shown = layout.concrete(inputs)
        outputs, back = self.program(*self._spared(ready))
        self._spared.keep(outputs)
        outputs = layout.own_parts(outputs, back.placements)
        return mapped.write_back(inputs, shown, outputs, back)


def typed_items(bad: Sequence[tuple[str, object]]) -> list[str]:
    return [f"{path}: {shortened(value)} of type {type(value).__name__}" for path, value in bad]
