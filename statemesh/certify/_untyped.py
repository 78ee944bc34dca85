"""The text of a traced program without what its types say of shards: programs with one text compile alike."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from .._jax._jaxprs import is_literal, made_varying, open_jaxpr


# What only checks types, or only a derivative reads.
_IGNORED = (
    "check_vma",
    "check_rep",
    "debug_info",
    "jvp_jaxpr_fun",
    "fwd_jaxpr_thunk",
    "bwd",
    "symbolic_zeros",
)


def untyped(jaxpr: Any) -> str:
    """The text of a jaxpr."""
    return "\n".join(_lines(jaxpr))


def _lines(jaxpr: Any) -> Iterator[str]:
    opened, names, numbers = open_jaxpr(jaxpr), dict[Any, str](), count()

    def name(atom: Any) -> str:
        if is_literal(atom):
            return f"{atom.val}:{_form(atom.aval)}"
        if atom not in names:
            names[atom] = f"v{next(numbers)}:{_form(atom.aval)}"
        return names[atom]

    yield f"{[*map(name, opened.constvars)]} {[*map(name, opened.invars)]}"
    yield from (repr(const) for const in getattr(jaxpr, "consts", ()))
    for eqn in opened.eqns:
        if made_varying(eqn):  # A cast changes no value.
            names[eqn.outvars[0]] = name(eqn.invars[0])
            continue
        operands, params = [*map(name, eqn.invars)], sorted(eqn.params.items())
        primitive = {"psum_invariant": "psum"}.get(eqn.primitive.name, eqn.primitive.name)
        yield f"{[*map(name, eqn.outvars)]} = {primitive} {operands}"
        for key, value in params:
            # A parameter that one variant of a collective lacks is `None` in the other.
            if key not in _IGNORED and value is not None:
                yield f" {key}={_value(value)}"
    yield f"{[*map(name, opened.outvars)]}"


def _form(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{getattr(aval, 'shape', '')}"


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_value, value))})"
    if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
        return f"{{{untyped(value)}}}"
    return repr(value)
