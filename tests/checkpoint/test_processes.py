"""Checkpoints of several processes, and of processes that are killed while they save."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from statemesh import checkpoint
from statemesh.checkpoint import CheckpointError, Checkpoints
from tests.checkpoint import model
from tests.checkpoint.model import LAYOUTS, SOURCES, STEPS, assert_same
from tests.processes import COUNT, ROOT, STRICT, free_port, run_together
from tests.scripts.kills_of_saving import check, commands, newest, saving


pytestmark = pytest.mark.slow

SAVING = [sys.executable, "-m", "tests.checkpoint.model"]


def test_two_processes_save_and_load_what_one_does(tmp_path: pathlib.Path) -> None:
    """The pairs of layouts of which one is that of two processes with two devices each."""
    expected = model.save_all(tmp_path)
    command = [*STRICT, "tests.checkpoint.model", "layouts", str(tmp_path)]
    rest = [str(COUNT), str(free_port())]
    run_together([[*command, str(i), *rest] for i in range(COUNT)], tmp_path, 4 // COUNT)
    # What two processes made of each checkpoint, saved by them at the end.
    for source in SOURCES:
        net = checkpoint.load(tmp_path / f"after {source}", model.make(), model.mesh_of((1, 1)))
        assert_same(np.load(tmp_path / f"masks {source}.npy"), net, expected)
    mesh = model.mesh_of(LAYOUTS["4x2"])
    net = checkpoint.load(tmp_path / "both", model.make(), mesh)
    assert_same(*model.train(net, mesh, STEPS), expected)


def test_the_newest_whole_checkpoint_survives_a_kill(tmp_path: pathlib.Path) -> None:
    check(tmp_path, processes=2, kills=1, seed=0, quiet=True)


def test_a_step_that_was_being_deleted_is_no_step(tmp_path: pathlib.Path) -> None:
    child = subprocess.run([*SAVING, "die", str(tmp_path)], cwd=ROOT, capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    # Of the fourth step on, the oldest is deleted.
    assert newest(tmp_path) >= 3
    left = [path.name for path in (tmp_path / ".old").iterdir()]
    assert left
    with Checkpoints(tmp_path) as checkpoints:
        latest = checkpoints.latest
        assert latest is not None
        assert [path.name for path in (tmp_path / ".old").iterdir()] == left
        checkpoints.save(latest + 1, model.numbered(0))
    assert not list((tmp_path / ".old").iterdir())


def test_half_a_step_is_deleted_only_when_its_process_is_dead(tmp_path: pathlib.Path) -> None:
    def halves() -> list[str]:
        return [path.name for path in tmp_path.glob("*tmp*")]

    with saving(commands(tmp_path, 1)) as (child,):
        # It is stopped in the middle of a save.
        while True:
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            if left := halves():
                break
            os.kill(child.pid, signal.SIGCONT)
        step = int(left[0].partition(".")[0])
        with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError) as error:
            checkpoints.save(step, model.numbered(step))
        assert str(error.value) == (
            f"Checkpoints.save: another process is saving in {tmp_path}, and step {step} is half-written "
            "there. Give each run a folder of its own. If the other run is dead, end what is left of its "
            "processes."
        )
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(step + 10, model.numbered(step + 10))
        assert halves() == left
        child.kill()
        child.wait()
        assert Checkpoints(tmp_path).latest == step + 10
        assert halves() == left
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(step + 11, model.numbered(step + 11))
            checkpoints.wait()
            assert not halves()


def test_a_full_disk_is_an_error_and_what_was_saved_stays(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, model.numbered(0))

    # No file may grow beyond 20 KiB.
    limited = ["bash", "-c", 'ulimit -f 20 && exec "$0" "$@"', *SAVING, "saving", str(tmp_path)]
    child = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode == 1
    assert re.search(r"CheckpointError: .* was not saved", child.stderr), child.stderr
    assert newest(tmp_path) == 0


def test_the_models_of_the_examples_go_on_in_other_layouts() -> None:
    """A pair of one model: in a process of its own, because its floats have 64 bits."""
    options = ["--models", "digits", "--layouts", "2", "4x2", "--steps", "1"]
    command = [sys.executable, "-m", "tests.scripts.pairs_of_layouts", *options]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    assert "digits: 4 of 4 pairs agree" in child.stdout
