"""More calls, to tell what is wrong: with other values, and with the same on every shard."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._compare import Finding, Leaf, leaves_of


# The results of a call, sharded and not, and what was fed in: arguments -> (got, want, wrong leaves).
Compared = Callable[[tuple[Any, ...]], tuple[Any, Any, list[Finding]]]


@dataclasses.dataclass
class Probe:
    """What a failing call does with other arguments, found out where it is asked for.

    **Attributes:**

    - `args`: of the failing call.
    - `place`: lays arguments out on the mesh.
    - `compared`: calls and compares.
    - `draws_in`: whether a call draws random numbers.
    """

    args: tuple[Any, ...]
    place: Callable[..., tuple[Any, ...]]
    compared: Compared
    draws_in: Callable[[tuple[Any, ...]], bool]

    @cached_property
    def generic_args(self) -> tuple[Any, ...]:
        """Arguments as the failing ones are, but for their values.

        Those that Hypothesis ends with are as simple as can be, zeros and ones, from which many a mistake
        looks like another.
        """
        random = np.random.default_rng(1)
        return tuple(jax.tree.map(lambda x: _generic(random, x), self.args))

    @cached_property
    def findings(self) -> dict[int, Finding]:
        """The leaves that are wrong for generic arguments, by number."""
        found = _tried(lambda: self.compared(self.generic_args)[2])
        return {finding.number: finding for finding in found or ()}

    @cached_property
    def twins(self) -> tuple[list[Any], list[Any]] | None:
        """Each leaf of the results where every shard has what the first one has, sharded and not."""

        def called() -> tuple[list[Any], list[Any]]:
            placed = self.place(*self.generic_args)
            got, want, _ = self.compared(tuple(jax.tree.map(_all_the_first, placed)))
            of_both = [[leaf.value for leaf in leaves_of("", tree)] for tree in (got, want)]
            return of_both[0], of_both[1]

        found: tuple[list[Any], list[Any]] | None = _tried(called)
        return found

    @cached_property
    def draws(self) -> bool:
        """Whether the function draws random numbers."""
        return bool(_tried(lambda: self.draws_in(self.args)))


def _tried(call: Callable[[], Any]) -> Any:
    """What a call gives; nothing where it fails, since a guess is worth no error of its own."""
    try:
        return call()
    except Exception:
        return None


def _generic(random: np.random.Generator, x: Any) -> Any:
    """Values in the range of those that there are, all different as far as that goes."""
    if not eqx.is_array(x) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    value = np.asarray(x)
    if value.dtype == bool:
        return jnp.asarray(random.integers(0, 2, x.shape).astype(bool))
    if jnp.issubdtype(x.dtype, jnp.integer):
        least, largest = (int(value.min(initial=0)), int(value.max(initial=0)))
        made = random.integers(least, max(largest, least + 1) + 1, x.shape)
        return jnp.asarray(made.astype(value.dtype))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        made = random.normal(size=x.shape) + 1j * random.normal(size=x.shape)
        return jnp.asarray(made.astype(value.dtype))
    wide = np.where(np.isfinite(value.astype(np.float64)), value, 0.0).astype(np.float64)
    made = random.uniform(-1, 1, x.shape) * (np.abs(wide).max(initial=0.0) or 1.0)
    # What is never negative, a variance or a count, may not be.
    return jnp.asarray((np.abs(made) if wide.min(initial=0.0) >= 0 else made).astype(value.dtype))


def _all_the_first(x: Any) -> Any:
    """What the first shard has, in the place of every shard's."""
    if not eqx.is_array(x) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    parts = Leaf("", x).parts
    if not parts:
        return x
    value = np.asarray(x)
    first = value[parts[0][1]]
    repeats = [n // max(k, 1) for n, k in zip(value.shape, first.shape, strict=True)]
    return jnp.asarray(np.tile(first, repeats))
