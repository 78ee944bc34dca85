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


def data(place: str, mesh: Any) -> Any:
    if place == "host":
        return DATA
    if place == "elsewhere":
        return jax.device_put(DATA, jax.devices()[5])
    return jax.device_put(DATA, NamedSharding(mesh, P("x")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_set", [True, False])
def test_pmap2_runs_on_its_own_mesh(is_set: bool, kind: str) -> None:
    mesh = make_mesh("4", KINDS[kind])
    body, count = counted(step)
    call, total = mapped(sm.pmap2, body), sm.State(1.0, reduce="sum")
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        for number, place in enumerate(("host", "placed", "host", "elsewhere", "placed"), 1):
            out, total = call(total, data(place, mesh))
            np.testing.assert_array_equal(out, np.arange(4) * DATA)
            assert float(total.value) == 1 + number * DATA.sum()
            assert out.sharding.mesh.axis_names == ("i",)
    # Arrays of NumPy and of JAX are two signatures, wherever they lie.
    assert count.times == 2


@pytest.mark.parametrize("is_set", [True, False])
def test_pmap2_is_traced_among_auto_axes(is_set: bool) -> None:
    mesh = make_mesh("4", AxisType.Auto)
    call = mapped(sm.pmap2)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        x = jnp.asarray(data("placed", mesh))
        out, total = jax.jit(call)(sm.State(1.0, reduce="sum"), x)
        np.testing.assert_array_equal(out, np.arange(4) * DATA)
        assert float(total.value) == 1 + DATA.sum()
        grad = jax.grad(lambda x: loss(call, x))
        np.testing.assert_allclose(grad(x), jax.jit(grad)(x))
        np.testing.assert_allclose(grad(x), 2 * np.arange(4) ** 2 * DATA + 1)


TEXT = (
    "step: pmap2 runs on a mesh of its own, and JAX cannot mix its results with arrays on Explicit mesh "
    "axes during a trace. Call it outside the trace; or call it outside `jax.set_mesh` and on arrays that "
    "do not lie on such a mesh; or use shard_map, which runs on the mesh that is set."
)


@pytest.mark.parametrize("transformed", [jax.jit, lambda f: jax.grad(lambda s, x: loss(f, x), 1)])
@pytest.mark.parametrize(("is_set", "place"), [(True, "host"), (False, "placed")])
def test_pmap2_is_not_traced_among_explicit_axes(
    is_set: bool, place: str, transformed: Any
) -> None:
    mesh = make_mesh("4", AxisType.Explicit)
    call, x = mapped(sm.pmap2), jnp.asarray(data(place, mesh))
    around = jax.set_mesh(mesh) if is_set else contextlib.nullcontext()
    with around, pytest.raises(sm.BatchAxisError) as raised:
        transformed(call)(sm.State(1.0, reduce="sum"), x)
    assert str(raised.value) == TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_vmap2_runs_where_its_arguments_lie(kind: str) -> None:
    mesh = make_mesh("4", KINDS[kind])
    call, x = mapped(sm.vmap2), data("placed", mesh)
    with jax.set_mesh(mesh):
        out, total = call(sm.State(1.0, reduce="sum"), x)
    np.testing.assert_array_equal(out, np.arange(4) * DATA)
    assert float(total.value) == 1 + DATA.sum()
