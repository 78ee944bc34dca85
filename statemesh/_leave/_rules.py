"""Step 4, the rules: where results are declared to go, and what may be wrong with them."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from .._base import errors
from .._base._specs import Placement
from .._base._types import Axes, AxisName, KeyPath, Leaf, PyTree
from .._model._state import State
from ._origins import Entered


@dataclasses.dataclass(slots=True)
class Mistakes:
    """Every mistake found in a result, and which states were stacked without being declared."""

    diverged: list[errors.Diverged] = dataclasses.field(default_factory=list)
    varying: list[errors.Varying] = dataclasses.field(default_factory=list)
    rank: list[errors.RankMismatch] = dataclasses.field(default_factory=list)
    # The path, the declared axis and the array, which has no such axis.
    axes: list[tuple[str, int, Any]] = dataclasses.field(default_factory=list)
    # The path, the state, the axis it entered with and the one it is declared to leave with.
    conflicts: list[tuple[str, Any, int | None, int | None]] = dataclasses.field(
        default_factory=list
    )
    # The paths of undeclared states that lanes wrote differently, and the numbers of their inputs.
    stacked: list[tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A State of the result, or a leaf outside of any, with its declared entry.

    **Attributes:**

    - `placements`: where the leaves of the State go; `None` for a unit that is not a State.
    """

    keys: KeyPath
    node: Any
    entry: Leaf
    placements: Sequence[Placement] | None


@dataclasses.dataclass(frozen=True)
class LeavingRules(abc.ABC):
    """What the author declared of results: where arrays and written states go.

    **Attributes:**

    - `fun_name`: the name of the mapped function, for messages.
    - `axis_names`: the mapped axes, in the order of the mesh.
    """

    fun_name: str
    axis_names: tuple[AxisName, ...]

    @abc.abstractmethod
    def entries(self, result: PyTree, root: str) -> list[Leaf]:
        """The declared entry of each leaf of the result, a State counting as one leaf."""

    @abc.abstractmethod
    def declared(self, result: PyTree, root: str) -> list[Leaf]:
        """What the author declared for each State of the result, or `UNDECLARED`."""

    @abc.abstractmethod
    def for_array(self, entry: Leaf, x: Leaf, path: str, mistakes: Mistakes) -> Placement:
        """The placement of an array outside a State."""

    @abc.abstractmethod
    def stays(self, where: Placement) -> bool:
        """Whether an array of a Module that entered with this placement also leaves with it.

        It does so only when the function did not write it, and then whatever is declared.
        """

    @abc.abstractmethod
    def for_state(
        self, state: State, entered: Entered | None, declared: Any, path: str, mistakes: Mistakes
    ) -> list[Placement]:
        """The placement of each leaf of a written state's value."""

    def check_entries(self, units: Sequence[Unit]) -> None:
        """Refuse entries that say nothing."""
        return

    @abc.abstractmethod
    def auxiliary(self) -> Placement:
        """The placement of the arrays that a kind of state adds to its value. All shards share one copy."""

    @abc.abstractmethod
    def fallback(self, declared: Any, x: Leaf, path: str) -> Placement | None:
        """The placement of a leaf that varies although its own placement keeps one copy.

        `None` where such a leaf is a mistake.
        """

    @abc.abstractmethod
    def refuse(self, mistakes: Mistakes) -> None:
        """Raise the error for the mistakes, if there are any."""

    def in_order(self, axis_names: Axes) -> tuple[AxisName, ...]:
        """These axes, in the order of the mesh."""
        return tuple(name for name in self.axis_names if name in axis_names)


def roots(result: PyTree, root: str) -> Sequence[tuple[str, Any]]:
    """The parts of a result, each with its path, as filters see them."""
    if type(result) is tuple:
        return [(f"{root}[{i}]", part) for i, part in enumerate(result)]
    return [(root, result)]
