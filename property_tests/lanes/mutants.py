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
        lambda self, name, mistakes: right(self, name, dataclasses.replace(mistakes, **{what: []}))
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
        return where and self.carrier.at(self.axis_name, -1, x.ndim + 1)

    return axis_of


MUTANTS = POLICY_MUTANTS + mutants(
    {
        "_call._by_axis.ByAxis._arriving": {
            "lanes broadcast instead of mapped": with_result(dict.fromkeys),
        },
        "_call._by_axis.ByAxis.entries": {
            "output axis ignored": with_result(lambda axes: [axis and 0 for axis in axes]),
        },
        "_call._by_axis.ByAxis.leaves_as_it_came": {
            "arrays of Modules follow out_axes always": always(False),
        },
        "_call._by_axis.ByAxis.refuse": {
            "out_axes=None unchecked": forgetting("varying"),
            "state axes in conflict": forgetting("conflicts"),
            "diverged states unchecked": forgetting("diverged"),
        },
        "_call._by_axis.ByAxis.otherwise": {
            "unexpected writes stacked unasked": stacked_unasked,
            "what is declared shared is stacked": stacked_though_shared,
            "stacked on the last axis": stacked_last,
        },
        "_call._by_axis.ByAxis.reconsidered": {"auto feeds nothing": unchanged},
        "_call._by_axis.choose_axes": {
            "state_in_axes ignored": undeclared("state_in_axes"),
            "state_out_axes ignored": undeclared("state_out_axes"),
            "state axes exchanged": with_result(lambda axes: axes[::-1]),
        },
        "_call._carriers.Lanes.at": {"vmap2 counts negative axes from the start": from_the_start},
        "_call._carriers.Devices.at": {"pmap2 counts negative axes from the start": from_the_start},
        "_call._carriers.Devices.bind": {
            "order of devices ignored": lambda right: (
                lambda self, *args: right(dataclasses.replace(self, devices=None), *args)
            ),
        },
        "_flow._forwarding": {
            "what is written in Modules is taken for what came in": lambda right: (
                lambda eqn, *_, **__: [0] * len(eqn.outvars)
            ),
        },
        "_base._axes._batched": {
            "nothing differs between lanes": all_batched(False),
            "everything differs between lanes": all_batched(True),
        },
        "_base._compat.inputs_read": {
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
