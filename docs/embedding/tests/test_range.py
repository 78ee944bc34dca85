"""`Range`: the range of what all shards have seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from quantmesh import Range

import statemesh as sm


def widen(seen: Range, x: jax.Array) -> Range:
    low, high = seen.value["low"], seen.value["high"]
    return seen.set({"low": jnp.minimum(low, x.min(0)), "high": jnp.maximum(high, x.max(0))})


@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 2, "model": 2}])
def test_shards_have_one_range(sizes: dict[str, int]) -> None:
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    call = sm.shard_map(widen, mesh, (None, P("data")), P())
    seen = Range.empty(2)
    for rows in (jnp.array([[3.0, 0], [1, 2], [2, 9], [8, -1]]), jnp.full((4, 2), 5.0)):
        seen = jax.block_until_ready(call(seen, rows))
        assert type(seen) is Range
        np.testing.assert_array_equal(seen.value["low"], [1, -1])
        np.testing.assert_array_equal(seen.value["high"], [8, 9])
