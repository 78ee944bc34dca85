"""The policies of `unexpected_out_state_mapping`, as a table: what happens to states without a declared axis
that lanes write."""

import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm
from tests.helpers import compiles, counted


TRANSFORMS: dict[str, Any] = {"vmap2": sm.vmap2, "pmap2": sm.pmap2}
POLICIES = ("raise", "warn", "ignore", "auto")
N = 4
X = np.arange(1, N + 1, dtype=np.float32)
SHAPES = {"fits": (N, 2), "does not fit": (2, N)}


@pytest.fixture(params=TRANSFORMS)
def lanes(request: pytest.FixtureRequest) -> Any:
    return TRANSFORMS[request.param]


def equal(result: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


def read(s: sm.State, x: Any) -> Any:
    return x + jnp.sum(s.value), s


def write(s: sm.State, x: Any) -> Any:
    return x, s.set(jnp.full(s.value.shape, x))


def read_and_write(s: sm.State, x: Any) -> Any:
    return x, s.set(s.value * 10 + x)


def unbatched(s: sm.State, x: Any) -> Any:
    return x, s.set(s.value + 1)


def refused(name: str, shape: Any) -> str:
    return f"""\
{name}: lanes wrote different values to states without a declared axis:
  - s: State(float32[{",".join(map(str, shape))}])
Mend it in one of three ways:
  1. keep one value per lane: state_out_axes={{0: filter}}, and state_in_axes={{0: filter}} from the next call on;
  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a function;
  3. reduce the value before it is set, as with jax.lax.pmean(value, 'i')."""  # noqa: E501


def warned(name: str) -> str:
    return f"""\
{name}: lanes wrote different values to states without a declared axis, and these were stacked on axis 0:
  - s
Declare it: state_out_axes={{0: filter}}."""


def stacked_write(old: Any) -> Any:
    return np.stack([np.full(old.shape, x) for x in X])


def stacked_both(old: Any) -> Any:
    return np.stack([old * 10 + x for x in X])


def each_its_own(old: Any) -> Any:
    return np.stack([mine * 10 + x for mine, x in zip(old, X, strict=True)])


def same(old: Any) -> Any:
    return old


def one_more(old: Any) -> Any:
    return old + 1


REFUSED: Any = None
# The state afterwards, for each policy. A dictionary has one entry for a state whose axis 0 has the size of
# the lanes, and one for a state whose axis 0 has another size.
TABLE: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (read, {"raise": same, "warn": same, "ignore": same, "auto": same}),
    (
        write,
        {
            "raise": REFUSED,
            "warn": stacked_write,
            "ignore": stacked_write,
            "auto": stacked_write,
        },
    ),
    (
        read_and_write,
        {
            "raise": REFUSED,
            "warn": stacked_both,
            "ignore": stacked_both,
            "auto": {"fits": each_its_own, "does not fit": stacked_both},
        },
    ),
    (unbatched, {"raise": one_more, "warn": one_more, "ignore": one_more, "auto": one_more}),
]
CASES = [
    pytest.param(fun, policy, size, after[size] if isinstance(after, dict) else after,
                 id=f"{fun.__name__}-{policy}-{size}")
    for fun, by_policy in TABLE for policy, after in by_policy.items() for size in SHAPES
]  # fmt: skip


@pytest.mark.parametrize(("fun", "policy", "size", "expected"), CASES)
def test_table(lanes: Any, fun: Any, policy: str, size: str, expected: Any) -> None:
    call = lanes(
        fun, axis_name="i", in_axes=(None, 0), out_axes=0, unexpected_out_state_mapping=policy
    )
    old = np.arange(8, dtype=np.float32).reshape(SHAPES[size])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if expected is REFUSED:
            with pytest.raises(sm.BatchAxisError) as raised:
                call(sm.State(old), X)
            assert str(raised.value) == refused(fun.__name__, old.shape)
        else:
            y, after = call(sm.State(old), X)
            equal(y, X + old.sum() if fun is read else X)
            equal(after.value, expected(old))
    stacks = policy == "warn" and fun in (write, read_and_write)
    assert [str(one.message) for one in seen] == ([warned(fun.__name__)] if stacks else [])
    assert all(one.category is UserWarning for one in seen)


@pytest.mark.parametrize("policy", ["ignore", "auto"])
@pytest.mark.parametrize("order", ["W @ x", "x @ W.T", "outer"])
def test_stacked_on_axis_0_whatever_the_operation(lanes: Any, order: str, policy: str) -> None:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
    compute: Any = {
        "W @ x": lambda w, x: w @ x,
        "x @ W.T": lambda w, x: x @ w.T,
        "outer": lambda w, x: w[:, 0] * x[1],
    }[order]

    def fun(m: Any, x: Any) -> Any:
        return {"w": m["w"], "h": m["h"].set(compute(m["w"].value, x))}

    call = lanes(fun, in_axes=(None, 0), unexpected_out_state_mapping=policy)
    model = {"w": sm.ParamState(w), "h": sm.HiddenState(np.zeros(2, np.float32))}
    after = call(model, data)
    equal(after["h"].value, np.stack([compute(w, x) for x in data]))
    equal(after["w"].value, w)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_declared_reduce_goes_before_the_policy(lanes: Any, policy: str) -> None:
    call = lanes(write, in_axes=(None, 0), unexpected_out_state_mapping=policy)
    equal(call(sm.State(np.zeros(N, np.float32), reduce="mean"), X)[1].value, np.full(N, X.mean()))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_declared_axis_goes_before_the_policy(lanes: Any, policy: str) -> None:
    call = lanes(
        write, in_axes=(None, 0), state_out_axes={1: ...}, unexpected_out_state_mapping=policy
    )
    equal(call(sm.State(np.zeros(2, np.float32)), X)[1].value, np.stack([X, X]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("side", ["state_in_axes", "state_out_axes"])
def test_axis_none_with_a_write_that_differs_is_refused_by_every_policy(
    lanes: Any, side: str, policy: str
) -> None:
    call = lanes(
        write, in_axes=(None, 0), unexpected_out_state_mapping=policy, **{side: {None: ...}}
    )
    with pytest.raises(sm.BatchAxisError, match=r"same in\s+all \(axis None\)"):
        call(sm.State(np.zeros(N, np.float32)), X)


@pytest.mark.parametrize("policy", ["warn", "ignore", "auto"])
def test_states_made_inside_are_stacked_too(lanes: Any, policy: str) -> None:
    call = lanes(lambda x: [sm.State(x), sm.State(1)], unexpected_out_state_mapping=policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if policy == "warn" else "error")
        lane, alike = call(X)
    equal(lane.value, X)
    assert alike.value.shape == ()


def test_every_state_is_judged_by_itself(lanes: Any) -> None:
    def fun(m: Any, x: Any) -> Any:
        return {
            "both": m["both"].set({"a": m["both"].value["a"] + x, "b": m["both"].value["b"] + 1}),
            "write": m["write"].set(m["write"].value * 0 + x),
            "read": m["read"],
        }

    model = {
        "both": sm.State({"a": X * 10, "b": np.zeros(N, np.float32)}),
        "write": sm.State(np.zeros(2, np.float32)),
        "read": sm.State(X),
    }
    after = lanes(fun, in_axes=(None, 0), unexpected_out_state_mapping="auto")(model, X)
    equal(after["both"].value["a"], X * 11)
    equal(after["both"].value["b"], np.ones(N))
    equal(after["write"].value, np.stack([X, X], 1))
    equal(after["read"].value, X)


def test_fed_back_under_auto_each_lane_goes_on_with_its_own(lanes: Any) -> None:
    body, count = counted(read_and_write)
    call = lanes(body, in_axes=(None, 0), unexpected_out_state_mapping="auto")
    state, expected = sm.State(np.float32(1)), np.ones(N, np.float32)
    for _ in range(2):
        _, state = call(state, X)
        expected = expected * 10 + X
    traces = count.times
    with compiles() as seen:
        for _ in range(3):
            _, state = call(state, X)
            expected = expected * 10 + X
    assert (count.times, seen.times) == (traces, 0)
    equal(state.value, expected)


def test_auto_looks_at_the_number_of_lanes_of_each_call(lanes: Any) -> None:
    call = lanes(read_and_write, in_axes=(None, 0), unexpected_out_state_mapping="auto")
    old = np.arange(3, dtype=np.float32)
    equal(call(sm.State(old), X)[1].value, np.stack([old * 10 + x for x in X]))
    equal(call(sm.State(old), X[:3])[1].value, old * 10 + X[:3])


def test_a_warning_names_all_states_that_were_stacked(lanes: Any) -> None:
    def fun(m: Any, x: Any) -> Any:
        return [s.set(s.value + x) for s in m]

    call = lanes(fun, in_axes=(None, 0), unexpected_out_state_mapping="warn")
    with pytest.warns(UserWarning, match=r"stacked on axis 0:\n  - m\[0\]\n  - m\[1\]\n"):
        call([sm.State(0.0), sm.State(1.0)], X)
