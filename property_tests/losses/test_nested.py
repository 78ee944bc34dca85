"""Gradients inside losses, and losses that each shard has for itself, in every kind of map."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..base.settings import fewer
from .nested import NestedCase, check_nested, nested_cases


@pytest.mark.slow
# Each example compiles two programs of its own.
@fewer(3 / 5)
@given(nested_cases(), st.sampled_from([0.0, 1.0]))
def test_nested(case: NestedCase, seed: float) -> None:
    check_nested(case, seed)
