"""What step 4 goes by: where results are declared to go, and what may be wrong with them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ._base import errors
from ._base._types import AxisName, Place
from ._match import Entered
from ._model._state import State


@runtime_checkable
class Rules(Protocol):
    """What the user declared of results: where arrays and written states go."""

    def entries(self, result: Any, root: str) -> list[Any]:
        """What is declared for each leaf of the result, a State counting as one."""

    def said(self, result: Any, root: str) -> list[Any]:
        """What is declared for each State of the result."""

    def for_array(self, entry: Any, x: Any, path: str, wrong: "Wrong") -> Place:
        """Where an array goes."""

    def leaves_as_it_came(self, where: Place) -> bool:
        """Whether an array in a Module that entered so goes there again when it is not written, whatever
        is declared."""

    def for_state(
        self, state: State, entered: Entered | None, said: Any, path: str, wrong: "Wrong"
    ) -> list[Place]:
        """Where each leaf of a written state's value goes."""

    def beside(self) -> Place:
        """Where what a kind keeps beside its value goes: it is the same everywhere, like a key."""

    def otherwise(self, said: Any, x: Any, path: str) -> Place | None:
        """Where a leaf goes that differs where its place keeps one copy; `None` where that is wrong."""

    def refuse(self, fun_name: str, wrong: "Wrong") -> None:
        """Raise the error for what is wrong, if anything is."""


@dataclasses.dataclass(slots=True)
class Wrong:
    """Every mistake found on the way out, and what was put elsewhere than declared."""

    diverged: list[errors.Diverged] = dataclasses.field(default_factory=list)
    varying: list[errors.Varying] = dataclasses.field(default_factory=list)
    rank: list[errors.RankMismatch] = dataclasses.field(default_factory=list)
    # Path, axis and array of what has no such axis; path, state, axis in and axis out.
    axes: list[tuple[str, int, Any]] = dataclasses.field(default_factory=list)
    conflicts: list[tuple[str, Any, int | None, int | None]] = dataclasses.field(
        default_factory=list
    )
    # Path and inputs of the states that lanes wrote unexpectedly.
    stacked: list[tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """How results leave: what the user declared, and what the mapped axes are."""

    fun_name: str
    rules: Rules
    axis_names: tuple[AxisName, ...]
    # Paths of the arguments that hold one and the same State object.
    tied: Sequence[Sequence[str]] = ()
    # Whether written states' buffers are given up.
    donating: bool = False

    def in_order(self, axis_names: frozenset[AxisName]) -> tuple[AxisName, ...]:
        return tuple(name for name in self.axis_names if name in axis_names)
