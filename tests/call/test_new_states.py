"""`new_states`, `vmap2_new_states`, `pmap2_new_states`: the states that an init creates, by axis."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm
from tests.helpers import compiles


N = 4
CREATE: dict[str, Any] = {"vmap": sm.vmap2_new_states, "pmap": sm.pmap2_new_states}
equal = np.testing.assert_array_equal


@pytest.fixture(params=CREATE)
def create(request: pytest.FixtureRequest) -> Any:
    return CREATE[request.param]


def words(keys: Any) -> Any:
    return np.asarray(jax.random.key_data(keys))


class Linear(sm.Module):
    rng: sm.RandomState
    w: Any = None
    b: Any = None

    def init_state(self, size: int) -> "Linear":
        key, rng = self.rng.split()
        # These values are as random as a draw from the key, and quick to compile.
        w = jax.random.key_data(key) + jnp.arange(size, dtype=np.uint32)[:, None]
        return self.replace(rng=rng, w=sm.ParamState(w), b=sm.ParamState(jnp.zeros(size)))


class Norm(sm.Module):
    mean: Any = None
    table: Any = None
    steps: Any = None

    def init_state(self) -> "Norm":
        return self.replace(
            mean=sm.BatchState(jnp.zeros((2, 3)), tag="stats"),
            table=sm.NonBatchState(jnp.arange(3.0)),
            steps=sm.ShortTermState(0),
        )


class Net(sm.Module):
    linear: Linear
    norms: list[Norm]
    given: sm.State
    act: Any = jnp.tanh


def net(seed: int = 0) -> Net:
    return Net(
        Linear(sm.RandomState(jax.random.key(seed))), [Norm(), Norm()], sm.State(jnp.arange(5))
    )


@functools.cache
def created(create: Any, lanes: int = N) -> Any:
    return create(net(), {"size": 3}, axis_size=lanes)


def test_every_state_gets_its_lanes() -> None:
    after, made = created(sm.vmap2_new_states)
    norm = {"mean": (N, 2, 3), "table": (3,), "steps": (N,)}
    assert {path: state.value.shape for path, state in sm.states(after).items()} == {
        "linear.rng": (),
        "linear.w": (N, 3, 2),
        "linear.b": (N, 3),
        **{f"norms[{i}].{field}": shape for i in (0, 1) for field, shape in norm.items()},
        "given": (5,),
    }
    equal(after.given.value, np.arange(5))
    assert after.act is jnp.tanh
    assert {axis: len(states) for axis, states in made.items()} == {0: 6, None: 2}
    # The listed states are the very states of the module.
    there = {id(state) for state in sm.states(after).values()}
    assert all(id(state) in there for states in made.values() for state in states)
    assert after.norms[1].table in made[None]
    equal(after.norms[0].table.value, np.arange(3))


def test_values_of_the_lanes(create: Any) -> None:
    before = net()
    after, _ = create(before, {"size": 3}, axis_size=8)
    w = np.asarray(after.linear.w.value)
    assert len(np.unique(w)) == w.size
    equal(after.linear.b.value, np.zeros((8, 3)))
    # The given stream advanced by one draw, the same for any number of lanes, and the module is as it was.
    key, rng = before.linear.rng.split()
    equal(words(after.linear.rng.key), words(rng.key))
    equal(w[0], words(key) + np.arange(3, dtype=np.uint32)[:, None])
    assert before.linear.w is None
    # Both transforms create the same, and fewer lanes the same as the first of more.
    few, _ = created(sm.vmap2_new_states)
    equal(few.linear.w.value, w[:N])
    under_jit = jax.jit(lambda: create(net(), {"size": 3}, axis_size=8)[0].linear.w.value)()
    equal(under_jit, w)


def test_axes_in_order_and_tags() -> None:
    create = sm.vmap2_new_states
    axes = {1: "stats", -1: [sm.ParamState, sm.BatchState], None: sm.ShortTermState}
    after, made = create(net(), {"size": 3}, "fresh", axis_size=N, state_out_axes=axes)
    assert after.norms[0].mean.value.shape == (2, N, 3)
    assert after.linear.w.value.shape == (3, 2, N)
    assert after.linear.b.value.shape == (3, N)
    assert after.norms[0].steps.value.shape == ()
    assert {axis: len(states) for axis, states in made.items()} == {1: 2, -1: 2, None: 4}
    # New states get the tag beside their own.
    assert after.given.tag == after.linear.rng.tag == frozenset()
    assert after.norms[0].mean.tag == {"stats", "fresh"}
    assert after.norms[0].table.tag == after.linear.w.tag == {"fresh"}
    # One filter means axis 0, and a `NonBatchState` goes before it.
    after, made = create(net(), {"size": 3}, axis_size=N, state_out_axes=...)
    assert after.norms[0].table.value.shape == (3,)
    assert after.norms[0].mean.value.shape == (N, 2, 3)
    assert sorted(made, key=str) == [0, None]


def test_which_states_are_new(create: Any) -> None:
    runs = []

    class Changed(sm.Module):
        count: sm.State
        again: sm.State
        fresh: Any = None
        noise: Any = None
        rng: Any = None
        rank: Any = None
        lanes: Any = None

        def init_state(self, rng: sm.RandomState) -> "Changed":
            runs.append("init")
            return self.replace(
                rank=sm.State(jax.lax.axis_index("i")),
                lanes=sm.NonBatchState(jax.lax.psum(jnp.ones(()), "i")),
                count=self.count.value + 1,
                # Made anew, although it looks like the old one.
                again=sm.State(0),
                fresh=sm.ShortTermState(self.count.value),
                noise=sm.State(jax.random.key_data(rng.split()[0])[0]),
                rng=sm.RandomState(jax.random.key(7)),
            )

    rng = sm.RandomState(jax.random.key(1))
    after, made = create(
        Changed(sm.State(3), sm.State(3)), {"rng": rng}, axis_size=N, axis_name="i"
    )
    assert runs == ["init"]
    assert int(after.count.value) == 4
    equal(after.again.value, np.zeros(N))
    equal(after.fresh.value, np.full(N, 3))
    assert len(np.unique(after.noise.value)) == N
    assert after.rng.key.shape == (N,) and len(np.unique(words(after.rng.key), axis=0)) == N
    equal(after.rank.value, np.arange(N))
    assert float(after.lanes.value) == N
    assert made == {
        0: [after.again, after.fresh, after.noise, after.rng, after.rank],
        None: [after.lanes],
    }


def test_created_states_go_straight_into_a_call_and_are_not_moved() -> None:
    created, _ = sm.pmap2_new_states(net(), {"size": 3}, "fresh")
    w = created.linear.w.value
    assert {s.device.id: s.index[0].start for s in w.addressable_shards} == {i: i for i in range(8)}
    assert len(created.norms[0].table.value.devices()) == 8
    assert created.norms[0].table.value.sharding.is_fully_replicated

    def fun(m: Net, x: Any) -> Any:
        return m.linear.w.value.sum(0) * x, m.replace(
            linear=m.linear.replace(w=m.linear.w.value + 1)
        )

    call = sm.pmap2(
        fun,
        in_axes=(None, 0),
        out_axes=(0, None),
        state_in_axes={None: sm.NonBatchState, 0: "fresh"},
    )
    x = np.ones((8, 2), np.uint32)
    placed = call.place(created, x)[0]
    assert placed.linear.w.value is created.linear.w.value
    assert placed.norms[0].table.value is created.norms[0].table.value
    y, after = call(created, x)
    equal(y, np.asarray(created.linear.w.value).sum(1, dtype=np.uint32))
    with compiles() as seen:
        jax.block_until_ready(call(after, x))
    assert seen.times == 0


# new_states


def test_new_states_lists_what_came_into_being() -> None:
    before = net()
    after = before.init_all_states(size=3)
    found = sm.new_states(before, after)
    norms = [f"norms[{i}].{field}" for i in (0, 1) for field in ("mean", "table", "steps")]
    assert list(found) == ["linear.w", "linear.b", *norms]
    assert found == {p: s for p, s in sm.states(after).items() if p in found}
    # It takes a filter.
    assert len(sm.new_states(before, after, sm.NonBatchState)) == 2
    assert len(sm.new_states(before, after, filter=["stats", sm.ParamState])) == 4
    assert sm.new_states(after, after) == {}
    with pytest.raises(sm.StructureError, match="no state matches 'nobody'"):
        sm.new_states(before, after, "nobody")


def test_a_state_of_another_make_is_new() -> None:
    old = sm.State(0)
    for changed in (sm.ParamState(0), sm.State(0, tag="t"), sm.State(0.0), sm.State([0])):
        assert sm.new_states({"a": old}, {"a": changed}) == {"['a']": changed}
    assert sm.new_states({"a": old}, {"a": sm.State(5)}) == {}
