"""The check tells mistakes from rounding: in narrow dtypes, beside large numbers, and where digits cancel.

It calls a function with other values, too: generic ones, large ones, NaN and infinities.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import RangeWarning, UntestedWarning, assert_equivalent
from statemesh.testing._program._counters import counters, limits_of
from statemesh.testing._program._literals import Exact
from statemesh.testing._program._noise import Noisy
from statemesh.testing._program._other_values import counts
from tests.helpers import slow

from .checked import assert_accused, check, report


jnp: Any = jax.numpy
lax: Any = jax.lax
FOUR: list[Any] = [{"x": 4}]
X = np.sin(np.arange(16, dtype=np.float32)).reshape(8, 2)


def rows(dtype: str) -> Any:
    return jnp.asarray(np.sin(np.arange(64 * 16)).reshape(64, 16), dtype)


def on_one(right: Any, mistaken: Any) -> Any:
    """What a mistake gives on one shard, where it is none, and on several."""
    return right if lax.axis_size("x") == 1 else mistaken


# Noise


@pytest.mark.parametrize("x", [1 + np.arange(4096) * 2.0**-23, np.arange(1.0, 4097.0)])
@pytest.mark.parametrize("run", [1.0, 2.0])
def test_noise_is_spread_over_a_roundoff_and_other_for_the_next_number(x: Any, run: float) -> None:
    (eqn,) = jax.make_jaxpr(lambda x: x * np.float32(0.3))(x.astype(np.float32)).eqns
    exact = x * np.float64(np.float32(0.3))
    with jax.enable_x64(True):
        noisy = Noisy(jnp.array([0.0, 1.0, run]), frozenset(), Exact())
        (moved,) = noisy.bind(eqn, [jnp.asarray(x), jnp.asarray(exact[0] / x[0])])
    # By what part of the roundoff of float32 each product is off.
    parts = (np.asarray(moved) / exact - 1) * 2.0**23
    counts, _ = np.histogram(parts, 16, (-1, 1))
    assert counts.sum() == 4096
    assert abs(counts - 256).max() < 80  # Five standard deviations.
    for step in (1, 2, 3):
        assert abs(np.corrcoef(parts[:-step], parts[step:])[0, 1]) < 0.1


def test_an_array_that_is_made_empty_is_not_rounded() -> None:
    (eqn,) = jax.make_jaxpr(lambda: lax.empty((2,), "float32"))().eqns
    with jax.enable_x64(True):
        (made,) = Noisy(jnp.array([0.0, 1.0, 1.0]), frozenset(), Exact()).bind(eqn, [])
    assert made.shape == (2,)


# Mistakes that are larger than rounding


def sums(x: Any) -> Any:
    total = lax.psum(x.sum(0), "x")
    return {
        "right": total,
        "right_mean": lax.pmean(x.mean(0), "x"),
        "right_spread": jnp.sqrt(lax.pmean(jnp.square(x - total / 64).mean(0), "x")),
        "averaged": on_one(total, lax.pmean(x.sum(0), "x")),
        "twice": total * on_one(1, 2),
        "largest": on_one(total, lax.pmax(x.sum(0), "x")),
        "first_row": on_one(total, total - lax.psum(x[0], "x") / 4),
        "own_spread": lax.pmean(x.std(0), "x"),
    }


@pytest.mark.slow
def test_mistakes_in_a_narrow_dtype_are_found() -> None:
    mistakes = {"averaged", "twice", "largest", "first_row", "own_spread"}
    # With large values sums overflow on the mesh only.
    assert_accused(mistakes, sums, rows("bfloat16"), meshes=FOUR, keep=["args[0]"])


def test_mistakes_of_the_gradient_in_bfloat16_are_found() -> None:
    forgotten = lambda x: lax.psum(on_one(x, lax.stop_gradient(x)).sum(0), "x")
    text = report(forgotten, rows("bfloat16"), meshes=FOUR, gradients=True)
    assert "the gradient by args[0]: bfloat16[64,16]" in text


@pytest.mark.slow
def test_a_small_part_of_a_large_array_is_found() -> None:
    x = np.cos(np.arange(256 * 256, dtype=np.float32)).reshape(256, 256)
    text = report(lambda x: x * on_one(1.0, 1.0003), x, out_specs=P("x"))
    assert "float32[256,256], off by 0.0003" in text


def beside_others(x: Any) -> Any:
    total, large = lax.psum(x.sum(0), "x"), jnp.full(2, -1e9)
    mean = lax.psum(jnp.sin(x).sum(), "x") / 16
    # Of this number, a sum of what is left of a mean, no digit is more than rounding.
    nothing = lax.psum((jnp.sin(x) - mean).sum(), "x") * 1e14
    # Eleven of sixteen digits cancel: rounding leaves five in double precision.
    far = total * 1e10
    return {
        "right_beside_large": jnp.append(total, large),
        "mistaken_beside_large": jnp.append(total * on_one(1, 1.01), large),
        "right_beside_nothing": jnp.append(total, nothing),
        "mistaken_beside_nothing": jnp.append(total * on_one(1, 1.001), nothing),
        "right_digits": (far + 1.0) - far,
        "mistaken_digits": (far + on_one(1.0, 1.01)) - far,
    }


@pytest.mark.slow
def test_numbers_that_are_large_or_cancel_do_not_loosen_those_beside_them() -> None:
    mistakes = [f"mistaken_{what}" for what in ("beside_large", "beside_nothing", "digits")]
    assert "On mesh x=2, compared with" in assert_accused(mistakes, beside_others, X + 1)


@pytest.mark.slow
def test_a_narrow_dtype_on_the_mesh_only_is_found() -> None:
    def in_half(x: Any) -> Any:
        total = lax.psum(jnp.square(x).sum(0), "x")
        return {
            "right": total,
            "mistaken": on_one(total, total.astype(jnp.float16)).astype(x.dtype),
        }

    assert_accused({"mistaken"}, in_half, rows("float32"))


# What is carried


def averaged(total: sm.State, x: Any) -> Any:
    return total.set(total.value + on_one(lax.psum(x.mean(0), "x"), lax.psum(x.mean(0), "x") / 4))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "large"), [("float32", 1e6), ("bfloat16", 1000)])
def test_the_increment_of_a_large_total_is_compared(dtype: str, large: float) -> None:
    total = sm.State(jnp.full(2, large, dtype))
    text = report(averaged, total, jnp.asarray(X + 2, dtype), in_specs=(None, P("x")))
    assert f"averaged(...).value: {dtype}[2], off by" in text


# What cannot be judged is named


def test_numbers_of_which_rounding_leaves_nothing_are_named() -> None:
    def cancelling(x: Any) -> Any:
        x = jnp.sin(x)
        nothing = lax.psum((x - lax.pmean(x.mean(0), "x")).sum(0), "x")
        return {"nothing": nothing, "clear": lax.psum(jnp.square(x).sum(0), "x")}

    with pytest.warns(UntestedWarning, match=r"\['nothing'\]: none of its numbers could be judged"):
        checked = check(cancelling, X, meshes=FOUR)
    assert checked.unjudged == {"cancelling(...)['nothing']": 2}
    assert "cancelling(...)['clear']" not in checked.only_double


@pytest.mark.parametrize(("large", "named"), [(1000, False), slow(1e7, True)])
def test_numbers_that_only_double_precision_shows_are_named(large: float, named: bool) -> None:
    def far(x: Any) -> Any:
        new = (lax.psum(jnp.square(x).sum(0), "x") + large) - large
        # What is zero is judged.
        return new if named else jnp.zeros((8, 2)).at[0].set(new)

    checked = check(far, X * 0.77, meshes=FOUR)
    assert checked.unjudged == {}
    assert checked.only_double == ({"far(...)": 2} if named else {})


# A tolerance of one's own


def within(x: Any) -> Any:
    total = lax.psum(jnp.square(x).sum(0), "x")
    large = jnp.round(jnp.sqrt(total) * 1000).astype(jnp.int32)
    count = lax.psum(jnp.int32(len(x)), "x")
    many = jnp.arange(20) + x[0, 0] * 0
    many = lax.pmax(many, "x")
    return {
        "close": total * on_one(1, 1.04),
        "far": total * on_one(1, 1.2),
        "small": total * 1e-6 * on_one(1, 1.2),
        "whole": large + on_one(0, large // 50),
        "whole_far": large + on_one(0, large // 5),
        "few": many < on_one(9.5, 10.5),
        "several": many < on_one(9.5, 14.5),
        "count": count + on_one(0, 1) * 0,
        "count_off": count * 100 + on_one(0, 1),
    }


@pytest.mark.slow
def test_a_tolerance_is_relative_to_the_numbers() -> None:
    """Also for integers and booleans that are computed from floats, but for no others."""
    far = {"far", "small", "whole_far", "several", "count_off"}
    assert_accused(far, within, X, tolerance=0.1)
    assert_accused({*far, "close", "whole", "few"}, within, X)


def test_a_tolerance_is_for_whole_numbers_that_a_branch_of_floats_gives() -> None:
    def chosen(x: Any) -> Any:
        some, all_rows = on_one(3, 4), lax.psum(x.sum(), "x")
        return lax.cond(all_rows > -100, lambda: jnp.full(2, some), lambda: jnp.zeros(2, int))

    check(chosen, X, tolerance=0.5)
    assert "off by 1" in report(chosen, X, tolerance=0.1)


def test_a_tolerance_of_zero_wants_equal_numbers() -> None:
    def fun(x: Any) -> Any:
        total = lax.psum(x.sum(0), "x")  # Of whole numbers, which are summed exactly.
        return {"exact": total, "off": total * on_one(1, 1 + 1e-6)}

    assert_accused({"off"}, fun, np.round(X * 9), tolerance=0.0, gradients=False)


# NaN and infinities


def with_holes(x: Any) -> Any:
    one = lax.axis_size("x") == 1
    row = lax.axis_index("x") * len(x) + jnp.arange(len(x))
    at: Any = lambda k, value: jnp.where((row == k)[:, None], value, x)
    return {
        "mask": at(1, -jnp.inf),
        "nan": at(2, jnp.nan),
        "softmax": jax.nn.softmax(at(3, -jnp.inf), axis=1),
        "nan_at_another": at(2 if one else 5, jnp.nan),
        "nan_on_mesh": x if one else at(2, jnp.nan),
        "number_on_mesh": at(2, jnp.nan) if one else x,
        "infinite_on_mesh": x if one else at(2, jnp.inf),
        "other_sign": at(2, jnp.inf if one else -jnp.inf),
        "nan_for_infinity": at(2, jnp.inf if one else jnp.nan),
        "beside_nan": at(2, jnp.nan) * (1 if one else 1.01),
        "beside_infinity": at(2, -jnp.inf) * (1 if one else 1.01),
    }


@pytest.mark.slow
def test_nan_and_infinities_agree_only_in_the_same_places() -> None:
    mistakes = {"nan_at_another", "nan_on_mesh", "number_on_mesh", "infinite_on_mesh"}
    mistakes |= {"other_sign", "nan_for_infinity", "beside_nan", "beside_infinity"}
    assert_accused(mistakes, with_holes, X, out_specs=P("x"))


@pytest.mark.slow
def test_the_gradient_of_a_mask_is_compared() -> None:
    def masked(x: Any) -> Any:
        kept = jnp.where(x > 0, x, -jnp.inf)
        return jax.nn.softmax(kept.at[:, 0].set(1.0), axis=1)

    check(masked, X, out_specs=P("x"), gradients=True)


@pytest.mark.slow
def test_arguments_may_hold_nan_and_infinities() -> None:
    x = np.concatenate([X, [[np.nan, np.inf], [-np.inf, 1]]]).astype(np.float32)
    check(
        lambda x: {"rows": x, "sum": lax.psum(jnp.nansum(x, 0), "x")},
        x,
        out_specs={"rows": P("x"), "sum": P()},
    )


def nothing_but_nan(x: Any) -> Any:
    return {"sum": lax.psum(x.sum(0), "x"), "root": jnp.sqrt(lax.psum(x.sum(0), "x") * 0 - 1)}


def test_a_result_of_nothing_but_nan_is_no_test() -> None:
    with pytest.warns(UntestedWarning, match=r"nothing_but_nan\(\.\.\.\)\['root'\]: .*NaN"):
        check(nothing_but_nan, X)


# Generic values


@pytest.mark.slow
def test_equal_numbers_do_not_hide_mistakes() -> None:
    def several(x: Any) -> Any:
        return {
            "mistaken": lax.pmean(x.var(0), "x"),
            "right": lax.pmean(jnp.square(x).mean(0), "x"),
        }

    assert "On mesh x=2 with generic values" in assert_accused(
        {"mistaken"}, several, np.ones((8, 2), np.float32)
    )

    def of_integers(x: Any) -> Any:
        return {"right": lax.psum(x.sum(0), "x"), "mistaken": lax.psum(len(x) * x[0], "x")}

    assert_accused({"mistaken"}, of_integers, np.zeros((8, 2), np.int32))


@pytest.mark.slow
def test_arguments_that_must_keep_their_values_can_be_named() -> None:
    def sum_if_alike(pair: Any, x: Any) -> Any:
        return lax.psum(jnp.where(pair[0] == pair[1], x.sum(0), x.var(0)), "x")

    specs = (None, P("x"))
    text = report(sum_if_alike, np.ones(2, np.float32), X, in_specs=specs)
    assert "On mesh x=2 with generic values" in text
    check(sum_if_alike, np.ones(2, np.float32), X, in_specs=specs, keep=["args[0]"])


# Later calls


@pytest.mark.parametrize("at", [slow(4), slow(9), 99])
def test_a_mistake_that_sets_in_late_is_found(at: int) -> None:
    """By a counter in a State, and by one that no call returns."""

    def step(count: sm.State, x: Any) -> Any:
        return x * jnp.where(count.value == at, on_one(1, 2), 1), count.set(count.value + 1)

    def counted(count: Any, x: Any) -> Any:
        return step(sm.State(count), x)[0]

    options: Any = {"in_specs": (None, P("x")), "out_specs": (P("x"), None), "steps": 2}
    text = report(step, sm.State(0), X, **options)
    assert f"On mesh x=2 with generic values and counters at {at}" in text
    assert "counters" not in "".join(check(step, sm.State(0), X, **options, keep="args[0]").agreed)
    options = {"in_specs": (P(), P("x")), "out_specs": P("x")}
    assert f"counters at {at}" in report(counted, np.int32(0), X, **options)


@pytest.mark.slow
def test_the_next_batch_is_another_one() -> None:
    """Where each call has the same batch, what the call before made of its batch is right."""

    def centred(last: Any, x: Any) -> Any:
        mean = lax.pmean(x.mean(0), "x")
        used = on_one(mean, jnp.where(last["known"].value, last["mean"].value, mean))
        return x - used, {"mean": last["mean"].set(mean), "known": last["known"].set(True)}

    last = {"mean": sm.State(jnp.zeros(2)), "known": sm.State(False)}
    options: Any = {"in_specs": (None, P("x")), "out_specs": (P("x"), None), "steps": None}
    assert "with generic values and the next batch" in report(centred, last, X, **options)


# Uses of an integer `n`, and whether any other one suits them.
USES: list[tuple[bool, Any]] = [
    *((True, lambda n, x: x * (n > 3)), (True, lambda n, x: x * (n % 10 == 9))),
    *((True, lambda n, x: x * 0.9 ** (n + 1)), (True, lambda n, x: x * jnp.cos(n / 100))),
    (True, lambda n, x: x + jax.random.normal(jax.random.fold_in(jax.random.key(0), n), x.shape)),
    (True, lambda n, x: lax.cond(n > 3, lambda: x, lambda: -x)),
    (True, lambda n, x: lax.switch(n // 2, [lambda: x, lambda: -x])),
    (True, lambda n, x: jax.jit(lambda m: x * (m > 3))(n + 1)),
    (True, lambda n, x: jax.vmap(lambda row: row * (lax.pmax(n, "x") > 3))(x)),
    (True, lambda n, x: x * (n + jnp.where(n > 2, 2, 1))),
    (True, lambda n, x: x * (jnp.where(x.sum() > 0, n + 1, 0) > 3)),
    (True, lambda n, x: x * jnp.where(n > 3, x.astype(int), 1)),
    # An index, a position, a part of a shard
    *(
        (False, lambda n, x: x + x[n]),
        (False, lambda n, x: x + lax.dynamic_slice(x, (n, 0), (1, 2))),
    ),
    *((False, lambda n, x: x.at[n].set(0)), (False, lambda n, x: x * (jnp.arange(4) < n)[:, None])),
    (False, lambda n, x: x * (n // 4 == lax.axis_index("x"))),
    (False, lambda n, x: x * (n < jnp.where(lax.axis_index("x") == 0, 4, 8))),
    # Rounds of a loop, other numbers
    (False, lambda n, x: lax.fori_loop(0, n, lambda _, x: x / 2, x)),
    (False, lambda n, x: x * (n < x.astype(int))),
    (False, lambda n, x: x * lax.cond(x[0, 0] > 0, lambda: n, lambda: x[0, 1].astype(int))),
    # Nothing depends on it.
    *((False, lambda n, x: x), (False, lambda n, x: (x, n + 1)[0])),
]


def test_which_integers_count() -> None:
    mesh = AbstractMesh((2,), ("x",))
    for is_count, use in USES:
        mapped = sm.shard_map(use, mesh, (P(), P("x")), P("x"), check_vma=False)
        closed = jax.make_jaxpr(mapped)(np.int32(0), X)
        assert counters(closed) == ({0} if is_count else set()), closed


def test_counts_reach_what_the_program_compares_them_with() -> None:
    def scheduled(step: Any, x: Any) -> Any:
        warm = jnp.minimum(1.0, step / 77)
        rate = jnp.where(step >= 1000, 0.1, 1.0) * jnp.where(step % 250 == 0, 2, 1)
        return x * warm * rate * lax.switch(step, [lambda: 1.0, lambda: 2.0, lambda: 3.0])

    closed = jax.make_jaxpr(scheduled)(np.int32(0), X)
    assert limits_of(closed, counters(closed)) == [0, 1, 2, 77, 250, 1000]
    assert limits_of(closed, frozenset()) == []
    assert counts([0, 1, 77]) == [4, 9, 76, 77, 78, 99]
    assert counts([]) == [4, 9, 99]


def late(step: Any, x: Any) -> Any:
    total = lax.psum(x.sum(), "x")
    return {
        "right": jnp.where(step >= 1000, 2 * total, total),
        "mistaken": jnp.where(step >= 1000, lax.pmean(x.sum(), "x"), total),
    }


def test_what_begins_at_a_count_is_found() -> None:
    text = assert_accused({"mistaken"}, late, np.int32(0), X, in_specs=(P(), P("x")))
    assert "with generic values and counters at 1000" in text


# What is chosen by numbers


@pytest.mark.slow
def test_sides_that_no_call_takes_are_named() -> None:
    def chooses(x: Any) -> Any:
        total, most = lax.psum(x.sum(), "x"), 9 * lax.psum(jnp.abs(x).sum(), "x")
        lax.cond(total > most, lambda: None, lambda: None)  # which gives nothing
        a = jnp.where(total > most, 0.0, total)  # never so large
        b = jnp.where(total > 0, total, 0.0)
        c = jnp.clip(total, -most, most)  # never so far
        return a + b + c + jnp.minimum(total, 3.0) + jax.nn.relu(total)

    found = {words.split("`: ")[1]: words for words in check(chooses, X).untaken}
    assert sorted(found) == ["it changed no number", "its condition was never true"]
    assert "# never so large" in found["its condition was never true"]
    assert "# never so far" in found["it changed no number"]


def test_a_branch_that_no_call_takes_is_warned_of() -> None:
    def branches(x: Any) -> Any:
        total, most = lax.psum(x.sum(), "x"), 9 * lax.psum(jnp.abs(x).sum(), "x")
        return lax.cond(total > most, lambda: 0.0, lambda: total)

    said = "its condition was never true, so that it is not tested"
    with pytest.warns(UntestedWarning, match=said):
        check(branches, X)


def test_a_choice_whose_condition_a_derivative_computes_apart() -> None:
    def doubled_four_times(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            a, b, step = carry
            b = jnp.where(step > 3, b, 2 * lax.stop_gradient(b))
            return (a * b, b, step + 1), None

        return lax.scan(body, (x, x, jnp.int32(0)), None, length=6)[0][0]

    checked = assert_equivalent(
        doubled_four_times,
        (X / 8,),
        meshes=[{"x": 2}],
        in_specs=P("x"),
        out_specs=P("x"),
        gradients=True,
    )
    assert checked.differentiated


def small_norm(x: Any) -> Any:
    total, norm = lax.psum(x.sum(), "x"), lax.psum(jnp.abs(x).sum(), "x")
    return {
        "right": jnp.where(norm < 1e-3, total, 2 * total),
        "mistaken": jnp.where(norm < 1e-3, lax.pmean(x.sum(), "x"), 2 * total),
    }


def test_what_is_chosen_below_a_threshold_is_found() -> None:
    text = assert_accused({"mistaken"}, small_norm, X)
    assert "On mesh x=2 with values up to " in text


# Large values, and NaN on one shard


@pytest.mark.slow
def test_an_overflow_of_float16_on_the_mesh_is_a_finding_about_range() -> None:
    def half_means(x: Any) -> Any:
        # JAX takes the mean of a shard's rows in float32, but not the sum of the shards' means.
        overflows = lax.psum(jnp.abs(x).mean(0), "x") / lax.axis_size("x")  # here
        return {"right": lax.pmean(x.mean(0), "x"), "overflows": overflows}

    x = jnp.asarray(X, jnp.float16)
    with pytest.warns(
        RangeWarning, match="on mesh x=4 with large values, see .*test_check_values.py"
    ):
        (text,) = check(half_means, x, meshes=[{"x": 4}]).overflows
    assert text.startswith("half_means(...)['overflows'] is inf, should be ")
    # Data that is so large itself is the caller's: there it is a mistake.
    assert "inf" in report(half_means, 3e4 + 0 * x, meshes=[{"x": 4}])


@pytest.mark.slow
def test_a_shard_that_does_not_hear_of_nan_elsewhere_is_found() -> None:
    def skips_updates(x: Any) -> Any:
        here = jnp.isfinite(x).all()
        everywhere = lax.pmin(here.astype(jnp.int32), "x") > 0
        return {"right": jnp.where(everywhere, x, 0), "mistaken": jnp.where(here, x, 0)}

    text = assert_accused({"mistaken"}, skips_updates, X, out_specs=P("x"))
    assert "On mesh x=2 with one NaN" in text


def test_a_norm_of_a_shard_is_found_where_data_is_large() -> None:
    """The norm is never reached by the values that are given."""

    def clipped(x: Any) -> Any:
        squares = jnp.square(x).sum()
        return {
            "right": x * jnp.minimum(1, 100 / jnp.sqrt(lax.psum(squares, "x"))),
            "mistaken": x * jnp.minimum(1, 100 / jnp.sqrt(squares)),
        }

    text = assert_accused({"mistaken"}, clipped, X, out_specs=P("x"))
    assert "On mesh x=2 with large values" in text


def left_out(x: Any) -> Any:
    """The mean over the shards that have a finite sum."""
    total = x.sum()
    finite = jnp.isfinite(total)
    count = lax.psum(finite.astype(x.dtype), "x") / lax.axis_size("x")
    return lax.psum(jnp.where(finite, total, 0), "x") / count


@pytest.mark.slow
def test_nan_goes_into_split_arguments_only() -> None:
    """In parameters it would spread to all results, on one device as on the mesh."""

    def step(w: Any, x: Any) -> Any:
        y = x * w
        here = jnp.isfinite(y).all()
        return {"right": y, "mistaken": jnp.where(here, y, 0)}

    w = np.ones(2, np.float32)
    options: Any = {"in_specs": (P(), P("x")), "out_specs": P("x")}
    text = assert_accused({"mistaken"}, step, w, X, **options)
    assert "On mesh x=2 with one NaN" in text
    # A function that is mapped already has its specs in its program.
    mapped = sm.shard_map(step, jax.make_mesh((2,), ("x",)), **options)
    with pytest.raises(AssertionError, match="with one NaN"):
        assert_equivalent(mapped, (w, X), meshes=[{"x": 2}], gradients=False)
    whole = check(lambda w: w + 1, w, in_specs=P())
    assert "on mesh x=2 with one NaN" not in whole.agreed


def test_a_number_on_the_mesh_for_nan_on_one_device_is_found() -> None:
    text = report(left_out, X)
    assert "On mesh x=2 with one NaN" in text and "should be nan" in text


@pytest.mark.slow
def test_a_part_that_is_skipped_and_not_multiplied_by_zero_accuses_nobody() -> None:
    """What comes later is hidden from each row: on one device by a product with zero, which hands NaN on."""

    def sums_so_far(x: Any) -> Any:
        size, here, row = lax.axis_size("x"), lax.axis_index("x"), jnp.arange(len(x))
        total, others = 0 * x, x
        for k in range(size):
            source = (here - k) % size
            seen = (source - here) * len(x) + row <= row[:, None]
            new: Any = lambda seen=seen, others=others: seen.astype(x.dtype) @ others
            total += lax.cond(source <= here, new, lambda: 0 * x)
            others = lax.ppermute(others, "x", [(i, (i + 1) % size) for i in range(size)])
        return total

    check(sums_so_far, X, out_specs=P("x"), check_vma=False)


@pytest.mark.slow
def test_the_derivative_of_a_maximum_with_nan_accuses_nobody() -> None:
    def largest(high: sm.State, x: Any) -> Any:
        return x, high.set(jnp.maximum(high.value, x.max(0)))

    high = sm.State(jnp.full(2, -0.5), reduce="max")
    options: Any = {"in_specs": (None, P("x")), "out_specs": (P("x"), None)}
    check(largest, high, X, **options, gradients=True)


@pytest.mark.slow
def test_nan_that_pmax_passes_over_accuses_nobody() -> None:
    """Devices of some kinds pass over NaN in `jax.lax.pmax`."""

    def chosen(x: Any) -> Any:
        top = lax.pmax(x.max(), "x").astype(jnp.int32)
        return lax.psum(jnp.where(top % 2 == 0, x, 1).sum(0), "x")

    check(chosen, 20 * X)


def test_numbers_below_the_smallest_of_double_precision_accuse_nobody() -> None:
    """XLA makes them zero, and NumPy does not: whose product is so small depends on the mesh."""

    def product(x: Any) -> Any:
        first, *others = lax.all_gather(jnp.exp(-x).prod(0), "x")
        return functools.reduce(jnp.multiply, others, first)

    x = np.float32([[368], [-1.3], [0.6], [0.9], [366], [-2.3], [-0.7], [0.4]])
    check(product, x, check_vma=False)
