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


# The state afterwards, from the one before.
After = Callable[[Any], Any]
AS_IT_WAS: After = lambda old: old
ONE_MORE: After = lambda old: old + 1
STACKED: After = lambda old: np.stack([np.full(old.shape, x) for x in X])
ALL_FROM_ONE: After = lambda old: np.stack([old * 10 + x for x in X])
EACH_FROM_ITS_OWN: After = lambda old: np.stack(
    [row * 10 + x for row, x in zip(old, X, strict=True)]
)
REFUSED: Any = None
# By policy; under 'auto', where the state's axis 0 has the size of the lanes, and where it has not.
COLUMNS = [(policy, "fits") for policy in POLICIES] + [("auto", "does not fit")]
TABLE: list[tuple[Callable[..., Any], list[Any]]] = [
    (read, [AS_IT_WAS] * 5),
    (write, [REFUSED, *[STACKED] * 4]),
    (read_and_write, [REFUSED, ALL_FROM_ONE, ALL_FROM_ONE, EACH_FROM_ITS_OWN, ALL_FROM_ONE]),
    (unbatched, [ONE_MORE] * 5),
]
CASES = [
    pytest.param(fun, policy, size, after, id=f"{fun.__name__}-{policy}-{size}")
    for fun, row in TABLE
    for (policy, size), after in zip(COLUMNS, row, strict=True)
]


@pytest.mark.parametrize(("fun", "policy", "size", "expected"), CASES)
def test_table(lanes: Any, fun: Any, policy: str, size: str, expected: Any) -> None:
    call = lanes(fun, in_axes=(None, 0), out_axes=0, unexpected_out_state_mapping=policy)
    old = np.arange(8, dtype=np.float32).reshape(SHAPES[size])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if expected is REFUSED:
            with pytest.raises(sm.BatchAxisError, match=r"\n  - s: State\(float32\[4,2\]\)\n"):
                call(sm.State(old), X)
        else:
            y, after = call(sm.State(old), X)
            equal(y, X + old.sum() if fun is read else X)
            equal(after.value, expected(old))
    text = (
        f"{fun.__name__}: lanes wrote different values to states without a declared axis, and these were "
        "stacked on axis 0:\n  - s\nDeclare it: state_out_axes={0: filter}."
    )
    stacks = policy == "warn" and fun in (write, read_and_write)
    assert [(one.category, str(one.message)) for one in seen] == [(UserWarning, text)] * stacks


@pytest.mark.parametrize("policy", ["ignore", "auto"])
def test_what_is_declared_goes_before_the_policy(lanes: Any, policy: str) -> None:
    def fun(states: Any, x: Any) -> Any:
        return [s.set(jnp.full(s.value.shape, x)) for s in states]

    states = [sm.State(np.zeros(N), reduce="mean"), sm.HiddenState(np.zeros(2), reduce="sum")]
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
