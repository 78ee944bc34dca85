"""Thousands of random programs, in batches that are compiled as one; run by hand.

python -m property_tests.deep_programs --programs 10000 --seconds 1500
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from statemesh.testing import set_devices


set_devices(8)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

from .random_programs import Program, programs  # noqa: E402
from .random_programs.runs import Difference, check_all  # noqa: E402


BATCH = 40
SIZES = ((8,), (4, 2), (2, 2, 2), (2,), (2, 4), (4,), (1, 8), (2, 2))
# What is drawn in turn: `portable`, `smooth`.
KINDS = (*((True, False), (False, False)) * 3, (True, True), (True, False), (False, False))


@dataclasses.dataclass
class Tally:
    """What has been done.

    **Attributes:**

    - `programs`: how many different ones were run.
    - `codes`: a mark of each different code: that is one signature, and one compile of its own.
    - `compiles`: what XLA was asked to compile, for the references too.
    """

    programs: int = 0
    codes: set[str] = dataclasses.field(default_factory=set)
    compiles: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)


def strategy(number: int) -> st.SearchStrategy[Program]:
    """What a batch draws."""
    portable, smooth = KINDS[number % len(KINDS)]
    # JAX takes no gradient across a mesh of Explicit axes that is not set.
    kind = AxisType.Explicit if number % 2 and not smooth else AxisType.Auto
    sizes = SIZES[number % len(SIZES)]
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = Mesh(devices, ("x", "y", "z")[: len(sizes)], axis_types=(kind,) * len(sizes))
    return programs(mesh=mesh, portable=portable, smooth=smooth)


def examples(number: int, phases: Sequence[Phase], run: Any) -> None:
    """Call `run` with the programs of a batch."""
    quiet = settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    seed(number)(quiet(given(strategy(number))(run)))()


def check(batch: Sequence[Program], number: int) -> list[Difference]:
    """What is off in a batch; where it cannot be run as one, it is run one by one."""
    emulate = number % 4 == 0
    try:
        return check_all(batch, emulated_too=emulate)
    except Exception as error:
        if len(batch) == 1:
            return [Difference(batch[0], f"{type(error).__name__}: {error}")]
        return [found for program in batch for found in check([program], number)]


class Wrong(Exception):
    """This program is off."""


def minimal(number: int, passed: set[Program]) -> str:
    """The smallest program that fails, of those that Hypothesis makes of a batch's."""
    last: list[Difference] = []

    def run(program: Program) -> None:
        if program not in passed:
            found = check([program], number)
            if found:
                last[:] = found[:1]
                raise Wrong
            passed.add(program)

    with contextlib.suppress(Wrong):
        examples(number, [Phase.generate, Phase.shrink], run)
    return (
        f"batch {number}\n{last[0].what}\n\n{last[0].program}" if last else f"batch {number}: gone"
    )


def share(first: int, stride: int, count: int, seconds: float) -> Tally:
    """Every so many batches, until there are enough programs or there is no time left."""
    tally, start = Tally(), time.monotonic()

    def listen(event: str, duration_secs: float, **more: Any) -> None:
        del duration_secs, more
        tally.compiles += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(listen)
    seen: set[Program] = set()
    for number in itertools.count(first, stride):
        drawn: dict[Program, None] = {}
        examples(number, [Phase.generate], lambda program: drawn.setdefault(program))  # noqa: B023
        batch = [program for program in drawn if program not in seen][: count - tally.programs]
        found = check(batch, number)
        if found:
            off = {one.program for one in found}
            tally.failures.append(minimal(number, {p for p in batch if p not in off}))
            print(tally.failures[-1], file=sys.stderr, flush=True)
        seen.update(batch)
        tally.programs += len(batch)
        tally.codes |= {_mark(program) for program in batch}
        if tally.programs >= count or time.monotonic() - start > seconds:
            return tally
    raise AssertionError


def _mark(program: Program) -> str:
    return hashlib.sha1(repr(program.code).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the number of the first batch")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    each = -(-given.programs // given.processes)
    if given.share is not None:
        tally = share(given.first + given.share, given.processes, each, given.seconds)
        print(json.dumps({**dataclasses.asdict(tally), "codes": sorted(tally.codes)}))
        return
    start = time.monotonic()
    command = [sys.executable, "-m", "property_tests.deep_programs", *sys.argv[1:], "--share"]
    running = [
        subprocess.Popen([*command, str(k)], stdout=subprocess.PIPE, text=True)
        for k in range(given.processes)
    ]
    shares: list[dict[str, Any]] = [json.loads(one.communicate()[0]) for one in running]
    took = time.monotonic() - start
    count = sum(one["programs"] for one in shares)
    codes = {code for one in shares for code in one["codes"]}
    failures = [failure for one in shares for failure in one["failures"]]
    print(
        f"{count} different programs, {len(codes)} compiled signatures, "
        f"{sum(one['compiles'] for one in shares)} compiles, {took:.0f} s, "
        f"{1000 * took * given.processes / max(count, 1):.0f} ms of a process for each, "
        f"{len(failures)} failures"
    )
    for failure in failures:
        print("\n" + failure)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
