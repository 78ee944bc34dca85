"""Step 3 for `shard_map`: instances on the devices of a mesh."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._base import _compat as compat
from .._base._types import AxisName, Leaf
from .._leave._varying import FromTypes, Unchecked, VaryingAxes
from .._resolve._inputs import Input
from .._resolve._layout import MeshLayout
from .._resolve._processes import SpreadLayout, spans_processes
from ._binding import Layout, Outside, Run


class OnMesh:
    """Instances on the devices of a mesh.

    **Arguments:**

    - `mesh`: the mesh.
    - `axis_names`: the axes that are mapped over.
    - `check_vma`: whether types say what varies.
    """

    outside: Outside | None = None

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        axis_names: tuple[AxisName, ...],
        check_vma: bool,
    ) -> None:
        self.mesh = mesh
        self.axis_names = axis_names
        self.check_vma = check_vma
        self.sizes: Mapping[AxisName, int] = mesh.shape

    def layout(self, name: str, inputs: Sequence[Input], donating: bool) -> Layout:
        return self._layout_type()(name, self.mesh, self.axis_names, inputs, donating)

    def _layout_type(self) -> type[MeshLayout]:
        return SpreadLayout if spans_processes(self.mesh) else MeshLayout

    def varying(self) -> VaryingAxes:
        return FromTypes(self.axis_names) if self.check_vma else Unchecked(self.axis_names)

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self, name: str, layout: Layout, arrays: Sequence[Leaf]) -> int:
        return math.prod(self.sizes[name] for name in self.axis_names)

    def call(self, run: Run, name: str, layout: Layout, arrays: Sequence[Leaf]) -> list[Leaf]:
        # `shard_map` reads the out specs after it has traced the function. So the list may be filled
        # while tracing, and no second trace is needed to learn the structure of the result.
        out_specs: list[PartitionSpec] = []

        def instance(*shards: Leaf) -> list[Leaf]:
            outputs, placements = run(*shards)
            out_specs[:] = [where.written for where in placements]
            return outputs

        instance.__name__ = instance.__qualname__ = name
        outputs: list[Leaf] = jax.shard_map(
            instance,
            mesh=self.mesh,
            in_specs=tuple(one.placement.written for one in layout.inputs),
            out_specs=out_specs,
            axis_names=set(self.axis_names),
            check_vma=self.check_vma,
        )(*arrays)
        return outputs


class OnOwnMesh(OnMesh):
    """Instances on a mesh of their own, whichever mesh is set."""

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        return compat.in_mesh(self.mesh, traced)
