"""`State` as a value and as a pytree node."""

import copy
import io
import operator
import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_same, label


structure: Any = jax.tree.structure


class Norm(sm.Module):
    mean: sm.BatchState
    count: sm.State
    name: str = sm.field(static=True, default="norm")


class Net(sm.Module):
    w: sm.ParamState
    norms: list[Norm]
    bias: jax.Array
    act: Any = operator.neg


def merge(old: Any, new: Any, axis_names: Any) -> Any:
    del old, axis_names
    return new


def make_norm(**meta: Any) -> Norm:
    return Norm(sm.BatchState(np.zeros(3), reduce="mean", **meta), sm.State(0, reduce="sum"))


def make_net(**meta: Any) -> Net:
    w = {"w": np.ones((2, 3), np.float32), "b": [1.0, 2]}
    return Net(sm.ParamState(w, spec={"w": P("x"), "b": None}), [make_norm(**meta)], jnp.ones(3))


def test_metadata() -> None:
    bare = sm.State(1.0)
    assert (bare.name, bare.tag, bare.spec, bare.reduce) == (None, frozenset(), None, None)
    full = sm.State(1.0, name="n", tag="t", spec=P("x"), reduce=merge)
    assert (full.name, full.tag, full.spec, full.reduce) == ("n", frozenset("t"), P("x"), merge)
    own = full.replace(tag=None, spec=sm.PerShard("y"))
    assert (own.name, own.tag, own.spec, own.reduce) == ("n", frozenset(), sm.PerShard("y"), merge)
    tags: list[tuple[Any, set[str]]] = [
        (None, set()),
        ("long", {"long"}),
        (["a", "b", "a"], {"a", "b"}),
        (("a",), {"a"}),
        (iter("ab"), {"a", "b"}),
    ]
    for tag, kept in tags:
        state = sm.State(0, tag=tag)
        assert state.tag == kept and type(state.tag) is frozenset
    for reduce in (None, "mean", "max", "min", "sum", merge):
        assert sm.State(0.0, reduce=reduce).reduce == reduce
        assert sm.State(0.0).replace(reduce=reduce).reduce == reduce


@pytest.mark.parametrize("state", [sm.State(1), sm.RandomState(jax.random.key(0))], ids=label)
def test_frozen(state: sm.State) -> None:
    before = state.value
    for attribute in ("value", "tag", "other"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(state, attribute, 2)
        with pytest.raises(AttributeError, match="immutable"):
            delattr(state, attribute)
    assert state.value is before
    assert state.tag == frozenset()


def test_replace_does_not_check_the_value() -> None:
    old = sm.State(np.zeros(2, np.float32), tag="t")
    new = old.replace(value={"a": 1, "b": np.ones((2, 2), bool)}, name="n")
    assert new.value["a"].dtype == jnp.int32
    assert new.value["b"].shape == (2, 2)
    assert (new.name, new.tag) == ("n", frozenset("t"))
    assert old.replace().value is old.value


def test_key_paths_end_in_value() -> None:
    tree = {"m": make_net(), "r": sm.RandomState(jax.random.key(0))}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert [path for path in paths if path.endswith(".value")] == [
        "['m'].norms[0].mean.value",
        "['m'].norms[0].count.value",
        "['r'].value",
    ]
    assert "['m'].w.value['b'][0]" in paths


def test_metadata_is_part_of_the_treedef() -> None:
    base: dict[str, Any] = {"name": "n", "tag": "t", "spec": {"a": P("y")}, "reduce": "mean"}
    other = {"name": "m", "tag": "u", "spec": {"a": P("x")}, "reduce": "max"}
    state = structure(sm.State({"a": 1.0}, **base))
    assert state == structure(sm.State({"a": 2.0}, **base))
    for field, value in other.items():
        assert state != structure(sm.State({"a": 1.0}, **base | {field: value}))


def test_flattening_runs_no_python_per_state() -> None:
    def python_calls(count: int) -> int:
        kinds: list[Any] = [sm.State, sm.ParamState, sm.HiddenState, sm.BatchState]
        tree = [kinds[i % 4](i, tag="t", spec=P("x")) for i in range(count)]
        tree += [sm.RandomState(jax.random.key(i)) for i in range(count)]
        calls = 0

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(profile)
        try:
            leaves = jax.tree.flatten(tree)[0]
        finally:
            sys.setprofile(None)
        assert len(leaves) == 2 * count
        return calls

    assert python_calls(100) == python_calls(4)


def test_unflatten_lets_placeholders_through() -> None:
    for state in (sm.State({"a": 1.0}, tag="t"), sm.RandomState(jax.random.key(0))):
        for leaf in (object(), None, jax.ShapeDtypeStruct((2,), np.float32), sm.State):
            filled = structure(state).unflatten([leaf])
            assert type(filled) is type(state)
            assert filled.tag == state.tag
            (held,) = jax.tree.leaves(filled, is_leaf=lambda x: x is leaf)  # noqa: B023
            assert held is leaf


def test_transformations_take_and_return_states() -> None:
    state = sm.ParamState({"a": np.arange(4.0)}, tag="t", reduce=merge)
    traces = 0

    @jax.jit
    def double(s: sm.ParamState) -> sm.ParamState:
        nonlocal traces
        traces += 1
        return s.set({"a": s.value["a"] * 2})

    assert_same(double(double(state)), state.set({"a": np.arange(4, dtype=np.float32) * 4}))
    double(sm.ParamState({"a": np.ones(4)}, tag=["t"], reduce=merge))
    assert traces == 1
    assert_same(
        jax.vmap(lambda s: s.set({"a": s.value["a"] + 1}))(state),
        state.set({"a": np.arange(1, 5.0, dtype="f")}),
    )
    slope = jax.grad(lambda s: (s.value["a"] ** 2).sum())(state)
    assert_same(slope, state.set({"a": 2 * np.arange(4, dtype=np.float32)}))
    last, each = jax.lax.scan(lambda s, _: (s.set(s.value + 1), s), sm.State(0), length=3)
    assert_same(last, sm.State(3))
    assert_same(each, sm.State(np.arange(3)))
    (abstract,) = jax.tree.leaves(jax.eval_shape(lambda s: s, state))
    assert abstract.shape == (4,)
    made = jax.jit(lambda x: sm.BatchState(x, tag="t"))(jnp.ones(2))
    assert_same(made, sm.BatchState(jnp.ones(2), tag="t"))


def test_repr() -> None:
    assert repr(sm.State(1)) == "State(int32(1))"
    shown = repr(sm.BatchState({"a": np.ones((2, 3))}, name="n", reduce=merge, tag=("z", "b")))
    assert shown == "BatchState({'a': float32[2,3]}, name='n', reduce=merge, tag=['b', 'z'])"
    assert "PerShard('x')" in repr(sm.State(1, spec=sm.PerShard("x")))
    assert "count=State(int32(0), reduce='sum')" in repr(make_net())
    jax.jit(lambda s: repr(s) and s)(sm.State(1))


@pytest.mark.parametrize(
    "copied", [lambda tree: pickle.loads(pickle.dumps(tree)), copy.deepcopy, copy.copy]
)
def test_copies_are_equal(copied: Callable[[Any], Any]) -> None:
    for tree in (
        sm.State({"a": 1.0}, name="n", tag="t", spec={"a": P("x")}, reduce=merge),
        sm.State(np.ones(3), spec=sm.PerShard("x")),
        sm.RandomState(jax.random.key(3), tag="t"),
        make_net(tag="t"),
        sm.partition(make_net(), sm.ParamState)[0],
    ):
        assert_same(copied(tree), tree)


def test_equinox_filters() -> None:
    net = make_net()
    floats, rest = eqx.partition(net, eqx.is_inexact_array)
    assert isinstance(floats.w, sm.ParamState)
    assert floats.norms[0].count.value is None
    assert rest.norms[0].mean.value is None
    assert_same(eqx.combine(floats, rest), net)

    def loss(net: Net) -> Any:
        return (net.w.value["w"] ** 2).sum()

    gradient: Any = eqx.filter_jit(eqx.filter_grad(loss))
    np.testing.assert_array_equal(gradient(net).w.value["w"], 2)
    whole = eqx.tree_at(lambda m: m.norms[0].count, net, sm.State(5))
    assert int(whole.norms[0].count.value) == 5


def test_equinox_serialisation() -> None:
    net, file = make_net(tag="t"), io.BytesIO()
    saved = jax.tree.map(lambda x: x + 1 if isinstance(x, jax.Array) else x, net)
    eqx.tree_serialise_leaves(file, saved)
    file.seek(0)
    assert_same(eqx.tree_deserialise_leaves(file, net), saved)


def test_is_state() -> None:
    assert sm.is_state(sm.State(0))
    assert sm.is_state(sm.RandomState(jax.random.key(0)))
    for other in (jnp.ones(2), None, sm.State, make_net(), [sm.State(0)], sm.PerShard("x")):
        assert not sm.is_state(other)


def test_a_state_is_no_array() -> None:
    uses: list[tuple[Callable[[Any], Any], str]] = [
        (lambda s: s == 3, "=="),
        (lambda s: bool(s), "bool()"),
        (lambda s: float(s), "float()"),
        (lambda s: s * 2, "*"),
        (lambda s: 2 - s, "-"),
        (lambda s: s[0], "[...]"),
        (lambda s: s < 2, "<"),
        (lambda s: np.asarray(s), "a function of arrays"),
        (lambda s: jnp.sin(s), "a function of arrays"),
        (lambda s: jnp.ones(2) + s, "a function of arrays"),
    ]
    for use, what in uses:
        with pytest.raises(TypeError) as raised:
            use(sm.BatchState(1.0))
        assert str(raised.value) == (
            f"a BatchState holds an array and is not one itself: apply {what} to `state.value`. Write a new "
            "value with `state.set(value)`."
        )


def test_states_are_compared_by_identity() -> None:
    state = sm.State(1.0)
    assert state == state
    assert state != sm.State(1.0)
    assert state != "name"
    assert state in {state: 1}
