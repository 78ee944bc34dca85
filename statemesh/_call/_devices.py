"""The devices of `pmap2`: each lane has one, of one process or of several."""

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._base._checks import check_text
from .._base._errors import BatchAxisError, StatemeshError, counted, error_listing, quoted
from .._base._specs import Placement
from .._base._trees import describe
from .._base._types import AxisName, DeviceList, Leaf, PyTree, Text
from .._jax import _compat as compat
from ._agreement import Passed, array_passed, is_own
from ._arguments import Call, Input, check_alive
from ._lanes import Lanes, Mapped, OneShape, count_lanes, fits
from ._layout import OnMesh
from ._mesh_and_specs import SpecPlacement, by_fields
from ._tracing import FromDataflow, VaryingAxes


def own_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Those of this process."""
    mine = jax.process_index(devices[0].platform) if devices else 0
    return [device for device in devices if device.process_index == mine]


class OnDevices(OneShape, OnMesh):
    """Where a program runs: lanes that each have a device. In all else they are like the lanes of a `vmap`.

    **Arguments:**

    - `fun_name`: for messages.
    - `mesh`: the mesh, of one axis.
    """

    def __init__(self, fun_name: str, mesh: Mesh) -> None:
        super().__init__(fun_name, mesh, mesh.axis_names, check_vma=False)

    def varying(self) -> VaryingAxes:
        return FromDataflow(self.axis_names, is_known=True)


class _LocalDevices(OnDevices):
    """The devices of this process, with its parts of the inputs."""

    def _moved(self, arrays: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
        check_alive(self.fun_name, self.inputs, arrays)
        arrays = list(arrays)
        for k in self.on_device:
            x = arrays[k]
            # All processes hold the same value, as a `shard_map` returns it.
            if not x.is_fully_addressable and x.is_fully_replicated:
                arrays[k] = _rewrapped(x, x.shape, self.targets[k])
        return super()._moved(arrays)


class OnProcesses(OnDevices):
    """Lanes on the devices of several processes.

    Every process passes the lanes of its devices, and whole what all lanes share. It gets its own parts.

    **Arguments:**

    - `fun_name`, `mesh`: for all processes.
    - `local_mesh`: the part of the mesh that is this process's.
    """

    spread = True

    def __init__(self, fun_name: str, mesh: Mesh, local_mesh: Mesh) -> None:
        super().__init__(fun_name, mesh)
        self.local = _LocalDevices(fun_name, local_mesh)
        # The same objects every time, because a layout recognises shardings by identity.
        self.local_targets: dict[Placement, NamedSharding] = {}

    def expect(self, inputs: Sequence[Input], donating: bool) -> None:
        super().expect(inputs, donating)
        self.local.expect(inputs, donating)

    def concrete(self, arrays: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
        ready, shown = self.local.concrete(arrays)
        # An array that is passed twice must stay one array.
        whole: dict[tuple[int, Placement], Any] = {}
        keys = [(id(x), leaf.placement) for x, leaf in zip(ready, self.inputs, strict=True)]
        for key, x, target in zip(keys, ready, self.targets, strict=True):
            if key not in whole:
                whole[key] = x
                if target is not None:
                    whole[key] = _rewrapped(x, self._whole_shape(x, key[1]), target)
        return [whole[key] for key in keys], shown

    def passed_alike(self, arrays: Sequence[Leaf]) -> list[Passed]:
        return [
            array_passed(leaf.path, x)
            for leaf, x in zip(self.inputs, arrays, strict=True)
            if leaf.placement.axis is None and hasattr(x, "dtype") and is_own(x)
        ]

    def returned(
        self, arrays: Sequence[Leaf], shown: Sequence[Leaf], forwarded: Iterable[int]
    ) -> Sequence[Leaf]:
        return self.local.returned(arrays, shown, forwarded)

    def placed(self, arrays: Sequence[Leaf]) -> Sequence[Leaf]:
        return self.local.placed(arrays)

    def traced(self, arrays: Sequence[Leaf], recorded: bool) -> list[Leaf]:
        raise BatchAxisError(
            f"{self.fun_name}: pmap2 over the devices of several processes cannot be traced, as by jit, "
            "grad, vmap or scan around it. It takes and gives this process's lanes, which exist only while "
            "it runs. Call it outside of them, and transform the function that it maps; or use shard_map."
        )

    def abstract(self, arrays: Sequence[Leaf]) -> list[Leaf]:
        parts = self.local.abstract(arrays)
        for k, (leaf, target) in enumerate(zip(self.inputs, self.targets, strict=True)):
            if target is not None:
                shape = self._whole_shape(parts[k], leaf.placement)
                parts[k] = jax.ShapeDtypeStruct(shape, parts[k].dtype, sharding=target)
        return parts

    def count(self, arrays: Sequence[Leaf]) -> int:
        return self.local.mesh.size

    def own_parts(self, outputs: list[Leaf], placements: Sequence[Placement]) -> list[Leaf]:
        parts = list(outputs)
        for k, (x, placement) in enumerate(zip(outputs, placements, strict=True)):
            if isinstance(x, jax.Array):
                if placement not in self.local_targets:
                    sharding = NamedSharding(self.local.mesh, placement.spec)
                    self.local_targets[placement] = sharding
                shape = _resized(x.shape, placement, self.mesh.size, self.local.mesh.size)
                parts[k] = _rewrapped(x, shape, self.local_targets[placement])
        return parts

    def _whole_shape(self, x: Leaf, placement: Placement) -> tuple[int, ...]:
        """The shape of the array of all processes, of which `x` is this one's part."""
        return _resized(x.shape, placement, self.local.mesh.size, self.mesh.size)


def _resized(
    shape: tuple[int, ...], placement: Placement, before: int, after: int
) -> tuple[int, ...]:
    """The shape with so many lanes `after` where there were as many `before`."""
    if placement.axis is None:
        return shape
    size = shape[placement.axis] * after // before
    return (*shape[: placement.axis], size, *shape[placement.axis + 1 :])


def _rewrapped(x: jax.Array, shape: tuple[int, ...], target: NamedSharding) -> jax.Array:
    """The buffers of `x` as another array: nothing is copied."""
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, target, parts)


def as_shapes(shapes: Any) -> tuple[tuple[int, ...] | None, ...] | None:
    """`global_arg_shapes`, as users write them, in their one form."""
    if shapes is None:
        return None
    try:
        return tuple(
            None if shape is None else tuple(map(operator.index, shape)) for shape in shapes
        )
    except TypeError:
        raise TypeError(
            f"global_arg_shapes={shapes!r} is not a shape (a tuple of ints) or None for each positional "
            "argument."
        ) from None


def check_global_shapes(
    name: str,
    shapes: Sequence[tuple[int, ...] | None],
    call: Call,
    axes: Mapping[int, int | None],
    lanes: int,
) -> None:
    """Refuse arguments that are not this process's part of the global shapes.

    **Arguments:**

    - `shapes`: one for each positional argument; `None` where nothing is said.
    - `axes`: the mapped axis of every leaf, by its position.
    - `lanes`: how many there are in all processes.
    """
    if len(shapes) != len(call.args):
        raise BatchAxisError(
            f"{name} was called with {counted(len(call.args), 'positional argument')}, but "
            f"global_arg_shapes has {counted(len(shapes), 'entry', 'entries')}. It has one for each "
            "positional argument: its global shape, or None."
        )
    items: list[str] = []
    for i, (shape, value) in enumerate(zip(shapes, call.args, strict=True)):
        if shape is None:
            continue
        positions = [p for unit in call.units[i] for p in unit.positions]
        part = shape
        if len(positions) == 1 and positions[0] in axes:
            (leaf,) = jax.tree.leaves(value)
            part = _own_part(shape, np.shape(leaf), axes[positions[0]], lanes)
            if part == np.shape(leaf):
                continue
        items.append(
            f"{call.names[i]}: {describe(value)} here, but global_arg_shapes has {shape}, of which this "
            f"process's part is {part}"
        )
    if items:
        raise error_listing(
            BatchAxisError,
            f"{name}: arguments do not fit global_arg_shapes",
            items,
            "A global shape is that of one array, with the lanes of all processes on the mapped axis; give "
            "None for any other argument.",
        )


def _own_part(
    whole: tuple[int, ...], shape: tuple[int, ...], axis: int | None, lanes: int
) -> tuple[int, ...]:
    """What this process has of an array with so many lanes in all, if it passes an array of this shape."""
    if axis is None or not fits(axis, len(whole)):
        return whole
    at = axis % len(whole)
    # Rounded up, so that the part of a wrong number of lanes never fits.
    share, rest = divmod(whole[at] * shape[axis], lanes)
    if rest and whole[at] > lanes:
        share += 1
    return (*whole[:at], share, *whole[at + 1 :])


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
            error = BatchAxisError(
                f"{name}: {counted(lanes, 'lane')} on {counted(len(devices), 'device')}; pmap2 gives every "
                f"lane a device of its own. Use {len(devices)} at most, each with a part of the batch, as in "
                f"x.reshape({len(devices)}, -1, *x.shape[1:]); or use vmap2 or shard_map."
            )
            error.has_too_many_lanes = True
            raise error
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
