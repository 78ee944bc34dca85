"""The common behaviour of `vmap2` and `pmap2`: how arrays and states enter, leave and are merged."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_says, compiles, counted, without_names


N = 4
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
equal = np.testing.assert_array_equal


def close(result: Any, expected: Any) -> None:
    got, wanted = jax.tree.leaves(result), jax.tree.leaves(expected)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Arrays


def test_arrays_enter_and_leave_on_their_axes(lanes: Any) -> None:
    whole = np.arange(24).reshape(4, 2, 3)
    for into, out in ((0, 0), (-2, 1), (2, -2)):
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
    def fun(tree: Any, y: Any, *, scale: Any, count: sm.State, how: str) -> Any:
        assert (how, tree["c"]) == ("add", None)
        total = tree["a"] + tree["b"][0] * tree["b"][1] * scale
        return {"sum": total, "y": [y, y + 1]}, count.set(count.value + 1)

    axes = ({"a": 0, "b": [-1, None], "c": None}, None)
    call = lanes(fun, in_axes=axes, out_axes=({"sum": 1, "y": [None, 0]}, None))
    tree = {"a": X, "b": [X.T, np.float32(2)], "c": None}
    # Keyword arguments are mapped over axis 0.
    result, count = call(tree, np.arange(2), scale=np.arange(N), count=sm.State(3), how="add")
    equal(result["sum"], (X + X * 2 * np.arange(N)[:, None]).T)
    equal(result["y"][0], np.arange(2))
    equal(result["y"][1], np.tile(np.arange(2) + 1, (N, 1)))
    assert int(count.value) == 4


# States


def plus_one(s: sm.State, x: Any) -> Any:
    return s.set(s.value + 1)


def plus(s: sm.State, x: Any) -> Any:
    return s.set(jax.tree.map(lambda value: value + x, s.value))


def plus_mean(s: sm.State, x: Any) -> Any:
    return s.set(s.value + jax.lax.pmean(x, "i"))


def into(axis: int | None) -> dict[str, Any]:
    return {"state_in_axes": {axis: ...}}


def out_of(axis: int | None) -> dict[str, Any]:
    return {"state_out_axes": {axis: ...}}


ZEROS, ROWS = np.zeros(3, np.float32), np.stack([X, X + 1])
# What the lanes do, the value that enters, the options, and the value that leaves.
STATES: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "one filter means axis 0": (plus, X, {"state_in_axes": ...}, 2 * X),
    "axis 1 both ways": (plus, X.T, into(1), 2 * X.T),
    "the same axis said twice, and from the end": (plus, X.T, into(1) | out_of(-1), 2 * X.T),
    "axis -2 of three": (plus, ROWS, into(-2), ROWS + X),
    "several arrays": (plus, {"n": X, "m": X + 1}, into(0), {"n": 2 * X, "m": 2 * X + 1}),
    "alike, declared": (plus_one, np.zeros((2, N)), into(1), np.ones((2, N))),
    "alike, not declared": (plus_one, X, {}, X + 1),
    "alike, declared on the way out": (plus_one, np.zeros(2), out_of(-1), np.ones((2, N))),
    "None keeps one copy": (plus_mean, ZEROS, into(None) | out_of(None), X.mean(0)),
    "on axis 0 on the way out": (plus, ZEROS, {"state_out_axes": ...}, X),
    "on axis 1 on the way out": (plus, ZEROS, out_of(1), X.T),
}


@pytest.mark.parametrize("row", STATES)
def test_where_states_enter_and_leave(lanes: Any, row: str) -> None:
    fun, old, options, expected = STATES[row]
    after = lanes(fun, axis_name="i", in_axes=(None, 0), **options)(sm.State(old), X)
    close(after.value, expected)
    assert jax.tree.map(np.shape, after.value) == jax.tree.map(np.shape, expected)


def test_an_axis_that_stands_for_states_alone_is_refused(lanes: Any) -> None:
    def read(m: Any, x: Any = 0.0) -> Any:
        return x

    state, rng = sm.State(X), sm.RandomState(jax.random.key(0))
    both = {"s": state, "x": X}
    text = (
        "read: in_axes maps arrays outside of States, so these axes would map nothing:\n  - %s\n"
        "Write None there, and say which States have lanes: state_in_axes={%d: filter}. A RandomState needs "
        "neither, because each lane draws from a stream of its own."
    )
    for in_axes, args, item, axis in (
        ((0, 0), (state, X), "in_axes[0] = 0 stands for m, a State", 0),
        ((0, 0), (rng, X), "in_axes[0] = 0 stands for m, a RandomState", 0),
        (({"s": -1, "x": None}, 0), (both, X), "in_axes[0] = -1 stands for m['s'], a State", -1),
        (1, (state,), "in_axes = 1 stands for m, a State", 1),
    ):
        call = functools.partial(lanes(read, in_axes=in_axes, axis_size=N), *args)
        assert_says(call, sm.BatchAxisError, text % (item, axis))
    # The default, what maps an array too, and what holds anyway.
    equal(lanes(read)(state, X), X)
    equal(lanes(read, in_axes=-2)(state, X), X)
    equal(lanes(read, in_axes=(0, 0))(both, X), X)
    equal(lanes(read, in_axes=(0, 0), state_in_axes=...)(state, X), X)


def test_what_is_not_written_comes_back_as_the_same_array(lanes: Any) -> None:
    model = {
        "lane": sm.ParamState(X),
        "shared": sm.State(X),
        "rng": sm.RandomState(jax.random.key(0)),
        "array": jnp.ones((N, 2)),
    }
    # Where a state that is not written would go does not matter.
    options: Any = {"state_in_axes": {0: sm.ParamState}, "state_out_axes": {1: sm.State}}
    call = lanes(lambda m, x: (m, x, x + 1), **options)
    placed = call.place(model, jnp.asarray(X))
    for a, b in zip(jax.tree.leaves(call(*placed)[:2]), jax.tree.leaves(placed), strict=True):
        assert a is b
    # Nor is it an output of the program.
    (output,) = jax.tree.leaves(call.lower(*placed).program.out_info)
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


# Tracing and compiling


def test_ten_calls_trace_once_and_compile_nothing_more(lanes: Any) -> None:
    def fun(m: Any, x: Any) -> Any:
        key, rng = m["rng"].split()
        new = {name: m[name].set(m[name].value + x) for name in ("lane", "total")}
        return (key, x), {**new, "rng": rng}

    body, count = counted(fun)
    call = lanes(body, in_axes=(None, 0), out_axes=(0, None), state_in_axes={0: "lane"})
    model: Any = {
        "lane": sm.State(jnp.zeros(N), tag="lane"),
        "total": sm.State(0.0, reduce="sum"),
        "rng": sm.RandomState(jax.random.key(0)),
    }
    x = np.arange(N, dtype=np.float32)
    _, model = jax.block_until_ready(call(model, x))
    with compiles() as seen:
        for _ in range(9):
            _, model = jax.block_until_ready(call(model, x))
    assert (count.times, seen.times) == (1, 0)
    equal(model["lane"].value, 10 * x)
    assert float(model["total"].value) == 10 * x.sum()


def test_derivatives_around_lanes(lanes: Any) -> None:
    def lane(s: sm.State, x: Any) -> Any:
        y = jnp.sin(x * s.value)
        return y, s.set(s.value + y.sum())

    call = lanes(lane, in_axes=(None, 0), out_axes=(0, None))

    def loss(w: Any, x: Any) -> Any:
        y, after = call(sm.State(w, reduce="sum"), x)
        return jnp.sum(y**2) + after.value**2

    def plain(w: Any, x: Any) -> Any:
        y = jnp.sin(x * w)
        return jnp.sum(y**2) + (w + y.sum()) ** 2

    def around(loss: Any) -> Any:
        w, x = jnp.float32(0.7), jnp.asarray(X) / 10
        each = jax.vmap(jax.grad(loss, (0, 1)), (None, 0))
        return jax.jit(each)(w, jnp.stack([x, 2 * x])), jax.jvp(loss, (w, x), (w, x + 1))

    close(around(loss), around(plain))


# The compiled programs are those that one would write by hand


LANES = 8


def lane(buffers: list[jax.Array], weight: jax.Array, x: jax.Array) -> Any:
    """A result, new buffers, and a weight on which the lanes agree."""
    after = jax.lax.pmean(weight + x.sum() * weight, "i")
    return x * weight, [b + x for b in buffers], after


def by_policy(buffers: list[sm.State], weight: sm.State, x: jax.Array) -> Any:
    """The same, in which the state's own policy merges the lanes' weights."""
    w = weight.value
    after = [b.set(b.value + x) for b in buffers]
    return x * w, after, weight.set(w + x.sum() * w)


def vmapped() -> Any:
    hand = jax.vmap(lane, in_axes=(0, None, 0), out_axes=(0, 0, None), axis_name="i")
    return jax.jit(hand)


def on_devices() -> Any:
    mesh = Mesh(np.array(jax.devices()[:LANES]), ("i",))

    def shard(buffers: list[jax.Array], weight: jax.Array, x: jax.Array) -> Any:
        out, after, merged = lane([b[0] for b in buffers], weight, x[0])
        return out[None], [b[None] for b in after], merged

    specs = (P("i"), P(), P("i"))
    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=(P("i"), P("i"), P())))


@pytest.mark.parametrize(("transform", "by_hand"), [(sm.vmap2, vmapped), (sm.pmap2, on_devices)])
def test_compiled_program_is_the_hand_written_one(
    transform: Any, by_hand: Callable[[], Any]
) -> None:
    buffers = [sm.BatchState(jnp.zeros((LANES, 3))) for _ in range(20)]
    weight, x = sm.ParamState(jnp.float32(2), reduce="mean"), jnp.ones((LANES, 3))
    mapped = transform(
        by_policy, axis_name="i", in_axes=(None, None, 0), state_in_axes=sm.BatchState
    )
    mine = mapped.lower(buffers, weight, x).compile().as_text()
    hand = by_hand()
    theirs = hand.lower([b.value for b in buffers], weight.value, x).compile().as_text()
    assert without_names(mine) == without_names(theirs)


@pytest.mark.parametrize("transform", [sm.vmap2, sm.pmap2])
def test_under_a_trace_there_is_no_layer_of_ours(transform: Any) -> None:
    mapped = transform(
        lambda s, read, x: (x, s.set(s.value + x), read),
        in_axes=(None, None, 0),
        state_out_axes={0: sm.State},
    )
    jaxpr = jax.make_jaxpr(mapped)(sm.State(0.0), sm.ParamState(jnp.ones(3)), jnp.ones(8)).jaxpr
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert not names & {"jit", "pjit", "custom_vmap_call"}
    # A state that was only read is no output of the program.
    assert jaxpr.outvars[2] is jaxpr.invars[1]
