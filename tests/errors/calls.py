"""Every mistake that is refused, with its exact text."""

from collections.abc import Callable

from typing import Any

import jax

import jax.numpy as jnp

import numpy as np

import pytest

from jax.sharding import AxisType, Mesh, NamedSharding

from jax.sharding import PartitionSpec as P

import statemesh as sm

from statemesh import legacy

from tests.helpers import assert_says, make_mesh, mistakes_in

X = np.arange(16, dtype=np.float32)

IN_SPECS, OUT_SPECS = (P(), P("x")), (P("x"), P())

CASES: list[Any] = []

mistake = mistakes_in(CASES)


def step(model: Any, x: Any) -> Any:
    return x * 2, model


def call(
    fun: Any = step,
    mesh: Any = None,
    in_specs: Any = IN_SPECS,
    out_specs: Any = OUT_SPECS,
    **kwargs: Any,
) -> sm.StatefulMapping:
    mapped: sm.StatefulMapping = sm.shard_map(
        fun, mesh or make_mesh(), in_specs, out_specs, **kwargs
    )
    return mapped


class Net(sm.Module):
    w: sm.ParamState
    mean: sm.BatchState
    count: sm.State


def net() -> Net:
    return Net(sm.ParamState(X), sm.BatchState(0.0), sm.State(0))


def assigning_to_a_state() -> Any:
    sm.BatchState(0.0).value = 1.0


def wrong_dtype_and_shape_written() -> Any:
    state = sm.BatchState({"mean": jnp.zeros(3), "n": jnp.int32(0)}, name="stats")
    return state.set({"mean": jnp.zeros(4), "n": jnp.float32(0)})


def kind_with_a_constructor() -> Any:
    class Mine(sm.State):
        def __init__(self, size: int) -> None:
            super().__init__(jnp.zeros(size))

    return Mine


def rows_over_an_unbound_axis() -> Any:
    def fun(rng: sm.RandomState, x: jax.Array) -> Any:
        _, rng = rng.rows(2, "data")
        return x, rng

    return call(fun)(sm.RandomState(jax.random.key(0)), X)


def where_without_a_tree() -> Any:
    predicate = sm.filters.to_predicate(sm.filters.Where(lambda m: m.w))
    return predicate((), sm.State(0))


def combining_overlapping_parts() -> Any:
    params, _ = sm.partition(net(), sm.ParamState)
    return sm.combine(params, net())


def combining_too_few_parts() -> Any:
    params, stats, _ = sm.partition({"net": [net()]}, sm.ParamState, sm.BatchState)
    return sm.combine(params, stats)


def combining_different_trees() -> Any:
    params, rest = sm.partition({"net": [net(), 1]}, sm.ParamState)
    rest["net"][0] = sm.State(0)
    rest["net"].append(2)
    return sm.combine(params, rest)


def another_mesh_than_the_one_that_is_set() -> Any:
    with jax.set_mesh(make_mesh("4x2")):
        return call()(net(), X)


def abstract_mesh_that_arguments_do_not_lie_on() -> Any:
    x = jax.device_put(np.ones(8), NamedSharding(make_mesh("4"), P("x")))
    mesh = make_mesh().abstract_mesh
    return sm.shard_map(lambda x: x, mesh, P("x"), P("x"))(x)


def axes_all_taken_by_an_outer_call() -> Any:
    mesh = make_mesh()
    return call(lambda m, x: (call(mesh=mesh)(m, x)[0], m))(net(), X)


def axis_taken_by_an_outer_call() -> Any:
    mesh = make_mesh("4x2")
    inner = call(mesh=mesh, axis_names={"x"})
    return call(lambda m, x: (inner(m, x)[0], m), mesh=mesh, axis_names={"x"})(net(), X)


def mesh_partly_taken_by_an_outer_call() -> Any:
    mesh = make_mesh("4x2")
    inner = sm.shard_map(lambda x: x, mesh, P("y"), P("y"))
    return sm.shard_map(inner, mesh, P("x"), P("x"), axis_names={"x"})(X)


def axis_taken_by_vmap() -> Any:
    mesh = make_mesh("4x2", AxisType.Explicit)
    split = jax.device_put(X, NamedSharding(mesh, P("x")))
    mapped = sm.shard_map(lambda x: x, mesh, P(), P(), axis_names={"x"})
    return jax.jit(jax.vmap(mapped))(split)


def donated_model_used_again() -> Any:
    mapped = call(lambda m, x: (x, m.replace(count=m.count.value + 1)), donate="states")
    (model, x) = mapped.place(net(), X)
    mapped(model, x)
    return mapped(model, x)


def tracer_kept_from_an_old_trace() -> Any:
    kept = []
    jax.jit(lambda w: kept.append(net().replace(w=w)))(X)
    return call()(kept[0], X)


def writes(**new: Callable[[jax.Array], Any]) -> Any:
    def fun(model: Net, x: jax.Array) -> Any:
        return x, model.replace(**{name: make(x) for name, make in new.items()})

    return fun


def one_state_in_two_places_written() -> Any:
    one = sm.State(0.0)
    both = [net().replace(mean=one, count=one)]
    return call(lambda m, x: (x, [m[0].replace(mean=m[0].mean.value + 1)]))(both, X)


def several_diverging_writes() -> Any:
    mesh = make_mesh("4x2")
    fun = writes(mean=jnp.mean, count=lambda x: jax.lax.axis_index("y"))
    return call(fun, mesh=mesh, in_specs=(P(), P(("x", "y"))), out_specs=(P(("x", "y")), P()))(
        net(), X
    )


def result_that_varies_and_is_not_typed_so() -> Any:
    fun = lambda m, x: ({"order": jnp.argsort(x), "sum": jax.lax.psum(x, "x")}, m)
    return call(fun, out_specs=(P(), P()))(net(), X)


def one_of_two_models_returned_by_a_cond() -> Any:
    def choose(teacher: Net, student: Net, x: Any) -> Any:
        return x, jax.lax.cond(jax.lax.pmax(x.sum(), "x") > 0, lambda: teacher, lambda: student)

    model = net().replace(mean=sm.BatchState(0.0, reduce="sum"))
    return call(choose, in_specs=(P(), P(), P("x")))(model, model, X)


def a_sum_with_an_old_value_that_differs() -> Any:
    mapped = call(lambda s, x: (x, s.set(s.value + x)), state_in_specs=P("x"), state_out_specs=P())
    return mapped(sm.State(X, reduce="sum"), X)


def a_function_whose_result_differs() -> Any:
    def keep(old: Any, new: Any, axis_names: Any) -> Any:
        return new

    mapped = call(lambda s, x: (x, s.set(s.value + x.sum())))
    return mapped(sm.State(0.0, reduce=keep), X)


def another_model_beside_the_loss() -> Any:
    fun = lambda m: ((m["w"].sum(), 0), {"b": m["w"]})
    return sm.value_and_grad(fun, has_aux=True)({"w": X})


MASKED = np.ma.masked_array(X, X > 3)


def branches_that_write_differently() -> Any:
    def more(m: Net) -> Net:
        return m.replace(count=m.count.value + 1, mean=m.mean.value + 1)

    fun = lambda m, x: (x, jax.lax.cond(jnp.sum(x) > 20, more, lambda m: m, m))
    return call(fun)(net(), X)


def several_keys_for_every_shard() -> Any:
    keys = sm.RandomState(jax.random.split(jax.random.key(0), 8))
    return call(lambda m, x: (x, m))({"rng": keys}, X)


@pytest.mark.parametrize(("make", "error", "text"), CASES)
def test_the_text_is_exactly(
    make: Callable[[], Any], error: type[BaseException], text: str
) -> None:
    # JAX adds the address of a page to some of its own classes of errors.
    assert_says(make, error, text, until="\nSee https:")


MISTAKES: Mistakes = {
    "state in state": lambda: sm.State({"a": sm.ParamState(1.0)}),
    "state of text": lambda: sm.State({"a": "text", "b": None, "c": object}),
    "unknown policy": lambda: sm.State(0.0, reduce="median"),
    "not a spec for a state": lambda: sm.State(0.0, spec="x"),
    "assigning to a state": assigning_to_a_state,
    "wrong dtype and shape written": wrong_dtype_and_shape_written,
    "fraction written to an integer": lambda: sm.State(3).set(1.5),
    "structure changed": lambda: sm.State((1, 2), name="pair").set([1, 2]),
    "state written into a state": lambda: sm.State(1.0).set(sm.State(2.0)),
    "unknown state field": lambda: sm.State(1.0).replace(values=2.0),
    "kind with a constructor": kind_with_a_constructor,
    "raw key": lambda: sm.RandomState(jax.random.PRNGKey(0)),
    "seed for a key": lambda: sm.RandomState(0),
    "sharded key": lambda: sm.RandomState(jax.random.key(0), spec=P("x")),
    "rows over an unbound axis": rows_over_an_unbound_axis,
    "unknown module field": lambda: net().replace(weights=1.0),
    "init argument that nobody takes": lambda: net().init_all_states(size=3),
    "not a filter": lambda: sm.partition(net(), 3),
    "not a filter in a mapping": lambda: call(state_in_specs={3: P("x")}),
    "filter that matches nothing": lambda: sm.partition(net(), "cache"),
    "filter that matches nothing in a call": lambda: call(
        state_in_specs={sm.RandomState: P(), "cache": P("x")}
    )(net(), X),
    "filter that matches nothing in the result": lambda: call(
        state_out_specs={sm.filters.PathContains("cache"): P("x")}
    )(net(), X),
    "where without a tree": where_without_a_tree,
    "combining nothing": lambda: sm.combine(),
    "combining overlapping parts": combining_overlapping_parts,
    "combining too few parts": combining_too_few_parts,
    "combining different trees": combining_different_trees,
    "mapping no function": lambda: sm.shard_map("step", make_mesh(), P(), P()),
    "no out specs": lambda: sm.shard_map(step, make_mesh(), P()),
    "text for a spec": lambda: call(in_specs=(P(), "x")),
    "text for a state spec": lambda: call(state_in_specs={sm.ParamState: "x"}),
    "per shard for an array": lambda: call(in_specs=(P(), sm.PerShard("x"))),
    "unknown donation": lambda: call(donate="everything"),
    "devices for a mesh": lambda: sm.shard_map(step, "cpu", P(), P()),
    "empty mesh": lambda: sm.shard_map(step, Mesh(np.empty((), dtype=object), ()), P(), P())(
        net(), X
    ),
    "unknown axis": lambda: call(
        mesh=make_mesh("4x2"), in_specs=(P(), P("x", "model")), out_specs=P(("y", "data"))
    ),
    "unknown axis for states": lambda: call(
        state_in_specs={sm.ParamState: P("z"), ...: sm.PerShard("w")}
    ),
    "unknown axis in a states own spec": lambda: call()(sm.State(X, spec=P("model")), X),
    "axis that is left to the compiler": lambda: call(
        mesh=make_mesh("4x2"), in_specs=(P(), P("x", "y")), axis_names={"x"}
    ),
    "axis twice in a spec": lambda: call(in_specs=(P(), P("x", "x"))),
    "axis names that the mesh lacks": lambda: call(axis_names={"data"}),
    "legacy auto of all axes": lambda: legacy.shard_map(
        lambda x: x, make_mesh(), P(), P(), auto=frozenset({"x"})
    ),
    "no mesh": lambda: sm.shard_map(step, None, (P(), P("x")), (P("x"), P()))(net(), X),
    "another mesh than the one that is set": another_mesh_than_the_one_that_is_set,
    "abstract mesh outside a trace": lambda: call(mesh=make_mesh().abstract_mesh)(net(), X),
    "abstract mesh that arguments do not lie on": abstract_mesh_that_arguments_do_not_lie_on,
    "in specs left out on auto axes": lambda: sm.shard_map(
        step, make_mesh("4x2"), out_specs=(P(), P())
    )(net(), X),
    "too few arguments": lambda: call()(net()),
    "too many arguments": lambda: call(in_specs=(P(),))(net(), X, X),
    "keyword that is not accepted": lambda: call()(net(), X, train=True),
    "specs that are no prefix": lambda: call(in_specs=({"a": P(), "b": P()}, [P("x"), P()]))(
        {"a": X}, [X]
    ),
    "specs that reach into a state": lambda: call(in_specs=({"s": {"k": P("x")}}, P()))(
        {"s": sm.State({"k": X})}, X
    ),
    "one dictionary for several arguments": lambda: call(in_specs={"model": P(), "x": P("x")})(
        net(), X
    ),
    "spec of a state that is no prefix of its value": lambda: call()(
        sm.State({"k": X}, spec={"v": P("x")}), X
    ),
    "size six on four shards": lambda: call(
        mesh=make_mesh("4"), state_in_specs={sm.ParamState: P("x")}
    )(net().replace(w=sm.ParamState(np.zeros((6, 2)))), np.zeros((6, 3), np.float32)),
    "size that two axes do not divide": lambda: call(
        mesh=make_mesh("4x2"), in_specs=(P(), P(("x", "y")))
    )(net(), np.zeros(12)),
    "spec of a scalar": lambda: call(state_in_specs=P("x"))(net(), X),
    "spec longer than the array": lambda: call(mesh=make_mesh("4x2"), in_specs=(P(), P("x", "y")))(
        net(), X
    ),
    "per shard of another size": lambda: call()(
        sm.State(np.zeros((4, 3)), spec=sm.PerShard("x")), X
    ),
    "per shard of a scalar": lambda: call()(sm.State(0.0, spec=sm.PerShard("x")), X),
    "axes all taken by an outer call": axes_all_taken_by_an_outer_call,
    "axis taken by an outer call": axis_taken_by_an_outer_call,
    "mesh partly taken by an outer call": mesh_partly_taken_by_an_outer_call,
    "axis taken by vmap": axis_taken_by_vmap,
    "donated model used again": donated_model_used_again,
    "tracer kept from an old trace": tracer_kept_from_an_old_trace,
    "one state in two places written": one_state_in_two_places_written,
    "diverging write": lambda: call(writes(mean=jnp.mean))(net(), X),
    "several diverging writes": several_diverging_writes,
    "diverging state made inside": lambda: call(
        lambda m, x: (x, {"made": sm.HiddenState(x, name="h")})
    )(net(), X),
    "mean of an integer": lambda: sm.State({"n": 0, "mean": 0.0}, reduce="mean"),
    "sum of a boolean": lambda: sm.State(0).replace(value=True, reduce="sum"),
    "result that varies": lambda: call(
        lambda m, x: ({"loss": x.sum(), "y": x}, m), out_specs=(P(), P())
    )(net(), X),
    "result that varies and is not typed so": result_that_varies_and_is_not_typed_so,
    "result with too few axes": lambda: call(lambda m, x: (x.sum(), m))(net(), X),
    "out specs that are no prefix": lambda: call(lambda m, x: (x, m, 1))(net(), X),
    "none for a result that is an array": lambda: call(out_specs=(P("x"), None))({"w": X}, X),
    "whole state beside split data": lambda: call(lambda m, x: (x * m.w.value, m))(net(), X),
    "one of two models returned by a cond": one_of_two_models_returned_by_a_cond,
    "a sum with an old value that differs": a_sum_with_an_old_value_that_differs,
    "a function whose result differs": a_function_whose_result_differs,
    "no model beside the loss": lambda: sm.value_and_grad(lambda m: (m["w"].sum(), None))({"w": X}),
    "another model beside the loss": another_model_beside_the_loss,
    "a number beside the loss": lambda: sm.value_and_grad(lambda m: (m["w"].sum(), 3))({"w": X}),
    "a masked argument": lambda: call(lambda m, x: (x, m))(net(), MASKED),
    "a masked value": lambda: sm.State({"a": MASKED, "b": X}),
    "a masked value set": lambda: sm.State(X).set(MASKED),
    "branches that write differently": branches_that_write_differently,
    "several keys for every shard": several_keys_for_every_shard,
    "a draw from several keys": lambda: sm.RandomState(jax.random.split(jax.random.key(0), 8)).rows(
        2
    ),
    "number for a key": lambda: sm.RandomState(jax.random.key(0)).replace(value=3),
    "no axis for per shard": lambda: sm.PerShard(),
}
