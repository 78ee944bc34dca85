"""The examples run as users run them."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import DOCS, run_script


pytestmark = pytest.mark.slow


PNG = b"\x89PNG\r\n\x1a\n"


def _run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the example with the name of the picture."""
    script = DOCS / "examples" / out.with_suffix(".py").name
    return run_script(script, "--out", str(out), *options, folder=out.parent)


def _numbers(output: str, label: str) -> list[float]:
    (line,) = re.findall(rf"^{label} +(.+)$", output, flags=re.MULTILINE)
    return [float(number) for number in line.split()]


def test_digits_sharded_and_unsharded_agree(tmp_path: Path) -> None:
    picture = tmp_path / "digits.png"
    done = _run(picture, "--x64")
    assert done.returncode == 0, done.stdout + done.stderr

    sharded, unsharded = _numbers(done.stdout, "held-out accuracy")
    assert sharded >= 0.97
    assert sharded == unsharded
    assert all(rate > 0 for rate in _numbers(done.stdout, "steps per second"))
    assert "dropout masks: bit-identical, sharded and unsharded" in done.stdout
    assert _numbers(done.stdout, "RNG keys") == [0.0]
    for label in ("parameters", "running statistics", "optimizer slots", "loss of each step"):
        (apart,) = _numbers(done.stdout, label)
        assert apart <= 1e-9, label
    # There is one progress bar for each run, on eight devices and on one.
    assert "mesh of 8: 100%" in done.stderr
    assert "mesh of 1: 100%" in done.stderr
    assert picture.read_bytes().startswith(PNG)


def test_digits_fails_when_it_has_not_learned(tmp_path: Path) -> None:
    done = _run(tmp_path / "digits.png", "--steps", "2")
    assert done.returncode == 1
    assert "is below 0.97" in done.stderr


def test_text_sharded_over_two_axes_and_unsharded_agree(tmp_path: Path) -> None:
    picture = tmp_path / "text.png"
    done = _run(picture, "--x64", "--steps", "200")
    assert done.returncode == 0, done.stdout + done.stderr

    sharded, unsharded = _numbers(done.stdout, "held-out loss")
    (counted,) = _numbers(done.stdout, "counting pairs")
    assert max(sharded, unsharded) < counted
    assert sharded == pytest.approx(unsharded, rel=1e-2)
    assert _numbers(done.stdout, "RNG keys") == [0.0]
    for label in ("parameters", "optimizer slots", "means and reaches", "losses"):
        (apart,) = _numbers(done.stdout, label)
        assert apart <= 1e-9, label
    assert "mesh of 4x2: 100%" in done.stderr
    assert "mesh of 1x1: 100%" in done.stderr
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("mesh", "options"), [("8x1", ("--steps", "30")), ("2x4", ("--steps", "2", "--x64"))]
)
def test_text_agrees_on_other_meshes_and_fails_when_it_has_not_learned(
    tmp_path: Path, mesh: str, options: tuple[str, ...]
) -> None:
    done = _run(tmp_path / "text.png", *options, "--mesh", mesh)
    assert done.returncode == 1
    assert f"mesh of {mesh}: 100%" in done.stderr
    # The example reports nothing else.
    (problem,) = [x for x in done.stderr.splitlines() if x and not x.startswith("mesh of")]
    assert re.fullmatch(r"held-out loss .* is not below .*, of counting pairs", problem)
