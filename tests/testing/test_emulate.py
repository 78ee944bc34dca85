"""`emulate`: calls with states, on meshes of any size, under transformations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing import emulate
from tests.helpers import compiles, counted, elsewhere, make_mesh, slow


tree_structure: Any = jax.tree.structure


def abstract(kind: AxisType = AxisType.Auto, **sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def assert_close(found: Any, expected: Any, rtol: float = 1e-5) -> None:
    """Trees of the same structure, shapes and dtypes, integers and keys exactly."""
    assert tree_structure(found) == tree_structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not isinstance(x, jax.Array):
            assert x is y
            continue
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        exact = np.asarray(x).dtype.kind in "biu"
        np.testing.assert_allclose(x, y, rtol=0 if exact else rtol, atol=0 if exact else rtol)


def moments(old: Any, new: Any, axis_names: Any) -> Any:
    n = jax.lax.psum(new["n"], axis_names)
    return {"n": n, "mean": jax.lax.psum(new["n"] * new["mean"], axis_names) / n}


class Model(sm.Module):
    w: sm.ParamState
    mean: sm.BatchState
    peak: sm.State
    rows: sm.State
    moments: sm.State
    local: sm.State
    part: sm.HiddenState
    rng: sm.RandomState
    untouched: sm.State
    act: Callable[[Any], Any] = sm.field(static=True, default=jnp.tanh)


def model(shards: int = 4) -> Model:
    return Model(
        w=sm.ParamState(jnp.arange(6.0).reshape(2, 3) / 5),
        mean=sm.BatchState(jnp.ones(3), reduce="mean"),
        peak=sm.State(jnp.zeros(3), reduce="max"),
        rows=sm.State(100, reduce="sum"),
        moments=sm.State({"n": jnp.ones(()), "mean": jnp.zeros(3)}, reduce=moments),
        local=sm.State(jnp.zeros(shards, jnp.int32), spec=sm.PerShard("x")),
        part=sm.HiddenState(jnp.zeros((8, 3)), spec=P("x")),
        rng=sm.RandomState(jax.random.key(3)),
        untouched=sm.State(jnp.arange(4.0)),
    )


def step(m: Model, x: Any) -> Any:
    key, rng = m.rng.split()
    keys, rng = rng.rows(len(x), "x")
    noise = jax.random.normal(key, (3,)) + jax.vmap(jax.random.normal)(keys)[:, None]
    y = m.act(x @ m.w.value) + 0.1 * noise
    y = y - jax.lax.pmean(y.mean(), "x")
    return y, m.replace(
        mean=0.9 * m.mean.value + 0.1 * y.mean(0),
        peak=jnp.maximum(m.peak.value, y.max(0)),
        rows=m.rows.value + (y > 0).sum(),
        moments={"n": m.moments.value["n"] + len(x), "mean": y.mean(0)},
        local=m.local.value + jax.lax.axis_index("x") + 1,
        part=m.part.value + jnp.sum(y, 0),
        rng=rng,
    )


X = jnp.sin(jnp.arange(16.0)).reshape(8, 2)


def stepper(mesh: Any, check: bool = True) -> sm.StatefulMapping:
    return sm.shard_map(
        step, mesh, in_specs=(None, P("x")), out_specs=(P("x"), P()), check_vma=check
    )


# States


@pytest.mark.parametrize(("kind", "check"), [(AxisType.Explicit, True), slow(AxisType.Auto, False)])
def test_states_policies_and_random_streams_are_those_of_the_call(
    kind: AxisType, check: bool
) -> None:
    real = stepper(make_mesh("4", kind), check)
    first = real(model(), X)
    second = real(first[1], X[::-1])
    call, old = stepper(abstract(kind, x=4), check), model()
    found = emulate(call, old, X)
    assert_close(found, first)
    # What was not written is what went in.
    assert found[1].untouched.value is old.untouched.value
    assert found[1].w.value is old.w.value and found[1].act is old.act
    assert_close(emulate(call, found[1], X[::-1]), second)
    # What lies on the mesh is taken as well.
    assert_close(emulate(call, first[1], X[::-1]), second)


@pytest.mark.slow
def test_256_shards_on_one_device() -> None:
    count = sm.State(0, reduce="sum")
    rng = sm.RandomState(jax.random.key(0))
    x = np.arange(1024.0, dtype=np.float32)

    def shard(state: Any, x: Any) -> Any:
        count, rng = state
        keys, rng = rng.rows(len(x), "x")
        total = jax.lax.psum(x.sum(), "x")
        passed = jax.lax.ppermute(x, "x", [(k, (k + 1) % 256) for k in range(256)])
        drawn = jax.vmap(jax.random.normal)(keys)
        return (total, passed, drawn), (count.set(count.value + (x >= 0).sum()), rng)

    outs = (P(), P("x"), P("x"))
    call = sm.shard_map(shard, abstract(x=256), in_specs=(None, P("x")), out_specs=(outs, P()))
    (total, passed, drawn), (new, _) = emulate(call, (count, rng), x)
    assert float(total) == x.sum() and int(new.value) == 1024
    np.testing.assert_array_equal(passed, np.roll(x, 4))
    keys, _ = rng.rows(1024)
    np.testing.assert_array_equal(drawn, jax.vmap(jax.random.normal)(keys))
    assert len(drawn.devices()) == 1


# The same on devices


def real_and_emulated(
    fun: Callable[..., Any], check: bool = True, **specs: Any
) -> list[Callable[..., Any]]:
    real = sm.shard_map(fun, make_mesh("4x2"), check_vma=check, **specs)
    other = sm.shard_map(fun, abstract(x=4, y=2), check_vma=check, **specs)
    return [real, lambda *args: emulate(other, *args)]


CUTS: list[tuple[P | None, P]] = [
    (P("x", "y"), P("y", "x")),
    (P(("x", "y")), P(("y", "x"))),
    (P(("y", "x")), P(None, ("y", "x"))),
    (P(None, "y"), P("x", "y")),
    (P("x"), P("x")),
    (None, P()),
]


@pytest.mark.slow
def test_arrays_are_cut_and_joined_as_on_devices() -> None:
    x = jnp.sin(jnp.arange(64.0)).reshape(16, 4)
    for into, out in CUTS:
        real, emulated = real_and_emulated(
            lambda x: jnp.cumsum(x, 0), check=False, in_specs=(into,), out_specs=out
        )
        assert_close(emulated(x), real(x))


def test_states_that_are_merged_over_some_axes() -> None:
    """A split state that is merged over the other axis, a tree of values, and states made inside."""

    def shard(given: Any, x: Any) -> Any:
        part, low = given
        least = {"a": x[:2, 0], "b": jnp.floor(9 * x[0, 0]).astype(jnp.int32)}
        new = sm.State(x.sum(), reduce="sum"), sm.State(x.max()[None], spec=P(("x", "y")))
        return new, (part.set(part.value + x.sum()), low.set(least))

    given = (
        sm.State(jnp.arange(8.0), spec=P("x"), reduce="sum"),
        sm.State({"a": jnp.zeros(2), "b": jnp.zeros((), jnp.int32)}, reduce="min"),
    )
    real, emulated = real_and_emulated(shard, in_specs=(None, P("x", "y")), out_specs=P())
    x = jnp.sin(jnp.arange(64.0)).reshape(16, 4)
    first = real(given, x)
    assert_close(emulated(given, x), first)
    assert_close(emulated(first[1], -x), real(first[1], -x))


# Lanes


def lane(count: Any, x: Any) -> Any:
    return x / jax.lax.psum(x, "lanes"), count.set(count.value + x.sum())


LANES: Any = {"axis_name": "lanes", "in_axes": (None, 0)}


def test_lanes_are_replayed_as_shards_are() -> None:
    count, x = sm.State(1.0, reduce="sum"), jnp.arange(8.0)
    expected = (x / 28, sm.State(29.0, reduce="sum"))
    for mapped in (sm.pmap2(lane, **LANES), sm.vmap2(lane, **LANES)):
        assert_close(emulate(mapped, count, x), expected)


def test_a_gradient_in_lanes() -> None:
    def train(w: Any, x: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return ((w.value * x) ** 2).mean(), w

        (value, w), grads = sm.value_and_grad(loss, axis_name="lanes")(w, x)
        return value, grads.value

    w, x = sm.ParamState(jnp.float32(1.5)), jnp.arange(16.0).reshape(8, 2)
    more: Any = {**LANES, "out_axes": None}
    expected = (2.25 * (x**2).mean(), 3 * (x**2).mean())
    for mapped in (sm.pmap2(train, **more), sm.vmap2(train, **more)):
        assert_close(emulate(mapped, w, x), expected)


def test_more_lanes_than_devices() -> None:
    count, x = sm.State(1.0, reduce="sum"), jnp.arange(300.0)
    pmapped, vmapped = sm.pmap2(lane, **LANES), sm.vmap2(lane, **LANES)
    with pytest.raises(sm.BatchAxisError, match="300 lanes on 8 devices"):
        pmapped(count, x)
    assert_close(emulate(pmapped, count, x), vmapped(count, x))


def test_mistakes_in_lanes_come_through() -> None:
    for n in (8, 300):
        with pytest.raises(sm.BatchAxisError, match="lanes wrote different values"):
            emulate(sm.pmap2(lane, **LANES), sm.State(1.0), jnp.arange(float(n)))
    with pytest.raises(sm.BatchAxisError):
        emulate(sm.pmap2(lambda x: x, out_axes=None), jnp.arange(8.0))


# Arguments and results


def test_every_kind_of_argument() -> None:
    def shard(tree: Any, factor: Any, act: Any, *, shift: Any, name: str) -> Any:
        assert name == "n" and isinstance(tree, dict)
        y = act(tree["x"] * factor + shift.value)
        return {"y": y, "name": name, "act": act, "tree": tree}, shift.set(shift.value + 1)

    out = {"y": P("x"), "name": None, "act": None, "tree": P("x")}
    specs: Any = {"in_specs": (P("x"), P(), None), "out_specs": (out, P())}
    # Strings of NumPy are static.
    args: Any = ({"x": np.arange(8.0), "s": np.str_("net")}, 3, jnp.sin)
    kwargs: Any = {"shift": sm.State(np.float32(2)), "name": "n"}
    expected = sm.shard_map(shard, make_mesh("4"), **specs)(*args, **kwargs)
    result = emulate(sm.shard_map(shard, abstract(x=4), **specs), *args, **kwargs)
    for name, value in (("name", "n"), ("act", jnp.sin)):
        assert result[0].pop(name) == expected[0].pop(name) == value
    assert result[0]["tree"].pop("s") == expected[0]["tree"].pop("s") == "net"
    assert_close(result, expected)


def test_arrays_may_lie_anywhere() -> None:
    def shard(w: Any, x: Any) -> Any:
        return jax.lax.psum((x * w.mean()).sum(), ("x", "y"))

    call = sm.shard_map(
        shard, abstract(x=4, y=2), in_specs=(P(), P("x")), out_specs=P(), check_vma=False
    )
    w, x = np.full((8, 1), 2, np.float32), np.arange(8, dtype=np.float32)[:, None]
    for there, here in zip(elsewhere(w).values(), elsewhere(x).values(), strict=True):
        assert emulate(call, there, x) == emulate(call, w, here) == 112


def test_with_a_mesh_set() -> None:
    call = sm.shard_map(lambda x: jax.lax.psum(x, "x"), in_specs=P("x"), out_specs=P())
    x = np.arange(8.0, dtype=np.float32)
    with jax.set_mesh(make_mesh("4", AxisType.Explicit)):
        np.testing.assert_array_equal(emulate(call, x), x.reshape(4, 2).sum(0))
        gradient = jax.grad(lambda x: emulate(call, x)[0] ** 2)(jnp.asarray(x))
        np.testing.assert_array_equal(gradient, [24, 0] * 4)
    # One mapped function, other meshes.
    for kind, n in ((AxisType.Auto, 2), (AxisType.Explicit, 4)):
        with jax.sharding.use_abstract_mesh(abstract(kind, x=n)):
            np.testing.assert_array_equal(emulate(call, x), x.reshape(n, -1).sum(0))


def test_a_method() -> None:
    class Scale(sm.Module):
        by: sm.State

        def __call__(self, x: Any) -> Any:
            return x * self.by.value

        mapped = sm.shard_map(__call__, abstract(x=4), in_specs=(None, P("x")), out_specs=P("x"))

    mapped = Scale(sm.State(3.0)).mapped
    np.testing.assert_array_equal(emulate(mapped, X), 3 * X)
    np.testing.assert_array_equal(mapped.on_mesh(make_mesh("2"))(X), 3 * X)


def test_what_the_call_raises_comes_through() -> None:
    call = sm.shard_map(lambda x: x.missing, abstract(x=4), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(AttributeError, match="missing"):
        emulate(call, X)
    with pytest.raises(sm.SpecError, match="7"):
        emulate(call, jnp.ones(7))


# Traced and compiled once


def test_one_trace_and_one_compile_for_a_signature() -> None:
    shard, count = counted(lambda s, x: (jax.lax.psum(x, "x"), s.set(s.value + 1)))
    call = sm.shard_map(shard, abstract(x=4), in_specs=(None, P("x")), out_specs=P())
    state = sm.State(0)
    _, state = emulate(call, state, X)
    assert count.times == 1
    others = [X * k for k in range(3)]
    with compiles() as seen:
        for x in others:
            _, state = emulate(call, state, x)
    assert (count.times, seen.times, int(state.value)) == (1, 0, 4)
    emulate(call, state, X[:4])
    assert count.times == 2


def test_static_arguments_tell_signatures_apart() -> None:
    def shard(x: Any, act: Any, factor: Any) -> Any:
        return act(x) * factor

    call = sm.shard_map(
        shard, abstract(x=4), in_specs=(P("x"), None, P()), out_specs=P("x"), check_vma=False
    )
    x = jnp.full(4, 2.0)
    for act, factor, expected in [
        (jnp.exp2, 1, 4.0),
        (jnp.square, 1.5, 6.0),
        (jnp.square, True, 4.0),
        (jnp.exp2, 0.0, 0.0),
        (jnp.exp2, -0.0, -0.0),
        (lambda x: x, np.float32(3), 6.0),
    ]:
        found = emulate(call, x, act, factor)
        np.testing.assert_array_equal(found, np.full(4, expected))
        assert np.signbit(found[0]) == np.signbit(expected)


# Transformations


def loss(w: Any, rng: Any, x: Any) -> Any:
    key, rng = rng.split()
    y = jnp.tanh(x @ w.value) * jax.random.normal(key, ())
    return jax.lax.pmean((y**2).mean(), ("x", "y")), rng


LOSS: Any = {"in_specs": (None, None, P("x")), "out_specs": P()}


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, slow(False)])
def test_gradients_of_the_call(check: bool) -> None:
    rng = sm.RandomState(jax.random.key(1))
    w = sm.ParamState(jnp.arange(6.0).reshape(2, 3) / 6)
    (real, emulated) = (
        jax.value_and_grad(call, argnums=(0, 2), has_aux=True)
        for call in real_and_emulated(loss, check, **LOSS)
    )
    expected = real(w, rng, X)
    assert_close(emulated(w, rng, X), expected)
    # Where arrays are typed by a mesh, gradients are too.
    placed = jax.device_put(X, jax.NamedSharding(make_mesh("4", AxisType.Explicit), P("x")))
    _, (_, gradient) = emulated(w, rng, placed)
    assert_close(gradient, expected[1][1])
    assert gradient.sharding == placed.sharding
    assert_close(jax.jit(emulated)(w, rng, placed)[1][1], expected[1][1])


@pytest.mark.slow
def test_second_derivatives() -> None:
    def shard(w: Any, x: Any) -> Any:
        return jax.lax.psum((jax.nn.silu(x * w) ** 2).sum(), ("x", "y"))

    calls = real_and_emulated(shard, in_specs=(P(), P("x", "y")), out_specs=P())
    x = jnp.sin(jnp.arange(32.0)).reshape(8, 4)
    real, emulated = (jax.grad(jax.grad(call))(jnp.float32(0.7), x) for call in calls)
    assert_close(emulated, real)
    # Derivatives forwards are emulated as a part of the program.
    call = sm.shard_map(shard, abstract(x=4, y=2), in_specs=(P(), P("x", "y")), out_specs=P())
    w = jnp.float32(0.7)
    _, forwards = emulate(lambda w: jax.jvp(lambda w: call(w, x), (w,), (jnp.ones_like(w),)), w)
    assert_close(forwards, jax.grad(calls[0])(w, x))
    assert_close(emulate(jax.hessian(lambda w: call(w, x)), w), real)


@pytest.mark.slow
def test_only_what_is_wanted_is_differentiated() -> None:
    """Of `x` there is no derivative backwards: of a loop with an unknown number of rounds."""

    def shard(w: Any, x: Any) -> Any:
        x = jax.lax.while_loop(lambda y: y.sum() < 30, lambda y: y * 2, x)
        return jax.lax.pmean((w * x).sum(), ("x", "y"))

    x = np.arange(1.0, 33.0, dtype=np.float32).reshape(8, 4)
    doubled = x.reshape(4, 2, 2, 2).sum((1, 3))
    while (doubled < 30).any():
        doubled = np.where(doubled < 30, 2 * doubled, doubled)
    for call in real_and_emulated(shard, check=False, in_specs=(P(), P("x", "y")), out_specs=P()):
        np.testing.assert_allclose(jax.grad(call)(jnp.float32(2.0), x), doubled.mean())


def test_gradients_reach_what_is_closed_over_and_what_is_returned_as_it_was() -> None:
    x = jnp.arange(8.0)

    def total(w: Any) -> Any:
        shard = lambda s, x: (s, jax.lax.psum((x * w).sum(), "x"))
        call = sm.shard_map(shard, abstract(x=4), in_specs=(None, P("x")), out_specs=P())
        same, y = emulate(call, sm.ParamState(w), x)
        return 10 * same.value + y

    assert float(jax.grad(total)(2.0)) == float(jax.jit(jax.grad(total))(2.0)) == 38


def test_under_vmap_scan_and_jit() -> None:
    call = sm.shard_map(
        lambda c, x: (jax.lax.psum(x * c, "x"), c + 1),
        abstract(x=4),
        in_specs=(P(), P("x")),
        out_specs=P(),
    )
    x = jnp.arange(8.0)
    sums = np.asarray(x).reshape(4, 2).sum(0)
    many = jax.vmap(lambda c: emulate(call, c, x)[0])(jnp.arange(3.0))
    np.testing.assert_array_equal(many, np.arange(3.0)[:, None] * sums)

    @jax.jit
    def rounds(c: Any) -> Any:
        return jax.lax.scan(lambda c, _: emulate(call, c, x)[::-1], c, None, length=3)

    last, made = rounds(1.0)
    assert float(last) == 4
    np.testing.assert_array_equal(made, np.array([[1.0], [2.0], [3.0]]) * sums)
