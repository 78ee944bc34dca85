"""Trees split by their states, and joined again."""

import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import statemesh as sm


structure: Any = jax.tree.structure


class Norm(sm.Module):
    mean: sm.BatchState
    scale: sm.ParamState
    eps: float = 1e-5


class Net(sm.Module):
    norms: list[Norm]
    rng: sm.RandomState
    bias: jax.Array
    nothing: None = None
    act: Any = operator.neg


def make_net() -> Net:
    def norm() -> Norm:
        return Norm(
            sm.BatchState(np.zeros(2), tag="slow"), sm.ParamState({"a": 1.0, "b": [2, 3.0]})
        )

    return Net([norm(), norm()], sm.RandomState(jax.random.key(0)), jnp.ones(2))


def nodes(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=sm.is_state)


def same(a: Any, b: Any) -> None:
    """The two trees have one structure and the very same leaves."""
    assert structure(a) == structure(b)
    assert all(map(operator.is_, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_what_goes_where() -> None:
    net = make_net()
    held, rest = sm.partition(net)
    assert list(sm.states(held)) == list(sm.states(net)) and sm.states(rest) == {}
    params, slow, rest = sm.partition(net, sm.ParamState, "slow")
    assert [
        n is m for n, m in zip(nodes(params), (net.norms[0].scale, net.norms[1].scale), strict=True)
    ]
    assert all(isinstance(n, sm.BatchState) for n in nodes(slow))
    assert list(sm.states(rest)) == ["rng"]
    assert rest.act is operator.neg
    assert rest.bias is net.bias
    assert (rest.nothing, params.nothing) == (None, None)
    assert rest.norms[0].eps == 1e-5
    assert isinstance(params, Net)


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
    doubled = jax.tree.map(lambda x: x * 2, params)
    assert [float(x) for x in jax.tree.leaves(doubled)] == [2.0, 4.0, 6.0] * 2
    arrays, static = eqx.partition(net, eqx.is_array)

    @jax.jit
    def step(arrays: Any) -> Any:
        params, rest = sm.partition(eqx.combine(arrays, static), sm.ParamState)
        params = jax.tree.map(lambda x: x * 2, params)
        return params, eqx.filter(sm.combine(params, rest), eqx.is_array)

    traced, whole = step(arrays)
    assert float(whole.norms[0].scale.value["a"]) == 2
    after = sm.combine(traced, rest)
    assert float(after.norms[1].scale.value["a"]) == 2
    assert after.norms[0].mean is net.norms[0].mean
    assert structure(after) == structure(net)


def test_small_trees() -> None:
    trees: list[Any] = [sm.State(1.0), (), None, 3, {}, [sm.State(()), ()]]
    for tree in trees:
        same(sm.combine(*sm.partition(tree)), tree)
    assert list(sm.states(sm.State(0))) == [""]
    assert sm.states([1, None]) == {}
