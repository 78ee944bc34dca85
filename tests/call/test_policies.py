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


def write(
    how: Any, old: Any = 10.0, check_vma: bool = True, name: str = "8", spec: Any = None
) -> Any:
    def fun(state: sm.State, x: jax.Array) -> Any:
        return state.set(state.value + jnp.sum(x).astype(state.value.dtype))

    call = sm.shard_map(fun, make_mesh(name), (P(), P("x")), P(), check_vma=check_vma)
    return call(sm.State(old, reduce=how, spec=spec), X).value


def product(old: Any, new: Any, axis_names: tuple[str, ...]) -> Any:
    gathered = jax.lax.all_gather(new - old, axis_names[0])
    return jax.lax.pmax(old + jnp.prod(gathered), axis_names)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", 10 + PARTS.mean()),
        ("max", 10 + PARTS.max()),
        ("min", 10 + PARTS.min()),
        ("sum", 10 + PARTS.sum()),
        (product, 10 + np.prod(PARTS)),
    ],
)
def test_policies(how: Any, expected: float, check_vma: bool) -> None:
    np.testing.assert_allclose(write(how, check_vma=check_vma), expected, rtol=1e-6)


@pytest.mark.parametrize("how", ["sum", "max", "min"])
def test_policies_on_integers_are_exact(how: str) -> None:
    parts = PARTS.astype(np.int64)
    expected = {"sum": parts.sum(), "max": parts.max(), "min": parts.min()}[how]
    value = write(how, old=np.int32(10))
    assert value.dtype == np.int32
    assert int(value) == 10 + expected


def test_a_value_that_agrees_is_not_merged() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        return state.set(state.value + jax.lax.psum(jnp.sum(x), "x"))

    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), P())
    assert float(call(sm.State(0.0, reduce="sum"), X).value) == X.sum()
    assert float(call(sm.State(0.0), X).value) == X.sum()


def test_only_the_axes_that_vary_are_merged() -> None:
    axes = []

    def how(old: Any, new: Any, axis_names: tuple[str, ...]) -> Any:
        axes.append(axis_names)
        return jax.lax.pmean(new, axis_names)

    def fun(state: sm.State, x: jax.Array) -> Any:
        return state.set(state.value + jnp.sum(x))

    mesh = make_mesh("2x2x2")
    for spec, expected in ((P("y"), ("y",)), (P(("z", "x")), ("x", "z")), (P(), None)):
        sm.shard_map(fun, mesh, (P(), spec), P())(sm.State(0.0, reduce=how), X)
        assert axes == ([] if expected is None else [expected])
        axes.clear()


def test_sharded_states_are_merged_over_the_other_axes() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        return state.set(state.value + x)

    mesh = make_mesh("4x2")
    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    call = sm.shard_map(fun, mesh, (P(), P("x", "y")), P())
    state = sm.State(np.zeros((16, 1), np.float32), spec=P("x"), reduce="sum")
    np.testing.assert_array_equal(call(state, x).value, x.sum(1, keepdims=True))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("how", ["sum", "mean", "max"])
def test_each_leaf_is_merged_over_the_axes_that_its_own_placement_leaves_out(
    how: str, check_vma: bool
) -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        return state.set({"rows": state.value["rows"] + x, "all": jnp.sum(x)})

    x = np.arange(32, dtype=np.float32).reshape(16, 2)
    state = sm.State(
        {"rows": np.zeros((16, 1), np.float32), "all": 0.0},
        spec={"rows": P("x"), "all": P()},
        reduce=how,
    )
    call = sm.shard_map(fun, make_mesh("4x2"), (P(), P("x", "y")), P(), check_vma=check_vma)
    merge = getattr(np, how)
    after = call(state, x).value
    np.testing.assert_array_equal(after["rows"], merge(x, axis=1, keepdims=True))
    np.testing.assert_allclose(after["all"], merge(x.reshape(4, 4, 2).sum(1)), rtol=1e-6)


def test_a_leaf_that_agrees_is_counted_once() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        return state.set({"steps": state.value["steps"] + 1, "sum": state.value["sum"] + x.sum()})

    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), P())
    after = call(sm.State({"steps": 3, "sum": 0.0}, reduce="sum"), X).value
    assert (int(after["steps"]), float(after["sum"])) == (4, float(X.sum()))


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


@pytest.mark.parametrize(
    "kind", [sm.State, sm.ShortTermState, sm.HiddenState, sm.NonBatchState, sm.LongTermState,
             sm.ParamState, sm.BatchState],
)  # fmt: skip
def test_a_diverging_write_is_refused(kind: type[sm.State]) -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        return state.set(jnp.sum(x))

    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), P())
    with pytest.raises(sm.DivergedStateError, match=f"state: {kind.__name__}"):
        call(kind(0.0), X)


def test_a_policy_that_leaves_a_difference_is_refused() -> None:
    def how(old: Any, new: Any, axis_names: tuple[str, ...]) -> Any:
        return new * 2

    with pytest.raises(sm.DivergedStateError, match="reduce=how"):
        write(how)


def test_a_policy_that_changes_the_dtype_is_refused() -> None:
    def how(old: Any, new: Any, axis_names: tuple[str, ...]) -> Any:
        return jax.lax.pmax(new, axis_names).astype(jnp.int32)

    with pytest.raises(sm.StructureError, match="what reduce=how returned"):
        write(how)


def test_count_mean_and_m2_merge_to_the_global_statistics() -> None:
    def merge(old: Any, new: Any, axis_names: tuple[str, ...]) -> Any:
        count = jax.lax.psum(new["n"], axis_names)
        mean = jax.lax.psum(new["n"] * new["mean"], axis_names) / count
        m2 = jax.lax.psum(new["m2"] + new["n"] * (new["mean"] - mean) ** 2, axis_names)
        return {"n": count, "mean": mean, "m2": m2}

    def fun(stats: sm.State, x: jax.Array) -> Any:
        n = jnp.float32(x.shape[0])
        return stats.set({"n": n, "mean": x.mean(), "m2": jnp.sum((x - x.mean()) ** 2)})

    stats = sm.State({"n": 0.0, "mean": 0.0, "m2": 0.0}, reduce=merge)
    after = sm.shard_map(fun, make_mesh(), (P(), P("x")), P())(stats, X).value
    np.testing.assert_allclose(after["mean"], X.mean(), rtol=1e-6)
    np.testing.assert_allclose(after["m2"] / after["n"], X.var(), rtol=1e-6)


def test_partly_written_values() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        return state.set({"a": state.value["a"], "b": state.value["b"] + 1})

    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), P())
    (state,) = sm.shard_map(lambda s: s, make_mesh(), (P(),), P()).place(
        sm.State({"a": X, "b": np.float32(0)})
    )
    after = call(state, X)
    assert after.value["a"] is state.value["a"]
    assert float(after.value["b"]) == 1.0


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


def test_donation_of_inputs_that_had_to_move_spares_the_original() -> None:
    call = sm.shard_map(tick, make_mesh("1"), ({"n": P(), "read": P(), "w": P("x")}, P("x")),
                        (P("x"), {"n": P(), "read": P(), "w": P("x")}), donate="all")  # fmt: skip
    m, x = model(), jnp.asarray(X)
    _, after = call(m, x)
    jax.block_until_ready(after)
    np.testing.assert_array_equal(m["n"].value, np.zeros(16))
    np.testing.assert_array_equal(x, X)


def test_one_array_in_two_places_may_be_donated() -> None:
    call = sm.shard_map(
        lambda a, b: (a.set(a.value + 1), b.set(b.value * 3)), make_mesh(), (P(), P()), P(),
        donate="states",
    )  # fmt: skip
    (a, _) = call.place(sm.State(X), sm.State(X))
    one, three = call(a, a)
    np.testing.assert_array_equal(one.value, X + 1)
    np.testing.assert_array_equal(three.value, X * 3)


def test_donating_calls_trace_once_and_go_on() -> None:
    fun, count = counted(lambda s, x: (x.sum(keepdims=True), s.set(s.value + x)))
    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), (P("x"), P()), donate="states")
    state = sm.State(jnp.zeros(16), spec=P("x"))
    for _ in range(5):
        _, state = call(state, X)
    assert count.times == 1
    np.testing.assert_array_equal(state.value, 5 * X)
    call(sm.State(jnp.zeros(8), spec=P("x")), X[:8])
    assert count.times == 2
