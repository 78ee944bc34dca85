"""Where in the user's code an operation was traced."""

import os
from collections.abc import Sequence
from typing import TypeAlias

import jax

from .._base._compat import Equation


# The file and the line of a frame.
Frame: TypeAlias = tuple[str, int]

_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_POLICIES = os.path.join(_OWN, "_leave") + os.sep
_GRADIENTS = os.path.join(_OWN, "_axes", "_reduction.py")
# The library that runs loops and transformations for many users, whose frames are not theirs.
_WRAPPERS = (f"{os.sep}site-packages{os.sep}equinox{os.sep}",)


def frames_of(eqn: Equation) -> tuple[Frame, ...]:
    """The frames in which an equation was traced, the innermost first, without JAX's own."""
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    frames = [(one.file_name, one.line_num) for one in getattr(traceback, "frames", ())]
    return tuple(frame for frame in frames if not frame[0].startswith(_JAX))


def is_own(frame: Frame) -> bool:
    return frame[0].startswith(_OWN)


def innermost(frames: Sequence[Frame]) -> list[Frame]:
    """The frames inside the innermost one of the user's: those of this package."""
    count = next((k for k, frame in enumerate(frames) if not is_own(frame)), len(frames))
    return list(frames[:count])


def user_line(frames: Sequence[Frame]) -> str:
    """The user's innermost line, as `file:line`."""
    for file, line in frames:
        if not file.startswith((_OWN, _JAX)) and not any(part in file for part in _WRAPPERS):
            return f"{shown(file)}:{line}"
    return ""


def shown(file: str) -> str:
    """A file's path from the working directory, if it is below it."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


def in_policy(frames: Sequence[Frame]) -> bool:
    """Whether a state's policy did it, after the user's function had returned."""
    return any(file.startswith(_POLICIES) for file, _ in innermost(frames))


def in_gradient(frames: Sequence[Frame]) -> bool:
    """Whether it reduces gradients."""
    return any(file == _GRADIENTS for file, _ in innermost(frames))
