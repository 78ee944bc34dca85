"""Train an ensemble: one member on each device.

The members are stacked on axis 0 of every state. `pmap2` gives each device one member with its own weights
and random key, and gives all of them the same rows. Training sends nothing. A prediction sends one sum for
the members' mean and one for their spread. `vmap2` runs the same ensemble on one device.
"""

import os


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget, assert_equivalent


HIDDEN = 16


class Member(sm.Module):
    enter: sm.ParamState
    shift: sm.ParamState
    out: sm.ParamState
    key: sm.State  # a plain state, which is this member's alone on any mesh

    def __init__(self, key: jax.Array) -> None:
        first, second, key = jax.random.split(key, 3)
        every = P("devices")
        self.enter = sm.ParamState(2 * jax.random.normal(first, (1, HIDDEN)), spec=every)
        self.shift = sm.ParamState(jax.random.normal(second, (HIDDEN,)), spec=every)
        self.out = sm.ParamState(jnp.zeros((HIDDEN, 1)), spec=every)
        self.key = sm.State(key, spec=every)

    def __call__(self, x: jax.Array) -> Any:
        return jnp.tanh(x @ self.enter.value + self.shift.value) @ self.out.value


def step(member: Member, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Member]:
    """One step of one member, which weights the rows at random, as a bootstrap does."""
    key, following = jax.random.split(member.key.value)
    weight = jax.random.exponential(key, y.shape)

    def loss_fn(member: Member) -> tuple[jax.Array, Member]:
        return (weight * (member(x) - y) ** 2).mean(), member

    (loss, member), grads = sm.value_and_grad(loss_fn)(member)
    changes = jax.tree.map(lambda grad: -0.1 * grad, grads)
    return loss, eqx.apply_updates(member.replace(key=following), changes)


def predict(member: Member, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean of all members, and how far they are apart."""
    own = member(x)
    mean = jax.lax.pmean(own, "members")
    return mean, jnp.sqrt(jax.lax.pmean((own - mean) ** 2, "members"))


LANES: dict[str, Any] = {"axis_name": "members", "state_in_axes": ...}
train = sm.pmap2(step, in_axes=None, donate_argnums=0, **LANES)
ask = sm.pmap2(predict, in_axes=None, out_axes=None, **LANES)
train_lanes = sm.vmap2(step, in_axes=None, **LANES)


def train_shard(members: Member, x: jax.Array, y: jax.Array) -> Any:
    """Several members, those of one device of a mesh."""
    return train_lanes(members, x, y)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), jax.device_count())
    members = sm.vmap2(Member, state_out_axes=...)(keys)
    x = jnp.linspace(-1, 1, 32)[:, None]
    y = jnp.sin(3 * x)

    specs: dict[str, Any] = {"in_specs": (None, P(), P()), "out_specs": P("devices")}
    assert_equivalent(train_shard, (members, x, y), meshes=[{"devices": 4}], steps=2, **specs)
    loss, _ = train(*train.place(members, x, y))
    assert jnp.allclose(loss, train_lanes(members, x, y)[0], rtol=1e-5)
    print("pmap2, vmap2 and vmap2 on a mesh agree")

    members, x, y = train.place(members, x, y)
    print(assert_budget(train, members, x, y, collectives=0, moved=0))
    assert_budget(ask, members, x, collectives={"psum": 2})
    losses = []
    for _ in range(200):
        loss, members = train(members, x, y)
        losses.append(loss.mean())
        losses[-8:][0].block_until_ready()  # at most eight steps ahead of the devices
    near, far = (ask(members, jnp.full((1, 1), place))[1].item() for place in (0.5, 3.0))
    print(f"members are apart by {near:.3f} where there are data, and by {far:.3f} far from them")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
