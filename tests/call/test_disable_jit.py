"""`jax.disable_jit()` reaches the body of every mapped call, and what is checked there is checked still."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm


X = np.arange(8, dtype=np.float32)


def shards(fun: Any, **options: Any) -> Any:
    mesh = jax.make_mesh((8,), ("x",))
    return sm.shard_map(fun, mesh, (P(), P("x")), (P("x"), P()), **options)


MAPS: dict[str, Any] = {
    "shard_map": shards,
    "unchecked": lambda fun: shards(fun, check_vma=False),
    "pmap2": lambda fun: sm.pmap2(fun, "x", in_axes=(None, 0), out_axes=(0, None)),
    "vmap2": lambda fun: sm.vmap2(fun, axis_name="x", in_axes=(None, 0), out_axes=(0, None)),
}


@pytest.fixture(autouse=True)
def without_jit() -> Iterator[None]:
    with jax.disable_jit():
        yield


@pytest.mark.parametrize("name", MAPS)
def test_function_sees_values_and_what_it_writes_is_merged(name: str) -> None:
    seen: list[str] = []

    def same(s: sm.State, x: jax.Array) -> Any:
        seen.append(type(x).__name__)
        return x + s.value, s.set(s.value + lax.psum(x.sum(), "x"))

    def different(s: sm.State, x: jax.Array) -> Any:
        return x, s.set(s.value + x.sum())

    for fun, reduce in ((same, None), (same, "sum"), (different, "sum")):
        y, s = MAPS[name](fun)(sm.State(1.0, reduce=reduce), X)
        np.testing.assert_array_equal(y, X + 1 if fun is same else X)
        assert float(s.value) == 29
    assert seen[0] == ("BatchTracer" if name == "vmap2" else "ShardMapTracer")
    if name != "unchecked":
        with pytest.raises(sm.StatemeshError, match=r"wrote different|differ"):
            MAPS[name](different)(sm.State(1.0), X)


def test_unmapped_result_of_pmap2_must_be_the_same() -> None:
    same = sm.pmap2(lambda x: lax.pmean(x, "x"), "x", out_axes=None)
    assert float(same(X)) == 3.5
    with pytest.raises(sm.BatchAxisError):
        sm.pmap2(lambda x: x, "x", out_axes=None)(X)


def test_function_that_cannot_be_traced() -> None:
    """Nothing shows then that lanes agree."""

    def fun(x: jax.Array) -> jax.Array:
        return x + 1 if type(x).__name__ == "ShardMapTracer" else x + float(x)

    np.testing.assert_array_equal(sm.pmap2(fun)(X), X + 1)
    with pytest.raises(sm.BatchAxisError):
        sm.pmap2(lambda x: fun(lax.pmean(x, "x")), "x", out_axes=None)(X)


@pytest.mark.parametrize("name", ["shard_map", "vmap2"])
def test_gradients_inside(name: str) -> None:
    def loss(w: sm.ParamState, x: jax.Array) -> Any:
        return (w.value * x).sum(), w

    def fun(w: sm.ParamState, x: jax.Array) -> Any:
        (_, w), grad = sm.value_and_grad(loss, axis_name="x")(w, x)
        return x, w.set(grad.value)

    _, w = MAPS[name](fun)(sm.ParamState(2.0), X)
    assert float(w.value) == 3.5


def test_gradients_of_a_map() -> None:
    def total(w: Any) -> Any:
        return sm.pmap2(lambda w, x: lax.psum(w * x, "x"), "x", in_axes=(None, 0))(w, X).sum()

    # Each of 8 lanes returns the sum over all of them.
    assert float(jax.grad(total)(2.0)) == 8 * 28
