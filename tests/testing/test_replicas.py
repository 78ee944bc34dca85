"""`assert_same_replicas`: a flipped bit in one device's copy is found."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_same_replicas
from tests.helpers import make_mesh


MESH = make_mesh("4x2", AxisType.Explicit)
DTYPES = ("float32", "bfloat16", "int8", "bool", "uint32", "complex64")


def laid_out(x: Any, spec: P) -> jax.Array:
    placed: jax.Array = jax.device_put(x, NamedSharding(MESH, spec))
    return placed


def flipped(x: jax.Array, device: int, bit: int) -> jax.Array:
    """The same array, in whose copy on one device a bit of the third number is another one."""
    parts = []
    for shard in x.addressable_shards:
        raw = np.asarray(shard.data).copy()
        if shard.device.id == device:
            size = raw.dtype.itemsize
            raw.reshape(-1).view(np.uint8)[2 * size + bit // 8] ^= np.uint8(1 << bit % 8)
        parts.append(jax.device_put(raw, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def test_equal_copies_pass() -> None:
    tree = {
        "keys": laid_out(jax.random.split(jax.random.key(0), 4), P()),
        "split": laid_out(np.arange(16.0).reshape(8, 2), P("x", "y")),
        "nan": laid_out(np.full(3, np.nan), P()),
        "alone": jnp.ones(3),
        "numpy": np.ones(3),
    }
    assert_same_replicas(tree)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_is_found(dtype: str) -> None:
    x = laid_out(jnp.asarray(np.arange(8) % 2, dtype), P())
    bits = [0] if dtype == "bool" else range(8 * x.dtype.itemsize)
    for bit in bits:
        with pytest.raises(AssertionError, match=r"model\['x'\]: .* on cpu:5"):
            assert_same_replicas({"x": flipped(x, 5, bit)})


def test_the_report_names_the_state_the_device_and_the_number() -> None:
    weights = laid_out(np.arange(16, dtype=np.float32).reshape(8, 2), P("y"))
    bias = laid_out(np.ones(8, np.float32), P())
    model = {"w": sm.ParamState(flipped(weights, 3, 23)), "b": sm.ParamState(flipped(bias, 6, 31))}
    with pytest.raises(AssertionError) as error:
        assert_same_replicas(model, "net")
    assert str(error.value) == "\n".join(
        [
            "devices hold different copies of 2 arrays:",
            "  - net['b'].value: float32[8], on cpu:6: at [2] of its part np.float32(-1.0), and "
            "np.float32(1.0) on cpu:0",
            "  - net['w'].value: float32[8,2], on cpu:3: at [1, 0] of its part np.float32(20.0), and "
            "np.float32(10.0) on cpu:1",
        ]
    )


def test_other_parts_are_no_copies() -> None:
    """Devices that hold different parts are not compared, and those of one part are."""
    assert_same_replicas(laid_out(np.arange(8, dtype=np.float32), P("x")))
    rows = laid_out(np.ones((8, 4), np.float32), P("x"))
    with pytest.raises(AssertionError, match=r"model: float32\[8,4\], on cpu:[45]"):
        assert_same_replicas(flipped(rows, 4, 3))
