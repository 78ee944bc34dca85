"""A VQ-VAE: nearest codes, straight-through gradients, running counts and sums, dead codes revived."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
ROWS, INPUTS, WIDTH, CODES = 24, 5, 3, 8
KEEP, DEAD, COMMITMENT = 0.8, 0.4, 0.25


class Params(NamedTuple):
    encoder: jax.Array
    decoder: jax.Array
    bias: jax.Array


class Coder(sm.Module):
    params: sm.ParamState
    codes: sm.State
    counts: sm.State
    sums: sm.State
    mean: sm.State
    chosen: sm.State
    farthest: sm.State
    key: Any


def make_coder(dtype: str) -> Coder:
    """The last two codes are far from all rows, and nearly dead."""
    codes = normal(dtype, CODES, WIDTH, seed=1).at[-2:].add(4)
    counts = jnp.full(CODES, 3, dtype).at[-2:].set(0.45)
    encoder, decoder = normal(dtype, INPUTS, WIDTH, seed=2), normal(dtype, WIDTH, INPUTS, seed=3)
    return Coder(
        params=sm.ParamState(Params(encoder / 2, decoder / 2, jnp.zeros(INPUTS, dtype))),
        codes=sm.State(codes),
        counts=sm.State(counts),
        sums=sm.State(codes * counts[:, None]),
        mean=sm.State(jnp.zeros(INPUTS, dtype)),
        chosen=sm.State(jnp.zeros(CODES, jnp.int32), reduce="sum"),
        farthest=sm.State(jnp.zeros((), dtype), reduce="max"),
        key=jax.random.key(0),
    )


def noisy(key: jax.Array, x: jax.Array) -> jax.Array:
    """The noise of a row depends on its number only."""
    row = lax.axis_index("data") * len(x) + jnp.arange(len(x))
    # mistake: noise-by-the-row-of-a-shard (row index not offset)
    #     row = jnp.arange(len(x))
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(row)
    # mistake: noise-alike (shared key)
    #     keys = jax.random.split(key, len(x))
    return x + 0.1 * jax.vmap(lambda one: jax.random.normal(one, x.shape[1:], x.dtype))(keys)


def distances(codes: jax.Array, z: jax.Array) -> jax.Array:
    return ((z[:, None] - codes) ** 2).sum(-1)


def loss_of(
    params: Params, codes: jax.Array, x: jax.Array, used: jax.Array, total: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The part of this shard's rows in the mean over all rows that are used."""
    z = jnp.tanh(x @ params.encoder) * 2
    index = distances(codes, z).argmin(1)
    nearest = lax.stop_gradient(codes[index])
    straight = z + lax.stop_gradient(nearest - z)
    rebuilt = ((straight @ params.decoder + params.bias - x) ** 2).mean(1)
    committed = ((z - nearest) ** 2).mean(1)
    # mistake: commitment-by-the-shards (small factor)
    #     committed = ((z - nearest) ** 2).mean(1) * (1 + 0.01 * (lax.axis_size("data") - 1))
    # mistake: commitment-without-a-stop (wrong formula)
    #     unseen: the codes have no gradient on one device either
    #     committed = ((z - codes[index]) ** 2).mean(1)
    each = jnp.where(used, rebuilt + COMMITMENT * committed, 0)
    return each.sum() / total, (z, index)
    # mistake: loss-summed-inside (gradient reduced twice)
    #     return lax.psum(each.sum(), "data") / total, (z, index)
    # mistake: mean-of-own-rows (mean of means)
    #     return each.sum() / used.sum() / lax.axis_size("data"), (z, index)


def revived(
    key: jax.Array, z: jax.Array, counts: jax.Array, sums: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rows at random in place of the codes that hardly any row was near to."""
    dead = counts < DEAD
    # mistake: dead-on-every-shard (count of the mesh)
    #     dead = counts < DEAD * lax.axis_size("data")
    everyone = lax.all_gather(z, "data", tiled=True)
    # mistake: revived-from-own-rows (all_gather forgotten)
    #     everyone = jnp.tile(z, (lax.axis_size("data"), 1))
    # mistake: revived-from-another-order (wrong order of parts)
    #     everyone = jnp.swapaxes(lax.all_gather(z, "data"), 0, 1).reshape(-1, z.shape[1])
    pick = jax.random.randint(key, (CODES,), 0, len(everyone))
    # mistake: picked-among-the-first (count of a shard)
    #     pick = jax.random.randint(key, (CODES,), 0, len(z))
    return jnp.where(dead, 1, counts), jnp.where(dead[:, None], everyone[pick], sums)


def learned(coder: Coder, key: jax.Array, z: jax.Array, assigned: jax.Array) -> Coder:
    """The codes become the running means of the rows that they are nearest to."""
    found = lax.psum(assigned.sum(0), "data")
    # mistake: counts-of-a-shard (counts not reduced)
    #     found = assigned.sum(0)
    # mistake: counts-averaged (pmean for psum)
    #     found = lax.pmean(assigned.sum(0), "data")
    near = lax.psum(assigned.T @ z, "data")
    # mistake: sums-of-a-shard (dropped psum)
    #     near = assigned.T @ z
    # mistake: sums-reduced-twice (doubled psum)
    #     near = lax.psum(lax.psum(assigned.T @ z, "data"), "data")
    keep = KEEP
    # mistake: kept-for-every-shard (small factor)
    #     keep = KEEP ** lax.axis_size("data")
    counts = keep * coder.counts.value + (1 - keep) * found
    sums = keep * coder.sums.value + (1 - keep) * near
    # mistake: old-sums-of-every-shard (doubled psum)
    #     sums = lax.psum(keep * coder.sums.value + (1 - keep) * assigned.T @ z, "data")
    counts, sums = revived(key, z, counts, sums)
    total = counts.sum()
    # mistake: total-of-all-shards (doubled psum)
    #     total = lax.psum(counts.sum(), "data")
    smooth = (counts + 0.1) / (total + 0.1 * CODES) * total
    codes = sums / smooth[:, None]
    # mistake: codes-of-the-last-sums (stale value)
    #     unseen: one device takes the old sums too
    #     codes = coder.sums.value / smooth[:, None]
    return coder.replace(codes=codes, counts=counts, sums=sums)


def perplexity(assigned: jax.Array) -> jax.Array:
    """How many codes the rows use, as an even use of so many would have it."""
    share = lax.psum(assigned.sum(0), "data") / lax.psum(assigned.sum(), "data")
    # mistake: shares-of-a-shard (statistics of a shard)
    #     share = assigned.sum(0) / assigned.sum()
    # mistake: mean-of-shares (mean of means)
    #     share = lax.pmean(assigned.sum(0) / assigned.sum(), "data")
    entropy = -(share * jnp.log(share + 0.01)).sum()
    return jnp.exp(entropy)


def step(coder: Coder, x: jax.Array) -> tuple[Coder, jax.Array, dict[str, jax.Array]]:
    key, noise, revival = jax.random.split(coder.key, 3)
    # mistake: keys-of-each-shard (key of a shard)
    #     key, noise, revival = jax.random.split(jax.random.fold_in(coder.key, lax.axis_index("data")), 3)
    used = x[:, 0] > -1
    mean = 0.9 * coder.mean.value + 0.1 * lax.pmean(x.mean(0), "data")
    # mistake: mean-of-a-shard (statistics of a shard)
    #     mean = 0.9 * coder.mean.value + 0.1 * x.mean(0)
    x = noisy(noise, x - mean)
    total = lax.psum(used.sum(), "data").astype(x.dtype)
    # mistake: used-on-a-shard (count of a shard)
    #     total = used.sum().astype(x.dtype)
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    params, codes = coder.params.value, coder.codes.value
    (loss, (z, index)), grads = gradient(params, codes, x, used, total)
    grads = lax.psum(grads, "data")
    # mistake: gradients-of-a-shard (gradient not reduced)
    #     grads = jax.tree.map(lambda g: g * 1, grads)
    # mistake: gradients-averaged (pmean for psum)
    #     grads = lax.pmean(grads, "data")
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assigned = jax.nn.one_hot(index, CODES, dtype=x.dtype) * used[:, None]
    far = distances(codes, z).min(1).max()
    coder = learned(coder, revival, z, assigned)
    # mistake: revival-by-each-shard (key of a shard)
    #     coder = learned(coder, jax.random.fold_in(revival, lax.axis_index("data")), z, assigned)
    coder = coder.replace(
        params=new,
        key=key,
        mean=mean,
        chosen=coder.chosen.value + assigned.sum(0).astype("int32"),
        farthest=jnp.maximum(coder.farthest.value, far),
        # mistake: farthest-of-the-mean (pmean for pmax)
        #     farthest=jnp.maximum(coder.farthest.value, lax.pmean(far, "data")),
    )
    numbers = {"loss": lax.psum(loss, "data"), "perplexity": perplexity(assigned)}
    # mistake: losses-averaged (pmean for psum)
    #     numbers = {"loss": lax.pmean(loss, "data"), "perplexity": perplexity(assigned)}
    return coder, index, numbers


def case(dtype: str) -> Case:
    return Case(
        step,
        (make_coder(dtype), normal(dtype, ROWS, INPUTS, seed=4)),
        mesh={"data": 4},
        in_specs=(None, P("data")),
        out_specs=(P(), P("data"), P()),
        # mistake: index-of-the-first-shard (wrong spec)
        #     out_specs=(P(), P(), P()),
        check_vma=False,
        steps=3,
    )
