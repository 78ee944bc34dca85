"""What the rows of the table call functions on, made of two 4×4 matrices with entries between 0.2 and 0.9.

The source of what a row uses stands in the short program that shows a wrong cell.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def whole(x: Array) -> Array:
    return (x * 100).astype(jnp.int32) % 7


def key(x: Array) -> Array:
    return jax.random.fold_in(jax.random.key(0), (x[0, 0] * 1000).astype(jnp.uint32))


def positive(x: Array) -> Array:
    return x @ x.T + 4 * jnp.eye(4)


def image(x: Array) -> Array:
    return x.reshape(1, 1, 4, 4)


def narrow(x: Array) -> Array:
    """Blocks of 32 entries of 8 bits, as those that share one scale."""
    return jnp.tile(x, (1, 8))[None].astype(jnp.float8_e4m3fn)


def scales() -> Array:
    return jnp.ones((1, 4, 1), jnp.float8_e8m0fnu)


MATMUL = (((1,), (0,)), ((), ()))
GATHER = lax.GatherDimensionNumbers((1,), (0,), (0,))
SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])


def updates(optimizer: Any, params: Array, gradients: Array) -> Any:
    """The parameters and the optimizer's state after two steps of an optimizer of Optax."""
    state = optimizer.init(params)
    for _ in range(2):
        change, state = optimizer.update(gradients, state, params)
        params = params + change
    return params, state
