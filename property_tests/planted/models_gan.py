"""Adversarial training: rows over one axis, the hidden units of generator and critic over the other."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
ROWS, REAL, FEATURES, LATENT, UNITS, BEST, ACROSS = 24, 19, 6, 4, 8, 5, 3
TARGET, STEEP, ORTHOGONAL, APART, HALF_LIFE = 0.3, 0.5, 0.05, 0.2, 40
CLIP, RATE_OF_GENERATOR, RATE_OF_CRITIC = 0.6, 0.03, 0.06


class Generator(NamedTuple):
    first: Any
    gain: Any
    second: Any
    bias: Any


class Critic(NamedTuple):
    first: Any
    head: Any
    spread: Any
    bias: Any


OF_GENERATOR = Generator(P(None, "model"), P("model"), P("model"), P())
OF_CRITIC = Critic(P(None, "model"), P("model"), P(), P())


class Gan(sm.Module):
    generator: sm.ParamState
    critic: sm.ParamState
    average: sm.State
    slots: sm.State
    moments: sm.State
    direction: sm.State
    buffer: sm.State
    chance: sm.State
    shown: sm.State
    steepest: sm.State
    calls: sm.State
    key: Any


def make_gan(dtype: str) -> Gan:
    draw = partial(normal, dtype)
    first, second = draw(LATENT, UNITS, seed=1) / 2, draw(UNITS, FEATURES, seed=2) / 2
    generator = Generator(first, jnp.ones(UNITS, dtype), second, draw(FEATURES, seed=3) / 2)
    first, spread, bias = draw(FEATURES, UNITS, seed=4), *jnp.asarray([0.5, 2], dtype)
    critic = Critic(first, draw(UNITS, seed=5), spread, bias)
    wide = jax.tree.map(lambda p: p.astype("float32"), generator)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape), ((generator,) * 2, (critic,) * 2))
    one, units = jnp.ones(()), jnp.ones(UNITS)
    return Gan(
        generator=sm.ParamState(generator, spec=OF_GENERATOR),
        critic=sm.ParamState(critic, spec=OF_CRITIC),
        average=sm.State(wide, spec=OF_GENERATOR),
        slots=sm.State(zeros, spec=((OF_GENERATOR,) * 2, (OF_CRITIC,) * 2)),
        moments=sm.State((0 * units, units), spec=P("model")),
        direction=sm.State(normal("float32", FEATURES, seed=6)),
        buffer=sm.State(normal(dtype, ROWS, FEATURES, seed=7), spec=P("data")),
        chance=sm.State(0.4 * one),
        shown=sm.State(0, reduce="sum"),
        # mistake: shown-by-the-fullest-shard (wrong policy)
        #     shown=sm.State(0, reduce="max"),
        steepest=sm.State(0 * one, reduce="max"),
        # mistake: steepest-of-one-shard (missing policy)
        #     steepest=sm.State(0 * one),
        calls=sm.State(0),
        key=jax.random.key(9),
    )


def keys_of(gan: Gan, use: int, here: int) -> jax.Array:
    """A key for each of this shard's rows, which depends on the call, the use and the row's number."""
    number = lax.axis_index("data") * here + jnp.arange(here)
    # mistake: number-in-the-shard (row index not offset)
    #     number = jnp.arange(here)
    # mistake: rows-dealt-in-turn (wrong order of rows)
    #     number = lax.axis_index("data") + lax.axis_size("data") * jnp.arange(here)
    key = jax.random.fold_in(gan.key, 10 * gan.calls.value + use)
    # mistake: key-of-the-units (key of a shard)
    #     key = jax.random.fold_in(gan.key, 10 * gan.calls.value + use + 99 * lax.axis_index("model"))
    # mistake: first-row-in-the-key-too (key folded twice)
    #     key = jax.random.fold_in(gan.key, 10 * gan.calls.value + use + 100 * number[0])
    return jax.vmap(lambda one: jax.random.fold_in(key, one))(number)


def latents(gan: Gan, use: int, here: int, like: Any) -> jax.Array:
    keys = keys_of(gan, use, here)
    return jax.vmap(lambda key: jax.random.normal(key, (LATENT,)))(keys).astype(like.dtype)


def augmented(gan: Gan, x: jax.Array, use: int) -> jax.Array:
    """Some rows mirrored, as many as the chance says."""
    mirror = jax.vmap(partial(jax.random.bernoulli, p=gan.chance.value))(keys_of(gan, use, len(x)))
    return jnp.where(mirror[:, None], x[:, ::-1], x)


def moved_on(x: jax.Array) -> jax.Array:
    """Every row one place further, over the borders of the shards; the last becomes the first."""
    size = lax.axis_size("data")
    # mistake: ring-of-the-units (wrong axis name)
    #     size = lax.axis_size("model")
    last = lax.ppermute(x[-1:], "data", [(i, (i + 1) % size) for i in range(size)])
    # mistake: last-row-to-the-shard-before (wrong ppermute)
    #     last = lax.ppermute(x[-1:], "data", [((i + 1) % size, i) for i in range(size)])
    return jnp.concatenate([last, x[:-1]])


def batch_moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = lax.pmean(x.mean(0), "data")
    # mistake: mean-over-the-units (wrong axis name)
    #     mean = lax.pmean(x.mean(0), "model")
    return mean, lax.pmean(((x - mean) ** 2).mean(0), "data")
    # mistake: variance-around-the-own-mean (mean of variances)
    #     return mean, lax.pmean(x.var(0), "data")
    # mistake: variance-summed (psum for pmean)
    #     return mean, lax.psum(((x - mean) ** 2).mean(0), "data")


def images_of(g: Generator, z: jax.Array, moments: Any = None) -> Any:
    """Made of latents, normalised by all of them unless the moments are given; and the moments."""
    hidden = (z @ g.first).astype("float32")
    mean, variance = moments or batch_moments(hidden)
    hidden = ((hidden - mean) * lax.rsqrt(variance + 0.01)).astype(z.dtype)
    out = lax.psum(jax.nn.silu(hidden * g.gain) @ g.second, "model") + g.bias
    # mistake: bias-of-both-halves (bias added before the psum)
    #     out = lax.psum(jax.nn.silu(hidden * g.gain) @ g.second + g.bias, "model")
    return out, (mean, variance)


def spectral(weight: jax.Array, direction: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest singular value after one more power iteration, and the new direction."""
    wide = weight.astype("float32")
    fixed = lax.stop_gradient(wide)
    right = direction @ fixed
    right = right * lax.rsqrt(lax.psum((right**2).sum(), "model"))
    # mistake: each-half-of-length-one (norm of a shard)
    #     right = right * lax.rsqrt((right**2).sum())
    left = lax.psum(fixed @ right, "model")
    # mistake: left-of-own-units (dropped psum)
    #     left = fixed @ right
    left = left * lax.rsqrt((left**2).sum())
    return lax.psum(left @ wide @ right, "model"), left


def spread_of(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """How far the rows are apart: the deviation of a unit over all rows, on average of all units."""
    hidden, count = hidden.astype("float32"), lax.psum(weight.sum(), "data")
    mean = lax.psum((weight[:, None] * hidden).sum(0), "data") / count
    # mistake: centre-of-own-rows (statistics of a shard)
    #     mean = (weight[:, None] * hidden).sum(0) / weight.sum()
    squares = lax.psum((weight[:, None] * (hidden - mean) ** 2).sum(0), "data") / count
    return lax.pmean(jnp.sqrt(squares + 0.01).mean(), "model")
    # mistake: spread-of-own-units (dropped pmean)
    #     return jnp.sqrt(squares + 0.01).mean()


def hidden_of(c: Critic, value: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.softplus(x @ (c.first / value).astype(x.dtype))


def scores_of(c: Critic, value: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    hidden = hidden_of(c, value, x)
    score = lax.psum(hidden @ c.head, "model") + c.bias
    # mistake: score-averaged (pmean for psum)
    #     score = lax.pmean(hidden @ c.head, "model") + c.bias
    return score.astype("float32") + c.spread * spread_of(hidden, weight)


def steepness(c: Critic, value: jax.Array, x: jax.Array) -> jax.Array:
    """The length of the gradient of each row's score."""
    slope = jax.grad(lambda x: (hidden_of(c, value, x) @ c.head).sum())(x).astype("float32")
    return jnp.sqrt((lax.psum(slope, "model") ** 2).sum(1) + 1e-4)
    # mistake: slopes-squared-before-the-sum (wrong order of operations)
    #     return jnp.sqrt(lax.psum(slope**2, "model").sum(1) + 1e-4)


def loss_of_critic(c: Critic, gan: Gan, real: jax.Array, fake: jax.Array, there: jax.Array) -> Any:
    """This shard's share: the gradient through a psum is that of the sum over all shards."""
    value, left = spectral(c.first, gan.direction.value)
    weight = there.astype("float32")
    count, total = lax.psum(weight.sum(), "data"), len(fake) * lax.axis_size("data")
    # mistake: total-of-a-shard (count of a shard)
    #     count, total = lax.psum(weight.sum(), "data"), len(fake)
    on_real = scores_of(c, value, augmented(gan, real, 1), weight)
    on_fake = scores_of(c, value, augmented(gan, fake, 2), jnp.ones(len(fake)))
    part = jax.vmap(jax.random.uniform)(keys_of(gan, 3, len(real)))[:, None].astype(real.dtype)
    steep = steepness(c, value, part * real + (1 - part) * moved_on(fake))
    on_rows = jax.nn.relu(1 - on_real) + STEEP * (steep - 1) ** 2
    loss = (weight * on_rows).sum() / count + jax.nn.relu(1 + on_fake).sum() / total
    return loss / lax.axis_size("model"), (loss, on_real, steep, left, count)
    # mistake: share-of-both-halves (gradient reduced twice)
    #     return loss, (loss, on_real, steep, left, count)


def unlike(first: jax.Array) -> jax.Array:
    """The products of this shard's units with all others, a share of what should be zero."""
    own = first.astype("float32")
    whole = lax.all_gather(own, "model", axis=1, tiled=True)
    # mistake: halves-reshaped-not-joined (wrong order of parts)
    #     whole = lax.all_gather(own, "model").reshape(len(own), UNITS)
    number = lax.axis_index("model") * own.shape[1] + jnp.arange(own.shape[1])
    # mistake: number-among-own-units (unit index not offset)
    #     number = jnp.arange(own.shape[1])
    products = jnp.where(number[:, None] == jnp.arange(UNITS), 0, own.T @ whole)
    return (products**2).sum() / lax.axis_size("data")


def loss_of_generator(g: Generator, gan: Gan, c: Critic, z: jax.Array) -> Any:
    """This shard's share; only the fakes that the critic believes most are counted."""
    fake, moments = images_of(g, z)
    value, _ = spectral(c.first, gan.direction.value)
    score = scores_of(c, value, augmented(gan, fake, 5), jnp.ones(len(fake)))
    everyone = lax.all_gather(lax.stop_gradient(score), "data", tiled=True)
    believed = score >= lax.top_k(everyone, BEST)[0][-1]
    # mistake: believed-on-this-shard (top-k of a shard)
    #     believed = score >= lax.top_k(lax.stop_gradient(score), BEST)[0][-1]
    apart, close = (jnp.sqrt(((a - moved_on(a)) ** 2).sum(1) + 0.1) for a in (z, fake))
    alike = (apart / close).astype("float32").sum() / (len(z) * lax.axis_size("data"))
    # mistake: alike-as-a-mean (factor of the shards forgotten)
    #     alike = (apart / close).astype("float32").mean()
    loss = APART * alike - jnp.where(believed, score, 0).sum() / BEST
    # mistake: by-the-believed-here (count of a shard)
    #     loss = APART * alike - jnp.where(believed, score, 0).sum() / jnp.maximum(believed.sum(), 1)
    share = loss / lax.axis_size("model") + ORTHOGONAL * unlike(g.first)
    # mistake: split-part-shared-out-too (normalized twice)
    #     share = (loss + ORTHOGONAL * unlike(g.first)) / lax.axis_size("model")
    return share, (loss, score, believed, fake, moments)


def reduced(grads: Any, specs: Any) -> tuple[Any, jax.Array]:
    """The gradients of all shards, together no longer than `CLIP`, and how long they were."""
    split = ["model" in spec for spec in specs]
    grads = [lax.psum(g.astype("float32"), "data") for g in grads]
    # mistake: shares-averaged (pmean for psum)
    #     grads = [lax.pmean(g.astype("float32"), "data") for g in grads]
    grads = [g if own else lax.psum(g, "model") for g, own in zip(grads, split, strict=True)]
    # mistake: split-ones-summed-too (doubled psum)
    #     grads = [lax.psum(g, "model") for g in grads]
    parts = [(g**2).sum() for g in grads]
    squares = sum(lax.psum(s, "model") if own else s for s, own in zip(parts, split, strict=True))
    # mistake: norm-of-own-units (local norm in clipping)
    #     squares = sum(parts)
    norm = jnp.sqrt(jnp.asarray(squares))
    return type(specs)(*(g * jnp.minimum(1, CLIP / norm) for g in grads)), norm


def adam(params: Any, grads: Any, slots: Any, t: jax.Array, rate: Any) -> Any:
    """The updated parameters, and both slots."""
    first = jax.tree.map(lambda m, g: 0.5 * m + 0.5 * g, slots[0], grads)
    second = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, slots[1], grads)
    rate, high = rate / (1 - 0.5**t), 1 - 0.9**t
    # mistake: rate-grows-with-the-shards (small factor)
    #     rate, high = rate * lax.axis_size("data") / (1 - 0.5**t), 1 - 0.9**t
    change = jax.tree.map(lambda m, v: rate * m / (jnp.sqrt(v / high) + 0.01), first, second)
    new = jax.tree.map(lambda p, c: (p.astype("float32") - c).astype(p.dtype), params, change)
    return new, (first, second)


def replayed(gan: Gan, fake: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each row the new fake or an earlier one, and the buffer for the next call."""
    newer = jax.vmap(jax.random.bernoulli)(keys_of(gan, 4, len(fake)))[:, None]
    old = gan.buffer.value
    return jnp.where(newer, fake, old), moved_on(jnp.where(newer, old, fake))
    # mistake: buffer-rolled-on-each-shard (shift without neighbours)
    #     return jnp.where(newer, fake, old), jnp.roll(jnp.where(newer, old, fake), 1, axis=0)


def sheet_of(gan: Gan, average: Generator, moments: Any, here: int) -> jax.Array:
    """Images of the averaged generator, row by row on one sheet."""
    g = jax.tree.map(lambda a, p: a.astype(p.dtype), average, gan.generator.value)
    images, _ = images_of(g, latents(gan, 6, here, g.first), moments)
    return lax.all_gather(images, "data", tiled=True).reshape(-1, ACROSS * FEATURES)
    # mistake: sheet-joined-side-by-side (wrong order of parts)
    #     return lax.all_gather(images, "data", axis=1, tiled=True).reshape(-1, ACROSS * FEATURES)


def step(gan: Gan, real: jax.Array, there: jax.Array) -> Any:
    here, t, gradient = len(real), gan.calls.value + 1, partial(jax.value_and_grad, has_aux=True)
    fake, _ = images_of(gan.generator.value, latents(gan, 0, here, real))
    given, buffer = replayed(gan, fake)
    (_, aux), grads = gradient(loss_of_critic)(gan.critic.value, gan, real, given, there)
    own_loss, on_real, steep, left, count = aux
    grads, norm_c = reduced(grads, OF_CRITIC)
    critic, slots_c = adam(gan.critic.value, grads, gan.slots.value[1], t, RATE_OF_CRITIC)
    gan = gan.replace(direction=left)
    z = latents(gan, 7, here, real)
    (_, aux), grads = gradient(loss_of_generator)(gan.generator.value, gan, critic, z)
    own, score, believed, fake, (mean, variance) = aux
    grads, norm_g = reduced(grads, OF_GENERATOR)
    generator, slots_g = adam(gan.generator.value, grads, gan.slots.value[0], t, RATE_OF_GENERATOR)
    keep = 0.5 ** (here * lax.axis_size("data") / HALF_LIFE)
    # mistake: half-life-in-rows-of-a-shard (count of a shard)
    #     keep = 0.5 ** (here / HALF_LIFE)
    average = jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, gan.average.value, generator)
    now = mean, variance * ROWS / (ROWS - 1)
    # mistake: unbiased-by-own-rows (count of a shard)
    #     now = mean, variance * here / (here - 1)
    moments = jax.tree.map(lambda old, new: 0.8 * old + 0.2 * new, gan.moments.value, now)
    signs = lax.psum(jnp.where(there, jnp.sign(on_real), 0).sum(), "data") / count
    # mistake: chance-by-own-rows (statistics of a shard)
    #     signs = jnp.where(there, jnp.sign(on_real), 0).sum() / there.sum()
    gan = gan.replace(
        generator=generator,
        critic=critic,
        average=average,
        slots=(slots_g, slots_c),
        moments=moments,
        buffer=buffer,
        chance=jnp.clip(gan.chance.value + 0.2 * (signs - TARGET), 0, 0.8),
        shown=gan.shown.value + there.sum(),
        # mistake: shown-to-both-halves (doubled psum)
        #     shown=gan.shown.value + lax.psum(there.sum(), "model"),
        steepest=jnp.maximum(gan.steepest.value, steep.max()),
        calls=t,
    )
    best = lax.all_gather(score, "data", tiled=True).argmax()
    # mistake: best-of-own-rows (argmax of a shard)
    #     best = lax.axis_index("data") * here + score.argmax()
    numbers = {"critic": lax.psum(own_loss, "data"), "generator": lax.psum(own, "data")}
    # mistake: losses-over-the-units (wrong axis name)
    #     numbers = {"critic": lax.psum(own_loss, "data"), "generator": lax.psum(own, "model")}
    numbers |= {"norms": (norm_c, norm_g), "best": best}
    return gan, (fake, on_real, believed), mean, (sheet_of(gan, average, moments, here), numbers)


def case(dtype: str) -> Case:
    return Case(
        step,
        (make_gan(dtype), normal(dtype, ROWS, FEATURES, seed=8) + 1, jnp.arange(ROWS) < REAL),
        mesh={"data": 4, "model": 2},
        in_specs=(None, P("data"), P("data")),
        out_specs=(P(), P("data"), P("model"), P()),
        # mistake: mean-as-one-copy (wrong spec)
        #     out_specs=(P(), P("data"), P(), P()),
        check_vma=False,
        steps=3,
    )
