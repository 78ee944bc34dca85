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


# It has at least as many digits as a caller means who writes another dtype than double precision.
_USUAL = np.dtype(np.float32)


# What hands a literal on, to be compared.
_HANDS_ON = ("convert_element_type", "broadcast_in_dim")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


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
    for eqn in all_equations(opened(jaxpr)):
        for atom in filter(is_literal, eqn.invars):
            known, dtype = exact.of(atom), _dtype(atom)
            if known is None or known.dtype.kind == "c":
                continue
            own, x = float(np.asarray(atom.val, dtype)), float(known)
            if own != x and abs(own) in (0, 1):
                yield eqn, f"{x!r} is {own:g} in {dtype}"


def exact_literals(own: Jaxpr, wide: Jaxpr) -> Exact:
    """What the literals of a program stand for, as far as it can be known.

    **Arguments:**

    - `own`: the program, as it is.
    - `wide`: the same function traced in double precision.
    """
    pairing = _Pairing()
    pairing.jaxprs(opened(own), opened(wide))
    numbers = {key: x for key, x in pairing.exact.items() if x is not None}
    jaxprs = {id(jaxpr): jaxpr for jaxpr, _ in pairing.paired.values()}.values()
    return Exact(numbers, {id(eqn) for jaxpr in jaxprs for eqn in _comparisons(jaxpr, numbers)})


def _comparisons(jaxpr: Jaxpr, numbers: Mapping[int, Numbers]) -> Iterator[Equation]:
    """The equations of a jaxpr that compare with a number which its dtype does not have."""
    rounded: set[Atom] = set()

    def is_rounded(atom: Any) -> bool:
        if not is_literal(atom):
            return atom in rounded
        x = numbers.get(id(atom))
        return x is not None and x.dtype.kind == "f" and x != np.asarray(atom.val, _dtype(atom))

    for eqn in jaxpr.eqns:
        if not any(map(is_rounded, eqn.invars)):
            continue
        if eqn.primitive.name in _COMPARISONS:
            yield eqn
        elif is_identity(eqn) or eqn.primitive.name in _HANDS_ON:
            rounded.update(eqn.outvars)


class _Pairing:
    """Pairs the literals of two programs that were traced from one function.

    **Attributes:**

    - `exact`: the number that each literal stands for; `None` for one that stands for several.
    - `paired`: the jaxprs that have been paired. A function that is called several times is often one jaxpr.
    """

    def __init__(self) -> None:
        self.exact: dict[int, Numbers | None] = {}
        self.paired: dict[tuple[int, int], tuple[Jaxpr, Jaxpr]] = {}

    def jaxprs(self, own: Jaxpr, wide: Jaxpr) -> None:
        key = id(own), id(wide)
        if key in self.paired:
            return
        self.paired[key] = own, wide
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
        with np.errstate(all="ignore"):
            is_same = equal(wide.astype(own.dtype), own).all()
        if not is_same or not np.array_equal(np.isfinite(own), np.isfinite(wide)):
            # An overflow is another number, such as the mask that the program looks for.
            return
        if not all(_is_meant(part, own.dtype) for part in _parts(wide)):
            return
        known = self.exact.setdefault(id(literal), wide)
        if known is not None and not equal(known, wide).all():
            self.exact[id(literal)] = None


def _is_meant(x: float, dtype: Any) -> bool:
    """Whether a number in double precision cannot be what a narrower dtype made of another number.

    A program that names a dtype, as `np.float32(1 / 3)` does, gets the same there in double precision. Such a
    number has as many digits as the dtype, and so has no number that was written with few.
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
