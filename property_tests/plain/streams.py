"""Checks what random streams promise on every mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import statemesh as sm

from ..base.arrays import Array
from ..base.models import mesh_of
from ..programs import Axes, MeshShape


# `rows` draws one key per row, `split` one key, a number that many keys. `set` writes a new key.
ROWS, SPLIT, SET = "rows", "split", "set"
Draws = tuple[str | int, ...]

# The draws that work with each key implementation on a mesh. JAX has no philox program for several devices,
# so that nothing may be folded into such a key. Programs of `threefry4x32` take long to compile, so that it
# is in `tests/test_keys.py` instead.
ON_MESHES: dict[str, Draws] = {
    "threefry2x32": (ROWS, SPLIT, SET, 2),
    "rbg": (ROWS, SPLIT, SET, 2),
    "unsafe_rbg": (ROWS, SPLIT, SET, 2),
    "philox2x32": (ROWS, SPLIT, 2),
    "philox4x32": (ROWS, SPLIT, 2),
}

Numbers = Callable[[Any], Any]


def all_at_once(keys: Any) -> Any:
    """Two numbers from each key."""
    return jax.vmap(lambda key: jax.random.bits(key, (2,)))(keys)


def one_by_one(keys: Any) -> Any:
    """The same, one key after another."""
    return np.stack([jax.random.bits(key, (2,)) for key in keys])


def draw_all(
    draws: Draws, axes: Axes, rng: sm.RandomState, x: Any, numbers: Numbers = all_at_once
) -> tuple[list[Any], list[Any], sm.RandomState]:
    """Makes all draws. Returns the numbers of each row, and one entry per shard with the bits of its keys."""
    by_row, by_shard = [], []
    for draw in draws:
        if draw == ROWS:
            keys, rng = rng.rows(x.shape[0], axes or None)
            by_row.append(numbers(keys))
        elif draw == SET:
            rng = rng.set(jax.random.fold_in(rng.key, 7))
        else:
            keys, rng = rng.split(None if isinstance(draw, str) else draw)
            by_shard.append(jax.random.key_data(keys).reshape(1, -1))
    return by_row, by_shard, rng


@functools.cache
def mapping(mesh: MeshShape, axes: Axes, draws: Draws, per_shard: Axes = ()) -> sm.StatefulMapping:
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


def bits(keys: Any) -> Array:
    return np.asarray(jax.random.key_data(keys))


def check_streams(
    mesh: MeshShape, axes: Axes, draws: Draws, seed: int, impl: str, *, jit: bool
) -> None:
    """Checks calls in a row against the unsharded run.

    The numbers of each row and the remaining key agree bit by bit. No two shards, draws or calls share a key.
    """
    mapped = mapping(mesh, axes, draws)
    x = np.zeros(3 * mesh.size(axes), np.float32)
    plain = sm.RandomState(jax.random.key(seed, impl=impl))
    rng = mapped.place(plain, x)[0]
    call = jax.jit(mapped) if jit else mapped
    seen: list[Array] = []
    for _ in range(2):
        before = rng
        by_row, by_shard, rng = jax.block_until_ready(call(rng, x))
        want_rows, want_first, plain = draw_all(draws, axes, plain, x, one_by_one)
        assert_same_bits(by_row, want_rows)
        assert_same_bits([np.asarray(keys)[:1] for keys in by_shard], want_first)
        np.testing.assert_array_equal(bits(rng.key), bits(plain.key))
        if not draws and not jit:
            assert rng.key is before.key
        seen += [np.asarray(numbers).reshape(-1, 2) for numbers in by_row]
        seen += [np.asarray(keys).reshape(-1, len(bits(rng.key))) for keys in by_shard]
    assert_distinct([*seen, bits(rng.key)[None]])


def check_per_shard(mesh: MeshShape, axes: Axes, draws: Draws, seed: int, impl: str) -> None:
    """Where each shard along `axes` has a key, it draws what an unsharded run draws from that key."""
    mapped = mapping(mesh, (), draws, axes)
    keys = jax.random.split(jax.random.key(seed, impl=impl), mesh.size(axes))
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
    words = len(bits(keys[0]))
    assert_distinct([np.asarray(drawn).reshape(-1, words) for drawn in by_shard])


def assert_same_bits(got: Sequence[Any], want: Sequence[Any]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_distinct(keys: Sequence[Array]) -> None:
    """All keys, and all numbers drawn from them, are different."""
    every = [row.tobytes() for rows in keys for row in rows]
    assert len(set(every)) == len(every)
