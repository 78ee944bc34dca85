"""Memory: no shared buffer is donated twice, no array that the caller holds is lost, and no result shares
memory that somebody fills again."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import assert_budget
from tests.helpers import compiles, make_mesh


pytestmark = pytest.mark.usefixtures("each_kind")


jnp: Any = jax.numpy

X = np.arange(8.0).astype(np.float32)
WHOLE = P()


def equal(x: Any, y: Any) -> None:
    np.testing.assert_array_equal(x, y)


def memory(x: jax.Array) -> set[int]:
    return {part.data.unsafe_buffer_pointer() for part in x.addressable_shards}


def shared(x: jax.Array, y: jax.Array) -> bool:
    return not memory(x).isdisjoint(memory(y))


def on(mesh: Mesh, spec: P = WHOLE) -> NamedSharding:
    return NamedSharding(mesh, spec)


def view(x: jax.Array) -> jax.Array:
    """Another array of the same memory."""
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def aligned(size: int) -> np.ndarray:
    """A NumPy array whose memory JAX uses for its own array on a CPU."""
    held = np.zeros(size * 4 + 64, np.uint8)
    start = -held.ctypes.data % 64
    whole: np.ndarray = held[start : start + size * 4].view(np.float32)
    return whole


def one_more(state: Any) -> Any:
    return state.set(state.value + 1)


# States that share memory. If a buffer is donated twice, JAX 0.10 ends the process.


def two_states(m: Any, x: Any) -> Any:
    return {"a": m["a"].set(m["a"].value + x.sum()), "b": m["b"].set(m["b"].value - x.sum())}


def first_of_two(m: Any, x: Any) -> Any:
    return {"a": m["a"].set(m["a"].value + x.sum()), "b": m["b"]}


def twice(x: Any, there: Any) -> Any:
    y = jax.device_put(x, there)
    return y, y


# How one array gets into two states.
SHARING: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "one array": twice,
    "the caller's": lambda x, there: (x, x),
    "a view": lambda x, there: (jax.device_put(x, there), view(jax.device_put(x, there))),
}


@pytest.mark.parametrize("donate", ["states", "all"])
@pytest.mark.parametrize("spec", [P(), P("x")], ids=str)
def test_states_that_share_memory_may_be_donated(spec: P, donate: Any) -> None:
    mesh = make_mesh()
    for fun, b_after in ((first_of_two, 1.0), (two_states, -83.0)):
        call = sm.shard_map(fun, mesh, (None, P()), P(), donate=donate, state_in_specs=spec)
        for how, make in SHARING.items():
            z, x = jnp.ones(8), jnp.arange(8.0)
            a, b = make(z, on(mesh, spec))
            after = call({"a": sm.State(a), "b": sm.State(b)}, x)
            if fun is first_of_two:
                assert after["b"].value is b or how == "the caller's"
                equal(b, np.ones(8))
            if how == "the caller's":
                equal(z, np.ones(8))
            for _ in range(2):
                after = call(after, jnp.arange(8.0))
            equal(after["a"].value, np.full(8, 85.0))
            equal(after["b"].value, np.full(8, b_after))


def test_memory_shared_with_arrays_keys_and_packed_models() -> None:
    mesh = make_mesh()
    # A state and an array, over lanes on devices.
    lanes = sm.pmap2(
        lambda a, b, x: (a.set(a.value + x), b), donate_argnums=(0, 1), state_in_axes=..., in_axes=0
    )
    a = lanes.place(sm.State(jnp.ones(8)), jnp.ones(8), np.ones(8))[0]
    after, b = lanes(a, a.value, np.ones(8))
    equal(after.value, np.full(8, 2.0))
    equal(b, np.ones(8))
    # In a call that was compiled ahead, and of packed models.
    call = sm.shard_map(two_states, mesh, (None, P()), P(), donate="states")
    a, b = twice(jnp.ones(8), on(mesh))
    m = {"a": sm.State(a), "b": sm.State(b)}
    after = call.lower(m, jnp.ones(8)).compile()(m, jnp.ones(8))
    equal(after["a"].value, np.full(8, 9.0))
    equal(after["b"].value, np.full(8, -7.0))
    packed = sm.pack({"a": sm.State(X), "b": sm.State(X)}, mesh)
    both: Any = lambda p, q, x: (first_of_two(p, x), first_of_two(q, x))
    call = sm.shard_map(both, mesh, (None, None, P()), P(), donate="states")
    for new in call(packed, packed, jnp.ones(8)):
        equal(new.unpack()["a"].value, X + 8)
    # A key and its data.
    key = jax.device_put(jax.random.key(0), on(mesh))
    m = {"key": sm.RandomState(key), "data": sm.State(jax.random.key_data(key))}
    draw = lambda m: {"key": m["key"].split()[1], "data": m["data"]}
    after = sm.shard_map(draw, mesh, (None,), P(), donate="states")(m)
    for data in (after["data"].value, m["data"].value):
        equal(data, jax.random.key_data(jax.random.key(0)))


def test_what_is_fed_back_in_any_order_and_views_of_it() -> None:
    mesh = make_mesh()
    call = sm.shard_map(two_states, mesh, (None, P()), P(), donate="states")
    x = jax.device_put(np.ones(8, np.float32), on(mesh))
    m = call({"a": sm.State(X), "b": sm.State(X)}, x)
    for _ in range(3):
        m = call({"a": m["b"], "b": m["a"]}, x)
    equal(m["a"].value + m["b"].value, 2 * X)
    keep = sm.shard_map(
        lambda a, x: (one_more(a), x), mesh, (P(), P()), (P(), P()), donate="states"
    )
    state = keep(keep(sm.State(X), x)[0], x)[0]
    # A program made this array, and another array is a view of it.
    other = view(state.value)
    after, same = keep(state, other)
    assert same is other
    equal(other, X + 2)
    equal(after.value, X + 3)


# Arguments that had to be moved


def moving_calls() -> dict[str, Any]:
    def fun(s: Any, x: Any) -> Any:
        return one_more(s), x * 2

    specs: Any = ((P(), P()), P())
    split: Any = ((P("y"), P("x")), P("x"))
    return {
        "states": sm.shard_map(fun, make_mesh(), *specs, donate="states"),
        "two axes": sm.shard_map(
            fun, make_mesh("2x2"), *split, donate="all", state_in_specs=P("y")
        ),
        "pmap2": sm.pmap2(fun, donate_argnums=(0, 1), in_axes=None, out_axes=None, axis_size=8),
    }


@pytest.mark.parametrize("name", ["states", "two axes", "pmap2"])
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


def test_what_lies_right_is_spared_only_where_something_shares_it() -> None:
    call = sm.shard_map(
        lambda s, x: (s.set(s.value + x), x), make_mesh(), (P(), P()), P(), donate="states"
    )
    value = jax.device_put(X, on(make_mesh()))
    part = value.addressable_data(0)
    after, same = call(sm.State(value), part)
    for x, y in ((after.value, 2 * X), (part, X), (same, X)):
        equal(x, y)
    # What a call moved and gave back may be donated.
    x = jnp.asarray(X)
    keep = sm.shard_map(lambda s: s, make_mesh(), P(), P())
    give = sm.shard_map(one_more, make_mesh(), P(), P(), donate="states")
    for state in (keep(sm.State(x)), sm.place(sm.State(x), make_mesh()), *keep.place(sm.State(x))):
        equal(give(state).value, X + 1)
        assert state.value.is_deleted()
        equal(x, X)


# Arrays outside a State that come back as they went in


def through(mesh: Mesh, spec: P = WHOLE) -> Any:
    return sm.shard_map(lambda w, x: (w, x), mesh, (spec, P("x")), (spec, P("x")))


def through_lanes() -> Any:
    return sm.pmap2(lambda w, x: (w, x), in_axes=(None, 0), out_axes=(None, 0))


@pytest.mark.parametrize("make", [lambda: through(make_mesh()), through_lanes])
def test_an_untouched_array_that_was_moved_is_one_of_its_own(make: Any) -> None:
    call = make()
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
    # An array of NumPy may be filled anew. No computation may still read the memory that is filled.
    host = aligned(8)
    host[:] = 1
    results = [call(host, host), call.place(host, host)]
    results.append(sm.place([host, sm.State(host)], make_mesh()))
    host[:] = 2
    for y in jax.tree.leaves(results):
        equal(y, np.ones(8))


def test_an_untouched_array_has_the_layout_of_its_out_spec() -> None:
    mesh, one = make_mesh(), make_mesh("1", AxisType.Auto)
    for spec in (P(), P("x")):
        for given in (X, jnp.asarray(X), jax.device_put(X, jax.devices()[0])):
            kept, _ = through(mesh, spec)(given, X)
            assert kept.sharding.is_equivalent_to(on(mesh, spec), 1)
    # An array that had the same layout under another spec gets the spec of the result.
    mine = jax.device_put(X, on(one, P("x")))
    kept, _ = through(one)(mine, X)
    assert kept.sharding == on(one)
    assert through(one, P("x"))(mine, X)[0] is mine
    # A state is the very array under another name.
    call = sm.shard_map(lambda s, w: (s, w), one, P(), P())
    x = jnp.asarray(X)
    state, w = call(sm.State(x), x)
    assert state.value is x
    assert w is not x and w.sharding == on(one)


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


# What is fed back


def feeding(donate: Any) -> dict[str, tuple[Any, sm.State]]:
    """Calls on many meshes, each with a state of 256 KiB to 4 MiB."""

    def call(mesh: Mesh, shape: tuple[int, ...], spec: Any = None) -> Any:
        state = sm.ParamState(np.zeros(shape, np.float32), spec=spec)
        return sm.shard_map(one_more, mesh, (None,), P(), donate=donate), state

    one, eight, two = make_mesh("1"), make_mesh("8"), make_mesh("4x2")
    line = Mesh(np.array(jax.devices()).reshape(1, 8), ("one", "x"), axis_types=two.axis_types)
    square = (512, 512)
    return {
        "replicated": call(eight, square),
        "a tuple of axes": call(two, square, P(("x", "y"))),
        "the last dimension": call(two, square, P(None, "y")),
        "per shard": call(eight, (8, 256, 256), sm.PerShard("x")),
        "split on one device": call(one, (256, 256), P("x")),
        "an axis of one device": call(line, square, P("one")),
    }


def test_what_lies_right_by_any_name_is_given_up_and_what_lies_on_no_mesh_is_copied() -> None:
    call = sm.shard_map(one_more, make_mesh(), (None,), P(), donate="states")
    for spec in (P(), P(None), P(None, None)):
        state = sm.State(jax.device_put(np.zeros((4, 4), np.float32), on(make_mesh(), spec)))
        assert call.explain(state).leaves[0].moved == 0
        equal(call(state).value, 1.0)
        assert state.value.is_deleted()
    # Its owner keeps it, also on one device.
    plain = sm.State(jnp.zeros((4, 4)))
    cases: list[tuple[Any, int]] = [("none", 0), ("states", 64)]
    for donate, moved in cases:
        call = sm.shard_map(one_more, make_mesh("1"), (None,), P(), donate=donate)
        assert call.explain(plain).leaves[0].moved == moved
        call(plain)
        equal(plain.value, 0.0)


@pytest.mark.parametrize("donate", ["none", "states"])
def test_what_is_fed_back_is_never_copied(donate: Any) -> None:
    for name, (call, state) in feeding(donate).items():
        (state,) = call.place(state)
        (shard,) = {part.data.nbytes for part in state.value.addressable_shards}
        state = call(state)
        live = len(jax.live_arrays())
        with compiles() as seen:
            for _ in range(4):
                old, state = state, call(state)
                assert old.value.is_deleted() == (donate == "states"), name
                del old
                assert len(jax.live_arrays()) <= live, name
        assert seen.times == 0, name
        equal(state.value, 5.0)
        explanation = assert_budget(call, state, moved=0)
        assert explanation.memory is not None
        assert explanation.memory.donated == (shard if donate == "states" else 0), name
