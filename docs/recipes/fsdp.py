"""FSDP with layers that are scanned and rematerialised.

The rows of the batch are split over the mesh axis "data", and so are all parameters, their gradients and the
two slots of Adam: each of n devices holds 1/n of them. A scan runs over the layers. Each layer is gathered
when it runs, and because of `jax.checkpoint` once more in the backward pass, so only one layer is whole at a
time. The transpose of each gather sends every device its own part of the gradients, summed over all rows.
"""

import functools
import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX starts

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget, assert_equivalent


LAYERS, WIDTH = 4, 64
OPTIMIZER = optax.adam(3e-3)
# What the backward pass does not compute again. Whole weights are not among it, so they are gathered again.
KEPT = jax.checkpoint_policies.save_only_these_names("hidden")


class Layer(sm.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=first)
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(checkpoint_name(jax.nn.silu(self.up(x)), "hidden"))


def loss_fn(layers: Layer, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Layer]:
    @functools.partial(jax.checkpoint, policy=KEPT)
    def apply(x: jax.Array, layer: Layer) -> tuple[jax.Array, None]:
        return jax.vmap(sm.gather(layer, "data"))(x), None

    x, _ = sm.scan(apply, x, layers)
    return ((x - y) ** 2).mean(), layers


def step(
    layers: Layer, slots: optax.OptState, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, Layer, optax.OptState]:
    (loss, layers), grads = sm.value_and_grad(loss_fn, axis_name="data")(layers, x, y)
    updates, slots = OPTIMIZER.update(grads, slots)
    return loss, eqx.apply_updates(layers, updates), slots


def main() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    in_specs = (None, None, P("data"), P("data"))
    train = sm.shard_map(step, mesh, in_specs, out_specs=P(), donate="states")

    layers = eqx.filter_vmap(Layer)(jax.random.split(jax.random.key(0), LAYERS))
    # Axis 0 counts the layers: the scan goes along it, so it stays whole.
    layers = sm.fsdp(layers, mesh, "data", min_size=0, first_axis=1)
    slots = OPTIMIZER.init(sm.trainable(layers))
    x = jax.random.normal(jax.random.key(1), (32, WIDTH))
    y = jnp.sin(x @ jax.random.normal(jax.random.key(2), (WIDTH, WIDTH)) / 8)

    args = (layers, slots, x[:8], y[:8])
    assert_equivalent(train, args, meshes=[{"data": 4}], steps=2)
    print("four devices agree with one")

    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((layers, slots)))
    layers, slots, x, y = train.place(layers, slots, x, y)
    # Each layer is gathered twice, and its gradients are scattered once. One sum is that of the loss.
    budget = {"all_gather": 2 * LAYERS, "reduce_scatter": LAYERS, "psum": 1}
    print(assert_budget(train, layers, slots, x, y, collectives=budget))
    leaves = jax.tree.leaves((layers, slots))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    print(f"parameters and slots: {whole} bytes in all, {held} bytes on a device")

    losses = []
    for _ in range(60):
        loss, layers, slots = train(layers, slots, x, y)
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
