"""An Equinox module as the tree that `jax.shard_map` maps, under `jax.jit` and under `eqx.filter_jit`."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from tests.scripts.benchmarks.peers._case import Case, Made, by_hand, fed_back, mapped


class Unit(eqx.Module):
    """A module with a state and a child module."""

    value: jax.Array
    below: "Unit | None" = None


class Flat(eqx.Module):
    units: list[Unit]


def _model(case: Case) -> Flat | Unit | None:
    values = case.placed()
    if case.kind != "deep":
        return Flat([Unit(value) for value in values])
    unit = None
    for value in reversed(values):
        unit = Unit(value, unit)
    return unit


def _made(case: Case, jit: Callable[..., Any], lower: bool) -> Made:
    def program(model: Any, *inputs: jax.Array) -> Any:
        values, structure = jax.tree.flatten(model)
        result, new = by_hand(case, values, *inputs)
        return result, jax.tree.unflatten(structure, new)

    call = jit(mapped(case, program))
    return fed_back(case, call, _model(case), lambda model: jax.tree.leaves(model)[0], lower)


under_jit = functools.partial(_made, jit=jax.jit, lower=True)
under_filter_jit = functools.partial(_made, jit=eqx.filter_jit, lower=False)
