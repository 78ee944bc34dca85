"""Mixed precision by hand: a dynamic loss scale, a check for overflow, master weights in float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")


def shards() -> int:
    return int(lax.axis_size("data"))


class Trainer(sm.Module):
    weights: sm.ParamState
    scale: sm.State
    good: sm.State
    skipped: sm.State
    largest: sm.State


def make_trainer(dtype: str) -> Trainer:
    """The scale is the largest that one row's gradients bear, but not two."""
    largest: Any = jnp.finfo
    scale = float(largest(dtype).max) / 64
    return Trainer(
        weights=sm.ParamState(normal("float32", 6, seed=1)),
        scale=sm.State(jnp.asarray(scale, "float32")),
        good=sm.State(0),
        skipped=sm.State(0),
        largest=sm.State(jnp.zeros((), "float32"), reduce="max"),
    )


def scaled_gradients(
    weights: jax.Array, scale: jax.Array, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """This shard's part of the mean, in the dtype of the rows; infinite where the scale is too large."""
    rows = len(x) * lax.axis_size("data")

    def scaled_loss(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = (jax.nn.softplus(x @ weights) - y * (x @ weights)).sum() / rows
        # mistake: mean-of-its-own-rows (count of a shard)
        #     loss = (jax.nn.softplus(x @ weights) - y * (x @ weights)).sum() / len(x)
        return loss * scale.astype(loss.dtype), loss

    grads, loss = jax.grad(scaled_loss, has_aux=True)(weights.astype(x.dtype))
    return loss, grads


def totalled(grads: jax.Array, scale: jax.Array) -> Any:
    """The gradients of all rows in float32."""
    own = grads.astype("float32") / scale
    return lax.psum(own, "data")
    # mistake: gradients-not-reduced (gradient not reduced)
    #     return own
    # mistake: gradients-averaged (pmean for psum)
    #     return lax.pmean(own, "data")
    # mistake: gradients-reduced-twice (gradient reduced twice)
    #     return lax.psum(lax.psum(own, "data"), "data")
    # mistake: averaged-before-unscaling (overflow of a psum)
    #     return lax.psum(grads * shards(), "data").astype("float32") / scale / shards()
    # mistake: scaled-by-a-little (small factor)
    #     return lax.psum(own, "data") * (1 if shards() == 1 else 1.0003)
    # mistake: reduced-if-many (branch on the mesh)
    #     return lax.psum(own, "data") * (1 if shards() == 1 else 0)


def step(trainer: Trainer, x: jax.Array, y: jax.Array) -> tuple[Trainer, dict[str, jax.Array]]:
    scale = trainer.scale.value
    loss, grads = scaled_gradients(trainer.weights.value, scale, x, y)
    own = jnp.isfinite(grads).all()
    finite = lax.pmin(own.astype("int32"), "data") > 0
    # mistake: finite-on-this-shard (local finite check)
    #     finite = own
    # mistake: finite-somewhere (wrong reduction)
    #     finite = lax.pmax(own.astype("int32"), "data") > 0
    mean = totalled(jnp.where(finite, grads, 0), scale)
    # mistake: own-gradients-kept (local finite check)
    #     mean = totalled(jnp.where(own, grads, 0), scale)
    weights = jnp.where(finite, trainer.weights.value - 0.02 * mean, trainer.weights.value)
    # mistake: weights-changed-all-the-same (mask forgotten)
    #     weights = trainer.weights.value - 0.02 * totalled(jnp.where(own, grads, 0), scale)
    good = jnp.where(finite, trainer.good.value + 1, 0)
    # mistake: good-counted-on-every-shard (count of the mesh)
    #     good = jnp.where(finite, trainer.good.value + lax.axis_size("data"), 0)
    grown = jnp.where(good >= 2, scale * 2, scale)
    trainer = trainer.replace(
        weights=weights,
        scale=jnp.where(finite, grown, scale / 2),
        # mistake: halved-by-every-shard (count of the mesh)
        #     scale=jnp.where(finite, grown, scale / 2 ** shards()),
        good=good,
        skipped=trainer.skipped.value + (1 - finite),
        # mistake: skips-summed (doubled psum)
        #     skipped=trainer.skipped.value + lax.psum(1 - finite, "data"),
        largest=jnp.maximum(trainer.largest.value, jnp.abs(mean).max()),
        # mistake: largest-before-the-mean (statistics of a shard)
        #     largest=jnp.maximum(trainer.largest.value, jnp.where(own, grads / scale, 0).max()),
    )
    out = {"loss": lax.psum(loss.astype("float32"), "data"), "finite": finite}
    # mistake: loss-of-the-first-shard (differing replicas)
    #     out = {"loss": loss.astype("float32"), "finite": finite}
    # mistake: loss-in-its-own-dtype (dtype depends on the mesh)
    #     out = {"loss": lax.psum(loss, "data").astype(["f4", "f2"][shards() > 1]), "finite": finite}
    return trainer, out


def case(dtype: str) -> Case:
    x = normal(dtype, 16, 6).at[5].multiply(1500)
    return Case(
        step,
        (make_trainer(dtype), x, (normal("float32", 16, seed=2) > 0).astype(dtype)),
        mesh={"data": 4},
        in_specs=(None, P("data"), P("data")),
        out_specs=P(),
        check_vma=False,
        steps=3,
    )
