"""`value_and_grad` inside and around JAX's transformations and other maps, on every kind of mesh."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh
from tests.grad.test_grad import WAYS, X, check, plain


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


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


def scan(vag: Any, model: Any, x: Any) -> Any:
    return jax.lax.scan(lambda m, k: step(vag, m, k * x), model, jnp.arange(1.0, 4.0))


def cond(vag: Any, model: Any, x: Any) -> Any:
    return [
        jax.lax.cond(model["b"].value > k, lambda m: step(vag, m, x)[0], lambda m: m, model)
        for k in (0, 1)
    ]


def while_loop(vag: Any, model: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda m: m["n"].value < 3, lambda m: step(vag, m, x)[0], model)


def remat(vag: Any, model: Any, x: Any) -> Any:
    return jax.checkpoint(lambda m: step(vag, m, x))(model)


def jit(vag: Any, model: Any, x: Any) -> Any:
    return jax.jit(lambda m: step(vag, m, x))(model)


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


PROGRAMS = (scan, cond, while_loop, remat, jit, vmap_of_models, vmap_of_rows, gradient_of)


@functools.cache
def all_inside(way: str) -> Any:
    """The results of all programs, in one mapped call."""
    return WAYS[way](
        lambda *args: [program(sm.value_and_grad, *args) for program in PROGRAMS], make_model(), X
    )


@functools.cache
def all_unsharded() -> Any:
    return eqx.filter_jit(lambda *args: [program(plain, *args) for program in PROGRAMS])(
        make_model(), X
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_inside(program: Callable[..., Any], way: str) -> None:
    k = PROGRAMS.index(program)
    check(all_inside(way)[k], all_unsharded()[k])


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


def penalised(vag: Any, model: Any, x: Any) -> Any:
    """A loss that contains the gradient of another loss."""

    def loss(model: Any, x: Any) -> Any:
        (loss, _), grads = vag(loss_fn, axis_name="x")(model, x)
        return loss + jnp.sum(grads["w"].value ** 2), model

    return vag(loss, axis_name="x")(model, x)


def test_one_in_the_loss_of_another_is_refused_over_the_same_axis() -> None:
    with pytest.raises(sm.StatemeshError, match="Leave axis_name out inside") as raised:
        WAYS["check"](lambda *args: penalised(sm.value_and_grad, *args), make_model(), X)
    assert str(raised.value) == (
        "value_and_grad: inside the loss of another value_and_grad over 'x', it cannot reduce over the "
        "same axes: there each shard has its own parameters, which may differ. Leave axis_name out "
        "inside, for the gradient of this shard's own loss."
    )


def test_one_in_the_loss_of_another_is_of_each_shard_alone() -> None:
    def steeper(vag: Any, model: Any, x: Any) -> Any:
        """The loss after one step along this shard's own gradient."""

        def loss(model: Any, x: Any) -> Any:
            (_, _), grads = vag(loss_fn)(model, x)
            stepped = model["w"].value - 0.1 * grads["w"].value
            return loss_fn({**model, "w": model["w"].set(stepped)}, x)[0], model

        return vag(loss, axis_name="x")(model, x)

    got = WAYS["check"](lambda *args: steeper(sm.value_and_grad, *args), make_model(), X)
    parts = [steeper(plain, make_model(), rows) for rows in jnp.split(X, 4)]
    for a, *others in zip(*map(jax.tree.leaves, (got, *parts)), strict=True):
        if jnp.issubdtype(jnp.asarray(a).dtype, jnp.inexact):
            np.testing.assert_allclose(a, np.mean(others, axis=0), rtol=1e-4, atol=1e-6)


def direct(fun: Callable[..., Any], model: Any, x: Any) -> Any:
    return fun(model, x)


def around(w: Any, way: Callable[..., Any], vag: Any) -> Any:
    """A number to which the loss and the gradients contribute."""

    def inside(model: Any, x: Any) -> Any:
        (loss, _), grads = vag(loss_fn, axis_name="x")(model, x)
        return loss, grads["w"].value, grads["b"].value

    loss, slope, other = way(inside, {**make_model(), "w": w}, X)
    return loss + slope @ jnp.array([1.0, -2.0, 3.0]) + other**2


@functools.cache
def derivative_of_unsharded() -> Any:
    return jax.jit(jax.value_and_grad(lambda w: around(w, direct, plain)))(make_model()["w"])


@pytest.mark.parametrize(
    ("way", "jitted"), [*((way, False) for way in WAYS), ("check", True), ("no check", True)]
)
def test_a_derivative_around(way: str, jitted: bool) -> None:
    ours = jax.value_and_grad(lambda w: around(w, WAYS[way], sm.value_and_grad))
    ours = jax.jit(ours) if jitted else ours
    check(ours(make_model()["w"]), derivative_of_unsharded())


@pytest.mark.parametrize("way", WAYS)
def test_scan_around(way: str) -> None:
    def once(model: Any, k: Any) -> Any:
        return WAYS[way](lambda m, x: step(sm.value_and_grad, m, x), model, k * X)

    wanted = all_unsharded()[PROGRAMS.index(scan)]
    check(jax.lax.scan(once, make_model(), jnp.arange(1.0, 4.0)), wanted)


# Meshes


def some_axes(kind: str, check_vma: bool, names: set[str]) -> Any:
    step = sm.value_and_grad(loss_fn, axis_name="x")
    mesh, specs = make_mesh("4x2", KINDS[kind]), (P(), P("x"))
    return sm.shard_map(step, mesh, specs, P(), check_vma=check_vma, axis_names=names)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["free", "set_mesh"])
def test_every_kind_of_mesh(check_vma: bool, kind: str, how: str) -> None:
    call = some_axes(kind, check_vma, {"x", "y"})
    mesh = make_mesh("4x2", KINDS[kind])
    with jax.set_mesh(mesh) if how == "set_mesh" else contextlib.nullcontext():
        check(call(make_model(), X), unsharded())


@pytest.mark.parametrize("check_vma", [True, False])
def test_some_axes_of_a_mesh(check_vma: bool) -> None:
    check(some_axes("explicit", check_vma, {"x"})(make_model(), X), unsharded())


@pytest.mark.usefixtures("each_kind")
def test_without_jit() -> None:
    mesh = make_mesh("4")
    step = sm.value_and_grad(loss_fn, axis_name="x")
    call = sm.shard_map(step, mesh, (P(), P("x")), P(), jit=False)
    check(call(make_model(), X), unsharded())
    # Inside a jit there is a program whose dataflow can be followed.
    call = sm.shard_map(step, mesh, (P(), P("x")), P(), jit=False, check_vma=False)
    check(jax.jit(call)(make_model(), X), unsharded())


@pytest.mark.usefixtures("each_kind")
def test_in_maps_of_jax_alone() -> None:
    step = sm.value_and_grad(loss_fn, axis_name="x")
    wanted = unsharded()
    mesh = make_mesh("4")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    # JAX takes arrays on Explicit axes only where they lie as the specs say.
    args = sm.place(make_model(), mesh), sm.place(X, mesh, P("x"))
    check(jax.jit(mapped)(*args), wanted)
    lanes = jax.vmap(step, in_axes=(None, 0), out_axes=None, axis_name="x")
    check(lanes(make_model(), X.reshape(4, 2, 3)), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["free", "set_mesh"])
@pytest.mark.parametrize("jitted", [False, True])
def test_outside_any_mapped_call_on_arrays_laid_out(kind: str, how: str, jitted: bool) -> None:
    mesh = make_mesh("4x2", KINDS[kind])
    model = jax.device_put(make_model(), NamedSharding(mesh, P()))
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    run = sm.value_and_grad(loss_fn, axis_name="x")
    run = jax.jit(run) if jitted else run
    with jax.set_mesh(mesh) if how == "set_mesh" else contextlib.nullcontext():
        got = run(model, x)
    check(got, unsharded())


def test_outside_any_mapped_call_where_only_the_rows_are_laid_out() -> None:
    x = jax.device_put(X, NamedSharding(make_mesh("4", AxisType.Explicit), P("x")))
    got = sm.value_and_grad(loss_fn)(make_model(), x)
    check(got, unsharded())


# Maps in maps


def lanes(fun: Callable[..., Any], name: str) -> Any:
    return sm.vmap2(fun, in_axes=(None, 0), out_axes=None, axis_name=name)


@pytest.mark.usefixtures("each_kind")
@pytest.mark.parametrize("check_vma", [True, False])
def test_lanes_in_shards(check_vma: bool) -> None:
    def shard(model: Any, x: Any) -> Any:
        both = sm.value_and_grad(loss_fn, axis_name=("lanes", "x"))
        return lanes(both, "lanes")(model, x.reshape(2, 1, 3))

    mesh = make_mesh("4")
    got = sm.shard_map(shard, mesh, (P(), P("x")), P(), check_vma=check_vma)(make_model(), X)
    check(got, unsharded())


@pytest.mark.usefixtures("each_kind")
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_in_lanes(check_vma: bool) -> None:
    both = sm.value_and_grad(loss_fn, axis_name=("lanes", "x"))
    inner = sm.shard_map(both, make_mesh("4"), (P(), P("x")), P(), check_vma=check_vma)
    got = lanes(inner, "lanes")(make_model(), X.reshape(2, 4, 3))
    check(got, unsharded())


@pytest.mark.parametrize("outer", [sm.vmap2, sm.pmap2])
def test_lanes_in_lanes(outer: Any) -> None:
    both = sm.value_and_grad(loss_fn, axis_name=("a", "b"))
    mapped = outer(lanes(both, "b"), in_axes=(None, 0), out_axes=None, axis_name="a")
    got = mapped(make_model(), X.reshape(4, 2, 1, 3))
    check(got, unsharded())


@pytest.mark.usefixtures("each_kind")
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_in_shards(check_vma: bool) -> None:
    mesh = make_mesh("4x2")

    def outer(model: Any, x: Any) -> Any:
        both = sm.value_and_grad(loss_fn, axis_name=("x", "y"))
        inner = sm.shard_map(both, mesh, (P(), P("y")), P(), axis_names={"y"}, check_vma=check_vma)
        return inner(model, x)

    mapped = sm.shard_map(outer, mesh, (P(), P("x")), P(), axis_names={"x"}, check_vma=check_vma)
    check(mapped(make_model(), X), unsharded())
