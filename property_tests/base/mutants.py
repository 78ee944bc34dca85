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
    """One attribute of the engine and what breaks it.

    **Attributes:**

    - `owner`: the dotted name of the module or class that has the attribute. It is looked up when the mutant
        is tried, so that a wrong name fails this mutant alone.
    """

    name: str
    owner: str
    attribute: str
    broken: Break

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        owner = pkgutil.resolve_name(self.owner)
        patch.setattr(owner, self.attribute, self.broken(getattr(owner, self.attribute)))


def engine(name: str) -> Any:
    """What the engine has under this dotted name."""
    return pkgutil.resolve_name(f"statemesh.{name}")


def always(value: Any) -> Break:
    return lambda right: lambda *args, **kwargs: value


def unchanged(right: Any) -> Any:
    """Returns the first argument."""
    return lambda first, *rest: first


def with_result(change: Callable[[Any], Any]) -> Break:
    return lambda right: lambda *args: change(right(*args))


def last_match(right: Any) -> Any:
    """The last filter that matches takes the state."""

    def matches(filters: Any, roots: Any, what: str) -> Any:
        last = len(filters) - 1
        found = right(filters[::-1], roots, what)
        return [[None if i is None else last - i for i in first] for first in found]

    return matches


def _other_policy(confused: dict[str, str]) -> Break:
    """Named policies confused."""
    return lambda right: (
        lambda value, old, how, axes: right(value, old, confused.get(how, how), axes)
    )


def _first_value(right: Any) -> Any:
    """A mean that is the first shard's value: no reduction over shards at all."""

    def reduced(value: Any, old: Any, how: str, axes: Any) -> Any:
        first = jax.lax.axis_index(axes) == 0
        kept = jax.tree.map(lambda x: jax.lax.psum(x * first, axes), value)
        return kept if how == "mean" else right(value, old, how, axes)

    return reduced


def _without_gradient(right: Any) -> Any:
    return lambda *args: jax.lax.stop_gradient(right(*args))


def _old_value_forgotten(right: Any) -> Any:
    return lambda self, old, axes: right(self, self, axes)


STATES = "statemesh._model._state"
# What shards and lanes have in common.
POLICY_MUTANTS = [
    Mutant("the mean is the first shard's value", STATES, "reduced", _first_value),
    Mutant("sum is the mean", STATES, "reduced", _other_policy({"sum": "mean"})),
    Mutant("max is min", STATES, "reduced", _other_policy({"max": "min"})),
    Mutant("min is max", STATES, "reduced", _other_policy({"min": "max"})),
    Mutant("policies have no gradient", STATES, "reduced", _without_gradient),
    Mutant("leave skipped", "statemesh.State", "leave", unchanged),
    Mutant("old value forgotten in leave", "statemesh.State", "leave", _old_value_forgotten),
    Mutant("one key for all shards", "statemesh.RandomState", "enter", unchanged),
]
