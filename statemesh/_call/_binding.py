"""Step 3, what binds the axis names: the devices of a mesh, or the lanes of a `vmap`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._base import _compat as compat
from .._base import _errors as errors
from .._base._types import AxisName
from .._resolve._agreement import Passed
from .._resolve._lanes import FixedLaneLayout, FixedLayout, Lane, LaneLayout, count_lanes
from .._resolve._layout import Layout
from .._resolve._processes import LanesOfProcesses, OwnParts, SpreadLayout, spans_processes
from .._resolve._specs import Placement
from .._varying import FromDataflow, FromTypes, Unchecked, VaryingAxes


@runtime_checkable
class Inputs(Protocol):
    """How the inputs of a program are laid out at every call."""

    placements: Sequence[Any]
    paths: Sequence[str]
    # Inputs that are new arrays inside, made from something else.
    fresh: frozenset[int]

    def check(self, arrays: Sequence[Any]) -> None: ...

    def check_alive(self, given: Sequence[Any]) -> None: ...

    def agree(self, given: Sequence[Any], passed: Callable[[], list[Passed]]) -> None: ...

    def concrete(self, given: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]: ...

    def returned(
        self, given: Sequence[Any], shown: Sequence[Any], forwarded: Iterable[int]
    ) -> Sequence[Any]: ...

    def part_size(self, k: int, x: Any) -> int: ...

    def traced(self, given: Sequence[Any], recorded: bool) -> list[Any]: ...

    def abstract(self, given: Sequence[Any]) -> list[Any]: ...


# The program's arrays as callers have them, each with its place.
Outside = Callable[[Sequence[Any], Sequence[Any]], list[Any]]

# One instance: what it gets of each input; its outputs, and where each of them goes.
Run = Callable[..., tuple[list[Any], Sequence[Any]]]


@runtime_checkable
class Binding(Protocol):
    """What the three mapped calls differ in once it is known where every leaf goes."""

    axis_names: tuple[AxisName, ...]
    # Whether JAX types what varies.
    check_vma: bool
    sizes: Mapping[AxisName, int]
    # Where callers have other arrays than the program: a part of each.
    outside: Outside | None

    def layout(
        self,
        name: str,
        paths: Sequence[str],
        placements: Sequence[Any],
        kinds: Sequence[type],
        strengthen: Sequence[bool],
        stateful: Sequence[bool],
        donating: bool,
    ) -> Inputs: ...

    def varying(self) -> VaryingAxes:
        """How it is known in one run which values differ between instances."""

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        """Where the call must run when another mesh is set than its own."""

    def count(self, name: str, inputs: Inputs, arrays: Sequence[Any]) -> int | None:
        """How many instances there are: of this process."""

    def call(self, run: Run, name: str, inputs: Inputs, arrays: Sequence[Any]) -> list[Any]:
        """Every instance's run; the outputs as they are outside."""


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

    def layout(
        self,
        name: str,
        paths: Sequence[str],
        placements: Sequence[Placement],
        kinds: Sequence[type],
        strengthen: Sequence[bool],
        stateful: Sequence[bool],
        donating: bool,
    ) -> Inputs:
        inputs = paths, placements, kinds, strengthen, stateful, donating
        return self._layout_type()(name, self.mesh, self.axis_names, *inputs)

    def _layout_type(self) -> type[Layout]:
        return SpreadLayout if spans_processes(self.mesh) else Layout

    def varying(self) -> VaryingAxes:
        return FromTypes(self.axis_names) if self.check_vma else Unchecked(self.axis_names)

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self, name: str, inputs: Inputs, arrays: Sequence[Any]) -> int:
        return math.prod(self.sizes[name] for name in self.axis_names)

    def call(self, run: Run, name: str, inputs: Inputs, arrays: Sequence[Any]) -> list[Any]:
        # `shard_map` lays the out specs over the result after it has traced the function. So the
        # list may be filled while tracing, and no second trace is needed to learn the structure.
        out_specs: list[PartitionSpec] = []

        def instance(*shards: Any) -> list[Any]:
            outputs, places = run(*shards)
            out_specs[:] = [where.written for where in places]
            return outputs

        instance.__name__ = instance.__qualname__ = name
        outputs: list[Any] = jax.shard_map(
            instance,
            mesh=self.mesh,
            in_specs=tuple(where.written for where in inputs.placements),
            out_specs=out_specs,
            axis_names=set(self.axis_names),
            check_vma=self.check_vma,
        )(*arrays)
        return outputs


class OnOwnMesh(OnMesh):
    """Instances on a mesh that is theirs, whichever one is set."""

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        return compat.in_mesh(self.mesh, traced)


class OnDevices(OnOwnMesh):
    """Instances that each have one device: lanes, which differ in nothing else from those of a `vmap`.

    **Arguments:**

    - `mesh`: the mesh, of one axis.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, mesh.axis_names, check_vma=False)

    def _layout_type(self) -> type[Layout]:
        return FixedLayout

    def varying(self) -> VaryingAxes:
        return FromDataflow(self.axis_names)


class OnProcesses(OnDevices):
    """Instances on the devices of several processes, each of which has the parts of its own.

    **Arguments:**

    - `mesh`: the mesh, of one axis.
    - `own`: the part of it that is this process's.
    """

    def __init__(self, mesh: Mesh, own: Mesh) -> None:
        super().__init__(mesh)
        self.whole = mesh
        self.own = own
        self.outside = OwnParts(mesh, own)

    def layout(
        self,
        name: str,
        paths: Sequence[str],
        placements: Sequence[Placement],
        kinds: Sequence[type],
        strengthen: Sequence[bool],
        stateful: Sequence[bool],
        donating: bool,
    ) -> Inputs:
        inputs = paths, placements, kinds, strengthen, stateful, donating
        return LanesOfProcesses(name, self.whole, self.own, self.axis_names, *inputs)

    def count(self, name: str, inputs: Inputs, arrays: Sequence[Any]) -> int:
        return self.own.size


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

    def layout(
        self,
        name: str,
        paths: Sequence[str],
        placements: Sequence[Lane],
        kinds: Sequence[type],
        strengthen: Sequence[bool],
        stateful: Sequence[bool],
        donating: bool,
    ) -> Inputs:
        del stateful, donating
        kind = FixedLaneLayout if self.fixed else LaneLayout
        return kind(name, paths, placements, kinds, strengthen)

    def varying(self) -> VaryingAxes:
        return FromTypes(self.axis_names)

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self, name: str, inputs: Inputs, arrays: Sequence[Any]) -> int | None:
        triples = zip(inputs.paths, inputs.placements, arrays, strict=True)
        mapped = [(path, where.axis, x) for path, where, x in triples if where.axis is not None]
        return count_lanes(name, mapped, self.axis_size)

    def call(self, run: Run, name: str, inputs: Inputs, arrays: Sequence[Any]) -> list[Any]:
        # Filled while tracing, as the out specs of a `shard_map` are.
        out_axes: list[int | None] = []

        def lane(*parts: Any) -> list[Any]:
            outputs, places = run(*parts)
            out_axes[:] = [where.axis for where in places]
            return outputs

        lane.__name__ = lane.__qualname__ = name
        mapped = jax.vmap(
            lane,
            in_axes=tuple(where.axis for where in inputs.placements),
            out_axes=out_axes,
            axis_name=self.axis_names[0],
            axis_size=self.count(name, inputs, arrays),
            spmd_axis_name=self.spmd_axis_name,
        )
        try:
            outputs: list[Any] = mapped(*arrays)
        except (AssertionError, ValueError) as error:
            # JAX gives up where a collective over lanes meets the types of a mesh, in no words or in some
            # that say nothing of lanes.
            lanes = self.axis_names[0]
            if not compat.inside_checked_shard_map() or not compat.in_collective_over(error, lanes):
                raise
            raise errors.lane_collective(name, lanes) from error
        return outputs
