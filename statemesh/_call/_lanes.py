"""Step 2, lanes: which axis of each leaf is mapped over, and how many lanes that makes."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from .._base._errors import BatchAxisError, counted, error_listing
from .._base._specs import is_axis
from .._base._trees import describe
from .._base._types import AxisName, Filter, Leaf, StateAxes
from .._state._filters import first_matches
from .._state._state import states_of
from .._state._values import strong
from ._agreement import Passed, Traced
from ._layout import MeshLayout
from ._placement import Input, deleted, is_deleted
from ._specs import UNDECLARED, not_an_axis


@dataclasses.dataclass(frozen=True, slots=True)
class LanePlacement:
    """The axis of one leaf that `vmap` takes away inside; `None` where all lanes share it.

    **Attributes:**

    - `axis_names`: the axis over which the leaf's parts are kept apart, if any.
    """

    axis: int | None
    axis_names: frozenset[AxisName]

    # These belong to a placement on a mesh.
    spec: ClassVar[None] = None
    written: ClassVar[None] = None
    axes: ClassVar[tuple[()]] = ()

    def take(self, part: Leaf) -> Any:
        """What the lane sees of its part: `vmap` has taken the axis away."""
        return part

    def put(self, value: Leaf) -> Any:
        """The part that a lane's value becomes: `vmap` will add the axis."""
        return value


def is_size(size: object) -> bool:
    """Whether this can be a number of lanes."""
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and int(size) > 0


def fits(axis: int, ndim: int) -> bool:
    """Whether an array of so many axes has this one."""
    return -ndim <= axis < ndim


def count_lanes(
    name: str, mapped: Sequence[tuple[str, int, Any]], axis_size: int | None
) -> int | None:
    """How many lanes the mapped leaves make; `axis_size` where there are none.

    **Arguments:**

    - `mapped`: path, axis and array of each.

    **Raises:** `BatchAxisError` for an axis that an array does not have, and where sizes disagree.
    """
    if bad := [(p, axis, x) for p, axis, x in mapped if not fits(axis, np.ndim(x))]:
        raise error_listing(
            BatchAxisError,
            f"{name}: arguments do not have the axes that they are mapped over",
            [
                f"{path}: {describe(x)} has {counted(np.ndim(x), 'axis', 'axes')}, but is mapped over axis "
                f"{axis}"
                for path, axis, x in bad
            ],
            "Name an axis that they have, or None for what all lanes share.",
        )
    sizes = {np.shape(x)[axis] for _, axis, x in mapped}
    if axis_size is not None:
        sizes.add(axis_size)
    if len(sizes) > 1:
        raise _lanes_disagree(name, mapped, axis_size)
    return next(iter(sizes), None)


class Pairs(tuple[tuple[Filter, int | None], ...]):
    """Filters, each with its axis: the one form of `state_in_axes` and `state_out_axes`."""

    __slots__ = ()


class AxesOfMap(tuple[Any, ...]):
    """`in_axes` of a method of a `Map`: the `Map` itself comes before the method's arguments.

    **Attributes:**

    - `one_for_all`: whether the author wrote one axis, which stands for all arguments.
    """

    one_for_all: bool

    def __new__(cls, in_axes: Any, args: int) -> "AxesOfMap":
        is_sequence = isinstance(in_axes, tuple | list)
        axes = super().__new__(cls, (None, *(in_axes if is_sequence else [in_axes] * args)))
        axes.one_for_all = not is_sequence
        return axes


def as_pairs(state_axes: StateAxes, what: str) -> Pairs:
    """`state_in_axes` or `state_out_axes`, as users write them, in their one form."""
    if isinstance(state_axes, Pairs):
        return state_axes
    if state_axes is None:
        return Pairs()
    if not isinstance(state_axes, Mapping):
        return Pairs([(state_axes, 0)])
    for axis in state_axes:
        if not is_axis(axis):
            raise not_an_axis(f"a key of {what}", axis)
    return Pairs([(filter, axis) for axis, filter in state_axes.items()])


def choose_axes(
    pairs: Sequence[tuple[Filter, int | None]], roots: Sequence[tuple[str, Any]], what: str
) -> list[Leaf]:
    """The axis declared for each state of the roots, in order; `UNDECLARED` where none is."""
    if not pairs:
        return [UNDECLARED for _, tree in roots for _ in states_of(tree)]
    filters = [filter for filter, _ in pairs]
    hits = [hit for tree in first_matches(filters, roots, what) for hit in tree]
    return [UNDECLARED if hit is None else pairs[hit][1] for hit in hits]


class LaneLayout:
    """The inputs of a program that runs over lanes: wherever they lie, they are taken.

    **Arguments:**

    - `fun_name`: for messages.
    - `inputs`: the inputs.
    """

    def __init__(self, fun_name: str, inputs: Sequence[Input]) -> None:
        self.fun_name = fun_name
        self.inputs = inputs
        self.to_strong = [k for k, source in enumerate(inputs) if source.strong]
        # Not arrays of JAX yet: they do not come back as they went in. A tracer is one, by another type.
        of_jax = (jax.Array, jax.core.Tracer)
        self.fresh = frozenset(
            k for k, source in enumerate(inputs) if not issubclass(source.kind, of_jax)
        )

    def check(self, arrays: Sequence[Leaf]) -> None:
        """Axes and sizes are checked where lanes are counted."""

    def agree(self, arrays: Sequence[Leaf], passed: Callable[[], list[Passed]]) -> None:
        """There are no other processes."""

    def traced_alike(self, trace: Callable[[], Traced]) -> Traced:
        """What `trace` returns: there are no other processes."""
        return trace()

    def check_alive(self, arrays: Sequence[Leaf]) -> None:
        """Refuse arrays whose buffers were given up."""
        gone = [source.path for source, x in zip(self.inputs, arrays, strict=True) if is_deleted(x)]
        if gone:
            raise deleted(self.fun_name, gone)

    def concrete(self, arrays: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
        """Arrays as the program takes them, and as they come back when not written."""
        # Arrays of keys have no attribute `weak_type`.
        weak = [k for k in self.to_strong if getattr(arrays[k], "weak_type", False)]
        if not weak:
            return arrays, arrays
        ready = list(arrays)
        for k in weak:
            ready[k] = strong(arrays[k])
        return ready, ready

    def to_move(self, arrays: Sequence[Leaf]) -> list[int]:
        """The inputs that a call lays out anew: lanes have no layout."""
        return []

    def returned(
        self, arrays: Sequence[Leaf], shown: Sequence[Leaf], forwarded: Iterable[int]
    ) -> Sequence[Leaf]:
        """What comes back as it went in: lanes have no layout that it could lack."""
        del arrays, forwarded
        return shown

    def part_size(self, k: int, x: Leaf) -> int:
        """The bytes of an input, none of which is given up here."""
        return 0

    def traced(self, arrays: Sequence[Leaf], recorded: bool) -> list[Leaf]:
        """Inputs some of which are traced, wherever they lie."""
        del recorded
        return list(self.concrete(arrays)[0])

    def abstract(self, arrays: Sequence[Leaf]) -> list[Leaf]:
        """Shapes and dtypes, to lower the program with."""
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x for x in arrays
        ]


class OtherShapes(Exception):
    """Inputs of other shapes than those that a program was resolved for: another one is needed."""


class _Fixed:
    """A layout for inputs of the shapes that it first met."""

    shapes: tuple[Any, ...] | None = None

    def check(self, arrays: Sequence[Leaf]) -> None:
        shapes = tuple(map(np.shape, arrays))
        if self.shapes is None:
            self.shapes = shapes
        if self.shapes != shapes:
            raise OtherShapes


class FixedMeshLayout(_Fixed, MeshLayout):
    """A `MeshLayout` for inputs of one shape: of lanes that each have a device."""


class FixedLaneLayout(_Fixed, LaneLayout):
    """A `LaneLayout` for inputs of one shape."""


def _lanes_disagree(
    name: str, mapped: Sequence[tuple[str, int, Any]], axis_size: int | None
) -> BatchAxisError:
    by_size: dict[int, list[str]] = {}
    for path, axis, x in mapped:
        size = np.shape(x)[axis]
        by_size.setdefault(size, []).append(f"{path}: {describe(x)} has {size} on axis {axis}")
    items: list[str] = []
    for lines in by_size.values():
        # A model has many arrays that agree.
        items += lines[:3]
        if lines[3:]:
            items.append(f"and {len(lines) - 3} more like it")
    if axis_size is not None:
        items.append(f"axis_size={axis_size}")
    advice = "All mapped axes must have one size; give None as the axis of what all lanes share."
    return error_listing(BatchAxisError, f"{name}: the number of lanes is not clear", items, advice)
