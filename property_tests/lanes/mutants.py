"""Mutants that the checks of programs over lanes must notice."""

import dataclasses
from typing import Any

from ..base.mutants import (
    POLICY_MUTANTS,
    Break,
    Mutant,
    always,
    engine,
    last_match,
    unchanged,
    with_result,
)


def from_the_start(right: Any) -> Any:
    """Negative axes counted from the start."""

    def at(self: Any, name: str, axis: Any, ndim: int) -> Any:
        return right(self, name, -axis - 1 if axis is not None and axis < 0 else axis, ndim)

    return at


def forgetting(what: str) -> Break:
    """One kind of mistakes ignored."""
    return lambda right: (
        lambda self, mistakes: right(self, dataclasses.replace(mistakes, **{what: []}))
    )


def undeclared(what: str) -> Break:
    """`state_in_axes` or `state_out_axes` ignored."""
    return lambda right: (
        lambda pairs, roots, option: right(() if option == what else pairs, roots, option)
    )


def all_batched(flag: bool) -> Break:
    return lambda right: lambda values, name: [flag] * len(values)


def stacked_unasked(right: Any) -> Any:
    return lambda self, *args: right(dataclasses.replace(self, unexpected="ignore"), *args)


def stacked_though_shared(right: Any) -> Any:
    return lambda self, declared, *args: stacked_unasked(right)(
        self, engine("_resolve._specs.UNSAID"), *args
    )


def stacked_last(right: Any) -> Any:
    def axis_of(self: Any, declared: Any, x: Any, path: str) -> Any:
        where = right(self, declared, x, path)
        return where and self.placement(-1, x.ndim + 1)

    return axis_of


def axes_mutant(name: str, attribute: str, broken: Break) -> Mutant:
    """A mutant of the rules by which results leave."""
    return Mutant(name, "statemesh._leave._axis_rules.LeaveByAxis", attribute, broken)


ENTERING, LEAVING = "statemesh._call._axis_rules", "statemesh._leave._axis_rules"
MUTANTS = [
    *POLICY_MUTANTS,
    Mutant(
        "lanes broadcast instead of mapped",
        f"{ENTERING}.AxisContext",
        "_axes",
        with_result(lambda found: (dict.fromkeys(found[0]), found[1])),
    ),
    axes_mutant(
        "output axis ignored",
        "entries",
        with_result(lambda axes: [axis and 0 for axis in axes]),
    ),
    Mutant(
        "vmap2 counts negative axes from the start",
        "statemesh._call._over_lanes.Lanes",
        "placement",
        from_the_start,
    ),
    Mutant(
        "pmap2 counts negative axes from the start",
        "statemesh._call._on_devices.Devices",
        "placement",
        from_the_start,
    ),
    axes_mutant("arrays of Modules follow out_axes always", "stays", always(False)),
    Mutant(
        "what is written in Modules is taken for what came in",
        "statemesh._axes._dataflow._Forwarded",
        "equation",
        lambda right: lambda self, eqn, given: ([0] * len(eqn.outvars), []),
    ),
    Mutant("one key for what all lanes make", "statemesh.RandomState", "_made", unchanged),
    Mutant(
        "order of devices ignored",
        "statemesh._call._on_devices.Devices",
        "bind",
        lambda right: lambda self, *args: right(dataclasses.replace(self, devices=None), *args),
    ),
    Mutant(
        "functions as policies dropped",
        "statemesh._model._state",
        "call_policy",
        lambda right: lambda *args: args[2],
    ),
    Mutant(
        "nothing differs between lanes",
        "statemesh._axes._mesh_and_lanes",
        "_batched",
        all_batched(False),
    ),
    Mutant(
        "everything differs between lanes",
        "statemesh._axes._mesh_and_lanes",
        "_batched",
        all_batched(True),
    ),
    axes_mutant("out_axes=None unchecked", "refuse", forgetting("varying")),
    axes_mutant("state axes in conflict", "refuse", forgetting("conflicts")),
    axes_mutant("diverged states unchecked", "refuse", forgetting("diverged")),
    Mutant("state_in_axes ignored", ENTERING, "choose_axes", undeclared("state_in_axes")),
    Mutant("state_out_axes ignored", LEAVING, "choose_axes", undeclared("state_out_axes")),
    Mutant("state axes exchanged", ENTERING, "choose_axes", with_result(lambda axes: axes[::-1])),
    Mutant("the last filter wins", "statemesh._resolve._lanes", "first_matches", last_match),
    axes_mutant("unexpected writes stacked unasked", "fallback", stacked_unasked),
    axes_mutant("what is declared shared is stacked", "fallback", stacked_though_shared),
    axes_mutant("stacked on the last axis", "fallback", stacked_last),
    Mutant("auto feeds nothing", f"{ENTERING}.AxisContext", "after", always(None)),
    Mutant(
        "auto feeds what is only written",
        "statemesh._base._compat",
        "inputs_read",
        with_result(lambda read: [True] * len(read)),
    ),
    Mutant(
        "a lane's key left",
        "statemesh.RandomState",
        "leave",
        lambda right: lambda self, old, axes: right(self, old, ()),
    ),
]
