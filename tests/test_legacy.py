"""Code written for `jax.experimental.shard_map`, with and without states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.legacy import shard_map
from tests.helpers import make_mesh


X = np.arange(32, dtype=np.float32).reshape(8, 4)


def test_prefix_specs_and_none() -> None:
    f = shard_map(
        lambda tree, n: ({"a": tree["a"] * n}, tree["b"].sum()[None]),
        make_mesh(),
        in_specs=({"a": P("x"), "b": P()}, None),
        out_specs=(P("x"), P()),
    )
    out, total = f({"a": X, "b": X}, 3)
    np.testing.assert_array_equal(out["a"], 3 * X)
    np.testing.assert_allclose(total, [X.sum()])


def test_without_the_check_the_promise_is_believed() -> None:
    f = shard_map(lambda x: x.sum(), make_mesh(), P("x"), P(), check_rep=False)
    assert float(f(np.ones(8, np.float32))) == 1.0


def test_auto_axes_are_left_to_the_compiler() -> None:
    mesh = make_mesh("4x2")

    def fun(x: jax.Array) -> Any:
        assert x.shape == (2, 4)
        return jax.lax.psum(x, "x")

    f = shard_map(fun, mesh, P("x"), P(), auto=frozenset({"y"}))
    placed = jax.device_put(X, NamedSharding(mesh, P("x", "y")))
    for run in (f, jax.jit(f)):
        np.testing.assert_allclose(run(placed), X.reshape(4, 2, 4).sum(0))


def test_with_states() -> None:
    def fun(count: sm.State, x: jax.Array) -> Any:
        return x * count.value, count.set(count.value + jnp.sum(x))

    for check_rep in (True, False):
        f = shard_map(fun, make_mesh(), (P(), P("x")), (P("x"), P()), check_rep)
        y, count = f(sm.State(1.0, reduce="sum"), X)
        np.testing.assert_array_equal(y, X)
        assert float(count.value) == 1 + X.sum()
