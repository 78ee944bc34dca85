"""The line of the user's code that an equation comes from."""

import dataclasses
import itertools
import linecache
from collections.abc import Iterator, Sequence
from typing import Any

from ..._base._libraries import OWN_FOLDER, is_library, shown
from ._jaxprs import Equation


@dataclasses.dataclass(frozen=True, order=True)
class SourceLine:
    """A line of source code.

    **Attributes:**

    - `file`, `number`: where it is.
    """

    file: str
    number: int

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self.number}"


def line_of(eqn: Equation) -> SourceLine | None:
    """The innermost line of the user's among the calls that made an equation."""
    return next(_lines(eqn), None)


def callers_of(eqn: Equation) -> tuple[SourceLine, ...]:
    """The lines of the user's around that line, the innermost first."""
    return tuple(_lines(eqn))[1:]


def _lines(eqn: Equation) -> Iterator[SourceLine]:
    for frame in _frames(eqn):
        if not is_library(frame.file_name):
            yield SourceLine(frame.file_name, frame.line_num)


def frames_below(eqn: Equation) -> list[str]:
    """The names of the functions that the user's line called, down to the equation."""
    inner = itertools.takewhile(lambda frame: is_library(frame.file_name), _frames(eqn))
    return [frame.function_name for frame in inner][::-1]


def _frames(eqn: Equation) -> Sequence[Any]:
    """The Python frames in which an equation was traced, the innermost first."""
    traceback: Any = eqn.source_info.traceback
    return traceback.frames if traceback is not None else ()


def by_statemesh(eqn: Equation) -> bool:
    """Whether code of statemesh stands between the user's line and an equation."""
    # Our own folder counts as a library's.
    files = itertools.takewhile(is_library, (frame.file_name for frame in _frames(eqn)))
    return any(file.startswith(OWN_FOLDER) for file in files)


def is_transposed(eqn: Equation) -> bool:
    """Whether an equation belongs to the backward pass: its line is that of the forward equation."""
    return "transpose(" in str(eqn.source_info.name_stack)
