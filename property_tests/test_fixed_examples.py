"""The property tests' checks on examples that do not change: no mutant of the engine passes them all."""

import pytest

from . import examples, lane_examples, loss_examples, nested_examples


ALL = {
    f"{group.__name__.rpartition('.')[2]}: {name}": check
    for group in (examples, lane_examples, loss_examples, nested_examples)
    for name, check in group.CHECKS.items()
}


@pytest.mark.parametrize("name", ALL)
def test_the_engine_passes(name: str) -> None:
    ALL[name]()
