"""Both suites run on 8 simulated devices. `annotations.py` checks annotations at run time, if asked to."""

from collections.abc import Iterator

import jaxtyping
import pytest
from jax.sharding import AxisType

import tests.annotations
import tests.compiling


tests.annotations.install()

from statemesh.testing import load_profile, set_devices  # noqa: E402
from statemesh.testing._locate import _locate  # noqa: E402


set_devices(8)
load_profile()
# A report tells users of a failure of `locate`. Here it fails the test.
_locate.RAISE_FAILURES = True

from tests.helpers import default_kind, slow  # noqa: E402


@pytest.fixture(params=[AxisType.Explicit, slow(AxisType.Auto)], ids=lambda kind: kind.name)
def each_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test on meshes of Explicit axes, as `jax.make_mesh` makes them, and slow on Auto ones."""
    with default_kind(request.param):
        yield


@pytest.fixture
def as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test without the checks of annotations, which would refuse what the test passes before we do."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-errors", action="store_true", help="write the texts of errors anew")
