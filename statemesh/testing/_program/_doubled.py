"""A call in double precision, with all shards on one device."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import AnyLeaf, Fun, Numbers, PyTree
from ._choices import thresholds
from ._counters import counters, limits_of
from ._jaxprs import Equation, Sources, all_equations, forwarded, sources_of, split_inputs
from ._literals import rounded_literals
from ._numbers import is_inexact, numbers, promoted
from ._replay import BrokenPromise, Differences, Replay
from ._stepped import Stepped, compile_fast
from ._trace import (
    NO_MESH,
    Trace,
    is_array_or_type,
    on_one_device,
    type_of,
)


def compile_unfused() -> dict[str, int | str] | None:
    """`compile_fast`, and operations stay apart.

    XLA copies into each fusion what its results need, so that a program in which one state leads to the next
    would compile in a time that grows with the square of their number.
    """
    options = compile_fast()
    return None if options is None else {**options, "xla_disable_hlo_passes": "fusion"}


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

    def narrow(kind: AnyLeaf, x: AnyLeaf) -> AnyLeaf:
        if not is_array_or_type(kind) or not is_inexact(kind.dtype):
            return x
        return jnp.asarray(np.asarray(x), kind.dtype)

    return jax.tree.map(narrow, wide.types, wide.values)


@dataclasses.dataclass(frozen=True)
class Called:
    """What a call gave.

    **Attributes:**

    - `args`, `results`: the arguments, and the results.
    - `broken`: the promises that do not hold, by their numbers in the program.
    - `unended`: the loops that were stopped before they had ended.
    """

    args: Wide
    results: Wide
    broken: dict[int, BrokenPromise] = dataclasses.field(default_factory=dict)
    unended: list[Equation] = dataclasses.field(default_factory=list)

    @cached_property
    def numbers(self) -> list[Numbers]:
        return [numbers(x) for x in jax.tree.leaves(self.results.values)]


class Doubled:
    """A traced call, with its replays in double precision.

    **Arguments:**

    - `name`: the name of the function in messages.
    - `program`: what the names of its programs begin with, which JAX logs when it compiles them.

    **Attributes:**

    - `trace`: the traced call.
    - `own_dtype`: the operations that could not run in double precision, once it has run.
    - `loops`: whether it has loops that might not end.
    - `sides`: for each side of what the user's lines choose, whether a call has taken it.
    """

    def __init__(self, name: str, program: str, traced: Trace, args: Sequence[AnyLeaf]) -> None:
        self._name, self._program = name, program
        self.trace, jaxpr = traced, traced.closed.jaxpr
        self._inputs = [k for k, x in enumerate(args) if is_array_or_type(x)]
        self._outputs = [
            k for k, x in enumerate(jax.tree.leaves(traced.form)) if is_array_or_type(x)
        ]
        self._replay = Stepped(name, jaxpr, traced.exact)
        self.own_dtype, self.loops = self._replay.own_dtype, self._replay.loops
        self.sides = self._replay.sides(self._replay.no_differences)
        with jax.enable_x64(True):
            self._consts = [_widened(jnp.asarray(x)) for x in traced.closed.consts]

    def runs(
        self,
        args: Sequence[Wide],
        noise: Numbers | None = None,
        rounded: frozenset[tuple[str, float]] = frozenset(),
    ) -> list[Called]:
        """Call the function once for each run, with noise, also in the literals that are rounded."""
        arrays = [
            [*self._consts, *filter(is_array_or_type, jax.tree.leaves(one.values))] for one in args
        ]
        with jax.enable_x64(True), jax.sharding.use_abstract_mesh(NO_MESH):
            found = self._replay.runs(arrays, noise, rounded)
        return [self._called(*each) for each in zip(args, *zip(*found, strict=True), strict=True)]

    def _called(self, args: Wide, arrays: Sequence[AnyLeaf], differences: Differences) -> Called:
        results = Wide(self.trace.form, self.trace.results(arrays))
        self.sides |= {side: True for side, seen in self._replay.sides(differences).items() if seen}
        broken = self._replay.broken(differences, self.trace.paths)
        return Called(args, results, broken, self._replay.unended(differences))

    def in_own_dtypes(self, args: PyTree) -> PyTree:
        """The results of the replay in the dtypes of the program."""
        arrays = [on_one_device(x) for x in jax.tree.leaves(args) if is_array_or_type(x)]
        with jax.sharding.use_abstract_mesh(NO_MESH):
            consts = [on_one_device(jnp.asarray(x)) for x in self.trace.closed.consts]
            results, _ = self._in_own_dtypes(*consts, *arrays)
        return self.trace.results(results)

    @cached_property
    def _in_own_dtypes(self) -> Fun:
        replay = Replay(self._name, self.trace.closed.jaxpr)
        replay.__name__ = f"{self._program}_on_one_device"
        return jax.jit(replay, compiler_options=compile_unfused())

    @cached_property
    def literals(self) -> frozenset[tuple[str, float]]:
        return rounded_literals(self.trace.closed, self.trace.exact)

    @cached_property
    def _flow(self) -> tuple[list[Sources], frozenset[Sources]]:
        return sources_of(self.trace.closed)

    @property
    def exact(self) -> set[int]:
        """The numbers of the leaves of the results that are arrays and computed without floats."""
        floats = {k for k, aval in enumerate(self.trace.closed.in_avals) if is_inexact(aval.dtype)}
        pairs = zip(self._outputs, self._flow[0], strict=True)
        return {leaf for leaf, sources in pairs if floats.isdisjoint(sources)}

    @property
    def drawn(self) -> list[set[int]]:
        """For each draw of random numbers, the numbers of the leaves of the arguments that make its key."""
        return [{self._inputs[i] for i in sources} for sources in self._flow[1]]

    def uses(self, dtype: Any) -> bool:
        """Whether the program computes in a dtype."""
        every = all_equations(self.trace.closed.jaxpr)
        # A token has no dtype.
        return any(getattr(x.aval, "dtype", None) == dtype for eqn in every for x in eqn.outvars)

    @cached_property
    def split(self) -> set[int]:
        """The numbers of the leaves of the arguments of which a shard gets a part."""
        return {self._inputs[i] for i in split_inputs(self.trace.closed)}

    @cached_property
    def thresholds(self) -> list[float]:
        """The sizes of the numbers that the user's lines compare floats with, or limit them to."""
        return thresholds(self.trace.closed.jaxpr)

    @cached_property
    def counters(self) -> set[int]:
        """The numbers of the leaves of the arguments that count, and may have any value."""
        return {self._inputs[i] for i in self._counting}

    @cached_property
    def counted_to(self) -> list[int]:
        """The whole numbers of the program that a count meets."""
        return limits_of(self.trace.closed, self._counting)

    @cached_property
    def _counting(self) -> Sources:
        return counters(self.trace.closed)

    @cached_property
    def forwarded(self) -> dict[int, int | None]:
        """For each array of the results that is one of the arguments, which it is, by their leaves."""
        jaxpr = self.trace.closed.jaxpr
        leaves = [None] * len(jaxpr.constvars) + self._inputs
        pairs = zip(self._outputs, forwarded(jaxpr), strict=True)
        return {leaf: leaves[i] for leaf, i in pairs if i is not None}
