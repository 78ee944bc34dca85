"""Speech recognition: utterances over one axis, the frames of each utterance over the other."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
FRAMES, FEATURES, UNITS, CLASSES, TOKENS, PART, RATE, WARM = 24, 3, 8, 5, 4, 24, 0.05, 200
LENGTHS, SPOKEN, BOTH = (22, 17, 9, 20, 13, 24), (4, 3, 2, 3, 4, 3), ("batch", "time")
NOISE, MASKED, SMOOTHING, NEVER, CLIP, DECAY, HALF_LIFE = 1.0, 4, 0.2, -1e4, 0.4, 0.1, 30
SHAPES: dict[str, tuple[int, ...]] = {"window": (6 * FEATURES, UNITS), "gate": (UNITS, UNITS)}
SHAPES |= {"head": (UNITS, CLASSES), "scale": (UNITS,), "query": (UNITS,), "bias": (CLASSES,)}
Arrays = dict[str, jax.Array]


class Recognizer(sm.Module):
    params: sm.ParamState
    average: sm.State
    slots: sm.State
    carry: sm.HiddenState
    sums: sm.BatchState
    prior: sm.State
    confusion: sm.State
    longest: sm.State
    counts: sm.State
    key: Any


def make_recognizer(dtype: str) -> Recognizer:
    params = {name: normal(dtype, *shape, seed=ord(name[0])) / 2 for name, shape in SHAPES.items()}
    row, per = 0 * padded(params), jnp.zeros(FEATURES)
    return Recognizer(
        params=sm.ParamState(params),
        average=sm.State(jax.tree.map(lambda p: p.astype("float32"), params)),
        slots=sm.State((row, row), spec=P("time")),
        carry=sm.HiddenState(normal("float32", len(LENGTHS), UNITS, seed=8), spec=P("batch")),
        sums=sm.BatchState((0 * per[0], per, per), reduce="sum"),
        # mistake: sums-on-average (wrong policy)
        #     sums=sm.BatchState((0 * per[0], per, per), reduce="mean"),
        prior=sm.State(jnp.full(CLASSES, 1 / CLASSES)),
        confusion=sm.State(jnp.zeros((CLASSES, CLASSES), "int32"), reduce="sum"),
        # mistake: confusion-of-the-worst-shard (wrong policy)
        #     confusion=sm.State(jnp.zeros((CLASSES, CLASSES), "int32"), reduce="max"),
        longest=sm.State(0, reduce="max"),
        # mistake: longest-on-one-shard (missing policy)
        #     longest=sm.State(0),
        counts=sm.State((0, 0)),
        key=jax.random.key(4),
    )


def padded(tree: Any) -> jax.Array:
    """All numbers as one row, which every number of shards divides."""
    row = ravel_pytree(jax.tree.map(lambda a: a.astype("float32"), tree))[0]
    return jnp.pad(row, (0, -len(row) % PART))


def places(here: int, frames: int) -> tuple[jax.Array, jax.Array]:
    """The numbers of this shard's utterances, and of its frames, among all."""
    utterance = lax.axis_index("batch") * here + jnp.arange(here)
    # mistake: utterances-of-a-shard (row index not offset)
    #     utterance = jnp.arange(here)
    frame = lax.axis_index("time") * frames + jnp.arange(frames)
    # mistake: frames-offset-by-the-shards (wrong offset)
    #     frame = lax.axis_index("time") * lax.axis_size("time") + jnp.arange(frames)
    return utterance, frame


def over_time(x: jax.Array) -> jax.Array:
    """The sum over all frames of each utterance."""
    return lax.psum(x.sum(1, keepdims=True), "time")
    # mistake: sum-over-both-axes (wrong axis name)
    #     return lax.psum(x.sum(1, keepdims=True), BOTH)


def features(x: jax.Array, valid: jax.Array, sums: Any) -> jax.Array:
    """Normalized by the valid frames of the utterance, and beside it by all frames so far."""
    weight = valid[..., None].astype("float32")
    count = over_time(weight)
    # mistake: frames-counted-here (count of a shard)
    #     count = jnp.maximum(weight.sum(1, keepdims=True), 1)
    mean = over_time(weight * x) / count
    squares = over_time(weight * (x - mean) ** 2) / count
    # mistake: squares-around-the-own-mean (mean of variances)
    #     squares = over_time(weight * (x - x.mean(1, keepdims=True)) ** 2) / count
    middle = sums[1] / sums[0]
    common = (x - middle) * lax.rsqrt(sums[2] / sums[0] - middle**2 + 0.01)
    return jnp.concatenate([(x - mean) * lax.rsqrt(squares + 0.01), common], -1)


def augmented(x: jax.Array, valid: jax.Array, lengths: jax.Array, key: jax.Array) -> jax.Array:
    """Each frame louder or softer, and some in a row left out, by the number of the utterance."""
    utterance, frame = places(*valid.shape)
    keys = jax.vmap(partial(jax.random.fold_in, key))(utterance)
    # mistake: keys-split-on-each-shard (shared key)
    #     keys = jax.random.split(key, len(x))
    # mistake: another-key-in-each-block (key of a shard)
    #     keys = jax.vmap(partial(jax.random.fold_in, key))(utterance + 100 * frame[0])
    draws = jax.vmap(partial(jax.random.uniform, shape=(FRAMES + 1,)))(keys)
    noise = draws[:, frame, None] - 0.5
    # mistake: noise-of-the-first-frames (position not offset)
    #     noise = draws[:, : len(frame), None] - 0.5
    after = frame - draws[:, FRAMES:] * lengths[:, None]
    # mistake: left-out-in-every-block (position not offset)
    #     after = jnp.arange(len(frame)) - draws[:, FRAMES:] * lengths[:, None]
    return jnp.where((valid & ((after < 0) | (after >= MASKED)))[..., None], x + NOISE * noise, 0)


def windows(x: jax.Array) -> jax.Array:
    """Each frame between the one before and the one after; zero beyond the first and last."""
    onwards = [(i, i + 1) for i in range(lax.axis_size("time") - 1)]
    # mistake: edges-to-the-wrong-sides (wrong ppermute neighbour)
    #     onwards = [(i + 1, i) for i in range(lax.axis_size("time") - 1)]
    before = lax.ppermute(x[:, -1:], "time", onwards)
    # mistake: first-frame-sent-onwards (halo from the wrong side)
    #     before = lax.ppermute(x[:, :1], "time", onwards)
    after = lax.ppermute(x[:, :1], "time", [(b, a) for a, b in onwards])
    # mistake: silence-after-each-block (ppermute forgotten)
    #     after = jnp.zeros_like(x[:, :1])
    x = jnp.concatenate([before, x, after], 1)
    return jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], -1)


def forward(gate: jax.Array, x: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`h = gate * h + x` frame by frame over all shards of time, and the last `h` of all."""

    def more(before: Any, now: Any) -> Any:
        now = before[0] * now[0], before[1] * now[0] + now[1]
        return now, now

    none = jnp.ones_like(start), jnp.zeros_like(start)
    end, (kept, own) = lax.scan(more, none, (gate.swapaxes(0, 1), x.swapaxes(0, 1)))
    ends = lax.all_gather(end, "time")
    carries = [start]
    for i in range(lax.axis_size("time")):
        carries.append(carries[-1] * ends[0][i] + ends[1][i])
        # mistake: blocks-faded-by-the-own-gate (stale value)
        #     carries.append(carries[-1] * end[0] + ends[1][i])
    before = jnp.stack(carries)[lax.axis_index("time")]
    # mistake: every-block-from-the-start (carry not passed on)
    #     before = start
    h = own + kept * before
    return h.swapaxes(0, 1), carries[-1]
    # mistake: state-after-the-own-block (last value of a shard)
    #     return h.swapaxes(0, 1), h[-1]


def backward(x: jax.Array, scale: jax.Array) -> jax.Array:
    """All that follows each frame, summed over all frames for this shard's part of the units."""
    whole = lax.all_to_all(x, "time", 2, 1, tiled=True)
    part = scale.reshape(-1, whole.shape[2])[lax.axis_index("time")]
    # mistake: scale-of-the-first-units (axis_index forgotten)
    #     part = scale[: whole.shape[2]]
    out = part * lax.cumsum(whole, 1, reverse=True)
    return lax.all_to_all(out, "time", 1, 2, tiled=True)
    # mistake: units-and-frames-reshaped (wrong order of parts)
    #     return out.reshape(x.shape)


@jax.custom_jvp
def log_total(score: jax.Array) -> jax.Array:
    """The logarithm of the summed exponentials of all frames."""
    highest = lax.pmax(score.max(1, keepdims=True), "time")
    # mistake: highest-of-own-frames (dropped pmax)
    #     highest = score.max(1, keepdims=True)
    return highest + jnp.log(over_time(jnp.exp(score - highest)))


@log_total.defjvp
def change_of_log_total(scores: Any, changes: Any) -> tuple[jax.Array, jax.Array]:
    value = log_total(*scores)
    change = jnp.exp(scores[0] - value) * changes[0]
    return value, over_time(change)
    # mistake: change-by-own-frames (custom derivative not reduced)
    #     return value, change.sum(1, keepdims=True)


def aligned(log_p: jax.Array, there: jax.Array, tokens: jax.Array, spoken: jax.Array) -> jax.Array:
    """What all ways through the tokens cost: one shard of time after the other, known to all."""
    number, size = lax.axis_index("time"), lax.axis_size("time")
    picked = jnp.take_along_axis(log_p, tokens[:, None], 2)

    def advanced(alpha: jax.Array, now: Any) -> tuple[jax.Array, None]:
        before = jnp.pad(alpha[:, :-1], ((0, 0), (1, 0)), constant_values=NEVER)
        return jnp.where(now[1][:, None], jnp.logaddexp(alpha, before) + now[0], alpha), None

    def turn(alpha: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        end, _ = lax.scan(advanced, alpha, (picked.swapaxes(0, 1), there.T))
        given = lax.ppermute(end, "time", [(i, i + 1) for i in range(size - 1)])
        return jnp.where(number == at + 1, given, alpha), end
        # mistake: turn-too-early (off by one)
        #     return jnp.where(number == at, given, alpha), end

    start = jnp.where(jnp.arange(TOKENS) == 0, 0.0, jnp.full(tokens.shape, NEVER))
    _, ends = lax.scan(turn, start, jnp.arange(size))
    costs = -jnp.take_along_axis(ends[-1], spoken[:, None] - 1, 1)[:, 0]
    return lax.psum(jnp.where(number == size - 1, costs, 0), "time")
    # mistake: costs-of-every-block (mask forgotten)
    #     return lax.psum(costs, "time")


def loss_fn(params: Arrays, net: Recognizer, x: jax.Array, valid: jax.Array, batch: Arrays) -> Any:
    """This shard's share: the derivative through a psum is that of all shares together."""
    there, size = valid[:, ::2], lax.axis_size("time")
    rows = jax.nn.silu(windows(x) @ params["window"]).reshape(*there.shape, 2, UNITS).mean(2)
    gate = jax.nn.sigmoid((rows @ params["gate"]).astype("float32") + 1)
    gate, rows = (jnp.where(there[..., None], a, b) for a, b in ((gate, 1), (rows, 0)))
    hidden, carry = forward(gate, (1 - gate) * rows, net.carry.value)
    hidden += backward(rows.astype("float32"), params["scale"].astype("float32") / FRAMES)
    score = jnp.where(there, hidden @ params["query"], NEVER)
    pooled = jnp.exp(score - log_total(score))[..., None] * hidden
    context = over_time(pooled)
    # mistake: context-of-own-frames (dropped psum)
    #     context = pooled.sum(1, keepdims=True)
    log_p = jax.nn.log_softmax((hidden + context) @ params["head"] + params["bias"])
    goals = (1 - SMOOTHING) * jax.nn.one_hot(batch["labels"], CLASSES)
    missed = jnp.where(there, -((goals + SMOOTHING * net.prior.value) * log_p).sum(-1), 0)
    costs = aligned(log_p, there, batch["tokens"], batch["spoken"]).sum() / size
    # mistake: costs-counted-in-every-block (gradient reduced twice)
    #     costs = aligned(log_p, there, batch["tokens"], batch["spoken"]).sum()
    frames, utterances = lax.psum(there.sum(), BOTH), len(x) * lax.axis_size("batch")
    # mistake: share-by-own-frames (count of a shard)
    #     frames, utterances = jnp.maximum(there.sum(), 1), len(x) * lax.axis_size("batch")
    return missed.sum() / frames + 0.2 * costs / utterances, (carry, log_p, missed)


def reduced(grads: Arrays) -> tuple[jax.Array, jax.Array]:
    """A part, for this shard of time, of all shards' gradient, and the length of the whole."""
    row = lax.psum(padded(grads), "batch")
    # mistake: gradient-of-own-utterances (gradient not reduced)
    #     row = padded(grads)
    own = lax.psum_scatter(row, "time", tiled=True)
    norm = jnp.sqrt(lax.psum((own**2).sum(), "time"))
    # mistake: norm-of-the-own-part (local norm in clipping)
    #     norm = jnp.sqrt((own**2).sum())
    return own * jnp.minimum(1, CLIP / norm), norm


def adam(params: Arrays, own: jax.Array, slots: Any, t: jax.Array, rate: jax.Array) -> Any:
    """The new parameters, of which each shard of time makes a part, and its part of the slots."""
    first, second = 0.8 * slots[0] + 0.2 * own, 0.9 * slots[1] + 0.1 * own**2
    change = first / (1 - 0.8**t) / (jnp.sqrt(second / (1 - 0.9**t)) + 0.01)
    weights = padded({name: p if p.ndim > 1 else 0 * p for name, p in params.items()})
    change += DECAY * weights.reshape(-1, len(own))[lax.axis_index("time")]
    # mistake: decay-of-the-first-part (axis_index forgotten)
    #     change += DECAY * weights[: len(own)]
    whole = lax.all_gather(change, "time", tiled=True)
    # mistake: parts-interleaved (wrong order of parts)
    #     whole = lax.all_gather(change, "time", axis=1).reshape(-1)
    row, unravel = ravel_pytree(params)
    return unravel((padded(params) - rate * whole)[: len(row)].astype(row.dtype)), (first, second)


def step(net: Recognizer, batch: Arrays) -> Any:
    sound, lengths = batch["sound"].astype("float32"), batch["lengths"]
    valid = places(*sound.shape[:2])[1] < lengths[:, None]
    weighted = jnp.where(valid[..., None], sound, 0)
    own = valid.sum(), weighted.sum((0, 1)), (weighted**2).sum((0, 1))
    sums = jax.tree.map(lambda old, new: old + lax.psum(new, BOTH), net.sums.value, own)
    # mistake: sums-of-one-block-of-time (wrong axis name)
    #     sums = jax.tree.map(lambda old, new: old + lax.psum(new, "batch"), net.sums.value, own)
    key, now = jax.random.split(net.key)
    # mistake: next-key-of-the-utterances (key of a shard)
    #     key, now = jax.random.split(jax.random.fold_in(net.key, lax.axis_index("batch")))
    x = augmented(features(sound, valid, sums), valid, lengths, now).astype(batch["sound"].dtype)
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (carry, log_p, missed)), grads = gradient(net.params.value, net, x, valid, batch)
    (grad, norm), there = reduced(grads), valid[:, ::2]
    seen, t = net.counts.value[0] + lax.psum(valid.sum(), BOTH), net.counts.value[1] + 1
    # mistake: frames-of-a-shard-so-far (dropped psum)
    #     seen, t = net.counts.value[0] + valid.sum(), net.counts.value[1] + 1
    rate = RATE * jnp.minimum(1, seen / WARM)
    params, slots = adam(net.params.value, grad, net.slots.value, t, rate)
    keep = 0.5 ** (len(x) * lax.axis_size("batch") / HALF_LIFE)
    # mistake: half-life-in-own-utterances (count of a shard)
    #     keep = 0.5 ** (len(x) / HALF_LIFE)
    predicted, count = log_p.argmax(-1), over_time(there)[:, 0]
    posterior = jnp.where(there[..., None], jnp.exp(log_p), 0)
    share = lax.psum(posterior.sum((0, 1)), BOTH) / lax.psum(count.sum(), "batch")
    # mistake: frames-counted-in-time-twice (doubled psum)
    #     share = lax.psum(posterior.sum((0, 1)), BOTH) / lax.psum(count.sum(), BOTH)
    lost = over_time(missed)[:, 0] / count
    # mistake: lost-on-average-of-blocks (pmean for psum)
    #     lost = lax.pmean(missed.sum(1), "time") / count
    net = net.replace(
        params=params,
        average=jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, net.average.value, params),
        slots=slots,
        carry=carry,
        sums=jax.tree.map(jnp.add, net.sums.value, own),
        prior=0.8 * net.prior.value + 0.2 * share,
        confusion=net.confusion.value.at[batch["labels"], predicted].add(there.astype("int32")),
        longest=jnp.maximum(net.longest.value, lengths.max()),
        counts=(seen, t),
        key=key,
    )
    worst = lax.all_gather(lost, "batch", tiled=True).argmax()
    # mistake: worst-among-own-utterances (argmax of a shard)
    #     worst = lost.argmax()
    numbers = {"loss": lax.psum(loss, BOTH), "norm": norm, "worst": worst}
    return net, posterior, lost, numbers


def case(dtype: str) -> Case:
    n = len(LENGTHS)
    batch = {"sound": normal(dtype, n, FRAMES, FEATURES, seed=40) + normal(dtype, n, 1, 1, seed=10)}
    batch |= {"labels": integers(n, FRAMES // 2, below=CLASSES, seed=11)}
    batch |= {"tokens": integers(n, TOKENS, below=CLASSES, seed=12)}
    batch |= {"lengths": jnp.asarray(LENGTHS), "spoken": jnp.asarray(SPOKEN)}
    return Case(
        step,
        (make_recognizer(dtype), batch),
        mesh={"batch": 2, "time": 4},
        in_specs=(None, dict.fromkeys(batch, P("batch")) | {"sound": P(*BOTH), "labels": P(*BOTH)}),
        out_specs=(P(), P(*BOTH), P("batch"), P()),
        # mistake: lost-as-one-copy (wrong spec)
        #     out_specs=(P(), P(*BOTH), P(), P()),
        check_vma=False,
        steps=3,
    )
