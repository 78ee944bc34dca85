"""Results that are promised to be the same on several shards, and what they differ by."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import Unequal, axes_str
from ._stacked import Stacked


@dataclasses.dataclass(eq=False)
class Promise:
    """A result of a `shard_map` whose out spec leaves some mesh axis out; or a predicate of control flow.

    **Attributes:**

    - `eqn`, `index`: the equation, and which of its results.
    - `spec`: the out spec, `None` for a predicate.
    - `stacks`: how it has been stacked, each time that it was replayed.
    """

    eqn: Any
    index: int
    spec: Any = None
    stacks: list["_Stack"] = dataclasses.field(default_factory=list)

    def seen(self, value: Stacked, left: Sequence[Hashable]) -> int:
        """Note how it is stacked; the number of the note."""
        sizes = value.x.shape[: len(value.axes)]
        stack = _Stack(value.axes, sizes, value.shape, tuple(left))
        if stack not in self.stacks:
            self.stacks.append(stack)
        return self.stacks.index(stack)

    def broken(self, path: str, amount: float, where: tuple[int, int]) -> Unequal:
        """The gap that was found, as it is told."""
        stack = self.stacks[where[0]]
        index = tuple(map(int, np.unravel_index(where[1], (*stack.sizes, *stack.shape))))
        other = dict(zip(stack.axes, index, strict=False))
        first = {name: 0 if name in stack.left else at for name, at in other.items()}
        aval = self.eqn.outvars[self.index].aval
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
class _Stack:
    """The axes over which shards may have different values, those of them along which they must not, and what
    shape that gives."""

    axes: tuple[Hashable, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    left: tuple[Hashable, ...]


def gap(value: Stacked, left: Sequence[Hashable]) -> tuple[Any, Any]:
    """By how much shards differ along the axes `left`, and where in the stacked array they do most.

    What rounding alone may do is no difference: shards that compute the same do not always round the same.
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
        apart = jnp.nan_to_num(jnp.abs(x - first), nan=jnp.inf, posinf=jnp.inf)
        largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0))
        eps = float(jnp.finfo(x.dtype).eps)  # type: ignore[no-untyped-call]
        allowed = largest * (2 * eps if eps > 1e-6 else 64 * eps)
        apart = jnp.where(same | (apart <= allowed), 0, apart)
    else:
        wide = x.astype(jnp.float32)
        apart = jnp.where(same, 0, jnp.maximum(jnp.abs(wide - wide[at]), 1))
    # The words of a key are no axis of the value.
    apart = apart.astype(jnp.float32).max(tuple(range(x.ndim - own, x.ndim)))
    return jnp.max(apart), jnp.argmax(apart).astype(jnp.int32)
