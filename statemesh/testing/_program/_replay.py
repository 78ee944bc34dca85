"""A traced program, replayed equation by equation over stacked shards."""

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _errors as errors
from ._arithmetic import Arithmetic, OwnDtypes, Promoted
from ._collectives import RULES, collective
from ._control_flow import Differences, Frame, Replays, Step, cond, one_by_one, scan, while_
from ._jaxprs import (
    CALLS,
    Atom,
    Equation,
    Jaxpr,
    all_equations,
    axes_named,
    called,
    is_identity,
    is_literal,
    names_of,
    nested_equations,
    new_axes,
    opened,
    operands_of_call,
)
from ._noise import Noisy
from ._promises import UNENDED, Promise, largest_difference
from ._stacked import Axes, Scope, Stacked, names_of_spec


_CONTROL_FLOW: Mapping[str, Step] = {"cond": cond, "while": while_, "scan": scan}

# The rounds after which a loop of a check is stopped. Rounding that a tolerance is too small for would let
# a loop that converges on devices run for ever.
MOST_ROUNDS = 10_000

# Equations whose rule for `vmap` does not do what shards do: it draws other numbers, or calls back only once.
_SHARD_BY_SHARD = (
    *("random_bits", "random_split", "random_fold_in", "rng_bit_generator", "pure_callback"),
    *("io_callback", "ffi_call"),
)
_SAFE_KEYS = ("fry", "threefry2x32")


class Replay:
    """A traced program as a function that runs on one device, in the program's own dtypes.

    **Attributes:**

    - `most_rounds`: the rounds after which a `while_loop` is stopped; `None` for never.

    **Arguments:**

    - `name`: the name of the program in messages.
    - `jaxpr`: the program. Its constants are its first inputs.
    """

    most_rounds: int | None = None

    def __init__(self, name: str, jaxpr: Jaxpr) -> None:
        self.name = name
        self.jaxpr = jaxpr
        self.arithmetic: Arithmetic = OwnDtypes()
        self.promises: list[Promise] = list(_promises(jaxpr))
        self._promise_numbers = {(id(p.eqn), p.index): i for i, p in enumerate(self.promises)}
        count = len(self.promises)
        self.no_differences: Differences = (
            np.zeros(count, np.float32),
            np.zeros((count, 2), np.int32),
        )
        self._axes: dict[Any, list[Axes]] = {}

    def __call__(self, *arrays: Any) -> tuple[list[jax.Array], Differences]:
        frame = Frame(Scope(), self.no_differences)
        given = [Stacked(self.arithmetic.value(x)) for x in arrays]
        made = self._run(self.jaxpr, given, frame)
        return [value.x for value in made], frame.differences

    def run(self, jaxpr: Jaxpr, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        """Replay a jaxpr, with constants or without, that is a part of the program."""
        consts = [Stacked(self.arithmetic.value(x)) for x in getattr(jaxpr, "consts", ())]
        return self._run(opened(jaxpr), [*consts, *values], frame)

    def axes(self, jaxpr: Jaxpr, values: Sequence[Stacked], scope: Scope) -> list[Axes]:
        """The axes along which the results of a jaxpr are stacked."""
        stacks = tuple(value.axes for value in values)
        # Loops and branches ask again and again. The jaxpr lives as long as this object, so its id is a key.
        key = (id(jaxpr), stacks, tuple(scope.sizes), tuple(scope.indices))
        if key not in self._axes:

            def probe(*xs: Any) -> None:
                given = [Stacked(x, axes) for x, axes in zip(xs, stacks, strict=True)]
                made = self.run(jaxpr, given, Frame(scope, self.no_differences))
                self._axes[key] = [value.axes for value in made]

            jax.eval_shape(probe, *[value.x for value in values])
        return self._axes[key]

    def _run(self, jaxpr: Jaxpr, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

        def value_of(atom: Atom) -> Stacked:
            if is_literal(atom):
                # As a NumPy array, which has no mesh: the literal may carry the mesh of where it was traced.
                aval: Any = atom.aval
                return Stacked(self.arithmetic.literal(atom.val, aval.dtype))
            return known[atom]

        for eqn in jaxpr.eqns:
            made = self._equation(eqn, [value_of(atom) for atom in eqn.invars], frame)
            known.update(zip(eqn.outvars, made, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Equation, values: list[Stacked], frame: Frame) -> list[Stacked]:
        name, scope = eqn.primitive.name, frame.scope
        if is_identity(eqn):
            return values
        if name in CALLS:
            return self.run(called(eqn), operands_of_call(eqn, values), frame)
        if name in _CONTROL_FLOW:
            return _CONTROL_FLOW[name](self, eqn, values, frame)
        if name == "shard_map":
            return self._shard_map(eqn, values, frame)
        used = axes_named(eqn) & {*scope.sizes, *scope.indices}
        if name == "axis_index" and used:
            return [_axis_index(eqn.params["axis_name"], scope)]
        if used:
            self._check_collective(eqn, used, scope)
            shards = math.prod(scope.shape(names_of(eqn)))
            # Each operand has a result.
            each = zip(values, eqn.invars, eqn.outvars, strict=True)
            return [
                self._collective(eqn.replace(invars=[a], outvars=[b]), value, scope, shards)
                for value, a, b in each
            ]
        if why := _not_replayed(eqn):
            raise errors.not_replayed(self.name, name, why)
        over = scope.union(values)
        if over and name in _SHARD_BY_SHARD and not _draws_safely(eqn):
            return one_by_one(_plain, over, self, eqn, values, frame)
        try:
            return _plain(self, eqn, values, frame)
        except NotImplementedError:
            if not over:
                raise
            # The primitive has no rule for `vmap`.
            return one_by_one(_plain, over, self, eqn, values, frame)
        except NameError as error:
            # A collective that has no rule in `RULES`: outside of a map its axis is not bound.
            raise errors.not_replayed(self.name, name) from error

    def _collective(self, eqn: Equation, value: Stacked, scope: Scope, shards: int) -> Stacked:
        axes: list[Axes] = []

        def run(x: Any) -> list[Any]:
            made = collective(eqn, Stacked(x, value.axes), scope)
            axes.append(made.axes)
            return [made.x]

        (made,) = self.arithmetic.reduced(eqn, [value.x], run, shards)
        return Stacked(made, axes[0])

    def _check_collective(self, eqn: Equation, used: set[Hashable], scope: Scope) -> None:
        name = eqn.primitive.name
        known = name in RULES and used == {*names_of(eqn)} <= {*scope.sizes}
        if not known or len(eqn.invars) != len(eqn.outvars):
            raise errors.not_replayed(self.name, name)

    def _shard_map(self, eqn: Equation, values: list[Stacked], frame: Frame) -> list[Stacked]:
        params, scope = eqn.params, frame.scope
        sizes = new_axes(eqn)
        for spec in (*params["in_specs"], *params["out_specs"]):
            if again := [name for name in names_of_spec(spec) if name not in sizes]:
                # JAX makes such specs for the gradient of nested calls, and cannot compile them.
                why = f"one inside another names {again[0]!r}, which the outer one maps over"
                raise errors.not_replayed(self.name, "shard_map", why)
        inside = Scope({**scope.sizes, **sizes}, scope.indices)
        split = [inside.split(v, spec) for v, spec in zip(values, params["in_specs"], strict=True)]
        inner = Frame(inside, frame.differences)
        made = self.run(params["jaxpr"], split, inner)
        for k, (value, spec) in enumerate(zip(made, params["out_specs"], strict=True)):
            left = [
                name for name in value.axes if name in sizes and name not in names_of_spec(spec)
            ]
            made[k] = self.one_copy(eqn, k, value, left, inner)
        frame.differences = inner.differences
        return [inside.joined(v, spec) for v, spec in zip(made, params["out_specs"], strict=True)]

    def one_copy(
        self, eqn: Equation, index: int, value: Stacked, left: Sequence[Hashable], frame: Frame
    ) -> Stacked:
        """Keep one copy along the axes `left`, and note by how much the others differ."""
        if not left:
            return value
        amount, position = largest_difference(value, left)
        promise = self.promises[self._promise_numbers[id(eqn), index]]
        stack = promise.stack_number(value, left)
        self._note(eqn, index, amount, jnp.stack([stack, position]), frame)
        # All shards have the same value, so the first one's copy serves.
        first = tuple(0 if name in left else slice(None) for name in value.axes)
        return Stacked(value.x[first], tuple(name for name in value.axes if name not in left))

    def stopped(self, eqn: Equation, goes_on: jax.Array, frame: Frame) -> None:
        """Note whether a loop that was stopped would have gone on."""
        self._note(eqn, UNENDED, goes_on.astype(np.float32), jnp.zeros(2, np.int32), frame)

    def _note(
        self, eqn: Equation, index: int, amount: jax.Array, position: jax.Array, frame: Frame
    ) -> None:
        here = np.arange(len(self.promises)) == self._promise_numbers[id(eqn), index]
        frame.note(jnp.where(here, amount, 0), jnp.where(here[:, None], position, 0))


class PromotedReplay(Replay):
    """The same with floats in double precision."""

    most_rounds = MOST_ROUNDS

    def __init__(self, name: str, jaxpr: Jaxpr) -> None:
        super().__init__(name, jaxpr)
        self.arithmetic: Promoted = Promoted()


class NoisyReplay(Replay):
    """The same with floats in double precision and with noise, which is the first input.

    **Arguments:**

    - `rounded`: that of `Noisy`.
    """

    most_rounds = MOST_ROUNDS

    def __init__(self, name: str, jaxpr: Jaxpr, rounded: Collection[tuple[str, float]]) -> None:
        super().__init__(name, jaxpr)
        self.rounded = rounded

    def __call__(self, noise: Any, *arrays: Any) -> tuple[list[jax.Array], Differences]:
        self.arithmetic = Noisy(noise, self.rounded)
        try:
            return super().__call__(*arrays)
        finally:
            # It holds tracers, which must not outlive their trace.
            self.arithmetic = OwnDtypes()


def _plain(
    replay: Replays, eqn: Equation, values: Sequence[Stacked], frame: Frame
) -> list[Stacked]:
    return frame.scope.over_axes(lambda *xs: replay.arithmetic.bind(eqn, xs), values)


def _axis_index(name: Hashable, scope: Scope) -> Stacked:
    if name in scope.indices:
        return Stacked(scope.indices[name])
    return Stacked(jnp.arange(scope.sizes[name], dtype=jnp.int32), (name,))


def _promises(jaxpr: Jaxpr) -> Iterator[Promise]:
    """What must hold: results with one copy for several shards and predicates are the same, and loops end."""
    for eqn in {id(eqn): eqn for eqn in all_equations(jaxpr)}.values():
        name = eqn.primitive.name
        if name in ("cond", "while"):
            yield Promise(eqn, 0)
        if name == "while":
            yield Promise(eqn, UNENDED)
        if name == "shard_map":
            for k, spec in enumerate(eqn.params["out_specs"]):
                if {*new_axes(eqn)} - {*names_of_spec(spec)}:
                    yield Promise(eqn, k, spec)


def _not_replayed(eqn: Equation) -> str:
    """Why an equation that is no collective cannot be replayed; an empty string if it can."""
    if any(hasattr(var.aval, "inner_aval") for var in (*eqn.invars, *eqn.outvars)):
        return "it reads or writes a reference"
    for one in nested_equations(eqn):
        name = one.primitive.name
        if name in RULES or name in ("shard_map", "axis_index"):
            return f"it runs `{name}` inside"
    return ""


def _draws_safely(eqn: Equation) -> bool:
    """Whether each key gives the same random numbers, or new keys, under `vmap` as by itself."""
    if eqn.primitive.name not in ("random_bits", "random_split", "random_fold_in"):
        return False
    key: Any = eqn.invars[0].aval
    return any(name in str(key.dtype) for name in _SAFE_KEYS)
