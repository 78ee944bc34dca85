"""Lines for what the backward function of a `custom_vjp` computes, and for what it hands on."""

import dis
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util

from ..._base._libraries import is_library
from .._types import AnyLeaf, Fun
from ._jaxprs import Equation


# The scope of the equations that a backward function of the user's records, inside of `backward_lines`.
_BACKWARD = "statemesh.backward"
_LOCK = threading.RLock()


@contextmanager
def backward_lines() -> Iterator[None]:
    """A context in which equations of a `custom_vjp`'s backward function are recorded with their own lines.

    JAX gives them all the line of the call. A cotangent that the function hands on as it is gets an equation
    too, so that the line is known at which a sum over shards may be missing. Functions of libraries keep the
    line of the call.
    """
    kind: Any = jax.custom_vjp
    # All threads have the same class.
    with _LOCK:
        before = vars(kind).get("bwd")
        # JAX asks a `custom_vjp` for its backward function when it is called.
        kind.bwd = _Backward()
        try:
            yield
        finally:
            if before is None:
                del kind.bwd
            else:
                kind.bwd = before


class _Backward:
    """The attribute `bwd` of all `custom_vjp`s, each of which keeps its own function."""

    def __get__(self, owner: Any, kind: object = None) -> Any:
        function = None if owner is None else vars(owner).get("bwd")
        return function and _with_lines(function)

    def __set__(self, owner: Any, function: Any) -> None:
        vars(owner)["bwd"] = function


class _TracebackOfEach:
    """In the place of one traceback for all equations: as it is false, JAX takes that of each."""

    def __bool__(self) -> bool:
        return False

    def as_python_traceback(self) -> None:
        """What JAX would add to an error."""


def _with_lines(function: Fun) -> Fun:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or is_library(code.co_filename):
        return function
    handed_on = _hands_on(code)

    @functools.wraps(function)
    def with_lines(*args: Any, **kwargs: Any) -> Any:
        of_each: Any = _TracebackOfEach()
        scope = source_info_util.new_name_stack(_BACKWARD)
        with source_info_util.user_context(of_each, name_stack=scope):
            results = function(*args, **kwargs)
            given = {id(x) for x in jax.tree.leaves((args, kwargs))}
            return jax.tree.map(lambda x: handed_on(x) if id(x) in given else x, results)

    return with_lines


def _hands_on(code: CodeType) -> Callable[[AnyLeaf], AnyLeaf]:
    """An identity that records an equation, on the line where this code returns."""
    returned = [x.positions for x in dis.get_instructions(code) if x.opname.startswith("RETURN")]
    line = returned[-1].lineno if returned and returned[-1] else None
    # Code of this file on this line, so that JAX finds them in the frame.
    source = "\n" * ((line or code.co_firstlineno) - 1) + "lambda x: named(x, name)"
    made = compile(source, code.co_filename, "eval")
    named: Callable[[AnyLeaf], AnyLeaf] = eval(made, {"named": checkpoint_name, "name": _BACKWARD})
    return named


def is_of_backward(eqn: Equation) -> bool:
    """Whether a backward function of the user's has recorded an equation, with its own line."""
    before, scope, _ = str(eqn.source_info.name_stack).partition(_BACKWARD)
    return bool(scope) and "transpose(" not in before


def is_handed_on(eqn: Equation) -> bool:
    """Whether an equation stands for a cotangent that a backward function of the user's hands on."""
    return bool(eqn.params.get("name") == _BACKWARD)
