"""A written state is merged with the old value of the state that it continues, whatever it passed through."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted, label, make_mesh, without_names


X = np.arange(8, dtype=np.float32)
TOTAL = float(X.sum())


def model(**options: Any) -> dict[str, sm.State]:
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


def by_leaves(m: Any, x: Any) -> Any:
    treedef: Any
    leaves, treedef = jax.tree.flatten({"a": m["b"], "b": m["a"]})
    return treedef.unflatten([leaves[0] + x.sum(), leaves[1] + 2 * x.sum()])


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
    def other(m: Any) -> Any:
        return swap(m, 0 * x)

    return lax.cond(lax.pmax(x.sum(), "x") > 0, lambda m: swap(m, x), other, m)


@jax.jit
def add(state: sm.State, x: Any) -> sm.State:
    return state.set(state.value + x)


def through_one_cached_jit(m: Any, x: Any) -> Any:
    return {"a": add(m["b"], x.sum()), "b": add(m["a"], 2 * x.sum())}


def through_a_gradient(m: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return (w * x).sum(), jax.checkpoint(swap)(m, w * x)

    return jax.value_and_grad(loss, has_aux=True)(jnp.ones(()))[0][1]


def through_nested_lanes(m: Any, x: Any) -> Any:
    return sm.vmap2(swap, in_axes=(None, 0))(m, x)


def in_a_branch_of_its_own(m: Any, x: Any) -> Any:
    """A written state outlives the map by which another one was made."""
    new = jax.jit(swap)(m, x)
    return jax.tree.map(lambda value: value + 0, {"b": new["b"], "a": new["a"]})


KNOWN: list[Callable[..., Any]] = [
    swap,
    jax.jit(swap),
    jax.checkpoint(swap),
    jax.jit(jax.checkpoint(by_tree_map)),
    by_tree_map,
    by_leaves,
    in_scan,
    in_while,
    in_cond,
    through_one_cached_jit,
    through_a_gradient,
    through_nested_lanes,
    in_a_branch_of_its_own,
]


def mappings(fun: Callable[..., Any]) -> dict[str, Any]:
    specs = (P(), P("x")), P()
    return {
        "checked": sm.shard_map(fun, make_mesh("4"), *specs),
        "unchecked": sm.shard_map(fun, make_mesh("4"), *specs, check_vma=False),
        "eager": sm.shard_map(fun, make_mesh("4"), *specs, jit=False),
        "lanes": sm.vmap2(fun, in_axes=(None, 0), axis_name="x"),
        "devices": sm.pmap2(fun, "x", in_axes=(None, 0)),
    }


def call(fun: Callable[..., Any], how: str, m: Any) -> Any:
    x = X.reshape(4, 2) if how in ("lanes", "devices") else X
    return mappings(fun)[how](m, x)


@pytest.mark.parametrize("how", ["checked", "unchecked", "lanes", "devices"])
@pytest.mark.parametrize("fun", KNOWN, ids=label)
def test_a_state_continues_the_one_that_it_was_written_from(fun: Any, how: str) -> None:
    after = call(fun, how, model())
    assert (float(after["a"].value), float(after["b"].value)) == (2 + TOTAL, 1 + 2 * TOTAL)


@pytest.mark.parametrize("fun", [jax.checkpoint(swap), by_tree_map, in_scan], ids=label)
def test_a_call_that_is_not_compiled_knows_it_too(fun: Any) -> None:
    after = call(fun, "eager", model())
    assert (float(after["a"].value), float(after["b"].value)) == (2 + TOTAL, 1 + 2 * TOTAL)


def test_a_call_that_is_not_compiled_may_go_by_values() -> None:
    def fun(m: Any, x: Any) -> Any:
        return swap(m, x) if m["a"].value == 1 else m

    after = call(fun, "eager", model())
    assert (float(after["a"].value), float(after["b"].value)) == (2 + TOTAL, 1 + 2 * TOTAL)


def exchanged_in_one_branch(m: Any, x: Any) -> Any:
    same = lax.pmax(x.sum(), "x") > 0
    return lax.cond(same, lambda m: {"a": m["b"], "b": m["a"]}, lambda m: m, m)


def exchanged_in_each_round(m: Any, x: Any) -> Any:
    return lax.scan(lambda m, row: (swap(m, row), None), varying(m), x)[0]


def closed_over_by_branches(m: Any, x: Any) -> Any:
    same = lax.pmax(x.sum(), "x") > 0
    return m | {"a": lax.cond(same, lambda: m["a"], lambda: m["b"])}


@pytest.mark.parametrize("how", ["checked", "unchecked", "eager", "lanes", "devices"])
@pytest.mark.parametrize(
    "fun",
    [exchanged_in_one_branch, exchanged_in_each_round, closed_over_by_branches],
    ids=label,
)
def test_what_cannot_be_known_is_refused(fun: Any, how: str) -> None:
    text = rf"{fun.__name__}\(\.\.\.\)\['a'\] may be m\['a'\] or m\['b'\]"
    with pytest.raises(sm.StructureError, match=text):
        call(fun, how, model())


@pytest.mark.parametrize("how", ["checked", "lanes"])
def test_nothing_is_asked_where_it_makes_no_difference(how: str) -> None:
    after = call(exchanged_in_one_branch, how, model(reduce="max"))
    assert (float(after["a"].value), float(after["b"].value)) == (2, 1)


def test_names_tell_states_apart() -> None:
    m = {k: s.replace(name=k) for k, s in model().items()}

    def fun(m: Any, x: Any) -> Any:
        new = lax.cond(lax.pmax(x.sum(), "x") > 0, lambda m: m, lambda m: m, m)
        return {k: s.set(s.value + x.sum()) for k, s in new.items()}

    after = call(fun, "checked", m)
    assert (float(after["a"].value), float(after["b"].value)) == (1 + TOTAL, 2 + TOTAL)


def test_a_function_sees_the_old_value_of_its_own_state() -> None:
    def largest_step(old: Any, new: Any, axis_names: Any) -> Any:
        return old + lax.pmax(new - old, axis_names)

    after = call(jax.checkpoint(swap), "checked", model(reduce=largest_step))
    assert (float(after["a"].value), float(after["b"].value)) == (2 + 13, 1 + 26)


def test_alike_states_leave_as_they_entered() -> None:
    """Inside they are alike, but one is a part of an array and the other is whole."""
    m = {"a": sm.State(X, spec=P("x")), "b": sm.State(X[:2] + 10)}

    @jax.checkpoint
    def fun(m: Any, x: Any) -> Any:
        return {"a": m["b"].set(m["b"].value + 1), "b": m["a"].set(m["a"].value + 1)}

    mapped = sm.shard_map(fun, make_mesh("4"), (P(), P("x")), P())
    apart = {k: s.replace(spec=None) for k, s in m.items()}
    where = {sm.filters.Where(lambda args: args["a"]): P("x")}
    mapped = sm.shard_map(fun, make_mesh("4"), (P(), P("x")), P(), state_in_specs=where)
    after = mapped(apart, X)
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


@pytest.mark.parametrize("how", ["checked", "unchecked", "lanes", "devices"])
def test_it_is_traced_once_and_leaves_nothing_behind(how: str) -> None:
    fun, count = counted(jax.checkpoint(swap))
    m, x = model(), X.reshape(4, 2) if how in ("lanes", "devices") else X
    mapped = mappings(fun)[how]
    structure: Any = jax.tree.structure(m)
    for _ in range(3):
        m = mapped(m, x)
    assert count.times == 1
    assert jax.tree.structure(m) == structure
    assert all(state._meta.token is None for state in m.values())


@pytest.mark.parametrize("fun", [jax.checkpoint(swap), in_scan], ids=label)
def test_the_compiled_program_is_the_same(fun: Any) -> None:
    """States with names of their own need no links."""
    named = {k: s.replace(name=k) for k, s in model().items()}

    def same_names(m: Any, x: Any) -> Any:
        return {k: m[k].set(s.value) for k, s in fun({"a": m["b"], "b": m["a"]}, x).items()}

    programs = [
        mappings(same_names)["checked"].lower(m, X).compile().as_text() for m in (model(), named)
    ]
    assert without_names(programs[0]) == without_names(programs[1])


def test_a_new_state_is_one() -> None:
    @jax.jit
    def fun(m: Any, x: Any) -> Any:
        return swap(m, x) | {"c": sm.State(x.sum(), reduce="sum")}

    after = call(fun, "checked", model())
    assert float(after["c"].value) == TOTAL


@pytest.mark.parametrize("how", ["checked", "unchecked", "eager", "lanes", "devices"])
def test_the_same_value_everywhere_is_no_sum_of_copies(how: str) -> None:
    def fun(s: sm.State, x: Any) -> Any:
        return s.set(s.value + lax.all_gather(x, "x", tiled=True).sum())

    assert float(call(fun, how, sm.State(1.0, reduce="sum")).value) == 1 + TOTAL


def test_a_loop_over_a_state_of_another_type_names_it_and_the_mend() -> None:
    def loop(m: Any, x: Any) -> Any:
        def body(m: Any, row: Any) -> Any:
            return m | {"total": m["total"].set(m["total"].value + row)}, None

        return lax.scan(body, m, x)[0]

    m = {"seen": sm.State(0.0, reduce="max"), "total": sm.State(0.0, reduce="sum")}
    with pytest.raises(TypeError) as raised:
        call(loop, "checked", m)
    assert str(raised.value).split("\n\nHint: ")[1] == (
        "a loop or branch needs one type for what goes in and what comes out, but shards write different "
        "values in it to states that enter the same on every shard:\n"
        "  - m['total']: State(float32[], reduce='sum') is the same over 'x'\n"
        "Mark the value as varying before the loop or branch; its policy merges it when it leaves:\n"
        "    m['total'].set(jax.lax.pcast(m['total'].value, ('x',), to='varying'))"
    )

    def mended(m: Any, x: Any) -> Any:
        total = m["total"].set(jax.lax.pcast(m["total"].value, ("x",), to="varying"))
        return loop(m | {"total": total}, x)

    assert float(call(mended, "checked", m)["total"].value) == TOTAL


def carried(state: sm.State, x: Any) -> Any:
    return lax.scan(lambda s, row: (s.set(s.value + row), None), state, x)[0]


def carried_by_scan_of_models(state: sm.State, x: Any) -> Any:
    return sm.scan(lambda s, row: (s.set(s.value + row), None), state, x)[0]


def carried_by_while(state: sm.State, x: Any) -> Any:
    def body(pair: Any) -> Any:
        return pair[0] + 1, pair[1].set(pair[1].value + x.sum())

    return lax.while_loop(lambda pair: pair[0] < 1, body, (0, state))[1]


def of_one_branch(state: sm.State, x: Any) -> Any:
    return lax.cond(x.sum() > -1, lambda s: s.set(s.value + x.sum()), lambda s: s, state)


@pytest.mark.parametrize("kinds", [(), (jax.sharding.AxisType.Explicit,)], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "loop", [carried, carried_by_scan_of_models, carried_by_while, of_one_branch]
)
def test_a_loop_names_a_state_without_a_policy_too(loop: Any, kinds: Any) -> None:
    call: Any = lambda fun: sm.shard_map(fun, make_mesh("8", *kinds), (None, P("x")), None)
    states = {"seen": sm.State(jnp.ones(3)), "total": sm.State(0.0)}
    fun = lambda m, x: loop(m["total"], x)
    with pytest.raises(TypeError, match=r"must have equal .*types") as raised:
        call(fun)(states, X)
    assert str(raised.value).split("\n\nHint: ")[1] == (
        "a loop or branch needs one type for what goes in and what comes out, but shards write different "
        "values in it to states that enter the same on every shard:\n"
        "  - m['total']: State(float32[]) is the same over 'x'\n"
        "Mark the value as varying before the loop or branch, and declare how it is merged when it leaves, "
        "as in State(value, reduce='mean'), or give it a spec that names 'x':\n"
        "    m['total'].set(jax.lax.pcast(m['total'].value, ('x',), to='varying'))"
    )

    def mended(m: Any, x: Any) -> Any:
        return loop(m["total"].set(lax.pcast(m["total"].value, ("x",), to="varying")), x)

    after = call(mended)(states | {"total": sm.State(0.0, reduce="sum")}, X)
    assert float(after.value) == TOTAL
