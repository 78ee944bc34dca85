"""Lanes: which axis of each leaf is mapped over, how many lanes that makes, and how one `vmap` runs them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np

from .._base import _errors as errors
from .._base._checks import check_named_once
from .._base._errors import BatchAxisError, StatemeshError, counted, error_listing
from .._base._specs import Placement, is_axis
from .._base._trees import describe
from .._base._types import AxisName, Filter, Leaf, StateAxes, flat_names, is_axis_name
from .._jax import _compat as compat
from .._state._filters import first_matches
from .._state._state import states_of
from .._state._values import strong
from ._arguments import Input
from ._layout import OnMesh, Run
from ._mesh_and_specs import UNDECLARED, not_an_axis
from ._tracing import FromTypes, VaryingAxes


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


class OtherShapes(Exception):
    """Inputs of other shapes than those that a program was resolved for: another one is needed."""


class OneShape:
    """Takes inputs of the shapes that it first met, and no others."""

    shapes: tuple[Any, ...] | None = None

    def check(self, arrays: Sequence[Leaf]) -> None:
        """Refuse inputs of other shapes."""
        shapes = tuple(map(np.shape, arrays))
        if self.shapes is None:
            self.shapes = shapes
        if self.shapes != shapes:
            raise OtherShapes


@dataclasses.dataclass(eq=False)
class OnLanes(OneShape):
    """Where a program runs: all instances in one `jax.vmap`. Inputs are taken wherever they lie.

    **Arguments:**

    - `fun_name`: for messages.
    - `axis_name`: what collectives call the lanes.
    - `axis_size`: how many there are to be; `None` where the inputs alone say it.
    - `spmd_axis_name`: the mesh axes over which the compiler is to spread them.
    - `fixed`: whether the program is for inputs of one shape only.
    """

    fun_name: str
    axis_name: AxisName
    axis_size: int | None
    spmd_axis_name: Any
    fixed: bool

    mesh: ClassVar[None] = None
    shared: ClassVar[None] = None
    sizes: ClassVar[Mapping[AxisName, int]] = {}
    spread: ClassVar[bool] = False

    def expect(self, inputs: Sequence[Input], donating: bool) -> None:
        """Take note, once, of the inputs that each run will have."""
        self.inputs = inputs
        self.to_strong = [k for k, source in enumerate(inputs) if source.strong]
        # Not arrays of JAX yet: they do not come back as they went in. A tracer is one, by another type.
        of_jax = (jax.Array, jax.core.Tracer)
        self.fresh = frozenset(
            k for k, source in enumerate(inputs) if not issubclass(source.kind, of_jax)
        )

    def check(self, arrays: Sequence[Leaf]) -> None:
        """Refuse other shapes. Axes and sizes are checked where lanes are counted."""
        if self.fixed:
            super().check(arrays)

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

    def placed(self, arrays: Sequence[Leaf]) -> Sequence[Leaf]:
        """Arrays as the program takes them."""
        return self.concrete(arrays)[0]

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

    def count(self, arrays: Sequence[Leaf]) -> int | None:
        """The number of lanes."""
        mapped = [
            (source.path, source.placement.axis, x)
            for source, x in zip(self.inputs, arrays, strict=True)
            if source.placement.axis is not None
        ]
        return count_lanes(self.fun_name, mapped, self.axis_size)

    def varying(self) -> VaryingAxes:
        """How one run learns which values differ between lanes."""
        return FromTypes((self.axis_name,))

    def call(self, run: Run, arrays: Sequence[Leaf]) -> list[Leaf]:
        """Run every lane, and put its outputs together."""
        # Filled while tracing, as the out specs of a `shard_map` are.
        out_axes: list[int | None] = []

        def lane(*parts: Leaf) -> list[Leaf]:
            outputs, placements = run(*parts)
            out_axes[:] = [placement.axis for placement in placements]
            return outputs

        lane.__name__ = lane.__qualname__ = self.fun_name
        mapped = jax.vmap(
            lane,
            in_axes=tuple(x.placement.axis for x in self.inputs),
            out_axes=out_axes,
            axis_name=self.axis_name,
            axis_size=self.count(arrays),
            spmd_axis_name=self.spmd_axis_name,
        )
        try:
            outputs: list[Leaf] = mapped(*arrays)
        except (AssertionError, ValueError) as error:
            # A collective over lanes fails where a mesh types what varies. JAX says so without words, or in
            # words that do not mention lanes.
            lanes = self.axis_name
            if not compat.inside_checked_shard_map() or not compat.in_collective_over(error, lanes):
                raise
            raise StatemeshError(
                f"{self.fun_name}: inside a checked shard_map JAX has no collectives over the lanes of a "
                f"vmap ({lanes!r}). Write instead:\n"
                f"  1. statemesh's own, which run over lanes there: sm.psum(x, {lanes!r}), or sm.pmean, "
                "sm.pmax, sm.pmin, sm.all_gather, sm.axis_index;\n"
                "  2. for a state: State(value, reduce='mean'), or 'sum', 'max', 'min': statemesh merges "
                "the lanes' writes;\n"
                "  3. for a result: return it with out_axes=0 and reduce its lane axis after vmap2, as "
                "with jnp.sum(out, axis=0)."
            ) from error
        return outputs

    def own_parts(self, outputs: list[Leaf], placements: Sequence[Placement]) -> list[Leaf]:
        """The outputs: there are no other processes."""
        return outputs


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


Mapped: TypeAlias = Sequence[tuple[str, int, Any]]
"""The path, the axis and the array of each leaf that is mapped over lanes."""


@dataclasses.dataclass(frozen=True)
class Lanes:
    """What `vmap2` runs lanes on: one `jax.vmap` carries all of them.

    **Attributes:**

    - `spmd_axis_name`: the mesh axes over which the compiler is to spread them, as for `jax.vmap`.
    - `has_mesh`: whether the lanes have a mesh. Their number, and so the program, then depends on the inputs'
        shapes.
    """

    spmd_axis_name: Any = None

    has_mesh: ClassVar[bool] = False

    def check(self, transform: str) -> None:
        """Refuse at construction whatever no call could make right."""
        names = flat_names(self.spmd_axis_name)
        if not all(map(is_axis_name, names)):
            expected = "the name of a mesh axis, or a tuple of several, as in spmd_axis_name='data'"
            raise errors.invalid_argument(
                transform, "spmd_axis_name", self.spmd_axis_name, expected
            )
        check_named_once(transform, "spmd_axis_name", names)

    def placement(self, axis_name: AxisName, axis: int | None, ndim: int) -> Placement:
        """The placement of a leaf that has its lanes on this one of its `ndim` axes."""
        return LanePlacement(axis, frozenset() if axis is None else frozenset([axis_name]))

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> OnLanes:
        """Bind the axis name to the lanes of what is mapped.

        **Arguments:**

        - `mapped`: the mapped leaves, which say how many lanes there are.
        - `asked`: the number of lanes that the author asked for, if any.
        - `fixed`: whether the program is for inputs of these shapes only.
        """
        if count_lanes(name, mapped, asked) is None:
            raise BatchAxisError(
                f"{name}: nothing is mapped, so nothing shows how many lanes there are. Give axis_size=..., "
                "or an axis in in_axes or state_in_axes."
            )
        if axis_name in compat.manual_axes(jax.sharding.get_abstract_mesh()):
            raise BatchAxisError(
                f"{name}: axis_name={axis_name!r} is a mesh axis that an enclosing shard_map maps over. "
                "Give the lanes another name."
            )
        return OnLanes(name, axis_name, asked, self.spmd_axis_name, fixed)

    def on_one_device(self) -> "Lanes":
        """What the same lanes run on, on one device."""
        return self


Layout: TypeAlias = OnMesh | OnLanes
"""Where a program runs, once the placement of every leaf is known."""
