"""Step 3, what binds the axis names: the devices of a mesh, lanes on devices, or the lanes of one `vmap`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._base import _errors as errors
from .._base._checks import check_named_once, check_text
from .._base._errors import (
    BatchAxisError,
    StatemeshError,
    counted,
    error_listing,
    quoted,
)
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
from ._lanes import (
    FixedLaneLayout,
    FixedMeshLayout,
    LaneLayout,
    LanePlacement,
    count_lanes,
)
from ._layout import MeshLayout
from ._mesh import by_fields
from ._placement import Input
from ._processes import (
    LanesOfProcesses,
    OwnParts,
    SpreadLayout,
    own_devices,
    spans_processes,
)
from ._rules import Binding, Layout, Mapped, Outside, Run
from ._specs import SpecPlacement
from ._varying import FromDataflow, FromTypes, VaryingAxes


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
        if self.check_vma:
            return FromTypes(self.axis_names)
        return FromDataflow(self.axis_names, is_known=False)

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
            out_specs[:] = [placement.written for placement in placements]
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


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One `vmap` carries all lanes."""

    spmd_axis_name: Any = None

    has_mesh = False

    def check(self, transform: str) -> None:
        names = flat_names(self.spmd_axis_name)
        if not all(map(is_axis_name, names)):
            raise errors.invalid_argument(transform, "spmd_axis_name", self.spmd_axis_name)
        check_named_once(transform, "spmd_axis_name", names)

    def placement(self, axis_name: AxisName, axis: int | None, ndim: int) -> Placement:
        return LanePlacement(axis, frozenset() if axis is None else frozenset([axis_name]))

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> Binding:
        if count_lanes(name, mapped, asked) is None:
            raise _nothing_to_infer(name)
        if axis_name in compat.manual_axes(jax.sharding.get_abstract_mesh()):
            raise _lane_name_taken(name, axis_name)
        return OverLanes(axis_name, asked, self.spmd_axis_name, fixed)

    def on_one_device(self) -> "Lanes":
        return self


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

    def layout(self, name: str, inputs: Sequence[Input], donating: bool) -> Layout:
        return (FixedLaneLayout if self.fixed else LaneLayout)(name, inputs)

    def varying(self) -> VaryingAxes:
        return FromTypes(self.axis_names)

    def context(self, traced: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self, name: str, layout: Layout, arrays: Sequence[Leaf]) -> int | None:
        mapped = [
            (one.path, one.placement.axis, x)
            for one, x in zip(layout.inputs, arrays, strict=True)
            if one.placement.axis is not None
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
            in_axes=tuple(one.placement.axis for one in layout.inputs),
            out_axes=out_axes,
            axis_name=self.axis_names[0],
            axis_size=self.count(name, layout, arrays),
            spmd_axis_name=self.spmd_axis_name,
        )
        try:
            outputs: list[Leaf] = mapped(*arrays)
        except (AssertionError, ValueError) as error:
            # A collective over lanes fails where a mesh types what varies. JAX says so without words, or in
            # words that do not mention lanes.
            lanes = self.axis_names[0]
            if not compat.inside_checked_shard_map() or not compat.in_collective_over(error, lanes):
                raise
            raise _lane_collective(name, lanes) from error
        return outputs


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
            raise _no_devices(transform, devices)
        if len(set(devices)) < len(devices):
            raise _bad_devices(transform, devices)
        if not all(isinstance(device, jax.Device) for device in devices):
            raise _bad_devices(transform, devices)
        if backend is not None and any(device.platform != backend for device in devices):
            raise _no_such_backend(transform, backend, devices)

    def placement(self, axis_name: AxisName, axis: int | None, ndim: int) -> Placement:
        if axis is None:
            return SpecPlacement(PartitionSpec())
        axis %= ndim
        return SpecPlacement(PartitionSpec(*[None] * axis, axis_name), axis=axis)

    def bind(
        self, name: str, axis_name: AxisName, mapped: Mapped, asked: int | None, fixed: bool
    ) -> Binding:
        if taken := compat.manual_axes(jax.sharding.get_abstract_mesh()):
            raise _pmap2_inside(name, sorted(taken, key=str))
        found = self._found()
        several = len(own_devices(found)) < len(found)
        # With several processes each passes only a part of the lanes, so the author has to give their number.
        count = asked if several else count_lanes(name, mapped, asked)
        lanes = len(found) if count is None else count
        if lanes == 0:
            raise _no_lanes(name, mapped)
        if lanes > len(found):
            raise _too_many_lanes(name, lanes, len(found))
        mesh = Mesh(np.array(found[:lanes]), (axis_name,))
        if not several:
            return OnDevices(mesh)
        mine = own_devices(found[:lanes])
        if not mine:
            raise _no_own_devices(name, lanes)
        passed = count_lanes(name, mapped, None)
        if passed is not None and passed != len(mine):
            raise _process_lanes(name, passed, len(mine))
        return OnProcesses(mesh, Mesh(np.array(mine), (axis_name,)))

    def on_one_device(self) -> Lanes:
        found = self._found()
        if len(own_devices(found)) < len(found):
            raise _unsharded_by_one_process()
        return Lanes()

    def _found(self) -> list[jax.Device]:
        if self.devices is not None:
            return list(self.devices)
        try:
            return jax.devices(self.backend)
        except RuntimeError as error:
            raise _unknown_backend("pmap2", self.backend, error) from error


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
        self.own = own
        self.outside = OwnParts(mesh, own)

    def layout(self, name: str, inputs: Sequence[Input], donating: bool) -> Layout:
        return LanesOfProcesses(name, self.whole, self.own, self.axis_names, inputs, donating)

    def count(self, name: str, layout: Layout, arrays: Sequence[Leaf]) -> int:
        return self.own.size


def _no_devices(transform: str, devices: Sequence[Any]) -> StatemeshError:
    return StatemeshError(
        f"{transform}: devices={devices!r} is empty. Leave it out, or pass some, as in "
        "devices=jax.devices()[:4]."
    )


def _bad_devices(transform: str, devices: Sequence[Any]) -> StatemeshError:
    return StatemeshError(
        f"{transform}: devices={devices!r} must be different jax.Devices, as in devices=jax.devices()[:4]."
    )


def _unknown_backend(transform: str, backend: object, why: Exception) -> StatemeshError:
    return StatemeshError(f"{transform}: backend={backend!r} cannot be used: {why}")


def _nothing_to_infer(name: str) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: nothing is mapped, so nothing shows how many lanes there are. Give axis_size=..., or an "
        "axis in in_axes or state_in_axes."
    )


def _no_lanes(name: str, mapped: Sequence[tuple[str, int, object]]) -> BatchAxisError:
    items = [f"{path}: {describe(x)} has 0 on axis {axis}" for path, axis, x in mapped[:3]]
    return error_listing(
        BatchAxisError, f"{name}: there are no lanes", items, "Map over an axis of size 1 or more."
    )


def _too_many_lanes(name: str, lanes: int, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: {counted(lanes, 'lane')} on {counted(devices, 'device')}; pmap2 gives every lane a device "
        f"of its own. Use {devices} at most, each with a part of the batch, as in "
        f"x.reshape({devices}, -1, *x.shape[1:]); or use vmap2 or shard_map."
    )


def _process_lanes(name: str, lanes: int, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: this process passed {counted(lanes, 'lane')}, but has {counted(devices, 'device')}. With "
        "several processes, each passes one lane for each of its own devices, and gets these lanes back."
    )


def _no_such_backend(name: str, backend: object, devices: Sequence[jax.Device]) -> StatemeshError:
    return StatemeshError(
        f"{name}: devices={list(devices)!r} are not of backend={backend!r}. Give only one of the two."
    )


def _lane_name_taken(name: str, axis: AxisName) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: axis_name={axis!r} is a mesh axis that an enclosing shard_map maps over. Give the lanes "
        "another name."
    )


def _pmap2_inside(name: str, taken: Sequence[AxisName]) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: pmap2 gives each lane a device, but an enclosing mapped call uses the devices already "
        f"(axes {quoted(taken)}). Use vmap2 inside it."
    )


def _lane_collective(name: str, axis: AxisName) -> StatemeshError:
    return StatemeshError(
        f"{name}: inside a checked shard_map JAX has no collectives over the lanes of a vmap ({axis!r}). "
        "Write instead:\n"
        f"  1. statemesh's own, which run over lanes there: sm.psum(x, {axis!r}), or sm.pmean, sm.pmax, "
        "sm.pmin, sm.all_gather, sm.axis_index;\n"
        "  2. for a state: State(value, reduce='mean'), or 'sum', 'max', 'min': statemesh merges the lanes' "
        "writes;\n"
        "  3. for a result: return it with out_axes=0 and reduce its lane axis after vmap2, as with "
        "jnp.sum(out, axis=0)."
    )


def _no_own_devices(name: str, devices: int) -> BatchAxisError:
    return BatchAxisError(
        f"{name}: none of the {counted(devices, 'device')} belongs to this process. Only processes that own "
        "some of them can make the call."
    )


def _unsharded_by_one_process() -> BatchAxisError:
    return BatchAxisError(
        "unsharded: each of several processes has only its own lanes. Gather them, as with "
        "jax.experimental.multihost_utils.process_allgather, and call vmap2."
    )
