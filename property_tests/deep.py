"""Thousands of random programs that are right: `assert_equivalent` should accuse none of them; run by hand.

python -m property_tests.deep --programs 10000 --seconds 1500
"""

import argparse
import dataclasses
import itertools
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import tests.compiling  # noqa: F401
from statemesh.testing import RangeWarning, UntestedWarning, assert_equivalent, set_devices


set_devices(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tqdm import tqdm  # noqa: E402

from .base.arrays import Values  # noqa: E402
from .base.models import mesh_of, model_of  # noqa: E402
from .plain.cases import cases, values  # noqa: E402
from .plain.mapped import in_specs, out_specs, run_body  # noqa: E402
from .programs import Case, MeshShape  # noqa: E402
from .trees import Setting  # noqa: E402


# So many programs are compiled as one.
BATCH = 25
SIZES = ((4,), (2, 2), (8,), (2,), (4, 2))
# What is drawn in turn: the dtype of floats, and whether gradients are compared.
KINDS = (
    *(("float32", False), ("bfloat16", False), ("float32", True)),
    *(("float32", False), ("float16", False), ("bfloat16", True)),
)
Program: TypeAlias = tuple[Case, Values]
# Settings of tests that are run for what they draw.
ONLY_DRAWN: Any = {
    "database": None,
    "deadline": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@dataclasses.dataclass
class Tally:
    """How many checks accused nothing, and each program that was accused, with the report."""

    checks: int = 0
    alarms: list[str] = dataclasses.field(default_factory=list)


def drawn(number: int, *, smooth: bool, count: int = BATCH) -> list[Program]:
    """The programs of a batch, all of one mesh, each with values."""
    mesh = MeshShape(SIZES[number % len(SIZES)], explicit=number % 2 == 0)
    batch: list[Program] = []

    @seed(number)
    @settings(max_examples=count, **ONLY_DRAWN)
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        case = data.draw(cases(portable=True, smooth=smooth, mesh=mesh))
        # A tag is of one program; here states are placed by their own specs.
        slots = tuple(dataclasses.replace(slot, declared=False) for slot in case.slots)
        case = dataclasses.replace(case, slots=slots)
        batch.append((case, data.draw(values(case=case, calls=1))))

    collect()
    return batch


def in_dtype(tree: Any, dtype: str) -> Any:
    """The same tree, whose floats are of this dtype."""

    def leaf(x: Any) -> Any:
        return jnp.asarray(x, dtype) if getattr(x, "dtype", None) == np.float32 else x

    return jax.tree.map(leaf, tree)


def check_together(batch: Sequence[Program], dtype: str, *, gradients: bool) -> None:
    """Check these programs side by side in one function, which compiles as much as a check of one."""
    programs = [case for case, _ in batch]

    def together(models: Any, settings: Any, inputs: Any) -> Any:
        results = [
            run_body(case, model, setting, *own, dtype=dtype)
            for case, model, setting, own in zip(programs, models, settings, inputs, strict=True)
        ]
        return [outputs for outputs, _ in results], [model for _, model in results]

    models = [model_of(case, run.slots, run.seed) for case, run in batch]
    gains, inputs = zip(*[run.calls[0] for _, run in batch], strict=True)
    outputs, leaving = zip(*map(out_specs, programs), strict=True)
    with warnings.catch_warnings():
        # Some of what a random program returns cannot be judged, and some overflows in float16.
        for category in (UntestedWarning, RangeWarning):
            warnings.simplefilter("ignore", category)
        assert_equivalent(
            together,
            (in_dtype(models, dtype), list(map(Setting, gains)), in_dtype(list(inputs), dtype)),
            meshes=[mesh_of(programs[0].mesh)],
            in_specs=(None, None, [list(in_specs(case)[2:]) for case in programs]),
            out_specs=(list(outputs), list(leaving)),
            fed_back={"args[0]": "[1]"},
            gradients=gradients,
            steps=2,
        )


def check(batch: Sequence[Program], dtype: str, tally: Tally, *, gradients: bool) -> None:
    """Check programs side by side. Where they are accused, each half is checked by itself."""
    before = len(tally.alarms)
    try:
        check_together(batch, dtype, gradients=gradients)
        tally.checks += 1
        return
    except Exception as error:
        report = f"{dtype}, gradients={gradients}\n{type(error).__name__}: {error}"
    half = len(batch) // 2
    for part in (batch[:half], batch[half:]) if half else ():
        check(part, dtype, tally, gradients=gradients)
    if len(tally.alarms) == before:
        several = "\n".join(f"{case}\n{run}" for case, run in batch)
        tally.alarms.append(f"{report}\n\n{several}")
        print("\n" + tally.alarms[-1], file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first batch")
    options = parser.parse_args()
    tally, start, programs = Tally(), time.monotonic(), 0
    with tqdm(total=options.programs, unit=" programs") as bar:
        for number in itertools.count(options.first):
            dtype, smooth = KINDS[number % len(KINDS)]
            check(drawn(number, smooth=smooth), dtype, tally, gradients=smooth)
            # Each compiled program takes memory maps, of which a process may have some 65,000.
            jax.clear_caches()
            programs += BATCH
            bar.set_postfix(alarms=len(tally.alarms), batch=number)
            bar.update(BATCH)
            if programs >= options.programs or time.monotonic() - start > options.seconds:
                break
    print(f"{programs} programs, {len(tally.alarms)} alarms")
    sys.exit(bool(tally.alarms))


if __name__ == "__main__":
    main()
