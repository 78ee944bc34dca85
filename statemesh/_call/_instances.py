"""Step 3, what binds the axis names: the devices of a mesh, lanes on devices, or the lanes of one `vmap`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._base import _errors as errors
from .._base._checks import check_named_once, check_text
from .._base._errors import BatchAxisError, StatemeshError, counted, error_listing, quoted
from .._base._specs import Placement
from .._base._trees import describe
from .._base._types import (
    AxisName,
    DeviceList,
    Leaf,
    PyTree,
    Text,
    flat_names,
    is_axis_name,
)
from .._jax import _compat as compat
from ._lanes import FixedLaneLayout, FixedMeshLayout, LaneLayout, LanePlacement, count_lanes
from ._layout import MeshLayout
from ._mesh import by_fields
from ._placement import Input
from ._processes import LanesOfProcesses, OwnParts, own_devices
from ._specs import SpecPlacement
from ._varying import FromDataflow, FromTypes, VaryingAxes


Layout: TypeAlias = MeshLayout | LaneLayout
"""How the inputs of a program are laid out at every call."""

Outside: TypeAlias = Callable[[Sequence[Leaf], Sequence[Placement]], list[Leaf]]
"""Takes the program's outputs and their placements; returns the parts of this process."""

Run: TypeAlias = Callable[..., tuple[list[Leaf], Sequence[Placement]]]
"""Runs one instance on its parts of the inputs; returns its outputs and their placements."""

Mapped: TypeAlias = Sequence[tuple[str, int, Any]]
"""The path, the axis and the array of each leaf that is mapped over lanes."""


class OnMesh:
    """Instances on the devices of a mesh.

    **Arguments:**

    - `mesh`: the mesh.
    - `axis_names`: the axes that are mapped over.
    - `check_vma`: whether types say what varies.
    - `is_own`: whether it is a mesh of the call's own, whichever one is set.

    **Attributes:**

    - `outside`: set where other processes hold a part of each output.
    """

    outside: Outside | None = None

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        axis_names: tuple[AxisName, ...],
        check_vma: bool,
        is_own: bool,
    ) -> None:
        self.mesh = mesh
        self.axis_names = axis_names
        self.check_vma = check_vma
        self.is_own = is_own
        self.sizes: Mapping[AxisName, int] = mesh.shape

    def layout(self, name: str, inputs: Sequence[Input], donating: bool) -> Layout:
        """How the inputs are laid out."""
        return MeshLayout(name, self.mesh, self.axis_names, inputs, donating)

    def varying(self) -> VaryingAxes:
        """How one run learns which values differ between instances."""
        if self.check_vma:
            return FromTypes(self.axis_names)
        return FromDataflow(self.axis_names, is_known=False)

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        """The context to call in when another mesh is set than the call's own."""
        return compat.in_mesh(self.mesh, traced) if self.is_own else nullcontext()

    def count(self, name: str, layout: Layout, arrays: Sequence[Leaf]) -> int | None:
        """The number of instances in this process."""
        return math.prod(self.sizes[name] for name in self.axis_names)

    def call(self, run: Run, name: str, layout: Layout, arrays: Sequence[Leaf]) -> list[Leaf]:
        """Run every instance, and put its outputs together."""
        # `shard_map` reads the out specs after it has traced the function. So the list may be filled
        # while tracing, and no second trace is needed to learn the structure of the result.
        out_specs: list[PartitionSpec] = []

        def instance(*shards: Leaf) -> list[Leaf]:
            outputs, placements = run(*shards)
            out_specs[:] = [placement.written for placement in placements]
            return outputs

        instance.__name__ = instance.__qualname__ = name
        outputs: list[Leaf] = jax.shard_map(
            instance,
            mesh=self.mesh,
            in_specs=tuple(x.placement.written for x in layout.inputs),
            out_specs=out_specs,
            axis_names=set(self.axis_names),
            check_vma=self.check_vma,
        )(*arrays)
        return outputs


@dataclasses.dataclass(frozen=True)
class Lanes:
    """What `vmap2` runs lanes on: one `jax.vmap` carries all of them.

    **Attributes:**

    - `spmd_axis_name`: the mesh axes over which the compiler is to spread them, as for `jax.vmap`.
    - `axis_name`, `axis_size`: of the lanes of one call, what collectives call them, and how many there are
        to be; `None` where the inputs alone say it.
    - `fixed`: whether the program is for inputs of one shape only.
    - `has_mesh`: whether the lanes have a mesh. Their number, and so the program, then depends on the inputs'
        shapes.
    """

    spmd_axis_name: Any = None
    axis_name: Any = None
    axis_size: int | None = None
    fixed: bool = False

    has_mesh: ClassVar[bool] = False
    outside: ClassVar[None] = None
    sizes: ClassVar[Mapping[AxisName, int]] = {}

    def check(self, transform: str) -> None:
        """Refuse at construction whatever no call could make right."""
        names = flat_names(self.spmd_axis_name)
        if not all(map(is_axis_name, names)):
            raise errors.invalid_argument(transform, "spmd_axis_name", self.spmd_axis_name)
        check_named_once(transform, "spmd_axis_name", names)

    def placement(self, axis_name: AxisName, axis: int | None, ndim: int) -> Placement:
        """The placement of a leaf that has its lanes on this one of its `ndim` axes."""
        return LanePlacement(axis, frozenset() if axis is None else frozenset([axis_name]))

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> "Lanes":
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
        return Lanes(self.spmd_axis_name, axis_name, asked, fixed)

    def on_one_device(self) -> "Lanes":
        """What the same lanes run on, on one device."""
        return self

    def layout(self, name: str, inputs: Sequence[Input], donating: bool) -> Layout:
        return (FixedLaneLayout if self.fixed else LaneLayout)(name, inputs)

    def varying(self) -> VaryingAxes:
        return FromTypes((self.axis_name,))

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self, name: str, layout: Layout, arrays: Sequence[Leaf]) -> int | None:
        mapped = [
            (source.path, source.placement.axis, x)
            for source, x in zip(layout.inputs, arrays, strict=True)
            if source.placement.axis is not None
        ]
        return count_lanes(name, mapped, self.axis_size)

    def call(self, run: Run, name: str, layout: Layout, arrays: Sequence[Leaf]) -> list[Leaf]:
        # Filled while tracing, as the out specs of a `shard_map` are.
        out_axes: list[int | None] = []

        def lane(*parts: Leaf) -> list[Leaf]:
            outputs, placements = run(*parts)
            out_axes[:] = [placement.axis for placement in placements]
            return outputs

        lane.__name__ = lane.__qualname__ = name
        mapped = jax.vmap(
            lane,
            in_axes=tuple(x.placement.axis for x in layout.inputs),
            out_axes=out_axes,
            axis_name=self.axis_name,
            axis_size=self.count(name, layout, arrays),
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
                f"{name}: inside a checked shard_map JAX has no collectives over the lanes of a vmap "
                f"({lanes!r}). Write instead:\n"
                f"  1. statemesh's own, which run over lanes there: sm.psum(x, {lanes!r}), or sm.pmean, "
                "sm.pmax, sm.pmin, sm.all_gather, sm.axis_index;\n"
                "  2. for a state: State(value, reduce='mean'), or 'sum', 'max', 'min': statemesh merges "
                "the lanes' writes;\n"
                "  3. for a result: return it with out_axes=0 and reduce its lane axis after vmap2, as "
                "with jnp.sum(out, axis=0)."
            ) from error
        return outputs


@dataclasses.dataclass(frozen=True)
class Devices:
    """What `pmap2` runs lanes on: every lane has a device of its own.

    **Attributes:**

    - `devices`: the devices in the order of the lanes; `None` for all there are.
    - `backend`: of which platform; `None` for the default one.
    """

    devices: DeviceList | None = None
    backend: Text = None

    has_mesh = True

    def __reduce__(self) -> tuple[PyTree, ...]:
        return by_fields(self)

    def check(self, transform: str) -> None:
        devices, backend = self.devices, self.backend
        check_text(transform, "backend", backend)
        if devices is None:
            return
        if not devices:
            raise StatemeshError(
                f"{transform}: devices={devices!r} is empty. Leave it out, or pass some, as in "
                "devices=jax.devices()[:4]."
            )
        differ = len(set(devices)) == len(devices)
        if not (differ and all(isinstance(device, jax.Device) for device in devices)):
            raise StatemeshError(
                f"{transform}: devices={devices!r} must be different jax.Devices, as in "
                "devices=jax.devices()[:4]."
            )
        if backend is not None and any(device.platform != backend for device in devices):
            raise StatemeshError(
                f"{transform}: devices={list(devices)!r} are not of backend={backend!r}. Give only one of "
                "the two."
            )

    def placement(self, axis_name: AxisName, axis: int | None, ndim: int) -> Placement:
        if axis is None:
            return SpecPlacement(PartitionSpec())
        axis %= ndim
        return SpecPlacement(PartitionSpec(*[None] * axis, axis_name), axis=axis)

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> OnMesh:
        if taken := compat.manual_axes(jax.sharding.get_abstract_mesh()):
            raise BatchAxisError(
                f"{name}: pmap2 gives each lane a device, but an enclosing mapped call uses the devices "
                f"already (axes {quoted(sorted(taken, key=str))}). Use vmap2 inside it."
            )
        devices = self._all()
        spread = len(own_devices(devices)) < len(devices)
        # With several processes each passes only a part of the lanes, so the author has to give their number.
        count = asked if spread else count_lanes(name, mapped, asked)
        lanes = len(devices) if count is None else count
        if lanes == 0:
            raise error_listing(
                BatchAxisError,
                f"{name}: there are no lanes",
                [f"{path}: {describe(x)} has 0 on axis {axis}" for path, axis, x in mapped[:3]],
                "Map over an axis of size 1 or more.",
            )
        if lanes > len(devices):
            error = BatchAxisError(
                f"{name}: {counted(lanes, 'lane')} on {counted(len(devices), 'device')}; pmap2 gives every "
                f"lane a device of its own. Use {len(devices)} at most, each with a part of the batch, as in "
                f"x.reshape({len(devices)}, -1, *x.shape[1:]); or use vmap2 or shard_map."
            )
            error.has_too_many_lanes = True
            raise error
        mesh = Mesh(np.array(devices[:lanes]), (axis_name,))
        if not spread:
            return OnDevices(mesh)
        mine = own_devices(devices[:lanes])
        if not mine:
            raise BatchAxisError(
                f"{name}: none of the {counted(lanes, 'device')} belongs to this process. Only processes "
                "that own some of them can make the call."
            )
        passed = count_lanes(name, mapped, None)
        if passed is not None and passed != len(mine):
            raise BatchAxisError(
                f"{name}: this process passed {counted(passed, 'lane')}, but has "
                f"{counted(len(mine), 'device')}. With several processes, each passes one lane for each of "
                "its own devices, and gets these lanes back."
            )
        return OnProcesses(mesh, Mesh(np.array(mine), (axis_name,)))

    def on_one_device(self) -> Lanes:
        devices = self._all()
        if len(own_devices(devices)) < len(devices):
            raise BatchAxisError(
                "unsharded: each of several processes has only its own lanes. Gather them, as with "
                "jax.experimental.multihost_utils.process_allgather, and call vmap2."
            )
        return Lanes()

    def _all(self) -> list[jax.Device]:
        if self.devices is not None:
            return list(self.devices)
        try:
            return jax.devices(self.backend)
        except RuntimeError as error:
            raise StatemeshError(
                f"pmap2: backend={self.backend!r} cannot be used: {error}"
            ) from error


Carrier: TypeAlias = Lanes | Devices
Binding: TypeAlias = OnMesh | Lanes
"""What binds the axis names once the placement of every leaf is known."""


class OnDevices(OnMesh):
    """Instances that each have one device. In all else they behave like the lanes of a `vmap`.

    **Arguments:**

    - `mesh`: the mesh, of one axis.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, mesh.axis_names, check_vma=False, is_own=True)

    def layout(self, name: str, inputs: Sequence[Input], donating: bool) -> Layout:
        return FixedMeshLayout(name, self.mesh, self.axis_names, inputs, donating)

    def varying(self) -> VaryingAxes:
        return FromDataflow(self.axis_names, is_known=True)


class OnProcesses(OnDevices):
    """Instances on the devices of several processes. Each process passes and gets its own parts.

    **Arguments:**

    - `mesh`: the mesh, of one axis.
    - `own`: the part of it that is this process's.
    """

    def __init__(self, mesh: Mesh, own: Mesh) -> None:
        super().__init__(mesh)
        self.whole = mesh
        self.own_mesh = own
        self.outside = OwnParts(mesh, own)

    def layout(self, name: str, inputs: Sequence[Input], donating: bool) -> Layout:
        return LanesOfProcesses(name, self.whole, self.own_mesh, self.axis_names, inputs, donating)

    def count(self, name: str, layout: Layout, arrays: Sequence[Leaf]) -> int:
        return self.own_mesh.size
