"""The copies that devices hold of one part of an array, compared by value."""

import functools
from collections import defaultdict
from collections.abc import Hashable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .. import _errors as errors
from .._types import Numbers


# Where a part of an array lies: its first and last index along each axis.
Place: TypeAlias = tuple[tuple[int, int], ...]


class Copies:
    """An array of which several devices hold the same part.

    **Attributes:**

    - `path`: the path of the array as the user would type it.
    - `array`: the array.
    - `spread`: for each number, the difference between the largest and the smallest copy of it. It is
        infinite where some copies are NaN and others are not. Keys are compared by their data, and complex
        numbers by their real and imaginary parts, of which the larger difference counts.
    """

    def __init__(
        self, path: str, array: jax.Array, parts: dict[Place, list[tuple[Any, jax.Array]]]
    ) -> None:
        self.path, self.array = path, array
        self._parts = {
            place: [(device, _numbers(data)) for device, data in copies]
            for place, copies in parts.items()
        }
        self.spread: Numbers = np.zeros(array.shape)
        for place, copies in self._parts.items():
            found = _spread([data for _, data in copies])
            self.spread[tuple(slice(*ends) for ends in place)] = found

    def worst(self, allowed: Numbers = 0.0) -> errors.UnequalCopies | None:
        """The number whose spread exceeds by most what is allowed.

        **Arguments:**

        - `allowed`: a number, or one for each number of the array.

        **Returns:** where it is and what it is there, or `None` if no spread is larger than allowed.
        """
        allowed = np.broadcast_to(allowed, self.spread.shape)
        # Where nothing is allowed, a larger spread still exceeds that by more.
        least = 1e-12 * float(self.spread.max(initial=0.0, where=np.isfinite(self.spread)))
        with np.errstate(divide="ignore", invalid="ignore"):
            times = self.spread / np.maximum(allowed, least)
        # An allowance that is NaN allows nothing.
        times = np.where(self.spread <= allowed, 0.0, np.where(np.isnan(times), np.inf, times))
        if not times.any():
            return None
        at = tuple(map(int, np.unravel_index(int(np.argmax(times)), self.spread.shape)))
        place = next(place for place in self._parts if _holds(place, at))
        inside = tuple(k - start for k, (start, _) in zip(at, place, strict=True))
        devices = [device for device, _ in self._parts[place]]
        values = np.stack([data[inside] for _, data in self._parts[place]])
        low, high = _farthest(values)
        return errors.UnequalCopies(
            self.path,
            errors.array_str(self.array),
            getattr(self.array.sharding, "spec", None),
            self._left_out(),
            float(self.spread[at]),
            float(allowed[at]),
            at,
            (self._shard(devices[low]), self._shard(devices[high])),
            (self._shown(values[low]), self._shown(values[high])),
        )

    def _left_out(self) -> tuple[Hashable, ...]:
        """The mesh axes over which the array is not split."""
        sharding = self.array.sharding
        if not isinstance(sharding, NamedSharding):
            return ()
        named = [x if isinstance(x, tuple) else (x,) for x in sharding.spec]
        split = {name for names in named for name in names}
        return tuple(name for name in sharding.mesh.axis_names if name not in split)

    def _shard(self, device: Any) -> str:
        sharding = self.array.sharding
        if not isinstance(sharding, NamedSharding):
            return f"device {device.id}"
        (at,) = np.argwhere(sharding.mesh.devices == device)
        return errors.axes_str(dict(zip(sharding.mesh.axis_names, map(int, at), strict=True)))

    def _shown(self, value: Numbers) -> str:
        if jnp.issubdtype(self.array.dtype, jnp.complexfloating):
            return f"{complex(*value):.6g}"
        if jnp.issubdtype(self.array.dtype, jnp.floating):
            return f"{float(value[0]):.6g}"
        if jnp.issubdtype(self.array.dtype, jnp.bool_):
            return str(bool(value[0]))
        numbers = [int(x) for x in value]
        return str(numbers if jnp.issubdtype(self.array.dtype, jax.dtypes.prng_key) else numbers[0])


def copies_of(path: str, array: object) -> Copies | None:
    """The copies of an array; `None` where each device holds a part of its own, or there is only one.

    **Arguments:**

    - `path`: the path of the array as the user would type it.
    - `array`: a leaf of a result. Whatever is no `jax.Array` has no copies.
    """
    if not isinstance(array, jax.Array):
        return None
    parts: dict[Place, list[tuple[Any, jax.Array]]] = defaultdict(list)
    shards = array.addressable_shards
    for shard in shards:
        # The index of keys has an entry more, for their data.
        sides = zip(shard.index, array.shape, strict=False)
        place = tuple(part.indices(side)[:2] for part, side in sides)
        parts[place].append((shard.device, shard.data))
    return None if len(parts) == len(shards) else Copies(path, array, dict(parts))


def _numbers(x: jax.Array) -> Numbers:
    """The numbers of an array, in a type in which NumPy compares all of them, with one more axis.

    The last axis has the real and the imaginary part, or the numbers of a key.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        found = np.asarray(jax.random.key_data(x))
        return found.reshape((*x.shape, -1)).astype(np.uint64)
    found = np.asarray(x)
    if jnp.issubdtype(found.dtype, jnp.complexfloating):
        return np.stack([found.real, found.imag], axis=-1).astype(np.float64)
    if jnp.issubdtype(found.dtype, jnp.floating):
        return found.astype(np.float64)[..., None]
    signed = jnp.issubdtype(found.dtype, jnp.signedinteger)
    return found.astype(np.int64 if signed else np.uint64)[..., None]


def _spread(copies: list[Numbers]) -> Numbers:
    first, *rest = copies
    if all(np.array_equal(first, other) for other in rest):
        return np.zeros(first.shape[:-1])
    if first.dtype.kind in "iu":
        most, least = functools.reduce(np.maximum, copies), functools.reduce(np.minimum, copies)
        # In unsigned numbers the difference of any two integers is exact.
        return (most.astype(np.uint64) - least.astype(np.uint64)).astype(np.float64).max(axis=-1)
    missing = [np.isnan(x) for x in copies]
    some, every = (
        functools.reduce(np.logical_or, missing),
        functools.reduce(np.logical_and, missing),
    )
    most, least = functools.reduce(np.fmax, copies), functools.reduce(np.fmin, copies)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where((most == least) | every, 0.0, most - least)
    return np.where(some & ~every, np.inf, difference).max(axis=-1)


def _farthest(values: Numbers) -> tuple[int, int]:
    """The numbers of the two copies that are farthest from each other."""
    columns = [_spread([values[:1], values[k : k + 1]]) for k in range(len(values))]
    one = int(np.argmax(columns))
    columns = [_spread([values[one : one + 1], values[k : k + 1]]) for k in range(len(values))]
    two = int(np.argmax(columns))
    return min(one, two), max(one, two)


def _holds(place: Place, at: tuple[int, ...]) -> bool:
    return all(start <= k < stop for k, (start, stop) in zip(at, place, strict=True))
