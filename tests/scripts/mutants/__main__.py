"""How many mutants of the package the suites kill, and how many of these the quick suite kills alone.

First, what each test costs and which lines it runs; then the mutants, from where a run stopped:

    python -m pytest -m "" -p tests.scripts.mutants.record
    python -m tests.scripts.mutants --seed 0 --count 150

A mutant runs against the quick tests that cover its lines, then against the slow ones, until one fails. The
test that failed before comes first. Each result is a line of `results.jsonl` beside this file, and `TABLE.md`
is made of them. A mutant whose file has changed is run again. The mutants are a sample that is drawn evenly
by lines of code, and the list in `by_hand.py`.

`--marks` runs nothing and lists the tests whose mark `slow` is not what the measurement says: a test is quick
because it is cheap or because a mutant needs it.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from typing import Any

from .by_hand import mutants as by_hand
from .made import Mutant, sample


ROOT = pathlib.Path(__file__).parents[3]
RECORDED = ROOT / ".mutants"
RESULTS = pathlib.Path(__file__).with_name("results.jsonl")
TABLE = pathlib.Path(__file__).with_name("TABLE.md")
# Tests of a mutant that are collected and run by one process.
_BATCHES = 15, 60, 400
_SECONDS = 60.0  # beyond ten times what the tests take without a mutant


@dataclasses.dataclass(frozen=True)
class Test:
    """A test as it was recorded: its cost in seconds of the processor, and the lines that it runs."""

    id: str
    seconds: float
    slow: bool
    lines: dict[str, frozenset[int]]

    @property
    def file(self) -> str:
        return self.id.split("::")[0]


def _is_unseen(test: Test) -> bool:
    """Whether it starts processes of its own, whose lines the recording does not see."""
    return test.slow and test.file.endswith("test_processes.py")


def recorded() -> list[Test]:
    files = sorted(RECORDED.glob("tests-*.jsonl"))
    rows = [json.loads(row) for file in files for row in file.read_text().splitlines()]
    return [
        Test(r["id"], r["seconds"], r["slow"], {f: frozenset(n) for f, n in r["lines"].items()})
        for r in rows
    ]


def covering(mutant: Mutant, tests: list[Test], killers: set[str]) -> list[Test]:
    """The tests that run a line of the mutant, or else of its file.

    First those that killed it before, then the cheapest of each file.
    """
    lines = range(mutant.line, mutant.last + 1)
    near = [t for t in tests if not t.lines.get(mutant.file, frozenset()).isdisjoint(lines)]
    # What runs at the import only is covered by all that run the file.
    near = near or [t for t in tests if mutant.file in t.lines]
    by_file: dict[str, list[Test]] = defaultdict(list)
    for test in sorted(near, key=lambda t: t.seconds):
        by_file[test.file].append(test)
    turns = [
        (t.id not in killers, k, t.seconds, t)
        for group in by_file.values()
        for k, t in enumerate(group)
    ]
    return [t for *_, t in sorted(turns, key=lambda turn: turn[:3])]


def first_failing(tests: list[Test], tree: pathlib.Path) -> str | None:
    """The first test that fails in this copy of the repository."""
    rest = list(tests)
    for size in (*_BATCHES, len(tests)):
        batch, rest = rest[:size], rest[size:]
        if not batch:
            return None
        # Tests of one file stand together, which is how pytest collects fastest.
        order = {file: k for k, file in reversed(list(enumerate(t.file for t in batch)))}
        batch.sort(key=lambda t: order[t.file])
        names = tree / "tests.txt"
        names.write_text("".join(f"{t.id}\n" for t in batch))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-m",
            "",
            "--numprocesses=0",
            f"@{names}",
        ]
        limit = _SECONDS + 10 * sum(t.seconds for t in batch)
        environment = os.environ | {"PYTHONPATH": str(tree), "CI": "true", "JAXTYPING_DISABLE": "1"}
        try:
            done = subprocess.run(
                command,
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no end after {limit:.0f} s"
        if done.returncode:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
            return failed.group(1) if failed else f"pytest ended with {done.returncode}"
    return None


def run(mutant: Mutant, tests: list[Test], killers: set[str], tree: pathlib.Path) -> dict[str, Any]:
    near = covering(mutant, tests, killers)
    begin = time.perf_counter()
    path = tree / "statemesh" / mutant.file
    original = path.read_bytes()
    try:
        mutant.apply(tree / "statemesh")
        quick = first_failing([t for t in near if not t.slow], tree)
        rest = [t for t in near if t.slow] + [t for t in tests if _is_unseen(t) and t not in near]
        slow = None if quick else first_failing(rest, tree)
    finally:
        path.write_bytes(original)
    return {
        "mutant": mutant.key,
        "line": mutant.line,
        "package": mutant.package,
        "of": digest(mutant),
        "covering": len(near),
        "killed": "quick" if quick else "slow" if slow else "no",
        "by": quick or slow,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def digest(mutant: Mutant) -> str:
    source = (ROOT / "statemesh" / mutant.file).read_bytes()
    return hashlib.sha256(source).hexdigest()[:12]


def known() -> dict[tuple[str, str], dict[str, Any]]:
    rows = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else ()
    return {(r["mutant"], r["of"]): r for r in rows}


def copied(folder: pathlib.Path) -> pathlib.Path:
    """A copy of the repository in which a mutant can stand, with the programs that were compiled here."""
    parts = (
        "statemesh",
        "tests",
        "property_tests",
        "docs",
        "README.md",
        "LICENSE",
        "pyproject.toml",
        ".ci",
    )
    for part in parts:
        source = ROOT / part
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / part)
    (folder / ".pytest_cache").mkdir()
    (folder / ".pytest_cache" / "jax").symlink_to((ROOT / ".pytest_cache" / "jax").resolve())
    return folder


def table(rows: list[dict[str, Any]]) -> str:
    """Kills by package: of all mutants, how many all tests kill, and how many of these the quick ones."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["package"]][row["killed"]] += 1
        counts["all"][row["killed"]] += 1
    text = [
        "| package | mutants | killed | of these by the quick suite |",
        "| --- | --- | --- | --- |",
    ]
    for package, count in counts.items():
        killed = count["quick"] + count["slow"]
        share = f" ({count['quick'] / killed:.0%})" if killed else ""
        text.append(f"| {package} | {count.total()} | {killed} | {count['quick']}{share} |")
    text += ["", "Killed by no test:", ""]
    text += [f"- line {r['line']} of `{r['mutant']}`" for r in rows if r["killed"] == "no"]
    return "\n".join(text)


def marks(tests: list[Test], rows: list[dict[str, Any]], most: float) -> str:
    """The test functions whose mark is not what the measurement says.

    **Arguments:**

    - `most`: what a cheap test costs at most, in seconds of the processor.
    """
    killers = {row["by"] for row in rows if row["by"]}
    lines: list[str] = []
    for test in sorted(tests, key=lambda t: -t.seconds):
        if not test.slow and test.seconds > most and test.id not in killers:
            lines.append(f"dear, and no mutant needs it: {test.seconds:6.1f} s  {test.id}")
        if test.slow and test.id in killers:
            lines.append(f"slow, and a mutant needs it:  {test.seconds:6.1f} s  {test.id}")
        if test.slow and test.seconds < most / 10:
            lines.append(f"slow, and cheap:              {test.seconds:6.1f} s  {test.id}")
    return "\n".join(sorted(lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="no mutant is begun after that")
    parser.add_argument("--marks", type=float, metavar="SECONDS", help="run nothing")
    options = parser.parse_args()

    package = ROOT / "statemesh"
    mutants = [*sample(package, options.seed, options.count), *by_hand(package)]
    mutants.sort(key=lambda m: m.key)
    keys = {m.key for m in mutants}
    results = {key: row for key, row in known().items() if row["mutant"] in keys}
    tests = recorded()
    if options.marks is None:
        run_missing(mutants, tests, results, options.processes, 60 * options.minutes)
    rows = [results[key] for m in mutants if (key := (m.key, digest(m))) in results]
    if options.marks is not None:
        print(marks(tests, rows, options.marks))
        return
    text = table(rows)
    if len(rows) < len(mutants):
        text += f"\n\n{len(mutants) - len(rows)} mutants have not been run."
    command = f"python -m tests.scripts.mutants --seed {options.seed} --count {options.count}"
    described = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    TABLE.write_text(f"# Mutants\n\nOf commit {commit}, made by `{command}`.\n\n{text}\n")
    print(text)


def run_missing(
    mutants: list[Mutant],
    tests: list[Test],
    results: dict[tuple[str, str], dict[str, Any]],
    processes: int,
    seconds: float,
) -> None:
    """Run the mutants that have no result yet, and keep the results as they come."""
    end = time.monotonic() + seconds
    killers: dict[str, set[str]] = defaultdict(set)
    for (key, _), result in results.items():
        killers[key].add(result["by"])
    trees: queue.Queue[pathlib.Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for k in range(processes):
            (tree := pathlib.Path(folder, str(k))).mkdir()
            trees.put(copied(tree))
        # Where no test can run, every mutant would count as killed.
        cheapest = sorted(tests, key=lambda t: t.seconds)[:5]
        if failed := first_failing(cheapest, tree):
            raise SystemExit(f"without a mutant: {failed}")

        def tried(mutant: Mutant) -> dict[str, Any] | None:
            if time.monotonic() > end:
                return None
            tree = trees.get()
            try:
                return run(mutant, tests, killers[mutant.key], tree)
            finally:
                trees.put(tree)

        missing = [m for m in mutants if (m.key, digest(m)) not in results]
        # In an order by chance, so that a run that is stopped has tried some of every part.
        missing.sort(key=lambda m: (not m.by_hand, hashlib.sha256(m.key.encode()).hexdigest()))
        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            for done in concurrent.futures.as_completed([pool.submit(tried, m) for m in missing]):
                if (row := done.result()) is not None:
                    results[row["mutant"], row["of"]] = row
                    RESULTS.write_text("".join(f"{json.dumps(r)}\n" for r in results.values()))
                    print(
                        f"{row['seconds']:7.1f} s  {row['killed']:5}  {row['mutant']}", flush=True
                    )


if __name__ == "__main__":
    main()
