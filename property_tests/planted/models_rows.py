"""A small step on rows, for many examples: shares of a total, noise, positions, neighbours, what was seen."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16")
ROWS, WIDTH = 16, 3


class Seen(sm.Module):
    total: sm.State
    key: Any


def shares(x: jax.Array) -> Any:
    total = 1 + lax.psum(jnp.abs(x).sum(), "data")
    # mistake: total-of-a-shard (dropped psum)
    #     total = 1 + jnp.abs(x).sum()
    # mistake: total-reduced-twice (doubled psum)
    #     total = 1 + lax.psum(lax.psum(jnp.abs(x).sum(), "data"), "data")
    # mistake: total-averaged (pmean for psum)
    #     total = 1 + lax.pmean(jnp.abs(x).sum(), "data")
    return x / total


def positioned(x: jax.Array) -> jax.Array:
    row = lax.axis_index("data") * len(x) + jnp.arange(len(x))
    # mistake: row-of-the-shard (row index not offset)
    #     row = jnp.arange(len(x))
    return x + jnp.sin(row)[:, None].astype(x.dtype)


def noisy(key: jax.Array, x: jax.Array) -> jax.Array:
    """The noise of a row depends on its number only."""
    row = lax.axis_index("data") * len(x) + jnp.arange(len(x))
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(row)
    # mistake: noise-alike (shared key)
    #     keys = jax.random.split(key, len(x))
    return x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:], x.dtype))(keys)


def differences(x: jax.Array) -> jax.Array:
    """Each row less the one before it, around."""
    n = lax.axis_size("data")
    before = lax.ppermute(x[-1:], "data", [(i, (i + 1) % n) for i in range(n)])
    # mistake: before-by-two (wrong ppermute neighbour)
    #     before = lax.ppermute(x[-1:], "data", [(i, (i + 2) % n) for i in range(n)])
    return x - jnp.concatenate([before, x[:-1]])


def step(seen: Seen, x: jax.Array) -> tuple[dict[str, Any], Seen]:
    key, noise = jax.random.split(seen.key)
    out = {
        "shares": shares(x),
        "positioned": positioned(x),
        "noisy": noisy(noise, x),
        "differences": differences(x),
    }
    return out, seen.replace(total=seen.total.value + x.sum(), key=key)


def case(dtype: str) -> Case:
    seen = Seen(sm.State(jnp.zeros((), dtype), reduce="sum"), jax.random.key(0))
    return Case(
        step,
        (seen, normal(dtype, ROWS, WIDTH)),
        mesh={"data": 4},
        in_specs=(None, P("data")),
        out_specs=(P("data"), P()),
        # mistake: rows-of-the-first-shard (wrong spec)
        #     out_specs=(P(), P()),
        check_vma=False,
        gradients=True,
    )
