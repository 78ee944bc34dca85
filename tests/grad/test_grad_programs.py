"""Training steps compile to the programs that one would write by hand."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh, without_names


RATE = 0.01
LANES = 8


def forward(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return (x**2).mean()


def loss_fn(model: list[sm.ParamState], x: jax.Array) -> Any:
    return forward([w.value for w in model], x), model


def step(model: list[sm.ParamState], x: jax.Array) -> Any:
    (loss, model), grads = sm.value_and_grad(loss_fn, axis_name="x")(model, x)
    return loss, eqx.apply_updates(model, jax.tree.map(lambda g: -RATE * g, grads))


def by_hand(weights: list[jax.Array], x: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(forward)(weights, x)
    loss, grads = jax.lax.pmean((loss, grads), "x")
    return loss, jax.tree.map(lambda w, g: w + -RATE * g, weights, grads)


def joined_mean(loss: jax.Array, grads: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Their means over "x", put end to end in one array."""
    arrays = [*grads, loss]
    flat = jax.lax.psum(jax.lax.concatenate([x.ravel() for x in arrays], 0), "x")
    parts = jax.lax.split(flat, [x.size for x in arrays])
    *grads, loss = [
        part.reshape(x.shape) / jax.lax.axis_size("x")
        for part, x in zip(parts, arrays, strict=True)
    ]
    return loss, grads


def joined_by_hand(cast: bool, weights: list[jax.Array], x: jax.Array) -> Any:
    own = jax.lax.pcast(weights, "x", to="varying") if cast else weights
    loss, grads = joined_mean(*jax.value_and_grad(forward)(own, x))
    return loss, jax.tree.map(lambda w, g: w + -RATE * g, weights, grads)


def arguments(
    count: int, mesh: Mesh | None = None
) -> tuple[list[jax.Array], list[sm.ParamState], jax.Array]:
    """On a mesh, rows are split over "x"."""
    weights, x = [jnp.full((4, 4), 0.1 * (k + 1)) for k in range(count)], jnp.ones((LANES, 4))
    if mesh is not None:
        weights, x = sm.place(weights, mesh), sm.place(x, mesh, P("x"))
    return weights, list(map(sm.ParamState, weights)), x


def compiled(lowered: Any) -> str:
    text: str = lowered.compile().as_text()
    return text


# With the loss, up to eight arrays. More are put end to end in several steps: see `test_packed.py`.
@pytest.mark.parametrize(("count", "name"), [(7, "8"), (2, "4x2")])
@pytest.mark.parametrize("check", [True, False])
def test_sharded_step_is_the_hand_written_one(count: int, name: str, check: bool) -> None:
    kind = AxisType.Explicit if check else AxisType.Auto
    # Where there is an axis "y", every shard over it has the same rows and the same parameters.
    mesh, hand = make_mesh(name, kind), functools.partial(joined_by_hand, check)
    weights, model, x = arguments(count, mesh)
    specs = (P(), P("x"))
    theirs = jax.jit(jax.shard_map(hand, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check))
    mine = sm.shard_map(step, mesh, (None, P("x")), P(), check_vma=check)
    ours = compiled(mine.lower(model, x))
    assert without_names(ours) == without_names(compiled(theirs.lower(weights, x)))
    # One all-reduce carries the loss and all gradients.
    assert ours.count(" all-reduce(") == 1


def test_step_in_lanes_is_the_hand_written_one() -> None:
    weights, model, x = arguments(3)
    theirs = jax.jit(jax.vmap(by_hand, in_axes=(None, 0), out_axes=None, axis_name="x"))
    options: Any = {"in_axes": (None, 0), "out_axes": None, "axis_name": "x"}
    ours = sm.vmap2(step, **options).lower(model, x[:, None])
    hand = theirs.lower(weights, x[:, None])
    assert without_names(compiled(ours)) == without_names(compiled(hand))
    on_devices = sm.pmap2(step, **options).lower(model, x[:, None])
    assert compiled(on_devices).count(" all-reduce(") == 1
