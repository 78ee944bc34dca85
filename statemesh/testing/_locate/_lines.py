"""The line of the user's code that an equation comes from."""

import dataclasses
import linecache
from collections.abc import Iterator
from typing import Any

from ..._base._libraries import OWN_FOLDER, is_library, shown
from .._program._jaxprs import Equation


@dataclasses.dataclass(frozen=True, order=True)
class Line:
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


def line_of(eqn: Equation) -> Line | None:
    """The innermost line of the user's among the calls that made an equation."""
    return next(_lines(eqn), None)


def callers_of(eqn: Equation) -> tuple[Line, ...]:
    """The lines of the user's around that line, the innermost first."""
    return tuple(_lines(eqn))[1:]


def _lines(eqn: Equation) -> Iterator[Line]:
    # JAX keeps with each equation the Python frames in which it was traced, the innermost first.
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not is_library(frame.file_name):
            yield Line(frame.file_name, frame.line_num)


def by_statemesh(eqn: Equation) -> bool:
    """Whether code of statemesh stands between the user's line and an equation."""
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if frame.file_name.startswith(OWN_FOLDER):
            return True
        if not is_library(frame.file_name):
            return False
    return False


def is_transposed(eqn: Equation) -> bool:
    """Whether an equation belongs to the backward pass: its line is that of the forward equation."""
    return "transpose(" in str(eqn.source_info.name_stack)
