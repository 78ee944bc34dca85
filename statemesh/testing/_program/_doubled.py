"""A call in double precision, with all shards on one device."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._recent import Recent
from .._static_keys import static_key
from .._types import AnyLeaf, Fun, PyTree, tree_util
from ._jaxprs import Equation, Sources, drawn_arguments, rounded_literals, sources_of
from ._noise import Promoted, is_inexact, promoted
from ._replay import UNENDED, Broken, NoisyReplay, PromotedReplay, Replay, broken, unended
from ._trace import NO_MESH, Trace, is_array_or_type, on_one_device, trace, type_of


def compile_fast() -> dict[str, int] | None:
    """Options for a program that runs a few times: it need not be fast, but it must compile fast."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


@dataclasses.dataclass(frozen=True)
class Wide:
    """Trees of arguments or results in double precision.

    **Attributes:**

    - `types`: the tree with the type that each array has in the program in its place.
    - `values`: the tree with arrays whose floats are in double precision.
    """

    types: PyTree
    values: PyTree


def widened(tree: PyTree) -> Wide:
    """Arguments in double precision."""
    types = jax.tree.map(lambda x: type_of(x) if is_array_or_type(x) else x, tree)
    with jax.enable_x64(True):
        return Wide(types, jax.tree.map(_widened, tree))


def _widened(x: AnyLeaf) -> AnyLeaf:
    if not is_array_or_type(x):
        return x
    x = on_one_device(x)
    return jnp.asarray(np.asarray(x), promoted(x.dtype)) if is_inexact(x.dtype) else x


def narrowed(wide: Wide) -> PyTree:
    """The trees in the dtypes of the program."""

    def one(kind: AnyLeaf, x: AnyLeaf) -> AnyLeaf:
        if not is_array_or_type(kind) or not is_inexact(kind.dtype):
            return x
        return jnp.asarray(np.asarray(x), kind.dtype)

    return jax.tree.map(one, wide.types, wide.values)


class Doubled:
    """A function whose calls are traced as they are and replayed in double precision.

    **Arguments:**

    - `call`: a mapped function, or a function that calls one.
    - `context`: makes the context in which it is traced.
    """

    def __init__(
        self, call: Fun, context: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self.call = call
        self.context = context
        self.name = getattr(call, "__name__", type(call).__name__)
        self._programs: Recent[_Program] = Recent()

    def form(self, types: PyTree) -> PyTree:
        """The tree of the results, with types in the place of arrays."""
        return self.program_of(types).trace.form

    def own_dtype(self, types: PyTree) -> set[str]:
        """The operations that could not run in double precision."""
        arithmetic = self.program_of(types).exact.replay.arithmetic
        assert isinstance(arithmetic, Promoted)
        return arithmetic.own_dtype

    def is_untouched(self, types: PyTree, argument: int, result: int) -> bool:
        """Whether a leaf of the results is a leaf of the arguments, each by its number."""
        jaxpr = self.program_of(types).trace.closed.jaxpr
        given = [is_array_or_type(x) for x in jax.tree.leaves(types)]
        found = [is_array_or_type(x) for x in jax.tree.leaves(self.form(types))]
        return jaxpr.invars[sum(given[:argument])] is jaxpr.outvars[sum(found[:result])]

    def sources(self, types: PyTree) -> list[Sources]:
        """For each array of the results, the numbers of the arrays of the arguments that it depends on."""
        return sources_of(self.program_of(types).trace.closed.jaxpr)

    def drawn(self, types: PyTree) -> frozenset[int]:
        """The numbers of the leaves of the arguments from which random numbers are drawn."""
        found = drawn_arguments(self.program_of(types).trace.closed.jaxpr)
        arrays = [k for k, x in enumerate(jax.tree.leaves(types)) if is_array_or_type(x)]
        return frozenset(arrays[k] for k in found)

    def loops(self, types: PyTree) -> bool:
        """Whether it has loops that might not end."""
        promises = self.program_of(types).exact.replay.promises
        return any(promise.index == UNENDED for promise in promises)

    def __call__(
        self, args: Wide, noise: Any = None, compared_with: "Doubled | None" = None
    ) -> "Called":
        """Call the function.

        **Arguments:**

        - `args`: the tuple of the positional arguments and the dictionary of the others.
        - `noise`: that of `Noisy`; without it there is none, and the program is a smaller one.
        - `compared_with`: the function that this one is compared with. Constants that only one of the two
            has may be rounded.
        """
        program = self.program_of(args.types)
        arrays = [x for x in jax.tree.leaves(args.values) if is_array_or_type(x)]
        if noise is None:
            return program(program.exact, arrays)
        others = (compared_with or self).program_of(args.types).literals
        return program(program.noisy(program.literals - others), arrays, noise)

    def program_of(self, types: PyTree) -> "_Program":
        """The traced call with arguments of these types."""
        leaves, treedef = tree_util.tree_flatten(types)
        # A static leaf whose value cannot be known is never equal to another.
        statics = tuple(_key(x) for x in leaves)
        key = treedef, statics

        def new() -> _Program:
            with self.context():
                traced = trace(self.call, treedef, leaves)
            return _Program(self.name, traced)

        return self._programs.get(key, new)


def _key(x: AnyLeaf) -> Hashable:
    if is_array_or_type(x):
        return x.shape, x.dtype, bool(getattr(x, "weak_type", False))
    return static_key(x) or object()


@dataclasses.dataclass(frozen=True)
class Called:
    """What a call gave.

    **Attributes:**

    - `results`: the results.
    - `broken`: the promises that do not hold.
    - `unended`: the loops that were stopped before they had ended.
    """

    results: Wide
    broken: list[Broken]
    unended: list[Equation]


class _Program:
    """One traced call."""

    def __init__(self, name: str, traced: Trace) -> None:
        self.name, self.trace = name, traced
        self.exact = _Compiled(PromotedReplay(name, traced.closed.jaxpr))
        self._noisy: Recent[_Compiled] = Recent()
        with jax.enable_x64(True):
            self.consts = [_widened(jnp.asarray(x)) for x in traced.closed.consts]

    @cached_property
    def literals(self) -> frozenset[tuple[str, float]]:
        return rounded_literals(self.trace.closed)

    def noisy(self, rounded: frozenset[tuple[str, float]]) -> "_Compiled":
        """The program with noise, also in these literals."""
        new = lambda: _Compiled(NoisyReplay(self.name, self.trace.closed.jaxpr, rounded))
        return self._noisy.get(rounded, new)

    def __call__(
        self, compiled: "_Compiled", arrays: Sequence[AnyLeaf], noise: Any = None
    ) -> Called:
        with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
            first = [] if noise is None else [jnp.asarray(noise, np.float64)]
            made, differences = compiled.run(*first, *self.consts, *arrays)
        promises, outvars = compiled.replay.promises, self.trace.closed.jaxpr.outvars
        return Called(
            Wide(self.trace.form, self.trace.results(made)),
            broken(promises, differences, outvars, self.trace.paths),
            unended(promises, differences),
        )


class _Compiled:
    """One replay of a program, compiled."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.run = jax.jit(replay, compiler_options=compile_fast())
