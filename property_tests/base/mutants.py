"""Mutants: parts of the engine replaced by broken ones, which the checks on fixed examples must notice."""

import dataclasses
import pkgutil
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import pytest


# Takes the right function and returns a broken one.
Break: TypeAlias = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A name, the dotted name of what is replaced, and what breaks it."""

    name: str
    target: str
    broken: Break

    @property
    def owner(self) -> Any:
        """The module or class that has the target.

        It is looked up when the mutant is tried, so that an unknown name fails only this mutant.
        """
        return pkgutil.resolve_name(self.target.rpartition(".")[0])

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        attribute = self.target.rpartition(".")[2]
        patch.setattr(self.owner, attribute, self.broken(getattr(self.owner, attribute)))


def mutants(targets: dict[str, dict[str, Break]]) -> list[Mutant]:
    """The mutants of each target, by their names."""
    return [
        Mutant(name, f"statemesh.{target}", broken)
        for target, breaks in targets.items()
        for name, broken in breaks.items()
    ]


def engine(name: str) -> Any:
    """What the engine has under this dotted name."""
    return pkgutil.resolve_name(f"statemesh.{name}")


def always(value: Any) -> Break:
    return lambda right: lambda *args, **kwargs: value


def argument(number: int) -> Break:
    """Returns one of the arguments."""
    return lambda right: lambda *args: args[number]


def with_result(change: Callable[[Any], Any]) -> Break:
    return lambda right: lambda *args: change(right(*args))


def last_match(right: Any) -> Any:
    """The last filter that matches takes the state."""

    def matches(filters: Any, roots: Any, option: str) -> Any:
        last = len(filters) - 1
        found = right(filters[::-1], roots, option)
        return [[None if i is None else last - i for i in first] for first in found]

    return matches


def _other_policy(confused: dict[str, str]) -> Break:
    """Named policies confused."""

    def broken(right: Any) -> Any:
        def reduced(writes: Any) -> Any:
            return right(
                [dataclasses.replace(one, how=confused.get(one.how, one.how)) for one in writes]
            )

        return reduced

    return broken


def _first_value(right: Any) -> Any:
    """A mean that is the first shard's value: no reduction over shards at all."""

    def first(x: Any, over: Any) -> Any:
        return jax.lax.psum(x * (jax.lax.axis_index(over) == 0), over) if over else x

    def reduced(writes: Any) -> Any:
        made = right(writes)
        for k, one in enumerate(writes):
            if one.how == "mean":
                leaves, structure = jax.tree.flatten(one.value)
                made[k] = jax.tree.unflatten(structure, map(first, leaves, one.over))
        return made

    return reduced


def _without_gradient(right: Any) -> Any:
    return lambda writes: jax.lax.stop_gradient(right(writes))


def _old_value_forgotten(right: Any) -> Any:
    return lambda self, old, axes: right(self, self, axes)


unchanged = argument(0)
# What shards and lanes have in common.
POLICY_MUTANTS = mutants(
    {
        "_leave._policies.reduced": {
            "the mean is the first shard's value": _first_value,
            "sum is the mean": _other_policy({"sum": "mean"}),
            "max is min": _other_policy({"max": "min"}),
            "min is max": _other_policy({"min": "max"}),
            "policies have no gradient": _without_gradient,
        },
        "State.leave": {
            "leave skipped": unchanged,
            "old value forgotten in leave": _old_value_forgotten,
        },
        "RandomState.enter": {"one key for all shards": unchanged},
    }
)
