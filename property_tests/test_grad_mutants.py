"""The checks of gradients fail on an engine that is broken on purpose."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest

from statemesh import _flow, _scope, _trainable
from statemesh._base import _compat, _jaxprs, _reduction
from statemesh._base._types import NO_AXES
from statemesh._call import _pipeline

from . import loss_examples, nested_examples
from .test_mutants import Mutant


pytestmark = pytest.mark.slow

Reduction, Pending, Plan = _reduction.Reduction, _reduction.Pending, _reduction.Plan


def planned(change: Callable[..., dict[str, Any]]) -> Callable[[Any], Any]:
    """A plan for a gradient with other axes, made of the right one and of where things differ."""

    def broken(right: Any) -> Any:
        def plan(self: Any, param: Any, loss: Any, *rest: Any) -> Any:
            found = right(self, param, loss, *rest)
            return dataclasses.replace(found, **change(found, param, loss))

        return plan

    return broken


never_divided = planned(lambda plan, param, loss: {"divide": NO_AXES})
always_divided = planned(lambda plan, param, loss: {"divide": plan.divide | plan.sum})
split_not_divided = planned(lambda plan, param, loss: {"divide": plan.divide - param})
same_not_divided = planned(lambda plan, param, loss: {"divide": plan.divide & loss})
same_not_summed = planned(lambda plan, param, loss: {"sum": plan.sum & loss})


def taken_for_whole(right: Any) -> Any:
    return lambda self, param, *rest: right(self, NO_AXES, *rest)


def taken_for_split(right: Any) -> Any:
    return lambda self, param, *rest: right(self, self.named & rest[-1], *rest)


def with_operands(change: Callable[[list[Any], list[Any]], list[Any]]) -> Callable[[Any], Any]:
    """What is reduced, decided by other operands: of keys and values each, the loss is the last."""

    def broken(right: Any) -> Any:
        def plans(self: Any, operands: Any) -> Any:
            half = len(operands) // 2
            return right(self, [operands[0], *change(operands[1 : half + 1], operands[half + 1 :])])

        return plans

    return broken


loss_first = with_operands(lambda keys, values: [keys[-1], *keys[:-1], *values])
values_for_keys = with_operands(lambda keys, values: [*values, *values])
keys_backwards = with_operands(lambda keys, values: [*keys[-2::-1], keys[-1], *values])
all_keys_apart = with_operands(
    lambda keys, values: [NO_AXES.union(*keys, *values)] * len(keys) + list(values)
)
no_key_apart = with_operands(lambda keys, values: [NO_AXES] * len(keys) + list(values))


def left_in_scans(right: Any) -> Any:
    def settled(eqn: Any, *rest: Any) -> Any:
        return eqn if eqn.primitive.name == "scan" else right(eqn, *rest)

    return settled


def any_axis(right: Any) -> Any:
    """A rule of lanes that takes every `vmap` for the one that they are."""

    def make(fun: Any) -> Any:
        made = right(fun)
        define = made.def_vmap

        def def_vmap(rule: Any) -> Any:
            def wrong(count: int, batched: Any, *operands: Any) -> Any:
                return rule(count, [True, *batched[1:]], *operands)

            wrong.pending = rule.pending  # type: ignore[attr-defined]
            return define(wrong)

        made.def_vmap = def_vmap
        return made

    return make


def copies_for_parameters(right: Any) -> Any:
    def init(self: Any, *args: Any) -> None:
        right(self, *args)
        self.params = [x + 0 for x in self.params]

    return init


def conjugated(right: Any) -> Any:
    def reduced(self: Any, *args: Any) -> Any:
        loss, grads = right(self, *args)
        return loss, list(map(jax.numpy.conj, grads))

    return reduced


def lanes_summed_once(right: Any) -> Any:
    """A sum over lanes of what is the same in all of them."""
    return lambda self, x, count, batched: right(self, x, count if batched else 1, batched)


def with_scope(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """A scope in which something is changed after it was made."""

    def broken(right: Any) -> Any:
        def init(self: Any, *args: Any) -> None:
            right(self, *args)
            change(self)

        return init

    return broken


def nothing_own(scope: Any) -> None:
    scope.own = NO_AXES


def within_every_map(scope: Any) -> None:
    scope.entry = scope.entry[0], frozenset(["x", "y"])


CHECKS = loss_examples.CHECKS | nested_examples.CHECKS

MUTANTS = [
    Mutant("nothing crosses", _scope, "crossed", lambda right: lambda jaxpr: NO_AXES),
    Mutant(
        "all that is followed crosses",
        _scope,
        "crossed",
        lambda right: lambda jaxpr: frozenset(["x", "y"]),
    ),
    Mutant(
        "what is stopped crosses",
        _scope,
        "crossed",
        lambda right: lambda jaxpr: right(jaxpr) | _jaxprs.exchanged_over(jaxpr),
    ),
    Mutant("inside a loss nothing is own", _scope.Scope, "__init__", with_scope(nothing_own)),
    Mutant(
        "derivatives around maps as in them",
        _scope.Scope,
        "__init__",
        with_scope(within_every_map),
    ),
    Mutant(
        "nothing transposed",
        Pending,
        "_derived",
        lambda right: (
            lambda self, *how: (
                (lambda mark, *operands: list(_reduction._halves(operands)[1]))
                if self.backward
                else right(self, *how)
            )
        ),
    ),
    Mutant(
        "no reduction at all",
        _scope.Scope,
        "reduced",
        lambda right: lambda self, loss, grads, *rest: (loss, list(grads)),
    ),
    Mutant(
        "reduced twice",
        _reduction,
        "reduce_on_mesh",
        lambda right: lambda values, *how: right(right(values, *how), *how),
    ),
    Mutant(
        "reduced twice where types tell",
        _scope,
        "reduce_on_mesh",
        lambda right: lambda values, *how: right(right(values, *how), *how),
    ),
    Mutant("the sum for the mean, checked", Reduction, "typed", never_divided),
    Mutant("the sum for the mean, unchecked", Reduction, "untyped", never_divided),
    Mutant("the mean for the sum, checked", Reduction, "typed", always_divided),
    Mutant("the mean for the sum, unchecked", Reduction, "untyped", always_divided),
    Mutant("not cast to varying", _scope.Scope, "cast", lambda right: lambda self, x: list(x)),
    Mutant("split parameters reduced, checked", Reduction, "typed", taken_for_whole),
    Mutant("split parameters reduced, unchecked", Reduction, "untyped", taken_for_whole),
    Mutant("whole parameters not reduced, checked", Reduction, "typed", taken_for_split),
    Mutant("whole parameters not reduced, unchecked", Reduction, "untyped", taken_for_split),
    Mutant("split parameters not divided, checked", Reduction, "typed", split_not_divided),
    Mutant("split parameters not divided, unchecked", Reduction, "untyped", split_not_divided),
    Mutant(
        "the loss not reduced",
        Reduction,
        "of_loss",
        lambda right: lambda self, loss, axes: Plan(NO_AXES, NO_AXES),
    ),
    Mutant(
        "the loss summed, not averaged",
        Reduction,
        "of_loss",
        lambda right: (
            lambda self, loss, axes: dataclasses.replace(right(self, loss, axes), divide=NO_AXES)
        ),
    ),
    Mutant("one loss counted by every shard", Reduction, "untyped", same_not_divided),
    Mutant("one loss's gradients not summed", Reduction, "untyped", same_not_summed),
    Mutant(
        "reduced over the first axis only",
        _scope,
        "reduce_on_mesh",
        lambda right: lambda values, plans, names: right(values, plans, names[:1]),
    ),
    Mutant(
        "reduced over the first axis only, unchecked",
        _reduction,
        "reduce_on_mesh",
        lambda right: lambda values, plans, names: right(values, plans, names[:1]),
    ),
    Mutant("left pending in scans", _flow, "_settled_equation", left_in_scans),
    Mutant(
        "left pending everywhere",
        _flow,
        "_has_pending",
        lambda right: lambda *args: False,
    ),
    Mutant("parameters and loss exchanged", Pending, "plans", loss_first),
    Mutant("gradients followed, not parameters", Pending, "plans", values_for_keys),
    Mutant("another parameter's axes", Pending, "plans", keys_backwards),
    Mutant("all parameters taken to differ", Pending, "plans", all_keys_apart),
    Mutant("no parameter taken to differ", Pending, "plans", no_key_apart),
    Mutant(
        "results that are the same taken to differ",
        Pending,
        "results_differ",
        lambda right: lambda self, given: [NO_AXES.union(*given)] * (len(given) // 2),
    ),
    Mutant(
        "results that differ taken to be the same",
        Pending,
        "results_differ",
        lambda right: lambda self, given: [NO_AXES] * (len(given) // 2),
    ),
    Mutant("lanes that agree summed once", Plan, "of_lanes", lanes_summed_once),
    Mutant("any vmap taken for the lanes", _reduction, "custom_vmap", any_axis),
    Mutant("parameters copied", _trainable.Parts, "__init__", copies_for_parameters),
    Mutant("types tell nothing", _compat, "varying", lambda right: lambda x: NO_AXES),
    Mutant("losses let differ", Reduction, "check", lambda right: lambda *args: None),
    Mutant(
        "no collective joins",
        _jaxprs,
        "collective",
        lambda right: lambda eqn: (NO_AXES, NO_AXES.union(*right(eqn))),
    ),
    Mutant("gradients conjugated", _scope.Scope, "reduced", conjugated),
    Mutant(
        "wrt passed over",
        _trainable,
        "to_predicate",
        lambda right: lambda *args: _trainable._is_trained,
    ),
    Mutant("summed again unseen", _pipeline, "summed_twice", lambda right: lambda *args: []),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_engine_is_found_out(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.live(monkeypatch)
    assert any(fails(check) for check in CHECKS.values()), f"not found out: {mutant.name}"


def fails(check: Callable[[], None]) -> bool:
    """By what it says; a mutant that cannot run (a `TypeError`) shows nothing."""
    try:
        check()
    except (AssertionError, ValueError, pytest.fail.Exception):
        return True
    return False
