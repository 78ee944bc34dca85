"""Attention over a sequence that is too long for one device.

The sequence is split over the mesh axis "seq", and the weights are whole on every device. Queries stay where
they are. Keys and values go once around the ring, and each device keeps a running maximum and sum. So the
softmax is exact. With n devices, a step sends keys and values n - 1 times, their gradients as often, and
one sum of the weights' gradients.
"""

import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget, assert_equivalent


ROWS, LENGTH, WIDTH = 2, 64, 8
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Attention(sm.Module):
    qkv: sm.ParamState
    out: sm.ParamState


def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of this shard's queries to the keys of all shards."""
    n, me, length = lax.axis_size("seq"), lax.axis_index("seq"), q.shape[1]
    own = jnp.arange(length)
    high, total, mixed = jnp.full(q.shape[:2], -jnp.inf), jnp.zeros(q.shape[:2]), jnp.zeros_like(q)
    for passed in range(n):
        if passed:  # One message carries both.
            k, v = lax.ppermute(jnp.stack([k, v]), "seq", [(i, (i + 1) % n) for i in range(n)])
        # The first round has this shard's own part, so every query has seen a key when the maximum is used.
        source = (me - passed) % n
        seen = (me * length + own)[:, None] >= source * length + own
        scores = jnp.where(seen, q @ k.mT * WIDTH**-0.5, -jnp.inf)
        higher = jnp.maximum(high, scores.max(-1))
        shrink, weights = jnp.exp(high - higher), jnp.exp(scores - higher[..., None])
        total = total * shrink + weights.sum(-1)
        mixed, high = mixed * shrink[..., None] + weights @ v, higher
    return mixed / total[..., None]


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same of a whole sequence, with JAX's softmax."""
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), q @ k.mT * WIDTH**-0.5, -jnp.inf)
    return jax.nn.softmax(scores) @ v


def step(
    model: Attention, x: jax.Array, y: jax.Array, attend: Attend, axis_name: str | None
) -> tuple[jax.Array, Attention]:
    def loss_fn(model: Attention) -> tuple[jax.Array, Attention]:
        q, k, v = jnp.einsum("btd,pde->pbte", x, model.qkv.value)
        return ((attend(q, k, v) @ model.out.value - y) ** 2).mean(), model

    (loss, model), grads = sm.value_and_grad(loss_fn, axis_name=axis_name)(model)
    return loss, jax.tree.map(lambda p, g: p - g, model, grads)


ring_step = partial(step, attend=ring_attention, axis_name="seq")
plain_step = partial(step, attend=plain_attention, axis_name=None)


def main() -> None:
    mesh, split = jax.make_mesh((jax.device_count(),), ("seq",)), P(None, "seq")
    specs: dict[str, Any] = {"in_specs": (None, split, split), "out_specs": P()}
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH))
    y = jnp.cumsum(x, 1) / jnp.arange(1, LENGTH + 1)[:, None]  # the mean of what came so far
    qkv = jax.random.normal(jax.random.key(0), (3, WIDTH, WIDTH)) * WIDTH**-0.5
    model = Attention(sm.ParamState(qkv), sm.ParamState(jnp.eye(WIDTH) / 2))
    args, sizes = (model, x[:, :16], y[:, :16]), [{"seq": 4}]
    assert_equivalent(ring_step, args, meshes=sizes, unsharded=plain_step, steps=2, **specs)
    print("the ring agrees with plain attention")

    train = sm.shard_map(ring_step, mesh, **specs, donate="states")
    model, x, y = train.place(model, x, y)
    budget = {"ppermute": 2 * (mesh.size - 1), "psum": 1}  # forward, and for the gradients
    print(assert_budget(train, model, x, y, collectives=budget, moved=0))

    losses = []
    for _ in range(100):
        loss, model = train(model, x, y)
        losses.append(loss)
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
