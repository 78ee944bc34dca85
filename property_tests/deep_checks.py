"""Thousands of random programs that are right: `assert_equivalent` should accuse none of them; run by hand.

python -m property_tests.deep_checks --programs 10000 --seconds 1500
"""

import argparse
import collections
import dataclasses
import itertools
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any


# Programs here run a few times each, so that compiling them takes longer than running them.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

from statemesh.testing import set_devices


set_devices(8)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402
from tqdm import tqdm  # noqa: E402

from statemesh.testing import UntestedWarning, assert_equivalent  # noqa: E402

from .random_programs import Program, programs  # noqa: E402
from .random_programs.narrow import args_in, step_in  # noqa: E402
from .random_programs.source import Leaf, Numbers  # noqa: E402
from .random_programs.values import INT, KEPT  # noqa: E402


# So many different codes are compiled as one, and checked with so many values for each.
BATCH, VALUES = 25, 6
SIZES = ((4,), (2, 2), (8,), (2,), (4, 2))
# What is drawn in turn: the dtype of floats, and whether gradients are compared.
KINDS = (
    *(("float32", False), ("bfloat16", False), ("float32", True)),
    *(("float32", False), ("float16", False), ("bfloat16", True)),
)


@dataclasses.dataclass
class Tally:
    """What has been done.

    **Attributes:**

    - `programs`, `codes`: how many different programs were checked, and of how many different codes.
    - `alarms`: for each program that was accused, its source and the report.
    - `untested`: how often each thing was not tested, in words.
    - `numbers`, `unjudged`: how many checks there were, and how many left numbers unjudged.
    """

    programs: int = 0
    codes: set[Any] = dataclasses.field(default_factory=set)
    alarms: list[str] = dataclasses.field(default_factory=list)
    untested: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unjudged: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    checks: int = 0


class SideBySide:
    """Programs of one mesh as one function, so that a check of all compiles as much as a check of one."""

    def __init__(self, batch: Sequence[Program], dtype: str) -> None:
        self.batch, self.dtype = batch, dtype
        steps = [step_in(program, dtype) for program in batch]
        counts = [len(program.code.arguments) for program in batch]
        # The number of the first argument of each program, and of the one after the last.
        self.starts = [0, *itertools.accumulate(counts)]

        def together(*args: Any) -> tuple[Any, ...]:
            pairs = zip(steps, itertools.pairwise(self.starts), strict=True)
            return tuple(step(*args[start:stop]) for step, (start, stop) in pairs)

        self.fun: Callable[..., Any] = together

    def check(self, batch: Sequence[Program], tally: Tally, **more: Any) -> None:
        """Check these programs, which have the codes of the batch."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UntestedWarning)
            checked = assert_equivalent(
                self.fun,
                tuple(x for program in batch for x in args_in(program, self.dtype)),
                meshes=[batch[0].mesh],
                in_specs=tuple(spec for program in batch for spec in program.in_specs),
                out_specs=tuple(program.out_specs for program in batch),
                fed_back={
                    f"args[{start}]": f"[{k}][1]"
                    for k, start in enumerate(self.starts[:-1])
                    if jax.tree.leaves(batch[k].args[0])
                },
                steps=2,
                **more,
            )
        tally.checks += 1
        for one in caught:
            if issubclass(one.category, UntestedWarning):
                text = str(one.message)
                tally.untested[text.partition(": ")[2] or text] += 1
        tally.unjudged.update(dict.fromkeys((self._number(p) for p in checked.unjudged), 1))

    def _number(self, path: str) -> str:
        return "a gradient" if path.startswith("the gradient") else "a result"

    def accused(self, report: str) -> set[int]:
        """The numbers of the programs that a report names."""
        found = {int(k) for k in re.findall(r"together\(\.\.\.\)\[(\d+)\]", report)}
        for k in re.findall(r"args\[(\d+)\]", report):
            found.add(int(np.searchsorted(self.starts, int(k), side="right")) - 1)
        return found


def strategy(number: int, *, smooth: bool) -> st.SearchStrategy[Program]:
    """What a batch draws."""
    sizes = SIZES[number % len(SIZES)]
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    kinds = ((AxisType.Explicit, AxisType.Auto)[number % 2],) * len(sizes)
    mesh = Mesh(devices, ("x", "y", "z")[: len(sizes)], axis_types=kinds)
    return programs(mesh=mesh, smooth=smooth)


def drawn(number: int, *, smooth: bool, count: int = BATCH) -> list[Program]:
    """The programs of a batch."""
    found: dict[Program, None] = {}
    quiet = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run = given(strategy(number, smooth=smooth))(lambda program: found.setdefault(program))
    seed(number)(quiet(run))()
    return list(found)


def with_other_values(program: Program, random: np.random.Generator) -> Program:
    """The same code with other values."""

    def numbers(leaf: Leaf) -> Numbers:
        if leaf.dtype == "key":
            return (int(random.integers(2**31)),)
        most = int(KEPT[leaf.dtype])
        count = int(random.integers(1, 8)) if leaf.shape else 1
        if leaf.dtype == INT:
            return tuple(map(int, random.integers(-most, most + 1, count)))
        return tuple(float(k) / 100 for k in random.integers(-100 * most, 100 * most + 1, count))

    return dataclasses.replace(program, values=tuple(map(numbers, program.code.leaves)))


def check(batch: Sequence[Program], dtype: str, tally: Tally, *, gradients: bool) -> None:
    """Check programs side by side. Those that are accused are checked again, each by itself."""
    by_code: dict[Any, list[Program]] = {}
    for program in batch:
        by_code.setdefault(program.code, []).append(program)
    groups = list(by_code.values())
    while groups:
        whole = SideBySide([group[0] for group in groups], dtype)
        try:
            for k in range(max(map(len, groups))):
                # Where there are no more values, the last ones stand in.
                some = [group[min(k, len(group) - 1)] for group in groups]
                whole.check(some, tally, gradients=gradients)
            return
        except Exception as error:
            report = f"{type(error).__name__}: {error}\n{getattr(error, '__notes__', '')}"
            if len(groups) == 1:
                tally.alarms.append(f"{dtype}, gradients={gradients}\n{report}\n\n{some[0]}")
                print("\n" + tally.alarms[-1], file=sys.stderr, flush=True)
                return
            off = whole.accused(report) if isinstance(error, AssertionError) else set()
            for number in off:
                before = len(tally.alarms)
                check(groups[number], dtype, tally, gradients=gradients)
                if len(tally.alarms) == before:
                    text = f"{dtype}, gradients={gradients}, only side by side\n{report}"
                    tally.alarms.append(f"{text}\n\n{groups[number][0]}")
                    print("\n" + tally.alarms[-1], file=sys.stderr, flush=True)
            if not off:
                half = len(groups) // 2
                for part in (groups[:half], groups[half:]):
                    flat = [program for group in part for program in group]
                    check(flat, dtype, tally, gradients=gradients)
                return
            groups = [group for k, group in enumerate(groups) if k not in off]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first batch")
    given = parser.parse_args()
    tally, seen, start = Tally(), set[Program](), time.monotonic()
    with tqdm(total=given.programs, unit=" programs") as bar:
        for number in itertools.count(given.first):
            dtype, smooth = KINDS[number % len(KINDS)]
            random = np.random.default_rng(number)
            some = drawn(number, smooth=smooth)
            more = [with_other_values(one, random) for one in some for _ in range(VALUES - 1)]
            batch = [one for one in dict.fromkeys([*some, *more]) if one not in seen]
            check(batch, dtype, tally, gradients=smooth)
            seen.update(batch)
            tally.programs += len(batch)
            tally.codes |= {(program.code, dtype) for program in batch}
            bar.set_postfix(alarms=len(tally.alarms), codes=len(tally.codes), batch=number)
            bar.update(len(batch))
            if tally.programs >= given.programs or time.monotonic() - start > given.seconds:
                break
    print(
        f"{tally.programs} different programs, {len(tally.codes)} different codes, {tally.checks} "
        f"checks, {time.monotonic() - start:.0f} s, {len(tally.alarms)} alarms"
    )
    for text, count in tally.untested.most_common():
        print(f"{count} times not tested: {text}")
    for text, count in tally.unjudged.most_common():
        print(f"{count} checks left numbers of {text} unjudged")
    sys.exit(bool(tally.alarms))


if __name__ == "__main__":
    main()
