"""Digests: a few bytes for a value, the same in every process. And programs in words that are."""

import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from . import _compat as compat
from . import _jaxprs as jaxprs
from ._arrays import is_key
from ._compat import Operand
from ._jaxprs import AnyJaxpr
from ._types import Leaf, PyTreeDef


SIZE = 16

_PLAIN = (str, bytes, int, float, complex, type(None), np.dtype, jax.sharding.PartitionSpec)


def digest(data: bytes) -> bytes:
    """The digest of some bytes."""
    return hashlib.blake2b(data, digest_size=SIZE).digest()


def of_array(x: Leaf) -> bytes:
    """The digest of an array. This process must hold the whole of it."""
    kind = str(x.dtype)
    if is_key(x):
        x = jax.random.key_data(x)
    host = np.ascontiguousarray(x)
    found = hashlib.blake2b(f"{kind}{host.shape}".encode(), digest_size=SIZE)
    found.update(host.view(np.uint8).data if host.ndim and host.size else host.tobytes())
    return found.digest()


def without_addresses(text: str) -> str:
    """A printed object, without where it lies in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def words_of(treedef: PyTreeDef) -> str:
    """The words with which a structure is printed, without their order: sets of strings have another one in
    each process."""
    return " ".join(sorted(re.findall(r"\w+|[^\w\s]", without_addresses(str(treedef)))))


def program_lines(program: AnyJaxpr) -> list[str]:
    """A traced program in lines that are alike in all processes that traced the same one.

    The lines hold no name of a function, no address, and no order of a set. The jaxprs that an equation runs
    come before it, equal ones once.
    """
    lines: list[str] = []
    numbers: dict[tuple[str, ...], str] = {}
    # By identity, so that a jaxpr that many equations run is read once.
    known: dict[int, str] = {}

    def body(jaxpr: AnyJaxpr) -> str:
        if id(jaxpr) not in known:
            own = tuple(_equation_lines(jaxpr, body))
            if own not in numbers:
                numbers[own] = f"jaxpr {len(numbers)}"
                lines.extend([f"{numbers[own]}:", *own])
            known[id(jaxpr)] = numbers[own]
        return known[id(jaxpr)]

    body(program)
    return lines


def _equation_lines(jaxpr: AnyJaxpr, body: Any) -> list[str]:
    opened = jaxprs.open_jaxpr(jaxpr)
    variables: dict[Operand, str] = {}

    def text(atom: Operand) -> str:
        kind = _sorted_in_braces(str(atom.aval).removeprefix("ShapedArray"))
        if isinstance(atom, compat.core.Literal):
            return f"{_parameter(atom.val, body)}:{kind}"
        name = variables.setdefault(atom, f"v{len(variables)}")
        return f"{name}:{kind}"

    def texts(atoms: Sequence[Operand]) -> str:
        return " ".join(map(text, atoms))

    constants = [_parameter(x, body) for x in getattr(jaxpr, "consts", ())]
    lines = [f"{text(v)} = {x}" for v, x in zip(opened.constvars, constants, strict=False)]
    lines.append(f"takes {texts(opened.invars)}")
    for eqn in opened.eqns:
        # A name is that of a function, or one given to a value. It changes nothing.
        parameters = [
            f"{key}={_parameter(value, body)}"
            for key, value in sorted(eqn.params.items())
            if key != "name" and value is not None
        ]
        listed = f"[{' '.join(parameters)}]" if parameters else ""
        lines.append(f"{texts(eqn.outvars)} = {eqn.primitive.name}{listed} {texts(eqn.invars)}")
    return [*lines, f"returns {texts(opened.outvars)}"]


def _parameter(value: Any, body: Any) -> str:
    """A parameter of an equation, or a constant of a program."""
    if hasattr(value, "eqns"):
        text: str = body(value)
        return text
    if hasattr(value, "__array__"):
        if compat.is_tracer(value) or not getattr(value, "is_fully_addressable", True):
            return "array"
        if not np.ndim(value) and not is_key(value):
            return repr(np.asarray(value).item())
        return f"array {of_array(value).hex()}"
    match value:
        case PyTreeDef():
            return words_of(value)
        case type():
            return _type_text(value)
        case int() | float() | complex():
            # JAX has numbers of its own, which are printed with their dtypes.
            return repr(np.asarray(value).item())
        case _ if isinstance(value, _PLAIN):
            return repr(value)
        case tuple() | list():
            return f"({', '.join(_parameter(one, body) for one in value)})"
        case Set():
            return f"{{{', '.join(sorted(_parameter(one, body) for one in value))}}}"
        case Mapping():
            return _parameter(sorted(value.items(), key=str), body)
        case _ if callable(value):
            return _type_text(type(value))
    return _sorted_in_braces(without_addresses(repr(value)))


def _type_text(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _sorted_in_braces(text: str) -> str:
    """A printed object, with what it shows of sets in one order."""

    def in_order(match: re.Match[str]) -> str:
        words = " ".join(sorted(re.findall(r"[^\s,()]+", match[1])))
        return f"{{{words}}}"

    return re.sub(r"\{([^{}]*,[^{}]*)\}", in_order, text)


def of_printed(value: object) -> bytes:
    """The digest of the words with which a value and its type are printed.

    Not of where objects lie in memory. And not of the order of words where a set may be printed: sets of
    strings have another one in each process.
    """
    text = without_addresses(f"{type(value).__qualname__} {value!r}")
    words = re.findall(r"\w+|[^\w\s]", text)
    return digest("\n".join(sorted(words) if "{" in text else words).encode())
