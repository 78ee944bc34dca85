"""Trees split by their states, and joined again."""

import operator
from typing import Any

import equinox as eqx
import jax

import statemesh as sm
from tests.state.test_state import Net, make_net


structure: Any = jax.tree.structure


def nodes(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=sm.is_state)


def same(a: Any, b: Any) -> None:
    """The two trees have one structure and the very same leaves."""
    assert structure(a) == structure(b)
    assert all(map(operator.is_, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_what_goes_where() -> None:
    net = make_net(tag="slow")
    held, rest = sm.partition(net)
    assert list(sm.states(held)) == list(sm.states(net)) and sm.states(rest) == {}
    params, slow, rest = sm.partition(net, sm.ParamState, "slow")
    assert nodes(params) == [net.w] and nodes(slow) == [net.norms[0].mean]
    assert list(sm.states(rest)) == ["norms[0].count"]
    assert rest.act is operator.neg and rest.bias is net.bias
    assert isinstance(params, Net)
    same(sm.combine(rest, slow, params), net)


def test_a_removed_leaf_is_a_sentinel() -> None:
    params, rest = sm.partition({"w": sm.ParamState(1.0), "none": None, "x": 2.0}, sm.ParamState)
    assert rest["w"] is not None
    assert params["none"] is None
    assert rest["none"] is None
    assert repr(rest["w"]) == repr(params["x"]) == "Removed"
    assert rest["w"] == params["x"]
    assert jax.tree.leaves(rest) == [2.0]
    assert len(jax.tree.leaves(params)) == 1


def test_parts_are_trees_also_under_a_trace() -> None:
    net = make_net()
    params, rest = sm.partition(net, sm.ParamState)
    arrays, static = eqx.partition(net, eqx.is_array)

    @jax.jit
    def step(arrays: Any) -> Any:
        params, rest = sm.partition(eqx.combine(arrays, static), sm.ParamState)
        params = jax.tree.map(lambda x: x * 2, params)
        return params, eqx.filter(sm.combine(params, rest), eqx.is_array)

    traced, whole = step(arrays)
    after = sm.combine(traced, rest)
    for doubled in (jax.tree.map(lambda x: x * 2, params).w, whole.w, after.w):
        assert [float(x) for x in doubled.value["b"]] == [2.0, 4.0]
    assert after.norms[0].mean is net.norms[0].mean
    assert structure(after) == structure(net)


def test_small_trees() -> None:
    trees: list[Any] = [sm.State(1.0), (), None, 3, {}, [sm.State(()), ()]]
    for tree in trees:
        same(sm.combine(*sm.partition(tree)), tree)
    assert list(sm.states(sm.State(0))) == [""]
    assert sm.states([1, None]) == {}
