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
equal = np.testing.assert_array_equal


def close(result: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(result), np.asarray(expected), rtol=1e-5)


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
    model = {
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


def test_inside_jax_vmap() -> None:
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


def over_shards(lane: Any, check_vma: bool, kind: AxisType = AxisType.Explicit) -> Any:
    """`lane` mapped by `vmap2` over the second axis inside a `shard_map` over the first."""

    def shard(s: Any, x: Any) -> Any:
        call = sm.vmap2(lane, axis_name="lane", in_axes=(None, 0), out_axes=(0, None))
        y, s = call(s, x[0])
        return jax.tree.map(lambda y: y[None], y), s

    specs = (P(), P("x"))
    return sm.shard_map(shard, make_mesh("8", kind), specs, (P("x"), P()), check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_lanes_of_shards(check_vma: bool) -> None:
    def lane(m: Any, x: Any) -> Any:
        key, rng = m["rng"].split()
        states = {name: m[name].set(m[name].value + x) for name in ("mean", "max", "min", "sum")}
        return (x * 2, jax.random.key_data(key)), {**states, "rng": rng}

    body, count = counted(lane)
    call = over_shards(body, check_vma)
    model: Any = {
        name: sm.State(np.float32(5), reduce=name) for name in ("mean", "max", "min", "sum")
    }
    model["rng"] = sm.RandomState(jax.random.key(0))
    (y, keys), after = call(model, X)
    equal(y, X * 2)
    assert len(np.unique(words(keys), axis=0)) == X.size
    equal(words(after["rng"].key), words(model["rng"].split()[1].key))
    for name, merge in (("mean", np.mean), ("max", np.max), ("min", np.min), ("sum", np.sum)):
        close(after[name].value, 5 + merge(X))
    with compiles() as seen:
        jax.block_until_ready(call(after, X))
    assert (count.times, seen.times) == (1, 0)


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


def test_states_with_lanes_inside_checked_shard_map() -> None:
    def shard(m: Any, x: Any) -> Any:
        def lane(m: Any, x: Any) -> Any:
            return x + m["w"].value, {
                "own": m["own"].set(m["own"].value + x),
                "w": m["w"].set(m["w"].value + 1),
                "sum": m["sum"].set(m["sum"].value + x),
            }

        call = sm.vmap2(lane, in_axes=(None, 0), out_axes=(0, None), state_in_axes={-1: "own"})
        y, m = call(m, x[0])
        return y[None], m

    call = sm.shard_map(shard, make_mesh(), (P(), P("x")), (P("x"), P()))
    model = {
        "own": sm.State(X, spec=sm.PerShard("x"), tag="own"),
        "w": sm.ParamState(1.0),
        # Its lanes are merged, and its shards stay apart.
        "sum": sm.State(np.ones(8, np.float32), spec=sm.PerShard("x"), reduce="sum"),
    }
    y, after = call(model, X)
    equal(y, X + 1)
    equal(after["own"].value, 2 * X)
    equal(after["sum"].value, 1 + X.sum(1))
    assert after["w"].value.shape == ()
    assert float(after["w"].value) == 2.0


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


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_what_lanes_may_ask_for_inside_a_shard_map(check_vma: bool) -> None:
    def lane(states: Any, x: Any) -> Any:
        values = {what: fun(x) for what, (fun, _) in ALLOWS.items()}
        return values, {what: states[what].set(value) for what, value in values.items()}

    states = {what: sm.State(np.float32(0), reduce="mean") for what in ALLOWS}
    results, after = over_shards(lane, check_vma)(states, X)
    for what, (_, expected) in ALLOWS.items():
        equal(results[what], expected)
        close(after[what].value, expected.mean())


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
