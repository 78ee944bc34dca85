"""Parameters split over the data axis, gathered for use; clipping, weight decay and an EMA by hand."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
WIDTH = 8


def shards() -> int:
    return int(lax.axis_size("data"))


def here(part: jax.Array) -> jax.Array:
    """The first row of this shard's part."""
    return lax.axis_index("data") * len(part)


class Params(NamedTuple):
    """The matrices are split, the bias is not."""

    up: jax.Array
    down: jax.Array
    bias: jax.Array


class Net(sm.Module):
    up: sm.ParamState
    down: sm.ParamState
    bias: sm.ParamState
    ema: sm.State
    norm: sm.State
    steps: sm.State


def make_net(dtype: str) -> Net:
    up, down = normal(dtype, WIDTH, 8, seed=1), normal(dtype, 8, WIDTH, seed=2)
    return Net(
        up=sm.ParamState(up, spec=P("data")),
        down=sm.ParamState(down, spec=P("data")),
        bias=sm.ParamState(normal(dtype, 8, seed=3)),
        ema=sm.State((up, down), spec=P("data")),
        norm=sm.State(jnp.zeros((), dtype)),
        steps=sm.State(0),
    )


def gathered(part: jax.Array) -> jax.Array:
    whole: jax.Array = lax.all_gather(part, "data", tiled=True)
    # mistake: gathered-in-another-order (wrong order of parts)
    #     whole = jnp.swapaxes(lax.all_gather(part, "data"), 0, 1).reshape(-1, part.shape[1])
    return whole
    # mistake: gradient-of-the-own-part-only (gradient not reduced)
    #     return lax.dynamic_update_slice(lax.stop_gradient(whole), part, (here(part), 0))


def onward() -> list[tuple[int, int]]:
    return [(i, (i + 1) % shards()) for i in range(shards())]


def loss_of(params: Params, x: jax.Array, y: jax.Array) -> Any:
    """Of this shard's rows."""
    hidden = jnp.tanh(x @ gathered(params.up) + params.bias)
    out = hidden @ gathered(params.down)
    return ((out - y) ** 2).mean()
    # mistake: loss-reduced-too (gradient reduced twice)
    #     return lax.psum(((out - y) ** 2).mean(), "data")


def gradients(params: Params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Params]:
    """The transpose of a gather sums over shards and keeps the own part; the bias is summed by the check."""
    n = lax.axis_size("data")
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    up, down, bias = grads.up / n, grads.down / n, grads.bias / n
    # mistake: up-not-averaged (psum for pmean)
    #     up, down, bias = grads.up, grads.down / n, grads.bias / n
    # mistake: bias-summed-again (gradient reduced twice)
    #     up, down, bias = grads.up / n, grads.down / n, lax.psum(grads.bias, "data") / n
    # mistake: parts-of-down-mixed (gradient reduced twice)
    #     up, down, bias = grads.up / n, lax.psum(grads.down, "data") / n, grads.bias / n
    # mistake: bias-not-averaged (psum for pmean)
    #     up, down, bias = grads.up / n, grads.down / n, grads.bias
    return lax.pmean(loss, "data"), Params(up, down, bias)
    # mistake: loss-summed (psum for pmean)
    #     return lax.psum(loss, "data"), Params(up, down, bias)


def norm_of(grads: Params) -> jax.Array:
    parts = (grads.up**2).sum() + (grads.down**2).sum()
    whole = (grads.bias**2).sum()
    return jnp.sqrt(lax.psum(parts, "data") + whole)
    # mistake: norm-of-a-mean (pmean for psum)
    #     return jnp.sqrt(lax.pmean(parts, "data") + whole)
    # mistake: bias-in-every-part (doubled psum)
    #     return jnp.sqrt(lax.psum(parts + whole, "data"))
    # mistake: mean-of-norms (mean of norms)
    #     return lax.psum(jnp.sqrt(parts), "data") + jnp.sqrt(whole)


def step(net: Net, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Net]:
    params = Params(net.up.value, net.down.value, net.bias.value)
    loss, grads = gradients(params, x, y)
    norm = norm_of(grads)
    scale = jnp.minimum(1, 1 / norm)
    # mistake: clipped-by-the-own-norm (local norm in clipping)
    #     scale = jnp.minimum(1, 1 / jnp.sqrt((grads.up**2).sum() + (grads.down**2).sum()))
    decay = 0.01
    # mistake: decay-on-every-shard (small factor)
    #     decay = 0.01 * lax.axis_size("data")
    new = Params(*(p - 0.3 * (scale * g + decay * p) for p, g in zip(params, grads, strict=True)))
    t = net.steps.value + 1
    keep = jnp.minimum(0.99, t / (t + 9)).astype(norm.dtype)
    # mistake: ema-by-its-rows (count of a shard)
    #     keep = jnp.minimum(0.99, t / (t + len(x))).astype(norm.dtype)
    ema = tuple(keep * e + (1 - keep) * p for e, p in zip(net.ema.value, new[:2], strict=True))
    # mistake: ema-of-the-first-part (wrong part)
    #     ema = tuple(keep * e + (1 - keep) * gathered(p)[: len(p)] for e, p in zip(net.ema.value, new[:2]))
    # mistake: ema-of-the-neighbour (wrong ppermute neighbour)
    #     ema = tuple(lax.ppermute(e, "data", onward()) for e in new[:2])
    net = net.replace(up=new.up, down=new.down, bias=new.bias)
    return loss, net.replace(ema=ema, norm=norm, steps=t)


def case(dtype: str) -> Case:
    return Case(
        step,
        (make_net(dtype), normal(dtype, 16, WIDTH, seed=4), normal(dtype, 16, WIDTH, seed=5)),
        mesh={"data": 4},
        in_specs=(None, P("data"), P("data")),
        out_specs=P(),
    )
