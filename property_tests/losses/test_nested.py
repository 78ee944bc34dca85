"""Gradients in losses, and losses that shards have to themselves, in every kind of map."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .nested import NestedCase, check_nested, nested_cases


# Each example compiles two programs of its own.
fewer = settings(max_examples=settings().max_examples * 3 // 5)


@pytest.mark.slow
@fewer
@given(nested_cases(), st.sampled_from([0.0, 1.0]))
def test_nested(case: NestedCase, seed: float) -> None:
    check_nested(case, seed)
