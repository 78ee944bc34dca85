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


# Of an integer the arguments that it is computed from, with nothing but literals. `None` for what is computed
# from anything else, and for what is no integer.
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
        met = NONE.union(*(image for image in images if image))
        if not met:
            # An index of a shard, or a range of positions, has no operands.
            is_literal = bool(images) and None not in images and not inner
            return [NONE if is_literal else None] * count
        pairs = zip(eqn.invars, images, strict=True)
        others = any(image is None and _is_integer(atom.aval) for atom, image in pairs)
        if others or inner or name.startswith(_INDEXED):
            fitting.update(met)
            return [None] * count
        whole = [_is_integer(atom.aval) for atom in eqn.outvars]
        used.update(met if name in _ROUNDING or not all(whole) else NONE)
        return [met if is_whole else None for is_whole in whole]

    jaxpr = opened(jaxpr)
    single = [not x.aval.shape and _is_integer(x.aval) for x in jaxpr.invars]
    flow(jaxpr, [frozenset([k]) if is_one else None for k, is_one in enumerate(single)])
    return frozenset(used - fitting)


def _is_integer(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.integer))
