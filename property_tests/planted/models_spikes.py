"""Spiking neurons that learn to tell stimuli: neurons over one axis, trials over the other."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
TRIALS, NEURONS, TIME, CLASSES, NEAR, DELAY, EXCITATORY, REST = 8, 16, 6, 3, 2, 2, 12, 2
LEAK, SYNAPSE, STEEP, USED, RECOVERY, RESET, NOISE = 0.6, 0.8, 4.0, 0.4, 0.3, 0.5, 0.2
RATIO, INHIBITION, HALF, TARGET, RATES, COLUMN = 2.0, 0.8, 0.5, 0.2, 2.0, 0.2
RATE, CLIP, LEARN, NIGHT, LENGTHS = 0.2, 0.3, 0.3, 60, (6, 4, 5, 6, 3, 6, 2, 5)
SPLIT, COMMON, EDGES = ("recurrent", "gain", "readout"), ("kernel", "bias"), (0.175, 0.214, 0.365)
OF_PARAMS = {name: P("neurons") for name in SPLIT} | {name: P() for name in COMMON}
BOTH, OF_BOTH, LINE = ("neurons", "trials"), P("trials", "neurons"), P(None, "trials", "neurons")
Arrays = dict[str, jax.Array]


class Network(sm.Module):
    params: sm.ParamState
    slots: sm.State
    slow: sm.State
    activity: sm.HiddenState
    resting: sm.State
    homeostat: sm.State
    baseline: sm.State
    spikes: sm.State
    loudest: sm.State
    seen: sm.State
    calls: sm.State
    key: Any


def make_network(dtype: str) -> Network:
    draw = partial(normal, dtype)
    params = {"gain": 1 + draw(NEURONS, seed=41) / 4, "bias": draw(CLASSES, seed=7) / 4}
    params |= {"recurrent": draw(NEURONS, NEURONS, seed=1), "kernel": draw(2 * NEAR + 1, seed=2)}
    params["readout"] = draw(NEURONS, CLASSES, seed=4) / 8
    slow, one = abs(normal("float32", NEURONS, NEURONS, seed=5)), jnp.ones((TRIALS, NEURONS))
    activity = {"potential": 0.2 * one, "resources": one, "trace": 0 * one}
    activity["line"] = jnp.zeros((DELAY, TRIALS, NEURONS), dtype)
    return Network(
        params=sm.ParamState(params, spec=OF_PARAMS),
        slots=sm.State(jax.tree.map(lambda p: jnp.zeros(p.shape), params), spec=OF_PARAMS),
        slow=sm.State(COLUMN * slow / slow.sum(0), spec=P("neurons")),
        activity=sm.HiddenState(activity, spec=dict.fromkeys(activity, OF_BOTH) | {"line": LINE}),
        resting=sm.State(jnp.zeros((TRIALS, NEURONS), "int32"), spec=OF_BOTH),
        homeostat=sm.State((0.2 * one[0], 0.7 + slow[0] / 8), spec=P("neurons")),
        baseline=sm.State(-jnp.ones(())),
        spikes=sm.State(jnp.zeros(()), reduce="sum"),
        # mistake: spikes-of-the-mean-shard (wrong policy)
        #     spikes=sm.State(jnp.zeros(()), reduce="mean"),
        loudest=sm.State(jnp.zeros(()), reduce="max"),
        # mistake: loudest-of-one-shard (missing policy)
        #     loudest=sm.State(jnp.zeros(())),
        seen=sm.State(0, reduce="sum"),
        calls=sm.State(0),
        key=jax.random.key(3),
    )


def neurons_of(here: int) -> jax.Array:
    """The numbers of this shard's neurons among all."""
    return lax.axis_index("neurons") * here + jnp.arange(here)
    # mistake: neurons-dealt-in-turn (wrong order of rows)
    #     return lax.axis_index("neurons") + lax.axis_size("neurons") * jnp.arange(here)


def tuning_of(here: int) -> jax.Array:
    return 2 * jnp.pi * neurons_of(here) / NEURONS
    # mistake: each-shard-goes-around (count of a shard)
    #     return 2 * jnp.pi * neurons_of(here) / here


def noise_of(net: Network, trials: int, neurons: int) -> jax.Array:
    """Of each step, trial and neuron, by their numbers among all."""
    number = lax.axis_index("trials") * trials + jnp.arange(trials)
    # mistake: trial-in-the-shard (row index not offset)
    #     number = jnp.arange(trials)
    key = jax.random.fold_in(net.key, net.calls.value)
    # mistake: key-of-the-neurons (key of a shard)
    #     key = jax.random.fold_in(net.key, net.calls.value + 100 * lax.axis_index("neurons"))
    cells = number[:, None] * NEURONS + neurons_of(neurons)
    # mistake: rows-as-wide-as-the-shard (wrong stride)
    #     cells = number[:, None] * neurons + neurons_of(neurons)
    keys = jax.vmap(partial(jax.random.fold_in, key))(cells.reshape(-1))
    noise = jax.vmap(lambda one: jax.random.normal(one, (TIME,)), out_axes=1)(keys)
    return noise.reshape(TIME, trials, neurons)


def pool_of(x: jax.Array) -> jax.Array:
    return HALF + lax.pmean(x.mean(-1, keepdims=True), "neurons")
    # mistake: pool-of-own-neurons (dropped pmean)
    #     return HALF + x.mean(-1, keepdims=True)


@jax.custom_vjp
def normalized(x: jax.Array) -> jax.Array:
    """Divided by what all neurons get."""
    return x / pool_of(x)


def normalized_forward(x: jax.Array) -> Any:
    pool = pool_of(x)
    return x / pool, (x, pool)


def normalized_backward(kept: Any, g: jax.Array) -> tuple[jax.Array]:
    x, pool = kept
    shared = lax.pmean((g * x).mean(-1, keepdims=True), "neurons")
    # mistake: pool-follows-own-neurons (custom derivative without its reduction)
    #     shared = (g * x).mean(-1, keepdims=True)
    return (g / pool - shared / pool**2,)


normalized.defvjp(normalized_forward, normalized_backward)


@jax.custom_jvp
def spike(over: jax.Array) -> jax.Array:
    """A graded spike; its derivative is that of a fast sigmoid, which has heavier tails."""
    return jax.nn.sigmoid(STEEP * over)


@spike.defjvp
def spike_tangent(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    return spike(*primals), tangents[0] * STEEP / (2 + STEEP * jnp.abs(primals[0])) ** 2


def lateral(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """What comes from neighbours on the ring, some of which are on the shards beside."""
    here, size = x.shape[1], lax.axis_size("neurons")
    left = lax.ppermute(x[:, -NEAR:], "neurons", [(i, (i + 1) % size) for i in range(size)])
    # mistake: left-from-the-shard-after (wrong ppermute)
    #     left = lax.ppermute(x[:, -NEAR:], "neurons", [((i + 1) % size, i) for i in range(size)])
    right = lax.ppermute(x[:, :NEAR], "neurons", [((i + 1) % size, i) for i in range(size)])
    # mistake: ring-of-each-shard (halo of a shard)
    #     right = x[:, :NEAR]
    wide = jnp.concatenate([left, x, right], 1)
    return sum((kernel[j] * wide[:, j : j + here] for j in range(len(kernel))), jnp.zeros_like(x))


def advance(params: Arrays, net: Network, old: Arrays, now: Any) -> tuple[Arrays, jax.Array]:
    """One step of time; trials that are over stay as they are."""
    t, drive, noise, live = now
    sent, here = old["line"][-1], drive.shape[1]
    signed = jnp.where(neurons_of(here) < EXCITATORY, sent, -RATIO * sent)
    # mistake: inhibitory-by-place-in-the-shard (unit index not offset)
    #     signed = jnp.where(jnp.arange(here) < EXCITATORY, sent, -RATIO * sent)
    whole = lax.all_gather(signed, "neurons", axis=1, tiled=True)
    # mistake: senders-interleaved (wrong order of parts)
    #     whole = lax.all_gather(signed, "neurons", axis=2).reshape(len(signed), -1)
    current = (whole @ jnp.abs(params["recurrent"]).T + lateral(params["kernel"], sent)) / 4
    part = old["trace"] @ net.slow.value
    current += lax.psum_scatter(part, "neurons", scatter_dimension=1, tiled=True)
    # mistake: slow-ones-of-the-first-neurons (offset of the slice forgotten)
    #     current += lax.psum(part, "neurons")[:, :here]
    current -= INHIBITION * lax.pmean(sent.astype("float32").mean(1, keepdims=True), "neurons")
    # mistake: inhibited-by-a-sum (psum for pmean)
    #     current -= INHIBITION * lax.psum(sent.astype("float32").mean(1, keepdims=True), "neurons")
    potential = LEAK * old["potential"] + (1 - LEAK) * (drive + current + NOISE * noise)
    fired = jnp.where(t < net.resting.value, 0, spike(potential - net.homeostat.value[1]))
    left = old["resources"] + RECOVERY * (1 - old["resources"]) - USED * fired * old["resources"]
    after = {"potential": potential - RESET * fired, "resources": left}
    after |= {"trace": SYNAPSE * old["trace"] + fired, "line": jnp.roll(old["line"], 1, 0)}
    after["line"] = after["line"].at[0].set((fired * old["resources"]).astype(sent.dtype))
    return jax.tree.map(partial(jnp.where, live[:, None]), after, old), live[:, None] * fired


def loss_fn(params: Arrays, net: Network, trials: Arrays, noise: jax.Array) -> Any:
    """This shard's share: the gradient through a psum is that of the sum over all shards."""
    live = jnp.arange(TIME)[:, None] < trials["length"]
    tuned = 1 + jnp.cos(trials["angle"][:, None] - tuning_of(noise.shape[2]))
    drive = normalized(params["gain"].astype("float32") * trials["contrast"][..., None] * tuned)
    scanned = jnp.arange(TIME), drive, noise, live
    final, fired = lax.scan(partial(advance, params, net), net.activity.value, scanned)
    logits = lax.psum(final["trace"] @ params["readout"], "neurons") + params["bias"]
    # mistake: bias-of-every-shard (bias added before the psum)
    #     logits = lax.psum(final["trace"] @ params["readout"] + params["bias"], "neurons")
    likely = jax.nn.log_softmax(logits)[jnp.arange(len(logits)), trials["label"]]
    steps = lax.psum(live.sum(), "trials")
    # mistake: steps-of-own-trials (count of a shard)
    #     steps = live.sum()
    rates = lax.psum(fired.sum((0, 1)), "trials") / steps
    judged = trials["length"] > 2
    count = lax.psum(judged.sum(), "trials")
    # mistake: judged-on-average (pmean for psum)
    #     count = lax.pmean(judged.sum(), "trials")
    missed = -jnp.where(judged, likely, 0).sum() / count
    apart = RATES * ((rates - TARGET) ** 2).sum() / NEURONS
    # mistake: apart-by-own-neurons (count of a shard)
    #     apart = RATES * ((rates - TARGET) ** 2).mean()
    share = missed / lax.axis_size("neurons") + apart / lax.axis_size("trials")
    # mistake: apart-in-every-trial-shard (regularization counted by every shard)
    #     share = missed / lax.axis_size("neurons") + apart
    return share, (share, final, fired, likely, rates)


def reduced(grads: Arrays) -> tuple[Arrays, jax.Array]:
    """The gradients of all trials, together no longer than `CLIP`, and how long they were."""
    grads = {name: lax.psum(g.astype("float32"), "trials") for name, g in grads.items()}
    # mistake: shares-averaged (pmean for psum)
    #     grads = {name: lax.pmean(g.astype("float32"), "trials") for name, g in grads.items()}
    grads |= {name: lax.psum(grads[name], "neurons") for name in COMMON}
    # mistake: kernel-by-own-neurons (gradient not reduced)
    #     grads |= {name: lax.psum(grads[name], "neurons") for name in COMMON[1:]}
    own, common = (sum((grads[name] ** 2).sum() for name in names) for names in (SPLIT, COMMON))
    norm = jnp.sqrt(lax.psum(own, "neurons") + common)
    # mistake: norm-of-own-neurons (local norm in clipping)
    #     norm = jnp.sqrt(own + common)
    # mistake: common-ones-of-every-shard (doubled psum)
    #     norm = jnp.sqrt(lax.psum(own + common, "neurons"))
    return {name: g * jnp.minimum(1, CLIP / norm) for name, g in grads.items()}, norm


def reinforced(net: Network, pre: jax.Array, post: jax.Array, likely: jax.Array) -> Any:
    """The slow weights after trials that went better or worse than before, and the new baseline."""
    mean = lax.pmean(likely.mean(), "trials")
    baseline = 0.7 * net.baseline.value + 0.3 * mean
    # mistake: baseline-of-own-trials (statistics of a shard)
    #     baseline = 0.7 * net.baseline.value + 0.3 * likely.mean()
    deviation = jnp.sqrt(lax.pmean(((likely - mean) ** 2).mean(), "trials"))
    # mistake: deviations-averaged (mean of deviations)
    #     deviation = lax.pmean(likely.std(), "trials")
    better = (likely - baseline) / (deviation + 0.1)
    whole = lax.all_gather(post, "neurons", axis=1, tiled=True)
    change = lax.psum(jnp.einsum("b,bi,bj->ij", better, pre, whole), "trials") / TRIALS
    # mistake: taught-by-own-trials (dropped psum)
    #     change = jnp.einsum("b,bi,bj->ij", better, pre, whole) / len(better)
    slow = net.slow.value * jnp.exp(LEARN * change)
    return COLUMN * slow / lax.psum(slow.sum(0), "neurons"), baseline
    # mistake: columns-of-own-rows (dropped psum)
    #     return COLUMN * slow / slow.sum(0), baseline


def statistics(fired: jax.Array, rates: jax.Array) -> Any:
    """What own trials tell, Fano factors, the entropy of some trials, and numbers of all."""
    counts, here, tuning = fired.sum(0), len(rates), tuning_of(len(rates))
    x, y = counts @ jnp.cos(tuning), counts @ jnp.sin(tuning)
    angle = jnp.arctan2(lax.psum(y, "neurons"), lax.psum(x, "neurons"))
    # mistake: angles-averaged (reduction after a nonlinearity)
    #     angle = lax.pmean(jnp.arctan2(y, x), "neurons")
    mean = lax.pmean(counts.mean(0), "trials")
    squares = lax.psum(((counts - mean) ** 2).sum(0), "trials")
    # mistake: squares-around-own-means (mean of variances)
    #     squares = lax.psum(((counts - counts.mean(0)) ** 2).sum(0), "trials")
    whole = lax.all_to_all(counts + 0.1, "neurons", split_axis=0, concat_axis=1, tiled=True)
    part = whole / whole.sum(1, keepdims=True)
    together = lax.pmean(fired.mean(2), "neurons").var(0)
    # mistake: shards-in-step-with-themselves (wrong order of operations)
    #     together = lax.pmean(fired.mean(2).var(0), "neurons")
    together = together / lax.pmean(fired.var(0).mean(1), "neurons")
    numbers = {"synchrony": lax.pmean(together.mean(), "trials")}
    bins = (rates[:, None] > jnp.asarray(EDGES)).sum(1)
    numbers["histogram"] = lax.psum((bins[:, None] == jnp.arange(4)).sum(0), "neurons")
    # mistake: histogram-of-both-axes (doubled psum)
    #     numbers["histogram"] = lax.psum((bins[:, None] == jnp.arange(4)).sum(0), BOTH)
    own = jnp.where(rates == lax.pmax(rates.max(), "neurons"), neurons_of(here), NEURONS)
    # mistake: most-active-in-its-shard (axis_index forgotten)
    #     own = jnp.where(rates == lax.pmax(rates.max(), "neurons"), jnp.arange(here), NEURONS)
    numbers["most"] = lax.pmin(own.min(), "neurons")
    return angle, squares / (TRIALS - 1) / mean, -(part * jnp.log(part)).sum(1), numbers


def step(net: Network, trials: Arrays) -> Any:
    here = len(net.homeostat.value[0])
    noise = noise_of(net, len(trials["label"]), here)
    grads, aux = jax.grad(loss_fn, has_aux=True)(net.params.value, net, trials, noise)
    (share, final, fired, likely, rates), (grads, norm) = aux, reduced(grads)
    seen = net.seen.value + lax.psum(trials["length"].sum(), "trials")
    # mistake: steps-of-the-others-later (stale value)
    #     seen = net.seen.value + trials["length"].sum()
    rate = RATE / (1 + seen / 50)
    # mistake: rate-grows-with-the-shards (small factor)
    #     rate = RATE * lax.axis_size("trials") ** 0.5 / (1 + seen / 50)
    slots = jax.tree.map(lambda m, g: 0.7 * m + g, net.slots.value, grads)
    counts = fired.sum(0)
    slow, baseline = reinforced(net, final["trace"], counts / TIME, likely)
    night = seen // NIGHT > net.seen.value // NIGHT
    average = 0.8 * net.homeostat.value[0] + 0.2 * rates
    winner = lax.all_gather(counts, "neurons", axis=1, tiled=True).argmax(1)
    # mistake: winner-on-each-shard (argmax of a shard)
    #     winner = lax.axis_index("neurons") * here + counts.argmax(1)
    net = net.replace(
        params=jax.tree.map(lambda p, m: (p - rate * m).astype(p.dtype), net.params.value, slots),
        slots=slots,
        slow=jnp.where(night, 0.9 * slow, slow),
        activity=final,
        resting=jnp.where(neurons_of(here) == winner[:, None], REST, 0),
        homeostat=(average, net.homeostat.value[1] + 0.5 * (average - TARGET)),
        baseline=baseline,
        spikes=net.spikes.value + fired.sum(),
        loudest=jnp.maximum(net.loudest.value, final["potential"].max()),
        seen=net.seen.value + trials["length"].sum(),
        # mistake: seen-by-every-neuron-shard (wrong axis name)
        #     seen=net.seen.value + lax.psum(trials["length"].sum(), "neurons"),
        calls=net.calls.value + 1,
    )
    angle, fano, entropy, numbers = statistics(fired, rates)
    numbers |= {"loss": lax.psum(share, BOTH), "norm": norm}
    # mistake: loss-of-all-trials-only (partial reduction)
    #     numbers |= {"loss": lax.psum(share, "trials"), "norm": norm}
    return net, (likely, angle, winner), fano, (entropy, numbers)


def case(dtype: str) -> Case:
    trials = {"angle": jnp.linspace(-2.2, 2.2, TRIALS), "length": jnp.asarray(LENGTHS)}
    trials |= {"label": jnp.arange(TRIALS) // 3, "contrast": 1 + normal(dtype, TIME, TRIALS) / 4}
    by_trial = {name: P("trials") for name in trials} | {"contrast": P(None, "trials")}
    return Case(
        step,
        (make_network(dtype), trials),
        mesh={"neurons": 4, "trials": 2},
        in_specs=(None, by_trial),
        out_specs=(P(), P("trials"), P("neurons"), (P(("trials", "neurons")), P())),
        # mistake: entropy-neurons-first (wrong spec)
        #     out_specs=(P(), P("trials"), P("neurons"), (P(("neurons", "trials")), P())),
        # mistake: fano-as-one-copy (wrong spec)
        #     out_specs=(P(), P("trials"), P(), (P(("trials", "neurons")), P())),
        check_vma=False,
        steps=3,
    )
