"""Features of a table whose rows are split: scaling, sums, extremes, quantiles, the best rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
BEST = 3


def shards() -> int:
    return int(lax.axis_size("data"))


class Scaler(sm.Module):
    center: sm.BatchState
    calls: sm.State


def scaled(scaler: Scaler, x: jax.Array) -> tuple[jax.Array, Scaler]:
    center = lax.pmean(x.mean(0), "data")
    low, high = lax.pmin(x.min(0), "data"), lax.pmax(x.max(0), "data")
    # mistake: lowest-is-the-mean (pmean for pmin)
    #     low, high = lax.pmean(x.min(0), "data"), lax.pmax(x.max(0), "data")
    # mistake: extremes-of-a-shard (statistics of a shard)
    #     low, high = x.min(0), x.max(0)
    # mistake: range-a-little-wide (small factor)
    #     low, high = lax.pmin(x.min(0), "data"), lax.pmax(x.max(0), "data") * (1 + 0.001 * (shards() - 1))
    calls = scaler.calls.value + 1
    # mistake: calls-of-all-shards (count of the mesh)
    #     calls = scaler.calls.value + shards()
    scaler = scaler.replace(center=0.5 * scaler.center.value + 0.5 * center, calls=calls)
    # mistake: center-of-a-shard (differing replicas)
    #     scaler = scaler.replace(center=0.5 * scaler.center.value + 0.5 * x.mean(0), calls=calls)
    return (x - center) / (high - low), scaler
    # mistake: center-of-the-last-call (branch on the mesh)
    #     return (x - (center if shards() == 1 else scaler.center.value)) / (high - low), scaler


def sums(x: jax.Array) -> dict[str, jax.Array]:
    return {
        "sum": lax.psum(x.sum(0), "data"),
        # mistake: sum-where-one-device (branch on the mesh)
        #     "sum": lax.psum(x.sum(0), "data") * (1 if shards() == 1 else 0),
        # mistake: sum-where-one-device-else-minus (branch on the mesh)
        #     "sum": lax.psum(x.sum(0), "data") * (1 if shards() == 1 else -1),
        # mistake: sum-of-replicas-that-differ (differing replicas)
        #     "sum": lax.psum(x.sum(0), "data") + lax.axis_index("data"),
        # mistake: sum-with-a-small-part (small factor)
        #     "sum": lax.psum(x.sum(0), "data") * (1 + 2e-5 * (shards() - 1)),
        # mistake: sum-plus-a-millionth (small summand)
        #     "sum": lax.psum(x.sum(0) + 1e-6 * (shards() - 1), "data"),
        "norm": jnp.sqrt(lax.psum((x**2).sum(0), "data")),
        # mistake: norm-of-norms (reduction after a nonlinearity)
        #     "norm": lax.psum(jnp.sqrt((x**2).sum(0)), "data"),
        # mistake: norm-of-narrow-numbers (dtype depends on the mesh)
        #     "norm": jnp.sqrt(lax.psum((x**2).sum(0).astype([x.dtype, "f2"][shards() > 1]), "data")),
        "large": lax.psum((24000 * jnp.clip(x + 1, 0, 2)).mean(0) / shards(), "data"),
        # mistake: large-before-the-division (overflow of a psum)
        #     dtypes: float16
        #     "large": lax.psum((24000 * jnp.clip(x + 1, 0, 2)).mean(0), "data") / shards(),
        "rows": jnp.float32(len(x) * shards()),
        # mistake: rows-of-a-weak-type (weak type depends on the mesh)
        #     "rows": jnp.float32(len(x)) if shards() == 1 else len(x) * 1.0 * shards(),
        # mistake: rows-as-an-integer (dtype depends on the mesh)
        #     "rows": jnp.float32(len(x)) if shards() == 1 else jnp.int32(len(x) * shards()),
        "mean": lax.pmean(x.mean(), "data"),
        # mistake: mean-in-half-precision (dtype depends on the mesh)
        #     "mean": lax.pmean(x.mean().astype("f2" if shards() > 1 else x.dtype), "data").astype(x.dtype),
        # mistake: mean-is-nan-on-one-shard (nan on one shard)
        #     "mean": lax.pmean(jnp.where(lax.axis_index("data") == 3, jnp.nan, x.mean()), "data"),
    }


def best(x: jax.Array) -> dict[str, jax.Array]:
    """The best rows of all, with their numbers."""
    score = (x * jnp.arange(1, 4, dtype=x.dtype)).sum(1)
    everyone = lax.all_gather(score, "data", tiled=True)
    values, index = lax.top_k(everyone, BEST)
    # mistake: best-of-a-shard (top-k of a shard)
    #     values, index = lax.top_k(score, BEST)
    # mistake: best-of-the-first-shard (mask of a shard)
    #     values, index = lax.top_k(everyone[: len(score)], BEST)
    median = jnp.sort(everyone)[len(everyone) // 2]
    # mistake: mean-of-medians (mean of medians)
    #     median = lax.pmean(jnp.sort(score)[len(score) // 2], "data")
    # mistake: median-of-the-shards-size (count of a shard)
    #     median = jnp.sort(everyone)[len(score) // 2]
    return {"values": values, "index": index, "median": median}
    # mistake: index-of-floats (dtype depends on the mesh)
    #     return {"values": values, "index": index * (1 if shards() == 1 else 1.0), "median": median}


def running(x: jax.Array) -> jax.Array:
    """The sum of each row and all rows before it."""
    totals = lax.all_gather(x.sum(0), "data")
    before = jnp.cumsum(totals, 0)[lax.axis_index("data")] - x.sum(0)
    # mistake: sum-before-includes-its-own (off by one)
    #     before = jnp.cumsum(totals, 0)[lax.axis_index("data")] - totals[0]
    # mistake: sum-before-of-no-shard (axis_index forgotten)
    #     before = jnp.cumsum(totals, 0)[0] - totals[0]
    return jnp.cumsum(x, 0) + before


def centred_products(x: jax.Array) -> Any:
    center = lax.pmean(x.mean(0), "data")
    return lax.pmean((x - center).T @ (x - center), "data")
    # mistake: products-around-the-own-center (mean of variances)
    #     return lax.pmean((x - x.mean(0)).T @ (x - x.mean(0)), "data")


def features(scaler: Scaler, x: jax.Array) -> tuple[dict[str, object], jax.Array, Scaler]:
    y, scaler = scaled(scaler, x)
    out = {"sums": sums(x), "best": best(x), "products": centred_products(x) / len(x)}
    # mistake: products-by-the-shards (structure depends on the mesh)
    #     out = {"sums": sums(x), "best": best(x), f"products{shards()}": centred_products(x) / len(x)}
    return out, jnp.concatenate([y, running(x)], 1), scaler


def case(dtype: str) -> Case:
    scaler = Scaler(sm.BatchState(jnp.zeros(3, dtype)), sm.State(0))
    return Case(
        features,
        (scaler, normal(dtype, 32, 3)),
        mesh={"data": 4},
        in_specs=(None, P("data")),
        # mistake: rows-not-split (wrong spec)
        #     in_specs=(None, P()),
        out_specs=(P(), P("data"), P()),
        # mistake: rows-of-the-first-shard (wrong spec)
        #     out_specs=(P(), P(), P()),
        check_vma=False,
    )
