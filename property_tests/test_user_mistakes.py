"""`assert_equivalent` inside of `given`: right code passes, mistakes are found and their lines are named."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings

from statemesh.testing import arrays

from .planted.lines import named, right_lines
from .planted.mistakes import mistakes, right_case
from .planted.models_rows import ROWS, WIDTH


pytestmark = pytest.mark.slow

MISTAKES = {mistake.name: mistake for mistake in mistakes() if mistake.model == "rows"}
# To which Hypothesis shrinks.
SIMPLEST = np.zeros((ROWS, WIDTH), np.float32)


@pytest.mark.parametrize("name", [None, "total-averaged", "noise-alike"])
def test_inside_of_given(name: str | None) -> None:
    mistake = MISTAKES[name] if name else None
    case = mistake.case("float32") if mistake else right_case("rows", "float32")
    reports = []

    @settings(max_examples=1, derandomize=True, database=None)
    @given(arrays(shape=(ROWS, WIDTH)))
    @example(SIMPLEST)
    def check(x: Any) -> None:
        try:
            dataclasses.replace(case, args=(case.args[0], x)).check()
        except AssertionError as error:
            reports.append(str(error))

    check()
    if mistake is None:
        assert not reports
    else:
        lines = right_lines(mistake)
        assert reports and all(lines & set(named(report, mistake)) for report in reports)
