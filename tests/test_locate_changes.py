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


def looked_up_in_its_own_part(table: Any, at: Any) -> Any:
    found = (at >= 0) & (at < len(table))  # not less the first row
    rows = table[jnp.clip(at, 0, len(table) - 1)]
    return jax.lax.psum(jnp.where(found[:, None], rows, 0), "data")


def counted_before(x: Any) -> Any:
    counts = jax.lax.all_gather((x > 0).sum(), "data")
    before = jnp.where(jnp.arange(len(counts)) < 0, counts, 0).sum()  # before the first shard
    return before + jnp.cumsum((x > 0).sum(1))


def doubled_later(x: Any) -> Any:
    """The sum of all rows, from parts that go round."""
    n, total = jax.lax.axis_size("data"), 0 * x.sum(0)
    for k in range(n):
        if k:
            total = 2 * total  # doubled
        total = total + x.sum(0)
        x = jax.lax.ppermute(x, "data", [(i, (i + 1) % n) for i in range(n)])
    return total


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


AT = np.array([0, 5, 7, 2, 3], np.int32)
OTHERS: dict[str, tuple[Any, Any, Any, Any]] = {
    "not less the first row": (looked_up_in_its_own_part, (ROWS, P()), P(), (X, AT)),
    "before the first shard": (counted_before, ROWS, ROWS, (X,)),
    "doubled": (doubled_later, ROWS, P(), (X,)),
}


@pytest.mark.parametrize("text", OTHERS)
def test_more_changes_that_put_all_right(text: str) -> None:
    """Of an argument, of a constant, and of an operation that the program on one device has not."""
    fun, in_specs, out_specs, args = OTHERS[text]
    mesh = AbstractMesh((4,), ("data",))
    found = locate(sm.shard_map(fun, mesh, in_specs, out_specs, check_vma=False), *args)
    assert found is not None
    assert found.places[0].line == line_with(text)


def summed(x: Any) -> Any:
    part = x.sum(0)  # summed
    double = 2 * part  # used
    return double + 1


def test_a_cause_names_all_lines_at_which_it_can_stand() -> None:
    mesh = AbstractMesh((4,), ("data",))
    found = locate(sm.shard_map(summed, mesh, ROWS, P(), check_vma=False), X)
    assert found is not None
    lines = f"{line_with('summed')} or {line_with('used')} or {line_with('used') + 1}"
    change = "with jax.lax.psum(..., 'data')"
    assert found.cause == f"{change} at {HERE.name}:{lines}, all results are right"


def part_of(x: Any) -> Any:
    return x.sum(0)  # handed on


def test_no_cause_where_the_value_goes_to_another_function() -> None:
    """The reduction may be missing on any line that hands it on."""
    mesh = AbstractMesh((4,), ("data",))
    mapped = sm.shard_map(lambda x: 3 + part_of(x), mesh, ROWS, P(), check_vma=False)
    found = locate(mapped, X)
    assert found is not None
    assert found.places[0].line == line_with("handed on")
    assert found.cause is None


def whole(x: Any) -> Any:
    return jnp.cumsum(x, 0)


@pytest.mark.parametrize(
    ("in_specs", "out_specs", "first", "second"),
    [
        (P(), ROWS, "out_specs of whole(...): P('data')", "in_specs of args[0]: P()"),
        (ROWS, P(), "out_specs of whole(...): P()", "in_specs of args[0]: P('data')"),
    ],
)
def test_specs_that_make_results_longer_or_shorter(
    in_specs: Any, out_specs: Any, first: str, second: str
) -> None:
    mesh = AbstractMesh((4,), ("data",))
    found = locate(sm.shard_map(whole, mesh, in_specs, out_specs, check_vma=False), X)
    assert found is not None
    assert [place.source for place in found.places] == [first, second]
    assert found.places[0].operation == "the length of axis 0 of the result"
    assert (found.places[0].got, found.places[0].want) in (("32", "8"), ("2", "8"))


def test_an_argument_that_should_be_split_comes_first() -> None:
    mesh = AbstractMesh((4,), ("data",))
    numbered: Any = lambda x: x + jax.lax.axis_index("data")
    found = locate(sm.shard_map(numbered, mesh, P(), ROWS, check_vma=False), X)
    assert found is not None
    assert [place.source[:14] for place in found.places] == ["in_specs of ar", "out_specs of <"]


def test_a_line_is_put_right_with_its_derivative() -> None:
    def loss(w: Any, x: Any) -> Any:
        return ((x @ w) ** 2).sum() / len(x)  # by its own rows

    def step(w: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        value = jax.lax.psum(value, "data")
        grads = jax.lax.psum(grads, "data")
        return value, w - grads

    mesh = AbstractMesh((4,), ("data",))
    mapped = sm.shard_map(step, mesh, (P(), ROWS), P(), check_vma=False)
    found = locate(mapped, X[0], X)
    assert found is not None
    assert found.places[0].line == line_with("by its own rows")
