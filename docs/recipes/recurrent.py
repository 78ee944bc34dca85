"""Train a recurrent network on streams that are longer than a step.

Each row of the batch is a stream, and the rows are split over the mesh axis "data". The hidden value is a
state that is split like the rows. A step reads what the step before left, and no hidden value ever moves.
The weights are whole on every device. A step sends one sum, of their gradients and the loss.
"""

import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget, assert_equivalent


ROWS, CHUNK, HIDDEN = 16, 10, 16
OPTIMIZER = optax.adam(1e-2)
SPECS: dict[str, Any] = {"in_specs": (None, P("data")), "out_specs": P()}


class Recurrent(sm.Module):
    cell: sm.nn.GRUCell
    out: sm.ParamState

    def __init__(self, key: jax.Array) -> None:
        cell = sm.nn.GRUCell(1, HIDDEN, key=key, spec=P("data"))
        self.cell = cell.init_state(batch_size=ROWS)
        self.out = sm.ParamState(jnp.zeros((HIDDEN, 1)))


class Training(sm.Module):
    model: Recurrent
    slots: optax.OptState

    def __init__(self, key: jax.Array) -> None:
        self.model = Recurrent(key)
        self.slots = OPTIMIZER.init(sm.trainable(self.model))


def loss_fn(model: Recurrent, x: jax.Array) -> tuple[jax.Array, Recurrent]:
    """Predict each value of this chunk from those before it, also those of earlier chunks."""

    def advance(cell: sm.nn.GRUCell, now: jax.Array) -> tuple[sm.nn.GRUCell, jax.Array]:
        hidden, cell = cell(now)
        return cell, hidden

    cell, hidden = sm.scan(advance, model.cell, x[:, :-1].swapaxes(0, 1))
    error = hidden @ model.out.value - x[:, 1:].swapaxes(0, 1)
    return (error**2).mean(), model.replace(cell=cell)


def step(training: Training, x: jax.Array) -> tuple[jax.Array, Training]:
    (loss, model), grads = sm.value_and_grad(loss_fn, axis_name="data")(training.model, x)
    updates, slots = OPTIMIZER.update(grads, training.slots)
    return loss, training.replace(model=eqx.apply_updates(model, updates), slots=slots)


def chunk(start: int) -> jax.Array:
    """A piece of sine waves, one of each frequency for each row."""
    times = start + jnp.arange(CHUNK + 1.0)
    return jnp.sin(times * jnp.linspace(0.2, 0.8, ROWS)[:, None])[..., None]


def main() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    train = sm.shard_map(step, mesh, **SPECS, donate="states")
    training = Training(jax.random.key(0))
    assert_equivalent(step, (training, chunk(0)), meshes=[{"data": 4}], steps=2, **SPECS)
    print("four devices agree with one")

    training, x = train.place(training, chunk(0))
    print(assert_budget(train, training, x, collectives={"psum": 1}, moved=0))

    losses = []
    for turn in range(80):
        loss, training = train(training, chunk(turn * CHUNK))
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    held = training.model.cell.hidden.value.addressable_shards[0].data.shape
    print(f"hidden values on each device: {held} of {(ROWS, HIDDEN)}")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
