"""Molecular dynamics: particles over one axis, pairs and features of a potential over the other."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .case import Case, normal


DTYPES = ("float32", "bfloat16", "float16")
ATOMS, REAL, SPECIES, BASIS, HIDDEN = 24, 21, 2, 8, 4
INNER, KEPT, BINS, FASTEST = 2, 4, 8, 3
SPACING, CUTOFF, DIAMETER, STIFF, BOND, REST = 1.5, 2.1, 1.6, 4.0, 1.0, 1.4
STEP, REMEMBERED, WARM, PRESSURE, SOFTNESS, LIMIT = 0.08, 0.95, 0.4, 0.3, 0.1, 3.0


class Moving(NamedTuple):
    """What an inner step changes; the forces are those at the positions."""

    positions: jax.Array
    velocities: jax.Array
    travelled: jax.Array
    forces: jax.Array


class Block(NamedTuple):
    """The particles of a shard, on their way around the ring."""

    positions: jax.Array
    number: jax.Array
    real: jax.Array


class System(sm.Module):
    up: sm.ParamState
    out: sm.ParamState
    bias: sm.ParamState
    kinds: sm.ParamState
    centres: sm.LongTermState
    typical: sm.State
    particles: sm.State
    trajectory: sm.State
    box: sm.State
    pressures: sm.State
    spread: sm.State
    histogram: sm.State
    encounters: sm.State
    highest: sm.State
    time: sm.State
    key: Any


def make_system(dtype: str) -> System:
    grid = np.stack(np.meshgrid(*[np.arange(3.0)] * 3, indexing="ij"), -1).reshape(-1, 3)
    places = jnp.asarray(grid[:ATOMS] * SPACING, "float32") + normal("float32", ATOMS, 3) / 8
    speeds = normal("float32", ATOMS, 3, seed=1) / 2 + jnp.array([0.3, 0.0, -0.2])
    particles = places, speeds.at[REAL:].set(0), jnp.zeros((ATOMS, 3))
    return System(
        up=sm.ParamState(normal(dtype, BASIS, HIDDEN, seed=2) / 2, spec=P("model")),
        out=sm.ParamState(normal(dtype, HIDDEN, seed=3) / 2),
        bias=sm.ParamState(normal(dtype, HIDDEN, seed=4) / 4),
        kinds=sm.ParamState(1 + normal(dtype, SPECIES, BASIS, seed=5) / 4, spec=P(None, "model")),
        centres=sm.LongTermState(jnp.linspace(0.8, 2.0, BASIS, dtype="float32"), spec=P("model")),
        typical=sm.State(jnp.full(BASIS, 0.5, "float32"), spec=P("model")),
        particles=sm.State(particles, spec=P("atoms")),
        trajectory=sm.State(jnp.zeros((KEPT, ATOMS, 3), dtype), spec=P(None, "atoms")),
        box=sm.State(jnp.asarray(3 * SPACING, "float32")),
        pressures=sm.State(jnp.zeros(KEPT)),
        # mistake: pressures-split-like-the-particles (wrong spec)
        #     pressures=sm.State(jnp.zeros(KEPT), spec=P("atoms")),
        spread=sm.State(jnp.zeros(())),
        histogram=sm.State(jnp.zeros(BINS), reduce="sum"),
        # mistake: histogram-of-an-average-shard (wrong policy)
        #     histogram=sm.State(jnp.zeros(BINS), reduce="mean"),
        encounters=sm.State(0, reduce="sum"),
        # mistake: encounters-on-a-shard (policy forgotten)
        #     encounters=sm.State(0),
        highest=sm.State(jnp.zeros(()), reduce="max"),
        # mistake: highest-of-all-together (wrong policy)
        #     highest=sm.State(jnp.zeros(()), reduce="sum"),
        time=sm.State(0),
        key=jax.random.key(7),
    )


def numbers_of(here: int) -> jax.Array:
    """Of this shard's particles among all."""
    return lax.axis_index("atoms") * here + jnp.arange(here)
    # mistake: numbers-dealt-in-turn (wrong offset)
    #     return lax.axis_index("atoms") + jnp.arange(here) * lax.axis_size("atoms")


def apart(a: jax.Array, b: jax.Array, box: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From each of `b` to each of `a` the shortest way in the periodic box, and how long it is."""
    away = a - b
    away = away - box * jnp.round(away / box)
    return away, jnp.sqrt((away**2).sum(-1) + 1e-4)


def repelled(home: Block, box: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each pair once, on one shard of the pairs: what acts on the visitors travels on with them."""
    size = lax.axis_size("atoms")
    ahead = [(k, (k + 1) % size) for k in range(size)]
    own = reaction = jnp.zeros_like(home.positions)
    visitor, virial = home, jnp.zeros(())
    for _ in range(size):
        # mistake: ring-not-closed (off by one)
        #     for _ in range(max(size - 1, 1)):
        away, distance = apart(home.positions[:, None], visitor.positions, box)
        ordered = home.number[:, None] < visitor.number
        # mistake: ordered-in-the-blocks (row index not offset)
        #     ordered = jnp.arange(len(own))[:, None] < jnp.arange(len(own))
        dealt = (home.number[:, None] + visitor.number) % lax.axis_size("model")
        # mistake: pairs-dealt-by-the-blocks (wrong axis name)
        #     dealt = (home.number[:, None] + visitor.number) % lax.axis_size("atoms")
        pair = ordered & (dealt == lax.axis_index("model")) & home.real[:, None] & visitor.real
        # mistake: visitors-as-real-as-the-hosts (wrong mask)
        #     pair = ordered & (dealt == lax.axis_index("model")) & home.real[:, None] & home.real
        strength = jnp.where(pair, STIFF * jnp.maximum(0, DIAMETER - distance), 0)
        push = (strength / distance)[..., None] * away
        own, virial = own + push.sum(1), virial + (push * away).sum()
        # mistake: virial-of-the-last-visitor (wrong accumulation)
        #     own, virial = own + push.sum(1), (push * away).sum()
        reaction = reaction - push.sum(0)
        # mistake: reactions-travel-twice (doubled ppermute)
        #     reaction = lax.ppermute(reaction, "atoms", ahead) - push.sum(0)
        visitor, reaction = lax.ppermute((visitor, reaction), "atoms", ahead)
        # mistake: reactions-stay-behind (ppermute forgotten)
        #     visitor, reaction = lax.ppermute(visitor, "atoms", ahead), reaction
        # mistake: only-the-places-travel (ppermute forgotten)
        #     visitor = visitor._replace(positions=lax.ppermute(visitor.positions, "atoms", ahead))
    forces = lax.psum(own + reaction, "model")
    # mistake: reaction-of-own-pairs (dropped psum)
    #     forces = lax.psum(own, "model") + reaction
    return forces, lax.psum(virial, ("atoms", "model"))


def bonded(home: Block, box: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each particle hangs on the next of the chain, also where that is another shard's first."""
    size = lax.axis_size("atoms")
    back, ahead = ([(k, (k + by) % size) for k in range(size)] for by in (-1, 1))
    first = lax.ppermute(home.positions[:1], "atoms", back)
    # mistake: chain-closed-in-the-shard (halo of a shard)
    #     first = home.positions[:1]
    following = jnp.concatenate([home.positions[1:], first])
    away, length = apart(home.positions, following, box)
    held = (home.number < REAL - 1)[:, None]
    # mistake: last-of-each-shard-is-free (off by one)
    #     held = ((home.number < REAL - 1) & (jnp.arange(len(away)) < len(away) - 1))[:, None]
    pull = jnp.where(held, -BOND * (length - REST)[:, None] * away / length[:, None], 0)
    before = lax.ppermute(pull[-1:], "atoms", ahead)
    # mistake: reaction-to-the-wrong-side (wrong ppermute neighbour)
    #     before = lax.ppermute(pull[-1:], "atoms", back)
    forces = pull - jnp.concatenate([before, pull[:-1]])
    return forces, lax.psum((pull * away).sum(), "atoms")
    # mistake: bonds-of-every-copy (doubled psum)
    #     return forces, lax.psum((pull * away).sum(), ("atoms", "model"))


def energy_of(
    everyone: jax.Array, stretch: jax.Array, system: System, species: jax.Array, kinds: jax.Array
) -> Any:
    """This shard's share of the learned energy: of its own particles, among all."""
    number, real = numbers_of(len(species)), species >= 0
    away, distance = apart(everyone[number][:, None], everyone, system.box.value)
    distance = stretch * distance
    other = (number[:, None] != jnp.arange(len(everyone))) & (kinds >= 0)
    # mistake: self-left-out-by-the-row (row index not offset)
    #     other = (jnp.arange(len(real))[:, None] != jnp.arange(len(everyone))) & (kinds >= 0)
    smooth = jnp.where(other & (distance < CUTOFF), 1 + jnp.cos(jnp.pi * distance / CUTOFF), 0) / 2
    bumps = jnp.exp(-4 * (distance[..., None] - system.centres.value) ** 2) * smooth[..., None]
    weights = system.kinds.value[kinds]
    features = jnp.einsum("ijk,jk->ik", bumps.astype(weights.dtype), weights)
    usual = features - system.typical.value.astype(features.dtype)
    hidden = jnp.tanh(lax.psum(usual @ system.up.value, "model") + system.bias.value)
    # mistake: tanh-of-own-features (reduction after a nonlinearity)
    #     hidden = lax.psum(jnp.tanh(usual @ system.up.value + system.bias.value), "model")
    # mistake: bias-with-each-half (bias added before the psum)
    #     hidden = jnp.tanh(lax.psum(usual @ system.up.value + system.bias.value, "model"))
    each = jnp.where(real, (hidden @ system.out.value).astype("float32"), 0)
    return each.sum() / lax.axis_size("model"), (each, features.astype("float32"))
    # mistake: energy-of-every-copy (gradient reduced twice)
    #     return each.sum(), (each, features.astype("float32"))


def forces_on(system: System, positions: jax.Array, species: jax.Array) -> Any:
    """The forces on this shard's particles, the virial, and what the potential made of each."""
    everyone = lax.all_gather(positions, "atoms", tiled=True)
    # mistake: places-interleaved (wrong order of parts)
    #     everyone = lax.all_gather(positions, "atoms", axis=1).reshape(-1, 3)
    kinds = lax.all_gather(species, "atoms", tiled=True)
    # mistake: own-kinds-for-all (all_gather forgotten)
    #     kinds = jnp.tile(species, lax.axis_size("atoms"))
    gradient = jax.grad(energy_of, argnums=(0, 1), has_aux=True)
    (of_all, of_stretch), found = gradient(everyone, jnp.ones(()), system, species, kinds)
    of_all = lax.psum(of_all, "model")
    # mistake: forces-of-own-features (gradient not reduced)
    #     of_all = 1.0 * of_all
    learned = -lax.psum_scatter(of_all, "atoms", tiled=True)
    # mistake: no-reaction-from-other-shards (gradient of a shard)
    #     learned = -of_all[numbers_of(len(species))]
    home = Block(positions, numbers_of(len(species)), species >= 0)
    (repulsion, virial), (chain, of_chain) = (f(home, system.box.value) for f in (repelled, bonded))
    virial = virial + of_chain - lax.psum(of_stretch, ("atoms", "model"))
    # mistake: virial-of-own-particles (missing axis)
    #     virial = virial + of_chain - lax.psum(of_stretch, "model")
    return learned + repulsion + chain, virial, found


def temperature_of(velocities: jax.Array, mass: jax.Array, count: jax.Array) -> Any:
    """The temperature of all particles, and the kinetic energy of each of this shard."""
    kinetic = mass * (velocities**2).sum(-1) / 2
    degrees = 3 * (count - 1)
    # mistake: degrees-lost-on-each-shard (small factor)
    #     degrees = 3 * (count - lax.axis_size("atoms"))
    return 2 * lax.psum(kinetic.sum(), "atoms") / degrees, kinetic


def thermal(system: System, velocities: jax.Array, mass: jax.Array, now: jax.Array) -> jax.Array:
    """Partly drawn anew for each particle by its number; as a whole the particles stay at rest."""
    key = jax.random.fold_in(system.key, now)
    # mistake: noise-of-each-half (key of a shard)
    #     key = jax.random.fold_in(system.key, now + INNER * lax.axis_index("model"))
    keys = jax.vmap(partial(jax.random.fold_in, key))(numbers_of(len(mass)))
    # mistake: noise-alike-on-all-shards (shared key)
    #     keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(mass)))
    noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
    real = (mass > 0)[:, None]
    heat = jnp.sqrt(WARM * (1 - REMEMBERED**2) / jnp.where(real, mass[:, None], 1))
    velocities = jnp.where(real, REMEMBERED * velocities + heat * noise, 0)
    drift = lax.psum(mass @ velocities, "atoms") / lax.psum(mass.sum(), "atoms")
    # mistake: each-shard-at-rest (statistics of a shard)
    #     drift = mass @ velocities / mass.sum()
    return jnp.where(real, velocities - drift, 0)


def fastest(energies: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers of the particles of most energy, and where those are."""
    every = lax.all_gather(energies, "atoms", tiled=True)
    # mistake: energies-interleaved (wrong order of parts)
    #     every = lax.all_gather(energies, "atoms").T.reshape(-1)
    _, chosen = lax.top_k(every, FASTEST)
    # mistake: fastest-of-a-shard (top-k of a shard)
    #     _, chosen = lax.top_k(energies, FASTEST)
    here = chosen // len(energies) == lax.axis_index("atoms")
    # mistake: owner-by-the-remainder (wrong owner)
    #     here = chosen % lax.axis_size("atoms") == lax.axis_index("atoms")
    found = jnp.where(here[:, None], positions[chosen % len(energies)], 0)
    # mistake: places-of-all-owners (mask forgotten)
    #     found = positions[chosen % len(energies)]
    return chosen, lax.psum(found, "atoms")


def counted(system: System, moving: Moving, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many are near each particle, and the distances of pairs: each at its lower number."""
    everyone, present = (lax.all_gather(x, "atoms", tiled=True) for x in (moving.positions, real))
    _, distance = apart(moving.positions[:, None], everyone, system.box.value)
    number, all_numbers = numbers_of(len(real))[:, None], jnp.arange(len(everyone))
    near = real[:, None] & present & (distance < CUTOFF)
    # mistake: padding-is-near-too (mask of a shard)
    #     near = real[:, None] & jnp.tile(real, lax.axis_size("atoms")) & (distance < CUTOFF)
    bins = jnp.minimum(distance * BINS / CUTOFF, BINS - 1).astype("int32")
    once = (near & (number < all_numbers)).astype("float32")
    return near.sum(1) - real, jnp.zeros(BINS).at[bins].add(once)


def step(system: System, species: jax.Array, pull: jax.Array) -> Any:
    real, box = species >= 0, system.box.value
    mass = jnp.array([1.0, 2.0, 0.0])[species]
    heavy = jnp.where(real, mass, 1)[:, None]
    count = lax.psum(real.sum(), "atoms")
    # mistake: count-of-own-particles (count of a shard)
    #     count = real.sum()

    def forced(positions: jax.Array) -> Any:
        forces, virial, found = forces_on(system, positions, species)
        return jnp.where(real[:, None], forces + pull.astype("float32"), 0), virial, found

    positions, velocities, travelled = system.particles.value
    start = forced(positions)[0]
    largest = jnp.sqrt((start**2).sum(-1)).max()
    dt = STEP / jnp.maximum(1, lax.pmax(largest, "atoms") / LIMIT)
    # mistake: step-by-the-own-forces (dropped pmax)
    #     dt = STEP / jnp.maximum(1, largest / LIMIT)

    def inner(moving: Moving, now: jax.Array) -> tuple[Moving, Any]:
        half = thermal(system, moving.velocities + dt / 2 * moving.forces / heavy, mass, now)
        positions = moving.positions + dt * half
        forces, virial, found = forced(positions)
        velocities = half + dt / 2 * forces / heavy
        return Moving(positions, velocities, moving.travelled + dt * half, forces), (virial, *found)

    moving = Moving(positions, velocities, travelled, start)
    moving, found = lax.scan(inner, moving, system.time.value * INNER + jnp.arange(INNER))
    virial, each, features = (x[-1] for x in found)
    temperature, kinetic = temperature_of(moving.velocities, mass, count)
    pressure = ((count - 1) * temperature + virial / 3) / box**3
    # mistake: pressure-in-the-volume-of-a-shard (small factor)
    #     pressure = ((count - 1) * temperature + virial / 3) / (box**3 / lax.axis_size("atoms"))
    scale = jnp.cbrt(1 + SOFTNESS * jnp.clip(pressure - PRESSURE, -1, 1))
    spread = lax.psum((moving.travelled**2).sum(), "atoms") / count
    # mistake: spread-of-the-mean-shard (mean of means)
    #     spread = lax.pmean((moving.travelled**2).sum() / real.sum(), "atoms")
    seen = lax.psum((features * real[:, None]).sum(0), "atoms") / count
    # mistake: features-seen-by-a-shard (statistics of a shard)
    #     seen = (features * real[:, None]).sum(0) / real.sum()
    speeds = jnp.where(real, jnp.sqrt((moving.velocities**2).sum(-1)), jnp.inf)
    median = jnp.sort(lax.all_gather(speeds, "atoms", tiled=True))[count // 2]
    # mistake: mean-of-the-shards-medians (mean of medians)
    #     median = lax.pmean(jnp.sort(speeds)[real.sum() // 2], "atoms")
    near, histogram = counted(system, moving, real)
    chosen, places = fastest(jnp.where(real, kinetic + each, -jnp.inf), moving.positions)
    slot = system.time.value % KEPT
    system = system.replace(
        particles=(moving.positions * scale, moving.velocities, moving.travelled),
        trajectory=system.trajectory.value.at[slot].set(moving.positions.astype(pull.dtype)),
        typical=0.8 * system.typical.value + 0.2 * seen,
        box=box * scale,
        pressures=system.pressures.value.at[slot].set(pressure),
        spread=system.spread.value + (spread - system.spread.value) / (system.time.value + 1),
        histogram=system.histogram.value + histogram,
        # mistake: histogram-summed-with-the-old (doubled psum)
        #     histogram=lax.psum(system.histogram.value + histogram, "atoms"),
        encounters=system.encounters.value + (near > 9).sum(),
        highest=jnp.maximum(system.highest.value, largest),
        time=system.time.value + 1,
    )
    found = {"temperature": temperature, "median": median, "chosen": chosen, "places": places}
    return system, kinetic + each, near, found


def case(dtype: str) -> Case:
    species = jnp.where(jnp.arange(ATOMS) < REAL, jnp.arange(ATOMS) * 5 % 7 % SPECIES, -1)
    return Case(
        step,
        (make_system(dtype), species, normal(dtype, ATOMS, 3, seed=6) / 4),
        mesh={"atoms": 4, "model": 2},
        in_specs=(None, P("atoms"), P("atoms")),
        out_specs=(P(), P("atoms"), P("atoms"), P()),
        check_vma=False,
        steps=3,
    )
