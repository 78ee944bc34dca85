"""The check compares the form of results, and sees what a function depends on besides its arguments."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .checked import accused, check, report
from .helpers import compiles


jnp: Any = jax.numpy
lax: Any = jax.lax
X = np.sin(np.arange(16, dtype=np.float32)).reshape(8, 2)
# A number that a function below names.
FACTOR = 1.0


def on_one(right: Any, other: Any) -> Any:
    return right if lax.axis_size("x") == 1 else other


# Dtypes, weak types, keys, static results


def of_other_forms(x: Any) -> Any:
    total = lax.psum(x.sum(0), "x")
    return {
        "right": total,
        "dtype": on_one(total, total.astype(jnp.bfloat16)),
        "weak": on_one(jnp.asarray(2.0, jnp.float32), jnp.asarray(2.0)),
        "static": on_one("one", "several"),
        "structure": on_one((total, total), [total, total]),
    }


def test_dtypes_weak_types_and_static_results_are_compared() -> None:
    assert accused(of_other_forms, X) == {"dtype", "weak", "static", "structure"}


def test_keys_are_compared() -> None:
    text = report(lambda x: {on_one("key", "other"): lax.psum(x.sum(0), "x")}, X)
    assert "has the key 'other' and lacks the key 'key'" in text


# What a function depends on besides its arguments


def scaled_by(factor: list[float]) -> Any:
    def scaled(x: Any) -> Any:
        return lax.psum(x.sum(0), "x") * on_one(1.0, factor[0])

    return scaled


def test_a_value_that_was_closed_over_and_changed_is_seen() -> None:
    factor = [1.0]
    fun = scaled_by(factor)
    check(fun, X)
    factor[0] = 2.0
    assert "scaled(...): float32[2], off by" in report(fun, X)


def by_global(x: Any) -> Any:
    return lax.psum(x.sum(0), "x") * on_one(1.0, FACTOR)


@pytest.mark.slow
def test_a_global_that_changed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    check(by_global, X)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert "by_global(...): float32[2], off by" in report(by_global, X)


def test_what_did_not_change_compiles_nothing() -> None:
    check(by_global, X)
    with compiles() as more:
        check(by_global, 2 * X)
    assert more.times == 0


# Results without a derivative


def with_extremes(model: Any, x: Any) -> Any:
    halved = lax.while_loop(lambda y: jnp.abs(y).max() > 0.1, lambda y: y / 2, model["loop"].value)
    return lax.psum(x.sum(0), "x"), {
        "top": model["top"].set(x.max(0)),
        "loop": model["loop"].set(halved + 0.1),
    }


def extremes() -> Any:
    return {"top": sm.State(jnp.zeros(2), reduce="max"), "loop": sm.State(jnp.ones(2))}


@pytest.mark.slow
def test_results_without_a_derivative_are_named() -> None:
    """A state of `reduce=\"max\"` has one."""
    given = {"in_specs": (None, P("x")), "gradients": True}
    checked = check(with_extremes, extremes(), X, **given)
    name = "with_extremes(...)[1]"
    assert checked.constant == (f"{name}['loop'].value",)
    assert "the gradient by args[1]" in checked.differentiated


def test_a_gradient_that_there_is_not_is_refused_before_anything_is_compiled() -> None:
    def top(x: Any) -> Any:
        return lax.while_loop(lambda y: jnp.abs(y).max() > 0.1, lambda y: y / 2, x)

    x = jnp.asarray(X)
    check(lambda x: x, x, out_specs=P("x"))
    with compiles() as count, pytest.raises(Exception, match=r"while_loop|Reverse-mode"):
        check(top, x, out_specs=P("x"), gradients=True, check_vma=False)
    assert count.times == 0
