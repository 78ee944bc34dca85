"""`python -m statemesh.certify`: which functions are right when sharded, for the JAX that is installed.

It adds to `jax-VERSION.json`, and writes short programs that show what is wrong, and `table.html`, a
page with all tables in the folder.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from ._run import Judged
from ._table import as_text, counts, differences, page, table_row


# So many rows share a process: what JAX keeps of them is given back, and a crash takes few with it.
_TOGETHER = 24
# After this time they are waiting for each other for ever.
_SECONDS = 900


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m statemesh.certify", description=__doc__)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("certify"), help="a folder"
    )
    parser.add_argument("--every", type=int, default=1, help="every N-th row only")
    parser.add_argument("--missing", action="store_true", help="only what the file lacks")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("names", nargs="*", help="rows, such as jax.numpy.sort; all if left out")
    options = parser.parse_args()
    start = time.monotonic()
    known = _worker("names", [])
    file: pathlib.Path = options.out / f"jax-{known['jax']}.json"
    table: dict[str, Any] = {"jax": known["jax"], "untried": [], "rows": {}}
    # The primitives that `jax.lax` shows and no row has reached.
    table["unreached"] = known["primitives"]
    if file.exists():
        table = json.loads(file.read_text())
    names = options.names or known["names"][:: options.every]
    if options.missing:
        names = [name for name in names if name not in {*table["rows"], *table["untried"]}]
    # Neighbours take about as long: each process gets some of all kinds.
    count = -(-len(names) // _TOGETHER)
    chunks = [names[k::count] for k in range(count)]
    with ThreadPoolExecutor(options.processes) as pool:
        running = [pool.submit(_run, chunk) for chunk in chunks]
        for done, future in enumerate(as_completed(running), 1):
            _add(table, future.result(), options.out)
            file.write_text(as_text(table))
            print(
                f"{done} of {len(chunks)} parts, after {time.monotonic() - start:.0f} s", flush=True
            )
    in_order = [name for name in known["names"] if name in table["rows"]]
    table["rows"] = {name: table["rows"][name] for name in in_order}
    file.write_text(as_text(table))
    out: pathlib.Path = options.out
    tables = [json.loads(each.read_text()) for each in sorted(out.glob("jax-*.json"), reverse=True)]
    (out / "table.html").write_text(page(tables))
    print(f"{file}: {len(table['rows'])} functions, {counts(table['rows'])}")
    for other in tables:
        for name, mode, column, before, after in differences(other["rows"], table["rows"]):
            print(
                f"{name}, {mode}, {column}: {before} on {other['jax']}, {after} on {table['jax']}"
            )


def _add(table: dict[str, Any], part: dict[str, Any], out: pathlib.Path) -> None:
    """Put what came of some rows into the table, and the programs of what is wrong into files."""
    programs = pathlib.Path("programs") / table["jax"]
    (out / programs).mkdir(parents=True, exist_ok=True)
    for name, row in part["rows"].items():
        files = {}
        for cell, text in row["programs"]:
            judged = Judged(**cell)
            path = programs / f"{name}-{judged.mode}-{judged.column.replace(' ', '-')}.py"
            (out / path).write_text(text)
            files[judged] = str(path)
        cells = [Judged(**cell) for cell in row["cells"]]
        table["rows"][name] = table_row(row["line"], cells, files)
    table["untried"] = sorted({*table["untried"], *part["untried"]})
    table["unreached"] = sorted({*table["unreached"]} - {*part["primitives"]})


def _run(names: list[str]) -> dict[str, Any]:
    """What came of some rows; where one crashes the process, each has its own."""
    try:
        found: dict[str, Any] = _worker("run", names)
        return found
    except subprocess.CalledProcessError as error:
        ended = f"the process ends with {error.returncode}"
    except subprocess.TimeoutExpired:
        ended = "it never ends"
    if len(names) == 1:
        cell = Judged("shard_map", "value", "", "raw", ended)
        row = {"line": "", "cells": [dataclasses.asdict(cell)], "programs": []}
        return {"rows": {names[0]: row}, "untried": [], "primitives": []}
    half = len(names) // 2
    first, second = _run(names[:half]), _run(names[half:])
    return {
        "rows": first["rows"] | second["rows"],
        "untried": first["untried"] + second["untried"],
        "primitives": first["primitives"] + second["primitives"],
    }


def _worker(task: str, names: list[str]) -> Any:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
        subprocess.run(
            [sys.executable, "-m", "statemesh.certify._worker", task, file.name, *names],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"},
            check=True,
            timeout=_SECONDS,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        return json.load(file)


if __name__ == "__main__":
    main()
