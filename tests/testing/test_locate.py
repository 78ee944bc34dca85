"""`locate`: the line at which a call on a mesh stops computing what it computes on one device."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing._locate._locate import locate, located, located_in_gradient
from tests.helpers import make_mesh
from tests.locate_programs import PROGRAMS, cases, generic, lines_of, tensor_parallel


HERE = pathlib.Path(__file__)
MESH = AbstractMesh((4,), ("data",))
ROWS = P("data")
X = generic(8, 3)


def line_with(text: str) -> int:
    """The number of the line of this file that ends with a comment."""
    lines = HERE.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"  # {text}"))


def on_mesh(fun: Any, in_specs: Any = ROWS, out_specs: Any = ROWS) -> Any:
    return sm.shard_map(fun, MESH, in_specs, out_specs)


def centred(x: Any) -> Any:
    mean = x.mean(0)  # the local mean
    shifted = x - mean  # uses the local mean
    return jnp.tanh(shifted)


def test_the_report() -> None:
    found = locate(on_mesh(centred), X)
    first, second = line_with("the local mean"), line_with("uses the local mean")
    assert str(found) == (
        "Values stop being those of one device here:\n"
        f"  {HERE}:{first}: mean = x.mean(0)  # the local mean\n"
        "    a quotient: 0.571744 on data=2, -0.833585 on data=3 at [0], and should be -0.284674\n"
        "    In other words: the mean over 'data' of what shards have is the value on one device.\n"
        f"    Tried: with jax.lax.pmean(..., 'data') at test_locate.py:{first} or {second}, "
        "all results are right.\n"
        "or, less likely, here:\n"
        f"  {HERE}:{second}: shifted = x - mean  # uses the local mean"
    )


def test_the_fields() -> None:
    found = locate(on_mesh(centred), X)
    assert found is not None
    assert found.matched
    assert not found.gradient
    place, other = found.places
    assert (place.file, place.line) == (str(HERE), line_with("the local mean"))
    assert place.source == "mean = x.mean(0)  # the local mean"
    assert (place.operation, place.step) == ("a quotient", None)
    assert place.note == "the mean over 'data' of what shards have is the value on one device"
    assert (other.line, other.operation) == (line_with("uses the local mean"), "a difference")


def test_where_nothing_is_wrong() -> None:
    assert locate(on_mesh(lambda x: x - jax.lax.pmean(x.mean(0), "data")), X) is None


def test_on_devices_and_arguments_that_lie_there() -> None:
    mesh = make_mesh()
    mapped = sm.shard_map(centred, mesh, P("x"), P("x"))
    found = locate(mapped, *mapped.place(X))
    assert found is not None
    assert found.places[0].line == line_with("the local mean")


def test_a_round_of_a_loop() -> None:
    def layer(x: Any, k: Any) -> Any:
        top = jax.lax.cond(k == 2, lambda x: x.max(0), lambda x: 0 * x[0], x)  # in a branch
        return jnp.tanh(x) + top, None

    found = locate(on_mesh(lambda x: jax.lax.scan(layer, x, jnp.arange(4))[0]), X)
    assert found is not None
    assert found.places[0].step == 2
    assert found.places[0].line in (line_with("in a branch"), line_with("in a branch") + 1)


def test_calls_inside_of_libraries_and_of_the_user() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return jax.nn.softmax(x, 0)  # in a call

    @jax.checkpoint
    def outer(x: Any) -> Any:
        return inner(x) * 2

    found = locate(on_mesh(lambda x: outer(x) + inner(2 * x)), X)
    assert found is not None
    assert found.places[0].line == line_with("in a call")


def test_only_the_gradient_is_off() -> None:
    @jax.custom_jvp
    def same(x: Any) -> Any:
        return 2 * x

    same.defjvp(lambda x, t: (same(*x), 2 * t[0] - t[0].mean(0)))  # a rule

    def fun(x: Any) -> Any:
        return jnp.sin(same(x))  # uses a rule

    found = locate(on_mesh(fun), X)
    assert found is not None
    assert found.gradient
    assert str(found).startswith("The derivatives stop being those of one device here:\n")
    assert found.places[0].line in (line_with("a rule"), line_with("uses a rule"))
    assert located_in_gradient(on_mesh(fun), on_mesh(fun).unsharded, (X,)) == found


def test_another_reference() -> None:
    mapped = on_mesh(centred)
    found = located(mapped, on_mesh(lambda x: centred(x)).unsharded, (X,))
    assert found is not None
    assert found.places[0].line == line_with("the local mean")


def test_overflow_is_found_in_the_dtypes_of_the_program() -> None:
    def fun(x: Any) -> Any:
        return jax.lax.psum(x * 1e4, "data") / jax.lax.axis_size("data")  # overflows

    found = locate(on_mesh(fun, P(), P()), np.full(3, 5, np.float16))
    assert found is not None
    assert found.rounding
    assert found.places[0].line == line_with("overflows")
    assert "inf on data=0" in found.places[0].got
    assert "In double precision all agrees: numbers overflow or are rounded." in str(found)


def test_a_reference_written_in_other_lines() -> None:
    def whole(x: Any) -> Any:
        middle = x.mean(0)
        return jnp.tanh(x - middle)

    found = located(on_mesh(centred), whole, (X,))
    assert found is not None
    assert found.places[0].line == line_with("the local mean")


def test_a_result_of_another_dtype() -> None:
    def fun(x: Any) -> Any:
        return 8.0 if jax.lax.axis_size("data") == 1 else 8

    found = locate(on_mesh(fun, ROWS, P()), X)
    assert found is not None
    assert str(found.places[0]) == (
        "fun(...)\n    this result, made by no line of yours: int32[], and should be float32[]"
    )


def test_steps_of_one_program_only() -> None:
    def fun(x: Any) -> Any:
        for k in range(jax.lax.axis_size("data")):
            x = x + k
        return x * 2  # not matched

    found = locate(on_mesh(fun), X)
    assert found is not None
    assert not found.matched
    assert "some values could not be compared" in str(found)


def test_the_index_of_a_shard_explains_what_is_made_of_it() -> None:
    table = generic(8, 3)

    def look_up(table: Any, at: Any) -> Any:
        own = at - jax.lax.axis_index("data") * len(table)
        rows = table[jnp.clip(own, 0, len(table) - 1)]
        inside = (own >= 0) & (own < len(table))
        return jax.lax.psum(jnp.where(inside[:, None], rows, 0), "data")

    def scaled(table: Any, at: Any) -> Any:
        rows = look_up(table, at)
        return rows / len(table)  # by its own part

    specs = (P("data"), P())
    at = np.array([0, 3, 7, 5], np.int32)
    assert locate(on_mesh(look_up, specs, P()), table, at) is None
    found = locate(on_mesh(scaled, specs, P()), table, at)
    assert found is not None
    assert found.places[0].line == line_with("by its own part")


def test_keys_that_depend_on_the_shard() -> None:
    def noisy(key: Any, x: Any) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))  # folded
        return x + jax.random.normal(key, x.shape)  # uses folded

    found = locate(on_mesh(noisy, (P(), P("data"))), jax.random.key(0), X)
    assert found is not None
    assert {place.line for place in found.places} & {line_with("folded"), line_with("uses folded")}


def test_a_right_program() -> None:
    case = tensor_parallel("")
    assert locate(case.mapped, *case.args) is None


@pytest.mark.slow
@pytest.mark.parametrize("program", [one for one in PROGRAMS if one is not tensor_parallel])
def test_right_programs(program: Any) -> None:
    case = program("")
    assert locate(case.mapped, *case.args) is None


QUICK = ("heads not summed", "edge only")


@pytest.mark.parametrize("bug", QUICK)
def test_planted_mistakes(bug: str) -> None:
    program = next(program for program, name in cases() if name == bug)
    case = program(bug)
    found = locate(case.mapped, *case.args)
    assert found is not None
    assert found.places[0].line in lines_of(bug)


@pytest.mark.slow
def test_planted_mistakes_of_every_program() -> None:
    first, among, missed = 0, 0, []
    half = list(cases())[::2]
    for program, bug in half:
        case = program(bug)
        found = locate(case.mapped, *case.args)
        lines = [place.line for place in found.places] if found else []
        right = [line in lines_of(bug) for line in lines]
        first, among = first + any(right[:1]), among + any(right)
        if not any(right):
            missed.append((bug, lines))
    assert len(half) >= 15
    assert among >= 0.9 * len(half), missed
    assert first >= 0.75 * len(half)
