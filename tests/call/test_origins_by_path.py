"""Which entering state a returned one continues, when it no longer remembers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


X = np.arange(1, 17, dtype=np.float32)
TOTAL = float(X.sum())


class Net(sm.Module):
    w: sm.ParamState
    total: sm.State


def net(start: float = 0.0) -> Net:
    return Net(sm.ParamState(np.ones(3, np.float32)), sm.State(start, reduce="sum"))


def forgetful(tree: Any, by: Any) -> Any:
    """Every leaf moved on, by a function that makes new State objects."""
    return jax.tree.map(lambda leaf: leaf + by, tree)


def call(fun: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`fun` with everything replicated but the last argument."""
    specs = (*[P()] * (len(args) - 1), P("x"))
    return sm.shard_map(fun, make_mesh(), specs, P(), **options)(*args)


def test_models_of_one_class_are_taken_in_order() -> None:
    def fun(a: Net, b: Net, x: jax.Array) -> Any:
        return Net(a.w, forgetful(a.total, x.sum())), Net(b.w, forgetful(b.total, 2 * x.sum()))

    a, b = call(fun, net(1.0), net(10.0), X)
    assert (float(a.total.value), float(b.total.value)) == (1 + TOTAL, 10 + 2 * TOTAL)


def test_a_whole_path_goes_before_its_end() -> None:
    def fun(states: Any, x: jax.Array) -> Any:
        (a, b), c = states
        return [
            [forgetful(a, x.sum()), forgetful(b, 2 * x.sum())],
            forgetful(c, 3 * x.sum()),
        ]

    start = [
        [sm.State(1.0, reduce="sum"), sm.State(2.0, reduce="sum")],
        sm.State(3.0, reduce="sum"),
    ]
    (a, b), c = call(fun, start, X)
    values = [float(s.value) for s in (a, b, c)]
    assert values == [1 + TOTAL, 2 + 2 * TOTAL, 3 + 3 * TOTAL]


def test_what_was_not_written_is_known_by_its_arrays() -> None:
    def fun(a: Net, b: Net, x: jax.Array) -> Any:
        del a
        return x.sum(keepdims=True), jax.tree.map(lambda leaf: leaf, b)

    mapped = sm.shard_map(fun, make_mesh(), (P(), P(), P("x")), (P("x"), P()))
    a, b, x = mapped.place(net(1.0), net(2.0), X)
    _, after = mapped(a, b, x)
    assert after.w.value is b.w.value
    assert after.total.value is b.total.value


def test_a_state_made_of_an_entering_array_is_new() -> None:
    def fun(model: Net, x: jax.Array) -> Any:
        return sm.BatchState(model.w.value, tag="copy"), model

    copy, after = call(fun, net(), X)
    assert type(copy) is sm.BatchState
    assert copy.tag == {"copy"}
    np.testing.assert_array_equal(copy.value, 1)
    assert type(after.w) is sm.ParamState


def test_a_state_made_inside_is_not_one_that_is_returned() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        return {"old": state, "new": sm.State(jax.lax.psum(x.sum(), "x"))}

    mapped = sm.shard_map(fun, make_mesh(), (P(), P("x")), P())
    out = mapped(sm.State(5.0), X)
    assert float(out["old"].value) == 5
    assert float(out["new"].value) == TOTAL


def test_the_same_state_returned_twice() -> None:
    def fun(model: Net, x: jax.Array) -> Any:
        after = Net(model.w, forgetful(model.total, x.sum()))
        return after, after

    first, second = call(fun, net(1.0), X)
    assert float(first.total.value) == float(second.total.value) == 1 + TOTAL


def one_of_two(a: Net, b: Net, x: jax.Array) -> Any:
    del a
    return Net(forgetful(b.w, 1), b.total.set(b.total.value + x.sum()))


def test_where_it_makes_no_difference_nothing_is_asked() -> None:
    after = call(one_of_two, net(1.0), net(2.0), X)
    np.testing.assert_array_equal(after.w.value, 2)
    assert float(after.total.value) == 2 + TOTAL


@pytest.mark.parametrize(
    ("options", "reduce"),
    [({"donate": "states"}, None), ({}, "mean")],
    ids=["donation", "policy"],
)
def test_where_it_does_it_is_refused(options: dict[str, Any], reduce: str | None) -> None:
    def model() -> Net:
        return net().replace(w=sm.ParamState(np.ones(8, np.float32), reduce=reduce))

    def fun(pair: Any, x: jax.Array) -> Any:
        return one_of_two(pair[0], pair[1], x)

    with pytest.raises(
        sm.StructureError, match=r"fun\(\.\.\.\)\.w may be .*\[0\]\.w or .*\[1\]\.w"
    ):
        call(fun, [model(), model()], X, **options)
    named = model().replace(w=model().w.replace(name="b"))
    after = call(fun, [model(), named], X, **options)
    np.testing.assert_array_equal(after.w.value, 2)
    assert float(after.total.value) == TOTAL


def test_another_shape_is_another_state() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        del state
        return sm.State(x, spec=P("x")), sm.State(jnp.zeros(3))

    split, zeros = call(fun, sm.State(np.ones(8, np.float32), reduce="mean"), X)
    np.testing.assert_array_equal(split.value, X)
    assert zeros.value.shape == (3,)


def test_another_shape_inside_tells_them_apart() -> None:
    by_rows = {sm.filters.Where(lambda pair: pair[1].w): P("x")}
    pair = [net().replace(w=sm.ParamState(np.ones(8, np.float32))) for _ in range(2)]
    after = call(lambda pair, x: one_of_two(pair[0], pair[1], x), pair, X, state_in_specs=by_rows)
    assert after.w.value.sharding.spec == P("x")
    np.testing.assert_array_equal(after.w.value, 2)
