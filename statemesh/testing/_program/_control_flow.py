"""Control flow, replayed: branches and loops stay branches and loops, and each shard takes its own way."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp

from .._types import AnyLeaf, Fun
from ._arithmetic import Arithmetic
from ._collectives import communicating_axes
from ._jaxprs import Equation, Jaxpr, opened
from ._stacked import Axes, Scope, Stacked


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
