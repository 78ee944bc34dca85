"""Random Modules pass through lanes again and again, and Maps of Maps draw random numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..base.settings import fewer
from ..plain.test_random import seeds
from .modules import FedBack, check_fed_back, check_nested_maps, fed_back


pytestmark = pytest.mark.slow


transforms = st.sampled_from(["vmap2", "pmap2"])


# Every example compiles several programs.
@fewer(1 / 3)
@given(case=fed_back(), transform=transforms)
def test_a_model_is_fed_back_for_ever(case: FedBack, transform: str) -> None:
    check_fed_back(case, transform)


@fewer(1 / 8)
@given(data=st.data(), seed=seeds, outermost=st.sampled_from(["vmap", "pmap"]))
def test_maps_in_maps_draw_their_own(data: st.DataObject, seed: int, outermost: str) -> None:
    depth = data.draw(st.integers(2, 3), "depth")
    sizes = [data.draw(st.integers(1, 3), "size") for _ in range(depth)]
    fewer = [data.draw(st.integers(1, size), "fewer") for size in sizes]
    axes = [data.draw(st.sampled_from([0, -1]), "axis") for _ in range(depth)]
    check_nested_maps(sizes, fewer, axes, seed, outermost)
