"""Step 3: what binds the axis names, the devices of a mesh or the lanes of a `vmap`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from .._base._specs import Placement
from .._base._types import AxisName, Leaf
from .._leave._varying import VaryingAxes
from .._resolve._agreement import Passed, Traced
from .._resolve._inputs import Input


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
