"""Further calls that narrow the cause down: with generic values, and with the same values on every shard."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._types import AnyLeaf, Numbers, PyTree
from ._compare import Leaf, Mismatch, leaves_of


# From arguments to the results of the sharded call, those of the reference, and the mismatches.
Compared = Callable[[tuple[PyTree, ...]], tuple[PyTree, PyTree, list[Mismatch]]]


@dataclasses.dataclass
class Probe:
    """What a failing call gives for other arguments. Nothing is called before it is needed.

    **Attributes:**

    - `args`: the arguments of the failing call.
    - `place`: the function that places arguments on the mesh.
    - `compared`: the function that calls and compares.
    - `draws_in`: whether a call with these arguments draws random numbers.
    """

    args: tuple[PyTree, ...]
    place: Callable[..., tuple[PyTree, ...]]
    compared: Compared
    draws_in: Callable[[tuple[PyTree, ...]], bool]

    @cached_property
    def generic_args(self) -> tuple[PyTree, ...]:
        """The failing arguments with other values.

        The values that Hypothesis shrinks to are zeros and ones, for which many mistakes look alike.
        """
        random = np.random.default_rng(1)
        return tuple(jax.tree.map(lambda x: _generic(random, x), self.args))

    @cached_property
    def mismatches(self) -> dict[int, Mismatch]:
        """The mismatches for generic arguments, by number of the leaf."""
        found = _result_or_none(lambda: self.compared(self.generic_args)[2])
        return {mismatch.number: mismatch for mismatch in found or ()}

    @cached_property
    def uniform_results(self) -> tuple[list[Numbers], list[Numbers]] | None:
        """The leaves of both results where every shard gets the part of the first shard."""

        def called() -> tuple[list[Numbers], list[Numbers]]:
            placed = self.place(*self.generic_args)
            got, want, _ = self.compared(tuple(jax.tree.map(_first_part_everywhere, placed)))
            of_both = [[leaf.value for leaf in leaves_of("", tree)] for tree in (got, want)]
            return of_both[0], of_both[1]

        found: tuple[list[Numbers], list[Numbers]] | None = _result_or_none(called)
        return found

    @cached_property
    def draws(self) -> bool:
        """Whether the function draws random numbers."""
        return bool(_result_or_none(lambda: self.draws_in(self.args)))


def _result_or_none(call: Callable[[], Any]) -> Any:
    """The result of a call; `None` where it fails, since a guess must not raise an error of its own."""
    try:
        return call()
    except Exception:
        return None


def _generic(random: np.random.Generator, x: AnyLeaf) -> AnyLeaf:
    """Random values in the range of the given ones."""
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
    # Values that are never negative, such as variances and counts, stay so.
    return jnp.asarray((np.abs(made) if wide.min(initial=0.0) >= 0 else made).astype(value.dtype))


def _first_part_everywhere(x: AnyLeaf) -> AnyLeaf:
    """The array with the part of the first shard in the place of every part."""
    if not eqx.is_array(x) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    parts = Leaf("", x).parts
    if not parts:
        return x
    value = np.asarray(x)
    first = value[parts[0][1]]
    repeats = [n // max(k, 1) for n, k in zip(value.shape, first.shape, strict=True)]
    return jnp.asarray(np.tile(first, repeats))
