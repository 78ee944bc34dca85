"""What carries lanes: each a device of its own, or all of them one `vmap`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .._base import _compat as compat
from .._base import _errors as errors
from .._base._types import AxisName, Place
from .._resolve._lanes import Lane
from .._resolve._specs import Placement
from ._binding import Binding, OnMesh, OverLanes


@runtime_checkable
class Carrier(Protocol):
    """What `pmap2` and `vmap2` differ in."""

    # Whether a program depends on the shapes of its inputs.
    shaped: bool

    def check(self, transform: str) -> None:
        """Refuse at construction whatever no call could make right."""

    def at(self, axis_name: AxisName, axis: int | None, ndim: int) -> Place:
        """The placement of a leaf that has its lanes on this one of its `ndim` axes."""

    def bind(
        self, name: str, axis_name: AxisName, count: int | None, asked: int | None, fixed: bool
    ) -> Binding:
        """What binds the axis name to `count` lanes.

        `asked` is their number where no input says it or the author did; `fixed`: for inputs of these
        shapes only.
        """

    def alone(self) -> "Carrier":
        """The same on one device."""


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One `vmap` carries all lanes."""

    spmd_axis_name: Any = None

    shaped = False

    def check(self, transform: str) -> None:
        """There is nothing that could be wrong."""

    def at(self, axis_name: AxisName, axis: int | None, ndim: int) -> Place:
        return Lane(axis, frozenset() if axis is None else frozenset([axis_name]))

    def bind(
        self, name: str, axis_name: AxisName, count: int | None, asked: int | None, fixed: bool
    ) -> Binding:
        if count is None:
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

    devices: Sequence[jax.Device] | None = None
    backend: str | None = None

    shaped = True

    def check(self, transform: str) -> None:
        devices, backend = self.devices or (), self.backend
        if backend is not None and any(device.platform != backend for device in devices):
            raise errors.no_such_backend(transform, backend, devices)

    def at(self, axis_name: AxisName, axis: int | None, ndim: int) -> Place:
        if axis is None:
            return Placement(PartitionSpec())
        axis %= ndim
        return Placement(PartitionSpec(*[None] * axis, axis_name), axis=axis)

    def bind(
        self, name: str, axis_name: AxisName, count: int | None, asked: int | None, fixed: bool
    ) -> Binding:
        if taken := compat.manual_axes(jax.sharding.get_abstract_mesh()):
            raise errors.pmap2_inside(name, sorted(taken, key=str))
        found = jax.devices(self.backend) if self.devices is None else list(self.devices)
        lanes = len(found) if count is None else count
        if lanes > len(found):
            raise errors.too_many_lanes(name, lanes, len(found))
        mesh = Mesh(np.array(found[:lanes]), (axis_name,))
        return OnMesh(mesh, (axis_name,), check_vma=True, fixed=True)

    def alone(self) -> Lanes:
        return Lanes()
