"""Runs the check on all planted mistakes, delicate programs and right models; by hand, for the docs.

python -m property_tests.planted.measure --processes 2 --lines planted.jsonl

Each outcome is written down at once. What the file of lines holds already is not run again.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from tqdm import tqdm


DTYPES = ("float32", "bfloat16", "float16", "int32")
# A process is given up after so many cases, so that compiled programs do not fill the memory.
CASES_OF_A_PROCESS = 25


@dataclasses.dataclass(frozen=True)
class Task:
    """One case to be run.

    **Attributes:**

    - `kind`: `planted`, `delicate` or `right` (a model without a mistake).
    - `name`: of the mistake or the delicate program.
    - `dtype`: of the case's floats.
    """

    kind: str
    model: str
    name: str
    dtype: str


@dataclasses.dataclass
class Outcome:
    """What the check did.

    **Attributes:**

    - `result`: `found` (an `AssertionError`, or a `RangeWarning` where a mistake is planted), `raised`
        (another error: the call or the check refused), `silent`, or `timed out`.
    - `text`: the first line of what was raised, with its type.
    - `report`: all of what was raised.
    - `warned`: the first lines of the warnings.
    - `locating`: the processor's seconds that it took to find the line.
    - `numbers`, `unjudged`, `only_double`: where the check passed, how many numbers the results and the
        gradient have, how many of these were not judged, and how many in double precision only.
    """

    task: Task
    result: str
    seconds: float
    text: str = ""
    report: str = ""
    warned: tuple[str, ...] = ()
    locating: float = 0.0
    numbers: int = 0
    unjudged: int = 0
    only_double: int = 0


def tasks(kinds: list[str], models: list[str]) -> list[Task]:
    """All cases of these kinds; no models means all."""
    from .delicate import DELICATE
    from .mistakes import MODELS, dtypes_of, mistakes

    found = []
    if "planted" in kinds:
        found += [Task("planted", m.model, m.name, dtype) for m in mistakes() for dtype in m.dtypes]
    if "right" in kinds:
        found += [Task("right", m, "", dtype) for m in MODELS for dtype in dtypes_of(m)]
    if "delicate" in kinds:
        found += [
            Task("delicate", "", d.name, dtype) for d in DELICATE.values() for dtype in d.dtypes
        ]
    return [task for task in found if not models or task.model in models or task.name in models]


def run(task: Task) -> Outcome:
    """In this process."""
    from statemesh.testing import RangeWarning

    from .delicate import DELICATE
    from .mistakes import mistakes, right_case

    if task.kind == "planted":
        (found,) = (m for m in mistakes() if (m.model, m.name) == (task.model, task.name))
        case = found.case(task.dtype)
    elif task.kind == "right":
        case = right_case(task.model, task.dtype)
    else:
        case = DELICATE[task.name].case(task.dtype)
    start = time.monotonic()
    outcome = Outcome(task, "silent", 0)
    with warnings.catch_warnings(record=True) as warned, timed(outcome):
        warnings.simplefilter("always")
        try:
            checked = case.check()
            outcome.numbers = case.numbers
            outcome.unjudged = sum(checked.unjudged.values())
            outcome.only_double = sum(checked.only_double.values())
        except Exception as error:
            first = str(error).strip().splitlines() or [""]
            outcome.result = "found" if isinstance(error, AssertionError) else "raised"
            outcome.text = f"{type(error).__name__}: {first[0]}"
            outcome.report = str(error)
    outcome.seconds = round(time.monotonic() - start, 2)
    if of_range := [one for one in warned if issubclass(one.category, RangeWarning)]:
        # Of a right program it is no alarm.
        outcome.result = "found" if task.kind == "planted" else outcome.result
        outcome.report = outcome.text = f"RangeWarning: {of_range[0].message}"
    outcome.warned = tuple(str(one.message).splitlines()[0] for one in warned if str(one.message))
    return outcome


@contextlib.contextmanager
def timed(outcome: Outcome) -> Iterator[None]:
    """Takes the time of what looks for the line after a check has failed."""
    from statemesh.testing._check import _check

    find = _check.located_in

    def located_in(*args: Any, **kwargs: Any) -> tuple[list[str], str]:
        start = time.process_time()
        found = find(*args, **kwargs)
        outcome.locating += round(time.process_time() - start, 2)
        return found

    with mock.patch.object(_check, "located_in", located_in):
        yield


def serve(timeout: int) -> None:
    """Runs what is read line by line, and writes each outcome on a line; until a case takes too long."""
    from statemesh.testing import set_devices

    set_devices(8)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        signal.alarm(timeout)
        outcome = run(Task(**json.loads(line)))
        print(json.dumps(dataclasses.asdict(outcome)), file=answers, flush=True)


def outcomes_of(batch: list[Task], timeout: int) -> Iterator[Outcome]:
    """In a process of their own; after a case that ends it, in another one."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.measure", "--serve", "--timeout", f"{timeout}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags},
    )
    assert process.stdin and process.stdout
    process.stdin.writelines(json.dumps(dataclasses.asdict(task)) + "\n" for task in batch)
    process.stdin.close()
    done = 0
    for line in process.stdout:
        done += 1
        yield outcome_of(json.loads(line))
    if process.wait() == -signal.SIGALRM:
        yield Outcome(batch[done], "timed out", timeout)
    elif done < len(batch):
        yield Outcome(batch[done], "raised", 0, "the process ended")
    if batch[done + 1 :]:
        yield from outcomes_of(batch[done + 1 :], timeout)


def run_all(
    todo: list[Task], processes: int, timeout: int, lines: pathlib.Path | None
) -> list[Outcome]:
    """In so many processes at a time."""
    batches = [todo[k : k + CASES_OF_A_PROCESS] for k in range(0, len(todo), CASES_OF_A_PROCESS)]
    outcomes: list[Outcome] = []
    writing = threading.Lock()

    def work(batch: list[Task]) -> None:
        for outcome in outcomes_of(batch, timeout):
            with writing:
                outcomes.append(outcome)
                bar.update()
                if lines:
                    with lines.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")

    with tqdm(total=len(todo), unit="case") as bar, ThreadPoolExecutor(processes) as pool:
        list(pool.map(work, batches))
    return outcomes


def read(lines: pathlib.Path | None) -> dict[Task, Outcome]:
    """What was measured before."""
    written = lines.read_text().splitlines() if lines and lines.exists() else []
    found = [outcome_of(json.loads(line)) for line in written]
    return {outcome.task: outcome for outcome in found}


def outcome_of(fields: dict[str, Any]) -> Outcome:
    task = Task(**fields["task"])
    return Outcome(**{**fields, "task": task, "warned": tuple(fields["warned"])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=180, help="seconds for one case")
    parser.add_argument("--kinds", nargs="+", default=["planted", "right", "delicate"])
    parser.add_argument(
        "--only", nargs="+", default=[], help="models, mistakes or delicate programs"
    )
    parser.add_argument("--dtypes", nargs="+", default=[], choices=DTYPES)
    parser.add_argument("--pages", type=pathlib.Path, help="a folder with the pages to update")
    parser.add_argument(
        "--lines", type=pathlib.Path, help="a file of JSON lines, one for each case"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.timeout)
        return
    dtypes = given.dtypes or DTYPES
    wanted = [task for task in tasks(given.kinds, given.only) if task.dtype in dtypes]
    known = read(given.lines)
    todo = [task for task in wanted if task not in known]
    done = run_all(todo, given.processes, given.timeout, given.lines)
    known |= {outcome.task: outcome for outcome in done}
    outcomes = [known[task] for task in wanted]
    from .table import put, tables

    text = tables(outcomes)
    print(text)
    if given.pages:
        put(given.pages, text)


if __name__ == "__main__":
    main()
