"""`Quantize` gives the same on every mesh, and rounds as it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from quantmesh import Quantize

import statemesh as sm
from statemesh.testing import arrays, assert_budget, assert_equivalent, given_meshes


ROWS = jnp.linspace(-2, 3, 48).reshape(16, 3)


def layer(bits: int = 4) -> Quantize:
    return Quantize(3, jax.random.key(0), bits=bits, axis_name="data")


def call(layer: Quantize, x: jax.Array) -> tuple[jax.Array, Quantize]:
    return layer(x)


@settings(max_examples=3)
@given_meshes(axis_names=["data"], max_devices=4, x=arrays(shape=(16, 3)))
def test_it_is_the_same_on_every_mesh(mesh: Mesh, x: np.ndarray) -> None:
    # What one call has seen, so that the first call that is compared rounds.
    _, ready = layer()(ROWS)
    assert_equivalent(
        call,
        (ready, x),
        meshes=[mesh],
        in_specs=(None, P("data")),
        out_specs=(P("data"), P()),
    )


def test_it_exchanges_the_range_and_nothing_else() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    mapped = sm.shard_map(call, mesh, (None, P("data")), (P("data"), P()))
    assert_budget(mapped, layer(), ROWS, collectives={"your code": 2}, bytes=42)


def test_it_rounds_to_levels_and_keeps_means() -> None:
    x = jnp.tile(jnp.array([[0.3, -1.7, 2.2]]), (4000, 1))
    _, ready = layer(bits=2)(ROWS)
    y, _ = ready(x)
    low, high = ROWS.min(0), ROWS.max(0)
    at = (y - low) / (high - low) * 3
    np.testing.assert_allclose(at, jnp.round(at), atol=1e-5)
    np.testing.assert_allclose(y.mean(0), x[0], atol=0.05)


def test_gradients_pass() -> None:
    _, ready = layer()(ROWS)
    slope = jax.grad(lambda x: (2 * ready(x)[0]).sum())(ROWS)
    np.testing.assert_array_equal(slope, 2)


def test_a_mistaken_axis_is_named() -> None:
    wrong = Quantize(3, jax.random.key(0), axis_name="date")
    mapped = sm.shard_map(call, jax.make_mesh((8,), ("data",)), (None, P("data")), P("data"))
    with pytest.raises(sm.StatemeshError, match="no axis is called 'date' here"):
        mapped(wrong, ROWS)
