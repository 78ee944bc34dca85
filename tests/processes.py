"""Processes that tests and scripts start, and that never outlive them."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence


ROOT = pathlib.Path(__file__).parents[1]
COUNT = 2
# Runs a module. Two processes may write an entry of the cache at once.
STRICT = [sys.executable, "-W", "error"]
STRICT += ["-W", "ignore:Error reading persistent compilation cache entry", "-m"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def run_together(
    commands: Sequence[Sequence[str]],
    folder: pathlib.Path,
    devices: int,
    patience: float = 120,
    optimization: int = 0,
) -> list[str]:
    """Run processes with so many devices each. All of them must end well and in so many seconds.

    Each is in a group of its own, and whatever is left of it at the end is killed.

    **Returns:** the output of each, which is also in a numbered file in the folder.
    """
    # As `compiling.py` has it.
    flags = f"--xla_force_host_platform_device_count={devices}"
    flags += f" --xla_backend_optimization_level={optimization}"
    logs = [folder / f"{i}.log" for i in range(len(commands))]
    deadline = time.monotonic() + patience
    started: list[subprocess.Popen[bytes]] = []
    try:
        for i, (command, log) in enumerate(zip(commands, logs, strict=True)):
            # No result may depend on the order of a set.
            environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONHASHSEED": str(i + 1)}
            with log.open("wb") as out:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = [process.wait(max(deadline - time.monotonic(), 0)) for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outputs = [log.read_text(errors="replace") for log in logs]
    for code, output in zip(codes, outputs, strict=True):
        assert code == 0, output
    return outputs
