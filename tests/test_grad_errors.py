"""Every mistake with gradients that is refused, with its exact text."""

# ruff: noqa: E501

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


# What it is asked for


@mistake(sm.StatemeshError, "value_and_grad: reduce='max' is not known. Use one of 'mean', 'sum'.")
def reduce_that_is_unknown() -> Any:
    # Past the annotations, which the suites check at run time.
    return inspect.unwrap(sm.value_and_grad)(fit, reduce="max")


@mistake(
    TypeError,
    "5 is not a filter. Use a type, a tag (string), `...`, None, a function `(path, state) -> bool`, a list of filters, or a class of statemesh.filters.",
)
def wrt_that_is_no_filter() -> Any:
    return sm.grad(fit, wrt=5)(net(), X)


@mistake(
    sm.StructureError,
    """\
value_and_grad: wrt picks values that hold no floating or complex numbers:
  - net['rng']: RandomState(key<fry>[])
  - net['steps']: State(int32[])
  - net['table']: int32[3]
Let it pick parameters, as `wrt=sm.ParamState` does; sm.filters.All, Any and Not join several filters.""",
)
def wrt_everything() -> Any:
    return sm.grad(fit, wrt=...)(net(), X)


@mistake(
    sm.StructureError,
    """\
value_and_grad: wrt=BatchState picks nothing in the model. It has:
  - net['rng']: RandomState(key<fry>[])
  - net['steps']: State(int32[])
  - net['table']: int32[3]
  - net['w']: ParamState(float32[])""",
)
def wrt_that_picks_nothing() -> Any:
    return sm.grad(fit, wrt=sm.BatchState)(net(), X)


@mistake(
    sm.StructureError,
    """\
value_and_grad: the model has no ParamState of floating or complex numbers, and no such array outside States. It has:
  - net['count']: ParamState(int32[])
  - net['mean']: BatchState(float32[])""",
)
def model_without_parameters() -> Any:
    return sm.grad(fit)({"count": sm.ParamState(1), "mean": sm.BatchState(0.0), "k": 5}, X)


@mistake(
    sm.StructureError,
    "value_and_grad: the model has no ParamState of floating or complex numbers, and no such array outside States. It has no states and no arrays.",
)
def model_without_arrays() -> Any:
    return sm.grad(lambda model, x: (model, x))({"k": 5, "act": jnp.tanh}, X)


# What the function returns


def returning(make: Callable[..., Any], has_aux: bool = False) -> Any:
    def loss_fn(net: Any, x: Any) -> Any:
        return make(fit(net, x)[0], net, x)

    return sm.value_and_grad(loss_fn, has_aux=has_aux)(net(), X)


WHERE = "If it writes no state, return the model as it came in; if it returns more, pass `has_aux=True` and return ((loss, aux), model)."


@mistake(
    sm.StructureError,
    f"value_and_grad: loss_fn must return (loss, model), but returned NoneType. {WHERE}",
)
def nothing_returned() -> Any:
    return returning(lambda loss, net, x: None)


@mistake(
    sm.StructureError,
    f"value_and_grad: loss_fn must return (loss, model), but returned list. {WHERE}",
)
def a_list_returned() -> Any:
    return returning(lambda loss, net, x: [loss, net])


@mistake(
    sm.StructureError,
    f"value_and_grad: loss_fn must return (loss, model), but returned a tuple of float, dict, int. {WHERE}",
)
def three_returned() -> Any:
    return returning(lambda loss, net, x: (1.0, net, 3))


@mistake(
    sm.StructureError,
    f"value_and_grad: loss_fn must return (loss, model), but returned (). {WHERE}",
)
def an_empty_tuple_returned() -> Any:
    return returning(lambda loss, net, x: ())


@mistake(
    sm.StructureError,
    "value_and_grad: loss_fn must return ((loss, aux), model), but returned a tuple of float, dict.",
)
def aux_missing() -> Any:
    return returning(lambda loss, net, x: (1.0, net), has_aux=True)


@mistake(
    sm.StructureError,
    "value_and_grad: the loss that loss_fn returns must be one real floating number, but is float32[8]. Reduce it: `loss.mean()`.",
)
def loss_of_each_row() -> Any:
    return returning(lambda loss, net, x: (x * net["w"].value, net))


@mistake(
    sm.StructureError,
    "value_and_grad: the loss that loss_fn returns must be one real floating number, but is float32[1]. Reduce it: `loss.mean()`.",
)
def loss_with_an_axis_of_one() -> Any:
    return returning(lambda loss, net, x: ((loss[None], x), net), has_aux=True)


@mistake(
    sm.StructureError,
    "value_and_grad: the loss that loss_fn returns must be one real floating number, but is int32[]. Reduce it: `loss.mean()`.",
)
def integer_loss() -> Any:
    return returning(lambda loss, net, x: (net["steps"].value, net))


@mistake(
    sm.StructureError,
    "value_and_grad: the loss that loss_fn returns must be one real floating number, but is complex64[]. Reduce it: `loss.mean()`.",
)
def complex_loss() -> Any:
    return returning(lambda loss, net, x: (loss + 0j, net))


@mistake(
    sm.StructureError,
    "value_and_grad: the loss that loss_fn returns must be one real floating number, but is None. Reduce it: `loss.mean()`.",
)
def no_loss() -> Any:
    return returning(lambda loss, net, x: (None, net))


# Where it stands


@mistake(
    sm.StatemeshError,
    "value_and_grad: no axis is called 'y', 'z' here; the axes mapped over are 'x'.",
)
def axes_that_are_not_bound() -> Any:
    return on_mesh(sm.value_and_grad(fit, axis_name=("x", "y", "z")))


@mistake(
    sm.StatemeshError,
    "value_and_grad: no axis is called 'y' here; the axes mapped over are 'x'.",
)
def axis_that_is_not_bound_in_lanes() -> Any:
    return lanes(sm.pmap2, sm.value_and_grad(fit, axis_name="y"))


@mistake(
    sm.StatemeshError,
    """\
value_and_grad: the loss that fit returns differs over 'x', which axis_name does not name, but all shards there share one copy of:
  - net['w']
JAX would sum their gradients over the shards. Write one of:
  - `axis_name='x'` (and any other axes to reduce over), for the mean of the shards' losses
  - `jax.lax.psum(..., 'x')` in the function, if each shard computes a part of one result""",
)
def axis_forgotten() -> Any:
    return on_mesh(sm.value_and_grad(fit))


@mistake(
    sm.StatemeshError,
    """\
value_and_grad: the loss that fit returns differs over 'x', 'y', which axis_name does not name, but all shards there share one copy of:
  - net['w']
JAX would sum their gradients over the shards. Write one of:
  - `axis_name=('x', 'y')` (and any other axes to reduce over), for the mean of the shards' losses
  - `jax.lax.psum(..., ('x', 'y'))` in the function, if each shard computes a part of one result""",
)
def two_axes_forgotten() -> Any:
    return on_mesh(sm.value_and_grad(fit), "4x2", ("x", "y"))


COUNTED_TWICE = "value_and_grad: reduce='sum' is to sum the loss over 'x', but it is the same there on every shard: the sum would count it once for each shard. If the function has reduced it already, write reduce='mean', which leaves such a loss as it is, or leave the axis out of axis_name."
SUM_OF_AGREED = sm.value_and_grad(agreed, axis_name="x", reduce="sum")


@mistake(sm.StatemeshError, COUNTED_TWICE)
def sum_of_one_loss() -> Any:
    return on_mesh(SUM_OF_AGREED)


@mistake(sm.StatemeshError, COUNTED_TWICE)
def sum_of_one_loss_unchecked() -> Any:
    return on_mesh(SUM_OF_AGREED, check_vma=False)


@mistake(sm.StatemeshError, COUNTED_TWICE)
def sum_of_one_loss_in_vmap2() -> Any:
    return lanes(sm.vmap2, SUM_OF_AGREED)


@mistake(sm.StatemeshError, COUNTED_TWICE)
def sum_of_one_loss_in_pmap2() -> Any:
    return lanes(sm.pmap2, SUM_OF_AGREED)


UNCHECKED = "value_and_grad cannot know over which of 'x' the parameters are split, on which their gradients depend: this map does not check what varies, and is run by JAX itself or with jit=False. Use `statemesh.shard_map` (without jit=False), or leave check_vma at its default."


@mistake(sm.StatemeshError, UNCHECKED)
def unchecked_map_of_jax() -> Any:
    step = sm.value_and_grad(fit, axis_name="x")
    mesh = make_mesh("4")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(), check_vma=False)
    # JAX takes arrays on Explicit axes only where they lie as the specs say.
    return jax.jit(mapped)(sm.place(net(), mesh), sm.place(X, mesh, P("x")))


@mistake(sm.StatemeshError, UNCHECKED)
def pmap_of_jax() -> Any:
    step = sm.value_and_grad(fit, axis_name="x")
    return jax.pmap(step, axis_name="x", in_axes=(None, 0))(net(), X.reshape(4, 2))


@mistake(sm.StatemeshError, UNCHECKED)
def unchecked_without_jit() -> Any:
    return on_mesh(sm.value_and_grad(fit, axis_name="x"), check_vma=False, jit=False)


@mistake(
    sm.StatemeshError,
    "value_and_grad cannot know over which of 'x' the parameters are split, on which their gradients depend: the map over 'y' does not check what varies, and stands inside the map over 'x', which does, or is run by JAX itself. Use `statemesh.shard_map` for both, and leave check_vma at its default.",
)
def unchecked_map_in_a_checked_one() -> Any:
    return nested(outer=True, inner=False)


@mistake(
    sm.StatemeshError,
    "value_and_grad cannot know over which of 'x' the parameters are split, on which their gradients depend: the map over 'y' checks what varies, and stands inside the map over 'x', which does not. Use `statemesh.shard_map` for both, and leave check_vma at its default.",
)
def checked_map_in_an_unchecked_one() -> Any:
    return nested(outer=False, inner=True)


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


@mistake(sm.StatemeshError, EXCHANGED)
def exchanged_in_vmap2() -> Any:
    return sm.vmap2(each_exchanged, axis_name="x")(X)


@mistake(sm.StatemeshError, EXCHANGED)
def exchanged_in_pmap2() -> Any:
    return sm.pmap2(each_exchanged, axis_name="x")(X)


@mistake(sm.StatemeshError, EXCHANGED)
def exchanged_unchecked() -> Any:
    return sm.shard_map(each_exchanged, make_mesh("4"), P("x"), P("x"), check_vma=False)(X)


@mistake(sm.StatemeshError, EXCHANGED.replace("'x'", "'lanes'"))
def exchanged_between_lanes_in_a_checked_shard_map() -> Any:
    # JAX has no collective for it; that of the layers is none in the program.
    def exchanged(w: Any) -> Any:
        return jnp.sum(w) * total(jnp.sum(w), ("lanes",)), w

    lanes = sm.vmap2(lambda w: sm.grad(exchanged)(w)[0], axis_name="lanes")
    return sm.shard_map(lanes, make_mesh("4"), P("x"), P("x"))(X)


@mistake(sm.StatemeshError, EXCHANGED)
def exchanged_and_checked() -> Any:
    return sm.shard_map(each_exchanged, make_mesh("4"), P("x"), P("x"))(X)


@mistake(
    sm.StatemeshError,
    """\
value_and_grad: the loss that gathered returns varies over 'y', which axis_name does not name, and depends on what the shards exchange there. JAX would sum the gradients of all shards' losses. Write one of:
  - `axis_name='y'` (and any other axes to reduce over), for the mean of the shards' losses
  - `jax.lax.psum(..., 'y')` in the function, if each shard computes a part of one result""",
)
def parameters_gathered_over_an_axis_not_named() -> Any:
    return of_gathered("x", True)


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


@mistake(sm.StatemeshError, REDUCED_INSIDE)
def one_loss_in_the_loss_of_each_shard() -> Any:
    return on_mesh(STEEPER)


@mistake(sm.StatemeshError, REDUCED_INSIDE)
def one_loss_in_the_loss_of_each_shard_unchecked() -> Any:
    return on_mesh(STEEPER, check_vma=False)


@mistake(sm.StatemeshError, REDUCED_INSIDE)
def one_loss_in_the_loss_of_each_lane() -> Any:
    return lanes(sm.vmap2, STEEPER)


@mistake(sm.StatemeshError, REDUCED_INSIDE)
def one_loss_in_the_loss_of_each_device() -> Any:
    return lanes(sm.pmap2, STEEPER)


# Sums of gradients that are sums already


@mistake(
    sm.StatemeshError,
    """\
again: gradients that value_and_grad has already reduced over shards are summed over them again, which makes them too large by a factor of the number of shards:
  - the gradient of net['b']: over 'x'
  - the gradient of net['w']: over 'x'
Leave `jax.lax.psum` out; value_and_grad has reduced them once.""",
)
def gradients_summed_again() -> Any:
    def again(net: Any, x: Any) -> Any:
        return jax.lax.psum(sm.grad(fit, axis_name="x")({**net, "b": jnp.ones(2)}, x)[0], "x")

    return on_mesh(again)


@mistake(
    sm.StatemeshError,
    """\
again: gradients that value_and_grad has already reduced over shards are summed over them again, which makes them too large by a factor of the number of shards:
  - the gradient of net['w']: over 'y'
Leave `jax.lax.psum` out; value_and_grad has reduced them once.""",
)
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
