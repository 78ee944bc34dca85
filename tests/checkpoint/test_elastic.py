"""The recipe that loses a process and goes on with what is left."""

import pathlib
import re
import runpy

import numpy as np
import pytest

from tests.helpers import DOCS, run_script


@pytest.mark.slow
def test_training_goes_on_after_a_kill_as_without_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, picture = DOCS / "recipes" / "elastic.py", tmp_path / "losses.png"
    done = run_script(recipe, "--out", str(picture), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    output, errors = done.stdout, done.stderr
    # The recipe sets this variable for its processes.
    monkeypatch.setenv("XLA_FLAGS", "")
    runpy.run_path(str(recipe))["train"](str(tmp_path / "alone"), 1, 0, 0)
    uninterrupted = capsys.readouterr().out

    # JAX ends the process that is left, with a reason; one alone does all the remaining steps.
    codes = re.findall(r"^processes ended with (.+)$", output, re.M)
    assert len(codes) == 2, output
    survivor, killed = codes[0].split()
    assert survivor not in ("0", "-9") and killed == "-9"
    assert "This most likely indicates that another task died" in errors
    assert codes[1] == "0"

    expected = losses(uninterrupted, 8)
    before, after = losses(output, 4), losses(output, 2)
    assert sorted(expected) == list(range(len(expected)))
    # Something was left to do at the kill, and a checkpoint was there.
    assert sorted(before) == list(range(len(before))) and len(before) < len(expected)
    assert sorted(after) == list(range(min(after), len(expected))) and 0 < min(after) <= len(before)
    for part in (before, after):
        np.testing.assert_allclose([*part.values()], [expected[i] for i in part], rtol=1e-3)
    assert expected[len(expected) - 1] < expected[0] / 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def losses(output: str, devices: int) -> dict[int, float]:
    lines = re.findall(rf"^step (\d+) devices {devices} loss (\S+)$", output, re.M)
    return {int(step): float(loss) for step, loss in lines}
