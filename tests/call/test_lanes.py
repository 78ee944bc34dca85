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


TRANSFORMS: dict[str, Any] = {"vmap2": sm.vmap2, "pmap2": sm.pmap2}
N = 4
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)


@pytest.fixture(params=TRANSFORMS)
def lanes(request: pytest.FixtureRequest) -> Any:
    return TRANSFORMS[request.param]


def equal(result: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


def close(result: Any, expected: Any) -> None:
    got, wanted = jax.tree.leaves(result), jax.tree.leaves(expected)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


# Arrays


@pytest.mark.parametrize(("into", "out"), [(0, 0), (1, 2), (-1, -1), (-2, 1), (-3, -3), (2, -2)])
def test_arrays_enter_and_leave_on_their_axes(lanes: Any, into: int, out: int) -> None:
    whole = np.arange(24).reshape(4, 2, 3)
    each = list(np.moveaxis(whole, into, 0))
    result = lanes(lambda x: x * 10 + 1, in_axes=into, out_axes=out)(whole)
    equal(result, np.stack([x * 10 + 1 for x in each], out))


def test_what_goes_round_is_the_same_where_it_was_the_same(lanes: Any) -> None:
    ring = [(i, (i + 1) % N) for i in range(N)]

    def moved(x: jax.Array) -> Any:
        return jax.lax.ppermute(x, "i", ring)

    def mean(x: jax.Array) -> Any:
        return moved(jax.lax.pmean(x, "i"))

    close(lanes(mean, axis_name="i", out_axes=None)(X), X.mean(0))
    with pytest.raises(sm.BatchAxisError, match="the same in all lanes"):
        lanes(moved, axis_name="i", out_axes=None)(X)


def test_lanes_that_get_nothing_differ() -> None:
    def some(x: jax.Array) -> Any:
        return jax.lax.ppermute(jax.lax.pmean(x, "i"), "i", [(0, 1), (1, 0)])

    with pytest.raises(sm.BatchAxisError, match="the same in all lanes"):
        sm.pmap2(some, "i", out_axes=None)(X)


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


def test_an_array_that_all_lanes_agree_on_may_leave_once(lanes: Any) -> None:
    call = lanes(lambda x: (jax.lax.psum(x, "i"), x), axis_name="i", out_axes=(None, 0))
    total, same = call(X)
    equal(total, X.sum(0))
    equal(same, X)


# States


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_a_declared_state_enters_and_leaves_on_its_axis(lanes: Any, axis: int) -> None:
    each = [np.full((2, 3), i) for i in range(N)]
    call = lanes(
        lambda s, x: (x, s.set(s.value * 2 + x[0].astype(int))),
        in_axes=(None, 0),
        state_in_axes={axis: sm.ShortTermState},
    )
    _, after = call(sm.ShortTermState(np.stack(each, axis)), X)
    equal(after.value, np.stack([e * 2 + int(X[i, 0]) for i, e in enumerate(each)], axis))


def test_axes_of_states_are_independent_of_in_axes(lanes: Any) -> None:
    # in_axes=0 for the whole model: its states still enter as declared, here whole.
    model = {"s": sm.State(np.arange(3.0)), "x": X}
    y, s = lanes(lambda m: (m["s"].value + m["x"], m["s"]))(model)
    equal(y, X + np.arange(3))
    equal(s.value, np.arange(3))


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
        (({"s": -1, "x": None}, 0), ({"s": state, "x": X}, X), "in_axes[0] = -1 stands for m['s'], a State", -1),
        (1, (state,), "in_axes = 1 stands for m, a State", 1),
    ]
    for in_axes, args, item, axis in refused:
        text = "\n".join([head, f"  - {item}", mend % axis])
        assert_says(lambda: lanes(read, in_axes=in_axes, axis_size=N)(*args), sm.BatchAxisError, text)
    # The default, what maps an array too, and what holds anyway.
    equal(lanes(read)(state, X), X)
    equal(lanes(read, in_axes=-2)(state, X), X)
    equal(lanes(read, in_axes=(0, 0))({"s": state, "x": X}, X), X)
    equal(lanes(read, in_axes=(0, 0), state_in_axes=...)(state, X), X)


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


def test_one_filter_means_axis_0(lanes: Any) -> None:
    call = lanes(lambda s, x: s.set(s.value + x[0]), in_axes=(None, 0), state_in_axes=...)
    equal(call(sm.State(np.ones(N, np.float32)), X).value, 1 + X[:, 0])


def test_a_state_of_several_arrays_has_its_lanes_in_each(lanes: Any) -> None:
    value = {"n": np.arange(N), "mean": X}
    call = lanes(
        lambda s, x: s.set({"n": s.value["n"] + 1, "mean": s.value["mean"] + x}),
        in_axes=(None, 0),
        state_in_axes={0: sm.BatchState},
    )
    after = call(sm.BatchState(value), X)
    equal(after.value["n"], np.arange(N) + 1)
    equal(after.value["mean"], 2 * X)


def test_an_unbatched_write_to_a_declared_state_is_broadcast(lanes: Any) -> None:
    call = lanes(
        lambda s, x: s.set(np.full(2, 7, np.float32)), in_axes=(None, 0), state_in_axes={1: ...}
    )
    equal(call(sm.State(np.zeros((2, N), np.float32)), X).value, np.full((2, N), 7))


def test_an_unbatched_write_to_an_undeclared_state_stays_unbatched(lanes: Any) -> None:
    call = lanes(lambda s, x: (x, s.set(s.value + 1)), in_axes=(None, 0))
    equal(call(sm.State(np.zeros(N)), X)[1].value, np.ones(N))


def test_an_unbatched_write_to_a_declared_output_is_broadcast(lanes: Any) -> None:
    call = lanes(lambda s, x: s.set(s.value + 1), in_axes=(None, 0), state_out_axes={-1: ...})
    equal(call(sm.State(np.zeros(2)), X).value, np.ones((2, N)))


def test_axis_none_keeps_one_copy(lanes: Any) -> None:
    call = lanes(
        lambda s, x: s.set(s.value + jax.lax.pmean(x, "i")),
        axis_name="i",
        in_axes=(None, 0),
        state_in_axes={None: ...},
        state_out_axes={None: ...},
    )
    close(call(sm.State(np.ones(3, np.float32)), X).value, 1 + X.mean(0))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_written_state_gets_its_axis_on_the_way_out(lanes: Any, axis: int) -> None:
    call = lanes(lambda s, x: s.set(s.value + x), in_axes=(None, 0), state_out_axes={axis: ...})
    equal(call(sm.State(np.ones(3, np.float32)), X).value, np.stack(list(1 + X), axis))


def test_the_same_axis_may_be_said_twice_and_from_the_end(lanes: Any) -> None:
    call = lanes(
        lambda s, x: s.set(s.value + 1),
        in_axes=(None, 0),
        state_in_axes={1: ...},
        state_out_axes={-1: ...},
    )
    equal(call(sm.State(np.zeros((2, N))), X).value, np.ones((2, N)))


def test_a_declared_output_that_is_not_written_is_ignored(lanes: Any) -> None:
    call = lanes(lambda s, x: (x * s.value, s), in_axes=(None, 0), state_out_axes={0: ...})
    state = sm.State(jnp.arange(3.0))
    _, after = call(*(placed := call.place(state, X)))
    assert after.value is placed[0].value


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
    call = lanes(lambda m, x: (m, x, x + 1), in_axes=0, state_in_axes={0: sm.ParamState})
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
    def fun(x: Any) -> Any:
        return {
            "lane": sm.ParamState(x * 2),
            "wide": sm.HiddenState(x),
            "alike": sm.State(7),
            "tiled": sm.ParamState(8),
        }

    made = lanes(fun, state_out_axes={0: sm.ParamState, 1: sm.HiddenState})(X)
    equal(made["lane"].value, X * 2)
    equal(made["wide"].value, X.T)
    assert made["alike"].value.shape == ()
    equal(made["tiled"].value, np.full(N, 8))


def test_a_state_that_is_closed_over_is_a_constant(lanes: Any) -> None:
    w = sm.State(3.0)
    equal(lanes(lambda x: x * w.value)(X), X * 3)


def test_what_the_function_raises_comes_through(lanes: Any) -> None:
    error = KeyError("as it is")

    def fun(x: Any) -> Any:
        raise error

    with pytest.raises(KeyError) as raised:
        lanes(fun)(X)
    assert raised.value is error


def test_fed_back_over_several_calls(lanes: Any) -> None:
    def fun(m: Any, x: Any) -> Any:
        lane, total = m["lane"], m["total"]
        return x * lane.value, {
            "lane": lane.set(lane.value + x),
            "total": total.set(total.value + jnp.sum(x)),
        }

    model: Any = {"lane": sm.State(X, tag="lane"), "total": sm.State(0.0, reduce="sum")}
    call = lanes(fun, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: "lane"})
    lane, total = X, np.float32(0)
    for _ in range(3):
        y, model = call(model, X)
        equal(y, X * lane)
        lane, total = lane + X, total + X.sum()
    equal(model["lane"].value, lane)
    equal(model["total"].value, total)


# Policies


def welford(old: Any, new: Any, axis_names: Any) -> Any:
    n = jax.lax.psum(new["n"] - old["n"], axis_names)
    return {"n": old["n"] + n, "mean": jax.lax.pmean(new["mean"], axis_names)}


POLICIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mean": (lambda v, x: x, lambda v: X.mean(0)),
    "max": (lambda v, x: x, lambda v: X.max(0)),
    "min": (lambda v, x: x, lambda v: X.min(0)),
    "sum": (lambda v, x: v + x, lambda v: v + X.sum(0)),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_named_policies_over_lanes(lanes: Any, policy: str) -> None:
    write, expected = POLICIES[policy]
    old = np.full(3, 2, np.float32)
    state = sm.State({"a": old, "b": [old * 2]}, reduce=policy)

    def fun(s: Any, x: Any) -> Any:
        return s.set({"a": write(s.value["a"], x), "b": [write(s.value["b"][0], x)]})

    after = lanes(fun, in_axes=(None, 0))(state, X)
    close(after.value["a"], expected(old))
    close(after.value["b"], [expected(old * 2)])
    assert after.reduce == policy


def test_a_function_as_policy_over_lanes(lanes: Any) -> None:
    state = sm.State({"n": 5, "mean": np.zeros(3, np.float32)}, reduce=welford)
    after = lanes(
        lambda s, x: s.set({"n": s.value["n"] + 2, "mean": s.value["mean"] + x}), in_axes=(None, 0)
    )(state, X)
    assert int(after.value["n"]) == 5 + 2 * N
    close(after.value["mean"], X.mean(0))


def test_a_declared_axis_goes_before_the_policy(lanes: Any) -> None:
    call = lanes(lambda s, x: s.set(x), in_axes=(None, 0), state_out_axes={0: ...})
    equal(call(sm.State(np.zeros(3, np.float32), reduce="sum"), X).value, X)


# Tracing and compiling


def test_ten_calls_trace_once_and_compile_nothing_more(lanes: Any) -> None:
    def fun(m: Any, x: Any) -> Any:
        key, rng = m["rng"].split()
        w = m["w"]
        return (key, x), {
            "w": w.set(w.value + x),
            "rng": rng,
            "n": m["n"].set(m["n"].value + 1),
        }

    body, count = counted(fun)
    call = lanes(body, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: "lane"})
    model: Any = {
        "w": sm.State(jnp.zeros(N), tag="lane"),
        "rng": sm.RandomState(jax.random.key(0)),
        "n": sm.State(0),
    }
    x = np.ones(N, np.float32)
    y, model = call(model, x)
    jax.block_until_ready(model)
    assert count.times == 1
    with compiles() as seen:
        for _ in range(9):
            y, model = call(model, x)
            jax.block_until_ready((y, model))
    assert (count.times, seen.times) == (1, 0)
    equal(model["w"].value, np.full(N, 10))
    assert int(model["n"].value) == 10


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
    y = jnp.sin(x * m.w.value) * m.lane.value
    return y, m.replace(lane=m.lane.value + y, total=m.total.value + jnp.sum(y))


def mapped(lanes: Any) -> Any:
    return lanes(step, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: sm.ShortTermState})


def by_hand(m: Model, x: Any) -> tuple[Any, Model]:
    """The same computation for all lanes at once, without a mapped call."""
    y = jnp.sin(x * m.w.value) * m.lane.value
    return y, m.replace(lane=m.lane.value + y, total=m.total.value + jnp.sum(y))


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
    "eager": lambda call, m, x: call(m, x),
    "jit": lambda call, m, x: jax.jit(call)(m, x),
    "grad": lambda call, m, x: jax.grad(lambda m: loss(call, m, x))(m),
    "remat": lambda call, m, x: jax.grad(lambda m: loss(jax.checkpoint(call), m, x))(m),
    "scan": scanned,
    "cond": chosen,
    "vmap": lambda call, m, x: jax.vmap(call, (None, 0))(m, jnp.stack([x, 2 * x])),
    "vmap of grad": lambda call, m, x: jax.vmap(jax.grad(lambda m, x: loss(call, m, x)), (None, 0))(
        m, jnp.stack([x, 2 * x])
    ),
    "jvp": lambda call, m, x: jax.jvp(lambda x: loss(call, m, x), (x,), (x + 1,)),
}


@functools.cache
def expected(how: str) -> Any:
    return AROUND[how](jax.jit(by_hand), model(), jnp.asarray(X) / 10)


@pytest.mark.parametrize("how", AROUND)
def test_inside_transformations(lanes: Any, how: str) -> None:
    x = jnp.asarray(X) / 10
    close(AROUND[how](mapped(lanes), model(), x), expected(how))


def test_an_outer_trace_runs_the_function_once(lanes: Any) -> None:
    body, count = counted(step)
    call = lanes(body, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: sm.ShortTermState})
    jax.jit(lambda m, x: scanned(call, m, x))(model(), X)
    assert count.times == 1


# Methods of a mapped call


def test_lower_gives_the_program_from_shapes_alone(lanes: Any) -> None:
    body, count = counted(step)
    call = lanes(body, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: sm.ShortTermState})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (model(), X))
    lowered = call.lower(*shapes)
    assert count.times == 1
    assert sorted(x.shape for x in jax.tree.leaves(lowered.program.out_info)) == [
        (),
        (N, 3),
        (N, 3),
    ]
    assert lowered.compile().as_text()


def test_what_was_placed_stays_where_it_is(lanes: Any) -> None:
    call = mapped(lanes)
    args = call.place(model(), X)
    again = call.place(*args)
    for a, b in zip(jax.tree.leaves(args), jax.tree.leaves(again), strict=True):
        assert a is b
    close(call(*args), by_hand(model(), X))


def test_unsharded_is_the_same_on_one_device(lanes: Any) -> None:
    y, after = mapped(lanes).unsharded(model(), X)
    close((y, after), by_hand(model(), X))
    assert len(y.devices()) == 1


@pytest.mark.parametrize("called", ["at once", "as a decorator"])
def test_decorator_forms(lanes: Any, called: str) -> None:
    def double(x: Any) -> Any:
        return x * 2 + jax.lax.axis_index("i")

    options = {"axis_name": "i", "in_axes": -1, "out_axes": -1}
    call = lanes(double, **options) if called == "at once" else lanes(**options)(double)
    assert isinstance(call, sm.StatefulMapping)
    assert (call.__name__, call.__wrapped__) == ("double", double)
    equal(call(X.T), X.T * 2 + np.arange(N))


def test_method_decorator(lanes: Any) -> None:
    class Net(sm.Module):
        w: sm.ParamState

        @lanes(in_axes=(None, 0), out_axes=(0, None))  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return x * self.w.value, self.replace(w=self.w.value + 1)

    net = Net(sm.ParamState(2.0))
    y, after = net(X)
    equal(y, X * 2)
    assert float(after.w.value) == 3.0
    equal(Net.__call__(after, X)[0], X * 3)
    (placed,) = net.__call__.place(X)
    equal(placed, X)


# Random numbers


def draw(rng: sm.RandomState, x: Any) -> Any:
    del x
    return rng.split()


def words(keys: Any) -> Any:
    return np.asarray(jax.random.key_data(keys))


def outside() -> Any:
    return draw(sm.RandomState(jax.random.key(3)), None)


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


def test_the_first_lane_draws_what_is_drawn_outside(lanes: Any) -> None:
    equal(drawn(lanes, N)[0][0][0], words(outside()[0]))


def test_both_transforms_draw_the_same() -> None:
    for a, b in zip(drawn(sm.vmap2, 8), drawn(sm.pmap2, 8), strict=True):
        equal(a[0], b[0])
        equal(a[1], b[1])


def test_the_first_lanes_of_more_draw_the_same(lanes: Any) -> None:
    for few, many in zip(drawn(lanes, N), drawn(lanes, 8), strict=True):
        equal(few[0], many[0][:N])


@pytest.mark.parametrize("n", [N, 8])
def test_the_state_advances_once_a_call_whatever_the_number_of_lanes(lanes: Any, n: int) -> None:
    rng = outside()[1]
    for _, key in drawn(lanes, n):
        equal(key, words(rng.key))
        _, rng = draw(rng, None)


def test_lanes_with_keys_of_their_own(lanes: Any) -> None:
    keys = jax.random.split(jax.random.key(5), N)
    call = lanes(draw, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: sm.RandomState})
    got, after = call(sm.RandomState(keys), X)
    each = [draw(sm.RandomState(key), None) for key in keys]
    equal(words(got), np.stack([words(own) for own, _ in each]))
    equal(words(after.key), np.stack([words(rng.key) for _, rng in each]))


def test_a_filter_for_all_states_leaves_a_single_key_alone(lanes: Any) -> None:
    call = lanes(draw, in_axes=(None, 0), out_axes=(0, None), state_in_axes=..., state_out_axes=...)
    keys, rng = call(sm.RandomState(jax.random.key(3)), np.zeros(N))
    equal(words(keys), drawn(lanes, N)[0][0])
    assert rng.key.shape == ()
