"""`locate`: the line at which a call on a mesh stops computing what it computes on one device."""

import functools
import pathlib
import re
import runpy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import Located, Place, assert_equivalent, locate
from statemesh.testing._locate import _compare, _locate
from statemesh.testing._locate._locate import located_or_why
from statemesh.testing._locate._suspects import is_first, suspects_of
from statemesh.testing._program._stacked import MappedAxes
from tests.helpers import make_mesh, slow

from .by_numpy import compare_by_numpy


HERE = pathlib.Path(__file__)
MESH = AbstractMesh((4,), ("data",))
ROWS = P("data")
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def line_with(text: str) -> int:
    """The number of the line of this file that ends with a comment."""
    lines = HERE.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"  # {text}"))


def on_mesh(fun: Any, in_specs: Any = ROWS, out_specs: Any = ROWS, mesh: Any = MESH) -> Any:
    return sm.shard_map(fun, mesh, in_specs, out_specs, check_vma=False)


def located(fun: Any, *args: Any, **specs: Any) -> Located:
    """What is found in a call on the mesh; of the rows `X` where no arguments are given."""
    found = locate(on_mesh(fun, **specs), *(args or (X,)))
    assert found is not None
    return found


def centred(x: Any) -> Any:
    mean = x.mean(0)  # the local mean
    shifted = x - mean  # uses the local mean
    return jnp.tanh(shifted)


def test_the_report_and_its_fields() -> None:
    found = located(centred)
    first, second = line_with("the local mean"), line_with("uses the local mean")
    assert str(found) == (
        "Values stop being those of one device here:\n"
        f"  {HERE}:{first}: mean = x.mean(0)  # the local mean\n"
        "    a quotient: -1.52865 on data=2, 0.889047 on data=3 at [0], and should be -0.126249\n"
        "    In other words: the mean over 'data' of what shards have is the value on one device.\n"
        f"    Tried: with jax.lax.pmean(..., 'data') at test_locate.py:{first} or {second}, "
        "all results are right.\n"
        "or, less likely, here:\n"
        f"  {HERE}:{second}: shifted = x - mean  # uses the local mean"
    )
    assert (found.matched, found.gradient, found.rounding) == (True, False, False)
    place, other = found.places
    assert (place.file, place.line, place.step) == (str(HERE), first, None)
    assert place.source == "mean = x.mean(0)  # the local mean"
    assert (other.line, other.operation) == (second, "a difference")


def over_the_norm(x: Any) -> Any:
    return x / jnp.sqrt(1 + lax.pmean((x**2).sum(0), "data"))  # means of sums


def by_the_size(x: Any) -> Any:
    return x / jnp.sqrt(1 + lax.psum((x**2).mean(0), "data"))  # sums of means


@pytest.mark.parametrize(
    ("fun", "line", "told"),
    [
        (over_the_norm, "means of sums", "with jax.lax.psum instead of jax.lax.pmean"),
        (by_the_size, "sums of means", "with jax.lax.pmean instead of jax.lax.psum"),
    ],
    ids=["sum", "mean"],
)
def test_a_sum_instead_of_a_mean_and_the_other_way_round(fun: Any, line: str, told: str) -> None:
    at = f"at test_locate.py:{line_with(line)}"
    assert located(fun).cause == f"{told} {at}, all results are right"


def test_a_place_whose_right_values_are_not_known() -> None:
    place = Place("a.py", 7, "x = y", "`lt`", got="", want="", shards="")
    assert str(place) == "a.py:7: x = y\n    `lt`: what shards should have here is not known"


def test_where_nothing_is_wrong() -> None:
    assert locate(on_mesh(lambda x: x - lax.pmean(x.mean(0), "data")), X) is None


def test_other_floats_where_the_given_ones_agree() -> None:
    def scaled(x: Any) -> Any:
        return x / (1 + jnp.abs(x).max())  # by the own largest

    found = located(scaled, 0 * X)
    assert found.other_floats and not found.gradient
    assert found.places[0].line == line_with("by the own largest")
    told = "With the floats of these arguments the results agree: others show the mistake."
    assert told in str(found)
    assert not located(scaled).other_floats


def test_other_floats_that_a_function_was_not_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def generic(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(_locate, "generic", generic)
    assert locate(on_mesh(lambda x: x - lax.pmean(x.mean(0), "data")), X) is None


def test_integers_stay_where_floats_are_others() -> None:
    def of_own_rows(x: Any, at: Any) -> Any:
        # Each shard gets the numbers of its own rows.
        return x[at - lax.axis_index("data") * len(x)]

    mapped = on_mesh(of_own_rows, (ROWS, ROWS))
    assert locate(mapped, X, np.arange(8)) is None


def test_a_failure_of_locate_is_told_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def places(*_: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(_locate, "places", places)
    specs: Any = {"in_specs": ROWS, "out_specs": ROWS}
    with pytest.raises(KeyError, match="a bug"):
        assert_equivalent(centred, (X,), meshes=[{"data": 4}], **specs)
    # What our tests raise, users read.
    monkeypatch.setattr(_locate, "RAISE_FAILURES", False)
    told = "  No line is named, because locate failed: KeyError: 'a bug'\n  - centred"
    with pytest.raises(AssertionError, match=re.escape(told)):
        assert_equivalent(centred, (X,), meshes=[{"data": 4}], **specs)


def test_results_are_located_where_there_is_no_derivative() -> None:
    def lowest(x: Any) -> Any:
        return lax.pmin(x, "data")

    mapped = on_mesh(lowest, in_specs=P(), out_specs=P())
    assert located_or_why(mapped, mapped.unsharded, (X,), gradient=False) is None
    with pytest.raises(NotImplementedError, match="pmin"):
        located_or_why(mapped, mapped.unsharded, (X,))


def test_on_devices_and_arguments_that_lie_there() -> None:
    mapped = sm.shard_map(centred, make_mesh(), P("x"), P("x"))
    found = locate(mapped, *mapped.place(X))
    assert found is not None
    assert found.places[0].line == line_with("the local mean")


def test_rows_that_are_taken_in_chunks() -> None:
    """On one device other rows are in a chunk than on the shards together, which changes no row."""

    def step(w: Any, x: Any) -> Any:
        numbers, chunks = jnp.arange(len(x)).reshape(2, -1), x.reshape(2, -1, x.shape[1])

        def scaled(chunk: Any) -> Any:
            at, rows = chunk
            units = jnp.tanh(lax.pmean(rows @ w, "model"))  # a mean for each chunk
            return x[at] * units[:, None]

        return lax.map(scaled, (numbers, chunks)).reshape(x.shape)

    split = P("data", "model")
    specs = {"in_specs": (P("model"), split), "out_specs": split, "mesh": GRID}
    found = located(step, np.ones(4), np.concatenate([X, X[:, :1]], 1), **specs)
    assert (found.places[0].line, found.places[0].step) == (line_with("a mean for each chunk"), 0)


def test_what_a_round_of_a_loop_hands_to_the_next_one() -> None:
    """Parts of a sum may be handed on, and positions that the index of a shard gives, if they are read so."""

    def own_total(x: Any) -> Any:
        def once(carry: Any, _: Any) -> Any:
            total, seen = carry
            seen = seen + jnp.tanh(total)
            return (x.sum(), seen), seen  # the own total

        return lax.scan(once, (0.0, 0.0), None, length=2)[1]

    def own_position(x: Any) -> Any:
        def once(at: Any, _: Any) -> Any:
            value = lax.pmean(x[at].sum(), "data")
            return (at + lax.axis_index("data")) % len(x), value  # the own position

        return lax.scan(once, 0, None, length=2)[1]

    found = located(own_total, in_specs=ROWS, out_specs=P())
    assert found.places[0].line == line_with("the own total")
    found = located(own_position, in_specs=P(), out_specs=P())
    assert found.places[0].line == line_with("the own position")


def test_a_round_of_a_loop() -> None:
    def layer(x: Any, k: Any) -> Any:
        top = lax.cond(k == 2, lambda x: x.max(0), lambda x: 0 * x[0], x)  # in a branch
        return jnp.tanh(x) + top, None

    place, *_ = located(lambda x: lax.scan(layer, x, jnp.arange(4))[0]).places
    assert place.step == 2
    assert place.line in (line_with("in a branch"), line_with("in a branch") + 1)


def test_calls_inside_of_libraries_and_of_the_user() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return jax.nn.softmax(x, 0)  # in a call

    @jax.checkpoint
    def outer(x: Any) -> Any:
        return inner(x) * 2

    assert located(lambda x: outer(x) + inner(2 * x)).places[0].line == line_with("in a call")


def test_only_the_gradient_is_off() -> None:
    @jax.custom_jvp
    def same(x: Any) -> Any:
        return 2 * x

    same.defjvp(lambda x, t: (same(*x), 2 * t[0] - t[0].mean(0)))  # a rule

    found = located(lambda x: jnp.sin(same(x)))  # uses a rule
    assert found.gradient
    assert str(found).startswith("The derivatives stop being those of one device here:\n")
    assert found.places[0].line in (line_with("a rule"), line_with("uses a rule"))


def test_a_reference_written_in_other_lines() -> None:
    def whole(x: Any) -> Any:
        middle = x.mean(0)
        return jnp.tanh(x - middle)

    specs: Any = {"in_specs": ROWS, "out_specs": ROWS, "unsharded": whole, "gradients": False}
    with pytest.raises(AssertionError, match=f"{HERE.name}:{line_with('the local mean')}: "):
        assert_equivalent(centred, (X,), meshes=[{"data": 4}], **specs)


def test_overflow_is_found_in_the_dtypes_of_the_program() -> None:
    def fun(x: Any) -> Any:
        return lax.psum(x * 1e4, "data") / lax.axis_size("data")  # overflows

    found = located(fun, np.full(3, 5, np.float16), in_specs=P(), out_specs=P())
    assert found.rounding
    assert found.places[0].line == line_with("overflows")
    assert "inf on data=0" in found.places[0].got
    assert "In double precision all agrees: numbers overflow or are rounded." in str(found)


def test_a_result_of_another_dtype() -> None:
    def fun(x: Any) -> Any:
        return 8.0 if lax.axis_size("data") == 1 else 8

    assert str(located(fun, out_specs=P()).places[0]) == (
        "fun(...)\n    this result, made by no line of yours: int32[], and should be float32[]"
    )


def test_steps_of_one_program_only() -> None:
    def fun(x: Any) -> Any:
        for k in range(lax.axis_size("data")):
            x = x + k
        return x * 2

    found = located(fun)
    assert not found.matched
    assert "some values could not be compared" in str(found)


def look_up(table: Any, at: Any) -> Any:
    mine = at - lax.axis_index("data") * len(table)
    rows = table[jnp.clip(mine, 0, len(table) - 1)]
    inside = (mine >= 0) & (mine < len(table))
    return lax.psum(jnp.where(inside[:, None], rows, 0), "data")


AT = np.array([0, 3, 7, 5], np.int32)
OWN_PART: dict[str, Any] = {"in_specs": (ROWS, P()), "out_specs": P()}


@pytest.mark.slow
def test_the_index_of_a_shard_explains_what_is_made_of_it() -> None:
    def scaled(table: Any, at: Any) -> Any:
        rows = look_up(table, at)
        return rows / len(table)  # by its own part

    assert locate(on_mesh(look_up, **OWN_PART), X, AT) is None
    assert located(scaled, X, AT, **OWN_PART).places[0].line == line_with("by its own part")


def test_keys_that_depend_on_the_shard() -> None:
    def noisy(key: Any, x: Any) -> Any:
        key = jax.random.fold_in(key, lax.axis_index("data"))  # folded
        return x + jax.random.normal(key, x.shape)  # uses folded

    found = located(noisy, jax.random.key(0), X, in_specs=(P(), ROWS))
    assert {place.line for place in found.places} & {line_with("folded"), line_with("uses folded")}


# What shards have, in words

NOTES: dict[str, Callable[[Any], Any]] = {
    "the sum over 'data' of what shards have is the value on one device": lambda x: x.sum(0) * 2,
    "the mean over 'data' of what shards have is the value on one device": lambda x: x.mean(0) * 2,
    "the maximum over 'data' of what shards have is the value on one device": lambda x: x.max(0),
    "the minimum over 'data' of what shards have is the value on one device": lambda x: x.min(0),
    "shards have 0.25 times the value on one device": lambda x: lax.pmean(x.sum(0), "data"),
}


@pytest.mark.parametrize("note", NOTES)
def test_what_shards_have_in_words(note: str) -> None:
    assert located(NOTES[note], out_specs=P()).places[0].note == note


def test_numbers_that_mask_hide_no_difference() -> None:
    def masked(x: Any) -> Any:
        near = x + 1e-3 * lax.axis_index("data")  # near
        return jnp.where(x > 0, near, -1e9)

    assert located(masked).places[0].line == line_with("near")


# The numbers of a report are those that JAX computes

Y, Z = np.linspace(-2, 2, 12).reshape(3, 4), np.linspace(0.5, 3, 12).reshape(3, 4)
K = np.arange(12, dtype=np.int32).reshape(3, 4)
OPERATIONS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda x, y: (x + y, x - y, x * y, x / y, jnp.maximum(x, y), x < y, -x), (Y, Z)),
    (lambda k: (k + 1, k // 3, k % 5, k & 6, k ^ 3, ~k, k >= 4), (K,)),
    (lambda x: (jnp.exp(x), jnp.tanh(x), jax.nn.sigmoid(x), jnp.sign(x), x**3, x**-2), (Y,)),
    (lambda y: (jnp.log(y), jnp.sqrt(y), lax.rsqrt(y), y**1.5, jnp.log1p(y)), (Z,)),
    (lambda x: (x.sum(0), x.max(1), x.min(), (x > 0).any(), (x > -9).all(1)), (Y,)),
    (lambda x: (x.T, x.reshape(2, 6), x[None], x[1:, ::2], jnp.flip(x, 1), x[:, 1]), (Y,)),
    (lambda x, y: (x @ y.T, jnp.einsum("ij,ij->j", x, y), jnp.vecdot(x, y)), (Y, Z)),
    (lambda x, y: (jnp.where(x > 0, x, y), jnp.concatenate([x, y], 1), y[:, None] + x), (Y, Z)),
    (lambda k, x: (lax.dynamic_slice(x, (k[0, 1], k[0, 2]), (2, 2)),), (K, Y)),
    (lambda k, x: (lax.dynamic_update_slice(x, 2 * x[:2, 1:3], (k[0, 1], k[0, 1])),), (K, Y)),
    (lambda x: (x.cumsum(1), lax.cumsum(x, 0, reverse=True), x.argmax(1), (-x).argmin(0)), (Y,)),
    (lambda x: (jnp.clip(x, -1, 1), jnp.clip(x, x.min(), x + 1), jnp.clip(x, 0)), (Y,)),
    (lambda k: (k.astype(jnp.float32), jnp.arange(4) + k, jnp.float32(7) * k), (K,)),
]


@pytest.mark.parametrize(
    "number", [number if number % 2 else slow(number) for number in range(len(OPERATIONS))]
)
def test_what_numbers_should_be(number: int) -> None:
    fun, args = OPERATIONS[number]
    for k, result in enumerate(fun(*map(jnp.asarray, args))):

        def scaled(*args: Any, k: int = k) -> Any:
            made = fun(*args)[k]
            return made * lax.axis_size("data")

        place, *_ = located(scaled, *args, in_specs=P(), out_specs=P()).places
        at = re.search(r" at \[(.*)\]$", place.got)
        index = tuple(map(int, at[1].split(","))) if at else ()
        want = float(np.asarray(result)[index])
        np.testing.assert_allclose(float(place.want), want, rtol=1e-5)
        np.testing.assert_allclose(float(place.got.split()[0]), 4 * want, rtol=1e-5)


FLOATS = np.array(
    [[0, -0.0, 1, -1], [np.nan, np.inf, -np.inf, 2.5], [-2.5, 6e4, -7, 3]], np.float32
)
INTEGERS = np.array([[0, 1, -1, 5], [-7, 2**31 - 1, -(2**31), 3], [8, -8, 2, 100]], np.int32)
EDGES: list[Callable[[Any, Any], Any]] = [
    lambda x, y: (x + y, x * y, jnp.maximum(x, y), x == y, x >= y, lax.clamp(y, x, y + 1)),
    lambda x, y: (x / y, jnp.sign(x), x**-2, x**0, jnp.log1p(x), jax.nn.sigmoid(x), lax.rsqrt(x)),
    lambda x, y: (~x, x & y, x | y, x ^ y, lax.reduce_and(x, (0,)), lax.reduce_or(x, (1,))),
    lambda x, y: (x.sum(0), x.max(1), x.min(), lax.cumsum(x, 1, reverse=True), x.argmax(1)),
    lambda x, y: (x.any(0), (~(x > y)).all(1), jnp.where(~(x > y), x, y), x[:0].sum(0)),
    lambda x, y: tuple(map(x.astype, (jnp.float32, bool, jnp.int8, jnp.uint8, jnp.float16))),
    lambda x, y: (x @ y.T, jnp.dot(x, y.T, preferred_element_type=jnp.float32)),
    lambda x, y: (lax.dynamic_slice(x, (1, 9), (2, 2)), lax.dynamic_slice(x, (-9, 0), (2, 2))),
    lambda x, y: (lax.dynamic_update_slice(x, y[:2, :2], (2, 3)), jnp.concatenate([x[:0], y])),
]


@pytest.mark.parametrize("wide", [slow(True), False])
def test_numpy_computes_what_the_replay_computes(wide: bool) -> None:
    """Also with what is no usual number; the nodes of the planted models are compared in their own test."""
    arrays = FLOATS, INTEGERS, INTEGERS.astype(np.uint8), FLOATS.astype(np.float16), FLOATS > 0
    compared = set()
    for fun in EDGES:
        for x in arrays:
            try:
                closed = jax.make_jaxpr(fun)(x, x[::-1])
            except TypeError:  # There is no such operation on this dtype.
                continue
            compared |= compare_by_numpy(closed, (x, x[::-1]), MappedAxes(), wide)
    assert {"not", "reduce_and", "argmax", "sign", "integer_pow", "dynamic_slice"} <= compared


every: Any = lambda x: lax.all_gather(x, "data", tiled=True)
COLLECTIVES: list[Callable[[Any], Any]] = [
    every,
    lambda x: lax.all_gather(x.T, "data", axis=1, tiled=True).T,
    lambda x: lax.psum(x.sum(0), "data"),
    lambda x: every(lax.psum_scatter(every(x), "data", tiled=True)) / lax.axis_size("data"),
]


@pytest.mark.parametrize("exchange", COLLECTIVES)
def test_numbers_that_shards_exchange(exchange: Any) -> None:
    def scaled(x: Any) -> Any:
        return exchange(x) * lax.axis_size("data")  # scaled

    assert locate(on_mesh(exchange, out_specs=P()), X) is None
    assert located(scaled, out_specs=P()).places[0].line == line_with("scaled")


def test_complex_numbers_are_shown() -> None:
    def turned(x: Any) -> Any:
        return (1 + x * 1j) * lax.axis_size("data")  # turned

    place = located(turned).places[0]
    assert place.line == line_with("turned")
    assert re.match(r"\(4[+-].*j\) on data=", place.got)


@pytest.mark.parametrize("most_bytes", [0, 500, 5000])
def test_values_that_are_not_kept_are_computed_again(
    most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compare, "_MOST_BYTES", most_bytes)
    assert located(centred).places[0].line == line_with("the local mean")
    assert located(doubled_later, out_specs=P()).places


# Simple changes of a line


def ring(x: Any, towards: int) -> Any:
    """For each row the sum of all rows before it, from parts that go round."""
    n, me = lax.axis_size("data"), lax.axis_index("data")
    total, moved = jnp.cumsum(x, 0) - x, x
    for passed in range(1, n):
        onward = [(i, (i + towards) % n) for i in range(n)]
        moved = lax.ppermute(moved, "data", onward)  # passed on
        total = total + jnp.where(passed <= me, moved.sum(0), 0)
    return total


def counted_in_its_own_part(x: Any) -> Any:
    place = jnp.arange(len(x))  # counted
    return jnp.sin(place)[:, None] * x


def without_the_first_row(x: Any) -> Any:
    edge = lax.axis_index("data") == lax.axis_size("data") - 1  # of the last shard
    return jnp.where((jnp.arange(len(x)) == 0) & edge, 0, x.T).T


def by_the_other_axis(x: Any) -> Any:
    place = lax.axis_index("model") * len(x)  # of the other axis
    return x * jnp.cos(place + jnp.arange(len(x)))[:, None]


def looked_up_in_its_own_part(table: Any, at: Any) -> Any:
    inside = (at >= 0) & (at < len(table))  # not less the first row
    rows = table[jnp.clip(at, 0, len(table) - 1)]
    return lax.psum(jnp.where(inside[:, None], rows, 0), "data")


def counted_short(x: Any) -> Any:
    each = (x == x).any().astype(int)
    shards = lax.psum(each, "data") - min(lax.axis_size("data") - 1, 1)  # one too few
    return lax.psum(x.sum(0), "data") / (shards * len(x))


def counted_before(x: Any) -> Any:
    counts = lax.all_gather((x > 0).sum(), "data")
    before = jnp.where(jnp.arange(len(counts)) < 0, counts, 0).sum()  # before the first shard
    return before + jnp.cumsum((x > 0).sum(1))


def doubled_later(x: Any) -> Any:
    """The sum of all rows, from parts that go round."""
    n, total = lax.axis_size("data"), 0 * x.sum(0)
    for k in range(n):
        if k:
            total = 2 * total  # doubled
        total = total + x.sum(0)
        x = lax.ppermute(x, "data", [(i, (i + 1) % n) for i in range(n)])
    return total


TWO_AXES = AbstractMesh((4, 3), ("data", "model"))


@pytest.mark.parametrize(
    ("fun", "args", "specs", "text", "change"),
    [
        (
            *(lambda x: ring(x, -1), (X,), {}, "passed on"),
            "with a move to the next shard along 'data'",
        ),
        (
            *(counted_in_its_own_part, (X,), {}, "counted"),
            "with 2 * jax.lax.axis_index('data') added",
        ),
        (
            *(by_the_other_axis, (X,), {"mesh": TWO_AXES}, "of the other axis"),
            "with jax.lax.axis_index('data')",
        ),
        # Of an argument, of a constant, of an operation that one device has not
        (looked_up_in_its_own_part, (X, AT), OWN_PART, "not less the first row", ...),
        (counted_short, (X,), {"out_specs": P()}, "one too few", ...),
        (counted_before, (X,), {}, "before the first shard", ...),
        (doubled_later, (X,), {"out_specs": P()}, "doubled", ...),
        # Several changes of a condition may do the same: none is a cause.
        (without_the_first_row, (X,), {}, "of the last shard", None),
    ],
)
def test_a_change_that_puts_all_right(
    fun: Any, args: Any, specs: Any, text: str, change: Any
) -> None:
    found, line = located(fun, *args, **specs), line_with(text)
    assert found.places[0].line == line
    said = change and f"{change} at {HERE.name}:{line}, all results are right"
    assert change is ... or found.cause == said


def weighted(x: Any, y: Any) -> Any:
    return x * y * (1.0 + lax.axis_index("data"))  # weighted


def test_a_line_that_is_called_with_operands_in_another_order() -> None:
    """The operand that is as large as the product is not the same in each call."""

    def both(x: Any) -> Any:
        return jnp.stack([weighted(x, x[:, :1]), weighted(x[:, :1], x)], 1)

    assert located(both).places[0].line == line_with("weighted")


def part_of(x: Any) -> Any:
    return x.sum(0)  # handed on


def test_a_cause_names_all_lines_at_which_it_can_stand() -> None:
    def summed(x: Any) -> Any:
        part = x.sum(0)  # summed
        double = 2 * part  # used
        return double + 1

    lines = f"{line_with('summed')} or {line_with('used')} or {line_with('used') + 1}"
    found = located(summed, out_specs=P())
    text = f"with jax.lax.psum(..., 'data') at {HERE.name}:{lines}, all results are right"
    assert found.cause == text

    def used_often(x: Any) -> Any:
        part = x.sum(0)  # used often
        a = part + 1
        b = part * 2
        c = part - 1
        return a, b, c

    # At four lines the cause is not sure.
    found = located(used_often, out_specs=P())
    assert found.places[0].line == line_with("used often")
    assert found.cause is None
    # The reduction may be missing on any line of another function that hands the value on.
    found = located(lambda x: 3 + part_of(x), out_specs=P())
    assert found.places[0].line == line_with("handed on")
    assert found.cause is None


def test_a_change_is_a_cause_only_if_other_numbers_confirm_it() -> None:
    def summed_up(x: Any) -> Any:
        total = (x * x).sum(0)  # of one shard only
        return jnp.tanh(total)

    # With these numbers a maximum over shards does what a sum does.
    x = np.where(np.arange(8)[:, None] < 2, X, 0)
    line = line_with("of one shard only")
    text = (
        f"with jax.lax.psum(..., 'data') at {HERE.name}:{line} or {line + 1}, all results are right"
    )
    assert located(summed_up, x, out_specs=P()).cause == text


def test_what_the_last_shard_has() -> None:
    """It goes out as what the first one has."""

    def passed_along(x: Any) -> Any:
        part = jnp.sin(x.sum(0))  # has the last part
        return {"part": part}  # sends nothing

    def given(x: Any) -> Any:
        return {"part": jnp.sin(x[-2:].sum(0))}

    mapped = on_mesh(passed_along, out_specs=P())
    found = located_or_why(mapped, given, (X,))
    assert isinstance(found, Located)
    texts = "has the last part", "sends nothing"
    assert [place.line for place in found.places[:2]] == [*map(line_with, texts)]
    assert (
        found.places[0].note == "of each number one shard along 'data' has the value on one device"
    )


def scored(x: Any, weights: Any) -> tuple[Any, Any]:
    part = ((x @ weights) ** 2).sum()  # of this shard
    return part, jnp.tanh(weights)


def test_a_result_that_is_not_made_whole_where_it_leaves() -> None:
    def step(x: Any, weights: Any) -> Any:
        score, weights = scored(x, weights)
        weights = weights / 2
        return {"score": score, "weights": weights}  # leaves

    places = located(step, X, X[0], in_specs=(ROWS, P()), out_specs=P()).places
    lines = [line_with("of this shard") + 1, line_with("of this shard"), line_with("leaves")]
    assert [place.line for place in places] == lines


def loss_of(model: Any, x: Any) -> Any:
    return (jnp.tanh(x @ model["w"].value) ** 2).mean() + model["b"].value ** 2, model


def test_gradients_that_our_own_reduction_sums() -> None:
    def step(model: Any, x: Any) -> Any:
        run = sm.value_and_grad(loss_of, axis_name="data", reduce="sum")
        (loss, model), grads = run(model, x)  # asks for a sum
        w, b = (model[k].set(model[k].value - 0.1 * grads[k].value) for k in "wb")
        return loss, {"w": w, "b": b}

    model = {"w": sm.ParamState(jnp.asarray(X[0])), "b": sm.ParamState(jnp.asarray(X[0, 0]))}
    found = located(step, model, X, in_specs=(None, ROWS), out_specs=P())
    line = line_with("asks for a sum")
    assert found.places[0].line == line
    assert found.places[0].note == "shards have 4 times the value on one device"


@pytest.mark.parametrize(
    ("w_spec", "x_spec", "y_spec", "source", "arguments"),
    [
        (
            P(None, "model"),
            P("model"),
            P("model"),
            "in_specs of args[1]: P('model')",
            "args[1], args[2]",
        ),
        (P(None, "model"), P("model"), P("data"), "in_specs of args[1]: P('model')", "args[1]"),
        (P(None, "data"), P("data"), P("data"), "the spec of args[0]: P(None, 'data')", "args[0]"),
    ],
)
def test_arguments_that_another_axis_should_split(
    w_spec: Any, x_spec: Any, y_spec: Any, source: str, arguments: str
) -> None:
    def scored(w: Any, x: Any, y: Any) -> Any:
        each = lax.psum(jnp.tanh(x @ w.value).sum(1), "model") - y
        return lax.pmean((each**2).mean(), "data")

    mesh = AbstractMesh((2, 2), ("data", "model"))
    w = sm.State(jnp.asarray(X[:3]).T @ X[:3, :2], spec=w_spec)
    mapped = sm.shard_map(scored, mesh, (None, x_spec, y_spec), P(), check_vma=False)
    found = locate(mapped, w, X, X[:, 0])
    assert found is not None
    got = source.partition(": ")[2]
    want = got.replace("data", "model") if "data" in got else got.replace("model", "data")
    assert str(found.places[0]) == f"{source}\n    the spec: {got}, and should be {want}"
    assert found.cause == f"with {want} for {arguments}, all results are right"


GRID = AbstractMesh((2, 2), ("data", "model"))


def test_a_result_that_another_axis_should_put_together() -> None:
    def around_the_mean(x: Any) -> Any:
        return x - lax.pmean(x.mean(0), "data")

    found = located(around_the_mean, mesh=GRID, out_specs=P("model"))
    assert found.places[0].source == "out_specs of around_the_mean(...): P('model')"
    assert found.cause == "with P('data') for around_the_mean(...), all results are right"


def test_axes_that_stand_in_each_others_place() -> None:
    def around_the_mean(x: Any) -> Any:
        return x - lax.pmean(x.mean(0), "data")

    specs = {"in_specs": P("data", "model"), "out_specs": P("model", "data")}
    found = located(around_the_mean, X[:, :2], mesh=GRID, **specs)
    assert found.places[0].source == "out_specs of around_the_mean(...): P('model', 'data')"
    assert found.cause == "with P('data', 'model') for around_the_mean(...), all results are right"


def test_a_state_that_should_not_be_split() -> None:
    def step(last: Any, x: Any) -> Any:
        mean = lax.pmean(x.mean(), "data")
        return last.set(last.value.at[1].set(mean)), x

    last = sm.State(jnp.ones(4), spec=ROWS)
    found = located(step, last, X, in_specs=(None, ROWS), out_specs=(P(), ROWS))
    assert found.places[0].source == "the spec of args[0]: P('data')"
    assert found.cause == "with P() for args[0], all results are right"


def test_a_state_that_another_axis_should_split_leaves_as_it_came_in() -> None:
    """What it counts is reduced over the axis along which it then differs."""

    def step(seen: Any, count: Any, x: Any) -> Any:
        few = jnp.where(seen.value < 0.5, 1, 0).sum()
        return seen.set(seen.value + x.sum(1)), count.set(count.value + few), x

    states = sm.State(jnp.asarray(X[:, 0]), spec=P("model")), sm.State(0, reduce="sum")
    found = located(
        step, *states, X, mesh=GRID, in_specs=(None, None, ROWS), out_specs=(P(), P(), ROWS)
    )
    assert found.places[0].source == "the spec of args[0]: P('model')"
    assert found.cause == "with P('data') for args[0], all results are right"


@pytest.mark.parametrize("policy", ["sum", "max"])
def test_a_state_that_would_not_differ_if_its_source_were_split_rightly(policy: Any) -> None:
    """The policy then reduces over no axis."""

    def step(seen: Any, x: Any) -> Any:
        return seen.set(lax.psum(x.sum(0), "data")), x - lax.pmean(x.mean(0), "data")

    seen = sm.State(jnp.zeros(3), reduce=policy)
    specs = {"in_specs": (None, P("model")), "out_specs": (P(), ROWS)}
    found = located(step, seen, X, mesh=GRID, **specs)
    assert found.places[0].source == "in_specs of args[1]: P('model')"


def test_numbers_that_leave_as_they_are_and_are_read_as_positions() -> None:
    def chosen(x: Any, at: Any) -> Any:
        mine = (at >= 0) & (at < len(x))  # in its own part
        found = x[jnp.clip(at, 0, len(x) - 1)]
        return at, lax.psum(jnp.where(mine, found, 0), "data")

    at = np.array([3, 11, 6, 9, 14])
    found = located(chosen, np.arange(16.0) ** 2, at, in_specs=(ROWS, P()), out_specs=(P(), P()))
    assert found.places[0].line == line_with("in its own part")


def test_edges_in_another_order() -> None:
    def around(x: Any) -> Any:
        n, rows = lax.axis_size("data"), jnp.tanh(x)
        before = lax.ppermute(rows[-1:], "data", [(i, i + 1) for i in range(n - 1)])
        after = lax.ppermute(rows[:1], "data", [(i + 1, i) for i in range(n - 1)])
        wide = jnp.concatenate([after, rows, before])  # swapped
        return wide[2:] - 2 * wide[:-2]

    assert located(around).places[0].line == line_with("swapped")


@pytest.mark.parametrize(
    ("policy", "right", "written"),
    [
        ("max", "sum", lambda old, x: old + x.sum(0)),  # counts
        ("sum", "mean", lambda old, x: 0.9 * old + x.mean(0)),  # averages
        ("mean", "sum", lambda old, x: old + x.sum(0)),  # adds up
    ],
)
def test_a_state_with_another_policy_than_it_should_have(
    policy: str, right: str, written: Any
) -> None:
    def step(seen: Any, x: Any) -> Any:
        return x, seen.set(written(seen.value, x))

    seen = sm.State(jnp.asarray(X[0]), reduce=policy)
    found = located(step, seen, X, in_specs=(None, ROWS), out_specs=(ROWS, P()))
    first, second = found.places[:2]
    assert first.source == (
        f"the write policy of step(...)[1]: reduce={policy!r}, where {right!r} puts all results right"
    )
    assert second.line == line_with({"max": "counts", "sum": "averages", "mean": "adds up"}[policy])


def test_one_of_two_states_has_another_policy_than_it_should_have() -> None:
    def step(seen: Any, x: Any) -> Any:
        total, highest = seen
        highest = highest.set(jnp.maximum(highest.value, x.max(0)))
        return x, (total.set(total.value + x.sum(0)), highest)

    states = sm.State(jnp.zeros(3), reduce="sum"), sm.State(jnp.full(3, -9.0), reduce="sum")
    found = located(step, states, X, in_specs=(None, ROWS), out_specs=(ROWS, P()))
    assert found.places[0].source == (
        "the write policy of step(...)[1][1]: reduce='sum', where 'max' puts all results right"
    )


@pytest.mark.parametrize("mesh", [MESH, GRID])
def test_a_state_without_the_policy_that_it_should_have(mesh: Any) -> None:
    """The line that writes it may be to blame as well, and is likelier."""

    def step(seen: Any, x: Any) -> Any:
        return x, seen.set(x.max(0))  # of a shard, without a policy

    specs = {"in_specs": (None, ROWS), "out_specs": (ROWS, P())}
    found = located(step, sm.State(jnp.asarray(X[0])), X, mesh=mesh, **specs)
    first, second = found.places[:2]
    assert first.line == line_with("of a shard, without a policy")
    text = "the write policy of step(...)[1]: reduce=None, where 'max' puts all results right"
    assert second.source == text


def test_states_of_one_policy_that_should_differ_along_other_axes() -> None:
    """They are reduced together, each along its own axes."""

    def step(few: Any, many: Any, x: Any) -> Any:
        shard = lax.axis_index("data")  # among other units
        own = x.reshape(lax.axis_size("model"), -1, 3)[shard]
        few = few.set(few.value + (own > 0).sum())
        return few, many.set(many.value + (x > 0).sum()), own

    states = sm.State(0, reduce="sum"), sm.State(0, reduce="sum")
    specs = {"in_specs": (None, None, ROWS), "out_specs": (P(), P(), P(("data", "model")))}
    found = located(step, *states, X, mesh=GRID, **specs)
    assert found.places[0].line == line_with("among other units")
    assert found.cause is not None and found.cause.startswith("with jax.lax.axis_index('model')")


def own_positions(at: Any, rows: int, mistake: str) -> Any:
    local = at - lax.axis_index("data") * rows
    if mistake == "offset":
        local = at - lax.axis_index("data") * (rows - (lax.axis_size("data") > 1))  # offset
    if mistake == "mask":
        return jnp.where(local < rows, local, rows)  # mask
    return jnp.where((local >= 0) & (local < rows), local, rows)


@pytest.mark.parametrize("mistake", ["offset", "mask"])
def test_positions_in_the_own_part_of_a_table(mistake: str) -> None:
    """On one device nobody knows what they should be. Two tables have other lengths."""

    def both(table: Any, other: Any, at: Any) -> Any:
        parts = []
        for part in table, other:
            local = own_positions(at, len(part), mistake)
            parts.append(part.at[local].get(mode="fill", fill_value=0))
        return lax.psum(parts[0] + parts[1], "data")

    draw = np.random.default_rng(5)
    args = draw.normal(size=16), draw.normal(size=24), draw.integers(16, size=20)
    found = located(both, *args, in_specs=(ROWS, ROWS, None), out_specs=P())
    assert line_with(mistake) in [place.line for place in found.places[:2]]


def halves_of_shards(x: Any) -> Any:
    both = jnp.concatenate([x, -x])
    shares = both / len(x)  # of own rows, in another order
    up, down = jnp.split(shares, 2)  # computes nothing
    return up - 2 * down


def test_a_line_that_computes_nothing_hands_the_blame_back() -> None:
    """Shards have the rows in another order than one device: nobody knows what the shares should be."""
    places = located(halves_of_shards).places
    texts = "of own rows, in another order", "computes nothing"
    assert [place.line for place in places[:2]] == [*map(line_with, texts)]


def squares_of(x: Any) -> Any:
    return (x * x).sum(0)  # by its function


def test_a_function_that_returns_a_part_to_a_line_that_hands_it_on() -> None:
    def step(x: Any) -> Any:
        squares = squares_of(x)  # gets a part
        rows = lax.psum(len(x), "data")
        return jnp.sqrt(squares / rows)

    places = located(step, out_specs=P()).places
    lines = [line_with(text) for text in ("by its function", "gets a part")]
    assert [place.line for place in places[:2]] == lines


def test_a_function_of_another_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "squares.py"
    file.write_text("def squares_of(x):\n    return (x * x).sum(0)\n")
    there = runpy.run_path(str(file))

    def step(x: Any) -> Any:
        squares = there["squares_of"](x)  # gets a part from there
        rows = lax.psum(len(x), "data")
        return jnp.sqrt(squares / rows)

    first, second = located(step, out_specs=P()).places[:2]
    assert (first.file, first.line) == (str(file), 2)
    assert (second.file, second.line) == (str(HERE), line_with("gets a part from there"))


def test_no_cause_where_a_factor_may_be_missing_before() -> None:
    """The loss is too small by the number of shards, and every gradient after the mean over them too."""

    def loss(model: Any, x: Any) -> Any:
        rows = len(x) * lax.axis_size("data")
        return (jnp.tanh(x @ model.value) ** 2).sum() / rows, model

    def step(model: Any, x: Any) -> Any:
        (value, model), grads = sm.value_and_grad(loss, axis_name="data")(model, x)
        return value, model.set(model.value - 0.1 * grads.value)

    found = located(step, sm.ParamState(X[0]), X, in_specs=(None, ROWS), out_specs=P())
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
    places = located(whole, in_specs=in_specs, out_specs=out_specs).places
    assert [place.source for place in places] == [first, second]
    assert places[0].operation == "the length of axis 0 of the result"
    assert (places[0].got, places[0].want) in (("32", "8"), ("2", "8"))


def test_an_argument_that_should_be_split_comes_first() -> None:
    numbered: Any = lambda x: x + lax.axis_index("data")
    places = located(numbered, in_specs=P()).places
    assert [place.source[:14] for place in places] == ["in_specs of ar", "out_specs of <"]


def test_a_line_is_put_right_with_its_derivative() -> None:
    def loss(w: Any, x: Any) -> Any:
        return ((x @ w) ** 2).sum() / len(x)  # by its own rows

    def step(w: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        value = lax.psum(value, "data")
        grads = lax.psum(grads, "data")
        return value, w - grads

    found = located(step, X[0], X, in_specs=(P(), ROWS), out_specs=P())
    assert found.places[0].line == line_with("by its own rows")


def test_a_sum_too_many_inside_of_a_loss() -> None:
    """It makes the loss right on all shards, and the gradient too large."""

    def loss(w: Any, x: Any) -> Any:
        return lax.psum((jnp.sin(x @ w) ** 2).sum(), "data")  # summed inside

    def step(w: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        value = lax.psum(value, "data")
        grads = lax.psum(grads, "data")
        return value, w - 0.1 * grads

    found = located(step, X[0], X, in_specs=(P(), ROWS), out_specs=P())
    assert found.places[0].line == line_with("summed inside")


def averaged(w: Any, bias: Any, x: Any) -> Any:
    def loss(w: Any, bias: Any) -> Any:
        return (jnp.sin(x @ w + bias) ** 2).mean()

    of_both = jax.grad(loss, (0, 1))(w, bias)  # asks for both
    of_w, of_bias = of_both[0] / lax.axis_size("data"), of_both[1]  # one of them
    return of_w, of_bias


def test_a_gradient_that_is_too_large_as_it_comes_out() -> None:
    """No step of the program is at fault: one is missing, where the other gradient has it."""
    # The check of replication sums it over shards.
    mapped = sm.shard_map(averaged, MESH, (P(), P(), ROWS), P())
    found = locate(mapped, X[0], X[0, 0], X)
    assert found is not None
    texts = "one of them", "asks for both"
    assert [place.line for place in found.places[:2]] == [*map(line_with, texts)]
    assert found.cause is None


def test_a_line_that_only_hands_a_part_on() -> None:
    def part(x: Any) -> Any:
        own, rest = x.sum(0) / 2, 1  # a part of it
        return own, rest  # not made whole

    found = located(lambda x: jnp.tanh(part(x)[0]), out_specs=P())
    texts = "not made whole", "a part of it"
    assert [place.line for place in found.places[:2]] == [*map(line_with, texts)]


def test_a_tree_of_parts_that_only_some_lines_make_whole() -> None:
    def step(x: Any) -> Any:
        sums = {"a": x.sum(0), "b": jnp.tanh(x).sum(0)}
        sums = jax.tree.map(lambda s: lax.psum(s, "data"), sums)  # along one of two axes
        return sums | {}  # not along the other one

    found = located(step, in_specs=P(("data", "model")), out_specs=P(), mesh=GRID)
    lines = [place.line for place in found.places]
    assert lines[:2] == [*map(line_with, ("along one of two axes", "not along the other one"))]


def test_a_model_that_is_updated_is_returned_as_a_matter_of_course() -> None:
    def step(x: Any) -> Any:
        mean = jnp.zeros_like(x[0])
        mean = mean + x.mean(0)  # updated by a shard
        return mean, x  # updated and returned

    found = located(step, out_specs=(P(), ROWS))
    texts = "updated by a shard", "updated and returned"
    assert [place.line for place in found.places[:2]] == [*map(line_with, texts)]


def test_rows_of_which_each_shard_has_some() -> None:
    def asked(x: Any) -> Any:
        at = jnp.array([6, 1, 4, 3]) - lax.axis_index("data") * len(x)
        own = x[jnp.clip(at, 0, len(x) - 1)]  # nobody has all of them
        return lax.psum(own, "data")  # of shards that do not have them too

    places = located(asked, out_specs=P()).places
    texts = "nobody has all of them", "of shards that do not have them too"
    assert [place.line for place in places[:2]] == [*map(line_with, texts)]
    note = "of each number one shard along 'data' has the value on one device"
    assert places[0].note == note


def squared(x: Any) -> Any:
    return (x * x).sum(0)  # right where it is called first


def test_a_function_that_is_right_in_another_call_is_not_to_blame() -> None:
    def both(x: Any) -> Any:
        right = lax.psum(squared(x), "data")
        wrong = squared(2 * x)  # not summed
        return right + wrong

    texts = "not summed", "right where it is called first"
    places = located(both, out_specs=P()).places
    assert [places[0].line, places[-1].line] == [*map(line_with, texts)]


# Loops, pieces, truths, calls: lines that come before others that are as wrong


def halved_together(x: Any) -> Any:
    def goes_on(x: Any) -> Any:
        largest = jnp.abs(x).max()  # of own rows
        return largest > 0.3  # asks own rows

    return lax.while_loop(goes_on, lambda x: x / 2, x)


def length(x: Any) -> Any:
    return (x * x).sum()  # in the loop and before it


def descended(x: Any) -> Any:
    def once(carry: Any, _: Any) -> Any:
        x, old = carry
        new = length(jnp.sin(x))
        return (x * (new / old), new), None

    (x, _), _ = lax.scan(once, (x, length(x)), None, length=3)
    return x


def with_rows_before(x: Any) -> Any:
    n = lax.axis_size("data")
    before = lax.ppermute(x[-1:], "data", [(i + 1, i) for i in range(n - 1)])  # backward
    return x * 2 + jnp.concatenate([before, x[:-1]])


def with_rows_after(x: Any) -> Any:
    after = jnp.zeros_like(x[:1])  # nothing after
    return x * 2 + jnp.concatenate([x[1:], after])


def smoothed(x: Any, own_edge: bool = False) -> Any:
    n, scaled = lax.axis_size("data"), jnp.tanh(x)
    before = lax.ppermute(scaled[-1:], "data", [(i, (i + 1) % n) for i in range(n)])
    if own_edge:
        before = scaled[-1:]  # its own edge
    around = jnp.concatenate([before, scaled])
    return around[1:] - around[:-1]


def smoothed_with_the_largest(x: Any) -> Any:
    n = lax.axis_size("data")
    scaled = x / jnp.abs(x).max()  # of own rows, with edges
    before = lax.ppermute(scaled[-1:], "data", [(i, (i + 1) % n) for i in range(n)])
    around = jnp.concatenate([before, scaled])
    return around[1:] - around[:-1]


def summed_in_rounds(x: Any, rounds: int, then: Any = lambda x, moved: moved) -> Any:
    n, total, moved = lax.axis_size("data"), jnp.zeros_like(x[0]), x
    for _ in range(rounds):  # another number of rounds
        total = total + jnp.tanh(moved).sum(0)
        onward = [(i, (i + 1) % n) for i in range(n)]
        moved = lax.ppermute(then(x, moved), "data", onward)  # what goes on
    return total


def one_round_less(x: Any) -> Any:
    return summed_in_rounds(x, max(lax.axis_size("data") - 1, 1))


def one_round_more(x: Any) -> Any:
    return summed_in_rounds(x, lax.axis_size("data") + (lax.axis_size("data") > 1))


def no_round_on_one_device(x: Any) -> Any:
    return lax.psum(x.sum(0), "data") + summed_in_rounds(x, lax.axis_size("data") - 1)


def the_first_goes_on(x: Any) -> Any:
    return summed_in_rounds(x, lax.axis_size("data"), lambda x, moved: x)


def one_round_less_with_truths(x: Any) -> Any:
    n, total, moved = lax.axis_size("data"), jnp.zeros_like(x[0]), x
    for k in range(max(n - 1, 1)):  # another number of rounds, with truths
        before = lax.select_n(jnp.asarray(k > 0), 0 * total, total)
        total = before + jnp.tanh(moved).sum(0)
        moved = lax.ppermute(moved, "data", [(i, (i + 1) % n) for i in range(n)])
    return total


def paired(x: Any) -> Any:
    n, total, moved, stays = lax.axis_size("data"), 0 * x[0], x, x * x
    for _ in range(n):
        total = total + (jnp.tanh(moved) * stays).sum(0)
        moved = lax.ppermute(moved, "data", [(i, (i + 1) % n) for i in range(n)])  # one of two
    return total


def numbered_in_rounds(x: Any) -> Any:
    n, me, total, moved = lax.axis_size("data"), lax.axis_index("data"), 0 * x[0], x
    for _ in range(n):
        number = me * len(x) + jnp.arange(len(x))  # always its own number
        total = total + number @ jnp.tanh(moved)
        moved = lax.ppermute(moved, "data", [(i, (i + 1) % n) for i in range(n)])
    return total


def rolled(x: Any, rounds: int, mistake: str = "") -> Any:
    n, me, stays = lax.axis_size("data"), lax.axis_index("data"), x * x

    def once(k: Any, carry: Any) -> Any:
        total, moved, partner = carry
        owner = me if mistake == "number" else (me - k) % n
        rows = len(moved) * owner + jnp.arange(len(moved))  # its own in a rolled loop
        total = total + rows @ (jnp.tanh(moved) * partner)
        onward = [(i, (i + 1) % n) for i in range(n)]
        if mistake == "partner":
            return total, lax.ppermute(moved, "data", onward), partner  # one of two, rolled
        return total, *lax.ppermute((moved, partner), "data", onward)

    return lax.fori_loop(0, rounds, once, (0 * x[0], x, stays))[0]  # rounds of a rolled loop


def rolled_short(x: Any) -> Any:
    return rolled(x, max(lax.axis_size("data") - 1, 1))


def rolled_short_in_all_layers(x: Any) -> Any:
    """What comes out of a loop leads to what comes into the next one."""

    def layer(x: Any, _: Any) -> Any:
        return x + jnp.tanh(rolled_short(x)), None

    x = layer(x, None)[0]
    return lax.psum(lax.scan(layer, x, None, length=2)[0].sum(0), "data")


def rolled_with_own_numbers(x: Any) -> Any:
    return rolled(x, lax.axis_size("data"), "number")


def rolled_apart(x: Any) -> Any:
    return rolled(x, lax.axis_size("data"), "partner")


def counted_rows(x: Any) -> Any:
    """Each round reads what the round before has led to."""

    def once(x: Any, _: Any) -> Any:
        total, count = x.sum(), (x > 0).sum()  # a number and a whole number
        return jnp.sin(3 * x * total / (1 + count)), None

    return lax.scan(once, x, None, length=4)[0]


def below_the_second_in_rounds(x: Any) -> Any:
    def once(x: Any, _: Any) -> Any:
        second = lax.top_k(x[:, 0], 2)[0][-1]  # not everyone's, in rounds
        return jnp.sin(3 * x - second), None

    # The number after the loop is another one on one device.
    return lax.scan(once, x, None, length=4)[0] + 1e-30 / lax.axis_size("data")


def small_everywhere(x: Any) -> Any:
    own = (jnp.abs(x) < 1.5).all()
    everywhere = lax.pmax(own.astype("int32"), "data") > 0  # somewhere
    return jnp.where(everywhere, x, 0)


def in_its_own_dtype(x: Any) -> Any:
    total = lax.psum(jnp.where(jnp.isfinite(x), x, 0).sum(0), "data")
    return total.astype(["float32", "float16"][lax.axis_size("data") > 1])  # narrowed


def first_row() -> Any:
    return lax.axis_index("data") * lax.axis_size("data")  # times the shards


def numbered(x: Any) -> Any:
    return x[:, 0] * (first_row() + jnp.arange(len(x)))


def nearest(x: Any, y: Any) -> Any:
    return (x @ y.T).max(1)


def compared(x: Any) -> Any:
    everyone = lax.all_gather(x, "data", tiled=True)
    a = nearest(x, everyone)
    b = nearest(jnp.tanh(x), x)  # among own rows
    return a + b


def two_of_three_means(x: Any) -> Any:
    own = x.mean(0), jnp.tanh(x).mean(0), (x**2).mean(0)
    a, b, c = lax.pmean(own[0], "data"), lax.pmean(own[1], "data"), own[2]  # one forgotten
    return x * a + b - c


def below_the_second(x: Any) -> Any:
    own = x[:, 0] * 2
    everyone = lax.all_gather(own, "data", tiled=True)
    first = everyone.max()
    second = lax.top_k(own, 2)[0][-1]  # not everyone's
    return x * first - second


def last_of_all(x: Any) -> Any:
    here = x[:, 0] > 0
    number = jnp.where(here.any(), lax.axis_index("data") * len(x) + here.argmax(), 8)
    return x * lax.pmax(number, "data")  # the last


def in_blocks(x: Any) -> Any:
    number = lax.axis_index("data") * len(x) + jnp.arange(len(x))
    block = number // (4 * lax.axis_size("data"))  # by the shards
    return x * block[:, None]


def sums_averaged(x: Any) -> Any:
    own = x.sum(0)
    total = lax.pmean(own, "data")  # a mean of sums
    return x - total / 8


def along_one_of_two(x: Any) -> Any:
    own = (x * x).sum(0)
    total = {"squares": lax.psum(own, "model")}  # along one axis of two
    return x, total


def by_the_norm(x: Any) -> Any:
    squares = [(y**2).sum() for y in (x, jnp.tanh(x))]
    norm = jnp.sqrt(squares[0] + squares[1] + 1)  # of own squares
    return x / norm


def running(x: Any) -> Any:
    return jnp.cumsum(x, 0)  # of own rows, as it should be


def running_twice(x: Any) -> Any:
    sums = lax.all_gather(x.sum(0), "data")
    earlier = jnp.arange(len(sums)) < lax.axis_index("data")
    right = running(x) + jnp.where(earlier[:, None], sums, 0).sum(0)
    wrong = running(jnp.tanh(x))  # without what comes before
    return right - 2 * wrong


def passed(x: Any, by: int, kind: str) -> Any:
    """The sum of what the shards before have; behind, for -1."""
    size = lax.axis_size("data")
    along = [(k, k + by) for k in range(size) if 0 <= k + by < size]
    if kind == "ring":
        along = [(k, (k + by) % size) for k in range(size)]

    def hop(_: Any, carry: Any) -> Any:
        moving = lax.ppermute(carry[0], "data", along)  # in a ring with its derivative
        return moving, carry[1] + moving

    count = max(size - 1 - (kind == "short"), 0)
    return lax.fori_loop(0, count, hop, (x, 0 * x))[1]  # too few hops with the derivative


def of_earlier_rows(x: Any, kind: str) -> Any:
    before = jax.custom_vjp(functools.partial(passed, by=1, kind=kind))
    before.defvjp(
        lambda x: (passed(x, 1, kind), None),
        lambda _, g: (passed(g, -1, kind),),
    )

    def loss(x: Any) -> Any:
        return (x * jnp.sin(jnp.cumsum(x, 0) - x + before(x.sum(0)))).sum()

    return jax.grad(loss)(x)


@jax.custom_vjp
def shared_by_all(x: Any) -> Any:
    return x


shared_by_all.defvjp(lambda x: (x, None), lambda _, g: (g,))  # hands a part on, backward


def with_parts_of_a_gradient(x: Any) -> Any:
    return jax.grad(lambda w: (jnp.tanh(x @ shared_by_all(w)) ** 2).sum())(jnp.arange(3.0))


@jax.custom_vjp
def centred_backward(x: Any) -> Any:
    return jnp.tanh(x)


def centred_back(slope: Any, g: Any) -> tuple[Any]:
    mean = g.mean(0)  # of own rows, backward
    return (slope * (g - mean),)


centred_backward.defvjp(lambda x: (jnp.tanh(x), 1 - jnp.tanh(x) ** 2), centred_back)


def with_own_means_of_a_gradient(x: Any) -> Any:
    return jax.grad(lambda x: (centred_backward(x) ** 2).sum())(x)


def trees_in_a_ring(x: Any) -> Any:
    n = lax.axis_size("data")
    along = [(k, k + 1) for k in range(n - 1)]

    def hop(_: Any, carry: Any) -> Any:
        (rows, sums), total = carry
        total = total + jnp.sin(5 * rows).T @ sums
        return [lax.ppermute(y, "data", along) for y in (rows, sums)], total  # a tree, open

    return jnp.cos(x * lax.fori_loop(0, n, hop, ([x, x.sum(1)], 0 * x[0]))[1])


def in_the_part(table: Any, at: Any, mistake: str) -> Any:
    own = at - lax.axis_index("data") * len(table)
    here = (own >= 0) & (own < len(table))
    if mistake == "one too many":
        here = (own >= 0) & (own <= len(table))  # one too many
    found = jnp.where(here[:, None], table[jnp.clip(own, 0, len(table) - 1)], 0)
    if mistake == "of all shards":
        found = table[jnp.clip(own, 0, len(table) - 1)]  # of all shards
    return jnp.tanh(lax.psum(found, "data"))


def places_of_the_best(x: Any) -> Any:
    high, place = lax.top_k(x[:, 0], 2)
    high = lax.all_gather(high, "data", tiled=True)
    place = lax.all_gather(place, "data", tiled=True)  # in the own part
    return place[lax.top_k(high, 2)[1]]


def product(a: Any, b: Any, common: Any) -> Any:
    return lax.psum(a @ b + common, "data")  # what all have, with each part


def two_products(x: Any) -> Any:
    first = product(x[:, 0], x[:, 1], jnp.asarray(0.5))
    y = jnp.tanh(x * first)
    return x * product(y[:, 0], y[:, 1], first)


def with_a_share(x: Any) -> Any:
    share = 1 / lax.axis_size("data")
    a = x * share  # by the shards, named once
    b = jnp.tanh(x) - share
    c = (x**2).max(1, keepdims=True) * share
    return a + b, c


def gram(x: Any) -> Any:
    return lax.psum(x.T @ x + 0.5, "data")  # a number, with each part


def products_with_a_number(x: Any) -> Any:
    for _ in range(lax.axis_size("data")):  # other steps than on one device
        x = 1 * x
    return x @ jnp.tanh(gram(x) / 8)


# These give the same on all shards.
OF_ALL_SHARDS = {
    with_parts_of_a_gradient,
    places_of_the_best,
    in_its_own_dtype,
    one_round_less,
    one_round_less_with_truths,
    one_round_more,
    no_round_on_one_device,
    paired,
    numbered_in_rounds,
    rolled_short,
    rolled_short_in_all_layers,
    rolled_with_own_numbers,
    rolled_apart,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (halved_together, "of own rows"),
        (descended, "in the loop and before it"),
        (with_rows_before, "backward"),
        (with_rows_after, "nothing after"),
        (functools.partial(smoothed, own_edge=True), "its own edge"),
        (smoothed_with_the_largest, "of own rows, with edges"),
        (one_round_less, "another number of rounds"),
        (one_round_more, "another number of rounds"),
        (one_round_less_with_truths, "another number of rounds, with truths"),
        (no_round_on_one_device, "another number of rounds"),
        (paired, "one of two"),
        (numbered_in_rounds, "always its own number"),
        (rolled_short, "rounds of a rolled loop"),
        (rolled_short_in_all_layers, "rounds of a rolled loop"),
        (rolled_with_own_numbers, "its own in a rolled loop"),
        (rolled_apart, "one of two, rolled"),
        (counted_rows, "a number and a whole number"),
        (below_the_second_in_rounds, "not everyone's, in rounds"),
        (small_everywhere, "somewhere"),
        (in_its_own_dtype, "narrowed"),
        (numbered, "times the shards"),
        (compared, "among own rows"),
        (two_of_three_means, "one forgotten"),
        (below_the_second, "not everyone's"),
        (last_of_all, "the last"),
        (in_blocks, "by the shards"),
        (sums_averaged, "a mean of sums"),
        (by_the_norm, "of own squares"),
        (running_twice, "without what comes before"),
        (functools.partial(of_earlier_rows, kind="ring"), "in a ring with its derivative"),
        (functools.partial(of_earlier_rows, kind="short"), "too few hops with the derivative"),
        (with_parts_of_a_gradient, "hands a part on, backward"),
        (with_own_means_of_a_gradient, "of own rows, backward"),
        (trees_in_a_ring, "a tree, open"),
        (places_of_the_best, "in the own part"),
        (two_products, "what all have, with each part"),
        (products_with_a_number, "a number, with each part"),
        (with_a_share, "by the shards, named once"),
    ],
)
def test_the_line_that_comes_first(fun: Any, text: str) -> None:
    out = P() if fun in OF_ALL_SHARDS else ROWS
    assert located(fun, out_specs=out).places[0].line == line_with(text)


def test_a_derivative_that_a_function_hands_on() -> None:
    first = located(with_parts_of_a_gradient, out_specs=P()).places[0]
    assert first.operation == "a derivative that is handed on"
    assert first.note == "the sum over 'data' of what shards have is the value on one device"


@pytest.mark.parametrize("mistake", ["one too many", "of all shards"])
def test_rows_of_other_shards_that_are_no_zeros(mistake: str) -> None:
    find = functools.partial(in_the_part, mistake=mistake)
    at = jnp.asarray([1, 6, 3, 2, 4])
    found = located(find, jnp.asarray(X), at, in_specs=(ROWS, P()), out_specs=P())
    assert found.places[0].line == line_with(mistake)


def test_as_many_rounds_as_along_the_other_axis() -> None:
    def around(x: Any) -> Any:
        n = lax.axis_size("data")
        ahead = [(k, (k + 1) % n) for k in range(n)]

        def hop(_: Any, carry: Any) -> Any:
            visitor, total = carry
            return lax.ppermute(visitor, "data", ahead), total + jnp.tanh(visitor).sum(0)

        first = x, 0 * x[0]
        return lax.fori_loop(0, lax.axis_size("model"), hop, first)[1]  # the other axis

    found = located(around, mesh=AbstractMesh((4, 2), ("data", "model")), out_specs=P())
    assert found.places[0].line == line_with("the other axis")


def test_one_spec_of_two_results_that_are_too_short() -> None:
    def both(x: Any) -> Any:
        return (2 * x, x + 1), lax.psum(x.sum(0), "data")

    found = located(both, out_specs=P())
    assert found.places[0].source.startswith("out_specs of both(...)[0][0]: P()")


def test_a_reduction_along_one_axis_of_two() -> None:
    rows = P(("data", "model"))
    found = located(along_one_of_two, in_specs=rows, out_specs=(rows, P()), mesh=GRID)
    assert found.places[0].line == line_with("along one axis of two")


def test_gradients_that_nothing_makes_whole() -> None:
    def loss(w: Any, b: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w) ** 2).sum() + (jnp.tanh(x[:, 0] * b) ** 2).sum()

    def step(w: Any, b: Any, x: Any) -> Any:
        grads = jax.grad(loss, (0, 1))(w, b, x)
        norm = jnp.sqrt((grads[0] ** 2).sum() + grads[1] ** 2)  # reads both of them
        return w - grads[0] / norm, b - grads[1] / norm

    specs = {"in_specs": (P(), P(), ROWS), "out_specs": (P(), P())}
    found = located(step, jnp.asarray(X[0]), jnp.asarray(0.5), X, **specs)
    assert found.places[0].line == line_with("reads both of them")


def around_the_ring(x: Any, *, stays: bool = False) -> Any:
    """What each row gets from all others; what acts on the visitors goes on with them."""
    n = lax.axis_size("data")
    ahead = [(k, (k + 1) % n) for k in range(n)]
    own = reaction = jnp.zeros_like(x)
    visitor = x
    for _ in range(n):
        push = jnp.tanh(x[:, None] - visitor)
        own, reaction = own + push.sum(1), reaction - (push**2).sum(0)
        if stays:
            visitor = lax.ppermute(visitor, "data", ahead)  # without the reaction
        else:
            visitor, reaction = lax.ppermute((visitor, reaction), "data", ahead)
    return own + reaction


@pytest.mark.parametrize(
    ("forces", "text"),
    [
        (functools.partial(around_the_ring, stays=True), "without the reaction"),
        (functools.partial(smoothed, own_edge=True), "its own edge"),
    ],
)
def test_a_function_that_runs_before_a_loop_and_in_it(forces: Any, text: str) -> None:
    """A line that is put right before the loop is right inside too."""

    def steps(x: Any) -> Any:
        def once(carry: Any, _: Any) -> Any:
            x, old = carry
            x = x + old / 8
            return (x, forces(x)), None

        (x, _), _ = lax.scan(once, (x, forces(x)), None, length=2)
        return x

    assert located(steps).places[0].line == line_with(text)


def test_a_summand_that_is_not_summed_over_shards() -> None:
    """The pairs that a shard has are no part of anything that one device has."""

    def forces(x: Any) -> Any:
        n, me = lax.axis_size("data"), lax.axis_index("data")
        ahead = [(k, (k + 1) % n) for k in range(n)]
        own = reaction = jnp.zeros_like(x)
        number = numbers = me * len(x) + jnp.arange(len(x))
        visitor = x
        for _ in range(n):
            dealt = (number[:, None] + numbers) % lax.axis_size("model")
            mine = (dealt == lax.axis_index("model"))[..., None]
            push = jnp.where(mine, jnp.tanh(x[:, None] - visitor), 0)
            own, reaction = own + push.sum(1), reaction - (push**2).sum(0)
            visitor, reaction, numbers = lax.ppermute((visitor, reaction, numbers), "data", ahead)
        return lax.psum(own, "model") + reaction  # one of both

    found = located(forces, mesh=GRID)
    assert found.places[0].line == line_with("one of both")


def test_a_number_that_is_added_to_a_sum_over_shards() -> None:
    def shares(x: Any) -> Any:
        scaled = x if lax.axis_size("data") == 1 else x * 1
        apart = scaled * jnp.tanh(x).max(0) + x.mean(0)  # the largest of own rows
        return x / (lax.psum((apart**2).sum(0), "data") + 1.5)

    split = P("data", "model")
    found = located(shares, np.tile(X, 2), mesh=GRID, in_specs=split, out_specs=split)
    assert found.places[0].line == line_with("the largest of own rows")


def test_a_state_that_does_not_differ_where_a_line_is_right() -> None:
    """Its policy then reduces over one axis less."""

    def step(seen: Any, x: Any) -> Any:
        mean = x.mean()
        shifted = lax.pmean(x.mean(1), "model") - lax.pmean(mean, "data")  # of own columns
        tenths = jnp.floor(shifted * 10).astype("int32")
        return seen.set(seen.value + tenths.sum()), x

    seen = sm.State(0, reduce="sum")
    specs = {"in_specs": (None, P("data", "model")), "out_specs": (P(), P("data", "model"))}
    found = located(step, seen, X[:, :2], mesh=GRID, **specs)
    assert found.places[0].line == line_with("of own columns")


def test_what_rounding_decides_is_no_first_wrong_value() -> None:
    def compared(x: Any) -> Any:
        # Of eight rows the two sums round differently, of two rows they do not.
        total, again = lax.psum((x.sum(0), x[::-1].sum(0)), "data")
        return total > again

    mapped = on_mesh(compared, out_specs=P())
    x = np.random.default_rng(1).normal(size=(8, 40))
    _, traces = _compare.both_traced(mapped, mapped.unsharded, ((x.astype("float32"),), {}))
    with jax.enable_x64(True):
        comparison = _compare.compare_traced(traces, jnp.asarray(x), wide=True)
        (node,) = (node for node in comparison.mesh.nodes if node.name == "gt")
        assert comparison.is_unrelated(node.results[0])
        assert not is_first(comparison, node)


def test_a_line_hands_on_what_other_lines_read() -> None:
    def least(x: Any) -> Any:
        at = x[:, 0].argmin()
        # The sign of the quotient is that of one device, and reads what is not.
        half = (lax.axis_index("data") * len(x) + at) // 2  # of the least of own rows
        return x * lax.pmax(half, "data")

    mapped = on_mesh(least)
    _, traces = _compare.both_traced(mapped, mapped.unsharded, ((X,), {}))
    with jax.enable_x64(True):
        comparison = _compare.compare_traced(traces, jnp.asarray(X, float), wide=True)
        found = {x.line.number: x.values for x in suspects_of(comparison) if x.line}
    readers = [x for x in comparison.mesh.nodes if x.name == "pmax"]
    assert [*found[line_with("of the least of own rows")]] == [*readers[0].operands]


def test_what_goes_on_from_round_to_round() -> None:
    """The mean over the shards of what each has in the end would be right as well."""
    places = located(the_first_goes_on, out_specs=P()).places
    assert line_with("what goes on") in [place.line for place in places]


def test_numbers_that_differ_are_shown_apart() -> None:
    place, *_ = located(lambda x: x * (1 + 1e-7 * (lax.axis_size("data") - 1))).places
    assert place.got.split()[0] != place.want.split()[0]


def test_of_a_result_the_number_that_is_most_off_is_shown() -> None:
    def constants(x: Any) -> Any:
        shards = lax.axis_size("data")
        return jnp.array([1 + 1e-6 * shards, 2.0 * shards])

    place, *_ = located(constants, out_specs=P()).places
    assert (place.got, place.want) == ("8 at [1]", "2")


def row_of_the_first_shard() -> Any:
    return jnp.int32(0)


def test_no_cause_where_another_function_may_have_given_a_number() -> None:
    def counted(x: Any) -> Any:
        row = row_of_the_first_shard() + jnp.arange(len(x))  # from row 0
        return x[:, 0] * row

    found = located(counted)
    assert found.places[0].line == line_with("from row 0")
    assert found.cause is None

    def counted_from(first: int) -> Any:
        return lambda x: x[:, 0] * (first + jnp.arange(len(x)))  # from a number

    number = line_with("from a number")
    cause = (
        f"with 2 * jax.lax.axis_index('data') added at {HERE.name}:{number}, all results are right"
    )
    assert located(counted_from(0)).cause == cause


def spread_of_own(x: Any) -> Any:
    return jnp.sqrt(x**2 + 0.01).mean()  # the own spread


def twice_the_spread(x: Any) -> Any:
    return 2 * spread_of_own(x)


def test_a_function_that_is_called_with_what_it_has_made_wrong() -> None:
    """Nobody knows what its second call should give, and the derivative reads more of the line."""

    def step(w: Any, x: Any) -> Any:
        def share(w: Any) -> Any:
            units = jnp.tanh(x[:, :1] * w)
            first = twice_the_spread(units)
            moved = units * lax.stop_gradient(jnp.sin(first))
            return first * twice_the_spread(moved) / lax.axis_size("data")

        value, grads = jax.value_and_grad(share)(w)
        return lax.psum(value, "data"), grads

    specs = {"in_specs": (ROWS, P()), "out_specs": (P(), ROWS)}
    found = located(step, np.arange(8.0) / 4, X, **specs)
    assert found.places[0].line == line_with("the own spread")


def test_a_loss_that_is_no_share_of_the_shards() -> None:
    """The line that returns it computes nothing. One device is one shard."""

    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            score = lax.psum(x @ w, "data")
            loss = (score**2).mean()
            return loss, score  # the whole loss

        grads, score = jax.grad(loss_of, has_aux=True)(w)
        return jnp.tanh(w - 0.1 * grads), score

    args = np.arange(8.0) / 8, np.asarray(X.T)
    specs = {"in_specs": (ROWS, P(None, "data")), "out_specs": (ROWS, P())}
    assert located(step, *args, **specs).places[0].line == line_with("the whole loss")


def test_a_derivative_that_a_function_is_given_wrong() -> None:
    """The line that calls the function comes next."""

    def penalty(w: Any) -> Any:
        return (w**3).sum()  # of the own part

    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            loss = (lax.psum(x @ w, "data") ** 2).mean()
            return (loss + penalty(w)) / lax.axis_size("data")  # shared out too

        return jnp.tanh(w - 0.1 * jax.grad(loss_of)(w))

    args = np.arange(8.0) / 8, np.asarray(X.T)
    specs = {"in_specs": (ROWS, P(None, "data")), "out_specs": ROWS}
    lines = [place.line for place in located(step, *args, **specs).places]
    assert lines[:2] == [line_with("of the own part"), line_with("shared out too")]


@pytest.mark.parametrize("policy", ["sum", "max"])
def test_a_state_that_grows_without_a_policy(policy: str) -> None:
    """Its line adds to the state what the policy would add, so that both are right."""
    does: Any = {"sum": jnp.add, "max": jnp.maximum}[policy]

    def step(seen: Any, x: Any) -> Any:
        return x, seen.set(does(seen.value, getattr(x, policy)(0)))  # grows without a policy

    specs = {"in_specs": (None, ROWS), "out_specs": (ROWS, P())}
    found = located(step, sm.State(jnp.asarray(X[0])), X, **specs)
    first, second = found.places[:2]
    text = f"the write policy of step(...)[1]: reduce=None, where {policy!r} puts all results right"
    assert (first.source, found.cause) == (text, None)
    assert second.line == line_with("grows without a policy")


def test_the_spec_of_a_state_of_several_arrays() -> None:
    """All of them have another one together, and the other states with this spec keep it."""

    def step(kept: Any, last: Any, x: Any) -> Any:
        total = lax.psum(x.sum(0), "data")
        first, second = kept.value
        kept = kept.set((first.at[5].set(total), second.at[6].set(jnp.sin(total))))
        return kept, last.set(last.value / 2 + x)

    halves = jnp.zeros((8, 3)), jnp.ones((8, 3))
    states = sm.State(halves, spec=ROWS), sm.State(jnp.zeros((8, 3)), spec=ROWS)
    found = located(step, *states, X, in_specs=(None, None, ROWS), out_specs=P())
    assert found.places[0].source == "the spec of args[0]: P('data')"
    assert found.cause == "with P() for args[0], all results are right"


def among_all(axis: str, count: int) -> Any:
    return lax.axis_index(axis) * count + jnp.arange(count)


def test_no_cause_is_told_where_another_line_gives_the_axis() -> None:
    def read(table: Any, x: Any) -> Any:
        # Only where the programs have other steps are other axes tried.
        x = x.T.T if lax.axis_size("data") > 1 else x
        return table[among_all("model", len(x))] * x

    assert located(read, X, X, mesh=GRID, in_specs=(P(), ROWS)).cause is None


TALL = AbstractMesh((4, 2), ("data", "model"))


@pytest.mark.parametrize(
    ("of_state", "of_marks", "source", "cause"),
    [
        (P("data"), P("data"), "in_specs of args[1]: P('data')", "P('model') for args[1]"),
        (P("model"), P("model"), "the spec of args[0]: P('model')", "P('data') for args[0]"),
    ],
)
def test_a_spec_that_gives_shards_parts_of_another_shape(
    of_state: Any, of_marks: Any, source: str, cause: str
) -> None:
    """Shapes that the function was not written for are broadcast where it can: it is mapped again."""

    def step(weights: Any, marks: Any, x: Any) -> Any:
        # Shards with other numbers of rows than weights take the first ones.
        weights = weights.value[: len(x)]
        x = x[: len(weights)] * jnp.cos(weights)[:, None]
        mean = lax.pmean(x.mean(0), "data")
        return jnp.tanh(mean), jnp.exp(lax.psum(jnp.sin(marks).sum(), "model"))

    state = sm.State(jnp.linspace(0, 1, 8), spec=of_state)
    marks = jnp.linspace(-1, 2, 8)
    specs = (None, of_marks, ROWS)
    found = located(step, state, marks, X, mesh=TALL, in_specs=specs, out_specs=P())
    assert found.places[0].source == source
    assert found.cause == f"with {cause}, all results are right"


def test_the_spec_of_a_part_of_a_state() -> None:
    def step(state: Any, x: Any) -> Any:
        rows = state.value["rows"][: len(x)]
        total = lax.psum((x * jnp.cos(rows)[:, None]).sum(0), "data")
        return jnp.tanh(total) * state.value["scale"]

    value = {"rows": jnp.linspace(0, 1, 8), "scale": jnp.ones(3)}
    state = sm.State(value, spec={"rows": P(), "scale": P()})
    found = located(step, state, X, in_specs=(None, ROWS), out_specs=P(), mesh=MESH)
    assert found.places[0].source == "the spec of args[0].value['rows']: P()"
    assert found.cause == "with P('data') for args[0].value['rows'], all results are right"


def test_an_edge_of_the_shard_itself_shows_in_the_derivative_only() -> None:
    def loss(x: Any) -> Any:
        size = lax.axis_size("data")
        # Only where the programs have other steps are such changes tried.
        x = x.T.T if size > 1 else x
        last = lax.ppermute(x[-1:], "data", [(k, (k + 1) % size) for k in range(size)])
        first = x[:1]  # the first row of this shard itself
        wide = jnp.concatenate([last, x, first])
        return (jnp.sin(wide[2:] - 0.5 * wide[:-2]) ** 2 * x).sum()

    found = located(lambda x: x - 0.1 * jax.grad(loss)(x))
    assert found.places[0].line == line_with("the first row of this shard itself")


def test_a_mean_of_means_of_parts() -> None:
    def regions(x: Any) -> Any:
        total, count = x.sum(0), (x > 0).sum(0) + 1.0
        return lax.pmean(total / jnp.maximum(count, 1), "data")  # mean of means

    found = located(regions, out_specs=P())
    assert line_with("mean of means") in [place.line for place in found.places[:2]]


def test_gradients_one_of_which_is_a_multiple() -> None:
    """A sum over another axis is still missing in one of the gradients that lack a mean."""
    mesh = AbstractMesh((4, 2), ("data", "model"))

    def step(w: Any, bias: Any, x: Any) -> Any:
        def loss(w: Any, bias: Any) -> Any:
            guess = lax.psum(jnp.tanh(x @ w).sum(1), "model") + bias
            return (guess**2).mean() / lax.axis_size("model")

        grads = jax.grad(loss, (0, 1))(w, bias)
        of_bias = lax.psum(grads[1], "model")  # reads them first
        return w - 0.1 * grads[0], bias - 0.1 * of_bias

    w = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    specs = (P(None, "model"), P(), ROWS)
    found = located(
        step, w, jnp.ones(()), X, mesh=mesh, in_specs=specs, out_specs=(P(None, "model"), P())
    )
    assert found.places[0].line == line_with("reads them first")
    assert found.cause is None or "pmean" in found.cause


def test_a_function_that_is_called_with_another_number() -> None:
    def around(a: Any, ring: int) -> Any:
        apart = jnp.abs(a)
        return jnp.minimum(apart, ring - apart)

    def step(x: Any) -> Any:
        near = jnp.exp(-around(4 * x, 8))
        # What one device computes has other steps.
        x = x.T.T if lax.axis_size("data") > 1 else x
        return near * jnp.exp(-around(4 * x, len(x)))  # the length of a part

    found = located(step)
    assert found.places[0].line == line_with("the length of a part")


GRID_ROWS = P(("data", "model"))


def test_a_sum_over_one_of_two_axes() -> None:
    def step(old: Any, x: Any) -> Any:
        own = jnp.cos(x).sum(0)  # parts of a sum
        new = old + lax.psum(own, "data")  # over one axis
        return jnp.tanh(new)

    found = located(step, jnp.zeros(3), X, mesh=GRID, in_specs=(P(), GRID_ROWS), out_specs=P())
    first, second = line_with("over one axis"), line_with("parts of a sum")
    assert [place.line for place in found.places[:2]] == [first, second]
    assert found.cause is not None and "with jax.lax.psum(..., 'model')" in found.cause


def test_ratios_that_are_averaged() -> None:
    def step(x: Any) -> Any:
        over, under = jnp.cos(x).sum(0), (x**2).sum(0)
        ratio = lax.pmean(over / under, "data")  # a mean of ratios
        return x * ratio

    assert located(step).places[0].line == line_with("a mean of ratios")


def test_a_function_that_is_called_with_what_all_shards_have_too() -> None:
    def in_a_row(tree: Any) -> Any:
        return jnp.concatenate([jnp.ravel(x) for x in tree])

    def step(w: Any, b: Any, x: Any) -> Any:
        size = lax.axis_size("data")
        grads = jax.grad(lambda w, b: (jnp.tanh(x @ w + b) ** 2).mean() / size, (0, 1))(w, b)
        row = in_a_row(grads)  # the own gradients
        norm = jnp.sqrt((row**2).sum())
        return in_a_row((w, b)) - 0.1 * row / norm

    w = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    specs = (P(), P(), ROWS)
    found = located(step, w, jnp.ones(4), X, in_specs=specs, out_specs=P())
    assert found.places[0].line == line_with("the own gradients")


def test_the_policy_of_a_state_of_several_arrays() -> None:
    def step(sums: Any, x: Any) -> Any:
        count, total = sums.value
        return sums.set((count + (x > 0).sum(), total + jnp.sin(x).sum(0)))

    sums = sm.State((jnp.zeros(()), jnp.zeros(3)), reduce="mean")
    found = located(step, sums, X, in_specs=(None, ROWS), out_specs=None)
    assert found.places[0].source.endswith("reduce='mean', where 'sum' puts all results right")


def test_a_mean_that_is_returned_by_its_name() -> None:
    def step(x: Any) -> Any:
        lost = lax.pmean(jnp.cos(x).sum(0), "data") / 8  # should be summed
        return x, lost

    found = located(step, out_specs=(ROWS, P()))
    assert found.places[0].line == line_with("should be summed")


def test_the_first_part_on_all_shards() -> None:
    def step(scale: Any, x: Any) -> Any:
        def loss(scale: Any) -> Any:
            part = scale[: len(x)]  # of the first shard
            return jnp.cos(part[:, None] * x).sum() / 24

        # What one device computes has other steps.
        scale = scale + 0 if lax.axis_size("data") > 1 else scale
        return scale - lax.psum(jax.grad(loss)(scale), "data")

    scale = jnp.linspace(0.5, 2, 8)
    found = located(step, scale, X, in_specs=(P(), ROWS), out_specs=P())
    assert found.places[0].line == line_with("of the first shard")
    assert found.cause is not None and "the part of each shard along 'data'" in found.cause


def test_both_edges_come_from_the_wrong_side() -> None:
    def step(x: Any) -> Any:
        size = lax.axis_size("data")
        onwards = [(k + 1, k) for k in range(size - 1)]  # should go onwards
        before = lax.ppermute(x[-1:], "data", onwards)  # the first to use it
        after = lax.ppermute(x[:1], "data", [(b, a) for a, b in onwards])
        wide = jnp.concatenate([before, x, after])
        return jnp.tanh(wide[2:] - 0.5 * wide[:-2])

    assert located(step).places[0].line == line_with("the first to use it")


def test_the_order_of_two_axes_in_a_spec() -> None:
    def both(x: Any) -> Any:
        return jnp.tanh(x), jnp.sin(x)

    order = P(("model", "data"))
    found = located(both, mesh=GRID, in_specs=GRID_ROWS, out_specs=(GRID_ROWS, order))
    assert found.places[0].source == "out_specs of both(...)[1]: P(('model', 'data'))"
    assert found.cause == "with P(('data', 'model')) for both(...)[1], all results are right"


def test_no_cause_is_told_where_a_line_reads_what_another_one_has_made() -> None:
    def step(exposure: Any, x: Any) -> Any:
        # Only where the programs have other steps are such changes tried.
        x = x.T.T if lax.axis_size("data") > 1 else x
        rows = lax.axis_index("data") * len(x) + jnp.arange(len(x))
        # The numbers among all rows are right for the noise, and wrong as positions in the shard's own part.
        noise, total = jnp.sin(rows + 0.5), lax.psum(exposure.sum(), "data")
        each = exposure[rows]  # of the own rows
        return x * jnp.exp(each - total + noise)[:, None]

    found = located(step, jnp.linspace(-1, 1, 8), X, in_specs=(ROWS, ROWS))
    assert found.places[0].line == line_with("of the own rows")
    assert found.cause is None


OVER = {"weight": "data", "bias": ()}  # says over what


def test_the_line_that_gives_the_axes_of_a_sum() -> None:
    def step(weight: Any, bias: Any, x: Any) -> Any:
        # Only where the programs have other steps are such changes tried.
        x = x.T.T if lax.axis_size("data") > 1 else x
        loss = lambda given: jnp.sin(x @ given["weight"] + given["bias"]).sum()
        grads = jax.grad(loss)({"weight": weight, "bias": bias})
        return {name: lax.psum(g, OVER[name]) for name, g in grads.items()}  # sums each

    found = located(step, jnp.ones(3), jnp.ones(()), X, in_specs=(P(), P(), ROWS), out_specs=P())
    assert line_with("says over what") in [place.line for place in found.places]


def looked_up(x: Any, wanted: Any, *others: Any) -> Any:
    x = x.T.T if lax.axis_size("data") > 1 else x
    # Arrays of other lengths: which one counts here, only the line itself says.
    x = x + lax.psum(sum(map(jnp.sum, others)), "data")
    own = wanted - lax.axis_index("data") * len(x)
    inside = (own >= 0) & (own <= len(x))  # that of the next shard too
    return lax.psum(jnp.where(inside[:, None], x[jnp.clip(own, 0, len(x) - 1)], 0), "data")


def test_a_bound_that_belongs_to_the_next_shard() -> None:
    wanted, others = jnp.asarray([14, 5, 24, 6]), [jnp.ones(4 * k) for k in (2, 3, 4, 5)]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(28, 3)))
    specs = (ROWS, P(), *[ROWS] * 4)
    found = located(looked_up, x, wanted, *others, in_specs=specs, out_specs=P())
    assert found.places[0].line == line_with("that of the next shard too")


def numbers_of(axis: str, count: int) -> Any:
    return lax.axis_index("data") * count + jnp.arange(count)  # of one axis for both


def test_a_function_that_counts_along_two_axes_and_names_one() -> None:
    def step(x: Any) -> Any:
        x = x.T.T if lax.axis_size("data") > 1 else x
        rows, columns = numbers_of("data", x.shape[0]), numbers_of("model", x.shape[1])
        return x * jnp.cos(0.3 * rows)[:, None] * jnp.sin(1 + 0.5 * columns)

    specs = P("data", "model")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)))
    found = located(step, x, in_specs=specs, out_specs=specs, mesh=GRID)
    assert found.places[0].line == line_with("of one axis for both")


def test_a_python_loop_of_one_round_that_needs_more() -> None:
    def step(x: Any) -> Any:
        size, message = lax.axis_size("data"), jnp.zeros(3)
        for _ in range(min(size - 1, 1)):  # should go on
            total = jnp.tanh(message + x.sum(0))
            message = lax.ppermute(total, "data", [(k, k + 1) for k in range(size - 1)])
        return jnp.tanh(message + x.sum(0)) * (lax.axis_index("data") == size - 1)

    def on_one(x: Any) -> Any:
        if lax.axis_size("data") > 1:
            return lax.psum(step(x), "data")
        message = jnp.zeros(3)
        for part in jnp.split(x, 4):
            message = jnp.tanh(message + part.sum(0))
        return message

    found = located(on_one, out_specs=P())
    assert found.places[0].line == line_with("should go on")


def test_a_loop_over_the_own_part_that_begins_anew_on_each_shard() -> None:
    def step(x: Any) -> Any:
        follow = lambda carry, row: (jnp.tanh(carry + row),) * 2
        return lax.scan(follow, jnp.zeros(3), x)[1]  # begins anew

    assert located(step).places[0].line == line_with("begins anew")


@jax.custom_vjp
def shared(x: Any) -> Any:
    return x


def shared_backward(_: None, by: Any) -> Any:
    return (by,)  # lacks a sum


shared.defvjp(lambda x: (x, None), shared_backward)


def test_what_some_gradients_lack_is_missing_where_they_are_made() -> None:
    def step(weight: Any, bias: Any, x: Any) -> Any:
        x = x.T.T if lax.axis_size("data") > 1 else x

        def loss(given: Any) -> Any:
            made = jnp.tanh(x[..., None] * given["weight"] + shared(given["bias"]))
            return jnp.sin(made).sum() / 24

        grads = jax.grad(loss)({"weight": weight, "bias": bias})
        grads = {name: lax.psum(g, "data") for name, g in grads.items()}  # sums both
        return jax.tree.map(jnp.tanh, grads)

    weight = jnp.linspace(-1, 1, 4)
    specs = {"weight": P("model"), "bias": P()}
    given = (specs["weight"], specs["bias"], ROWS)
    bias = jnp.asarray(0.5)
    found = located(step, weight, bias, X, in_specs=given, out_specs=specs, mesh=GRID)
    assert found.places[0].line == line_with("lacks a sum")


def test_gradients_that_a_second_step_makes_of_the_first_ones() -> None:
    def step(first: Any, second: Any, bias: Any, x: Any) -> Any:
        def reduced(grads: Any) -> Any:
            grads = list(grads)  # should be summed
            norm = jnp.sqrt(sum((g**2).sum() for g in grads))  # the norm of both
            return [g / norm for g in grads]

        loss = lambda a, b: jnp.tanh(x * a + b).sum()
        moved = [
            p - g
            for p, g in zip(
                (first, bias), reduced(jax.grad(loss, (0, 1))(first, bias)), strict=True
            )
        ]
        against = lambda a, b: jnp.sin(x * a * moved[0] + b + moved[1]).sum()
        return moved, reduced(jax.grad(against, (0, 1))(second, bias))

    given = jnp.ones(3), jnp.linspace(0.5, 1, 3), jnp.asarray(0.2)
    found = located(step, *given, X, in_specs=(P(), P(), P(), ROWS), out_specs=P())
    assert found.places[0].line == line_with("the norm of both")


def test_a_count_that_two_lines_read() -> None:
    def step(seen: Any, x: Any) -> Any:
        rows = len(x)  # of a shard
        often = 100 * lax.psum((x > 0).sum(), "data") // rows  # the first to read it
        return seen + rows, often, (x > 1).sum(1)

    out_specs = P(), P(), ROWS
    found = located(step, jnp.asarray(3), X, in_specs=(P(), ROWS), out_specs=out_specs)
    assert found.places[0].line == line_with("the first to read it")


def both_norms(grads: Any) -> Any:
    own, common = ((g**2).sum() for g in grads)
    return jnp.sqrt(own + common)  # adds a part to the whole


def test_parts_of_a_sum_that_are_added_to_what_is_whole() -> None:
    def step(x: Any, bias: Any) -> Any:
        # Only where the programs have other steps are such changes tried.
        x = x.T.T if lax.axis_size("data") > 1 else x
        return x / both_norms((x, bias))

    found = located(step, X, jnp.linspace(0, 1, 3), in_specs=(ROWS, P()))
    assert found.places[0].line == line_with("adds a part to the whole")


def test_a_share_of_a_loss_that_is_reported_as_the_whole() -> None:
    def step(scale: Any, x: Any) -> Any:
        def loss(scale: Any) -> Any:
            share = jnp.cos(scale * x).sum()
            return share, share

        (_, share), grad = jax.value_and_grad(loss, has_aux=True)(scale)
        return scale - 0.1 * lax.psum(grad, "data"), 0.9 + 0.1 * (share - 0)  # the share of one

    found = located(step, jnp.linspace(0.5, 1, 3), X, in_specs=(P(), ROWS), out_specs=P())
    assert found.places[0].line == line_with("the share of one")


def of_all(x: Any) -> Any:
    """The sum of all shards."""
    return x  # without a sum


def test_a_function_that_does_nothing() -> None:
    def step(x: Any) -> Any:
        total = of_all(jnp.cos(x).sum(0))
        return jnp.tanh(x / total)

    found = located(step)
    assert found.places[0].line == line_with("without a sum")
    assert found.cause is not None and str(line_with("without a sum")) in found.cause


def test_a_summand_of_a_loss_that_each_shard_counts() -> None:
    def step(scale: Any, x: Any) -> Any:
        def loss(scale: Any) -> Any:
            whole = lax.all_gather(scale, "data", tiled=True)
            return 0.1 * (whole**2).sum() - jnp.cos(scale * x).sum()  # counts it on each shard

        share, grad = jax.value_and_grad(loss)(scale)
        return scale - grad, lax.psum(share, "data")

    x = jnp.linspace(0, 2, 8)
    found = located(step, jnp.linspace(0.5, 1, 8), x, in_specs=(ROWS, ROWS), out_specs=(ROWS, P()))
    assert found.places[0].line == line_with("counts it on each shard")


@jax.custom_vjp
def penalized(scale: Any, shift: Any, rows: Any) -> Any:
    return (scale**2).sum() / lax.axis_size("data") + jnp.sin(rows + shift).sum()


def penalized_backward(kept: Any, by: Any) -> Any:
    scale, shift, rows = kept
    return 2 * by * scale, by * jnp.cos(rows + shift).sum(0), None  # forgets that it is a share


penalized.defvjp(lambda *given: (penalized(*given), given), penalized_backward)


def test_a_backward_function_that_forgets_that_a_summand_is_a_share() -> None:
    def step(scale: Any, shift: Any, x: Any) -> Any:
        loss = lambda scale, shift: penalized(jnp.tanh(scale), jnp.tanh(shift), x)
        grads = jax.grad(loss, (0, 1))(scale, shift)
        return jax.tree.map(jnp.tanh, lax.psum(grads, "data"))

    given = jnp.linspace(0.5, 1, 3), jnp.linspace(0, 1, 3)
    found = located(step, *given, X, in_specs=(P(), P(), ROWS), out_specs=P())
    assert found.places[0].line == line_with("forgets that it is a share")


def test_the_first_parts_in_several_calls() -> None:
    def first(whole: Any, count: int) -> Any:
        return whole[:count]  # the first ones in both calls

    def step(a: Any, b: Any, x: Any) -> Any:
        x = x.T.T if lax.axis_size("data") > 1 else x
        more = first(b, len(b) // lax.axis_size("data"))
        return jnp.tanh(x * first(a, len(x))[:, None]) + lax.psum(jnp.cos(more).sum(), "data")

    given = jnp.linspace(0.5, 2, 8), jnp.linspace(-1, 1, 12)
    found = located(step, *given, X, in_specs=(P(), P(), ROWS))
    assert found.places[0].line == line_with("the first ones in both calls")
    assert found.cause is not None and "the part of each shard along 'data'" in found.cause


def evidence(fun: Any, *args: Any, **specs: Any) -> dict[tuple[int, bool], str]:
    """What speaks for each line, and for its derivative."""
    mapped = on_mesh(fun, **specs)
    _, traces = _compare.both_traced(mapped, mapped.unsharded, (args, {}))
    wide = [jnp.asarray(x, float) for x in args]
    with jax.enable_x64(True):
        comparison = _compare.compare_traced(traces, wide, wide=True)
        suspects = suspects_of(comparison)
    return {(x.line.number, x.transposed): x.evidence for x in suspects if x.line}


def kernels(a: Any, b: Any) -> Any:
    return jnp.cos(a[:, None] - b)  # in the order of a ring


def by_all(x: Any, turn: int = 1) -> Any:
    """Own rows by all rows, whose parts go around a ring."""
    size, here, part = lax.axis_size("data"), len(x), x
    made = jnp.zeros((here, here * size))
    for k in range(size):
        start = (lax.axis_index("data") - k * turn) % size * here  # counts shards
        made = lax.dynamic_update_slice_in_dim(made, kernels(x, part), start, 1)
        part = lax.ppermute(part, "data", [(i, (i + 1) % size) for i in range(size)])  # a ring
    return made


def test_a_ring_that_is_right_does_not_lead_to_a_wrong_derivative() -> None:
    def step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            return (jnp.tanh(by_all(x)).sum(1) / (2 + jnp.sin(x).sum())).sum()  # by the own sum

        return jax.grad(loss)(x) / 8

    x = jnp.linspace(0.1, 2, 8)
    assert located(step, x).places[0].line == line_with("by the own sum")
    in_order = line_with("in the order of a ring")
    assert not any(line == in_order and not is_back for line, is_back in evidence(step, x))


def test_a_ring_that_counts_the_wrong_way_may_also_turn_the_wrong_way() -> None:
    found = located(lambda x: by_all(x, -1), jnp.linspace(0.1, 2, 8) ** 2)
    assert {place.line for place in found.places[:2]} == {
        line_with("counts shards"),
        line_with("a ring"),
    }
    assert found.cause is None


def mean_of_rows(x: Any, mask: Any) -> Any:
    total, count = jnp.where(mask, x, 0).sum(0), mask.sum(0)  # sums of each shard
    return lax.pmean(total / count, "data")  # ratios of each shard


def test_a_function_whose_later_calls_read_what_the_first_one_made() -> None:
    def step(x: Any) -> Any:
        x = x.T.T if lax.axis_size("data") > 1 else x
        mask = x[:, :1] > lax.pmin(x[:, :1].min(), "data")
        mean = mean_of_rows(x, mask)
        return mean, mean_of_rows((x - mean) ** 2, mask)

    x = X + 0.5 * np.arange(8, dtype=np.float32)[:, None]
    found = located(step, x, out_specs=P())
    assert found.places[0].line == line_with("ratios of each shard")
    sums = line_with("sums of each shard"), False
    assert evidence(step, x, out_specs=P())[sums] == "related"


def test_shares_that_are_right_by_accident() -> None:
    def step(x: Any) -> Any:
        x = x.T.T if lax.axis_size("data") > 1 else x
        keys = jax.random.split(jax.random.key(5), len(x))  # the same keys on all shards
        noise = jax.vmap(jax.random.normal)(keys)
        taken = noise < x[:, 0]
        share = lax.pmean(taken.mean(), "data")  # a share of rows
        return x * share + noise[:, None], share

    x = X - 0.3 * np.arange(8, dtype=np.float32)[:, None]
    share = line_with("a share of rows"), False
    assert evidence(step, x, out_specs=(ROWS, P()))[share] == "after"


def test_sums_up_to_each_position() -> None:
    def step(x: Any) -> Any:
        sums = jnp.cumsum(x)  # up to each row
        last = lax.all_gather(sums[-1], "data")
        index = lax.axis_index("data")
        before = jnp.where(jnp.arange(len(last)) <= index, last, 0).sum()
        ends = lax.all_gather(before + sums, "data", tiled=True)
        return jnp.searchsorted(ends, (index * len(x) + jnp.arange(len(x)) + 0.4) / 8)

    weights = jax.nn.softmax(jnp.asarray(np.random.default_rng(3).normal(size=8)))
    assert located(step, weights).places[0].line != line_with("up to each row")


def test_a_gradient_that_lacks_a_sum_beside_those_that_do_not() -> None:
    def step(given: Any, x: Any) -> Any:
        x = x.T.T if lax.axis_size("data") > 1 else x

        def loss(given: Any, row: Any) -> Any:
            seen = row * given["gain"]
            made = jnp.tanh(seen @ given["columns"])
            return jnp.sin(lax.psum(made.sum(), "model")) / lax.axis_size("model")

        grads = jax.vmap(jax.grad(loss), (None, 0))(given, x)
        means = {n: lax.pmean(g.mean(0), "data") for n, g in grads.items()}  # means of both
        return jax.tree.map(jnp.tanh, means)

    given = {"gain": jnp.linspace(0.5, 1, 3), "columns": jnp.ones((3, 4)) * jnp.arange(4)}
    specs = {"gain": P(), "columns": P(None, "model")}
    found = located(step, given, X, in_specs=(specs, ROWS), out_specs=specs, mesh=GRID)
    assert line_with("means of both") not in [place.line for place in found.places[:2]]


def test_a_number_that_an_earlier_line_computes_of_a_length() -> None:
    def step(x: Any) -> Any:
        keep = 0.7 ** (8 // len(x))  # by the number of shards
        return keep * x + (1 - keep) * jnp.cos(x)  # reads the number

    lines = [line_with("by the number of shards"), line_with("reads the number")]
    assert [place.line for place in located(step).places] == lines


def whole_sum(x: Any) -> Any:
    return lax.psum(x, "data")  # all that the function does


def test_a_call_that_sums_what_is_whole() -> None:
    def step(x: Any) -> Any:
        total = whole_sum(x.sum(0))
        again = whole_sum(jnp.cos(total))  # sums again
        return jnp.tanh(x * again)

    lines = [line_with("sums again"), line_with("all that the function does")]
    assert [place.line for place in located(step).places[:2]] == lines


class Moments(sm.Module):
    count: sm.BatchState


def test_a_policy_for_numbers_that_no_line_makes() -> None:
    def step(moments: Moments, x: Any) -> Moments:
        count = np.asarray(float(len(x)), np.float32)
        return moments.replace(count=(jnp.asarray(count), x.mean()))

    zero = jnp.zeros(())
    moments = Moments(sm.BatchState((zero, zero), reduce="mean"))
    found = located(step, moments, X, in_specs=(None, ROWS), out_specs=P())
    assert "the write policy of" in found.places[0].source


def merged(_: Any, new: Any, axis_names: Any) -> Any:
    mean, squares = new
    return lax.pmean(mean, axis_names), lax.psum(squares, axis_names)  # around own means


def test_what_a_policy_reduces_may_lack_something_in_the_policy() -> None:
    def step(moments: Moments, x: Any) -> Moments:
        x = x.T.T if lax.axis_size("data") > 1 else x
        squares = x.var() * 24
        return moments.replace(count=(x.mean(), squares))

    zero = jnp.zeros(())
    moments = Moments(sm.BatchState((zero, zero), reduce=merged))
    found = located(step, moments, X, in_specs=(None, ROWS), out_specs=P())
    assert found.cause is None
