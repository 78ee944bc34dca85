"""With random functions, axes, trees and policies `pmap2` gives what `vmap2` and the loop over lanes give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import statemesh as sm

from ..base.settings import fewer
from ..plain.cases import values
from ..plain.test_random import seeds
from .cases import COUNTS, lane_cases
from .checks import HOMES, check_lane_gradient, check_lanes
from .mapped import TRANSFORMS


# Every example compiles several programs.
few = fewer(1 / 5)
# A gradient on a mesh takes seconds to compile.
fewest = fewer(1 / 10)


@few
@given(st.data())
def test_lanes_are_the_loop_over_lanes(data: st.DataObject) -> None:
    lane = data.draw(lane_cases(), "case")
    home = data.draw(st.sampled_from(HOMES), "home")
    run = data.draw(values(case=lane.case), "values")
    for transform in ("vmap2", data.draw(st.sampled_from(TRANSFORMS[1:]), "transform")):
        check_lanes(lane, run, transform, home=home)


@pytest.mark.slow
@few
@given(st.data())
def test_inside_jit(data: st.DataObject) -> None:
    lane = data.draw(lane_cases(), "case")
    run = data.draw(values(case=lane.case, calls=2), "values")
    check_lanes(lane, run, data.draw(st.sampled_from(TRANSFORMS), "transform"), how="jit")


@few
@given(st.data())
def test_lanes_on_shards(data: st.DataObject) -> None:
    lane = data.draw(lane_cases(nested=True), "case")
    how = data.draw(st.sampled_from(["eager", "jit"]), "how")
    check_lanes(lane, data.draw(values(case=lane.case, calls=2), "values"), "vmap2", how=how)


@pytest.mark.slow
@few
@given(st.data())
def test_gradients_are_those_of_the_loop(data: st.DataObject) -> None:
    lane = data.draw(lane_cases(smooth=True), "case")
    run = data.draw(values(case=lane.case, calls=1), "values")
    check_lane_gradient(lane, run, TRANSFORMS[:2], jit=data.draw(st.booleans(), "inside jit"))


@pytest.mark.slow
@fewest
@given(st.data())
def test_gradients_on_shards(data: st.DataObject) -> None:
    lane = data.draw(lane_cases(nested=True, smooth=True), "case")
    run = data.draw(values(case=lane.case, calls=1), "values")
    check_lane_gradient(lane, run, ["vmap2"])


@fewest
@given(
    transform=st.sampled_from(TRANSFORMS[:2]),
    count=st.sampled_from(COUNTS),
    most=st.integers(1, 8),
    seed=seeds,
    axis=st.sampled_from([0, -1]),
)
def test_lanes_draw_from_keys_of_their_own(
    transform: str, count: int, most: int, seed: int, axis: int
) -> None:
    """From one stream each draws the same, however many lanes there are; from its own, what that has."""

    def draw(rng: sm.RandomState) -> Any:
        key, rng = rng.split()
        several, rng = rng.split(2)
        return jnp.concatenate([jax.random.key_data(x).ravel() for x in (key, several)]), rng

    def lanes(count: int, **options: Any) -> Any:
        return getattr(sm, transform)(draw, axis_size=count, in_axes=None, **options)

    plain = sm.RandomState(jax.random.key(seed))
    first, left = draw(plain)
    drawn, after = lanes(count)(plain)
    np.testing.assert_array_equal(drawn[0], first)
    assert len(np.unique(np.reshape(drawn, (-1, 2)), axis=0)) == 3 * count
    assert after.key == left.key
    some = min(most, count)
    np.testing.assert_array_equal(lanes(some)(plain)[0], drawn[:some])

    keys = jax.random.split(plain.key, count)
    drawn, after = lanes(count, state_in_axes={axis: sm.RandomState})(sm.RandomState(keys))
    for key, numbers, left_of_lane in zip(keys, drawn, after.key, strict=True):
        wanted, left = draw(sm.RandomState(key))
        np.testing.assert_array_equal(numbers, wanted)
        assert left_of_lane == left.key
