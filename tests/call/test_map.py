"""`Map`: a module over lanes that is created, called and called again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm
from tests.helpers import compiles


N = 4
X = np.arange(N * 2, dtype=np.float32).reshape(N, 2)
equal = np.testing.assert_array_equal


@pytest.fixture(params=["vmap", "pmap"])
def behavior(request: pytest.FixtureRequest) -> Any:
    return request.param


class Counter(sm.Module):
    """A running sum for each lane, and one table for all lanes."""

    total: Any = None
    table: Any = None
    given: sm.State = sm.State(1.0)
    act: Any = jnp.abs

    def init_state(self, size: int = 2) -> "Counter":
        return self.replace(
            total=sm.ShortTermState(jnp.zeros(size)), table=sm.NonBatchState(jnp.arange(3.0))
        )

    def update(self, x: Any, *, scale: Any = None) -> Any:
        assert self.total.value.shape == (2,)
        scale = 1.0 if scale is None else scale
        total = self.total.value + self.act(x) * scale
        return total * self.given.value, self.replace(total=total)

    def peek(self, by: Any) -> Any:
        return self.total.value * by, self

    def reset(self) -> Any:
        return None, self.replace(total=self.total.value * 0)

    def mean(self, x: Any) -> Any:
        return jax.lax.pmean(x, "lanes"), self

    def rewrite_table(self, x: Any) -> Any:
        return x, self.replace(table=self.table.value + x[0])

    def rewrite_given(self, x: Any) -> Any:
        return x, self.replace(given=self.given.value + x[0])


def test_created_called_and_called_again(behavior: str) -> None:
    empty = sm.Map(Counter(), N, behavior=behavior)
    counters = empty.init_all_states()
    assert isinstance(counters, sm.Module)
    assert counters.module.total.value.shape == (N, 2)
    total = np.zeros((N, 2), np.float32)
    for call in (counters.update, None, None):
        out, counters = (counters if call is None else call)(-X)
        total = total + X
        equal(out, total)
        equal(counters.module.total.value, total)
        assert counters.module.table.value.shape == (3,)
    assert len(out.devices()) == (1 if behavior == "vmap" else N)
    # The map that was called is as it was, and arguments go on to `init_state`.
    assert empty.module.total is None
    assert empty.init_all_states(size=5).module.total.value.shape == (N, 5)
    again = counters.replace(module=counters.module.replace(total=counters.module.total.value + 1))
    equal(again(X)[0], total + X + 1)
    assert repr(counters).startswith("Map(\n  module=Counter(")


def test_other_methods_inherit_the_axes(behavior: str) -> None:
    counters = sm.Map(
        Counter(), N, behavior=behavior, in_axes=-1, out_axes=1, axis_name="lanes"
    ).init_all_states()
    each = np.arange(N)[:, None]
    out, counters = counters(X.T, scale=np.arange(N))  # Keyword arguments are mapped over axis 0.
    equal(out, (X * each).T)
    out, counters = counters.map("peek")(np.arange(N))
    equal(out, (X * each**2).T)
    out, counters = counters.map("mean")(X.T)
    np.testing.assert_allclose(out, np.tile(X.mean(0)[:, None], (1, N)))
    out, counters = counters.map("reset")()
    assert out is None
    equal(counters.module.total.value, np.zeros((N, 2)))


class Scaled(sm.Module):
    """Its methods take a State."""

    def update(self, x: Any, by: Any) -> Any:
        return x * by["scale"].value, self


def test_a_state_among_the_arguments_is_shared_and_an_axis_for_it_refused(behavior: str) -> None:
    by = {"scale": sm.State(X)}
    # One axis stands for all arguments; a State is shared all the same.
    for in_axes in (0, (0, None)):
        out, _ = sm.Map(Scaled(), N, behavior=behavior, in_axes=in_axes)(X[:, None], by)
        equal(out, X[:, None] * X)
    refused = (
        r"would map nothing:\n  - in_axes\[1\] = -1 stands for by\['scale'\], a State\nWrite None"
    )
    for last in (-1, {"scale": -1}):
        with pytest.raises(sm.BatchAxisError, match=refused):
            sm.Map(Scaled(), N, behavior=behavior, in_axes=[0, last])(X, by)


def test_axes_and_tag_of_new_states(behavior: str) -> None:
    made = sm.Map(
        Counter(), N, behavior=behavior, init_state_axes={-1: sm.ShortTermState}, state_tag="fresh"
    ).init_all_states()
    assert made.module.total.value.shape == (2, N)
    assert made.module.total.tag == made.module.table.tag == {"fresh"}
    assert made.module.given.tag == frozenset()
    for k in (1, 2):
        out, made = made(X)
        equal(out, k * X)
        equal(made.module.total.value, k * X.T)


def test_unexpected_writes_follow_the_policy(behavior: str) -> None:
    made = sm.Map(Counter(), N, behavior=behavior).init_all_states()
    with pytest.raises(sm.BatchAxisError, match=r"map\.module\.given"):
        made.map("rewrite_given")(X)
    warned = sm.Map(made.module, N, behavior=behavior, unexpected_out_state_mapping="warn")
    with pytest.warns(UserWarning, match=r"map\.module\.given"):
        _, after = warned.init_all_states().map("rewrite_given")(X)
    equal(after.module.given.value, 1 + X[:, 0])
    summed = made.replace(module=made.module.replace(given=sm.State(0.0, reduce="sum")))
    _, summed = summed.map("rewrite_given")(X)
    assert float(summed.module.given.value) == X[:, 0].sum()
    with pytest.raises(sm.BatchAxisError, match=r"map\.module\.table"):
        made.map("rewrite_table")(X)


def test_ten_calls_trace_once_and_compile_nothing_more(behavior: str) -> None:
    runs = []

    class Traced(Counter):
        def update(self, x: Any, *, scale: Any = None) -> Any:
            runs.append("update")
            return super().update(x, scale=scale)

        def init_state(self, size: int = 2) -> Any:
            runs.append("init")
            return super().init_state(size)

    made = sm.Map(Traced(), N, behavior=behavior, in_axes=(0,)).init_all_states()
    _, made = jax.block_until_ready(made(X))
    with compiles() as seen:
        for _ in range(9):
            _, made = made.update(X)
            jax.block_until_ready(made.module.total.value)
    assert (runs, seen.times) == (["init", "update"], 0)
    equal(made.module.total.value, 10 * X)


def test_under_jit_grad_and_scan(behavior: str) -> None:
    made = sm.Map(Counter(), N, behavior=behavior).init_all_states()
    arrays, static = sm.partition(made, ...)

    @jax.jit
    def scanned(arrays: Any, x: Any) -> Any:
        def body(arrays: Any, x: Any) -> Any:
            out, new = sm.combine(arrays, static)(x)
            return sm.partition(new, ...)[0], out

        return jax.lax.scan(body, arrays, jnp.stack([x, x, x]))

    after, outs = scanned(arrays, X)
    equal(outs, np.stack([X, 2 * X, 3 * X]))
    equal(sm.combine(after, static).module.total.value, 3 * X)
    slope = jax.grad(lambda x: jnp.sum(scanned(arrays, x)[1]))(jnp.asarray(X + 1))
    equal(slope, np.full((N, 2), 6))
    # Two maps that were told the same are alike.
    other = sm.Map(Counter(), N, behavior=behavior).init_all_states()
    structure: Any = jax.tree.structure
    assert structure(made) == structure(other)
    third = sm.Map(Counter(), N, behavior=behavior, out_axes=1).init_all_states()
    assert structure(made) != structure(third)


def test_a_map_in_a_module_creates_its_states_with_the_rest(behavior: str) -> None:
    class Outer(sm.Module):
        counters: sm.Map[Counter]
        scale: Any = None

        def init_state(self) -> "Outer":
            return self.replace(scale=sm.ParamState(2.0))

    outer = Outer(sm.Map(Counter(), N, behavior=behavior)).init_all_states()
    assert outer.counters.module.total is not None
    assert outer.counters.module.total.value.shape == (N, 2)
    out, _ = outer.counters(X)
    equal(out, X)
