"""Kill processes at random moments while they save; every step that is left must be whole.

All the time another process looks at the folder, which must not disturb anyone. By hand:

    python -m tests.scripts.kills_of_saving [--kills 50] [--processes 1 2] [--seed 0]
"""

import argparse
import contextlib
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm

from statemesh import checkpoint
from statemesh.checkpoint import Checkpoints
from tests.checkpoint.model import numbered
from tests.processes import ROOT, free_port


@contextlib.contextmanager
def saving(commands: Sequence[list[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that save one step after another, of which the first is whole. All are killed at the end."""
    children = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    try:
        for child in children:
            before: list[str] = []
            for line in child.stdout or ():
                before.append(line)
                if line == "started\n":
                    break
            assert before[-1:] == ["started\n"], "".join(before)
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def commands(folder: pathlib.Path, processes: int) -> list[list[str]]:
    command = [sys.executable, "-m", "tests.checkpoint.model", "saving", str(folder)]
    if processes == 1:
        return [command]
    rest = [str(processes), str(free_port())]
    return [[*command, str(i), *rest] for i in range(processes)]


def killed(folder: pathlib.Path, processes: int, draw: random.Random) -> None:
    """Save with processes that are killed at random moments, in any order."""
    with saving(commands(folder, processes)) as children:
        for child in draw.sample(children, processes):
            end = time.monotonic() + draw.uniform(0, 1)
            while time.monotonic() < end:
                looked(folder)
            # A look ends nobody's save. Only a process that was killed takes others with it.
            assert processes > 1 or child.poll() is None, child.stdout and child.stdout.read()
            # Whoever is left must not take what it cannot finish for whole.
            child.kill()


def looked(folder: pathlib.Path) -> int | None:
    """The newest step, as a process sees it that only looks."""
    with Checkpoints(folder, keep=1) as checkpoints:
        return checkpoints.latest


def newest(folder: pathlib.Path) -> int:
    """The newest step, -1 if there is none. Every step that is there must load, with its own values."""
    latest = -1
    for name in (path.name for path in folder.iterdir()):
        if not name.isdecimal():
            continue
        expected = numbered(int(name))
        back = checkpoint.load(folder / name, expected)
        np.testing.assert_array_equal(back["x"].value, expected["x"].value)
        assert {int(y) for y in back["y"]} == {int(name)}
        latest = max(latest, int(name))
    return latest


def check(folder: pathlib.Path, processes: int, kills: int, seed: int, quiet: bool = False) -> int:
    """Kill again and again, and go on from what is left.

    **Returns:** how many kills left a step half-written.
    """
    draw, last, halves = random.Random(seed), -1, 0
    for _ in tqdm(range(kills), f"{processes} processes", unit="kill", disable=quiet):
        killed(folder, processes, draw)
        step = newest(folder)
        assert step >= last, f"step {last} was whole, and is lost: seed {seed}"
        halves += any("tmp" in path.name for path in folder.iterdir())
        # What the next process finds is what it would go on from. A look changes nothing.
        before = sorted(folder.rglob("*"))
        assert looked(folder) == (None if step < 0 else step)
        assert sorted(folder.rglob("*")) == before
        # One that saves tidies up. It does so in a copy, so that the next killed process has to do it itself.
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            with Checkpoints(copy) as checkpoints:
                checkpoints.save(step + 1, numbered(step + 1))
            assert newest(pathlib.Path(copy)) == step + 1
            assert not any("tmp" in path.name for path in pathlib.Path(copy).iterdir())
            assert not list(pathlib.Path(copy).glob(".old/*"))
        last = step
    assert last >= 0
    return halves


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill processes while they save.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    options = parser.parse_args()
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            halves = check(pathlib.Path(folder), processes, options.kills, options.seed)
        print(
            f"{processes} processes: {options.kills} of {options.kills} kills left the newest whole step, "
            f"{halves} of them beside a half-written one"
        )


if __name__ == "__main__":
    main()
