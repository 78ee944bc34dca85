"""`assert_equivalent` inside of `given`: right code passes, mistakes are found and their lines are named.

They are found in the simplest example that Hypothesis comes to, too.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from statemesh.testing import arrays

from .planted.case import Case
from .planted.lines import named, right_lines
from .planted.mistakes import mistakes, right_case
from .planted.models_rows import ROWS, WIDTH


pytestmark = pytest.mark.slow

rows = arrays(shape=(ROWS, WIDTH))
MISTAKES = {mistake.name: mistake for mistake in mistakes() if mistake.model == "rows"}


def with_rows(case: Case, x: Any) -> Case:
    return dataclasses.replace(case, args=(case.args[0], x))


@settings(max_examples=2)
@given(rows)
def test_right_code_passes(x: Any) -> None:
    with_rows(right_case("rows", "float32"), x).check()


def test_a_mistake_is_found_and_named() -> None:
    mistake = MISTAKES["total-averaged"]
    case = mistake.case("float32")

    @settings(max_examples=2, derandomize=True, database=None, phases=[Phase.generate])
    @given(rows)
    def fails(x: Any) -> None:
        with_rows(case, x).check()

    with pytest.raises(AssertionError) as raised:
        fails()
    assert right_lines(mistake) & set(named(str(raised.value), mistake))


def test_mistakes_are_found_in_the_simplest_example() -> None:
    """The one that Hypothesis shrinks to."""
    mistake = MISTAKES["noise-alike"]
    with pytest.raises(AssertionError) as raised:
        with_rows(mistake.case("float32"), np.zeros((ROWS, WIDTH), np.float32)).check()
    assert right_lines(mistake) & set(named(str(raised.value), mistake))
