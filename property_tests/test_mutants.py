"""The checks that the property tests are made of fail on an engine that is broken on purpose."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

import statemesh as sm
from statemesh import _exit, _flow, _leave, _partition, _traced, _varying, _write_back
from statemesh._base._links import Links
from statemesh._call import _by_spec, _pipeline, _pure
from statemesh._model import _filters, _random, _state
from statemesh._resolve import _layout, _specs

from .examples import CHECKS


pytestmark = pytest.mark.slow


# What a check may fail with: its own assertions, or what a broken engine runs into.
FAILURES = (AssertionError, ValueError, TypeError, AttributeError, pytest.fail.Exception)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An attribute of the engine, and a function of the right one that makes the wrong one."""

    name: str
    owner: Any
    attribute: str
    broken: Callable[[Any], Any]

    def live(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self.owner, self.attribute, self.broken(getattr(self.owner, self.attribute)))


def same_nowhere(right: Any) -> Any:
    return lambda self, x: frozenset()


def other_policy(wrong: dict[str, str]) -> Callable[[Any], Any]:
    """Named policies confused."""
    return lambda right: lambda value, old, how, axes: right(value, old, wrong.get(how, how), axes)


def one_shards_value(right: Any) -> Any:
    """A mean that is the first shard's value: no reduction over shards at all."""

    def reduced(value: Any, old: Any, how: str, axes: Any) -> Any:
        first = jax.lax.axis_index(axes) == 0
        kept = jax.tree.map(lambda x: jax.lax.psum(x * first, axes), value)
        return kept if how == "mean" else right(value, old, how, axes)

    return reduced


def without_gradient(right: Any) -> Any:
    return lambda *args: jax.lax.stop_gradient(right(*args))


def of_another_shard(right: Any) -> Any:
    """`PerShard` entries handed to the next shard."""

    def take(self: Any, shard: Any) -> Any:
        if self.axis is not None:
            # One of the axes is enough; JAX refuses several in another order than the mesh's.
            names = jax.tree.leaves(tuple(self.spec))[0]
            count = jax.lax.axis_size(names)
            shard = jax.lax.ppermute(shard, names, [(i, (i + 1) % count) for i in range(count)])
        return right(self, shard)

    return take


def axes_backwards(right: Any) -> Any:
    """Axes that split one array axis together, minor to major."""

    def post_init(self: Any) -> None:
        entries = [e[::-1] if isinstance(e, tuple) else e for e in self.written.partitions]
        object.__setattr__(self, "written", PartitionSpec(*entries))
        right(self)

    return post_init


def first_arguments_kept(right: Any) -> Any:
    """A call that goes on with the arrays of the first one."""
    kept: dict[int, Any] = {}
    return lambda self, given: kept.setdefault(id(self), right(self, given))


def copied(right: Any) -> Any:
    """A result in which every array is a new one."""

    def back(self: Any, outputs: Any, arguments: Any) -> Any:
        return right(self, outputs, [jax.numpy.copy(x) for x in arguments])

    return back


def last_match(right: Any) -> Any:
    """The last filter that matches takes the state."""

    def matches(filters: Any, roots: Any, what: str) -> Any:
        last = len(filters) - 1
        found = right(filters[::-1], roots, what)
        return [[None if i is None else last - i for i in first] for first in found]

    return matches


MUTANTS = [
    Mutant(
        "links not followed",
        _traced,
        "continued",
        lambda right: lambda jaxpr: [frozenset()] * len(jaxpr.outvars),
    ),
    Mutant("nothing linked", _pure, "links_for", lambda right: lambda entered: None),
    Mutant(
        "tokens of other traces believed",
        Links,
        "rebuilt",
        lambda right: lambda self, value, token: (value, token),
    ),
    Mutant("a gathered value counted by every shard", _varying.Told, "same", same_nowhere),
    Mutant("mean is the first shard's value", _state, "reduced", one_shards_value),
    Mutant("sum is the mean", _state, "reduced", other_policy({"sum": "mean"})),
    Mutant("max is min", _state, "reduced", other_policy({"max": "min"})),
    Mutant("min is max", _state, "reduced", other_policy({"min": "max"})),
    Mutant("policies have no gradient", _state, "reduced", without_gradient),
    Mutant("leave skipped", sm.State, "leave", lambda right: lambda self, old, axes: self),
    Mutant(
        "old value forgotten in leave",
        sm.State,
        "leave",
        lambda right: lambda self, old, axes: right(self, self, axes),
    ),
    Mutant(
        "reduced over the first axis only",
        _exit.Exit,
        "in_order",
        lambda right: lambda self, names: right(self, names)[:1],
    ),
    Mutant(
        "reduced over every axis",
        _exit.Exit,
        "in_order",
        lambda right: lambda self, names: self.axis_names if names else (),
    ),
    Mutant(
        "predicates passed over",
        _flow._Walk,
        "_cond",
        lambda right: lambda self, branches, _, given: right(self, branches, frozenset(), given),
    ),
    Mutant("a written state forgotten", _leave, "_untouched", lambda right: lambda *args: True),
    Mutant("untouched arrays copied", _write_back.WriteBack, "__call__", copied),
    Mutant(
        "outputs in the wrong order",
        _write_back.WriteBack,
        "__call__",
        lambda right: lambda self, outputs, arguments: right(self, outputs[::-1], arguments),
    ),
    Mutant(
        "states taken for one another",
        _leave,
        "match",
        lambda right: lambda *args: right(*args)[1:] + right(*args)[:1],
    ),
    Mutant(
        "placements of states exchanged",
        _by_spec,
        "choose_specs",
        lambda right: lambda *args: right(*args)[::-1],
    ),
    Mutant(
        "state_in_specs passed over",
        _by_spec,
        "choose_specs",
        lambda right: lambda *args: [_specs.UNSAID] * len(right(*args)),
    ),
    Mutant(
        "arrays replicated instead of sharded",
        _by_spec,
        "placement",
        lambda right: lambda spec: _specs.REPLICATED,
    ),
    Mutant("axes of a spec backwards", _specs.Placement, "__post_init__", axes_backwards),
    Mutant("another shard's entry", _specs.Placement, "take", of_another_shard),
    Mutant("arguments of the first call", _layout.Layout, "concrete", first_arguments_kept),
    Mutant(
        "static leaves not compared",
        _pipeline.Signature,
        "same_statics",
        lambda right: lambda self, leaves: True,
    ),
    Mutant("static leaves not a key", _pipeline, "_tokens", lambda right: lambda *args: ()),
    Mutant(
        "one key for all shards",
        sm.RandomState,
        "enter",
        lambda right: lambda self, axes: self,
    ),
    Mutant(
        "common stream not advanced",
        sm.RandomState,
        "_advanced",
        lambda right: lambda self, value: self._rebuilt(value, self._shared),
    ),
    Mutant(
        "rows numbered on each shard",
        _random,
        "shard_index",
        lambda right: lambda what, axis_name: 0,
    ),
    Mutant(
        "key left unadvanced",
        sm.RandomState,
        "leave",
        lambda right: lambda self, old, axes: old,
    ),
    Mutant("set without checks", _state, "conform", lambda right: lambda old, new, label: new),
    Mutant(
        "set without metadata",
        sm.State,
        "set",
        lambda right: lambda self, value: type(self)(right(self, value).value),
    ),
    Mutant("the last filter wins", _partition, "first_matches", last_match),
    Mutant("combine keeps one part", sm, "combine", lambda right: lambda *parts: parts[0]),
    Mutant("All is Any", _filters.All, "_joined", lambda right: _filters.Any._joined),
    Mutant(
        "Not is nothing",
        _filters.Not,
        "bind",
        lambda right: lambda self, tree: _filters._bind(self.filters[0], tree),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_engine_is_found_out(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.live(monkeypatch)
    assert any(fails(check) for check in CHECKS.values()), f"not found out: {mutant.name}"


def fails(check: Callable[[], None]) -> bool:
    try:
        check()
    except FAILURES:
        return True
    return False


# Which step of a call a part of the engine belongs to.
STEPS = {
    "partition": ("_partition", "_model._filters", "_model._random", "_arguments"),
    "resolve": ("_resolve", "_call._by_spec", "_call._by_axis"),
    "call": ("_call._pipeline", "_call._pure", "_flow", "_varying", "_base"),
    "leave": ("_leave", "_exit", "_model._state"),
    "write back": ("_write_back",),
}


def step_of(mutant: Mutant) -> str | None:
    owner = mutant.owner if isinstance(mutant.owner, types.ModuleType) else None
    name = owner.__name__ if owner else mutant.owner.__module__
    name = name.removeprefix("statemesh.")
    return next((step for step, parts in STEPS.items() if name.startswith(parts)), None)


def test_every_step_is_broken() -> None:
    steps = [step_of(mutant) for mutant in MUTANTS]
    assert set(STEPS) <= set(steps)
    assert len([step for step in steps if step]) >= 25
