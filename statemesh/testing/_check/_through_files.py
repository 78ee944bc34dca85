"""A tree, written to a file and read from it."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._types import PyTree


def saved(tree: PyTree) -> PyTree:
    """A tree whose arrays were written to a file and read from it."""
    return jax.tree.map(lambda x: _through_file(x) if eqx.is_array(x) else x, tree)


def _through_file(x: jax.Array) -> jax.Array:
    file = io.BytesIO()
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = np.asarray(jax.random.key_data(x) if is_key else x)
    # As bytes: the format of NumPy does not know bfloat16 and the like.
    np.save(file, data.reshape(-1).view(np.uint8))
    file.seek(0)
    loaded = np.load(file).view(data.dtype).reshape(data.shape)
    if is_key:
        return jax.random.wrap_key_data(loaded, impl=jax.random.key_impl(x))
    return jnp.asarray(loaded)
