"""Which results may differ between shards though JAX's types do not say so.

A `cond`, or a loop, whose predicate differs between shards gives results that do. JAX types them by what its
branches return alone. So the traced program is walked once: from each such predicate on, the axes are
followed that a value may differ over beyond those of its type.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ._base import _compat as compat
from ._base._types import AxisName


Axes = frozenset[AxisName]
NONE: Axes = frozenset()


def hidden_axes(jaxpr: Any, given: Sequence[Axes]) -> list[Axes]:
    """For each result of a jaxpr, the axes over which it may differ unseen.

    **Arguments:**

    - `jaxpr`: the program of one shard.
    - `given`: the same of its arguments.
    """
    known: dict[Any, Axes] = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        found = _through(eqn, [_known(known, var) for var in eqn.invars])
        for var, axes in zip(eqn.outvars, found, strict=True):
            known[var] = axes - _typed(var)
    return [_known(known, var) for var in jaxpr.outvars]


def _known(known: Mapping[Any, Axes], atom: Any) -> Axes:
    # A literal cannot be a key.
    return NONE if compat.is_literal(atom) else known.get(atom, NONE)


def _through(eqn: Any, given: list[Axes]) -> Sequence[Axes]:
    match compat.control_flow(eqn):
        case ("cond", branches):
            return _through_cond(branches, given[0] | _typed(eqn.invars[0]), given[1:])
        case ("while", cond, body, cond_consts, body_consts):
            return _through_while(cond, body, cond_consts, body_consts, given)
        case ("scan", body, consts, carry):
            return _through_scan(body, consts, carry, given)
        case ("call", jaxpr):
            return hidden_axes(jaxpr, given)
    seen = NONE.union(*given)
    if seen:
        # What a collective reduces over, its operand was typed to vary over, and its result is not.
        typed = NONE.union(*map(_typed, eqn.invars))
        reduced = typed - NONE.union(*map(_typed, eqn.outvars))
        seen -= reduced
    return [seen] * len(eqn.outvars)


def _through_cond(branches: Sequence[Any], predicate: Axes, given: list[Axes]) -> list[Axes]:
    results = zip(*(hidden_axes(branch, given) for branch in branches), strict=True)
    chosen = [predicate if len(set(sources)) > 1 or None in sources else NONE
              for sources in zip(*map(_sources, branches), strict=True)]  # fmt: skip
    return [NONE.union(axes, *each) for axes, each in zip(chosen, results, strict=True)]


def _through_while(
    cond: Any, body: Any, cond_consts: int, body_consts: int, given: list[Axes]
) -> list[Axes]:
    first = cond_consts + body_consts
    carry = given[first:]
    kept = [source == body_consts + i for i, source in enumerate(_sources(body))]
    while True:
        (stop,) = hidden_axes(cond, [*given[:cond_consts], *carry])
        stop |= _typed(cond.outvars[0])
        after = hidden_axes(body, [*given[cond_consts:first], *carry])
        grown = [
            old if same else old | new | stop
            for old, new, same in zip(carry, after, kept, strict=True)
        ]
        if grown == carry:
            return carry
        carry = grown


def _through_scan(body: Any, consts: int, carries: int, given: list[Axes]) -> list[Axes]:
    carry = given[consts : consts + carries]
    while True:
        after = hidden_axes(body, [*given[:consts], *carry, *given[consts + carries :]])
        grown = [old | new for old, new in zip(carry, after[:carries], strict=True)]
        if grown == carry:
            return [*carry, *after[carries:]]
        carry = grown


def _sources(jaxpr: Any) -> list[int | None]:
    """For each result the argument that it is, if it is one as it came in."""
    numbers = {var: i for i, var in enumerate(jaxpr.invars)}
    return [None if compat.is_literal(v) else numbers.get(v) for v in jaxpr.outvars]


def _typed(var: Any) -> Axes:
    return compat.varying_type(var.aval)
