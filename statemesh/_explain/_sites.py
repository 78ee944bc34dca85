"""Where mapped calls stand in a traced program, and which arrays each gets there.

JAX traces a function once and runs its program wherever it is called, and it traces the body of a loop
several times. So calls are not counted while they are traced: each leaves a mark in the program, and these
are counted.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from .._base import _jaxprs as jaxprs
from .._base._compat import ClosedJaxpr, Equation, Jaxpr, Operand
from .._base._types import Array, Leaf


# The number of a call, and what tells each of its inputs from other arrays.
Site: TypeAlias = tuple[int, tuple[Hashable, ...]]

_MARK = "statemesh_mapped_call_"


def marked(number: int, outputs: Sequence[Array], inputs: Sequence[Leaf]) -> list[Array]:
    """The outputs of a call, with an equation in the program that tells its number and its inputs."""

    mark: Callable[[Any, Any], Any] = lambda outputs, inputs: outputs
    mark.__name__ = f"{_MARK}{number}"
    # It has a derivative of its own, so that no transformation drops the inputs, which it does not use.
    marking = jax.custom_jvp(mark)

    @marking.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return marking(*primals), tangents[0]

    made: list[Array] = marking(list(outputs), list(inputs))
    return made


def sites_of(closed: ClosedJaxpr) -> list[Site]:
    """Every place of a program where a marked call stands."""
    return list(_sites(jaxprs.open_jaxpr(closed), {}, ()))


def _sites(
    jaxpr: Jaxpr, known: Mapping[int, Hashable], around: tuple[Hashable, ...]
) -> Iterator[Site]:
    """Those of a jaxpr and of those that it runs.

    **Arguments:**

    - `known`: what tells an array of this jaxpr from others, where it is one of the jaxpr around it.
    - `around`: the numbers of the equations around it.
    """

    def identity(value: Operand) -> Hashable:
        return known.get(id(value), (around, id(value)))

    for k, eqn in enumerate(jaxpr.eqns):
        # What is computed again for a gradient is the same call.
        if eqn.params.get("differentiated"):
            continue
        inner = jaxprs.jaxprs_of(eqn)
        if (number := _number(eqn, inner)) is not None:
            yield number, tuple(map(identity, eqn.invars[len(eqn.outvars) :]))
            continue
        for body, operands in zip(inner, _entering(eqn, inner), strict=True):
            pairs = zip(body.invars, operands, strict=False)
            yield from _sites(body, {id(v): identity(x) for v, x in pairs}, (*around, k))


def _number(eqn: Equation, inner: Sequence[Jaxpr]) -> int | None:
    """The number of the call that an equation marks, if it is a mark."""
    if not jaxprs.with_own_derivative(eqn):
        return None
    names = [str(body.debug_info.func_name) for body in inner]
    found = [name.removeprefix(_MARK) for name in names if name.startswith(_MARK)]
    return int(found[0]) if found else None


def _entering(eqn: Equation, inner: Sequence[Jaxpr]) -> list[Sequence[Operand]]:
    """For each jaxpr that an equation runs the operands that are its first inputs, in each turn of a loop."""
    match jaxprs.control_flow(eqn):
        case "call", _:
            return [eqn.invars] * len(inner)
        case "cond", _:
            return [eqn.invars[1:]] * len(inner)
        case "scan", _, consts, _:
            return [eqn.invars[:consts]] * len(inner)
        case "while", cond, _, cond_consts, body_consts:
            own = [eqn.invars[:cond_consts], eqn.invars[cond_consts : cond_consts + body_consts]]
            return [own[0] if body is cond else own[1] for body in inner]
        case _:
            return [()] * len(inner)
