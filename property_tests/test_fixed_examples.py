"""The checks of the property tests on fixed examples. No mutant of the engine passes them all."""

import pytest

from .lanes import examples as lanes
from .losses import examples as losses
from .losses import nested_examples
from .plain import examples as plain


CHECKS = {
    "plain": plain.CHECKS,
    "lanes": lanes.CHECKS,
    "losses": losses.CHECKS | nested_examples.CHECKS,
}


# The quick suite has what these check in the random programs of `lanes/` and `losses/`.
SLOW = {"lanes", "losses"}


@pytest.mark.parametrize(
    ("design", "name"),
    [
        pytest.param(design, name, marks=[pytest.mark.slow] if design in SLOW else [])
        for design, checks in CHECKS.items()
        for name in checks
    ],
)
def test_the_engine_passes(design: str, name: str) -> None:
    CHECKS[design][name]()
