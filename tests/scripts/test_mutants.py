"""The list of mutants follows the code."""

import pathlib

import statemesh
from tests.scripts.mutants.by_hand import CHANGES, mutants


def test_each_mistake_still_has_its_line() -> None:
    assert len(mutants(pathlib.Path(statemesh.__file__).parent)) == len(CHANGES) > 0
