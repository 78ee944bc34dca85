"""`loop`: one shard after the other, in plain Python."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import loop

from .helpers import make_mesh


tree_structure: Any = jax.tree.structure

SIZES = {"x": 4, "y": 2}
SPLIT = P("x")
X = np.sin(np.arange(64.0, dtype=np.float32)).reshape(16, 4)


def refusal(call: Callable[[], Any], kind: type[Exception] = sm.StatemeshError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize(
    ("into", "out"),
    [
        (P("x", "y"), P("x", "y")),
        (P("y", "x"), P("y", "x")),
        (P(("x", "y")), P(("x", "y"))),
        (P(("y", "x")), P(None, ("y", "x"))),
        (P(None, "y"), P("x", "y")),
        (P("x"), P("x")),
        (P(), P("x", "y")),
        (None, P()),
    ],
)
def test_it_cuts_and_joins_as_shard_map(into: P | None, out: P) -> None:
    def shard(x: Any) -> Any:
        return jnp.cumsum(x, 0)

    real = sm.shard_map(shard, make_mesh("4x2"), in_specs=(into,), out_specs=out, check_vma=False)
    found = loop(shard, SIZES, (into,), out)(X)
    assert type(found) is np.ndarray and found.dtype == np.float32
    np.testing.assert_allclose(found, real(X), rtol=1e-6)


def test_trees_keywords_and_what_is_no_array() -> None:
    seen: list[tuple[int, ...]] = []

    def shard(tree: Any, act: Any, n: int, *, by: Any, name: str) -> Any:
        assert type(n) is int and by.shape == (3,)
        seen.append(tree["a"].shape)
        return {"out": [act(tree["a"] * n), tree["b"].sum()[None]], "name": name, "n": n}

    specs = ({"a": P("x"), "b": P(("x", "y"))}, None, None)
    call = loop(shard, SIZES, specs, {"out": [P("x"), P(("x", "y"))], "name": None, "n": None})
    found = call({"a": X, "b": jnp.arange(8)}, np.tanh, 2, by=np.ones(3), name="one")
    np.testing.assert_allclose(found["out"][0], np.tanh(2 * X), rtol=1e-6)
    np.testing.assert_array_equal(found["out"][1], np.arange(8))
    assert (found["name"], found["n"]) == ("one", 2)
    assert seen == [(4, 4)] * 8


def test_numbers_can_be_printed_and_branched_on(capsys: pytest.CaptureFixture[str]) -> None:
    def shard(x: Any) -> Any:
        print(float(x[0]))
        return x if x[0] > 2 else -x

    found = loop(shard, {"x": 4}, P("x"), P("x"))(np.arange(4.0))
    assert capsys.readouterr().out == "0.0\n1.0\n2.0\n3.0\n"
    np.testing.assert_array_equal(found, [0, -1, -2, 3])


def test_a_mesh_gives_its_sizes() -> None:
    found = loop(lambda x: x.sum()[None], make_mesh("4x2"), P("x"), P("x"))(np.ones(8))
    np.testing.assert_array_equal(found, np.full(4, 2))


class Model(sm.Module):
    mean: sm.BatchState
    peak: sm.State
    low: sm.State
    rows: sm.State
    local: sm.State
    part: sm.State
    calls: sm.State
    act: Callable[[Any], Any] = sm.field(static=True, default=jnp.tanh)


def model() -> Model:
    return Model(
        mean=sm.BatchState(jnp.ones(4), reduce="mean"),
        peak=sm.State(jnp.zeros(()), reduce="max"),
        low=sm.State({"a": jnp.zeros(2), "b": jnp.zeros((), jnp.int32)}, reduce="min"),
        rows=sm.State(100, reduce="sum", tag="counter"),
        local=sm.State(jnp.zeros((4, 3)), spec=sm.PerShard("x")),
        part=sm.State(jnp.zeros(8), spec=P("x"), reduce="mean"),
        calls=sm.State(0),
    )


def step(m: Model, x: Any) -> Any:
    y = m.act(x + m.mean.value)
    return y, m.replace(
        mean=y.mean(0),
        peak=jnp.maximum(m.peak.value, y.max()),
        low={"a": y[:2, 0], "b": jnp.floor(9 * y[0, 0]).astype(jnp.int32)},
        rows=m.rows.value + (y > 0).sum(),
        local=m.local.value + y[0, :3],
        part=m.part.value + y.sum(1)[:2],
        calls=m.calls.value + 1,
    )


def test_states_leave_as_from_shard_map() -> None:
    given = model()
    real = sm.shard_map(step, make_mesh("4"), in_specs=(None, P("x")), out_specs=(P("x"), P()))
    looped = loop(step, {"x": 4}, (None, P("x")), (P("x"), P()))
    for _ in range(2):
        (y, expected), (found_y, found) = real(given, X), looped(given, X)
        np.testing.assert_allclose(found_y, y, rtol=1e-6)
        assert tree_structure(found) == tree_structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=1e-6)
        given = found
    assert int(found.calls.value) == 2 and found.rows.tag == frozenset({"counter"})


def test_a_part_is_merged_over_the_other_axes_alone() -> None:
    state = sm.State(np.arange(8.0), spec=P("x"), reduce="sum")

    def shard(s: Any, x: Any) -> Any:
        return s.set(s.value + x.sum())

    found = loop(shard, SIZES, (None, P("x", "y")), P())(state, X)
    expected = sm.shard_map(shard, make_mesh("4x2"), (None, P("x", "y")), P())(state, X)
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-6, atol=1e-6)


def test_a_state_made_inside() -> None:
    def shard(x: Any) -> Any:
        return sm.State(x.sum(), reduce="sum"), sm.State(x.max()[None], spec=P("x"))

    total, peaks = loop(shard, {"x": 4}, P("x"), P())(X)
    np.testing.assert_allclose(total.value, X.sum(), rtol=1e-5)
    np.testing.assert_array_equal(peaks.value, X.reshape(4, -1).max(1))


# What is refused


def test_results_that_differ() -> None:
    def shard(s: Any, x: Any) -> Any:
        return s.set(x[0]), {"whole": x, "by_row": x}

    looped = loop(shard, SIZES, (None, P(("x", "y"))), (P(), {"whole": P(), "by_row": P("x")}))
    assert refusal(lambda: looped(sm.State(0), np.arange(16))) == (
        "shard: results that are promised to be the same on several shards differ:\n"
        "  - shard(...)[0]: int32[] with out spec P() is one copy for all shards along 'x', 'y', but differs "
        "by 14 between x=0, y=0 and x=3, y=1\n"
        "  - shard(...)[1]['by_row']: int32[2] with out spec P('x') is one copy for all shards along 'y', "
        "but differs by 2 at [0] between x=0, y=0 and x=0, y=1\n"
        "  - shard(...)[1]['whole']: int32[2] with out spec P() is one copy for all shards along 'x', 'y', "
        "but differs by 14 at [0] between x=0, y=0 and x=3, y=1\n"
        "Reduce them over these axes inside (jax.lax.psum, pmean), let a state's `reduce` do it, or name the "
        "axes in the out specs."
    )


def test_nan_is_as_nan() -> None:
    found = loop(lambda x: x[0] * np.nan, {"x": 4}, P("x"), P())(np.arange(4.0))
    assert np.isnan(found)
    text = refusal(
        lambda: loop(lambda x: 1 / x[0] - 1 / x[0], {"x": 2}, P("x"), P())(np.arange(2.0))
    )
    assert "differs by inf between x=0 and x=1" in text


def test_collectives() -> None:
    def shard(x: Any) -> Any:
        return jax.lax.psum(x, "x")

    text = refusal(lambda: loop(shard, {"x": 4}, P("x"), P())(X))
    assert text.startswith(
        "shard: a loop runs one shard after the other, without collectives (unbound axis name: x"
    )
    assert text.endswith("Use statemesh.testing.emulate, which has them.")


def test_other_errors_come_through() -> None:
    def shard(x: Any) -> Any:
        raise NameError("unknown")

    assert "unknown" in refusal(lambda: loop(shard, {"x": 4}, P("x"), P())(X), NameError)


class Tally(sm.State):
    __slots__ = ()

    def leave(self, old: Any, axis_names: Any) -> Any:
        return self


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (
            sm.State(0.0, reduce=lambda old, new, names: new),
            "State with a function as its `reduce`",
        ),
        (sm.RandomState(jax.random.key(0)), "RandomState with an `enter` or `leave` of its own"),
        (Tally(0.0), "Tally with an `enter` or `leave` of its own"),
    ],
)
def test_states_that_may_need_collectives(state: Any, what: str) -> None:
    def shard(s: Any) -> Any:
        return s

    tail = ", which may use collectives, and a loop has none. Use statemesh.testing.emulate."
    looped = loop(shard, {"x": 2}, (None,), P())
    assert refusal(lambda: looped([state])) == f"shard: args[0][0] is a {what}{tail}"
    made = loop(lambda: state, {"x": 2}, (), P())
    assert refusal(made) == f"<lambda>: <lambda>(...) is a {what}{tail}"


def test_specs_that_do_not_fit() -> None:
    def shard(x: Any) -> Any:
        return x

    def text(spec: Any, x: Any, out: Any = SPLIT) -> str:
        return refusal(lambda: loop(shard, SIZES, spec, out)(x), sm.SpecError)

    assert text(P(None, "x"), np.ones((2, 7))) == (
        "shard: args[0] has size 7 on axis 1, which P(None, 'x') shares among 4 shards."
    )
    assert text(None, sm.State(np.ones(3), spec=sm.PerShard("y"))) == (
        "shard: args[0] has size 3 on axis 0, which PerShard('y') shares among 2 shards."
    )
    assert text(P("z"), X) == (
        "shard: args[0] is placed by P('z'), and there is no 'z' among the axes 'x', 'y'."
    )
    assert text(P("x", "y"), np.ones(8)) == (
        "shard: args[0] of shape (8,) has fewer axes than P('x', 'y') has entries."
    )
    assert text(P("x"), np.ones(8), P("x", "y")) == (
        "shard: shard(...) of shape (2,) has fewer axes than P('x', 'y') has entries."
    )


def test_a_number_of_specs_that_does_not_fit() -> None:
    looped = loop(lambda x: x, {"x": 2}, (P(), P()), P())
    assert refusal(lambda: looped(X), TypeError) == (
        "<lambda>: in_specs has 2 entries for 1 positional arguments. Give one entry for each, or one spec "
        "for all."
    )
