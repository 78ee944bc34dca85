"""Maps of Maps draw random numbers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import statemesh as sm

from ..base.settings import fewer
from ..plain.test_random import seeds


class Noise(sm.Module):
    """Makes its stream in `init_state`, and draws one number in a call."""

    rng: Any = None
    seen: Any = None

    def init_state(self, seed: int) -> "Noise":
        rng = sm.RandomState(jax.random.key(seed))
        return self.replace(rng=rng, seen=sm.ShortTermState(0))

    def update(self, x: Any) -> Any:
        key, rng = self.rng.split()
        return jax.random.bits(key) ^ x, self.replace(rng=rng, seen=self.seen.value + 1)


def nested(sizes: Sequence[int], axes: Sequence[int], seed: int, outermost: str) -> Any:
    """Maps of Maps of `Noise`. The first size is that of the innermost."""
    made: Any = Noise()
    for i, (size, axis) in enumerate(zip(sizes, axes, strict=True)):
        behavior = outermost if i == len(sizes) - 1 else "vmap"
        made = sm.Map(made, size, init_state_axes={axis: ...}, behavior=behavior)
    return made.init_all_states(seed=seed)


def innermost(maps: Any, axes: Sequence[int]) -> tuple[Any, Noise]:
    """The keys of all lanes, with the axis of the outermost lanes first, and the module that has them."""
    while isinstance(maps, sm.Map):
        maps = maps.module
    keys = maps.rng.key
    # The outermost axis was inserted last, so that it is removed first.
    for i, axis in enumerate(axes[::-1]):
        keys = jnp.moveaxis(keys, axis if axis < 0 else axis + i, i)
    return keys, maps


@pytest.mark.slow
@fewer(1 / 8)
@given(data=st.data(), seed=seeds, outermost=st.sampled_from(["vmap", "pmap"]))
def test_maps_in_maps_draw_their_own(data: st.DataObject, seed: int, outermost: str) -> None:
    """Each lane of each Map has its own stream, and draws what `Noise` draws with that key."""
    depth = data.draw(st.integers(2, 3), "depth")
    sizes = [data.draw(st.integers(1, 3), "size") for _ in range(depth)]
    axes = [data.draw(st.sampled_from([0, -1]), "axis") for _ in range(depth)]
    maps = nested(sizes, axes, seed, outermost)
    keys, _ = innermost(maps, axes)
    assert keys.shape == tuple(sizes[::-1])
    seen = [keys]
    separate = {at: sm.RandomState(keys[at]) for at in np.ndindex(keys.shape)}
    for number in range(2):
        out, maps = maps(np.zeros(keys.shape, np.uint32))
        left, module = innermost(maps, axes)
        np.testing.assert_array_equal(np.asarray(module.seen.value), number + 1)
        for at, rng in separate.items():
            key, separate[at] = rng.split()
            assert np.asarray(out)[at] == np.asarray(jax.random.bits(key))
            assert left[at] == separate[at].key
        seen.append(left)
    # No two lanes or calls share a key.
    every = np.stack([np.asarray(jax.random.key_data(each)).reshape(-1, 2) for each in seen])
    assert len(np.unique(every.reshape(-1, 2), axis=0)) == every.size // 2
    # With fewer lanes, the first lanes have the same keys. The first of all has the key that was given.
    few = [data.draw(st.integers(1, size), "fewer") for size in sizes]
    first, _ = innermost(nested(few, axes, seed, "vmap"), axes)
    assert (first == keys[tuple(slice(size) for size in few[::-1])]).all()
    assert keys[(0,) * depth] == jax.random.key(seed)
