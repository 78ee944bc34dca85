"""Every mistake with lanes that is refused, with its exact text."""

# ruff: noqa: E501

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import assert_says, make_mesh, mistakes_in


X = np.arange(8, dtype=np.float32).reshape(4, 2)
CASES: list[Any] = []
mistake = mistakes_in(CASES)
TRANSFORMS: dict[str, Any] = {"vmap2": sm.vmap2, "pmap2": sm.pmap2}


def with_both(
    error: type[BaseException], text: str
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """A mistake that both transforms refuse in the same words; `{transform}` in the text is its name."""

    def add(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        for name, lanes in TRANSFORMS.items():

            def of(lanes: Any = lanes) -> Any:
                return make(lanes)

            expected = text.replace("{transform}", name)
            CASES.append(pytest.param(of, error, expected, id=f"{make.__name__}-{name}"))
        return make

    return add


def step(s: Any, x: Any) -> Any:
    return x, s.set(s.value + x)


class Net(sm.Module):
    w: sm.ParamState
    mean: sm.State


def net() -> Net:
    return Net(sm.ParamState(X), sm.State(np.zeros(2, np.float32)))


def update(model: Net, x: Any) -> Any:
    return x, model.replace(w=model.w.value + 1, mean=model.mean.value + x)


# At construction


@with_both(
    TypeError,
    """\
{transform} maps a function, got 3 of type int. The function comes first: `{transform}(fn, in_axes=0)`.""",
)
def not_a_callable(lanes: Any) -> Any:
    return lanes(3)


@with_both(
    TypeError,
    """\
{transform} maps a function, got None of type NoneType. The function comes first: `{transform}(fn, in_axes=0)`.""",
)
def decorated_nothing(lanes: Any) -> Any:
    return lanes(axis_size=4)(None)


@with_both(
    sm.StatemeshError,
    """\
unexpected_out_state_mapping='stack' is not known. Use one of 'raise', 'warn', 'ignore', 'auto'.""",
)
def unknown_policy(lanes: Any) -> Any:
    return lanes(step, unexpected_out_state_mapping="stack")


@pytest.mark.parametrize("lanes", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("size", [0, -1, 4.0, True, "4"], ids=repr)
def test_a_size_that_is_no_positive_int(lanes: Any, size: Any) -> None:
    with pytest.raises(sm.StatemeshError) as raised:
        lanes(step, axis_size=size)
    assert str(raised.value) == f"axis_size={size!r} is not a positive int."


@with_both(
    TypeError,
    """\
a key of state_in_axes is 'w' of type str, not an axis. Use an int (negative ones count from the end), or None for what all lanes share.""",
)
def filter_in_place_of_the_axis(lanes: Any) -> Any:
    return lanes(step, state_in_axes={"w": 0})


@with_both(
    TypeError,
    """\
a key of state_out_axes is 0.5 of type float, not an axis. Use an int (negative ones count from the end), or None for what all lanes share.""",
)
def half_an_axis_for_states(lanes: Any) -> Any:
    return lanes(step, state_out_axes={0.5: ...})


@with_both(
    TypeError,
    """\
3 is not a filter. Use a type, a tag (string), `...`, None, a function `(path, state) -> bool`, a list of filters, or a class of statemesh.filters.""",
)
def axis_in_place_of_the_filter(lanes: Any) -> Any:
    return lanes(step, state_in_axes={0: 3})


@mistake(
    sm.StatemeshError,
    f"pmap2: devices={jax.devices()[:1]!r} are not of backend='tpu'. Give only one of the two.",
)
def devices_of_another_backend() -> Any:
    return sm.pmap2(step, devices=jax.devices()[:1], backend="tpu")


# in_axes and out_axes


@with_both(
    sm.BatchAxisError,
    """\
step was called with 2 positional arguments, but in_axes has 1 entry. in_axes has one entry for each positional argument (None for one that all lanes share); each argument passed by keyword is mapped over axis 0.""",
)
def entries_for_fewer_arguments(lanes: Any) -> Any:
    return lanes(step, in_axes=(0,))(sm.State(0.0), X)


@with_both(
    TypeError,
    """\
step(s: Any, x: Any) -> Any cannot be called like this: missing a required argument: 'x'.""",
)
def too_few_arguments(lanes: Any) -> Any:
    return lanes(step)(sm.State(0.0))


@with_both(
    TypeError,
    """\
in_axes[1] is 0.5 of type float, not an axis. Use an int (negative ones count from the end), or None for what all lanes share.""",
)
def half_an_axis(lanes: Any) -> Any:
    return lanes(step, in_axes=(None, 0.5))(sm.State(0.0), X)


@with_both(
    TypeError,
    """\
in_axes is True of type bool, not an axis. Use an int (negative ones count from the end), or None for what all lanes share.""",
)
def truth_for_an_axis(lanes: Any) -> Any:
    return lanes(lambda x: x, in_axes=True)(X)


@with_both(
    TypeError,
    """\
out_axes is 'rows' of type str, not an axis. Use an int (negative ones count from the end), or None for what all lanes share.""",
)
def name_for_an_axis(lanes: Any) -> Any:
    return lanes(lambda x: x + 1, out_axes="rows")(X)


@with_both(
    sm.BatchAxisError,
    """\
axes must be a tree prefix of what they map:
  - in_axes[0] is a dict with keys ['b'], but batch is a dict with keys ['a']
One axis stands for a whole subtree: 0 or None in its place fits anything.""",
)
def in_axes_no_prefix(lanes: Any) -> Any:
    def fun(batch: Any) -> Any:
        return batch

    return lanes(fun, in_axes=({"b": 0},))({"a": X})


@with_both(
    sm.BatchAxisError,
    """\
axes must be a tree prefix of what they map:
  - out_axes is a tuple of 3 elements, but step(...) is a tuple of 2 elements
One axis stands for a whole subtree: 0 or None in its place fits anything.""",
)
def out_axes_no_prefix(lanes: Any) -> Any:
    return lanes(step, in_axes=(None, 0), out_axes=(0, 0, 0))(sm.State(X[0], reduce="sum"), X)


@with_both(
    sm.BatchAxisError,
    """\
<lambda>: arguments do not have the axes that they are mapped over:
  - x['a']: float32[4,2] has 2 axes, but is mapped over axis 2
  - x['b']: 3.0 has 0 axes, but is mapped over axis 2
Name an axis that they have, or None for what all lanes share.""",
)
def axis_that_arguments_do_not_have(lanes: Any) -> Any:
    return lanes(lambda x: x, in_axes=2)({"a": X, "b": 3.0})


@with_both(
    sm.BatchAxisError,
    """\
update: arguments do not have the axes that they are mapped over:
  - model.w: float32[4,2] has 2 axes, but is mapped over axis -3
  - model.mean: float32[2] has 1 axis, but is mapped over axis -3
Name an axis that they have, or None for what all lanes share.""",
)
def axis_that_states_do_not_have(lanes: Any) -> Any:
    return lanes(update, in_axes=(None, 0), state_in_axes={-3: ...})(net(), X)


@with_both(
    sm.BatchAxisError,
    """\
<lambda>: results have too few axes for where their lanes should go:
  - <lambda>(...)['y']: float32[2] in each lane, with lanes to go on axis 2
With the lanes a result has one axis more than in each lane; 0 always fits.""",
)
def axis_that_results_do_not_have(lanes: Any) -> Any:
    return lanes(lambda x: {"x": x[None] * 2, "y": x * 2}, out_axes=2)(X)


@with_both(
    sm.BatchAxisError,
    """\
update: results have too few axes for where their lanes should go:
  - model.mean: float32[2] in each lane, with lanes to go on axis -3
With the lanes a result has one axis more than in each lane; 0 always fits.""",
)
def axis_that_written_states_do_not_have(lanes: Any) -> Any:
    return lanes(
        update, in_axes=(None, 0), out_axes=(0, None), state_out_axes={None: sm.ParamState, -3: ...}
    )(net(), X)


@with_both(
    sm.BatchAxisError,
    """\
fun: results have too few axes for where their lanes should go:
  - s: float32[] in each lane, with lanes to go on axis 2
With the lanes a result has one axis more than in each lane; 0 always fits.""",
)
def declared_state_that_lost_axes(lanes: Any) -> Any:
    def fun(s: sm.State, x: Any) -> Any:
        return s.replace(value=x[0])

    state = sm.State(np.zeros((2, 2, 4), np.float32))
    return lanes(fun, in_axes=(None, 0), state_in_axes={2: ...})(state, X)


@with_both(
    sm.BatchAxisError,
    """\
<lambda>: out_axes=None is for results that are the same in all lanes, but:
  - <lambda>(...)[1]: float32[2] differs between lanes
Reduce it, as with jax.lax.pmean(value, 'i'), or give it an axis: out_axes=0.""",
)
def result_that_is_not_the_same_in_all_lanes(lanes: Any) -> Any:
    return lanes(lambda x: (jax.lax.pmean(x, "i"), x * 2), axis_name="i", out_axes=(None, None))(X)


# How many lanes


@with_both(
    sm.BatchAxisError,
    """\
<lambda>: the number of lanes is not clear:
  - a['u']: float32[4,2] has 4 on axis 0
  - b: float32[4,2] has 2 on axis 1
  - axis_size=3
All mapped axes must have one size; give None as the axis of what all lanes share.""",
)
def sizes_that_conflict(lanes: Any) -> Any:
    return lanes(lambda a, b: a, in_axes=(0, 1), axis_size=3)({"u": X}, X)


@with_both(
    sm.BatchAxisError,
    """\
step: the number of lanes is not clear:
  - s: float32[3] has 3 on axis 0
  - x: float32[4,2] has 4 on axis 0
All mapped axes must have one size; give None as the axis of what all lanes share.""",
)
def state_of_another_number_of_lanes(lanes: Any) -> Any:
    return lanes(step, in_axes=(None, 0), state_in_axes={0: ...})(
        sm.State(np.zeros(3, np.float32)), X
    )


@mistake(
    sm.BatchAxisError,
    """\
step: nothing is mapped, so nothing shows how many lanes there are. Give axis_size=..., or an axis in in_axes or state_in_axes.""",
)
def nothing_to_infer_from() -> Any:
    return sm.vmap2(step, in_axes=None)(sm.State(X), X)


@mistake(
    sm.BatchAxisError,
    """\
<lambda>: 9 lanes on 8 devices; pmap2 gives every lane a device of its own. Use 8 at most, each with a part of the batch, as in x.reshape(8, -1, *x.shape[1:]); or use vmap2 or shard_map.""",
)
def more_lanes_than_devices() -> Any:
    return sm.pmap2(lambda x: x)(np.zeros((9, 2)))


@mistake(
    sm.BatchAxisError,
    """\
<lambda>: 4 lanes on 1 device; pmap2 gives every lane a device of its own. Use 1 at most, each with a part of the batch, as in x.reshape(1, -1, *x.shape[1:]); or use vmap2 or shard_map.""",
)
def more_lanes_than_devices_given() -> Any:
    return sm.pmap2(lambda: 1, devices=jax.devices()[:1], axis_size=4)()


# States


@with_both(
    sm.BatchAxisError,
    """\
step: states enter on one axis and leave on another:
  - s: State(float32[2]) enters on axis 0 but leaves on axis 1
A state leaves on the axis that state_in_axes gives it: leave it out of state_out_axes, or give it the same axis there.""",
)
def state_that_enters_and_leaves_on_other_axes(lanes: Any) -> Any:
    return lanes(step, in_axes=(None, 0), state_in_axes={0: ...}, state_out_axes={1: ...})(
        sm.State(X), X
    )


@with_both(
    sm.BatchAxisError,
    """\
step: states enter on one axis and leave on another:
  - s: State(float32[2]) enters on axis 0 but leaves on axis None
A state leaves on the axis that state_in_axes gives it: leave it out of state_out_axes, or give it the same axis there.""",
)
def state_that_enters_on_an_axis_and_leaves_on_none(lanes: Any) -> Any:
    return lanes(step, in_axes=(None, 0), state_in_axes={0: ...}, state_out_axes={None: ...})(
        sm.State(X), X
    )


@with_both(
    sm.BatchAxisError,
    """\
update: lanes wrote different values to states without a declared axis:
  - model.w: ParamState(float32[2])
  - model.mean: State(float32[2])
Mend it in one of three ways:
  1. keep one value per lane: state_out_axes={0: filter}, and state_in_axes={0: filter} from the next call on;
  2. declare how writes are merged: State(value, reduce='mean'), or 'sum', 'max', 'min', or a function;
  3. reduce the value before it is set, as with jax.lax.pmean(value, 'lanes') with axis_name='lanes'.""",
)
def writes_that_differ_between_lanes_without_a_name(lanes: Any) -> Any:
    def update(model: Net, x: Any) -> Any:
        return model.replace(w=model.w.value + x, mean=model.mean.value + x)

    return lanes(update, in_axes=(None, 0))(net().replace(w=sm.ParamState(X[0])), X)


class Doubled(sm.State):
    def leave(self, old: Any, axis_names: Any) -> Any:
        return self.set(2 * self.value)


def last(old: Any, new: Any, axis_names: Any) -> Any:
    return new


MERGED_APART = """\
step: the policies of these states gave values that differ between lanes (%s), but one copy is kept:
  - s: Doubled(float32[]): Doubled.leave returned it, but must return the same value in every lane
Mend it:
  - reduce it in Doubled.leave, as with jax.lax.psum(value, axis_names)
Or keep one value per lane: state_out_axes={0: filter}, and state_in_axes={0: filter} from the next call on."""


@with_both(sm.BatchAxisError, MERGED_APART % "'i'")
def leave_that_returns_another_value_in_each_lane(lanes: Any) -> Any:
    return lanes(step, axis_name="i", in_axes=(None, 0))(Doubled(0.0), X[:, 0])


@with_both(sm.BatchAxisError, MERGED_APART % "without a name")
def leave_that_differs_in_lanes_declared_to_be_the_same(lanes: Any) -> Any:
    mapped = lanes(step, in_axes=(None, 0), state_out_axes={None: ...})
    return mapped(Doubled(0.0), X[:, 0])


@with_both(
    sm.BatchAxisError,
    (MERGED_APART % "'i'")
    .replace("Doubled.leave", "last")
    .replace("Doubled(float32[])", "State(float32[], reduce=last)"),
)
def policy_that_returns_another_value_in_each_lane(lanes: Any) -> Any:
    mapped = lanes(step, axis_name="i", in_axes=(None, 0))
    return mapped(sm.State(0.0, reduce=last), X[:, 0])


@with_both(
    sm.BatchAxisError,
    """\
update: lanes wrote different values to states that state_out_axes declares to be the same in all (axis None):
  - model.mean: State(float32[2])
Reduce the value, as with jax.lax.pmean(value, 'i'); or declare how writes are merged, State(value, reduce='mean'); or give the states an axis: state_out_axes={0: filter}. A NonBatchState cannot have an axis: use another kind of state.""",
)
def axis_none_with_writes_that_differ(lanes: Any) -> Any:
    return lanes(
        update,
        axis_name="i",
        in_axes=(None, 0),
        out_axes=(0, None),
        state_out_axes={None: ...},
    )(net(), X)


@with_both(
    sm.StructureError,
    """\
state_in_axes: no state matches BatchState, 'nobody'. The states are:
  - model.w: ParamState(float32[4,2])
  - model.mean: State(float32[2])""",
)
def filters_in_that_match_nothing(lanes: Any) -> Any:
    return lanes(update, in_axes=(None, 0), state_in_axes={0: sm.BatchState, 1: "nobody"})(net(), X)


@with_both(
    sm.StructureError,
    """\
state_out_axes: no state matches RandomState. The states are:
  - step(...)[1]: State(float32[2])""",
)
def filter_out_that_matches_nothing(lanes: Any) -> Any:
    return lanes(step, in_axes=(None, 0), state_out_axes={0: sm.RandomState})(sm.State(X[0]), X)


@with_both(
    sm.StructureError,
    """\
fun: a state that stands in several places was written:
  - m[0] and m[1] are one State object
As soon as one is written, each place has a state of its own. Keep the state in one place; tie what must be in two with `equinox.nn.Shared`, or put copies in: `state.replace()`.""",
)
def one_state_in_two_places(lanes: Any) -> Any:
    def fun(m: Any, x: Any) -> Any:
        return x, [m[0].set(m[0].value + 1), m[1]]

    return lanes(fun, in_axes=(None, 0))([state := sm.State(0.0), state], X)


@with_both(
    sm.StatemeshError,
    """\
reduce='mean' cannot merge values of dtype int32. Use reduce='sum', 'max' or 'min' for integers, or a function `(old, new, axis_names) -> value`.""",
)
def mean_of_integers(lanes: Any) -> Any:
    return lanes(lambda s, x: s.set(x), in_axes=(None, 0))(
        sm.State(0, reduce="mean"), np.arange(4, dtype=np.int32)
    )


# Arguments of pmap2


@mistake(
    sm.StatemeshError,
    """\
static_broadcasted_argnums has 2, -3, but the call has 2 positional arguments, numbered from 0.""",
)
def static_arguments_that_are_not_there() -> Any:
    return sm.pmap2(step, static_broadcasted_argnums=(0, 2, -3))(1, X)


@mistake(
    sm.StatemeshError,
    """\
donate_argnums has 2, but the call has 2 positional arguments, numbered from 0.""",
)
def donated_arguments_that_are_not_there() -> Any:
    return sm.pmap2(step, donate_argnums=(0, 2), in_axes=(None, 0))(sm.State(X[0], reduce="sum"), X)


@mistake(
    sm.BatchAxisError,
    """\
fun: how is [1] of type list, which cannot be hashed, but static_broadcasted_argnums names it. Each value of a static argument has a compiled program of its own, found by its hash. Pass a value that can be hashed; or, for an array that all lanes share, give None in in_axes instead.""",
)
def static_argument_that_cannot_be_hashed() -> Any:
    def fun(x: Any, how: Any) -> Any:
        return x

    return sm.pmap2(fun, static_broadcasted_argnums=1)(X, [1])


# Inside other mapped calls


def inside(fun: Callable[[Any], Any]) -> Any:
    return sm.shard_map(fun, make_mesh(), P("x"), P("x"))(np.zeros((8, 2), np.float32))


@mistake(
    sm.BatchAxisError,
    """\
lane: axis_name='x' is a mesh axis that an enclosing shard_map maps over. Give the lanes another name.""",
)
def name_of_a_mesh_axis() -> Any:
    def lane(x: Any) -> Any:
        return x + 1

    return inside(sm.vmap2(lane, axis_name="x", in_axes=1, out_axes=1))


@mistake(
    sm.BatchAxisError,
    """\
lane: pmap2 gives each lane a device, but an enclosing mapped call uses the devices already (axes 'x'). Use vmap2 inside it.""",
)
def pmap2_inside_shard_map() -> Any:
    def lane(x: Any) -> Any:
        return x + 1

    return inside(sm.pmap2(lane))


@mistake(
    sm.BatchAxisError,
    """\
lane: pmap2 gives each lane a device, but an enclosing mapped call uses the devices already (axes 'i'). Use vmap2 inside it.""",
)
def pmap2_inside_pmap2() -> Any:
    def lane(x: Any) -> Any:
        return x + 1

    return sm.pmap2(sm.pmap2(lane, "j"), "i")(X)


# New states


class Counter(sm.Module):
    count: sm.State | None = None
    table: sm.NonBatchState | None = None

    def init_state(self, kind: Any = sm.State) -> "Counter":
        lane = jax.lax.axis_index("i") * jnp.ones(3)
        return self.replace(count=kind(lane))

    def update(self, x: Any) -> Any:
        return x, self

    def forget(self, x: Any) -> Any:
        return x

    def three(self, x: Any) -> Any:
        return x, self, 1

    _hidden = 3


@mistake(
    TypeError,
    """\
states are created for a statemesh.Module, got {'a': State(float32[])} of type dict. Derive its class from sm.Module and create its states in `init_state(self, **kwargs)`.""",
)
def new_states_of_a_dict() -> Any:
    return sm.vmap2_new_states({"a": sm.State(0.0)}, {}, axis_size=2)


@mistake(
    sm.BatchAxisError,
    """\
vmap2_new_states needs axis_size=..., the number of lanes: nothing else shows it.""",
)
def new_states_without_a_size() -> Any:
    return sm.vmap2_new_states(Counter(), {})


@pytest.mark.parametrize("create", [sm.vmap2_new_states, sm.pmap2_new_states])
def test_new_states_of_no_positive_size(create: Any) -> None:
    with pytest.raises(sm.StatemeshError) as raised:
        create(Counter(), {}, axis_size=0)
    assert str(raised.value) == "axis_size=0 is not a positive int."


@pytest.mark.parametrize("create", [sm.vmap2_new_states, sm.pmap2_new_states])
def test_a_non_batch_state_made_of_values_that_differ(create: Any) -> None:
    with pytest.raises(
        sm.BatchAxisError, match=r"all_states\(\.\.\.\)\.count: NonBatchState\(float32\[3\]\)"
    ):
        create(Counter(), {"kind": sm.NonBatchState}, axis_size=2, axis_name="i")


@pytest.mark.parametrize("create", [sm.vmap2_new_states, sm.pmap2_new_states])
def test_new_states_and_a_filter_that_matches_nothing(create: Any) -> None:
    with pytest.raises(sm.StructureError) as raised:
        create(Counter(), {}, None, 2, {1: sm.BatchState}, axis_name="i")
    assert str(raised.value) == (
        "state_out_axes: no state matches BatchState. The states are:\n"
        "  - module.count: State(float32[3])"
    )


@mistake(
    TypeError,
    """\
Counter.init_all_states got 'size', which no `init_state` in it takes. Add the argument to the signature of the `init_state` that needs it.""",
)
def new_states_with_an_argument_that_nobody_takes() -> Any:
    return sm.vmap2_new_states(Counter(), {"size": 3}, axis_size=2, axis_name="i")


# Map


@pytest.mark.parametrize("size", [0, -3, 2.0, True, None, "8"], ids=repr)
def test_a_map_of_no_positive_size(size: Any) -> None:
    with pytest.raises(sm.StatemeshError) as raised:
        sm.Map(Counter(), size)
    assert str(raised.value) == f"init_map_size={size!r} is not a positive int."


@mistake(
    TypeError,
    """\
states are created for a statemesh.Module, got <class 'tests.test_lane_errors.Counter'> of type _ModuleMeta. Derive its class from sm.Module and create its states in `init_state(self, **kwargs)`.""",
)
def map_of_a_class() -> Any:
    return sm.Map(Counter, 3)


@mistake(sm.StatemeshError, """behavior='pmap2' is not known. Use one of 'vmap', 'pmap'.""")
def map_of_unknown_behavior() -> Any:
    return sm.Map(Counter(), 3, behavior="pmap2")


@mistake(
    sm.StatemeshError,
    """unexpected_out_state_mapping='stack' is not known. Use one of 'raise', 'warn', 'ignore', 'auto'.""",
)
def map_of_unknown_policy() -> Any:
    return sm.Map(Counter(), 3, unexpected_out_state_mapping="stack")


def counters(**options: Any) -> sm.Map[Counter]:
    return sm.Map(Counter(), 4, axis_name="i", **options).init_all_states()


@pytest.mark.parametrize("name", ["forgot", "_hidden", "count"])
def test_a_map_of_an_unknown_method(name: str) -> None:
    with pytest.raises(sm.StructureError) as raised:
        counters().map(name)
    assert str(raised.value) == (
        f"Counter has no method {name!r}. Its methods are 'forget', 'three', 'update'."
    )


@mistake(
    sm.BatchAxisError,
    """\
update: the number of lanes is not clear:
  - map.module.count: float32[4,3] has 4 on axis 0
  - x: float32[3,2] has 3 on axis 0
  - axis_size=4
All mapped axes must have one size; give None as the axis of what all lanes share.""",
)
def map_with_another_number_of_lanes() -> Any:
    return counters()(X[:3])


@pytest.mark.parametrize("behavior", ["vmap", "pmap"])
@pytest.mark.parametrize(
    ("name", "what"), [("forget", "float32[2]"), ("three", "a tuple of 3 elements")]
)
def test_a_method_that_returns_no_pair(behavior: str, name: str, what: str) -> None:
    with pytest.raises(sm.StructureError) as raised:
        counters(behavior=behavior).map(name)(X)
    assert str(raised.value) == (
        f"Map: Counter.{name} returned {what}, not `(out, module)`. Return the result and the module with "
        "its new states: `return out, self.replace(state=...)`, or `return out, self`."
    )


@mistake(
    sm.BatchAxisError,
    """\
Counter.init_all_states: 9 lanes on 8 devices; pmap2 gives every lane a device of its own. Use 8 at most, each with a part of the batch, as in x.reshape(8, -1, *x.shape[1:]); or use vmap2 or shard_map.""",
)
def map_of_more_lanes_than_devices() -> Any:
    return sm.Map(Counter(), 9, behavior="pmap").init_all_states()


@mistake(
    sm.BatchAxisError,
    """\
update was called with 1 positional argument, but in_axes has 2 entries. in_axes has one entry for each positional argument (None for one that all lanes share); each argument passed by keyword is mapped over axis 0.""",
)
def map_with_axes_for_other_arguments() -> Any:
    return counters(in_axes=(0, None))(X)


@mistake(
    TypeError,
    """\
update(map: statemesh._map.Map, x: Any) -> Any cannot be called like this: too many positional arguments.""",
)
def map_with_too_many_arguments() -> Any:
    return counters()(X, X)


@mistake(
    sm.BatchAxisError,
    """\
<lambda>: there are no lanes:
  - x: float32[0,2] has 0 on axis 0
Map over an axis of size 1 or more.""",
)
def pmap2_of_no_lanes() -> Any:
    return sm.pmap2(lambda x: x)(jnp.ones((0, 2)))


@mistake(
    sm.StatemeshError,
    "pmap2: devices=(0, 1) must be different jax.Devices, as in devices=jax.devices()[:4].",
)
def devices_that_are_numbers() -> Any:
    return sm.pmap2(lambda x: x, devices=[0, 1])


@mistake(
    sm.StatemeshError,
    "pmap2: devices=() is empty. Leave it out, or pass some, as in devices=jax.devices()[:4].",
)
def no_devices() -> Any:
    return sm.pmap2(lambda x: x, devices=[])


@with_both(TypeError, "axis_name=['i'] of type list cannot be hashed. Use a string.")
def axis_name_that_cannot_be_hashed(lanes: Any) -> Any:
    return lanes(lambda x: x, axis_name=["i"])


@pytest.mark.parametrize(("make", "error", "text"), CASES)
def test_the_text_is_exactly(
    make: Callable[[], Any], error: type[BaseException], text: str
) -> None:
    assert_says(make, error, text, until="\n-----")


def test_one_device_twice() -> None:
    with pytest.raises(sm.StatemeshError, match=r"must be different jax\.Devices"):
        sm.pmap2(lambda x: x, devices=[jax.devices()[0]] * 2)


def test_vmap2_of_no_lanes_is_as_under_vmap() -> None:
    assert sm.vmap2(lambda x: x.sum())(jnp.ones((0, 2))).shape == (0,)
