"""Programs of others: their ports give what they give, and the pages show what was measured."""

import json
from typing import Any

import jax
import numpy as np
import pytest

from statemesh.testing import assert_equivalent
from tests.helpers import DOCS, module_at


show = module_at(DOCS / "showcase" / "show.py")

# What a port changes or adds at most. PPO draws, normalizes and shuffles over all devices in six places.
MOST_LINES = {"purejaxrl_ppo": 27}
pytestmark = pytest.mark.filterwarnings("ignore")  # Those of the programs.


def figures(name: str) -> Any:
    return json.loads((DOCS / "showcase" / name / "figures.json").read_text())


@pytest.mark.parametrize("name", show.names())
def test_a_page_shows_what_was_measured(name: str) -> None:
    measured, case = figures(name), show.load(name, "case")
    assert (show.PAGES / f"{name}.md").read_text() == show.page(name, measured)
    assert (show.PAGES / f"{name}.svg").exists()
    gone, come = show.diff(show.code(name, "original"), show.code(name, "port"))
    assert max(gone, come) <= MOST_LINES.get(name, 20)
    assert len(measured["meshes"]) == len(case.MESHES) >= 3
    assert len(measured["original"]) == case.STEPS
    # The naive port is off by far more than the port, and the check names a line of it.
    off_by = show.farthest(measured)
    assert off_by < 1.5e-4 and 100 * off_by < show.off(measured["naive"], measured["original"])
    assert "naive.py:" in measured["report"]
    original = (DOCS / "showcase" / name / "original.py").read_text()
    assert case.LICENCE in original and case.COMMIT[:7] in original


def test_there_are_eight_programs_from_six_projects() -> None:
    cases = [show.load(name, "case") for name in show.names()]
    assert len(cases) >= 8
    assert len({case.PROJECT for case in cases}) >= 6
    assert (DOCS / "pages" / "showcase.md").read_text() == show.index()


@pytest.mark.slow
@pytest.mark.parametrize("name", show.names())
def test_a_port_gives_what_the_original_gives(name: str) -> None:
    case, steps = show.load(name, "case"), 3
    expected = show.run(case, show.load(name, "original"), steps)
    port = show.load(name, "port")
    with jax.set_mesh(show.mesh_of(case.MESHES[0])):
        got = show.run(case, port, steps)
    assert len(set(expected)) == steps  # Each step changes what is measured.
    np.testing.assert_allclose(got, expected, rtol=1e-4)


# The script checks them all. This one compiles in a few seconds.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["haiku_mnist"])
def test_the_check_holds_a_port_and_finds_the_naive_one(name: str) -> None:
    case = show.load(name, "case")
    short = {**case.CHECK, "meshes": case.CHECK["meshes"][:1], "steps": 1}
    port, naive = show.load(name, "port"), show.load(name, "naive")
    assert_equivalent(case.mapped(port), case.arguments(port), **short)
    with pytest.raises(AssertionError, match=r"naive\.py:\d+"):
        assert_equivalent(case.mapped(naive), case.arguments(naive), **short)
