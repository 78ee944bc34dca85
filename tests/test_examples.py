"""The examples run as users run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow


ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
PNG = b"\x89PNG\r\n\x1a\n"


def _run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the example with the name of the picture."""
    # The devices of this suite are left out, because the example sets up its own.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg"}
    script = EXAMPLES / out.with_suffix(".py").name
    command = [sys.executable, str(script), "--out", str(out), *options]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=out.parent, env=environment, check=False
    )


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
    done = _run(picture, "--x64")
    assert done.returncode == 0, done.stdout + done.stderr

    sharded, unsharded = _numbers(done.stdout, "held-out loss")
    (counted,) = _numbers(done.stdout, "characters")
    (counted_pairs,) = _numbers(done.stdout, "pairs of characters")
    assert max(sharded, unsharded) < counted_pairs < counted
    assert sharded == pytest.approx(unsharded, rel=1e-2)
    assert all(rate > 0 for rate in _numbers(done.stdout, "steps per second"))
    assert "dropout masks: bit-identical, sharded and unsharded" in done.stdout
    assert _numbers(done.stdout, "RNG keys") == [0.0]
    for label in ("parameters", "optimizer slots", "means and reaches", "losses"):
        (apart,) = _numbers(done.stdout, label)
        assert apart <= 1e-9, label
    assert "mesh of 4x2: 100%" in done.stderr
    assert "mesh of 1x1: 100%" in done.stderr
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(("mesh", "options"), [("8x1", ()), ("2x4", ("--x64",))])
def test_text_agrees_on_other_meshes_and_fails_when_it_has_not_learned(
    tmp_path: Path, mesh: str, options: tuple[str, ...]
) -> None:
    done = _run(tmp_path / "text.png", *options, "--steps", "2", "--mesh", mesh)
    assert done.returncode == 1
    assert f"mesh of {mesh}: 100%" in done.stderr
    # The example reports nothing else.
    (problem,) = [x for x in done.stderr.splitlines() if x and not x.startswith("mesh of")]
    assert re.fullmatch(r"held-out loss .* is not below .*, of pairs", problem)
