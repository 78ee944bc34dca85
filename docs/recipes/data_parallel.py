"""Data parallel with synchronised statistics.

The rows of the batch are split over the mesh axis "data". Every device holds all parameters, running
statistics and optimizer slots. Each shard computes the gradients of its own rows, and one sum over devices
joins them. `BatchNorm` sends sums over the rows, so it normalises by the statistics of the whole batch, and
its running statistics are the same on every device and on every mesh.
"""

import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX starts

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import statemesh as sm
from statemesh.testing import assert_budget, assert_equivalent


OPTIMIZER = optax.adam(3e-3)


class Net(sm.Module):
    up: sm.ParamState
    norm: sm.nn.BatchNorm
    down: sm.ParamState

    def __init__(self, key: jax.Array, hidden: int = 64) -> None:
        first, second = jax.random.split(key)
        self.up = sm.ParamState(jax.random.normal(first, (64, hidden)) / 8)
        self.norm = sm.nn.BatchNorm(hidden, axis_name="data", momentum=0.9)
        self.down = sm.ParamState(jax.random.normal(second, (hidden, 10)) * hidden**-0.5)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, "Net"]:
        x, norm = self.norm(x @ self.up.value)
        return jax.nn.silu(x) @ self.down.value, self.replace(norm=norm)


def loss_fn(net: Net, images: jax.Array, digits: jax.Array) -> tuple[jax.Array, Net]:
    logits, net = net(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean(), net


def step(
    net: Net, slots: optax.OptState, images: jax.Array, digits: jax.Array
) -> tuple[jax.Array, Net, optax.OptState]:
    (loss, net), grads = sm.value_and_grad(loss_fn, axis_name="data")(net, images, digits)
    updates, slots = OPTIMIZER.update(grads, slots)
    return loss, eqx.apply_updates(net, updates), slots


def main() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    in_specs = (None, P(), P("data"), P("data"))
    train = sm.shard_map(step, mesh, in_specs, out_specs=P(), donate="states")

    data = load_digits()
    images, digits = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    net = Net(jax.random.key(0))
    slots = OPTIMIZER.init(sm.trainable(net))

    args = (net, slots, images[:16], digits[:16])
    assert_equivalent(train, args, meshes=[{"data": 4}], steps=2)
    print("four devices agree with one")

    args = train.place(net, slots, images[:128], digits[:128])
    # One sum is of all gradients and the loss. BatchNorm has three forward and three backward.
    print(assert_budget(train, *args, collectives={"psum": 7}))
    net, slots, *_ = args

    shuffle, losses = np.random.default_rng(0), []
    for _ in range(60):
        rows = shuffle.choice(len(images), 128, replace=False)
        loss, net, slots = train(net, slots, images[rows], digits[rows])
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
