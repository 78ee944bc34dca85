"""Loops, a branch, and a rule of its own: layers in a scan that are computed again for the gradient."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16")
LAYERS, WIDTH = 3, 4


class Net(sm.Module):
    layers: sm.ParamState
    rng: sm.RandomState


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    """Half of what it gets, with a gradient that is centred over all rows."""
    return 0.5 * x


def halved_back(_: None, g: jax.Array) -> tuple[jax.Array]:
    return (0.5 * g - lax.pmean(g.mean(0), "data"),)
    # mistake: rule-of-a-shard (statistics of a shard)
    #     return (0.5 * g - g.mean(0),)


halved.defvjp(lambda x: (0.5 * x, None), halved_back)


def smoothed(x: jax.Array) -> jax.Array:
    """Each row with the one before it, around."""
    n = lax.axis_size("data")
    before = lax.ppermute(x[-1:], "data", [(i, (i + 1) % n) for i in range(n)])
    # mistake: row-of-the-shard-after (wrong ppermute neighbour)
    #     before = lax.ppermute(x[-1:], "data", [(i, (i - 1) % n) for i in range(n)])
    # mistake: last-row-of-the-shard (ppermute forgotten)
    #     before = x[-1:]
    return 0.5 * x + 0.5 * jnp.concatenate([before, x[:-1]])


def layer(x: jax.Array, layer_and_number: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    weights, number = layer_and_number
    h = jax.nn.silu(x @ weights)
    mean = lax.pmean(h.mean(0), "data")
    # mistake: mean-of-a-shard (statistics of a shard)
    #     mean = h.mean(0)
    # mistake: mean-of-a-shard-in-the-last-layer (statistics of a shard)
    #     mean = jnp.where(number == LAYERS - 1, h.mean(0), lax.pmean(h.mean(0), "data"))
    h = h - mean
    # mistake: index-of-the-shard-added (count of the mesh)
    #     h = h - mean + 0.1 * lax.axis_index("data")
    # mistake: softmax-of-the-rows (statistics of a shard)
    #     h = (h - mean) * jax.nn.softmax(h, axis=0) ** (lax.axis_size("data") > 1)
    return x + halved(h) * (1 + number / LAYERS).astype(x.dtype), None


def dropped(rng: sm.RandomState, x: jax.Array) -> tuple[jax.Array, sm.RandomState]:
    keys, rng = rng.rows(len(x), "data")
    # mistake: noise-alike (shared key)
    #     keys, rng = rng.rows(len(x))
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
    return jnp.where(keep, x / 0.8, 0), rng


def shortened(x: jax.Array) -> Any:
    """Divided by the largest size of all, if that is more than one, in a branch."""
    largest = lax.pmax(lax.stop_gradient(jnp.abs(x)).max(), "data")
    # mistake: largest-of-a-shard (dropped pmax)
    #     largest = lax.stop_gradient(jnp.abs(x)).max()
    return lax.cond(largest > 1, lambda x: x / largest.astype(x.dtype), lambda x: x, x)
    # mistake: divided-by-the-rows (count of a shard)
    #     return lax.cond(largest > 1, lambda x: x / len(x), lambda x: x, x)


def decayed(x: jax.Array) -> Any:
    """The sum of all parts, which go round in a loop."""
    n = lax.axis_size("data")

    def body(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, part = state
        part = lax.ppermute(part, "data", [(i, (i + 1) % n) for i in range(n)])
        return total + part.sum(0), part
        # mistake: the-own-part-each-round (stale value)
        #     return total + x.sum(0), part

    return lax.fori_loop(0, n, body, (0 * x.sum(0), x))[0]


def loss(net: Net, x: jax.Array) -> Any:
    x, rng = dropped(net.rng, smoothed(x))
    numbers = jnp.arange(LAYERS)
    x, _ = lax.scan(jax.checkpoint(layer), x, (net.layers.value, numbers))
    x = shortened(x)
    return (x**2).mean() + 1e-2 * (lax.pmean(decayed(x), "data") ** 2).sum(), net.replace(rng=rng)


def step(net: Net, x: jax.Array) -> tuple[jax.Array, Net]:
    (value, net), grads = sm.value_and_grad(loss, axis_name="data")(net, x)
    return value, net.replace(layers=net.layers.value - 0.1 * grads.layers.value)


def case(dtype: str) -> Case:
    net = Net(
        sm.ParamState(normal(dtype, LAYERS, WIDTH, WIDTH) / 2),
        sm.RandomState(jax.random.key(0)),
    )
    return Case(
        step,
        (net, normal(dtype, 16, WIDTH, seed=1)),
        mesh={"data": 4},
        in_specs=(None, P("data")),
        out_specs=(P(), P()),
    )
