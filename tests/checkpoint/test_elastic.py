"""The recipe that loses a process and goes on with what is left, run as users run it."""

import pathlib
import re
import sys

import numpy as np
import pytest

from tests.processes import ROOT, run_together


@pytest.mark.slow
def test_training_goes_on_after_a_kill_as_without_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("JAX_ENABLE_X64", raising=False)
    recipe = [sys.executable, str(ROOT / "docs" / "recipes" / "elastic.py")]
    picture = tmp_path / "losses.png"
    alone = [*recipe, "--train", str(tmp_path / "alone"), "1", "0", "0"]
    output, uninterrupted = run_together([[*recipe, "--out", str(picture)], alone], tmp_path, 2)

    # JAX ends the process that is left, with a reason; one alone does all the remaining steps.
    codes = re.findall(r"^processes ended with (.+)$", output, re.M)
    assert len(codes) == 2, output
    survivor, killed = codes[0].split()
    assert survivor not in ("0", "-9") and killed == "-9"
    assert "This most likely indicates that another task died" in output
    assert codes[1] == "0"

    expected = losses(uninterrupted, 2)
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
