"""The examples run as users run them."""

import re
from pathlib import Path

import pytest

from tests.helpers import DOCS, run_script


pytestmark = pytest.mark.slow


def numbers(output: str, label: str) -> list[float]:
    (line,) = re.findall(rf"^{label} +(.+)$", output, flags=re.MULTILINE)
    return [float(number) for number in line.split()]


def trained(
    name: str, meshes: tuple[str, str], compared: tuple[str, ...], folder: Path, *options: str
) -> str:
    """What an example prints that was trained in float64 on two meshes, which must agree."""
    picture = folder / f"{name}.png"
    script = DOCS / "examples" / f"{name}.py"
    done = run_script(script, "--out", str(picture), "--x64", *options, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(done.stdout, "RNG keys") == [0.0]
    for label in compared:
        (apart,) = numbers(done.stdout, label)
        assert apart <= 1e-9, label
    # There is one progress bar for each run.
    for mesh in meshes:
        assert f"mesh of {mesh}: 100%" in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return done.stdout


def test_digits_sharded_and_unsharded_agree(tmp_path: Path) -> None:
    compared = "parameters", "running statistics", "optimizer slots", "loss of each step"
    output = trained("digits", ("8", "1"), compared, tmp_path, "--steps", "120")
    sharded, unsharded = numbers(output, "held-out accuracy")
    assert sharded == unsharded >= 0.97
    assert all(rate > 0 for rate in numbers(output, "steps per second"))
    assert "dropout masks: bit-identical, sharded and unsharded" in output


def test_text_sharded_over_two_axes_and_unsharded_agree(tmp_path: Path) -> None:
    compared = "parameters", "optimizer slots", "means and reaches", "losses"
    output = trained("text", ("4x2", "1x1"), compared, tmp_path, "--steps", "150")
    sharded, unsharded = numbers(output, "held-out loss")
    (counted,) = numbers(output, "counting pairs")
    assert sharded == pytest.approx(unsharded, rel=1e-2)
    assert max(sharded, unsharded) < counted


def test_text_agrees_on_another_mesh_and_fails_when_it_has_not_learned(tmp_path: Path) -> None:
    options = "--out", str(tmp_path / "text.png"), "--steps", "2", "--x64", "--mesh", "2x4"
    done = run_script(DOCS / "examples" / "text.py", *options, folder=tmp_path)
    assert done.returncode == 1
    # The example reports nothing else.
    (problem,) = [x for x in done.stderr.splitlines() if x and not x.startswith("mesh of")]
    assert re.fullmatch(r"held-out loss .* is not below .*, of counting pairs", problem)
