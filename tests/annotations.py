"""The run-time checks of annotations, made once for each annotated function.

jaxtyping makes the checks again each time that a `def` runs, and many functions of the package are nested in
others. jaxtyping gives the type checker a function with a signature but without a body or a closure. So one
such function can stand for every other with the same signature.

The checks take a quarter of the time of the tests, so they run only with `JAXTYPING_DISABLE=0`, as in CI on
one Python.
"""

import os
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype
from jaxtyping import install_import_hook


if "JAXTYPING_DISABLE" not in os.environ:
    jaxtyping.config.update("jaxtyping_disable", True)


def install() -> None:
    """Checks the annotations of the package from now on, if asked to."""
    if not jaxtyping.config.jaxtyping_disable:
        install_import_hook("statemesh", "tests.annotations.checked")


_made: dict[Any, Callable[..., Any]] = {}


def checked(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype` for the functions that jaxtyping makes, each with the signature that it checks."""
    code = getattr(stand_in, "__code__", None)
    # A function that is not nested is defined once.
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
