"""Mistakes with states, modules, filters, keys and the parts of trees."""

from collections.abc import Callable
from operator import getitem
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import jnp, make_mesh

from .table import Mistake, Mistakes, each


X = np.arange(16, dtype=np.float32)
MASKED = np.ma.masked_array(X, X > 3)
KEY = jax.random.key(0)
# Without its types, which refuse some mistakes first.
untyped: Any = sm


class Net(sm.Module):
    w: sm.ParamState
    mean: sm.BatchState
    count: sm.State


def net() -> Net:
    return Net(sm.ParamState(X), sm.BatchState(0.0), sm.State(0))


def kind_with_a_constructor() -> Any:
    class Mine(sm.State):
        def __init__(self, size: int) -> None:
            super().__init__(jnp.zeros(size))

    return Mine


def combining_different_trees() -> Any:
    params, rest = sm.partition({"net": [net(), 1]}, sm.ParamState)
    rest["net"][0] = sm.State(0)
    rest["net"].append(2)
    return sm.combine(params, rest)


def packed(value: Any = None) -> Any:
    first = np.ones(4) if value is None else value
    return sm.pack({"a": sm.State(first), "b": sm.State(1.0)}, make_mesh())


def reshaped(change: Callable[[Any], Any]) -> list[Mistake]:
    """Buffers of another shape, unpacked, looked at and given to a call."""
    step = lambda model: sm.shard_map(lambda model: model, make_mesh(), None, None)(model)
    uses = (lambda model: model.unpack(), lambda model: getitem(model.states, "['b']"), step)
    return each(lambda use: use(jax.tree.map(change, packed())), *uses)


class Forgetful(sm.State):
    __slots__ = ()

    def leave(self, old: Any, axis_names: Any) -> Any:
        self.set(self.value + 1)


class Dazed(sm.State):
    __slots__ = ()

    def enter(self, axis_names: Any) -> Any:
        return self.value, axis_names


class Unmade(sm.Module):
    def init_state(self) -> Any:
        self.replace()


class Steps(sm.Module):
    total: sm.State
    n: int


ONE = sm.State(0.0)


def entered(state: sm.State) -> Any:
    step = lambda state, x: state.set(state.value + x.sum())
    return sm.shard_map(step, make_mesh(), (P(), P("x")), P())(state, X)


MISTAKES: Mistakes = {
    "forgotten return": [
        lambda: entered(Forgetful(1.0)),
        lambda: entered(Dazed(1.0)),
        lambda: Unmade().init_all_states(),
    ],
    "state in a state": [
        lambda: sm.State({"a": sm.ParamState(1.0)}),
        lambda: sm.State(1.0).set(sm.State(2.0)),
    ],
    "state of text": lambda: sm.State({"a": "text", "b": None, "c": object}),
    "masked value": [
        lambda: sm.State({"a": MASKED, "b": X}),
        lambda: sm.State(X).set(MASKED),
    ],
    "mean of an integer": lambda: sm.State({"n": 0, "mean": 0.0}, reduce="mean"),
    "sum of a boolean": lambda: sm.State(0).replace(value=True, reduce="sum"),
    "assigning to a state": lambda: setattr(sm.BatchState(0.0), "value", 1.0),
    "attribute of an array": [
        lambda: untyped.BatchState(0.0).shape,
        lambda: untyped.RandomState(KEY).at[0],
    ],
    "assigning to a module": [
        lambda: setattr(net(), "mean", 1.0),
        lambda: setattr(net(), "cache", 1.0),
        lambda: setattr(Unmade(), "mean", 1.0),
    ],
    "policy of two arguments": lambda: sm.State(0.0, reduce=lambda old, new: new),
    "filter of one argument": each(
        lambda use: use(lambda state: True),
        lambda filter: sm.states(net(), filter),
        lambda filter: sm.filters.Not(filter),
        lambda filter: sm.vmap2(net, state_in_axes=filter),
        lambda filter: sm.value_and_grad(net, wrt=filter),
    ),
    "another shape or dtype written": [
        lambda: sm.BatchState({"mean": jnp.zeros(3), "n": jnp.int32(0)}, name="stats").set(
            {"mean": jnp.zeros(4), "n": jnp.float32(0)}
        ),
        lambda: sm.State(3).set(1.5),
    ],
    "another structure written": lambda: sm.State((1, 2), name="pair").set([1, 2]),
    "number that does not fit": [
        lambda: sm.State(2**70),
        lambda: sm.State([1, -(2**31) - 1]),
        lambda: sm.State(np.int8(3)).set(300),
        lambda: sm.State(np.uint8(3), name="n").set(-1),
        lambda: sm.State(3).replace(value=2**31),
    ],
    "unknown field of a state": lambda: sm.State(1.0).replace(values=2.0),
    "unknown field of a module": lambda: net().replace(weights=1.0),
    "tags that are none": each(
        lambda tag: sm.State(1.0).replace(tag=tag), b"a", ("a", 3), ["a", ["b"]]
    ),
    "kind with a constructor": kind_with_a_constructor,
    "no typed key": [
        lambda: sm.RandomState(jax.random.PRNGKey(0)),
        lambda: sm.RandomState(0),
        lambda: sm.RandomState(KEY).replace(value=3),
    ],
    "key under two names": lambda: sm.RandomState(KEY, value=KEY),
    "sharded key": lambda: sm.RandomState(KEY, spec=P("x")),
    "draw from several keys": lambda: sm.RandomState(jax.random.split(KEY, 8)).rows(2),
    "count below zero": [
        lambda: sm.RandomState(KEY).rows(-3, "x"),
        lambda: sm.RandomState(KEY).split(-1),
    ],
    "no axis for a value per shard": lambda: sm.PerShard(),
    "axis named twice for a value per shard": [
        lambda: sm.PerShard("x", "y", "x"),
        lambda: sm.PerShard(("x", "y"), "x"),
    ],
    "init argument that nobody takes": lambda: net().init_all_states(size=3),
    "argument of a filter": [
        lambda: untyped.filters.OfType((3,)),
    ],
    "filter that matches nothing": lambda: sm.partition(net(), "cache"),
    "where without a tree": lambda: sm.filters.to_predicate(sm.filters.Where(lambda m: m.w))(
        (), sm.State(0)
    ),
    "combining nothing": lambda: sm.combine(),
    "combining overlapping parts": lambda: sm.combine(sm.partition(net(), sm.ParamState)[0], net()),
    "combining too few parts": lambda: sm.combine(
        *sm.partition({"net": [net()]}, sm.ParamState, sm.BatchState)[:2]
    ),
    "combining different trees": combining_different_trees,
    "packing what is packed": lambda: sm.pack(packed(), make_mesh()),
    "assigning to a packed model": [
        lambda: setattr(packed(), "buffers", ()),
        lambda: delattr(packed(), "buffers"),
    ],
    "buffer of another shape": [
        *reshaped(lambda x: x.reshape(-1, 1)),
        *reshaped(lambda x: x[:2]),
        *reshaped(lambda x: np.stack([x, x])),
    ],
    "carry and result of a scan": [
        lambda: sm.scan(lambda c, x: c, sm.State(0.0), X),
        lambda: sm.scan(lambda c, x: ([c], x), sm.State(0.0), X),
        lambda: sm.scan(lambda c, x: (sm.State(0.0), x), sm.BatchState(0.0), X),
        lambda: sm.scan(lambda c, x: ({"a": c["a"], "c": c["b"]}, x), {"a": ONE, "b": 1.0}, X),
        lambda: sm.scan(lambda c, x: (Steps(sm.State(X), c.n + 1), x), Steps(ONE, 3), X),
    ],
}
