"""What carries lanes: each a device of its own, or all of them one `vmap`."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .._base import _compat as compat
from .._base import errors
from .._base._checks import check_text
from .._base._stored import by_fields
from .._base._types import AxisName, DeviceList, Place, Text
from .._resolve._lanes import Lane, count_lanes
from .._resolve._processes import own_devices
from .._resolve._specs import Placement
from ._binding import Binding, OnDevices, OnProcesses, OverLanes


# Path, axis and array of each leaf that is mapped.
Mapped = Sequence[tuple[str, int, Any]]


@runtime_checkable
class Carrier(Protocol):
    """What `pmap2` and `vmap2` differ in."""

    # Whether the lanes have a mesh. Then a program depends on the shapes of its inputs: they say its size.
    has_mesh: bool

    def check(self, transform: str) -> None:
        """Refuse at construction whatever no call could make right."""

    def at(self, axis_name: AxisName, axis: int | None, ndim: int) -> Place:
        """The placement of a leaf that has its lanes on this one of its `ndim` axes."""

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> Binding:
        """What binds the axis name to the lanes of what is mapped.

        `asked` is their number where no input says it or the author did; `fixed`: for inputs of these
        shapes only.
        """

    def alone(self) -> "Carrier":
        """The same on one device."""


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One `vmap` carries all lanes."""

    spmd_axis_name: Any = None

    has_mesh = False

    def check(self, transform: str) -> None:
        if self.spmd_axis_name is not None and not isinstance(self.spmd_axis_name, Hashable):
            raise errors.invalid_argument(transform, "spmd_axis_name", self.spmd_axis_name)

    def at(self, axis_name: AxisName, axis: int | None, ndim: int) -> Place:
        return Lane(axis, frozenset() if axis is None else frozenset([axis_name]))

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> Binding:
        if count_lanes(name, mapped, asked) is None:
            raise errors.nothing_to_infer(name)
        if axis_name in compat.manual_axes(jax.sharding.get_abstract_mesh()):
            raise errors.lane_name_taken(name, axis_name)
        return OverLanes(axis_name, asked, self.spmd_axis_name, fixed)

    def alone(self) -> "Lanes":
        return self


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

    def __reduce__(self) -> tuple[Any, ...]:
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

    def at(self, axis_name: AxisName, axis: int | None, ndim: int) -> Place:
        if axis is None:
            return Placement(PartitionSpec())
        axis %= ndim
        return Placement(PartitionSpec(*[None] * axis, axis_name), axis=axis)

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> Binding:
        if taken := compat.manual_axes(jax.sharding.get_abstract_mesh()):
            raise errors.pmap2_inside(name, sorted(taken, key=str))
        found = self._found()
        several = len(own_devices(found)) < len(found)
        # With several processes each passes a part of the lanes: only the author can say them all.
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

    def alone(self) -> Lanes:
        found = self._found()
        if len(own_devices(found)) < len(found):
            raise errors.unsharded_by_one_process()
        return Lanes()

    def _found(self) -> list[jax.Device]:
        return jax.devices(self.backend) if self.devices is None else list(self.devices)
