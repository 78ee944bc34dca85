"""Results that are promised to be the same on several shards, and by how much they differ."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._errors import Unequal, axes_str
from ._collectives import nested_collectives
from ._jaxprs import Equation
from ._stacked import Axes, Stacked


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
