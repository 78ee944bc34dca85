"""Which integers of the arguments count, so that any other value suits the program as well."""

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


def _is_whole(aval: Any) -> bool:
    return aval.dtype == bool or _is_integer(aval)


def _is_integer(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.integer))
