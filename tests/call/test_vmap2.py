"""`vmap2` only: nested, inside and around `shard_map` and `pmap2`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


N = 3
X = np.arange(1, 8 * N + 1, dtype=np.float32).reshape(8, N)
equal = np.testing.assert_array_equal


def words(keys: Any) -> Any:
    return np.asarray(jax.random.key_data(keys)).reshape(-1, 2)


def test_how_many_lanes() -> None:
    def fun(s: sm.State, x: Any = 0) -> Any:
        return jax.lax.axis_index("i"), s.set(s.value + x + 1)

    options: Any = {"axis_name": "i", "out_axes": (0, None)}
    # More than there are devices.
    y, total = sm.vmap2(fun, in_axes=(None, 0), **options)(
        sm.State(0, reduce="sum"), np.arange(100)
    )
    equal(y, np.arange(100))
    assert int(total.value) == np.arange(100).sum() + 100
    # Nothing is mapped.
    y, after = sm.vmap2(fun, in_axes=None, axis_size=5, **options)(sm.State(1))
    equal(y, np.arange(5))
    assert int(after.value) == 2


def test_spmd_axis_name_spreads_the_lanes() -> None:
    mesh = make_mesh("4x2")

    def fun(s: sm.State, x: Any) -> Any:
        x = jax.lax.with_sharding_constraint(x + s.value, NamedSharding(mesh, P("y")))
        return x, s.set(x)

    options: Any = {"in_axes": (None, 0), "state_out_axes": {0: ...}}
    call = sm.vmap2(fun, spmd_axis_name="x", **options)
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    ones = sm.State(np.ones(2, np.float32))
    y, after = jax.jit(call)(ones, x)
    for array in (y, after.value):
        equal(array, x + 1)
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)
    without, _ = jax.jit(sm.vmap2(fun, **options))(ones, x)
    assert without.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "y")), 2)


# Nested


@pytest.mark.parametrize("outer", [sm.vmap2, sm.pmap2])
def test_nested_in_lanes(outer: Any) -> None:
    def fun(m: Any, x: Any) -> Any:
        both = jax.lax.psum(x, ("i", "j"))
        key, rng = m["rng"].split()
        return (both, key), {
            "own": m["own"].set(m["own"].value + x),
            "row": m["row"].set(m["row"].value + jax.lax.psum(x, "j")),
            "sum": m["sum"].set(m["sum"].value + x),
            "rng": rng,
        }

    options: Any = {"in_axes": (None, 0), "out_axes": ((None, 0), None)}
    inner = sm.vmap2(fun, axis_name="j", state_in_axes={0: "own"}, **options)
    call = outer(inner, axis_name="i", state_in_axes={0: ["own", "row"]}, **options)
    model: dict[str, Any] = {
        "own": sm.State(X, tag="own"),
        "row": sm.State(np.zeros(8, np.float32), tag="row"),
        "sum": sm.State(np.float32(1), reduce="sum"),
        "rng": sm.RandomState(jax.random.key(0)),
    }
    (total, keys), after = call(model, X)
    equal(total, X.sum())
    equal(after["own"].value, 2 * X)
    equal(after["row"].value, X.sum(1))
    equal(after["sum"].value, 1 + X.sum())
    assert keys.shape == X.shape and len(np.unique(words(keys), axis=0)) == X.size
    equal(words(after["rng"].key), words(model["rng"].split()[1].key))


# Inside shard_map


def test_around_shard_map() -> None:
    inner = sm.shard_map(
        lambda s, x: (x * s.value, s.set(s.value + jax.lax.psum(jnp.sum(x), "x"))),
        make_mesh(),
        (P(), P("x")),
        (P("x"), P()),
    )
    call = sm.vmap2(inner, in_axes=(None, 1), out_axes=(1, None), state_in_axes={0: ...})
    y, after = call(sm.State(np.arange(N, dtype=np.float32)), X)
    equal(y, X * np.arange(N))
    equal(after.value, np.arange(N) + X.sum(0))
