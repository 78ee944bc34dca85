"""An Equinox module as the tree that `jax.shard_map` maps, under `jax.jit` and under `eqx.filter_jit`."""

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

    def values(self) -> list[jax.Array]:
        return [unit.value for unit in self.units]

    def with_values(self, values: list[jax.Array]) -> "Flat":
        return Flat([Unit(value) for value in values])


class Deep(eqx.Module):
    top: Unit

    def values(self) -> list[jax.Array]:
        found, unit = [self.top.value], self.top
        while unit.below is not None:
            unit = unit.below
            found.append(unit.value)
        return found

    def with_values(self, values: list[jax.Array]) -> "Deep":
        unit = None
        for value in reversed(values):
            unit = Unit(value, unit)
        assert unit is not None
        return Deep(unit)


def _made(case: Case, jit: Callable[..., Any], lower: bool) -> Made:
    values = case.placed()
    model: Any = (
        Deep(Unit(values[0])).with_values(values)
        if case.kind == "deep"
        else Flat([Unit(value) for value in values])
    )

    def program(model: Any, *inputs: jax.Array) -> Any:
        result, new = by_hand(case, model.values(), *inputs)
        return result, model.with_values(new)

    call = jit(mapped(case, program))
    return fed_back(case, call, model, lambda model: model.values()[0], lower)


def under_jit(case: Case) -> Made:
    return _made(case, jax.jit, lower=True)


def under_filter_jit(case: Case) -> Made:
    return _made(case, eqx.filter_jit, lower=False)
