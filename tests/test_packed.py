"""`pack`: a model in few arrays, which every call takes and gives back."""

import re
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_same, compiles, counted, make_mesh, slow


pytestmark = pytest.mark.usefixtures("each_kind")


jnp: Any = jax.numpy
KINDS = [(AxisType.Auto,), (AxisType.Explicit,), (AxisType.Auto, AxisType.Explicit)]
X = np.arange(8, dtype=np.float32)


def moments(old: Any, new: Any, axis_names: Any) -> Any:
    return old + jax.lax.pmax(new, axis_names)


class Net(sm.Module):
    w: sm.ParamState
    rows: sm.State
    both: sm.State
    mean: sm.BatchState
    most: sm.State
    count: sm.State
    local: sm.State
    half: sm.State
    rng: sm.RandomState
    plain: Any
    act: Any = sm.field(static=True, default=np.tanh)


def make_net() -> Net:
    ordered = {"u": P(("y", "x")), "v": P()}
    return Net(
        w=sm.ParamState(np.arange(8, dtype=np.float32).reshape(4, 2), spec=P(None, "y")),
        rows=sm.State(np.arange(16, dtype=np.float32).reshape(2, 8), spec=P("y", "x")),
        both=sm.State({"u": np.arange(8, dtype=np.int32), "v": np.float32(2)}, spec=ordered),
        mean=sm.BatchState(np.float32(3), reduce="mean"),
        most=sm.State(np.float32(1), reduce=moments),
        count=sm.State(0, reduce="sum"),
        local=sm.State(np.arange(4, dtype=np.int32), spec=sm.PerShard("x")),
        half=sm.State(np.ones(3, np.float16)),
        rng=sm.RandomState(jax.random.key(1)),
        plain=jnp.arange(3.0),
    )


def step(net: Net, x: Any) -> Any:
    keys, rng = net.rng.rows(len(x), "x")
    noise = jax.vmap(jax.random.uniform)(keys)
    u, v = net.both.value["u"], net.both.value["v"]
    return x + noise, net.replace(
        w=net.w.value * 2,
        rows=net.rows.value + 1,
        both={"u": u * 3, "v": v},
        mean=net.mean.value + x.mean(),
        most=x.max(),
        count=net.count.value + (x > 2).sum(),
        local=net.local.value + jax.lax.axis_index("x"),
        rng=rng,
        plain=net.plain + 1,
    )


def mapped(**options: Any) -> Any:
    mesh = make_mesh("4x2")
    return sm.shard_map(step, mesh, (None, P("x")), (P("x"), P()), **options)


def packed_net() -> sm.Packed:
    return sm.pack(make_net(), make_mesh("4x2"))


def test_there_is_one_buffer_for_each_dtype_and_set_of_mesh_axes() -> None:
    packed = packed_net()
    assert_same(packed.unpack(), make_net())
    laid = {(str(b.dtype), b.sharding.spec): b.shape for b in packed.buffers}
    assert laid == {
        ("float32", P("y")): (8,),
        ("float32", P(("x", "y"))): (16,),
        ("float32", P()): (3,),
        ("int32", P(("x", "y"))): (8,),
        ("int32", P()): (1,),
        ("int32", P("x")): (4,),
        ("float16", P()): (3,),
    }
    assert set(packed.rest) == {"rng", "plain"}
    assert repr(packed) == "Packed(8 states in 7 arrays, 2 not packed)"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, slow({"check_vma": False, "donate": "states"})], ids=str)
def test_calls_give_what_they_give_unpacked(options: Any) -> None:
    fun, count = counted(step)
    mesh = make_mesh("4x2")
    specs = (None, P("x")), (P("x"), P())
    call = sm.shard_map(fun, mesh, *specs, **options)
    plain, packed = sm.place(make_net(), mesh), packed_net()
    for k in range(3):
        y, plain = mapped(**options)(plain, X + k)
        before, (z, packed) = packed, call(packed, X + k)
        np.testing.assert_array_equal(y, z)
        assert isinstance(packed, sm.Packed)
        assert_same(packed.unpack(), plain)
        if options:
            # A buffer in which nothing was written is the one that went in.
            half = [str(b.dtype) for b in packed.buffers].index("float16")
            assert packed.buffers[half] is before.buffers[half]
            assert [b.is_deleted() for b in before.buffers] == [i != half for i in range(7)]
    with compiles() as seen:
        _, packed = call(packed, X)
        call(packed_net(), X)
    assert (count.times, seen.times) == (1, 0)


@pytest.mark.slow
def test_inside_jit_and_in_a_scan() -> None:
    call = mapped()
    first = jax.jit(lambda packed: call(packed, X)[1])(packed_net())
    assert_same(first.unpack(), call(make_net(), X)[1])

    def body(packed: Any, x: Any) -> Any:
        y, packed = call(packed, x)
        return packed, y

    start = jax.tree.map(jnp.asarray, packed_net())
    last, ys = jax.lax.scan(body, start, np.stack([X, X + 1]))
    plain = make_net()
    for x, y in zip([X, X + 1], ys, strict=True):
        out, plain = call(plain, x)
        np.testing.assert_array_equal(out, y)
    assert_same(last.unpack(), plain)


def trained_net() -> Any:
    """Parameters and other states of one dtype, whole and split, and a state that is only partly trained."""
    return {
        "w": sm.ParamState(np.arange(1, 3, dtype=np.float32), tag="first"),
        "v": sm.ParamState(
            {"a": np.ones((8, 2), np.float32), "n": np.int32(3)}, spec={"a": P("x"), "n": P()}
        ),
        "mean": sm.BatchState(np.arange(5, 7, dtype=np.float32)),
        "rows": sm.State(np.arange(8, dtype=np.float32), spec=P("x")),
        "count": sm.State(0, reduce="sum"),
        "plain": jnp.ones(3),
        "rng": sm.RandomState(jax.random.key(0)),
        "act": np.tanh,
    }


def loss_of(net: Any, x: Any) -> Any:
    w = net["w"].value.sum() * net["plain"].sum() + jax.lax.psum(net["v"].value["a"].sum(), "x")
    count = net["count"].set(net["count"].value + x.sum().astype(int))
    out = x * w + net["mean"].value.sum() + net["rows"].value
    return out**2, {**net, "count": count, "mean": net["mean"].set(net["mean"].value + 1)}


def in_two_forms() -> Any:
    mesh = make_mesh("4")
    net = trained_net()
    call = sm.shard_map(loss_of, mesh, (None, P("x")), (P("x"), P()))

    def loss(net: Any, x: Any) -> Any:
        out, net = call(net, x)
        return out.mean(), net

    return loss, sm.pack(net, mesh), sm.place(net, mesh)


def test_outside_a_map_what_is_trained_is_what_is_trained_of_the_model() -> None:
    loss, packed, plain = in_two_forms()
    (value, new), grads = sm.value_and_grad(loss)(packed, X)
    (wanted, plain_new), plain_grads = sm.value_and_grad(loss)(plain, X)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert isinstance(grads, sm.Packed) and isinstance(new, sm.Packed)
    assert repr(grads) == "Packed(2 states in 2 arrays, 1 not packed)"
    structure: Any = jax.tree.structure
    assert structure(grads) == structure(sm.trainable(packed))
    assert_same(sm.trainable(packed).unpack(), sm.trainable(plain))
    assert list(grads.states) == ["['v']", "['w']"] and list(grads.rest) == ["['plain']"]
    assert_same(grads.unpack(), plain_grads)
    assert_same(new.unpack(), plain_new)


def test_slots_of_a_packed_model_are_packed_and_stay_so_in_calls() -> None:
    optimizer = optax.adam(0.1)

    def train(net: Any, slots: Any, x: Any) -> Any:
        def loss(net: Any, x: Any) -> Any:
            out, net = loss_of(net, x)
            return out.mean(), net

        (value, net), grads = sm.value_and_grad(loss, axis_name="x")(net, x)
        updates, slots = optimizer.update(grads, slots)
        return value, (eqx.apply_updates(net, updates), slots)

    _, packed, plain = in_two_forms()
    fun, count = counted(train)
    call = sm.shard_map(fun, make_mesh("4"), (None, P(), P("x")), P())
    slots, plain_slots = (optimizer.init(sm.trainable(net)) for net in (packed, plain))
    for _ in range(3):
        _, (packed, slots) = call(packed, slots, X)
    assert count.times == 1
    for _ in range(3):
        _, (plain, plain_slots) = call(plain, plain_slots, X)
    assert isinstance(slots[0].mu, sm.Packed)
    assert list(slots[0].mu.states) == ["['v']", "['w']"]
    wanted = plain, plain_slots[0].nu
    for a, b in zip((packed.unpack(), slots[0].nu.unpack()), wanted, strict=True):
        structure: Any = jax.tree.structure
        assert structure(a) == structure(b)
        for x, y in zip(
            jax.tree.leaves(sm.trainable(a)), jax.tree.leaves(sm.trainable(b)), strict=True
        ):
            np.testing.assert_allclose(x, y, rtol=1e-5)


def test_averages_of_a_packed_model_are_those_of_the_model() -> None:
    _, packed, plain = in_two_forms()
    double: Any = lambda net: jax.tree.map(lambda x: 2 * x if eqx.is_inexact_array(x) else x, net)
    later, plain_later = double(packed), double(plain)
    ema, plain_ema = (sm.nn.EMA(net, decay=0.75, wrt=WRT) for net in (packed, plain))
    average: Any = lambda ema, net: ema(net)
    for run in (average, eqx.filter_jit(average)):
        averaged, ema = run(ema, later)
        wanted, plain_ema = run(plain_ema, plain_later)
        assert isinstance(averaged, sm.Packed)
        assert_same(averaged.unpack(), wanted)
        assert_same(ema.averages, plain_ema.averages)


WRT = sm.filters.Any(sm.BatchState, sm.filters.WithTag("first"))


def test_states_that_are_all_empty_come_back() -> None:
    mesh = make_mesh("4")
    specs = [P(), P("x"), P(None, "x")]
    model = {
        (k, shape): sm.State(np.zeros(shape, np.float32), spec=spec)
        for k, spec in enumerate(specs)
        for shape in ((0, 4), (4, 0))
    }
    packed = sm.pack(model, mesh)
    assert_same(packed.unpack(), model)
    assert_same(jax.jit(lambda model: sm.pack(model, mesh).unpack())(sm.place(model, mesh)), model)
    assert_same(sm.pack(model, mesh.abstract_mesh).unpack(), model)
    fun = lambda model, x: (x, jax.tree.map(lambda value: value + 1, model))
    _, packed = sm.shard_map(fun, mesh, (None, P("x")), (P("x"), P()))(packed, X)
    assert isinstance(packed, sm.Packed)
    assert_same(packed.unpack(), model)


def test_buffers_may_be_given_another_dtype_and_stay_where_they_are_placed() -> None:
    _, packed, plain = in_two_forms()
    half = jax.tree.map(lambda x: x.astype(jnp.float16) if eqx.is_inexact_array(x) else x, packed)
    fun = lambda net: net["v"].value["a"].sum(keepdims=True)
    call = sm.shard_map(fun, make_mesh("4"), (None,), P("x"))
    assert call(half).dtype == np.float16
    placed = sm.place([packed], make_mesh("4"))[0]
    assert all(a is b for a, b in zip(placed.buffers, packed.buffers, strict=True))


def test_states_that_leave_the_model_are_states() -> None:
    def out(model: Any, x: Any) -> Any:
        return x, model["a"], {"b": model["b"].set(model["b"].value + 1)}

    mesh = make_mesh("4")
    model = {"a": sm.State(np.float32(1)), "b": sm.State(np.float32(2))}
    call = sm.shard_map(out, mesh, (None, P("x")), (P("x"), P(), P()))
    _, a, rest = call(sm.pack(model, mesh), X)
    assert (type(a), float(a.value)) == (sm.State, 1.0)
    assert float(rest["b"].value) == 3.0


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_it_is_made_and_read_inside_jit_on_axes_of_every_type(kinds: Any) -> None:
    mesh = make_mesh("4x2", *kinds)
    plain = sm.place(make_net(), mesh)
    packed = jax.jit(lambda net: sm.pack(net, mesh))(plain)
    assert_same(packed.unpack(), plain)
    assert_same(jax.jit(sm.Packed.unpack)(packed), plain)
    # One state is read without the others.
    assert_same(dict(packed.states), sm.states(plain, sm.filters.Not(sm.RandomState)))


def test_the_compiler_puts_unpacking_and_packing_into_what_is_between() -> None:
    mesh, count, size = make_mesh("8"), 64, 512
    model = {f"s{k}": sm.State(np.ones(size, np.float32), spec=P("x")) for k in range(count)}
    fun = lambda model: jax.tree.map(lambda value: 0.9 * value + 1, model)
    call = sm.shard_map(fun, mesh, (P(),), P())
    plain, packed = (
        call.lower(model).compile() for model in (sm.place(model, mesh), sm.pack(model, mesh))
    )
    held: Any = packed.memory_analysis()
    # Pieces that are not written into the buffer at once would need memory in addition to it.
    assert held.temp_size_in_bytes < held.output_size_in_bytes / 20
    cost, of_packed = plain.cost_analysis(), packed.cost_analysis()
    assert cost is not None and of_packed is not None
    # There is one more access than without packing: the buffer is first filled with zeros.
    assert of_packed["bytes accessed"] < 1.6 * cost["bytes accessed"]
    assert of_packed["flops"] <= cost["flops"]


def test_a_donated_state_is_in_memory_once() -> None:
    mesh = make_mesh("8")
    model = sm.State(np.ones(2**20, np.float32), spec=P("x"))
    call = sm.shard_map(
        lambda state, x: state.set(state.value + x), mesh, (P(), P()), P(), donate="states"
    )
    for given in (sm.place(model, mesh), sm.pack(model, mesh)):
        held: Any = call.lower(given, np.float32(1)).compile().memory_analysis()
        assert held.alias_size_in_bytes >= 2**22 // 8
        assert held.temp_size_in_bytes < 2**12


def test_lanes_take_what_is_whole() -> None:
    def fun(model: Any, x: Any) -> Any:
        return x * model["w"].value, model["n"].set(model["n"].value + 1)

    model = {"w": sm.ParamState(np.float32(2)), "n": sm.State(0)}
    packed = sm.pack(model, make_mesh("4"))
    for lanes in (sm.vmap2, sm.pmap2):
        y, n = lanes(fun)(packed, X)
        np.testing.assert_array_equal(y, 2 * X)
        assert int(n.value) == 1


def test_states_may_be_packed_with_the_specs_of_a_call() -> None:
    specs = (None, P("x")), (P("x"), P())
    call = sm.shard_map(lambda model, x: (x, model), make_mesh("4"), *specs, state_in_specs=P("x"))
    _, packed = call(sm.pack({"w": sm.State(X)}, make_mesh("4"), state_specs=P("x")), X)
    np.testing.assert_array_equal(packed.unpack()["w"].value, X)


# Small arrays are put end to end and taken apart again, in programs that compile quickly.
# More than one operation takes at once, with a scalar and an empty array.
SHAPES = [(), (3,), (0,), (2, 2), *[(2,)] * 17]


def many_small() -> list[sm.State]:
    numbers = np.random.default_rng(0)
    return [sm.State(numbers.normal(size=shape).astype(np.float32)) for shape in SHAPES]


def test_many_small_arrays_come_back_as_they_were() -> None:
    states, mesh = many_small(), make_mesh("2")
    packed = sm.pack(states, mesh)
    (whole,) = packed.buffers
    np.testing.assert_array_equal(whole, np.concatenate([s.value.ravel() for s in states]))
    assert_same(packed.unpack(), states)
    assert_same(jax.jit(sm.Packed.unpack)(packed), sm.place(states, mesh))


def test_the_gradient_of_what_is_taken_apart_is_one_concatenation() -> None:
    def total(states: Any) -> jax.Array:
        return jnp.stack([(k * s.value).sum() for k, s in enumerate(states)]).sum()

    mesh = make_mesh("1")
    gradient: Any = jax.grad(sm.shard_map(total, mesh, P(), P()))
    packed = sm.pack(many_small(), mesh)
    (gradients,) = gradient(packed).buffers
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    assert gradients.tolist() == [k for k, size in enumerate(sizes) for _ in range(size)]
    text = str(jax.make_jaxpr(gradient)(packed))
    put_together = re.findall(r"dynamic_update_slice|concatenate|pad\[", text)
    assert put_together == ["concatenate"]


def test_no_loop_begins_at_a_constant() -> None:
    call = sm.shard_map(
        lambda states: jax.tree.map(lambda value: value + 1, states), make_mesh("2"), P(), P()
    )
    text = call.lower(sm.pack(many_small(), make_mesh("2"))).as_text()
    sliced = re.findall(r"dynamic(?:_update)?_slice .*", text)
    assert len(sliced) >= 3
    hidden = set(re.findall(r"(%\d+)(?::\d+)? = stablehlo.optimization_barrier", text))
    for line in sliced:
        start = line.split(",")[2 if "update" in line else 1]
        assert start.strip().split("#")[0] in hidden, line
