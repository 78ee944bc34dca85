"""Mutants that the checks of gradients must notice."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ..base.mutants import Break, always, engine, mutants, with_result


NO_AXES: frozenset[str] = frozenset()


def planned(change: Callable[..., dict[str, Any]]) -> Break:
    """A reduction's plan with other axes. `change` gets the right plan and what differs over which axes."""

    def broken(right: Any) -> Any:
        def plan(self: Any, param: Any, loss: Any, *rest: Any) -> Any:
            found = right(self, param, loss, *rest)
            return dataclasses.replace(found, **change(found, param, loss))

        return plan

    return broken


def taken_for_whole(right: Any) -> Any:
    return lambda self, param, *rest: right(self, NO_AXES, *rest)


def taken_for_split(right: Any) -> Any:
    return lambda self, param, *rest: right(self, self.named & rest[-1], *rest)


def with_operands(change: Callable[[list[Any], list[Any]], list[Any]]) -> Break:
    """A reduction decided by other operands. The last key and the last value are those of the loss."""

    def broken(right: Any) -> Any:
        def plans(self: Any, operands: Any) -> Any:
            half = len(operands) // 2
            return right(self, [operands[0], *change(operands[1 : half + 1], operands[half + 1 :])])

        return plans

    return broken


def left_in_scans(right: Any) -> Any:
    def settled(eqn: Any, *rest: Any) -> Any:
        return eqn if eqn.primitive.name == "scan" else right(eqn, *rest)

    return settled


def any_axis(right: Any) -> Any:
    """A batching rule that takes every `vmap` for the one of the lanes."""

    def make(fun: Any) -> Any:
        made = right(fun)
        define = made.def_vmap

        def def_vmap(rule: Any) -> Any:
            def broken(count: int, batched: Any, *operands: Any) -> Any:
                return rule(count, [True, *batched[1:]], *operands)

            broken.pending = rule.pending  # type: ignore[attr-defined]
            return define(broken)

        made.def_vmap = def_vmap
        return made

    return make


def lanes_summed_once(right: Any) -> Any:
    """Values that all lanes share are counted once in a sum over lanes."""
    return lambda self, x, count, batched: right(self, x, count if batched else 1, batched)


def not_transposed(right: Any) -> Any:
    def values(mark: Any, *operands: Any) -> list[Any]:
        return list(engine("_axes._reduction._halves")(operands)[1])

    return lambda self, *how: values if self.backward else right(self, *how)


def reduced_twice(right: Any) -> Any:
    return lambda values, *how: right(right(values, *how), *how)


def first_axis_only(right: Any) -> Any:
    return lambda values, plans, names: right(values, plans, names[:1])


def loss_summed(plan: Any) -> Any:
    return dataclasses.replace(plan, divide=NO_AXES)


def after_init(change: Callable[[Any], None]) -> Break:
    """Changes an object right after it was made."""

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


def copies_for_parameters(parts: Any) -> None:
    parts.params = [x + 0 for x in parts.params]


def both_ways(broken: dict[str, Break]) -> dict[str, dict[str, Break]]:
    """Mutants of the plan made from JAX's types, and of the plan made without types."""
    return {
        f"_axes._reduction.Reduction.{attribute}": {
            f"{name}, {how}": change for name, change in broken.items()
        }
        for attribute, how in (("typed", "checked"), ("untyped", "unchecked"))
    }


PLANS = both_ways(
    {
        "the sum for the mean": planned(lambda plan, param, loss: {"divide": NO_AXES}),
        "the mean for the sum": planned(
            lambda plan, param, loss: {"divide": plan.divide | plan.sum}
        ),
        "split parameters reduced": taken_for_whole,
        "whole parameters not reduced": taken_for_split,
        "split parameters not divided": planned(
            lambda plan, param, loss: {"divide": plan.divide - param}
        ),
    }
)
PLANS["_axes._reduction.Reduction.untyped"] |= {
    "one loss counted by every shard": planned(
        lambda plan, param, loss: {"divide": plan.divide & loss}
    ),
    "one loss's gradients not summed": planned(lambda plan, param, loss: {"sum": plan.sum & loss}),
}
MUTANTS = mutants(
    {
        "_grad._scope.crossed": {
            "nothing crosses": always(NO_AXES),
            "everything crosses": always(frozenset(["x", "y"])),
            "what is stopped crosses": lambda right: (
                lambda jaxpr: right(jaxpr) | engine("_base._jaxprs.exchanged_over")(jaxpr)
            ),
        },
        "_grad._scope.Scope.__init__": {
            "inside a loss nothing is own": after_init(nothing_own),
            "derivatives around maps as in them": after_init(within_every_map),
        },
        "_axes._reduction.Pending._derived": {"nothing transposed": not_transposed},
        "_grad._scope.Scope.reduced": {
            "no reduction at all": lambda right: (
                lambda self, loss, grads, *rest: (loss, list(grads))
            ),
            "gradients conjugated": with_result(
                lambda found: (found[0], list(map(jax.numpy.conj, found[1])))
            ),
        },
        "_axes._reduction.reduce_on_mesh": {
            "reduced twice": reduced_twice,
            "reduced over the first axis only, unchecked": first_axis_only,
        },
        "_grad._scope.reduce_on_mesh": {
            "reduced twice where types tell": reduced_twice,
            "reduced over the first axis only": first_axis_only,
        },
        **PLANS,
        "_grad._scope.Scope.cast": {
            "not cast to varying": lambda right: lambda self, x: list(x),
        },
        "_axes._reduction.Reduction.of_loss": {
            "the loss not reduced": with_result(lambda plan: type(plan)(NO_AXES, NO_AXES)),
            "the loss summed, not averaged": with_result(loss_summed),
        },
        "_axes._reduction.Reduction.check": {"losses let differ": always(None)},
        "_axes._differing._settled_equation": {"left pending in scans": left_in_scans},
        "_axes._differing._has_pending": {"left pending everywhere": always(False)},
        "_axes._reduction.Pending.plans": {
            "parameters and loss exchanged": with_operands(
                lambda keys, values: [keys[-1], *keys[:-1], *values]
            ),
            "gradients followed, not parameters": with_operands(
                lambda keys, values: [*values, *values]
            ),
            "another parameter's axes": with_operands(
                lambda keys, values: [*keys[-2::-1], keys[-1], *values]
            ),
            "all parameters taken to differ": with_operands(
                lambda keys, values: [NO_AXES.union(*keys, *values)] * len(keys) + list(values)
            ),
            "no parameter taken to differ": with_operands(
                lambda keys, values: [NO_AXES] * len(keys) + list(values)
            ),
        },
        "_axes._reduction.Pending.results_differ": {
            "results that are the same taken to differ": lambda right: (
                lambda self, given: [NO_AXES.union(*given)] * (len(given) // 2)
            ),
            "results that differ taken to be the same": lambda right: (
                lambda self, given: [NO_AXES] * (len(given) // 2)
            ),
        },
        "_axes._reduction.Plan.of_lanes": {"lanes that agree summed once": lanes_summed_once},
        "_axes._reduction.custom_vmap": {"any vmap taken for the lanes": any_axis},
        "_grad._trainable.Parts.__init__": {"parameters copied": after_init(copies_for_parameters)},
        "_grad._trainable.to_predicate": {
            "wrt ignored": with_result(lambda hit: engine("_grad._trainable._is_trained")),
        },
        "_base._compat.varying": {"types tell nothing": always(NO_AXES)},
        "_base._jaxprs.collective": {
            "no collective joins": with_result(lambda found: (NO_AXES, NO_AXES.union(*found))),
        },
        "_call._cache.check_sums": {"summed again unseen": always(None)},
    }
)
