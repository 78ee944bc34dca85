"""An MLP split by its hidden units, on a mesh of data x model.

Rows are split over "data". The first matrix is split by columns over "model" and the second by rows, so each
device computes its own hidden units from whole inputs, and a part of every output. One `psum` over "model"
adds the parts. The gradients are averaged over "data" only, because over "model" each device has those of its
own hidden units; the optimizer's slots lie where their parameters lie.
"""

import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX starts

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget, assert_equivalent


OPTIMIZER = optax.adam(3e-3)


class MLP(sm.Module):
    up: sm.ParamState
    up_bias: sm.ParamState
    down: sm.ParamState
    down_bias: sm.ParamState

    def __init__(self, key: jax.Array, n_in: int, hidden: int, n_out: int) -> None:
        first, second = jax.random.split(key)
        up = jax.random.normal(first, (n_in, hidden)) * n_in**-0.5
        down = jax.random.normal(second, (hidden, n_out)) * hidden**-0.5
        self.up = sm.ParamState(up, spec=P(None, "model"))
        self.up_bias = sm.ParamState(jnp.zeros(hidden), spec=P("model"))
        self.down = sm.ParamState(down, spec=P("model", None))
        self.down_bias = sm.ParamState(jnp.zeros(n_out))

    def __call__(self, x: jax.Array) -> jax.Array:
        units = jax.nn.silu(x @ self.up.value + self.up_bias.value)
        # The bias comes after the sum: before it, every device would add one.
        out: jax.Array = jax.lax.psum(units @ self.down.value, "model") + self.down_bias.value
        return out


def loss_fn(mlp: MLP, x: jax.Array, y: jax.Array) -> tuple[jax.Array, MLP]:
    return ((mlp(x) - y) ** 2).mean(), mlp


def step(
    mlp: MLP, slots: optax.OptState, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, MLP, optax.OptState]:
    (loss, mlp), grads = sm.value_and_grad(loss_fn, axis_name="data")(mlp, x, y)
    updates, slots = OPTIMIZER.update(grads, slots)
    return loss, eqx.apply_updates(mlp, updates), slots


def main() -> None:
    mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "model"))
    in_specs = (None, None, P("data"), P("data"))
    train = sm.shard_map(step, mesh, in_specs, out_specs=P(), donate="states")

    mlp = MLP(jax.random.key(0), n_in=16, hidden=128, n_out=8)
    slots = OPTIMIZER.init(sm.trainable(mlp))
    x = jax.random.normal(jax.random.key(1), (64, 16))
    y = jnp.sin(x @ jax.random.normal(jax.random.key(2), (16, 8)) / 4)

    args, meshes = (mlp, slots, x[:8], y[:8]), [{"data": 2, "model": 2}]
    assert_equivalent(train, args, meshes=meshes, steps=2)
    print("a mesh of 2x2 agrees with one device")

    mlp, slots, x, y = train.place(mlp, slots, x, y)
    # The outputs over "model"; over "data" the gradients of what is split, and of the rest with the loss.
    print(assert_budget(train, mlp, slots, x, y, collectives={"psum": 3}))

    losses = []
    for _ in range(60):
        loss, mlp, slots = train(mlp, slots, x, y)
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
