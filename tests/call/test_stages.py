"""`lower` and its results: the call by its own arguments and result, before it runs."""

import contextlib
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_same, assert_says, make_mesh


jnp: Any = jax.numpy
structure: Any = jax.tree.structure
X = np.arange(16, dtype=np.float32)


class Net(sm.Module):
    w: sm.ParamState
    count: sm.State
    activation: Callable[[Any], Any]


def net() -> Net:
    return Net(sm.ParamState(jnp.float32(2)), sm.State(0), jnp.tanh)


def step(net: Net, x: jax.Array, *, by: Any = 1) -> Any:
    return net.activation(x * net.w.value * by), net.replace(count=net.count.value + 1)


def mapped(**options: Any) -> Any:
    return sm.shard_map(step, make_mesh(), (None, P("x")), (P("x"), P()), **options)


@pytest.mark.parametrize("donate", ["none", "states"])
def test_what_is_compiled_is_called_as_the_function_is(donate: Any) -> None:
    call = mapped(donate=donate)
    compiled = call.lower(net(), X).compile()
    y, after = compiled(net(), X)
    assert_same((y, after), call(net(), X))
    # The results go in again.
    _, again = compiled(after, y)
    assert int(again.count.value) == 2
    # Keyword arguments may come from the host.
    compiled = call.lower(net(), X, by=np.float32(2)).compile()
    np.testing.assert_allclose(compiled(net(), X, by=np.float32(3))[0], np.tanh(6 * X), rtol=1e-6)


def test_what_goes_in_and_what_comes_out() -> None:
    lowered = mapped(donate="states").lower(net(), X)
    ((model, x), kwargs) = lowered.args_info
    assert kwargs == {} and x.shape == (16,) and not x.donated
    assert model.activation is jnp.tanh and model.count.value.donated and not model.w.value.donated
    y, after = lowered.out_info
    assert (y.shape, y.dtype, after.w.value.shape) == ((16,), np.float32, ())
    assert structure((y, after)) == lowered.out_tree == structure((X, net()))
    assert structure(((net(), X), {})) == lowered.in_tree == lowered.compile().in_tree
    compiled = copy.copy(lowered).compile()
    assert "stablehlo" in lowered.as_text() and "HloModule" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert repr(lowered) == "<Lowered step>" and repr(compiled) == "<Compiled step>"
    # The parameter comes back as it went in.
    assert len(jax.tree.leaves(lowered.program.out_info)) == 2


def test_from_anything_with_a_shape_and_a_dtype() -> None:
    other = SimpleNamespace(shape=(16,), dtype=np.dtype(np.float32))
    for shape in (other, jax.ShapeDtypeStruct((16,), np.float32)):
        lowered = mapped().lower(net(), shape)
        assert lowered.out_info[0].shape == (16,)
        assert_same(lowered.compile()(net(), X), mapped()(net(), X))


def test_of_other_maps() -> None:
    call = sm.vmap2(step, in_axes=(None, 0), out_axes=(0, None))
    assert_same(call.lower(net(), X).compile()(net(), X), call(net(), X))
    static = sm.pmap2(lambda x, n: x * n, static_broadcasted_argnums=1)
    assert_same(static.lower(X[:8], 3).compile()(X[:8], 3), static(X[:8], 3))


def test_arguments_of_other_shapes_are_refused() -> None:
    compiled = sm.shard_map(lambda x: x, make_mesh(), P("x"), P("x")).lower(X).compile()
    with pytest.raises(TypeError, match="Argument types differ"):
        compiled(X[:8])


@pytest.mark.parametrize("given", [True, False])
def test_unsharded_where_a_mesh_is_set(given: bool) -> None:
    kind = AxisType.Explicit
    mapped = sm.shard_map(
        lambda s, x: (jax.lax.psum(x * s.value, "x"), s.set(s.value + jax.lax.axis_size("x"))),
        make_mesh("8", kind) if given else None,
        (P(), P("x")),
        (P(), P()),
    )
    x = np.arange(8, dtype=np.float32)
    grad = jax.grad(lambda x: mapped.unsharded(sm.State(2.0), x)[0].sum())
    for name, shown in (("8", "x=8"), ("4x2", "x=4, y=2"), ("8", "x=8")):
        with jax.set_mesh(make_mesh(name, kind)):
            for _ in range(2):
                y, s = mapped.unsharded(sm.State(2.0), x)
            np.testing.assert_array_equal(y, 2 * x)
            assert (float(s.value), len(y.sharding.device_set)) == (3, 1)
            for traced in (grad, jax.jit(grad)):
                with pytest.raises(sm.SpecError) as caught:
                    traced(x)
                assert str(caught.value) == (
                    f"`unsharded` runs on a mesh of one device, but Mesh({shown}) is set, "
                    "and JAX allows no other mesh during a trace. If shard_map was given a mesh, call "
                    "`unsharded` outside `jax.set_mesh`; if it was given none, call it inside `with "
                    "jax.set_mesh(mesh):` with a mesh of one device."
                )
    with contextlib.nullcontext() if given else jax.set_mesh(make_mesh("1", kind)):
        np.testing.assert_array_equal(grad(x), np.full(8, 2.0))
        np.testing.assert_array_equal(jax.jit(grad)(x), np.full(8, 2.0))


def test_unsharded_of_a_mesh_without_devices() -> None:
    mesh = make_mesh()
    mapped = sm.shard_map(lambda x: x + 1, mesh.abstract_mesh, P("x"), P("x"))
    np.testing.assert_array_equal(mapped.unsharded(np.zeros(8)), np.ones(8))
    outer = sm.shard_map(mapped.unsharded, mesh, P("x"), P("x"))
    assert_says(
        lambda: outer(np.zeros(8)),
        sm.SpecError,
        "`unsharded` runs on a mesh of one device, so it cannot be called inside another mapped call, "
        "which maps over 'x' already. Call it outside that call.",
    )
