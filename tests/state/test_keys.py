"""Keys of every implementation of JAX: the promises about streams hold for each, or the error names it."""

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import emulate
from tests.helpers import make_mesh, slow


# One implementation of each group. From several rbg keys `vmap` draws with the first one. JAX compiles
# draws from philox keys for one device only. The property suite has the others on meshes.
IMPLEMENTATIONS = ("threefry2x32", "rbg", "philox4x32")
X: Any = np.ones((16, 3), np.float32)
BOTH: list[Any] = [sm.vmap2, sm.pmap2]


each_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def make_rng(impl: str, seed: int = 1) -> sm.RandomState:
    return sm.RandomState(jax.random.key(seed, impl=impl))


def data(keys: Any) -> np.ndarray[Any, Any]:
    return np.asarray(jax.random.key_data(keys))


def distinct(keys: Any, count: int) -> bool:
    rows = np.asarray(keys)
    return len(np.unique(rows.reshape(-1, rows.shape[-1]), axis=0)) == count


def numbers(rng: sm.RandomState, x: jax.Array) -> Any:
    """Numbers for each row."""
    keys, rng = rng.rows(len(x), "x")
    return jax.vmap(lambda key: jax.random.bits(key, (3,)))(keys), rng


@pytest.mark.slow
@each_implementation
def test_a_row_gets_the_same_numbers_everywhere(impl: str) -> None:
    keys, after = make_rng(impl).rows(16)
    expected = np.stack([jax.random.bits(key, (3,)) for key in keys])
    specs = (P(), P("x")), (P("x"), P())
    calls: list[tuple[Any, Any]] = [(sm.shard_map(numbers, make_mesh(), *specs), X)]
    calls += [(to(numbers, axis_name="x", in_axes=(None, 0)), X.reshape(8, 2, 3)) for to in BOTH]
    for call, x in calls:
        got, left = call(make_rng(impl), x)
        np.testing.assert_array_equal(np.asarray(got).reshape(16, 3), expected)
        np.testing.assert_array_equal(data(left.key), data(after.key))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_streams_of_nested_calls_are_apart(impl: str) -> None:
    def one(rng: sm.RandomState) -> Any:
        key, rng = rng.split()
        return jax.random.key_data(key)[None], rng

    def outer(rng: sm.RandomState) -> Any:
        return sm.shard_map(one, mesh, P(), (P("y"), P()), axis_names={"y"})(rng)

    # With so many shards, two have the same positions in another order, and some have equal positions.
    mesh, rng = AbstractMesh((4, 4), ("x", "y")), make_rng(impl)
    call = sm.shard_map(outer, mesh, P(), (P("x"), P()), axis_names={"x"})
    keys, after = emulate(call, rng)
    assert distinct(keys, 16)
    key, rng = rng.split()
    np.testing.assert_array_equal(keys[0], data(key))
    np.testing.assert_array_equal(data(after.key), data(rng.key))
    assert after.key.dtype == rng.key.dtype == key.dtype


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "impl"), [slow(sm.pmap2, "rbg"), (sm.vmap2, "philox4x32")])
def test_lanes_draw_from_keys_of_their_own(transform: Any, impl: str) -> None:
    def fun(rng: sm.RandomState, x: jax.Array) -> Any:
        key, rng = rng.split()
        return jax.random.bits(key, (3,)), rng

    first, plain = fun(make_rng(impl), X)
    lanes = transform(fun, in_axes=(None, 0))
    (got, after), (fewer, _) = (lanes(make_rng(impl), X[:n]) for n in (8, 4))
    np.testing.assert_array_equal(got[0], first)
    np.testing.assert_array_equal(got[:4], fewer)
    assert distinct(got, 8)
    np.testing.assert_array_equal(data(after.key), data(plain.key))


@pytest.mark.slow
def test_an_emulated_shard_makes_keys_as_a_device_does() -> None:
    def fun(rng: sm.RandomState) -> Any:
        keys = jax.random.split(jax.random.fold_in(rng.key, jax.lax.axis_index("x")), 2)
        return jax.random.key_data(keys), jax.random.bits(keys[1], (3,))

    call = sm.shard_map(fun, make_mesh("2"), P(), P("x"))
    jax.tree.map(
        np.testing.assert_array_equal, emulate(call, make_rng("rbg")), call(make_rng("rbg"))
    )


IN_LANES = """\
RandomState.{}: each lane has its own key, of the implementation '{}'. For such keys jax.vmap may use only \
the first lane's key: the numbers would depend on the number of lanes, and differ from those of \
shard_map and pmap2. Make the key with `jax.random.key(seed, impl='threefry2x32')`, or \
draw with `RandomState.rows`, whose keys are threefry keys."""


def test_a_key_for_each_lane_that_vmap_cannot_draw_from_is_refused() -> None:
    def split(rng: sm.RandomState, x: jax.Array) -> Any:
        return rng.split(2)

    def key(rng: sm.RandomState, x: jax.Array) -> Any:
        return jax.random.bits(rng.key), rng

    keys = sm.RandomState(jax.random.split(jax.random.key(0, impl="rbg"), 8))
    for fun in (split, key):
        calls = [
            (sm.vmap2(fun, in_axes=(None, 0)), make_rng("rbg")),
            (sm.vmap2(fun, in_axes=(None, 0), state_in_axes=sm.RandomState), keys),
        ]
        for call, rng in calls:
            with pytest.raises(sm.StatemeshError) as caught:
                call(rng, X[:8])
            assert str(caught.value) == IN_LANES.format(fun.__name__, "rbg")
    # Draws from a key that all lanes share are those of the unmapped call.
    shared = jax.random.bits(make_rng("rbg").split()[0])
    got = sm.vmap2(lambda x: jax.random.bits(make_rng("rbg").split()[0]))(X[:8])
    np.testing.assert_array_equal(got, [shared] * 8)


@each_implementation
def test_many_draws_give_no_key_twice(impl: str) -> None:
    rng, drawn = make_rng(impl), [data(make_rng(impl).key)]
    for _ in range(6):
        one, rng = rng.split()
        some, rng = rng.split(3)
        assert one.dtype == some.dtype == rng.key.dtype
        drawn += [*data(some), data(one), data(rng.key)]
    assert distinct(drawn, 31)
    rows, _ = rng.rows(200)
    assert distinct(data(rows), 200)
    assert rows.dtype == (rng.key.dtype if impl == "threefry2x32" else jax.random.key(0).dtype)


def test_threefry_keys_are_those_of_jax_random() -> None:
    rng = make_rng("threefry2x32")
    rest, drawn = jax.random.split(rng.key)
    np.testing.assert_array_equal(data(rng.split()[0]), data(drawn))
    np.testing.assert_array_equal(data(rng.split(3)[0]), data(jax.random.split(drawn, 3)))
    np.testing.assert_array_equal(data(rng.split()[1].key), data(rest))
    rows = jnp.stack([jax.random.fold_in(drawn, i) for i in range(4)])
    np.testing.assert_array_equal(data(rng.rows(4)[0]), data(rows))


def test_keys_of_an_implementation_of_ones_own() -> None:
    impl = jax.extend.random.define_prng_impl(
        key_shape=(3,),
        seed=lambda seed: jnp.stack([seed.astype(jnp.uint32)] * 3),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 3)),
        random_bits=lambda key, width, shape: jnp.zeros(shape, f"uint{width}"),
        fold_in=lambda key, number: key,
        name="mine",
    )
    rng = sm.RandomState(jax.random.key(3, impl=impl))
    call = sm.shard_map(numbers, make_mesh(), (P(), P("x")), (P("x"), P()))
    got, after = call(rng, X)
    expected, plain = numbers(rng, X)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(data(after.key), data(plain.key))
    assert distinct(got, 16)
    with pytest.raises(sm.StatemeshError, match=r"of the implementation PRNGSpec\('mine'\)"):
        sm.vmap2(lambda rng, x: rng.split(), in_axes=(None, 0))(rng, X[:8])
