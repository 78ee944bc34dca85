"""Over which mesh axes and lanes values differ, and collectives over both.

JAX's types show which values vary over a mesh axis. They do not show which values a `vmap` batches, and JAX's
collectives over lanes fail inside a checked `shard_map`. JAX gives the rule of a `custom_vmap` the values of
all lanes as one array, and says which of them are batched. With such a rule this module finds out what
differs between lanes, and reduces over them anywhere.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from .._base._checks import check_names, is_inexact
from .._base._errors import StatemeshError, quoted
from .._base._types import NO_AXES, Axes, AxisName, PyTree, SeveralAxes, flat_names
from .._jax import _compat as compat
from .._jax._jaxprs import Rule
from .._jax._lifting import over_lanes
from ._joined import AnyArray, largest, largest_entry, smallest, smallest_entry, together


# The names by which states see the microbatches and blocks of `value_and_grad`, as if they were lanes, when
# they enter and leave one. While one runs they are not bound: microbatches follow one another.
MICROBATCHES = "the microbatches of value_and_grad"
BLOCKS = "the blocks of value_and_grad"
PARTS_OF_ROWS = (MICROBATCHES,), (BLOCKS,)
# The mark that is bound instead.
IN_MICROBATCHES = compat.InMicrobatches()

# Written states are merged in the scope of this name, by which `explain` knows the collectives of policies.
MERGING = "statemesh merges states"

# For each surrounding `value_and_grad` the axes over which it reduces its loss, and all axes bound there.
gradients_around: ContextVar[tuple[tuple[Axes, Axes], ...]] = ContextVar(
    "gradients_around", default=()
)


def bound_names(what: str, axis_name: SeveralAxes) -> tuple[AxisName, ...]:
    """The axes that `axis_name` (one, several or `None`) means here: none outside any mapped call.

    **Raises:** `StatemeshError` for a name that is not bound inside a mapped call; `TypeError` for what is no
    name.
    """
    check_names(what, axis_name)
    names, bound = flat_names(axis_name), compat.bound_axis_names()
    if bound and (unbound := [name for name in names if name not in bound]):
        raise StatemeshError(
            f"{what}: no axis is called {quoted(unbound)} here; the axes mapped over are {quoted(bound)}."
        )
    return names if bound else ()


def shard_index(what: str, axis_name: SeveralAxes) -> Any:
    """This shard's number along the axes, major to minor; 0 outside any mapped call."""
    names = bound_names(what, axis_name)
    return index_along(names) if names else 0


def index_along(axis_names: Sequence[AxisName]) -> Any:
    """This shard's or lane's number along bound axes, major to minor.

    Inside a checked `shard_map` JAX types the number of a lane as varying over a mesh axis of that name, and
    fails wherever a jaxpr is traced: in `jit`, `checkpoint`, `scan`, `cond`. There a rule gives it.
    """
    if not (lanes := lanes_in_checked_map(axis_names)):
        return jax.lax.axis_index(axis_names[0] if len(axis_names) == 1 else tuple(axis_names))
    number: Any = 0
    for name in axis_names:
        index = _lane_index(name) if name in lanes else jax.lax.axis_index(name)
        number = number * jax.lax.axis_size(name) + index
    return number


def inside_microbatches() -> bool:
    """Whether a microbatch is being traced."""
    try:
        jax.lax.axis_size(IN_MICROBATCHES)
    except NameError:
        return False
    return True


def meshes_and_lanes(
    axis_names: Sequence[AxisName],
) -> tuple[tuple[AxisName, ...], tuple[AxisName, ...]]:
    """The names of mesh axes among these, and the names of lanes."""
    taken = compat.manual_axes(jax.sharding.get_abstract_mesh())
    meshes = tuple(name for name in axis_names if name in taken)
    return meshes, tuple(name for name in axis_names if name not in taken)


def lanes_in_checked_map(axis_names: Sequence[AxisName]) -> tuple[AxisName, ...]:
    """The names of lanes among these, if a checked `shard_map` is around.

    There JAX's collectives over lanes fail: `jax.lax.psum` by an AssertionError in JAX 0.10.2 and 0.12.0.
    """
    lanes = meshes_and_lanes(axis_names)[1]
    return lanes if lanes and compat.inside_checked_shard_map() else ()


def varying_over(values: Sequence[AnyArray], axis_names: Sequence[AxisName]) -> list[Axes]:
    """For each array the axes among `axis_names` over which it may differ."""
    meshes, lanes = meshes_and_lanes(axis_names)
    over = [compat.varying(x) & frozenset(meshes) for x in values]
    for name in lanes:
        batched = _batched(values, name)
        over = [axes | {name} if hit else axes for axes, hit in zip(over, batched, strict=True)]
    return over


def psum(arrays: Sequence[AnyArray], axis_names: Sequence[AxisName]) -> list[AnyArray]:
    """The sum of each array."""
    over_mesh = partial(together, jax.lax.psum)
    return _collective(arrays, axis_names, over_mesh, lambda x: jnp.sum(x, 0, dtype=x.dtype))


def pmax(arrays: Sequence[AnyArray], axis_names: Sequence[AxisName]) -> list[AnyArray]:
    """The largest of each array; NaN if there is one."""
    return _collective(arrays, axis_names, largest, largest_entry)


def pmin(arrays: Sequence[AnyArray], axis_names: Sequence[AxisName]) -> list[AnyArray]:
    """The smallest of each array; NaN if there is one."""
    return _collective(arrays, axis_names, smallest, smallest_entry)


def total(value: PyTree, axis_names: Sequence[AxisName]) -> PyTree:
    """The sum of every array of a tree over mesh axes and lanes, in code that may be differentiated.

    It is `jax.lax.psum`, except for lanes inside a checked `shard_map`, where that fails. There each lane
    gets a copy of the sum, and JAX does not know that the copies are equal; `known_same` tells it.
    """
    lanes = lanes_in_checked_map(axis_names)
    for name in lanes:
        value = jax.tree.map(partial(_lane_total, name), value)
    others = tuple(name for name in axis_names if name not in lanes)
    return jax.lax.psum(all_varying(value, others), others) if others else value


def _as_jax(reduce: Callable[..., list[AnyArray]]) -> Callable[..., PyTree]:
    """A reduction of a tree over lanes, one value for all of them, as libraries expect it of JAX's own."""

    def of_tree(tree: PyTree, lanes: Sequence[AxisName]) -> PyTree:
        def of_leaf(x: AnyArray) -> AnyArray:
            # A derivative that is taken in each lane needs copies, and one of all lanes does not.
            copies = reduce is psum and is_inexact(x) and compat.is_derived_in_lanes(x)
            copies = copies and not _is_shared(x, lanes)
            return total(x, lanes) if copies else reduce([x], lanes)[0]

        return jax.tree.map(lambda x: of_leaf(jnp.asarray(x)), tree)

    return of_tree


over_lanes.update({reduce.__name__: _as_jax(reduce) for reduce in (psum, pmax, pmin)})


def known_same(value: PyTree, axis_names: Sequence[AxisName]) -> PyTree:
    """What `total` made of each lane, as one value of which JAX knows that all lanes share it.

    It has no gradient.
    """
    value = jax.lax.stop_gradient(value)
    for name in lanes_in_checked_map(axis_names):
        value = jax.tree.map(partial(same_in_lanes, name), value)
    return value


@jax.named_scope(MERGING)
def one_copy(x: AnyArray, axis_names: Sequence[AxisName]) -> AnyArray:
    """What is the same on all shards over these mesh axes, typed as the same: the first shard's copy."""
    first = jax.lax.axis_index(tuple(axis_names)) == 0
    return jax.lax.psum(jnp.where(first, x, jnp.zeros_like(x)), tuple(axis_names))


def same_in_lanes(name: AxisName, x: AnyArray) -> AnyArray:
    """What is the same in all lanes called `name`, as one value of which JAX knows it: the first lane's copy.

    For values on their way out of the lanes: the gradient goes to the first lane's copy alone.
    """
    return _in_lanes(name, x, lambda _, batched, x: (x[0] if batched else x, False))


def first_of(x: AnyArray, axis_names: Sequence[AxisName]) -> AnyArray:
    """The first shard's unsigned numbers, for all shards."""
    first = jax.lax.axis_index(tuple(axis_names)) == 0
    (number,) = pmax([all_varying(jnp.where(first, x, 0), axis_names)], axis_names)
    return number


def refuse_in_lanes(x: AnyArray, error: Callable[[], Exception]) -> AnyArray:
    """`x`, unless it differs between the lanes of any `vmap` around.

    **Raises:** what `error` returns, where it differs.
    """

    def look(_: int, batched: bool, x: AnyArray) -> tuple[AnyArray, bool]:
        if batched:
            raise error()
        return x, False

    for name in meshes_and_lanes(compat.bound_axis_names())[1]:
        x = _in_lanes(name, x, look, joins=False)
    return x


def all_varying(value: PyTree, axis_names: Sequence[AxisName]) -> PyTree:
    """`value` with the leaves that vary over some of the mesh axes typed as varying over all of them.

    JAX reduces a leaf over mesh axes only if it varies over all of them or over none.
    """
    meshes, _ = meshes_and_lanes(axis_names)

    def typed(x: AnyArray) -> AnyArray:
        return compat.vary(x, meshes) if compat.varying(x).intersection(meshes) else x

    return jax.tree.map(typed, value)


def call_policy(
    policy: Callable[..., PyTree],
    before: PyTree,
    value: PyTree,
    axis_names: tuple[AxisName, ...],
    label: str,
) -> PyTree:
    """What a function that a user gave as a policy makes of `value`.

    **Arguments:**

    - `label`: what the message calls the state.

    **Raises:** `StatemeshError` for lanes inside a checked `shard_map`: JAX has no collectives over them
    there, and those of statemesh give each lane a copy of which JAX does not know that it is the same.
    """
    if lanes := lanes_in_checked_map(axis_names):
        name = getattr(policy, "__name__", repr(policy))
        raise StatemeshError(
            f"{label}: inside a checked shard_map the function reduce={name} cannot merge what the lanes of "
            f"vmap2 ({lanes[0]!r}) wrote, because JAX has no collectives over lanes there. Write instead:\n"
            "  1. a named policy: reduce='mean', or 'sum', 'max', 'min';\n"
            "  2. one value for each lane, with state_out_axes={0: ...}, and merge them after vmap2, as with "
            "jnp.mean(state.value, axis=0)."
        )
    return policy(before, all_varying(value, axis_names), axis_names)


def _batched(values: Sequence[AnyArray], name: AxisName) -> list[bool]:
    """Which values differ between the lanes called `name`."""
    if not values:
        return []
    hits: list[bool] = []

    @custom_vmap
    def look(values: Sequence[AnyArray], lane: Array) -> AnyArray:
        return jnp.zeros(())

    def rule(
        _: int, batched: Any, values: Sequence[AnyArray], lane: Array
    ) -> tuple[AnyArray, bool]:
        hits.extend(batched[0])
        return jnp.zeros(()), False

    look.def_vmap(rule)
    # A lane's own number is batched over its `vmap`, whatever the values are batched over. So the rule is
    # called for these lanes before those of any `vmap` further out.
    look([_without_gradient(x) for x in values], jax.lax.axis_index(name))
    return hits


def _is_shared(x: AnyArray, lanes: Sequence[AxisName]) -> bool:
    """Whether it is certain that all lanes share `x`, and its derivatives too."""
    return not compat.is_derived(x) and all(_batched([x], name) == [False] for name in lanes)


def _without_gradient(x: AnyArray) -> AnyArray:
    return jax.lax.stop_gradient(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _in_lanes(
    name: AxisName,
    x: AnyArray,
    done: Callable[[int, bool, AnyArray], tuple[AnyArray, bool]],
    joins: bool = True,
    lane: Any = None,
) -> AnyArray:
    """What `done` makes of the lanes called `name`, of all of them at once.

    **Arguments:**

    - `done`: it is given how many lanes there are, whether `x` is batched over them, and `x`. It returns its
        result, and whether that is batched.
    - `joins`: whether all lanes get the same, batched or not; else each may get a value of its own.
    - `lane`: the lane's own number, where it was asked for before.
    """

    @custom_vmap
    def run(x: AnyArray, lane: Array) -> AnyArray:
        return x

    def rule(
        count: int, batched: Sequence[bool], x: AnyArray, lane: Array
    ) -> tuple[AnyArray, bool]:
        if batched[1]:
            return done(count, batched[0], x)
        # A `vmap` further in, over another axis: each of its entries goes through these lanes by itself.
        return run(x, lane), batched[0]

    axes = frozenset([name])
    run.def_vmap(Rule(rule, exchanged_over=axes, joined_over=axes if joins else NO_AXES))
    # A lane's own number is batched over its `vmap` only: by this the rule knows these lanes from others.
    return run(x, jax.lax.axis_index(name) if lane is None else lane)


def _whole(count: int, batched: bool, x: AnyArray) -> AnyArray:
    """The values of all lanes along the first axis, whether they differ or not."""
    return x if batched else jnp.broadcast_to(x, (count, *x.shape))


def _lane_total(name: AxisName, x: AnyArray) -> AnyArray:
    """The sum over lanes, one copy for each of them.

    With copies, a cotangent belongs to one lane, whichever of `vmap` and `grad` is the inner one, and the sum
    of all lanes' cotangents is right for both. A single sum for all lanes would need another rule for each.
    """

    def copies(count: int, batched: bool, x: AnyArray) -> tuple[AnyArray, bool]:
        whole = _whole(count, batched, x)
        return jnp.broadcast_to(jnp.sum(whole, 0, dtype=whole.dtype), whole.shape), True

    @jax.custom_vjp
    def run(x: AnyArray, lane: AnyArray) -> AnyArray:
        return _in_lanes(name, x, copies, lane=lane)

    # The lane's number is an operand, because JAX may trace the derivative of a `jit` when the lanes' name is
    # no longer bound.
    run.defvjp(
        lambda x, lane: (run(x, lane), lane), lambda lane, cotangent: (run(cotangent, lane), None)
    )
    return run(x, jax.lax.axis_index(name))


def _lane_index(name: AxisName) -> AnyArray:
    numbers = lambda count, *_: (jnp.arange(count, dtype=jnp.int32), True)
    return _in_lanes(name, jnp.zeros((), jnp.int32), numbers, joins=False)


def _collective(
    arrays: Sequence[AnyArray],
    axis_names: Sequence[AxisName],
    over_mesh: Callable[..., list[AnyArray]],
    over_lanes: Callable[[AnyArray], AnyArray],
) -> list[AnyArray]:
    meshes, lanes = meshes_and_lanes(axis_names)
    for name in lanes:
        done = lambda *lane: (over_lanes(_whole(*lane)), False)
        arrays = [_in_lanes(name, x, done) for x in arrays]
    return over_mesh(arrays, meshes) if meshes else list(arrays)
