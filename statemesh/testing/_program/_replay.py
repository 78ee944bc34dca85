"""A traced program, replayed equation by equation over stacked shards.

Branches and loops stay branches and loops, in which each shard takes its own way.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import statemesh as sm

from .. import _errors as errors
from .._types import AnyLeaf, Numbers
from . import _jaxprs as jaxprs
from ._choices import Choice, choices
from ._collective_rules import RULES, collective, communicating_axes, nested_collectives
from ._jaxprs import Equation, Jaxpr, names_of, new_axes
from ._noise import OwnDtypes
from ._numbers import data_of, more_than_rounding
from ._stacked import Axes, MappedAxes, Stacked, names_of_spec, numpy_of


# For each promise the largest difference, and where it is: the number of the stack, and the index in it.
Differences: TypeAlias = tuple[Any, Any]

# The rounds after which a loop of a check is stopped. Rounding that a tolerance is too small for would let
# a loop that converges on devices run for ever.
MOST_ROUNDS = 10_000

# In the place of the number of a result: the promise that a loop ends; and the sides of a choice, downwards.
_UNENDED = -1
_FIRST_SIDE = -2

# Equations whose rule for `vmap` does not do what shards do: it draws other numbers, calls back only once, or
# joins all lanes (those of Equinox).
_SHARD_BY_SHARD = (
    *("random_bits", "random_split", "random_fold_in", "rng_bit_generator", "pure_callback"),
    *("io_callback", "ffi_call"),
    *("unvmap_any", "unvmap_all", "unvmap_max", "select_if_vmap"),
)
_SAFE_KEYS = ("fry", "threefry2x32")


class BrokenPromise(NamedTuple):
    """A result or a predicate that should be the same on all shards, although their copies differ.

    **Attributes:**

    - `text`: which it is, and by how much and where it differs.
    - `amount`: the largest difference.
    - `is_predicate`: whether shards would wait in collectives for others that never come.
    - `eqn`: the equation that makes it.
    """

    text: str
    amount: float
    is_predicate: bool
    eqn: Equation


class Frame:
    """One run of a jaxpr.

    **Attributes:**

    - `scope`: the mesh axes that are mapped over.
    - `differences`: those found so far in results that are promised to be the same.
    """

    def __init__(self, scope: MappedAxes, differences: Differences) -> None:
        self.scope = scope
        self.differences = differences

    def note(self, amounts: AnyLeaf, positions: AnyLeaf) -> None:
        """Keep the larger differences."""
        old, at = self.differences
        numpy = numpy_of(old, amounts)
        larger = (amounts > old)[..., None]
        self.differences = numpy.maximum(old, amounts), numpy.where(larger, positions, at)


# What replays one equation.
_Rule: TypeAlias = Callable[[Equation, Sequence[Stacked], Frame], list[Stacked]]


class Replay:
    """A traced program as a function that runs on one device.

    **Arguments:**

    - `name`: the name of the program in messages.
    - `jaxpr`: the program. Its constants are its first inputs.
    - `most_rounds`: the rounds after which a `while_loop` is stopped; `None` for never.

    **Attributes:**

    - `arithmetic`: how it computes.
    - `lanes`: how many axes the operand of a collective has before its mesh axes.
    - `__name__`: the name under which JAX compiles it, and logs that.
    """

    def __init__(self, name: str, jaxpr: Jaxpr, most_rounds: int | None = MOST_ROUNDS) -> None:
        self.name, self.jaxpr, self.most_rounds = name, jaxpr, most_rounds
        self.__name__ = f"{name}_emulated"
        self.arithmetic, self.lanes = OwnDtypes(), 0
        self._choices = {id(choice.eqn): choice for choice in choices(jaxpr)}
        self.promises = [*_promises(jaxpr), *_sides(self._choices.values())]
        self._promise_numbers = {(id(p.eqn), p.index): i for i, p in enumerate(self.promises)}
        count = len(self.promises)
        self.no_differences: Differences = (
            np.zeros(count, np.float32),
            np.zeros((count, 2), np.int32),
        )
        self._axes: dict[Any, list[Axes]] = {}

    def __call__(self, *arrays: Any) -> tuple[list[AnyLeaf], Differences]:
        frame = Frame(MappedAxes(), self.no_differences)
        inputs = [Stacked(self.arithmetic.value(x)) for x in arrays]
        results = self._run(self.jaxpr, inputs, frame)
        return [value.x for value in results], frame.differences

    def run(self, jaxpr: Jaxpr, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        """Replay a jaxpr, with constants or without, that is a part of the program."""
        consts = [Stacked(self.arithmetic.value(x)) for x in getattr(jaxpr, "consts", ())]
        return self._run(jaxprs.opened(jaxpr), [*consts, *values], frame)

    def axes(self, jaxpr: Jaxpr, values: Sequence[Stacked], scope: MappedAxes) -> list[Axes]:
        """The axes along which the results of a jaxpr are stacked."""
        stacks = tuple(value.axes for value in values)
        # Loops and branches ask again and again. The jaxpr lives as long as this object, so its id is a key.
        key = (id(jaxpr), stacks, tuple(scope.sizes), tuple(scope.indices))
        if key not in self._axes:
            probe = lambda values: self.run(jaxpr, values, Frame(scope, self.no_differences))
            self._axes[key] = [value.axes for value in jax.eval_shape(probe, list(values))]
        return self._axes[key]

    def _run(self, jaxpr: Jaxpr, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        def run(eqn: Equation, values: list[Stacked]) -> list[Stacked]:
            results = self._equation(eqn, values, frame)
            if choice := self._choices.get(id(eqn)):
                self._note_sides(choice, values, results, frame)
            return results

        return jaxprs.interpreted(jaxpr, values, self._literal, run)

    def _literal(self, atom: Any) -> Stacked:
        return Stacked(self.arithmetic.literal(atom))

    def _equation(self, eqn: Equation, values: list[Stacked], frame: Frame) -> list[Stacked]:
        name = eqn.primitive.name
        if jaxprs.is_identity(eqn):
            return values
        if name in jaxprs.CALLS:
            return self.run(jaxprs.called(eqn), jaxprs.operands_of_call(eqn, values), frame)
        if name == "shard_map":
            return self._shard_map(eqn, values, frame)
        return self.leaf(eqn, values, frame)

    def leaf(self, eqn: Equation, values: list[Stacked], frame: Frame) -> list[Stacked]:
        """The results of an equation that is not opened."""
        name, scope = eqn.primitive.name, frame.scope
        rules: dict[str, _Rule] = {"cond": self._cond, "while": self._while, "scan": self._scan}
        if name in rules:
            return rules[name](eqn, values, frame)
        used = jaxprs.axes_named(eqn) & {*scope.sizes, *scope.indices}
        if name == "axis_index" and used:
            axis = eqn.params["axis_name"]
            if axis in scope.indices:
                return [Stacked(scope.indices[axis])]
            return [Stacked(np.arange(scope.sizes[axis], dtype=np.int32), (axis,))]
        if used:
            return self._collective(eqn, values, used, scope)
        if why := _not_replayed(eqn):
            raise self._refused(name, why)
        over = scope.union(values)
        if not over or name not in _SHARD_BY_SHARD or draws_safely(eqn):
            try:
                return self._plain(eqn, values, frame)
            except NotImplementedError:  # The primitive has no rule for `vmap`.
                if not over:
                    raise
            except NameError as error:
                # A collective that has no rule in `RULES`: outside of a map its axis is not bound.
                raise self._refused(name) from error
        return self._shard_by_shard(self._plain, over, eqn, values, frame)

    def _plain(self, eqn: Equation, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        return frame.scope.over_axes(lambda *xs: self.arithmetic.bind(eqn, xs), values)

    def _collective(
        self, eqn: Equation, values: Sequence[Stacked], used: set[Hashable], scope: MappedAxes
    ) -> list[Stacked]:
        name, over = eqn.primitive.name, names_of(eqn)
        known = name in RULES and used == {*over} <= {*scope.sizes}
        if not known or len(eqn.invars) != len(eqn.outvars):
            raise self._refused(name)
        shards, results = math.prod(scope.shape(over)), []
        # Each operand has a result.
        for value, a, b in zip(values, eqn.invars, eqn.outvars, strict=True):
            axes: list[Axes] = []

            def run(x: Any, value: Stacked = value, axes: list[Axes] = axes) -> list[Any]:
                result = collective(eqn, Stacked(x, value.axes), scope)
                axes.append(result.axes)
                return [result.x]

            of_operand = eqn.replace(invars=[a], outvars=[b])
            (x,) = self.arithmetic.reduced(of_operand, [value.x], run, shards, self.lanes)
            results.append(Stacked(x, axes[0]))
        return results

    def _shard_map(self, eqn: Equation, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        params, scope = eqn.params, frame.scope
        sizes = new_axes(eqn)
        for spec in (*params["in_specs"], *params["out_specs"]):
            if again := [name for name in names_of_spec(spec) if name not in sizes]:
                # JAX makes such specs for the gradient of nested calls, and cannot compile them.
                why = f"one inside another names {again[0]!r}, which the outer one maps over"
                raise self._refused("shard_map", why)
        inside = MappedAxes({**scope.sizes, **sizes}, scope.indices)
        split = [inside.split(v, spec) for v, spec in zip(values, params["in_specs"], strict=True)]
        inner = Frame(inside, frame.differences)
        joined = []
        parts = zip(self.run(params["jaxpr"], split, inner), params["out_specs"], strict=True)
        for k, (value, spec) in enumerate(parts):
            kept = names_of_spec(spec)
            left = [name for name in value.axes if name in sizes and name not in kept]
            joined.append(inside.joined(self._one_copy(eqn, k, value, left, inner), spec))
        frame.differences = inner.differences
        return joined

    def _refused(self, primitive: str, why: str = "") -> sm.StatemeshError:
        return sm.StatemeshError(
            f"{self.name}: `{primitive}` cannot be replayed on one device{why and f': {why}'}. Run the call "
            "on devices; simulated ones will do (XLA_FLAGS=--xla_force_host_platform_device_count=8)."
        )

    # Control flow

    def _cond(self, eqn: Equation, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        index, *operands = values
        own_way, must_agree = _partitioned_axes(eqn, index.axes)
        if own_way:
            return self._shard_by_shard(self._cond, own_way, eqn, values, frame)
        index = self._one_copy(eqn, 0, index, must_agree, frame)
        branches, scope = eqn.params["branches"], frame.scope
        of_each = [self.axes(branch, operands, scope) for branch in branches]
        # A branch may vary along fewer axes than another. All must return arrays of the same shape.
        axes = [scope.in_order(set().union(*each)) for each in zip(*of_each, strict=True)]
        taken = [functools.partial(self._run_as, axes, scope, jaxpr) for jaxpr in branches]
        results, frame.differences = jax.lax.switch(index.x, taken, operands, frame.differences)
        return results

    def _while(self, eqn: Equation, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        params, scope = eqn.params, frame.scope
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        of_cond = values[: params["cond_nconsts"]]
        of_body, start, _ = jaxprs.operands_of_loop(eqn, values)
        carry = self._carried(body, of_body, start, [], scope)
        (varying,) = self.axes(condition, [*of_cond, *carry], scope)
        own_way, must_agree = _partitioned_axes(eqn, varying)
        if own_way:
            return self._shard_by_shard(self._while, own_way, eqn, values, frame)
        axes = [value.axes for value in carry]

        def goes_on(carry: list[Stacked], differences: Differences) -> tuple[Any, Differences]:
            inner = Frame(scope, differences)
            (go,) = self.run(condition, [*of_cond, *carry], inner)
            # Where shards do not agree, all stop: the difference is reported, and no loop runs for ever.
            every = jnp.all(go.x, tuple(range(len(go.axes))))
            return every & self._one_copy(eqn, 0, go, must_agree, inner).x, inner.differences

        def is_next(state: Any) -> Any:
            rounds, go, _, _ = state
            return jnp.any(go) & (self.most_rounds is None or rounds < self.most_rounds)

        def once(state: Any) -> Any:
            rounds, go, old, differences = state
            new, differences = self._run_as(axes, scope, body, [*of_body, *old], differences)
            if go.ndim:
                # A loop under `vmap` has a predicate for each lane. A lane that has ended keeps its values.
                new = [_in_lanes(go, *both) for both in zip(new, old, strict=True)]
            go, differences = goes_on(new, differences)
            return rounds + 1, go, new, differences

        go, differences = goes_on(carry, frame.differences)
        state = jnp.int32(0), go, carry, differences
        _, go, carry, frame.differences = jax.lax.while_loop(is_next, once, state)
        if self.most_rounds is not None:
            stopped = jnp.any(go).astype(np.float32)
            self._note(eqn, _UNENDED, stopped, jnp.zeros(2, np.int32), frame)
        return carry

    def _scan(self, eqn: Equation, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
        params, scope, body = eqn.params, frame.scope, eqn.params["jaxpr"]
        consts, start, scanned = jaxprs.operands_of_loop(eqn, values)
        carries = len(start)
        # The types of one round: enough to ask along which axes its results are stacked.
        slices = [Stacked(_one_round(value), value.axes) for value in scanned]

        carry = self._carried(body, consts, start, slices, scope)
        # The results that a scan stacks keep the axes along which they differ.
        axes = [*(value.axes for value in carry), *[()] * (len(eqn.outvars) - carries)]

        def once(state: Any, slices: list[Stacked]) -> Any:
            carry, differences = state
            inputs = [*consts, *carry, *slices]
            results, differences = self._run_as(axes, scope, body, inputs, differences)
            return (results[:carries], differences), results[carries:]

        (carry, frame.differences), stacks = jax.lax.scan(
            once,
            (carry, frame.differences),
            [_with_axis_moved(value, len(value.axes), 0) for value in scanned],
            length=params["length"],
            reverse=params["reverse"],
        )
        return [*carry, *(_with_axis_moved(value, 0, len(value.axes)) for value in stacks)]

    def _carried(
        self,
        body: Jaxpr,
        consts: Sequence[Stacked],
        carry: Sequence[Stacked],
        slices: Sequence[Stacked],
        scope: MappedAxes,
    ) -> list[Stacked]:
        """What a loop carries, stacked along all axes along which it may differ in any round."""
        # In each round a value can spread along further axes, until there is no axis left.
        while True:
            after = self.axes(body, [*consts, *carry, *slices], scope)
            grown = [scope.spread(value, axes) for value, axes in zip(carry, after, strict=False)]
            if all(a is b for a, b in zip(grown, carry, strict=True)):
                return grown
            carry = grown

    def _run_as(
        self,
        axes: Sequence[Axes],
        scope: MappedAxes,
        jaxpr: Jaxpr,
        values: Sequence[Stacked],
        differences: Differences,
    ) -> tuple[list[Stacked], Differences]:
        """The results of a jaxpr, copied for each shard along `axes`, and the differences until then."""
        inner = Frame(scope, differences)
        results = zip(self.run(jaxpr, values, inner), axes, strict=True)
        return [scope.spread(value, names) for value, names in results], inner.differences

    def _shard_by_shard(
        self,
        rule: _Rule,
        over: Sequence[Hashable],
        eqn: Equation,
        values: Sequence[Stacked],
        frame: Frame,
    ) -> list[Stacked]:
        """Run an equation shard by shard along some axes, so that each runs nothing but its own way."""
        scope = frame.scope
        sizes = {name: size for name, size in scope.sizes.items() if name not in over}
        varying = {i for i, value in enumerate(values) if set(value.axes) & set(over)}
        flat = {i: Stacked(*scope.flat(values[i], over)) for i in varying}

        def shard(item: Any) -> Any:
            indices, parts = item
            here = dict(zip(over, indices, strict=True))
            inner = Frame(MappedAxes(sizes, {**scope.indices, **here}), self.no_differences)
            results = rule(eqn, [parts.get(i, x) for i, x in enumerate(values)], inner)
            return results, inner.differences

        shape = scope.shape(over)
        grid = jnp.indices(shape, dtype=jnp.int32).reshape(len(shape), -1)
        results, (amounts, positions) = jax.lax.map(shard, (list(grid), flat))
        worst = jnp.argmax(amounts, 0)
        frame.note(
            jnp.take_along_axis(amounts, worst[None], 0)[0],
            jnp.take_along_axis(positions, worst[None, :, None], 0)[0],
        )
        return [scope.unflat(value.x, over, value.axes) for value in results]

    # Promises

    def largest_difference(
        self, value: Stacked, left: Sequence[Hashable]
    ) -> tuple[AnyLeaf, AnyLeaf, Stacked]:
        """By how much shards differ along the axes `left`, where they differ most, and in what."""
        return *_largest_difference(value, left), value

    def _one_copy(
        self, eqn: Equation, index: int, value: Stacked, left: Sequence[Hashable], frame: Frame
    ) -> Stacked:
        """Keep one copy along the axes `left`, and note by how much the others differ."""
        if not left:
            return value
        amount, position, of_one = self.largest_difference(value, left)
        promise = self.promises[self._promise_numbers[id(eqn), index]]
        stack = of_one.axes, tuple(of_one.x.shape), tuple(left)
        number = promise.stacks.setdefault(stack, len(promise.stacks))
        numpy = numpy_of(position)
        positions = numpy.stack([numpy.full_like(position, number), position], -1)
        self._note(eqn, index, amount, positions, frame)
        # All shards have the same value, so the first one's copy serves.
        first = tuple(0 if name in left else slice(None) for name in value.axes)
        return Stacked(value.x[first], tuple(name for name in value.axes if name not in left))

    def _note(
        self, eqn: Equation, index: int, amount: AnyLeaf, position: AnyLeaf, frame: Frame
    ) -> None:
        numpy = numpy_of(amount, position)
        here = np.arange(len(self.promises)) == self._promise_numbers[id(eqn), index]
        frame.note(numpy.where(here, amount, 0), numpy.where(here[:, None], position, 0))

    def _note_sides(
        self,
        choice: Choice,
        values: Sequence[Stacked],
        results: Sequence[Stacked],
        frame: Frame,
    ) -> None:
        chosen = values[choice.limited or 0]
        if choice.limited is not None:
            chosen = frame.scope.spread(chosen, results[0].axes)
        for side, seen in enumerate(choice.sides(chosen.x, results[0].x)):
            nowhere = np.zeros(2, np.int32)
            self._note(choice.eqn, _FIRST_SIDE - side, seen.astype(np.float32), nowhere, frame)

    def sides(self, differences: Differences) -> dict[tuple[Choice, int], bool]:
        """For each side of each choice whether it was taken."""
        pairs = zip(self.promises, np.asarray(differences[0]), strict=True)
        return {
            (self._choices[id(promise.eqn)], _FIRST_SIDE - promise.index): bool(amount)
            for promise, amount in pairs
            if promise.index <= _FIRST_SIDE
        }

    def broken(self, differences: Differences, paths: Sequence[str]) -> dict[int, BrokenPromise]:
        """The promises that do not hold, by their numbers.

        **Arguments:**

        - `differences`: those that a run has found.
        - `paths`: the paths of the results of the program.
        """
        amounts, positions = map(np.asarray, differences)
        named = dict(zip(map(id, self.jaxpr.outvars), paths, strict=False))
        return {
            number: promise.broken(named, float(amounts[number]), positions[number])
            for number, promise in enumerate(self.promises)
            if amounts[number] and promise.index >= 0
        }

    def unended(self, differences: Differences) -> list[Equation]:
        """The loops that were stopped."""
        pairs = zip(self.promises, np.asarray(differences[0]), strict=True)
        return [promise.eqn for promise, amount in pairs if promise.index == _UNENDED and amount]

    @property
    def loops(self) -> bool:
        """Whether there are loops that might not end."""
        return any(promise.index == _UNENDED for promise in self.promises)


@dataclasses.dataclass(eq=False)
class _Promise:
    """A result that must be the same on several shards.

    That is a result of a `shard_map` whose out spec leaves a mesh axis out, or a predicate of control flow
    with collectives inside. Or a loop that must end; or, as no promise at all, a side of a choice, whose
    number is one once it is taken.

    **Attributes:**

    - `eqn`, `index`: the equation, and the number of its result.
    - `spec`: the out spec; `None` for a predicate.
    - `stacks`: numbers of the ways in which the result has been stacked, of which there are several where an
        equation is replayed several times: the mesh axes; the shape of the array; and the axes along which
        all shards must have the same value.
    """

    eqn: Equation
    index: int
    spec: PartitionSpec | None = None
    stacks: dict[tuple[Axes, tuple[int, ...], Axes], int] = dataclasses.field(default_factory=dict)

    def broken(self, named: Mapping[int, str], amount: float, position: Numbers) -> BrokenPromise:
        """The promise, which does not hold, with the largest difference and its position."""
        axes, shape, left = list(self.stacks)[int(position[0])]
        index = tuple(map(int, np.unravel_index(int(position[1]), shape)))
        other = dict(zip(axes, index, strict=False))
        first = {name: 0 if name in left else at for name, at in other.items()}
        shards = errors.axes_str(first), errors.axes_str(other)
        if self.spec is None:
            collectives = {inner.primitive.name for inner in nested_collectives(self.eqn)}
            inside = ", ".join(f"`{name}`" for name in sorted(collectives))
            text = (
                f"  - a `{self.eqn.primitive.name}` with {inside} over {errors.names(left)} inside goes one "
                f"way on {shards[0]}, another on {shards[1]}"
            )
        else:
            result: Any = self.eqn.outvars[self.index]
            path = named.get(id(result), f"result {self.index} of a shard_map")
            inner = index[len(axes) :]
            at = f"at {list(inner)} " if inner else ""
            text = (
                f"  - {path}: {errors.array_str(result.aval)} with out spec {errors.spec_str(self.spec)} is "
                f"one copy for all shards along {errors.names(left)}, but differs by {amount:.6g} {at}"
                f"between {shards[0]} and {shards[1]}"
            )
        return BrokenPromise(text, amount, self.spec is None, self.eqn)


def _promises(jaxpr: Jaxpr) -> Iterator[_Promise]:
    """What must hold: results with one copy for several shards and predicates are the same, and loops end."""
    for eqn in {id(eqn): eqn for eqn in jaxprs.all_equations(jaxpr)}.values():
        name = eqn.primitive.name
        if name in ("cond", "while"):
            yield _Promise(eqn, 0)
        if name == "while":
            yield _Promise(eqn, _UNENDED)
        if name == "shard_map":
            for k, spec in enumerate(eqn.params["out_specs"]):
                if {*new_axes(eqn)} - {*names_of_spec(spec)}:
                    yield _Promise(eqn, k, spec)


def _sides(every: Iterable[Choice]) -> Iterator[_Promise]:
    for choice in every:
        for side in range(len(choice.unseen)):
            yield _Promise(choice.eqn, _FIRST_SIDE - side)


def _largest_difference(value: Stacked, left: Sequence[Hashable]) -> tuple[AnyLeaf, AnyLeaf]:
    """By how much shards differ along the axes `left`, and where in the stacked array they differ most."""
    x = data_of(value.x)
    if x.size == 0:
        return np.float32(0), np.int32(0)
    at = tuple(slice(0, 1) if name in left else slice(None) for name in value.axes)
    difference = more_than_rounding(x, x[at])
    # The data of a key has an axis that the key does not have.
    difference = difference.max(tuple(range(value.x.ndim, x.ndim)))
    return difference.max(), difference.argmax().astype(np.int32)


def _partitioned_axes(
    eqn: Equation, axes: Sequence[Hashable]
) -> tuple[list[Hashable], list[Hashable]]:
    """The axes along which a predicate may differ: those without and those with collectives inside.

    Along the first each shard goes its own way. Along the others all shards must agree: one that went another
    way would never reach the collectives.
    """
    communicating = communicating_axes(eqn)
    return [n for n in axes if n not in communicating], [n for n in axes if n in communicating]


def _in_lanes(lanes: jax.Array, new: Stacked, old: Stacked) -> Stacked:
    """A new value in some lanes, which come after the mesh axes."""
    shape = (*[1] * len(new.axes), *lanes.shape)
    is_new = lanes.reshape(*shape, *[1] * (new.x.ndim - len(shape)))
    return Stacked(jnp.where(is_new, new.x, old.x), new.axes)


def _one_round(value: Stacked) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one entry of an array that a scan loops over."""
    shape = (*value.x.shape[: len(value.axes)], *value.shape[1:])
    return jax.ShapeDtypeStruct(shape, value.x.dtype)


def _with_axis_moved(value: Stacked, source: int, target: int) -> Stacked:
    """The value with an axis of its array moved, such as that of the rounds of a scan."""
    return Stacked(jnp.moveaxis(value.x, source, target), value.axes)


def _not_replayed(eqn: Equation) -> str:
    """Why an equation that is no collective cannot be replayed; an empty string if it can."""
    if any(hasattr(var.aval, "inner_aval") for var in (*eqn.invars, *eqn.outvars)):
        return "it reads or writes a reference"
    for inner in jaxprs.nested_equations(eqn):
        name = inner.primitive.name
        if name in RULES or name in ("shard_map", "axis_index"):
            return f"it runs `{name}` inside"
    return ""


def draws_safely(eqn: Equation) -> bool:
    """Whether each key gives the same random numbers, or new keys, under `vmap` as by itself."""
    if eqn.primitive.name not in ("random_bits", "random_split", "random_fold_in"):
        return False
    key: Any = eqn.invars[0].aval
    return any(name in str(key.dtype) for name in _SAFE_KEYS)
