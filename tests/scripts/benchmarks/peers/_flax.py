"""Flax NNX: a module whose variables are written in place, and the same module split from its structure."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from tests.scripts.benchmarks.peers._case import Case, Made, by_hand, fed_back, mapped, result_spec


class Unit(nnx.Module):
    """A module with a state and a child module."""

    def __init__(self, values: Sequence[jax.Array]) -> None:
        self.state = nnx.Variable(values[0])
        self.below = Unit(values[1:]) if len(values) > 1 else None

    def variables(self) -> list[Any]:
        return [self.state, *([] if self.below is None else self.below.variables())]


class Flat(nnx.Module):
    def __init__(self, values: Sequence[jax.Array], of: type[Any]) -> None:
        self.units = nnx.List([of(value) for value in values])

    def variables(self) -> list[Any]:
        return list(self.units)


def _model(case: Case) -> Flat | Unit:
    if case.kind == "deep":
        return Unit(case.placed())
    return Flat(case.placed(), nnx.Param if case.kind == "training" else nnx.Variable)


def _first(model: Flat | Unit) -> Any:
    return model.variables()[0][...]


def _step(case: Case, model: Flat | Unit, *inputs: jax.Array) -> Any:
    """The update that one device makes to its part of the model."""
    variables = model.variables()
    result, new = by_hand(case, [variable[...] for variable in variables], *inputs)
    for variable, value in zip(variables, new, strict=True):
        variable[...] = value
    return result


def _mapped(case: Case) -> Any:
    """Take the module and write the new values into it."""
    states = nnx.StateSharding([(nnx.Variable, case.state_spec)])
    mapped: Any = nnx.shard_map(
        functools.partial(_step, case),
        mesh=case.mesh,
        in_specs=(states, *[case.split.spec] * len(case.inputs)),
        out_specs=result_spec(case),
    )
    return nnx.jit(mapped)


def under_jit(case: Case) -> Made:
    model, call = _model(case), _mapped(case)
    lower = lambda: call.lower(model, *case.inputs)
    return Made(lambda: call(model, *case.inputs), lambda: _first(model), lower)


def cached(case: Case) -> Made:
    model = _model(case)
    call = nnx.cached_partial(_mapped(case), model)
    return Made(lambda: call(*case.inputs), lambda: _first(model))


def split_and_merge(case: Case) -> Made:
    """`jax.shard_map` maps the module's state as a tree, and the function closes over its structure."""
    graphdef, state = nnx.split(_model(case))

    def program(state: Any, *inputs: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        result = _step(case, model, *inputs)
        return result, nnx.state(model)

    call = jax.jit(mapped(case, program))
    return fed_back(case, call, state, lambda state: _first(nnx.merge(graphdef, state)))
