"""Every error that `statemesh.testing` raises, except the report of a failed check."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, get_args

import statemesh as sm

from ._types import DType


def names(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def spec_str(spec: Iterable[object]) -> str:
    """A spec as one types it."""
    return f"P({names(tuple(spec))})"


def bad_keyword(what: str, argument: str, value: object, expected: str) -> TypeError:
    kind = type(value).__name__
    return TypeError(f"{what}: {argument} is {value!r} of type {kind}, but must be {expected}.")


def check(what: str, argument: str, value: object, kinds: Any, expected: str) -> None:
    """Refuse what is not of these types. A truth value is no number."""
    is_flag = isinstance(value, bool) and bool not in (kinds, *get_args(kinds))
    if is_flag or not isinstance(value, kinds):
        raise bad_keyword(what, argument, value, expected)


def axes_str(sizes: Mapping[Hashable, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def no_numbers(dtype: DType, least: int | float, most: int | float) -> sm.StatemeshError:
    return sm.StatemeshError(
        f"arrays: dtype {dtype} has no number from {least} to {most} that is finite and not subnormal."
    )


def short(x: object) -> str:
    """A number, not too long."""
    return f"{x:.6g}" if isinstance(x, float | complex) else str(x)


def array_str(x: Any) -> str:
    """`float32[2,3]` for an array, `repr` for the rest."""
    if hasattr(x, "dtype") and isinstance(getattr(x, "shape", None), tuple):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:77]}..."
