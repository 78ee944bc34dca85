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


POLICIES = ("raise", "warn", "ignore", "auto")
N = 4
X = np.arange(1, N + 1, dtype=np.float32)
SHAPES = {"fits": (N, 2), "does not fit": (2, N)}
equal = np.testing.assert_array_equal


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


def as_it_was(old: Any) -> Any:
    return old


def one_more(old: Any) -> Any:
    return old + 1


REFUSED: Any = None
# The state afterwards, by policy; under 'auto', where its axis 0 has the size of the lanes and where it has not.
COLUMNS = [
    ("raise", "fits"),
    ("warn", "fits"),
    ("ignore", "fits"),
    ("auto", "fits"),
    ("auto", "does not fit"),
]
TABLE: list[tuple[Callable[..., Any], list[Any]]] = [
    (read, [as_it_was] * 5),
    (write, [REFUSED, *[stacked_write] * 4]),
    (read_and_write, [REFUSED, stacked_both, stacked_both, each_its_own, stacked_both]),
    (unbatched, [one_more] * 5),
]
CASES = [
    pytest.param(fun, policy, size, after, id=f"{fun.__name__}-{policy}-{size}")
    for fun, row in TABLE
    for (policy, size), after in zip(COLUMNS, row, strict=True)
]


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


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_declared_goes_before_the_policy(lanes: Any, policy: str) -> None:
    def fun(states: Any, x: Any) -> Any:
        return [s.set(jnp.full(s.value.shape, x)) for s in states]

    states = [sm.State(np.zeros(N), reduce="mean"), sm.HiddenState(np.zeros(2))]
    options: Any = {"in_axes": (None, 0), "unexpected_out_state_mapping": policy}
    merged, stacked = lanes(fun, state_out_axes={1: sm.HiddenState}, **options)(states, X)
    equal(merged.value, np.full(N, X.mean()))
    equal(stacked.value, np.stack([X, X]))
    for side in ("state_in_axes", "state_out_axes"):
        with pytest.raises(sm.BatchAxisError, match=r"same in\s+all \(axis None\)"):
            lanes(write, **options, **{side: {None: ...}})(sm.State(np.zeros(N, np.float32)), X)


def test_every_state_is_judged_by_itself(lanes: Any) -> None:
    def fun(m: Any, x: Any) -> Any:
        return {
            "both": m["both"].set({"a": m["both"].value["a"] + x, "b": m["both"].value["b"] + 1}),
            "write": m["write"].set(m["write"].value * 0 + x),
            "read": m["read"],
            "product": m["product"].set(m["read"].value[:, None] * x),
            "new": sm.State(x),
            "new alike": sm.State(1),
        }

    model = {
        "both": sm.State({"a": X * 10, "b": np.zeros(N, np.float32)}),
        "write": sm.State(np.zeros(2, np.float32)),
        "read": sm.State(X),
        "product": sm.State(np.zeros((N, 1), np.float32)),
    }
    after = lanes(fun, in_axes=(None, 0), unexpected_out_state_mapping="auto")(model, X)
    equal(after["both"].value["a"], X * 11)
    equal(after["both"].value["b"], np.ones(N))
    equal(after["write"].value, np.stack([X, X], 1))
    equal(after["read"].value, X)
    equal(after["product"].value, X[:, None, None] * X[:, None])
    equal(after["new"].value, X)
    assert after["new alike"].value.shape == ()


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
