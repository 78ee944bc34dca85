"""The values of a flat program on all shards.

All of this runs inside `jax.enable_x64`.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._program._noise import Promoted
from .._program._replay import MOST_ROUNDS, Frame, Replay
from .._program._stacked import Axes, Scope, Stacked, names_of_spec
from .._types import AnyLeaf, Numbers
from ._flat import Constant, Operand, Program, Step
from ._quick import quick


# What is compiled here runs a few times.
_COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
_COMPILED = ("scan", "while", "cond", "random_bits", "random_split", "random_fold_in", "sort")

Values = dict[int, Stacked]


class Evaluator(Replay):
    """What runs the steps of a flat program.

    **Arguments:**

    - `program`: the program.
    - `wide`: whether floats are in double precision; else in their own dtypes.
    """

    most_rounds = MOST_ROUNDS

    def __init__(self, program: Program, wide: bool) -> None:
        super().__init__("locate", program.jaxpr)
        self.wide = wide
        if wide:
            self.arithmetic = Promoted()
        self._compiled: dict[Hashable, Any] = {}

    def step(self, step: Step, values: Sequence[Stacked]) -> list[Stacked]:
        """The results of one step."""
        made = quick(step, values, self.wide)
        if made is not None:
            return made
        if step.kind == "split":
            assert step.spec is not None
            return [step.scope.split(values[0], step.spec)]
        if step.kind == "join":
            assert step.spec is not None
            left = [
                n
                for n in values[0].axes
                if n not in (*names_of_spec(step.spec), *step.around.sizes)
            ]
            # Along the axes that the spec leaves out a device keeps its own copy. We keep the first.
            first = tuple(0 if n in left else slice(None) for n in values[0].axes)
            axes = tuple(n for n in values[0].axes if n not in left)
            return [step.scope.joined(Stacked(values[0].x[first], axes), step.spec)]
        if step.name in _COMPILED:
            return self._run_compiled(step, values)
        return self._equation(step.eqn, list(values), Frame(step.scope, self.no_differences))

    def _run_compiled(self, step: Step, values: Sequence[Stacked]) -> list[Stacked]:
        stacks = tuple(value.axes for value in values)
        key = id(step), stacks
        if key not in self._compiled:
            axes: list[Axes] = []

            def run(*xs: Any) -> list[AnyLeaf]:
                given = [Stacked(x, names) for x, names in zip(xs, stacks, strict=True)]
                frame = Frame(step.scope, self.no_differences)
                made = self._equation(step.eqn, given, frame)
                axes[:] = [value.axes for value in made]
                return [value.x for value in made]

            # In narrow dtypes the rounding must be that of a program that is compiled as usual.
            fast = _COMPILE_FAST if self.wide and jax.default_backend() == "cpu" else None
            # The step is kept, because its number may be given to another one once it is gone.
            self._compiled[key] = jax.jit(run, compiler_options=fast), axes, step
        run_compiled, found, _ = self._compiled[key]
        made = run_compiled(*[value.x for value in values])
        return [Stacked(x, names) for x, names in zip(made, found, strict=True)]

    def operand(self, x: Operand, known: Mapping[int, Stacked]) -> Stacked:
        return Stacked(self.arithmetic.value(x.value)) if isinstance(x, Constant) else known[x]

    def run_step(self, step: Step, known: Values) -> None:
        """Add the results of a step to what is known."""
        made = self.step(step, [self.operand(x, known) for x in step.operands])
        known.update(zip(step.results, made, strict=True))


def as_numbers(x: AnyLeaf) -> Numbers:
    """The numbers of an array; for keys, those of their data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    found = np.asarray(x)
    # What is compared is not rounded, and NumPy cannot compute with bfloat16.
    return found.astype(np.float64) if jnp.issubdtype(found.dtype, jnp.floating) else found


def on_all_shards(value: Stacked, scope: Scope) -> Numbers:
    """The numbers with all mesh axes of the scope in front."""
    x, names = as_numbers(value.x), list(scope.sizes)
    new = tuple(i for i, name in enumerate(names) if name not in value.axes)
    x = np.expand_dims(x, new)
    return np.broadcast_to(x, (*scope.sizes.values(), *x.shape[len(names) :]))


def is_key(x: AnyLeaf) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def last_reads(program: Program) -> Mapping[int, int]:
    """For each value the number of the last step that reads it."""
    found: dict[int, int] = {}
    for i, step in enumerate(program.steps):
        found |= dict.fromkeys(step.inputs, i)
    results = [x for x in program.results if isinstance(x, int)]
    return found | dict.fromkeys(results, len(program.steps))
