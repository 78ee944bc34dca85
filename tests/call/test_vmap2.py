"""`vmap2` only: nested, inside and around `shard_map` and `pmap2`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import compiles, counted, make_mesh


N = 3
X = np.arange(1, 8 * N + 1, dtype=np.float32).reshape(8, N)


def equal(result: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


def close(result: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(result), np.asarray(expected), rtol=1e-5)


def words(keys: Any) -> Any:
    return np.asarray(jax.random.key_data(keys)).reshape(-1, 2)


def test_more_lanes_than_devices() -> None:
    x = np.arange(100)
    y, total = sm.vmap2(
        lambda s, x: (x + s.value, s.set(s.value + x)), in_axes=(None, 0), out_axes=(0, None)
    )(sm.State(0, reduce="sum"), x)
    equal(y, x)
    assert int(total.value) == x.sum()


def test_axis_size_where_nothing_is_mapped() -> None:
    call = sm.vmap2(
        lambda s: (jax.lax.axis_index("i"), s.set(s.value + 1)),
        in_axes=None,
        axis_name="i",
        axis_size=5,
        out_axes=(0, None),
    )
    y, after = call(sm.State(1))
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


def test_nested_in_itself() -> None:
    def fun(m: Any, x: Any) -> Any:
        both = jax.lax.psum(x, ("i", "j"))
        return both, {
            "own": m["own"].set(m["own"].value + x),
            "row": m["row"].set(m["row"].value + jax.lax.psum(x, "j")),
            "sum": m["sum"].set(m["sum"].value + x),
        }

    inner = sm.vmap2(
        fun,
        axis_name="j",
        in_axes=(None, 0),
        out_axes=(None, 0),
        state_in_axes={0: "own"},
    )
    outer = sm.vmap2(
        inner,
        axis_name="i",
        in_axes=(None, 0),
        out_axes=(None, 0),
        state_in_axes={0: ["own", "row"]},
    )
    model = {
        "own": sm.State(X, tag="own"),
        "row": sm.State(np.zeros(8, np.float32), tag="row"),
        "sum": sm.State(np.float32(1), reduce="sum"),
    }
    total, after = outer(model, X)
    equal(total, X.sum())
    equal(after["own"].value, 2 * X)
    equal(after["row"].value, X.sum(1))
    equal(after["sum"].value, 1 + X.sum())


def test_nested_lanes_draw_different_numbers() -> None:
    def fun(rng: sm.RandomState, x: Any) -> Any:
        return rng.split()

    inner = sm.vmap2(fun, in_axes=(None, 0), out_axes=(0, None))
    outer = sm.vmap2(inner, in_axes=(None, 0), out_axes=(0, None))
    rng = sm.RandomState(jax.random.key(0))
    keys, after = outer(rng, X)
    assert keys.shape == X.shape
    assert len(np.unique(words(keys), axis=0)) == X.size
    equal(words(after.key), words(rng.split()[1].key))


def test_jax_vmap_inside_and_around() -> None:
    call = sm.vmap2(
        lambda s, x: (jax.vmap(lambda x: x * s.value)(x), s.set(s.value + x.sum())),
        in_axes=(None, 0),
        out_axes=(0, None),
    )
    y, after = jax.vmap(call, (None, 0))(sm.State(2.0, reduce="mean"), np.stack([X, X + 1]))
    equal(y, np.stack([2 * X, 2 * X + 2]))
    close(after.value, [2 + X.sum(1).mean(), 2 + (X + 1).sum(1).mean()])


# Inside shard_map


def moments(old: Any, new: Any, axis_names: Any) -> Any:
    """Counts and sums are added, and the largest value is kept."""
    added = jax.tree.map(
        lambda a, b: a + jax.lax.psum(b - a, axis_names),
        (old["n"], old["sum"]),
        (new["n"], new["sum"]),
    )
    return {"n": added[0], "sum": added[1], "max": jax.lax.pmax(new["max"], axis_names)}


MERGED: dict[str, Any] = {
    "mean": X.mean(),
    "max": X.max(),
    "min": X.min(),
    "sum": 5 + (X - 5).sum(),
}


def over_shards(lane: Any, check_vma: bool, kind: Any = AxisType.Auto) -> Any:
    """`lane` mapped by `vmap2` over the second axis inside a `shard_map` over the first."""

    def shard(s: Any, x: Any) -> Any:
        call = sm.vmap2(lane, axis_name="lane", in_axes=(None, 0), out_axes=(0, None))
        y, s = call(s, x[0])
        return y[None], s

    mesh = make_mesh("8", kind)
    return sm.shard_map(
        shard, mesh, in_specs=(P(), P("x")), out_specs=(P("x"), P()), check_vma=check_vma
    )


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("policy", MERGED)
def test_named_policies_inside_shard_map(policy: str, check_vma: bool) -> None:
    call = over_shards(lambda s, x: (x * 2, s.set(x)), check_vma)
    y, after = call(sm.State(np.float32(5), reduce=policy), X)
    equal(y, X * 2)
    close(after.value, MERGED[policy])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_a_function_as_policy_inside_shard_map(check_vma: bool, kind: AxisType) -> None:
    def lane(s: Any, x: Any) -> Any:
        v = s.value
        return x, s.set({"n": v["n"] + 1, "sum": v["sum"] + x, "max": jnp.maximum(v["max"], x)})

    state = sm.State({"n": 2, "sum": np.float32(1), "max": np.float32(0)}, reduce=moments)
    call = over_shards(lane, check_vma, kind=kind)
    if check_vma:
        with pytest.raises(sm.StatemeshError, match=r"reduce=moments cannot merge what the lanes"):
            call(state, X)
        return
    _, after = call(state, X)
    assert int(after.value["n"]) == 2 + X.size
    close(after.value["sum"], 1 + X.sum())
    close(after.value["max"], X.max())


def test_lanes_and_shards_are_merged_apart_where_the_state_is_per_shard() -> None:
    def shard(s: Any, x: Any) -> Any:
        call = sm.vmap2(lambda s, x: s.set(s.value + x), in_axes=(None, 0))
        return call(s, x[0])

    call = sm.shard_map(shard, make_mesh(), (P(), P("x")), P())
    after = call(sm.State(np.ones(8, np.float32), spec=sm.PerShard("x"), reduce="sum"), X)
    equal(after.value, 1 + X.sum(1))


def test_states_with_lanes_inside_checked_shard_map() -> None:
    def shard(m: Any, x: Any) -> Any:
        def lane(m: Any, x: Any) -> Any:
            return x + m["w"].value, {
                "own": m["own"].set(m["own"].value + x),
                "w": m["w"].set(m["w"].value + 1),
            }

        call = sm.vmap2(
            lane, in_axes=(None, 0), out_axes=(0, None), state_in_axes={-1: sm.ShortTermState}
        )
        y, m = call(m, x[0])
        return y[None], m

    call = sm.shard_map(shard, make_mesh(), (P(), P("x")), (P("x"), P()))
    own = sm.ShortTermState(X, spec=sm.PerShard("x"))
    y, after = call({"own": own, "w": sm.ParamState(1.0)}, X)
    equal(y, X + 1)
    equal(after["own"].value, 2 * X)
    assert after["w"].value.shape == ()
    assert float(after["w"].value) == 2.0


def test_lanes_of_shards_draw_different_numbers() -> None:
    def lane(rng: sm.RandomState, x: Any) -> Any:
        key, rng = rng.split()
        return jax.random.key_data(key), rng

    rng = sm.RandomState(jax.random.key(0))
    keys, after = over_shards(lane, True)(rng, X)
    assert len(np.unique(np.asarray(keys).reshape(-1, 2), axis=0)) == X.size
    equal(words(after.key), words(rng.split()[1].key))


REFUSED = """\
lane: inside a checked shard_map JAX has no collectives over the lanes of a vmap ('lane'). Write instead:
  1. statemesh's own, which run over lanes there: sm.psum(x, 'lane'), or sm.pmean, sm.pmax, sm.pmin, sm.all_gather, sm.axis_index;
  2. for a state: State(value, reduce='mean'), or 'sum', 'max', 'min': statemesh merges the lanes' writes;
  3. for a result: return it with out_axes=0 and reduce its lane axis after vmap2, as with jnp.sum(out, axis=0)."""  # noqa: E501


def test_a_collective_over_lanes_and_mesh_inside_a_checked_shard_map_is_refused() -> None:
    def lane(s: Any, x: Any) -> Any:
        return jax.lax.psum(x, ("lane", "x")), s

    with pytest.raises(sm.StatemeshError) as raised:
        over_shards(lane, True)(sm.State(0.0), X)
    assert type(raised.value) is sm.StatemeshError
    assert str(raised.value) == REFUSED
    y, _ = over_shards(lane, False)(sm.State(0.0), X)
    equal(y, np.full_like(X, X.sum()))


ALLOWS: dict[str, Any] = {
    "axis_index": (lambda x: jax.lax.axis_index("lane") + x, X + np.arange(N)),
    "axis_size": (lambda x: jax.lax.axis_size("lane") * x, X * N),
    "over the lanes": (lambda x: sm.pmax(x, "lane"), np.tile(X.max(1)[:, None], (1, N))),
    "over the mesh": (lambda x: jax.lax.psum(x, "x"), np.tile(X.sum(0), (8, 1))),
}


@pytest.mark.parametrize("what", ALLOWS)
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_what_lanes_may_ask_for_inside_a_shard_map(check_vma: bool, what: str) -> None:
    fun, expected = ALLOWS[what]
    y, after = over_shards(lambda s, x: (fun(x), s.set(fun(x))), check_vma)(
        sm.State(np.float32(0), reduce="mean"), X
    )
    equal(y, expected)
    close(after.value, expected.mean())


def test_the_functions_own_assertion_comes_through_inside_a_checked_shard_map() -> None:
    def lane(s: Any, x: Any) -> Any:
        raise AssertionError

    with pytest.raises(AssertionError):
        over_shards(lane, True)(sm.State(0.0), X)


def test_grad_through_policies_inside_a_checked_shard_map() -> None:
    def lane(w: Any, s: Any, x: Any) -> Any:
        y = jnp.sin(w * x)
        return y, s.set(y)

    def shard(w: Any, s: Any, x: Any) -> Any:
        y, s = sm.vmap2(lane, in_axes=(None, None, 0), out_axes=(0, None))(w, s, x[0])
        return y[None], s

    call = sm.shard_map(shard, make_mesh(), (P(), P(), P("x")), (P("x"), P()))

    def loss(w: Any) -> Any:
        y, s = call(w, sm.State(np.float32(0), reduce="mean"), X / 10)
        return jnp.sum(y**2) + 3 * s.value

    def by_hand(w: Any) -> Any:
        y = jnp.sin(w * X / 10)
        return jnp.sum(y**2) + 3 * jnp.mean(y)

    close(jax.grad(loss)(0.5), jax.grad(by_hand)(0.5))


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


def test_inside_pmap2() -> None:
    def lane(m: Any, x: Any) -> Any:
        return x, [m[0].set(m[0].value + x), m[1].set(m[1].value + x)]

    inner = sm.vmap2(lane, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: "own"})
    call = sm.pmap2(inner, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: "own"})
    model = [sm.State(X, tag="own"), sm.State(np.float32(0), reduce="sum")]
    y, (own, total) = call(model, X)
    equal(y, X)
    equal(own.value, 2 * X)
    equal(total.value, X.sum())


def test_steady_inside_a_checked_shard_map() -> None:
    body, count = counted(lambda s, x: (x, s.set(s.value + x)))
    call = over_shards(body, True)
    state = sm.State(np.float32(0), reduce="sum")
    _, state = call(state, X)
    with compiles() as seen:
        for _ in range(3):
            _, state = call(state, X)
            jax.block_until_ready(state)
    assert (count.times, seen.times) == (1, 0)
    equal(state.value, 4 * X.sum())
