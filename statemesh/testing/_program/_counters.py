"""Which integers of the arguments count, so that other values suit the program as well; and up to what."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp

from ._jaxprs import (
    CALLS,
    NONE,
    Equation,
    Jaxpr,
    Sources,
    called,
    inner_jaxprs,
    interpreted,
    opened,
    operands_of_call,
)


# Of an integer or a boolean the arguments that it is computed from, with nothing but literals. `None` for
# what is computed from anything else, and for what is neither.
Image: TypeAlias = Sources | None

# What is known of a value: the number that it is, that it is computed from counts and numbers, or nothing.
Known: TypeAlias = float | str | None
_COUNT = "count"
# Larger numbers are no counts: they are seeds, or infinity.
_MOST = 10**7

_INDEXED = ("gather", "scatter", "dynamic_slice", "dynamic_update_slice")
# Whole numbers that are made of whole numbers show a mistake for any of them, unless they are rounded.
_ROUNDING = ("div", "rem")


def counters(jaxpr: Jaxpr) -> Sources:
    """The numbers of the single integers in the arguments on which results depend as on a count of calls.

    They are compared with numbers of the program, or become floats. An integer that meets others (positions,
    indices of shards, data), is an index or enters a loop has to fit what it meets, and is none of them.
    """
    fitting: set[int] = set()
    used: set[int] = set()

    def flow(jaxpr: Jaxpr, inputs: Sequence[Image]) -> list[Image]:
        return interpreted(
            jaxpr, [*[None] * len(jaxpr.constvars), *inputs], lambda _: NONE, through
        )

    def through(eqn: Equation, images: list[Image]) -> Sequence[Image]:
        name, count, inner = eqn.primitive.name, len(eqn.outvars), inner_jaxprs(eqn)
        if name in CALLS or name == "shard_map":
            return flow(opened(called(eqn)), operands_of_call(eqn, images))
        if name == "cond":
            used.update(images[0] or NONE)
            each = zip(*(flow(jaxpr, images[1:]) for jaxpr in inner), strict=True)
            return [None if None in some else NONE.union(*some) for some in each]
        if not images or (inner and not any(images)):
            # The index of a shard and a range of positions have no operands.
            return [None] * count
        integers = [
            image for atom, image in zip(eqn.invars, images, strict=True) if _is_integer(atom.aval)
        ]
        met = NONE.union(*(image for image in integers if image))
        if met and (None in integers or inner or name.startswith(_INDEXED)):
            fitting.update(met)
            return [None] * count
        whole = [_is_integer(atom.aval) for atom in eqn.outvars]
        used.update(met if name in _ROUNDING or not all(whole) else NONE)
        # What data choose among images of counters is one of these.
        is_choice = name == "select_n" and bool(met)
        if None in integers or (None in images and not is_choice):
            return [None] * count
        from_these = NONE.union(*(image for image in images if image))
        return [from_these if _is_whole(atom.aval) else None for atom in eqn.outvars]

    jaxpr = opened(jaxpr)
    single = [not x.aval.shape and _is_integer(x.aval) for x in jaxpr.invars]
    flow(jaxpr, [frozenset([k]) if is_one else None for k, is_one in enumerate(single)])
    return frozenset(used - fitting)


def limits_of(jaxpr: Jaxpr, counting: Sources) -> list[int]:
    """The whole numbers of the program that a count meets: the end of a warmup, an interval, a boundary.

    **Arguments:**

    - `counting`: the numbers of the arguments that count.
    """
    found: set[float] = set()

    def flow(jaxpr: Jaxpr, inputs: Sequence[Known]) -> list[Known]:
        constants: list[Known] = [None] * len(jaxpr.constvars)
        return interpreted(jaxpr, [*constants, *inputs], value, through)

    def value(literal: Any) -> Known:
        return float(literal.val) if _is_real(literal.aval) else None

    def through(eqn: Equation, operands: list[Known]) -> Sequence[Known]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if _COUNT in operands:
            # Those that a call gets too: inside, `%` looks first whether it divides by zero.
            found.update(x for x in operands if isinstance(x, float) and x.is_integer())
        if name in CALLS or name == "shard_map":
            return flow(opened(called(eqn)), operands_of_call(eqn, operands))
        if name == "cond":
            inner = inner_jaxprs(eqn)
            found.update(range(len(inner)) if operands[0] == _COUNT else ())
            for jaxpr in inner:
                flow(jaxpr, operands[1:])
            return [None] * count
        if not operands or None in operands or inner_jaxprs(eqn):
            return [None] * count
        if _COUNT not in operands:
            return operands if name == "convert_element_type" else [None] * count
        return [_COUNT] * count

    jaxpr = opened(jaxpr)
    flow(jaxpr, [_COUNT if k in counting else None for k in range(len(jaxpr.invars))])
    return sorted(int(x) for x in found if 0 <= x <= _MOST)


def _is_real(aval: Any) -> bool:
    return not aval.shape and (_is_integer(aval) or bool(jnp.issubdtype(aval.dtype, jnp.floating)))


def _is_whole(aval: Any) -> bool:
    return aval.dtype == bool or _is_integer(aval)


def _is_integer(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.integer))
