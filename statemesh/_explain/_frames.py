"""Where in the user's code an operation was traced."""

import os
import re
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
# Libraries that stand around users' functions, and around ours. Nobody looks for a line there.
_AROUND = re.compile(r"[\\/]site-packages[\\/](equinox|jaxtyping|beartype)[\\/]|^<@beartype")


def frames_of(eqn: Equation) -> tuple[Frame, ...]:
    """The frames in which an equation was traced, the innermost first, without JAX's own."""
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    frames = [(one.file_name, one.line_num) for one in getattr(traceback, "frames", ())]
    return tuple(frame for frame in frames if not frame[0].startswith(_JAX))


def _is_users(frame: Frame) -> bool:
    return not frame[0].startswith((_OWN, _JAX)) and not _AROUND.search(frame[0])


def _innermost(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames inside the innermost one of the user's: those of this package."""
    return frames[: next((k for k, frame in enumerate(frames) if _is_users(frame)), None)]


def user_line(frames: Sequence[Frame]) -> str:
    """The user's innermost line, as `file:line`."""
    return next((f"{_shown(frame[0])}:{frame[1]}" for frame in frames if _is_users(frame)), "")


def _shown(file: str) -> str:
    """A file's path from the working directory, if it is below it."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


def in_policy(frames: Sequence[Frame]) -> bool:
    """Whether a state's policy did it, after the user's function had returned."""
    return any(file.startswith(_POLICIES) for file, _ in _innermost(frames))


def in_gradient(frames: Sequence[Frame]) -> bool:
    """Whether it reduces gradients."""
    return any(file == _GRADIENTS for file, _ in _innermost(frames))
