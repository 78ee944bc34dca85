"""A hidden Markov model of long sequences: lines over one axis, their positions over the other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import log_softmax, logsumexp
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
LINES, TIME, INPUTS, FEATURES, STATES, WINDOW = 8, 24, 3, 2, 3, 5
PRIOR, KEEP, FRESH, RATE, INERTIA, CLIP, RIDGE, SLOWER = 0.5, 0.9, 0.6, 0.1, 0.7, 0.15, 0.01, 0.6
BOTH, GRID = ("lines", "time"), P("lines", "time")
SPLIT = {"weights": P(), "stay": P(), "season": P("time"), "offsets": P("lines")}
OVER = {"weights": BOTH, "stay": BOTH, "season": "lines", "offsets": "time"}
# mistake: stay-of-own-lines (wrong axis name)
#     OVER = {"weights": BOTH, "stay": "time", "season": "lines", "offsets": "time"}
# mistake: offsets-of-other-lines (doubled psum)
#     OVER = {"weights": BOTH, "stay": BOTH, "season": "lines", "offsets": BOTH}
UNMOVED = -1e4 * (1 - np.eye(STATES, dtype="float32"))
Arrays = dict[str, jax.Array]
Found = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class Chain(sm.Module):
    params: sm.ParamState
    slots: sm.State
    counts: sm.State
    moments: sm.BatchState
    belief: sm.HiddenState
    visits: sm.State
    seen: sm.State
    peak: sm.State
    oddest: sm.State
    calls: sm.State
    key: Any


def make_chain(dtype: str) -> Chain:
    params = {"weights": normal(dtype, INPUTS, FEATURES, seed=1), "stay": jnp.ones(STATES, dtype)}
    params["season"] = normal(dtype, TIME, FEATURES, seed=2) / 4
    params["offsets"] = normal(dtype, LINES, FEATURES, seed=3) / 4
    mean, often = normal("float32", STATES, FEATURES, seed=4), jnp.asarray([5.0, 7.0, 6.0])
    counts = {"first": often / 18, "pairs": abs(normal("float32", STATES, STATES, seed=8)) + 0.5}
    counts |= {"visits": often, "sums": 6 * mean, "squares": 8 * (mean**2 + 0.5)}
    slots, features = jax.tree.map(lambda p: jnp.zeros(p.shape), params), jnp.ones(FEATURES)
    return Chain(
        params=sm.ParamState(params, spec=SPLIT),
        slots=sm.State(slots, spec=SPLIT),
        counts=sm.State(counts),
        moments=sm.BatchState((0 * features, features)),
        belief=sm.HiddenState(jnp.full((LINES, TIME, STATES), 1 / STATES), spec=GRID),
        visits=sm.State(jnp.zeros(STATES, "int32"), reduce="sum"),
        # mistake: visits-of-the-busiest-shard (wrong reduction)
        #     visits=sm.State(jnp.zeros(STATES, "int32"), reduce="max"),
        seen=sm.State(0, reduce="sum"),
        peak=sm.State(jnp.zeros(()), reduce="max"),
        # mistake: peak-averaged (wrong policy)
        #     peak=sm.State(jnp.zeros(()), reduce="mean"),
        oddest=sm.State((jnp.full((), 1e3), jnp.asarray(-1))),
        calls=sm.State(0),
        key=jax.random.key(3),
    )


def numbers(axis: str, here: int) -> jax.Array:
    """The global numbers of this shard's lines, or of its positions."""
    return lax.axis_index(axis) * here + jnp.arange(here)
    # mistake: numbers-in-the-shard (axis_index forgotten)
    #     return jnp.arange(here)
    # mistake: dealt-in-turn (wrong order of parts)
    #     return lax.axis_index(axis) + lax.axis_size(axis) * jnp.arange(here)


def marks_of(lengths: jax.Array, here: int) -> Arrays:
    """Numbers of lines and positions, and which count; positions come first, then lines."""
    line, position = numbers("lines", len(lengths)), numbers("time", here)
    valid = position[:, None] < lengths
    # mistake: lengths-cut-evenly (wrong mask)
    #     valid = jnp.arange(here)[:, None] < lengths // lax.axis_size("time")
    seen = valid & ((3 * position[:, None] + line) % 7 != 2)
    # mistake: missing-by-the-own-line (row index not offset)
    #     seen = valid & ((3 * position[:, None] + jnp.arange(len(lengths))) % 7 != 2)
    first, end = position[:, None] == 0, position[:, None] == lengths - 1
    # mistake: firsts-of-all-blocks (position not offset)
    #     first, end = jnp.arange(here)[:, None] == 0, position[:, None] == lengths - 1
    marks = {"line": line, "position": position, "valid": valid, "seen": seen}
    marks["train"] = line % 3 != 2
    # mistake: held-out-by-the-own-line (split by local index)
    #     marks["train"] = jnp.arange(len(lengths)) % 3 != 2
    return marks | {"first": first, "end": end, "inner": valid & ~first}
    # mistake: no-pairs-over-edges (first of a block left out)
    #     return marks | {"first": first, "end": end, "inner": valid.at[0].set(False)}


def dropped(chain: Chain, x: jax.Array, marks: Arrays) -> jax.Array:
    """Without some inputs, drawn for each line and position."""
    key = jax.random.fold_in(chain.key, chain.calls.value)
    # mistake: key-of-the-block (key of a shard)
    #     key = jax.random.fold_in(chain.key, chain.calls.value + 77 * lax.axis_index("time"))
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(marks["line"])
    # mistake: keys-split-for-the-own-lines (shared key)
    #     keys = jax.random.split(key, len(marks["line"]))
    draw: Any = lambda key, at: jax.random.bernoulli(jax.random.fold_in(key, at), KEEP, (INPUTS,))
    kept = jax.vmap(jax.vmap(draw, (0, None)), (None, 0))(keys, marks["position"])
    return jnp.where(kept, x / KEEP, 0)


def features_of(params: Arrays, x: jax.Array, seen: jax.Array, old: Any) -> tuple[jax.Array, Any]:
    """Standardised features of each position, and the moments of what was seen."""
    z = x @ params["weights"] + params["season"][:, None] + params["offsets"]
    wide, weight = z.astype("float32"), seen[..., None].astype("float32")
    count = lax.psum(weight.sum(), BOTH)
    mean = lax.psum((weight * wide).sum((0, 1)), BOTH) / count
    # mistake: mean-of-own-means (mean of ratios)
    #     mean = lax.pmean((weight * wide).sum((0, 1)) / weight.sum(), BOTH)
    variance = lax.psum((weight * (wide - mean) ** 2).sum((0, 1)), BOTH) / count
    # mistake: variance-of-own-lines (wrong axis name)
    #     variance = lax.psum((weight * (wide - mean) ** 2).sum((0, 1)), "time") / count
    mean, variance = (a + FRESH * (b - a) for a, b in zip(old, (mean, variance), strict=True))
    return (wide - mean) * lax.rsqrt(variance + 0.1), (mean, variance)


def forward(add: Any, moves: jax.Array) -> jax.Array:
    """The message of each position to the next: blocks are multiplied, then the own one is run."""
    on = lambda message, move: (add(message[..., None] + move, axis=-2),) * 2
    starts = jnp.broadcast_to(UNMOVED[:, None], (STATES, moves.shape[1], STATES))
    own = jax.vmap(lambda start: lax.scan(on, start, moves)[0], out_axes=1)(starts)
    blocks = lax.all_gather(own, "time")
    # mistake: own-block-for-all (dropped all_gather)
    #     blocks = jnp.stack([own] * lax.axis_size("time"))
    passed = jnp.arange(len(blocks)) < lax.axis_index("time")
    # mistake: the-block-before-left-out (off by one)
    #     passed = jnp.arange(len(blocks)) < lax.axis_index("time") - 1
    blocks = jnp.where(passed[:, None, None, None], blocks, UNMOVED)
    entering, _ = lax.scan(on, starts[0], blocks)
    return lax.scan(on, entering, moves)[1]
    # mistake: start-of-every-block (carry not passed on)
    #     return lax.scan(on, starts[0], moves)[1]


def backward(add: Any, moves: jax.Array) -> jax.Array:
    """The message of each position from the next: passed from block to block in turn."""
    back = lambda message, move: (add(move + message[..., None, :], axis=-1), message)
    size, message = lax.axis_size("time"), jnp.zeros((moves.shape[1], STATES))
    for _ in range(size - 1):
        # mistake: one-turn (too few rounds)
        #     for _ in range(min(size - 1, 1)):
        leaving, _ = lax.scan(back, message, moves, reverse=True)
        message = lax.ppermute(leaving, "time", [(i + 1, i) for i in range(size - 1)])
        # mistake: messages-back-sent-forth (wrong ppermute neighbour)
        #     message = lax.ppermute(leaving, "time", [(i, i + 1) for i in range(size - 1)])
        # mistake: last-block-hears-the-first (ring for a line)
        #     message = lax.ppermute(leaving, "time", [((i + 1) % size, i) for i in range(size)])
    return lax.scan(back, message, moves, reverse=True)[1]


def preceded(x: jax.Array) -> jax.Array:
    """Of each position the one before, over the edges of blocks; zero before the first."""
    pairs = [(i, i + 1) for i in range(lax.axis_size("time") - 1)]
    return jnp.concatenate([lax.ppermute(x[-1:], "time", pairs), x[:-1]])
    # mistake: first-position-sent (halo from the wrong side)
    #     return jnp.concatenate([lax.ppermute(x[:1], "time", pairs), x[:-1]])
    # mistake: nothing-over-the-edge (ppermute forgotten)
    #     return jnp.concatenate([jnp.zeros_like(x[-1:]), x[:-1]])


def passes(log_b: jax.Array, log_a: jax.Array, log_first: jax.Array, marks: Arrays) -> Found:
    """Log likelihoods of lines, posteriors of states and of pairs of neighbours, and the moves."""
    moves = jnp.where(marks["first"][..., None, None], log_first, log_a) + log_b[..., None, :]
    moves = jnp.where(marks["valid"][..., None, None], moves, UNMOVED)
    ahead, behind = forward(logsumexp, moves), backward(logsumexp, moves)
    last = lax.axis_index("time") == lax.axis_size("time") - 1
    # mistake: end-of-the-first-block (wrong owner)
    #     last = lax.axis_index("time") == 0
    total = lax.psum(jnp.where(last, logsumexp(ahead[-1], axis=-1), 0), "time")
    posterior = jnp.where(marks["valid"][..., None], jnp.exp(ahead + behind - total[:, None]), 0)
    pairs = preceded(ahead)[..., None] + moves + behind[..., None, :] - total[:, None, None]
    return total, posterior, jnp.exp(jnp.where(marks["inner"][..., None, None], pairs, -1e4)), moves


def derivative(kept: tuple[jax.Array, jax.Array, Arrays], given: Found) -> Any:
    """This shard's part: every block of a line holds a share of what its total adds to the loss."""
    posterior, pairs, marks = kept
    by = lax.psum(given[0], "time")[:, None]
    # mistake: shares-of-other-blocks-lost (custom derivative not reduced)
    #     by = given[0][:, None]
    # mistake: shares-of-other-lines-too (custom derivative over the wrong axes)
    #     by = lax.psum(given[0], BOTH)[:, None]
    begin = jnp.where(marks["first"][..., None], by * posterior, 0)
    return by * posterior, (by[..., None] * pairs).sum((0, 1)), begin.sum((0, 1)), None


log_likelihood = jax.custom_vjp(passes)
log_likelihood.defvjp(lambda *a: ((found := passes(*a)), (*found[1:3], a[3])), derivative)


def loss_fn(params: Arrays, chain: Chain, x: jax.Array, marks: Arrays, lengths: jax.Array) -> Any:
    """This shard's share: the sum of all is the loss for each valid position of training lines."""
    counts, heat = chain.counts.value, jnp.minimum(1, 0.6 + 0.1 * chain.calls.value)
    z, moments = features_of(params, x, marks["seen"], chain.moments.value)
    visits = counts["visits"][:, None] + PRIOR
    mean = counts["sums"] / visits
    variance = counts["squares"] / visits - mean**2 + 0.2
    log_b = -((z[..., None, :] - mean) ** 2 / variance + jnp.log(variance)).sum(-1) / 2
    log_b = jnp.where(marks["seen"][..., None], heat * log_b, 0)
    stay = jnp.diag(params["stay"].astype("float32"))
    log_a, log_first = log_softmax(jnp.log(counts["pairs"] + PRIOR) + stay), counts["first"] + PRIOR
    found = log_likelihood(log_b, log_a, log_softmax(jnp.log(log_first)), marks)
    positions = lax.psum((marks["train"] * lengths).sum(), "lines")
    # mistake: positions-of-every-block (doubled psum)
    #     positions = lax.psum((marks["train"] * lengths).sum(), BOTH)
    # mistake: positions-of-own-lines (count of a shard)
    #     positions = (marks["train"] * lengths).sum()
    ridge = RIDGE * (params["offsets"].astype("float32") ** 2).sum()
    loss = (ridge - (marks["train"] * found[0]).sum() / positions) / lax.axis_size("time")
    # mistake: ridge-of-every-block (factor of the shards forgotten)
    #     loss = ridge - (marks["train"] * found[0]).sum() / positions / lax.axis_size("time")
    return loss, (loss, z, found, moments)
    # mistake: loss-summed-too-early (psum in the loss)
    #     return lax.psum(loss, BOTH), (loss, z, found, moments)


def reduced(grads: Arrays) -> tuple[Arrays, jax.Array]:
    """The gradients of all shards, together no longer than `CLIP`, and how long they were."""
    grads = {name: lax.psum(g.astype("float32"), OVER[name]) for name, g in grads.items()}
    # mistake: gradients-averaged (pmean for psum)
    #     grads = {name: lax.pmean(g.astype("float32"), OVER[name]) for name, g in grads.items()}
    own = {name: (g**2).sum() for name, g in grads.items()}
    squares = own["weights"] + own["stay"] + lax.psum(own["season"], "time")
    # mistake: season-of-the-own-block (local norm in clipping)
    #     squares = own["weights"] + own["stay"] + own["season"]
    norm = jnp.sqrt(squares + lax.psum(own["offsets"], "lines"))
    return {name: g * jnp.minimum(1, CLIP / norm) for name, g in grads.items()}, norm


def expected(z: jax.Array, posterior: jax.Array, pairs: jax.Array, marks: Arrays) -> Any:
    """Counts and sums of features of each state, for one training line."""
    posterior = jnp.where(marks["train"][:, None], posterior, 0)
    weight = jnp.where(marks["seen"][..., None], posterior, 0)
    own = {"first": jnp.where(marks["first"][..., None], posterior, 0).sum((0, 1))}
    own |= {"pairs": jnp.where(marks["train"][:, None, None], pairs, 0).sum((0, 1))}
    own |= {"visits": weight.sum((0, 1)), "sums": jnp.einsum("tlk,tld->kd", weight, z)}
    own |= {"squares": jnp.einsum("tlk,tld->kd", weight, z**2)}
    lines = lax.psum(marks["train"].sum(), "lines")
    # mistake: a-mean-of-own-lines (count of a shard)
    #     lines = marks["train"].sum()
    return jax.tree.map(lambda a: lax.psum(a, BOTH) / lines, own)
    # mistake: counts-of-own-lines (wrong axis name)
    #     return jax.tree.map(lambda a: lax.psum(a, "time") / lines, own)


def window_of(surprise: jax.Array) -> jax.Array:
    """Where the most surprising window of each line starts: blocks of lines become whole lines."""
    whole = lax.all_to_all(surprise, "time", split_axis=1, concat_axis=0, tiled=True)
    # mistake: lines-folded-up (reshape for an exchange)
    #     whole = surprise.reshape(TIME, -1)
    sums = jnp.stack([whole[i : TIME - WINDOW + 1 + i] for i in range(WINDOW)]).sum(0)
    return lax.all_gather(sums.argmax(0), "time", tiled=True)


def step(chain: Chain, x: jax.Array, lengths: jax.Array) -> Any:
    marks = marks_of(lengths, x.shape[1])
    params, given = chain.params.value, dropped(chain, x.swapaxes(0, 1), marks)
    grads, aux = jax.grad(loss_fn, has_aux=True)(params, chain, given, marks, lengths)
    loss, z, (total, posterior, pairs, moves), moments = aux
    grads, norm = reduced(grads)
    slots = jax.tree.map(lambda m, g: INERTIA * m + g, chain.slots.value, grads)
    seen = chain.seen.value + lax.psum(marks["seen"].sum(), BOTH)
    # mistake: seen-here (stale value)
    #     seen = chain.seen.value + marks["seen"].sum()
    rate, found = (1 + seen / LINES / TIME) ** -SLOWER, expected(z, posterior, pairs, marks)
    # mistake: rate-by-the-own-size (global size from a local shape)
    #     rate, found = (1 + seen / z[..., 0].size) ** -SLOWER, expected(z, posterior, pairs, marks)
    path = (forward(jnp.max, moves) + backward(jnp.max, moves)).argmax(-1)
    states = jax.nn.one_hot(path, STATES, dtype="int32") * marks["valid"][..., None]
    score, (lowest, oddest) = total / lengths, chain.oddest.value
    own = score.min(), marks["line"][score.argmin()]
    # mistake: numbered-by-the-place (argmin not offset)
    #     own = score.min(), score.argmin()
    scores, names = lax.all_gather(own, "lines")
    worst, name = scores.min(), names[scores.argmin()]
    surprise = jnp.where(marks["seen"], (z**2).sum(-1), 0)
    every = lax.psum((surprise.sum(1), marks["seen"].sum(1)), "lines")
    # mistake: profile-of-own-lines (dropped psum)
    #     every = surprise.sum(1), marks["seen"].sum(1)
    held = lax.psum(jnp.where(marks["train"], 0, jnp.stack([total, lengths])).sum(1), "lines")
    new = {
        "params": jax.tree.map(lambda p, m: (p - RATE * m).astype(p.dtype), params, slots),
        "counts": jax.tree.map(lambda a, b: a + rate * (b - a), chain.counts.value, found),
        "belief": 0.7 * chain.belief.value + 0.3 * posterior.swapaxes(0, 1),
        "visits": chain.visits.value + states.sum((0, 1)),
        "seen": chain.seen.value + marks["seen"].sum(),
        "peak": jnp.maximum(chain.peak.value, surprise.max()),
        "oddest": (jnp.minimum(worst, lowest), jnp.where(worst < lowest, name, oddest)),
    }
    jumps = ((path != preceded(path)) & marks["inner"]).sum(0)
    ended = jnp.where(marks["end"][..., None], posterior, 0).sum(0)
    of_lines = {"score": score, "start": window_of(surprise)}
    of_lines |= lax.psum({"ended": ended, "jumps": jumps}, "time")
    # mistake: ends-of-the-own-block (dropped psum)
    #     of_lines |= {"ended": ended, "jumps": lax.psum(jumps, "time")}
    of_all = {"loss": lax.psum(loss, BOTH), "norm": norm, "held": held[0] / held[1]}
    chain = chain.replace(slots=slots, moments=moments, calls=chain.calls.value + 1, **new)
    return chain, path.swapaxes(0, 1), of_lines, every[0] / jnp.maximum(every[1], 1), of_all


def case(dtype: str) -> Case:
    levels = integers(LINES, TIME // 3, below=STATES, seed=15).repeat(3, 1)
    x = normal(dtype, STATES, INPUTS, seed=6)[levels]
    x += normal(dtype, LINES, TIME, INPUTS, seed=12) / 2
    lengths = jnp.asarray([24, 17, 21, 9, 23, 13, 19, 24])
    return Case(
        step,
        (make_chain(dtype), x, lengths),
        mesh={"lines": 2, "time": 4},
        in_specs=(None, GRID, P("lines")),
        out_specs=(P(), GRID, P("lines"), P("time"), P()),
        # mistake: profile-as-one-copy (wrong spec)
        #     out_specs=(P(), GRID, P("lines"), P(), P()),
        check_vma=False,
        steps=3,
    )
