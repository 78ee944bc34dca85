"""`jax.disable_jit()` reaches the body of every mapped call, and what is checked there is checked still."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


X = np.arange(8, dtype=np.float32)

MAPS: dict[str, Any] = {
    "shard_map": lambda f, **k: sm.shard_map(f, make_mesh(), (P(), P("x")), (P("x"), P()), **k),
    "unchecked": lambda f: MAPS["shard_map"](f, check_vma=False),
    "donating": lambda f: MAPS["shard_map"](f, donate="states"),
    "pmap2": lambda f: sm.pmap2(f, "x", in_axes=(None, 0), out_axes=(0, None)),
    "vmap2": lambda f: sm.vmap2(f, axis_name="x", in_axes=(None, 0), out_axes=(0, None)),
}
each_map = pytest.mark.parametrize("name", MAPS)


@each_map
@pytest.mark.parametrize("reduce", [None, "sum"])
def test_function_sees_values(name: str, reduce: str | None) -> None:
    seen: list[str] = []

    def fun(s: sm.State, x: jax.Array) -> Any:
        seen.append(type(x).__name__)
        return x + s.value, s.set(s.value + lax.psum(x.sum(), "x"))

    with jax.disable_jit():
        y, s = MAPS[name](fun)(sm.State(1.0, reduce=reduce), X)
    np.testing.assert_array_equal(y, X + 1)
    assert float(s.value) == 29
    assert seen[0] == ("BatchTracer" if name == "vmap2" else "ShardMapTracer")


@pytest.mark.parametrize("name", [name for name in MAPS if name != "unchecked"])
def test_undeclared_difference_is_found(name: str) -> None:
    call = MAPS[name](lambda s, x: (x, s.set(s.value + x.sum())))
    with jax.disable_jit(), pytest.raises(sm.StatemeshError, match=r"wrote different|differ"):
        call(sm.State(1.0), X)


@each_map
def test_write_is_merged(name: str) -> None:
    call = MAPS[name](lambda s, x: (x, s.set(s.value + x.sum())))
    with jax.disable_jit():
        _, s = call(sm.State(1.0, reduce="sum"), X)
    assert float(s.value) == 29


def test_unmapped_result_of_pmap2_must_be_the_same() -> None:
    with jax.disable_jit():
        same = sm.pmap2(lambda x: lax.pmean(x, "x"), "x", out_axes=None)
        assert float(same(X)) == 3.5
        with pytest.raises(sm.BatchAxisError):
            sm.pmap2(lambda x: x, "x", out_axes=None)(X)


def test_function_that_cannot_be_traced() -> None:
    """Nothing shows then that lanes agree."""

    def fun(x: jax.Array) -> jax.Array:
        return x + 1 if type(x).__name__ == "ShardMapTracer" else x + float(x)

    with jax.disable_jit():
        np.testing.assert_array_equal(sm.pmap2(fun)(X), X + 1)
        with pytest.raises(sm.BatchAxisError):
            sm.pmap2(lambda x: fun(lax.pmean(x, "x")), "x", out_axes=None)(X)


def test_replicated_values_may_be_branched_on_in_a_checked_map() -> None:
    def fun(s: sm.State, x: jax.Array) -> Any:
        return (x + 1 if s.value > 0 else x - 1), s

    call = MAPS["shard_map"](fun)
    with jax.disable_jit():
        np.testing.assert_array_equal(call(sm.State(1.0), X)[0], X + 1)
        np.testing.assert_array_equal(call(sm.State(-1.0), X)[0], X - 1)


@each_map
def test_gradients(name: str) -> None:
    def loss(w: sm.ParamState, x: jax.Array) -> Any:
        return (w.value * x).sum(), w

    def fun(w: sm.ParamState, x: jax.Array) -> Any:
        (_, w), grad = sm.value_and_grad(loss, axis_name="x")(w, x)
        return x, w.set(grad.value)

    with jax.disable_jit():
        _, w = MAPS[name](fun)(sm.ParamState(2.0), X)
    assert float(w.value) == 3.5


def test_gradient_of_a_map() -> None:
    def total(w: Any) -> Any:
        return sm.pmap2(lambda w, x: lax.psum(w * x, "x"), "x", in_axes=(None, 0))(w, X).sum()

    expected = jax.grad(total)(2.0)
    with jax.disable_jit():
        assert float(jax.grad(total)(2.0)) == float(expected)


def test_calls_before_and_after() -> None:
    call = MAPS["pmap2"](lambda s, x: (x + s.value, s.set(s.value + 1)))
    s = sm.State(0.0)
    for disabled in (False, True, False):
        with jax.disable_jit(disabled):
            y, s = call(s, X)
    np.testing.assert_array_equal(y, X + 2)
    assert float(s.value) == 3
