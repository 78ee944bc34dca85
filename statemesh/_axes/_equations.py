"""Equations of traced programs: that of a `shard_map`, and those that do no more than scale a value."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from .._base import _compat as compat
from .._base import _jaxprs as jaxprs
from .._base._compat import Equation
from .._base._jaxprs import AnyJaxpr
from .._base._specs import written_axes
from .._base._types import Axes, AxisName


def shard_map_equation(jaxpr: AnyJaxpr) -> Equation | None:
    """The equation of the `shard_map` in a program that maps something; `None` if there is none."""
    return next((eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"), None)


def shard_map_recorded(outputs: Iterable[Any]) -> Equation | None:
    """The same of a `shard_map` that has just been recorded into an outer jaxpr, by its outputs."""
    for x in outputs:
        # What transforms the recorded program (`grad`, `vmap`) holds the tracer that records it.
        while compat.is_tracer(x):
            if (made := compat.made_by(x)) is not None:
                return made[0] if made[0].primitive.name == "shard_map" else None
            x = getattr(x, "primal", getattr(x, "val", None))
    return None


def names_inside(eqn: Equation) -> set[str]:
    """The names that the program of a `shard_map` gives to values."""
    body = jaxprs.open_jaxpr(eqn.params["jaxpr"])
    return {name for one in jaxprs.equations(body) if (name := jaxprs.name_given(one))}


def split_over(eqn: Equation) -> list[Axes]:
    """The axes over which each operand of a `shard_map` is split."""
    specs = eqn.params["in_specs"]
    return [frozenset(name for names in written_axes(spec) for name in names) for spec in specs]


def sizes_mapped(eqn: Equation) -> dict[AxisName, int]:
    """The axes over which a `shard_map` maps, with their sizes."""
    return {name: eqn.params["mesh"].shape[name] for name in eqn.params["newly_manual_axes"]}


# Primitives whose one result is their one operand but for its sign, dtype, shape or type.
_UNSCALED = (
    "pvary",
    "pcast",
    "name",
    "copy",
    "neg",
    "convert_element_type",
    "reshape",
    "broadcast_in_dim",
    "squeeze",
)


def divisor(eqn: Equation) -> int | None:
    """The whole number by which an equation divides its one operand, if it only scales that by a constant.

    1 where the constant is another one, or where the equation changes no more than the dtype, shape or type.
    `None` where it does anything else.
    """
    name, literals = (
        eqn.primitive.name,
        [v for v in eqn.invars if isinstance(v, compat.core.Literal)],
    )
    if name in _UNSCALED:
        return 1
    if name not in ("mul", "div") or len(literals) != 1 or np.ndim(literals[0].val) != 0:
        return None
    number = np.asarray(literals[0].val, literals[0].aval.dtype)
    if name == "div" and literals[0] is eqn.invars[0]:
        return None
    factor = abs(complex(number))
    if not factor or not math.isfinite(factor):
        return 1
    whole = round(factor if name == "div" else 1 / factor)
    # Numbers are rounded to the digits of their dtype: so is what they are compared with.
    written = number.dtype.type(whole if name == "div" else 1 / max(whole, 1))
    return whole if whole and written == number else 1
