"""A traced program, replayed equation by equation over stacked shards."""

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .. import _errors as errors
from .._errors import Unequal, axes_str
from .._types import AnyLeaf, Fun
from ._collectives import RULES, collective, communicating_axes, nested_collectives
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
from ._noise import Arithmetic, Noisy, OwnDtypes, Promoted
from ._stacked import Axes, Scope, Stacked, names_of_spec


# In the place of the number of a result: the promise that a loop ends.
UNENDED = -1


@dataclasses.dataclass(eq=False)
class Promise:
    """A result that must be the same on several shards.

    That is a result of a `shard_map` whose out spec leaves a mesh axis out, or a predicate of control flow
    with collectives inside. Or a loop that must end.

    **Attributes:**

    - `eqn`, `index`: the equation, and the number of its result.
    - `spec`: the out spec; `None` for a predicate.
    - `stacks`: the ways in which the result has been stacked. There are several where an equation is replayed
        several times.
    """

    eqn: Equation
    index: int
    spec: PartitionSpec | None = None
    stacks: list["_Stack"] = dataclasses.field(default_factory=list)

    def stack_number(self, value: Stacked, left: Sequence[Hashable]) -> int:
        """The number in `stacks` of the way in which a result is stacked."""
        sizes = value.x.shape[: len(value.axes)]
        stack = _Stack(value.axes, sizes, value.shape, tuple(left))
        if stack not in self.stacks:
            self.stacks.append(stack)
        return self.stacks.index(stack)

    def unequal(self, path: str, amount: float, where: tuple[int, int]) -> Unequal:
        """The difference that was found, as errors describe it."""
        stack = self.stacks[where[0]]
        index = tuple(map(int, np.unravel_index(where[1], (*stack.sizes, *stack.shape))))
        other = dict(zip(stack.axes, index, strict=False))
        first = {name: 0 if name in stack.left else at for name, at in other.items()}
        aval: Any = self.eqn.outvars[self.index].aval
        return Unequal(
            path=path,
            what=f"{aval.dtype}[{','.join(map(str, aval.shape))}]",
            spec=self.spec,
            axis_names=stack.left,
            amount=amount,
            index=index[len(stack.axes) :],
            shards=(axes_str(first), axes_str(other)),
        )


@dataclasses.dataclass(frozen=True)
class Broken:
    """A promise that does not hold.

    **Attributes:**

    - `number`: the number of the promise in the program.
    - `unequal`: the difference, as errors describe it.
    - `control`, `collectives`: for a predicate, its primitive and the collectives inside; else empty.
    """

    number: int
    unequal: Unequal
    control: str = ""
    collectives: tuple[str, ...] = ()


def broken(
    promises: Sequence[Promise],
    differences: tuple[Any, Any],
    outvars: Sequence[Any],
    paths: Sequence[str],
) -> list[Broken]:
    """The promises that do not hold.

    **Arguments:**

    - `differences`: those that a replay found, by number of the promise.
    - `outvars`, `paths`: the results of the program, and their paths.
    """
    amounts, where = map(np.asarray, differences)
    named = dict(zip(map(id, outvars), paths, strict=False))
    found = []
    for number, promise in enumerate(promises):
        if not amounts[number] or promise.index == UNENDED:
            continue
        at = int(where[number][0]), int(where[number][1])
        inside = f"result {promise.index} of a shard_map"
        result = promise.eqn.outvars[promise.index] if promise.spec is not None else None
        unequal = promise.unequal(named.get(id(result), inside), float(amounts[number]), at)
        control, names = "", set()
        if promise.spec is None:
            control = promise.eqn.primitive.name
            names = {one.primitive.name for one in nested_collectives(promise.eqn)}
        found.append(Broken(number, unequal, control, tuple(sorted(names))))
    return found


def unended(promises: Sequence[Promise], differences: tuple[Any, Any]) -> list[Equation]:
    """The loops that were stopped."""
    pairs = zip(promises, np.asarray(differences[0]), strict=True)
    return [promise.eqn for promise, amount in pairs if promise.index == UNENDED and amount]


@dataclasses.dataclass(frozen=True)
class _Stack:
    """One way in which a result is stacked.

    **Attributes:**

    - `axes`, `sizes`: the mesh axes along which it is stacked, and their sizes.
    - `shape`: the shape of the value of one shard.
    - `left`: those of `axes` along which all shards must have the same value.
    """

    axes: Axes
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    left: Axes


def largest_difference(value: Stacked, left: Sequence[Hashable]) -> tuple[jax.Array, jax.Array]:
    """By how much shards differ along the axes `left`, and where in the stacked array they differ most.

    Differences that rounding explains do not count: equal computations on two shards may
    round differently.
    """
    x = value.x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.size == 0:
        return jnp.float32(0), jnp.int32(0)
    own = x.ndim - value.x.ndim
    at = tuple(slice(0, 1) if name in left else slice(None) for name in value.axes)
    first = x[at]
    same = (x == first) | ((x != x) & (first != first))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        difference = jnp.nan_to_num(jnp.abs(x - first), nan=jnp.inf, posinf=jnp.inf)
        largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0))
        eps = float(jnp.finfo(x.dtype).eps)  # type: ignore[no-untyped-call]
        allowed = largest * (2 * eps if eps > 1e-6 else 64 * eps)
        difference = jnp.where(same | (difference <= allowed), 0, difference)
    else:
        wide = x.astype(jnp.float32)
        difference = jnp.where(same, 0, jnp.maximum(jnp.abs(wide - wide[at]), 1))
    # The data of a key has an axis that the key does not have.
    difference = difference.astype(jnp.float32).max(tuple(range(x.ndim - own, x.ndim)))
    return jnp.max(difference), jnp.argmax(difference).astype(jnp.int32)


# For each promise the largest difference, and where it is: the number of the stack, and the index in it.
Differences: TypeAlias = tuple[Any, Any]


class Frame:
    """One run of a jaxpr.

    **Attributes:**

    - `scope`: the mesh axes that are mapped over.
    - `differences`: those found so far in results that are promised to be the same.
    """

    def __init__(self, scope: Scope, differences: Differences) -> None:
        self.scope = scope
        self.differences = differences

    def note(self, amounts: jax.Array, where: jax.Array) -> None:
        """Keep the larger differences."""
        old, at = self.differences
        self.differences = jnp.maximum(old, amounts), jnp.where((amounts > old)[:, None], where, at)


@runtime_checkable
class Replays(Protocol):
    """What replays a jaxpr."""

    no_differences: Differences
    arithmetic: Arithmetic
    most_rounds: int | None

    def one_copy(
        self, eqn: Equation, index: int, value: Stacked, left: Sequence[Hashable], frame: Frame
    ) -> Stacked:
        """Keep one copy along the axes `left`, and note by how much the others differ."""

    def stopped(self, eqn: Equation, goes_on: jax.Array, frame: Frame) -> None:
        """Note whether a loop that was stopped would have gone on."""

    def run(self, jaxpr: Jaxpr, values: Sequence[Stacked], frame: Frame) -> list[Stacked]: ...

    def axes(self, jaxpr: Jaxpr, values: Sequence[Stacked], scope: Scope) -> list[Axes]:
        """The axes along which the results of a jaxpr are stacked."""


# What replays one equation.
Step: TypeAlias = Callable[[Replays, Equation, Sequence[Stacked], Frame], list[Stacked]]


def cond(replay: Replays, eqn: Equation, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
    index, *operands = values
    own_way, must_agree = _partitioned_axes(eqn, index.axes)
    if own_way:
        return one_by_one(cond, own_way, replay, eqn, values, frame)
    index = replay.one_copy(eqn, 0, index, must_agree, frame)
    branches = eqn.params["branches"]
    found = [replay.axes(branch, operands, frame.scope) for branch in branches]
    axes = [frame.scope.in_order(set().union(*each)) for each in zip(*found, strict=True)]

    def taken(jaxpr: Jaxpr) -> Fun:
        return lambda differences, *xs: _run(
            replay, jaxpr, xs, operands, axes, frame.scope, differences
        )

    # A branch may vary along fewer axes than another. All must return arrays of the same shape.
    branch_funs = [taken(branch) for branch in branches]
    xs, frame.differences = jax.lax.switch(
        index.x, branch_funs, frame.differences, *_arrays(operands)
    )
    return _stacked(xs, axes)


def while_(
    replay: Replays, eqn: Equation, values: Sequence[Stacked], frame: Frame
) -> list[Stacked]:
    params, scope = eqn.params, frame.scope
    first = params["cond_nconsts"] + params["body_nconsts"]
    of_cond, of_body = values[: params["cond_nconsts"]], values[params["cond_nconsts"] : first]
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    carry = _fixed_point(values[first:], scope, lambda c: replay.axes(body, [*of_body, *c], scope))
    (varying,) = replay.axes(condition, [*of_cond, *carry], scope)
    own_way, must_agree = _partitioned_axes(eqn, varying)
    if own_way:
        return one_by_one(while_, own_way, replay, eqn, values, frame)
    axes = [value.axes for value in carry]

    def goes_on(xs: Sequence[AnyLeaf], differences: Differences) -> tuple[Any, Differences]:
        inner = Frame(scope, differences)
        (go,) = replay.run(condition, [*of_cond, *_stacked(xs, axes)], inner)
        # Where shards do not agree, all stop: the difference is reported, and no loop runs for ever.
        every = jnp.all(go.x, tuple(range(len(go.axes))))
        return every & replay.one_copy(eqn, 0, go, must_agree, inner).x, inner.differences

    def is_next(state: Any) -> Any:
        rounds, go, _, _ = state
        return jnp.any(go) & (replay.most_rounds is None or rounds < replay.most_rounds)

    def once(state: Any) -> Any:
        rounds, go, xs, differences = state
        given, like = [*_arrays(of_body), *xs], [*of_body, *carry]
        new, differences = _run(replay, body, given, like, axes, scope, differences)
        if go.ndim:
            # A loop under `vmap` has a predicate for each lane. A lane that has ended keeps its values.
            new = [_where(go, a, b, names) for a, b, names in zip(new, xs, axes, strict=True)]
        go, differences = goes_on(new, differences)
        return rounds + 1, go, new, differences

    go, differences = goes_on(_arrays(carry), frame.differences)
    start = jnp.int32(0), go, _arrays(carry), differences
    _, go, xs, frame.differences = jax.lax.while_loop(is_next, once, start)
    if replay.most_rounds is not None:
        replay.stopped(eqn, jnp.any(go), frame)
    return _stacked(xs, axes)


def _where(lanes: jax.Array, new: AnyLeaf, old: AnyLeaf, axes: Axes) -> AnyLeaf:
    """New values in some lanes, which come after the mesh axes."""
    shape = (*[1] * len(axes), *lanes.shape)
    return jnp.where(lanes.reshape(*shape, *[1] * (new.ndim - len(shape))), new, old)


def _partitioned_axes(
    eqn: Equation, axes: Sequence[Hashable]
) -> tuple[list[Hashable], list[Hashable]]:
    """The axes along which a predicate may differ: those without and those with collectives inside.

    Along the first each shard goes its own way. Along the others all shards must agree: one that went another
    way would never reach the collectives.
    """
    communicating = communicating_axes(eqn)
    return [n for n in axes if n not in communicating], [n for n in axes if n in communicating]


def scan(replay: Replays, eqn: Equation, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
    params, scope, body = eqn.params, frame.scope, eqn.params["jaxpr"]
    inner = opened(body)
    # Versions of JAX store these counts under different names. What is scanned over or stacked has one axis
    # more outside than inside; constants and what is carried have as many.
    carries = _with_equal_ranks(eqn.outvars, inner.outvars)
    first = _with_equal_ranks(eqn.invars, inner.invars) - carries
    consts, scanned = values[:first], values[first + carries :]
    # The types of one round: enough to ask along which axes its results are stacked.
    slices = [Stacked(_one_round(value), value.axes) for value in scanned]

    def after(carry: Sequence[Stacked]) -> list[Axes]:
        return replay.axes(body, [*consts, *carry, *slices], scope)

    carry = _fixed_point(values[first : first + carries], scope, after)
    axes = [*(value.axes for value in carry), *after(carry)[carries:]]

    def once(state: Any, xs: Any) -> Any:
        differences, *mine = state
        like = [*consts, *carry, *slices]
        given = [*_arrays(consts), *mine, *xs]
        made, differences = _run(replay, body, given, like, axes, scope, differences)
        return (differences, *made[:carries]), made[carries:]

    over = [jnp.moveaxis(value.x, len(value.axes), 0) for value in scanned]
    (frame.differences, *last), ys = jax.lax.scan(
        once,
        (frame.differences, *_arrays(carry)),
        over,
        length=params["length"],
        reverse=params["reverse"],
    )
    ys = [jnp.moveaxis(y, 0, len(mine)) for y, mine in zip(ys, axes[carries:], strict=True)]
    return _stacked([*last, *ys], axes)


def one_by_one(
    step: Step,
    over: Sequence[Hashable],
    replay: Replays,
    eqn: Equation,
    values: Sequence[Stacked],
    frame: Frame,
) -> list[Stacked]:
    """Run an equation shard by shard along some axes, so that each shard runs nothing but its own way."""
    scope = frame.scope
    sizes = {name: size for name, size in scope.sizes.items() if name not in over}
    stacked = [i for i, value in enumerate(values) if set(value.axes) & set(over)]
    flat = {i: scope.flat(values[i], over) for i in stacked}
    # The axes of the results are known only after the function has been traced.
    found: list[list[Axes]] = []

    def shard(item: Any) -> Any:
        indices, xs = item
        mine = list(values)
        for i, x in zip(stacked, xs, strict=True):
            mine[i] = Stacked(x, flat[i][1])
        here = dict(zip(over, indices, strict=True))
        inner = Frame(Scope(sizes, {**scope.indices, **here}), replay.no_differences)
        made = step(replay, eqn, mine, inner)
        found[:] = [[value.axes for value in made]]
        return _arrays(made), inner.differences

    shape = scope.shape(over)
    grid = jnp.indices(shape, dtype=jnp.int32).reshape(len(shape), -1)
    xs, (amounts, where) = jax.lax.map(shard, (list(grid), [flat[i][0] for i in stacked]))
    worst = jnp.argmax(amounts, 0)
    frame.note(
        jnp.take_along_axis(amounts, worst[None], 0)[0],
        jnp.take_along_axis(where, worst[None, :, None], 0)[0],
    )
    return [scope.unflat(x, over, rest) for x, rest in zip(xs, found[0], strict=True)]


def _fixed_point(
    carry: Sequence[Stacked],
    scope: Scope,
    after: Callable[[Sequence[Stacked]], list[Axes]],
) -> list[Stacked]:
    """What a loop carries, stacked along all axes along which it may differ after any number of rounds."""
    # In each round a value can spread along further axes, until there is no axis left.
    while True:
        new = after(carry)[: len(carry)]
        grown = [scope.spread(value, axes) for value, axes in zip(carry, new, strict=True)]
        if all(a is b for a, b in zip(grown, carry, strict=True)):
            return grown
        carry = grown


def _run(
    replay: Replays,
    jaxpr: Jaxpr,
    xs: Sequence[AnyLeaf],
    like: Sequence[Stacked],
    axes: Sequence[Axes],
    scope: Scope,
    differences: Differences,
) -> tuple[list[Any], Differences]:
    """The results, stacked along `axes`, of a jaxpr on arrays that are stacked as `like`."""
    inner = Frame(scope, differences)
    made = replay.run(jaxpr, _stacked(xs, [value.axes for value in like]), inner)
    spread = [scope.spread(value, names) for value, names in zip(made, axes, strict=True)]
    return _arrays(spread), inner.differences


def _stacked(xs: Sequence[AnyLeaf], axes: Sequence[Axes]) -> list[Stacked]:
    return [Stacked(x, names) for x, names in zip(xs, axes, strict=True)]


def _arrays(values: Sequence[Stacked]) -> list[Any]:
    return [value.x for value in values]


def _one_round(value: Stacked) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one entry of an array that a scan loops over."""
    shape = (*value.x.shape[: len(value.axes)], *value.shape[1:])
    return jax.ShapeDtypeStruct(shape, value.x.dtype)


def _with_equal_ranks(outer: Sequence[AnyLeaf], inner: Sequence[AnyLeaf]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)


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
