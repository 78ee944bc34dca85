"""The property tests' checks on examples that do not change: no mutant of the engine passes them all."""

import pytest

from .lanes import examples as lane_examples
from .losses import examples as loss_examples
from .losses import nested_examples
from .plain import examples


GROUPS = {
    "examples": examples,
    "lane_examples": lane_examples,
    "loss_examples": loss_examples,
    "nested_examples": nested_examples,
}
ALL = {
    f"{group}: {name}": check
    for group, module in GROUPS.items()
    for name, check in module.CHECKS.items()
}


@pytest.mark.parametrize("name", ALL)
def test_the_engine_passes(name: str) -> None:
    ALL[name]()
