"""What the literals of a program are before a dtype rounds them.

A number of Python becomes a literal of the dtype that it meets: in bfloat16, 0.99 is 0.98828125. Traced in
double precision, the same function has the number itself in the same place.
"""

import dataclasses
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .._types import Numbers
from ._jaxprs import (
    Atom,
    Equation,
    Jaxpr,
    aligned,
    all_equations,
    inner_jaxprs,
    is_identity,
    is_literal,
    is_short,
    opened,
)
from ._numbers import equal, is_inexact, promoted


# A caller who names a dtype for a number means at least as many digits.
_USUAL = np.dtype(np.float32)

# What hands a literal on as it is, but for its dtype.
_HANDS_ON = ("convert_element_type", "broadcast_in_dim")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclasses.dataclass(frozen=True)
class Exact:
    """What the literals of a program stand for. By `id`, so only as long as the program is there.

    **Attributes:**

    - `numbers`: for literals the numbers in double precision.
    - `compared`: the equations that compare with a number which the dtype of the program does not have.
    """

    numbers: Mapping[int, Numbers] = dataclasses.field(default_factory=dict)
    compared: Collection[int] = ()

    def of(self, literal: Atom) -> Numbers | None:
        return self.numbers.get(id(literal))


def rounded_literals(jaxpr: Jaxpr, exact: Exact) -> frozenset[tuple[str, float]]:
    """The dtypes and values of the literals that may be rounded: they need more than half of the digits.

    What is known exactly is a number of double precision.
    """
    literals = set()
    for atom in _literals(jaxpr):
        known = exact.of(atom)
        x = np.asarray(atom.val, _dtype(atom)) if known is None else known
        if not is_inexact(x.dtype) or x.dtype.kind == "c" or not np.isfinite(float(x)):
            continue
        if not is_short(float(x), x.dtype):
            literals.add((str(x.dtype), float(x)))
    return frozenset(literals)


def has_rounded(jaxpr: Jaxpr) -> bool:
    """Whether a program has literals that stand for other numbers than those that were written."""
    return any(map(_may_be_rounded, _literals(jaxpr)))


def _literals(jaxpr: Jaxpr) -> Iterable[Any]:
    return (atom for eqn in all_equations(opened(jaxpr)) for atom in eqn.invars if is_literal(atom))


def _may_be_rounded(literal: Any) -> bool:
    dtype = _dtype(literal)
    if not is_inexact(dtype) or promoted(dtype) == dtype:
        return False
    x = np.asarray(literal.val, dtype)
    if dtype.itemsize <= 2:
        # In 8 digits many numbers are one that looks as if it was meant: 0.9999 is 1.
        return bool(x != 0)
    return not all(is_short(part, _USUAL) for part in _parts(x) if math.isfinite(part))


def lost_literals(jaxpr: Jaxpr, exact: Exact) -> Iterator[tuple[Equation, str]]:
    """The literals of which a dtype leaves 0, 1 or -1, so that what they should do is not done.

    Each comes in words, with the equation that reads it.
    """
    for eqn, operands in _with_literals(opened(jaxpr), exact.numbers):
        for atom, x in zip(eqn.invars, operands, strict=True):
            if x is None or not _is_rounded(x, _dtype(atom)):
                continue
            left = float(_as(x, _dtype(atom)))
            if abs(left) in (0, 1):
                yield eqn, f"{float(x)!r} is {left:g} in {_dtype(atom)}"


def exact_literals(own: Jaxpr, wide: Jaxpr) -> Exact:
    """What the literals of a program stand for, as far as it can be known.

    **Arguments:**

    - `own`: the program, as it is.
    - `wide`: the same function traced in double precision.
    """
    pairing = _Pairing()
    pairing.jaxprs(opened(own), opened(wide))
    numbers = {key: x for key, x in pairing.exact.items() if x is not None}
    compared = {
        id(eqn)
        for eqn, operands in _with_literals(opened(own), numbers)
        if eqn.primitive.name in COMPARISONS
        if any(x is not None and _is_rounded(x, _dtype(eqn.invars[0])) for x in operands)
    }
    return Exact(numbers, compared)


def _with_literals(
    jaxpr: Jaxpr, numbers: Mapping[int, Numbers]
) -> Iterator[tuple[Equation, list[Numbers | None]]]:
    """All equations of a program, with those of their operands that are literals; `None` for the others."""
    handed: dict[Atom, Numbers] = {}

    def number(atom: Any) -> Numbers | None:
        if not is_literal(atom):
            return handed.get(atom)
        literal = np.asarray(atom.val, _dtype(atom))
        return numbers.get(id(atom), _as(literal, promoted(literal.dtype)))

    for eqn in jaxpr.eqns:
        operands = list(map(number, eqn.invars))
        yield eqn, operands
        hands_on = is_identity(eqn) or eqn.primitive.name in _HANDS_ON
        if hands_on and len(operands) == 1 and operands[0] is not None:
            handed[eqn.outvars[0]] = operands[0]
        for inner in inner_jaxprs(eqn):
            yield from _with_literals(inner, numbers)


def _is_rounded(x: Numbers, dtype: Any) -> bool:
    """Whether a real number is none that a dtype of floats has."""
    real = x.dtype.kind != "c" and is_inexact(dtype)
    return real and not equal(_as(x, dtype).astype(np.float64), x).all()


def _as(x: Numbers, dtype: Any) -> Numbers:
    with np.errstate(all="ignore"):  # It may overflow.
        return x.astype(dtype)


class _Pairing:
    """Pairs the literals of two programs that were traced from one function.

    **Attributes:**

    - `exact`: the number that each literal stands for; `None` for one that stands for several.
    """

    def __init__(self) -> None:
        self.exact: dict[int, Numbers | None] = {}
        # A function that is called several times is often one jaxpr.
        self._paired: dict[tuple[int, int], tuple[Jaxpr, Jaxpr]] = {}

    def jaxprs(self, own: Jaxpr, wide: Jaxpr) -> None:
        key = id(own), id(wide)
        if key in self._paired:
            return
        self._paired[key] = own, wide
        equations = [_without_conversions(jaxpr) for jaxpr in (own, wide)]
        keys = [list(map(_key, each)) for each in equations]
        for a, b in aligned(*keys).items():
            self._equations(equations[0][a], equations[1][b])
        self._atoms(own.outvars, wide.outvars)

    def _equations(self, own: Equation, wide: Equation) -> None:
        self._atoms(own.invars, wide.invars)
        for both in zip(inner_jaxprs(own), inner_jaxprs(wide), strict=False):
            self.jaxprs(*both)

    def _atoms(self, own: Iterable[Atom], wide: Iterable[Atom]) -> None:
        for a, b in zip(own, wide, strict=False):
            if is_literal(a) and is_literal(b) and is_inexact(_dtype(a)):
                self._literals(a, np.asarray(a.val, _dtype(a)), np.asarray(b.val, _dtype(b)))

    def _literals(self, literal: Atom, own: Numbers, wide: Numbers) -> None:
        if wide.dtype != promoted(own.dtype) or own.dtype == wide.dtype or own.shape != wide.shape:
            return
        is_same = equal(_as(wide, own.dtype), own).all()
        if not is_same or not np.array_equal(np.isfinite(own), np.isfinite(wide)):
            # An overflow is another number, such as the mask that the program looks for.
            return
        if not all(_is_meant(part, own.dtype) for part in _parts(wide)):
            return
        known = self.exact.setdefault(id(literal), wide)
        if known is not None and not equal(known, wide).all():
            self.exact[id(literal)] = None


def _is_meant(x: float, dtype: Any) -> bool:
    """Whether a number in double precision is one that was written, not what a narrower dtype made of it.

    A program that names a dtype, as `np.float32(1 / 3)` does, rounds in double precision too. The dtype has
    what it has rounded, and needs most of its digits for that.
    """
    if not math.isfinite(x) or x.is_integer():
        return True
    dtypes = {_USUAL, np.dtype(dtype)} - {np.dtype(np.complex64)}
    return not any(float(np.asarray(x, d)) == x and not is_short(x, d) for d in dtypes)


def _parts(x: Numbers) -> list[float]:
    return [float(x.real), float(x.imag)] if x.dtype.kind == "c" else [float(x)]


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _without_conversions(jaxpr: Jaxpr) -> list[Equation]:
    # In double precision there are fewer dtypes to convert between.
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "convert_element_type"]


def _key(eqn: Equation) -> Hashable:
    return eqn.primitive.name, *(getattr(var.aval, "shape", None) for var in eqn.outvars)
