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


# States


@mistake(
    TypeError,
    """\
a State's value is a pytree of arrays, but:
  - value['a'] is ParamState(float32[]) (ParamState)
A State cannot hold a State. Put the inner value in: `State(inner.value)`; or keep the two side by side in a Module.""",
)
def state_in_state() -> Any:
    return sm.State({"a": sm.ParamState(1.0)})


@mistake(
    TypeError,
    """\
a State's value is a pytree of arrays, but:
  - value['a'] is 'text' (str)
  - value['c'] is <class 'object'> (type)
Keep values that are not arrays in a field of the Module that holds the State.""",
)
def state_of_text() -> Any:
    return sm.State({"a": "text", "b": None, "c": object})


@mistake(
    sm.StatemeshError,
    """\
reduce='median' is not a write policy. Use None, 'mean', 'max', 'min', 'sum', or a function `(old, new, axis_names) -> value`.""",
)
def unknown_policy() -> Any:
    return sm.State(0.0, reduce="median")


@mistake(
    TypeError,
    """\
spec is 'x' of type str, not a spec. Use P('axis'), P(), None, or for a state sm.PerShard('axis').""",
)
def not_a_spec_for_a_state() -> Any:
    return sm.State(0.0, spec="x")


@mistake(
    AttributeError,
    """\
BatchState is immutable; cannot assign to `value`. Write `new = state.set(value)`, or `new = state.replace(value=...)`, and return the new state.""",
)
def assigning_to_a_state() -> None:
    sm.BatchState(0.0).value = 1.0


@mistake(
    sm.StructureError,
    """\
stats: the new value has a different shape or dtype:
  - value['mean']: was float32[3], is float32[4]
  - value['n']: was int32[], is float32[]
Cast or reshape it; to change it on purpose, use `state.replace(value=...)`.""",
)
def wrong_dtype_and_shape_written() -> Any:
    state = sm.BatchState({"mean": jnp.zeros(3), "n": jnp.int32(0)}, name="stats")
    return state.set({"mean": jnp.zeros(4), "n": jnp.float32(0)})


@mistake(
    sm.StructureError,
    """\
State: the new value has a different shape or dtype:
  - value: was int32[], is float32[]
Cast or reshape it; to change it on purpose, use `state.replace(value=...)`.""",
)
def fraction_written_to_an_integer() -> Any:
    return sm.State(3).set(1.5)


@mistake(
    sm.StructureError,
    """\
pair: the new value has a different tree structure.
  old: PyTreeDef((*, *))
  new: PyTreeDef([*, *])
To change the structure on purpose, use `state.replace(value=...)`.""",
)
def structure_changed() -> Any:
    return sm.State((1, 2), name="pair").set([1, 2])


@mistake(
    TypeError,
    """\
a State's value is a pytree of arrays, but:
  - value is State(float32[]) (State)
A State cannot hold a State. Put the inner value in: `State(inner.value)`; or keep the two side by side in a Module.""",
)
def state_written_into_a_state() -> Any:
    return sm.State(1.0).set(sm.State(2.0))


@mistake(
    sm.StructureError,
    """\
State.replace got 'values'; the fields of State are 'value', 'name', 'tag', 'spec', 'reduce'.""",
)
def unknown_state_field() -> Any:
    return sm.State(1.0).replace(values=2.0)


@mistake(
    TypeError,
    """\
Mine overrides __init__, which JAX calls whenever it rebuilds a state. Override `enter` and `leave`, and give Mine a classmethod for other ways to make one.""",
)
def kind_with_a_constructor() -> Any:
    class Mine(sm.State):
        def __init__(self, size: int) -> None:
            super().__init__(jnp.zeros(size))

    return Mine


@mistake(
    TypeError,
    """\
RandomState needs a typed key, got uint32[2]. Write `sm.RandomState(jax.random.key(0))`; `jax.random.wrap_key_data(raw)` makes a typed key of a raw one.""",
)
def raw_key() -> Any:
    return sm.RandomState(jax.random.PRNGKey(0))


@mistake(
    TypeError,
    """\
RandomState needs a typed key, got 0. Write `sm.RandomState(jax.random.key(0))`; `jax.random.wrap_key_data(raw)` makes a typed key of a raw one.""",
)
def seed_for_a_key() -> Any:
    return sm.RandomState(0)


@mistake(
    sm.SpecError,
    """\
RandomState cannot be placed with spec=P('x'): every shard holds the same key and draws its own numbers from it. Leave `spec` out, or use sm.PerShard('axis') for independent keys.""",
)
def sharded_key() -> Any:
    return sm.RandomState(jax.random.key(0), spec=P("x"))


@mistake(
    sm.StatemeshError,
    """\
RandomState.rows: no axis is called 'data' here; the axes mapped over are 'x'.""",
)
def rows_over_an_unbound_axis() -> Any:
    def fun(rng: sm.RandomState, x: jax.Array) -> Any:
        _, rng = rng.rows(2, "data")
        return x, rng

    return call(fun)(sm.RandomState(jax.random.key(0)), X)


# Modules, filters, partition


@mistake(
    sm.StructureError,
    """\
Net.replace got 'weights'; the fields of Net are 'w', 'mean', 'count'.""",
)
def unknown_module_field() -> Any:
    return net().replace(weights=1.0)


@mistake(
    TypeError,
    """\
Net.init_all_states got 'size', which no `init_state` in it takes. Add the argument to the signature of the `init_state` that needs it.""",
)
def init_argument_that_nobody_takes() -> Any:
    return net().init_all_states(size=3)


@mistake(
    TypeError,
    """\
3 is not a filter. Use a type, a tag (string), `...`, None, a function `(path, state) -> bool`, a list of filters, or a class of statemesh.filters.""",
)
def not_a_filter() -> Any:
    return sm.partition(net(), 3)


@mistake(
    TypeError,
    """\
3 is not a filter. Use a type, a tag (string), `...`, None, a function `(path, state) -> bool`, a list of filters, or a class of statemesh.filters.""",
)
def not_a_filter_in_a_mapping() -> Any:
    return call(state_in_specs={3: P("x")})


@mistake(
    sm.StructureError,
    """\
partition: no state matches 'cache'. The states are:
  - tree.w: ParamState(float32[16])
  - tree.mean: BatchState(float32[])
  - tree.count: State(int32[])""",
)
def filter_that_matches_nothing() -> Any:
    return sm.partition(net(), "cache")


@mistake(
    sm.StructureError,
    """\
state_in_specs: no state matches RandomState, 'cache'. The states are:
  - model.w: ParamState(float32[16])
  - model.mean: BatchState(float32[])
  - model.count: State(int32[])""",
)
def filter_that_matches_nothing_in_a_call() -> Any:
    return call(state_in_specs={sm.RandomState: P(), "cache": P("x")})(net(), X)


@mistake(
    sm.StructureError,
    """\
state_out_specs: no state matches PathContains('cache'). The states are:
  - step(...)[1].w: ParamState(float32[16])
  - step(...)[1].mean: BatchState(float32[])
  - step(...)[1].count: State(int32[])""",
)
def filter_that_matches_nothing_in_the_result() -> Any:
    return call(state_out_specs={sm.filters.PathContains("cache"): P("x")})(net(), X)


@mistake(
    TypeError,
    """\
Where picks states by position, for which it needs the tree: write `to_predicate(filter, tree)`.""",
)
def where_without_a_tree() -> Any:
    predicate = sm.filters.to_predicate(sm.filters.Where(lambda m: m.w))
    return predicate((), sm.State(0))


@mistake(
    sm.StructureError,
    """\
combine needs at least one tree: `combine(*partition(tree, filter))`.""",
)
def combining_nothing() -> Any:
    return sm.combine()


@mistake(
    sm.StructureError,
    """\
combine: each leaf must be in exactly one tree:
  - `w` is in 2 trees: ParamState(float32[16]), ParamState(float32[16])""",
)
def combining_overlapping_parts() -> Any:
    params, _ = sm.partition(net(), sm.ParamState)
    return sm.combine(params, net())


@mistake(
    sm.StructureError,
    """\
combine: each leaf must be in exactly one tree:
  - `['net'][0].count` is in none of the trees""",
)
def combining_too_few_parts() -> Any:
    params, stats, _ = sm.partition({"net": [net()]}, sm.ParamState, sm.BatchState)
    return sm.combine(params, stats)


@mistake(
    sm.StructureError,
    """\
combine: trees 0 and 1 have different structures at `['net']`.
  tree 0: [Net(w=ParamState(float32[16]), mean=Removed, count=Removed), Removed]
  tree 1: [State(int32[]), 1, 2]
All parts of one `partition` have the same structure. Did anything but `set` change a part?""",
)
def combining_different_trees() -> Any:
    params, rest = sm.partition({"net": [net(), 1]}, sm.ParamState)
    rest["net"][0] = sm.State(0)
    rest["net"].append(2)
    return sm.combine(params, rest)


# What is declared


@mistake(
    TypeError,
    """\
shard_map maps a function, got 'step' of type str. The function comes first: `shard_map(fun, mesh, in_specs, out_specs)`.""",
)
def mapping_no_function() -> Any:
    return sm.shard_map("step", make_mesh(), P(), P())  # type: ignore[call-overload]


@mistake(
    TypeError,
    """\
shard_map needs out_specs: `shard_map(fun, mesh, in_specs, out_specs)`, with P() for results that are the same on every shard.""",
)
def no_out_specs() -> Any:
    return sm.shard_map(step, make_mesh(), P())


@mistake(
    TypeError,
    """\
in_specs[1] is 'x' of type str, not a spec. Use P('axis'), P(), None, or for a state sm.PerShard('axis').""",
)
def text_for_a_spec() -> Any:
    return call(in_specs=(P(), "x"))


@mistake(
    TypeError,
    """\
state_in_specs[ParamState] is 'x' of type str, not a spec. Use P('axis'), P(), None, or for a state sm.PerShard('axis').""",
)
def text_for_a_state_spec() -> Any:
    return call(state_in_specs={sm.ParamState: "x"})


@mistake(
    sm.SpecError,
    """\
in_specs[1] is PerShard('x'), which can only place States. Use P('x') for an array; for a State write state_in_specs={...: PerShard('x')} or State(value, spec=PerShard('x')).""",
)
def per_shard_for_an_array() -> Any:
    return call(in_specs=(P(), sm.PerShard("x")))


@mistake(
    sm.StatemeshError,
    """\
donate='everything' is not known. Use one of 'none', 'states', 'all'.""",
)
def unknown_donation() -> Any:
    return call(donate="everything")


@mistake(
    TypeError,
    """\
mesh must be a jax.sharding.Mesh, got 'cpu' of type str. Make one with `jax.make_mesh((jax.device_count(),), ('x',))`.""",
)
def devices_for_a_mesh() -> Any:
    return sm.shard_map(step, "cpu", P(), P())  # type: ignore[call-overload]


@mistake(
    sm.SpecError,
    """\
shard_map requires a non-empty mesh, but Mesh() has no devices. Make one with `jax.make_mesh((jax.device_count(),), ('x',))`.""",
)
def empty_mesh() -> Any:
    return sm.shard_map(step, Mesh(np.empty((), dtype=object), ()), P(), P())(net(), X)


@mistake(
    sm.SpecError,
    """\
specs name axes the mesh does not have:
  - in_specs[1] refers to 'model': P('x', 'model')
  - out_specs refers to 'data': P(('y', 'data'))
The axes to map over are 'x', 'y' of Mesh(x=4, y=2).""",
)
def unknown_axis() -> Any:
    return call(mesh=make_mesh("4x2"), in_specs=(P(), P("x", "model")), out_specs=P(("y", "data")))


@mistake(
    sm.SpecError,
    """\
specs name axes the mesh does not have:
  - state_in_specs[ParamState] refers to 'z': P('z')
  - state_in_specs[...] refers to 'w': PerShard('w')
The axes to map over are 'x' of Mesh(x=8).""",
)
def unknown_axis_for_states() -> Any:
    return call(state_in_specs={sm.ParamState: P("z"), ...: sm.PerShard("w")})


@mistake(
    sm.SpecError,
    """\
specs name axes the mesh does not have:
  - the spec of model refers to 'model': P('model')
The axes to map over are 'x' of Mesh(x=8).""",
)
def unknown_axis_in_a_states_own_spec() -> Any:
    return call()(sm.State(X, spec=P("model")), X)


@mistake(
    sm.SpecError,
    """\
specs name axes that the call does not map over:
  - in_specs[1] refers to 'y': P('x', 'y')
The axes to map over are 'x' of Mesh(x=4, y=2); 'y' is not mapped over.""",
)
def axis_that_is_left_to_the_compiler() -> Any:
    return call(mesh=make_mesh("4x2"), in_specs=(P(), P("x", "y")), axis_names={"x"})


@mistake(
    sm.SpecError,
    """\
a mesh axis can split only one axis of an array:
  - in_specs[1] = P('x', 'x') has 'x' twice""",
)
def axis_twice_in_a_spec() -> Any:
    return call(in_specs=(P(), P("x", "x")))


@mistake(
    sm.SpecError,
    """\
axis_names has 'data', but the axes of Mesh(x=8) are 'x'.""",
)
def axis_names_that_the_mesh_lacks() -> Any:
    return call(axis_names={"data"})


@mistake(
    sm.SpecError,
    """\
auto=['x'] must be some, but not all, of the axes of Mesh(x=8).""",
)
def legacy_auto_of_all_axes() -> Any:
    return legacy.shard_map(lambda x: x, make_mesh(), P(), P(), auto=frozenset({"x"}))


# Calls


@mistake(
    sm.SpecError,
    """\
no mesh: shard_map was given none, and none is set. Pass `mesh=...`, or call inside `with jax.set_mesh(mesh):`.""",
)
def no_mesh() -> Any:
    return sm.shard_map(step, None, (P(), P("x")), (P("x"), P()))(net(), X)


@mistake(
    sm.SpecError,
    """\
shard_map was given Mesh(x=8) with axis types (Auto), but the mesh that is set is Mesh(x=4, y=2) with axis types (Auto, Auto). Leave `mesh` out to use the mesh that is set, or call outside `jax.set_mesh`.""",
)
def another_mesh_than_the_one_that_is_set() -> Any:
    with jax.set_mesh(make_mesh("4x2")):
        return call()(net(), X)


@mistake(
    sm.SpecError,
    """\
Mesh(x=8) is an AbstractMesh, which has no devices to run on. Pass arrays that lie on a mesh with these axes, as jax.device_put(x, NamedSharding(mesh, P())) puts them, or give shard_map a jax.sharding.Mesh.""",
)
def abstract_mesh_outside_a_trace() -> Any:
    return call(mesh=make_mesh().abstract_mesh)(net(), X)


@mistake(
    sm.SpecError,
    """\
an argument, float32[8], lies on Mesh(x=4), but shard_map was given the AbstractMesh Mesh(x=8), which takes its devices from the arguments. Put the arguments on a mesh with these axes, or give shard_map the mesh that they lie on.""",
)
def abstract_mesh_that_arguments_do_not_lie_on() -> Any:
    x = jax.device_put(np.ones(8), NamedSharding(make_mesh("4"), P("x")))
    mesh = make_mesh().abstract_mesh
    return sm.shard_map(lambda x: x, mesh, P("x"), P("x"))(x)


@mistake(
    TypeError,
    """\
in_specs can be left out only on a mesh of Explicit axes; this is Mesh(x=4, y=2) with axis types (Auto, Auto). Write in_specs=..., one entry for each positional argument.""",
)
def in_specs_left_out_on_auto_axes() -> Any:
    return sm.shard_map(step, make_mesh("4x2"), out_specs=(P(), P()))(net(), X)


@mistake(
    sm.SpecError,
    """\
step was called with 1 positional argument, but in_specs has 2 entries. in_specs has one entry for each positional argument (None for one that is not sharded); keyword arguments have none.""",
)
def too_few_arguments() -> Any:
    return call()(net())


@mistake(
    sm.SpecError,
    """\
step was called with 3 positional arguments, but in_specs has 1 entry. in_specs has one entry for each positional argument (None for one that is not sharded); keyword arguments have none.""",
)
def too_many_arguments() -> Any:
    return call(in_specs=(P(),))(net(), X, X)


@mistake(
    TypeError,
    """\
step(model: Any, x: Any) -> Any cannot be called like this: got an unexpected keyword argument 'train'.""",
)
def keyword_that_is_not_accepted() -> Any:
    return call()(net(), X, train=True)


@mistake(
    sm.SpecError,
    """\
specs must be a tree prefix of what they place:
  - shard_map in_specs[0] is a dict with keys ['a', 'b'], but model is a dict with keys ['a']
One spec stands for a whole subtree: P() or P('axis') in its place fits anything.""",
)
def specs_that_are_no_prefix() -> Any:
    return call(in_specs=({"a": P(), "b": P()}, [P("x"), P()]))({"a": X}, [X])


@mistake(
    sm.SpecError,
    """\
specs must be a tree prefix of what they place:
  - shard_map in_specs[0]['s'] = {'k': P('x',)} reaches into the State model['s']; States are placed by `state_in_specs`, `state_out_specs` or their own `spec`
One spec stands for a whole subtree: P() or P('axis') in its place fits anything.""",
)
def specs_that_reach_into_a_state() -> Any:
    return call(in_specs=({"s": {"k": P("x")}}, P()))({"s": sm.State({"k": X})}, X)


@mistake(
    sm.SpecError,
    """\
specs must be a tree prefix of what they place:
  - shard_map in_specs is a dict with keys ['model', 'x'], but model is a Net
One spec stands for a whole subtree: P() or P('axis') in its place fits anything.""",
)
def one_dictionary_for_several_arguments() -> Any:
    return call(in_specs={"model": P(), "x": P("x")})(net(), X)


@mistake(
    sm.SpecError,
    """\
specs must be a tree prefix of what they place:
  - the spec of model is a dict with keys ['v'], but model.value is a dict with keys ['k']
One spec stands for a whole subtree: P() or P('axis') in its place fits anything.""",
)
def spec_of_a_state_that_is_no_prefix_of_its_value() -> Any:
    return call()(sm.State({"k": X}, spec={"v": P("x")}), X)


@mistake(
    sm.SpecError,
    """\
shard_map applied to the function 'step': arrays do not fit their specs on Mesh(x=4):
  - model.w: float32[6,2] with spec P('x'): axis 0 has size 6, not divisible by 'x' of size 4 (6 % 4 = 2)
  - x: float32[6,3] with spec P('x'): axis 0 has size 6, not divisible by 'x' of size 4 (6 % 4 = 2)
Pad the array, choose another spec, or write P() to replicate it.""",
)
def size_six_on_four_shards() -> Any:
    return call(mesh=make_mesh("4"), state_in_specs={sm.ParamState: P("x")})(
        net().replace(w=sm.ParamState(np.zeros((6, 2)))), np.zeros((6, 3), np.float32)
    )


@mistake(
    sm.SpecError,
    """\
shard_map applied to the function 'step': arrays do not fit their specs on Mesh(x=4, y=2):
  - x: float64[12] with spec P(('x', 'y')): axis 0 has size 12, not divisible by 'x', 'y' of size 4 * 2 = 8 (12 % 8 = 4)
Pad the array, choose another spec, or write P() to replicate it.""",
)
def size_that_two_axes_do_not_divide() -> Any:
    return call(mesh=make_mesh("4x2"), in_specs=(P(), P(("x", "y"))))(net(), np.zeros(12))


@mistake(
    sm.SpecError,
    """\
shard_map applied to the function 'step': arrays do not fit their specs on Mesh(x=8):
  - model.mean: float32[] has rank 0, but its spec P('x') has 1 entry
  - model.count: int32[] has rank 0, but its spec P('x') has 1 entry
Pad the array, choose another spec, or write P() to replicate it.""",
)
def spec_of_a_scalar() -> Any:
    return call(state_in_specs=P("x"))(net(), X)


@mistake(
    sm.SpecError,
    """\
shard_map applied to the function 'step': arrays do not fit their specs on Mesh(x=4, y=2):
  - x: float32[16] has rank 1, but its spec P('x', 'y') has 2 entries
Pad the array, choose another spec, or write P() to replicate it.""",
)
def spec_longer_than_the_array() -> Any:
    return call(mesh=make_mesh("4x2"), in_specs=(P(), P("x", "y")))(net(), X)


@mistake(
    sm.SpecError,
    """\
shard_map applied to the function 'step': arrays do not fit their specs on Mesh(x=8):
  - model: float32[4,3] with spec P('x') (PerShard): axis 0 has size 4, but needs one entry per shard, 8
Pad the array, choose another spec, or write P() to replicate it.""",
)
def per_shard_of_another_size() -> Any:
    return call()(sm.State(np.zeros((4, 3)), spec=sm.PerShard("x")), X)


@mistake(
    sm.SpecError,
    """\
shard_map applied to the function 'step': arrays do not fit their specs on Mesh(x=8):
  - model: float32[] with spec P('x') (PerShard) is a scalar; it needs a leading axis with one entry per shard
Pad the array, choose another spec, or write P() to replicate it.""",
)
def per_shard_of_a_scalar() -> Any:
    return call()(sm.State(0.0, spec=sm.PerShard("x")), X)


@mistake(
    sm.SpecError,
    """\
an enclosing shard_map already maps over every axis of Mesh(x=8). Give the outer one `axis_names` that leave some axes free.""",
)
def axes_all_taken_by_an_outer_call() -> Any:
    mesh = make_mesh()
    return call(lambda m, x: (call(mesh=mesh)(m, x)[0], m))(net(), X)


@mistake(
    sm.SpecError,
    """\
axis_names has 'x', which an enclosing shard_map already maps over on Mesh(x=4, y=2). Name other axes.""",
)
def axis_taken_by_an_outer_call() -> Any:
    mesh = make_mesh("4x2")
    inner = call(mesh=mesh, axis_names={"x"})
    return call(lambda m, x: (inner(m, x)[0], m), mesh=mesh, axis_names={"x"})(net(), X)


@mistake(
    sm.SpecError,
    """\
shard_map was given Mesh(x=4, y=2) to map over all its axes, but an enclosing shard_map already maps over 'x'. Leave `mesh` out, or name the axes that are left: axis_names={'y'}.""",
)
def mesh_partly_taken_by_an_outer_call() -> Any:
    mesh = make_mesh("4x2")
    inner = sm.shard_map(lambda x: x, mesh, P("y"), P("y"))
    return sm.shard_map(inner, mesh, P("x"), P("x"), axis_names={"x"})(X)


@mistake(
    sm.SpecError,
    """\
an enclosing jax.vmap maps over an array that is split over 'x' of Mesh(x=4, y=2), so its lanes use up that mesh axis. Leave `axis_names` out to map over the other axes, or split the array differently.""",
)
def axis_taken_by_vmap() -> Any:
    mesh = make_mesh("4x2", AxisType.Explicit)
    split = jax.device_put(X, NamedSharding(mesh, P("x")))
    mapped = sm.shard_map(lambda x: x, mesh, P(), P(), axis_names={"x"})
    return jax.jit(jax.vmap(mapped))(split)


@mistake(
    sm.StatemeshError,
    """\
<lambda>: these arguments were given up to an earlier call that donates its arguments:
  - m.count
Go on with what that call returned, as in `out, model = step(model, x)`.""",
)
def donated_model_used_again() -> Any:
    mapped = call(lambda m, x: (x, m.replace(count=m.count.value + 1)), donate="states")
    (model, x) = mapped.place(net(), X)
    mapped(model, x)
    return mapped(model, x)


@mistake(
    jax.errors.UnexpectedTracerError,
    """\
step: a traced value outlived its trace. These arguments are traced:
  - model.w
  - model.mean
  - model.count
Return values from the traced function instead of keeping them: a model that is written inside `jax.jit` or `jax.grad` leaves it as a result.""",
)
def tracer_kept_from_an_old_trace() -> Any:
    kept = []
    jax.jit(lambda w: kept.append(net().replace(w=w)))(X)
    return call()(kept[0], X)


# Results


def writes(**new: Callable[[jax.Array], Any]) -> Any:
    def fun(model: Net, x: jax.Array) -> Any:
        return x, model.replace(**{name: make(x) for name, make in new.items()})

    return fun


@mistake(
    sm.StructureError,
    """\
<lambda>: a state that stands in several places was written:
  - m[0].mean and m[0].count are one State object
As soon as one is written, each place has a state of its own. Keep the state in one place; tie what must be in two with `equinox.nn.Shared`, or put copies in: `state.replace()`.""",
)
def one_state_in_two_places_written() -> Any:
    one = sm.State(0.0)
    both = [net().replace(mean=one, count=one)]
    return call(lambda m, x: (x, [m[0].replace(mean=m[0].mean.value + 1)]))(both, X)


@mistake(
    sm.DivergedStateError,
    """\
fun: shards wrote different values to states that keep one copy:
  - model.mean: BatchState(float32[]) varies over 'x' but leaves with P(), which keeps one copy
Mend it in one of three ways:
  1. reduce the value yourself: state.set(jax.lax.pmean(value, 'x'));
  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a function;
  3. keep one value per shard: State(value, spec=sm.PerShard('x')), or a spec that names 'x', as in state_out_specs.""",
)
def diverging_write() -> Any:
    return call(writes(mean=jnp.mean))(net(), X)


@mistake(
    sm.DivergedStateError,
    """\
fun: shards wrote different values to states that keep one copy:
  - model.mean: BatchState(float32[]) varies over 'x', 'y' but leaves with P(), which keeps one copy
  - model.count: State(int32[]) varies over 'y' but leaves with P(), which keeps one copy
Mend it in one of three ways:
  1. reduce the value yourself: state.set(jax.lax.pmean(value, ('x', 'y')));
  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a function;
  3. keep one value per shard: State(value, spec=sm.PerShard('x', 'y')), or a spec that names 'x', 'y', as in state_out_specs.""",
)
def several_diverging_writes() -> Any:
    mesh = make_mesh("4x2")
    fun = writes(mean=jnp.mean, count=lambda x: jax.lax.axis_index("y"))
    return call(fun, mesh=mesh, in_specs=(P(), P(("x", "y"))), out_specs=(P(("x", "y")), P()))(
        net(), X
    )


@mistake(
    sm.DivergedStateError,
    """\
<lambda>: shards wrote different values to states that keep one copy:
  - <lambda>(...)[1]['made']: HiddenState(float32[2], name='h') varies over 'x' but leaves with P(), which keeps one copy
Mend it in one of three ways:
  1. reduce the value yourself: state.set(jax.lax.pmean(value, 'x'));
  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a function;
  3. keep one value per shard: State(value, spec=sm.PerShard('x')), or a spec that names 'x', as in state_out_specs.""",
)
def diverging_state_made_inside() -> Any:
    return call(lambda m, x: (x, {"made": sm.HiddenState(x, name="h")}))(net(), X)


@mistake(
    sm.StatemeshError,
    """\
reduce='mean' cannot merge values of dtype int32. Use reduce='sum', 'max' or 'min' for integers, or a function `(old, new, axis_names) -> value`.""",
)
def mean_of_an_integer() -> Any:
    return sm.State({"n": 0, "mean": 0.0}, reduce="mean")


@mistake(
    sm.StatemeshError,
    """\
reduce='sum' cannot merge values of dtype bool. Use an integer with reduce='max' or 'min' instead, or a function `(old, new, axis_names) -> value`.""",
)
def sum_of_a_boolean() -> Any:
    return sm.State(0).replace(value=True, reduce="sum")


@mistake(
    sm.SpecError,
    """\
<lambda>: out_specs require replication, but these results vary:
  - <lambda>(...)[0]['loss']: float32[] varies over 'x' but its out_spec is P()
  - <lambda>(...)[0]['y']: float32[2] varies over 'x' but its out_spec is P()
Reduce it, as with jax.lax.psum(value, 'x'), or name 'x' in out_specs to join the shards' parts.""",
)
def result_that_varies() -> Any:
    return call(lambda m, x: ({"loss": x.sum(), "y": x}, m), out_specs=(P(), P()))(net(), X)


@mistake(
    sm.SpecError,
    """\
<lambda>: out_specs require replication, but these results vary:
  - <lambda>(...)[0]['order']: int32[2] varies over 'x' but its out_spec is P()
Reduce it, as with jax.lax.psum(value, 'x'), or name 'x' in out_specs to join the shards' parts.""",
)
def result_that_varies_and_is_not_typed_so() -> Any:
    fun = lambda m, x: ({"order": jnp.argsort(x), "sum": jax.lax.psum(x, "x")}, m)
    return call(fun, out_specs=(P(), P()))(net(), X)


@mistake(
    sm.SpecError,
    """\
<lambda>: results have fewer axes than their specs have entries:
  - <lambda>(...)[0]: float32[] has rank 0, but its spec P('x') has 1 entry
Keep an axis, as with jnp.sum(x, keepdims=True) or x[None], or use P() for a value that is the same on every shard.""",
)
def result_with_too_few_axes() -> Any:
    return call(lambda m, x: (x.sum(), m))(net(), X)


@mistake(
    sm.SpecError,
    """\
specs must be a tree prefix of what they place:
  - shard_map out_specs is a tuple of 2 elements, but <lambda>(...) is a tuple of 3 elements
One spec stands for a whole subtree: P() or P('axis') in its place fits anything.""",
)
def out_specs_that_are_no_prefix() -> Any:
    return call(lambda m, x: (x, m, 1))(net(), X)


@mistake(
    sm.SpecError,
    """\
step(...)[1]['w'] is float32[16], but its out_spec is None, which only fits results without arrays outside States. Write P() or P('axis').""",
)
def none_for_a_result_that_is_an_array() -> Any:
    return call(out_specs=(P("x"), None))({"w": X}, X)


@mistake(
    TypeError,
    """\
mul got incompatible shapes for broadcasting: (2,), (16,).

Hint: a replicated state met sharded data:
  - m.w (float32[16]) is whole on every shard, but x, split by P('x'), is float32[2] there
To split the state like the data, write state_in_specs=P('x') (or {filter: P('x')}), or give the state its own spec=P('x').""",
)
def whole_state_beside_split_data() -> Any:
    return call(lambda m, x: (x * m.w.value, m))(net(), X)


@mistake(
    sm.StructureError,
    """\
choose: these states differ only in where they came from, and nothing shows which of them each result continues:
  - choose(...)[1].mean may be teacher.mean or student.mean
That is lost if the branches of a `cond` return different states, or if a loop exchanges them. Distinguish them by a name or tag: State(value, name='a'); or write the values into the states that came in, after the `cond` or loop: `state.set(new.value)`.""",
)
def one_of_two_models_returned_by_a_cond() -> Any:
    def choose(teacher: Net, student: Net, x: Any) -> Any:
        return x, jax.lax.cond(jax.lax.pmax(x.sum(), "x") > 0, lambda: teacher, lambda: student)

    model = net().replace(mean=sm.BatchState(0.0, reduce="sum"))
    return call(choose, in_specs=(P(), P(), P("x")))(model, model, X)


@mistake(
    sm.DivergedStateError,
    """\
<lambda>: the policies of these states gave values that differ between shards, but one copy is kept:
  - s: State(float32[2], reduce='sum') varies over 'x' but leaves with P(): reduce='sum' adds the increments to the old value, which entered split over 'x'
Mend it:
  - let it leave as it entered; or write what the shards' values become, as in reduce=lambda old, new, axis_names: jax.lax.psum(new, axis_names)""",
)
def a_sum_with_an_old_value_that_differs() -> Any:
    mapped = call(lambda s, x: (x, s.set(s.value + x)), state_in_specs=P("x"), state_out_specs=P())
    return mapped(sm.State(X, reduce="sum"), X)


@mistake(
    sm.DivergedStateError,
    """\
<lambda>: the policies of these states gave values that differ between shards, but one copy is kept:
  - s: State(float32[], reduce=keep) varies over 'x' but leaves with P(): keep returned it, but must return the same value on every shard
Mend it:
  - reduce it in keep, as with jax.lax.psum(value, 'x') or jax.lax.all_gather(value, 'x', to='invarying')""",
)
def a_function_whose_result_differs() -> Any:
    def keep(old: Any, new: Any, axis_names: Any) -> Any:
        return new

    mapped = call(lambda s, x: (x, s.set(s.value + x.sum())))
    return mapped(sm.State(0.0, reduce=keep), X)


@mistake(
    sm.StructureError,
    """\
value_and_grad: <lambda> must return (loss, model) with the model that it was given, a dict, but returned None in its place:
  - m['w'] is missing
Return the model as it came in, or with what was written to its states. What else is returned goes beside the loss: pass `has_aux=True` and return ((loss, aux), model).""",
)
def no_model_beside_the_loss() -> Any:
    return sm.value_and_grad(lambda m: (m["w"].sum(), None))({"w": X})


@mistake(
    sm.StructureError,
    """\
value_and_grad: <lambda> must return ((loss, aux), model) with the model that it was given, a dict, but returned a dict in its place:
  - m['w'] is missing
  - m['b'] is new
Return the model as it came in, or with what was written to its states. What else is returned goes beside the loss: pass `has_aux=True` and return ((loss, aux), model).""",
)
def another_model_beside_the_loss() -> Any:
    fun = lambda m: ((m["w"].sum(), 0), {"b": m["w"]})
    return sm.value_and_grad(fun, has_aux=True)({"w": X})


@mistake(
    sm.StructureError,
    """\
value_and_grad: <lambda> must return (loss, model) with the model that it was given, a dict, but returned 3 in its place:
  - m['w'] is missing
  - m is new
Return the model as it came in, or with what was written to its states. What else is returned goes beside the loss: pass `has_aux=True` and return ((loss, aux), model).""",
)
def a_number_beside_the_loss() -> Any:
    return sm.value_and_grad(lambda m: (m["w"].sum(), 3))({"w": X})


MASKED = np.ma.masked_array(X, X > 3)


@mistake(
    TypeError,
    """\
the argument x has a mask, which JAX would drop:
  - x is a masked array, float32[16]
Pass the numbers and the mask as two arrays: `x.filled(0)` and `numpy.ma.getmaskarray(x)`.""",
)
def a_masked_argument() -> Any:
    return call(lambda m, x: (x, m))(net(), MASKED)


@mistake(
    TypeError,
    """\
a State's value has a mask, which JAX would drop:
  - value['a'] is a masked array, float32[16]
Pass the numbers and the mask as two arrays: `value['a'].filled(0)` and `numpy.ma.getmaskarray(value['a'])`.""",
)
def a_masked_value() -> Any:
    return sm.State({"a": MASKED, "b": X})


@mistake(
    TypeError,
    """\
a State's value has a mask, which JAX would drop:
  - value is a masked array, float32[16]
Pass the numbers and the mask as two arrays: `value.filled(0)` and `numpy.ma.getmaskarray(value)`.""",
)
def a_masked_value_set() -> Any:
    return sm.State(X).set(MASKED)


@mistake(
    sm.DivergedStateError,
    """\
<lambda>: shards wrote different values to states that keep one copy:
  - m.mean: BatchState(float32[]) varies over 'x' but leaves with P(), which keeps one copy
  - m.count: State(int32[]) varies over 'x' but leaves with P(), which keeps one copy
Mend it in one of three ways:
  1. reduce the value yourself: state.set(jax.lax.pmean(value, 'x'));
  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a function;
  3. keep one value per shard: State(value, spec=sm.PerShard('x')), or a spec that names 'x', as in state_out_specs.""",
)
def branches_that_write_differently() -> Any:
    def more(m: Net) -> Net:
        return m.replace(count=m.count.value + 1, mean=m.mean.value + 1)

    fun = lambda m, x: (x, jax.lax.cond(jnp.sum(x) > 20, more, lambda m: m, m))
    return call(fun)(net(), X)


@mistake(
    sm.StatemeshError,
    """\
m['rng']: RandomState holds keys of shape (8,), but a shard or lane draws from one key. Hold one key; each shard or lane then gets a stream of its own. Or give each its own key: RandomState(keys, spec=sm.PerShard('axis')) for shard_map, state_in_axes=sm.RandomState for pmap2 and vmap2.""",
)
def several_keys_for_every_shard() -> Any:
    keys = sm.RandomState(jax.random.split(jax.random.key(0), 8))
    return call(lambda m, x: (x, m))({"rng": keys}, X)


@mistake(
    sm.StatemeshError,
    """\
RandomState holds keys of shape (8,), but a shard or lane draws from one key. Hold one key; each shard or lane then gets a stream of its own. Or give each its own key: RandomState(keys, spec=sm.PerShard('axis')) for shard_map, state_in_axes=sm.RandomState for pmap2 and vmap2.""",
)
def a_draw_from_several_keys() -> Any:
    return sm.RandomState(jax.random.split(jax.random.key(0), 8)).rows(2)


@mistake(
    TypeError,
    """\
RandomState needs a typed key, got int32[]. Write `sm.RandomState(jax.random.key(0))`; `jax.random.wrap_key_data(raw)` makes a typed key of a raw one.""",
)
def number_for_a_key() -> Any:
    return sm.RandomState(jax.random.key(0)).replace(value=3)


@mistake(
    TypeError,
    """\
PerShard names no mesh axis. Write PerShard('data').""",
)
def no_axis_for_per_shard() -> Any:
    return sm.PerShard()


@pytest.mark.parametrize(("make", "error", "text"), CASES)
def test_the_text_is_exactly(
    make: Callable[[], Any], error: type[BaseException], text: str
) -> None:
    # JAX adds the address of a page to some of its own classes of errors.
    assert_says(make, error, text, until="\nSee https:")
