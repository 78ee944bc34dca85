"""The peers run in turn, each in its own process."""

import dataclasses
import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.scripts.benchmarks.peers._peers import FLOOR


@dataclasses.dataclass
class Row:
    """The measurements of one peer, in seconds and bytes, or `None` for a missing one."""

    peer: str
    kind: str
    axes: str
    devices: int
    states: int
    # The time of a call until its result is there, and the calling thread's until the call returns.
    wall: float | None = None
    host: float | None = None
    # Of the first calls, which trace and compile.
    first: float | None = None
    second: float | None = None
    # For each later call.
    traces: float | None = None
    compiles: float | None = None
    # The bytes that a device holds and moves, by XLA's account of the program.
    peak: float | None = None
    moved: float | None = None
    # Why nothing was measured.
    refused: str | None = None


class Worker:
    """A peer's process, which is ended where it does not answer in so many seconds."""

    def __init__(self, row: Row, limit: float) -> None:
        self.row, self.limit = row, limit
        flags = f"--xla_force_host_platform_device_count={row.devices}"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", f"{__package__}._worker"),
                *(row.peer, row.kind, row.axes, str(row.devices), str(row.states)),
            ],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.times: list[tuple[float, float]] = []
        self.state: list[float] = []
        found = self.answer()
        if found is not None:
            row.first, row.second, self.state = found["first"], found["second"], found["state"]

    @property
    def alive(self) -> bool:
        return self.row.refused is None

    def answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        there, _, _ = select.select([self.process.stdout], [], [], self.limit)
        line = self.process.stdout.readline() if there else ""
        while line and not line.startswith("{"):  # A line that the library prints is not an answer.
            line = self.process.stdout.readline()
        none = {"refused": "it ended" if there else f"took over {self.limit:.0f} s"}
        found: dict[str, Any] = json.loads(line) if line else none
        if "refused" in found:
            self.row.refused = found["refused"]
            self.end()
            return None
        return found

    def tell(self, command: str) -> dict[str, Any] | None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def conclude(self, with_sizes: bool) -> None:
        """Put medians and counts into the row and end the process."""
        walls, hosts = zip(*self.times, strict=True)
        self.row.wall, self.row.host = statistics.median(walls), statistics.median(hosts)
        if (found := self.tell("sizes" if with_sizes else "counts")) is not None:
            for name, value in found.items():
                setattr(self.row, name, value)
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def measure(
    kind: str,
    axes: Sequence[str],
    devices: int,
    states: int,
    peers: Sequence[str],
    rounds: int,
    seconds: float,
    limit: float,
) -> list[Row]:
    """Measure one program with all peers, on meshes of each type of axes in turn.

    Each peer has so many turns of so many seconds, in an order that rotates. All must compute the same.
    """
    rows = [Row(peer, kind, each, devices, states) for each in axes for peer in peers]
    workers = [worker for row in rows if (worker := Worker(row, limit)).alive]
    floor = next((worker.state for worker in workers if worker.row.peer == FLOOR), None)
    for worker in workers if floor is not None else ():
        np.testing.assert_allclose(worker.state, floor, rtol=1e-4, err_msg=worker.row.peer)
    for turn in range(rounds):
        k = turn % max(len(workers), 1)
        for worker in workers[k:] + workers[:k]:
            if worker.alive and (found := worker.tell(f"calls {seconds}")) is not None:
                worker.times += found["times"]
    for worker in workers:
        if worker.alive:
            worker.conclude(with_sizes=states <= 1000)
    return rows
