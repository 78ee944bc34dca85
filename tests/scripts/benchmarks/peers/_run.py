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
    # What the times are medians of: the medians of the rounds, and the first calls of several processes.
    walls: list[float] = dataclasses.field(default_factory=list)
    hosts: list[float] = dataclasses.field(default_factory=list)
    firsts: list[float] = dataclasses.field(default_factory=list)


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
        self.state: list[float] = []
        found = self.answer()
        if found is not None:
            row.firsts.append(found["first"])
            row.first, row.second = statistics.median(row.firsts), found["second"]
            self.state = found["state"]

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

    def round(self, seconds: float) -> None:
        """Call for so long."""
        if (found := self.tell(f"calls {seconds}")) is not None:
            walls, hosts = zip(*found["times"], strict=True)
            self.row.walls.append(statistics.median(walls))
            self.row.hosts.append(statistics.median(hosts))

    def conclude(self, with_sizes: bool) -> None:
        """Put medians and counts into the row and end the process."""
        row = self.row
        row.wall, row.host = statistics.median(row.walls), statistics.median(row.hosts)
        if (found := self.tell("sizes" if with_sizes else "counts")) is not None:
            for name, value in found.items():
                setattr(row, name, value)
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
    starts: int,
    rounds: int,
    seconds: float,
    limit: float,
) -> list[Row]:
    """Measure one program with all peers, on meshes of each type of axes in turn.

    Each peer starts so many processes and then, in the last one, has so many rounds of so many seconds, in an
    order that rotates. All must compute the same.
    """
    rows = [Row(peer, kind, each, devices, states) for each in axes for peer in peers]
    for _ in range(starts - 1):
        for row in rows:
            if row.refused is None and (worker := Worker(row, limit)).alive:
                worker.end()
    alive = [row for row in rows if row.refused is None]
    workers = [worker for row in alive if (worker := Worker(row, limit)).alive]
    floor = next((worker.state for worker in workers if worker.row.peer == FLOOR), None)
    for worker in workers if floor is not None else ():
        np.testing.assert_allclose(worker.state, floor, rtol=1e-4, err_msg=worker.row.peer)
    for turn in range(rounds):
        k = turn % max(len(workers), 1)
        for worker in workers[k:] + workers[:k]:
            if worker.alive:
                worker.round(seconds)
    for worker in workers:
        if worker.alive:
            worker.conclude(with_sizes=states <= 1000)
    return rows
