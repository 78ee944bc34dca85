"""Arrays as a program on one device takes them."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


# A function that puts an array somewhere else.
Placing: TypeAlias = Callable[[jax.Array], jax.Array]

NO_MESH = AbstractMesh((), ())


def type_of(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type without a sharding, which on Explicit axes is a part of it."""
    weak = bool(getattr(x, "weak_type", False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)


def as_array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def on_one_device(x: Any) -> Any:
    """The array, laid out so that it can meet any other array in one operation."""
    if is_typed(x):
        mesh = jax.typeof(x).sharding.mesh
        auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names)
        return jax.sharding.reshard(x, NamedSharding(auto, PartitionSpec()))
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def is_typed(x: object) -> bool:
    """Whether the type of a traced value has a sharding over Explicit mesh axes."""
    if not isinstance(x, jax.core.Tracer):
        return False
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and any(kind == AxisType.Explicit for kind in mesh.axis_types)


def placing_like(x: Any) -> Placing | None:
    """The function that puts a cotangent where its primal `x` lies; `None` where it may lie anywhere."""
    if is_typed(x):
        return lambda ct: jax.sharding.reshard(ct, jax.typeof(x).sharding)
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return None
    return lambda ct: jax.device_put(ct, x.sharding)
