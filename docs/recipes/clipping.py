"""Clipping by the global norm, and weight decay, of parameters that are split.

Rows are split over the mesh axis "data", and the hidden units of an MLP over "model". The bias of the outputs
is whole on every device. The norm is that of all parts: one `psum` over "model" adds the squares of what is
split, and the squares of what is whole are counted once. Each device then scales and decays its own parts,
for which nothing is sent. Only matrices decay.
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


LARGEST = 0.2
OPTIMIZER = optax.adamw(
    3e-3, weight_decay=1e-2, mask=lambda tree: jax.tree.map(lambda w: w.ndim > 1, tree)
)


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


def loss_fn(mlp: MLP, x: jax.Array, y: jax.Array) -> tuple[jax.Array, MLP]:
    units = jax.nn.silu(x @ mlp.up.value + mlp.up_bias.value)
    out = jax.lax.psum(units @ mlp.down.value, "model") + mlp.down_bias.value
    return ((out - y) ** 2).mean(), mlp


def step(
    mlp: MLP, slots: optax.OptState, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array, MLP, optax.OptState]:
    (loss, mlp), grads = sm.value_and_grad(loss_fn, axis_name="data")(mlp, x, y)
    norm = sm.global_norm(grads)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, LARGEST / norm), grads)
    updates, slots = OPTIMIZER.update(grads, slots, sm.trainable(mlp))
    return loss, norm, eqx.apply_updates(mlp, updates), slots


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
    # One more than in tensor_parallel.py: the squares.
    print(assert_budget(train, mlp, slots, x, y, collectives={"psum": 4}))
    losses, norms = [], []
    for _ in range(60):
        loss, norm, mlp, slots = train(mlp, slots, x, y)
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
        norms.append(float(norm))
    print(f"clipped steps: {sum(norm > LARGEST for norm in norms)} of {len(norms)}")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
