"""Step 2, what lanes run on: the devices of a mesh, or one `vmap`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .._base import _errors as errors
from .._base._checks import check_named_once, check_text
from .._base._errors import BatchAxisError, StatemeshError, counted, error_listing, quoted
from .._base._specs import Placement
from .._base._trees import describe
from .._base._types import (
    AxisName,
    DeviceList,
    PyTree,
    Text,
    flat_names,
    is_axis_name,
)
from .._jax import _compat as compat
from ._lanes import LanePlacement, OnLanes, count_lanes
from ._layout import OnMesh
from ._mesh import by_fields
from ._processes import OnDevices, OnProcesses, own_devices
from ._specs import SpecPlacement


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
        check_text(transform, "backend", backend, "the name of a platform, as in backend='cpu'")
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
    ) -> OnDevices:
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
            raise BatchAxisError(
                f"{name}: {counted(lanes, 'lane')} on {counted(len(devices), 'device')}; pmap2 gives every "
                f"lane a device of its own. Use {len(devices)} at most, each with a part of the batch, as in "
                f"x.reshape({len(devices)}, -1, *x.shape[1:]); or use vmap2 or shard_map."
            )
        mesh = Mesh(np.array(devices[:lanes]), (axis_name,))
        if not spread:
            return OnDevices(name, mesh)
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
        return OnProcesses(name, mesh, Mesh(np.array(mine), (axis_name,)))

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
Layout: TypeAlias = OnMesh | OnLanes
"""Where a program runs, once the placement of every leaf is known."""
