"""`pmap2` and `vmap2` if another mesh is set, or if arrays are placed elsewhere."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted, make_mesh


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
DATA = np.arange(4, dtype=np.float32)


def step(total: sm.State, x: jax.Array) -> Any:
    return x * jax.lax.axis_index("i"), total.set(total.value + x)


def mapped(transform: Any, fun: Any = step) -> Any:
    return transform(fun, axis_name="i", in_axes=(None, 0))


def loss(call: Any, x: Any) -> Any:
    out, total = call(sm.State(1.0, reduce="sum"), x)
    return (out**2).sum() + total.value


def gradient(x: Any) -> Any:
    return 2 * np.arange(4) ** 2 * x + 1


def where(home: str, mesh: Any) -> Any:
    """The data in every place where a caller may hold it."""
    if home == "host":
        return DATA
    if home == "elsewhere":
        return jax.device_put(DATA, jax.devices()[5])
    return jax.device_put(DATA, NamedSharding(mesh, P("x")))


@pytest.mark.parametrize("home", ["host", "placed", "elsewhere"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_set", [True, False])
def test_pmap2_runs_on_its_own_mesh(is_set: bool, kind: str, home: str) -> None:
    mesh = make_mesh("4", KINDS[kind])
    call, x = mapped(sm.pmap2), where(home, mesh)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        out, total = call(sm.State(1.0, reduce="sum"), x)
        again, total = call(total, x)
    np.testing.assert_array_equal(out, np.arange(4) * DATA)
    np.testing.assert_array_equal(again, out)
    assert float(total.value) == 1 + 2 * DATA.sum()
    assert out.sharding.mesh.axis_names == ("i",)


@pytest.mark.parametrize("is_set", [True, False])
def test_pmap2_is_traced_among_auto_axes(is_set: bool) -> None:
    mesh = make_mesh("4", AxisType.Auto)
    call = mapped(sm.pmap2)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        for x in (DATA, where("placed", mesh)):
            out, total = jax.jit(call)(sm.State(1.0, reduce="sum"), x)
            np.testing.assert_array_equal(out, np.arange(4) * DATA)
            assert float(total.value) == 1 + DATA.sum()
            grad = jax.grad(lambda x: loss(call, x))
            np.testing.assert_allclose(grad(jnp.asarray(x)), gradient(DATA))
            np.testing.assert_allclose(jax.jit(grad)(jnp.asarray(x)), gradient(DATA))


def test_a_trace_is_kept_where_a_mesh_is_set() -> None:
    fun, count = counted(step)
    call = mapped(sm.pmap2, fun)
    total = sm.State(1.0, reduce="sum")
    with jax.set_mesh(make_mesh("4", AxisType.Auto)):
        for _ in range(3):
            _, total = call(total, DATA)
    assert count.times == 1


TEXT = (
    "step: pmap2 runs on a mesh of its own, and JAX cannot mix its results with arrays on Explicit mesh "
    "axes during a trace. Call it outside the trace; or call it outside `jax.set_mesh` and on arrays that "
    "do not lie on such a mesh; or use shard_map, which runs on the mesh that is set."
)


@pytest.mark.parametrize("transformed", [jax.jit, lambda f: jax.grad(lambda s, x: loss(f, x), 1)])
@pytest.mark.parametrize(("is_set", "home"), [(True, "host"), (True, "placed"), (False, "placed")])
def test_pmap2_is_not_traced_among_explicit_axes(is_set: bool, home: str, transformed: Any) -> None:
    mesh = make_mesh("4", AxisType.Explicit)
    call, x = mapped(sm.pmap2), jnp.asarray(where(home, mesh))
    around = jax.set_mesh(mesh) if is_set else contextlib.nullcontext()
    with around, pytest.raises(sm.BatchAxisError) as raised:
        transformed(call)(sm.State(1.0, reduce="sum"), x)
    assert str(raised.value) == TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_vmap2_runs_where_its_arguments_lie(kind: str) -> None:
    mesh = make_mesh("4", KINDS[kind])
    call, x = mapped(sm.vmap2), where("placed", mesh)
    with jax.set_mesh(mesh):
        out, total = call(sm.State(1.0, reduce="sum"), x)
    np.testing.assert_array_equal(out, np.arange(4) * DATA)
    assert float(total.value) == 1 + DATA.sum()
