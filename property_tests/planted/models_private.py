"""Private federated training: clients over one axis, words and units of the model over the other."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
CLIENTS, BATCHES, ROWS, LENGTH, WORDS, WIDTH, UNITS, SENT, MOST = 12, 2, 3, 3, 8, 3, 4, 20, 6
LOCAL_RATE, RATE, TRUST, HORIZON, HALF_LIFE = 0.5, 0.1, 0.15, 200, 80
SAMPLED, SHARE, NOISE, COUNT_NOISE, QUANTILE, CLIP_RATE = 0.75, 0.1, 0.1, 0.2, 0.5, 0.4


class Weights(NamedTuple):
    """What is trained, or something for each part of it; the shift alone is whole on every shard."""

    table: Any
    into: Any
    back: Any
    bias: Any
    out: Any
    shift: Any


SPECS = Weights(P("model"), P(None, "model"), P(None, "model"), P("model"), P("model"), P())
OF_CLIENTS = Weights(*(P("clients", *spec) for spec in SPECS))


class Federation(sm.Module):
    weights: sm.ParamState
    average: sm.State
    slots: sm.State
    control: sm.State
    own: sm.State
    clip: sm.State
    account: sm.State
    seen: sm.State
    worst: sm.State
    typical: sm.BatchState
    rounds: sm.State
    rng: sm.RandomState


def make_federation(dtype: str) -> Federation:
    shapes = (WORDS, WIDTH), (WIDTH, UNITS), (UNITS, UNITS), (UNITS,), (UNITS, WIDTH), (WIDTH,)
    weights = Weights(*(normal(dtype, *s, seed=k) * 0.7 for k, s in enumerate(shapes)))
    wide = jax.tree.map(lambda p: p.astype("float32"), weights)
    zeros = jax.tree.map(jnp.zeros_like, wide)
    of_clients = jax.tree.map(lambda p: jnp.zeros((CLIENTS, *p.shape)), wide)
    return Federation(
        weights=sm.ParamState(weights, spec=SPECS),
        average=sm.State(wide, spec=SPECS),
        slots=sm.State((zeros, zeros), spec=(SPECS, SPECS)),
        control=sm.State(zeros, spec=SPECS),
        own=sm.State((of_clients, of_clients), spec=(OF_CLIENTS, OF_CLIENTS)),
        clip=sm.State(jnp.asarray(0.7, "float32")),
        account=sm.State((jnp.zeros(()), jnp.zeros(()))),
        seen=sm.State(0, reduce="sum"),
        # mistake: seen-by-one-shard (policy forgotten)
        #     seen=sm.State(0),
        worst=sm.State(jnp.zeros(()), reduce="max"),
        # mistake: worst-on-average (wrong policy)
        #     worst=sm.State(jnp.zeros(()), reduce="mean"),
        typical=sm.BatchState(jnp.zeros(()), reduce="mean"),
        # mistake: typical-added-up (sum for mean)
        #     typical=sm.BatchState(jnp.zeros(()), reduce="sum"),
        rounds=sm.State(0),
        rng=sm.RandomState(jax.random.key(5)),
    )


@jax.custom_vjp
def joined(parts: jax.Array) -> jax.Array:
    """The sum over the model's shards, each of which has the derivative of the sum for its part."""
    return lax.psum(parts, "model")


@jax.custom_vjp
def shared(whole: jax.Array) -> jax.Array:
    """What every shard of the model goes on with in its own way, so that the derivatives add up."""
    return whole


joined.defvjp(lambda parts: (joined(parts), None), lambda _, slope: (slope,))
# mistake: slope-of-every-copy (gradient summed twice)
#     joined.defvjp(lambda parts: (joined(parts), None), lambda _, slope: (lax.psum(slope, "model"),))
shared.defvjp(lambda whole: (whole, None), lambda _, slope: (lax.psum(slope, "model"),))
# mistake: slope-of-own-units (gradient not summed)
#     shared.defvjp(lambda whole: (whole, None), lambda _, slope: (slope,))


def read(w: Weights, words: jax.Array) -> jax.Array:
    """What the units make of the words so far; each shard of the model has some rows of the table."""
    own = words - lax.axis_index("model") * len(w.table)
    # mistake: words-wrapped-into-the-shard (wrong offset)
    #     own = words % len(w.table)
    inside = (own >= 0) & (own < len(w.table))
    # mistake: first-word-of-the-next-too (off by one)
    #     inside = (own >= 0) & (own <= len(w.table))
    found = jnp.where(inside[..., None], w.table[jnp.clip(own, 0, len(w.table) - 1)], 0)
    # mistake: words-of-other-shards-too (wrong mask)
    #     found = w.table[jnp.clip(own, 0, len(w.table) - 1)]

    def cell(own: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        every = lax.all_gather(own, "model", axis=-1, tiled=True)
        # mistake: units-interleaved (wrong gather axis)
        #     every = lax.all_gather(own, "model", axis=-1).reshape(len(own), UNITS)
        # mistake: own-units-for-all (missing gather)
        #     every = jnp.tile(own, lax.axis_size("model"))
        own = jnp.tanh(now @ w.into + every @ w.back + w.bias)
        return own, own

    start = jnp.zeros((len(words), len(w.bias)), found.dtype)
    _, hidden = lax.scan(cell, start, shared(joined(found)).swapaxes(0, 1))
    return shared(joined(hidden @ w.out) + w.shift).swapaxes(0, 1)
    # mistake: shift-with-each-part (bias added before the psum)
    #     return shared(joined(hidden @ w.out + w.shift)).swapaxes(0, 1)


def loss_of(w: Weights, words: jax.Array, there: jax.Array) -> jax.Array:
    """The cross entropy of a client's next words, on average of the rows that are there."""
    logits, target = (read(w, words[:, :-1]) @ w.table.T).astype("float32"), words[:, 1:]
    top = lax.pmax(lax.stop_gradient(logits).max(-1), "model")
    # mistake: top-of-own-words (dropped pmax)
    #     top = lax.stop_gradient(logits).max(-1)
    total = joined(jnp.exp(logits - top[..., None]).sum(-1))
    # mistake: likely-among-own-words (wrong normalization)
    #     total = jnp.exp(logits - top[..., None]).sum(-1)
    number = lax.axis_index("model") * len(w.table) + jnp.arange(len(w.table))
    # mistake: target-by-the-clients (wrong axis)
    #     number = lax.axis_index("clients") * len(w.table) + jnp.arange(len(w.table))
    hit = joined(jnp.where(target[..., None] == number, logits, 0).sum(-1))
    return (there @ (jnp.log(total) + top - hit)).sum() / (LENGTH * jnp.maximum(there.sum(), 1))


def either(yes: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(partial(jnp.where, yes), new, old)


def trained(start: Weights, dtype: Any, rate: Any, words: Any, there: Any, offset: Any) -> Any:
    """How a step for each of its batches changes a client's weights, and its new control variate."""

    def sgd(carry: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
        (w, steps), busy = carry, batch[1].any()
        loss = lambda w: loss_of(jax.tree.map(lambda p: p.astype(dtype), w), *batch)
        grads = jax.grad(loss)(w)
        # mistake: slopes-of-all-clients (gradient averaged too early)
        #     grads = lax.pmean(jax.grad(loss)(w), "clients")
        moved = jax.tree.map(lambda p, g, c: p - rate * (g + c), w, grads, offset)
        return (either(busy, moved, w), steps + busy), None
        # mistake: steps-of-clients-elsewhere (wrong carry)
        #     return (either(busy, moved, w), steps + lax.psum(busy.astype("int32"), "clients")), None

    (w, steps), _ = lax.scan(sgd, (start, jnp.zeros((), "int32")), (words, there))
    delta = jax.tree.map(jnp.subtract, w, start)
    return delta, jax.tree.map(lambda c, d: -c - d / (rate * jnp.maximum(steps, 1)), offset, delta)


def flat(tree: Weights) -> tuple[jax.Array, jax.Array]:
    """The numbers that are split over the model, and those that are not."""
    own = [x.ravel() for x, spec in zip(tree, SPECS, strict=True) if "model" in spec]
    return jnp.concatenate(own), tree.shift


def dot(a: Weights, b: Weights) -> jax.Array:
    """Of two updates as a whole."""
    (own_a, common_a), (own_b, common_b) = flat(a), flat(b)
    return lax.psum(own_a @ own_b, "model") + common_a @ common_b
    # mistake: shift-of-every-copy (doubled psum)
    #     return lax.psum(own_a @ own_b + common_a @ common_b, "model")


def compressed(update: Weights) -> Weights:
    """The largest numbers of the update, lowered by the largest that is not sent."""
    own, common = flat(jax.tree.map(jnp.abs, update))
    every = jnp.concatenate([lax.all_gather(own, "model", tiled=True), common])
    # mistake: largest-of-a-shard (local statistic)
    #     every = jnp.concatenate([own, common])
    # mistake: shift-gathered-from-each (gathered twice)
    #     every = lax.all_gather(jnp.concatenate([own, common]), "model", tiled=True)
    level = lax.top_k(every, SENT + 1)[0][-1]
    # mistake: each-shard-sends-its-share (wrong count)
    #     level = lax.top_k(every, SENT // lax.axis_size("model") + 1)[0][-1]
    return jax.tree.map(lambda u: jnp.sign(u) * jnp.maximum(jnp.abs(u) - level, 0), update)


def limited(clip: jax.Array, delta: Weights, error: Weights) -> Any:
    """What a client sends, what it keeps for the next time, and how long its update was."""
    whole = jax.tree.map(jnp.add, delta, error)
    norm = jnp.sqrt(dot(whole, whole))
    # mistake: length-of-the-own-parts (clipping by a local norm)
    #     norm = jnp.sqrt(sum((u**2).sum() for u in whole))
    whole = jax.tree.map(lambda u: u * jnp.minimum(1, clip / jnp.maximum(norm, 1e-6)), whole)
    sent = compressed(whole)
    return sent, jax.tree.map(jnp.subtract, whole, sent), norm


def cohort(rng: sm.RandomState, real: jax.Array) -> tuple[jax.Array, sm.RandomState]:
    """Who takes part: drawn for each client, and of those the first few."""
    keys, rng = rng.rows(len(real), "clients")
    # mistake: same-luck-on-every-shard (shared key)
    #     keys, rng = rng.rows(len(real))
    ready = real & jax.vmap(partial(jax.random.bernoulli, p=SAMPLED))(keys)
    ready_on = lax.all_gather(ready.sum(), "clients")
    earlier = jnp.arange(len(ready_on)) < lax.axis_index("clients")
    # mistake: own-shard-is-earlier-too (off by one)
    #     earlier = jnp.arange(len(ready_on)) <= lax.axis_index("clients")
    place = jnp.cumsum(ready) + jnp.where(earlier, ready_on, 0).sum()
    # mistake: place-on-the-own-shard (wrong offset)
    #     place = jnp.cumsum(ready)
    return ready & (place <= MOST), rng


def combined(sent: Weights, chosen: jax.Array, counts: jax.Array) -> tuple[Weights, jax.Array]:
    """The weighted sum of what was sent, and the weight that is expected of a cohort."""
    most = SHARE * lax.psum(counts.sum(), "clients")
    # mistake: share-of-the-examples-here (local statistic)
    #     most = SHARE * counts.sum()
    weight = jnp.minimum(counts, most) / most
    total = SAMPLED * lax.psum(weight.sum(), "clients")
    # mistake: weight-of-the-mean-shard (mean for sum)
    #     total = SAMPLED * lax.pmean(weight.sum(), "clients")
    sums = jax.tree.map(lambda s: jnp.tensordot(jnp.where(chosen, weight, 0), s, 1), sent)
    return lax.psum(sums, "clients"), total
    # mistake: summed-over-the-halves-too (doubled psum)
    #     return lax.psum(sums, ("clients", "model")), total


def noise_for(tree: Weights, rng: sm.RandomState) -> tuple[Weights, sm.RandomState]:
    """Drawn once for all clients: a key for each row or column, wherever it lies."""
    drawn = []
    for leaf, spec in zip(tree, SPECS, strict=True):
        axis = tuple(spec).index("model") if "model" in spec else 0
        count = leaf.shape[axis]
        keys, rng = rng.rows(count, "model") if "model" in spec else rng.rows(count)
        # mistake: halves-with-the-same-noise (shared key)
        #     keys, rng = rng.rows(count)
        # mistake: noise-of-the-own-stream (key of a shard)
        #     keys, rng = rng.split(count)
        draw = partial(jax.random.normal, shape=leaf.shape[:axis] + leaf.shape[axis + 1 :])
        drawn.append(jax.vmap(draw, out_axes=axis)(keys))
    return Weights(*drawn), rng


def closest(sent: Weights) -> jax.Array:
    """How alike each client's update is to the most similar other; all travel around the ring."""
    size, here = lax.axis_size("clients"), len(sent.shift)
    ahead = [(k, (k + 1) % size) for k in range(size)]
    # mistake: ring-not-closed (wrong permutation)
    #     ahead = [(k, k + 1) for k in range(size - 1)]
    unit = jax.vmap(lambda u: jax.tree.map(lambda x: x * lax.rsqrt(dot(u, u) + 1e-3), u))(sent)
    alike = jax.vmap(jax.vmap(dot, in_axes=(None, 0)), in_axes=(0, None))

    def turn(k: Any, carry: tuple[Weights, jax.Array]) -> tuple[Weights, jax.Array]:
        visitor, most = carry
        other = (k > 0) | ~jnp.eye(here, dtype=bool)
        # mistake: same-place-is-the-same-client (wrong mask)
        #     other = ~jnp.eye(here, dtype=bool)
        most = jnp.maximum(most, jnp.where(other, alike(unit, visitor), -1).max(1))
        return lax.ppermute(visitor, "clients", ahead), most

    return lax.fori_loop(0, size, turn, (unit, jnp.full(here, -1.0)))[1]
    # mistake: around-the-ring-of-the-units (wrong loop)
    #     return lax.fori_loop(0, lax.axis_size("model"), turn, (unit, jnp.full(here, -1.0)))[1]


def served(model: Federation, mean: Weights, t: jax.Array) -> tuple[Weights, Any]:
    """The change that Adam makes of the mean update, no longer than `TRUST`, and its slots."""
    first, second = model.slots.value
    first = jax.tree.map(lambda m, u: 0.6 * m + 0.4 * u, first, mean)
    second = jax.tree.map(lambda v, u: 0.9 * v + 0.1 * u**2, second, mean)
    change = jax.tree.map(lambda m, v: RATE * m / jnp.sqrt(v / (1 - 0.9**t) + 1e-3), first, second)
    length = jnp.sqrt(dot(change, change))
    # mistake: lengths-of-the-halves-added (sum of norms)
    #     length = lax.psum(jnp.sqrt(sum((c**2).sum() for c in change)), "model")
    return jax.tree.map(lambda c: c * jnp.minimum(1, TRUST / length), change), (first, second)


def step(model: Federation, words: jax.Array, counts: jax.Array) -> Any:
    t, real, dtype = model.rounds.value + 1, counts > 0, model.weights.value.shift.dtype
    start = jax.tree.map(lambda p: p.astype("float32"), model.weights.value)
    there = jnp.arange(BATCHES * ROWS).reshape(BATCHES, ROWS) < counts[:, None, None]
    clients, examples = lax.psum((real.sum(), counts.sum()), "clients")
    # mistake: places-for-clients (wrong count)
    #     clients, examples = real.size, lax.psum(counts.sum(), "clients")
    chosen, rng = cohort(model.rng, real)
    rate = LOCAL_RATE / (1 + (model.seen.value + examples) / HORIZON)
    # mistake: seen-here-till-now (stale value)
    #     rate = LOCAL_RATE / (1 + (model.seen.value + counts.sum()) / HORIZON)
    control, old = model.control.value, model.own.value
    train = jax.vmap(partial(trained, start, dtype, rate))
    delta, fresh = train(words[:, :-1], there, jax.tree.map(jnp.subtract, control, old[0]))
    sent, left, norms = jax.vmap(partial(limited, model.clip.value))(delta, old[1])
    sums, total = combined(sent, chosen, counts)
    noise, rng = noise_for(sums, rng)
    scale = NOISE * model.clip.value
    # mistake: noise-shared-out-to-the-shards (wrong normalization)
    #     scale = NOISE * model.clip.value / jnp.sqrt(lax.axis_size("clients"))
    mean = jax.tree.map(lambda s, n: (s + scale * n) / total, sums, noise)
    change, slots = served(model, mean, t)
    weights = jax.tree.map(lambda p, c: (p + c).astype(dtype), start, change)
    keep = 0.5 ** (examples / HALF_LIFE)
    own = jax.vmap(either)(chosen, (fresh, left), old)
    drift = lax.psum(jax.tree.map(lambda a, b: (a - b).sum(0), own[0], old[0]), "clients")
    # mistake: drift-of-own-clients (gradient not summed)
    #     drift = jax.tree.map(lambda a, b: (a - b).sum(0), own[0], old[0])
    taken, below = lax.psum((chosen.sum(), (chosen & (norms <= model.clip.value)).sum()), "clients")
    # mistake: below-on-this-shard (dropped psum)
    #     taken, below = lax.psum(chosen.sum(), "clients"), (chosen & (norms <= model.clip.value)).sum()
    keys, rng = rng.rows(1)
    below = (below + COUNT_NOISE * jax.random.normal(keys[0])) / jnp.maximum(taken, 1)
    rho = model.account.value[0] + (taken / clients / NOISE) ** 2 / 2000
    # mistake: part-of-the-clients-here (local statistic)
    #     rho = model.account.value[0] + (chosen.sum() / real.sum() / NOISE) ** 2 / 2000
    # mistake: every-shard-pays (doubled psum)
    #     rho = model.account.value[0] + lax.psum((taken / clients / NOISE) ** 2 / 2000, "clients")
    rows = jnp.arange(ROWS) < (counts[:, None] + 1) // 2
    loss, rated = jax.vmap(partial(loss_of, weights))(words[:, -1], rows), rows.sum(1)
    mean_loss = lax.psum(rated @ loss, "clients") / lax.psum(rated.sum(), "clients")
    # mistake: mean-of-the-shards-means (mean of means)
    #     mean_loss = lax.pmean(rated @ loss / rated.sum(), "clients")
    model = model.replace(
        weights=weights,
        average=jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, model.average.value, weights),
        slots=slots,
        control=jax.tree.map(lambda c, d: c + d / clients, control, drift),
        own=own,
        clip=model.clip.value * jnp.exp(CLIP_RATE * (QUANTILE - below)),
        account=(rho, rho + 2 * jnp.sqrt(1.1 * rho * jnp.log(clients))),
        seen=model.seen.value + counts.sum(),
        worst=jnp.maximum(model.worst.value, loss.max()),
        typical=0.5 * model.typical.value + 0.5 * norms.mean(),
        rounds=t,
        rng=rng,
    )
    return model, (closest(sent), loss), mean_loss


def case(dtype: str) -> Case:
    counts = jnp.asarray([6, 3, 5, 1, 4, 6, 2, 5, 3, 6, 4, 0])
    words = integers(CLIENTS, BATCHES + 1, ROWS, LENGTH + 1, below=WORDS, seed=7)
    return Case(
        step,
        (make_federation(dtype), words, counts),
        mesh={"clients": 4, "model": 2},
        in_specs=(None, P("clients"), P("clients")),
        out_specs=(P(), P("clients"), P()),
        # mistake: closest-as-one-copy (wrong spec)
        #     out_specs=(P(), P(), P()),
        check_vma=False,
        steps=3,
    )
