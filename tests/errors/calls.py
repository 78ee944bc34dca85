"""Mistakes with `shard_map`, `place`, `fsdp` and collectives: what is declared, passed and returned."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import legacy
from tests.helpers import jnp, make_mesh

from .states import KEY, MASKED, Net, X, net
from .table import Mistake, Mistakes, each


IN_SPECS, OUT_SPECS = (P(), P("x")), (P("x"), P())


def step(model: Any, x: Any) -> Any:
    return x * 2, model


def same(x: Any) -> Any:
    return x


def call(
    fun: Any = step,
    mesh: Any = None,
    in_specs: Any = IN_SPECS,
    out_specs: Any = OUT_SPECS,
    **options: Any,
) -> Any:
    return sm.shard_map(fun, mesh or make_mesh(), in_specs, out_specs, **options)


def sharded(fun: Any = same, name: str = "8", **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh(name), P("x"), P("x"), **options)


def on_parts(fun: Any, model: Any, **options: Any) -> Any:
    return sm.shard_map(fun, make_mesh("4"), (None,), P(), **options)(model)


# Functions that no call runs


async def coroutine(x: Any) -> Any:
    return x


async def stream(x: Any) -> Any:
    yield x


def generator(x: Any) -> Any:
    yield x


class Late:
    __name__ = "Late"

    async def __call__(self, x: Any) -> Any:
        return x


# Meshes


def another_mesh_than_the_one_that_is_set() -> Any:
    mapped = call(mesh=make_mesh("8", AxisType.Auto))
    with jax.set_mesh(make_mesh("4x2", AxisType.Auto)):
        return mapped(net(), X)


def axis_taken_by_an_outer_call() -> Any:
    mesh = make_mesh("4x2")
    inner = call(mesh=mesh, axis_names={"x"})
    return call(lambda m, x: (inner(m, x)[0], m), mesh=mesh, axis_names={"x"})(net(), X)


def axis_taken_by_vmap() -> Any:
    mesh = make_mesh("4x2", AxisType.Explicit)
    split = jax.device_put(X, NamedSharding(mesh, P("x")))
    return jax.jit(jax.vmap(sm.shard_map(same, mesh, P(), P(), axis_names={"x"})))(split)


# Specs for states


def stands_for_states(in_specs: Any, *args: Any, **options: Any) -> Any:
    def step(model: Any, x: Any = 0.0, rng: Any = None) -> Any:
        return None

    return sm.shard_map(step, make_mesh(), in_specs, P(), **options)


SPLIT, ONE = P("x"), sm.State(np.ones(8), reduce="sum")
TWO = {"mean": sm.BatchState(np.zeros(8), reduce="mean"), "w": [sm.ParamState(np.ones(8))]}


def results_of_states(out_specs: Any) -> Any:
    def written(state: sm.State, x: Any) -> Any:
        return x, {"a": state.set(state.value + 1), "b": state}

    return sm.shard_map(written, make_mesh(), (None, SPLIT), out_specs)(ONE, X[:8])


# What is given up, traced or without values


def deleted() -> jax.Array:
    x = jnp.ones(8) + 1
    x.delete()
    return x


def donated_model_used_again() -> Any:
    mapped = call(lambda m, x: (x, m.replace(count=m.count.value + 1)), donate="states")
    model, x = mapped.place(net(), X)
    mapped(model, x)
    return mapped(model, x)


def given_up() -> list[Mistake]:
    gone = deleted()
    found: list[Mistake] = []
    for mapped in (sharded(), sm.vmap2(same)):
        held = functools.partial(mapped, gone)
        uses = (mapped, mapped.place, mapped.unsharded, lambda x, held=held: jax.jit(held)())
        found += [functools.partial(use, gone) for use in uses]
    return found


SHAPE = jax.ShapeDtypeStruct((8,), np.float32)


def shapes_passed() -> list[Mistake]:
    mapped = [sharded(), sm.pmap2(same), sm.vmap2(same)]
    calls = [call for each in mapped for call in (each, each.place, each.unsharded)]
    return [functools.partial(call, SHAPE) for call in calls]


def tracer_kept_from_an_old_trace() -> Any:
    kept: list[Any] = []
    jax.jit(lambda w: kept.append(net().replace(w=w)))(X)
    return call()(kept[0], X)


def rank_of_an_array_on_the_mesh(ask: str) -> Any:
    mesh = make_mesh()
    x = jax.device_put(np.ones(8), NamedSharding(mesh, P("x")))
    mapped = sm.shard_map(same, mesh, (P(None, "x"),), P(None, "x"), donate="all")
    return getattr(mapped, ask)(x)


# Results


def keep(old: Any, new: Any, axis_names: Any) -> Any:
    return new


def writes(**new: Callable[[jax.Array], Any]) -> Any:
    def fun(model: Net, x: jax.Array) -> Any:
        return x, model.replace(**{name: make(x) for name, make in new.items()})

    return fun


def one_state_in_two_places_written() -> Any:
    one = sm.State(0.0)
    both = [net().replace(mean=one, count=one)]
    return call(lambda m, x: (x, [m[0].replace(mean=m[0].mean.value + 1)]))(both, X)


def several_diverging_writes() -> Any:
    fun = writes(mean=jnp.mean, count=lambda x: jax.lax.axis_index("y"))
    both = P(("x", "y"))
    return call(fun, make_mesh("4x2"), (P(), both), (both, P()))(net(), X)


def branches_that_write_differently() -> Any:
    def more(m: Net) -> Net:
        return m.replace(count=m.count.value + 1, mean=m.mean.value + 1)

    fun = lambda m, x: (x, jax.lax.cond(jnp.sum(x) > 20, more, lambda m: m, m))
    return call(fun)(net(), X)


def many_states_that_differ() -> list[Mistake]:
    model = {f"s{k:02}": sm.State(0.0) for k in range(80)}

    def step(model: Any, x: Any) -> Any:
        return {name: state.set(x.sum()) for name, state in model.items()}

    on_mesh: Any = sm.shard_map(step, make_mesh("4"), (None, P("x")), P())
    lanes: Any = sm.vmap2(step, in_axes=(None, 0))
    return [functools.partial(mapped, model, jnp.arange(4.0)) for mapped in (on_mesh, lanes)]


def one_of_two_models_returned_by_a_cond() -> Any:
    def choose(teacher: Net, student: Net, x: Any) -> Any:
        return x, jax.lax.cond(jax.lax.pmax(x.sum(), "x") > 0, lambda: teacher, lambda: student)

    model = net().replace(mean=sm.BatchState(0.0, reduce="sum"))
    return call(choose, in_specs=(P(), P(), P("x")))(model, model, X)


def a_sum_of_another_structure() -> list[Mistake]:
    step = lambda s, x: s.replace(value=(s.value, s.value + x.sum()))
    both = sm.shard_map(step, make_mesh(), (None, P("x")), None), sm.vmap2(step, in_axes=(None, 0))
    return [functools.partial(mapped, sm.State(1.0, reduce="sum", name="n"), X) for mapped in both]


# Packed models


# Lowered calls


def lowered_for_others() -> list[Mistake]:
    def double(x: Any, how: Any) -> Any:
        return 2 * x

    @functools.cache
    def compiled() -> Any:
        mapped = sm.shard_map(double, make_mesh(), (P("x"), None), P("x"))
        return mapped.lower(X, "fast").compile()

    return [lambda: compiled()([X], "fast"), lambda: compiled()(X, "slow")]


# Split parameters


def forgotten_gather(count: int) -> Any:
    names = [f"w{k:02}" for k in range(count)]
    model = {name: sm.ParamState(jnp.ones((8, 8))) for name in names}
    # Parameters that stay whole are not at fault.
    model |= {f"z{k:02}": sm.ParamState(jnp.ones(8)) for k in range(count)}
    model = sm.fsdp(model, make_mesh("4"), "x", min_size=16)

    def loss(model: Any) -> Any:
        for name in names:
            jnp.ones((4, 8)) @ model[name].value

    return on_parts(loss, model)


def cast_model_that_is_returned_whole() -> Any:
    def loss(model: Any, x: Any) -> Any:
        whole = sm.gather(model, "x")
        return jnp.square(x @ whole["w"].value).mean(), whole

    def step(model: Any, x: Any) -> Any:
        model = {"w": model["w"].replace(value=model["w"].value.astype(jnp.bfloat16))}
        return sm.value_and_grad(loss, axis_name="x")(model, x)[0]

    model = {"w": sm.ParamState(jnp.ones((16, 64)), spec=P("x"))}
    mapped = sm.shard_map(step, make_mesh("4"), (None, P("x")), P())
    return mapped(model, jnp.ones((8, 16)))


PLAIN = {"w": sm.ParamState(jnp.ones(8)), "b": jnp.ones(4)}
PARAM = sm.ParamState(X)
PART = [sm.ParamState(jnp.ones(8), spec=P("x"))]
EMPTY = Mesh(np.array([]), ("x",))


MISTAKES: Mistakes = {
    "mapping what only begins": [
        *each(sharded, stream, generator, functools.partial(coroutine), Late()),
        *each(lambda transform: transform(coroutine), sharded, sm.vmap2, sm.grad),
        lambda: sm.pmap2(coroutine, static_broadcasted_argnums=0),
    ],
    "assigning to a mapping": [
        *each(lambda name: setattr(sharded(), name, None), "mesh", "in_specs", "lower"),
        lambda: setattr(sm.pmap2(same), "devices", None),
        lambda: setattr(sm.vmap2(same), "in_axes", None),
    ],
    "no out specs": lambda: sm.shard_map(step, make_mesh(), P()),
    "text for a spec": [
        lambda: call(in_specs=(P(), "x")),
        lambda: call(state_in_specs={sm.ParamState: "x"}),
    ],
    "value per shard of an array": lambda: call(in_specs=(P(), sm.PerShard("x"))),
    "no filter in a call": lambda: call(state_in_specs={3: P("x")}),
    "filter that matches nothing in a call": [
        lambda: call(state_in_specs={sm.RandomState: P(), "cache": P("x")})(net(), X),
        lambda: call(state_out_specs={sm.filters.PathContains("cache"): P("x")})(net(), X),
    ],
    "specs of keys": [
        functools.partial(sharded, **{name: {filter: P("x")}})
        for name in ("state_in_specs", "state_out_specs")
        for filter in (sm.RandomState, sm.filters.OfType(sm.RandomState))
    ],
    "names of mesh axes": lambda: sharded(axis_names=["x", ["y"]]),
    "empty mesh": [
        lambda: call(mesh=Mesh(np.empty((), dtype=object), ()), in_specs=None, out_specs=P())(X),
        lambda: sm.place(sm.State(X), EMPTY),
        lambda: sm.pack(sm.State(X), EMPTY),
    ],
    "abstract mesh to place on": lambda: sm.place(X, make_mesh().abstract_mesh),
    "unknown axis": [
        lambda: call(
            mesh=make_mesh("4x2"), in_specs=(P(), P("x", "model")), out_specs=P(("y", "data"))
        ),
        lambda: call(state_in_specs={sm.ParamState: P("z"), ...: sm.PerShard("w")}),
        lambda: call()(sm.State(X, spec=P("model")), X),
    ],
    "axis left open": [
        lambda: sm.shard_map(same, make_mesh(), P(P.UNCONSTRAINED), P("x")),
        lambda: sm.place(X, make_mesh(), P(P.UNCONSTRAINED)),
        lambda: sm.shard_map(same, make_mesh(), None, P())(sm.State(X, spec=P(P.UNCONSTRAINED))),
    ],
    "axis that is left to the compiler": lambda: call(
        mesh=make_mesh("4x2"), in_specs=(P(), P("x", "y")), axis_names={"x"}
    ),
    "axis twice in a spec": lambda: call(in_specs=(P(), P("x", "x"))),
    "axis names that the mesh lacks": lambda: call(axis_names={"data"}),
    "legacy auto of all axes": lambda: legacy.shard_map(
        same, make_mesh(), P(), P(), auto=frozenset({"x"})
    ),
    "no mesh that is set": lambda: sm.shard_map(step, None, (P(), P("x")), P())(net(), X),
    "another mesh than the one that is set": another_mesh_than_the_one_that_is_set,
    "abstract mesh outside a trace": lambda: call(mesh=make_mesh().abstract_mesh)(net(), X),
    "abstract mesh that arguments do not lie on": lambda: sm.shard_map(
        same, make_mesh().abstract_mesh, P("x"), P("x")
    )(sm.place(X, make_mesh("4"), P("x"))),
    "in specs left out on Auto axes": lambda: sm.shard_map(
        step, make_mesh("4x2", AxisType.Auto), out_specs=(P(), P())
    )(net(), X),
    "number of arguments": [
        lambda: call()(net()),
        lambda: call(in_specs=(P(),))(net(), X, X),
        lambda: call()(net(), X, train=True),
    ],
    "specs that are no prefix": [
        lambda: call(in_specs=({"a": P(), "b": P()}, [P("x"), P()]))({"a": X}, [X]),
        lambda: call(in_specs=({"s": {"k": P("x")}}, P()))({"s": sm.State({"k": X})}, X),
        lambda: call(in_specs={"model": P(), "x": P("x")})(net(), X),
        lambda: call()(sm.State({"k": X}, spec={"v": P("x")}), X),
        lambda: call(lambda m, x: (x, m, 1))(net(), X),
        lambda: sm.shard_map(lambda s: s.replace(value=s.value["b"]), make_mesh(), None, None)(
            sm.State({"a": X, "b": X}, spec={"a": P("x"), "b": P()})
        ),
    ],
    "specs that would place nothing": [
        lambda: stands_for_states(SPLIT)(ONE),
        lambda: stands_for_states((SPLIT, SPLIT))(TWO, X),
        lambda: stands_for_states(({"mean": SPLIT, "w": None}, SPLIT))(TWO, X),
        lambda: stands_for_states((None, SPLIT, SPLIT))(ONE, X, sm.RandomState(KEY)),
        lambda: stands_for_states((SPLIT,)).place(ONE),
        lambda: stands_for_states((SPLIT,)).explain(ONE),
        lambda: stands_for_states((SPLIT,)).unsharded(ONE),
        lambda: sm.place(ONE, make_mesh(), SPLIT),
        lambda: results_of_states((SPLIT, SPLIT)),
        lambda: results_of_states((SPLIT, {"a": None, "b": SPLIT})),
    ],
    "arrays that do not fit their specs": [
        lambda: call(mesh=make_mesh("4"), state_in_specs={sm.ParamState: P("x")})(
            net().replace(w=sm.ParamState(np.zeros((6, 2)))), np.zeros((6, 3), np.float32)
        ),
        lambda: call(mesh=make_mesh("4x2"), in_specs=(P(), P(("x", "y"))))(net(), np.zeros(12)),
        lambda: call(state_in_specs=P("x"))(net(), X),
        lambda: call(mesh=make_mesh("4x2"), in_specs=(P(), P("x", "y")))(net(), X),
        lambda: call()(sm.State(np.zeros((4, 3)), spec=sm.PerShard("x")), X),
        lambda: call()(sm.State(0.0, spec=sm.PerShard("x")), X),
        *each(rank_of_an_array_on_the_mesh, "__call__", "explain", "lower"),
    ],
    "trees that do not fit where they are placed": each(
        lambda given: sm.place(given[0], make_mesh(), given[1], state_specs=given[2]),
        ({"a": X[:6], "m": [sm.State(X[:7], spec=P("x"))], "ok": X}, P("x"), None),
        (X[0], P("x"), None),
        (X, P("z"), None),
        (np.ones((8, 8)), P("x", "x"), None),
        ({"a": X}, {"b": P("x")}, None),
        (X, "x", None),
        (sm.State(X[:6], spec=sm.PerShard("x")), None, None),
        (sm.State(X), None, {"t": P("x")}),
        (sm.State({"a": X}), None, {...: {"b": P("x")}}),
        (sm.State(X), None, {3: P("x")}),
    ),
    "axes taken by an outer call": [
        lambda: call(lambda m, x: (call()(m, x)[0], m))(net(), X),
        axis_taken_by_an_outer_call,
        lambda: sm.shard_map(
            sm.shard_map(same, make_mesh("4x2"), P("y"), P("y")),
            *(make_mesh("4x2"), P("x"), P("x")),
            axis_names={"x"},
        )(X),
    ],
    "axis taken by vmap": axis_taken_by_vmap,
    "given up to an earlier call": [
        donated_model_used_again,
        *given_up(),
        lambda: sm.place(deleted(), make_mesh()),
    ],
    "shapes without values": [
        *shapes_passed(),
        lambda: sm.place({"w": jax.eval_shape(lambda: sm.State(X))}, make_mesh()),
        lambda: sm.pack({"w": jax.eval_shape(lambda: sm.State(X))}, make_mesh()),
    ],
    "placing what is traced": [
        *each(
            lambda transform: transform(
                lambda x: sm.place({"w": sm.State(x)}, make_mesh())["w"].value.sum()
            )(X[None] if transform is jax.vmap else X),
            *(jax.jit, jax.grad, jax.vmap),
        ),
        lambda: jax.jit(sharded().place)(X),
    ],
    "tracer kept from an old trace": tracer_kept_from_an_old_trace,
    "masked argument": [
        lambda: call(lambda m, x: (x, m))(net(), MASKED),
        *each(
            lambda name: getattr(sm, name)({"a": MASKED, "b": X}, "x"),
            *("psum", "pmean", "pmax", "pmin", "all_gather"),
        ),
        lambda: sharded(lambda x: sm.psum({"a": MASKED, "b": x}, "x"))(X),
    ],
    "several keys for every shard": lambda: call(lambda m, x: (x, m))(
        {"rng": sm.RandomState(jax.random.split(KEY, 8))}, X
    ),
    "rows over an axis that is not mapped over": lambda: call(
        lambda rng, x: (x, rng.rows(2, "data")[1])
    )(sm.RandomState(KEY), X),
    "one state in two places written": one_state_in_two_places_written,
    "writes that diverge": [
        lambda: call(writes(mean=jnp.mean))(net(), X),
        several_diverging_writes,
        lambda: call(lambda m, x: (x, {"made": sm.HiddenState(x, name="h")}))(net(), X),
        branches_that_write_differently,
    ],
    "many states that differ": many_states_that_differ(),
    "copies that differ where nothing is compiled": lambda: call(
        lambda x: {"order": jnp.argsort(x * (x[0] - 3))},
        *(None, P("x"), {"order": P()}),
        jit=False,
    )(X),
    "result that varies": [
        lambda: call(lambda m, x: ({"loss": x.sum(), "y": x}, m), out_specs=(P(), P()))(net(), X),
        lambda: call(
            lambda m, x: ({"order": jnp.argsort(x), "sum": jax.lax.psum(x, "x")}, m),
            out_specs=(P(), P()),
        )(net(), X),
    ],
    "result with too few axes": lambda: call(lambda m, x: (x.sum(), m))(net(), X),
    "no spec for a result that is an array": lambda: call(out_specs=(P("x"), None))({"w": X}, X),
    "whole state beside split data": lambda: call(lambda m, x: (x * m.w.value, m))(net(), X),
    "another error of JAX beside a whole state": lambda: call(
        lambda m, x: (jax.tree.map(jnp.add, [x], (x,)), m)
    )(net(), X),
    "one of two models returned by a cond": one_of_two_models_returned_by_a_cond,
    "policies that give several values": [
        lambda: call(
            lambda s, x: (x, s.set(s.value + x)), state_in_specs=P("x"), state_out_specs=P()
        )(sm.State(X, reduce="sum"), X),
        lambda: call(lambda s, x: (x, s.set(s.value + x.sum())))(sm.State(0.0, reduce=keep), X),
    ],
    "sum of another structure": a_sum_of_another_structure(),
    "axis named twice where a call is made": [
        lambda: sm.fsdp(PLAIN, make_mesh("4"), ("x", "x")),
        lambda: sharded(axis_names=("x", "x")),
        lambda: legacy.shard_map(same, make_mesh("4x2"), P(), P(), auto=("x", "x")),
        lambda: sm.vmap2(same, spmd_axis_name=("x", "x")),
    ],
    "packed models": [
        lambda: sm.pack({"v": sm.State(X[:6], spec=P("x")), "w": sm.State(X)}, make_mesh("4")),
        lambda: call(mesh=make_mesh("2x2"))(
            sm.pack(net().replace(w=sm.ParamState(X, spec=P("x"))), make_mesh("4x2")), X
        ),
        lambda: call(mesh=make_mesh("4"), state_in_specs=P("x"))(
            sm.pack({"w": sm.State(X)}, make_mesh("4")), X
        ),
        lambda: sm.trainable(
            sm.pack({"nets": [PARAM] * 6, "w": PARAM}, make_mesh("4")),
            sm.filters.PathContains("nets"),
        ),
        lambda: sm.value_and_grad(lambda packed: (packed, packed), wrt=sm.State)(
            sm.pack({"count": sm.State(0)}, make_mesh("4"))
        ),
    ],
    "other arguments than a call was lowered for": lowered_for_others(),
    "no name for split parameters": [
        lambda: sm.fsdp(PLAIN, make_mesh("4"), ()),
        lambda: sm.gather(PLAIN, ()),
    ],
    "splitting over an unknown axis": lambda: sm.fsdp(PLAIN, make_mesh("4x2"), "data"),
    "splitting below no size": lambda: sm.fsdp(PLAIN, make_mesh("4"), "x", min_size=-1),
    "splitting no parameters": lambda: sm.fsdp({"n": sm.State(1.0)}, make_mesh("4"), "x"),
    "splitting a packed model": lambda: sm.fsdp(
        sm.pack(PLAIN, make_mesh("4")), make_mesh("4"), "x"
    ),
    "gathering what is whole": [
        lambda: on_parts(lambda model: sm.gather(model, "x"), PLAIN),
        lambda: on_parts(lambda model: sm.gather(sm.gather(model, "x"), "x"), PART),
        lambda: on_parts(lambda model: sm.gather(model, "x"), PART, state_in_specs=P()),
    ],
    "gathering the major axis": lambda: sm.shard_map(
        lambda m: sm.gather(m, "x"), make_mesh("4x2"), (None,), P()
    )([sm.ParamState(jnp.ones(8), spec=P(("x", "y")))]),
    "gathering over lanes": each(
        lambda lanes: lanes(lambda w, x: sm.gather(w, "x"), axis_name="x")(PART, X[:8]),
        *(sm.vmap2, sm.pmap2),
    ),
    "gathering over an axis that is not mapped over": lambda: on_parts(
        lambda model: sm.gather(model, "y"), PART
    ),
    "using a part of a parameter": [
        lambda: on_parts(
            lambda layer: layer(jnp.ones(8)),
            sm.fsdp(eqx.nn.Linear(8, 4, key=KEY), make_mesh("4"), "x", min_size=0),
        ),
        *each(forgotten_gather, 10, 11),
    ],
    "returning whole parameters": cast_model_that_is_returned_whole,
    "norm of parts that no spec tells of": lambda: sm.shard_map(
        lambda x: sm.global_norm({"w": x, "v": PART[0]}), make_mesh("4"), P("x"), P()
    )(X[:8]),
    "scattering another structure": lambda: sm.scatter({"w": jnp.ones(8)}, {"w": PART[0], "b": X}),
}
