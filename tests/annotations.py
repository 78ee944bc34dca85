"""The checks of annotations at run time, made once for each annotated function.

jaxtyping makes them anew each time that a `def` is executed, and many of the package's functions stand inside
of others. What it gives to the type checker has a signature, but neither body nor closure: one is as good as
another with the same one.
"""

from collections.abc import Callable
from typing import Any

from beartype import beartype


_made: dict[Any, Callable[..., Any]] = {}


def checked(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype`, for functions as jaxtyping makes them: they stand for others, and have their signatures."""
    code = getattr(stand_in, "__code__", None)
    # What stands in no function is defined once.
    if code is None or code.co_filename != "<string>" or "<locals>" not in stand_in.__qualname__:
        return beartype(stand_in)
    key = (
        (stand_in.__module__, stand_in.__qualname__, code.co_code, code.co_varnames),
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        (len(stand_in.__defaults__ or ()), tuple(stand_in.__kwdefaults__ or ())),
        tuple((name, type(hint), hint) for name, hint in stand_in.__annotations__.items()),
    )
    try:
        found = _made.get(key)
    except TypeError:
        # An annotation that cannot be hashed.
        return beartype(stand_in)
    if found is None:
        found = _made[key] = beartype(stand_in)
    return found
