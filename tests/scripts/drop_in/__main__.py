"""Run a test file of JAX with statemesh's functions in the place of JAX's.

    python -m tests.scripts.drop_in run ~/jax/tests/shard_map_test.py results.json [--with statemesh]
    python -m tests.scripts.drop_in compare jax.json results.json

Take the files from JAX's repository, of the installed release. The extra `dev` is needed. `--with` is one of:
`jax` (the real functions), `statemesh`, `not compiled` (`jit=False`), `older names` (`statemesh.legacy`), and
`broken`, with which many tests must fail. `compare` lists the tests that pass in the first results but not in
the second.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.scripts.drop_in.stand_in import VARIANTS


def run(file: Path, variant: str, processes: int, only: str) -> dict[str, Any]:
    """The outcome of each test, and how often functions were made and called."""
    workers = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", f"{__package__}.stand_in"),
                *(str(file), variant, str(part), str(processes), only),
            ],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in range(processes)
    ]
    found: dict[str, Any] = {}
    counts: dict[str, Counter[str]] = {}
    for worker in workers:
        told = json.loads(worker.communicate()[0].splitlines()[-1])
        found |= told["found"]
        for name, count in told["counts"].items():
            counts.setdefault(name, Counter()).update(count)
    return {"found": found, "counts": counts}


def summary(told: dict[str, Any]) -> str:
    words = Counter(word for word, _ in told["found"].values())
    return f"{dict(words)}, {told['counts']}"


def compare(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The tests that passed in the first run and failed in the other, with the last line of each error."""
    passed = {name for name, (word, _) in one["found"].items() if word == "passed"}
    return [
        f"{name}: {text.strip().splitlines()[-1][:200]}"
        for name, (word, text) in sorted(other["found"].items())
        if word == "failed" and name in passed
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "compare"])
    parser.add_argument("file", type=Path, nargs=2)
    parser.add_argument("--with", dest="variant", choices=VARIANTS, default="statemesh")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="a part of the names of the tests to run")
    options = parser.parse_args()
    first, second = options.file
    if options.what == "run":
        told = run(first, options.variant, options.processes, options.only)
        second.write_text(json.dumps(told, indent=1))
        print(summary(told))
        return
    one, other = (json.loads(file.read_text()) for file in options.file)
    lines = compare(one, other)
    print(summary(one), summary(other), *lines, f"{len(lines)} more", sep="\n")


if __name__ == "__main__":
    main()
