"""Control flow, replayed: branches and loops stay what they are, and each shard takes its own."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp

from ._stacked import Scope, Stacked


# By how much the results differ that are promised not to; and where, in which of the shapes that they have
# had. One entry for each promise.
Gaps: TypeAlias = tuple[Any, Any]


class Frame:
    """One run of a jaxpr.

    **Attributes:**

    - `scope`: the mesh axes that are mapped over.
    - `gaps`: what promises have been found broken so far.
    """

    def __init__(self, scope: Scope, gaps: Gaps) -> None:
        self.scope = scope
        self.gaps = gaps

    def note(self, amounts: Any, where: Any) -> None:
        """Keep the larger gaps."""
        old, at = self.gaps
        self.gaps = jnp.maximum(old, amounts), jnp.where((amounts > old)[:, None], where, at)


@runtime_checkable
class Replays(Protocol):
    """What replays a jaxpr."""

    no_gaps: Gaps

    def joined(self, eqn: Any) -> frozenset[Hashable]:
        """The axes over which there are collectives in what an equation runs."""

    def promised(
        self, eqn: Any, index: int, value: Stacked, left: Sequence[Hashable], frame: Frame
    ) -> Stacked:
        """The one copy that is kept along the axes `left`; that shards have the same is noted, or not."""

    def run(self, jaxpr: Any, values: Sequence[Stacked], frame: Frame) -> list[Stacked]: ...

    def axes(
        self, jaxpr: Any, values: Sequence[Stacked], scope: Scope
    ) -> list[tuple[Hashable, ...]]:
        """Over which axes its results are stacked."""


# One equation, replayed.
Step: TypeAlias = Callable[[Replays, Any, Sequence[Stacked], Frame], list[Stacked]]


def cond(replay: Replays, eqn: Any, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
    index, *operands = values
    alone, together = _parted(replay, eqn, index.axes)
    if alone:
        return one_by_one(cond, alone, replay, eqn, values, frame)
    index = replay.promised(eqn, 0, index, together, frame)
    branches = eqn.params["branches"]
    found = [replay.axes(branch, operands, frame.scope) for branch in branches]
    axes = [frame.scope.in_order(set().union(*each)) for each in zip(*found, strict=True)]

    def taken(jaxpr: Any) -> Callable[..., Any]:
        return lambda gaps, *xs: _run(replay, jaxpr, xs, operands, axes, frame.scope, gaps)

    branch_funs = [taken(branch) for branch in branches]
    xs, frame.gaps = jax.lax.switch(index.x, branch_funs, frame.gaps, *_arrays(operands))
    return _stacked(xs, axes)


def while_(replay: Replays, eqn: Any, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
    params, scope = eqn.params, frame.scope
    first = params["cond_nconsts"] + params["body_nconsts"]
    of_cond, of_body = values[: params["cond_nconsts"]], values[params["cond_nconsts"] : first]
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    carry = _steady(values[first:], scope, lambda c: replay.axes(body, [*of_body, *c], scope))
    (apart,) = replay.axes(condition, [*of_cond, *carry], scope)
    alone, together = _parted(replay, eqn, apart)
    if alone:
        return one_by_one(while_, alone, replay, eqn, values, frame)
    axes = [value.axes for value in carry]

    def goes_on(xs: Sequence[Any], gaps: Gaps) -> tuple[Any, Gaps]:
        inner = Frame(scope, gaps)
        (go,) = replay.run(condition, [*of_cond, *_stacked(xs, axes)], inner)
        # Where shards do not agree, all stop.
        return jnp.all(go.x) & replay.promised(eqn, 0, go, together, inner).x, inner.gaps

    def once(state: Any) -> Any:
        _, xs, gaps = state
        given, like = [*_arrays(of_body), *xs], [*of_body, *carry]
        xs, gaps = _run(replay, body, given, like, axes, scope, gaps)
        go, gaps = goes_on(xs, gaps)
        return go, xs, gaps

    go, gaps = goes_on(_arrays(carry), frame.gaps)
    start = go, _arrays(carry), gaps
    _, xs, frame.gaps = jax.lax.while_loop(lambda state: state[0], once, start)
    return _stacked(xs, axes)


def _parted(
    replay: Replays, eqn: Any, axes: Sequence[Hashable]
) -> tuple[list[Hashable], list[Hashable]]:
    """Of the axes along which a predicate may differ: where shards go alone, where they have to agree."""
    joined = replay.joined(eqn)
    return [n for n in axes if n not in joined], [n for n in axes if n in joined]


def scan(replay: Replays, eqn: Any, values: Sequence[Stacked], frame: Frame) -> list[Stacked]:
    params, scope, body = eqn.params, frame.scope, eqn.params["jaxpr"]
    inner = getattr(body, "jaxpr", body)
    # What is scanned over, or stacked, has an axis more outside.
    carries = _as_inside(eqn.outvars, inner.outvars)
    first = _as_inside(eqn.invars, inner.invars) - carries
    consts, scanned = values[:first], values[first + carries :]
    # One of each, by its axes: enough to ask what becomes of them.
    slices = [Stacked(_without(value), value.axes) for value in scanned]

    def after(carry: Sequence[Stacked]) -> list[tuple[Hashable, ...]]:
        return replay.axes(body, [*consts, *carry, *slices], scope)

    carry = _steady(values[first : first + carries], scope, after)
    axes = [*(value.axes for value in carry), *after(carry)[carries:]]

    def once(state: Any, xs: Any) -> Any:
        gaps, *mine = state
        like = [*consts, *carry, *slices]
        given = [*_arrays(consts), *mine, *xs]
        made, gaps = _run(replay, body, given, like, axes, scope, gaps)
        return (gaps, *made[:carries]), made[carries:]

    over = [jnp.moveaxis(value.x, len(value.axes), 0) for value in scanned]
    (frame.gaps, *last), ys = jax.lax.scan(
        once,
        (frame.gaps, *_arrays(carry)),
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
    eqn: Any,
    values: Sequence[Stacked],
    frame: Frame,
) -> list[Stacked]:
    """An equation run shard by shard along some axes: nothing runs on a shard that would not run there."""
    scope = frame.scope
    sizes = {name: size for name, size in scope.sizes.items() if name not in over}
    apart = [i for i, value in enumerate(values) if set(value.axes) & set(over)]
    flat = {i: scope.flat(values[i], over) for i in apart}
    found: list[list[tuple[Hashable, ...]]] = []

    def shard(item: Any) -> Any:
        places, xs = item
        mine = list(values)
        for i, x in zip(apart, xs, strict=True):
            mine[i] = Stacked(x, flat[i][1])
        here = dict(zip(over, places, strict=True))
        inner = Frame(Scope(sizes, {**scope.places, **here}), replay.no_gaps)
        made = step(replay, eqn, mine, inner)
        found[:] = [[value.axes for value in made]]
        return _arrays(made), inner.gaps

    shape = scope.shape(over)
    grid = jnp.indices(shape, dtype=jnp.int32).reshape(len(shape), -1)
    xs, (amounts, where) = jax.lax.map(shard, (list(grid), [flat[i][0] for i in apart]))
    worst = jnp.argmax(amounts, 0)
    frame.note(
        jnp.take_along_axis(amounts, worst[None], 0)[0],
        jnp.take_along_axis(where, worst[None, :, None], 0)[0],
    )
    return [scope.unflat(x, over, rest) for x, rest in zip(xs, found[0], strict=True)]


def _steady(
    carry: Sequence[Stacked],
    scope: Scope,
    after: Callable[[Sequence[Stacked]], list[tuple[Hashable, ...]]],
) -> list[Stacked]:
    """What a loop carries, stacked over all axes over which it may differ after any number of rounds."""
    while True:
        new = after(carry)[: len(carry)]
        grown = [scope.spread(value, axes) for value, axes in zip(carry, new, strict=True)]
        if all(a is b for a, b in zip(grown, carry, strict=True)):
            return grown
        carry = grown


def _run(
    replay: Replays,
    jaxpr: Any,
    xs: Sequence[Any],
    like: Sequence[Stacked],
    axes: Sequence[tuple[Hashable, ...]],
    scope: Scope,
    gaps: Gaps,
) -> tuple[list[Any], Gaps]:
    """A jaxpr on arrays that are stacked as `like`; its results, stacked over `axes`."""
    inner = Frame(scope, gaps)
    made = replay.run(jaxpr, _stacked(xs, [value.axes for value in like]), inner)
    spread = [scope.spread(value, names) for value, names in zip(made, axes, strict=True)]
    return _arrays(spread), inner.gaps


def _stacked(xs: Sequence[Any], axes: Sequence[tuple[Hashable, ...]]) -> list[Stacked]:
    return [Stacked(x, names) for x, names in zip(xs, axes, strict=True)]


def _arrays(values: Sequence[Stacked]) -> list[Any]:
    return [value.x for value in values]


def _without(value: Stacked) -> Any:
    shape = (*value.x.shape[: len(value.axes)], *value.shape[1:])
    return jax.ShapeDtypeStruct(shape, value.x.dtype)


def _as_inside(outer: Any, inner: Any) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)
