"""Step 3 for `vmap2`: all lanes run in one `jax.vmap`."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from .._base import _compat as compat
from .._base import errors
from .._base._checks import check_named_once
from .._base._specs import Placement
from .._base._types import AxisName, Leaf, flat_names, is_axis_name
from .._leave._varying import FromTypes, VaryingAxes
from .._resolve._inputs import Input
from .._resolve._lanes import FixedLaneLayout, LaneLayout, LanePlacement, count_lanes
from ._binding import Binding, Layout, Mapped, Outside, Run


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One `vmap` carries all lanes."""

    spmd_axis_name: Any = None

    has_mesh = False

    def check(self, transform: str) -> None:
        names = flat_names(self.spmd_axis_name)
        if not all(map(is_axis_name, names)):
            raise errors.invalid_argument(transform, "spmd_axis_name", self.spmd_axis_name)
        check_named_once(transform, "spmd_axis_name", names)

    def placement(self, axis_name: AxisName, axis: int | None, ndim: int) -> Placement:
        return LanePlacement(axis, frozenset() if axis is None else frozenset([axis_name]))

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> Binding:
        if count_lanes(name, mapped, asked) is None:
            raise errors.nothing_to_infer(name)
        if axis_name in compat.manual_axes(jax.sharding.get_abstract_mesh()):
            raise errors.lane_name_taken(name, axis_name)
        return OverLanes(axis_name, asked, self.spmd_axis_name, fixed)

    def on_one_device(self) -> "Lanes":
        return self


class OverLanes:
    """Instances as the lanes of one `jax.vmap`.

    **Arguments:**

    - `axis_name`: what collectives call the lanes.
    - `axis_size`: how many there are to be; `None` where the inputs alone say it.
    - `spmd_axis_name`: the mesh axes over which the compiler is to spread them, as for `jax.vmap`.
    - `fixed`: whether the program is for inputs of one shape only.
    """

    check_vma = False
    outside: Outside | None = None

    def __init__(
        self, axis_name: AxisName, axis_size: int | None, spmd_axis_name: Any, fixed: bool
    ) -> None:
        self.fixed = fixed
        self.axis_names: tuple[AxisName, ...] = (axis_name,)
        self.axis_size = axis_size
        self.spmd_axis_name = spmd_axis_name
        self.sizes: Mapping[AxisName, int] = {}

    def layout(self, name: str, inputs: Sequence[Input], donating: bool) -> Layout:
        return (FixedLaneLayout if self.fixed else LaneLayout)(name, inputs)

    def varying(self) -> VaryingAxes:
        return FromTypes(self.axis_names)

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self, name: str, layout: Layout, arrays: Sequence[Leaf]) -> int | None:
        mapped = [
            (one.path, one.placement.axis, x)
            for one, x in zip(layout.inputs, arrays, strict=True)
            if one.placement.axis is not None
        ]
        return count_lanes(name, mapped, self.axis_size)

    def call(self, run: Run, name: str, layout: Layout, arrays: Sequence[Leaf]) -> list[Leaf]:
        # Filled while tracing, as the out specs of a `shard_map` are.
        out_axes: list[int | None] = []

        def lane(*parts: Leaf) -> list[Leaf]:
            outputs, placements = run(*parts)
            out_axes[:] = [where.axis for where in placements]
            return outputs

        lane.__name__ = lane.__qualname__ = name
        mapped = jax.vmap(
            lane,
            in_axes=tuple(one.placement.axis for one in layout.inputs),
            out_axes=out_axes,
            axis_name=self.axis_names[0],
            axis_size=self.count(name, layout, arrays),
            spmd_axis_name=self.spmd_axis_name,
        )
        try:
            outputs: list[Leaf] = mapped(*arrays)
        except (AssertionError, ValueError) as error:
            # A collective over lanes fails where a mesh types what varies. JAX says so without words, or in
            # words that do not mention lanes.
            lanes = self.axis_names[0]
            if not compat.inside_checked_shard_map() or not compat.in_collective_over(error, lanes):
                raise
            raise errors.lane_collective(name, lanes) from error
        return outputs
