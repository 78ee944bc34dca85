"""`explain` of a program that JAX takes from its cache on disk, with the lines of the file that wrote it."""

from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .helpers import make_mesh


SOURCE = """
def step(net, x):
    mean = jax.lax.pmean(x.mean(0), "x")
    largest = jax.lax.pmax(abs(x), "x")
    return x - mean, largest
"""


def written_at(line: int) -> Any:
    """The function, in a file that has so many lines before it."""
    names: dict[str, Any] = {"jax": jax}
    exec(compile("\n" * line + SOURCE, "model.py", "exec"), names)
    return sm.shard_map(names["step"], make_mesh(), (None, P("x")), (P("x"), P()))


def test_lines_are_those_of_the_program_that_is_explained() -> None:
    x = jax.numpy.ones((8, 3))
    for line in (0, 10):
        found = written_at(line).explain(None, x).collectives
        assert [(one.line, one.compiled, one.bytes) for one in found] == [
            (f"model.py:{line + 3}", "as traced", pytest.approx(2 * 7 / 8 * 12, abs=1)),
            (f"model.py:{line + 4}", "as traced", pytest.approx(2 * 7 / 8 * 12, abs=1)),
        ]
