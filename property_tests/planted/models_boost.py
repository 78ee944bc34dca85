"""Boosted trees on histograms: rows split over one axis, features over the other."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case


DTYPES = ("float32", "bfloat16", "float16")
ROWS, REAL, FOLDS, FEATURES, USED, BINS = 64, 59, 5, 8, 6, 6
DEPTH, LEAVES, ROUNDS, KEPT, FEWEST, NEWTON, FAR = 2, 4, 2, 4, 2, 2, 1e3
SHARE, RIDGE, LARGEST, OUTLIER, PRICE, LATER = 0.8, 1.0, 1.5, 1.4, 0.03, 0.02
SHRINK, ENOUGH, FADE, SURE = 0.5, 0.02, 0.8, 2.0


class Rows(NamedTuple):
    """A shard's rows in bins, and how much each counts to learn from and to validate with."""

    bins: jax.Array
    label: jax.Array
    weight: jax.Array
    checked: jax.Array


class Splits(NamedTuple):
    """The best split of each node, by the number of its feature among all."""

    gain: Any
    number: Any
    cut: Any
    threshold: Any


class Booster(sm.Module):
    edges: sm.LongTermState
    learned: sm.State
    trees: sm.State
    surprise: sm.BatchState
    steepest: sm.State
    drawn: sm.State
    calls: sm.State
    rng: sm.RandomState


def make_booster(dtype: str) -> Booster:
    levels, whole = (jnp.zeros((KEPT, DEPTH, LEAVES), kind) for kind in ("float32", "int32"))
    trees = Splits(levels, whole, whole, levels), jnp.zeros((KEPT, LEAVES), dtype)
    none, one = jnp.zeros(FEATURES), jnp.ones(())
    learned = {"margins": jnp.zeros(ROWS), "importance": none, "paid": none > 0, "best": one}
    specs = {"margins": P("rows"), "importance": P("features"), "paid": P("features")}
    return Booster(
        edges=sm.LongTermState(jnp.zeros((FEATURES, BINS - 1)), spec=P("features")),
        learned=sm.State(learned | {"stalled": 0}, spec=specs | {"best": P(), "stalled": P()}),
        trees=sm.State(trees),
        # mistake: trees-split-like-the-rows (wrong spec)
        #     trees=sm.State(trees, spec=P("rows")),
        surprise=sm.BatchState(0 * one, reduce="mean"),
        # mistake: surprise-of-all-shards-together (wrong policy)
        #     surprise=sm.BatchState(0 * one, reduce="sum"),
        steepest=sm.State(0 * one, reduce="max"),
        # mistake: steepest-on-average (wrong policy)
        #     steepest=sm.State(0 * one, reduce="mean"),
        drawn=sm.State(0, reduce="sum"),
        # mistake: drawn-without-a-policy (missing policy)
        #     drawn=sm.State(0),
        calls=sm.State(0),
        rng=sm.RandomState(jax.random.key(5)),
    )


def numbers_of(here: int, axis: str) -> jax.Array:
    """Of this shard's rows or features among all."""
    return lax.axis_index(axis) * here + jnp.arange(here)
    # mistake: numbers-dealt-in-turn (wrong offset)
    #     return lax.axis_index(axis) + jnp.arange(here) * lax.axis_size(axis)
    # mistake: numbers-always-of-rows (wrong axis)
    #     return lax.axis_index("rows") * here + jnp.arange(here)


def owned(number: jax.Array, here: int) -> tuple[jax.Array, jax.Array]:
    """Whether this shard has these features, and in which columns."""
    column = number - lax.axis_index("features") * here
    mine = (column >= 0) & (column < here)
    # mistake: first-of-the-next-shard-is-mine (off by one)
    #     mine = (column >= 0) & (column <= here)
    # mistake: owner-by-the-remainder (wrong owner)
    #     mine = number % lax.axis_size("features") == lax.axis_index("features")
    return mine, jnp.clip(column, 0, here - 1)


def mean_of(value: jax.Array, weight: jax.Array) -> jax.Array:
    """By the weights of the rows of all shards."""
    return lax.psum((weight * value).sum(), "rows") / lax.psum(weight.sum(), "rows")
    # mistake: means-of-the-shards-averaged (mean of means)
    #     return lax.pmean((weight * value).sum() / weight.sum(), "rows")
    # mistake: means-by-the-own-weight (wrong normalization)
    #     return lax.psum((weight * value).sum(), "rows") / weight.sum()


def edges_of(x: jax.Array, used: jax.Array) -> jax.Array:
    """Quantiles of each feature, halfway between two of the rows that are learned from."""
    values = jnp.where(used[:, None], x.astype("float32"), FAR)
    everyone = lax.all_gather(values, "rows", tiled=True)
    # mistake: quantiles-of-own-rows (missing gather)
    #     everyone = jnp.tile(values, (lax.axis_size("rows"), 1))
    # mistake: gathered-over-the-features (wrong gather axis)
    #     everyone = lax.all_gather(values, "features", tiled=True)
    ordered, count = jnp.sort(everyone, 0), lax.psum(used.sum(), "rows")
    # mistake: places-among-own-rows (wrong count)
    #     ordered, count = jnp.sort(everyone, 0), used.sum()
    places = count * jnp.arange(1, BINS) // BINS
    return ((ordered[places - 1] + ordered[places]) / 2).T


def losses_of(margins: jax.Array, label: jax.Array) -> jax.Array:
    return jax.nn.softplus(margins) - label * margins


def slopes_of(margins: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """First and second derivative of the loss by each row's margin; no first one is an outlier."""
    total = lambda margins: (rows.weight * losses_of(margins, rows.label)).sum()
    # mistake: derivative-of-the-total (gradient summed twice)
    #     total = lambda m: lax.psum((rows.weight * losses_of(m, rows.label)).sum(), "rows")
    first, second = jax.jvp(jax.grad(total), (margins,), (jnp.ones_like(margins),))
    squares, count = (lax.psum(v.sum(), "rows") for v in (first**2, rows.weight > 0))
    # mistake: outliers-among-own-rows (clipping by a local norm)
    #     squares, count = (v.sum() for v in (first**2, rows.weight > 0))
    largest = OUTLIER * jnp.sqrt(squares / count)
    return jnp.clip(first, -largest, largest), second


def drawn_of(keys: Any, now: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Most rows; and as many of all features in each round, however many of them a shard has."""
    by_round = jax.vmap(partial(jax.random.fold_in, data=now))
    # mistake: lots-of-each-half (key of a shard)
    #     by_round = jax.vmap(partial(jax.random.fold_in, data=now + 9 * lax.axis_index("features")))
    for_rows, for_features = (by_round(k) for k in keys)
    lots = jax.vmap(jax.random.uniform)(for_features)
    everyone = lax.all_gather(lots, "features", tiled=True)
    chosen = lots >= lax.top_k(everyone, USED)[0][-1]
    # mistake: as-many-of-each-shard (top-k of a shard)
    #     chosen = lots >= lax.top_k(lots, USED // lax.axis_size("features"))[0][-1]
    return jax.vmap(partial(jax.random.bernoulli, p=SHARE))(for_rows), chosen


def histograms(bins: jax.Array, node: jax.Array, stats: jax.Array) -> jax.Array:
    """Sums by node, feature and bin over all rows; each shard of the rows goes on with its nodes."""
    of_feature: Any = lambda of: jax.ops.segment_sum(stats, node * BINS + of, LEAVES * BINS)
    sums = jax.vmap(of_feature, in_axes=1)(bins).reshape(-1, LEAVES, BINS, 3).swapaxes(0, 1)
    return lax.psum_scatter(sums, "rows", tiled=True)
    # mistake: nodes-of-own-rows (dropped psum)
    #     return jnp.stack(jnp.split(sums, lax.axis_size("rows")))[lax.axis_index("rows")]
    # mistake: sums-of-an-average-shard (mean for sum)
    #     return lax.psum_scatter(sums, "rows", tiled=True) / lax.axis_size("rows")
    # mistake: histograms-summed-over-features-too (doubled psum)
    #     return lax.psum_scatter(lax.psum(sums, "features"), "rows", tiled=True)


def gains_of(sums: jax.Array, chosen: jax.Array, paid: jax.Array) -> jax.Array:
    """What each split of a node gains, less its price; features of high numbers are expensive."""
    left = jnp.cumsum(sums, axis=2)
    right = left[:, :, -1:] - left
    low, high, both = (s[..., 0] ** 2 / (s[..., 1] + RIDGE) for s in (left, right, left + right))
    allowed = chosen[:, None] & (jnp.minimum(left, right)[..., 2] >= FEWEST)
    price = PRICE * (1 + numbers_of(len(paid), "features")) * jnp.where(paid, 0.5, 1)
    # mistake: price-by-the-column (feature index not offset)
    #     price = PRICE * (1 + jnp.arange(len(paid))) * jnp.where(paid, 0.5, 1)
    return jnp.where(allowed, low + high - both - price[:, None] - LATER * jnp.arange(BINS), -1)


def best_of(gains: jax.Array, edges: jax.Array) -> Splits:
    """Of this shard's nodes among the features of all shards, then those of all nodes."""
    flat = gains.reshape(len(gains), -1)
    own, place = flat.max(1), flat.argmax(1)
    gain = lax.pmax(own, "features")
    # mistake: best-of-own-features (dropped pmax)
    #     gain = own
    code = numbers_of(len(edges), "features")[place // BINS] * BINS + place % BINS
    # mistake: winner-by-its-column (wrong offset)
    #     code = place
    code = lax.pmin(jnp.where(own == gain, code, FEATURES * BINS), "features")
    # mistake: losers-are-asked-too (mask forgotten)
    #     code = lax.pmin(code, "features")
    number, cut = code // BINS, code % BINS
    mine, column = owned(number, len(edges))
    threshold = lax.psum(jnp.where(mine, edges[column, cut], 0), "features")
    # mistake: threshold-known-to-its-owner (dropped psum)
    #     threshold = jnp.where(mine, edges[column, cut], 0)
    found = Splits(gain, number, cut, threshold)
    return jax.tree.map(lambda part: lax.all_gather(part, "rows", tiled=True), found)
    # mistake: own-nodes-for-all (missing gather)
    #     return jax.tree.map(lambda part: jnp.tile(part, lax.axis_size("rows")), found)


def routed(bins: jax.Array, node: jax.Array, splits: Splits) -> jax.Array:
    """Each row to a child of its node: only the shard that has the feature knows to which."""
    mine, column = owned(splits.number, bins.shape[1])
    over = jnp.take_along_axis(bins, column[node][:, None], 1)[:, 0] > splits.cut[node]
    right = lax.psum((mine[node] & over).astype("int32"), "features")
    # mistake: features-of-others-go-left (dropped psum)
    #     right = (mine[node] & over).astype("int32")
    # mistake: everyone-decides (wrong mask)
    #     right = lax.pmax(over.astype("int32"), "features")
    # mistake: decided-over-the-rows (wrong axis)
    #     right = lax.pmax((mine[node] & over).astype("int32"), "rows")
    return 2 * node + jnp.where(splits.gain[node] > 0, right, 0)


def grown(rows: Rows, stats: jax.Array, chosen: jax.Array, paid: jax.Array, edges: Any) -> Any:
    """A tree, level by level: each row's leaf, the leaves' Newton steps, gains of features, splits."""

    def level(node: jax.Array, _: Any) -> Any:
        sums = histograms(rows.bins, node, stats)
        splits = best_of(gains_of(sums, chosen, paid), edges)
        mine, column = owned(splits.number, len(paid))
        gain = jnp.maximum(splits.gain, 0)
        gained = jnp.zeros(len(paid)).at[column].add(jnp.where(mine, gain, 0))
        # mistake: gains-by-the-number-among-all (feature index not offset)
        #     gained = jnp.zeros(len(paid)).at[splits.number].add(gain)
        # mistake: gains-in-both-halves (mask forgotten)
        #     gained = jnp.zeros(len(paid)).at[column].add(gain)
        tree = jax.tree.map(lambda part: jnp.where(splits.gain > 0, part, 0), splits)
        return routed(rows.bins, node, splits), (gained, tree)

    start = jnp.zeros(len(stats), "int32")
    leaf, (gained, tree) = lax.scan(level, start, None, length=DEPTH)
    sums = lax.psum(jax.ops.segment_sum(stats, leaf, LEAVES), "rows")
    # mistake: steps-of-own-rows (local statistic)
    #     sums = jax.ops.segment_sum(stats, leaf, LEAVES)
    steps = jnp.clip(-sums[:, 0] / (sums[:, 1] + RIDGE), -LARGEST, LARGEST)
    return leaf, steps, gained.sum(0), tree


def rate_of(margins: jax.Array, change: jax.Array, rows: Rows) -> jax.Array:
    """How far to go along a tree's change: where the loss of all rows is lowest."""

    def newton(_: Any, rate: jax.Array) -> jax.Array:
        first, second = slopes_of(margins + rate * change, rows)
        down, bend = (first * change).sum(), (second * change**2).sum()
        return rate - lax.psum(down, "rows") / (lax.psum(bend, "rows") + RIDGE)
        # mistake: rates-of-the-shards-averaged (mean of ratios)
        #     return rate - lax.pmean(down / (bend + RIDGE), "rows")
        # mistake: slope-of-own-rows (gradient not summed)
        #     return rate - down / (lax.psum(bend, "rows") + RIDGE)

    return lax.fori_loop(0, NEWTON, newton, jnp.ones(()))


def ranked(margins: jax.Array, rows: Rows) -> jax.Array:
    """How surely a positive row to validate is above a negative one, on whichever shards they are."""
    size = lax.axis_size("rows")
    ahead = [(k, (k + 1) % size) for k in range(size)]
    # mistake: ring-with-an-end (wrong permutation)
    #     ahead = [(k, k + 1) for k in range(size - 1)]
    up, down = rows.checked * rows.label, rows.checked * (1 - rows.label)

    def meet(_: Any, met: Any) -> Any:
        above, pairs, visitors, weight = met
        pair = up[:, None] * weight
        above = above + (pair * jax.nn.sigmoid(SURE * (margins[:, None] - visitors))).sum()
        visitors, weight = lax.ppermute((visitors, weight), "rows", ahead)
        # mistake: margins-travel-alone (wrong carry)
        #     visitors = lax.ppermute(visitors, "rows", ahead)
        return above, pairs + pair.sum(), visitors, weight

    start = jnp.zeros(()), jnp.zeros(()), margins, down
    above, pairs, _, _ = lax.fori_loop(0, size, meet, start)
    # mistake: last-visitors-not-met (wrong loop)
    #     above, pairs, _, _ = lax.fori_loop(0, max(size - 1, 1), meet, start)
    return lax.psum(above, "rows") / lax.psum(pairs, "rows")


def step(booster: Booster, x: jax.Array, label: jax.Array, weight: jax.Array) -> Any:
    label, weight = label.astype("float32"), weight.astype("float32")
    number, first_call = numbers_of(len(label), "rows"), booster.calls.value == 0
    held, real = number % FOLDS == 1, number < REAL
    # mistake: every-fifth-of-a-shard (row index not offset)
    #     held, real = jnp.arange(len(label)) % FOLDS == 1, number < REAL
    used, checked = real & ~held, real & held
    edges = jnp.where(first_call, edges_of(x, used), booster.edges.value)
    bins = (x[..., None].astype("float32") > edges).sum(-1)
    usual = mean_of(weight, used)
    # mistake: usual-weight-of-own-rows (local statistic)
    #     usual = jnp.average(weight, weights=used)
    rows = Rows(bins, label, used * weight / usual, checked * weight)
    of_rows, rng = booster.rng.rows(len(label), "rows")
    # mistake: same-lots-on-all-shards (shared key)
    #     of_rows, rng = booster.rng.rows(len(label))
    of_features, rng = rng.rows(x.shape[1], "features")

    def one_round(old: Any, now: jax.Array) -> Any:
        first, second = slopes_of(old["margins"], rows)
        drawn, chosen = drawn_of((of_rows, of_features), now)
        stats = jnp.stack([first, second, jnp.ones_like(first)], 1) * (drawn & used)[:, None]
        leaf, steps, gained, tree = grown(rows, stats, chosen, old["paid"], edges)
        rate = SHRINK * rate_of(old["margins"], steps[leaf], rows) * 0.5 ** old["stalled"]
        margins = old["margins"] + rate * steps[leaf]
        loss = mean_of(losses_of(margins, label), rows.checked)
        new = {"margins": margins, "paid": old["paid"] | (gained > 0)}
        new |= {"importance": FADE * old["importance"] + gained}
        # mistake: gained-on-every-shard-of-rows (doubled psum)
        #     new |= {"importance": FADE * old["importance"] + lax.psum(gained, "rows")}
        stalled = jnp.where(loss < old["best"] - ENOUGH, 0, old["stalled"] + 1)
        new |= {"stalled": stalled, "best": jnp.minimum(old["best"], loss)}
        numbers = {"rates": rate, "checked": loss}
        return new, ((tree, rate * steps), numbers, jnp.abs(first), (drawn & used).sum())

    old, common = booster.learned.value, jnp.clip(mean_of(label, rows.weight), 0.05, 0.95)
    odds = jnp.log(common / (1 - common))
    start = old | {"margins": jnp.where(first_call, odds, old["margins"])}
    learned, found = lax.scan(one_round, start, jnp.arange(ROUNDS))
    trees, numbers, steep, drawn = found
    slots = (booster.calls.value * ROUNDS + jnp.arange(ROUNDS)) % KEPT
    stored = lambda old, new: old.at[slots].set(new.astype(old.dtype))
    booster = booster.replace(
        edges=edges,
        learned=learned,
        trees=jax.tree.map(stored, booster.trees.value, trees),
        surprise=FADE * booster.surprise.value + (1 - FADE) * steep.mean(),
        steepest=jnp.maximum(FADE * booster.steepest.value, steep.max()),
        drawn=booster.drawn.value + drawn.sum(),
        # mistake: drawn-for-both-halves (doubled psum)
        #     drawn=booster.drawn.value + lax.psum(drawn.sum(), "features"),
        calls=booster.calls.value + 1,
        rng=rng,
    )
    parts = learned["importance"] / lax.psum(learned["importance"].sum(), "features")
    # mistake: parts-of-own-importance (wrong normalization)
    #     parts = learned["importance"] / learned["importance"].sum()
    numbers |= {"ranked": ranked(learned["margins"], rows)}
    chance = jax.nn.sigmoid(learned["margins"]).astype(x.dtype)
    return booster, chance, parts, numbers


def case(dtype: str) -> Case:
    rng = np.random.default_rng(101)
    ranks = np.stack([rng.permutation(ROWS) for _ in range(FEATURES)], 1)
    x = (ranks - ROWS / 2) / 16
    chance = 2 * (x[:, 1] > 0.3) - 1.2 * (x[:, 6] > -0.4) + 0.8 * x[:, 3]
    label = chance + rng.normal(size=ROWS) / 2 > 0.6
    arrays = (jnp.asarray(v, dtype) for v in (x, label, rng.integers(4, 13, ROWS) / 8))
    return Case(
        step,
        (make_booster(dtype), *arrays),
        mesh={"rows": 4, "features": 2},
        in_specs=(None, P("rows", "features"), P("rows"), P("rows")),
        out_specs=(P(), P("rows"), P("features"), P()),
        # mistake: parts-as-one-copy (wrong spec)
        #     out_specs=(P(), P("rows"), P(), P()),
        check_vma=False,
        steps=3,
    )
