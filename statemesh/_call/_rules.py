"""What the author of a mapped call declared: the rules by which arguments enter and results leave."""

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

from jax.sharding import PartitionSpec

from .._base._checks import check_function
from .._base._errors import quoted, spec_str
from .._base._specs import Placement
from .._base._trees import describe
from .._base._types import Axes, AxisName, Fun, KeyPath, Leaf, PyTree
from .._state._state import State
from ._arguments import Call, Input
from ._lanes import Layout
from ._origins import Entered


@dataclasses.dataclass(frozen=True)
class Varying:
    """A returned array that varies over `axis_names`, which `spec` does not mention."""

    path: str
    value: Any
    axis_names: tuple[AxisName, ...]
    spec: PartitionSpec | None


@dataclasses.dataclass(frozen=True)
class Diverged:
    """A written state that still varies over `axis_names`, which `spec` does not mention."""

    path: str
    state: Any
    axis_names: tuple[AxisName, ...]
    spec: PartitionSpec | None
    # The spec or axis that `state_out_specs` or `state_out_axes` declares for it.
    declared: Any
    # Whether it is a parameter that continues none of the arguments, as `gather` makes them.
    is_new_parameter: bool = False

    @property
    def item(self) -> str:
        axes = quoted(self.axis_names)
        return f"{self.path}: {describe(self.state)} varies over {axes} but leaves with {spec_str(self.spec)}"


@dataclasses.dataclass(slots=True)
class Mistakes:
    """Every mistake found in a result, and which states were stacked without being declared."""

    diverged: list[Diverged] = dataclasses.field(default_factory=list)
    varying: list[Varying] = dataclasses.field(default_factory=list)
    # What is said of arrays that have fewer axes than their specs have entries.
    rank: list[str] = dataclasses.field(default_factory=list)
    # The path, the declared axis and the array, which has no such axis.
    axes: list[tuple[str, int, Any]] = dataclasses.field(default_factory=list)
    # The path, the state, the axis it entered with and the one it is declared to leave with.
    conflicts: list[tuple[str, Any, int | None, int | None]] = dataclasses.field(
        default_factory=list
    )
    # The paths of undeclared states that lanes wrote differently, and the numbers of their inputs.
    stacked: list[tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=list)


class Rules(abc.ABC):
    """What the author declared, by spec or by axis: where arguments enter, and where results leave.

    `for_call` returns the rules of one call, on the mesh of that call. They give every argument its placement
    (`resolve`), and every result (`for_array`, `for_state`).

    **Attributes:**

    - `what`: `in_specs` or `in_axes`.
    """

    what: ClassVar[str]

    @property
    def entries_in(self) -> Any:
        """One entry for each positional argument, or one for all."""
        return getattr(self, self.what)

    @property
    @abc.abstractmethod
    def names(self) -> tuple[AxisName, ...]:
        """The axes that a call maps over, in the order of the mesh."""

    @property
    @abc.abstractmethod
    def has_own_mesh(self) -> bool:
        """Whether calls run on a mesh of their own, whichever one is set."""

    @property
    def takes_set_mesh(self) -> bool:
        """Whether calls run on the mesh that is set, if any."""
        return False

    @property
    def cacheable(self) -> bool:
        """Whether calls with equal types and trees always have the same rules."""
        return True

    @property
    def key(self) -> Hashable:
        """What the program of a call depends on besides its arguments' structure, types and static leaves."""
        return None

    @property
    def by_shape(self) -> bool:
        """Whether a call with other shapes resolves differently, and needs another program."""
        return False

    @property
    def looks_ahead(self) -> bool:
        """Whether resolving needs to know what the function writes."""
        return False

    @abc.abstractmethod
    def check(self) -> None:
        """Refuse at construction whatever no call could make right."""

    def check_traced(self, name: str, leaves: Sequence[Leaf]) -> None:
        """Refuse arguments that cannot be used here while something is traced."""
        return

    def for_call(self, call: Call, traced: bool) -> "Rules":
        """The rules of this call."""
        return self

    def after(self, fed: frozenset[str]) -> "Rules":
        """The rules once it is known which states lanes get their own entries of, by their paths."""
        return self

    def has_devices(self, leaves: Sequence[Leaf]) -> bool:
        """Whether it is known on which devices a call of these arguments would run."""
        return True

    def of_shapes(self) -> "Rules":
        """The rules of the same calls where only shapes are known: a mesh without devices is enough."""
        return self

    @abc.abstractmethod
    def on_one_device(self) -> "Rules":
        """The rules of the same calls on one device."""

    @abc.abstractmethod
    def resolve(self, name: str, call: Call) -> tuple[list[Input], Layout, "Rules"]:
        """A record of each input, where the program runs, and the rules by which results leave."""

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
    def for_state(
        self, state: State, entered: Entered | None, declared: Any, path: str, mistakes: Mistakes
    ) -> list[Placement]:
        """The placement of each leaf of a written state's value."""

    def stays(self, array: Input) -> bool:
        """Whether an array outside a State leaves as it entered, whatever is declared, if nobody wrote it.

        By specs it never does: a spec of an array means to statemesh what it means to JAX.
        """
        return False

    def check_entries(
        self,
        name: str,
        flat: Sequence[tuple[KeyPath, Any]],
        entries: Sequence[Leaf],
        placements: Sequence[Sequence[Placement] | None],
    ) -> None:
        """Refuse entries that say nothing.

        **Arguments:**

        - `flat`: the leaves of the result, a State counting as one, with their keys.
        - `entries`: the declared entry of each.
        - `placements`: where the leaves of each State go; `None` for an array.
        """
        return

    @abc.abstractmethod
    def auxiliary(self) -> Placement:
        """The placement of the arrays that a kind of state adds to its value. All shards share one copy."""

    def fallback(self, declared: Any, x: Leaf, path: str) -> Placement | None:
        """The placement of a leaf that varies although its own placement keeps one copy.

        `None` where such a leaf is a mistake.
        """
        return None

    @abc.abstractmethod
    def refuse(self, name: str, mistakes: Mistakes) -> None:
        """Raise the error for the mistakes, if there are any."""

    def in_order(self, axis_names: Axes) -> tuple[AxisName, ...]:
        """These axes, in the order of the mesh."""
        return tuple(name for name in self.names if name in axis_names)


def roots(result: PyTree, root: str) -> Sequence[tuple[str, Any]]:
    """The parts of a result, each with its path, as filters see them."""
    if type(result) is tuple:
        return [(f"{root}[{i}]", part) for i, part in enumerate(result)]
    return [(root, result)]


DONATE = ("none", "states", "all")


@dataclasses.dataclass(frozen=True)
class Declared:
    """The arguments of a mapped call, checked as far as they can be without a call.

    **Attributes:**

    - `transform`: what the author wrote: `shard_map`, `pmap2`, `vmap2`.
    - `rules`: where arguments and results go.
    - `donate`: whose memory is given up: a word, or the positions of arguments.
    """

    transform: str
    fun: Fun
    name: str
    rules: Rules
    donate: Any = "none"
    jit: bool = True

    def __post_init__(self) -> None:
        """Refuse whatever no call could make right."""
        check_function(self.transform, self.fun)
        self.rules.check()
