"""Checks what random streams promise over lanes."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import statemesh as sm

from ..base.arrays import Array
from ..plain.streams import THREEFRY, Draws, bits, check_per_shard, check_streams, draw_all
from ..programs import Axes, MeshShape
from .cases import Axis


LANES = "x"


class Lanes:
    """`draw_all` over lanes that share the rows, with the interface that the checks of streams expect."""

    def __init__(self, transform: str, count: int, draws: Draws, *, keys: Axis = None) -> None:
        self.count, self.keys = count, keys
        own: Axes = (LANES,) if keys is None else ()
        self.mapped: Any = getattr(sm, transform)(
            functools.partial(draw_all, draws, own),
            axis_name=LANES,
            axis_size=count,
            in_axes=(None, None if keys is not None else 0),
            state_in_axes=None if keys is None else {keys: sm.RandomState},
        )

    def __call__(self, rng: sm.RandomState, x: Any) -> Any:
        by_row, by_shard, rng = self.mapped(rng, self._split(x))
        return _flat(by_row), _flat(by_shard), rng

    def place(self, rng: sm.RandomState, x: Any) -> Any:
        return self.mapped.place(rng, self._split(x))

    def _split(self, x: Any) -> Any:
        return x if self.keys is not None else x.reshape(self.count, -1)


def _flat(several: Sequence[Any]) -> list[Any]:
    return [keys.reshape(-1, *keys.shape[2:]) for keys in several]


def check_lane_streams(
    transform: str,
    count: int,
    fewer: int,
    draws: Draws,
    seed: int,
    *,
    jit: bool = False,
    impl: str = THREEFRY,
) -> None:
    """Checks that rows and the remaining key are those of a run without lanes, and that no lanes share a key.

    The first lanes draw the same if there are `fewer` lanes, and under `vmap2`.
    """
    lanes: Any = Lanes(transform, count, draws)
    check_streams(MeshShape((count,)), (LANES,), draws, seed, jit=jit, impl=impl, mapped=lanes)
    first, left = _drawn(lanes, fewer, seed, impl)
    for other in (Lanes(transform, fewer, draws), Lanes("vmap2", count, draws)):
        again, key = _drawn(other, fewer, seed, impl)
        np.testing.assert_array_equal(key, left)
        for a, b in zip(again, first, strict=True):
            np.testing.assert_array_equal(a, b)


def _drawn(lanes: Lanes, first: int, seed: int, impl: str) -> tuple[list[Array], Array]:
    """The bits that the first lanes draw, and the bits of the remaining key."""
    rng = sm.RandomState(jax.random.key(seed, impl=impl))
    by_row, by_lane, rng = lanes(rng, np.zeros(2 * lanes.count, np.float32))
    drawn = [np.asarray(keys)[: 2 * first] for keys in by_row]
    return drawn + [np.asarray(keys)[:first] for keys in by_lane], bits(rng.key)


def check_key_per_lane(transform: str, count: int, draws: Draws, seed: int, axis: int) -> None:
    """Checks that with one key per lane, each lane draws what a run with its key draws."""
    lanes: Any = Lanes(transform, count, draws, keys=axis)
    check_per_shard(MeshShape((count,)), (LANES,), draws, seed, mapped=lanes)
