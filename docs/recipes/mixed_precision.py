"""Mixed precision with a dynamic loss scale.

Rows are split over the mesh axis "data"; parameters and slots are whole on every device, in float32.
The network computes in float16, and the loss is multiplied by a scale so that small gradients do not vanish.
A step whose gradients are not finite only halves the scale, and many good steps double it. The decision reads
the gradients after their one sum over devices, so all devices decide alike and nothing more is sent.
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


COMPUTE = jnp.float16  # bfloat16 has the range of float32, and needs no scale
GOOD_STEPS = 20
OPTIMIZER = optax.adam(3e-3)


class Net(sm.Module):
    up: sm.ParamState
    down: sm.ParamState


class Training(sm.Module):
    net: Net
    slots: optax.OptState
    scale: sm.State
    good: sm.State
    skipped: sm.State

    def __init__(self, key: jax.Array, scale: float) -> None:
        up, down = jax.random.split(key)
        up, down = jax.random.normal(up, (16, 64)) / 4, jax.random.normal(down, (64, 8)) / 8
        self.net = Net(sm.ParamState(up), sm.ParamState(down))
        self.slots = OPTIMIZER.init(sm.trainable(self.net))
        self.scale, self.good, self.skipped = sm.State(scale), sm.State(0), sm.State(0)


def loss_fn(net: Net, x: jax.Array, y: jax.Array, *, scale: jax.Array) -> tuple[jax.Array, Net]:
    x, up, down = (a.astype(COMPUTE) for a in (x, net.up.value, net.down.value))
    out = (jax.nn.silu(x @ up) @ down).astype(jnp.float32)
    return ((out - y) ** 2).mean() * scale, net


def step(training: Training, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Training]:
    scale = training.scale.value
    gradient = sm.value_and_grad(loss_fn, axis_name="data")
    (loss, net), grads = gradient(training.net, x, y, scale=scale)
    # What is not finite on one shard is not finite in the sum over shards.
    finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    updates, slots = OPTIMIZER.update(jax.tree.map(lambda g: g / scale, grads), training.slots)
    net, slots = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (eqx.apply_updates(net, updates), slots),
        (training.net, training.slots),
    )
    good = jnp.where(finite, training.good.value + 1, 0)
    scale_of_good = jnp.where(good % GOOD_STEPS == 0, 2 * scale, scale)
    new_scale = jnp.where(finite, scale_of_good, scale / 2)
    skipped = training.skipped.value + ~finite
    new = training.replace(net=net, slots=slots, scale=new_scale, good=good, skipped=skipped)
    return loss / scale, new


def main() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    in_specs = (None, P("data"), P("data"))
    train = sm.shard_map(step, mesh, in_specs, out_specs=P(), donate="states")
    x = jax.random.normal(jax.random.key(1), (64, 16))
    y = jnp.sin(x @ jax.random.normal(jax.random.key(2), (16, 8)) / 4)

    training = Training(jax.random.key(0), scale=2.0**10)
    # With the infinite row, the gradients of one shard alone are not finite.
    for rows in (x[:8], x[:8].at[0].set(jnp.inf)):
        assert_equivalent(train, (training, rows, y[:8]), meshes=[{"data": 4}], steps=2)
    print("four devices agree with one")

    training, x, y = train.place(Training(jax.random.key(0), scale=2.0**24), x, y)
    print(assert_budget(train, training, x, y, collectives={"psum": 1}))
    losses = []
    for _ in range(100):
        loss, training = train(training, x, y)
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    print(f"steps skipped: {training.skipped.value}, scale in the end: {training.scale.value:.0f}")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
