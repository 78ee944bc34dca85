"""`value_and_grad` inside and around JAX's transformations and other maps, on every kind of mesh."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.grad.test_grad import WAYS, X, check, checked_or_not, plain, some_ways
from tests.helpers import make_mesh


each_kind = pytest.mark.usefixtures("each_kind")


def make_model() -> dict[str, Any]:
    return {
        "w": sm.ParamState(jnp.array([0.3, -0.6, 0.9])),
        "b": sm.ParamState(0.2),
        "n": sm.State(0),
    }


def loss_fn(model: Any, x: Any) -> Any:
    y = jnp.sin(x @ model["w"].value + model["b"].value)
    return jnp.mean((y - 0.5) ** 2), {**model, "n": model["n"].set(model["n"].value + 1)}


# Programs for the inside of a mapped call, written for any `value_and_grad`.


def step(vag: Any, model: Any, x: Any) -> Any:
    (loss, model), grads = vag(loss_fn, axis_name="x")(model, x)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.3 * g, grads)), loss


def while_loop(vag: Any, model: Any, x: Any) -> Any:
    again = jax.checkpoint(lambda m: step(vag, m, x)[0])
    return jax.lax.while_loop(lambda m: m["n"].value < 3, again, model)


def vmap_of_models(vag: Any, model: Any, x: Any) -> Any:
    models = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), model)
    return jax.vmap(lambda m: step(vag, m, x))(models)


def vmap_of_rows(vag: Any, model: Any, x: Any) -> Any:
    """Each row of a shard by itself, together with the same row of the other shards."""
    # The reference has the unsharded rows in the same groups.
    groups = x.reshape(-1, 2, 3).swapaxes(0, 1)
    return jax.vmap(lambda m, rows: step(vag, m, rows), (None, 0))(model, groups)


def gradient_of(vag: Any, model: Any, x: Any) -> Any:
    """A second derivative in forward mode."""

    def slopes(w: Any) -> Any:
        return vag(loss_fn, axis_name="x")({**model, "w": w}, x)[1]

    return jax.jvp(slopes, (model["w"],), (model["w"],))


PROGRAMS = (while_loop, vmap_of_models, vmap_of_rows, gradient_of)


def all_programs(vag: Any, model: Any, x: Any) -> Any:
    return [program(vag, model, x) for program in PROGRAMS]


@functools.cache
def all_unsharded() -> Any:
    return eqx.filter_jit(functools.partial(all_programs, plain))(make_model(), X)


@some_ways
def test_inside(way: str) -> None:
    inside = functools.partial(all_programs, sm.value_and_grad)
    check(WAYS[way](inside, make_model(), X), all_unsharded())


@functools.cache
def unsharded() -> Any:
    return plain(loss_fn)(make_model(), X)


def hessian(vag: Any, model: Any, x: Any) -> Any:
    def slopes(model: Any) -> Any:
        return vag(loss_fn, axis_name="x")(model, x)[1]["w"].value @ jnp.array([1.0, -2.0, 3.0])

    return jax.grad(slopes, allow_int=True)(model)["w"]


def test_a_second_derivative_in_reverse_inside_where_types_tell() -> None:
    def inside(model: Any, x: Any) -> Any:
        return hessian(sm.value_and_grad, model, x)

    wanted = hessian(plain, make_model(), X)
    check(WAYS["check"](inside, make_model(), X), wanted)
    for way in ("no check", "vmap2", "pmap2"):
        with pytest.raises(NotImplementedError, match="Transpose rule"):
            WAYS[way](inside, make_model(), X)


# Meshes


@each_kind
@pytest.mark.parametrize("check_vma", [True, False])
def test_every_kind_of_mesh(check_vma: bool) -> None:
    step, mesh = sm.value_and_grad(loss_fn, axis_name="x"), make_mesh("4x2")
    call = sm.shard_map(step, mesh, (P(), P("x")), P(), check_vma=check_vma)
    check(call(make_model(), X), unsharded())
    with jax.set_mesh(mesh):
        check(call(make_model(), X), unsharded())
    some = sm.shard_map(step, mesh, (P(), P("x")), P(), check_vma=check_vma, axis_names={"x"})
    check(some(make_model(), X), unsharded())


@pytest.mark.slow
def test_without_jit_and_in_maps_of_jax_alone() -> None:
    mesh, specs = make_mesh("2", AxisType.Explicit), (P(), P("x"))
    step = sm.value_and_grad(loss_fn, axis_name="x")
    call = sm.shard_map(step, mesh, specs, P(), jit=False)
    check(call(make_model(), X), unsharded())
    # Inside a jit there is a program whose dataflow can be followed.
    call = sm.shard_map(step, mesh, specs, P(), jit=False, check_vma=False)
    check(jax.jit(call)(make_model(), X), unsharded())
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
    # JAX takes arrays on Explicit axes only where they lie as the specs say.
    args = sm.place(make_model(), mesh), sm.place(X, mesh, P("x"))
    check(jax.jit(mapped)(*args), unsharded())
    lanes = jax.vmap(step, in_axes=(None, 0), out_axes=None, axis_name="x")
    check(lanes(make_model(), X.reshape(4, 2, 3)), unsharded())


@each_kind
def test_outside_any_mapped_call_on_arrays_laid_out() -> None:
    mesh = make_mesh("4x2")
    model = jax.device_put(make_model(), NamedSharding(mesh, P()))
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    run = sm.value_and_grad(loss_fn, axis_name="x")
    check(run(model, x), unsharded())
    with jax.set_mesh(mesh):
        check(jax.jit(run)(model, x), unsharded())
    # Only the rows are laid out.
    check(run(make_model(), x), unsharded())


# Maps in maps


def lanes(fun: Callable[..., Any], name: str) -> Any:
    return sm.vmap2(fun, in_axes=(None, 0), out_axes=None, axis_name=name)


@checked_or_not
def test_lanes_and_shards_in_one_another(check_vma: bool) -> None:
    both = sm.value_and_grad(loss_fn, axis_name=("lanes", "x"))
    kind = AxisType.Explicit if check_vma else AxisType.Auto
    mesh, specs = make_mesh("4", kind), (P(), P("x"))

    def shard(model: Any, x: Any) -> Any:
        return lanes(both, "lanes")(model, x.reshape(2, 1, 3))

    got = sm.shard_map(shard, mesh, specs, P(), check_vma=check_vma)(make_model(), X)
    check(got, unsharded())
    inner = sm.shard_map(both, mesh, specs, P(), check_vma=check_vma)
    check(lanes(inner, "lanes")(make_model(), X.reshape(2, 4, 3)), unsharded())


def test_lanes_in_lanes() -> None:
    both = sm.value_and_grad(loss_fn, axis_name=("a", "b"))
    mapped = sm.pmap2(lanes(both, "b"), in_axes=(None, 0), out_axes=None, axis_name="a")
    check(mapped(make_model(), X.reshape(4, 2, 1, 3)), unsharded())


def test_shards_in_shards() -> None:
    mesh = make_mesh("4x2", AxisType.Explicit)

    def outer(model: Any, x: Any) -> Any:
        both = sm.value_and_grad(loss_fn, axis_name=("x", "y"))
        return sm.shard_map(both, mesh, (P(), P("y")), P(), axis_names={"y"})(model, x)

    mapped = sm.shard_map(outer, mesh, (P(), P("x")), P(), axis_names={"x"})
    check(mapped(make_model(), X), unsharded())
