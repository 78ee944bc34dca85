"""Step 2 for a call: from what the author declared to a placement for every leaf."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from .._arguments import Arguments, Call
from .._base._specs import Placement
from .._base._types import Leaf
from .._leave._rules import LeavingRules
from ._binding import Binding


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Everything that the rules decide for one call.

    **Attributes:**

    - `placements`: that of every leaf that becomes an input, by the leaf's position.
    - `placed_by`: what says that the leaf lies so, by the leaf's position: an entry as the author wrote it,
        the state's own spec, its kind or the default.
    - `binding`: what binds the axis names.
    - `leaving`: where results go.
    - `by_shape`: whether a call with other shapes resolves differently, and needs another program.
    """

    placements: Mapping[int, Placement]
    placed_by: Mapping[int, str]
    binding: Binding
    leaving: LeavingRules
    by_shape: bool


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A state that the function wrote differently in each lane, although nobody declared it so.

    **Attributes:**

    - `path`: its path in the arguments.
    - `shapes`: those of its leaves.
    - `read`: whether the function reads it.
    """

    path: str
    shapes: Sequence[tuple[int, ...]]
    read: bool


@runtime_checkable
class Context(Protocol):
    """The rules as they stand for one call: on its mesh, with its inferred specs."""

    @property
    def key(self) -> Hashable:
        """What a program depends on besides the arguments' structure, types and static leaves."""

    @property
    def looks_ahead(self) -> bool:
        """Whether resolving needs to know what the function writes."""

    def resolve(self, name: str, arguments: Arguments, call: Call) -> Resolved:
        """Give every leaf its placement, and bind the axis names."""

    def after(self, stacked: Sequence[Stacked], lanes: int | None) -> "Context | None":
        """The context once it is known what the function wrote; `None` if it stays the same."""


@runtime_checkable
class Rules(Protocol):
    """What the author declared, by spec or by axis."""

    @property
    def what(self) -> str:
        """`in_specs` or `in_axes`."""

    @property
    def entries_in(self) -> Any:
        """One entry for each positional argument, or one for all."""

    @property
    def cacheable(self) -> bool:
        """Whether calls with equal types and trees always have the same context."""

    @property
    def has_own_mesh(self) -> bool:
        """Whether calls run on a mesh of their own, whichever one is set."""

    @property
    def takes_set_mesh(self) -> bool:
        """Whether calls run on the mesh that is set, if any."""

    def check(self) -> None:
        """Refuse at construction whatever no call could make right."""

    def check_traced(self, name: str, leaves: Sequence[Leaf]) -> None:
        """Refuse arguments that cannot be used here while something is traced."""

    def context(self, call: Call, traced: bool) -> Context:
        """The rules as they stand for this call."""

    def has_devices(self, leaves: Sequence[Leaf]) -> bool:
        """Whether it is known on which devices a call of these arguments would run."""

    def of_shapes(self) -> "Rules":
        """The rules of the same call where only shapes are known: a mesh without devices is enough."""

    def on_one_device(self) -> "Rules":
        """The rules of the same call on one device."""
