"""How a check feels: what pytest and a terminal show of it."""

import os
import pathlib
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget, assert_equivalent, emulate, locate
from tests.helpers import make_mesh


ROOT = pathlib.Path(__file__).parents[2]
OWN = str(pathlib.Path(sm.__file__).parent)
X = np.sin(np.arange(8, dtype=np.float32))

# A test file of a user's.
TEST = """
import numpy as np
from jax.sharding import PartitionSpec as P
from statemesh.testing import assert_equivalent, set_devices

set_devices(2)

def centred(x):
    return x - x.mean()

def test_centred():
    x = np.sin(np.arange(8, dtype=np.float32))
    assert_equivalent(centred, (x,), meshes=[{"x": 2}], in_specs=P("x"), out_specs=P("x"))
"""


def environment(**more: str) -> dict[str, str]:
    """That of this suite, except for what its own tests set up."""
    left_out = ("XLA_", "PYTEST_", "JAX_TRACEBACK")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out) and k != "CI"}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "JAXTYPING_DISABLE": "1"} | more


def centred(x: Any) -> Any:
    return x - x.mean()


def failing_check() -> Any:
    return assert_equivalent(
        centred, (X,), meshes=[{"x": 2}], in_specs=P("x"), out_specs=P("x"), gradients=False
    )


def failing_budget() -> Any:
    mapped = sm.shard_map(lambda x: sm.pmean(x.mean(), "x"), make_mesh(), P("x"), P())
    return assert_budget(mapped, jnp.asarray(X), collectives=0)


# Frames


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (failing_check, AssertionError),
        (failing_budget, AssertionError),
        (lambda: assert_equivalent(centred, (X,), meshes=[{"x": 2}]), TypeError),
        (lambda: emulate(None), TypeError),  # type: ignore[arg-type]
        (lambda: locate(None), TypeError),  # type: ignore[arg-type]
    ],
)
def test_tracebacks_end_at_the_users_line(
    call: Callable[[], Any], kind: type[Exception], as_users_run_it: None
) -> None:
    with pytest.raises(kind) as info:
        call()
    files = [frame.filename for frame in traceback.extract_tb(info.value.__traceback__)]
    assert not [file for file in files if file.startswith(OWN)]
    assert "jaxtyping" in files[-1] or files[-1] == __file__
    # The report stands alone. Other errors have the note that tells how to see our frames.
    notes = "".join(getattr(info.value, "__notes__", ()))
    assert ("JAX_TRACEBACK_FILTERING" in notes) == (kind is not AssertionError)


@pytest.mark.slow
def test_pytest_shows_the_report_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_mine.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        env=environment(CI="true"),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    # Each frame ends in the name of its file and the number of its line.
    frames = re.findall(r"^(\S+\.py):\d+: ?\w*$", done.stdout, re.M)
    assert frames == ["test_mine.py"], done.stdout
    assert "statemesh has left" not in done.stdout
