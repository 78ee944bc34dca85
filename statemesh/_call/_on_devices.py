"""Step 3 for `pmap2`: every lane runs on a device of its own."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .._base import _compat as compat
from .._base import errors
from .._base._checks import check_text
from .._base._specs import Placement
from .._base._stored import by_fields
from .._base._types import AxisName, DeviceList, Leaf, PyTree, Text
from .._leave._varying import FromDataflow, VaryingAxes
from .._resolve._inputs import Input
from .._resolve._lanes import FixedMeshLayout, count_lanes
from .._resolve._layout import MeshLayout
from .._resolve._processes import LanesOfProcesses, OwnParts, own_devices
from .._resolve._specs import SpecPlacement
from ._binding import Binding, Layout, Mapped
from ._on_mesh import OnOwnMesh
from ._over_lanes import Lanes


@dataclasses.dataclass(frozen=True)
class Devices:
    """Every lane has a device of its own.

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
            raise errors.no_devices(transform, devices)
        if len(set(devices)) < len(devices):
            raise errors.bad_devices(transform, devices)
        if not all(isinstance(device, jax.Device) for device in devices):
            raise errors.bad_devices(transform, devices)
        if backend is not None and any(device.platform != backend for device in devices):
            raise errors.no_such_backend(transform, backend, devices)

    def placement(self, axis_name: AxisName, axis: int | None, ndim: int) -> Placement:
        if axis is None:
            return SpecPlacement(PartitionSpec())
        axis %= ndim
        return SpecPlacement(PartitionSpec(*[None] * axis, axis_name), axis=axis)

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> Binding:
        if taken := compat.manual_axes(jax.sharding.get_abstract_mesh()):
            raise errors.pmap2_inside(name, sorted(taken, key=str))
        found = self._found()
        several = len(own_devices(found)) < len(found)
        # With several processes each passes only a part of the lanes, so the author has to give their number.
        count = asked if several else count_lanes(name, mapped, asked)
        lanes = len(found) if count is None else count
        if lanes == 0:
            raise errors.no_lanes(name, mapped)
        if lanes > len(found):
            raise errors.too_many_lanes(name, lanes, len(found))
        mesh = Mesh(np.array(found[:lanes]), (axis_name,))
        if not several:
            return OnDevices(mesh)
        mine = own_devices(found[:lanes])
        if not mine:
            raise errors.no_own_devices(name, lanes)
        passed = count_lanes(name, mapped, None)
        if passed is not None and passed != len(mine):
            raise errors.process_lanes(name, passed, len(mine))
        return OnProcesses(mesh, Mesh(np.array(mine), (axis_name,)))

    def on_one_device(self) -> Lanes:
        found = self._found()
        if len(own_devices(found)) < len(found):
            raise errors.unsharded_by_one_process()
        return Lanes()

    def _found(self) -> list[jax.Device]:
        if self.devices is not None:
            return list(self.devices)
        try:
            return jax.devices(self.backend)
        except RuntimeError as error:
            raise errors.unknown_backend("pmap2", self.backend, error) from error


class OnDevices(OnOwnMesh):
    """Instances that each have one device. In all else they behave like the lanes of a `vmap`.

    **Arguments:**

    - `mesh`: the mesh, of one axis.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, mesh.axis_names, check_vma=False)

    def _layout_type(self) -> type[MeshLayout]:
        return FixedMeshLayout

    def varying(self) -> VaryingAxes:
        return FromDataflow(self.axis_names)


class OnProcesses(OnDevices):
    """Instances on the devices of several processes. Each process passes and gets its own parts.

    **Arguments:**

    - `mesh`: the mesh, of one axis.
    - `own`: the part of it that is this process's.
    """

    def __init__(self, mesh: Mesh, own: Mesh) -> None:
        super().__init__(mesh)
        self.whole = mesh
        self.own = own
        self.outside = OwnParts(mesh, own)

    def layout(self, name: str, inputs: Sequence[Input], donating: bool) -> Layout:
        return LanesOfProcesses(name, self.whole, self.own, self.axis_names, inputs, donating)

    def count(self, name: str, layout: Layout, arrays: Sequence[Leaf]) -> int:
        return self.own.size
