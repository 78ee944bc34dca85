"""Looking at the mapped calls that a function makes while it is traced."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from .._arguments import Call
from .._base._types import Leaf
from .._write_back import WriteBack
from ._program import Program


# Looks at a mapped call: its program, its arguments, what that made, and how the result is put together.
Look: TypeAlias = Callable[[Program, Call, Sequence[Leaf], WriteBack], None]

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


def saw(program: Program, call: Call, outputs: Sequence[Leaf], back: WriteBack) -> None:
    """Note a mapped call, if anyone is watching."""
    look = _watching.get()
    if look is not None:
        look(program, call, outputs, back)
