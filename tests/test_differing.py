"""Writes that a branch makes differ between shards, which JAX's types do not follow."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import counted, make_mesh


X = np.arange(16, dtype=np.float32)
Step = Callable[[sm.State, jax.Array], Any]


def add_one(state: sm.State) -> sm.State:
    return state.set(state.value + 1)


def same(state: sm.State) -> sm.State:
    return state


def own(x: jax.Array) -> jax.Array:
    """A predicate that differs between shards."""
    return jnp.sum(x) > 20


def in_cond(state: sm.State, x: jax.Array) -> Any:
    return jax.lax.cond(own(x), add_one, same, state)


def in_switch(state: sm.State, x: jax.Array) -> Any:
    return jax.lax.switch(jax.lax.axis_index("x") % 3, [same, add_one, add_one], state)


def in_nested_cond(state: sm.State, x: jax.Array) -> Any:
    return jax.lax.cond(True, lambda s: in_cond(s, x), same, state)


def in_while(state: sm.State, x: jax.Array) -> Any:
    steps = jnp.sum(x).astype(int)
    return jax.lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[0] - 1, add_one(c[1])), (steps, state)
    )[1]


def in_scan(state: sm.State, x: jax.Array) -> Any:
    def body(pair: tuple[Any, Any], _: None) -> Any:
        first, second = pair
        return (second, in_cond(first, x)), None

    return jax.lax.scan(body, (state, state), length=3)[0][0]


def stacked_by_scan(state: sm.State, x: jax.Array) -> Any:
    _, each = jax.lax.scan(lambda c, _: (c, in_cond(state, x).value), 0, length=3)
    return state.set(each.sum())


def in_loop_with_consts(state: sm.State, x: jax.Array) -> Any:
    other = in_cond(state, x).value
    return jax.lax.fori_loop(0, 3, lambda i, s: s.set(s.value + other), state)


def in_jit(state: sm.State, x: jax.Array) -> Any:
    return jax.jit(in_cond)(state, x)


def in_remat(state: sm.State, x: jax.Array) -> Any:
    return jax.checkpoint(in_cond)(state, x)


def computed_from(state: sm.State, x: jax.Array) -> Any:
    chosen = jax.lax.cond(own(x), lambda: 1.0, lambda: 2.0)
    return state.set(jnp.sin(state.value) * chosen)


HIDING = [in_cond, in_switch, in_nested_cond, in_while, in_scan, stacked_by_scan]
HIDING += [in_loop_with_consts, in_jit, in_remat, computed_from]


def mapped(fun: Step, **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh(), (P(), P("x")), P(), **options)


@pytest.mark.parametrize("reduce", [None, "sum"])
@pytest.mark.parametrize("fun", HIDING)
def test_a_write_that_a_branch_makes_differ_is_refused(fun: Step, reduce: Any) -> None:
    state = sm.State(1.0, reduce=reduce)
    with pytest.raises(sm.DivergedStateError, match=r"state may differ over 'x'"):
        mapped(fun)(state, X)
    assert float(state.value) == 1


# Under `jax.vmap` a `cond` becomes a select, which JAX itself refuses here.
@pytest.mark.parametrize("around", [jax.jit, jax.grad])
def test_it_is_refused_inside_transformations(around: Any) -> None:
    def total(x: jax.Array) -> Any:
        return mapped(in_cond)(sm.State(1.0), x).value

    with pytest.raises(sm.DivergedStateError, match=r"state may differ over 'x'"):
        around(total)(X)


def test_the_axes_of_the_spec_may_differ() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        def go(s: sm.State) -> sm.State:
            return s.set(s.value + jax.lax.psum(1.0, "y"))

        return jax.lax.cond(jax.lax.axis_index("x") > 1, go, same, state)

    for spec in (P("x"), sm.PerShard("x")):
        call = sm.shard_map(fun, make_mesh("4x2"), (P(), P("x")), P())
        after = call(sm.State(np.zeros(4, np.float32), spec=spec), X)
        np.testing.assert_array_equal(after.value, [0, 0, 2, 2])


def with_where(state: sm.State, x: jax.Array) -> Any:
    return state.set(jnp.where(own(x), state.value + 1, state.value))


def with_cast(state: sm.State, x: jax.Array) -> Any:
    return state.set(jax.lax.pcast(in_cond(state, x).value, "x", to="varying"))


@pytest.mark.parametrize("fun", [with_where, with_cast])
def test_what_is_typed_to_differ_is_merged(fun: Step) -> None:
    assert float(mapped(fun)(sm.State(1.0, reduce="max"), X).value) == 2


def on_all_alike(state: sm.State, x: jax.Array) -> Any:
    return jax.lax.cond(jax.lax.psum(jnp.sum(x), "x") > 0, add_one, same, state)


def any_shard(state: sm.State, x: jax.Array) -> Any:
    return jax.lax.cond(jax.lax.pmax(own(x).astype(int), "x") > 0, add_one, same, state)


def reduced_after(state: sm.State, x: jax.Array) -> Any:
    return state.set(state.value + jax.lax.pmax(in_cond(state, x).value, "x") - 1)


def passed_through(state: sm.State, x: jax.Array) -> Any:
    def body(carry: Any) -> Any:
        i, s, y = carry
        return i - 1, s, y * 2

    steps = jnp.sum(x).astype(int) % 5
    y = jax.lax.pcast(1.0, "x", to="varying")
    _, after, _ = jax.lax.while_loop(lambda c: c[0] > 0, body, (steps, state, y))
    return add_one(jax.lax.cond(own(x), same, same, after))


def alike_in_a_loop(state: sm.State, x: jax.Array) -> Any:
    del x
    return jax.lax.while_loop(lambda s: s.value < 2, add_one, state)


@pytest.mark.parametrize(
    "fun", [on_all_alike, any_shard, reduced_after, passed_through, alike_in_a_loop]
)
def test_what_is_the_same_on_all_shards_passes(fun: Step) -> None:
    assert float(mapped(fun)(sm.State(1.0), X).value) == 2


def test_results_outside_of_states_are_left_to_jax() -> None:
    def fun(state: sm.State, x: jax.Array) -> Any:
        return in_cond(state, x).value, state

    value, _ = sm.shard_map(fun, make_mesh(), (P(), P("x")), (P(), P()))(sm.State(1.0), X)
    assert value.shape == ()


def test_keys_need_no_such_check() -> None:
    def fun(rng: sm.RandomState, x: jax.Array) -> Any:
        return jax.lax.cond(own(x), lambda r: r.split()[1], lambda r: r, rng)

    rng = sm.RandomState(jax.random.key(0))
    after = sm.shard_map(fun, make_mesh(), (P(), P("x")), P())(rng, X)
    assert after.key.sharding.is_fully_replicated


def test_the_check_traces_nothing_twice() -> None:
    fun, count = counted(on_all_alike)
    call = mapped(fun)
    state = sm.State(1.0)
    for _ in range(3):
        state = call(state, X)
    assert (count.times, float(state.value)) == (1, 4)
