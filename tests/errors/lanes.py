"""Mistakes with `vmap2`, `pmap2`, `Map` and what creates states of lanes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import jnp, make_mesh

from .states import untyped
from .table import Mistake, Mistakes, each


X = np.arange(8, dtype=np.float32).reshape(4, 2)
ONE = jax.devices()[:1]


def both(make: Callable[[Any], Any]) -> list[Mistake]:
    """A mistake with each of the two transforms."""
    return each(make, sm.vmap2, sm.pmap2)


def step(s: Any, x: Any) -> Any:
    return x, s.set(s.value + x)


def same(x: Any) -> Any:
    return x


class Net(sm.Module):
    w: sm.ParamState
    mean: sm.State


def net() -> Net:
    return Net(sm.ParamState(X), sm.State(np.zeros(2, np.float32)))


def update(model: Net, x: Any) -> Any:
    return x, model.replace(w=model.w.value + 1, mean=model.mean.value + x)


def mapped_step(lanes: Any, state: Any, x: Any = X, **options: Any) -> Any:
    return lanes(step, in_axes=(None, 0), **options)(state, x)


def mapped_update(lanes: Any, **options: Any) -> Any:
    return lanes(update, in_axes=(None, 0), **options)(net(), X)


def writes_that_differ(lanes: Any) -> Any:
    def update(model: Net, x: Any) -> Any:
        return model.replace(w=model.w.value + x, mean=model.mean.value + x)

    return lanes(update, in_axes=(None, 0))(net().replace(w=sm.ParamState(X[0])), X)


class Doubled(sm.State):
    def leave(self, old: Any, axis_names: Any) -> Any:
        return self.set(2 * self.value)


def last(old: Any, new: Any, axis_names: Any) -> Any:
    return new


def of_three(x: Any, y: Any, z: Any) -> Any:
    return x


def inside_a_shard_map(fun: Callable[[Any], Any]) -> Any:
    return sm.shard_map(fun, make_mesh(), P("x"), P("x"))(np.zeros((8, 2), np.float32))


def summed(x: Any) -> Any:
    return jax.lax.psum(x, "i")


def summed_by_its_number(s: Any, x: Any) -> Any:
    return s.set(s.value + sm.psum(x, "i") + 0 * jax.lax.axis_index("i"))


def state_of_lanes_on_a_mesh(fun: Any, reduce: Any) -> Any:
    lanes: Any = sm.vmap2(fun, in_axes=(None, 0), axis_name="i")
    return inside_a_shard_map(lambda x: lanes(sm.State(0.0, reduce=reduce), x[0]))


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


def create(make: Callable[[Any], Any]) -> list[Mistake]:
    """A mistake with each of the functions that create states."""
    return each(make, sm.vmap2_new_states, sm.pmap2_new_states)


def counters(**options: Any) -> sm.Map[Counter]:
    return sm.Map(Counter(), 4, axis_name="i", **options).init_all_states()


MISTAKES: Mistakes = {
    "decorating nothing": both(lambda lanes: lanes(axis_size=4)(None)),
    "no number of lanes": both(lambda lanes: lanes(step, axis_size=0)),
    "filter in place of the axis": both(lambda lanes: lanes(step, state_in_axes={"w": 0})),
    "half an axis for states": both(lambda lanes: lanes(step, state_out_axes={0.5: ...})),
    "axis in place of the filter": both(lambda lanes: lanes(step, state_in_axes={0: 3})),
    "half an axis": both(lambda lanes: lanes(step, in_axes=(None, 0.5))(sm.State(0.0), X)),
    "truth for an axis": both(lambda lanes: lanes(same, in_axes=True)(X)),
    "name for an axis": both(lambda lanes: lanes(same, out_axes="rows")(X)),
    "names of lanes": [
        functools.partial(lanes, same, axis_name=name)
        for name in ("", False, ("a", "b"))
        for lanes in (sm.vmap2, sm.pmap2)
    ],
    "number of arguments of lanes": [
        *both(lambda lanes: lanes(step, in_axes=(0,))(sm.State(0.0), X)),
        *both(lambda lanes: lanes(step)(sm.State(0.0))),
    ],
    "axes that are no prefix": [
        *both(lambda lanes: lanes(same, in_axes=({"b": 0},))({"a": X})),
        *both(lambda lanes: mapped_step(lanes, sm.State(X[0], reduce="sum"), out_axes=(0, 0, 0))),
    ],
    "axis that arguments do not have": [
        *both(lambda lanes: lanes(same, in_axes=2)({"a": X, "b": 3.0})),
        *both(lambda lanes: mapped_update(lanes, state_in_axes={-3: ...})),
    ],
    "axis that results do not have": [
        *both(lambda lanes: lanes(lambda x: {"x": x[None] * 2, "y": x * 2}, out_axes=2)(X)),
        *both(
            lambda lanes: mapped_update(
                lanes, out_axes=(0, None), state_out_axes={None: sm.ParamState, -3: ...}
            )
        ),
        *both(
            lambda lanes: lanes(
                lambda s, x: s.replace(value=x[0]), in_axes=(None, 0), state_in_axes={2: ...}
            )(sm.State(np.zeros((2, 2, 4), np.float32)), X)
        ),
    ],
    "result that differs between lanes": both(
        lambda lanes: lanes(
            lambda x: (jax.lax.pmean(x, "i"), x * 2), axis_name="i", out_axes=(None, None)
        )(X)
    ),
    "unclear number of lanes": [
        *both(lambda lanes: lanes(lambda a, b: a, in_axes=(0, 1), axis_size=3)({"u": X}, X)),
        *both(lambda lanes: mapped_step(lanes, sm.State(X[:3, 0]), state_in_axes={0: ...})),
    ],
    "nothing that shows the number of lanes": lambda: sm.vmap2(step, in_axes=None)(sm.State(X), X),
    "more lanes than devices": [
        lambda: sm.pmap2(same)(np.zeros((9, 2))),
        lambda: sm.pmap2(lambda: 1, devices=ONE, axis_size=4)(),
    ],
    "lanes of no devices": lambda: sm.pmap2(same)(jnp.ones((0, 2))),
    "devices of lanes": [
        lambda: sm.pmap2(step, devices=ONE, backend="tpu"),
        lambda: untyped.pmap2(same, devices=[0, 1]),
        lambda: sm.pmap2(same, devices=ONE * 2),
        lambda: sm.pmap2(same, devices=[]),
        lambda: untyped.pmap2(same, devices=ONE[0]),
    ],
    "states that enter and leave on other axes": [
        *both(
            lambda lanes: mapped_step(
                lanes, sm.State(X), state_in_axes={0: ...}, state_out_axes={1: ...}
            )
        ),
        *both(
            lambda lanes: mapped_step(
                lanes, sm.State(X), state_in_axes={0: ...}, state_out_axes={None: ...}
            )
        ),
    ],
    "writes that differ between lanes": both(writes_that_differ),
    "writes that differ where all lanes are to agree": both(
        lambda lanes: mapped_update(
            lanes, axis_name="i", out_axes=(0, None), state_out_axes={None: ...}
        )
    ),
    "policies that give several values in lanes": [
        *both(lambda lanes: mapped_step(lanes, Doubled(0.0), X[:, 0], axis_name="i")),
        *both(lambda lanes: mapped_step(lanes, Doubled(0.0), X[:, 0], state_out_axes={None: ...})),
        *both(lambda lanes: mapped_step(lanes, sm.State(0.0, reduce=last), X[:, 0], axis_name="i")),
    ],
    "filter that matches nothing in lanes": [
        *both(lambda lanes: mapped_update(lanes, state_in_axes={0: sm.BatchState, 1: "nobody"})),
        *both(lambda lanes: mapped_step(lanes, sm.State(X[0]), state_out_axes={0: sm.RandomState})),
    ],
    "one state in two places written in lanes": both(
        lambda lanes: lanes(lambda m, x: (x, [m[0].set(m[0].value + 1), m[1]]), in_axes=(None, 0))(
            [sm.State(0.0)] * 2, X
        )
    ),
    "positions of arguments": [
        functools.partial(sm.pmap2, same, **{name: value})
        for name in ("donate_argnums", "static_broadcasted_argnums")
        for value in ([1.0], [False], (0, "x"))
    ],
    "arguments that are not there": [
        lambda: sm.pmap2(step, static_broadcasted_argnums=(0, 2, -3))(1, X),
        lambda: sm.pmap2(step, donate_argnums=(0, 2), in_axes=(None, 0))(sm.State(X[0]), X),
    ],
    "global shapes": [
        lambda: sm.pmap2(of_three, in_axes=(1, 0, 0), global_arg_shapes=((3, 9), (8, 1), (8,)))(
            jnp.ones((3, 8)), jnp.ones(8), [jnp.ones(8)] * 2
        ),
        lambda: sm.pmap2(of_three, global_arg_shapes=((8,),))(*[jnp.ones(8)] * 3),
        *each(
            lambda shapes: untyped.pmap2(same, global_arg_shapes=shapes), 8, (8,), ((8, 2.0),), "8"
        ),
    ],
    "static argument that cannot be hashed": lambda: sm.pmap2(
        lambda x, how: x, static_broadcasted_argnums=1
    )(X, [1]),
    "name of a mesh axis for lanes": lambda: inside_a_shard_map(
        sm.vmap2(same, axis_name="x", in_axes=1, out_axes=1)
    ),
    "collective of JAX over the lanes of a mesh": lambda: inside_a_shard_map(
        sm.vmap2(summed, axis_name="i", in_axes=1, out_axes=1)
    ),
    "policy over the lanes of a mesh that is a function": lambda: state_of_lanes_on_a_mesh(
        step, last
    ),
    "lanes of a mesh that cannot be traced": lambda: state_of_lanes_on_a_mesh(
        summed_by_its_number, "sum"
    ),
    "axis that is not there": each(
        lambda fun: sm.vmap2(fun, axis_name="i")(X),
        lambda x: sm.psum(x, "j"),
        lambda x: sm.all_gather(x, "j"),
        lambda x: sm.axis_index("j"),
    ),
    "pmap2 inside another mapped call": [
        lambda: inside_a_shard_map(sm.pmap2(same)),
        lambda: sm.pmap2(sm.pmap2(same, "j"), "i")(X),
    ],
    "new states of no module": [
        lambda: untyped.vmap2_new_states({"a": sm.State(0.0)}, {}, axis_size=2),
        lambda: untyped.Map(Counter, 3),
    ],
    "new states without a number": lambda: sm.vmap2_new_states(Counter(), {}),
    "new states of no lanes": create(lambda new_states: new_states(Counter(), {}, axis_size=0)),
    "new states that differ but have no lanes": create(
        lambda new_states: new_states(
            Counter(), {"kind": sm.NonBatchState}, axis_size=2, axis_name="i"
        )
    ),
    "new states and a filter that matches nothing": create(
        lambda new_states: new_states(Counter(), {}, None, 2, {1: sm.BatchState}, axis_name="i")
    ),
    "new states with an argument that nobody takes": create(
        lambda new_states: new_states(Counter(), {"size": 3}, axis_size=2, axis_name="i")
    ),
    "map of no lanes": lambda: sm.Map(Counter(), 0),
    "map with a key that is no axis": lambda: sm.Map(Counter(), 2, init_state_axes={"a": ...}),
    "map with a filter that matches nothing": lambda: counters(init_state_axes="slow"),
    "map of an unknown method": each(
        lambda name: counters().map(name), "forgot", "_hidden", "count"
    ),
    "map with another number of lanes": lambda: counters()(X[:3]),
    "map of more lanes than devices": lambda: sm.Map(
        Counter(), 9, behavior="pmap"
    ).init_all_states(),
    "map with axes for other arguments": lambda: counters(in_axes=(0, None))(X),
    "map with too many arguments": lambda: counters()(X, X),
    "map of a method that returns no pair": [
        *each(lambda how: counters(behavior=how).map("forget")(X), "vmap", "pmap"),
        *each(lambda how: counters(behavior=how).map("three")(X), "vmap", "pmap"),
    ],
}
