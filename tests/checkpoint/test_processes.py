"""Checkpoints of several processes, and of processes that are killed while they save."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from statemesh import checkpoint
from statemesh.checkpoint import CheckpointError, Checkpoints
from tests import checkpoint_steps as steps
from tests.checkpoint_steps import LAYOUTS, STEPS
from tests.kills_of_saving import check, newest, saving
from tests.kills_of_saving import commands as saving_commands
from tests.test_checkpoint import assert_same
from tests.test_processes import COUNT, ROOT, ended, free_port, running


pytestmark = pytest.mark.slow

SAVING = [sys.executable, "-m", "tests.checkpoint_steps"]


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
    for source in [*LAYOUTS, "both", "packed"]:
        net = checkpoint.load(tmp_path / f"after {source}", steps.make(), steps.mesh_of((1, 1)))
        assert_same([], net, ([], expected[1]))
        found = np.load(tmp_path / f"masks {source}.npy")
        np.testing.assert_array_equal(found, np.stack(expected[0]))
    for shape in LAYOUTS.values():
        mesh = steps.mesh_of(shape)
        net = checkpoint.load(tmp_path / "both", steps.make(), mesh)
        assert_same(*steps.train(net, mesh, STEPS), expected)


@pytest.mark.parametrize(("processes", "kills"), [(1, 3), (2, 2)])
def test_the_newest_whole_checkpoint_survives_kills(
    processes: int, kills: int, tmp_path: pathlib.Path
) -> None:
    check(tmp_path, processes, kills, seed=0, quiet=True)


def test_a_step_that_was_being_deleted_is_no_step(tmp_path: pathlib.Path) -> None:
    child = subprocess.run([*SAVING, str(tmp_path), "die"], cwd=ROOT, capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    # Of the fourth step on, the oldest is deleted.
    assert newest(tmp_path) >= 3
    left = [path.name for path in (tmp_path / ".old").iterdir()]
    assert left
    with Checkpoints(tmp_path) as checkpoints:
        latest = checkpoints.latest
        assert latest is not None
        assert [path.name for path in (tmp_path / ".old").iterdir()] == left
        checkpoints.save(latest + 1, steps.numbered(0))
    assert not list((tmp_path / ".old").iterdir())


def test_a_look_leaves_a_running_save_alone(tmp_path: pathlib.Path) -> None:
    with saving(saving_commands(tmp_path, 1)) as (child,):
        looked: set[int] = set()
        while len(looked) < 6:
            with Checkpoints(tmp_path, keep=1) as checkpoints:
                back = checkpoints.load(steps.numbered(0))
                looked.add(int(back["y"][0]))
            assert child.poll() is None, child.stdout and child.stdout.read()
    assert newest(tmp_path) >= max(looked)


@contextlib.contextmanager
def stopped(folder: pathlib.Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that is stopped in the middle of a save, and the step that it saves."""
    with saving(saving_commands(folder, 1)) as (child,):
        halves: list[str] = []
        while not halves:
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            halves = [path.name for path in folder.glob("*tmp*")]
            if not halves:
                os.kill(child.pid, signal.SIGCONT)
        yield child, int(halves[0].partition(".")[0])


def test_what_another_process_is_writing_is_not_deleted(tmp_path: pathlib.Path) -> None:
    with stopped(tmp_path) as (child, step):
        with pytest.raises(CheckpointError) as error:
            Checkpoints(tmp_path).save(step, steps.numbered(step))
        assert str(error.value) == (
            f"Checkpoints.save: another process is saving in {tmp_path}, and step {step} is half-written "
            "there. Give each run a folder of its own. If the other run is dead, end what is left of its "
            "processes."
        )
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(step + 10, steps.numbered(step + 10))
        os.kill(child.pid, signal.SIGCONT)
        output = child.stdout.read() if child.stdout else ""
    # The other process has written its step, and then finds a later one.
    assert f"step {step + 1} in {tmp_path} is not later than step {step + 10}" in output
    assert newest(tmp_path) == step + 10
    assert Checkpoints(tmp_path).load(steps.numbered(step), step)["y"][0] == step


def test_what_a_dead_process_has_left_is_deleted(tmp_path: pathlib.Path) -> None:
    with stopped(tmp_path) as (child, step):
        child.kill()
        child.wait()
        half = [path.name for path in tmp_path.glob("*tmp*")]
        assert half
        assert Checkpoints(tmp_path).latest == step - 1
        assert [path.name for path in tmp_path.glob("*tmp*")] == half
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(step + 10, steps.numbered(step + 10))
            checkpoints.wait()
            assert not list(tmp_path.glob("*tmp*"))


def test_a_full_disk_is_an_error_and_what_was_saved_stays(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, steps.numbered(0))

    # No file may grow beyond 20 KiB.
    limited = ["bash", "-c", 'ulimit -f 20 && exec "$0" "$@"', *SAVING, str(tmp_path)]
    child = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode == 1
    assert re.search(r"CheckpointError: .* was not saved", child.stderr), child.stderr
    assert newest(tmp_path) == 0


def test_the_models_of_the_examples_go_on_in_other_layouts() -> None:
    """A few of the pairs: in a process of its own, because their floats have 64 bits."""
    command = [
        sys.executable,
        "-m",
        "tests.pairs_of_layouts",
        "--steps",
        "2",
        "--layouts",
        "2",
        "4x2",
    ]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    for model in ("digits", "text"):
        assert f"{model}: 4 of 4 pairs agree" in child.stdout
