"""Transformations around a map and inside it, and JAX's settings."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..helpers import make_mesh
from ._case import Map, case, double, jnp, numbers, plus_one_on_the_host, scan_and_cond


@case
def a_vmap_around(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x, y: x + lax.psum(y, "x"),
        mesh=make_mesh("2x2"),
        in_specs=(P("x"), P("x")),
        out_specs=P("x"),
    )
    return jax.vmap(mapped, in_axes=(0, None))(numbers(3, 4), numbers(4))


@case
def a_vmap_spread_over_a_mesh_axis(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x: x + lax.psum(x, "x"), mesh=make_mesh("2x2"), in_specs=(P("x"),), out_specs=P("x")
    )
    return jax.jit(jax.vmap(mapped, spmd_axis_name="y"))(numbers(4, 4))


@case
def a_vmap_over_an_explicit_axis(shard_map: Map) -> Any:
    mesh = make_mesh("2x2", AxisType.Explicit)
    x = jax.device_put(numbers(4, 4), NamedSharding(mesh, P("x", "y")))
    mapped = shard_map(lambda x: 2 * x, mesh=mesh, in_specs=(P("y"),), out_specs=P("y"))
    return jax.jit(jax.vmap(mapped))(x), jax.vmap(mapped)(x)


@case
def a_derivative_in_a_vmap_over_an_explicit_axis(shard_map: Map) -> Any:
    mesh = make_mesh("2x2", AxisType.Explicit)
    x = jax.device_put(numbers(4, 4), NamedSharding(mesh, P(None, "y")))
    mapped = shard_map(lambda x: x * x, mesh=mesh, in_specs=(P("y"),), out_specs=P("y"))
    return jax.vmap(lambda x: jax.vjp(mapped, x)[1](x))(x)


@case
def a_closed_over_tracer(shard_map: Map) -> Any:
    def loss(w: Any, x: Any) -> Any:
        mapped = shard_map(lambda x: x * w, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
        return mapped(x).sum()

    return jax.jit(jax.value_and_grad(loss))(numbers(3), numbers(8, 3))


@case
def a_gradient_outside(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda w, x: jnp.sin(x * w), mesh=make_mesh(), in_specs=(P(), P("x")), out_specs=P("x")
    )
    return jax.grad(lambda w, x: mapped(w, x).sum(), (0, 1))(numbers(3), numbers(8, 3))


@case
def a_gradient_inside(shard_map: Map) -> Any:
    def fun(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: lax.psum((x * w).sum(), "x"))(w)

    return shard_map(fun, mesh=make_mesh(), in_specs=(P(), P("x")), out_specs=P())(
        numbers(3), numbers(8, 3)
    )


@case
def forward_and_backward(shard_map: Map) -> Any:
    mapped = shard_map(jnp.cos, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    x = numbers(8)
    return jax.jvp(mapped, (x,), (x,)), jax.jit(jax.hessian(lambda x: mapped(x).sum()))(x)


@case
def integers_have_no_gradient(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda n, x: x * n, mesh=make_mesh(), in_specs=(P("x"), P("x")), out_specs=P("x")
    )
    n = jnp.arange(8)
    made = jax.grad(lambda n, x: mapped(n, x).sum(), (0, 1), allow_int=True)(n, numbers(8))
    assert made[0].dtype == jax.dtypes.float0 and made[0].shape == (8,)
    return made[1]


@case
def a_custom_jvp(shard_map: Map) -> Any:
    @jax.custom_jvp
    def cube(x: Any) -> Any:
        return x**3

    cube.defjvps(lambda t, _, x: 100 * t * x)
    mapped = shard_map(cube, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    return jax.grad(lambda x: mapped(x).sum())(numbers(8))


@case
def a_custom_vjp(shard_map: Map) -> Any:
    mapped = shard_map(double, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    return jax.grad(lambda x: mapped(x).sum())(numbers(8))


@case
def remat_outside(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x: jnp.sin(jnp.sin(x)), mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x")
    )
    return jax.grad(lambda x: jax.checkpoint(mapped)(x).sum())(numbers(8))


@case
def remat_inside(shard_map: Map) -> Any:
    inner = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    mapped = shard_map(inner, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    return jax.grad(lambda x: mapped(x).sum())(numbers(8))


@case
def a_callback(shard_map: Map) -> Any:
    return jax.jit(
        shard_map(plus_one_on_the_host, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    )(numbers(8))


@case
def an_effect(shard_map: Map) -> Any:
    seen: list[float] = []

    def fun(x: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x[0])), x)
        return x

    result = jax.jit(shard_map(fun, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x")))(
        numbers(8)
    )
    jax.effects_barrier()
    return result, np.sort(np.array(seen))


@case
def a_scan_and_a_cond(shard_map: Map) -> Any:
    fun = functools.partial(scan_and_cond, "x")
    return shard_map(fun, mesh=make_mesh("4"), in_specs=(P("x"),), out_specs=P("x"))(numbers(8, 2))


@case
def around_it_a_scan(shard_map: Map) -> Any:
    mapped = shard_map(lambda x: 2 * x, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
    return lax.scan(lambda c, _: (mapped(c), c.sum()), numbers(8), length=3)


@case
def shapes_only(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x: x.astype(int), mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x")
    )
    made = jax.eval_shape(mapped, jax.ShapeDtypeStruct((8, 2), np.float32))
    return np.zeros(made.shape, made.dtype)


@case
def exported(shard_map: Map) -> Any:
    mapped = shard_map(
        lambda x: lax.psum(x, "x"), mesh=make_mesh(), in_specs=(P("x"),), out_specs=P()
    )
    x = jax.device_put(numbers(8), NamedSharding(make_mesh(), P("x")))
    return jax.jit(export.export(jax.jit(mapped))(x).call)(x)


@case
def in_double_precision(shard_map: Map) -> Any:
    with jax.enable_x64(True):
        mapped = shard_map(lambda x: x / 3, mesh=make_mesh(), in_specs=(P("x"),), out_specs=P("x"))
        result = mapped(np.arange(8.0))
        assert result.dtype == np.float64
        return np.asarray(result)


@case
def without_jit(shard_map: Map) -> Any:
    with jax.disable_jit():
        mapped = shard_map(
            lambda x: x + 1, mesh=make_mesh("2"), in_specs=(P("x"),), out_specs=P("x")
        )
        return mapped(numbers(4))


@case
def nans_are_found(shard_map: Map) -> Any:
    mapped = shard_map(jnp.log, mesh=make_mesh("2"), in_specs=(P("x"),), out_specs=P("x"))
    with jax.debug_nans(True):
        fine = mapped(numbers(4) + 1)
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(mapped(-numbers(4)))
    return fine
