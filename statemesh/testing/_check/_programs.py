"""A function on a mesh, the reference and their gradients, kept together with their compiled programs."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import statemesh as sm

from .. import _errors as errors
from .._caches import Recent, is_hashable, static_key
from .._program._doubled import Called, Doubled, Wide, compile_unfused, narrowed
from .._program._jaxprs import Equation
from .._program._numbers import (
    FACTOR_OF_COPIES,
    FEW_RUNS,
    RUNS_OF_COPIES,
    Rounding,
    distances,
    is_inexact,
)
from .._program._paths import owners
from .._program._replay import BrokenPromise
from .._program._trace import is_array_or_type, leaf_key, name_of, trace_exactly, weighted_gradient
from .._types import AnyLeaf, AnyMesh, Args, Fun, Numbers, PyTree, tree_util


Entry = TypeVar("Entry")


# What is kept


# Each entry keeps compiled programs alive.
_kept: Recent[Any] = Recent(128)


def kept(key: Hashable | None, make: Callable[..., Entry], *parts: Any) -> Entry:
    """What `make` makes of these parts: for equal parts the same object, whose programs are compiled already.

    **Arguments:**

    - `key`: whatever else it depends on; `None` where that cannot be known.
    """
    if key is None or not is_hashable(parts):
        return make(*parts)
    entry: Entry = _kept.get((make, key, parts), lambda: make(*parts))
    return entry


@jax.tree_util.register_static
class StaticLeaves:
    """The leaves of a tree that are no arrays, made hashable."""

    def __init__(self, tree: PyTree) -> None:
        self.tree = tree
        leaves, structure = jax.tree.flatten(tree)
        self.key = structure, tuple(static_key(x) for x in leaves)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticLeaves) and self.key == other.key


# The gradient that is compared: of a weighted sum of all results, by the arrays of the arguments


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is differentiated by what.

    **Attributes:**

    - `of`: the numbers of the leaves of the results.
    - `by`: the numbers of the leaves of the arguments.
    - `constant`: the numbers of the leaves of the results that have no derivative.
    """

    of: tuple[int, ...] = ()
    by: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.of and self.by)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithGradient:
    """The results of a call, and the gradient."""

    results: PyTree
    gradient: list[Any]


def results_of(returned: PyTree) -> PyTree:
    """The results of a call, without the gradient if that is there."""
    return returned.results if isinstance(returned, WithGradient) else returned


def inexact_leaves(tree: PyTree) -> tuple[int, ...]:
    """The numbers of the leaves that are arrays of floats, except in the states of Optax.

    What an optimizer makes of a slot that is zero has no derivative.
    """
    is_slots: Callable[[object], bool] = lambda x: type(x).__module__.partition(".")[0] == "optax"
    pairs = zip(tree_util.tree_leaves(tree), owners(tree, is_slots), strict=True)
    inexact = [
        not is_slots(owner) and hasattr(x, "dtype") and is_inexact(x.dtype) for x, owner in pairs
    ]
    return tuple(number for number, hit in enumerate(inexact) if hit)


def with_gradient(call: Fun, selected: Selection) -> Fun:
    """A function that gives the results of a call and, if anything is selected, the gradient."""
    if not selected:
        return call

    def both(*args: PyTree, **kwargs: PyTree) -> WithGradient:
        leaves, treedef = tree_util.tree_flatten((args, kwargs))
        rest: list[PyTree] = []

        def outputs(chosen: Sequence[AnyLeaf]) -> tuple[list[jax.Array], PyTree]:
            filled = list(leaves)
            for number, x in zip(selected.by, chosen, strict=True):
                filled[number] = x
            again, named = treedef.unflatten(filled)
            result = call(*again, **named)
            arrays, statics = eqx.partition(result, is_array_or_type)
            rest[:] = [statics]
            flat = tree_util.tree_leaves(result)
            return [flat[k] for k in selected.of if k < len(flat)], arrays

        gradient, arrays = weighted_gradient(outputs, [leaves[k] for k in selected.by])
        return WithGradient(eqx.combine(arrays, rest[0]), gradient)

    both.__name__ = name_of(call)
    return both


# The gradient is given up after so many errors, if no part of the results has a derivative so far.
_MOST_ERRORS = 8


def differentiable(
    selected: Selection, traces: Callable[[Selection], Any], insists: bool
) -> Selection:
    """The selection without the results that have no derivative.

    They are searched in halves, because a model has many leaves, and a trace may take seconds.

    **Arguments:**

    - `traces`: traces the call with its gradient. It raises where there is none.
    - `insists`: whether its error is raised where no result has a derivative. If not, all of them are
        `constant`, and the search ends after a few errors.
    """
    parts, left, errors = [selected.of], list[int](), list[Exception]()
    while parts and (insists or left or len(errors) < _MOST_ERRORS):
        part = parts.pop()
        others = tuple(k for k in selected.of if k not in part)
        try:
            traces(Selection(part, selected.by, others))
            left += part
        except Exception as error:
            errors.append(error)
            half = len(part) // 2
            parts += [part[half:], part[:half]] if half else []
    if not left:
        if insists:
            raise errors[0]
        return Selection(constant=selected.of)
    refused = tuple(k for k in selected.of if k not in left)
    without = Selection(tuple(sorted(left)), selected.by, refused)
    if errors:
        traces(without)
    return without


def with_constants(fun: Fun, numbers: Sequence[int]) -> Fun:
    """The function of shards with these leaves of its results taken for constants."""

    def held(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, treedef = tree_util.tree_flatten(fun(*args, **kwargs))
        for k in numbers:
            leaves[k] = jax.lax.stop_gradient(leaves[k])
        return treedef.unflatten(leaves)

    held.__name__ = name_of(fun)
    return held


# A function and its calls


# From the arguments and the results of a call to the arguments of the next one.
Feed: TypeAlias = Callable[[PyTree, PyTree], PyTree]


class Programs:
    """The programs of a function: in its own dtypes, and replayed in double precision.

    They give its results and, if one is selected, the gradient.

    **Arguments:**

    - `what`: what it is called where results are compared with those that it gives.
    - `context`: makes the context in which it is traced.
    - `is_traced`: whether JAX can trace it. A function of NumPy has only the results that it gives.
    - `program`: what the names of its programs begin with, which JAX logs when it compiles them. Left empty,
        the function on one device gives it its name.

    **Attributes:**

    - `call`: the function that gives the results, with the gradient if one is selected.
    """

    def __init__(
        self,
        what: str,
        fun: Fun,
        selected: Selection,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        is_traced: bool = True,
        program: str = "",
    ) -> None:
        self.what, self.is_traced = what, is_traced
        self.call, self._context = with_gradient(fun, selected), context
        self.program = program or f"{name_of(fun)}_on_one_device"
        self._doubled: Recent[Doubled] = Recent()
        # JAX would keep the programs for all static values that were ever given.
        self._compiled: Recent[Fun] = Recent()

    def of(self, types: PyTree) -> Doubled:
        """The traced call with arguments of these types."""
        leaves, treedef = tree_util.tree_flatten(types)

        def new() -> Doubled:
            with self._context():
                traced = trace_exactly(self.call, treedef, leaves)
            return Doubled(name_of(self.call), self.program, traced, leaves)

        return self._doubled.get((treedef, *map(leaf_key, leaves)), new)

    def form(self, types: PyTree, args: Args) -> PyTree:
        """The results of the first call. There may be types in the place of arrays."""
        return self.of(types).trace.form if self.is_traced else self.call(*args[0], **args[1])

    def jitted(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the function inside `jax.jit`."""
        arrays, statics = eqx.partition((args, kwargs), is_array_or_type)

        def whole(arrays: PyTree) -> PyTree:
            args, kwargs = eqx.combine(arrays, statics)
            result, rest = eqx.partition(self.call(*args, **kwargs), is_array_or_type)
            return result, StaticLeaves(rest)

        whole.__name__ = f"{self.program}_in_jit"
        new = lambda: jax.jit(whole, compiler_options=compile_unfused())
        with self._context():
            result, rest = self._compiled.get(StaticLeaves(statics), new)(arrays)
        return eqx.combine(result, rest.tree)

    def on_one_device(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call a reference in the dtypes of the program."""
        return self.jitted(*args, **kwargs)


def chained(call: Fun, args: Args, steps: int, feed: Feed) -> list[PyTree]:
    """The results of calls, each of which gets what the call before returned."""
    results = []
    for _ in range(steps):
        # One call at a time: in older versions of JAX the collectives of several running calls can lock up.
        results.append(jax.block_until_ready(call(*args[0], **args[1])))
        args = feed(args, results[-1])
    return results


# So many numbers of results may several runs have together.
_AT_ONCE = 2**20
_NOISE: dict[Rounding, tuple[float, float]] = {"double": (1.0, 0.0), "own": (0.0, 1.0)}


class Chain:
    """Calls in a row in double precision. Each gets what the call before returned.

    **Arguments:**

    - `programs`: those of the function. Noise moves nothing in one that JAX cannot trace.
    - `args`: the arguments of the first call, and its keyword arguments.
    - `feed`: gives the arguments of the next call.
    - `steps`: the number of calls.
    - `compared_with`: for calls on a mesh, the function that they are compared with.

    **Attributes:**

    - `exact`: the calls without noise.
    """

    def __init__(
        self,
        programs: Programs,
        args: Wide,
        feed: Feed,
        steps: int,
        compared_with: Programs | None = None,
    ) -> None:
        self._programs, self._args, self._compared_with = programs, args, compared_with
        self._feed, self._steps = feed, steps
        (self.exact,) = self._runs()
        self._moved: dict[Rounding, list[list[Numbers]]] = {}
        self._done: dict[Rounding, int] = defaultdict(int)
        self._unended: dict[Rounding, list[Equation]] = defaultdict(list)
        # For each call and each promise of the program, by how much copies differ in runs with noise.
        self._amounts: dict[tuple[int, int], list[float]] = defaultdict(list)

    def _runs(self, noise: Numbers | None = None) -> list[list[Called]]:
        """The calls of each run: one without noise, or one for each of its rows."""
        inputs = [self._args] * (1 if noise is None else len(noise))
        runs: list[list[Called]] = [[] for _ in inputs]
        for _ in range(self._steps):
            for calls, called in zip(runs, self._called(inputs, noise), strict=True):
                calls.append(called)
            inputs = [self._fed(calls[-1]) for calls in runs]
        return runs

    def _fed(self, call: Called) -> Wide:
        args, results = call.args, call.results
        return Wide(self._feed(args.types, results.types), self._feed(args.values, results.values))

    def _called(self, args: Sequence[Wide], noise: Numbers | None) -> list[Called]:
        programs, other = self._programs, self._compared_with or self._programs
        if not programs.is_traced:
            (one,) = args
            positional, by_keyword = narrowed(one)
            result = programs.call(*positional, **by_keyword)
            return [Called(one, Wide(result, result))]
        call = programs.of(args[0].types)
        if noise is None or not other.is_traced:
            return call.runs(args, noise)
        # Constants that only one of the two has may be rounded.
        return call.runs(args, noise, call.literals - other.of(args[0].types).literals)

    def moved(self, rounding: Rounding, runs: int) -> list[list[Numbers]]:
        """By how much noise moves each number: the most of so many runs, for each call and array.

        It is infinite where a number becomes NaN or infinite, or is so no longer.
        """
        if rounding not in self._moved:
            self._moved[rounding] = [
                [np.zeros(x.shape) for x in call.numbers] for call in self.exact
            ]
        most = self._moved[rounding]
        while self._programs.is_traced and self._done[rounding] < runs:
            first = self._done[rounding]
            self._done[rounding] = min(runs, first + self._at_once)
            numbers = range(first, self._done[rounding])
            noise = np.array([[*_NOISE[rounding], float(number + 1)] for number in numbers])
            self._note(rounding, self._runs(noise))
        return most

    def _note(self, rounding: Rounding, runs: Sequence[Sequence[Called]]) -> None:
        """Keep what runs with noise give."""
        most = self._moved[rounding]
        for noisy in runs:
            for step, (exact, other) in enumerate(zip(self.exact, noisy, strict=True)):
                self._unended[rounding] += other.unended
                for k, pair in enumerate(zip(exact.numbers, other.numbers, strict=True)):
                    most[step][k] = np.maximum(most[step][k], distances(*pair))
                if rounding == "double":
                    for number, promise in other.broken.items():
                        self._amounts[step, number].append(promise.amount)

    @property
    def _at_once(self) -> int:
        """How many runs go side by side."""
        numbers = sum(np.size(x) for call in self.exact[:1] for x in call.numbers)
        return max(1, _AT_ONCE // max(numbers, 1))

    def unended(self, rounding: Rounding) -> list[Equation]:
        """The loops that do not end where operations round."""
        if self._programs.is_traced and self._programs.of(self._args.types).loops:
            self.moved(rounding, FEW_RUNS)
        return self._unended[rounding]

    def broken(self, step: int) -> list[BrokenPromise]:
        """The promises that do not hold, where copies differ by more than rounding explains."""
        promises = self.exact[step].broken
        if promises:
            self.moved("double", RUNS_OF_COPIES)

        def is_rounding(number: int, amount: float) -> bool:
            others = self._amounts[step, number]
            return (
                bool(others) and max(abs(x - amount) for x in others) * FACTOR_OF_COPIES >= amount
            )

        return [x for number, x in promises.items() if not is_rounding(number, x.amount)]


# The function on a mesh


def mesh_of(mesh: object) -> AnyMesh:
    """The mesh itself, or a mesh with the given sizes."""
    if isinstance(mesh, AnyMesh):
        return mesh
    if not isinstance(mesh, Mapping):
        raise TypeError(
            f"meshes: {mesh!r} is a {type(mesh).__name__}. Give a list of jax.sharding.Mesh, or of the sizes "
            'of their axes: meshes=[{"x": 2}, {"x": 4, "y": 2}].'
        )
    sizes = tuple(mesh.values())
    devices = jax.devices()
    count = int(np.prod(sizes))
    if count > len(devices):
        raise sm.StatemeshError(
            f"meshes: {errors.axes_str(mesh)} needs {count} devices, and JAX has {len(devices)}. Simulate "
            f"them: statemesh.testing.set_devices({count}) in the first lines of conftest.py; or emulate "
            "the mesh on one device with statemesh.testing.emulate."
        )
    shaped = np.array(devices[:count]).reshape(sizes)
    return Mesh(shaped, tuple(mesh), axis_types=(AxisType.Auto,) * len(sizes))


class FunctionOnMesh:
    """A function on a mesh.

    **Arguments:**

    - `specs`: further arguments of `shard_map`; `None` for a function that is mapped already.
    """

    def __init__(self, fun: Fun, mesh: AnyMesh, specs: StaticLeaves | None) -> None:
        self.fun, self.mesh = fun, mesh
        self.specs: Mapping[str, PyTree] | None = None if specs is None else specs.tree
        # What `pmap2` and `vmap2` return has no mesh of named axes, and is refused.
        self.mapped = fun.on_mesh(mesh) if isinstance(fun, sm.StatefulMapping) else self._map(fun)
        self._programs: Recent[Programs] = Recent()

    def _map(self, fun: Fun) -> sm.StatefulMapping:
        if self.specs is None:
            # No other function can take the place of the one that a mapping was made from.
            raise NotImplementedError
        return sm.shard_map(fun, self.mesh, **self.specs)

    @property
    def label(self) -> str:
        return f"on mesh {errors.axes_str(dict(self.mesh.shape))}"

    @property
    def has_devices(self) -> bool:
        return isinstance(self.mesh, Mesh)

    def placed(self, args: Args) -> Args:
        """The arguments where they lie on the mesh."""
        return self.mapped.place(*args[0]), args[1]

    def programs(self, selected: Selection, *, unsharded: bool = False) -> Programs:
        """The programs that give the results and the gradient, on the mesh or on one device."""

        def new() -> Programs:
            mapped, name = self.mapped, name_of(self.mapped)
            if selected.constant:
                mapped = self._map(with_constants(self.fun, selected.constant))
            if unsharded:
                what, program = "the function on one device", f"{name}_on_one_device"
                return Programs(what, mapped.unsharded, selected, program=program)
            context = self._set_mesh if selected else nullcontext
            # Where results depend on the mesh, each mesh has a reference of its own.
            what, program = "what emulate gives", f"{name}_on_mesh"
            return Programs(what, mapped, selected, context, program=program)

        return self._programs.get((selected, unsharded), new)

    def _set_mesh(self) -> AbstractContextManager[object]:
        # JAX can make zero gradients with Explicit axes in their type only where the mesh is set.
        if AxisType.Explicit not in self.mesh.axis_types:
            return nullcontext()
        if isinstance(self.mesh, Mesh):
            return jax.set_mesh(self.mesh)
        return jax.sharding.use_abstract_mesh(self.mesh)
