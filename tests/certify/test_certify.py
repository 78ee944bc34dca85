"""The table of what is right when sharded: how a row is read, a cell judged, and what the table says."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from statemesh.certify import _columns, _programs, _rows, _run, _table
from statemesh.certify._run import Judged, run
from statemesh.certify._untyped import untyped


ROOT = pathlib.Path(__file__).parents[2]
TABLES = ROOT / "docs" / "pages" / "certify"


@pytest.fixture(autouse=True)
def _double_precision() -> Any:
    with jax.enable_x64(True):
        _rows.drawn.cache_clear()
        yield
    _rows.drawn.cache_clear()


def test_a_line_is_a_call_of_operands() -> None:
    row = _rows.row("jax.lax.custom_root", "f(lambda x: x - a[0], b[0], 3 * a, [a, whole(b)])")
    assert row.operands == ("a[0]", "b[0]", "3 * a", "a", "whole(b)")
    assert row.call == "f(lambda x: x - x0, x1, x2, [x3, x4])"
    first, second = row.drawn(0), row.drawn(1)
    a, b = _rows.MATRICES[0]
    np.testing.assert_array_equal(first[2], 3 * a)
    np.testing.assert_array_equal(first[4], (b * 100).astype(int) % 7)
    assert not any(np.array_equal(x, y) for x, y in zip(first, second, strict=True))


def test_every_public_function_is_a_row_or_named() -> None:
    """Each line is of a function that there is. A function that makes no arrays is no row."""
    functions = _rows.functions()
    assert len(functions) > 800
    missing = {*_rows.LINES, *_rows.COLLECTIVES} - {*functions}
    # Names that one of the supported versions lacks.
    assert missing <= {"jax.lax.scaled_dot", "jax.lax.empty", "jax.lax.index_take"}
    rows, untried = _rows.rows(["jax.numpy.sort", "jax.numpy.fromfile", "jax.numpy.shape"])
    assert [*rows] == ["jax.numpy.sort"]
    assert untried == ["jax.numpy.fromfile"]


def test_gradients_count_where_an_entry_stands() -> None:
    """A permutation has another weighted sum, and complex numbers have both their parts in it."""
    x = jnp.arange(1.0, 4.0)
    assert _columns.weighted([x]) != _columns.weighted([x[::-1]])
    with_parts = _columns.weighted([x + 2j * x])
    np.testing.assert_allclose(with_parts, 3 * _columns.weighted([x]))


def test_the_compiler_takes_its_options() -> None:
    """Otherwise every cell would have an error on one device too, and nothing would be compared."""
    assert jax.jit(lambda: jnp.ones(()), compiler_options=_run._FAST)() == 1
    rows, _ = _rows.rows(["jax.numpy.negative"])
    found, _ = run(rows, ["unchecked"])
    assert {cell.outcome for cell in found["jax.numpy.negative"]} == {"right"}


def test_what_rounding_left_is_not_off() -> None:
    """A residual is about the square of the roundoff. What is larger is held to its own size."""
    eps = 2.0**-52
    assert not _run._off(np.array([1e-30, 0.0]), np.array([4e-31, 1e-31]), np.zeros(2), eps)
    assert _run._off(np.array([1e-20]), np.array([2e-20]), np.zeros(1), eps)
    assert _run._off(np.array([1.0, 1 + 1e-9]), np.ones(2), np.zeros(2), eps)
    assert not _run._off(np.array([1 + 1e-9]), np.ones(1), np.array([1e-6]), eps)
    # Of the narrowest floats the square is no small number.
    assert _run._off(np.array([10.0]), np.array([12.5]), np.zeros(1), 0.125)


def test_an_error_is_not_that_of_a_program_with_other_types() -> None:
    rows, _ = _rows.rows(["jax.lax.custom_linear_solve"])
    found, _ = run(rows, ["shard_map", "unchecked"])
    cells = found["jax.lax.custom_linear_solve"]
    assert outcomes(cells, "shard_map")["value"]["right"] < len(cells)
    assert {*outcomes(cells, "unchecked")["value"]} == {"right"}


def test_programs_that_differ_by_types_have_one_text() -> None:
    """So they are compiled once. Another operation, number, constant or dtype is another program."""
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )

    def text(fun: Any, check_vma: bool = True) -> str:
        mapped = jax.shard_map(
            fun, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=check_vma
        )
        return untyped(jax.jit(mapped).trace(jnp.ones(4)).jaxpr)

    def doubled(x: jax.Array) -> jax.Array:
        twice = jax.lax.fori_loop(
            0, 2, lambda _, y: y + x, jax.lax.pcast(jnp.zeros(2), "x", to="varying")
        )
        return twice + jax.lax.psum(x, "x")

    def alone(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 2, lambda _, y: y + x, jnp.zeros(2)) + jax.lax.psum(x, "x")

    assert text(doubled) == text(alone, check_vma=False)
    funs = [
        lambda x, k=k: x * k for k in (2, 3, np.arange(2.0), np.arange(2.0) + 1, jnp.float32(2))
    ]
    assert len({*map(text, funs), text(jnp.sin), text(jnp.cos)}) == 7


def outcomes(cells: list[Judged], mode: str) -> dict[str, Counter[str]]:
    columns = dict.fromkeys(cell.column for cell in cells)
    return {
        column: Counter(c.outcome for c in cells if (c.mode, c.column) == (mode, column))
        for column in columns
    }


def ends_with(program: str) -> str:
    """The error that ends a program. It changes JAX's settings, so it has a process of its own."""
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    errors = [line for line in run.stderr.splitlines() if line.split(":")[0].endswith("Error")]
    assert bool(errors) == bool(run.returncode), run.stderr
    return errors[-1].split(":")[0] if errors else ""


@pytest.mark.slow
def test_what_types_lose_is_wrong_in_jax_and_not_here() -> None:
    """Each wrong cell has a program whose assertion fails, and the same program is right with statemesh."""
    rows, _ = _rows.rows(["jax.lax.sort_key_val", "jax.numpy.matmul"])
    found, primitives = run(rows, ["shard_map", "unchecked", "statemesh", "Auto"])
    assert primitives >= {"sort", "dot_general", "transpose"}
    sort, product = found["jax.lax.sort_key_val"], found["jax.numpy.matmul"]
    by_jax, here = outcomes(sort, "shard_map"), outcomes(sort, "statemesh")
    for column in ("vjp", "vjp around", "type"):
        assert by_jax[column]["wrong"] == 1, column
        assert not here[column]["wrong"], column
        assert here[column]["right"] >= by_jax[column]["right"]
    for cell in sort:
        if cell.outcome == "wrong":
            row = rows["jax.lax.sort_key_val"]
            assert ends_with(_programs.program(row, cell)) == "AssertionError"
            if cell.column == "vjp":
                mended = dataclasses.replace(cell, mode="statemesh")
                assert ends_with(_programs.program(row, mended)) == ""
    for mode in ("unchecked", "statemesh", "Auto"):
        for column, outcome in outcomes(product, mode).items():
            assert {*outcome} <= {"right"}, (mode, column)


@pytest.mark.slow
def test_what_cannot_be_compared_is_not_called_wrong() -> None:
    """One function draws other numbers at each call; NaN is equal to itself."""
    rows, _ = _rows.rows(["jax.lax.rng_uniform"])
    rows["jax.numpy.log"] = _rows.row("jax.numpy.log", "f(-a[0, :2])")
    found, _ = run(rows, ["unchecked"])
    assert {cell.outcome for cell in found["jax.lax.rng_uniform"]} == {"none"}
    values = [cell.outcome for cell in found["jax.numpy.log"] if cell.column == "value"]
    assert {*values} == {"right"}


def test_a_table_says_the_worst_of_a_cell() -> None:
    cells = [
        Judged("shard_map", "value", "a", "right"),
        Judged("shard_map", "value", "b", "raw", "TypeError: no"),
        wrong := Judged("Auto", "vjp", "a on axis 0", "wrong", "1 for 2 at [0]"),
    ]
    row = _table.table_row("f(a, b)", cells, {wrong: "programs/f.py"})
    signs = dict(zip(_table.PLACES, row["signs"], strict=True))
    assert signs.pop(("shard_map", "value")) == "e"
    assert signs.pop(("Auto", "vjp")) == "W"
    assert {*signs.values()} == {"-"}
    assert row["notes"] == {
        "shard_map value": ["b", "TypeError: no"],
        "Auto vjp": ["a on axis 0", "1 for 2 at [0]", "programs/f.py"],
    }
    mended = _table.table_row("f(a, b)", cells[:1], {})
    assert list(_table.differences({"f": row}, {"f": mended, "g": row})) == [
        ("f", "shard_map", "value", "raw", "right"),
        ("f", "Auto", "vjp", "wrong", "none"),
    ]
    counted = _table.counts({"f": row, "g": mended}, ("shard_map", "Auto"))
    assert (counted["right"], counted["raw"], counted["wrong"]) == (1, 1, 1)
    page = _table.page([{"jax": "0", "rows": {"f": row}}])
    assert '"Auto vjp":["a on axis 0"' in page


def test_the_public_tables() -> None:
    """With statemesh nothing is wrong in silence, and each wrong cell has a program that shows it."""
    files = sorted(TABLES.glob("jax-*.json"))
    assert files
    for file in files:
        table = json.loads(file.read_text())
        assert _table.counts(table["rows"], ("shard_map",))["wrong"] >= 10
        assert _table.counts(table["rows"], ("statemesh",))["wrong"] == 0
        assert _table.counts(table["rows"])["unconfirmed"] == 0
        for row in table["rows"].values():
            for (mode, column), sign in zip(_table.PLACES, row["signs"], strict=True):
                if sign == "W":
                    assert (TABLES / row["notes"][f"{mode} {column}"][2]).exists()


@pytest.mark.slow
def test_a_part_of_the_table_is_as_it_was(tmp_path: pathlib.Path) -> None:
    """Run as the command runs it. An outcome that changes is to be looked at, and the table made anew."""
    command = [sys.executable, "-m", "statemesh.certify", "--out", str(tmp_path), "--every", "40"]
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    (file,) = tmp_path.glob("jax-*.json")
    made = json.loads(file.read_text())
    rows = made["rows"]
    assert len(rows) > 20
    assert _table.counts(rows, ("statemesh",))["wrong"] == _table.counts(rows)["unconfirmed"] == 0
    known = json.loads((TABLES / file.name).read_text())["rows"]
    assert list(_table.differences(known, rows)) == []
