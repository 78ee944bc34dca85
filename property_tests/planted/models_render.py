"""A radiance field by volume rendering: rays over one axis, the segments of each ray over the other."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
RAYS, SAMPLES, CHUNKS, WIDTH = 16, 12, 2, 4
NODES, RANK, SKY, UNITS, OCTAVES, SIDE = 8, 4, 8, 8, 3, 4
NEAR, FAR, OPEN, SHARP, KEPT, FADED = 0.5, 3.5, 0.2, 40, 0.8, 0.9
NARROW, THIN, SMOOTH, PLAIN, RATE, CLIP, HALVED = 0.1, 0.1, 0.2, 0.1, 1.0, 0.15, 60
BOTH = ("depth", "rays")
SPECS = {"lines": P(None, "rays"), "sky": P("depth"), "exposure": P("rays")}
# mistake: sky-split-like-the-lines (wrong spec)
#     SPECS = {"lines": P(None, "rays"), "sky": P("rays"), "exposure": P("rays")}
SPECS |= {"hidden": P(), "head": P(), "bias": P()}
# Over which axes a gradient is summed, and over which a parameter is split.
SUMMED: dict[str, Any] = {"lines": "depth", "sky": "rays", "exposure": "depth"}
# mistake: exposure-of-all-shards (gradient summed twice)
#     SUMMED: dict[str, Any] = {"lines": "depth", "sky": "rays", "exposure": BOTH}
SPLIT = {"lines": "rays", "sky": "depth", "exposure": "rays"}
Arrays = dict[str, jax.Array]


class Field(sm.Module):
    params: sm.ParamState
    slots: sm.State
    average: sm.State
    occupancy: sm.State
    visits: sm.State
    misses: sm.State
    quality: sm.State
    seen: sm.State
    calls: sm.State
    rng: sm.RandomState


def make_field(dtype: str) -> Field:
    lines, sky = 0.7 + normal(dtype, 3, NODES, RANK, seed=1) / 4, normal(dtype, SKY, 3, seed=2)
    params = {"lines": lines, "sky": sky, "exposure": normal(dtype, RAYS, seed=3) / 4}
    params["hidden"] = normal(dtype, 6 * OCTAVES + RANK, UNITS, seed=4) / 4
    params["head"] = normal(dtype, UNITS + 3, 4, seed=5) / 2
    params["bias"] = normal(dtype, 4, seed=6) / 4
    wide = jax.tree.map(lambda p: p.astype("float32"), params)
    return Field(
        params=sm.ParamState(params, spec=SPECS),
        slots=sm.State(jax.tree.map(jnp.zeros_like, wide), spec=SPECS),
        average=sm.State(wide, spec=SPECS),
        occupancy=sm.State(jnp.ones(SIDE**3), spec=P(BOTH)),
        visits=sm.State(jnp.zeros(SIDE**3), reduce="sum"),
        # mistake: visits-of-the-busiest-shard (wrong policy)
        #     visits=sm.State(jnp.zeros(SIDE**3), reduce="max"),
        misses=sm.State(jnp.ones(RAYS), spec=P("rays")),
        quality=sm.State(jnp.zeros(())),
        seen=sm.State(0, reduce="sum"),
        # mistake: seen-by-one-shard (missing policy)
        #     seen=sm.State(0),
        calls=sm.State(0),
        rng=sm.RandomState(jax.random.key(11)),
    )


def numbers_of(axis: Any, here: int) -> jax.Array:
    """Of this shard's items among all that are split over the axis."""
    return lax.axis_index(axis) * here + jnp.arange(here)
    # mistake: numbers-from-the-shard-on (wrong offset)
    #     return lax.axis_index(axis) + jnp.arange(here)


def samples_of(keys: jax.Array) -> jax.Array:
    """One position in each of this shard's equal parts of every ray."""
    number = numbers_of("depth", SAMPLES // lax.axis_size("depth"))
    # mistake: segments-by-the-rays (wrong axis)
    #     number = numbers_of("rays", SAMPLES // lax.axis_size("depth"))
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (SAMPLES,)))(keys)[:, number]
    # mistake: segments-drawn-alike (shared key)
    #     drawn = jax.vmap(lambda key: jax.random.uniform(key, (len(number),)))(keys)
    return NEAR + (FAR - NEAR) * (number + drawn) / SAMPLES
    # mistake: parts-of-a-segment (wrong count)
    #     return NEAR + (FAR - NEAR) * (number + drawn) / len(number)


def gaps_of(t: jax.Array) -> jax.Array:
    """From each sample to the next, which may be the first of the next shard; the last one ends far."""
    size = lax.axis_size("depth")
    following = lax.ppermute(t[:, :1], "depth", [(k + 1, k) for k in range(size - 1)])
    # mistake: first-sample-of-the-shard-before (wrong permutation)
    #     following = lax.ppermute(t[:, :1], "depth", [(k, k + 1) for k in range(size - 1)])
    following = jnp.where(lax.axis_index("depth") == size - 1, FAR, following)
    # mistake: every-segment-ends-far (missing halo)
    #     following = jnp.full_like(following, FAR)
    return jnp.concatenate([t[:, 1:], following], 1) - t


def passed(x: jax.Array, by: int) -> jax.Array:
    """The sum of what the shards before this one hold along the rays; behind it, for -1."""
    size = lax.axis_size("depth")
    along = [(k, k + by) for k in range(size) if 0 <= k + by < size]
    # mistake: segments-in-a-ring (wrong permutation)
    #     along = [(k, (k + by) % size) for k in range(size)]

    def hop(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        moving, total = carry
        moving = lax.ppermute(moving, "depth", along)
        # mistake: totals-travel-too (wrong carry)
        #     moving = lax.ppermute(moving + total, "depth", along)
        return moving, total + moving

    return lax.fori_loop(0, size - 1, hop, (x, jnp.zeros_like(x)))[1]
    # mistake: one-hop-too-few (off by one)
    #     return lax.fori_loop(0, max(size - 2, 0), hop, (x, jnp.zeros_like(x)))[1]


before = jax.custom_vjp(partial(passed, by=1))
before.defvjp(lambda x: (passed(x, 1), None), lambda _, g: (passed(g, -1),))
# mistake: derivative-of-earlier-segments (wrong derivative)
#     before.defvjp(lambda x: (passed(x, 1), None), lambda _, g: (passed(g, 1),))


def interpolated(lines: jax.Array, x: jax.Array) -> jax.Array:
    """The product over the coordinates of what the lines are at each, between two of their nodes."""
    whole = lax.all_gather(lines, "rays", axis=1, tiled=True)
    # mistake: own-nodes-repeated (missing gather)
    #     whole = jnp.tile(lines, (1, lax.axis_size("rays"), 1))
    # mistake: nodes-mixed-with-coordinates (wrong gather axis)
    #     whole = lax.all_gather(lines, "rays", tiled=True).reshape(3, NODES, RANK)
    place = x.astype("float32") * (NODES - 1)
    # mistake: place-among-own-nodes (wrong count)
    #     place = x.astype("float32") * (lines.shape[1] - 1)
    near = jax.nn.relu(1 - jnp.abs(place[..., None] - jnp.arange(NODES))).astype(lines.dtype)
    first, second, third = jnp.einsum("rsdn,dnk->drsk", near, whole)
    return first * second * third


def field_at(params: Arrays, x: jax.Array, directions: jax.Array, octaves: jax.Array) -> Any:
    """Density and colour; the higher octaves of the encoding come in one after the other."""
    window = 0.5 - 0.5 * jnp.cos(jnp.pi * jnp.clip(octaves - jnp.arange(OCTAVES), 0, 1))
    angle = jnp.pi * x[..., None, None] * 2.0 ** jnp.arange(OCTAVES)
    waves = window * jnp.sin(angle + jnp.pi / 2 * jnp.arange(2)[:, None])
    waves = waves.reshape(*x.shape[:2], -1).astype(params["hidden"].dtype)
    hidden = jnp.concatenate([waves, interpolated(params["lines"], x)], -1) @ params["hidden"]
    view = jnp.broadcast_to(directions[:, None].astype(waves.dtype), x.shape)
    out = jnp.concatenate([jax.nn.silu(hidden), view], -1) @ params["head"]
    out = (out + params["bias"]).astype("float32")
    return jax.nn.softplus(out[..., 0]), jax.nn.sigmoid(out[..., 1:])


def sky_of(sky: jax.Array, directions: jax.Array) -> jax.Array:
    """The colour behind everything, between nodes around the horizon; each shard has some of them."""
    place = SKY * (0.5 + jnp.arctan2(directions[:, 1], directions[:, 0]) / (2 * jnp.pi))
    away = jnp.abs(place[:, None] - numbers_of("depth", len(sky)))
    # mistake: horizon-of-own-nodes (wrong offset)
    #     away = jnp.abs(place[:, None] - jnp.arange(len(sky)))
    near = jax.nn.relu(1 - jnp.minimum(away, SKY - away))
    return jax.nn.sigmoid(lax.psum(near @ sky.astype("float32"), "depth"))
    # mistake: sigmoid-of-own-nodes (psum after a nonlinearity)
    #     return lax.psum(jax.nn.sigmoid(near @ sky.astype("float32")), "depth")


def composited(density: jax.Array, colour: jax.Array, t: jax.Array, gaps: jax.Array) -> Any:
    """What each sample weighs, and the colour, distance and opacity of each ray."""
    thick = density * gaps
    inside = jnp.cumsum(jnp.pad(thick[:, :-1], ((0, 0), (1, 0))), 1)
    segments = lax.all_gather(thick.sum(1), "depth")
    earlier = jnp.arange(len(segments)) < lax.axis_index("depth")
    # mistake: own-segment-hides-itself (off by one)
    #     earlier = jnp.arange(len(segments)) <= lax.axis_index("depth")
    above = jnp.where(earlier[:, None], segments, 0).sum(0)
    weights = jnp.exp(-above[:, None] - inside) * (1 - jnp.exp(-thick))
    # mistake: every-segment-in-full-light (missing prefix)
    #     weights = jnp.exp(-inside) * (1 - jnp.exp(-thick))
    values = jnp.concatenate([colour, t[..., None], jnp.ones_like(t)[..., None]], -1)
    return weights, lax.psum(jnp.einsum("rs,rsk->rk", weights, values), "depth")
    # mistake: segments-averaged (mean for sum)
    #     return weights, lax.pmean(jnp.einsum("rs,rsk->rk", weights, values), "depth")


def distortion(weights: jax.Array, middle: jax.Array, gaps: jax.Array) -> jax.Array:
    """How far apart the weights of a ray lie; of all pairs, those whose second one is here."""
    moments = weights * middle
    lighter = jnp.cumsum(weights, 1) - weights + before(weights.sum(1))[:, None]
    nearer = jnp.cumsum(moments, 1) - moments + before(moments.sum(1))[:, None]
    # mistake: moments-of-own-segment (missing prefix)
    #     nearer = jnp.cumsum(moments, 1) - moments
    return (2 * weights * (middle * lighter - nearer) + weights**2 * gaps / 3).sum(1)


def share_of(params: Arrays, call: Arrays, chunk: Arrays) -> Any:
    """This shard's share of the loss of a chunk: the shares of all shards add up to the whole."""
    real, t = chunk["real"], samples_of(chunk["keys"])
    gaps = gaps_of(t)
    point = chunk["origin"][:, None] + t[..., None] * chunk["direction"][:, None]
    x = 0.5 + 0.5 * point / (1 + jnp.abs(point))
    density, colour = field_at(params, x, chunk["direction"], call["waves"])
    cells = jnp.minimum((x * SIDE).astype("int32"), SIDE - 1) @ jnp.array([SIDE**2, SIDE, 1])
    weights, sums = composited(density * call["open"][cells], colour, t, gaps)
    rendered = sums[:, :3] + (1 - sums[:, 4:]) * sky_of(params["sky"], chunk["direction"])
    usual = lax.psum((params["exposure"] * call["all"]).sum(), "rays") / call["count"]
    # mistake: usual-exposure-of-own-rays (local statistic)
    #     usual = (params["exposure"] * call["all"]).sum() / call["all"].sum()
    rendered = rendered * jnp.exp(params["exposure"][chunk["row"]] - usual)[:, None]
    missed = rendered - chunk["colour"]
    each = (jnp.sqrt(missed**2 + 0.01) - 0.1).mean(1)
    photo = (chunk["weight"] * real * each).sum() / call["count"]
    # mistake: chunk-by-its-own-rays (wrong count)
    #     photo = (chunk["weight"] * real * each).sum() / lax.psum(real.sum(), "rays")
    spread = (real * distortion(weights, t + gaps / 2, gaps)).sum() / call["count"]
    fog = (real[:, None] * jnp.log1p(density**2)).sum() / (call["count"] * SAMPLES)
    # mistake: fog-over-own-samples (wrong normalization)
    #     fog = (real[:, None] * jnp.log1p(density**2)).sum() / (call["count"] * t.shape[1])
    share = photo / lax.axis_size("depth") + NARROW * spread + THIN * fog
    # mistake: photo-of-every-segment (gradient summed twice)
    #     share = photo + NARROW * spread + THIN * fog
    # mistake: all-terms-shared-out (wrong normalization)
    #     share = (photo + NARROW * spread + THIN * fog) / lax.axis_size("depth")
    found = {"colour": rendered, "weights": weights, "density": density, "cells": cells}
    found |= {"distance": sums[:, 3] / (sums[:, 4] + 0.1), "squares": (missed**2).mean(1)}
    return share, (share, found)


def penalty(params: Arrays) -> jax.Array:
    """This shard's share of what the lines lose by bends, and the exposures by being there."""
    lines, exposure = (params[name].astype("float32") for name in ("lines", "exposure"))
    size, here = lax.axis_size("rays"), lines.shape[1]
    following = lax.ppermute(lines[:, :1], "rays", [(k + 1, k) for k in range(size - 1)])
    # mistake: bend-back-to-own-start (missing halo)
    #     following = lines[:, :1]
    steps = jnp.concatenate([lines[:, 1:], following], 1) - lines
    inner = numbers_of("rays", here) < NODES - 1
    # mistake: inner-nodes-of-a-shard (wrong mask)
    #     inner = jnp.arange(here) < here - 1
    bends = (inner[:, None] * steps**2).sum() / NODES
    return (SMOOTH * bends + PLAIN * (exposure**2).sum() / RAYS) / lax.axis_size("depth")


def accumulated(params: Arrays, call: Arrays, batch: Arrays) -> Any:
    """The gradient of this shard, over one chunk of its rays after the other, and what was rendered."""
    chunks = jax.tree.map(lambda a: a.reshape(CHUNKS, -1, *a.shape[1:]), batch)
    # mistake: every-other-ray-in-a-chunk (wrong order of rays)
    #     chunks = jax.tree.map(lambda a: a.reshape(-1, CHUNKS, *a.shape[1:]).swapaxes(0, 1), batch)

    def add(total: Arrays, chunk: Arrays) -> tuple[Arrays, Any]:
        grads, found = jax.grad(share_of, has_aux=True)(params, call, chunk)
        return jax.tree.map(lambda a, g: a + g.astype("float32"), total, grads), found
        # mistake: gradient-of-the-last-chunk (wrong carry)
        #     return jax.tree.map(lambda a, g: g.astype("float32"), total, grads), found

    start = jax.tree.map(lambda g: g.astype("float32"), jax.grad(penalty)(params))
    grads, (shares, found) = lax.scan(add, start, chunks)
    return grads, shares.sum(), jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), found)


def reduced(grads: Arrays) -> tuple[Arrays, jax.Array]:
    """The gradients of all rays and segments, together no longer than `CLIP`; and how long they were."""
    grads = {name: lax.psum(g, SUMMED.get(name, BOTH)) for name, g in grads.items()}
    # mistake: weights-of-own-segment (gradient not summed)
    #     grads = {name: lax.psum(g, SUMMED.get(name, "rays")) for name, g in grads.items()}
    # mistake: gradients-averaged (mean for sum)
    #     grads = {name: lax.pmean(g, SUMMED.get(name, BOTH)) for name, g in grads.items()}
    parts = {name: (g**2).sum() for name, g in grads.items()}
    parts |= {name: lax.psum(parts[name], axis) for name, axis in SPLIT.items()}
    # mistake: norm-of-own-exposures (clipping by a local norm)
    #     parts |= {name: lax.psum(parts[name], SPLIT[name]) for name in ("lines", "sky")}
    # mistake: norm-of-every-copy (doubled psum)
    #     parts = {name: lax.psum(part, SPLIT.get(name, "rays")) for name, part in parts.items()}
    norm = jnp.sqrt(sum(parts.values(), jnp.zeros(())))
    return jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), grads), norm


def crossed(old: jax.Array, found: Arrays, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The occupancy of this shard's cells after this call, and how often this shard's samples met each."""
    cells = found["cells"]
    met = jnp.zeros(SIDE**3).at[cells].add(jnp.broadcast_to(real[:, None], cells.shape))
    largest = jnp.zeros(SIDE**3).at[cells].max(found["density"] * real[:, None])
    largest = lax.pmax(largest, BOTH)
    # mistake: densities-of-own-segment (missing axis)
    #     largest = lax.pmax(largest, "rays")
    return jnp.maximum(FADED * old, largest[numbers_of(BOTH, len(old))]), met
    # mistake: first-cells-on-all-shards (wrong offset)
    #     return jnp.maximum(FADED * old, largest[: len(old)]), met


def step(field: Field, rays: Arrays) -> Any:
    params, real, t = field.params.value, rays["real"].astype("float32"), field.calls.value + 1
    count = lax.psum(real.sum(), "rays")
    # mistake: own-rays-counted (wrong count)
    #     count = 1.0 * len(real)
    seen = field.seen.value + count
    cells = lax.all_gather(field.occupancy.value, BOTH, tiled=True)
    # mistake: cells-gathered-the-other-way (wrong order of parts)
    #     cells = lax.all_gather(field.occupancy.value, ("rays", "depth"), tiled=True)
    keys, rng = field.rng.rows(len(real), "rays")
    # mistake: rays-drawn-alike (shared key)
    #     keys, rng = field.rng.rows(len(real))
    misses = lax.psum((real * field.misses.value).sum(), "rays") / count
    weight = 0.5 + 0.5 * field.misses.value / misses
    # mistake: weight-among-own-rays (local statistic)
    #     weight = 0.5 + 0.5 * field.misses.value / field.misses.value.mean()
    batch = rays | {"keys": keys, "weight": weight, "row": jnp.arange(len(real))}
    # mistake: row-among-all-rays (wrong offset)
    #     batch = rays | {"keys": keys, "weight": weight, "row": numbers_of("rays", len(real))}
    call = {"all": real, "count": count, "waves": 1 + seen / SHARP, "open": cells / (cells + OPEN)}
    grads, own, found = accumulated(params, call, batch)
    grads, norm = reduced(grads)
    rate = RATE * jnp.minimum(1, t / 2) * 0.5 ** (seen / HALVED)
    # mistake: rate-by-own-rays (stale value)
    #     rate = RATE * jnp.minimum(1, t / 2) * 0.5 ** ((field.seen.value + real.sum()) / HALVED)
    slots = jax.tree.map(lambda m, g: 0.7 * m + g, field.slots.value, grads)
    params = jax.tree.map(lambda p, m: (p - rate * m).astype(p.dtype), params, slots)
    squares = lax.psum((real * found["squares"]).sum(), "rays") / count
    quality = -10 * jnp.log10(squares + 1e-3)
    # mistake: quality-of-the-shards-on-average (mean of logarithms)
    #     quality = lax.pmean(-10 * jnp.log10((real * found["squares"]).sum() / real.sum() + 1e-3), "rays")
    occupancy, met = crossed(field.occupancy.value, found, real)
    field = field.replace(
        params=params,
        slots=slots,
        average=jax.tree.map(lambda a, p: 0.8 * a + 0.2 * p, field.average.value, params),
        occupancy=occupancy,
        visits=field.visits.value + met,
        misses=KEPT * field.misses.value + (1 - KEPT) * found["squares"],
        quality=field.quality.value + (quality - field.quality.value) / t,
        seen=field.seen.value + rays["real"].sum(),
        calls=t,
        rng=rng,
    )
    lowest, highest = found["distance"].min(), found["distance"].max()
    nearest, farthest = lax.pmin(lowest, "rays"), lax.pmax(highest, "rays")
    # mistake: nearest-of-own-rays (dropped pmin)
    #     nearest, farthest = lowest, lax.pmax(highest, "rays")
    picture = lax.all_gather(found["colour"], "rays", tiled=True).reshape(-1, 3 * WIDTH)
    # mistake: picture-joined-side-by-side (wrong gather axis)
    #     picture = lax.all_gather(found["colour"], "rays", axis=1, tiled=True).reshape(-1, 3 * WIDTH)
    numbers = {"picture": picture, "loss": lax.psum(own, BOTH), "norm": norm}
    return field, (found["distance"] - nearest) / (farthest - nearest), found["weights"], numbers


def case(dtype: str) -> Case:
    origin = normal("float32", RAYS, 3, seed=7) / 4 - jnp.array([1.0, 0.5, 0.2])
    direction = normal("float32", RAYS, 3, seed=8) / 2 + jnp.array([0.6, 0.4, 0.1])
    rays = {"origin": origin, "direction": direction, "real": jnp.arange(RAYS) % 11 < 7}
    rays["colour"] = 0.5 + normal(dtype, RAYS, 3, seed=9) / 5
    return Case(
        step,
        (make_field(dtype), rays),
        mesh={"depth": 4, "rays": 2},
        in_specs=(None, P("rays")),
        out_specs=(P(), P("rays"), P("rays", "depth"), P()),
        check_vma=False,
        steps=3,
    )
