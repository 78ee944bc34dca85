"""The common behaviour of `vmap2` and `pmap2`: how arrays and states enter, leave and are merged."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm
from tests.helpers import assert_says, compiles, counted


N = 4
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
equal = np.testing.assert_array_equal


def close(result: Any, expected: Any) -> None:
    got, wanted = jax.tree.leaves(result), jax.tree.leaves(expected)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Arrays


@pytest.mark.parametrize(("into", "out"), [(0, 0), (1, 2), (-2, 1), (2, -2)])
def test_arrays_enter_and_leave_on_their_axes(lanes: Any, into: int, out: int) -> None:
    whole = np.arange(24).reshape(4, 2, 3)
    result = lanes(lambda x: x * 10 + 1, in_axes=into, out_axes=out)(whole)
    equal(result, np.moveaxis(whole, into, out) * 10 + 1)


def test_what_goes_round_is_the_same_where_it_was_the_same(lanes: Any) -> None:
    def moved(x: jax.Array, ring: Any = tuple((i, (i + 1) % N) for i in range(N))) -> Any:
        return jax.lax.ppermute(x, "i", ring)

    def mean(x: jax.Array) -> Any:
        return moved(jax.lax.pmean(x, "i"))

    def some(x: jax.Array) -> Any:
        return moved(jax.lax.pmean(x, "i"), ((0, 1), (1, 0)))

    close(lanes(mean, axis_name="i", out_axes=None)(X), X.mean(0))
    # JAX's vmap takes full permutations only.
    for fun in (moved,) if lanes is sm.vmap2 else (moved, some):
        with pytest.raises(sm.BatchAxisError, match="the same in all lanes"):
            lanes(fun, axis_name="i", out_axes=None)(X)


def test_axes_are_prefix_trees(lanes: Any) -> None:
    tree = {"a": X, "b": [X.T, np.float32(2)]}

    def fun(tree: Any, y: Any) -> Any:
        return {"sum": tree["a"] + tree["b"][0] * tree["b"][1], "y": [y, y + 1]}

    call = lanes(
        fun, in_axes=({"a": 0, "b": [-1, None]}, None), out_axes={"sum": 1, "y": [None, 0]}
    )
    result = call(tree, np.arange(2))
    equal(result["sum"], (X * 3).T)
    equal(result["y"][0], np.arange(2))
    equal(result["y"][1], np.tile(np.arange(2) + 1, (N, 1)))


def test_keyword_arguments_are_mapped_over_axis_0(lanes: Any) -> None:
    def fun(x: Any, *, scale: Any, count: sm.State, how: str) -> Any:
        assert how == "add"
        return x * scale, count.set(count.value + 1)

    y, count = lanes(fun, in_axes=1, out_axes=(1, 0))(
        X.T, scale=np.arange(N), count=sm.State(3), how="add"
    )
    equal(y, (X * np.arange(N)[:, None]).T)
    assert int(count.value) == 4


def test_what_is_no_array_is_static(lanes: Any) -> None:
    class Layer(sm.Module):
        w: sm.ParamState
        act: Any
        rate: float
        name: str

    def fun(layer: Layer, x: Any, nothing: Any) -> Any:
        assert nothing is None
        assert type(layer.rate) is float
        return layer.act(x * layer.w.value) * layer.rate, layer

    layer = Layer(sm.ParamState(-2.0), jnp.abs, 0.5, "first")
    y, after = lanes(fun, in_axes=(None, 0, None), out_axes=(0, None))(layer, X, None)
    equal(y, X)
    assert (after.act, after.rate, after.name) == (jnp.abs, 0.5, "first")


# States

ZEROS = np.zeros(3, np.float32)
LAST = np.moveaxis(np.stack([X, X + 1]), 0, 1)  # Lanes on axis 0, two rows in each.


def plus_one(s: sm.State, x: Any) -> Any:
    return s.set(s.value + 1)


def plus(s: sm.State, x: Any) -> Any:
    return s.set(s.value + x)


def plus_mean(s: sm.State, x: Any) -> Any:
    return s.set(s.value + jax.lax.pmean(x, "i"))


# What the lanes do, the value that enters, the options, and the value that leaves.
STATES: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "one filter means axis 0": (plus, X, {"state_in_axes": ...}, 2 * X),
    "axis 1 both ways": (plus, X.T, {"state_in_axes": {1: ...}}, 2 * X.T),
    "the same axis said twice, and from the end": (
        plus,
        X.T,
        {"state_in_axes": {1: ...}, "state_out_axes": {-1: ...}},
        2 * X.T,
    ),
    "axis -2 of three": (
        plus,
        np.moveaxis(LAST, 0, 1),
        {"state_in_axes": {-2: sm.State}},
        np.moveaxis(LAST + X[:, None], 0, 1),
    ),
    "several arrays": (
        lambda s, x: s.set({"n": s.value["n"] + 1, "mean": s.value["mean"] + x}),
        {"n": np.arange(N), "mean": X},
        {"state_in_axes": ...},
        {"n": np.arange(N) + 1, "mean": 2 * X},
    ),
    "an unbatched write to a declared state is broadcast": (
        lambda s, x: s.set(np.full(2, 7, np.float32)),
        np.zeros((2, N), np.float32),
        {"state_in_axes": {1: ...}},
        np.full((2, N), 7),
    ),
    "an unbatched write to an undeclared state stays unbatched": (plus_one, X, {}, X + 1),
    "an unbatched write to a declared output is broadcast": (
        plus_one,
        np.zeros(2),
        {"state_out_axes": {-1: ...}},
        np.ones((2, N)),
    ),
    "None keeps one copy": (
        plus_mean,
        ZEROS,
        {"state_in_axes": {None: ...}, "state_out_axes": {None: ...}},
        X.mean(0),
    ),
    "on axis 0 on the way out": (plus, ZEROS, {"state_out_axes": ...}, X),
    "on axis 1 on the way out": (plus, ZEROS, {"state_out_axes": {1: ...}}, X.T),
}


@pytest.mark.parametrize("row", STATES)
def test_where_states_enter_and_leave(lanes: Any, row: str) -> None:
    fun, old, options, expected = STATES[row]
    after = lanes(fun, axis_name="i", in_axes=(None, 0), **options)(sm.State(old), X)
    close(after.value, expected)
    assert jax.tree.map(np.shape, after.value) == jax.tree.map(np.shape, expected)


def test_the_default_axis_is_not_that_of_states(lanes: Any) -> None:
    model = {"s": sm.State(np.arange(3.0)), "x": X}
    y, s = lanes(lambda m: (m["s"].value + m["x"], m["s"]))(model)
    equal(y, X + np.arange(3))
    equal(s.value, np.arange(3))


def test_the_first_match_counts(lanes: Any) -> None:
    model = {
        "a": sm.ParamState(np.arange(8).reshape(2, N), tag="t"),
        "b": sm.ParamState(np.arange(8).reshape(N, 2)),
        "c": sm.State(np.arange(2)),
        "d": sm.State(np.arange(N)),
    }

    def fun(m: Any, x: Any) -> Any:
        assert [m[k].value.shape for k in "abcd"] == [(2,), (2,), (2,), (N,)]
        return x, {k: m[k].set(m[k].value * 2) for k in "abcd"}

    axes = {1: "t", 0: sm.ParamState, None: ...}
    _, after = lanes(fun, in_axes=(None, 0), state_in_axes=axes)(model, X)
    for k in "abcd":
        equal(after[k].value, model[k].value * 2)


def test_an_axis_that_stands_for_states_alone_is_refused(lanes: Any) -> None:
    def read(m: Any, x: Any = 0.0) -> Any:
        return x

    state, rng = sm.State(X), sm.RandomState(jax.random.key(0))
    head = "read: in_axes maps arrays outside of States, so these axes would map nothing:"
    mend = (
        "Write None there, and say which States have lanes: state_in_axes={%d: filter}. A RandomState needs "
        "neither, because each lane draws from a stream of its own."
    )
    refused: list[tuple[Any, tuple[Any, ...], str, int]] = [
        ((0, 0), (state, X), "in_axes[0] = 0 stands for m, a State", 0),
        ((0, 0), (rng, X), "in_axes[0] = 0 stands for m, a RandomState", 0),
        (
            ({"s": -1, "x": None}, 0),
            ({"s": state, "x": X}, X),
            "in_axes[0] = -1 stands for m['s'], a State",
            -1,
        ),
        (1, (state,), "in_axes = 1 stands for m, a State", 1),
    ]
    for in_axes, args, item, axis in refused:
        text = "\n".join([head, f"  - {item}", mend % axis])
        assert_says(
            lambda: lanes(read, in_axes=in_axes, axis_size=N)(*args), sm.BatchAxisError, text
        )
    # The default, what maps an array too, and what holds anyway.
    equal(lanes(read)(state, X), X)
    equal(lanes(read, in_axes=-2)(state, X), X)
    equal(lanes(read, in_axes=(0, 0))({"s": state, "x": X}, X), X)
    equal(lanes(read, in_axes=(0, 0), state_in_axes=...)(state, X), X)


def test_what_is_not_written_comes_back_as_the_same_array(lanes: Any) -> None:
    args = (
        {
            "lane": sm.ParamState(X),
            "shared": sm.State(X),
            "rng": sm.RandomState(jax.random.key(0)),
            "array": jnp.ones((N, 2)),
        },
        jnp.asarray(X),
    )
    # Where a state that is not written would go does not matter.
    options: Any = {"state_in_axes": {0: sm.ParamState}, "state_out_axes": {1: sm.State}}
    call = lanes(lambda m, x: (m, x, x + 1), **options)
    placed = call.place(*args)
    model, x, _ = call(*placed)
    assert x is placed[1]
    for name in ("lane", "shared", "rng"):
        assert model[name].value is placed[0][name].value
    assert model["array"] is placed[0]["array"]
    # The state is not an output of the program either.
    (output,) = jax.tree.leaves(call.lower(*args).program.out_info)
    assert output.shape == X.shape


def test_states_made_inside(lanes: Any) -> None:
    closed_over = sm.State(2.0)

    def fun(x: Any) -> Any:
        return {
            "lane": sm.ParamState(x * closed_over.value),
            "wide": sm.HiddenState(x),
            "alike": sm.State(7),
            "tiled": sm.ParamState(8),
        }

    made = lanes(fun, state_out_axes={0: sm.ParamState, 1: sm.HiddenState})(X)
    equal(made["lane"].value, X * 2)
    equal(made["wide"].value, X.T)
    assert made["alike"].value.shape == ()
    equal(made["tiled"].value, np.full(N, 8))


def test_what_the_function_raises_comes_through(lanes: Any) -> None:
    error = KeyError("as it is")

    def fun(x: Any) -> Any:
        raise error

    with pytest.raises(KeyError) as raised:
        lanes(fun)(X)
    assert raised.value is error


# Policies


def welford(old: Any, new: Any, axis_names: Any) -> Any:
    n = jax.lax.psum(new["n"] - old["n"], axis_names)
    return {"n": old["n"] + n, "mean": jax.lax.pmean(new["mean"], axis_names)}


def test_policies_over_lanes(lanes: Any) -> None:
    old = np.full(3, 2, np.float32)

    def state(policy: Any, tag: Any = None) -> sm.State:
        return sm.State({"n": 5.0, "mean": old}, reduce=policy, tag=tag)

    def fun(states: dict[str, sm.State], x: Any) -> Any:
        return {
            name: s.set({"n": s.value["n"] + 2, "mean": s.value["mean"] + x})
            for name, s in states.items()
        }

    names = ["mean", "max", "min", "sum"]
    states = {name: state(name) for name in names}
    states |= {"welford": state(welford), "declared": state("sum", "declared")}
    after = lanes(fun, in_axes=(None, 0), state_out_axes={0: "declared"})(states, X)
    wanted = {
        "mean": {"n": 7, "mean": old + X.mean(0)},
        "max": {"n": 7, "mean": old + X.max(0)},
        "min": {"n": 7, "mean": old + X.min(0)},
        "sum": {"n": 7, "mean": old + X.sum(0)},
        "welford": {"n": 5 + 2 * N, "mean": old + X.mean(0)},
        # A declared axis goes before the policy.
        "declared": {"n": np.full(N, 7), "mean": old + X},
    }
    for name, value in wanted.items():
        close(after[name].value, value)
        assert after[name].reduce == states[name].reduce


# Tracing and compiling


def test_ten_calls_trace_once_and_compile_nothing_more(lanes: Any) -> None:
    def fun(m: Any, x: Any) -> Any:
        key, rng = m["rng"].split()
        w, total = m["w"], m["total"]
        return (key, x), {
            "w": w.set(w.value + x),
            "rng": rng,
            "total": total.set(total.value + x),
        }

    body, count = counted(fun)
    call = lanes(body, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: "lane"})
    model: Any = {
        "w": sm.State(jnp.zeros(N), tag="lane"),
        "rng": sm.RandomState(jax.random.key(0)),
        "total": sm.State(0.0, reduce="sum"),
    }
    x = np.arange(N, dtype=np.float32)
    y, model = call(model, x)
    jax.block_until_ready(model)
    assert count.times == 1
    with compiles() as seen:
        for _ in range(9):
            y, model = call(model, x)
            jax.block_until_ready((y, model))
    assert (count.times, seen.times) == (1, 0)
    equal(model["w"].value, 10 * x)
    assert float(model["total"].value) == 10 * x.sum()


def test_other_shapes_and_other_statics_are_other_programs(lanes: Any) -> None:
    body, count = counted(lambda x, how: x * 2 if how == "twice" else x)
    call = lanes(body, in_axes=(0, None))
    for x, how, times in [(X, "twice", 1), (X, "once", 2), (X[:2], "twice", 3), (X, "twice", 3)]:
        equal(call(x, how), x * 2 if how == "twice" else x)
        assert count.times == times


# Inside JAX's transformations


class Model(sm.Module):
    w: sm.ParamState
    lane: sm.ShortTermState
    total: sm.State


def model() -> Model:
    return Model(
        sm.ParamState(np.arange(1, 4, dtype=np.float32)),
        sm.ShortTermState(np.ones((N, 3), np.float32)),
        sm.State(np.float32(0), reduce="sum"),
    )


def step(m: Model, x: Any) -> tuple[Any, Model]:
    """One lane; without a mapped call, all lanes at once."""
    y = jnp.sin(x * m.w.value) * m.lane.value
    return y, m.replace(lane=m.lane.value + y, total=m.total.value + jnp.sum(y))


def mapped(lanes: Any, fun: Any = step) -> Any:
    return lanes(fun, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: sm.ShortTermState})


def loss(call: Any, m: Model, x: Any) -> Any:
    y, after = call(m, x)
    return jnp.sum(y**2) + after.total.value**2 + jnp.sum(after.lane.value**3)


def scanned(call: Any, m: Model, x: Any) -> Any:
    def body(m: Model, x: Any) -> Any:
        y, m = call(m, x)
        return m, y

    return jax.lax.scan(body, m, jnp.stack([x, x + 1, x + 2]))


def chosen(call: Any, m: Model, x: Any) -> Any:
    return [
        jax.lax.cond(flag, lambda m: call(m, x)[1], lambda m: m, m)
        for flag in (jnp.asarray(True), jnp.asarray(False))
    ]


AROUND: dict[str, Callable[..., Any]] = {
    "remat": lambda call, m, x: jax.grad(lambda m: loss(jax.checkpoint(call), m, x))(m),
    "scan": scanned,
    "cond": chosen,
    "vmap of grad": lambda call, m, x: jax.vmap(jax.grad(lambda m, x: loss(call, m, x)), (None, 0))(
        m, jnp.stack([x, 2 * x])
    ),
    "jvp": lambda call, m, x: jax.jvp(lambda x: loss(call, m, x), (x,), (x + 1,)),
}


@functools.cache
def expected(how: str) -> Any:
    return AROUND[how](jax.jit(step), model(), jnp.asarray(X) / 10)


@pytest.mark.parametrize("how", AROUND)
def test_inside_transformations(lanes: Any, how: str) -> None:
    x = jnp.asarray(X) / 10
    close(jax.jit(AROUND[how], static_argnums=0)(mapped(lanes), model(), x), expected(how))


def test_an_outer_trace_runs_the_function_once(lanes: Any) -> None:
    body, count = counted(step)
    call = mapped(lanes, body)
    jax.jit(lambda m, x: scanned(call, m, x))(model(), X)
    assert count.times == 1


# Methods of a mapped call


def test_lower_place_and_unsharded(lanes: Any) -> None:
    body, count = counted(step)
    call = mapped(lanes, body)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (model(), X))
    lowered = call.lower(*shapes)
    assert count.times == 1
    results = jax.tree.leaves(lowered.program.out_info)
    assert sorted(x.shape for x in results) == [(), (N, 3), (N, 3)]
    assert lowered.compile().as_text()
    args = call.place(model(), X)
    for a, b in zip(jax.tree.leaves(args), jax.tree.leaves(call.place(*args)), strict=True):
        assert a is b
    close(call(*args), step(model(), X))
    y, after = call.unsharded(model(), X)
    close((y, after), step(model(), X))
    assert len(y.devices()) == 1


def test_decorators(lanes: Any) -> None:
    def double(x: Any) -> Any:
        return x * 2 + jax.lax.axis_index("i")

    options = {"axis_name": "i", "in_axes": -1, "out_axes": -1}
    for call in (lanes(double, **options), lanes(**options)(double)):
        assert isinstance(call, sm.StatefulMapping)
        assert (call.__name__, call.__wrapped__) == ("double", double)
        equal(call(X.T), X.T * 2 + np.arange(N))

    class Net(sm.Module):
        w: sm.ParamState

        @lanes(in_axes=(None, 0), out_axes=(0, None))  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return x * self.w.value, self.replace(w=self.w.value + 1)

    net = Net(sm.ParamState(2.0))
    y, after = net(X)
    equal(y, X * 2)
    equal(Net.__call__(after, X)[0], X * 3)
    (placed,) = net.__call__.place(X)
    equal(placed, X)


# Random numbers


def draw(rng: sm.RandomState, x: Any) -> Any:
    del x
    return rng.split()


def words(keys: Any) -> Any:
    return np.asarray(jax.random.key_data(keys))


@functools.cache
def drawn(lanes: Any, n: int) -> Any:
    """The draws of a first and a second call, each with a key for each lane, and the state."""
    call = lanes(draw, in_axes=(None, 0), out_axes=(0, None))
    first, rng = call(sm.RandomState(jax.random.key(3)), np.zeros(n))
    second, later = call(rng, np.zeros(n))
    return (words(first), words(rng.key)), (words(second), words(later.key))


def test_lanes_draw_different_numbers_at_every_call(lanes: Any) -> None:
    (first, _), (second, _) = drawn(lanes, 8)
    assert first.shape == (8, 2)
    assert len(np.unique(np.concatenate([first, second]), axis=0)) == 16
    key, rng = draw(sm.RandomState(jax.random.key(3)), None)
    equal(first[0], words(key))
    # The state advances once a call, whatever the number of lanes, and fewer lanes draw as the first of more.
    for few, many, other in zip(drawn(lanes, N), drawn(lanes, 8), drawn(sm.vmap2, 8), strict=True):
        equal(few[0], many[0][:N])
        equal(few[1], words(rng.key))
        equal(many[1], words(rng.key))
        equal(many[0], other[0])
        _, rng = draw(rng, None)


def test_keys_of_lanes_and_a_single_key(lanes: Any) -> None:
    keys = jax.random.split(jax.random.key(5), N)
    call = lanes(draw, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: sm.RandomState})
    got, after = call(sm.RandomState(keys), X)
    each = [draw(sm.RandomState(key), None) for key in keys]
    equal(words(got), np.stack([words(own) for own, _ in each]))
    equal(words(after.key), np.stack([words(rng.key) for _, rng in each]))
    # A filter for all states leaves a single key alone.
    call = lanes(draw, in_axes=(None, 0), out_axes=(0, None), state_in_axes=..., state_out_axes=...)
    got, rng = call(sm.RandomState(jax.random.key(3)), np.zeros(N))
    equal(words(got), drawn(lanes, N)[0][0])
    assert rng.key.shape == ()
