"""A steady call is one dispatch of JAX's. Whatever is not like the last calls takes the careful path."""

import dataclasses
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_same, compiles, make_mesh


ROWS = np.arange(16, dtype=np.float32).reshape(8, 2)


# These releases of JAX refuse an array that was given up; others have to be spared such arrays, one by one.
REFUSES_DELETED = hasattr(jax, "get_mesh")


class Model(sm.Module):
    w: sm.ParamState
    seen: sm.State
    rng: sm.RandomState
    rows: list[sm.State]


def make_model(count: int = 1) -> Model:
    return Model(
        sm.ParamState(jnp.ones(2)),
        sm.State(0.0, reduce="sum"),
        sm.RandomState(jax.random.key(0)),
        [sm.State(jnp.zeros((8, 2)), spec=P("x")) for _ in range(count)],
    )


def step(model: Model, x: Any, scale: Any = 1.0) -> Any:
    key, rng = model.rng.split()
    y = x * model.w.value * scale + jax.random.uniform(key)
    rows = [state.set(state.value + x) for state in model.rows]
    return y, model.replace(seen=model.seen.value + x.sum(), rng=rng, rows=rows)


def mapping(fun: Callable[..., Any] = step, mesh: Any = None, scaled: bool = False) -> Any:
    specs = (None, P("x"), P()) if scaled else (None, P("x"))
    return sm.shard_map(fun, mesh or make_mesh(), specs, (P("x"), P()))


def steady(mapped: Any, *args: Any, mesh: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """Calls until nothing has to be moved and the next one is one dispatch; its rows and its model."""
    model, rows, *others = args
    rows = jax.device_put(rows, NamedSharding(mesh or make_mesh(), P("x")))
    for _ in range(3):
        _, model = mapped(model, rows, *others, **kwargs)
    return model, rows


def python_steps(call: Callable[[], Any]) -> int:
    """How many functions Python enters in a call, of its own and of C."""
    steps = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal steps
        steps += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return steps


def assert_one_dispatch(steady_call: Callable[[int], Callable[[], Any]]) -> None:
    """A steady call takes as many steps in Python with few states as with many: nothing is done for each."""
    few, many = map(steady_call, (2, 12))
    assert python_steps(few) == python_steps(many) or not REFUSES_DELETED
    with compiles() as seen:
        few(), many()
    assert seen.times == 0


WAYS: dict[str, tuple[str, AxisType, tuple[Any, ...], dict[str, Any]]] = {
    "one device": ("1", AxisType.Explicit, (), {}),
    "a number": ("2", AxisType.Auto, (2.0,), {}),
    "a keyword": ("8", AxisType.Explicit, (), {"scale": jnp.float32(2)}),
}


@pytest.mark.parametrize("warm_up", [1, 2, 4])
def test_results_fed_back_under_another_name_are_soon_one_dispatch(warm_up: int) -> None:
    mesh = jax.make_mesh((8,), ("x",))

    def steady_call(warm_up: int, state: sm.State) -> Callable[[], Any]:
        mapped = sm.shard_map(lambda s: s.set(s.value + 1), mesh, (None,), P())
        for _ in range(warm_up):
            after = mapped(state)
        for _ in range(4):
            after = mapped(after)
        return lambda: mapped(after)

    placed = sm.place(sm.State(np.ones((4, 4))), mesh)
    renamed = NamedSharding(mesh, P(None, None))  # The name under which it comes back.
    same_name = steady_call(1, placed.set(jax.device_put(placed.value, renamed)))
    assert python_steps(steady_call(warm_up, placed)) == python_steps(same_name)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_steady_call_is_one_dispatch(way: str) -> None:
    name, kind, numbers, keywords = WAYS[way]
    mesh = make_mesh(name, kind)
    keywords = {k: jax.device_put(x, NamedSharding(mesh, P())) for k, x in keywords.items()}

    def steady_call(count: int) -> Callable[[], Any]:
        mapped = mapping(mesh=mesh, scaled=bool(numbers))
        model, rows = steady(mapped, make_model(count), ROWS, *numbers, mesh=mesh, **keywords)
        for given in (ROWS, 2 * ROWS):
            for factor in (1, 0):
                scaled = [factor * number for number in numbers]
                after = mapped(model, jax.device_put(given, rows.sharding), *scaled, **keywords)
                # An array of NumPy takes the careful path.
                assert_same(after, mapped(model, given, *scaled, **keywords))
        for _ in range(3):
            mapped(model, rows, *numbers, **keywords)
        # What was not written is the array that went in.
        assert after[1].w.value is model.w.value
        return lambda: mapped(model, rows, *numbers, **keywords)

    assert_one_dispatch(steady_call)


def test_lanes() -> None:
    def steady_call(count: int) -> Callable[[], Any]:
        def fun(states: Any, x: Any) -> Any:
            return [s.set(s.value + x) for s in states], x * 2

        mapped = sm.vmap2(fun, state_in_axes=..., state_out_axes=...)
        states, x = [sm.State(jnp.zeros(4)) for _ in range(count)], jnp.arange(4.0)
        for _ in range(4):
            states, y = mapped(states, x)
        np.testing.assert_array_equal(y, 2 * x)
        np.testing.assert_array_equal(states[-1].value, 4 * x)
        return lambda: mapped(states, x)

    assert_one_dispatch(steady_call)


@pytest.mark.parametrize("donate", ["none", "states", "all"])
def test_calls_that_give_memory_up_and_calls_with_static_leaves(donate: Any) -> None:
    mesh = make_mesh()

    def state() -> Any:
        return sm.place(sm.State(np.ones(8, np.float32)), mesh)

    def steady_call(count: int) -> Callable[[], Any]:
        def fun(model: Any, x: Any) -> Any:
            act, name, states, read = model
            return x * 2, (act, name, [s.set(act(s.value) + x.sum()) for s in states], read)

        mapped = sm.shard_map(fun, mesh, (None, P()), (P(), P()), donate=donate)
        # The states are of one size, so that any two may share memory.
        model = (jnp.negative, "a name", [state() for _ in range(count)], state())
        whole = NamedSharding(mesh, P())

        def call() -> Any:
            nonlocal model
            _, model = mapped(model, jax.device_put(np.ones(2, np.float32), whole))

        for _ in range(6):
            old = model
            call()
            assert all(s.value.is_deleted() == (donate != "none") for s in old[2])
            assert model[0] is old[0] and model[3].value is old[3].value
        np.testing.assert_array_equal(model[2][-1].value, 1.0)
        return call

    assert_one_dispatch(steady_call)


def test_static_leaves_that_change_between_steady_calls() -> None:
    def fun(act: Any, s: sm.State, x: Any) -> Any:
        y = act(x) if callable(act) else x * (len(act) if isinstance(act, str) else act)
        return y, s.set(s.value + 1)

    mapped = sm.shard_map(fun, make_mesh(), (None, None, P("x")), (P("x"), P()), donate="states")
    _, state, x = mapped.place(jnp.sin, sm.State(np.zeros(8, np.float32)), ROWS)
    array = jax.device_put(np.float32(3), NamedSharding(make_mesh(), P()))
    expected: dict[Any, Any] = {jnp.sin: np.sin(ROWS), jnp.cos: np.cos(ROWS), "text": 4 * ROWS}
    for act in [jnp.sin] * 4 + [jnp.cos, jnp.sin, "text", jnp.sin, 2.0, array] * 3:
        y, state = mapped(act, state, x)
        of_number = None if callable(act) or isinstance(act, str) else ROWS * act
        np.testing.assert_allclose(y, expected[act] if of_number is None else of_number, rtol=1e-6)
    assert float(state.value[0]) == 22


def test_memory_that_is_given_up_in_a_steady_call_is_shared_with_nothing() -> None:
    mesh = make_mesh()
    whole = NamedSharding(mesh, P())

    def fun(a: sm.State, b: sm.State, x: Any) -> Any:
        return a.set(a.value + 1), b.set(b.value + 2), a.value + b.value

    def view(x: jax.Array) -> jax.Array:
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

    mapped = sm.shard_map(fun, mesh, (None, None, P()), P(), donate="states")

    def place(number: float) -> Any:
        return jax.device_put(np.full(8, number, np.float32), whole)

    x = place(0)
    makers: list[Callable[[Any, Any], tuple[Any, Any, Any]]] = [
        lambda a, b: (a, a, x),
        lambda a, b: (a, view(a), x),
        lambda a, b: (b, a, x),
        lambda a, b: (a, b, a),
        lambda a, b: (a, b, view(b)),
        lambda a, b: (a, place(1), x),
    ]
    for make in makers:
        a, b = sm.State(place(0)), sm.State(place(0))
        for _ in range(5):
            a, b, _ = mapped(a, b, x)
        first, second, third = make(a.value, b.value)
        values = [np.array(value) for value in (first, second, third)]
        a, b, _ = mapped(sm.State(first), sm.State(second), third)
        for number in (1, 2):
            np.testing.assert_array_equal(a.value, values[0] + number)
            np.testing.assert_array_equal(b.value, values[1] + 2 * number)
            np.testing.assert_array_equal(third, values[2])
            a, b, _ = mapped(a, b, x)
    # A view of what an earlier call made was apart from what a later call took.
    shown = view(a.value)
    for _ in range(2):
        c, d, _ = mapped(sm.State(place(0)), sm.State(place(1)), shown)
    before = np.array(shown)
    mapped(a, b, shown)
    np.testing.assert_array_equal(shown, before)
    # One array twice: one that was given up, and then one that came from the same place.
    for _ in range(4):
        c, d, total = mapped(c, d, x)
    total.delete()
    with pytest.raises(sm.StatemeshError, match="given up"):
        mapped(sm.State(total), sm.State(total), x)
    c, d, total = mapped(c, d, x)
    expected = np.array(total)
    c, d, _ = mapped(sm.State(total), sm.State(total), x)
    np.testing.assert_array_equal(c.value, expected + 1)
    np.testing.assert_array_equal(d.value, expected + 2)


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
    "a static leaf": lambda model, x: (model.replace(rows=[*model.rows, jnp.tanh]), x),
}


@pytest.mark.slow
def test_other_calls_between_steady_ones() -> None:
    def fun(model: Model, x: Any) -> Any:
        rows = [s.set(s.value + 1) if sm.is_state(s) else s for s in model.rows]
        after = model.replace(seen=model.seen.value + x.sum().astype("f"))
        return x * model.w.value, after.replace(rows=type(model.rows)(rows))

    mesh = make_mesh("8", AxisType.Explicit)
    mapped = mapping(fun, mesh)
    model, rows = steady(mapped, make_model(), ROWS, mesh=mesh)
    calls = [other(model, rows) for other in OTHERS.values()]
    plain = mapping(fun, mesh)
    expected = [plain(*args) for args in (*calls, (model, rows))]
    for _ in range(3):
        for args, wanted in zip(calls, expected, strict=False):
            assert_same(mapped(*args), wanted)
            assert_same(mapped(model, rows), expected[-1])
    with jax.disable_jit():
        _, after = mapped(*calls[3])
        assert after.w.name == "w"
        assert type(mapped(*calls[5])[1].rows) is tuple
    for args in (*calls, (model, rows)):
        mapped(*args)
    with compiles() as seen:
        for args in calls:
            for given in (args, args, (model, rows), (model, rows)):
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
    classes = [kind() for _ in range(20)]
    structure: Any = jax.tree.structure
    one, other = (structure(made(0)) for made in classes[:2])
    assert one == other and hash(one) != hash(other)
    mapped = sm.shard_map(lambda p: dataclasses.replace(p, x=p.x + 1), make_mesh(), None, P())
    x = jax.device_put(np.ones(2, np.float32), NamedSharding(make_mesh(), P()))
    for made in classes:
        for _ in range(3):
            assert type(mapped(made(x))) is made


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    for _ in range(2):
        mapped(model, rows)
    # Where it may not trace, a call that was compiled still runs.
    with jax.no_tracing(REFUSES_DELETED):
        assert_same(mapped(model, rows), expected)
    with pytest.raises(sm.StatemeshError):
        mapped(model, np.ones((7, 2), np.float32))
    # What a call forbids meanwhile is allowed after each call, refused or not.
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


def test_threads_with_calls_of_their_own() -> None:
    mapped = mapping()
    model, rows = steady(mapped, make_model(), ROWS)
    expected = [mapped(model, np.asarray(rows) * k) for k in range(4)]

    def calls(k: int) -> None:
        own = rows * k if k % 2 else np.asarray(rows) * k
        for _ in range(20):
            assert_same(mapped(model, own), expected[k])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(calls, range(4)))


def test_explain_names_arguments_by_their_paths() -> None:
    model = {key: sm.State(jnp.ones(3)) for key in ("a'b", 'q"x', "back\\slash", "é☃", "new\nline")}
    fun = sm.shard_map(lambda m: sum(s.value.sum() for s in m.values()), make_mesh(), None, P())
    memory = fun.explain(model).memory
    assert memory is not None and memory.by_argument == {f"m[{key!r}]": 12 for key in model}


# What happens while the arguments are flattened


class Watched:
    """A node of the arguments. What is in `hooks` happens while they are flattened."""

    hooks: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, x: Any) -> None:
        self.x = x


def _children(node: Watched) -> tuple[tuple[Any], None]:
    while Watched.hooks:
        Watched.hooks.pop()()
    return (node.x,), None


jax.tree_util.register_pytree_node(Watched, _children, lambda _, children: Watched(*children))


def watched() -> tuple[Any, sm.State, Watched]:
    """A call that is like those before it."""
    mesh = jax.make_mesh((8,), ("x",))
    mapped = sm.shard_map(
        lambda s, node: (s.set(s.value + 1), 2 * node.x), mesh, (None, P("x")), (P(), P("x"))
    )
    node = Watched(jax.device_put(np.arange(8.0), NamedSharding(mesh, P("x"))))
    (state,) = mapped.place(sm.State(0), node)[:1]
    for _ in range(3):
        state, _ = mapped(state, node)
    return mapped, state, node


@contextmanager
def on_signal(handler: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind_of_error", [RuntimeError, KeyboardInterrupt])
def test_what_a_signal_handler_raises_comes_through(kind_of_error: Any) -> None:
    mapped, state, node = watched()

    def stop() -> None:
        raise kind_of_error("stop: 're-tracing' is no refusal, 'no_tracing' is not set")

    with on_signal(stop):
        Watched.hooks.append(lambda: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(kind_of_error, match="stop"):
            mapped(state, node)
    after, doubled = mapped(state, node)
    assert int(after.value) == 4
    np.testing.assert_array_equal(doubled, 2 * np.arange(8.0))


def test_a_signal_handler_may_compute() -> None:
    mapped, state, node = watched()
    results: list[float] = []

    def compute() -> None:
        results.append(float(jax.jit(lambda x: x + 1)(1.0)))
        fresh = sm.vmap2(lambda s, x: s.value + x, in_axes=(None, 0))
        for _ in range(3):
            results.append(float(fresh(sm.State(1.0), jnp.arange(3.0))[2]))
        # The very call that was interrupted, with other arrays.
        results.append(float(mapped(state, Watched(np.ones(16)))[1].sum()))

    with on_signal(compute):
        Watched.hooks.append(lambda: signal.raise_signal(signal.SIGUSR1))
        after, _ = mapped(state, node)
    assert results == [2, 3, 3, 3, 32]
    assert int(after.value) == 4


def test_an_array_that_was_given_up_is_named() -> None:
    mapped, state, node = watched()
    gone = Watched(node.x + 0)
    gone.x.delete()
    with pytest.raises(sm.StatemeshError, match=r"<lambda>.*\n  - node\[<flat index 0>\]"):
        mapped(state, gone)
    assert int(mapped(state, node)[0].value) == 4
