"""Memory: no shared buffer is donated twice, no array that the caller holds is lost, and no result shares
memory that somebody fills again."""

import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._resolve._buffers import Made, Spared, apart, copied, memory
from statemesh.testing import assert_budget
from tests.helpers import compiles, counted, make_mesh


jnp: Any = jax.numpy

X = np.arange(8.0).astype(np.float32)
WHOLE = P()


def equal(x: Any, y: Any) -> None:
    np.testing.assert_array_equal(x, y)


def shared(x: jax.Array, y: jax.Array) -> bool:
    return not memory(x).isdisjoint(memory(y))


def on(mesh: Mesh, spec: P = WHOLE) -> NamedSharding:
    return NamedSharding(mesh, spec)


def aligned(size: int) -> np.ndarray:
    """A NumPy array whose memory JAX uses for its own array on a CPU."""
    held = np.zeros(size * 4 + 64, np.uint8)
    start = -held.ctypes.data % 64
    whole: np.ndarray = held[start : start + size * 4].view(np.float32)
    return whole


# States that share memory. If a buffer is donated twice, JAX 0.10 ends the process.


SHARING = """
import sys
from statemesh.testing import set_devices
set_devices(8)
import jax, jax.numpy as jnp, numpy as np, statemesh as sm
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("x",))
rep, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))

def both(m, x):
    return {"a": m["a"].set(m["a"].value + x.sum()), "b": m["b"].set(m["b"].value - x.sum())}

def first(m, x):
    return {"a": m["a"].set(m["a"].value + x.sum()), "b": m["b"]}

def one(z, there):
    y = jax.device_put(z, there)
    return y, y

def put_twice(z, there):
    return jax.device_put(z, there), jax.device_put(z, there)

def placed(z, there):
    m = sm.place((sm.State(z), sm.State(z)), mesh, state_specs=there.spec)
    return m[0].value, m[1].value

def host(z, there):
    return z, z

def rewrapped(z, there):
    y = jax.device_put(z, there)
    parts = [shard.data for shard in y.addressable_shards]
    return y, jax.make_array_from_single_device_arrays(y.shape, there, parts)

for make in (one, put_twice, placed, host, rewrapped):
    for there in (rep, split):
        for donate in ("states", "all"):
            for fun in (first, both):
                f = sm.shard_map(fun, mesh, (None, P()), P(), donate=donate, state_in_specs=there.spec)
                z = jnp.ones(8)
                a, b = make(z, there)
                x = jnp.arange(8.0)
                m = {"a": sm.State(a), "b": sm.State(b)}
                after = f(m, x)
                if fun is first:
                    assert after["b"].value is b or make is host
                    np.testing.assert_array_equal(b, np.ones(8))
                    np.testing.assert_array_equal(after["b"].value, np.ones(8))
                if make in (placed, host):
                    np.testing.assert_array_equal(z, np.ones(8))
                for _ in range(2):
                    after = f(after, x)
                np.testing.assert_array_equal(after["a"].value, np.full(8, 85.0))
                np.testing.assert_array_equal(after["b"].value, np.full(8, -83.0 if fun is both else 1.0))

# Of `pmap2`, and an array in the place of a state; in a call that was compiled ahead; of packed models.
f = sm.pmap2(lambda a, b, x: (a.set(a.value + x), b), donate_argnums=(0, 1), state_in_axes=..., in_axes=0)
a = f.place(sm.State(jnp.ones(8)), jnp.ones(8), np.ones(8))[0]
after, b = f(a, a.value, np.ones(8))
np.testing.assert_array_equal(after.value, np.full(8, 2.0))
np.testing.assert_array_equal(b, np.ones(8))

f = sm.shard_map(both, mesh, (None, P()), P(), donate="states")
for make in (one, put_twice):
    a, b = make(jnp.ones(8), rep)
    m = {"a": sm.State(a), "b": sm.State(b)}
    after = f.lower(m, jnp.ones(8)).compile()(m, jnp.ones(8))
    np.testing.assert_array_equal(after["a"].value, np.full(8, 9.0))
    np.testing.assert_array_equal(after["b"].value, np.full(8, -7.0))

packed = sm.pack(m, mesh)
def two(p, q, x):
    return first(p, x), first(q, x)
p, q = sm.shard_map(two, mesh, (None, None, P()), P(), donate="states")(packed, packed, jnp.ones(8))
for one in (p, q):
    np.testing.assert_array_equal(one.unpack()["a"].value, np.full(8, 9.0))

# A key and its data.
key = jax.device_put(jax.random.key(0), rep)
m = {"key": sm.RandomState(key), "data": sm.State(jax.random.key_data(key))}
before = np.array(jax.random.key_data(jax.random.key(0)))
def draw(m):
    _, rng = m["key"].split()
    return {"key": rng, "data": m["data"]}
after = sm.shard_map(draw, mesh, (None,), P(), donate="states")(m)
np.testing.assert_array_equal(after["data"].value, before)
np.testing.assert_array_equal(m["data"].value, before)
print("all of them")
"""


@pytest.mark.slow
def test_states_that_share_memory_may_be_donated() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SHARING], capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == "all of them\n"


# How a program avoids getting a buffer twice


def test_what_shares_memory_is_copied_where_it_is_donated() -> None:
    y = copied(jax.device_put(X, on(make_mesh())))
    other = copied(y)
    parts = [shard.data for shard in y.addressable_shards]
    again = jax.make_array_from_single_device_arrays(y.shape, y.sharding, parts)
    spared = Spared([0, 2], [32, 32, 32])
    first, second, third = spared([y, again, other])
    assert first is not y and not shared(first, y)
    assert second is again and third is other
    equal(first, X)


def test_of_what_has_no_size_or_one_of_its_own_nothing_is_compared() -> None:
    assert Spared([0, 1], [32, 4, 8]).compared == []
    assert Spared([0, 1], [0, 0, 8]).compared == []
    assert Spared([1], [32, 4, 32]).compared == []
    assert Spared([0], [32, 4, 32]).compared == [0, 2]


def test_memory_is_looked_up_only_of_what_no_program_made(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    def look(x: Any) -> Any:
        looked.append(x)
        return memory(x)

    monkeypatch.setattr("statemesh._resolve._buffers.memory", look)
    call = sm.shard_map(
        lambda m, x: jax.tree.map(lambda v: v + x, m),
        make_mesh(),
        (None, P()),
        P(),
        donate="states",
    )
    model = [sm.State(X), sm.State(X)]
    x = jax.device_put(X, on(make_mesh()))
    model = call(model, x)
    looked.clear()
    for _ in range(3):
        model = call(model, x)
    # The first call found that `x` shares no memory with the other arguments.
    assert looked == []
    model = call(model, copied(x))
    assert len(looked) == 3
    equal(model[0].value, 6 * X)


def test_an_array_made_before_another_was_compared_is_looked_up() -> None:
    call = sm.shard_map(
        lambda a, x: (a.set(a.value + 1), x), make_mesh(), (P(), P()), (P(), P()), donate="states"
    )
    fixed = jax.device_put(np.zeros(8, np.float32), on(make_mesh()))
    state = call(call(sm.State(X), fixed)[0], fixed)[0]
    # A program made this array, and another array is a view of it.
    parts = [shard.data for shard in state.value.addressable_shards]
    view = jax.make_array_from_single_device_arrays((8,), state.value.sharding, parts)
    after, same = call(state, view)
    assert same is view
    equal(view, X + 2)
    equal(after.value, X + 3)


def test_what_is_fed_back_is_recognised_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    known = Spared._known

    def ask(self: Spared, compared: Any) -> bool:
        asked.append(known(self, compared))
        return asked[-1]

    monkeypatch.setattr(Spared, "_known", ask)
    spared = Spared([0, 1], [32, 32, 32])
    first, second, x = (copied(jax.device_put(X, on(make_mesh()))) for _ in range(3))
    assert spared([first, second, x]) == [first, second, x]
    for _ in range(3):
        first, second = copied(first), copied(second)
        spared.keep([first, second])
        given = [second, first, x]
        assert spared(given) is given
    # The first call looked, and the second learned the order.
    assert asked == [False, True]
    twice = spared([second, second, x])
    assert asked == [False, True, False]
    assert twice[0] is not twice[1]


def test_what_was_made_is_forgotten() -> None:
    made = Made()
    kept = jnp.ones(2)
    made.add([kept])
    for _ in range(3000):
        made.add([jnp.ones(())])
    assert made.numbers([kept, jnp.ones(())])[0] == 1
    assert len(made._entries) < 2100


# Arguments that had to be moved


def test_what_jax_would_share_is_copied() -> None:
    x = jnp.asarray(X)
    for target, shares in ((on(make_mesh()), True), (on(make_mesh(), P("x")), False)):
        assert shared(jax.device_put(x, target), x) == shares
        assert (apart(x, target) is not x) == shares
        assert not shared(jax.device_put(apart(x, target), target), x)
    elsewhere = on(Mesh(jax.devices()[1:2], ("x",)))
    assert apart(x, elsewhere) is x
    key = jax.random.key(0)
    assert not shared(copied(key), key)
    host = aligned(8)
    assert not np.shares_memory(apart(host, on(make_mesh())), host)


def moving_calls() -> dict[str, Any]:
    def fun(s: Any, x: Any) -> Any:
        return s.set(s.value + 1), x * 2

    options: dict[str, Any] = {"in_specs": (P(), P()), "out_specs": P()}
    return {
        "states": sm.shard_map(fun, make_mesh(), **options, donate="states"),
        "all": sm.shard_map(fun, make_mesh(), **options, donate="all"),
        "two axes": sm.shard_map(fun, make_mesh("2x2"), **options, donate="all"),
        "part": sm.shard_map(
            fun, make_mesh("2x2"), (P("y"), P("x")), P("x"), donate="all", state_in_specs=P("y")
        ),
        "one device": sm.shard_map(fun, make_mesh("1"), **options, donate="all"),
        "pmap2": sm.pmap2(fun, donate_argnums=(0, 1), in_axes=None, out_axes=None, axis_size=8),
    }


@pytest.mark.parametrize("name", ["states", "all", "two axes", "part", "one device", "pmap2"])
def test_an_original_that_had_to_be_moved_is_there_after_donation(name: str) -> None:
    call = moving_calls()[name]
    for x in (
        jnp.asarray(X),
        jax.device_put(X, jax.devices()[1]),
        jax.device_put(X, on(make_mesh("4x2"), P("y"))),
        jax.device_put(X, on(make_mesh("2"))),
    ):
        state = sm.State(x)
        after, y = call(state, x)
        equal(after.value, X + 1)
        equal(y, 2 * X)
        equal(x, X)
        placed = call.place(state, x)
        after, y = call(*placed)
        equal(after.value, X + 1)
        equal(x, X)
        if name in ("states", "pmap2"):
            assert placed[0].value.is_deleted()


def test_an_original_is_spared_that_something_shares_which_lies_right() -> None:
    call = sm.shard_map(
        lambda s, x: (s.set(s.value + x), x), make_mesh(), (P(), P()), P(), donate="states"
    )
    value = jax.device_put(X, on(make_mesh()))
    x = value.addressable_data(0)
    after, same = call(sm.State(value), x)
    equal(after.value, 2 * X)
    equal(x, X)
    equal(same, X)


def test_what_a_call_moved_and_gave_back_may_be_donated() -> None:
    x = jnp.asarray(X)
    keep = sm.shard_map(lambda s: s, make_mesh(), P(), P())
    give = sm.shard_map(lambda s: s.set(s.value + 1), make_mesh(), P(), P(), donate="states")
    state = keep(sm.State(x))
    equal(give(state).value, X + 1)
    assert state.value.is_deleted()
    equal(x, X)
    (by_call,) = keep.place(sm.State(x))
    for state in (sm.place(sm.State(x), make_mesh()), by_call):
        give(state)
        assert state.value.is_deleted()
        equal(x, X)


# Arrays outside a State that come back as they went in


def through(mesh: Mesh, spec: P = WHOLE) -> Any:
    return sm.shard_map(lambda w, x: (w, x), mesh, (spec, P("x")), (spec, P("x")))


def lanes() -> Any:
    return sm.pmap2(lambda w, x: (w, x), in_axes=(None, 0), out_axes=(None, 0))


@pytest.mark.parametrize("call", [through(make_mesh()), lanes()], ids=["shard_map", "pmap2"])
def test_an_untouched_array_that_was_moved_is_one_of_its_own(call: Any) -> None:
    w, x = jnp.asarray(X), jnp.asarray(X)
    kept, same = call(w, x)
    assert kept is not w and not shared(kept, w)
    w.delete()
    x.delete()
    equal(kept, X)
    equal(same, X)
    # If it is laid out as the out spec says, it is the very array.
    again, _ = call(kept, same)
    assert again is kept


@pytest.mark.parametrize("call", [through(make_mesh()), lanes()], ids=["shard_map", "pmap2"])
def test_an_array_of_numpy_may_be_filled_anew(call: Any) -> None:
    w, x = aligned(8), aligned(8)
    w[:] = x[:] = 1
    # The test does not wait: no computation may still read the memory that is filled.
    results = [call(w, x), call.place(w, x)]
    w[:] = x[:] = 2
    for y in jax.tree.leaves(results):
        equal(y, np.ones(8))
    w[:] = 1
    placed = sm.place({"w": w, "s": sm.State(w)}, make_mesh())
    w[:] = 2
    equal(placed["w"], np.ones(8))
    equal(placed["s"].value, np.ones(8))


@pytest.mark.parametrize("name", ["1", "8"])
def test_an_untouched_array_has_the_layout_of_its_out_spec(name: str) -> None:
    mesh = make_mesh(name)
    for spec in (P(), P("x")):
        for given in (X, jnp.asarray(X), jax.device_put(X, jax.devices()[0])):
            kept, _ = through(mesh, spec)(given, X)
            assert kept.sharding == on(mesh, spec)
    # An array that had the same layout under another spec gets the spec of the result.
    mine = jax.device_put(X, on(make_mesh("1"), P("x")))
    kept, _ = through(make_mesh("1"))(mine, X)
    assert kept.sharding == on(make_mesh("1"))
    assert through(make_mesh("1"), P("x"))(mine, X)[0] is mine


def test_a_state_is_the_very_array_under_another_name() -> None:
    call = sm.shard_map(lambda s, w: (s, w), make_mesh("1"), P(), P())
    x = jnp.asarray(X)
    state, w = call(sm.State(x), x)
    assert state.value is x
    assert w is not x and w.sharding == on(make_mesh("1"))


def test_arrays_of_a_module_are_their_own_once_and_then_the_very_ones() -> None:
    class Net(sm.Module):
        w: jax.Array
        s: sm.State

    net = Net(w=jnp.asarray(X), s=sm.State(X))
    call = sm.shard_map(lambda net, x: (net, x), make_mesh(), (None, P("x")), (P(), P("x")))
    first, _ = call(net, X)
    net.w.delete()
    equal(first.w, X)
    with compiles() as seen:
        second, _ = call(first, X)
        third, _ = call(second, X)
    assert third.w is first.w and third.s.value is first.s.value
    assert seen.times == 0


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_spec_spelled_otherwise_says_the_same(kind: AxisType) -> None:
    mesh = make_mesh("8", kind)
    call = sm.shard_map(lambda s, w: (s, w), mesh, P(), P())
    x = jax.device_put(X.reshape(4, 2), on(mesh, P(None, None)))
    state, w = call(sm.State(x), x)
    assert state.value is x and w is x
    _, made = call(state, X)
    assert call(state, made)[1] is made


def test_in_an_eager_derivative_too() -> None:
    x = jnp.asarray(X)
    call = sm.shard_map(lambda m, x: (x.sum()[None], m), make_mesh(), (None, P("x")), (P("x"), P()))

    def loss(x: Any) -> Any:
        y, m = call({"s": sm.State(w), "w": w}, x)
        return y.sum(), m

    w = jnp.asarray(X)
    _, m = jax.grad(loss, has_aux=True)(x)
    w.delete()
    equal(m["w"], X)
    equal(m["s"].value, X)


# What is fed back, on Auto and Explicit meshes


KINDS = [AxisType.Auto, AxisType.Explicit]


def one_more(state: Any) -> Any:
    return state.set(state.value + 1)


def feeding_calls(kind: AxisType, donate: Any) -> dict[str, Any]:
    """Calls on many meshes, each with a state of 256 KiB to 4 MiB."""

    def call(name: str, state: sm.State) -> Any:
        mesh = make_mesh(name, kind)
        return sm.shard_map(one_more, mesh, (None,), P(), donate=donate), state

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    line = Mesh(np.array(jax.devices()).reshape(1, 8), ("one", "x"), axis_types=(kind,) * 2)
    return {
        "replicated": call("8", sm.ParamState(zeros(512, 512))),
        "of rank 3": call("8", sm.ParamState(zeros(4, 512, 512))),
        "split": call("8", sm.ParamState(zeros(512, 512), spec=P("x"))),
        "a tuple of axes": call("4x2", sm.ParamState(zeros(512, 512), spec=P(("x", "y")))),
        "a tuple of one axis": call("8", sm.ParamState(zeros(512, 512), spec=P(("x",)))),
        "the last dimension": call("4x2", sm.ParamState(zeros(512, 512), spec=P(None, "y"))),
        "per shard": call("8", sm.State(zeros(8, 256, 256), spec=sm.PerShard("x"))),
        "on one device": call("1", sm.ParamState(zeros(256, 256))),
        "split on one device": call("1", sm.ParamState(zeros(256, 256), spec=P("x"))),
        "an axis of one device": (
            sm.shard_map(one_more, line, (None,), P(), donate=donate),
            sm.ParamState(zeros(512, 512), spec=P("one")),
        ),
    }


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("donate", ["none", "states"])
@pytest.mark.parametrize("name", feeding_calls(AxisType.Auto, "none"))
def test_what_is_fed_back_is_never_copied(name: str, donate: str, kind: AxisType) -> None:
    call, state = feeding_calls(kind, donate)[name]
    (state,) = call.place(state)
    (shard,) = {part.data.nbytes for part in state.value.addressable_shards}
    state = call(state)
    live = len(jax.live_arrays())
    with compiles() as seen:
        for _ in range(4):
            old, state = state, call(state)
            assert old.value.is_deleted() == (donate == "states")
            del old
            assert len(jax.live_arrays()) <= live
    assert seen.times == 0
    equal(state.value, 5.0)
    explanation = assert_budget(call, state, moved=0)
    assert explanation.memory is not None
    assert explanation.memory.donated == (shard if donate == "states" else 0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_donation_is_one(kind: AxisType) -> None:
    """States, keys and packed states, with a mesh that is set or given."""
    mesh = make_mesh("8", kind)

    def step(model: Any, packed: Any, x: Any) -> Any:
        key, rng = model["rng"].split()
        new = {"w": one_more(model["w"]), "rng": rng, "keys": model["keys"].split()[1]}
        noise = jax.random.normal(key, x.shape)
        return new, jax.tree.map(lambda v: v + 1, packed), (x + noise).sum(keepdims=True)

    step, count = counted(step)
    model = {
        "w": sm.ParamState(np.ones((64, 64), np.float32)),
        "rng": sm.RandomState(jax.random.key(0)),
        "keys": sm.RandomState(jax.random.split(jax.random.key(1), 8), spec=sm.PerShard("x")),
    }
    packed = sm.pack([sm.State(np.ones((3, 3), np.float32)), sm.State(np.ones(5))], mesh)
    for given in (mesh, None):
        count.times = 0
        with jax.set_mesh(mesh):
            call = sm.shard_map(
                step, given, (None, None, P("x")), (P(), P(), P("x")), donate="states"
            )
            args = call.place(model, sm.pack(packed.unpack(), mesh), np.ones((8, 2), np.float32))
            held, buffers, _ = call(*args)
            with compiles() as seen:
                for _ in range(3):
                    old = jax.tree.leaves((held, buffers))
                    held, buffers, _ = call(held, buffers, args[2])
                    assert all(x.is_deleted() for x in old)
            assert count.times == 1 and seen.times == 0
            assert_budget(call, held, buffers, args[2], moved=0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_equivalent_layout_is_given_up_as_it_is(kind: AxisType) -> None:
    mesh = make_mesh("8", kind)
    line = Mesh(np.array(jax.devices()).reshape(1, 8), ("one", "x"), axis_types=(kind,) * 2)
    value = np.zeros((512, 512), np.float32)
    for where, specs in ((mesh, [P(), P(None), P(None, None)]), (line, [P(), P("one")])):
        call = sm.shard_map(one_more, where, (None,), P(), donate="states")
        for spec in specs:
            state = sm.ParamState(jax.device_put(value, on(where, spec)))
            assert call.explain(state).leaves[0].moved == 0
            equal(call(state).value, 1.0)
            assert state.value.is_deleted()
        keep = sm.shard_map(lambda s, w: s, where, (None, P()), P(), donate="all")
        state = sm.ParamState(jax.device_put(value, on(where, specs[-1])))
        assert keep(state, np.ones(2)).value is state.value


def test_explain_counts_what_is_copied_before_it_is_given_up() -> None:
    mesh = make_mesh("1")
    state = sm.State(jnp.zeros((4, 4)))
    cases: list[tuple[Any, int]] = [("none", 0), ("states", 64)]
    for donate, moved in cases:
        call = sm.shard_map(one_more, mesh, (None,), P(), donate=donate)
        assert call.explain(state).leaves[0].moved == moved
        call(state)
        # It lies on no mesh, so that its owner keeps it.
        equal(state.value, 0.0)


def test_lanes_on_devices_are_fed_back_whatever_axes_their_data_have() -> None:
    rows = jax.device_put(
        np.ones((8, 4), np.float32), on(make_mesh("8", AxisType.Explicit), P("x"))
    )
    call = sm.pmap2(
        lambda s, x: s.set(s.value + x), in_axes=(None, 0), state_in_axes=..., donate_argnums=0
    )
    (state, rows) = call.place(sm.State(np.zeros((8, 4), np.float32)), rows)
    state = call(state, rows)
    with compiles() as seen:
        for _ in range(3):
            old, state = state, call(state, rows)
            assert old.value.is_deleted()
    assert seen.times == 0
    assert_budget(call, state, rows, moved=0)
