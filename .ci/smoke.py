"""A program of a user who has installed statemesh, and a library that embeds it, and nothing else."""

import importlib.metadata
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from quantmesh import Quantize

import statemesh as sm


def refused(module: str) -> str:
    """What the import of a module says that needs an extra."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    raise AssertionError(f"{module} needs nothing else")


folder = pathlib.Path(sm.__file__).parent
assert "site-packages" in folder.parts, folder
assert (folder / "py.typed").exists()
assert importlib.metadata.version("statemesh") == sm.__version__
assert "pip install 'statemesh[testing]'" in refused("statemesh.testing")
assert "pip install 'statemesh[checkpoint]'" in refused("statemesh.checkpoint")

mesh = jax.make_mesh((4,), ("data",))
call = sm.shard_map(lambda layer, x: layer(x), mesh, (None, P("data")), (P("data"), P()))
layer = Quantize(3, jax.random.key(0), axis_name="data")
x = jnp.sin(jnp.arange(48.0)).reshape(16, 3)
_, layer = call(layer, x)
y, after = jax.block_until_ready(call(layer, x))
assert y.addressable_shards[0].data.shape == (4, 3)
assert np.array_equal(after.range.value["high"], np.max(x, 0))
np.testing.assert_allclose(y, call.unsharded(layer, x)[0], atol=1e-6)
assert not np.array_equal(y, x)
print(f"statemesh {sm.__version__} works in {folder}")
