"""A recommender learned online: ratings split over users and items, least squares, clusters of users.

Held out: the ranking of lines is not fitted on this model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
USERS, REAL, ITEMS, RANK, CLUSTERS, BINS, TOP, NEGATIVES = 16, 13, 12, 3, 4, 8, 3, 4
RIDGE, ALPHA, KEPT, WIDTH, RATE, MOMENTUM, ROUNDS, PATIENCE = 0.3, 0.5, 0.5, 0.25, 0.5, 0.5, 3, 2
BOTH, TABLE = ("users", "items"), P("users", "items")


class Ratings(NamedTuple):
    """What users gave to items, which of it is known or held out, and how often they looked."""

    value: Any
    known: Any
    held: Any
    views: Any


class Recommender(sm.Module):
    users: sm.ParamState
    items: sm.ParamState
    user_bias: sm.BatchState
    item_bias: sm.BatchState
    mean: sm.BatchState
    rated: sm.State
    centroids: sm.State
    velocity: sm.State
    histogram: sm.State
    highest: sm.State
    lowest: sm.State
    best: sm.State
    waited: sm.State
    calls: sm.State
    rng: sm.RandomState


def make_recommender(dtype: str) -> Recommender:
    far = jnp.full((1, RANK), 20, dtype)  # so that one cluster is empty at first
    return Recommender(
        users=sm.ParamState(jnp.zeros((USERS, RANK), dtype), spec=P("users")),
        items=sm.ParamState(normal(dtype, ITEMS, RANK, seed=1) / 2, spec=P("items")),
        user_bias=sm.BatchState(jnp.zeros(USERS, dtype), spec=P("users")),
        item_bias=sm.BatchState(normal(dtype, ITEMS, seed=2) / 4, spec=P("items")),
        # mistake: bias-of-items-by-the-users (wrong spec)
        #     item_bias=sm.BatchState(normal(dtype, ITEMS, seed=2) / 4, spec=P("users")),
        mean=sm.BatchState(jnp.zeros(())),
        rated=sm.State(0, reduce="sum"),
        # mistake: rated-by-one-shard (reduction forgotten)
        #     rated=sm.State(0),
        centroids=sm.State(jnp.concatenate([normal(dtype, CLUSTERS - 1, RANK, seed=3), far])),
        velocity=sm.State(jnp.zeros((CLUSTERS, RANK)), spec=P("users")),
        histogram=sm.State(jnp.zeros(BINS), reduce="sum"),
        # mistake: histogram-averaged (wrong policy)
        #     histogram=sm.State(jnp.zeros(BINS), reduce="mean"),
        highest=sm.State(jnp.full((), -9, dtype), reduce="max"),
        lowest=sm.State(jnp.full((), 9, dtype), reduce="min"),
        # mistake: lowest-by-the-highest (wrong policy)
        #     lowest=sm.State(jnp.full((), 9, dtype), reduce="max"),
        best=sm.State(jnp.full((), 9.0)),
        waited=sm.State(0),
        calls=sm.State(0),
        rng=sm.RandomState(jax.random.key(4)),
    )


def confidence(batch: Ratings) -> jax.Array:
    """The weight of each rating: more where users looked more often, none where nothing is known."""
    most = lax.pmax(batch.views.max(), BOTH)
    # mistake: most-views-of-a-shard (local maximum)
    #     most = batch.views.max()
    return jnp.where(batch.known, 1 + ALPHA * jnp.log1p(batch.views) / jnp.log1p(most), 0)


def mean_so_far(model: Recommender, batch: Ratings) -> jax.Array:
    """Of all ratings ever known, whatever their weights."""
    old = model.mean.value
    count = lax.psum(batch.known.sum(), BOTH)
    # mistake: count-of-a-shard (count of a shard)
    #     count = batch.known.sum()
    apart = lax.psum(jnp.where(batch.known, batch.value - old, 0).sum(), BOTH)
    return old + apart / (model.rated.value + count)


def biases(model: Recommender, apart: jax.Array, weight: jax.Array) -> tuple[Any, Any]:
    """Shrunken means of what is apart from the mean, first by user, then by item of what remains."""
    user_bias, item_bias = model.user_bias.value, model.item_bias.value
    given = lax.psum((weight * (apart - item_bias)).sum(1), "items")
    by_user = given / (lax.psum(weight.sum(1), "items") + RIDGE)
    # mistake: shrunken-by-every-shard (regularizer inside the psum)
    #     by_user = given / lax.psum(weight.sum(1) + RIDGE, "items")
    got = lax.psum((weight * (apart - by_user[:, None])).sum(0), "users")
    by_item = got / (lax.psum(weight.sum(0), "users") + RIDGE)
    # mistake: weight-averaged-over-shards (pmean for psum)
    #     by_item = got / (lax.pmean(weight.sum(0), "users") + RIDGE)
    by_item -= lax.pmean(by_item.mean(), "items")
    # mistake: centred-in-the-shard (statistics of a shard)
    #     by_item -= by_item.mean()
    # mistake: sum-of-means-taken-off (psum for pmean)
    #     by_item -= lax.psum(by_item.mean(), "items")
    return KEPT * user_bias + (1 - KEPT) * by_user, KEPT * item_bias + (1 - KEPT) * by_item


def solved(items: jax.Array, left: jax.Array, weight: jax.Array) -> jax.Array:
    """The factors of this shard's users that fit best, by their normal equations."""
    gram = lax.psum(jnp.einsum("ui,ik,il->ukl", weight, items, items), "items")
    # mistake: gram-over-the-users (wrong axis name)
    #     gram = lax.psum(jnp.einsum("ui,ik,il->ukl", weight, items, items), "users")
    right = lax.psum((weight * left) @ items, "items")
    # mistake: right-side-of-own-items (dropped psum)
    #     right = (weight * left) @ items
    count = lax.psum((weight > 0).sum(1), "items")
    ridge = RIDGE / 4 * (1 + count)[:, None, None] * jnp.eye(RANK)
    return jnp.linalg.solve(gram + ridge, right[..., None])[..., 0]


def descended(items: jax.Array, users: jax.Array, left: jax.Array, weight: jax.Array) -> jax.Array:
    """The items' factors after a few rounds of conjugate gradients for all of them together."""

    def times(x: jax.Array) -> jax.Array:
        return lax.psum((weight * (users @ x.T)).T @ users, "users") + RIDGE * x

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.psum((x * y).sum(), "items")
        # mistake: dot-of-own-items (norm of a shard)
        #     return (x * y).sum()

    rest = lax.psum((weight * left).T @ users, "users") - times(items)
    # mistake: rest-summed-as-a-whole (doubled psum)
    #     rest = lax.psum((weight * left).T @ users - times(items), "users")
    direction, square = rest, dot(rest, rest)
    for _ in range(ROUNDS):
        across = times(direction)
        length = square / dot(direction, across)
        items, rest = items + length * direction, rest - length * across
        before, square = square, dot(rest, rest)
        direction = rest + square / before * direction
    return items


def clustered(model: Recommender, users: jax.Array, real: jax.Array, rate: Any) -> Any:
    """The centroids after a step to their users' means, in parts; an empty one moves to the farthest user."""
    centroids = model.centroids.value.astype("float32")
    apart = ((users[:, None] - centroids) ** 2).sum(2)
    nearest, distance = apart.argmin(1), jnp.where(real, apart.min(1), -1)
    sums = jax.ops.segment_sum(jnp.where(real[:, None], users, 0), nearest, CLUSTERS)
    counts = lax.psum(jax.ops.segment_sum(real.astype("float32"), nearest, CLUSTERS), "users")
    # mistake: sizes-in-the-shard (dropped psum)
    #     counts = jax.ops.segment_sum(real.astype("float32"), nearest, CLUSTERS)
    own = lax.psum_scatter(sums, "users", tiled=True)
    first = lax.axis_index("users") * len(own)
    old = lax.dynamic_slice_in_dim(centroids, first, len(own))
    size = lax.dynamic_slice_in_dim(counts, first, len(own))[:, None]
    # mistake: sizes-of-the-first-part (slice of another shard)
    #     size = counts[: len(own), None]
    step = rate * (own / jnp.maximum(size, 1) - old)
    velocity = jnp.where(size > 0, MOMENTUM * model.velocity.value + step, 0)
    centroids = lax.all_gather(old + velocity, "users", tiled=True)
    # mistake: parts-interleaved (wrong order of parts)
    #     centroids = lax.all_gather(old + velocity, "users", axis=1).reshape(CLUSTERS, RANK)
    # mistake: other-parts-are-old (stale value)
    #     centroids = lax.dynamic_update_slice_in_dim(centroids, old + velocity, first, 0)
    mine = distance.max() == lax.pmax(distance.max(), "users")
    # mistake: farthest-of-every-shard (wrong owner)
    #     mine = distance.max() == lax.pmax(distance.max(), "items")
    farthest = lax.psum(jnp.where(mine, users[distance.argmax()], 0), "users")
    return jnp.where(counts[:, None] > 0, centroids, farthest), velocity, nearest


def local(number: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Where items stand in this shard, and whether they are here at all."""
    here = number - lax.axis_index("items") * count
    # mistake: items-overlap (off by one)
    #     here = number - lax.axis_index("items") * (count - 1)
    return jnp.clip(here, 0, count - 1), (here >= 0) & (here < count)
    # mistake: items-of-other-shards-too (mask forgotten)
    #     return jnp.clip(here, 0, count - 1), here < ITEMS


def pushed(rng: Any, scores: jax.Array, batch: Ratings, real: jax.Array) -> tuple[Any, Any]:
    """How much each item should lose because it was drawn and scored as high as what users know."""
    known = lax.psum(batch.known.sum(1), "items")
    usual = lax.psum(jnp.where(batch.known, scores, 0).sum(1), "items") / jnp.maximum(known, 1)
    keys, rng = rng.rows(len(scores), "users")
    # mistake: keys-split-in-the-shard (key of a shard)
    #     keys, rng = rng.split(len(scores))
    # mistake: same-keys-in-every-shard (shared key)
    #     keys, rng = rng.rows(len(scores))
    drawn = jax.vmap(lambda key: jax.random.randint(key, (NEGATIVES,), 0, ITEMS))(keys)
    here, mine = local(drawn, scores.shape[1])
    score = jnp.where(mine, jnp.take_along_axis(scores, here, 1), 0)
    high = jax.nn.sigmoid(lax.psum(score, "items") - usual[:, None])
    high = jnp.where(mine & real[:, None], high, 0)
    push = jax.ops.segment_sum(high.ravel(), here.ravel(), scores.shape[1])
    return lax.psum(push, "users") / REAL, rng
    # mistake: push-by-the-users-here (small factor)
    #     return lax.psum(push, "users") / jnp.maximum(real.sum(), 1), rng


def best_items(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The highest scores of each user over all items, and which items have them."""
    high, place = lax.top_k(scores, TOP)
    # mistake: share-of-the-best (top-k of a shard)
    #     high, place = lax.top_k(scores, 1 + TOP // lax.axis_size("items"))
    number = place + lax.axis_index("items") * scores.shape[1]
    # mistake: best-items-in-the-shard (unit index not offset)
    #     number = place
    high = lax.all_gather(high, "items", axis=1, tiled=True)
    number = lax.all_gather(number, "items", axis=1, tiled=True)
    high, place = lax.top_k(high, TOP)
    return high, jnp.take_along_axis(number, place, 1)


def smoothed(popularity: jax.Array) -> jax.Array:
    """Items are in the order of their release: with the one before and the one after, if there is one."""
    n = lax.axis_size("items")
    before = lax.ppermute(popularity[-1:], "items", [(i, i + 1) for i in range(n - 1)])
    # mistake: first-item-sent-on (halo from the wrong side)
    #     before = lax.ppermute(popularity[:1], "items", [(i, i + 1) for i in range(n - 1)])
    after = lax.ppermute(popularity[:1], "items", [(i + 1, i) for i in range(n - 1)])
    # mistake: after-from-the-shard-before (wrong ppermute neighbour)
    #     after = lax.ppermute(popularity[:1], "items", [(i, i + 1) for i in range(n - 1)])
    wide = jnp.concatenate([before, popularity, after])
    return (wide[:-2] + 2 * wide[1:-1] + wide[2:]) / 4


def spread(errors: jax.Array, known: jax.Array) -> jax.Array:
    """A histogram of this shard's errors: each counts in the two bins around it, by its distance to them."""
    near = 1 - jnp.abs(jnp.clip(jnp.abs(errors) / WIDTH, 0, BINS - 1)[..., None] - jnp.arange(BINS))
    return jnp.where(known[..., None], jnp.maximum(near, 0), 0).sum((0, 1))


def step(model: Recommender, batch: Ratings) -> Any:
    batch = batch._replace(value=batch.value.astype("float32"))
    rate = RATE / (1 + model.calls.value / 2) * 0.5**model.waited.value
    # mistake: rate-by-the-shards (count of the mesh)
    #     rate = RATE / (1 + model.calls.value / lax.axis_size("users")) * 0.5**model.waited.value
    rows = lax.axis_index("users") * len(batch.value) + jnp.arange(len(batch.value))
    # mistake: rows-of-a-shard (row index not offset)
    #     rows = jnp.arange(len(batch.value))
    real, weight = rows < REAL, confidence(batch)
    mean = mean_so_far(model, batch)
    user_bias, item_bias = biases(model, batch.value - mean, weight)
    base = mean + user_bias[:, None] + item_bias
    items = model.items.value.astype("float32")
    users = solved(items, batch.value - base, weight)
    items = descended(items, users, batch.value - base, weight)
    centroids, velocity, nearest = clustered(model, users, real, rate)
    scores = base + users @ items.T
    errors = jnp.where(batch.known, batch.value - scores, 0)
    total = lax.psum(weight.sum(), BOTH)
    missed = jnp.sqrt(lax.psum((weight * errors**2).sum(), BOTH) / total)
    # mistake: mean-of-the-roots (mean of roots)
    #     missed = lax.pmean(jnp.sqrt((weight * errors**2).sum() / weight.sum()), BOTH)
    histogram = spread(errors, batch.known)
    summed = jnp.cumsum(model.histogram.value + lax.psum(histogram, BOTH))
    quantile = jnp.interp(0.8 * summed[-1], summed, WIDTH * jnp.arange(BINS))
    push, rng = pushed(model.rng, scores, batch, real)
    high, number = best_items(jnp.where(batch.known, -99, scores))
    here, mine = local(number, scores.shape[1])
    hits = (mine & jnp.take_along_axis(batch.held, here, 1) & real[:, None]).sum()
    recall = lax.psum(hits, BOTH) / lax.psum((batch.held & real[:, None]).sum(), BOTH)
    # mistake: mean-of-recalls (mean of ratios)
    #     recall = lax.pmean(hits / (batch.held & real[:, None]).sum(), BOTH)
    waited = jnp.where(missed < 0.95 * model.best.value, 0, model.waited.value + 1)
    popularity = lax.psum(weight.sum(0), "users")
    narrow = {"users": users, "items": items, "centroids": centroids}
    narrow |= {"user_bias": user_bias, "item_bias": item_bias - rate * push}
    narrow |= {
        "highest": jnp.maximum(model.highest.value, jnp.where(batch.known, scores, -9).max()),
        "lowest": jnp.minimum(model.lowest.value, jnp.where(batch.known, scores, 9).min()),
    }
    model = model.replace(
        **{name: x.astype(model.items.value.dtype) for name, x in narrow.items()},
        mean=mean,
        rated=model.rated.value + batch.known.sum(),
        velocity=velocity,
        histogram=model.histogram.value + histogram,
        best=jnp.minimum(model.best.value, missed),
        waited=waited,
        calls=model.calls.value + 1,
        rng=rng,
    )
    numbers = {"missed": missed, "quantile": quantile, "recall": recall}
    numbers["stop"] = waited >= PATIENCE
    return model, (high, number, nearest), smoothed(popularity), numbers


def case(dtype: str) -> Case:
    kinds = np.random.default_rng(5).integers(CLUSTERS - 1, size=USERS)
    taste = 2 * normal("float32", CLUSTERS - 1, RANK, seed=3)[kinds]
    taste += normal("float32", USERS, RANK, seed=6) / 4
    about = normal("float32", ITEMS, RANK, seed=1) / 2 + normal("float32", ITEMS, RANK, seed=7) / 4
    value = 3 + taste @ about.T + normal("float32", USERS, ITEMS, seed=8) / 4
    use = integers(USERS, ITEMS, below=8, seed=10)
    rows = (jnp.arange(USERS) < REAL)[:, None]
    views = integers(USERS, ITEMS, below=20, seed=11) * (1 + jnp.arange(ITEMS) // 3)
    return Case(
        step,
        (
            make_recommender(dtype),
            Ratings(value.astype(dtype), rows & (use < 4), rows & (use > 3) & (use < 6), views),
        ),
        mesh={"users": 2, "items": 2},
        in_specs=(None, Ratings(TABLE, TABLE, TABLE, TABLE)),
        # mistake: views-the-other-way (wrong spec)
        #     in_specs=(None, Ratings(TABLE, TABLE, TABLE, P("items", "users"))),
        out_specs=(P(), P("users"), P("items"), P()),
        # mistake: popularity-by-the-users (wrong spec)
        #     out_specs=(P(), P("users"), P("users"), P()),
        check_vma=False,
    )
