"""A call traces and compiles once for each signature. It adds no layer to an outer trace and no cost."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_calls_trace_once(kind: str) -> None:
    fun, count = counted(step)
    mesh = make_mesh("4x2", KINDS[kind])
    rows = P(mesh.axis_names)
    mapped = sm.shard_map(fun, mesh, (P(), rows, P()), (rows, P()))
    model, x = make_model(), np.ones(8, np.float32)
    _, model = mapped(model, x, 1.0)
    assert count.times == 1
    with compiles() as seen:
        for i in range(2, 11):
            _, model = mapped(model, x, float(i))
            jax.block_until_ready(model)
    assert (count.times, seen.times) == (1, 0)
    mapped(model, np.ones(16, np.float32), 1.0)
    assert count.times == 2
    # The unsharded call keeps what it has compiled, too.
    _, model = mapped.unsharded(model, x, 1.0)
    before = count.times
    with compiles() as seen:
        for _ in range(3):
            _, model = mapped.unsharded(model, x, 1.0)
    assert (count.times - before, seen.times) == (0, 0)


class Scaled(sm.Module):
    scale: jax.Array
    state: sm.State


def test_the_dtype_of_an_array_does_not_depend_on_where_others_lie() -> None:
    mesh = make_mesh("8", AxisType.Explicit)
    on_mesh = NamedSharding(mesh, P())
    host = np.ones(8, jnp.bfloat16)
    for weak in (jnp.asarray(2.0), jax.device_put(jnp.asarray(2.0), on_mesh)):
        assert weak.weak_type
        model = Scaled(weak, jax.tree.map(lambda v, weak=weak: weak, sm.State(1.0)))
        for x in (host, jnp.asarray(host), jax.device_put(host, on_mesh)):
            fun, count = counted(lambda m, x: (m.scale * x, m.state.value * x, m))
            mapped = sm.shard_map(fun, mesh, (None, P()), P())
            *products, after = mapped(model, x)
            assert {y.dtype for y in products} == {np.dtype(np.float32)}
            mapped(after, x)
            assert count.times == 1
            assert not any(y.weak_type for y in jax.tree.leaves(mapped.place(model, x)))
        traced = jax.jit(lambda m, x, mapped=mapped: mapped(m, x)[:2])(model, host)
        assert {y.dtype for y in traced} == {np.dtype(np.float32)}


@pytest.mark.parametrize("transform", [sm.vmap2, sm.pmap2])
def test_nor_does_it_depend_on_a_trace(transform: Any) -> None:
    mapped = transform(lambda m, x: (m.scale * x, m.state.value * x), in_axes=(None, 0))
    state = jax.tree.map(lambda v: jnp.asarray(2.0), sm.State(1.0))
    model, x = Scaled(jnp.asarray(2.0), state), np.ones(8, jnp.bfloat16)
    for call in (mapped, jax.jit(mapped)):
        assert {y.dtype for y in call(model, x)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_untouched_is_the_array_that_went_in(kind: str) -> None:
    mesh = make_mesh("8", KINDS[kind])

    def reads(read: sm.State, rng: sm.RandomState, own: sm.State, x: jax.Array, y: Any) -> Any:
        return y * read.value, read, rng, own, x

    specs = (P(), P(), P(), P("x"), P("x"))
    call = sm.shard_map(reads, mesh, specs, (P("x"), P(), P(), P(), P("x")))
    placed = call.place(
        sm.State(jnp.arange(3.0)),
        sm.RandomState(jax.random.key(0)),
        sm.State(jnp.zeros(len(mesh.devices)), spec=sm.PerShard("x")),
        np.ones(8, np.float32),
        np.ones((8, 3), np.float32),
    )
    after = call(*placed)[1:]
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(placed[:4]), strict=True):
        assert new is old
    # Nor is it an output of the program.
    (output,) = jax.tree.leaves(call.lower(*placed).program.out_info)
    assert output.shape == (8, 3)


def test_eager_grad_is_compiled_once() -> None:
    fun, count = counted(lambda w, x: (x * w.value, w))
    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), (P("x"), P()))
    slope = jax.grad(lambda w: call(w, np.ones(8, np.float32))[0].sum())
    slope(sm.State(2.0))
    with compiles() as seen:
        assert float(slope(sm.State(3.0)).value) == 8.0
    assert count.times == 1
    assert seen.times == 0


def train(w: sm.State, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((x @ w) ** 2)

    value, slope = jax.value_and_grad(loss)(jax.lax.pcast(w.value, "x", to="varying"))
    return jax.lax.pmean(value, "x"), w.set(w.value - 0.1 * jax.lax.pmean(slope, "x"))


def many(states: list[sm.State], x: jax.Array) -> Any:
    return x * 2, [s.set(s.value + x) for s in states]


def train_by_hand(w: jax.Array, x: jax.Array) -> Any:
    loss, after = train(sm.State(w), x)
    return loss, after.value


A = np.ones((16, 4), np.float32)
W = np.ones(4, np.float32)
SPLIT = P("x")
# A mapped function, its states, the spec of its result; the same by hand, its arrays, specs in and out.
PROGRAMS: dict[str, tuple[Any, ...]] = {
    "train": (
        *(train, sm.State(W), P()),
        *(train_by_hand, [W], [P(), SPLIT], (P(), P())),
    ),
    "many": (
        *(many, [sm.State(A, spec=SPLIT) for _ in range(100)], SPLIT),
        lambda *arrays: (arrays[-1] * 2, *(s + arrays[-1] for s in arrays[:-1])),
        *([A] * 100, [SPLIT] * 101, (SPLIT,) * 101),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_program_is_the_hand_written_one(name: str, kind: str) -> None:
    mesh = make_mesh("8", KINDS[kind])
    fun, states, out_spec, hand, arrays, in_specs, hand_out = PROGRAMS[name]
    mine = sm.shard_map(fun, mesh, (None, SPLIT), (out_spec, P())).lower(states, A).compile()
    placed = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip([*arrays, A], in_specs, strict=True)
    ]
    by_hand = jax.jit(jax.shard_map(hand, mesh=mesh, in_specs=tuple(in_specs), out_specs=hand_out))
    theirs = by_hand.lower(*placed).compile()
    assert without_names(mine.as_text()) == without_names(theirs.as_text())


@older_objects_frozen()
def test_no_array_of_a_call_is_kept_alive() -> None:
    call = sm.shard_map(
        lambda s, x: (x * s.value, s.set(s.value + 1)), make_mesh(), (P(), P()), (P(), P())
    )
    state = sm.State(jnp.ones(3))
    array = weakref.ref(state.value)
    call(state, np.ones(3, np.float32))
    del state
    gc.collect()
    assert array() is None


class Label(sm.Module):
    number: int = sm.field(static=True)


@pytest.mark.slow
def test_threads_with_programs_of_their_own_and_one_that_all_use() -> None:
    fun, count = counted(lambda x, label: x * label.number)
    mapped = sm.vmap2(fun, in_axes=(0, None))
    x = jnp.ones(2)
    mapped(x, Label(-1))

    def work(first: int) -> None:
        for number in range(first, first + 10):
            for label in (number, -1):
                assert mapped(x, Label(label))[0] == label

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 10)))
    assert count.times == 21
