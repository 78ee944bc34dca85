"""A program: steps 1 to 4 of one call as a pure function over arrays, and the ways to run it."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base import _errors as errors
from .._base._errors import _HASHABLE, _typed, error_listing
from .._base._specs import Placement
from .._base._types import NUMBERS, Leaf, PyTree, PyTreeDef, Sharding
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax import _jaxprs as jaxprs
from .._jax._compat import tree_util
from ._agreement import Passed, static_passed, structure_passed
from ._arguments import Arguments, Call, Statics, has_unhashable_node, unhashable
from ._lanes import OtherShapes
from ._packing import Packing, Repacking
from ._per_shard import PerShardInput, PerShardRun
from ._placement import Input, Spared
from ._rules import Context, Declared, Stacked
from ._write_back import WriteBack


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
        _check_signature(declared.fun, declared.name, given.positional, keywords)

    def arrays(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """The program's inputs among all leaves."""
        return [leaves[i] for i in self.positions]

    def write_back(
        self,
        given: Sequence[Leaf],
        shown: Sequence[Leaf],
        outputs: Sequence[Leaf],
        back: WriteBack,
    ) -> Any:
        """Step 5: the result of a call.

        **Arguments:**

        - `given`, `shown`: the inputs, and as they were laid out.
        - `outputs`, `back`: what the run has given.
        """
        if shown is not given:
            shown = self.layout.returned(given, shown, back.forwarded)
        return back.filled(outputs, shown)

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


class DonatingProgram:
    """A program compiled so that it may overwrite inputs.

    Which inputs those are is known only after tracing: what was forwarded or only read is never given
    up. JAX remembers the trace, so that compiling with donation does not trace again.
    """

    def __init__(self, program: Program, how: Any) -> None:
        self.program = program
        self.how = how
        self._compiled: dict[Any, tuple[Any, Spared]] = {}
        # The program of the last call is tried first.
        self._last: tuple[Any, Spared] = (_refuse, Spared((), ()))

    def __call__(self, *arrays: Leaf) -> tuple[list[Leaf], WriteBack]:
        compiled, spared = self._last
        try:
            outputs: tuple[list[Leaf], WriteBack] = compiled(*spared(arrays))
        except OtherShapes:
            if compat.jit_disabled():
                return self.program(*arrays)
            compiled, spared = self._last = self._for(arrays)
            outputs = compiled(*spared(arrays))
        spared.keep(outputs[0])
        return outputs

    def trace(self, *arrays: Leaf) -> jax.stages.Traced:
        compiled, _ = self._for(arrays)
        return compiled.trace(*arrays)

    def lower(self, *arrays: Leaf) -> jax.stages.Lowered:
        compiled, _ = self._for(arrays)
        return compiled.lower(*arrays)

    def _for(self, arrays: Sequence[Leaf]) -> tuple[Any, Spared]:
        key = _shapes(arrays)
        if key not in self._compiled:
            one = _OfShapes(self.program, key)
            traced = jax.jit(one).trace(*arrays)
            donated = self._given_up(arrays, *traced.out_info)
            spared = spared_by(self.program, arrays, donated)
            self._compiled[key] = (jax.jit(one, donate_argnums=donated), spared)
        return self._compiled[key]

    def _given_up(
        self, arrays: Sequence[Leaf], outputs: Sequence[Leaf], back: WriteBack
    ) -> tuple[int, ...]:
        kept = back.forwarded
        wanted = [k for k in self.program.given_up(self.how, back) if k not in kept]
        # A buffer can become only an output of its own size. JAX would warn of any other.
        room = Counter(
            (x.shape, x.dtype, placement.spec)
            for x, placement in zip(outputs, back.placements, strict=True)
        )
        inputs = self.program.layout.inputs
        given: list[int] = []
        for k in wanted:
            if not hasattr(arrays[k], "shape"):
                continue
            like = (arrays[k].shape, arrays[k].dtype, inputs[k].placement.spec)
            if room[like] > 0:
                room[like] -= 1
                given.append(k)
        return tuple(given)


class _OfShapes:
    """A program that is traced for these shapes only.

    What is donated depends on shapes. To compare them at every call would cost as much as the rest of it;
    but `jax.jit` traces anew where they differ.
    """

    def __init__(self, program: Program, shapes: tuple[Any, ...]) -> None:
        self.program = program
        self.shapes = shapes
        self.__name__ = self.__qualname__ = program.__name__

    def __call__(self, *flat_args: Leaf) -> tuple[list[Leaf], WriteBack]:
        if _shapes(flat_args) != self.shapes:
            raise OtherShapes
        return self.program(*flat_args)


def _refuse(*arrays: Leaf) -> Any:
    raise OtherShapes


def _shapes(arrays: Sequence[Leaf]) -> tuple[PyTree, ...]:
    return tuple((jnp.shape(x), jnp.result_type(x)) for x in arrays)


def spared_by(program: Program, arrays: Sequence[Leaf], donated: Sequence[int]) -> Spared:
    """The guard that keeps inputs like these from being given up twice."""
    sizes = [program.layout.part_size(k, x) for k, x in enumerate(arrays)]
    return Spared(donated, sizes)


Result = tuple[list[Leaf], WriteBack]

# So often the same call may be refused before we stop asking. JAX forgets programs when it is told to, and
# when it has very many of them.
_REFUSALS = 3


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
_ANY = LikeBefore(math.inf)
jax.tree_util.register_pytree_node(LikeBefore, LikeBefore.flatten, lambda *_: _ANY)


class OneDispatch:
    """A program compiled to take the arguments of a call as they are, as trees.

    `jax.jit` flattens them, compares their structure, shapes, dtypes, and placements with those of earlier
    calls, and runs what it compiled, all in C++. Given a `LikeBefore` it does nothing else.

    **Arguments:**

    - `program`: one that `fits`.
    - `treedef`: the structure of `(args, kwargs)`.
    """

    def __init__(self, program: Program, treedef: PyTreeDef) -> None:
        def of_trees(args: PyTree, kwargs: PyTree, call: LikeBefore) -> Result:
            if call is not _ANY:
                # Under `jax.disable_jit` JAX compares nothing, and calls the function itself.
                raise Refused
            return program(*tree_util.tree_leaves((args, kwargs)))

        of_trees.__name__ = of_trees.__qualname__ = program.__name__
        self.jitted: Any = jax.jit(of_trees)
        self.check_alive = program.layout.check_alive
        self._treedef = treedef
        args, kwargs = treedef.children()
        self._structures = [*args.children(), kwargs]
        self._chances = _REFUSALS
        self._calls_back: bool | None = None

    @staticmethod
    def fits(program: Program) -> bool:
        """Whether a program can be called like this: all leaves are arrays of JAX or Python's numbers."""
        kinds = [one.kind for one in program.layout.inputs]
        return (
            compat.REFUSES_DELETED
            and program.binding.outside is None
            and not program.statics.positions
            and not program.unhashable
            and all(issubclass(kind, jax.Array) or kind in NUMBERS for kind in kinds)
        )

    def __call__(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        given: Sequence[Leaf],
        ready: Sequence[Leaf],
    ) -> Result:
        """Run the program, and compile it if need be.

        **Arguments:**

        - `given`: the leaves of `(args, kwargs)`.
        - `ready`: the same, laid out.
        """
        result: Result
        if ready is given:
            result = self.jitted(args, kwargs, _ANY)
            return result
        # To rebuild a model takes longer than to look at its leaves, and most often only the data moved.
        new, start = [], 0
        for tree, structure in zip((*args, kwargs), self._structures, strict=True):
            stop = start + structure.num_leaves
            own = ready[start:stop]
            stays = all(map(is_, own, given[start:stop]))
            new.append(tree if stays else structure.unflatten(own))
            start = stop
        result = self.jitted(tuple(new[:-1]), new[-1], _ANY)
        return result

    def again(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        given: Sequence[Leaf],
        result: Result,
        refused: "OneDispatch | None",
    ) -> "OneDispatch | None":
        """What to try at the next call, after one in which nothing had to be moved.

        **Arguments:**

        - `args`, `kwargs`, `given`: of that call, and their leaves.
        - `result`: what it gave.
        - `refused`: what was tried at it, and was refused.
        """
        if compat.jit_disabled():
            return None
        if refused is self:
            self._chances -= 1
        if self._calls_back is None:
            # A callback of the user's, which may run on the calling thread, may trace functions of its own.
            equations = jaxprs.equations(self.jitted.trace(args, kwargs, _ANY).jaxpr)
            self._calls_back = any(map(jaxprs.calls_back, equations))
        if self._chances <= 0 or self._calls_back:
            return None
        # A kind of call that is refused once takes a slower way through JAX from then on. So we wait until
        # results that are fed back are laid out under the same name: on Explicit axes `P()` comes back as
        # `P(None, None)`.
        outputs, back = result
        written = [outputs[k] for k, _ in back.written]
        return self if _layouts(written) <= _layouts(given) else None

    def trace(self, *arrays: Leaf) -> jax.stages.Traced:
        """The program of these inputs, which the call that follows finds."""
        return self.jitted.trace(*self._treedef.unflatten(arrays), _ANY)


def _layouts(arrays: Sequence[Leaf]) -> set[tuple[int, Sharding]]:
    return {(x.ndim, x.sharding) for x in arrays if isinstance(x, jax.Array)}


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
        call: Program,
        treedef: PyTreeDef,
        complete: Callable[[tuple[PyTree, ...]], tuple[PyTree, ...]],
    ) -> None:
        # `complete` adds to the positional arguments what the mapping binds, such as a method's object.
        self.program = program
        self._complete = complete
        self.in_tree = treedef
        self._call = call
        # The owner of a static leaf may change it before it is compared.
        self._texts = call.statics.texts

    @property
    def args_info(self) -> Any:
        """The arguments, as `(args, kwargs)`, with a `jax.stages.ArgInfo` for each array."""
        call, inputs = self._call, tree_util.tree_leaves(self.program.args_info)
        inputs = list(map(explicit.unless_explicit, inputs))
        leaves = dict(zip(call.statics.positions, call.statics.values, strict=True))
        leaves |= dict(zip(call.positions, inputs, strict=True))
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
        return f"<{type(self).__name__} {self._call.declared.name}>"


class Lowered(Stage):
    """A call, lowered."""

    def compile(self, *args: PyTree, **kwargs: PyTree) -> "Compiled":
        """Compile it.

        **Arguments:**

        - `args`, `kwargs`: those of `jax.stages.Lowered.compile`.

        **Returns:** a function of the call's arguments.
        """
        compiled = self.program.compile(*args, **kwargs)
        return Compiled(compiled, self._call, self.in_tree, self._complete)


class Compiled(Stage):
    """A call, compiled for arguments like these: called as the function is."""

    def __init__(
        self,
        program: Any,
        call: Program,
        treedef: PyTreeDef,
        complete: Callable[[tuple[PyTree, ...]], tuple[PyTree, ...]],
    ) -> None:
        super().__init__(program, call, treedef, complete)
        inputs = tree_util.tree_leaves(program.args_info)
        donated = [k for k, info in enumerate(inputs) if info.donated]
        self._spared = spared_by(call, inputs, donated)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        call, layout = self._call, self._call.layout
        leaves, treedef = tree_util.tree_flatten((self._complete(args), kwargs))
        if treedef != self.in_tree:
            raise _other_structure(call.declared.name, self.in_tree, treedef)
        if call.unhashable:
            raise _compiled_for_unhashable(call.declared.name, call.unhashable)
        statics = call.statics
        if differ := statics.other_in(leaves):
            pairs = [(self._texts[position], leaves[position]) for position in differ]
            raise _other_statics(call.declared.name, pairs)
        given = [
            x if isinstance(x, jax.Array) or k in layout.fresh else jnp.asarray(x)
            for k, x in enumerate(call.arrays(leaves))
        ]
        ready, shown = layout.concrete(given)
        outputs, back = self.program(*self._spared(ready))
        self._spared.keep(outputs)
        if call.binding.outside is not None:
            outputs = call.binding.outside(outputs, back.placements)
        return call.write_back(given, shown, outputs, back)


def _other_structure(name: str, lowered: PyTreeDef, given: PyTreeDef) -> TypeError:
    return TypeError(
        f"{name} was compiled for arguments of one tree structure, and called with another.\n"
        f"  compiled for: {lowered}\n  called with: {given}\n"
        "Lower it for these arguments, or call the function itself, which compiles anew."
    )


def _other_statics(name: str, differ: Sequence[tuple[str, object]]) -> TypeError:
    return error_listing(
        TypeError,
        f"{name} was called with other values of arguments that are not arrays than it was compiled for",
        [f"compiled for {compiled}, called with {given!r}" for compiled, given in differ],
        "Lower it for these arguments, or call the function itself, which compiles anew.",
    )


def _compiled_for_unhashable(name: str, bad: Sequence[tuple[str, object]]) -> TypeError:
    return error_listing(
        TypeError,
        f"{name} was compiled for arguments that are not arrays and cannot be hashed, so a change in them "
        "would go unseen",
        _typed(bad),
        _HASHABLE + "call the function itself, which traces it anew.",
    )


def _check_signature(
    fun: Callable[..., Any], name: str, positional: int, keywords: Iterable[str]
) -> None:
    """Refuse arguments that `fun` does not take, in the words of Python."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(f"{name}{signature} cannot be called like this: {error}.") from None
