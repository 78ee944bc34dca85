"""A recommender: tables split by rows over one axis, batches over the other, sampled negatives, Adagrad."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
USERS, ITEMS, BATCH, WIDTH = 12, 20, 24, 4
NEGATIVES, BEST, KEEP, RATE, LIMIT = 6, 4, 0.75, 0.1, 0.1


class Trained(NamedTuple):
    """The rows of a batch and of its negatives, and what makes queries of users."""

    users: jax.Array
    items: jax.Array
    negatives: jax.Array
    dense: jax.Array


class Tables(NamedTuple):
    users: jax.Array
    items: jax.Array


Batch = dict[str, jax.Array]


class Recommender(sm.Module):
    tables: sm.ParamState
    slots: sm.State
    dense: sm.ParamState
    counts: sm.State
    clicks: sm.State
    rate: sm.State
    answered: sm.State
    longest: sm.State
    key: Any


def make_recommender(dtype: str) -> Recommender:
    """Few items are clicked often, and those by far: the best of them do not hang on rounding."""
    tables = Tables(normal(dtype, USERS, WIDTH, seed=1), normal(dtype, ITEMS, WIDTH, seed=2) / 4)
    often = 40 * 0.5 ** np.random.default_rng(41).permutation(ITEMS) + 0.5
    return Recommender(
        tables=sm.ParamState(tables, spec=P("vocab")),
        slots=sm.State(jax.tree.map(lambda x: jnp.full_like(x, 0.01), tables), spec=P("vocab")),
        dense=sm.ParamState(normal(dtype, WIDTH, WIDTH, seed=4) / 2),
        counts=sm.State(jnp.asarray(often, dtype), spec=P("vocab")),
        clicks=sm.State(integers(ITEMS, below=5, seed=15), spec=P("vocab")),
        rate=sm.State(jnp.full((), 0.5, dtype)),
        answered=sm.State(0, reduce="sum"),
        # mistake: answered-by-a-shard (reduction forgotten)
        #     answered=sm.State(0),
        longest=sm.State(jnp.zeros((), dtype), reduce="max"),
        # mistake: longest-on-average (wrong reduction)
        #     longest=sm.State(jnp.zeros((), dtype), reduce="mean"),
        key=jax.random.key(0),
    )


def own_rows(index: jax.Array, rows: int) -> jax.Array:
    """Where in this shard's part of a table each row is: behind its end if it is on another shard."""
    local = index - lax.axis_index("vocab") * rows
    # mistake: rows-not-offset (row index not offset)
    #     local = index
    # mistake: rows-offset-by-the-data (wrong axis name)
    #     local = index - lax.axis_index("data") * rows
    return jnp.where((local >= 0) & (local < rows), local, rows)
    # mistake: rows-before-not-masked (wrong mask)
    #     return jnp.where(local < rows, local, rows)


def lookup(table: jax.Array, index: jax.Array) -> Any:
    found = table.at[own_rows(index, len(table))].get(mode="fill", fill_value=0)
    # mistake: last-row-for-the-others (wrong mask)
    #     found = table.at[own_rows(index, len(table))].get(mode="clip")
    return lax.psum(found, "vocab")
    # mistake: rows-of-own-shard (dropped psum)
    #     return found


def added(table: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
    """The sum of the rows with each number, for the numbers that this shard's part of the table has."""
    return jnp.zeros_like(table).at[own_rows(index, len(table))].add(rows, mode="drop")


def drawn(key: jax.Array, counts: jax.Array) -> jax.Array:
    """Items at random, popular ones more often: the same on all shards, so counts enter in float32."""
    everyone = lax.all_gather(counts.astype("float32"), "vocab", tiled=True)
    # mistake: negatives-from-own-items (all_gather forgotten)
    #     everyone = counts.astype("float32")
    edges = jnp.cumsum(everyone**0.75)
    return jnp.searchsorted(edges, jax.random.uniform(key, (NEGATIVES,)) * edges[-1])


def loss_of(trained: Trained, batch: Batch, offsets: jax.Array, total: jax.Array) -> jax.Array:
    """This shard's part in the loss: each clicked item against all of the batch and the negatives."""
    query = jnp.tanh(trained.users @ trained.dense)
    items = lax.all_gather(trained.items, "data", tiled=True)
    logits = query @ jnp.concatenate([items, trained.negatives]).T - offsets
    own = lax.axis_index("data") * len(query) + jnp.arange(len(query))
    # mistake: target-of-the-first-shard (row index not offset)
    #     own = jnp.arange(len(query))
    # mistake: target-offset-by-the-size (wrong offset)
    #     own = lax.axis_index("data") * lax.axis_size("data") + jnp.arange(len(query))
    each = jnp.take_along_axis(jax.nn.log_softmax(logits), own[:, None], 1)[:, 0]
    return -(each * batch["clicked"]).sum() / total
    # mistake: loss-summed-inside (gradient reduced twice)
    #     return lax.psum(-(each * batch["clicked"]).sum(), "data") / total
    # mistake: mean-of-own-clicks (mean of means)
    #     return -(each * batch["clicked"]).sum() / batch["clicked"].sum() / lax.axis_size("data")


def clipping(tables: Tables, dense: jax.Array) -> Any:
    """How much all gradients are shortened, so that together they are not longer than the limit."""
    squares = lax.psum((tables.users**2).sum() + (tables.items**2).sum(), "vocab")
    # mistake: norm-of-own-rows (local norm in clipping)
    #     squares = (tables.users**2).sum() + (tables.items**2).sum()
    # mistake: norm-over-the-data (wrong axis name)
    #     squares = lax.psum((tables.users**2).sum() + (tables.items**2).sum(), "data")
    norm = jnp.sqrt(squares + (dense**2).sum())
    # mistake: dense-norm-on-every-shard (doubled psum)
    #     norm = jnp.sqrt(squares + lax.psum((dense**2).sum(), "vocab"))
    return jnp.minimum(1, LIMIT / norm)


def recommended(query: jax.Array, items: jax.Array, counts: jax.Array) -> Any:
    """The best items of all shards for each query."""
    best, index = lax.top_k(query @ items.T + jnp.log(counts), BEST)
    # mistake: fewer-from-each-shard (count of the mesh)
    #     best, index = lax.top_k(query @ items.T + jnp.log(counts), BEST // lax.axis_size("vocab"))
    index = index + lax.axis_index("vocab") * len(items)
    # mistake: best-not-offset (row index not offset)
    #     index = index + 0
    # mistake: best-offset-by-the-best (wrong offset)
    #     index = index + lax.axis_index("vocab") * BEST
    best, index = lax.all_gather((best, index), "vocab", axis=1, tiled=True)
    # mistake: best-of-own-items (local argmax)
    #     best, index = best * 1, index
    return jnp.take_along_axis(index, lax.top_k(best, BEST)[1], 1)


def favourite(clicks: jax.Array) -> Any:
    """The item clicked most often; of several, that with the lowest number."""
    number = lax.axis_index("vocab") * len(clicks) + clicks.argmax()
    most = clicks.max() == lax.pmax(clicks.max(), "vocab")
    # mistake: most-clicked-of-own (local max)
    #     most = clicks.max() == clicks.max()
    return lax.pmin(jnp.where(most, number, ITEMS), "vocab")
    # mistake: last-of-several (tie-breaking)
    #     return lax.pmax(jnp.where(most, number, -1), "vocab")


def step(model: Recommender, batch: Batch) -> tuple[Recommender, jax.Array, dict[str, jax.Array]]:
    key, drawing = jax.random.split(model.key)
    tables, counts, dense = model.tables.value, model.counts.value, model.dense.value
    negatives = drawn(drawing, counts)
    # mistake: negatives-of-each-shard (key of a shard)
    #     negatives = drawn(jax.random.fold_in(drawing, lax.axis_index("data")), counts)
    compared = jnp.concatenate([lax.all_gather(batch["item"], "data", tiled=True), negatives])
    share = counts / lax.psum(counts.sum(), "vocab")
    # mistake: share-of-own-items (statistics of a shard)
    #     share = counts / counts.sum()
    total = lax.psum(batch["clicked"].sum(), "data")
    # mistake: clicks-of-own-batch (dropped psum)
    #     total = batch["clicked"].sum()
    users, items = lookup(tables.users, batch["user"]), lookup(tables.items, batch["item"])
    trained = Trained(users, items, lookup(tables.items, negatives), dense)
    offsets = jnp.log(lookup(share, compared))
    loss, rows = jax.value_and_grad(loss_of)(trained, batch, offsets, total)
    of_items = added(tables.items, batch["item"], rows.items)
    of_negatives = added(tables.items, negatives, rows.negatives)
    own = Tables(added(tables.users, batch["user"], rows.users), of_items + of_negatives)
    grads, dense_grad = lax.psum((own, rows.dense), "data")
    # mistake: rows-not-reduced (gradient not reduced)
    #     grads, dense_grad = own, lax.psum(rows.dense, "data")
    # mistake: gradients-averaged (pmean for psum)
    #     grads, dense_grad = lax.pmean((own, rows.dense), "data")
    scale = clipping(grads, dense_grad)
    grads = jax.tree.map(lambda g: scale * g, grads)
    slots = jax.tree.map(lambda s, g: s + g**2, model.slots.value, grads)
    # mistake: slots-of-each-batch (reduction after a nonlinearity)
    #     slots = jax.tree.map(lambda s, g: s + lax.psum((scale * g) ** 2, "data"), model.slots.value, own)
    found = lax.psum(added(counts, batch["item"], batch["clicked"]), "data")
    # mistake: found-in-own-batch (counts not reduced)
    #     found = added(counts, batch["item"], batch["clicked"])
    clicks = model.clicks.value + found.astype("int32")
    shown = len(batch["item"]) * lax.axis_size("data")
    # mistake: shown-on-a-shard (count of a shard)
    #     shown = len(batch["item"])
    model = model.replace(
        tables=jax.tree.map(lambda p, g, s: p - RATE * g / jnp.sqrt(s), tables, grads, slots),
        slots=slots,
        dense=dense - RATE * scale * dense_grad,
        counts=KEEP * counts + (1 - KEEP) * found,
        clicks=clicks,
        rate=KEEP * model.rate.value + (1 - KEEP) * total / shown,
        # mistake: rate-of-own-batch (statistics of a shard)
        #     rate=KEEP * model.rate.value + (1 - KEEP) * batch["clicked"].mean(),
        answered=model.answered.value + (own_rows(batch["item"], len(counts)) < len(counts)).sum(),
        longest=jnp.maximum(model.longest.value, jnp.sqrt((tables.items**2).sum(1).max())),
        key=key,
    )
    best = recommended(jnp.tanh(users @ dense), tables.items, counts)
    return model, best, {"loss": lax.psum(loss, "data"), "scale": scale, "most": favourite(clicks)}


def case(dtype: str) -> Case:
    clicked = (normal("float32", BATCH, seed=8) > -0.6).astype(dtype)
    user, item = integers(BATCH, below=USERS, seed=6), integers(BATCH, below=ITEMS, seed=7)
    return Case(
        step,
        (make_recommender(dtype), {"user": user, "item": item, "clicked": clicked}),
        mesh={"data": 4, "vocab": 2},
        in_specs=(None, P("data")),
        # mistake: batch-over-the-vocab (wrong spec)
        #     in_specs=(None, P("vocab")),
        out_specs=(P(), P("data"), P()),
        check_vma=False,
        steps=3,
    )
