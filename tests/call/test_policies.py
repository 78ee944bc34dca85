"""What is written back: the policies, the check that shards agree, and donation."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted, make_mesh


pytestmark = pytest.mark.usefixtures("each_kind")


X = np.arange(1, 17, dtype=np.float32)
PARTS = X.reshape(8, 2).sum(1)


def product(old: Any, new: Any, axis_names: tuple[str, ...]) -> Any:
    gathered = jax.lax.all_gather(new - old, axis_names[0])
    return jax.lax.pmax(old + jnp.prod(gathered), axis_names)


EXPECTED: list[tuple[Any, Any]] = [
    ("mean", 10 + PARTS.mean()),
    ("max", 10 + PARTS.max()),
    ("min", 10 + PARTS.min()),
    ("sum", 10 + PARTS.sum()),
    (product, 10 + np.prod(PARTS)),
]


@pytest.mark.parametrize("check_vma", [True, False])
def test_policies(check_vma: bool) -> None:
    def fun(states: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda old: old + jnp.sum(x).astype(old.dtype), states)

    floats = [sm.State(10.0, reduce=how) for how, _ in EXPECTED]
    integers = [sm.State(10, reduce=how) for how in ("max", "min", "sum")]
    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), P(), check_vma=check_vma)
    merged, exact = call((floats, integers), X)
    for state, (_, expected) in zip(merged, EXPECTED, strict=True):
        np.testing.assert_allclose(state.value, expected, rtol=1e-6)
    for state, (_, expected) in zip(exact, EXPECTED[1:4], strict=True):
        assert state.value.dtype == np.int32
        assert int(state.value) == expected


def test_a_value_that_agrees_is_not_merged() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        value = state.value
        total = jax.lax.psum(x.sum(), "x")
        new = {"n": value["n"] + 1, "all": value["all"] + total, "sum": x.sum()}
        return state.set(value | new)

    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), P())
    state, x = call.place(sm.State({"n": 3, "all": 0.0, "sum": 0.0, "kept": X}, reduce="sum"), X)
    after = call(state, x).value
    assert [float(after[k]) for k in ("n", "all", "sum")] == [4, X.sum(), X.sum()]
    assert after["kept"] is state.value["kept"]


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_leaf_is_merged_over_the_axes_that_its_own_placement_leaves_out(
    check_vma: bool,
) -> None:
    def fun(states: Any, x: jax.Array) -> Any:
        return [s.set({"rows": s.value["rows"] + x, "all": jnp.sum(x)}) for s in states]

    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    value = {"rows": np.zeros((16, 1), np.float32), "all": 0.0}
    spec = {"rows": P("x"), "all": P()}
    policies = ("sum", "mean", "max")
    states = [sm.State(value, spec=spec, reduce=how) for how in policies]
    call = sm.shard_map(fun, make_mesh("4x2"), (P(), P("x", "y")), P(), check_vma=check_vma)
    for how, after in zip(policies, call(states, x), strict=True):
        merge = getattr(np, how)
        np.testing.assert_array_equal(after.value["rows"], merge(x, axis=1, keepdims=True))
        by_shard = x.reshape(4, 4, 2).sum(1)
        np.testing.assert_allclose(after.value["all"], merge(by_shard), rtol=1e-6)


def test_a_function_merges_leaves_that_vary_over_different_axes() -> None:
    def merge(old: Any, new: Any, axis_names: tuple[str, ...]) -> Any:
        assert axis_names == ("x", "y")
        return jax.tree.map(lambda a, b: a + jax.lax.psum(b - a, axis_names), old, new)

    def fun(state: sm.State, x: jax.Array, y: jax.Array) -> Any:
        value = state.value
        return state.set({"x": value["x"] + x.sum(), "y": value["y"] + (x.sum() * y.sum())})

    state = sm.State({"x": 0.0, "y": 0.0}, reduce=merge)
    call = sm.shard_map(fun, make_mesh("4x2"), (P(), P("x"), P("y")), P())
    after = call(state, X, X).value
    # A value that does not vary over an axis counts once for each shard along it.
    assert float(after["x"]) == 2 * X.sum()
    np.testing.assert_allclose(after["y"], X.sum() ** 2, rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_function_merges_each_leaf_over_the_axes_that_its_own_placement_leaves_out(
    check_vma: bool,
) -> None:
    def merge(old: Any, new: Any, axis_names: tuple[str, ...]) -> Any:
        return jax.tree.map(lambda a, b: a + jax.lax.psum(b - a, axis_names), old, new)

    def fun(state: sm.State, x: jax.Array) -> Any:
        added = {"all": x.sum(), "columns": x.sum(0, keepdims=True), "rows": x}
        return state.set(jax.tree.map(jnp.add, state.value, added))

    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    value = {"all": 100.0, "columns": np.ones((1, 2), "f"), "rows": np.ones((16, 1), "f")}
    spec = {"all": P(), "columns": P(None, "y"), "rows": P("x")}
    state = sm.State(value, spec=spec, reduce=merge)
    call = sm.shard_map(fun, make_mesh("4x2"), (P(), P("x", "y")), P(), check_vma=check_vma)
    after = call(state, x).value
    assert float(after["all"]) == 100 + x.sum()
    np.testing.assert_array_equal(after["columns"], 1 + x.sum(0, keepdims=True))
    np.testing.assert_array_equal(after["rows"], 1 + x.sum(1, keepdims=True))


def test_a_policy_that_changes_the_dtype_is_refused() -> None:
    def rounded(old: Any, new: Any, axis_names: Any) -> Any:
        return jax.lax.pmax(new, axis_names).astype(jnp.int32)

    call = sm.shard_map(lambda s, x: s.set(s.value + x.sum()), make_mesh(), (P(), P("x")), P())
    with pytest.raises(sm.StructureError, match="what reduce=rounded returned"):
        call(sm.State(10.0, reduce=rounded), X)


# Donation


def tick(model: Any, x: jax.Array) -> Any:
    return x * 2, {
        "n": model["n"].set(model["n"].value + x),
        "read": model["read"],
        "w": model["w"],
    }


def model() -> Any:
    return {
        "n": sm.State(jnp.zeros(16), spec=P("x")),
        "read": sm.State(jnp.ones(16), spec=P("x")),
        "w": jnp.ones(16),
    }


@pytest.mark.parametrize("donate", ["none", "states", "all"])
def test_donation_gives_up_what_it_says(donate: Any) -> None:
    fun, count = counted(tick)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call = sm.shard_map(
            fun, make_mesh(), ({"n": P(), "read": P(), "w": P("x")}, P("x")),
            (P("x"), {"n": P(), "read": P(), "w": P("x")}), donate=donate,
        )  # fmt: skip
        m, x = call.place(model(), X)
        y, after = call(m, x)
        jax.block_until_ready(after)
    assert count.times == 1
    assert m["n"].value.is_deleted() == (donate != "none")
    assert not m["read"].value.is_deleted()
    assert not m["w"].is_deleted()
    assert x.is_deleted() == (donate == "all")
    assert after["read"].value is m["read"].value
    np.testing.assert_array_equal(after["n"].value, X)
    np.testing.assert_array_equal(y, X * 2)
