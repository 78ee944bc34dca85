"""A call traces and compiles once for each signature. It adds no layer to an outer trace and no cost."""

import copy
import sys
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._call import _cache
from tests.helpers import compiles, counted, make_mesh, older_objects_frozen, without_names


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


class Model(sm.Module):
    w: sm.ParamState
    count: sm.State
    rng: sm.RandomState
    plain: jax.Array
    rate: float = 0.5


def make_model() -> Model:
    return Model(
        sm.ParamState(2.0),
        sm.State(0, reduce="sum"),
        sm.RandomState(jax.random.key(0)),
        jnp.asarray(1.0) * 3,
    )


def step(model: Model, x: jax.Array, scale: Any) -> tuple[jax.Array, Model]:
    key, rng = model.rng.split()
    y = x * model.w.value * scale + model.rate * jax.random.uniform(key)
    return y, model.replace(
        w=model.w.value * 0.5, count=model.count.value + 1, rng=rng, plain=model.plain * 2
    )


def test_the_unsharded_call_keeps_what_it_has_compiled() -> None:
    fun, count = counted(step)
    mapped = sm.shard_map(fun, make_mesh("8"), (P(), P("x"), P()), (P("x"), P()))
    model, x = make_model(), np.ones(8, np.float32)
    _, model = mapped.unsharded(model, x, 1.0)
    before = count.times
    with compiles() as seen:
        for _ in range(3):
            _, model = mapped.unsharded(model, x, 1.0)
    assert (count.times - before, seen.times) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [pytest.param("1", marks=pytest.mark.slow), "8", "4x2"])
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_ten_calls_trace_once(kind: str, name: str, how: str) -> None:
    fun, count = counted(step)
    mesh = make_mesh(name, KINDS[kind])
    rows = P(mesh.axis_names)
    mapped = sm.shard_map(fun, mesh, (P(), rows, P()), (rows, P()))
    call = mapped if how == "eager" else jax.jit(mapped, static_argnums=())
    model: Any = make_model()
    if how == "jit":
        # Static leaves cannot pass through jax.jit: only the arrays go in and come out.
        placed = mapped.place(model, np.ones(8, np.float32), 1.0)[0]
        arrays = jax.tree.leaves(placed)
        at = [i for i, leaf in enumerate(arrays) if isinstance(leaf, jax.Array)]

        @jax.jit
        def call(leaves: list[Any], x: Any, scale: Any) -> Any:
            filled = list(arrays)
            for i, leaf in zip(at, leaves, strict=True):
                filled[i] = leaf
            y, after = mapped(jax.tree.unflatten(jax.tree.structure(placed), filled), x, scale)
            return y, [jax.tree.leaves(after)[i] for i in at]

        model = [arrays[i] for i in at]
    x = np.ones(8, np.float32)
    y, model = call(model, x, 1.0)
    jax.block_until_ready(model)
    assert count.times == 1
    with compiles() as seen:
        for i in range(2, 11):
            y, model = call(model, x, float(i))
            jax.block_until_ready(model)
    assert count.times == 1
    assert seen.times == 0
    call(model, np.ones(16, np.float32), 1.0)
    assert count.times == 2


def test_weak_and_strong_states_are_one_signature() -> None:
    fun, count = counted(lambda s, x: (x, s.set(s.value * x[0])))
    call = sm.shard_map(fun, make_mesh(), (P(), P()), (P(), P()))
    state = sm.State(1.0).replace()
    weak = jax.tree.map(lambda v: jnp.asarray(1.0) * 2, state)
    assert weak.value.weak_type
    _, state = call(weak, jnp.ones(2))
    for _ in range(3):
        _, state = call(state, jnp.ones(2))
    assert count.times == 1


class Scaled(sm.Module):
    scale: jax.Array
    state: sm.State


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("jit", [True, False])
def test_the_dtype_of_an_array_does_not_depend_on_where_others_lie(kind: str, jit: bool) -> None:
    mesh = make_mesh("8", KINDS[kind])
    where = NamedSharding(mesh, P())
    host = np.ones(8, jnp.bfloat16)
    elsewhere = [host, jnp.asarray(host), jax.device_put(host, where)]
    for weak in (jnp.asarray(2.0), jax.device_put(jnp.asarray(2.0), where)):
        assert weak.weak_type
        model = Scaled(weak, jax.tree.map(lambda v, weak=weak: weak, sm.State(1.0)))
        for x in elsewhere:
            fun, count = counted(lambda m, x: (m.scale * x, m.state.value * x, m))
            mapped = sm.shard_map(fun, mesh, (None, P()), P(), jit=jit)
            *products, after = mapped(model, x)
            assert {y.dtype for y in products} == {np.dtype(np.float32)}
            if jit:
                mapped(after, x)
                assert count.times == 1
            traced = jax.jit(lambda m, x, mapped=mapped: mapped(m, x)[:2])(model, host)
            assert {y.dtype for y in traced} == {np.dtype(np.float32)}
            assert not any(y.weak_type for y in jax.tree.leaves(mapped.place(model, x)))


@pytest.mark.parametrize("transform", [sm.vmap2, sm.pmap2])
def test_nor_does_it_depend_on_a_trace(transform: Any) -> None:
    mapped = transform(lambda m, x: (m.scale * x, m.state.value * x), in_axes=(None, 0))
    state = jax.tree.map(lambda v: jnp.asarray(2.0), sm.State(1.0))
    model, x = Scaled(jnp.asarray(2.0), state), np.ones(8, jnp.bfloat16)
    for call in (mapped, jax.jit(mapped)):
        assert {y.dtype for y in call(model, x)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["1", "8"])
def test_untouched_states_are_the_arrays_that_went_in(kind: str, name: str) -> None:
    mesh = make_mesh(name, KINDS[kind])

    def reads(read: sm.State, rng: sm.RandomState, own: sm.State, x: jax.Array) -> Any:
        return x * read.value, read, rng, own

    call = sm.shard_map(reads, mesh, (P(), P(), P(), P("x")), (P("x"), P(), P(), P()))
    args = (
        sm.State(jnp.arange(3.0)),
        sm.RandomState(jax.random.key(0)),
        sm.State(jnp.zeros(len(mesh.devices)), spec=sm.PerShard("x")),
        np.ones((8, 3), np.float32),
    )
    placed = call.place(*args)
    _, *after = call(*placed)
    for new, old in zip(after, placed, strict=False):
        assert new.value is old.value
    (output,) = jax.tree.leaves(call.lower(*args).program.out_info)
    assert output.shape == (8, 3)


def test_untouched_array_under_its_own_spec() -> None:
    mesh = make_mesh()
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("x")))
    call = sm.shard_map(lambda x, y: (x, y + 1), mesh, (P("x"), P("x")), (P("x"), P("x")))
    same, _ = call(x, x)
    assert same is x


def test_array_that_lies_right_by_another_name_is_not_touched() -> None:
    mesh = make_mesh()
    x = jax.device_put(np.ones((8, 1), np.float32), NamedSharding(mesh, P("x", None)))
    call = sm.shard_map(lambda s, y: (s, y + 1), mesh, (P(), P("x")), (P(), P("x")))
    state, _ = call(sm.State(x, spec=P("x")), np.ones(8))
    assert state.value is x
    with compiles() as seen:
        call(state, np.ones(8))
    assert seen.times == 0


def test_no_layer_under_an_outer_trace() -> None:
    mesh = make_mesh()

    def fun(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * 2

    mine = sm.shard_map(fun, mesh, P("x"), P("x"))
    theirs = jax.shard_map(fun, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x = jnp.arange(8.0)

    def same(wrap: Any) -> None:
        ours, bare = jax.make_jaxpr(wrap(mine))(x), jax.make_jaxpr(wrap(theirs))(x)
        assert str(ours) == str(bare)

    same(lambda f: f)
    same(jax.jit)
    same(lambda f: jax.grad(lambda x: f(x).sum()))
    same(lambda f: jax.vmap(lambda i: f(x * i)))
    same(lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])


def test_eager_grad_is_compiled_once() -> None:
    fun, count = counted(lambda w, x: (x * w.value, w))
    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), (P("x"), P()))
    slope = jax.grad(lambda w: call(w, np.ones(8, np.float32))[0].sum())
    slope(sm.State(2.0))
    with compiles() as seen:
        assert float(slope(sm.State(3.0)).value) == 8.0
    assert count.times == 1
    assert seen.times == 0


def programs() -> dict[str, Any]:
    """A mapped function over states, the same by hand over arrays, and their arguments."""
    n = 100

    def buffers(b: sm.State, x: jax.Array) -> Any:
        return jnp.tanh(x) * 2, b.set(b.value + x)

    def by_hand_buffers(b: jax.Array, x: jax.Array) -> Any:
        return jnp.tanh(x) * 2, b + x

    def train(w: sm.State, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean((x @ w) ** 2)

        value, slope = jax.value_and_grad(loss)(jax.lax.pcast(w.value, "x", to="varying"))
        return jax.lax.pmean(value, "x"), w.set(w.value - 0.1 * jax.lax.pmean(slope, "x"))

    def by_hand_train(w: jax.Array, x: jax.Array) -> Any:
        loss, after = train(sm.State(w), x)
        return loss, after.value

    def many(states: list[sm.State], x: jax.Array) -> Any:
        return x * 2, [s.set(s.value + x) for s in states]

    def by_hand_many(*arrays: jax.Array) -> Any:
        *states, x = arrays
        return (x * 2, *(s + x for s in states))

    x = np.ones((16, 4), np.float32)
    return {
        "buffers": (
            buffers, (sm.State(x, spec=P("x")), x), (P("x"), P()),
            by_hand_buffers, (x, x), (P("x"), P("x")), (P("x"), P("x")),
        ),
        "train": (
            train, (sm.State(np.ones(4, np.float32)), x), (P(), P()),
            by_hand_train, (np.ones(4, np.float32), x), (P(), P("x")), (P(), P()),
        ),
        "many": (
            many, ([sm.State(x, spec=P("x")) for _ in range(n)], x), (P("x"), P()),
            by_hand_many, (x,) * (n + 1), (P("x"),) * (n + 1), (P("x"),) * (n + 1),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["buffers", "train", "many"])
def test_compiled_program_is_the_hand_written_one(name: str, kind: str) -> None:
    mesh = make_mesh("8", KINDS[kind])
    fun, args, out_specs, hand, arrays, in_specs, hand_out = programs()[name]
    mine = sm.shard_map(fun, mesh, (P(), P("x")), out_specs).lower(*args).compile().as_text()
    placed = [
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, in_specs, strict=True)
    ]
    by_hand = jax.jit(jax.shard_map(hand, mesh=mesh, in_specs=in_specs, out_specs=hand_out))
    theirs = by_hand.lower(*placed).compile().as_text()
    assert without_names(mine) == without_names(theirs)


def test_different_statics_are_different_programs() -> None:
    fun, count = counted(lambda m, x: x * m.rate)
    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), P("x"))
    x = np.ones(8, np.float32)

    class Rated(sm.Module):
        rate: Any

    for rate in (0.0, -0.0, 1, 1.0, True, 2.0, 1.0):
        expected = np.ones(8, np.float32) * rate
        np.testing.assert_array_equal(call(Rated(rate), x), expected)
        assert np.signbit(np.asarray(call(Rated(rate), x))[0]) == np.signbit(expected[0])
    assert count.times == 6


def test_two_threads_on_one_model() -> None:
    call = sm.shard_map(
        lambda m, x: (x * m.w.value, m.replace(w=m.w.value + x[0])),
        make_mesh(),
        (P(), P("x")),
        (P("x"), P()),
        state_out_specs=P(),
        check_vma=False,
    )
    model, wrong = make_model(), []

    def work(k: int) -> None:
        for _ in range(20):
            y, after = call(model, np.full(8 * k, k, np.float32))
            jax.block_until_ready((y, after))
            if float(y[0]) != 2.0 * k or float(after.w.value) != 2.0 + k:
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert float(model.w.value) == 2.0


def test_jit_false_runs_the_body_at_every_call() -> None:
    fun, count = counted(lambda s, x: (x + s.value, s.set(s.value + 1)))
    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), (P("x"), P()), jit=False)
    state = sm.State(0.0)
    for _ in range(3):
        y, state = call(state, np.zeros(8, np.float32))
    assert count.times == 3
    assert float(state.value) == 3.0


def test_mesh_of_the_context_may_change() -> None:
    fun, count = counted(lambda s, x: (x * s.value, s))
    call = sm.shard_map(fun, None, (P(), P("x")), (P("x"), P()))
    for name in ("8", "2", "8"):
        mesh = make_mesh(name, AxisType.Explicit)
        with jax.set_mesh(mesh):
            y, _ = call(sm.State(3.0), np.ones(8, np.float32))
            assert y.sharding.mesh == mesh
    assert count.times == 2


@older_objects_frozen()
def test_mesh_is_kept_alive_by_nothing_of_the_first_call() -> None:
    import gc
    import weakref

    call = sm.shard_map(
        lambda s, x: (x * s.value, s.set(s.value + 1)), make_mesh(), (P(), P()), (P(), P())
    )
    state = sm.State(jnp.ones(3))
    array = weakref.ref(state.value)
    call(state, np.ones(3, np.float32))
    del state
    gc.collect()
    assert array() is None


def test_other_threads_at_every_step_of_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    # Between any two steps of finding and keeping programs, another thread keeps one more program.
    monkeypatch.setattr(_cache, "_KEPT", 20)
    mapped = sm.shard_map(lambda x, label: x, make_mesh(), (P("x"), None), P("x"))
    x = np.ones(8, np.float32)
    mapped(x, "one")
    pipeline = mapped._pipeline
    cache = pipeline._cache
    (alike,) = cache._entries.values()
    known = pipeline._last
    assert known is not None
    others = 0
    watched = "find", "keep", "make_room"

    def other(frame: types.FrameType, event: str, argument: Any) -> Any:
        nonlocal others
        code = frame.f_code
        if code.co_filename != _cache.__file__ or code.co_name not in watched:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            others += 1
            entry = copy.copy(known)
            entry.tokens = (f"other {others}",)
            keep(entry)
        return other

    keep = cache.keep
    # Python 3.12 reports opcodes only if a frame wanted them before the tracing began.
    # https://github.com/python/cpython/issues/114480
    sys._getframe().f_trace_opcodes = True
    sys.settrace(other)
    try:
        for label in ("two", "one"):
            mapped(x, label)
    finally:
        sys.settrace(None)
    assert others > 40
    mapped(x, "three")
    assert len(alike) == 20


def test_programs_in_use_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "_KEPT", 3)
    fun, count = counted(lambda x, label: x)
    mapped = sm.shard_map(fun, make_mesh(), (P("x"), None), P("x"))
    x = np.ones(8, np.float32)
    for label in ("one", "two", "three", *["two", "three"] * 3, "one", "four", "one", "three"):
        mapped(x, label)
    assert count.times == 4


WAYS: dict[str, Any] = {
    "checked": lambda fun, mesh: sm.shard_map(fun, mesh, (P(), P("x")), (P("x"), P())),
    "unchecked": lambda fun, mesh: sm.shard_map(
        fun, mesh, (P(), P("x")), (P("x"), P()), check_vma=False
    ),
    "pmap2": lambda fun, mesh: sm.pmap2(fun, "x", in_axes=(None, 0), out_axes=(0, None)),
    "vmap2": lambda fun, mesh: sm.vmap2(fun, axis_name="x", in_axes=(None, 0), out_axes=(0, None)),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_tracer_is_kept(way: str) -> None:
    def train(model: Model, x: jax.Array) -> tuple[jax.Array, Model]:
        def loss(model: Model) -> tuple[jax.Array, Model]:
            key, rng = model.rng.split()
            y = model.w.value * jax.random.uniform(key) * x.sum()
            return y, model.replace(count=model.count.value + 1, rng=rng)

        (_, model), grads = sm.value_and_grad(loss, axis_name="x")(model)
        (model,) = jax.lax.scan(
            lambda m, _: ((m[0].replace(w=m[0].w.value + 1),), 0), (model,), length=2
        )[0]
        return x * grads.w.value, model

    x = np.ones(8, np.float32)
    with older_objects_frozen(), jax.checking_leaks():
        _, model = WAYS[way](train, make_mesh())(make_model(), x)
    assert (float(model.w.value), int(model.count.value)) == (4, 1)
