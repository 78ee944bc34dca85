"""Runs a program without what is written twice in it, and without what nobody needs.

XLA does the same before all else, but only for several devices: so ends its pass that splits a program over
them. The passes that follow look at how often a value is used. They divide by it or multiply by its
reciprocal, and take `rsqrt(x)` for `1 / sqrt(x)` only where the root has no other use. So one device would
round otherwise.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._base._types import Array, ArrayLike
from . import _compat as compat
from ._compat import ClosedJaxpr, Equation, Jaxpr, Operand
from ._jaxprs import (
    AnyJaxpr,
    consts_of,
    is_literal,
    jaxprs_of,
    needed,
    open_jaxpr,
    run_anew,
    run_by,
)


# What was made, by what was done to which values. Both are kept, so that no other value gets an id of theirs.
_Made: TypeAlias = dict[Hashable, tuple[list[Any], list[Any]]]

# JAX lowers smaller operands of these by broadcasting them for each operation anew.
_ELEMENTWISE = ("add", "sub", "mul", "div", "pow", "max", "min", "rem", "atan2")
# These keep values apart, or are random.
_NEVER_MERGED = ("optimization_barrier", "rng_uniform")


def run_merged(closed: ClosedJaxpr, arrays: Sequence[ArrayLike]) -> list[Array]:
    """The results of a program. Each operation runs once for the same operands, and only if it is needed."""
    outputs = _run(open_jaxpr(closed), closed.consts, arrays, {})
    pairs = zip(outputs, closed.out_avals, strict=True)
    return [x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype) for x, aval in pairs]


def _run(
    jaxpr: Jaxpr, consts: Sequence[ArrayLike], arguments: Sequence[ArrayLike], made: _Made
) -> list[Any]:
    known: dict[Operand, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True)
    )

    def value(atom: Operand) -> Any:
        return getattr(atom, "val", None) if is_literal(atom) else known[atom]

    def once(done: Hashable, operands: Sequence[Any], make: Callable[[], list[Any]]) -> list[Any]:
        if done not in made:
            made[done] = make(), list(operands)
        return made[done][0]

    def spread(x: Any, shape: tuple[int, ...]) -> Any:
        if np.shape(x) == shape:
            return x
        return once(("broadcast", id(x), shape), [x], lambda: [jnp.broadcast_to(x, shape)])[0]

    def outputs_of(eqn: Equation, operands: list[Any]) -> list[Any]:
        name, params, primitive = eqn.primitive.name, eqn.params, eqn.primitive
        is_recomputed = params.get("differentiated", False)
        if name in ("jit", "pjit") or is_recomputed:
            if is_recomputed and params["prevent_cse"]:
                # JAX lowers it so too. What runs again for a derivative is not merged with the first time.
                operands = compat.optimization_barrier(operands)
            (inner,) = jaxprs_of(eqn)
            return _run(inner, consts_of(eqn), operands, made)
        if run_by(name, operands, params):
            return run_anew(name, operands, params, _in_a_program_of_its_own)
        if name == "integer_pow" and params["y"] < 0:
            # JAX lowers it as the reciprocal of a power that others may have computed too.
            (x,), power = operands, -params["y"]
            return [1 / once(("power", id(x), power), operands, lambda: [x**power])[0]]
        if name in _ELEMENTWISE:
            shape = getattr(eqn.outvars[0].aval, "shape", ())
            operands = [
                x if is_literal(atom) else spread(x, shape)
                for atom, x in zip(eqn.invars, operands, strict=True)
            ]
        result = primitive.bind(*operands, **primitive.get_bind_params(params))
        return list(result) if primitive.multiple_results else [result]

    for eqn in needed(jaxpr, jaxpr.outvars, with_effects=True):
        operands = list(map(value, eqn.invars))
        make, done = partial(outputs_of, eqn, operands), _done(eqn, operands)
        # Each equation keeps the line of the user's that it has come from.
        with compat.in_place_of(eqn):
            outputs = make() if done is None else once(done, operands, make)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return list(map(value, jaxpr.outvars))


def _in_a_program_of_its_own(jaxpr: AnyJaxpr) -> Callable[..., list[Any]]:
    """A loop's or a branch's jaxpr as a function."""
    return lambda *operands: _run(open_jaxpr(jaxpr), getattr(jaxpr, "consts", ()), operands, {})


def _done(eqn: Equation, operands: Sequence[Any]) -> Hashable | None:
    """What an equation does to which values: equal for two that give the same. `None` if we cannot tell."""
    if eqn.effects or eqn.primitive.name in _NEVER_MERGED:
        return None
    which = [
        (str(atom.aval), np.asarray(x).tobytes()) if is_literal(atom) else id(x)
        for atom, x in zip(eqn.invars, operands, strict=True)
    ]
    done = eqn.primitive, *which, *sorted(eqn.params.items(), key=lambda item: item[0])
    try:
        hash(done)
    except TypeError:
        return None
    return done
