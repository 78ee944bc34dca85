"""The arrays of a result, and their numbers."""

import dataclasses
from collections.abc import Hashable
from functools import cached_property
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._types import AnyLeaf, Numbers, PyTree


# Where a shard is on the mesh: its index along each axis, by the name of the axis.
Coordinates: TypeAlias = dict[Hashable, int]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a result.

    **Attributes:**

    - `path`: the path as the user would type it.
    - `array`: the array as it was returned, or its type.
    """

    path: str
    array: Any

    @cached_property
    def value(self) -> Numbers:
        """The numbers of the array, also where it holds keys."""
        return numbers(self.array)

    @property
    def dtype(self) -> Any:
        """Of a number of Python it is the dtype that JAX gives it."""
        return self.array.dtype if hasattr(self.array, "dtype") else jnp.result_type(self.array)

    @cached_property
    def parts(self) -> list[tuple[Coordinates, tuple[slice, ...]]]:
        """For each shard its coordinates and its part; empty for an array that lies on no mesh."""
        sharding = getattr(self.array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(
            sharding.mesh, jax.sharding.Mesh
        ):
            return []
        has = sharding.devices_indices_map(self.array.shape)
        return [
            (dict(zip(sharding.mesh.axis_names, at, strict=True)), has[device])
            for at, device in np.ndenumerate(sharding.mesh.devices)
        ]


def leaves_of(name: str, result: PyTree) -> list[Leaf]:
    """The arrays of a result, and its numbers of Python."""
    flat, _ = jax.tree_util.tree_flatten_with_path(result)
    return [Leaf(name + jax.tree_util.keystr(keys), x) for keys, x in flat if is_number_or_type(x)]


def is_number_or_type(x: AnyLeaf) -> bool:
    return eqx.is_array_like(x) or isinstance(x, jax.ShapeDtypeStruct)


def numbers(x: AnyLeaf) -> Numbers:
    """The numbers of an array: floats in double precision, and keys as the integers that they are."""
    if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    found = np.asarray(x)
    if jnp.issubdtype(found.dtype, jnp.floating):
        return found.astype(np.float64)  # NumPy cannot subtract bfloat16 and the like.
    return found.astype(np.complex128) if found.dtype.kind == "c" else found
