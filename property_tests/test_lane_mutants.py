"""The checks of lanes fail on an engine that is broken on purpose."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import statemesh as sm
from statemesh import _flow
from statemesh._base import _axes, _jaxprs
from statemesh._call import _by_axis, _carriers
from statemesh._model import _state
from statemesh._resolve import _lanes, _specs

from .lane_examples import CHECKS
from .test_mutants import (
    Mutant,
    fails,
    last_match,
    one_shards_value,
    other_policy,
    without_gradient,
)


pytestmark = pytest.mark.slow


def with_axis(change: Callable[[int], int]) -> Callable[[Any], Any]:
    """A carrier that finds the lanes on another axis."""

    def at(right: Any) -> Any:
        return lambda self, name, axis, ndim: right(
            self, name, axis if axis is None else change(axis), ndim
        )

    return at


def forgetting(what: str) -> Callable[[Any], Any]:
    """One kind of mistakes passed over."""

    def refuse(right: Any) -> Any:
        return lambda self, name, wrong: right(self, name, dataclasses.replace(wrong, **{what: []}))

    return refuse


def undeclared(what: str) -> Callable[[Any], Any]:
    """`state_in_axes` or `state_out_axes` passed over."""

    def choose(right: Any) -> Any:
        return lambda pairs, roots, said: right(() if said == what else pairs, roots, said)

    return choose


def stacked_last(right: Any) -> Any:
    def otherwise(self: Any, said: Any, x: Any, path: str) -> Any:
        where = right(self, said, x, path)
        return where and self.carrier.at(self.axis_name, -1, x.ndim + 1)

    return otherwise


from_the_start = with_axis(lambda axis: axis if axis >= 0 else -axis - 1)
MUTANTS = [
    Mutant(
        "lanes broadcast instead of mapped",
        _by_axis.ByAxis,
        "_arriving",
        lambda right: lambda *args: dict.fromkeys(right(*args)),
    ),
    Mutant(
        "output axis ignored",
        _by_axis.ByAxis,
        "entries",
        lambda right: lambda *args: [axis and 0 for axis in right(*args)],
    ),
    Mutant("vmap2 counts negative axes from the start", _carriers.Lanes, "at", from_the_start),
    Mutant("pmap2 counts negative axes from the start", _carriers.Devices, "at", from_the_start),
    Mutant(
        "arrays of Modules follow out_axes always",
        _by_axis.ByAxis,
        "leaves_as_it_came",
        lambda right: lambda self, where: False,
    ),
    Mutant(
        "what is written in Modules is taken for what came in",
        _flow,
        "_forwarding",
        lambda right: lambda eqn, *_, **__: [0] * len(eqn.outvars),
    ),
    Mutant(
        "one key for what all lanes make",
        sm.RandomState,
        "_made",
        lambda right: lambda self, axes: self,
    ),
    Mutant(
        "order of devices ignored",
        _carriers.Devices,
        "bind",
        lambda right: lambda self, *args: right(dataclasses.replace(self, devices=None), *args),
    ),
    Mutant("the first lane's value taken", _state, "reduced", one_shards_value),
    Mutant("sum is the mean over lanes", _state, "reduced", other_policy({"sum": "mean"})),
    Mutant("max is min", _state, "reduced", other_policy({"max": "min"})),
    Mutant("min is max", _state, "reduced", other_policy({"min": "max"})),
    Mutant("policies have no gradient", _state, "reduced", without_gradient),
    Mutant(
        "policy over lanes dropped",
        sm.State,
        "leave",
        lambda right: lambda self, old, axes: self,
    ),
    Mutant(
        "old value forgotten",
        sm.State,
        "leave",
        lambda right: lambda self, old, axes: right(self, self, axes),
    ),
    Mutant("functions as policies dropped", _state, "call_policy", lambda right: lambda *a: a[2]),
    Mutant(
        "nothing differs between lanes",
        _axes,
        "_batched",
        lambda right: lambda values, name: [False] * len(values),
    ),
    Mutant(
        "everything differs between lanes",
        _axes,
        "_batched",
        lambda right: lambda values, name: [True] * len(values),
    ),
    Mutant("out_axes=None unchecked", _by_axis.ByAxis, "refuse", forgetting("varying")),
    Mutant("state axes in conflict", _by_axis.ByAxis, "refuse", forgetting("conflicts")),
    Mutant("diverged states unchecked", _by_axis.ByAxis, "refuse", forgetting("diverged")),
    Mutant("state_in_axes passed over", _by_axis, "choose_axes", undeclared("state_in_axes")),
    Mutant("state_out_axes passed over", _by_axis, "choose_axes", undeclared("state_out_axes")),
    Mutant(
        "state axes exchanged",
        _by_axis,
        "choose_axes",
        lambda right: lambda *args: right(*args)[::-1],
    ),
    Mutant("the last filter wins", _lanes, "first_matches", last_match),
    Mutant(
        "unexpected writes stacked unasked",
        _by_axis.ByAxis,
        "otherwise",
        lambda right: (
            lambda self, said, x, path: right(
                dataclasses.replace(self, unexpected="ignore"), said, x, path
            )
        ),
    ),
    Mutant(
        "what is declared shared is stacked",
        _by_axis.ByAxis,
        "otherwise",
        lambda right: (
            lambda self, said, x, path: right(
                dataclasses.replace(self, unexpected="ignore"), _specs.UNSAID, x, path
            )
        ),
    ),
    Mutant("stacked on the last axis", _by_axis.ByAxis, "otherwise", stacked_last),
    Mutant(
        "auto feeds nothing",
        _by_axis.ByAxis,
        "reconsidered",
        lambda right: lambda self, program, arrays: self,
    ),
    Mutant(
        "auto feeds what is only written",
        _jaxprs,
        "inputs_read",
        lambda right: lambda jaxpr: [True] * len(right(jaxpr)),
    ),
    Mutant(
        "one key for all lanes",
        sm.RandomState,
        "enter",
        lambda right: lambda self, axes: self,
    ),
    Mutant(
        "a lane's key left",
        sm.RandomState,
        "leave",
        lambda right: lambda self, old, axes: right(self, old, ()),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_engine_is_found_out(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.live(monkeypatch)
    assert any(fails(check) for check in CHECKS.values()), f"not found out: {mutant.name}"
