"""With random functions, axes, trees and policies `pmap2` gives what `vmap2` and the loop over lanes give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..base.settings import fewer
from ..plain.cases import values
from ..plain.streams import IN_LANES, SPLIT, Draws
from ..plain.test_random import draws, seeds
from ..programs import INT
from ..strategies import arrays
from .cases import COUNTS, MISTAKES, lane_cases, mistaken
from .checks import HOMES, check_lane_gradient, check_lanes, check_refused, check_unexpected
from .mapped import TRANSFORMS
from .streams import check_key_per_lane, check_lane_streams


# Every example compiles several programs.
few = fewer(1 / 4)
# Compiling a random stream, or a gradient on a mesh, takes seconds.
fewest = fewer(1 / 6)
transforms = st.sampled_from(TRANSFORMS[:2])
counts = st.sampled_from(COUNTS)


@few
@given(st.data())
def test_lanes_are_the_loop_over_lanes(data: st.DataObject) -> None:
    lane = data.draw(lane_cases(), "case")
    home = data.draw(st.sampled_from(HOMES), "home")
    run = data.draw(values(case=lane.case), "values")
    for transform in ("vmap2", data.draw(st.sampled_from(TRANSFORMS[1:]), "transform")):
        check_lanes(lane, run, transform, home=home)


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


@fewest
@given(st.data())
def test_gradients_on_shards(data: st.DataObject) -> None:
    lane = data.draw(lane_cases(nested=True, smooth=True), "case")
    run = data.draw(values(case=lane.case, calls=1), "values")
    check_lane_gradient(lane, run, ["vmap2"])


@given(st.data())
def test_lanes_that_differ_where_one_value_is_to_be_are_refused(data: st.DataObject) -> None:
    mistake = data.draw(st.sampled_from(MISTAKES), "mistake")
    lane = mistaken(data.draw(lane_cases(), "case"), mistake)
    run = data.draw(values(case=lane.case, calls=1), "values")
    check_refused(lane, run, data.draw(st.sampled_from(TRANSFORMS), "transform"))


@few
@given(
    transform=transforms,
    mapping=st.sampled_from(["auto", "ignore"]),
    read=st.booleans(),
    data=st.data(),
)
def test_unexpected_writes(transform: str, mapping: str, read: bool, data: st.DataObject) -> None:
    lanes = data.draw(counts, "lanes")
    shape = data.draw(st.sampled_from([(), (3,), (lanes,), (lanes, 2)]), "shape")
    old = data.draw(arrays(shape=shape, dtype=INT), "state")
    calls = [data.draw(arrays(shape=(lanes,), dtype=INT), "inputs") for _ in range(3)]
    check_unexpected(transform, mapping, old, calls, read=read)


@fewest
@given(
    transform=transforms,
    count=counts,
    impl=st.sampled_from(list(IN_LANES)),
    seed=seeds,
    jit=st.booleans(),
    data=st.data(),
)
def test_streams_are_those_of_the_run_without_lanes(
    transform: str, count: int, impl: str, seed: int, jit: bool, data: st.DataObject
) -> None:
    fewer = data.draw(st.integers(1, count), "fewer")
    drawn = data.draw(draws(*IN_LANES[impl]), "draws")
    check_lane_streams(transform, count, fewer, drawn, seed, jit=jit, impl=impl)


@fewest
@given(
    transform=transforms,
    count=counts,
    draws=draws(SPLIT, 2),
    seed=seeds,
    axis=st.sampled_from([0, -1]),
)
def test_a_key_per_lane(transform: str, count: int, draws: Draws, seed: int, axis: int) -> None:
    check_key_per_lane(transform, count, draws, seed, axis)
