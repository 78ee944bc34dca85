"""The check calls a function with other values: generic ones, large ones, NaN and infinities."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from statemesh.testing import UntestedWarning

from .checked import assert_accused, check, report


jnp: Any = jax.numpy
lax: Any = jax.lax
X = np.sin(np.arange(16, dtype=np.float32)).reshape(8, 2)
ONES = np.ones((8, 2), np.float32)


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


def test_equal_numbers_do_not_hide_mistakes() -> None:
    def several(x: Any) -> Any:
        return {
            "mistaken": lax.pmean(x.var(0), "x"),
            "right": lax.pmean(jnp.square(x).mean(0), "x"),
        }

    assert "On mesh x=2 with generic values" in assert_accused({"mistaken"}, several, ONES)

    def of_integers(x: Any) -> Any:
        return {"right": lax.psum(x.sum(0), "x"), "mistaken": lax.psum(len(x) * x[0], "x")}

    assert_accused({"mistaken"}, of_integers, np.zeros((8, 2), np.int32))


@pytest.mark.slow
def test_arguments_that_must_keep_their_values_can_be_named() -> None:
    def sum_if_alike(pair: Any, x: Any) -> Any:
        return lax.psum(jnp.where(pair[0] == pair[1], x.sum(0), x.var(0)), "x")

    specs = (None, P("x"))
    text = report(sum_if_alike, ONES[0], X, in_specs=specs)
    assert "On mesh x=2 with generic values" in text
    check(sum_if_alike, ONES[0], X, in_specs=specs, keep=["args[0]"])


# Large values, and NaN on one shard


@pytest.mark.slow
def test_an_overflow_of_float16_on_the_mesh_is_found() -> None:
    def half_means(x: Any) -> Any:
        # JAX takes the mean of a shard's rows in float32, but not the sum of the shards' means.
        overflows = lax.psum(jnp.abs(x).mean(0), "x") / lax.axis_size("x")
        return {"right": lax.pmean(x.mean(0), "x"), "overflows": overflows}

    text = assert_accused({"overflows"}, half_means, jnp.asarray(X, jnp.float16), meshes=[{"x": 4}])
    assert "with large values" in text and "inf" in text


@pytest.mark.slow
def test_a_shard_that_does_not_hear_of_nan_elsewhere_is_found() -> None:
    def skips_updates(x: Any) -> Any:
        here = jnp.isfinite(x).all()
        everywhere = lax.pmin(here.astype(jnp.int32), "x") > 0
        return {"right": jnp.where(everywhere, x, 0), "mistaken": jnp.where(here, x, 0)}

    text = assert_accused({"mistaken"}, skips_updates, X, out_specs=P("x"))
    assert "On mesh x=2 with one NaN" in text


@pytest.mark.slow
def test_nan_that_pmax_passes_over_accuses_nobody() -> None:
    """Devices of some kinds pass over NaN in `jax.lax.pmax`."""

    def chosen(x: Any) -> Any:
        top = lax.pmax(x.max(), "x").astype(jnp.int32)
        return lax.psum(jnp.where(top % 2 == 0, x, 1).sum(0), "x")

    check(chosen, 20 * X)
