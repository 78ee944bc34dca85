"""Every mistake with lanes that is refused, with its exact text."""

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


@pytest.mark.parametrize("lanes", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("size", [0, -1, 4.0, True, "4"], ids=repr)
def test_a_size_that_is_no_positive_int(lanes: Any, size: Any) -> None:
    with pytest.raises(sm.StatemeshError) as raised:
        lanes(step, axis_size=size)
    assert str(raised.value) == f"axis_size={size!r} is not a positive int."


def in_axes_no_prefix(lanes: Any) -> Any:
    def fun(batch: Any) -> Any:
        return batch

    return lanes(fun, in_axes=({"b": 0},))({"a": X})


def declared_state_that_lost_axes(lanes: Any) -> Any:
    def fun(s: sm.State, x: Any) -> Any:
        return s.replace(value=x[0])

    state = sm.State(np.zeros((2, 2, 4), np.float32))
    return lanes(fun, in_axes=(None, 0), state_in_axes={2: ...})(state, X)


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


def leave_that_differs_in_lanes_declared_to_be_the_same(lanes: Any) -> Any:
    mapped = lanes(step, in_axes=(None, 0), state_out_axes={None: ...})
    return mapped(Doubled(0.0), X[:, 0])


def policy_that_returns_another_value_in_each_lane(lanes: Any) -> Any:
    mapped = lanes(step, axis_name="i", in_axes=(None, 0))
    return mapped(sm.State(0.0, reduce=last), X[:, 0])


def one_state_in_two_places(lanes: Any) -> Any:
    def fun(m: Any, x: Any) -> Any:
        return x, [m[0].set(m[0].value + 1), m[1]]

    return lanes(fun, in_axes=(None, 0))([state := sm.State(0.0), state], X)


def static_argument_that_cannot_be_hashed() -> Any:
    def fun(x: Any, how: Any) -> Any:
        return x

    return sm.pmap2(fun, static_broadcasted_argnums=1)(X, [1])


def inside(fun: Callable[[Any], Any]) -> Any:
    return sm.shard_map(fun, make_mesh(), P("x"), P("x"))(np.zeros((8, 2), np.float32))


def name_of_a_mesh_axis() -> Any:
    def lane(x: Any) -> Any:
        return x + 1

    return inside(sm.vmap2(lane, axis_name="x", in_axes=1, out_axes=1))


def pmap2_inside_shard_map() -> Any:
    def lane(x: Any) -> Any:
        return x + 1

    return inside(sm.pmap2(lane))


def pmap2_inside_pmap2() -> Any:
    def lane(x: Any) -> Any:
        return x + 1

    return sm.pmap2(sm.pmap2(lane, "j"), "i")(X)


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


@pytest.mark.parametrize("size", [0, -3, 2.0, True, None, "8"], ids=repr)
def test_a_map_of_no_positive_size(size: Any) -> None:
    with pytest.raises(sm.StatemeshError) as raised:
        sm.Map(Counter(), size)
    assert str(raised.value) == f"init_map_size={size!r} is not a positive int."


def counters(**options: Any) -> sm.Map[Counter]:
    return sm.Map(Counter(), 4, axis_name="i", **options).init_all_states()


@pytest.mark.parametrize("name", ["forgot", "_hidden", "count"])
def test_a_map_of_an_unknown_method(name: str) -> None:
    with pytest.raises(sm.StructureError) as raised:
        counters().map(name)
    assert str(raised.value) == (
        f"Counter has no method {name!r}. Its methods are 'forget', 'three', 'update'."
    )


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


MISTAKES: Mistakes = {
    "not a callable": both(lambda lanes: lanes(3)),
    "decorated nothing": both(lambda lanes: lanes(axis_size=4)(None)),
    "unknown policy": both(lambda lanes: lanes(step, unexpected_out_state_mapping="stack")),
    "filter in place of the axis": both(lambda lanes: lanes(step, state_in_axes={"w": 0})),
    "half an axis for states": both(lambda lanes: lanes(step, state_out_axes={0.5: ...})),
    "axis in place of the filter": both(lambda lanes: lanes(step, state_in_axes={0: 3})),
    "devices of another backend": lambda: sm.pmap2(step, devices=jax.devices()[:1], backend="tpu"),
    "entries for fewer arguments": both(lambda lanes: lanes(step, in_axes=(0,))(sm.State(0.0), X)),
    "too few arguments": both(lambda lanes: lanes(step)(sm.State(0.0))),
    "half an axis": both(lambda lanes: lanes(step, in_axes=(None, 0.5))(sm.State(0.0), X)),
    "truth for an axis": both(lambda lanes: lanes(lambda x: x, in_axes=True)(X)),
    "name for an axis": both(lambda lanes: lanes(lambda x: x + 1, out_axes="rows")(X)),
    "in axes no prefix": both(in_axes_no_prefix),
    "out axes no prefix": both(
        lambda lanes: lanes(step, in_axes=(None, 0), out_axes=(0, 0, 0))(
            sm.State(X[0], reduce="sum"), X
        )
    ),
    "axis that arguments do not have": both(
        lambda lanes: lanes(lambda x: x, in_axes=2)({"a": X, "b": 3.0})
    ),
    "axis that states do not have": both(
        lambda lanes: lanes(update, in_axes=(None, 0), state_in_axes={-3: ...})(net(), X)
    ),
    "axis that results do not have": both(
        lambda lanes: lanes(lambda x: {"x": x[None] * 2, "y": x * 2}, out_axes=2)(X)
    ),
    "axis that written states do not have": both(
        lambda lanes: lanes(
            update,
            in_axes=(None, 0),
            out_axes=(0, None),
            state_out_axes={None: sm.ParamState, -3: ...},
        )(net(), X)
    ),
    "declared state that lost axes": both(declared_state_that_lost_axes),
    "result that is not the same in all lanes": both(
        lambda lanes: lanes(
            lambda x: (jax.lax.pmean(x, "i"), x * 2), axis_name="i", out_axes=(None, None)
        )(X)
    ),
    "sizes that conflict": both(
        lambda lanes: lanes(lambda a, b: a, in_axes=(0, 1), axis_size=3)({"u": X}, X)
    ),
    "state of another number of lanes": both(
        lambda lanes: lanes(step, in_axes=(None, 0), state_in_axes={0: ...})(
            sm.State(np.zeros(3, np.float32)), X
        )
    ),
    "nothing to infer from": lambda: sm.vmap2(step, in_axes=None)(sm.State(X), X),
    "more lanes than devices": lambda: sm.pmap2(lambda x: x)(np.zeros((9, 2))),
    "more lanes than devices given": lambda: sm.pmap2(
        lambda: 1, devices=jax.devices()[:1], axis_size=4
    )(),
    "state that enters and leaves on other axes": both(
        lambda lanes: lanes(
            step, in_axes=(None, 0), state_in_axes={0: ...}, state_out_axes={1: ...}
        )(sm.State(X), X)
    ),
    "state that enters on an axis and leaves on none": both(
        lambda lanes: lanes(
            step, in_axes=(None, 0), state_in_axes={0: ...}, state_out_axes={None: ...}
        )(sm.State(X), X)
    ),
    "writes that differ between lanes without a name": both(
        writes_that_differ_between_lanes_without_a_name
    ),
    "leave that returns another value in each lane": both(
        lambda lanes: lanes(step, axis_name="i", in_axes=(None, 0))(Doubled(0.0), X[:, 0])
    ),
    "leave that differs in lanes declared to be the same": both(
        leave_that_differs_in_lanes_declared_to_be_the_same
    ),
    "policy that returns another value in each lane": both(
        policy_that_returns_another_value_in_each_lane
    ),
    "axis none with writes that differ": both(
        lambda lanes: lanes(
            update,
            axis_name="i",
            in_axes=(None, 0),
            out_axes=(0, None),
            state_out_axes={None: ...},
        )(net(), X)
    ),
    "filters in that match nothing": both(
        lambda lanes: lanes(
            update, in_axes=(None, 0), state_in_axes={0: sm.BatchState, 1: "nobody"}
        )(net(), X)
    ),
    "filter out that matches nothing": both(
        lambda lanes: lanes(step, in_axes=(None, 0), state_out_axes={0: sm.RandomState})(
            sm.State(X[0]), X
        )
    ),
    "one state in two places": both(one_state_in_two_places),
    "mean of integers": both(
        lambda lanes: lanes(lambda s, x: s.set(x), in_axes=(None, 0))(
            sm.State(0, reduce="mean"), np.arange(4, dtype=np.int32)
        )
    ),
    "static arguments that are not there": lambda: sm.pmap2(
        step, static_broadcasted_argnums=(0, 2, -3)
    )(1, X),
    "donated arguments that are not there": lambda: sm.pmap2(
        step, donate_argnums=(0, 2), in_axes=(None, 0)
    )(sm.State(X[0], reduce="sum"), X),
    "static argument that cannot be hashed": static_argument_that_cannot_be_hashed,
    "name of a mesh axis": name_of_a_mesh_axis,
    "pmap2 inside shard map": pmap2_inside_shard_map,
    "pmap2 inside pmap2": pmap2_inside_pmap2,
    "new states of a dict": lambda: sm.vmap2_new_states({"a": sm.State(0.0)}, {}, axis_size=2),
    "new states without a size": lambda: sm.vmap2_new_states(Counter(), {}),
    "new states with an argument that nobody takes": lambda: sm.vmap2_new_states(
        Counter(), {"size": 3}, axis_size=2, axis_name="i"
    ),
    "map of a class": lambda: sm.Map(Counter, 3),
    "map of unknown behavior": lambda: sm.Map(Counter(), 3, behavior="pmap2"),
    "map of unknown policy": lambda: sm.Map(Counter(), 3, unexpected_out_state_mapping="stack"),
    "map with another number of lanes": lambda: counters()(X[:3]),
    "map of more lanes than devices": lambda: sm.Map(
        Counter(), 9, behavior="pmap"
    ).init_all_states(),
    "map with axes for other arguments": lambda: counters(in_axes=(0, None))(X),
    "map with too many arguments": lambda: counters()(X, X),
    "pmap2 of no lanes": lambda: sm.pmap2(lambda x: x)(jnp.ones((0, 2))),
    "devices that are numbers": lambda: sm.pmap2(lambda x: x, devices=[0, 1]),
    "no devices": lambda: sm.pmap2(lambda x: x, devices=[]),
    "axis name that cannot be hashed": both(lambda lanes: lanes(lambda x: x, axis_name=["i"])),
}
