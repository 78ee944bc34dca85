"""`assert_equivalent` accuses no random program that is right. `deep.py` checks thousands, by hand."""

import pytest

from .deep import Tally, check, drawn
from .programs import FLOAT


@pytest.mark.parametrize(
    ("number", "dtype", "gradients", "count"),
    [
        # Two devices, on Auto axes and on Explicit ones.
        (3, FLOAT, False, 3),
        pytest.param(8, "bfloat16", False, 5, marks=pytest.mark.slow),
        pytest.param(8, FLOAT, True, 2, marks=pytest.mark.slow),
    ],
)
def test_no_right_program_is_accused(
    number: int, dtype: str, count: int, *, gradients: bool
) -> None:
    tally = Tally()
    check(drawn(number, smooth=gradients, count=count), dtype, tally, gradients=gradients)
    assert not tally.alarms
    assert tally.checks
