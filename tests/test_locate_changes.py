"""`locate` tries simple changes of a line: another shard to send to, an index that leaves out the shard."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing._locate._locate import locate


HERE = pathlib.Path(__file__)
ROWS = P("data")
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def line_with(text: str) -> int:
    lines = HERE.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"  # {text}"))


def ring(x: Any, towards: int) -> Any:
    """For each row the sum of all rows before it, from parts that go round."""
    n, me = jax.lax.axis_size("data"), jax.lax.axis_index("data")
    total, moved = jnp.cumsum(x, 0) - x, x
    for passed in range(1, n):
        onward = [(i, (i + towards) % n) for i in range(n)]
        moved = jax.lax.ppermute(moved, "data", onward)  # passed on
        total = total + jnp.where(passed <= me, moved.sum(0), 0)
    return total


def from_the_wrong_side(x: Any) -> Any:
    return ring(x, -1)


def counted_in_its_own_part(x: Any) -> Any:
    place = jnp.arange(len(x))  # counted
    return jnp.sin(place)[:, None] * x


def without_the_first_row(x: Any) -> Any:
    edge = jax.lax.axis_index("data") == jax.lax.axis_size("data") - 1  # of the last shard
    return jnp.where((jnp.arange(len(x)) == 0) & edge, 0, x.T).T


def by_the_other_axis(x: Any) -> Any:
    place = jax.lax.axis_index("model") * len(x)  # of the other axis
    return x * jnp.cos(place + jnp.arange(len(x)))[:, None]


CASES = {
    "passed on": (from_the_wrong_side, "with a move to the next shard along 'data'"),
    "counted": (counted_in_its_own_part, "with 2 * jax.lax.axis_index('data') added"),
    "of the other axis": (by_the_other_axis, "with jax.lax.axis_index('data')"),
}


@pytest.mark.parametrize("text", CASES)
def test_a_change_that_puts_all_right(text: str) -> None:
    fun, change = CASES[text]
    mesh = AbstractMesh((4, 3), ("data", "model"))
    found = locate(sm.shard_map(fun, mesh, ROWS, ROWS, check_vma=False), X)
    assert found is not None
    line = line_with(text)
    assert found.places[0].line == line
    assert found.cause == f"{change} at {HERE.name}:{line}, all results are right"


def test_a_change_of_a_condition_is_no_cause() -> None:
    """Several changes of a condition may do the same."""
    mesh = AbstractMesh((4,), ("data",))
    found = locate(sm.shard_map(without_the_first_row, mesh, ROWS, ROWS), X)
    assert found is not None
    assert found.places[0].line == line_with("of the last shard")
    assert found.cause is None
