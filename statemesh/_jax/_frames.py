"""The user's lines: in tracebacks, which leave out the frames of this package, and of what was traced."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from .._base._libraries import OWN_FOLDER, cell_of, is_library
from .._base._types import PyTree
from . import _compat as compat


if TYPE_CHECKING:
    F = TypeVar("F", bound=Callable[..., PyTree])
else:
    F = TypeVar("F")  # Without the bound, which a run-time type checker would check at every call.

_SETTING = "JAX_TRACEBACK_FILTERING"
_NOTE = (
    "--------------------\n"
    "statemesh has left its own frames out of the traceback of this exception. "
    f"Set {_SETTING}=off to include these."
)


def without_own_frames(fun: F, *, says_so: bool = True) -> F:
    """`fun` with errors whose tracebacks leave out this package's frames, where JAX leaves out its own.

    **Arguments:**

    - `says_so`: whether a note tells of it in an `AssertionError` too. The report of a failed test stands
        alone.
    """

    @functools.wraps(fun)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        try:
            return fun(*args, **kwargs)
        except Exception as error:  # Whatever the user's function raises.
            leave_out_own(error, says_so=says_so or not isinstance(error, AssertionError))
            raise

    return call  # type: ignore[return-value]


def leave_out_own(error: BaseException, *, says_so: bool = True) -> None:
    """Take our frames out of the tracebacks of an error that is being raised and of its causes.

    `jax.config.jax_traceback_filtering` decides whether and how, as it does for JAX's frames.

    **Arguments:**

    - `says_so`: whether a note tells of it.
    """
    mode = compat.traceback_filtering()
    if mode == "off":
        return
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and not any(at is other for other in seen):
        seen.append(at)
        if mode == "tracebackhide":
            for frame, _ in walk_tb(at.__traceback__):
                if _is_own(frame):
                    frame.f_locals["__tracebackhide__"] = True
        else:
            at.__traceback__ = _without_own(at.__traceback__)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    # While JAX is tracing, one of its own functions is further out and adds the note itself.
    around = compat.current_trace(()) is not compat.TOP_LEVEL
    notes = getattr(error, "__notes__", ())
    says_so = says_so and mode != "tracebackhide" and not around
    if says_so and not any(_SETTING in note for note in notes):
        error.add_note(_NOTE)


def stacklevel() -> int:
    """The `stacklevel` with which a warning points at the user's line."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and _is_own(frame):
        frame, level = frame.f_back, level + 1
    return level


def _without_own(traceback: TracebackType | None) -> TracebackType | None:
    kept = None
    steps = []
    while traceback is not None:
        steps.append(traceback)
        traceback = traceback.tb_next
    for step in reversed(steps):
        if not _is_own(step.tb_frame):
            kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OWN_FOLDER)


# The file and the line of a frame.
Frame: TypeAlias = tuple[str, int]


def frames_of(eqn: compat.Equation) -> tuple[Frame, ...]:
    """The frames in which an equation was traced, the innermost first, without JAX's own."""
    return frames_in(getattr(getattr(eqn, "source_info", None), "traceback", None))


def frames_in(traceback: object) -> tuple[Frame, ...]:
    """The frames of a traceback as JAX records it, the innermost first, without JAX's own."""
    frames = [(frame.file_name, frame.line_num) for frame in getattr(traceback, "frames", ())]
    return tuple(frame for frame in frames if not frame[0].startswith(compat.JAX_FOLDER))


def user_line(frames: Sequence[Frame]) -> str:
    """The user's innermost line, as `file:line`; the file from the working directory, if it is below it."""
    here = os.getcwd() + os.sep
    lines = (
        f"{cell_of(file) or file.removeprefix(here)}:{number}"
        for file, number in frames
        if not is_library(file)
    )
    return next(lines, "")
