"""Every mistake with gradients that is refused, with its exact text."""

import inspect

from collections.abc import Callable

from typing import Any

import jax

import jax.numpy as jnp

import numpy as np

import pytest

from jax.sharding import PartitionSpec as P

import statemesh as sm

from statemesh._axes._mesh_and_lanes import total

from tests.helpers import assert_says, make_mesh, mistakes_in

pytestmark = pytest.mark.usefixtures("each_kind")

X = np.arange(8, dtype=np.float32)

CASES: list[Any] = []

mistake = mistakes_in(CASES)


def net() -> dict[str, Any]:
    return {
        "w": sm.ParamState(1.0),
        "steps": sm.State(0),
        "rng": sm.RandomState(jax.random.key(0)),
        "table": jnp.arange(3),
    }


def fit(net: Any, x: Any) -> Any:
    return jnp.mean((x * net["w"].value - 1) ** 2), net


def agreed(net: Any, x: Any) -> Any:
    return jax.lax.pmean(fit(net, x)[0], "x"), net


def on_mesh(fun: Any, name: str = "4", axes: Any = "x", **kwargs: Any) -> Any:
    return sm.shard_map(fun, make_mesh(name), (P(), P(axes)), P(), **kwargs)(net(), X)


def lanes(transform: Any, fun: Any) -> Any:
    mapped = transform(fun, in_axes=(None, 0), out_axes=None, axis_name="x")
    return mapped(net(), X.reshape(4, 2))


def returning(make: Callable[..., Any], has_aux: bool = False) -> Any:
    def loss_fn(net: Any, x: Any) -> Any:
        return make(fit(net, x)[0], net, x)

    return sm.value_and_grad(loss_fn, has_aux=has_aux)(net(), X)


WHERE = "If it writes no state, return the model as it came in; if it returns more, pass `has_aux=True` and return ((loss, aux), model)."

COUNTED_TWICE = "value_and_grad: reduce='sum' is to sum the loss over 'x', but it is the same there on every shard: the sum would count it once for each shard. If the function has reduced it already, write reduce='mean', which leaves such a loss as it is, or leave the axis out of axis_name."

SUM_OF_AGREED = sm.value_and_grad(agreed, axis_name="x", reduce="sum")

UNCHECKED = "value_and_grad cannot know over which of 'x' the parameters are split, on which their gradients depend: this map does not check what varies, and is run by JAX itself or with jit=False. Use `statemesh.shard_map` (without jit=False), or leave check_vma at its default."


def unchecked_map_of_jax() -> Any:
    step = sm.value_and_grad(fit, axis_name="x")
    mesh = make_mesh("4")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(), check_vma=False)
    # JAX takes arrays on Explicit axes only where they lie as the specs say.
    return jax.jit(mapped)(sm.place(net(), mesh), sm.place(X, mesh, P("x")))


def pmap_of_jax() -> Any:
    step = sm.value_and_grad(fit, axis_name="x")
    return jax.pmap(step, axis_name="x", in_axes=(None, 0))(net(), X.reshape(4, 2))


def nested(outer: bool, inner: bool) -> Any:
    def shard(net: Any, x: Any) -> Any:
        step = sm.value_and_grad(fit, axis_name=("x", "y"))
        specs, names = (P(), P("y")), {"y"}
        return sm.shard_map(step, make_mesh("4x2"), specs, P(), axis_names=names, check_vma=inner)(
            net, x
        )

    return on_mesh(shard, "4x2", axis_names={"x"}, check_vma=outer)


EXCHANGED = """\
value_and_grad: the loss that exchanged returns varies over 'x', which axis_name does not name, and depends on what the shards exchange there. JAX would sum the gradients of all shards' losses. Write one of:
  - `axis_name='x'` (and any other axes to reduce over), for the mean of the shards' losses
  - `jax.lax.psum(..., 'x')` in the function, if each shard computes a part of one result"""


def exchanged(w: Any) -> Any:
    """A loss for each shard, of the parameters of all."""
    return jnp.sum(w) * jax.lax.psum(jnp.sum(w), "x"), w


def each_exchanged(w: Any) -> Any:
    return sm.grad(exchanged)(w)[0]


def exchanged_between_lanes_in_a_checked_shard_map() -> Any:
    def exchanged(w: Any) -> Any:
        return jnp.sum(w) * total(jnp.sum(w), ("lanes",)), w

    lanes = sm.vmap2(lambda w: sm.grad(exchanged)(w)[0], axis_name="lanes")
    return sm.shard_map(lanes, make_mesh("4"), P("x"), P("x"))(X)


def gathered(model: Any, x: Any) -> Any:
    return jnp.mean((x * jax.lax.all_gather(model["w"].value, "y", tiled=True)) ** 2), model


def of_gathered(axis_name: Any, check_vma: bool) -> Any:
    """The gradient of a loss of parameters that are all split over "y"."""

    def step(model: Any, x: Any) -> Any:
        return sm.grad(gathered, axis_name=axis_name)(model, x)[0]["w"].value

    mapped = sm.shard_map(step, make_mesh("2x2"), (P(), P("x")), P("y"), check_vma=check_vma)
    return mapped({"w": sm.ParamState(jnp.ones(4), spec=P("y"))}, jnp.ones((4, 4)))


@pytest.mark.parametrize(
    ("axis_name", "check_vma"), [("x", False), (("x", "y"), False), (("x", "y"), True)]
)
def test_parameters_gathered_have_the_gradient_of_one_loss(axis_name: Any, check_vma: bool) -> None:
    # Of the mean of 16 squares, 4 of them of each parameter.
    assert of_gathered(axis_name, check_vma).tolist() == [0.5] * 4


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_that_exchange_nothing_have_losses_of_their_own(check_vma: bool) -> None:
    def own(model: Any, x: Any) -> Any:
        return jnp.sum(x) * jnp.sum(model["w"].value ** 2), model

    def step(model: Any, x: Any) -> Any:
        return sm.grad(own)(model, x)[0]["w"].value

    model = {"w": sm.ParamState(jnp.arange(4.0), spec=P("x"))}
    mapped = sm.shard_map(step, make_mesh("2"), (P(), P()), P("x"), check_vma=check_vma)
    assert mapped(model, jnp.ones(3)).tolist() == [0, 6, 12, 18]


REDUCED_INSIDE = "value_and_grad: inside the loss of another value_and_grad over 'x', the loss that agreed returns depends on what the shards exchange over the same axes. There each shard has its own parameters, which may differ. Return this shard's own loss, without a collective over 'x'."


def steeper(net: Any, x: Any) -> Any:
    grads, _ = sm.grad(agreed)(net, x)
    return fit({**net, "w": net["w"].set(net["w"].value - grads["w"].value)}, x)


STEEPER = sm.value_and_grad(steeper, axis_name="x")


def gradients_summed_again() -> Any:
    def again(net: Any, x: Any) -> Any:
        return jax.lax.psum(sm.grad(fit, axis_name="x")({**net, "b": jnp.ones(2)}, x)[0], "x")

    return on_mesh(again)


def gradient_summed_where_it_is_the_same() -> Any:
    def again(net: Any, x: Any) -> Any:
        return jax.lax.psum(sm.grad(fit, axis_name="x")(net, x)[0]["w"].value, "y")

    return on_mesh(again, "4x2")


@pytest.mark.parametrize(("make", "error", "text"), CASES)
def test_the_text_is_exactly(
    make: Callable[[], Any], error: type[BaseException], text: str
) -> None:
    assert_says(make, error, text, until="\n-----")


def test_an_axis_forgotten_is_found_where_nothing_is_checked() -> None:
    with pytest.raises(sm.StatemeshError, match="differs over 'x'"):
        on_mesh(sm.value_and_grad(fit), check_vma=False)


def test_a_sum_of_one_loss_is_found_where_it_comes_of_parameters_alone() -> None:
    # Not where types are checked: there the parameters are made varying, and the loss is with them.
    step = sm.value_and_grad(lambda net, x: (net["w"].value ** 2, net), axis_name="x", reduce="sum")
    with pytest.raises(sm.StatemeshError, match="the sum would count it once for each"):
        on_mesh(step, check_vma=False)


def test_a_loss_returned_alone_is_called_by_its_type() -> None:
    with pytest.raises(sm.StructureError) as raised:
        returning(lambda loss, net, x: loss)
    assert "Tracer" not in str(raised.value)


MISTAKES: Mistakes = {
    "reduce that is unknown": lambda: inspect.unwrap(sm.value_and_grad)(fit, reduce="max"),
    "wrt that is no filter": lambda: sm.grad(fit, wrt=5)(net(), X),
    "wrt everything": lambda: sm.grad(fit, wrt=...)(net(), X),
    "wrt that picks nothing": lambda: sm.grad(fit, wrt=sm.BatchState)(net(), X),
    "model without parameters": lambda: sm.grad(fit)(
        {"count": sm.ParamState(1), "mean": sm.BatchState(0.0), "k": 5}, X
    ),
    "model without arrays": lambda: sm.grad(lambda model, x: (model, x))(
        {"k": 5, "act": jnp.tanh}, X
    ),
    "nothing returned": lambda: returning(lambda loss, net, x: None),
    "a list returned": lambda: returning(lambda loss, net, x: [loss, net]),
    "three returned": lambda: returning(lambda loss, net, x: (1.0, net, 3)),
    "an empty tuple returned": lambda: returning(lambda loss, net, x: ()),
    "aux missing": lambda: returning(lambda loss, net, x: (1.0, net), has_aux=True),
    "loss of each row": lambda: returning(lambda loss, net, x: (x * net["w"].value, net)),
    "loss with an axis of one": lambda: returning(
        lambda loss, net, x: ((loss[None], x), net), has_aux=True
    ),
    "integer loss": lambda: returning(lambda loss, net, x: (net["steps"].value, net)),
    "complex loss": lambda: returning(lambda loss, net, x: (loss + 0j, net)),
    "no loss": lambda: returning(lambda loss, net, x: (None, net)),
    "axes that are not bound": lambda: on_mesh(sm.value_and_grad(fit, axis_name=("x", "y", "z"))),
    "axis that is not bound in lanes": lambda: lanes(
        sm.pmap2, sm.value_and_grad(fit, axis_name="y")
    ),
    "axis forgotten": lambda: on_mesh(sm.value_and_grad(fit)),
    "two axes forgotten": lambda: on_mesh(sm.value_and_grad(fit), "4x2", ("x", "y")),
    "sum of one loss": lambda: on_mesh(SUM_OF_AGREED),
    "sum of one loss unchecked": lambda: on_mesh(SUM_OF_AGREED, check_vma=False),
    "sum of one loss in vmap2": lambda: lanes(sm.vmap2, SUM_OF_AGREED),
    "sum of one loss in pmap2": lambda: lanes(sm.pmap2, SUM_OF_AGREED),
    "unchecked map of jax": unchecked_map_of_jax,
    "pmap of jax": pmap_of_jax,
    "unchecked without jit": lambda: on_mesh(
        sm.value_and_grad(fit, axis_name="x"), check_vma=False, jit=False
    ),
    "unchecked map in a checked one": lambda: nested(outer=True, inner=False),
    "checked map in an unchecked one": lambda: nested(outer=False, inner=True),
    "exchanged in vmap2": lambda: sm.vmap2(each_exchanged, axis_name="x")(X),
    "exchanged in pmap2": lambda: sm.pmap2(each_exchanged, axis_name="x")(X),
    "exchanged unchecked": lambda: sm.shard_map(
        each_exchanged, make_mesh("4"), P("x"), P("x"), check_vma=False
    )(X),
    "exchanged between lanes in a checked shard map": exchanged_between_lanes_in_a_checked_shard_map,
    "exchanged and checked": lambda: sm.shard_map(each_exchanged, make_mesh("4"), P("x"), P("x"))(
        X
    ),
    "parameters gathered over an axis not named": lambda: of_gathered("x", True),
    "one loss in the loss of each shard": lambda: on_mesh(STEEPER),
    "one loss in the loss of each shard unchecked": lambda: on_mesh(STEEPER, check_vma=False),
    "one loss in the loss of each lane": lambda: lanes(sm.vmap2, STEEPER),
    "one loss in the loss of each device": lambda: lanes(sm.pmap2, STEEPER),
    "gradients summed again": gradients_summed_again,
    "gradient summed where it is the same": gradient_summed_where_it_is_the_same,
}
