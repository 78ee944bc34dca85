"""The examples run with the options that users have."""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.helpers import DOCS, run_script


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("precision")]


@pytest.fixture
def precision() -> Iterator[None]:
    """Takes back the precision that an example has set."""
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


def run(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    script = str(DOCS / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, "--x64", *options])
    monkeypatch.setenv("XLA_FLAGS", "")
    runpy.run_path(script)["main"]()


def numbers(output: str, label: str) -> list[float]:
    (line,) = re.findall(rf"^{label} +(.+)$", output, flags=re.MULTILINE)
    return [float(number) for number in line.split()]


SAME = {
    "digits": ("parameters", "running statistics", "optimizer slots", "loss of each step"),
    "text": ("parameters", "optimizer slots", "means and reaches", "losses"),
}


@pytest.mark.parametrize(
    ("name", "steps", "meshes"), [("digits", 100, ("8", "1")), ("text", 110, ("4x2", "1x1"))]
)
def test_sharded_and_unsharded_agree_in_float64(
    name: str,
    steps: int,
    meshes: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture = tmp_path / "picture.png"
    run(name, monkeypatch, "--out", str(picture), "--steps", str(steps))
    output, bars = capsys.readouterr()
    assert numbers(output, "RNG keys") == [0.0]
    for label in SAME[name]:
        (apart,) = numbers(output, label)
        assert apart <= 1e-9, label
    for mesh in meshes:
        assert f"mesh of {mesh}: 100%" in bars
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    if name == "digits":
        sharded, unsharded = numbers(output, "held-out accuracy")
        assert sharded == unsharded >= 0.97
        assert all(rate > 0 for rate in numbers(output, "steps per second"))
        assert "dropout masks: bit-identical, sharded and unsharded" in output
    else:
        sharded, unsharded = numbers(output, "held-out loss")
        (counted,) = numbers(output, "counting pairs")
        assert sharded == pytest.approx(unsharded, rel=1e-2)
        assert max(sharded, unsharded) < counted


def test_text_agrees_on_another_mesh_and_fails_when_it_has_not_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--out", str(tmp_path / "text.png"), "--steps", "2", "--mesh", "2x4"
    with pytest.raises(SystemExit) as ended:
        run("text", monkeypatch, *options)
    # The example finds nothing else.
    problem = r"held-out loss \S+ is not below \S+, of counting pairs"
    assert re.fullmatch(problem, str(ended.value.code))


def machines(folder: Path, count: int) -> tuple[str, list[float]]:
    """What the example prints on so many machines, and its losses."""
    script = DOCS / "examples" / "machines.py"
    done = run_script(script, str(folder), "--machines", str(count), folder=folder.parent)
    assert done.returncode == 0, done.stderr
    (losses,) = re.findall(r"^losses (.*)$", done.stdout, re.MULTILINE)
    return done.stdout, [float(loss) for loss in losses.split()]


def test_machines_go_on_where_fewer_stopped_as_one_does(tmp_path: Path) -> None:
    two, first = machines(tmp_path / "several", 2)
    assert "psum over ('machine',): 5312 bytes" in two
    assert "steps 0 to 20 on 2 machines of 4 devices" in two
    four, second = machines(tmp_path / "several", 4)
    assert "steps 20 to 40 on 4 machines of 2 devices" in four
    alone = [loss for _ in range(2) for loss in machines(tmp_path / "one", 1)[1]]
    np.testing.assert_allclose(first + second, alone, rtol=1e-2, atol=1e-4)
    assert min(alone[-5:]) < alone[0] / 10


def test_machines_that_a_launcher_started_start_no_others(tmp_path: Path) -> None:
    script = DOCS / "examples" / "machines.py"
    done = run_script(script, str(tmp_path / "run"), folder=tmp_path)
    # Here is no launcher from which JAX could learn who the others are.
    assert "coordinator_address should be defined" in done.stderr
    assert "steps" not in done.stdout
