"""`assert_equivalent` accuses no random program that is right. `deep_checks.py` checks thousands, by hand."""

import pytest

from .deep_checks import Tally, check, drawn


@pytest.mark.parametrize(
    ("dtype", "gradients"),
    [
        ("float32", False),
        pytest.param("bfloat16", False, marks=pytest.mark.slow),
        pytest.param("float32", True, marks=pytest.mark.slow),
    ],
)
def test_no_right_program_is_accused(dtype: str, *, gradients: bool) -> None:
    tally = Tally()
    check(drawn(3, smooth=gradients, count=5), dtype, tally, gradients=gradients)
    assert not tally.alarms
    assert tally.checks
