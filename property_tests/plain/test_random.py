"""Random streams on random meshes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import statemesh as sm

from ..base.models import mesh_of
from ..base.settings import fewer
from ..programs import Axes, MeshShape
from ..strategies import meshes


# Programs of `threefry4x32` take long to compile; they are in `tests/state/test_keys.py`.
IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg", "philox2x32", "philox4x32")
seeds = st.integers(0, 2**31 - 1)


def some(mesh: MeshShape, least: int) -> st.SearchStrategy[Axes]:
    """At least `least` axes of a mesh, in any order."""
    ordered = st.permutations(mesh.axis_names)
    return ordered.flatmap(
        lambda names: st.integers(least, len(names)).map(lambda n: tuple(names[:n]))
    )


def split(rng: sm.RandomState) -> tuple[Any, sm.RandomState]:
    """One entry, with the bits of three keys."""
    key, rng = rng.split()
    several, rng = rng.split(2)
    return jnp.concatenate([jax.random.key_data(x).ravel() for x in (key, several)])[None], rng


def draw(axes: Axes, rng: sm.RandomState, x: Any) -> tuple[Any, Any, sm.RandomState]:
    """Two numbers of each row, and keys of the shard."""
    keys, rng = rng.rows(len(x), axes or None)
    drawn, rng = split(rng)
    return jax.vmap(lambda key: jax.random.bits(key, (2,)))(keys), drawn, rng


@functools.cache
def mapped(mesh: MeshShape, axes: Axes) -> sm.StatefulMapping:
    """`draw` with the rows split over `axes`."""
    rows, shards = PartitionSpec(axes), PartitionSpec(mesh.axis_names)
    specs = (None, rows), (rows, shards, None)
    mapping: sm.StatefulMapping = sm.shard_map(functools.partial(draw, axes), mesh_of(mesh), *specs)
    return mapping


def bits(keys: Any) -> Any:
    return np.asarray(jax.random.key_data(keys))


def assert_distinct(*drawn: Any) -> None:
    rows = [row.tobytes() for some in drawn for row in some]
    assert len(set(rows)) == len(rows)


@fewer(1 / 6)  # Each example compiles programs of its own.
@given(st.data())
def test_streams_are_those_of_the_unsharded_run(data: st.DataObject) -> None:
    """Numbers of rows and the remaining key, bit by bit; and no two shards, draws or calls share a key."""
    mesh = data.draw(meshes(), "mesh")
    axes = data.draw(some(mesh, 0), "axes of the rows")
    impl = data.draw(st.sampled_from(IMPLEMENTATIONS), "implementation")
    x = np.zeros(3 * mesh.size(axes), np.float32)
    rng = plain = sm.RandomState(jax.random.key(data.draw(seeds, "seed"), impl=impl))
    words, numbers, keys = len(bits(rng.key)), [], []
    for _ in range(2):
        by_row, by_shard, rng = jax.block_until_ready(mapped(mesh, axes)(rng, x))
        want_rows, want_first, plain = draw(axes, plain, x)
        np.testing.assert_array_equal(by_row, want_rows)
        np.testing.assert_array_equal(np.asarray(by_shard)[:1], want_first)
        np.testing.assert_array_equal(bits(rng.key), bits(plain.key))
        numbers.append(np.asarray(by_row))
        keys.append(np.asarray(by_shard).reshape(-1, words))
    assert_distinct(*numbers)
    assert_distinct(*keys, bits(rng.key)[None])


@pytest.mark.slow
@fewer(1 / 6)
@given(st.data())
def test_a_key_per_shard(data: st.DataObject) -> None:
    """Where each shard along some axes has a key, it draws what an unsharded run draws from that key."""
    mesh = data.draw(meshes(), "mesh")
    axes = data.draw(some(mesh, 1), "axes of the keys")
    impl = data.draw(st.sampled_from(IMPLEMENTATIONS), "implementation")
    key = jax.random.key(data.draw(seeds, "seed"), impl=impl)
    keys = jax.random.split(key, mesh.size(axes))
    out_specs = (PartitionSpec(mesh.axis_names), None)
    placed = {sm.RandomState: sm.PerShard(*axes)}
    call = sm.shard_map(split, mesh_of(mesh), None, out_specs, state_in_specs=placed)
    by_shard, rng = jax.block_until_ready(call(sm.RandomState(keys)))
    rest = tuple(name for name in mesh.axis_names if name not in axes)
    for number, at in enumerate(mesh.coordinates()):
        entry = mesh.index(at, axes)
        wanted, plain = split(sm.RandomState(keys[entry]))
        np.testing.assert_array_equal(bits(rng.key)[entry], bits(plain.key))
        if mesh.index(at, rest) == 0:
            np.testing.assert_array_equal(np.asarray(by_shard)[number], wanted[0])
    assert_distinct(np.asarray(by_shard).reshape(-1, len(bits(key))))
