"""Looking at the mapped calls that a function makes while it is traced."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeAlias

from .._arguments import Call
from .._base._types import Leaf
from .._write_back import WriteBack
from ._program import Program


# Looks at a mapped call: its program, its arguments, what that made, and how the result is put together. It
# returns what is to stand for what the call made.
Look: TypeAlias = Callable[[Program, Call, list[Leaf], WriteBack], list[Leaf]]

_watching: contextvars.ContextVar[Look | None] = contextvars.ContextVar("watching", default=None)


@contextlib.contextmanager
def watching(look: Look) -> Iterator[None]:
    """Look at each mapped call that is traced while the context is open.

    The call is over afterwards: who keeps its arrays keeps tracers of a trace that ends.
    """
    token = _watching.set(look)
    try:
        yield
    finally:
        _watching.reset(token)


def seen(program: Program, call: Call, outputs: list[Leaf], back: WriteBack) -> list[Leaf]:
    """What a mapped call has made, as it goes on if anyone is watching."""
    look = _watching.get()
    return outputs if look is None else look(program, call, outputs, back)
