"""Contrastive learning: two towers, the embeddings of all shards, a temperature, a queue, a teacher."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
ROWS, PIXELS, WORDS, WIDTH, QUEUE = 24, 5, 6, 4, 48
LARGEST_SCALE = 3.0


class Towers(sm.Module):
    image: sm.ParamState
    text: sm.ParamState
    log_scale: sm.ParamState
    teacher: sm.State
    queue: sm.State
    position: sm.State
    hits: sm.State
    hardest: sm.State
    rng: sm.RandomState


def unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x**2).sum(-1, keepdims=True) + 0.01)


def make_towers(dtype: str) -> Towers:
    """Towers that have learned something: some images are nearest to their texts."""
    text = normal(dtype, WORDS, WIDTH, seed=2)
    image = text[:PIXELS] + normal(dtype, PIXELS, WIDTH, seed=1) / 4
    return Towers(
        image=sm.ParamState(image),
        text=sm.ParamState(text),
        log_scale=sm.ParamState(jnp.ones((), dtype)),
        teacher=sm.State(text * 0.8),
        queue=sm.State(unit(normal(dtype, QUEUE, WIDTH, seed=3))),
        position=sm.State(0),
        hits=sm.State(0, reduce="sum"),
        hardest=sm.State(jnp.zeros((), dtype), reduce="max"),
        rng=sm.RandomState(jax.random.key(0)),
    )


def augmented(rng: sm.RandomState, images: jax.Array) -> tuple[jax.Array, sm.RandomState]:
    """Some pixels of each image left out."""
    keys, rng = rng.rows(len(images), "data")
    # mistake: left-out-alike (shared key)
    #     keys, rng = rng.rows(len(images))
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (PIXELS,)))(keys)
    # mistake: left-out-by-the-first-key (shared key)
    #     keep = jnp.broadcast_to(jax.random.bernoulli(keys[0], 0.8, (PIXELS,)), images.shape)
    return jnp.where(keep, images, 0), rng


def first_row(count: int) -> jax.Array:
    """The number of this shard's first row, of so many on each shard."""
    return lax.axis_index("data") * count
    # mistake: offset-of-the-shard-forgotten (axis_index forgotten)
    #     return jnp.int32(0)
    # mistake: offset-by-the-shards (row index not offset)
    #     return lax.axis_index("data") * lax.axis_size("data")


def gathered(x: jax.Array) -> jax.Array:
    """The embeddings of all shards, in the order of the rows."""
    everyone: jax.Array = lax.all_gather(x, "data", tiled=True)
    # mistake: own-embeddings-repeated (all_gather forgotten)
    #     everyone = jnp.tile(x, (lax.axis_size("data"), 1))
    # mistake: embeddings-in-another-order (wrong order of parts)
    #     everyone = jnp.swapaxes(lax.all_gather(x, "data"), 0, 1).reshape(-1, x.shape[1])
    return everyone
    # mistake: gradient-of-own-embeddings (gradient not reduced)
    #     return lax.dynamic_update_slice(lax.stop_gradient(everyone), x, (first_row(len(x)), 0))


def likelihoods(
    queries: jax.Array, keys: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How far each query is from its key among all of them, and whether it is the nearest."""
    logits = scale * (queries @ keys.T)
    labels = first_row(len(queries)) + jnp.arange(len(queries))
    # mistake: labels-of-a-shard (row index not offset)
    #     labels = jnp.arange(len(queries))
    # mistake: labels-one-too-early (off by one)
    #     labels = jnp.arange(len(queries)) + lax.axis_index("data") * (len(queries) - 1)
    chosen = logits[jnp.arange(len(queries)), labels]
    return jax.nn.logsumexp(logits, 1) - chosen, logits.argmax(1) == labels


def weighted_mean(each: jax.Array) -> Any:
    """Of this shard's rows; the hard ones among all rows count more."""
    hard = jnp.exp(lax.stop_gradient(each) / 2)
    weights = hard / lax.pmean(hard.mean(), "data")
    # mistake: hard-among-own-rows (statistics of a shard)
    #     weights = hard / hard.mean()
    # mistake: hard-by-the-sum (psum for pmean)
    #     weights = hard / lax.psum(hard.mean(), "data")
    return (weights * each).mean()
    # mistake: mean-of-rows-of-all (count of the mesh)
    #     return (weights * each).sum() / ROWS


def crowding(embedded: jax.Array) -> jax.Array:
    """Large where the embeddings of all rows lie close together."""
    centre = lax.pmean(embedded.mean(0), "data")
    # mistake: centre-of-a-shard (statistics of a shard)
    #     centre = embedded.mean(0)
    variance = lax.pmean(((embedded - centre) ** 2).mean(0), "data")
    # mistake: variances-of-a-shard (dropped psum)
    #     variance = ((embedded - centre) ** 2).mean(0)
    return -jnp.log(variance + 0.01).mean()


def loss_fn(towers: Towers, images: jax.Array, texts: jax.Array) -> tuple[jax.Array, Towers]:
    images, rng = augmented(towers.rng, images)
    image, text = unit(images @ towers.image.value), unit(texts @ towers.text.value)
    scale = jnp.exp(towers.log_scale.value)
    # mistake: scale-by-the-shards (small factor)
    #     scale = jnp.exp(towers.log_scale.value) * (1 + 0.01 * (lax.axis_size("data") - 1))
    keys = jnp.concatenate([gathered(text), towers.queue.value])
    to_text, right = likelihoods(image, keys, scale)
    to_image, _ = likelihoods(text, gathered(image), scale)
    # mistake: images-of-a-shard (all_gather forgotten)
    #     to_image, _ = likelihoods(text, image, scale)
    contrast = (weighted_mean(to_text) + weighted_mean(to_image)) / 2
    towers = towers.replace(
        rng=rng,
        hits=towers.hits.value + right.sum(),
        hardest=jnp.maximum(towers.hardest.value, to_text.max()),
        # mistake: hardest-of-the-sum (psum for pmax)
        #     hardest=jnp.maximum(towers.hardest.value, lax.psum(to_text.max(), "data")),
    )
    return contrast + 0.1 * crowding(image), towers


def queued(towers: Towers, texts: jax.Array) -> Towers:
    """With what the teacher makes of the texts of all shards in place of the oldest."""
    own = unit(texts @ towers.teacher.value)
    new = lax.all_gather(own, "data", tiled=True)
    # mistake: queue-of-a-shard (all_gather forgotten)
    #     new = own
    at = towers.position.value % QUEUE
    queue = lax.dynamic_update_slice_in_dim(towers.queue.value, new, at, 0)
    position = towers.position.value + len(new)
    # mistake: position-by-own-rows (count of a shard)
    #     position = towers.position.value + len(own)
    return towers.replace(queue=queue, position=position)


def step(
    towers: Towers, images: jax.Array, texts: jax.Array
) -> tuple[jax.Array, Towers, jax.Array]:
    gradient = sm.value_and_grad(loss_fn, axis_name="data")
    # mistake: gradients-summed (psum for pmean)
    #     gradient = sm.value_and_grad(loss_fn, axis_name="data", reduce="sum")
    (loss, towers), grads = gradient(towers, images, texts)
    towers = queued(towers, texts)
    image = towers.image.value - 0.1 * grads.image.value
    # mistake: image-gradient-summed-again (gradient reduced twice)
    #     image = towers.image.value - 0.1 * lax.psum(grads.image.value, "data")
    text = towers.text.value - 0.1 * grads.text.value
    # mistake: rate-divided-by-the-shards (normalized twice)
    #     text = towers.text.value - 0.1 / lax.axis_size("data") * grads.text.value
    log_scale = towers.log_scale.value - 0.1 * grads.log_scale.value
    teacher = 0.9 * towers.teacher.value + 0.1 * text
    # mistake: teacher-by-the-shards (small factor)
    #     teacher = text + 0.9 ** lax.axis_size("data") * (towers.teacher.value - text)
    # mistake: teacher-of-the-last-text (stale value)
    #     unseen: one device teaches by the old one too
    #     teacher = 0.9 * towers.teacher.value + 0.1 * towers.text.value
    towers = towers.replace(image=image, text=text, teacher=teacher)
    towers = towers.replace(log_scale=jnp.minimum(log_scale, LARGEST_SCALE))
    return loss, towers, unit(images @ image)


def case(dtype: str) -> Case:
    images = normal(dtype, ROWS, PIXELS, seed=4)
    texts = jnp.pad(images, ((0, 0), (0, 1))) + normal(dtype, ROWS, WORDS, seed=5) / 4
    return Case(
        step,
        (make_towers(dtype), images, texts),
        mesh={"data": 4},
        in_specs=(None, P("data"), P("data")),
        # mistake: texts-not-split (wrong spec)
        #     in_specs=(None, P("data"), P()),
        out_specs=(P(), P(), P("data")),
        check_vma=False,
        steps=3,
    )
