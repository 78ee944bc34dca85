"""A steady call is one dispatch of JAX's. Whatever is not like the last calls takes the careful path."""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._base import _compat as compat
from statemesh._call import _pipeline
from tests.helpers import assert_same, compiles, elsewhere, make_mesh


ROWS = np.arange(16, dtype=np.float32).reshape(8, 2)


class Model(sm.Module):
    w: sm.ParamState
    seen: sm.State
    rng: sm.RandomState
    rows: list[sm.State]


def make_model() -> Model:
    return Model(
        sm.ParamState(jnp.ones(2)),
        sm.State(0.0, reduce="sum"),
        sm.RandomState(jax.random.key(0)),
        [sm.State(jnp.zeros((8, 2)), spec=P("x"))],
    )


def step(model: Model, x: Any, scale: Any = 1.0) -> Any:
    key, rng = model.rng.split()
    y = x * model.w.value * scale + jax.random.uniform(key)
    rows = [model.rows[0].set(model.rows[0].value + x)]
    return y, model.replace(seen=model.seen.value + x.sum(), rng=rng, rows=rows)


def mapping(
    fun: Callable[..., Any] = step,
    mesh: str = "8",
    scaled: bool = False,
    kind: AxisType = AxisType.Auto,
) -> Any:
    specs = (None, P("x"), P()) if scaled else (None, P("x"))
    return sm.shard_map(fun, make_mesh(mesh, kind), specs, (P("x"), P()))


def careful(mapped: Any) -> bool:
    """Whether the next call takes the careful path whatever it gets."""
    return mapped._pipeline._again is None


def steady(
    mapped: Any, *args: Any, mesh: str = "8", kind: AxisType = AxisType.Auto, **kwargs: Any
) -> tuple[Any, Any]:
    """Calls until nothing has to be moved and the next one is one dispatch; its rows and its model."""
    model, rows, *others = args
    rows = jax.device_put(rows, NamedSharding(make_mesh(mesh, kind), P("x")))
    for _ in range(3):
        _, model = mapped(model, rows, *others, **kwargs)
    assert careful(mapped) != compat.REFUSES_DELETED
    return model, rows


@pytest.fixture
def one_dispatch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called on, the careful path fails."""

    def forbid() -> None:
        def fail(*args: Any) -> Any:
            raise AssertionError("the careful path was taken")

        if compat.REFUSES_DELETED:
            monkeypatch.setattr(_pipeline, "_flatten", fail)

    return forbid


KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("mesh", ["2", "8"])
def test_a_steady_call_is_one_dispatch(
    mesh: str, kind: AxisType, one_dispatch: Callable[[], None]
) -> None:
    mapped, plain = mapping(mesh=mesh, kind=kind), mapping(mesh=mesh, kind=kind)
    model, rows = steady(mapped, make_model(), ROWS, mesh=mesh, kind=kind)
    twice = jax.device_put(2 * ROWS, rows.sharding)
    expected = [plain(model, ROWS), plain(model, 2 * ROWS)]
    one_dispatch()
    for given, wanted in zip((rows, twice), expected, strict=True):
        assert_same(mapped(model, given), wanted)
    y, after = mapped(model, rows)
    # What was not written is the array that went in.
    assert after.w.value is model.w.value
    assert y.sharding.is_equivalent_to(rows.sharding, 2)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_on_one_device(kind: AxisType, one_dispatch: Callable[[], None]) -> None:
    mesh = make_mesh("1", kind)
    mapped = sm.shard_map(
        lambda s, x: (s.set(s.value + x), 2 * x), mesh, (None, P("x")), (P(), P("x"))
    )
    state, x = mapped.place(sm.State(np.zeros((8, 2)), spec=P("x")), np.ones((8, 2), np.float32))
    for _ in range(3):
        state, _ = mapped(state, x)
    one_dispatch()
    state, y = mapped(state, x)
    np.testing.assert_array_equal(state.value, 4 * np.ones((8, 2)))
    np.testing.assert_array_equal(y, 2 * np.ones((8, 2)))


@pytest.mark.parametrize("scale", [2.0, 3, True], ids=str)
def test_python_numbers_as_arguments(scale: Any, one_dispatch: Callable[[], None]) -> None:
    mapped, plain = mapping(scaled=True), mapping(scaled=True)
    model, rows = steady(mapped, make_model(), ROWS, scale)
    expected = plain(model, rows, type(scale)(0))
    one_dispatch()
    assert_same(mapped(model, rows, type(scale)(0)), expected)


def test_keyword_arguments(one_dispatch: Callable[[], None]) -> None:
    mapped, plain = mapping(), mapping()
    scale = jax.device_put(jnp.float32(2), NamedSharding(make_mesh(), P()))
    model, rows = steady(mapped, make_model(), ROWS, scale=scale)
    expected = plain(model, rows, scale=scale)
    one_dispatch()
    assert_same(mapped(model, rows, scale=scale), expected)


@pytest.mark.parametrize("where", elsewhere(ROWS))
def test_arrays_from_elsewhere(where: str) -> None:
    mapped = mapping()
    model, rows = steady(mapped, make_model(), ROWS)
    expected = mapping()(model, rows)
    given = elsewhere(ROWS)[where]
    for _ in range(3):
        assert_same(mapped(model, given), expected)
        assert_same(mapped(model, rows), expected)


def test_states_from_elsewhere_come_back_in_place() -> None:
    mapped = mapping()
    model, rows = steady(mapped, make_model(), ROWS)
    y, expected = mapped(model, rows)
    away = jax.device_put(np.ones(2, np.float32), jax.devices()[2])
    for weight in (away, np.ones(2, np.float32), jnp.ones(2)):
        z, after = mapped(model.replace(w=sm.ParamState(0.0).replace(value=weight)), rows)
        assert after.w.value.sharding == expected.w.value.sharding
        assert_same(z, y)
        mapped(model, rows)


OTHERS: dict[str, Callable[[Model, Any], tuple[Any, ...]]] = {
    "other rows": lambda model, x: (model, jnp.concatenate([x, x])),
    "another dtype": lambda model, x: (model, x.astype(jnp.bfloat16)),
    "a weak state": lambda model, x: (
        model.replace(seen=model.seen.replace(value=jnp.asarray(1.0) * 2)),
        x,
    ),
    "other metadata": lambda model, x: (model.replace(w=model.w.replace(name="w")), x),
    "another kind": lambda model, x: (model.replace(w=sm.State(model.w.value)), x),
    "a tuple of states": lambda model, x: (model.replace(rows=tuple(model.rows)), x),
    "a static leaf": lambda model, x: (
        model.replace(rows=[*model.rows, jnp.tanh]),
        x,
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_calls_between_steady_ones(what: str) -> None:
    if what == "other rows":

        def fun(model: Model, x: Any, scale: Any = 1.0) -> Any:
            return x * model.w.value * scale, model.replace(seen=model.seen.value + x.sum())
    else:

        def fun(model: Model, x: Any, scale: Any = 1.0) -> Any:
            y, after = step(model, x.astype(jnp.float32), scale)
            return y, after.replace(rows=type(model.rows)([*after.rows, *model.rows[1:]]))

    mapped = mapping(fun)
    model, rows = steady(mapped, make_model(), ROWS)
    args = OTHERS[what](model, rows)
    expected = [mapping(fun)(*args), mapping(fun)(model, rows)]
    for given, wanted in zip([args, (model, rows)] * 3, expected * 3, strict=True):
        assert_same(mapped(*given), wanted)
    with compiles() as seen:
        for given in [args, args, (model, rows), (model, rows)] * 2:
            mapped(*given)
    assert seen.times == 0


def test_equal_trees_of_different_dataclasses() -> None:
    def kind() -> Any:
        @functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=[])
        @dataclasses.dataclass
        class Pair:
            x: Any

        return Pair

    # JAX finds programs by the hash of a tree; trees of these classes are equal.
    classes = [kind() for _ in range(60)]
    structure: Any = jax.tree.structure
    one, other = (structure(made(0)) for made in classes[:2])
    assert one == other and hash(one) != hash(other)
    mapped = sm.shard_map(lambda p: dataclasses.replace(p, x=p.x + 1), make_mesh(), None, P())
    x = jax.device_put(np.ones(2, np.float32), NamedSharding(make_mesh(), P()))
    for made in classes:
        for _ in range(3):
            assert type(mapped(made(x))) is made


def test_an_array_that_was_given_up() -> None:
    mapped = mapping()
    model, rows = steady(mapped, make_model(), ROWS)
    gone = jax.device_put(ROWS, rows.sharding)
    gone.delete()
    with pytest.raises(sm.StatemeshError, match=r"step\(\.\.\.\)|x"):
        mapped(model, gone)
    assert_same(mapped(model, rows), mapping()(model, rows))


def test_the_owner_of_a_numpy_array_may_write_to_it() -> None:
    # On CPU devices JAX's own calls may read the memory of an aligned array after they have returned.
    memory = np.empty(2**20 * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    aligned = memory[start : start + 2**20 * 4].view(np.float32).reshape(8, -1)

    def fun(state: sm.State, x: Any) -> Any:
        for _ in range(3):
            x = jnp.sin(x)
        return state.set(state.value + 1), x.sum(keepdims=True).reshape(1)

    mapped = sm.shard_map(fun, make_mesh(), (None, P("x")), (P(), P("x")))
    state = sm.State(jnp.zeros(()))
    placed = jax.device_put(np.ones_like(aligned), NamedSharding(make_mesh(), P("x")))
    for _ in range(3):
        state, expected = mapped(state, placed)
    for _ in range(5):
        aligned[:] = 1
        _, found = mapped(state, aligned)
        aligned[:] = -5
        np.testing.assert_array_equal(found, expected)
        mapped(state, placed)


def test_traces_see_the_mapped_call() -> None:
    mapped = mapping()
    model, rows = steady(mapped, make_model(), ROWS)

    def sums(x: Any) -> Any:
        return mapped(model, x)[0].sum()

    # With a traced argument, and with arrays only, in a trace.
    assert "shard_map" in str(jax.make_jaxpr(sums)(rows))
    assert "shard_map" in str(jax.make_jaxpr(lambda x: sums(rows) + x)(1.0))
    np.testing.assert_array_equal(jax.grad(sums)(rows), np.ones((8, 2)))
    mapped(model, rows)
    (found,) = jax.vmap(lambda x: (mapped(model, rows)[0] * x,))(jnp.arange(3.0))
    np.testing.assert_array_equal(found[2], 2 * mapped(model, rows)[0])
    tangents = jax.jvp(lambda x: sums(rows) * x, (1.0,), (1.0,))[1]
    np.testing.assert_allclose(tangents, sums(rows), rtol=1e-6)


@pytest.mark.parametrize("how", ["shard_map", "vmap2"])
def test_a_callback_may_trace(how: str) -> None:
    times = 0

    def host(x: Any) -> Any:
        nonlocal times
        times += 1
        return np.asarray(jax.jit(lambda y: y + times)(x))

    def fun(state: sm.State, x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.pure_callback(host, shape, x, vmap_method="expand_dims")
        return state.set(state.value + 1), y

    # On one device it runs on the thread that calls.
    mapped: Any = sm.shard_map(fun, make_mesh("1"), (None, P("x")), (P(), P("x")))
    if how == "vmap2":
        mapped = sm.vmap2(fun)
    state, rows = mapped.place(sm.State(jnp.zeros(())), ROWS)
    rows = jnp.asarray(rows)
    for count in range(1, 6):
        state, y = mapped(state, rows)
        np.testing.assert_array_equal(y, ROWS + count)
    assert careful(mapped)


def test_effects_happen_once_a_call(capfd: pytest.CaptureFixture[str]) -> None:
    def fun(state: sm.State, x: Any) -> Any:
        jax.debug.print("called with {}", x[0])
        return state.set(state.value + 1), x

    mapped = sm.shard_map(fun, make_mesh("1"), (None, P("x")), (P(), P("x")))
    state, rows = mapped.place(sm.State(jnp.zeros(())), np.ones(8, np.float32))
    for _ in range(8):
        state, _ = mapped(state, rows)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("called with 1") == 8
    # JAX keeps no quick way for such a program, and we stop asking.
    assert careful(mapped)


def test_what_jax_forgot_is_compiled_again() -> None:
    mapped = mapping()
    model, rows = steady(mapped, make_model(), ROWS)
    expected = mapped(model, rows)
    jax.clear_caches()
    with compiles() as seen:
        assert_same(mapped(model, rows), expected)
    assert seen.times >= 1
    with compiles() as seen:
        for _ in range(5):
            assert_same(mapped(model, rows), expected)
    assert seen.times == 0


def test_settings_of_jax() -> None:
    mapped = mapping()
    model, rows = steady(mapped, make_model(), ROWS)
    expected = mapped(model, rows)
    with jax.debug_nans(True):
        for _ in range(3):
            assert_same(mapped(model, rows), expected)
    with jax.disable_jit():
        np.testing.assert_allclose(mapped(model, rows)[0], expected[0], rtol=1e-6)
    with jax.set_mesh(make_mesh("8")):
        assert_same(mapped(model, rows), expected)
    with jax.set_mesh(make_mesh("4x2")), pytest.raises(sm.SpecError):
        mapped(model, rows)
    # Where it may not trace, a call that was compiled still runs.
    mapped(model, rows)
    mapped(model, rows)
    with jax.no_tracing(True):
        if not careful(mapped):
            assert_same(mapped(model, rows), expected)
        with pytest.raises(RuntimeError, match="no_tracing"):
            jax.jit(lambda x: x + 3)(1.0)
    # It is put back after each call.
    assert float(jax.jit(lambda x: x + 3)(1.0)) == 4


def test_nan_is_found_where_it_arises() -> None:
    mapped = sm.shard_map(
        lambda s, x: (s.set(s.value + 1), jnp.log(x)), make_mesh(), (None, P("x")), (P(), P("x"))
    )
    state, x = mapped.place(sm.State(0), np.ones(8, np.float32))
    for _ in range(3):
        state, _ = mapped(state, x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        mapped(state, -x)


def test_no_tracing_is_put_back_after_a_refusal() -> None:
    mapped = mapping()
    model, _ = steady(mapped, make_model(), ROWS)
    with pytest.raises(sm.StatemeshError):
        mapped(model, np.ones((7, 2), np.float32))
    assert float(jax.jit(lambda x: x + 4)(1.0)) == 5


def test_lanes(one_dispatch: Callable[[], None]) -> None:
    mapped = sm.vmap2(
        lambda s, x: (s.set(s.value + x), x * 2), state_in_axes=..., state_out_axes=...
    )
    state, x = sm.State(jnp.zeros(4)), jnp.arange(4.0)
    for _ in range(3):
        state, _ = mapped(state, x)
    other = mapped(state, jnp.arange(4.0))
    one_dispatch()
    other = jax.tree.map(lambda v, u: v - u + x, other, other)
    structure: Any = jax.tree.structure
    assert structure(mapped(state, x)) == structure(other)


def test_threads_with_calls_of_their_own() -> None:
    mapped = mapping()
    model, rows = steady(mapped, make_model(), ROWS)
    expected = [mapping()(model, rows * k) for k in range(4)]

    def calls(k: int) -> None:
        own = rows * k if k % 2 else np.asarray(rows) * k
        for _ in range(20):
            assert_same(mapped(model, own), expected[k])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(calls, range(4)))


def test_explain_names_arguments_by_their_paths() -> None:
    for key in ("a'b", 'q"x', "back\\slash", "é☃", "new\nline"):
        fun = sm.shard_map(lambda s, key=key: s[key].value.sum(), make_mesh(), None, P())
        memory = fun.explain({key: sm.State(jnp.ones(3))}).memory
        assert memory is not None and memory.by_argument == {f"s[{key!r}]": 12}
