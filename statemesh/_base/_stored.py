"""Devices and meshes in a form that can be pickled: by platform and number."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from . import errors


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Devices, or the mesh that they make."""

    platform: str
    numbers: tuple[int, ...]
    # Of a mesh its shape, axis names and axis types; `None` for devices in a row.
    mesh: tuple[Any, Any, Any] | None

    def found(self) -> Any:
        """The same devices of this process's JAX."""
        there = {device.id: device for device in jax.devices(self.platform)}
        if missing := [number for number in self.numbers if number not in there]:
            raise errors.devices_not_here(self.platform, missing, sorted(there))
        devices = [there[number] for number in self.numbers]
        if self.mesh is None:
            return tuple(devices)
        shape, names, types = self.mesh
        return Mesh(np.array(devices).reshape(shape), names, axis_types=types)


def by_fields(value: Any) -> tuple[Any, ...]:
    """What a dataclass returns from `__reduce__` if a field may hold a mesh or devices."""
    fields = {f.name: _stored(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return _remade, (type(value), fields)


def _remade(cls: type, fields: dict[str, Any]) -> Any:
    found = {k: v.found() if isinstance(v, _Stored) else v for k, v in fields.items()}
    return cls(**found)


def _stored(value: Any) -> Any:
    if isinstance(value, Mesh) and not value.empty:
        shape = value.devices.shape
        return _of(value.devices.flat, (shape, value.axis_names, value.axis_types))
    if isinstance(value, tuple) and value and all(isinstance(x, jax.Device) for x in value):
        return _of(value, None)
    return value


def _of(devices: Any, mesh: tuple[Any, Any, Any] | None) -> _Stored:
    several = list(devices)
    return _Stored(several[0].platform, tuple(device.id for device in several), mesh)
