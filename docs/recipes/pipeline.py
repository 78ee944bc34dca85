"""Train layers that lie on several devices, one stage after the other.

Rows are split over the mesh axis "data", and layers over the axis "stage", where their gradients stay. Each
device splits its rows into microbatches. At each tick a stage runs its layers on one of them and sends the
result to the next stage by ppermute. With n stages and m microbatches, a stage idles in n - 1 of the
m + n - 1 ticks. These are the bubbles; more microbatches make them a smaller part.
"""

import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget, assert_equivalent


LAYERS, WIDTH, ROWS, MICROBATCHES = 8, 8, 48, 6
SPECS: dict[str, Any] = {"in_specs": (None, P("data"), P("data")), "out_specs": P()}


class Stack(sm.Module):
    weights: sm.ParamState

    def __init__(self, key: jax.Array) -> None:
        weights = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) * 0.3 * WIDTH**-0.5
        self.weights = sm.ParamState(weights, spec=P("stage"))


def apply(h: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
    return h + jnp.tanh(h @ weight), None


def pipeline(weights: jax.Array, x: jax.Array) -> jax.Array:
    """What leaves the last stage; on the other stages it means nothing."""
    n, stage = lax.axis_size("stage"), lax.axis_index("stage")
    parts = x.reshape(MICROBATCHES, -1, WIDTH)

    def tick(arrived: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
        # After the last microbatch the first stage repeats it. Nobody reads what comes out.
        h = jnp.where(stage == 0, parts[jnp.minimum(time, MICROBATCHES - 1)], arrived)
        h, _ = lax.scan(apply, h, weights)
        return lax.ppermute(h, "stage", [(i, i + 1) for i in range(n - 1)]), h

    # What stages have before the first microbatch arrives, nobody reads either.
    nothing = lax.pcast(jnp.zeros_like(parts[0]), ("stage",), to="varying")
    _, outs = lax.scan(tick, nothing, jnp.arange(MICROBATCHES + n - 1))
    return outs[n - 1 :].reshape(x.shape)


def loss_fn(stack: Stack, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Stack]:
    loss = ((pipeline(stack.weights.value, x) - y) ** 2).mean()
    last = lax.axis_index("stage") == lax.axis_size("stage") - 1
    return lax.psum(jnp.where(last, loss, 0), "stage"), stack


def plain_loss(stack: Stack, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Stack]:
    return ((lax.scan(apply, x, stack.weights.value)[0] - y) ** 2).mean(), stack


def update(stack: Stack, x: jax.Array, y: jax.Array, fun: Any, axis_name: str | None) -> Any:
    (loss, stack), grads = sm.value_and_grad(fun, axis_name=axis_name)(stack, x, y)
    return loss, stack.replace(weights=stack.weights.value - 0.2 * grads.weights.value)


step = partial(update, fun=loss_fn, axis_name="data")
plain_step = partial(update, fun=plain_loss, axis_name=None)


def main() -> None:
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    args = (Stack(jax.random.key(0)), x, jnp.sin(2 * x))
    sizes = [{"data": 2, "stage": 2}]
    assert_equivalent(step, args, meshes=sizes, unsharded=plain_step, steps=2, **SPECS)
    print("the pipeline agrees with a plain loop over the layers")

    mesh = jax.make_mesh((2, 4), ("data", "stage"))
    train = sm.shard_map(step, mesh, **SPECS, donate="states")
    stack, x, y = train.place(*args)
    ticks = MICROBATCHES + (idle := mesh.shape["stage"] - 1)
    budget = {"ppermute": 2 * ticks, "psum": 3}  # of the loss over both axes, and of gradients
    print(assert_budget(train, stack, x, y, collectives=budget, moved=0))
    print(f"bubbles: each stage is idle in {idle} of {ticks} ticks, {idle / ticks:.0%}")
    losses = []
    for _ in range(100):
        loss, stack = train(stack, x, y)
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
