"""`python -m statemesh.certify`: which functions are right when sharded, for the JAX that is installed.

It writes `jax-VERSION.json`, a page with the table, and a short program for each wrong cell.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any


# So many rows share a process: what JAX keeps of them is given back, and a crash takes few with it.
_ROWS = 24


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m statemesh.certify", description=__doc__)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("certify"), help="a folder"
    )
    parser.add_argument("--every", type=int, default=1, help="every N-th row only")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("names", nargs="*", help="rows, such as jax.numpy.sort; all if left out")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    names = options.names or _worker("names", [])["names"][:: options.every]
    chunks = [names[k : k + _ROWS] for k in range(0, len(names), _ROWS)]
    found: dict[str, Any] = {"rows": {}, "untried": [], "versions": {}}
    with ThreadPoolExecutor(options.processes) as pool:
        for done, part in enumerate(pool.map(_chunk, chunks)):
            found["rows"].update(part["rows"])
            found["untried"] += part["untried"]
            found["versions"] = part["versions"] or found["versions"]
            print(
                f"{(done + 1) * _ROWS} of {len(names)} functions, after {time.monotonic() - start:.0f} s",
                flush=True,
            )
    version = found["versions"]["jax"]
    programs = options.out / "programs" / version
    programs.mkdir(parents=True, exist_ok=True)
    for row in found["rows"].values():
        for cell in row["cells"]:
            if text := cell.pop("program", ""):
                name = (
                    "-".join([row["name"], cell["mode"], cell["column"].replace(" ", "-")]) + ".py"
                )
                (programs / name).write_text(text)
                cell["file"] = f"programs/{version}/{name}"
    found["seconds"] = round(time.monotonic() - start)
    file = options.out / f"jax-{version}.json"
    file.write_text(json.dumps(found, indent=0))
    counts = Counter(cell["outcome"] for row in found["rows"].values() for cell in row["cells"])
    print(f"{file}: {len(found['rows'])} functions,", dict(counts))


def _chunk(names: list[str]) -> dict[str, Any]:
    """What came of some rows; where one crashes the process, each has its own."""
    try:
        return _worker("run", names)
    except subprocess.CalledProcessError:
        if len(names) == 1:
            (name,) = names
            cells = [
                {
                    "mode": "all",
                    "column": "value",
                    "split": "",
                    "outcome": "raw",
                    "says": "the process crashes",
                }
            ]
            return {
                "rows": {name: {"name": name, "line": "", "cells": cells}},
                "untried": [],
                "versions": {},
            }
    half = len(names) // 2
    parts = [_chunk(names[:half]), _chunk(names[half:])]
    return {
        "rows": parts[0]["rows"] | parts[1]["rows"],
        "untried": parts[0]["untried"] + parts[1]["untried"],
        "versions": parts[0]["versions"] or parts[1]["versions"],
    }


def _worker(task: str, names: list[str]) -> Any:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
        subprocess.run(
            [sys.executable, "-m", "statemesh.certify._worker", task, file.name, *names],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        return json.load(file)


if __name__ == "__main__":
    main()
