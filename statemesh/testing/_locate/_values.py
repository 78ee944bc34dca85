"""The values of a flat program on all shards, in double precision.

All of this runs inside `jax.enable_x64`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._emulate._control_flow import Frame
from .._emulate._jaxprs import Jaxpr
from .._emulate._promoted import NO_NOISE, Promoted
from .._emulate._replay import Replay
from .._emulate._stacked import Scope, Stacked
from .._types import AnyLeaf, Fun, Numbers
from ._flat import Constant, Operand, Program, Step


# What is compiled here runs a few times.
_COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}

# How many values a run holds at a time. A longer part would take longer than linear time to compile.
_AT_ONCE = 200

Values = dict[int, Stacked]


class _Exact(Promoted):
    """Double precision without noise, which costs nothing to compile."""

    def _off(self, x: AnyLeaf, *_: Any, **__: Any) -> AnyLeaf:
        return x


class Evaluator(Replay):
    """What runs the steps of a flat program.

    **Arguments:**

    - `program`: the program.
    """

    def __init__(self, program: Program) -> None:
        super().__init__("locate", program.jaxpr)
        self.arithmetic = _Exact(NO_NOISE)

    def step(self, step: Step, values: Sequence[Stacked]) -> list[Stacked]:
        """The results of one step."""
        if step.kind == "run":
            return self._equation(step.eqn, list(values), Frame(step.scope, self.no_differences))
        assert step.spec is not None
        if step.kind == "split":
            return [step.scope.split(values[0], step.spec)]
        joined = step.scope.joined(values[0], step.spec)
        # Along the axes that the spec leaves out a device keeps its own copy. We keep the first.
        return [Stacked(joined.x[(0,) * len(joined.axes)])]

    def operand(self, x: Operand, known: Mapping[int, Stacked]) -> Stacked:
        return Stacked(self.arithmetic.value(x.value)) if isinstance(x, Constant) else known[x]


def compile_fast(fun: Fun) -> Fun:
    """A function that is compiled for a few calls."""
    fast = _COMPILE_FAST if jax.default_backend() == "cpu" else None
    return jax.jit(fun, compiler_options=fast)


def run_steps(
    evaluator: Evaluator, steps: Sequence[Step], known: Values, wanted: Iterable[int]
) -> Values:
    """The wanted values among the results of some steps.

    **Arguments:**

    - `known`: the values that the steps read.
    """
    made = {value for step in steps for value in step.results}
    read = sorted({x for step in steps for x in step.inputs} - made)
    keep = [value for value in wanted if value in made]
    axes: dict[int, Any] = {}

    def run(arrays: list[AnyLeaf]) -> list[AnyLeaf]:
        here = {i: Stacked(x, known[i].axes) for i, x in zip(read, arrays, strict=True)}
        for step in steps:
            found = evaluator.step(step, [evaluator.operand(x, here) for x in step.operands])
            here.update(zip(step.results, found, strict=True))
        axes.update({i: here[i].axes for i in keep})
        return [jnp.asarray(here[i].x) for i in keep]

    arrays = compile_fast(run)([known[i].x for i in read])
    return {i: Stacked(x, axes[i]) for i, x in zip(keep, arrays, strict=True)}


def as_numbers(x: AnyLeaf) -> Numbers:
    """An array of NumPy; for keys, that of their data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def on_all_shards(value: Stacked, scope: Scope) -> Numbers:
    """The numbers with all mesh axes of the scope in front."""
    x, names = as_numbers(value.x), list(scope.sizes)
    new = [i for i, name in enumerate(names) if name not in value.axes]
    x = np.expand_dims(x, new)
    return np.broadcast_to(x, (*scope.sizes.values(), *x.shape[len(names) :]))


def is_key(x: AnyLeaf) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def pieces(steps: Sequence[Step]) -> list[Sequence[Step]]:
    """The steps in parts that are small enough to be compiled."""
    return [steps[i : i + _AT_ONCE] for i in range(0, len(steps), _AT_ONCE)]


class Points:
    """A flat program some of whose values can be replaced.

    **Arguments:**

    - `evaluator`, `program`: the program.
    - `given`: the values of its inputs.
    - `points`: the values that can be replaced.
    """

    def __init__(
        self, evaluator: Evaluator, program: Program, given: Values, points: Sequence[int]
    ) -> None:
        self._given, self._points = given, list(points)
        self._inputs = [i for i in program.inputs if i in given]
        self._shapes: dict[int, Any] = {}
        self._axes: list[Any] = []
        self._call: Callable[..., Any] = compile_fast(self._function(evaluator, program))
        self._none: dict[int, Any] = {}

    def _function(self, evaluator: Evaluator, program: Program) -> Fun:
        points = set(self._points)

        def run(arrays: list[AnyLeaf], others: dict[int, AnyLeaf], flags: dict[int, AnyLeaf]) -> Any:
            known = {
                i: Stacked(x, self._given[i].axes)
                for i, x in zip(self._inputs, arrays, strict=True)
            }
            for step in program.steps:
                found = evaluator.step(step, [evaluator.operand(x, known) for x in step.operands])
                for i, value in zip(step.results, found, strict=True):
                    if i in points:
                        value = step.around.spread(value, step.around.sizes)
                        value = Stacked(_replaced(flags[i], others[i], value.x), value.axes)
                    known[i] = value
            results = [evaluator.operand(x, known) for x in program.results]
            self._axes[:] = [value.axes for value in results]
            return [value.x for value in results]

        return run

    def results(self, replaced: Mapping[int, Numbers], like: Mapping[int, Any]) -> list[Stacked]:
        """The results with some values replaced.

        **Arguments:**

        - `replaced`: the new values, with all mesh axes in front.
        - `like`: the shape and dtype of each value that can be replaced, with all mesh axes in front.
        """
        for i in self._points:
            if i not in self._none:
                self._none[i] = np.zeros(*like[i])
        others = {i: np.asarray(replaced.get(i, self._none[i]), like[i][1]) for i in self._points}
        flags = {i: np.bool_(i in replaced) for i in self._points}
        arrays = self._call([self._given[i].x for i in self._inputs], others, flags)
        return [Stacked(x, axes) for x, axes in zip(arrays, self._axes, strict=True)]


def _replaced(flag: AnyLeaf, other: AnyLeaf, x: AnyLeaf) -> AnyLeaf:
    if is_key(x):
        other = jax.random.wrap_key_data(other, impl=jax.random.key_impl(x))
    return jnp.where(flag, other, x)
