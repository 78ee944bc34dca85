"""Lanes: which axis of each leaf is mapped over, how many lanes that makes, and what they run on.

`vmap2` runs all of them in one `vmap`. `pmap2` gives each a device, of one process or of several.
"""

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._base import _errors as errors
from .._base._checks import check_named_once, check_text
from .._base._errors import BatchAxisError, StatemeshError, counted, error_listing, quoted
from .._base._specs import LanePlacement, Placement, SpecPlacement, is_axis
from .._base._trees import describe
from .._base._types import (
    AxisName,
    DeviceList,
    Filter,
    Leaf,
    PyTree,
    StateAxes,
    Text,
    flat_names,
    is_axis_name,
)
from .._jax import _compat as compat
from .._state._filters import first_matches
from .._state._state import states_of
from .._state._values import strong
from ._agreement import Passed, array_passed, is_own
from ._arguments import Call, Input, check_alive
from ._layout import OnMesh, Run
from ._mesh_and_specs import UNDECLARED, by_fields, not_an_axis
from ._tracing import FromDataflow, FromTypes, VaryingAxes


def is_size(size: object) -> bool:
    """Whether this can be a number of lanes."""
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and int(size) > 0


def fits(axis: int, ndim: int) -> bool:
    """Whether an array of so many axes has this one."""
    return -ndim <= axis < ndim


MappedLeaves: TypeAlias = Sequence[tuple[str, int, Any]]
"""The path, the axis and the array of each leaf that is mapped over lanes."""


def count_lanes(name: str, mapped: MappedLeaves, axis_size: int | None) -> int | None:
    """How many lanes the mapped leaves make; `axis_size` where there are none.

    **Raises:** `BatchAxisError` for an axis that an array does not have, and where sizes disagree.
    """
    if bad := [(p, axis, x) for p, axis, x in mapped if not fits(axis, np.ndim(x))]:
        raise error_listing(
            BatchAxisError,
            f"{name}: arguments do not have the axes that they are mapped over",
            [
                f"{path}: {describe(x)} has {counted(np.ndim(x), 'axis', 'axes')}, but is mapped over axis "
                f"{axis}"
                for path, axis, x in bad
            ],
            "Name an axis that they have, or None for what all lanes share.",
        )
    sizes = {np.shape(x)[axis] for _, axis, x in mapped}
    if axis_size is not None:
        sizes.add(axis_size)
    if len(sizes) > 1:
        by_size: dict[int, list[str]] = {}
        for path, axis, x in mapped:
            size = np.shape(x)[axis]
            by_size.setdefault(size, []).append(f"{path}: {describe(x)} has {size} on axis {axis}")
        items: list[str] = []
        for lines in by_size.values():
            # A model has many arrays that agree.
            items += lines[:3]
            if lines[3:]:
                items.append(f"and {len(lines) - 3} more like it")
        if axis_size is not None:
            items.append(f"axis_size={axis_size}")
        raise error_listing(
            BatchAxisError,
            f"{name}: the number of lanes is not clear",
            items,
            "All mapped axes must have one size; give None as the axis of what all lanes share.",
        )
    return next(iter(sizes), None)


class Pairs(tuple[tuple[Filter, int | None], ...]):
    """Filters, each with its axis: the one form of `state_in_axes` and `state_out_axes`."""

    __slots__ = ()


class AxesOfMap(tuple[Any, ...]):
    """`in_axes` of a method of a `Map`: the `Map` itself comes before the method's arguments.

    **Attributes:**

    - `one_for_all`: whether the author wrote one axis, which stands for all arguments.
    """

    one_for_all: bool

    def __new__(cls, in_axes: Any, args: int) -> "AxesOfMap":
        is_sequence = isinstance(in_axes, tuple | list)
        axes = super().__new__(cls, (None, *(in_axes if is_sequence else [in_axes] * args)))
        axes.one_for_all = not is_sequence
        return axes


def as_pairs(state_axes: StateAxes, what: str) -> Pairs:
    """`state_in_axes` or `state_out_axes`, as users write them, in their one form."""
    if isinstance(state_axes, Pairs):
        return state_axes
    if state_axes is None:
        return Pairs()
    if not isinstance(state_axes, Mapping):
        return Pairs([(state_axes, 0)])
    for axis in state_axes:
        if not is_axis(axis):
            raise not_an_axis(f"a key of {what}", axis)
    return Pairs([(filter, axis) for axis, filter in state_axes.items()])


def choose_axes(
    pairs: Sequence[tuple[Filter, int | None]], roots: Sequence[tuple[str, Any]], what: str
) -> list[Leaf]:
    """The axis declared for each state of the roots, in order; `UNDECLARED` where none is."""
    if not pairs:
        return [UNDECLARED for _, tree in roots for _ in states_of(tree)]
    hits = first_matches([filter for filter, _ in pairs], roots, what)
    return [UNDECLARED if hit is None else pairs[hit][1] for hit in hits]


class OtherShapes(Exception):
    """Inputs of other shapes than those that a program was resolved for: another one is needed."""


class OneShape:
    """Takes inputs of the shapes that it first met, and no others."""

    shapes: tuple[Any, ...] | None = None

    def check(self, arrays: Sequence[Leaf]) -> None:
        """Refuse inputs of other shapes."""
        shapes = tuple(map(np.shape, arrays))
        if self.shapes is None:
            self.shapes = shapes
        if self.shapes != shapes:
            raise OtherShapes


@dataclasses.dataclass(eq=False)
class OnLanes(OneShape):
    """Where a program runs: all instances in one `jax.vmap`. Inputs are taken wherever they lie.

    **Arguments:**

    - `fun_name`: for messages.
    - `axis_name`: what collectives call the lanes.
    - `axis_size`: how many there are to be; `None` where the inputs alone say it.
    - `spmd_axis_name`: the mesh axes over which the compiler is to spread them.
    - `fixed`: whether the program is for inputs of one shape only.
    """

    fun_name: str
    axis_name: AxisName
    axis_size: int | None
    spmd_axis_name: Any
    fixed: bool

    mesh: ClassVar[None] = None
    shared: ClassVar[None] = None
    sizes: ClassVar[Mapping[AxisName, int]] = {}
    spread: ClassVar[bool] = False

    def expect(self, inputs: Sequence[Input], donating: bool) -> None:
        """Take note, once, of the inputs that each run will have."""
        self.inputs = inputs
        self.to_strong = [k for k, source in enumerate(inputs) if source.strong]
        # Not arrays of JAX yet: they do not come back as they went in. A tracer is one, by another type.
        of_jax = (jax.Array, jax.core.Tracer)
        self.fresh = frozenset(
            k for k, source in enumerate(inputs) if not issubclass(source.kind, of_jax)
        )

    def check(self, arrays: Sequence[Leaf]) -> None:
        """Refuse other shapes. Axes and sizes are checked where lanes are counted."""
        if self.fixed:
            super().check(arrays)

    def concrete(self, arrays: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
        """Arrays as the program takes them, and as they come back when not written."""
        # Arrays of keys have no attribute `weak_type`.
        weak = [k for k in self.to_strong if getattr(arrays[k], "weak_type", False)]
        if not weak:
            return arrays, arrays
        ready = list(arrays)
        for k in weak:
            ready[k] = strong(arrays[k])
        return ready, ready

    def placed(self, arrays: Sequence[Leaf]) -> Sequence[Leaf]:
        """Arrays as the program takes them."""
        return self.concrete(arrays)[0]

    def to_move(self, arrays: Sequence[Leaf]) -> list[int]:
        """The inputs that a call lays out anew: lanes have no layout."""
        return []

    def returned(
        self, arrays: Sequence[Leaf], shown: Sequence[Leaf], forwarded: Iterable[int]
    ) -> Sequence[Leaf]:
        """What comes back as it went in: lanes have no layout that it could lack."""
        del arrays, forwarded
        return shown

    def part_size(self, k: int, x: Leaf) -> int:
        """The bytes of an input, none of which is given up here."""
        return 0

    def traced(self, arrays: Sequence[Leaf], recorded: bool) -> list[Leaf]:
        """Inputs some of which are traced, wherever they lie."""
        del recorded
        return list(self.concrete(arrays)[0])

    def abstract(self, arrays: Sequence[Leaf]) -> list[Leaf]:
        """Shapes and dtypes, to lower the program with."""
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x for x in arrays
        ]

    def count(self, arrays: Sequence[Leaf]) -> int | None:
        """The number of lanes."""
        mapped = [
            (source.path, source.placement.axis, x)
            for source, x in zip(self.inputs, arrays, strict=True)
            if source.placement.axis is not None
        ]
        return count_lanes(self.fun_name, mapped, self.axis_size)

    def varying(self) -> VaryingAxes:
        """How one run learns which values differ between lanes."""
        return FromTypes((self.axis_name,))

    def call(self, run: Run, arrays: Sequence[Leaf]) -> list[Leaf]:
        """Run every lane, and put its outputs together."""
        # Filled while tracing, as the out specs of a `shard_map` are.
        out_axes: list[int | None] = []

        def lane(*parts: Leaf) -> list[Leaf]:
            outputs, placements = run(*parts)
            out_axes[:] = [placement.axis for placement in placements]
            return outputs

        lane.__name__ = lane.__qualname__ = self.fun_name
        mapped = jax.vmap(
            lane,
            in_axes=tuple(x.placement.axis for x in self.inputs),
            out_axes=out_axes,
            axis_name=self.axis_name,
            axis_size=self.count(arrays),
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
                f"{self.fun_name}: inside a checked shard_map JAX has no collectives over the lanes of a "
                f"vmap ({lanes!r}). Write instead:\n"
                f"  1. statemesh's own, which run over lanes there: sm.psum(x, {lanes!r}), or sm.pmean, "
                "sm.pmax, sm.pmin, sm.all_gather, sm.axis_index;\n"
                "  2. for a state: State(value, reduce='mean'), or 'sum', 'max', 'min': statemesh merges "
                "the lanes' writes;\n"
                "  3. for a result: return it with out_axes=0 and reduce its lane axis after vmap2, as "
                "with jnp.sum(out, axis=0)."
            ) from error
        return outputs

    def own_parts(self, outputs: list[Leaf], placements: Sequence[Placement]) -> list[Leaf]:
        """The outputs: there are no other processes."""
        return outputs


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
        self, name: str, axis_name: AxisName, mapped: MappedLeaves, asked: int | None, fixed: bool
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
        self, name: str, axis_name: AxisName, mapped: MappedLeaves, asked: int | None, fixed: bool
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


Layout: TypeAlias = OnMesh | OnLanes
"""Where a program runs, once the placement of every leaf is known."""
