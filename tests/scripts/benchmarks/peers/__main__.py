"""The cost of a call with states: with statemesh, by hand, and with other libraries.

    python -m tests.scripts.benchmarks.peers run results.json [--kinds sharded reduced] [--axes Explicit Auto]
    python -m tests.scripts.benchmarks.peers show results.json more.json [--write docs/pages]

`run` starts each peer in a process of its own for each type of the mesh's axes, and calls all of them in
turn, waiting for each result. `show` prints tables of ratios to the program by hand, each program from the
first file that has it. With `--write` it puts the tables, a file of all numbers and two pictures into the
documentation.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import get_args

import jax

from tests.scripts.benchmarks.peers._case import Axes, Kind
from tests.scripts.benchmarks.peers._models import Model
from tests.scripts.benchmarks.peers._peers import PEERS, TRAINERS, peers_of
from tests.scripts.benchmarks.peers._pictures import picture, small_picture
from tests.scripts.benchmarks.peers._run import Row, measure
from tests.scripts.benchmarks.peers._table import put, read, tables


# How many states are measured where nothing else is asked for. Nested modules and layers have one number.
SIZES = {"deep": [100], "training": [10], "transformer": [27], "cnn": [16], "mlp": [100]}


def run(options: argparse.Namespace) -> None:
    rows: list[Row] = []
    for kind in options.kinds:
        peers = [name for name in peers_of(kind) if name in (options.peers or peers_of(kind))]
        for devices in options.devices:
            for states in options.states or SIZES.get(kind, [1, 10, 100, 1000]):
                # The models are compared by the time of their first call too.
                starts = options.starts or (5 if kind in get_args(Model) else 1)
                found = measure(
                    *(kind, options.axes, devices, states, peers),
                    *(starts, options.rounds, options.seconds, options.limit),
                )
                rows += found
                for row in found:
                    what = f"{kind} {row.axes} {devices} {states} {row.peer}"
                    print(f"{what}: {row.refused or row.wall}", flush=True)
                about = f"JAX {jax.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores"
                saved = {"about": about, "rows": [vars(row) for row in rows]}
                options.file[0].write_text(json.dumps(saved, indent=1))


def show(options: argparse.Namespace) -> None:
    about, rows = read(options.file)
    for lines in tables(rows).values():
        print("\n".join([*lines, ""]))
    if options.write is not None:
        put(options.write, f"{about}.", rows)
        picture(rows, options.write / "assets" / "benchmarks.svg")
        small_picture(rows, options.write / "assets" / "benchmarks-small.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), default=get_args(Kind))
    parser.add_argument("--axes", nargs="+", choices=get_args(Axes), default=get_args(Axes))
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--states", type=int, nargs="+")
    parser.add_argument("--peers", nargs="+", choices=PEERS | TRAINERS)
    parser.add_argument("--starts", type=int)
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    {"run": run, "show": show}[options.what](options)


if __name__ == "__main__":
    main()
