"""What random streams promise on any mesh, as plain checks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import statemesh as sm

from .mapped import mesh_of
from .programs import Axes, MeshShape
from .reference import Array


# `rows` draws one key per row, `split` one key, a number that many.
ROWS, SPLIT = "rows", "split"
Draws = tuple[str | int, ...]


def draw_all(
    draws: Draws, axes: Axes, rng: sm.RandomState, x: Any
) -> tuple[list[Any], list[Any], sm.RandomState]:
    """The bits of the keys drawn: one entry per row for `rows`, one per shard for the rest."""
    by_row, by_shard = [], []
    for draw in draws:
        if draw == ROWS:
            keys, rng = rng.rows(x.shape[0], axes or None)
            by_row.append(jax.random.key_data(keys))
        else:
            keys, rng = rng.split(None if isinstance(draw, str) else draw)
            by_shard.append(jax.random.key_data(keys).reshape(1, -1))
    return by_row, by_shard, rng


def mapping_of(
    mesh: MeshShape, axes: Axes, draws: Draws, per_shard: Axes = ()
) -> sm.StatefulMapping:
    """`draw_all` on a mesh, its rows sharded over `axes`."""
    rows = PartitionSpec(axes)
    mapping: sm.StatefulMapping = sm.shard_map(
        functools.partial(draw_all, draws, axes),
        mesh_of(mesh),
        (None, rows),
        (rows, PartitionSpec(mesh.axis_names), None),
        state_in_specs={sm.RandomState: sm.PerShard(*per_shard)} if per_shard else None,
    )
    return mapping


mapping = functools.cache(mapping_of)


def bits(keys: Any) -> Array:
    return np.asarray(jax.random.key_data(keys))


def check_streams(
    mesh: MeshShape,
    axes: Axes,
    draws: Draws,
    seed: int,
    *,
    jit: bool = False,
    mapped: sm.StatefulMapping | None = None,
) -> None:
    """Calls in a row: rows and the key that is left are those of the unsharded run, bit by bit, and
    no two shards, draws or calls get one key."""
    mapped = mapping(mesh, axes, draws) if mapped is None else mapped
    x = np.zeros(3 * mesh.size(axes), np.float32)
    plain = sm.RandomState(jax.random.key(seed))
    rng = mapped.place(plain, x)[0]
    call = jax.jit(mapped) if jit else mapped
    seen: list[Array] = []
    for _ in range(2):
        before = rng
        by_row, by_shard, rng = jax.block_until_ready(call(rng, x))
        want_rows, want_first, plain = draw_all(draws, axes, plain, x)
        assert_same_bits(by_row, want_rows)
        assert_same_bits([np.asarray(keys)[:1] for keys in by_shard], want_first)
        np.testing.assert_array_equal(bits(rng.key), bits(plain.key))
        if not draws and not jit:
            assert rng.key is before.key
        seen += [np.asarray(keys).reshape(-1, 2) for keys in (*by_row, *by_shard)]
    assert_distinct([*seen, bits(rng.key)[None]])


def check_per_shard(
    mesh: MeshShape,
    axes: Axes,
    draws: Draws,
    seed: int,
    *,
    mapped: sm.StatefulMapping | None = None,
) -> None:
    """With a key per shard of `axes`, each draws as the unsharded run of that key does."""
    mapped = mapping(mesh, (), draws, axes) if mapped is None else mapped
    keys = jax.random.split(jax.random.key(seed), mesh.size(axes))
    x = np.zeros(2, np.float32)
    _, by_shard, rng = jax.block_until_ready(mapped(sm.RandomState(keys), x))
    after = bits(rng.key)
    rest = [name for name in mesh.axis_names if name not in axes]
    for number, at in enumerate(mesh.coordinates()):
        entry = mesh.index(at, axes)
        _, want, plain = draw_all(draws, (), sm.RandomState(keys[entry]), x)
        np.testing.assert_array_equal(after[entry], bits(plain.key))
        if mesh.index(at, tuple(rest)) == 0:
            assert_same_bits([np.asarray(drawn)[number : number + 1] for drawn in by_shard], want)
    assert_distinct([np.asarray(drawn).reshape(-1, 2) for drawn in by_shard])


def assert_same_bits(got: Sequence[Any], want: Sequence[Any]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_distinct(keys: Sequence[Array]) -> None:
    """No key twice."""
    every = np.concatenate(keys) if keys else np.zeros((0, 2))
    assert len(np.unique(every, axis=0)) == len(every)
