"""Mistakes with `value_and_grad` and `grad`, and with microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import jnp, make_mesh

from .states import KEY
from .table import Mistake, Mistakes, each


X = np.arange(8, dtype=np.float32)
ROWS = jnp.arange(12.0).reshape(6, 2)


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


def on_mesh(fun: Any, name: str = "4", axes: Any = "x", **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh(name), (P(), P(axes)), P(), **options)(net(), X)


def in_lanes(transform: Any, fun: Any) -> Any:
    mapped = transform(fun, in_axes=(None, 0), out_axes=None, axis_name="x")
    return mapped(net(), X.reshape(4, 2))


def everywhere(fun: Any) -> list[Mistake]:
    """A mistake on a mesh, checked and unchecked, and over both kinds of lanes."""
    return [
        lambda: on_mesh(fun),
        lambda: on_mesh(fun, check_vma=False),
        lambda: in_lanes(sm.vmap2, fun),
        lambda: in_lanes(sm.pmap2, fun),
    ]


# What the function returns


def returning(make: Callable[..., Any], has_aux: bool = False) -> Mistake:
    def loss_fn(net: Any, x: Any) -> Any:
        return make(fit(net, x)[0], net, x)

    return lambda: sm.value_and_grad(loss_fn, has_aux=has_aux)(net(), X)


def beside(model: Any, has_aux: bool = False) -> Mistake:
    """A loss with something else in the place of the model."""

    def loss_fn(m: Any) -> Any:
        loss = m["w"].sum()
        return ((loss, 0) if has_aux else loss), model

    return lambda: sm.value_and_grad(loss_fn, has_aux=has_aux)({"w": X})


# Parameters that are to be split as another model


W = {"w": sm.ParamState(jnp.ones((8, 4))), "b": jnp.ones(4)}


def as_parts(split: Any, model: Any = W, mesh: str = "4", axis_name: Any = "x") -> Any:
    def gradient(model: Any, x: Any) -> Any:
        def loss_fn(model: Any, x: Any) -> Any:
            return (x.sum() * model["w"].value).sum(), model

        return sm.grad(loss_fn, axis_name=axis_name, split_as=split)(model, x)[0]

    return sm.shard_map(gradient, make_mesh(mesh), (None, P("x")), P())(model, X)


def parts(spec: Any, *shape: int) -> Any:
    """A model of which one parameter is split."""
    return {"w": sm.ParamState(jnp.ones(shape or (8, 4)), spec=spec), "b": jnp.ones(4)}


def split_over_lanes(lanes: Any) -> Any:
    split = sm.fsdp(W, make_mesh("4"), "x", min_size=4)
    step = sm.grad(lambda model, x: (x * model["w"].value.sum(), model), split_as=split)
    return lanes(step, axis_name="x", in_axes=(None, 0), out_axes=None)(W, X)


# Maps that do not check what varies


def unchecked_map_of_jax() -> Any:
    step, mesh = sm.value_and_grad(fit, axis_name="x"), make_mesh("4")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(), check_vma=False)
    # JAX takes arrays on Explicit axes only where they lie as the specs say.
    return jax.jit(mapped)(sm.place(net(), mesh), sm.place(X, mesh, P("x")))


def nested(outer: bool, inner: bool) -> Any:
    def shard(net: Any, x: Any) -> Any:
        step = sm.value_and_grad(fit, axis_name=("x", "y"))
        options: Any = {"axis_names": {"y"}, "check_vma": inner}
        return sm.shard_map(step, make_mesh("4x2"), (P(), P("y")), P(), **options)(net, x)

    return on_mesh(shard, "4x2", axis_names={"x"}, check_vma=outer)


# Losses of parameters that are not the shard's own


def each_exchanged(w: Any) -> Any:
    def exchanged(w: Any) -> Any:
        return jnp.sum(w) * jax.lax.psum(jnp.sum(w), "x"), w

    return sm.grad(exchanged)(w)[0]


def exchanged_between_lanes_in_a_checked_shard_map() -> Any:
    def exchanged(w: Any) -> Any:
        return jnp.sum(w) * sm.psum(jnp.sum(w), "lanes"), w

    lanes = sm.vmap2(lambda w: sm.grad(exchanged)(w)[0], axis_name="lanes")
    return sm.shard_map(lanes, make_mesh("4"), P("x"), P("x"))(X)


def of_gathered(axis_name: Any, check_vma: bool) -> Any:
    """The gradient of a loss of parameters that are all split over "y"."""

    def gathered(model: Any, x: Any) -> Any:
        return jnp.mean((x * jax.lax.all_gather(model["w"].value, "y", tiled=True)) ** 2), model

    def step(model: Any, x: Any) -> Any:
        return sm.grad(gathered, axis_name=axis_name)(model, x)[0]["w"].value

    mapped = sm.shard_map(step, make_mesh("2x2"), (P(), P("x")), P("y"), check_vma=check_vma)
    return mapped({"w": sm.ParamState(jnp.ones(4), spec=P("y"))}, jnp.ones((4, 4)))


def steeper(net: Any, x: Any) -> Any:
    grads, _ = sm.grad(agreed)(net, x)
    return fit({**net, "w": net["w"].set(net["w"].value - grads["w"].value)}, x)


def summed_again(net: Any, x: Any) -> Any:
    return jax.lax.psum(sm.grad(fit, axis_name="x")({**net, "b": jnp.ones(2)}, x)[0], "x")


def summed_where_it_is_the_same(net: Any, x: Any) -> Any:
    return jax.lax.psum(sm.grad(fit, axis_name="x")(net, x)[0]["w"].value, "y")


def gathered_before(net: Any, x: Any) -> Any:
    whole = {**net, "w": sm.ParamState(sm.all_gather(x, "x", tiled=True))}
    grads, _ = jax.jit(sm.grad(fit, axis_name="x"))(whole, x[0])
    return jax.lax.pmean(grads["w"].value, "x")


# Microbatches


def model() -> dict[str, Any]:
    return {"w": sm.ParamState(1.0), "seen": sm.State(0.0), "table": jnp.zeros(2)}


def rated(net: Any, x: Any, rate: Any = None, *, key: Any = None) -> Any:
    return jnp.mean((x * net["w"].value - 1) ** 2), net


def split(fun: Any, *args: Any, **options: Any) -> Any:
    return sm.value_and_grad(fun, microbatches=2, **options)(model(), *args)


def write_seen(net: Any, x: Any) -> Any:
    return fit(net, x)[0], {**net, "seen": net["seen"].set(x.sum())}


def write_both(net: Any, x: Any) -> Any:
    return fit(net, x)[0], {**net, "seen": net["seen"].set(x.sum()), "table": x.sum(0)}


def own(old: Any, new: Any, axis_names: Any) -> Any:
    return new


def rows_of_a_state_made_inside() -> Any:
    def draw(net: Any, x: Any) -> Any:
        keys, _ = sm.RandomState(KEY).rows(len(x))
        return fit(net, x)[0] + jax.random.uniform(keys[0]), net

    return split(draw, ROWS)


def in_blocks(mesh: str, fun: Any, rows: Any, check_vma: bool = True, **options: Any) -> Any:
    def call() -> Any:
        on = make_mesh(mesh)
        step = sm.value_and_grad(fun, axis_name=on.axis_names, **options)
        net = {**model(), "rng": sm.RandomState(KEY)}
        mapped = sm.shard_map(step, on, (None, rows), P(), check_vma=check_vma)
        return mapped(net, jnp.arange(16.0).reshape(8, 2))

    return call


def centred(net: Any, x: Any) -> Any:
    return fit(net, x - jax.lax.pmean(x, "x") * sm.axis_index("x"))


def drawn_for_a_shard(net: Any, x: Any) -> Any:
    key, rng = net["rng"].split()
    return fit(net, x + jax.random.uniform(key))[0], {**net, "rng": rng}


def split_by_the_first_axis() -> Any:
    split = sm.fsdp(W, make_mesh("2x2"), "x", min_size=0)

    def step(split: Any, x: Any) -> Any:
        whole = sm.gather(split, "x")
        return sm.value_and_grad(fit, axis_name=("x", "y"), blocks=4, split_as=split)(whole, x)[1]

    rows = jnp.arange(32.0).reshape(4, 8)
    return sm.shard_map(step, make_mesh("2x2"), (None, P(("x", "y"))), P())(split, rows)


def rows_after_a_key_was_set() -> Any:
    def draw(net: Any, x: Any, *, rng: Any) -> Any:
        rng.set(jax.random.fold_in(rng.key, 1)).rows(len(x))
        return fit(net, x)

    return sm.value_and_grad(draw, microbatches=2)(model(), ROWS, rng=sm.RandomState(KEY))


SUM_OF_AGREED = sm.value_and_grad(agreed, axis_name="x", reduce="sum")
OF_PARAMETERS = sm.value_and_grad(
    lambda net, x: (net["w"].value ** 2, net), axis_name="x", reduce="sum"
)


def through_a_cond(net: Any, x: Any) -> Any:
    double = lambda w: 2 * w
    return jax.lax.cond(x[0] > 3, double, double, net["w"].value), net


def summed(net: Any, x: Any) -> Any:
    return jax.lax.psum(through_a_cond(net, x)[0], "x")


MISTAKES: Mistakes = {
    "cond whose predicate differs": [
        lambda: on_mesh(lambda net, x: jax.grad(lambda w: summed({"w": sm.State(w)}, x))(1.0)),
        lambda: jax.grad(lambda w: on_mesh(lambda _, x: summed({"w": sm.State(w)}, x)))(1.0),
    ],
    "choosing what has no gradient": lambda: sm.grad(fit, wrt=...)(net(), X),
    "choosing nothing": lambda: sm.grad(fit, wrt=sm.BatchState)(net(), X),
    "model without parameters": [
        lambda: sm.grad(fit)({"n": sm.ParamState(1), "mean": sm.BatchState(0.0), "k": 5}, X),
        lambda: sm.grad(lambda model, x: (model, x))({"k": 5, "act": jnp.tanh}, X),
    ],
    "no pair returned": [
        returning(lambda loss, net, x: None),
        returning(lambda loss, net, x: [loss, net]),
        returning(lambda loss, net, x: (1.0, net, 3)),
        returning(lambda loss, net, x: ()),
        returning(lambda loss, net, x: (1.0, net), has_aux=True),
        returning(lambda loss, net, x: loss),
    ],
    "no loss returned": [
        returning(lambda loss, net, x: (x * net["w"].value, net)),
        returning(lambda loss, net, x: ((loss[None], x), net), has_aux=True),
        returning(lambda loss, net, x: (net["steps"].value, net)),
        returning(lambda loss, net, x: (loss + 0j, net)),
        returning(lambda loss, net, x: (None, net)),
    ],
    "another model returned": [
        beside(None),
        beside({"b": X}, has_aux=True),
        beside(3),
    ],
    "reducing over an axis that is not mapped over": [
        lambda: on_mesh(sm.value_and_grad(fit, axis_name=("x", "y", "z"))),
        lambda: in_lanes(sm.pmap2, sm.value_and_grad(fit, axis_name="y")),
    ],
    "axis forgotten": [
        lambda: on_mesh(sm.value_and_grad(fit)),
        lambda: on_mesh(sm.value_and_grad(fit), check_vma=False),
        lambda: on_mesh(sm.value_and_grad(fit), "4x2", ("x", "y")),
    ],
    "sum of one loss": everywhere(SUM_OF_AGREED),
    # Not where types are checked: there the parameters are made varying, and the loss is with them.
    "sum of one loss of parameters alone": lambda: on_mesh(OF_PARAMETERS, check_vma=False),
    "map that does not check what varies": [
        unchecked_map_of_jax,
        lambda: jax.pmap(sm.value_and_grad(fit, axis_name="x"), "x", in_axes=(None, 0))(
            net(), X.reshape(4, 2)
        ),
        lambda: on_mesh(sm.value_and_grad(fit, axis_name="x"), check_vma=False, jit=False),
    ],
    "maps of which one checks what varies": [
        lambda: nested(outer=True, inner=False),
        lambda: nested(outer=False, inner=True),
    ],
    "loss of what shards exchange": [
        *each(lambda transform: transform(each_exchanged, axis_name="x")(X), sm.vmap2, sm.pmap2),
        *each(
            lambda check_vma: sm.shard_map(
                each_exchanged, make_mesh("4"), P("x"), P("x"), check_vma=check_vma
            )(X),
            *(True, False),
        ),
    ],
    "loss of what lanes exchange on a mesh": exchanged_between_lanes_in_a_checked_shard_map,
    "loss of parameters gathered over an axis not named": lambda: of_gathered("x", True),
    "one loss in the loss of each shard": everywhere(sm.value_and_grad(steeper, axis_name="x")),
    "gradients summed again": [
        lambda: on_mesh(summed_again),
        lambda: on_mesh(summed_where_it_is_the_same, "4x2"),
    ],
    "parameters gathered before the gradient": lambda: on_mesh(gathered_before),
    "split as a model of another structure": [
        lambda: as_parts({"w": W["w"]}),
        lambda: as_parts({**W, "w": sm.ParamState(jnp.ones(8))}),
        lambda: sm.trainable(W, split_as=3),
    ],
    "split as a model without specs": lambda: as_parts(W),
    "split as a model over an axis that is not named": lambda: as_parts(
        sm.fsdp(W, make_mesh("4x2"), ("x", "y"), min_size=4), mesh="4x2"
    ),
    "split as a model by the major axis": lambda: as_parts(
        sm.fsdp(parts(P(("x", "y"), None)), make_mesh("4x2"), "x", min_size=4),
        sm.fsdp(parts(P("y", None)), make_mesh("4x2"), "y", min_size=4),
        "4x2",
    ),
    "split as a model for another mesh": lambda: as_parts(
        sm.fsdp(parts(P("x", None), 8, 4), make_mesh("4"), "x", min_size=4),
        sm.fsdp(parts(P(None, None), 6, 4), make_mesh("4"), "x", min_size=64),
    ),
    "split as a packed model": lambda: sm.trainable(
        sm.pack(W, make_mesh("4")), split_as=sm.fsdp(W, make_mesh("4"), "x")
    ),
    "split over lanes": each(split_over_lanes, sm.vmap2, sm.pmap2),
    "number of microbatches": lambda: sm.value_and_grad(fit, microbatches=0),
    "rows that microbatches do not divide": lambda: sm.value_and_grad(rated, microbatches=4)(
        model(), {"a": ROWS, "b": ROWS[:4]}, jnp.arange(9)
    ),
    "arguments without rows": [
        lambda: split(rated, ROWS, sm.RandomState(KEY)),
        lambda: split(rated, ROWS, 0.5),
    ],
    "microbatches inside microbatches": lambda: split(lambda net, x: split(fit, x)[0], ROWS),
    "microbatches that write different values": [
        lambda: split(write_both, ROWS),
        lambda: sm.shard_map(
            sm.value_and_grad(write_seen, axis_name="x", microbatches=3),
            *(make_mesh("2"), (None, P("x")), P()),
        )(model(), ROWS),
    ],
    "policy that merges no microbatches": lambda: sm.value_and_grad(write_seen, microbatches=2)(
        {**model(), "seen": sm.State(0.0, reduce=own)}, ROWS
    ),
    "loss that microbatches share": lambda: split(
        lambda net, x: (net["w"].value ** 2, net), ROWS, reduce="sum"
    ),
    "rows of a state made in a microbatch": rows_of_a_state_made_inside,
    "rows after a key was set in a microbatch": rows_after_a_key_was_set,
    "number of blocks": lambda: sm.value_and_grad(fit, blocks=12),
    "blocks that shards cannot share out": in_blocks("8", fit, P("x"), blocks=4),
    "rows that blocks do not divide": lambda: sm.value_and_grad(fit, blocks=16)(model(), ROWS),
    "microbatches of no whole blocks": in_blocks("2", fit, P("x"), blocks=8, microbatches=3),
    "rows that are not split for blocks": in_blocks("2x2", fit, P("x"), blocks=8),
    "one loss of rows that are not split for blocks": in_blocks("2", fit, P(), False, blocks=4),
    "exchange inside a block": in_blocks("2", centred, P("x"), blocks=4),
    "key of a shard in a block": in_blocks("2", drawn_for_a_shard, P("x"), blocks=4),
    "blocks that write different values": in_blocks("2", write_both, P("x"), blocks=4),
    "parts split in another order than blocks": split_by_the_first_axis,
}
