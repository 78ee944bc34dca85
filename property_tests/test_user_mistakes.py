"""`assert_equivalent` finds the mistakes of users' code, and names their lines; right code passes."""

from typing import Any

import pytest
from hypothesis import given, settings

from statemesh.testing import arrays, assert_equivalent

from .user_code import RIGHT, ROWS, WIDTH, WRONG, Code


pytestmark = pytest.mark.slow


rows = arrays(shape=(ROWS, WIDTH))
# The same mistake is to be found every time.
hundred = settings(max_examples=100, derandomize=True, database=None)
few = settings(max_examples=5)


def check(code: Code, x: Any, meshes: list[Any]) -> None:
    assert_equivalent(
        code.fun,
        (code.model(), x),
        meshes=meshes,
        in_specs=code.in_specs,
        out_specs=code.out_specs,
        **code.more,
    )


def mesh_of(code: Code) -> dict[str, int]:
    return {"data": 2, "model": 2} if "model" in str(code.in_specs) else {"data": 4}


@pytest.mark.parametrize("name", RIGHT)
# Some of this code only reads its state.
@pytest.mark.filterwarnings("ignore::statemesh.testing.UntestedWarning")
def test_right_code_passes(name: str) -> None:
    code = RIGHT[name]
    # What is written for four shards is right for four.
    meshes = [mesh_of(code)]
    if name != "turned" and "model" not in meshes[0]:
        meshes = [{"data": 8}, {"data": 1}, *meshes]

    @few
    @given(rows)
    def passes(x: Any) -> None:
        check(code, x, meshes)

    passes()


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_found_and_named(name: str) -> None:
    """In the simplest example that Hypothesis comes to, too."""
    mistake = WRONG[name]

    @hundred
    @given(rows)
    def fails(x: Any) -> None:
        check(mistake.code, x, [mesh_of(mistake.code)])

    with pytest.raises(AssertionError) as raised:
        fails()
    assert mistake.line in str(raised.value)
