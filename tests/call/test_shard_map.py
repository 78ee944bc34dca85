"""The contract of `shard_map` for specs, states, static leaves, placement and its result."""

import functools
import inspect
import itertools
import unittest.mock
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import legacy
from tests.helpers import make_mesh


pytestmark = pytest.mark.usefixtures("each_kind")


X = np.arange(16, dtype=np.float32)


# Specs mean what they mean for jax.shard_map


@pytest.mark.parametrize(
    ("in_specs", "out_specs"),
    [
        ((P("x"), P()), P("x")),
        ((P("x"), None), P("x")),
        (P(), P()),
        ((P(("x", "y")), P()), P(("x", "y"))),
    ],
)
def test_bare_function_as_under_jax(in_specs: Any, out_specs: Any) -> None:
    mesh = make_mesh("4x2")

    def fun(a: jax.Array, b: jax.Array) -> jax.Array:
        return a * 2 + jnp.sum(b)

    ours = sm.shard_map(fun, mesh, in_specs, out_specs)(X, X)
    spec = jax.tree.map(lambda s: P() if s is None else s, in_specs, is_leaf=lambda s: s is None)
    # JAX takes arrays on Explicit axes only where they lie as the specs say.
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), spec)
    placed = jax.device_put((X, X), places)
    bare = jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=out_specs))(*placed)
    np.testing.assert_array_equal(ours, bare)
    assert ours.sharding.is_equivalent_to(bare.sharding, 1)


def test_prefix_trees_in_and_out() -> None:
    def fun(tree: dict[str, Any], rest: Any) -> Any:
        assert tree["a"][0].shape == (2,)
        assert tree["b"].shape == (16,)
        return {"a": tree["a"], "total": rest}, tree["b"] + 1

    call = sm.shard_map(
        fun, make_mesh(), ({"a": P("x"), "b": P()}, P()), ({"a": P("x"), "total": P()}, P())
    )
    out, b = call({"a": [X, X * 2], "b": X}, {"deep": (1.5, X)})
    np.testing.assert_array_equal(out["a"][1], X * 2)
    np.testing.assert_array_equal(out["total"]["deep"][1], X)
    np.testing.assert_array_equal(b, X + 1)


def test_decorator_and_keyword_forms() -> None:
    mesh = make_mesh()

    @sm.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def double(x: jax.Array) -> jax.Array:
        "Twice."
        return x * 2

    partial = functools.partial(sm.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(double(X), partial(lambda x: x * 2)(X))
    assert double.__name__ == "double"
    assert list(inspect.signature(double).parameters) == ["x"]
    assert double.__wrapped__(3) == 6
    assert isinstance(double, sm.StatefulMapping)


def test_method_decorator() -> None:
    class Layer(sm.Module):
        w: sm.ParamState

        @sm.shard_map(mesh=make_mesh(), in_specs=(P(), P("x")), out_specs=(P("x"), P()))
        def step(self, x: jax.Array) -> tuple[jax.Array, "Layer"]:
            return x * self.w.value, self.replace(w=self.w.value + 1)

    layer = Layer(sm.ParamState(2.0))
    y, after = layer.step(X)
    np.testing.assert_array_equal(y, X * 2)
    assert float(after.w.value) == 3.0
    assert float(after.step.unsharded(X)[1].w.value) == 4.0
    assert list(inspect.signature(layer.step).parameters) == ["x"]
    assert layer.step.lower(X).compile() is not None
    assert len(layer.step.place(X)) == 1
    assert isinstance(Layer.step, sm.StatefulMapping)


def test_context_mesh() -> None:
    call = sm.shard_map(lambda x: x.sum(keepdims=True), in_specs=P("x"), out_specs=P("x"))
    with jax.set_mesh(make_mesh("4")):
        assert call(X).shape == (4,)
    with jax.set_mesh(make_mesh("2", AxisType.Explicit)):
        assert call(X).shape == (2,)
        assert jax.jit(call)(X).shape == (2,)


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_axis_names_leave_the_others_to_the_compiler(how: str) -> None:
    mesh = make_mesh("4x2")

    def fun(s: sm.State, x: jax.Array) -> Any:
        assert x.shape == (4, 8)
        return jax.lax.psum(x, "x"), s.set(s.value + x.sum())

    call = sm.shard_map(fun, mesh, (P(), P("x")), (P(), P()), axis_names={"x"})
    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    run = call if how == "eager" else jax.jit(call)
    placed = jax.device_put(x, NamedSharding(mesh, P("x", "y")))
    for given in (x, placed):
        y, after = run(sm.State(0.0, reduce="sum"), given)
        np.testing.assert_allclose(y, x.reshape(4, 4, 8).sum(0))
        np.testing.assert_allclose(after.value, x.sum())


def test_inferred_specs_on_explicit_axes() -> None:
    mesh = make_mesh("8", AxisType.Explicit)
    x = jax.device_put(X, NamedSharding(mesh, P("x")))

    def fun(s: sm.State, x: jax.Array, y: jax.Array) -> Any:
        assert x.shape == (2,) and y.shape == (16,)
        return x + 1, s.set(s.value + 1)

    call = sm.shard_map(fun, mesh, out_specs=(P("x"), P()))
    y, s = call(sm.State(0), x, X)
    np.testing.assert_array_equal(y, X + 1)
    assert int(s.value) == 1
    y, s = jax.jit(call)(s, x, X)
    assert int(s.value) == 2


# Where states are, and where they go


def shapes(*states: sm.State) -> Any:
    return [s.value.shape for s in states]


def test_states_anywhere_in_arguments_and_results() -> None:
    def fun(a: dict[str, Any], b: list[Any], *, c: sm.State) -> Any:
        return {"deep": [a["s"].set(a["s"].value + 1)], "more": (b[0], c.set(c.value * 2))}, b[1]

    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), (P(), P("x")))
    out, x = call({"s": sm.State(1)}, [sm.State(2), X], c=sm.State(3))
    assert int(out["deep"][0].value) == 2
    assert int(out["more"][0].value) == 2
    assert int(out["more"][1].value) == 6
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize(
    ("state_in_specs", "expected"),
    [
        (None, [(16,), (2,), (16,)]),
        (P("x"), [(2,), (2,), (2,)]),
        ({sm.ParamState: P("x")}, [(16,), (2,), (2,)]),
        ({"split": P("x"), ...: P()}, [(2,), (16,), (16,)]),
        ({sm.BatchState: P("x"), sm.LongTermState: P()}, [(2,), (2,), (16,)]),
        ({sm.filters.Where(lambda m: m[2]): P("x")}, [(16,), (2,), (2,)]),
    ],
)
def test_placement_of_states(state_in_specs: Any, expected: Any) -> None:
    seen = []

    def fun(states: Any, x: jax.Array) -> Any:
        seen.append(shapes(*states))
        return x

    states = (sm.BatchState(X, tag="split"), sm.State(X, spec=P("x")), sm.ParamState(X))
    sm.shard_map(fun, make_mesh(), (P(), P("x")), P("x"), state_in_specs=state_in_specs)(states, X)
    assert seen == [expected]


def test_spec_of_a_state_may_be_a_prefix_tree() -> None:
    value = {"k": X, "v": {"a": X, "b": jnp.zeros(3)}}
    spec = {"k": P("x"), "v": P()}
    for state, given in ((sm.State(value, spec=spec), None), (sm.State(value), {...: spec})):
        seen: list[Any] = []

        def fun(s: sm.State, seen: list[Any] = seen) -> Any:
            seen.append(jax.tree.map(jnp.shape, s.value))
            return s.set(jax.tree.map(lambda x: x + 1, s.value))

        call = sm.shard_map(
            lambda s, fun=fun: fun(s), make_mesh(), (P(),), P(), state_in_specs=given
        )
        after = call(state)
        assert seen[0]["k"] == (2,)
        assert seen[0]["v"] == {"a": (16,), "b": (3,)}
        np.testing.assert_array_equal(after.value["k"], X + 1)


def test_written_states_leave_the_way_they_entered() -> None:
    mesh = make_mesh()
    call = sm.shard_map(
        lambda *states: [s.set(s.value + 1) for s in states],
        mesh,
        (P(), P(), P()),
        P(),
        state_in_specs={"split": P("x")},
    )
    by_call, whole, own = call(sm.State(X, tag="split"), sm.State(X), sm.State(X, spec=P("x")))
    for state, spec in ((by_call, P("x")), (whole, P()), (own, P("x"))):
        assert state.value.sharding.is_equivalent_to(NamedSharding(mesh, spec), state.value.ndim)
        np.testing.assert_array_equal(state.value, X + 1)


def test_state_out_specs_apply_to_written_states_only() -> None:
    def fun(read: sm.State, written: sm.State, rng: sm.RandomState) -> Any:
        _, rng = rng.split()
        mine = jax.lax.axis_index("x")
        part = jax.lax.dynamic_slice(written.value, (2 * mine,), (2,))
        return read, written.replace(value=part), rng

    call = sm.shard_map(fun, make_mesh(), (P(), P(), P()), P(), state_out_specs=P("x"))
    scalar = sm.State(5.0)
    read, written, rng = call(scalar, sm.State(X), sm.RandomState(jax.random.key(0)))
    assert read.value.shape == ()
    np.testing.assert_array_equal(written.value, X)
    assert rng.key.shape == ()


def test_states_made_inside() -> None:
    def fun(x: jax.Array) -> Any:
        return (
            sm.State(x, spec=P("x")),
            sm.State(jax.lax.psum(x, "x")),
            sm.State(x.sum(), spec=sm.PerShard("x")),
        )

    split, whole, own = sm.shard_map(fun, make_mesh(), P("x"), P())(X)
    np.testing.assert_array_equal(split.value, X)
    np.testing.assert_array_equal(whole.value, X.reshape(8, 2).sum(0))
    np.testing.assert_array_equal(own.value, X.reshape(8, 2).sum(1))


def test_states_continue_by_path_after_tree_map() -> None:
    class Two(sm.Module):
        a: sm.State
        b: sm.State

    def fun(m: Two, x: jax.Array) -> Any:
        return x, jax.tree.map(lambda v: v + 1, m)

    mesh = make_mesh()
    call = sm.shard_map(
        fun, mesh, (P(), P()), P(), state_in_specs={sm.filters.PathContains("b"): P("x")}
    )
    _, after = call(Two(sm.State(X), sm.State(X)), X)
    assert after.a.value.sharding.is_equivalent_to(NamedSharding(mesh, P()), 1)
    assert after.b.value.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)
    np.testing.assert_array_equal(after.b.value, X + 1)


def test_exchanged_states_keep_their_own_placements() -> None:
    mesh = make_mesh()

    def fun(a: sm.State, b: sm.State) -> Any:
        return b.set(b.value + 1), a.set(a.value * 2)

    b, a = sm.shard_map(fun, mesh, (P(), P()), P(), state_in_specs={"a": P("x")})(
        sm.State(X, tag="a"), sm.State(X, tag="b")
    )
    assert a.value.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)
    assert b.value.sharding.is_equivalent_to(NamedSharding(mesh, P()), 1)
    np.testing.assert_array_equal(a.value, X * 2)


# PerShard


@pytest.mark.parametrize("name", ["1", "8", "4x2"])
def test_per_shard(name: str) -> None:
    mesh = make_mesh(name)
    n = mesh.shape["x"]

    def fun(count: sm.State, x: jax.Array) -> Any:
        assert count.value.shape == (3,)
        return x, count.set(count.value + jax.lax.axis_index("x"))

    call = sm.shard_map(fun, mesh, (P(), P("x")), (P("x"), P()))
    count = sm.State(np.zeros((n, 3), np.int32), spec=sm.PerShard("x"))
    for _ in range(2):
        _, count = call(count, X)
    np.testing.assert_array_equal(count.value, np.arange(n)[:, None] * np.full(3, 2))


def test_per_shard_over_two_axes() -> None:
    mesh = make_mesh("4x2")

    def fun(own: sm.State) -> Any:
        return own.set(own.value + jax.lax.axis_index(("x", "y")))

    call = sm.shard_map(fun, mesh, (P(),), P(), state_in_specs={...: sm.PerShard("x", "y")})
    np.testing.assert_array_equal(call(sm.State(np.zeros(8, np.int32))).value, np.arange(8))


# Static leaves and numbers


def test_static_leaves_stay_what_they_are() -> None:
    class Net(sm.Module):
        act: Any
        name: str
        dtype: Any
        depth: int
        nothing: None
        w: sm.State

    def fun(net: Net, x: jax.Array) -> Any:
        assert net.name == "net" and net.dtype is jnp.float32 and net.nothing is None
        assert type(net.depth) is int
        return net.act(x) * net.depth, net

    net = Net(jax.nn.relu, "net", jnp.float32, 3, None, sm.State(1.0))
    y, after = sm.shard_map(fun, make_mesh(), (P(), P("x")), (P("x"), P()))(net, X)
    np.testing.assert_array_equal(y, X * 3)
    assert after.act is jax.nn.relu and after.depth == 3 and after.dtype is jnp.float32


def test_numbers_are_traced_by_themselves_and_static_under_none() -> None:
    seen = []

    def fun(a: Any, b: Any, c: Any, *, d: Any) -> Any:
        seen.append([isinstance(v, jax.Array) for v in (a, b["k"], c, d)])
        return a + b["k"] + c + d

    call = sm.shard_map(fun, make_mesh(), (P(), P(), None), P())
    assert int(call(1, {"k": 2}, 3, d=4)) == 10
    assert int(call(5, {"k": 2}, 3, d=4)) == 14
    assert seen == [[True, True, False, False]]
    assert int(call(1, {"k": 2}, 4, d=4)) == 11
    assert len(seen) == 2


def test_unhashable_objects_under_none() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self, factor: float) -> None:
            self.factor = factor

    call = sm.shard_map(lambda o, x: x * o.factor, make_mesh(), (None, P("x")), P("x"))
    two, three = Unhashable(2.0), Unhashable(3.0)
    with pytest.warns(sm.RetracedWarning):
        call(two, X)
    for one in (two, three, two):
        np.testing.assert_array_equal(call(one, X), X * one.factor)


def test_numpy_values_are_arrays() -> None:
    seen = []

    def fun(a: Any, b: Any) -> Any:
        seen.append((a.dtype, b.dtype))
        return a * b

    class Holder(sm.Module):
        a: Any

    call = sm.shard_map(lambda h, b: fun(h.a, b), make_mesh(), (P(), P("x")), P("x"))
    np.testing.assert_array_equal(call(Holder(np.float32(2)), X), X * 2)
    np.testing.assert_array_equal(call(Holder(np.float32(3)), X), X * 3)
    assert seen == [(np.float32, np.float32)]


def test_keyword_arguments_are_broadcast() -> None:
    def fun(x: jax.Array, *, scale: Any, state: sm.State, how: str) -> Any:
        assert how == "up"
        return x * scale, state.set(state.value + 1)

    call = sm.shard_map(fun, make_mesh(), (P("x"),), (P("x"), P()))
    y, state = call(X, scale=np.full(2, 3.0, np.float32), state=sm.State(0), how="up")
    np.testing.assert_array_equal(y, X * 3)
    assert int(state.value) == 1


def test_equinox_modules_and_results_that_are_no_arrays() -> None:
    linear = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    x = np.ones((8, 4), np.float32)
    call = sm.shard_map(
        lambda layer, x: (jax.vmap(layer)(x), layer, "text", None),
        make_mesh(),
        (P(), P("x")),
        (P("x"), P(), None, None),
    )
    y, layer, text, none = call(linear, x)
    np.testing.assert_allclose(y, jax.vmap(linear)(jnp.asarray(x)), rtol=1e-6)
    assert text == "text" and none is None and layer.in_features == 4


# SpecPlacement


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["2", "8"])
def test_inputs_are_placed_from_anywhere(kind: AxisType, name: str) -> None:
    mesh = make_mesh(name, kind)
    devices = list(mesh.devices.flat)
    other = jax.sharding.Mesh(np.array(devices[::-1]), ("z",))
    call = sm.shard_map(lambda s, x: (x + s.value, s), mesh, (P(), P("x")), (P("x"), P()))
    state = sm.State(jax.device_put(X, jax.devices()[-1]), spec=P("x"))
    for given in (
        X,
        jnp.asarray(X),
        jax.device_put(X, jax.devices()[5]),
        jax.device_put(X, NamedSharding(mesh, P())),
        jax.device_put(X, NamedSharding(other, P("z"))),
        jax.device_put(X, NamedSharding(make_mesh("4x2"), P("y"))),
    ):
        for _ in range(2):
            y, after = call(state, given)
            np.testing.assert_array_equal(y, 2 * X)
            assert y.sharding == NamedSharding(mesh, P("x"))
            assert after.value.sharding == NamedSharding(mesh, P("x"))


@pytest.mark.parametrize(
    "kinds", [*itertools.product((AxisType.Auto, AxisType.Explicit), repeat=2)], ids=str
)
def test_inside_jit_values_are_laid_out_on_axes_of_every_type(kinds: Any) -> None:
    mesh = make_mesh("4x2", *kinds)
    call = sm.shard_map(lambda s, x: (x + s.value, s), mesh, (P(), P("x")), (P("x"), P()))
    state = sm.place(sm.State(X, spec=P("x")), mesh)
    for given in (X, *(jax.device_put(X, NamedSharding(mesh, P(n))) for n in (None, "x", "y"))):
        y, after = jax.jit(call)(state, given)
        np.testing.assert_array_equal(y, 2 * X)
        np.testing.assert_array_equal(after.value, X)
    wide = sm.shard_map(lambda x: x, mesh, P(("x", "y")), P(("x", "y")))
    for given in (X, jax.device_put(X, NamedSharding(mesh, P(("y", "x"))))):
        np.testing.assert_array_equal(jax.jit(wide)(given), X)


def test_closed_over_states_are_constants() -> None:
    w = sm.State(jax.device_put(np.float32(2), jax.devices()[3]))
    call = sm.shard_map(lambda x: x * w.value, make_mesh(), P("x"), P("x"))
    np.testing.assert_array_equal(call(X), X * 2)


def test_place_and_unsharded() -> None:
    mesh = make_mesh()
    call = sm.shard_map(
        lambda s, x: (x * s.value, s.set(s.value + x)), mesh, (P(), P("x")), (P("x"), P())
    )
    state, x = call.place(sm.State(jnp.ones(16), spec=P("x")), X)
    assert state.value.sharding == x.sharding == NamedSharding(mesh, P("x"))
    again, _ = call.place(state, x)
    assert again.value is state.value
    y, after = call.unsharded(state, x)
    np.testing.assert_array_equal(y, call(state, x)[0])
    np.testing.assert_array_equal(after.value, call(state, x)[1].value)
    assert len(y.sharding.device_set) == 1


@pytest.mark.parametrize("mapping", [sm.shard_map, legacy.shard_map], ids=["newer", "legacy"])
def test_abstract_mesh_under_a_trace(mapping: Any) -> None:
    mesh = make_mesh()
    call = mapping(lambda x: x * 2, mesh.abstract_mesh, P("x"), P("x"))
    placed = jax.device_put(X, NamedSharding(mesh, P("x")))
    np.testing.assert_array_equal(jax.jit(call)(placed), X * 2)


def test_zero_arguments_and_empty_results() -> None:
    call = sm.shard_map(lambda: jnp.arange(3), make_mesh(), (), P())
    np.testing.assert_array_equal(call(), np.arange(3))
    assert sm.shard_map(lambda x: None, make_mesh(), (P("x"),), None)(X) is None
    nothing = sm.shard_map(lambda x: x, make_mesh(), P("x"), P("x"))(np.zeros((0, 3), np.float32))
    assert nothing.shape == (0, 3)


# Errors inside the function


@pytest.mark.parametrize("error", [RuntimeError, KeyError, ValueError, KeyboardInterrupt])
def test_exceptions_come_through_and_the_model_is_untouched(error: type[BaseException]) -> None:
    raised = error("boom")
    state = sm.State(jnp.arange(16.0))

    def fun(s: sm.State, x: jax.Array) -> Any:
        s.set(s.value * 2)
        raise raised

    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), P("x"))
    with pytest.raises(error) as info:
        call(state, X)
    assert info.value is raised
    np.testing.assert_array_equal(state.value, np.arange(16.0))
    assert isinstance(state.value.sharding, SingleDeviceSharding)


def test_the_call_works_after_an_error() -> None:
    fail = [True]

    def fun(x: jax.Array) -> jax.Array:
        if fail[0]:
            raise RuntimeError("not yet")
        return x + 1

    call = sm.shard_map(fun, make_mesh(), P("x"), P("x"))
    with pytest.raises(RuntimeError, match="not yet"):
        call(X)
    fail[0] = False
    np.testing.assert_array_equal(call(X), X + 1)


def test_python_may_branch_without_jit() -> None:
    def fun(s: sm.State, x: jax.Array) -> Any:
        return (x + 1 if bool(s.value > 0) else x - 1), s

    call = sm.shard_map(fun, make_mesh(), (P(), P("x")), (P("x"), P()), jit=False)
    np.testing.assert_array_equal(call(sm.State(1.0), X)[0], X + 1)
    np.testing.assert_array_equal(call(sm.State(-1.0), X)[0], X - 1)


def test_disable_jit() -> None:
    call = sm.shard_map(
        lambda s, x: (x, s.set(s.value + 1)), make_mesh(), (P(), P("x")), (P("x"), P())
    )
    with jax.disable_jit():
        assert int(call(sm.State(1), X)[1].value) == 2


def test_what_has_every_attribute_is_a_function_too() -> None:
    fun = unittest.mock.Mock(return_value=jnp.ones(()))
    mapped = sm.shard_map(fun, make_mesh(), P("x"), P())
    assert float(mapped(np.ones(8, np.float32))) == 1
    assert mapped.__name__ == "Mock"
