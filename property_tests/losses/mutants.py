"""Mutants that the checks of gradients must notice."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ..base.mutants import Break, Mutant, always, engine, with_result


NO_AXES: frozenset[str] = frozenset()


def planned(change: Callable[..., dict[str, Any]]) -> Break:
    """A plan for a gradient with other axes, made of the right one and of where things differ."""

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
    """A reduction decided by other operands. Of the keys and the values, each time the last is the loss."""

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
    """A rule of lanes that takes every `vmap` for the one that they are."""

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
    """A sum over lanes of what is the same in all of them."""
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
    """An object in which something is changed after it was made."""

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


SCOPE_MODULE, REDUCTIONS = "statemesh._scope", "statemesh._axes._reduction"
SCOPE, PENDING = f"{SCOPE_MODULE}.Scope", f"{REDUCTIONS}.Pending"
TRAINABLE, FLOW = "statemesh._trainable", "statemesh._axes._differing"
COMPAT = "statemesh._base._compat"


def both_ways(name: str, broken: Break) -> list[Mutant]:
    """A mutant of the plan that types give, and of the one that is made without them."""
    owner = f"{REDUCTIONS}.Reduction"
    return [
        Mutant(f"{name}, checked", owner, "typed", broken),
        Mutant(f"{name}, unchecked", owner, "untyped", broken),
    ]


MUTANTS = [
    Mutant("nothing crosses", SCOPE_MODULE, "crossed", always(NO_AXES)),
    Mutant("everything crosses", SCOPE_MODULE, "crossed", always(frozenset(["x", "y"]))),
    Mutant(
        "what is stopped crosses",
        SCOPE_MODULE,
        "crossed",
        lambda right: lambda jaxpr: right(jaxpr) | engine("_base._compat.exchanged_over")(jaxpr),
    ),
    Mutant("inside a loss nothing is own", SCOPE, "__init__", after_init(nothing_own)),
    Mutant("derivatives around maps as in them", SCOPE, "__init__", after_init(within_every_map)),
    Mutant("nothing transposed", PENDING, "_derived", not_transposed),
    Mutant(
        "no reduction at all",
        SCOPE,
        "reduced",
        lambda right: lambda self, loss, grads, *rest: (loss, list(grads)),
    ),
    Mutant(
        "gradients conjugated",
        SCOPE,
        "reduced",
        with_result(lambda found: (found[0], list(map(jax.numpy.conj, found[1])))),
    ),
    Mutant("not cast to varying", SCOPE, "cast", lambda right: lambda self, x: list(x)),
    Mutant("reduced twice", REDUCTIONS, "reduce_on_mesh", reduced_twice),
    Mutant("reduced twice where types tell", SCOPE_MODULE, "reduce_on_mesh", reduced_twice),
    Mutant("reduced over the first axis only", SCOPE_MODULE, "reduce_on_mesh", first_axis_only),
    Mutant(
        "reduced over the first axis only, unchecked",
        REDUCTIONS,
        "reduce_on_mesh",
        first_axis_only,
    ),
    *both_ways(
        "the sum for the mean",
        planned(lambda plan, param, loss: {"divide": NO_AXES}),
    ),
    *both_ways(
        "the mean for the sum",
        planned(lambda plan, param, loss: {"divide": plan.divide | plan.sum}),
    ),
    *both_ways("split parameters reduced", taken_for_whole),
    *both_ways("whole parameters not reduced", taken_for_split),
    *both_ways(
        "split parameters not divided",
        planned(lambda plan, param, loss: {"divide": plan.divide - param}),
    ),
    Mutant(
        "one loss counted by every shard",
        f"{REDUCTIONS}.Reduction",
        "untyped",
        planned(lambda plan, param, loss: {"divide": plan.divide & loss}),
    ),
    Mutant(
        "one loss's gradients not summed",
        f"{REDUCTIONS}.Reduction",
        "untyped",
        planned(lambda plan, param, loss: {"sum": plan.sum & loss}),
    ),
    Mutant(
        "the loss not reduced",
        f"{REDUCTIONS}.Reduction",
        "of_loss",
        with_result(lambda plan: type(plan)(NO_AXES, NO_AXES)),
    ),
    Mutant(
        "the loss summed, not averaged",
        f"{REDUCTIONS}.Reduction",
        "of_loss",
        with_result(loss_summed),
    ),
    Mutant("losses let differ", f"{REDUCTIONS}.Reduction", "check", always(None)),
    Mutant("left pending in scans", FLOW, "_settled_equation", left_in_scans),
    Mutant("left pending everywhere", FLOW, "_has_pending", always(False)),
    Mutant(
        "parameters and loss exchanged",
        PENDING,
        "plans",
        with_operands(lambda keys, values: [keys[-1], *keys[:-1], *values]),
    ),
    Mutant(
        "gradients followed, not parameters",
        PENDING,
        "plans",
        with_operands(lambda keys, values: [*values, *values]),
    ),
    Mutant(
        "another parameter's axes",
        PENDING,
        "plans",
        with_operands(lambda keys, values: [*keys[-2::-1], keys[-1], *values]),
    ),
    Mutant(
        "all parameters taken to differ",
        PENDING,
        "plans",
        with_operands(
            lambda keys, values: [NO_AXES.union(*keys, *values)] * len(keys) + list(values)
        ),
    ),
    Mutant(
        "no parameter taken to differ",
        PENDING,
        "plans",
        with_operands(lambda keys, values: [NO_AXES] * len(keys) + list(values)),
    ),
    Mutant(
        "results that are the same taken to differ",
        PENDING,
        "results_differ",
        lambda right: lambda self, given: [NO_AXES.union(*given)] * (len(given) // 2),
    ),
    Mutant(
        "results that differ taken to be the same",
        PENDING,
        "results_differ",
        lambda right: lambda self, given: [NO_AXES] * (len(given) // 2),
    ),
    Mutant("lanes that agree summed once", f"{REDUCTIONS}.Plan", "of_lanes", lanes_summed_once),
    Mutant("any vmap taken for the lanes", REDUCTIONS, "custom_vmap", any_axis),
    Mutant(
        "parameters copied", f"{TRAINABLE}.Parts", "__init__", after_init(copies_for_parameters)
    ),
    Mutant("types tell nothing", COMPAT, "varying", always(NO_AXES)),
    Mutant(
        "no collective joins",
        COMPAT,
        "collective",
        with_result(lambda found: (NO_AXES, NO_AXES.union(*found))),
    ),
    Mutant(
        "wrt ignored",
        TRAINABLE,
        "to_predicate",
        lambda right: lambda *args: engine("_trainable._is_trained"),
    ),
    Mutant("summed again unseen", "statemesh._call._cache", "check_sums", always(None)),
]
