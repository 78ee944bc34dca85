"""Features that JAX's own tests cover least: changing meshes, arguments elsewhere, donation."""

import functools
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted, elsewhere, make_mesh


jnp: Any = jax.numpy
X = np.arange(16, dtype=np.float32).reshape(8, 2)


def centered(x: Any) -> Any:
    """The rows without their mean over the mesh axis."""
    return x - lax.pmean(x.mean(0), "x")


def by_rows(fun: Any, **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh(), (P("x"),), P("x"), **options)


# Meshes


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


def test_a_mesh_of_no_devices_is_refused_at_the_call_only() -> None:
    mapped = sm.shard_map(centered, Mesh(np.empty((), object), ()), (P("x"),), P("x"))
    with pytest.raises(sm.SpecError, match="non-empty mesh"):
        mapped(X)


def test_a_mesh_that_is_partly_taken_is_meant_where_its_axes_are_named() -> None:
    mesh = make_mesh("4x2")
    inner = sm.shard_map(
        lambda x: lax.psum(x, "y"), mesh, (P(None, "y"),), P(None, None), axis_names={"y"}
    )
    outer = sm.shard_map(inner, mesh, (P("x"),), P("x"), axis_names={"x"})
    np.testing.assert_array_equal(jax.jit(outer)(X), X.sum(1, keepdims=True))


# Arguments


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("place", elsewhere(X))
def test_arguments_are_taken_from_wherever_they_lie(place: str, kind: Any) -> None:
    mesh, x = make_mesh("8", kind), elsewhere(X)[place]
    mapped = sm.shard_map(centered, mesh, (P("x"),), P("x"))
    for context in (nullcontext, functools.partial(jax.set_mesh, mesh)):
        with context():
            result = mapped(x)
        np.testing.assert_array_equal(result, X - X.mean(0))
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
        np.testing.assert_array_equal(x, X)  # The original is still there, where it was.


def test_a_donated_argument_that_had_to_move_is_spared() -> None:
    mapped = by_rows(centered, donate="all")
    for place, x in elsewhere(X).items():
        np.testing.assert_array_equal(mapped(x), X - X.mean(0))
        if isinstance(x, jax.Array):
            assert x.is_deleted() == (x.sharding == NamedSharding(make_mesh(), P("x"))), place
    placed = mapped.place(X)[0]
    np.testing.assert_array_equal(mapped(placed), X - X.mean(0))
    assert placed.is_deleted()
    with pytest.raises(sm.StatemeshError, match=r"given up .*\n  - x"):
        mapped(placed)


def test_donation_by_an_outer_jit() -> None:
    mapped = by_rows(centered)
    placed = mapped.place(X)[0]
    np.testing.assert_array_equal(jax.jit(mapped, donate_argnums=0)(placed), X - X.mean(0))
    assert placed.is_deleted()


# What an eager transformation keeps


def test_a_backward_pass_that_is_recorded_has_no_layer_of_ours() -> None:
    mapped = by_rows(centered)
    _, pull = jax.vjp(mapped, X)
    names = [e.primitive.name for e in jax.make_jaxpr(pull)(X).eqns]
    assert names == ["shard_map" if hasattr(jax, "Inline") else "jit"]


def test_an_eager_backward_pass_is_compiled_once() -> None:
    fun, count = counted(centered)
    mapped = by_rows(fun)
    for times in range(3):
        out, pull = jax.vjp(mapped, times * X)
        np.testing.assert_allclose(pull(jnp.ones_like(out))[0], np.zeros_like(X), atol=1e-6)
    assert count.times == 1
