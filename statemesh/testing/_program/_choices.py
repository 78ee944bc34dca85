"""What a program chooses by its numbers: branches, conditions and limits, and which sides were seen."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._types import AnyLeaf
from ._jaxprs import Equation, Jaxpr, all_equations, is_literal
from ._lines import frames_below, line_of
from ._literals import COMPARISONS


# The functions that users call to choose, and how JAX's frames name them.
_FUNCTIONS = frozenset(
    (
        *("where", "select", "select_n", "cond", "switch", "clip", "_clip", "clamp"),
        *("minimum", "maximum", "ufunc.__call__"),
    )
)
# What stands around every function of JAX.
_AROUND = (
    *("api_boundary.", "_cpp_pjit.", "_run_python_pjit", "Primitive.", "DynamicJaxprTrace."),
    *("_forward_method_to_aval.", "current"),
)

_CONDITION = ("its condition was never false", "its condition was never true")
_LIMIT = ("it left no number as it was", "it changed no number")

_LIMITS = ("max", "min", "clamp")


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """An equation of the user's that chooses by numbers.

    **Attributes:**

    - `unseen`: for each of its sides, what is said where it was never seen.
    - `limited`: for a limit the number of the operand that is limited; `None` for a condition.
    """

    eqn: Equation
    unseen: Sequence[str]
    limited: int | None = None

    @property
    def is_branch(self) -> bool:
        """Whether code that was never run stands on a side."""
        return self.eqn.primitive.name == "cond"

    def sides(self, index_or_limited: AnyLeaf, result: AnyLeaf) -> list[Any]:
        """For each side whether it is taken somewhere.

        **Arguments:**

        - `index_or_limited`: the condition or the index, or what is limited.
        - `result`: what the equation gives.
        """
        if self.limited is None:
            return [(index_or_limited == side).any() for side in range(len(self.unseen))]
        # NaN stays as it is.
        same = (result == index_or_limited) | (result != result)
        return [same.any(), ~same.all()]


def choices(jaxpr: Jaxpr) -> Iterator[Choice]:
    """What the user's own lines choose; what functions of a library choose inside is their own affair."""
    for eqn in {id(eqn): eqn for eqn in all_equations(jaxpr)}.values():
        name = _name(eqn)
        chooses = name in ("cond", "select_n", "_where", "clip", *_LIMITS)
        if not chooses or not eqn.outvars or not _is_users(eqn):
            continue
        limited = _limited(eqn, name)
        if limited is not None:
            yield Choice(eqn, _LIMIT, limited)
        elif name in ("cond", "select_n", "_where") and _has_condition(eqn):
            count = 2 if name == "_where" else len(eqn.params.get("branches", eqn.invars[1:]))
            of_several = [f"its branch {k} was never taken" for k in range(count)]
            yield Choice(eqn, _CONDITION if count == 2 else of_several)


def thresholds(jaxpr: Jaxpr) -> list[float]:
    """The sizes of the numbers that the user's own lines compare floats with, or limit them to."""
    found: set[float] = set()
    for eqn in all_equations(jaxpr):
        if _name(eqn) not in ("clip", *COMPARISONS, *_LIMITS) or line_of(eqn) is None:
            continue
        atoms: list[Any] = list(eqn.invars)
        if any(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in atoms):
            sizes = [abs(float(atom.val)) for atom in atoms if is_literal(atom)]
            found.update(size for size in sizes if math.isfinite(size))
    return sorted(found)


def _name(eqn: Equation) -> str:
    """The name of the operation, or of the function of JAX that is called."""
    is_call = eqn.primitive.name in ("jit", "pjit")
    return str(eqn.params.get("name")) if is_call else eqn.primitive.name


def _has_condition(eqn: Equation) -> bool:
    """Whether its first operand is what chooses; derivatives may have moved it into the function called."""
    atoms: list[Any] = list(eqn.invars[:1])
    return any(
        atom.aval.dtype == bool or np.issubdtype(atom.aval.dtype, np.integer) for atom in atoms
    )


def _limited(eqn: Equation, name: str) -> int | None:
    """The number of the operand that a limit is for."""
    if name == "clip":
        return 0
    if name == "clamp":
        return 1
    if name not in _LIMITS:
        return None
    # A limit is one number. The larger of two arrays is none.
    atoms: list[Any] = list(eqn.invars)
    is_number = [is_literal(atom) or not atom.aval.shape for atom in atoms]
    if all(is_number):
        return 0
    return is_number.index(False) if any(is_number) else None


def _is_users(eqn: Equation) -> bool:
    if line_of(eqn) is None:
        return False
    names = [name for name in frames_below(eqn) if not name.startswith(_AROUND)]
    if names and names[0] == "switch":
        # It limits its index too.
        return eqn.primitive.name == "cond"
    return not names or names[0] in _FUNCTIONS
