"""The largest and the smallest over shards: their derivatives, NaN and signed zeros, and what they cost."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh, slow


N = 4
# Two shards share the largest value.
X = np.array([1, 3, 3, -2], np.float32)
HOWS = ("max", "min")
Fun = Callable[[Any, Any, Any], Any]


def on_mesh(fun: Fun, **options: Any) -> Fun:
    return sm.shard_map(fun, make_mesh(str(N)), (P(), P(), P("x")), (P(), P("x")), **options)


def in_lanes(fun: Fun, by: Any = sm.vmap2) -> Fun:
    def one(states: Any, w: Any, x: Any) -> Any:
        return fun(states, w, x[None])

    mapped: Fun = by(one, in_axes=(None, None, 0))
    return mapped


WAYS: dict[str, Callable[[Fun], Fun]] = {
    "mesh": on_mesh,
    "unchecked": lambda fun: on_mesh(fun, check_vma=False),
    "pmap2": lambda fun: in_lanes(fun, sm.pmap2),
    "vmap2": in_lanes,
}


def step(states: Any, w: Any, x: Any) -> Any:
    y = jnp.sin(w * x)
    return {k: s.set(y.sum().astype(s.value.dtype)) for k, s in states.items()}, y


@pytest.mark.parametrize("way", [*map(slow, ("mesh", "unchecked", "pmap2")), "vmap2"])
def test_derivatives(way: str) -> None:
    mapped = WAYS[way](step)

    def ours(w: Any, x: Any) -> Any:
        states, _ = mapped({how: sm.State(0.0, reduce=how) for how in HOWS}, w, x)
        return states["max"].value ** 2 + 3 * states["min"].value ** 2

    def plain(w: Any, x: Any) -> Any:
        y = jnp.sin(w * x)
        return jnp.max(y) ** 2 + 3 * jnp.min(y) ** 2

    def derivatives(loss: Any) -> list[Any]:
        w = 0.7
        return [
            jax.value_and_grad(loss, (0, 1))(w, X),
            jax.jvp(loss, (w, X), (1.0, np.ones_like(X))),
            jax.jit(jax.jacfwd(jax.grad(jax.checkpoint(loss), 1)))(w, X),
        ]

    pairs = zip(*map(jax.tree.leaves, map(derivatives, (ours, plain))), strict=True)
    for got, wanted in pairs:
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6)

    @jax.jit
    @jax.grad
    def ignoring_the_states(w: Any) -> Any:
        starts = (0.0, np.float16(0), 0)
        states = {(k, how): sm.State(x, reduce=how) for k, x in enumerate(starts) for how in HOWS}
        _, losses = jax.lax.scan(lambda s, _: mapped(s, w, X), states, None, length=2)
        return losses.sum()

    wanted = 2 * (X * np.cos(0.7 * X)).sum()
    np.testing.assert_allclose(ignoring_the_states(0.7), wanted, rtol=1e-5)


@pytest.mark.parametrize("how", HOWS)
def test_nan_and_zeros_of_both_signs(how: str) -> None:
    nan_somewhere = np.tile(X, (N, 1))
    np.fill_diagonal(nan_somewhere, np.nan)
    dtypes = ["float16", "bfloat16", "float32", "float8_e4m3fnuz"]
    rows = {dtype: jnp.asarray(np.c_[nan_somewhere, X], dtype) for dtype in dtypes}
    rows["zeros"] = jnp.array([[0.0, -0.0], [-0.0, 0.0], [0.0, -0.0], [0.0, -0.0]])

    def fun(states: Any, x: Any) -> Any:
        return {name: state.set(x[name][0]) for name, state in states.items()}

    states = {name: sm.State(jnp.zeros_like(x[0]), reduce=how) for name, x in rows.items()}
    mesh = make_mesh(str(N), AxisType.Explicit)
    found = sm.shard_map(fun, mesh, (P(), P("x")), P())(states, rows)
    for dtype in dtypes:
        value = np.asarray(found[dtype].value)
        assert value.dtype == dtype
        wanted = [np.nan] * N + [getattr(X, how)()]
        np.testing.assert_array_equal(value.astype(np.float32), wanted)
    zeros = np.asarray(found["zeros"].value)
    np.testing.assert_array_equal(zeros, [0, 0])
    np.testing.assert_array_equal(np.signbit(zeros), how == "min")


@pytest.mark.parametrize(("how", "start"), [("max", 0.0), ("min", np.float16(0)), ("max", 0)])
def test_one_reduction_of_as_many_bits(how: str, start: Any) -> None:
    call: Any = on_mesh(step)
    text = call.lower({"s": sm.State(start, reduce=how)}, 0.7, X).compile().as_text()
    (reduction,) = [line for line in text.splitlines() if " all-reduce(" in line]
    # XLA's own reductions of 16 bits are of 32 too.
    assert "s32[]" in reduction
