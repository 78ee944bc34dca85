"""Trees laid out on a mesh: `place`, and the `place` of a mapped call."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import compiles, elsewhere, make_mesh


pytestmark = pytest.mark.usefixtures("each_kind")


class Net(sm.Module):
    w: sm.ParamState
    cache: sm.State
    each: sm.State
    rng: sm.RandomState
    table: jax.Array
    rate: float = 0.5
    act: Any = operator.neg


def make_net() -> Net:
    return Net(
        sm.ParamState({"a": np.ones((8, 2)), "b": np.zeros(3)}, spec={"a": P("x"), "b": None}),
        sm.State(np.arange(16.0), tag="cache"),
        sm.State(np.arange(8), spec=sm.PerShard("x")),
        sm.RandomState(jax.random.key(0)),
        jnp.ones((8, 3)),
    )


structure: Any = jax.tree.structure


def lies(x: jax.Array, mesh: Mesh, spec: P) -> bool:
    return bool(x.sharding == NamedSharding(mesh, spec))


def buffers(x: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def test_per_shard_is_a_value() -> None:
    assert sm.PerShard("x") == sm.PerShard("x")
    assert sm.PerShard("x", "y") == sm.PerShard(("x", "y"))
    assert sm.PerShard("x", "y") != sm.PerShard("y", "x")
    assert hash(sm.PerShard("x")) == hash(sm.PerShard("x"))
    assert sm.PerShard("x") != P("x")
    assert repr(sm.PerShard("x", "y")) == "PerShard('x', 'y')"
    with pytest.raises(AttributeError, match="immutable"):
        sm.PerShard("x").axis_names = ("y",)


def test_a_model() -> None:
    mesh, net = make_mesh(), make_net()
    placed = sm.place(net, mesh, P("x"), state_specs={"cache": P("x")})
    assert lies(placed.w.value["a"], mesh, P("x"))
    assert lies(placed.w.value["b"], mesh, P())
    assert lies(placed.cache.value, mesh, P("x"))
    assert lies(placed.each.value, mesh, P("x"))
    assert lies(placed.rng.key, mesh, P())
    assert lies(placed.table, mesh, P("x"))
    assert (placed.rate, placed.act) == (0.5, operator.neg)
    assert structure(placed) == structure(net)
    np.testing.assert_array_equal(placed.cache.value, np.arange(16))
    np.testing.assert_array_equal(
        jax.random.key_data(placed.rng.key), jax.random.key_data(net.rng.key)
    )


def test_specs_are_a_prefix_tree_for_what_is_in_no_state() -> None:
    mesh = make_mesh("4x2")
    tree = {"a": [np.ones((4, 2)), np.ones(4)], "b": sm.State(np.ones(4)), "c": np.ones((2, 4))}
    placed = sm.place(tree, mesh, {"a": P("x"), "b": None, "c": P("y", "x")})
    assert lies(placed["a"][0], mesh, P("x"))
    assert lies(placed["a"][1], mesh, P("x"))
    assert lies(placed["b"].value, mesh, P())
    assert lies(placed["c"], mesh, P("y", "x"))


def test_which_spec_a_state_goes_by() -> None:
    mesh = make_mesh("4x2")
    tree = [
        sm.ParamState(np.ones(8), spec=P("y")),
        sm.State(np.ones(8), tag="t"),
        sm.State(np.ones(8), spec=sm.PerShard("x", "y")),
        sm.RandomState(jax.random.key(0)),
    ]
    cases: list[tuple[Any, list[P]]] = [
        (None, [P("y"), P(), P(("x", "y"))]),
        (P("x"), [P("x"), P("x"), P("x")]),
        ({"t": P("x")}, [P("y"), P("x"), P(("x", "y"))]),
        ({sm.ParamState: P(), ...: P("x")}, [P(), P("x"), P("x")]),
        ({sm.filters.Where(lambda m: m[1]): P("x")}, [P("y"), P("x"), P(("x", "y"))]),
    ]
    for state_specs, expected in cases:
        call = sm.shard_map(lambda tree: tree, mesh, P(), P(), state_in_specs=state_specs)
        for *placed, rng in (sm.place(tree, mesh, state_specs=state_specs), *call.place(tree)):
            for state, spec in zip(placed, expected, strict=True):
                assert lies(state.value, mesh, spec)
            assert lies(rng.key, mesh, P())
    keys = sm.RandomState(jax.random.split(jax.random.key(0), 4))
    assert lies(sm.place(keys, mesh, state_specs={...: sm.PerShard("x")}).key, mesh, P("x"))


def test_from_anywhere() -> None:
    mesh, x = make_mesh(), np.arange(16.0).astype(np.float32)
    for given in elsewhere(x.reshape(8, 2)).values():
        placed, state = sm.place((given, sm.State(given)), mesh, P("x"), state_specs=P("x"))
        for y in (placed, state.value):
            assert lies(y, mesh, P("x"))
            np.testing.assert_array_equal(y, x.reshape(8, 2))


def test_what_lies_right_is_not_touched() -> None:
    mesh = make_mesh()
    once = sm.place(make_net(), mesh, P("x"))
    twice = sm.place(once, mesh, P("x"))
    assert all(map(operator.is_, jax.tree.leaves(twice), jax.tree.leaves(once)))


def test_the_same_layout_by_another_name_is_not_copied() -> None:
    mesh = make_mesh()
    x = jax.device_put(np.ones((8, 1), np.float32), NamedSharding(mesh, P("x", None)))
    call = sm.shard_map(lambda s, x: (s, x), mesh, (P(), P("x")), (P(), P("x")))
    state, y = call.place(sm.State(x, spec=P("x")), x)
    for same in (sm.place(x, mesh, P("x")), state.value, y):
        assert buffers(same) == buffers(x)


def test_what_is_moved_to_the_device_where_it_lies_may_be_given_up() -> None:
    mesh, x = make_mesh("1"), jnp.ones((8, 2))
    call = sm.shard_map(lambda s: s.set(s.value + 1), mesh, (P(),), P(), donate="all")
    state = sm.place(sm.State(x), mesh)
    call(state)
    assert state.value.is_deleted()
    np.testing.assert_array_equal(x, np.ones((8, 2)))


def test_what_is_no_array_of_numbers_stays() -> None:
    unhashable: list[Any] = []
    tree = {"n": 1, "f": 1.5, "s": "text", "g": operator.neg, "z": None, "d": np.dtype("f")}
    tree["o"] = unhashable
    placed = sm.place(tree, make_mesh(), P("x"))
    assert placed == tree
    assert type(placed["n"]) is int
    words = np.array(["a", "b"])
    call = sm.shard_map(lambda m: m["n"] * 2, make_mesh(), (P(),), P())
    (placed,) = call.place({"n": np.ones(2), "words": words})
    assert placed["words"] is words
    assert sm.place({"n": np.ones(2), "words": words}, make_mesh())["words"] is words


def test_placed_arrays_are_strong() -> None:
    mesh = make_mesh()
    assert jnp.asarray(1.0).weak_type
    assert not sm.place(jnp.asarray(1.0), mesh).weak_type
    weak = jax.device_put(jnp.asarray(1.0), NamedSharding(mesh, P()))
    assert weak.weak_type and not sm.place(weak, mesh).weak_type
    assert sm.place(np.float64(1.0), mesh).dtype == np.float32


def test_a_placed_model_is_not_moved_by_the_call() -> None:
    mesh = make_mesh()

    def step(net: Net, x: jax.Array) -> Any:
        return x * net.w.value["b"][0], net

    call = sm.shard_map(step, mesh, (P(), P("x")), (P("x"), P()), state_in_specs={"cache": P("x")})
    by_call, x = call.place(make_net(), np.ones(8, np.float32))
    by_hand = sm.place(make_net(), mesh, state_specs={"cache": P("x")})
    for mine, theirs in zip(jax.tree.leaves(by_call), jax.tree.leaves(by_hand), strict=True):
        assert getattr(mine, "sharding", mine) == getattr(theirs, "sharding", theirs)
    call(by_call, x)
    with compiles() as seen:
        for net in (by_call, by_hand):
            _, after = call(net, x)
            assert all(map(operator.is_, jax.tree.leaves(after), jax.tree.leaves(net)))
    assert seen.times == 0
    again = call.place(by_call, x)
    assert all(map(operator.is_, jax.tree.leaves(again), jax.tree.leaves((by_call, x))))


def test_place_of_a_call_gives_its_positional_arguments() -> None:
    mesh = make_mesh()
    call = sm.shard_map(lambda x, n, f, *, s: f(x) * n, mesh, (P("x"), P(), None), P("x"))
    placed = call.place(np.ones(8), 3, operator.neg, s=sm.State(1.0))
    assert type(placed) is tuple
    x, n, f = placed
    assert lies(x, mesh, P("x"))
    assert (n, f) == (3, operator.neg)
    np.testing.assert_array_equal(call(*placed, s=sm.State(1.0)), -3)
    with pytest.raises(sm.SpecError):
        call.place(np.ones(6), 3, operator.neg, s=sm.State(1.0))


def test_place_of_a_call_takes_the_mesh_of_the_context() -> None:
    call = sm.shard_map(lambda x: x, None, P("x"), P("x"))
    with jax.set_mesh(make_mesh("8", AxisType.Explicit)):
        (x,) = call.place(np.ones(8))
        assert x.sharding.spec == P("x")
    with pytest.raises(sm.SpecError, match="no mesh"):
        call.place(np.ones(8))


def test_an_array_in_another_memory_is_moved() -> None:
    mesh = make_mesh()
    here = jax.sharding.NamedSharding(mesh, P("x"))
    if "pinned_host" not in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        pytest.fail("this JAX has one kind of memory only")
    x = jax.device_put(np.arange(8.0), here.with_memory_kind("pinned_host"))
    assert sm.place(x, mesh, P("x")).sharding.memory_kind == here.memory_kind
    (leaf,) = sm.shard_map(lambda x: 2 * x, mesh, P("x"), P("x")).explain(x).leaves
    assert leaf.moved > 0
