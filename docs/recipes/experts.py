"""A layer of experts, each on one device.

The rows of the batch and the experts are split over the mesh axis "data"; the gate is whole on every device.
Each token goes to the expert that the gate finds most likely, if that expert has a seat left for the
token's row; else it goes past all experts. One all_to_all sends the seated tokens to their experts and one
sends them back. The backward pass sends as many. Seats are counted by row, so all meshes agree.
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


ROWS, TOKENS, WIDTH, EXPERTS, SEATS = 16, 16, 8, 8, 4
OPTIMIZER = optax.adam(2e-2)
SPECS: dict[str, Any] = {"in_specs": (None, P("data"), P("data")), "out_specs": P()}


class Experts(sm.Module):
    enter: sm.ParamState
    gate: sm.ParamState
    experts: sm.ParamState
    seated: sm.BatchState

    def __init__(self, key: jax.Array) -> None:
        ours, theirs = jax.random.split(key)
        self.enter = sm.ParamState(jnp.eye(WIDTH))
        self.gate = sm.ParamState(jax.random.normal(ours, (WIDTH, EXPERTS)))
        experts = jax.random.normal(theirs, (EXPERTS, WIDTH, WIDTH)) * WIDTH**-0.5
        self.experts = sm.ParamState(experts, spec=P("data"))
        self.seated = sm.BatchState(jnp.zeros(EXPERTS), reduce="mean")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, "Experts"]:
        x = x @ self.enter.value
        probs = jax.nn.softmax(x @ self.gate.value)
        chosen = jax.nn.one_hot(probs.argmax(-1), EXPERTS)
        place = jnp.cumsum(chosen, 1).astype(int) - 1  # how many chose it before in the row
        seats = chosen[..., None] * jax.nn.one_hot(place, SEATS)  # rows, tokens, experts, seats
        there = jnp.einsum("rtes,rtd->resd", seats, x)
        there = jax.lax.all_to_all(there, "data", split_axis=1, concat_axis=0, tiled=True)
        done = jnp.tanh(jnp.einsum("resd,edf->resf", there, self.experts.value))
        back = jax.lax.all_to_all(done, "data", split_axis=0, concat_axis=1, tiled=True)
        out = jnp.einsum("rtes,resd->rtd", seats, back) * probs.max(-1, keepdims=True)
        # It is 1 where all experts are chosen alike, and more where few of them have all the tokens.
        balance = EXPERTS * (chosen.mean(1) * probs.mean(1)).sum(-1).mean()
        return x + out, balance, self.replace(seated=seats.sum((1, 3)).mean(0))


class Training(sm.Module):
    model: Experts
    slots: optax.OptState

    def __init__(self, key: jax.Array) -> None:
        self.model = Experts(key)
        self.slots = OPTIMIZER.init(sm.trainable(self.model))


def loss_fn(model: Experts, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Experts]:
    out, balance, model = model(x)
    return ((out - y) ** 2).mean() + 0.01 * balance, model


def step(training: Training, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Training]:
    (loss, model), grads = sm.value_and_grad(loss_fn, axis_name="data")(training.model, x, y)
    updates, slots = OPTIMIZER.update(grads, training.slots)
    return loss, training.replace(model=eqx.apply_updates(model, updates), slots=slots)


def main() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    train = sm.shard_map(step, mesh, **SPECS, donate="states")
    x = jax.random.normal(jax.random.key(1), (ROWS, TOKENS, WIDTH))
    training, y = Training(jax.random.key(0)), x + jnp.sin(3 * x)
    assert_equivalent(step, (training, x, y), meshes=[{"data": 4}], steps=2, **SPECS)
    print("four devices agree with one")

    training, x, y = train.place(training, x, y)
    budget = {"all_to_all": 4, "psum": 2}  # sums of gradients, and of the seats
    print(assert_budget(train, training, x, y, collectives=budget, moved=0))
    losses = []
    for _ in range(100):
        loss, training = train(training, x, y)
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    print(f"tokens without a seat: {1 - training.model.seated.value.sum() / TOKENS:.1%}")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
