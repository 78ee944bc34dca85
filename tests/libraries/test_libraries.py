"""Programs of other libraries run in a checked `shard_map` as they are, as they do on one device.

Some take long to compile, and the equivalence check takes minutes for some. The tests leave those out. This
runs all of them, and holds all to the check:

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.libraries.test_libraries
"""

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import testing
from tests.helpers import make_mesh

from .programs import PROGRAMS, Program, table


ROOT = Path(__file__).parents[2]
# Of these the check takes seconds.
HELD = (
    "jax: `scan` that starts at zeros",
    "jax: `fori_loop` that rotates its carry",
    "jax: `cond` with a constant in one branch",
    "jax: `checkpoint` of a loop in a loop",
    "jax: the gradient of exact `gelu`",
    "jax: the gradients of `erf` and `ndtri`",
    "jax: `associative_scan`",
    "jax: a gradient by forward mode with a basis of its own",
)
LONG = {
    "diffrax: Kvaerno5",
    "diffrax: ImplicitEuler",
    "diffrax: an Event that ends the solve",
    "diffrax: Tsit5 with PIDController",
    "diffrax: Dopri5 with SaveAt",
    "diffrax: Tsit5 with BacksolveAdjoint",
    "diffrax: an SDE by Euler with a VirtualBrownianTree",
    "optimistix: NelderMead",
}
QUICK = {"jax: `scan` that starts at zeros", "jax: `cond` with a constant in one branch"}
LANES = jnp.linspace(0.2, 0.9, 4)
SHARED = jnp.array([0.3, 0.7])
SPECS = (P("x"), P())


def marks(program: Program) -> list[Any]:
    broken = [] if program.outcome == "runs" else [pytest.mark.xfail(strict=True)]
    return broken + ([] if program.name in QUICK else [pytest.mark.slow])


def close(a: Any, b: Any, name: str) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=program.name, marks=marks(program))
        for program in PROGRAMS
        if program.name not in LONG
    ],
)
def test_a_library_runs_on_shards_as_on_one_device(program: Program) -> None:
    pytest.importorskip(program.library)
    compare(program)


def compare(program: Program) -> None:
    """Compare values and gradients with those of plain JAX on one device."""
    batch = jax.vmap(program.lane, in_axes=(0, None))
    mesh = make_mesh("2", (AxisType.Auto, AxisType.Explicit)[PROGRAMS.index(program) % 2])
    if not program.differentiable:
        expected = jax.jit(batch)(LANES, SHARED)
        mapped = sm.shard_map(batch, mesh, SPECS, P("x"))
        close(mapped(LANES, SHARED), expected, "value")
        return

    def loss(p: Any, w: Any) -> tuple[Any, Any]:
        results = batch(p, w)
        return (results**2).sum(), results

    # The gradient is taken inside, where JAX sums that of what all shards share; and outside.
    inside = jax.grad(loss, argnums=(0, 1), has_aux=True)
    expected, results = jax.jit(inside)(LANES, SHARED)
    mapped = sm.shard_map(inside, mesh, SPECS, (SPECS, P("x")))
    close(mapped(LANES, SHARED), (expected, results), "gradient inside")
    values = sm.shard_map(batch, mesh, SPECS, P("x"))
    outside = jax.jit(jax.grad(lambda p, w: (values(p, w) ** 2).sum(), argnums=(0, 1)))
    close(outside(LANES, SHARED), expected, "gradient outside")


def hold(program: Program) -> None:
    """Hold a program to one device by the equivalence check."""
    checked = testing.assert_equivalent(
        jax.vmap(program.lane, in_axes=(0, None)),
        (LANES, SHARED),
        meshes=[{"x": 2}],
        in_specs=SPECS,
        out_specs=P("x"),
        gradients=program.differentiable,
    )
    # Other values may make no sense to a solver. With those of the caller all is compared.
    assert "on mesh x=2" in checked.agreed
    assert "lane(...)" not in checked.unjudged


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::statemesh.testing.UntestedWarning")
@pytest.mark.parametrize("name", HELD)
def test_a_program_is_held_to_one_device(name: str) -> None:
    (program,) = [program for program in PROGRAMS if program.name == name]
    pytest.importorskip(program.library)
    hold(program)


def test_the_page_lists_all_programs_with_their_outcome() -> None:
    assert table() in (ROOT / "docs/pages/any-library.md").read_text()
    assert {program.name for program in PROGRAMS} >= LONG
    runs = [program.outcome == "runs" for program in PROGRAMS]
    assert len(runs) >= 40
    assert sum(runs) >= 0.9 * len(runs)


def main() -> None:
    """Hold each program that runs to one device, and say what comes of it."""
    warnings.simplefilter("ignore", testing.UntestedWarning)
    failed = 0
    for program in PROGRAMS:
        if program.outcome == "runs":
            started = time.monotonic()
            try:
                compare(program)
                hold(program)
                outcome = "held"
            except Exception as error:
                failed += 1
                outcome = f"FAILED: {error}"
            print(f"{time.monotonic() - started:5.0f} s {program.name}: {outcome}", flush=True)
            jax.clear_caches()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
