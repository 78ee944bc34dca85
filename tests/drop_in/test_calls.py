"""Features that JAX's own tests cover least: changing meshes, arguments elsewhere, donation."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import legacy
from tests.helpers import counted, make_mesh


X = np.arange(16, dtype=np.float32).reshape(8, 2)


def centered(x: Any) -> Any:
    """The rows without their mean over the mesh axis."""
    return x - lax.pmean(x.mean(0), "x")


def test_without_a_mesh_it_is_that_of_the_context_at_each_call() -> None:
    fun, count = counted(centered)
    mapped = sm.shard_map(fun, in_specs=(P("x"),), out_specs=P("x"))
    meshes = [make_mesh("8"), make_mesh("2"), Mesh(jax.devices()[::-1], ("x",)), make_mesh("8")]
    for mesh in meshes:
        with jax.set_mesh(mesh):
            result = mapped(X)
            under_jit = jax.jit(lambda x: mapped(x))(X)
        assert result.sharding.mesh == mesh
        assert result.sharding.device_set == set(mesh.devices.flat)
        np.testing.assert_array_equal(result, X - X.mean(0))
        np.testing.assert_array_equal(under_jit, X - X.mean(0))
    assert count.times == 7
    with pytest.raises(sm.SpecError, match="no mesh"):
        mapped(X)
    assert count.times == 7


def test_a_mesh_that_is_partly_taken_is_meant_where_its_axes_are_named() -> None:
    mesh = make_mesh("4x2")
    inner = sm.shard_map(
        lambda x: lax.psum(x, "y"), mesh, (P(None, "y"),), P(None, None), axis_names={"y"}
    )
    outer = sm.shard_map(inner, mesh, (P("x"),), P("x"), axis_names={"x"})
    np.testing.assert_array_equal(jax.jit(outer)(X), X.sum(1, keepdims=True))


def test_donation_by_an_outer_jit() -> None:
    mapped = sm.shard_map(centered, make_mesh(), (P("x"),), P("x"))
    placed = mapped.place(X)[0]
    np.testing.assert_array_equal(jax.jit(mapped, donate_argnums=0)(placed), X - X.mean(0))
    assert placed.is_deleted()


def test_the_older_function_takes_states() -> None:
    def fun(count: sm.State, x: jax.Array) -> Any:
        return x * count.value, count.set(count.value + x.sum())

    for check_rep in (True, False):
        f = legacy.shard_map(fun, make_mesh(), (P(), P("x")), (P("x"), P()), check_rep)
        y, count = f(sm.State(1.0, reduce="sum"), X)
        np.testing.assert_array_equal(y, X)
        assert float(count.value) == 1 + X.sum()
