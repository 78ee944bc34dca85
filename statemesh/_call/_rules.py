"""What an author may declare, by spec or by axis: what the engine asks of it."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from .._arguments import Arguments
from .._base._types import Place
from .._exit import Rules as LeavingRules
from ._binding import Binding


@runtime_checkable
class Rules(LeavingRules, Protocol):
    """Where arguments and results go."""

    @property
    def what(self) -> str:
        """`in_specs` or `in_axes`."""

    @property
    def entries_in(self) -> Any:
        """One entry for each positional argument, or one for all."""

    @property
    def steady(self) -> bool:
        """Whether calls with equal types and trees always find the same ground."""

    @property
    def has_own_mesh(self) -> bool:
        """Whether calls run on a mesh of their own, whichever one is set."""

    @property
    def takes_set_mesh(self) -> bool:
        """Whether calls run on the mesh that is set, if any."""

    def check(self) -> None:
        """Refuse at construction whatever no call could make right."""

    def ground(
        self, args: tuple[Any, ...], leaves: Sequence[Any], traced: bool
    ) -> tuple["Rules", Hashable]:
        """These rules as they stand for one call, and what else its program depends on: a mesh."""

    def check_traced(self, name: str, leaves: Sequence[Any]) -> None:
        """Refuse arguments that cannot be used here while something is traced."""

    def resolve(
        self,
        name: str,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        ground: Any,
    ) -> tuple[dict[int, Place], Binding, "Rules"]:
        """A placement for every leaf that becomes an input, by its position; what binds the names; and
        these rules with what they found out of the arguments."""

    def key(self, arrays: Sequence[Any]) -> Hashable:
        """What a program depends on of its inputs' shapes."""

    def reconsidered(self, program: Any, arrays: Sequence[Any]) -> "Rules":
        """These rules after a look at what the function does with inputs of these shapes."""

    def alone(self) -> "Rules":
        """The same on one device."""
