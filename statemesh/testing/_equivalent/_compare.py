"""Which leaves of a result differ from those of the reference, and where."""

import dataclasses
import math
from collections.abc import Hashable
from functools import cached_property
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .. import _errors as errors
from .._types import AnyLeaf, Numbers, PyTree


# Where a shard is on the mesh: its index along each axis, by the name of the axis.
Coordinates: TypeAlias = dict[Hashable, int]
_finfo: Any = jnp.finfo  # NumPy's own does not know bfloat16, and this one is not annotated.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a result.

    **Attributes:**

    - `path`: the path as the user would type it.
    - `array`: the array as it was returned.
    """

    path: str
    array: Any

    @cached_property
    def value(self) -> Numbers:
        """The numbers of the array, also where it holds keys."""
        return _numbers(self.array)

    @cached_property
    def parts(self) -> list[tuple[Coordinates, tuple[slice, ...]]]:
        """For each shard its coordinates and its part; empty for an array that lies on no mesh."""
        sharding = getattr(self.array, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return []
        has = sharding.devices_indices_map(self.array.shape)
        return [
            (dict(zip(sharding.mesh.axis_names, at, strict=True)), has[device])
            for at, device in np.ndenumerate(sharding.mesh.devices)
        ]

    @cached_property
    def unequal_copies(self) -> tuple[str, str] | None:
        """Two shards that have different copies of one value."""
        if not self.parts:
            return None
        by_device = {shard.device: shard.data for shard in self.array.addressable_shards}
        devices = self.array.sharding.mesh.devices
        first: dict[str, tuple[Coordinates, Numbers]] = {}
        for (at, index), device in zip(self.parts, devices.flat, strict=True):
            data = _numbers(by_device[device])
            other, known = first.setdefault(str(index), (at, data))
            if not np.array_equal(known, data, equal_nan=data.dtype.kind in "fc"):
                return errors.axes_str(other), errors.axes_str(at)
        return None


def leaves_of(name: str, result: PyTree) -> list[Leaf]:
    """The arrays of a result."""
    flat, _ = jax.tree_util.tree_flatten_with_path(result)
    return [Leaf(name + jax.tree_util.keystr(keys), x) for keys, x in flat if eqx.is_array_like(x)]


def _numbers(x: AnyLeaf) -> Numbers:
    if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    found = np.asarray(x)
    if jnp.issubdtype(found.dtype, jnp.floating):
        return found.astype(np.float64)  # NumPy cannot subtract bfloat16 and the like.
    return found


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A leaf that differs from the reference.

    **Attributes:**

    - `number`: the number of the leaf in the result.
    - `got`: the leaf.
    - `want`: the value of the reference.
    - `before`: the value before the call, if the leaf is fed back.
    - `tolerance`: the largest difference that rounding explains.
    """

    number: int
    got: Leaf
    want: Numbers
    before: Numbers | None
    tolerance: float

    @property
    def same_shape(self) -> bool:
        return bool(self.got.value.shape == self.want.shape)

    @cached_property
    def deviation(self) -> Numbers:
        """The difference between each number and the reference."""
        return deviations(self.got.value, self.want)

    @cached_property
    def worst(self) -> tuple[int, ...]:
        """The index of the largest difference."""
        return tuple(map(int, np.unravel_index(int(np.argmax(self.deviation)), self.want.shape)))

    @cached_property
    def shards(self) -> list[str]:
        """The shards that hold the number with the largest difference."""
        at = self.worst
        has = [shard for shard, index in self.got.parts if _covers(index, at, self.want.shape)]
        return [errors.axes_str(shard) for shard in has]

    @cached_property
    def sizes(self) -> dict[Hashable, int]:
        """The sizes of the mesh's axes."""
        sharding = getattr(self.got.array, "sharding", None)
        return dict(sharding.mesh.shape) if isinstance(sharding, NamedSharding) else {}

    @cached_property
    def split(self) -> dict[int, int]:
        """The number of parts of each axis of the array that is split."""
        shape = self.got.value.shape
        steps = [
            _size(index[d], shape[d]) for _, index in self.got.parts[:1] for d in range(len(index))
        ]
        counts = {d: shape[d] // step for d, step in enumerate(steps) if step}
        return {d: count for d, count in counts.items() if count > 1}

    def off(self) -> Numbers:
        """Which numbers differ by more than rounding."""
        return self.deviation > self.tolerance


def _covers(index: tuple[slice, ...], at: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(k in range(*s.indices(n)) for s, k, n in zip(index, at, shape, strict=False))


def _size(part: slice, whole: int) -> int:
    return len(range(*part.indices(whole)))


def deviations(got: Numbers, want: Numbers) -> Numbers:
    """The differences between numbers; infinite where only one of the two is NaN."""
    if got.dtype.kind in "biu" or want.dtype.kind == "b":
        return np.abs(got.astype(np.float64) - want.astype(np.float64))
    with np.errstate(invalid="ignore"):
        difference = np.abs(got - want)
    equal = (got == want) | ((got != got) & (want != want))
    return np.where(equal, 0.0, np.where(np.isnan(difference), np.inf, difference))


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far rounding may bring two computations of the same value apart.

    The first term is the unit roundoff of the dtype times the largest number of the leaf. The second is the
    change of the reference when each argument is off by one roundoff: a result that is small because terms
    cancel has fewer right digits. Both grow with the square root of the number of terms that are summed,
    since errors of either sign partly cancel (Higham, Accuracy and Stability of Numerical Algorithms, ch.
    4.2).
    """

    terms: int
    given: float | None = None

    def of(self, leaf: Leaf, want: Numbers, perturbed: Numbers) -> float:
        if not jnp.issubdtype(leaf.array.dtype, jnp.inexact):
            return 0.0
        finite = np.abs(np.where(np.isfinite(want), want, 0.0))
        largest = float(finite.max(initial=0.0))
        if self.given is not None:
            return self.given * max(largest, 1.0)
        eps = float(_finfo(leaf.array.dtype).eps)
        moved = np.abs(np.where(np.isfinite(perturbed) & np.isfinite(want), perturbed - want, 0.0))
        spread = 4 * math.sqrt(self.terms)
        tiny = float(_finfo(leaf.array.dtype).tiny)  # XLA may flush what is smaller to zero.
        return spread * (eps * largest + float(moved.max(initial=0.0))) + tiny


def compare(
    name: str,
    got: PyTree,
    want: PyTree,
    perturbed: PyTree,
    before: dict[int, Numbers],
    tolerance: Tolerance,
) -> list[Mismatch]:
    """The leaves of a result that differ from those of the reference.

    **Arguments:**

    - `perturbed`: the results of the reference for arguments that are off by rounding.
    - `before`: the values before the call of the leaves that are fed back, by number.
    """
    leaves, wanted, moved = (leaves_of(name, tree) for tree in (got, want, perturbed))
    if len(leaves) != len(wanted):
        raise errors.other_leaves(name, [x.path for x in leaves], [x.path for x in wanted])
    found = []
    for number, (leaf, goal, near) in enumerate(zip(leaves, wanted, moved, strict=True)):
        leaf = dataclasses.replace(leaf, array=jnp.asarray(leaf.array))
        allowed = tolerance.of(leaf, goal.value, near.value)
        one = Mismatch(number, leaf, goal.value, before.get(number), allowed)
        if not one.same_shape or one.off().any() or (leaf.unequal_copies and not allowed):
            found.append(one)
    return found


def perturbed(args: PyTree) -> PyTree:
    """Arguments whose inexact numbers are off by rounding, up or down."""
    random = np.random.default_rng(0)

    def off(x: AnyLeaf) -> AnyLeaf:
        if not eqx.is_inexact_array(x):
            return x
        eps, signs = float(_finfo(x.dtype).eps), random.choice([-1.0, 1.0], x.shape)
        value = np.asarray(x)
        wide = value.astype(
            np.result_type(value.dtype.type if value.dtype.kind == "c" else np.float64)
        )
        least = np.abs(wide).max(initial=0.0)
        moved = wide + eps * signs * np.maximum(np.abs(wide), least / 8)
        return jnp.asarray(moved.astype(value.dtype))

    return jax.tree.map(off, args)


def as_arrays(args: PyTree) -> PyTree:
    """Arguments as JAX arrays of strong types, like the results that are fed back: so there is one trace."""
    return jax.tree.map(_as_array, args)


def _as_array(x: AnyLeaf) -> AnyLeaf:
    if isinstance(x, np.ndarray | np.generic):
        return jnp.asarray(x)
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x


def longest_reduction(args: PyTree) -> int:
    """The largest number of terms that a reduction of one argument can have."""
    return max([1, *(np.size(x) for x in jax.tree.leaves(args) if eqx.is_array(x))])
