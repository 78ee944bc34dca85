"""Checkpoints of several processes, and of processes that are killed while they save."""

import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from statemesh import checkpoint
from statemesh.checkpoint import Checkpoints
from tests import checkpoint_steps as steps
from tests.checkpoint_steps import LAYOUTS, STEPS
from tests.test_checkpoint import assert_same
from tests.test_processes import COUNT, ROOT, ended, free_port, running


pytestmark = pytest.mark.slow

KILLS = 5


def commands(*arguments: str) -> list[list[str]]:
    port = str(free_port())
    module = [sys.executable, "-W", "error", "-m", "tests.checkpoint_processes"]
    return [[*module, str(i), str(COUNT), port, *arguments] for i in range(COUNT)]


def test_two_processes_save_and_load_what_one_does(tmp_path: pathlib.Path) -> None:
    """The pairs of layouts of which one is that of two processes with two devices each."""
    for name, shape in LAYOUTS.items():
        mesh = steps.mesh_of(shape)
        _, net = steps.train(steps.make(shape[0]), mesh, 0)
        checkpoint.save(tmp_path / name, net)
    masks, net = steps.train(net, mesh, STEPS)
    expected: Any = masks, steps.totals(net)
    logs = [tmp_path / f"{i}.log" for i in range(COUNT)]
    with running(commands("layouts", str(tmp_path)), logs, 4 // COUNT) as started:
        for code, output in ended(started, [log.with_suffix("") for log in logs]):
            assert code == 0, output
    # What two processes made of each checkpoint, saved by them at the end.
    for source in [*LAYOUTS, "both"]:
        net = checkpoint.load(tmp_path / f"after {source}", steps.make(), steps.mesh_of((1, 1)))
        assert_same([], net, ([], expected[1]))
        found = np.load(tmp_path / f"masks {source}.npy")
        np.testing.assert_array_equal(found, np.stack(expected[0]))
    for shape in LAYOUTS.values():
        mesh = steps.mesh_of(shape)
        net = checkpoint.load(tmp_path / "both", steps.make(), mesh)
        assert_same(*steps.train(net, mesh, STEPS), expected)


def newest(folder: pathlib.Path) -> int:
    """The newest step, whose values are all its own."""
    checkpoints = Checkpoints(folder)
    step = checkpoints.latest
    if step is None:
        return -1
    expected = steps.numbered(step)
    back = checkpoints.load(expected)
    np.testing.assert_array_equal(back["x"], expected["x"])
    assert {int(y) for y in back["y"]} == {step}
    return step


def started_saving(command: list[str]) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert child.stdout is not None
    # Orbax tells on the way of an old step that the last process was killed in deleting.
    assert "started\n" in iter(child.stdout.readline, "")
    return child


def test_the_newest_whole_checkpoint_survives_a_kill(tmp_path: pathlib.Path) -> None:
    draw = random.Random(0)
    last = -1
    for _ in range(KILLS):
        child = started_saving([sys.executable, "-m", "tests.checkpoint_steps", str(tmp_path)])
        time.sleep(draw.uniform(0.1, 0.8))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        step = newest(tmp_path)
        assert step >= last
        last = step
    assert last > 0


def test_a_full_disk_is_an_error_and_what_was_saved_stays(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, steps.numbered(0))

    # No file may grow beyond 20 KiB.
    limited = ["bash", "-c", 'ulimit -f 20 && exec "$0" "$@"']
    child = started_saving(
        [*limited, sys.executable, "-m", "tests.checkpoint_steps", str(tmp_path)]
    )
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 1
    assert re.search(r"CheckpointError: .* was not saved", output), output
    assert newest(tmp_path) == 0
