"""A program in double precision on one device, equation by equation, in several runs at once.

NumPy runs the equations that it has an operation for; JAX compiles the others, each by itself, once for all
programs that have one like it. To compile a program with noise as a whole takes XLA far longer than to run it
so, and for a program in which one state leads to the next a time that grows with the square of their number.
"""

import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._caches import Recent, is_hashable
from .._types import AnyLeaf, Numbers
from ._by_numpy import by_numpy, collects_by_numpy, is_number, operands_for_numpy
from ._collective_rules import RULES
from ._jaxprs import Equation, Jaxpr, inner_jaxprs, names_of, operands_of_loop
from ._literals import Exact
from ._noise import SCATTERS, Noisy, OwnDtypes, Promoted
from ._numbers import is_inexact, is_key
from ._replay import Differences, Frame, Replay
from ._stacked import Axes, MappedAxes, Stacked, numpy_of


# Each holds about ten maps of memory, of which a process may have some 65,000.
_compiled: Recent["_Compiled"] = Recent(1024)
# On more numbers JAX is faster, although it has to compile the operation and its noise.
_LARGE = 2**15

_NO_NOISE = np.zeros((1, 3))
# The axis along which the values of several runs are stacked, before all mesh axes.
_RUNS = "runs of a check"


class Stepped(Replay):
    """A traced program that runs in double precision on one device.

    **Arguments:**

    - `exact`: the numbers that literals stand for.
    - `few_rounds`: a loop over so many entries runs round by round. JAX compiles a longer one.

    **Attributes:**

    - `own_dtype`: the operations on floats that have run in their own dtype, by their names.
    """

    def __init__(self, name: str, jaxpr: Jaxpr, exact: Exact, few_rounds: int = 8) -> None:
        super().__init__(name, jaxpr)
        self._exact, self._few_rounds = exact, few_rounds
        self.own_dtype: set[str] = set()
        # It runs in what is compiled, and notes its promises under the same numbers.
        self._traced = Replay(name, jaxpr)
        self._traced.promises = self.promises
        self._noise, self._rounded = _NO_NOISE, frozenset[tuple[str, float]]()

    def runs(
        self,
        inputs: Sequence[Sequence[AnyLeaf]],
        noise: Numbers | None,
        rounded: frozenset[tuple[str, float]],
    ) -> list[tuple[list[AnyLeaf], Differences]]:
        """The results of each run, and the differences that it has found.

        **Arguments:**

        - `inputs`: those of each run.
        - `noise`: a row for each run, as `Noisy` takes them; `None` for one run without noise.
        - `rounded`: the literals that noise moves too.
        """
        count, (amounts, positions) = len(inputs), self.no_differences
        self._noise, self._rounded = _NO_NOISE if noise is None else noise, rounded
        frame = Frame(
            MappedAxes({_RUNS: count}), (np.stack([amounts] * count), np.stack([positions] * count))
        )
        with np.errstate(all="ignore"):
            self.arithmetic, self.lanes = Promoted(self._exact), 0
            if noise is not None:
                self.arithmetic, self.lanes = Noisy(noise, rounded, self._exact), 1
            values = [_of_runs(each) for each in zip(*inputs, strict=True)]
            results = [_by_run(x, count) for x in self._run(self.jaxpr, values, frame)]
        amounts, positions = frame.differences
        return [([x[k] for x in results], (amounts[k], positions[k])) for k in range(count)]

    def alone(self, eqn: Equation, values: list[Stacked], scope: MappedAxes) -> list[Stacked]:
        """The results of one equation of the program, without noise."""
        amounts, positions = self.no_differences
        self._noise, self._rounded = _NO_NOISE, frozenset()
        self.arithmetic, self.lanes = Promoted(self._exact), 0
        with np.errstate(all="ignore"):
            return self.leaf(eqn, values, Frame(scope, (amounts[None], positions[None])))

    def _literal(self, atom: Any) -> Stacked:
        x = self.arithmetic.literal(atom)
        return Stacked(x, (_RUNS,) if x.ndim else ())

    def leaf(self, eqn: Equation, values: list[Stacked], frame: Frame) -> list[Stacked]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan" and params["length"] <= self._few_rounds:
            return self._round_by_round(eqn, values, frame)
        if name == "cond" and (index := _one_number(values[0].x)) is not None:
            last = len(params["branches"]) - 1
            return self.run(params["branches"][min(max(index, 0), last)], values[1:], frame)
        results = self._by_numpy(eqn, values, frame)
        return self._by_jax(eqn, values, frame) if results is None else results

    def _round_by_round(
        self, eqn: Equation, values: Sequence[Stacked], frame: Frame
    ) -> list[Stacked]:
        """The results of a scan."""
        params, rounds = eqn.params, list[Sequence[Stacked]]()
        consts, carry, scanned = operands_of_loop(eqn, values)
        for k in sorted(range(params["length"]), reverse=params["reverse"]):
            slices = [entry_of(value, k) for value in scanned]
            results = self.run(params["jaxpr"], [*consts, *carry, *slices], frame)
            carry = results[: len(carry)]
            rounds.append(results[len(carry) :])
        rounds = rounds[::-1] if params["reverse"] else rounds
        return [*carry, *(stacked_rounds(each, frame.scope) for each in zip(*rounds, strict=True))]

    def _by_numpy(self, eqn: Equation, values: list[Stacked], frame: Frame) -> list[Stacked] | None:
        name, scope = eqn.primitive.name, frame.scope
        if id(eqn) in self._exact.compared or not all(is_number(v.x.dtype) for v in values):
            return None
        sizes = [
            value.x.size // len(value.x) if _of_each_run(value) else value.x.size
            for value in values
        ]
        sizes += [math.prod(getattr(atom.aval, "shape", ())) for atom in eqn.outvars]
        if max(sizes, default=0) > _LARGE:
            return None
        if name in RULES:
            if not collects_by_numpy(eqn, scope):
                return None
            with_runs = list(map(self._with_runs, values))
            results = self._collective(eqn, with_runs, {*names_of(eqn)}, scope)
            return list(map(_without_copies, results))
        if name == "axis_index" and eqn.params["axis_name"] in scope.sizes:
            return super().leaf(eqn, values, frame)
        axes = scope.union(map(self._with_runs, values))
        xs = operands_for_numpy(eqn, values, axes)
        run = by_numpy(eqn, xs, len(axes), wide=True)
        if run is None:
            return None
        results = self.arithmetic.reduced(eqn, xs, run, lanes=len(axes))
        return [_without_copies(Stacked(x, axes)) for x in results]

    def _with_runs(self, value: Stacked) -> Stacked:
        """The value with an axis for the runs, of size one where it is the same in all.

        Noise may make it another one in each.
        """
        if not self.lanes or _of_each_run(value):
            return value
        return Stacked(value.x[None], (_RUNS, *value.axes))

    def _by_jax(self, eqn: Equation, values: list[Stacked], frame: Frame) -> list[Stacked]:
        """The results of what JAX compiles, run by run."""
        of_runs = list(map(_of_each_run, values))
        axes = [value.axes[hit:] for value, hit in zip(values, of_runs, strict=True)]
        sizes = {name: size for name, size in frame.scope.sizes.items() if name != _RUNS}
        # What runs other equations notes promises, which are those of one program.
        opens = eqn.primitive.name not in SCATTERS and bool(inner_jaxprs(eqn))
        params = {k: v for k, v in eqn.params.items() if "sharding" not in k and "jaxpr" not in k}
        is_shared = not opens and is_hashable(tuple(params.values()))
        key = (
            *((eqn.primitive, *params.items()) if is_shared else (id(eqn), self._rounded)),
            *((v.shape, v.x.dtype, names) for v, names in zip(values, axes, strict=True)),
            *map(_type, (*eqn.invars, *eqn.outvars)),
            *sizes.items(),
            id(eqn) in self._exact.compared,
        )

        def new() -> _Compiled:
            arithmetic = self._exact, self._rounded
            return _Compiled(self._traced, eqn, *arithmetic, MappedAxes(sizes), axes)

        compiled = _compiled.get(key, new)
        dtypes = [getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)]
        is_moved = bool(self.lanes) and any(d is not None and is_inexact(d) for d in dtypes)
        each = []
        for k in range(len(self._noise) if any(of_runs) or is_moved else 1):
            xs = [v.x[k] if hit else v.x for v, hit in zip(values, of_runs, strict=True)]
            each.append(compiled(self._noise[k], xs))
        self.own_dtype |= compiled.own_dtype
        if opens:
            amounts, positions = zip(*(differences for _, differences in each), strict=True)
            frame.note(np.stack(amounts), np.stack(positions))
        return list(map(_of_runs, zip(*(results for results, _ in each), strict=True)))

    def largest_difference(
        self, value: Stacked, left: Sequence[Hashable]
    ) -> tuple[AnyLeaf, AnyLeaf, Stacked]:
        of_runs = _of_each_run(value)
        each = [Stacked(x, value.axes[1:]) for x in value.x] if of_runs else [value]
        of_one = super().largest_difference
        found = [of_one(one, left)[:2] for one in each]
        amounts, positions = (np.stack([[x] for x in xs]) for xs in zip(*found, strict=True))
        return amounts, positions, each[0]


class _Compiled:
    """An equation that JAX compiles, for operands with these axes.

    **Attributes:**

    - `own_dtype`: its name, if it runs in its own dtype.
    """

    def __init__(
        self,
        replay: Replay,
        eqn: Equation,
        exact: Exact,
        rounded: Collection[tuple[str, float]],
        scope: MappedAxes,
        of_operands: Sequence[Axes],
    ) -> None:
        self.own_dtype: set[str] = set()

        def run(noise: AnyLeaf, xs: Sequence[AnyLeaf]) -> tuple[list[Stacked], Differences]:
            replay.arithmetic = arithmetic = Noisy(noise, rounded, exact)
            frame = Frame(scope, replay.no_differences)
            values = list(map(Stacked, xs, of_operands))
            try:
                results = replay.leaf(eqn, values, frame)
            finally:
                # It holds tracers, which must not outlive their trace.
                replay.arithmetic = OwnDtypes()
            self.own_dtype |= arithmetic.own_dtype
            return results, frame.differences

        run.__name__ = f"check_{eqn.primitive.name}"
        self._run = jax.jit(run, compiler_options=compile_fast())

    def __call__(self, noise: Numbers, xs: Sequence[AnyLeaf]) -> tuple[list[Stacked], Differences]:
        results, (amounts, positions) = self._run(noise, xs)
        values = [Stacked(_in_numpy(value.x), value.axes) for value in results]
        return values, (np.asarray(amounts), np.asarray(positions))


def compile_fast() -> dict[str, int | str] | None:
    """Options for a program that runs a few times: it need not be fast, but it must compile fast."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


def _in_numpy(x: AnyLeaf) -> AnyLeaf:
    """An array as NumPy's, unless it is one of keys."""
    return x if is_key(x) else np.asarray(x)


def _type(atom: Any) -> Hashable:
    return getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)


# The values of several runs


def _of_each_run(value: Stacked) -> bool:
    """Whether each run has a value of its own."""
    return value.axes[:1] == (_RUNS,)


def _of_runs(each: Sequence[AnyLeaf | Stacked]) -> Stacked:
    """The value of all runs from that of each."""
    values = [x if isinstance(x, Stacked) else Stacked(_in_numpy(x)) for x in each]
    if all(x is each[0] for x in each):
        return values[0]
    arrays = [value.x for value in values]
    return Stacked(numpy_of(*arrays).stack(arrays), (_RUNS, *values[0].axes))


def _by_run(value: Stacked, count: int) -> list[jax.Array]:
    """The array of each run: one for all of them if it is the same."""
    return (
        list(map(jnp.asarray, value.x)) if _of_each_run(value) else [jnp.asarray(value.x)] * count
    )


def _without_copies(value: Stacked) -> Stacked:
    """The value without the axis for runs, if it is the same in all."""
    is_same = _of_each_run(value) and len(value.x) == 1
    return Stacked(value.x[0], value.axes[1:]) if is_same else value


# Loops and branches


def _one_number(x: AnyLeaf) -> int | None:
    """The number that all numbers of an array are, if they are one."""
    return int(x.flat[0]) if x.size and (x == x.flat[0]).all() else None


def entry_of(value: Stacked, k: int) -> Stacked:
    """An entry along the first axis of the value of one shard."""
    return Stacked(value.x[(*[slice(None)] * len(value.axes), k)], value.axes)


def stacked_rounds(each: Sequence[Stacked], scope: MappedAxes) -> Stacked:
    """The entries of all rounds, which may differ along other axes in each."""
    axes = scope.union(each)
    arrays = [scope.spread(value, axes).x for value in each]
    return Stacked(numpy_of(*arrays).stack(arrays, len(axes)), axes)
