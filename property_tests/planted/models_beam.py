"""A step of beam search: sentences over one axis, the words that they may go on with over the other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, integers, normal


DTYPES = ("float32", "bfloat16", "float16")
SENTENCES, BEAMS, WORDS, WIDTH, SOURCE = 12, 4, 16, 5, 7
EOS, NEVER = 9, -1e9


class Decoder(sm.Module):
    table: sm.ParamState
    bias: sm.ParamState
    recur: sm.ParamState
    counts: sm.State
    beams: sm.State
    best: sm.State
    temperature: sm.State
    position: sm.State
    key: Any


def make_decoder(dtype: str) -> Decoder:
    """In the midst of decoding: some beams have ended."""
    finished = (jnp.arange(SENTENCES * BEAMS) % 7 == 0).reshape(SENTENCES, BEAMS)
    tokens = integers(SENTENCES, BEAMS, below=WORDS, seed=1)
    beams = {
        "tokens": jnp.where(finished, EOS, tokens),
        "scores": -jnp.abs(normal("float32", SENTENCES, BEAMS, seed=2)) - 1,
        "finished": finished,
        "lengths": integers(SENTENCES, BEAMS, below=4, seed=3) + 1,
        "hidden": normal(dtype, SENTENCES, BEAMS, WIDTH, seed=4) / 2,
        "coverage": jnp.full((SENTENCES, BEAMS, SOURCE), 0.1),
    }
    return Decoder(
        table=sm.ParamState(normal(dtype, WORDS, WIDTH, seed=5), spec=P("vocab")),
        bias=sm.ParamState(normal(dtype, WORDS, seed=6) / 4, spec=P("vocab")),
        recur=sm.ParamState(normal(dtype, WIDTH, WIDTH, seed=7) / 2),
        counts=sm.State(jnp.ones(WORDS), spec=P("vocab"), reduce="sum"),
        # mistake: counts-averaged (wrong reduction)
        #     counts=sm.State(jnp.ones(WORDS), spec=P("vocab"), reduce="mean"),
        beams=sm.State(beams, spec=P("data")),
        best=sm.State(jnp.full(SENTENCES, NEVER), spec=P("data")),
        # mistake: best-over-the-words (wrong spec)
        #     best=sm.State(jnp.full(SENTENCES, NEVER), spec=P("vocab")),
        temperature=sm.State(1.0),
        position=sm.State(3),
        key=jax.random.key(0),
    )


def first_word(part: jax.Array) -> jax.Array:
    """The number of the first word in this shard's part of the table."""
    return lax.axis_index("vocab") * len(part)
    # mistake: first-word-by-the-sentences (wrong axis name)
    #     return lax.axis_index("data") * len(part)


def embedded(table: jax.Array, tokens: jax.Array) -> Any:
    own = tokens - first_word(table)
    inside = (own >= 0) & (own < len(table))
    rows = jnp.where(inside[..., None], table[jnp.clip(own, 0, len(table) - 1)], 0)
    # mistake: rows-by-the-remainder (mask forgotten)
    #     rows = table[own % len(table)]
    return lax.psum(rows, "vocab")


def advanced(decoder: Decoder, source: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One look at the source and one step of the cell; what the beams have looked at so far."""
    beams, source = decoder.beams.value, source.astype("float32")
    before = beams["hidden"].astype("float32")
    attention = jax.nn.softmax(jnp.einsum("sbw,slw->sbl", before, source))
    context = jnp.einsum("sbl,slw->sbw", attention, source)
    entering = embedded(decoder.table.value, beams["tokens"]) + context
    return jnp.tanh(before @ decoder.recur.value + entering), beams["coverage"] + attention


def log_probabilities(decoder: Decoder, hidden: jax.Array) -> jax.Array:
    """Of this shard's words among all words; often chosen ones are less likely."""
    logits = hidden @ decoder.table.value.astype("float32").T
    counts = decoder.counts.value
    share = counts / lax.psum(counts.sum(), "vocab")
    # mistake: share-among-own-words (statistics of a shard)
    #     share = counts / counts.sum()
    # mistake: share-of-every-shard (doubled psum)
    #     share = counts / lax.psum(counts.sum(), ("data", "vocab"))
    logits = (logits + decoder.bias.value) / decoder.temperature.value - 3 * share
    high = lax.pmax(logits.max(-1, keepdims=True), "vocab")
    # mistake: highest-of-own-words (dropped pmax)
    #     high = logits.max(-1, keepdims=True)
    total = lax.psum(jnp.exp(logits - high).sum(-1, keepdims=True), "vocab")
    # mistake: totals-averaged (pmean for psum)
    #     total = lax.pmean(jnp.exp(logits - high).sum(-1, keepdims=True), "vocab")
    return logits - high - jnp.log(total)


def noise_of(decoder: Decoder, count: int) -> jax.Array:
    """For this shard's words; a sentence's noise depends on its number and the position only."""
    sentence = lax.axis_index("data") * count + jnp.arange(count)
    # mistake: sentence-in-the-shard (row index not offset)
    #     sentence = jnp.arange(count)
    key = jax.random.fold_in(decoder.key, decoder.position.value)
    # mistake: key-of-the-words (key of a shard)
    #     key = jax.random.fold_in(decoder.key, decoder.position.value + lax.axis_index("vocab"))
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(sentence)
    # mistake: key-of-the-first-sentence (shared key)
    #     keys = jnp.broadcast_to(jax.random.fold_in(key, sentence[0]), count)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (BEAMS, WORDS)))(keys)
    own = decoder.table.value
    return lax.dynamic_slice_in_dim(noise, first_word(own), len(own), 2)
    # mistake: noise-of-the-first-words (wrong part)
    #     return noise[..., : len(own)]


def selected(candidates: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores, parents and tokens of the best beams, from the best of each part of the words."""
    count, flat = candidates.shape[-1], candidates.reshape(len(candidates), -1)
    scores, index = lax.top_k(flat, BEAMS)
    # mistake: beams-shared-by-the-shards (capacity of a shard)
    #     scores, index = lax.top_k(flat, BEAMS // lax.axis_size("vocab"))
    parents = index // count
    # mistake: parents-by-all-words (count of the mesh)
    #     parents = index // WORDS
    tokens = index % count + lax.axis_index("vocab") * count
    # mistake: tokens-in-the-shard (row index not offset)
    #     tokens = index % count
    # mistake: tokens-one-too-early (off by one)
    #     tokens = index % count + lax.axis_index("vocab") * (count - 1)
    everyone = lax.all_gather(scores, "vocab", axis=1, tiled=True)
    parents = lax.all_gather(parents, "vocab", axis=1, tiled=True)
    # mistake: own-parents-repeated (all_gather forgotten)
    #     parents = jnp.tile(parents, (1, lax.axis_size("vocab")))
    tokens = lax.all_gather(tokens, "vocab", axis=1, tiled=True)
    # mistake: tokens-in-another-order (wrong order of parts)
    #     tokens = lax.all_gather(tokens, "vocab", axis=2).reshape(everyone.shape)
    scores, best = lax.top_k(everyone, BEAMS)
    # mistake: best-of-own-words (top-k of a shard)
    #     scores, best = lax.top_k(scores, BEAMS)
    return scores, jnp.take_along_axis(parents, best, 1), jnp.take_along_axis(tokens, best, 1)


def ending(logp: jax.Array) -> Any:
    """The log-probability that a beam ends now; one shard has it."""
    shard, place = divmod(EOS, logp.shape[-1])
    mine = lax.axis_index("vocab") == shard
    # mistake: first-shard-has-the-end (wrong owner)
    #     mine = lax.axis_index("vocab") == 0
    return lax.psum(jnp.where(mine, logp[..., place], 0), "vocab")


def likeliest(logp: jax.Array) -> Any:
    """The word that a beam would go on with if it were alone."""
    leads = logp.max(-1) == lax.pmax(logp.max(-1), "vocab")
    word = logp.argmax(-1) + lax.axis_index("vocab") * logp.shape[-1]
    # mistake: word-in-the-shard (local argmax)
    #     word = logp.argmax(-1)
    return lax.psum(jnp.where(leads, word, 0), "vocab")


def mean_where(mask: jax.Array, x: jax.Array) -> Any:
    """Over the beams of all sentences for which the mask holds."""
    return lax.psum(jnp.where(mask, x, 0).sum(), "data") / lax.psum(mask.sum(), "data")
    # mistake: mean-of-the-means-of-shards (mean of means)
    #     return lax.pmean(x.mean(where=mask), "data")
    # mistake: masked-of-a-shard (count of a shard)
    #     return lax.psum(jnp.where(mask, x, 0).sum(), "data") / mask.sum()


def chosen_by(parents: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, parents.reshape(parents.shape + (1,) * (x.ndim - 2)), 1)


def step(
    decoder: Decoder, source: jax.Array, targets: jax.Array
) -> tuple[Decoder, jax.Array, jax.Array, dict[str, jax.Array]]:
    beams = decoder.beams.value
    hidden, coverage = advanced(decoder, source)
    logp = log_probabilities(decoder, hidden)
    words = first_word(decoder.table.value) + jnp.arange(logp.shape[-1])
    # A beam that has ended goes on with its end, at no cost.
    live, rest = ~beams["finished"], jnp.where(words == EOS, 0, NEVER)
    # mistake: end-in-every-shard (mask of a shard)
    #     live, rest = ~beams["finished"], jnp.where(words % len(words) == EOS % len(words), 0, NEVER)
    gain = jnp.where(live[..., None], logp + 0.2 * noise_of(decoder, len(logp)), rest)
    scores, parents, tokens = selected(beams["scores"][..., None] + gain)
    going = chosen_by(parents, live)
    finished, lengths = ~going | (tokens == EOS), chosen_by(parents, beams["lengths"]) + going
    hidden = chosen_by(parents, hidden).astype(beams["hidden"].dtype)
    coverage = chosen_by(parents, coverage)

    usual = lax.pmean(lengths.mean(), "data")
    # mistake: usual-length-of-the-sum (psum for pmean)
    #     usual = lax.psum(lengths.mean(), "data")
    covered = jnp.log(jnp.minimum(coverage, 1)).sum(-1)
    final = jnp.where(finished, scores / (lengths / usual) ** 0.6 + 0.1 * covered, NEVER)

    entropy = -lax.psum((jnp.exp(logp) * logp).sum(-1), "vocab")
    # mistake: entropy-of-own-words (dropped psum)
    #     entropy = -(jnp.exp(logp) * logp).sum(-1)
    cooler = 0.2 * (1.5 - mean_where(live, entropy))
    # mistake: cooler-by-the-shards (small factor)
    #     cooler = 0.2 / lax.axis_size("data") * (1.5 - mean_where(live, entropy))
    hit = targets[:, None] == words
    likelihood = lax.psum((logp * hit[:, None]).sum(-1), "vocab")
    perplexity = jnp.exp(-lax.pmean(likelihood.mean(), "data"))
    # mistake: mean-of-perplexities (reduction after a nonlinearity)
    #     perplexity = lax.pmean(jnp.exp(-likelihood.mean()), "data")
    slope = lax.pmean((hit - jnp.exp(logp).mean(1)).mean(0), "data")
    # mistake: slope-by-the-shards (normalized twice)
    #     slope = lax.pmean((hit - jnp.exp(logp).mean(1)).mean(0), "data") / lax.axis_size("data")
    beams = {"tokens": tokens, "scores": scores, "finished": finished, "lengths": lengths}
    used = jax.nn.one_hot(tokens - words[0], len(words)) * going[..., None]
    decoder = decoder.replace(
        bias=(decoder.bias.value + 0.5 * slope).astype(decoder.bias.value.dtype),
        # The state adds up what the shards of sentences have used.
        counts=decoder.counts.value + used.sum((0, 1)),
        beams=beams | {"hidden": hidden, "coverage": coverage},
        best=jnp.maximum(decoder.best.value, final.max(1)),
        temperature=decoder.temperature.value * jnp.exp(cooler),
        position=decoder.position.value + 1,
        # mistake: positions-by-the-shards (count of the mesh)
        #     position=decoder.position.value + lax.axis_size("vocab"),
    )
    greedy = mean_where(going, tokens == chosen_by(parents, likeliest(logp)))
    numbers = {"perplexity": perplexity, "greedy": greedy, "end": mean_where(live, ending(logp))}
    return decoder, logp, tokens, numbers


def case(dtype: str) -> Case:
    source = normal(dtype, SENTENCES, SOURCE, WIDTH, seed=8)
    return Case(
        step,
        (make_decoder(dtype), source, integers(SENTENCES, below=WORDS, seed=9)),
        mesh={"data": 2, "vocab": 2},
        in_specs=(None, P("data"), P("data")),
        # mistake: targets-over-the-words (wrong spec)
        #     in_specs=(None, P("data"), P("vocab")),
        out_specs=(P(), P("data", None, "vocab"), P("data"), P()),
        # mistake: parts-of-the-other-axis (wrong spec)
        #     out_specs=(P(), P("vocab", None, "data"), P("data"), P()),
        check_vma=False,
        steps=3,
    )
