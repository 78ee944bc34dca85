"""Devices and meshes in a form that can be pickled: by platform and number."""

import dataclasses
from collections.abc import Iterable
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from . import errors
from ._types import Leaf, PyTree


_MeshForm: TypeAlias = tuple[tuple[int, ...], tuple[str, ...], tuple[AxisType, ...]]
"""The shape, axis names and axis types of a mesh."""


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A row of devices, or a mesh of them."""

    platform: str
    numbers: tuple[int, ...]
    mesh: _MeshForm | None

    def found(self) -> PyTree:
        """The same devices of this process's JAX."""
        there = {device.id: device for device in jax.devices(self.platform)}
        if missing := [number for number in self.numbers if number not in there]:
            raise errors.devices_not_here(self.platform, missing, sorted(there))
        devices = [there[number] for number in self.numbers]
        if self.mesh is None:
            return tuple(devices)
        shape, names, types = self.mesh
        return Mesh(np.array(devices).reshape(shape), names, axis_types=types)


def by_fields(value: Leaf) -> tuple[Leaf, ...]:
    """The result of `__reduce__` for a dataclass of which a field may hold a mesh or devices."""
    fields = {f.name: _stored(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return _remade, (type(value), fields)


def _remade(cls: type, fields: dict[str, object]) -> PyTree:
    found = {k: v.found() if isinstance(v, _Stored) else v for k, v in fields.items()}
    return cls(**found)


def _stored(value: object) -> PyTree:
    if isinstance(value, Mesh) and not value.empty:
        shape = value.devices.shape
        return _of(value.devices.flat, (shape, value.axis_names, value.axis_types))
    if isinstance(value, tuple) and value and all(isinstance(x, jax.Device) for x in value):
        return _of(value, None)
    return value


def _of(
    devices: Iterable[jax.Device],
    mesh: _MeshForm | None,
) -> _Stored:
    several = list(devices)
    return _Stored(several[0].platform, tuple(device.id for device in several), mesh)
