"""What the author of a mapped call declared, and what the calls differ in: rules and bindings."""

import abc
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from .._base import _errors as errors
from .._base._checks import check_function
from .._base._specs import Placement
from .._base._types import Axes, AxisName, Fun, KeyPath, Leaf, PyTree
from .._state._state import State
from ._agreement import Passed, Traced
from ._arguments import Arguments, Call
from ._origins import Entered
from ._placement import Input
from ._varying import VaryingAxes


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
class ReturnedUnit:
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
    def stays(self, placement: Placement) -> bool:
        """Whether an array of a Module that entered with this placement also leaves with it.

        It does so only when the function did not write it, and then whatever is declared.
        """

    @abc.abstractmethod
    def for_state(
        self, state: State, entered: Entered | None, declared: Any, path: str, mistakes: Mistakes
    ) -> list[Placement]:
        """The placement of each leaf of a written state's value."""

    def check_entries(self, units: Sequence[ReturnedUnit]) -> None:
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


@runtime_checkable
class Layout(Protocol):
    """How the inputs of a program are laid out at every call."""

    inputs: Sequence[Input]
    # The inputs that are new arrays inside, made from something else.
    fresh: frozenset[int]

    def check(self, arrays: Sequence[Leaf]) -> None:
        """Refuse arrays that do not fit their placements."""

    def check_alive(self, given: Sequence[Leaf]) -> None:
        """Refuse arrays whose memory was given up."""

    def agree(self, given: Sequence[Leaf], passed: Callable[[], list[Passed]]) -> None:
        """Refuse, before the first call, what another process passes differently."""

    def traced_alike(self, trace: Callable[[], Traced]) -> Traced:
        """What `trace` returns, before it runs; refused where another process has traced another program."""

    def concrete(self, given: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
        """Arrays as the program takes them, and as they come back when they are not written."""

    def returned(
        self, given: Sequence[Leaf], shown: Sequence[Leaf], forwarded: Iterable[int]
    ) -> Sequence[Leaf]:
        """What comes back as it went in, laid out as declared."""

    def to_move(self, given: Sequence[Leaf]) -> list[int]:
        """The inputs that a call lays out anew before it runs."""

    def part_size(self, k: int, x: Leaf) -> int:
        """The bytes of an input that a device holds."""

    def traced(self, given: Sequence[Leaf], recorded: bool) -> list[Leaf]:
        """Inputs some of which are traced, as the program takes them."""

    def abstract(self, given: Sequence[Leaf]) -> list[Leaf]:
        """Shapes and dtypes, to lower the program with."""


# Takes the program's outputs and their placements; returns the parts of this process.
Outside = Callable[[Sequence[Leaf], Sequence[Placement]], list[Leaf]]

# Runs one instance on its parts of the inputs; returns its outputs and their placements.
Run = Callable[..., tuple[list[Leaf], Sequence[Placement]]]


@runtime_checkable
class Binding(Protocol):
    """What the three mapped calls differ in once the placement of every leaf is known."""

    axis_names: tuple[AxisName, ...]
    # Whether JAX types what varies.
    check_vma: bool
    sizes: Mapping[AxisName, int]
    # Set where other processes hold a part of each output.
    outside: Outside | None

    def layout(self, name: str, inputs: Sequence[Input], donating: bool) -> Layout:
        """How the inputs are laid out."""

    def varying(self) -> VaryingAxes:
        """How one run learns which values differ between instances."""

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        """The context to call in when another mesh is set than the binding's own."""

    def count(self, name: str, layout: Layout, arrays: Sequence[Leaf]) -> int | None:
        """The number of instances in this process."""

    def call(self, run: Run, name: str, layout: Layout, arrays: Sequence[Leaf]) -> list[Leaf]:
        """Run every instance, and put its outputs together."""


# The path, the axis and the array of each leaf that is mapped.
Mapped = Sequence[tuple[str, int, Any]]


@runtime_checkable
class Carrier(Protocol):
    """What `pmap2` and `vmap2` differ in: what they run lanes on."""

    # Whether the lanes have a mesh. Their number, and so the program, then depends on the inputs' shapes.
    has_mesh: bool

    def check(self, transform: str) -> None:
        """Refuse at construction whatever no call could make right."""

    def placement(self, axis_name: AxisName, axis: int | None, ndim: int) -> Placement:
        """The placement of a leaf that has its lanes on this one of its `ndim` axes."""

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> Binding:
        """Bind the axis name to the lanes of what is mapped.

        **Arguments:**

        - `mapped`: the mapped leaves, which say how many lanes there are.
        - `asked`: the number of lanes that the author asked for, if any.
        - `fixed`: whether the program is for inputs of these shapes only.
        """

    def on_one_device(self) -> "Carrier":
        """The carrier of the same lanes on one device."""


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

    def check(self) -> None:
        """Refuse at construction whatever no call could make right."""
        check_function(self.transform, self.fun)
        self.rules.check()
