"""Looking at the mapped calls that a function makes while it is traced."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence

from .._arguments import Call
from .._base._types import Leaf
from .._write_back import WriteBack
from ._program import Program


@dataclasses.dataclass(frozen=True)
class Seen:
    """A mapped call that was traced: its program, its arguments, and what it made of them."""

    program: Program
    call: Call
    outputs: Sequence[Leaf]
    back: WriteBack


_watching: contextvars.ContextVar[list[Seen] | None] = contextvars.ContextVar(
    "watching", default=None
)


@contextlib.contextmanager
def watching() -> Iterator[list[Seen]]:
    """The mapped calls that are traced while the context is open."""
    seen: list[Seen] = []
    token = _watching.set(seen)
    try:
        yield seen
    finally:
        _watching.reset(token)


def saw(program: Program, call: Call, outputs: Sequence[Leaf], back: WriteBack) -> None:
    """Note a mapped call, if anyone is watching."""
    seen = _watching.get()
    if seen is not None:
        seen.append(Seen(program, call, outputs, back))
