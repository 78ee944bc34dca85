"""statemesh: plain, donating, packed, and packed and donating."""

import functools
from typing import Any, Literal

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.scripts.benchmarks.peers import _case
from tests.scripts.benchmarks.peers._case import RATE, Case, Made, fed_back, moved, result_spec


class Unit(sm.Module):
    """A module with a state and a child module."""

    state: sm.State
    below: "Unit | None" = None


class Flat(sm.Module):
    units: list[sm.State]


def _moved(case: Case, state: sm.State, x: jax.Array) -> sm.State:
    return state.set(moved(case.kind, state.value, x))


def flat_step(case: Case, model: Flat, x: jax.Array) -> Any:
    return 2 * x, model.replace(units=[_moved(case, state, x) for state in model.units])


def deep_step(case: Case, model: Unit, x: jax.Array) -> Any:
    def new(unit: Unit) -> Unit:
        below = None if unit.below is None else new(unit.below)
        return unit.replace(state=_moved(case, unit.state, x), below=below)

    return 2 * x, new(model)


def loss_fn(model: Flat, x: jax.Array, y: jax.Array) -> Any:
    return _case.loss([state.value for state in model.units], x, y), model


def training_step(case: Case, model: Flat, x: jax.Array, y: jax.Array) -> Any:
    (found, model), grads = sm.value_and_grad(loss_fn, axis_name="x")(model, x, y)
    return found, eqx.apply_updates(model, jax.tree.map(lambda g: -RATE * g, grads))


def _model(case: Case) -> Any:
    values = case.placed()
    if case.kind == "training":
        return Flat([sm.ParamState(value) for value in values])
    if case.kind == "reduced":
        return Flat([sm.State(value, reduce="mean") for value in values])
    states = [sm.State(value, spec=case.state_spec) for value in values]
    if case.kind == "sharded":
        return Flat(states)
    unit = None
    for state in reversed(states):
        unit = Unit(state, unit)
    return unit


def _first(model: Any) -> Any:
    if isinstance(model, sm.Packed):
        model = model.unpack()
    return (model.units[0] if isinstance(model, Flat) else model.state).value


STEPS: dict[str, Any] = {
    "sharded": flat_step,
    "reduced": flat_step,
    "deep": deep_step,
    "training": training_step,
}


def make(case: Case, donate: Literal["none", "states"] = "none", pack: bool = False) -> Made:
    fun = functools.partial(STEPS[case.kind], case)
    in_specs = (None, *[case.split.spec] * len(case.inputs))
    call = sm.shard_map(fun, case.mesh, in_specs, (result_spec(case), P()), donate=donate)
    model = sm.pack(_model(case), case.mesh) if pack else _model(case)
    return fed_back(case, call, model, _first)


donating = functools.partial(make, donate="states")
packed = functools.partial(make, pack=True)
packed_donating = functools.partial(make, donate="states", pack=True)
