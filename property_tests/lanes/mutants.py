"""Mutants that the checks of programs over lanes must notice."""

import dataclasses
from typing import Any

from ..base.mutants import (
    POLICY_MUTANTS,
    Break,
    always,
    argument,
    engine,
    last_match,
    mutants,
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
        self, engine("_resolve._specs.UNDECLARED"), *args
    )


def stacked_last(right: Any) -> Any:
    def axis_of(self: Any, declared: Any, x: Any, path: str) -> Any:
        where = right(self, declared, x, path)
        return where and self.placement(-1, x.ndim + 1)

    return axis_of


MUTANTS = POLICY_MUTANTS + mutants(
    {
        "_call._axis_rules.AxisContext._axes": {
            "lanes broadcast instead of mapped": with_result(
                lambda found: (dict.fromkeys(found[0]), found[1])
            ),
        },
        "_leave._axis_rules.LeaveByAxis.entries": {
            "output axis ignored": with_result(lambda axes: [axis and 0 for axis in axes]),
        },
        "_leave._axis_rules.LeaveByAxis.stays": {
            "arrays of Modules follow out_axes always": always(False),
        },
        "_leave._axis_rules.LeaveByAxis.refuse": {
            "out_axes=None unchecked": forgetting("varying"),
            "state axes in conflict": forgetting("conflicts"),
            "diverged states unchecked": forgetting("diverged"),
        },
        "_leave._axis_rules.LeaveByAxis.fallback": {
            "unexpected writes stacked unasked": stacked_unasked,
            "what is declared shared is stacked": stacked_though_shared,
            "stacked on the last axis": stacked_last,
        },
        "_call._axis_rules.AxisContext.after": {"auto feeds nothing": always(None)},
        "_leave._axis_rules.choose_axes": {
            "state_out_axes ignored": undeclared("state_out_axes"),
        },
        "_call._axis_rules.choose_axes": {
            "state_in_axes ignored": undeclared("state_in_axes"),
            "state axes exchanged": with_result(lambda axes: axes[::-1]),
        },
        "_call._over_lanes.Lanes.placement": {
            "vmap2 counts negative axes from the start": from_the_start
        },
        "_call._on_devices.Devices.placement": {
            "pmap2 counts negative axes from the start": from_the_start
        },
        "_call._on_devices.Devices.bind": {
            "order of devices ignored": lambda right: (
                lambda self, *args: right(dataclasses.replace(self, devices=None), *args)
            ),
        },
        "_axes._dataflow._Forwarded.equation": {
            "what is written in Modules is taken for what came in": lambda right: (
                lambda self, eqn, given: ([0] * len(eqn.outvars), [])
            ),
        },
        "_axes._mesh_and_lanes._batched": {
            "nothing differs between lanes": all_batched(False),
            "everything differs between lanes": all_batched(True),
        },
        "_base._jaxprs.inputs_read": {
            "auto feeds what is only written": with_result(lambda read: [True] * len(read)),
        },
        "_resolve._lanes.first_matches": {"the last filter wins": last_match},
        "_model._state.call_policy": {"functions as policies dropped": argument(2)},
        "RandomState._made": {"one key for what all lanes make": unchanged},
        "RandomState.leave": {
            "a lane's key left": lambda right: lambda self, old, axes: right(self, old, ()),
        },
    }
)
