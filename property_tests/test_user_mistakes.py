"""`assert_equivalent` finds the mistakes of users' code, and names their lines; right code passes."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType, Mesh

from statemesh.testing import arrays, assert_equivalent

from .user_code import RIGHT, ROWS, WIDTH, WRONG, Code


pytestmark = pytest.mark.slow


rows = arrays(shape=(ROWS, WIDTH))
# The same mistake is to be found every time.
hundred = settings(max_examples=100, derandomize=True, database=None)
few = settings(max_examples=5)


def check(code: Code, x: Any, meshes: list[Mesh]) -> None:
    assert_equivalent(
        code.fun,
        (code.model(), x),
        meshes=meshes,
        in_specs=code.in_specs,
        out_specs=code.out_specs,
        **code.more,
    )


def mesh(kind: AxisType, **sizes: int) -> Mesh:
    shape = tuple(sizes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(shape))


def mesh_of(code: Code, kind: AxisType) -> Mesh:
    return mesh(kind, data=2, model=2) if "model" in str(code.in_specs) else mesh(kind, data=4)


@pytest.mark.parametrize("name", RIGHT)
# Some of this code only reads its state.
@pytest.mark.filterwarnings("ignore::statemesh.testing.UntestedWarning")
def test_right_code_passes(name: str) -> None:
    code = RIGHT[name]
    # What is written for four shards is right for four.
    meshes = [mesh_of(code, AxisType.Explicit)]
    if name != "turned" and "model" not in meshes[0].shape:
        meshes = [mesh(AxisType.Auto, data=8), mesh(AxisType.Auto, data=1), *meshes]

    @few
    @given(rows)
    def passes(x: Any) -> None:
        check(code, x, meshes)

    passes()


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_found_and_named(name: str) -> None:
    """In the simplest example that Hypothesis comes to, too."""
    mistake = WRONG[name]
    kind = (AxisType.Explicit, AxisType.Auto)[list(WRONG).index(name) % 2]

    @hundred
    @given(rows)
    def fails(x: Any) -> None:
        check(mistake.code, x, [mesh_of(mistake.code, kind)])

    with pytest.raises(AssertionError) as raised:
        fails()
    assert mistake.line in str(raised.value)
