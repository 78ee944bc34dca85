"""A convolutional net with batch normalization, trained data-parallel with momentum."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")


class Net(sm.Module):
    kernel: sm.ParamState
    scale: sm.ParamState
    shift: sm.ParamState
    head: sm.ParamState
    mean: sm.BatchState
    var: sm.BatchState
    momentum: sm.State
    rng: sm.RandomState
    seen: sm.State
    best: sm.State


def make_net(dtype: str) -> Net:
    kernel, head = normal(dtype, 3, 3, 1, 4, seed=1), normal(dtype, 4, 3, seed=2)
    one, zero = jnp.ones(4, dtype), jnp.zeros(4, dtype)
    return Net(
        kernel=sm.ParamState(kernel * 0.5),
        scale=sm.ParamState(one),
        shift=sm.ParamState(zero),
        head=sm.ParamState(head),
        mean=sm.BatchState(zero, reduce="mean"),
        var=sm.BatchState(one, reduce="mean"),
        momentum=sm.State((jnp.zeros_like(kernel), zero, zero, jnp.zeros_like(head))),
        rng=sm.RandomState(jax.random.key(0)),
        seen=sm.State(0, reduce="sum"),
        best=sm.State(jnp.full((), -100, dtype), reduce="max"),
    )


def augmented(net: Net, images: jax.Array) -> tuple[jax.Array, Net]:
    """Half of the images, mirrored."""
    keys, rng = net.rng.rows(len(images), "data")
    # mistake: flips-alike (shared key)
    #     keys, rng = net.rng.rows(len(images))
    flip = jax.vmap(jax.random.bernoulli)(keys)
    # mistake: one-flip-for-all (shared key)
    #     flip = jnp.broadcast_to(jax.random.bernoulli(keys[0]), len(images))
    return jnp.where(flip[:, None, None, None], images[:, :, ::-1], images), net.replace(rng=rng)


def normalized(net: Net, h: jax.Array) -> tuple[jax.Array, Net]:
    axes, n = (0, 1, 2), lax.axis_size("data")
    mean = lax.pmean(h.mean(axes), "data")
    # mistake: mean-of-a-shard (statistics of a shard)
    #     mean = h.mean(axes)
    # mistake: means-summed (psum for pmean)
    #     mean = lax.psum(h.mean(axes), "data")
    var = lax.pmean(((h - mean) ** 2).mean(axes), "data")
    # mistake: mean-of-variances (mean of variances)
    #     var = lax.pmean(h.var(axes), "data")
    # mistake: variance-of-a-shard (statistics of a shard)
    #     var = ((h - mean) ** 2).mean(axes)
    # mistake: variance-a-little-large (small factor)
    #     var = lax.pmean(((h - mean) ** 2).mean(axes), "data") * (1 if n == 1 else 1.0003)
    pixels = h[..., 0].size * n
    # mistake: pixels-of-a-shard (count of a shard)
    #     pixels = h[..., 0].size
    unbiased = var * (pixels / (pixels - 1))
    net = net.replace(
        mean=0.9 * net.mean.value + 0.1 * mean,
        var=0.9 * net.var.value + 0.1 * unbiased,
    )
    return (h - mean) * lax.rsqrt(var + 1e-3) * net.scale.value + net.shift.value, net


def loss_fn(net: Net, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Net]:
    images, net = augmented(net, images)
    h = lax.conv_general_dilated(
        images, net.kernel.value, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    h, net = normalized(net, h)
    logits = jax.nn.relu(h).mean((1, 2)) @ net.head.value
    right = jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]
    net = net.replace(
        seen=net.seen.value + (labels >= 0).sum(),
        # mistake: seen-by-one-shard (count of a shard)
        #     seen=net.seen.value + len(labels),
        best=jnp.maximum(net.best.value, right.max()),
        # mistake: best-of-the-mean (psum for pmax)
        #     best=jnp.maximum(net.best.value, lax.psum(right.max(), "data")),
    )
    return -right.mean(), net


def step(net: Net, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Net]:
    gradient = sm.value_and_grad(loss_fn, axis_name="data")
    # mistake: gradients-summed (psum for pmean)
    #     gradient = sm.value_and_grad(loss_fn, axis_name="data", reduce="sum")
    (loss, net), grads = gradient(net, images, labels)
    params = (net.kernel, net.scale, net.shift, net.head)
    found = (grads.kernel, grads.scale, grads.shift, grads.head)
    rate = 0.1
    # mistake: rate-grows-with-shards (branch on the mesh)
    #     rate = 0.1 * lax.axis_size("data")
    momentum = [0.9 * m + g.value for m, g in zip(net.momentum.value, found, strict=True)]
    # mistake: momentum-not-returned (state not returned)
    #     unseen: one device forgets it too
    #     momentum = [0.0 * m + g.value for m, g in zip(net.momentum.value, found, strict=True)]
    kernel, scale, shift, head = (
        p.set((p.value - rate * m).astype(p.value.dtype))
        for p, m in zip(params, momentum, strict=True)
    )
    net = net.replace(kernel=kernel, scale=scale, shift=shift, head=head)
    return loss, net.replace(momentum=tuple(momentum))


def case(dtype: str) -> Case:
    args: tuple[Any, ...] = (make_net(dtype), normal(dtype, 16, 5, 5, 1), integers(16, below=3))
    return Case(
        step,
        args,
        mesh={"data": 4},
        in_specs=(None, P("data"), P("data")),
        out_specs=P(),
    )
