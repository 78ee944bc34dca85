"""Which entering state a returned one continues: its old value, its policy and its place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted, make_mesh


X = np.arange(8, dtype=np.float32)
TOTAL = float(X.sum())


def model(**options: Any) -> dict[str, sm.State]:
    """Two states that only their places tell apart."""
    options = {"reduce": "sum"} | options
    return {"a": sm.State(1.0, **options), "b": sm.State(2.0, **options)}


def swap(m: Any, x: Any) -> Any:
    """Two states that change places, each written."""
    return {
        "a": m["b"].set(m["b"].value + x.sum()),
        "b": m["a"].set(m["a"].value + 2 * x.sum()),
    }


def varying(m: Any) -> Any:
    """States that a loop may write differently on each shard."""
    if "x" not in jax.typeof(lax.axis_index("x")).manual_axis_type.varying:
        return m
    return {k: s.set(lax.pcast(s.value, "x", to="varying")) for k, s in m.items()}


def by_tree_map(m: Any, x: Any) -> Any:
    more = jax.tree.map(lambda a, b: a + x.sum() + 0 * b, m["b"], m["a"])
    return {"a": more, "b": jax.tree.map(lambda value: value + 2 * x.sum(), m["a"])}


def in_scan(m: Any, x: Any) -> Any:
    def body(m: Any, row: Any) -> Any:
        a, b = m["a"], m["b"]
        return {"a": a.set(a.value + row + 0 * b.value), "b": b.set(b.value + 2 * row)}, None

    return lax.scan(body, varying({"a": m["b"], "b": m["a"]}), x)[0]


def in_while(m: Any, x: Any) -> Any:
    def body(i: Any, m: Any) -> Any:
        return {"a": m["a"].set(m["a"].value + x[i]), "b": m["b"].set(m["b"].value + 2 * x[i])}

    return lax.fori_loop(0, len(x), body, varying({"b": m["a"], "a": m["b"]}))


def in_cond(m: Any, x: Any) -> Any:
    other = lambda m: swap(m, 0 * x)
    return lax.cond(lax.pmax(x.sum(), "x") > 0, lambda m: swap(m, x), other, m)


@jax.jit
def add(state: sm.State, x: Any) -> sm.State:
    return state.set(state.value + x)


def through_a_gradient(m: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return (w * x).sum(), jax.checkpoint(swap)(m, w * x)

    return jax.value_and_grad(loss, has_aux=True)(jnp.ones(()))[0][1]


def in_a_branch_of_its_own(m: Any, x: Any) -> Any:
    """A written state outlives the map by which another one was made."""
    new = jax.jit(swap)(m, x)
    return jax.tree.map(lambda value: value + 0, {"b": new["b"], "a": new["a"]})


# "a" continues the state that entered as "b", plus the sum of the rows; "b" that of "a", plus twice the sum.
SWAPS: dict[str, Callable[..., Any]] = {
    "plain": swap,
    "jit": jax.jit(swap),
    "checkpoint": jax.checkpoint(swap),
    "tree.map": by_tree_map,
    "tree.map in checkpoint in jit": jax.jit(jax.checkpoint(by_tree_map)),
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
    "one jit twice": lambda m, x: {"a": add(m["b"], x.sum()), "b": add(m["a"], 2 * x.sum())},
    "a gradient": through_a_gradient,
    "nested lanes": lambda m, x: sm.vmap2(swap, in_axes=(None, 0))(m, x),
    "tree.map after jit": in_a_branch_of_its_own,
}


def mapping(fun: Callable[..., Any], how: str) -> Any:
    specs = (None, P("x")), P()
    ways: dict[str, Callable[[], Any]] = {
        "checked": lambda: sm.shard_map(fun, make_mesh("4", AxisType.Explicit), *specs),
        "unchecked": lambda: sm.shard_map(fun, make_mesh("4"), *specs, check_vma=False),
        "eager": lambda: sm.shard_map(fun, make_mesh("4"), *specs, jit=False),
        "lanes": lambda: sm.vmap2(fun, in_axes=(None, 0), axis_name="x"),
        "devices": lambda: sm.pmap2(fun, "x", in_axes=(None, 0)),
    }
    return ways[how]()


def rows(how: str) -> Any:
    return X.reshape(4, 2) if how in ("lanes", "devices") else X


def call(fun: Callable[..., Any], how: str, m: Any) -> Any:
    return mapping(fun, how)(m, rows(how))


def values(states: Any) -> list[float]:
    return [float(state.value) for state in jax.tree.leaves(states, is_leaf=sm.is_state)]


@pytest.mark.parametrize("how", ["checked", "unchecked", "lanes", "devices"])
def test_a_state_continues_the_one_that_it_was_written_from(how: str) -> None:
    """All swaps are parts of one program, each with a model of its own."""

    def fun(models: Any, x: Any) -> Any:
        return {name: SWAPS[name](m, x) for name, m in models.items()}

    fun, count = counted(fun)
    models = {name: model() for name in SWAPS}
    structure: Any = jax.tree.structure(models)
    mapped = mapping(fun, how)
    first = mapped(models, rows(how))
    for name, m in first.items():
        assert values(m) == [2 + TOTAL, 1 + 2 * TOTAL], name
    second = mapped(first, rows(how))
    for name, m in second.items():
        assert values(m) == [1 + 3 * TOTAL, 2 + 3 * TOTAL], name
    # It is traced once, and nothing of it is left in what is returned.
    assert count.times == 1
    assert jax.tree.structure(second) == structure


def test_a_call_that_is_not_compiled_knows_it_too_and_may_go_by_values() -> None:
    by_values = lambda m, x: swap(m, x) if m["a"].value == 1 else m
    for fun in (SWAPS["checkpoint"], by_values):
        assert values(call(fun, "eager", model())) == [2 + TOTAL, 1 + 2 * TOTAL]


def exchanged_in_one_branch(m: Any, x: Any) -> Any:
    alike = lax.pmax(x.sum(), "x") > 0
    return lax.cond(alike, lambda m: {"a": m["b"], "b": m["a"]}, lambda m: m, m)


def exchanged_in_each_round(m: Any, x: Any) -> Any:
    return lax.scan(lambda m, row: (swap(m, row), None), varying(m), x)[0]


def closed_over_by_branches(m: Any, x: Any) -> Any:
    alike = lax.pmax(x.sum(), "x") > 0
    return m | {"a": lax.cond(alike, lambda: m["a"], lambda: m["b"])}


@pytest.mark.parametrize("how", ["checked", "unchecked", "lanes"])
@pytest.mark.parametrize(
    "fun", [exchanged_in_one_branch, exchanged_in_each_round, closed_over_by_branches]
)
def test_what_cannot_be_known_is_refused(fun: Any, how: str) -> None:
    text = rf"{fun.__name__}\(\.\.\.\)\['a'\] may be m\['a'\] or m\['b'\]"
    with pytest.raises(sm.StructureError, match=text):
        call(fun, how, model())


def test_nothing_is_asked_where_it_makes_no_difference() -> None:
    assert values(call(exchanged_in_one_branch, "checked", model(reduce="max"))) == [2, 1]


def test_a_function_sees_the_old_value_of_its_own_state() -> None:
    def largest_step(old: Any, new: Any, axis_names: Any) -> Any:
        return old + lax.pmax(new - old, axis_names)

    after = call(SWAPS["checkpoint"], "checked", model(reduce=largest_step))
    assert values(after) == [2 + 13, 1 + 26]


def test_alike_states_leave_as_they_entered() -> None:
    """Inside they are alike, but one is a part of an array and the other is whole."""

    @jax.checkpoint
    def fun(m: Any, x: Any) -> Any:
        return {"a": m["b"].set(m["b"].value + 1), "b": m["a"].set(m["a"].value + 1)}

    split = {sm.filters.Where(lambda args: args["a"]): P("x")}
    mapped = sm.shard_map(fun, make_mesh("4"), (P(), P("x")), P(), state_in_specs=split)
    after = mapped({"a": sm.State(X), "b": sm.State(X[:2] + 10)}, X)
    np.testing.assert_array_equal(after["a"].value, X[:2] + 11)
    np.testing.assert_array_equal(after["b"].value, X + 1)


@pytest.mark.parametrize("how", ["checked", "unchecked"])
def test_a_value_made_of_another_state_leaves_with_its_own(how: str) -> None:
    """Others are alike and followed; this one is neither."""
    m = model() | {"split": sm.BatchState(X, spec=P("x"))}

    def fun(m: Any, x: Any) -> Any:
        new = m["split"].set(jnp.broadcast_to(m["a"].value, m["split"].value.shape))
        return jax.tree.map(lambda leaf: leaf, swap(m, x) | {"split": new})

    after = call(fun, how, m)["split"].value
    np.testing.assert_array_equal(after, np.ones(8))
    assert after.sharding.spec == P("x")


# Loops and branches whose types need the same states on all shards


def carried(state: sm.State, x: Any) -> Any:
    return lax.scan(lambda s, row: (s.set(s.value + row), None), state, x)[0]


def carried_by_scan_of_models(state: sm.State, x: Any) -> Any:
    return sm.scan(lambda s, row: (s.set(s.value + row), None), state, x)[0]


def of_one_branch(state: sm.State, x: Any) -> Any:
    return lax.cond(x.sum() > -1, lambda s: s.set(s.value + x.sum()), lambda s: s, state)


@pytest.mark.parametrize("loop", [carried, carried_by_scan_of_models, of_one_branch])
def test_a_loop_may_write_different_values_to_a_state_that_enters_the_same(loop: Any) -> None:
    """JAX refuses the types of such a loop or branch."""
    fun = lambda m, x: loop(m["total"], x)
    after = call(fun, "checked", {"total": sm.State(0.0, reduce="sum")})
    assert values(after) == [TOTAL]
    with pytest.raises(sm.DivergedStateError, match=r"m\['total'\].* varies over 'x'"):
        call(fun, "checked", {"total": sm.State(0.0)})


# Where a state no longer remembers, its path and its arrays tell


class Net(sm.Module):
    w: sm.ParamState
    total: sm.State


def net(start: float = 0.0, **options: Any) -> Net:
    return Net(sm.ParamState(np.ones(8, np.float32), **options), sm.State(start, reduce="sum"))


def forgetful(tree: Any, by: Any) -> Any:
    """Every leaf moved on, by a function that makes new State objects."""
    return jax.tree.map(lambda leaf: leaf + by, tree)


def replicated(fun: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`fun` with everything replicated but the last argument."""
    specs = (*[P()] * (len(args) - 1), P("x"))
    return sm.shard_map(fun, make_mesh("4"), specs, P(), **options)(*args)


def test_paths_and_positions() -> None:
    def models(a: Net, b: Net, x: jax.Array) -> Any:
        return Net(a.w, forgetful(a.total, x.sum())), Net(b.w, forgetful(b.total, 2 * x.sum()))

    a, b = replicated(models, net(1.0), net(10.0), X)
    assert values([a.total, b.total]) == [1 + TOTAL, 10 + 2 * TOTAL]

    def whole_paths(states: Any, x: jax.Array) -> Any:
        (a, b), c = states
        return [[forgetful(a, x.sum()), forgetful(b, 2 * x.sum())], forgetful(c, 3 * x.sum())]

    one, two, three = (sm.State(k, reduce="sum") for k in (1.0, 2.0, 3.0))
    after = replicated(whole_paths, [[one, two], three], X)
    assert values(after) == [1 + TOTAL, 2 + 2 * TOTAL, 3 + 3 * TOTAL]

    def twice(model: Net, x: jax.Array) -> Any:
        after = Net(model.w, forgetful(model.total, x.sum()))
        return after, after

    first, second = replicated(twice, net(1.0), X)
    assert values([first.total, second.total]) == [1 + TOTAL] * 2


def test_what_was_not_written_is_known_by_its_arrays() -> None:
    def fun(a: Net, b: Net, x: jax.Array) -> Any:
        del a
        return x.sum(keepdims=True), jax.tree.map(lambda leaf: leaf, b)

    mapped = sm.shard_map(fun, make_mesh(), (P(), P(), P("x")), (P("x"), P()))
    a, b, x = mapped.place(net(1.0), net(2.0), X)
    _, after = mapped(a, b, x)
    assert after.w.value is b.w.value
    assert after.total.value is b.total.value


def test_a_state_made_inside_is_new() -> None:
    def fun(model: Net, x: jax.Array) -> Any:
        total = lax.psum(x.sum(), "x")
        copy = sm.BatchState(model.w.value, tag="copy")
        split, own = sm.State(x, spec=P("x")), sm.State(x.sum(), spec=sm.PerShard("x"))
        return model, {"copy": copy, "new": sm.State(total), "split": split, "own": own}

    after, made = replicated(fun, net(5.0), X)
    assert type(made["copy"]) is sm.BatchState and made["copy"].tag == {"copy"}
    np.testing.assert_array_equal(made["copy"].value, 1)
    assert type(after.w) is sm.ParamState
    assert values([after.total, made["new"]]) == [5, TOTAL]
    np.testing.assert_array_equal(made["split"].value, X)
    np.testing.assert_array_equal(made["own"].value, X.reshape(4, 2).sum(1))
    summed = lambda m, x: swap(m, x) | {"c": sm.State(x.sum(), reduce="sum")}
    assert values(call(jax.jit(summed), "checked", model())["c"]) == [TOTAL]


def second_of_two(pair: Any, x: jax.Array) -> Any:
    a, b = pair
    del a
    return Net(forgetful(b.w, 1), b.total.set(b.total.value + x.sum()))


@pytest.mark.parametrize("options", [{"donate": "states"}, {}], ids=["donation", "policy"])
def test_which_of_two_alike_is_asked_where_it_makes_a_difference(options: dict[str, Any]) -> None:
    after = replicated(second_of_two, [net(1.0), net(2.0)], X)
    np.testing.assert_array_equal(after.w.value, 2)
    assert float(after.total.value) == 2 + TOTAL
    reduce = None if options else "mean"
    with pytest.raises(
        sm.StructureError, match=r"second_of_two\(\.\.\.\)\.w may be .*\[0\]\.w or .*\[1\]\.w"
    ):
        replicated(second_of_two, [net(reduce=reduce), net(reduce=reduce)], X, **options)
    after = replicated(
        second_of_two, [net(reduce=reduce), net(reduce=reduce, name="b")], X, **options
    )
    np.testing.assert_array_equal(after.w.value, 2)
    assert float(after.total.value) == TOTAL


def test_another_shape_inside_tells_them_apart() -> None:
    by_rows = {sm.filters.Where(lambda pair: pair[1].w): P("x")}
    after = replicated(second_of_two, [net(), net()], X, state_in_specs=by_rows)
    assert after.w.value.sharding.spec == P("x")
    np.testing.assert_array_equal(after.w.value, 2)
