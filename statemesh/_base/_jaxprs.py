"""Traced programs: what their equations do, and how to change and run them.

JAX documents neither the names of its primitives nor their parameters. This file holds all that we know of
them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ._compat import ClosedJaxpr, Equation, Jaxpr, Operand, core
from ._types import NO_AXES, Array, ArrayLike, Axes, flat_names


AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr

_SUMS = ("psum", "psum2", "psum_invariant", "unreduced_psum")
_GATHERS = ("all_gather", "all_gather_invariant", "all_gather_reduced")
_JOINING = (*_SUMS, *_GATHERS, "pmax", "pmin", "unreduced_pmax", "unreduced_pmin")
# By this attribute of its rule a call is found that reduces many arrays by few collectives.
JOINS = "joins"
# They change only the type: over which axes a value may differ.
_VARYING = ("pvary", "pcast")


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
    """A jaxpr without the constants that it may be closed over."""
    opened: Jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return opened


def is_literal(operand: Operand) -> bool:
    """Whether an operand is a constant written out."""
    return isinstance(operand, core.Literal)


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns")


def jaxprs_of(eqn: Equation) -> list[Jaxpr]:
    """The jaxprs that an equation runs."""
    values = jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
    return [open_jaxpr(value) for value in values if _is_jaxpr(value)]


def equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """All equations of a jaxpr, and of the jaxprs that they run."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_of(eqn):
            yield from equations(inner)


# The result is `Any` in its parts: what they are depends on the first.
def control_flow(eqn: Equation) -> tuple[Any, ...] | None:
    """An equation that runs other jaxprs, as its kind and these jaxprs; `None` for any other.

    `("cond", branches)`, `("while", predicate, body, their numbers of constants)`, `("scan", body, numbers of
    constants and carried values)`, `("call", jaxpr)`.
    """
    params = eqn.params
    match eqn.primitive.name:
        case "cond":
            return "cond", [open_jaxpr(branch) for branch in params["branches"]]
        case "while":
            cond, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
            return "while", cond, body, params["cond_nconsts"], params["body_nconsts"]
        case "scan":
            body = open_jaxpr(params["jaxpr"])
            # Scanned and stacked arrays have one axis more outside than inside.
            carry = _count_alike(eqn.outvars, body.outvars)
            return "scan", body, _count_alike(eqn.invars, body.invars) - carry, carry
        case "reduce" | "reduce_window":
            # Their jaxpr joins two entries, and its results go into it again.
            return None
    if (single := apart(eqn)) is not None:
        return "call", single
    called = [
        open_jaxpr(j) for name in ("jaxpr", "call_jaxpr") if (j := params.get(name)) is not None
    ]
    if len(called) == 1 and len(called[0].invars) == len(eqn.invars):
        return "call", called[0]
    return None


def _shape(operand: Operand) -> tuple[int, ...]:
    shape: tuple[int, ...] = getattr(operand.aval, "shape", ())
    return shape


def _count_alike(outer: Sequence[Operand], inner: Sequence[Operand]) -> int:
    return sum(_shape(a) == _shape(b) for a, b in zip(outer, inner, strict=True))


def collective(eqn: Equation) -> tuple[Axes, Axes]:
    """The axes over which an equation makes its results equal, and those over which it makes them differ.

    A collective of unknown name is taken to make them differ.
    """
    # Our own collectives over lanes are calls whose rule says it.
    by_rule: Axes = getattr(rule_of(eqn), "joined_over", NO_AXES)
    if by_rule:
        return by_rule, NO_AXES
    names = frozenset(
        name
        for key in ("axes", "axis_name")
        for name in flat_names(eqn.params.get(key))
        if not isinstance(name, int | np.integer)
    )
    joins = eqn.primitive.name in _JOINING and eqn.params.get("axis_index_groups") is None
    return (names, NO_AXES) if joins else (NO_AXES, names)


def gathered_by(eqn: Equation) -> Axes:
    """The axes over which an equation gives all instances one value, typed as one that may differ."""
    return collective(eqn)[0] if eqn.primitive.name == "all_gather" else NO_AXES


def permutes_all(eqn: Equation) -> bool:
    """Whether an equation gives every instance the value of another: equal values then stay equal.

    An instance that gets nothing has zeros instead. How many instances there are is known only while the axes
    are bound.
    """
    if eqn.primitive.name != "ppermute":
        return False
    try:
        count = math.prod(map(jax.lax.axis_size, flat_names(eqn.params["axis_name"])))
    except NameError:
        return False
    return len({to for _, to in eqn.params["perm"]}) == count


def is_sum(eqn: Equation) -> bool:
    """Whether an equation sums over mapped axes."""
    return eqn.primitive.name in _SUMS


def name_given(eqn: Equation) -> str | None:
    """The name that `jax.ad_checkpoint.checkpoint_name` gives a value by this equation."""
    name: str | None = eqn.params.get("name") if eqn.primitive.name == "name" else None
    return name


def forwards(eqn: Equation) -> bool:
    """Whether an equation's one result is its one operand, but for its dtype or type."""
    return eqn.primitive.name in ("name", "copy", "copy_p", "convert_element_type", *_VARYING)


# Each result comes of the operand with its number.
_ONE_BY_ONE = (*_JOINING, *_VARYING, "optimization_barrier", "device_put")


def operands_of_results(eqn: Equation) -> list[Iterable[int]]:
    """For each result of an equation that runs no other jaxpr the numbers of the operands it depends on."""
    count, name = len(eqn.invars), eqn.primitive.name
    if name in _ONE_BY_ONE and count == len(eqn.outvars):
        return [(k,) for k in range(count)]
    if name == "sort":
        return [(*range(eqn.params["num_keys"]), k) for k in range(count)]
    return [range(count)] * len(eqn.outvars)


def is_opaque(eqn: Equation) -> bool:
    """Whether an equation runs a user's code that stands in no jaxpr, as that of `jax.lax.custom_root` may.

    Other equations of this primitive, such as that of `jnp.ldexp`, hold no function.
    """
    return eqn.primitive.name == "call_hi_primitive" and any(
        callable(held)
        for param in eqn.params.values()
        for held in getattr(param, "__dict__", {}).values()
    )


def mapped_by_rule(eqn: Equation) -> Jaxpr | None:
    """What a call of a `custom_vmap` function runs where no `vmap` maps it; `None` for other equations.

    `None` also for one that has another form, `apart`, and for one whose rule exchanges values between lanes.
    """
    rule = rule_of(eqn)
    if rule is None or hasattr(rule, JOINS) or hasattr(rule, "exchanged_over"):
        return None
    return open_jaxpr(eqn.params["call"])


def exchanged_over(jaxpr: Jaxpr) -> Axes:
    """The axes over which a program's instances get anything from each other."""
    return NO_AXES.union(*map(exchanged_by, jaxpr.eqns))


def exchanged_by(eqn: Equation) -> Axes:
    """The axes over which the instances get anything from each other by one equation."""
    if eqn.primitive.name in ("axis_index", *_VARYING):
        return NO_AXES
    # Our own functions with a rule for `vmap` say themselves what they exchange: their jaxprs do not show it.
    by_rule: Axes = getattr(rule_of(eqn), "exchanged_over", NO_AXES)
    return by_rule.union(*collective(eqn), *map(exchanged_over, jaxprs_of(eqn)))


def calls_back(eqn: Equation) -> bool:
    """Whether an equation runs Python code of the user's."""
    return "callback" in eqn.primitive.name


def made_varying(eqn: Equation) -> Axes:
    """The axes over which an equation types its operand as varying, leaving its value as it is."""
    return frozenset(eqn.params.get("axes", ())) if eqn.primitive.name in _VARYING else NO_AXES


def rule_of(eqn: Equation) -> Callable[..., Any] | None:
    """The rule of a call of a `custom_vmap` function, `None` for any other equation."""
    return eqn.params["rule"] if eqn.primitive.name == "custom_vmap_call" else None


def apart(eqn: Equation) -> Jaxpr | None:
    """What an equation that reduces many arrays by few collectives does, with one for each array.

    `None` for any other equation.
    """
    if not getattr(rule_of(eqn), JOINS, False):
        return None
    body = open_jaxpr(eqn.params["call"])
    one = next(e for e in body.eqns if e.params.keys() & {"axes", "axis_name"})
    pairs = zip(list[Any](body.invars), list[Any](body.outvars), strict=True)
    return with_equations(body, [one.replace(invars=[x], outvars=[y]) for x, y in pairs])


def with_own_derivative(eqn: Equation) -> bool:
    """Whether an equation runs a jaxpr that has a derivative of its own."""
    return eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")


def inputs_read(jaxpr: AnyJaxpr) -> list[bool]:
    """For each input of a traced program whether its results, or its effects, depend on it.

    A `shard_map` in the program is looked into.
    """
    used = {id(v) for v in open_jaxpr(jaxpr).outvars}
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and not any(id(v) in used for v in eqn.outvars):
            continue
        inner = open_jaxpr(eqn.params["jaxpr"]) if eqn.primitive.name == "shard_map" else None
        read = [True] * len(eqn.invars) if inner is None else inputs_read(inner)
        used |= {id(v) for v, hit in zip(eqn.invars, read, strict=True) if hit}
    return [id(v) in used for v in open_jaxpr(jaxpr).invars]


def with_jaxprs(eqn: Equation, new: Mapping[int, Jaxpr]) -> Equation:
    """An equation that runs other jaxprs, each given under the `id` of the one that it replaces."""

    def one(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(one, value)) if any(map(_is_jaxpr, value)) else value
        if not _is_jaxpr(value):
            return value
        opened = open_jaxpr(value)
        found = new.get(id(opened), opened)
        return found if opened is value else value.replace(jaxpr=found)

    changed: Equation = eqn.replace(params={name: one(value) for name, value in eqn.params.items()})
    return changed


def with_equations(jaxpr: Jaxpr, eqns: Sequence[Equation]) -> Jaxpr:
    """A jaxpr with other equations."""
    effects = set(jaxpr.effects).union(*(eqn.effects for eqn in eqns))
    changed: Jaxpr = jaxpr.replace(eqns=list(eqns), effects=effects)
    return changed


def with_open(closed: AnyJaxpr, jaxpr: Jaxpr) -> AnyJaxpr:
    """A closed jaxpr with another one inside."""
    replace: Callable[..., AnyJaxpr] = closed.replace
    return jaxpr if open_jaxpr(closed) is closed else replace(jaxpr=jaxpr)


def calling(fun: Callable[..., list[Array]], eqn: Equation) -> Equation:
    """An equation that runs `fun` on the operands of `eqn`, in the place of `eqn`."""

    def named(*operands: Array) -> list[Array]:
        # An operand returned as it came in would be no result of the call; a name makes it one.
        return [checkpoint_name(x, "settled") for x in fun(*operands)]

    avals = [jax.ShapeDtypeStruct(_shape(v), getattr(v.aval, "dtype", None)) for v in eqn.invars]
    (call,) = open_jaxpr(jax.make_jaxpr(jax.jit(named))(*avals)).eqns
    changed: Equation = call.replace(invars=list(eqn.invars), outvars=list(eqn.outvars))
    return changed


def runs(jaxpr: Jaxpr) -> Callable[..., list[Array]]:
    """An open jaxpr as a function of arrays."""
    run: Callable[..., list[Array]] = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
    return run


def run_jaxpr(closed: ClosedJaxpr, arrays: Sequence[ArrayLike]) -> list[Array]:
    """The results of a traced program, as arrays even where they are constants of it."""
    made = core.jaxpr_as_fun(closed)(*arrays)
    return [
        x if isinstance(x, jax.Array) else jax.numpy.asarray(x, aval.dtype)
        for x, aval in zip(made, closed.out_avals, strict=True)
    ]
