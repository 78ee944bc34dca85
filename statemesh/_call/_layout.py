"""Where a program runs: on the devices of a mesh, on which its inputs are laid out. And `place`."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import is_, methodcaller
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._base import _errors as errors
from .._base._checks import is_shaped
from .._base._errors import SpecError, counted, error_listing, mesh_str, quoted, spec_str
from .._base._specs import Placement, SpecPlacement, canonical, only, spec_axes
from .._base._trees import describe, is_packed, is_state, is_state_or_packed, path_str
from .._base._types import (
    NUMBERS,
    AnyMesh,
    Axes,
    AxisName,
    Leaf,
    PyTree,
    Sharding,
    SpecTree,
    StateSpecs,
)
from .._jax import _compat as compat
from .._jax import _explicit as explicit
from .._jax._compat import tree_util
from .._jax._frames import without_own_frames
from .._state._values import strong
from ._agreement import (
    Passed,
    check_same_arrays,
    is_own,
    static_passed,
)
from ._arguments import Input, check_alive, check_valued
from ._memory import UNSHARED, copied, memory
from ._mesh_and_specs import (
    UNDECLARED,
    OfStates,
    broadcast_specs,
    check_mesh,
    check_specs,
    check_state_specs,
    choose_specs,
    manual_names,
    own_placements,
    placement,
    specs_of_states,
)
from ._tracing import FromDataflow, FromTypes, VaryingAxes


_is_deleted = methodcaller("is_deleted")


def _as_wide_as_now(x: Leaf) -> Any:
    """An array of the host in the dtype that it has for JAX, with x64 on or off.

    Of several that it is to lay out at once JAX remembers the objects, but not which of the two it was.
    """
    if isinstance(x, jax.Array) or x.dtype.itemsize < 8 or x.dtype.kind not in "fiuc":
        return x
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    return x if dtype == x.dtype else np.asarray(x, dtype)


Run: TypeAlias = Callable[..., tuple[list[Leaf], Sequence[Placement]]]
"""Runs one instance on its parts of the inputs; returns its outputs and their placements."""


class OnMesh:
    """Where a program runs: each instance on a device of a mesh. It lays the inputs out there.

    On the devices of several processes every one of them passes the same arrays. Those that a process has for
    itself are compared with the others' when they are moved.

    **Arguments:**

    - `fun_name`: for messages.
    - `mesh`: the mesh.
    - `axis_names`: the mesh axes that the call maps over.
    - `check_vma`: whether types say what varies.
    """

    # Whether other processes hold a part of each output, so that this one's callers get their own.
    spread: ClassVar[bool] = False

    def __init__(
        self,
        fun_name: str,
        mesh: Mesh | AbstractMesh,
        axis_names: Sequence[AxisName],
        check_vma: bool = True,
    ) -> None:
        self.fun_name = fun_name
        self.mesh = mesh
        self.sizes: Mapping[AxisName, int] = mesh.shape
        # The mesh on which other processes have devices, if they do.
        self.shared = mesh if isinstance(mesh, Mesh) and mesh.is_multi_process else None
        self.axis_names = tuple(axis_names)
        self._names = frozenset(axis_names)
        self.check_vma = check_vma

    def expect(self, inputs: Sequence[Input], donating: bool) -> None:
        """Take note, once, of the inputs that each run will have.

        **Arguments:**

        - `inputs`: the inputs.
        - `donating`: whether some inputs are given up. What had to be moved then shares no memory with what
            it was moved from: its owner would lose it.
        """
        self.inputs = inputs
        self.donating = donating
        kinds = [leaf.kind for leaf in inputs]
        # NumPy arrays have no sharding to compare; Python numbers need none; references stay where they are.
        self.hosted = [k for k, t in enumerate(kinds) if issubclass(t, np.ndarray | np.generic)]
        others = {*self.hosted, *(k for k, t in enumerate(kinds) if t in (*NUMBERS, jax.Ref))}
        self.on_device = [k for k in range(len(kinds)) if k not in others]
        # The memory of a NumPy array belongs to its owner, who may write to it.
        self.fresh = frozenset({*self.hosted, *(k for k, t in enumerate(kinds) if t in NUMBERS)})
        self.strong_at = [k for k in self.on_device if inputs[k].strong]
        self.only_arrays = len(self.on_device) == len(inputs)
        self.targets: list[Leaf] = [None] * len(inputs)
        for k in [*self.hosted, *self.on_device]:
            self.targets[k] = NamedSharding(self.mesh, inputs[k].placement.spec)
        # The sharding objects that were found right before: what comes out of the program and is fed
        # back carries the very same ones, so that a comparison of identities is enough.
        self.seen = list(self.targets)

    def check(self, arrays: Sequence[Leaf]) -> None:
        """Refuse arrays that do not fit their specs."""
        what = f"shard_map applied to the function {self.fun_name!r}"
        named = [(leaf.path, x) for leaf, x in zip(self.inputs, arrays, strict=True)]
        check_shapes(what, named, [leaf.placement for leaf in self.inputs], self.mesh)

    def passed_alike(self, arrays: Sequence[Leaf]) -> list[Passed]:
        """The inputs that processes compare before the first call, and not when they are moved: numbers."""
        numbers = sorted(self.fresh.difference(self.hosted))
        return [static_passed(self.inputs[k].path, arrays[k]) for k in numbers]

    def concrete(self, arrays: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
        """Concrete arrays as the program takes them, and as they come back when not written.

        The two differ for an array that has the same layout on another mesh: it comes back as it is, but the
        program, compiled for one mesh, gets it on that one.
        """
        if self.only_arrays:
            here = [x.sharding for x in arrays]
            if (
                here == self.seen
                and not self._weak(arrays)
                and (compat.REFUSES_DELETED or not any(map(_is_deleted, arrays)))
            ):
                self.seen = here
                return arrays, arrays
        return self._moved(arrays)

    def _weak(self, arrays: Sequence[Leaf]) -> list[int]:
        """The weakly typed inputs that enter strong, so that no program depends on where others lie."""
        # Arrays of keys have no attribute `weak_type`.
        return [k for k in self.strong_at if getattr(arrays[k], "weak_type", False)]

    def _moved(self, arrays: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
        check_alive(self.fun_name, self.inputs, arrays)
        if self.shared is not None:
            # One array on the mesh will stand for those that each process has for itself.
            at = sorted([*self.hosted, *self.on_device])
            check_same_arrays(
                self.fun_name, self.shared, [(self.inputs[k].path, arrays[k]) for k in at]
            )
        ready, shown = list(arrays), list(arrays)
        for k in self._weak(arrays):
            ready[k] = shown[k] = strong(arrays[k])
        unseen = [k for k in self.on_device if ready[k].sharding is not self.seen[k]]
        # What the host has is to be moved in any case.
        misplaced = [k for k in self.hosted if not isinstance(arrays[k], jax.Array)]
        if misplaced or not all(
            is_laid_out(ready[k], self.targets[k], self._names) for k in unseen
        ):
            # First of all, because JAX compares the layouts only of arrays that fit them.
            self.check(arrays)
        # What only needs another type: Explicit types also name axes of one device.
        renamed: set[int] = set()
        # What comes back as it is.
        kept: set[int] = set()
        for k in unseen:
            x, is_right = ready[k], self._lies_right(ready[k], k)
            if is_right and self._is_on_mesh(x):
                self.seen[k] = x.sharding
                continue
            misplaced.append(k)
            if self._is_on_mesh(x) and x.sharding.is_equivalent_to(self.targets[k], x.ndim):
                renamed.add(k)
            if is_right or k in renamed:
                kept.add(k)
        if not misplaced:
            same = all(map(is_, ready, arrays))
            return (arrays, arrays) if same else (ready, shown)
        targets = [self.targets[k] for k in misplaced]
        sources = [_as_wide_as_now(ready[k]) for k in misplaced]
        for i, (k, target) in enumerate(zip(misplaced, targets, strict=True)):
            # The owner of a NumPy array may write to it while the program still reads it.
            if k in self.hosted or (self.donating and k not in renamed):
                sources[i] = unshared(sources[i], target)
        if self.shared is None:
            moved = jax.device_put(sources, targets)
        else:
            moved = [onto(x, target) for x, target in zip(sources, targets, strict=True)]
        for k, x in zip(misplaced, moved, strict=True):
            ready[k] = x
            if k not in kept:
                shown[k] = x
        if self.donating:
            new = [k for k in misplaced if k not in renamed]
            self._spare([arrays[k] for k in new if k not in self.hosted], ready, misplaced)
            UNSHARED.add([ready[k] for k in new])
        return ready, shown

    def to_move(self, arrays: Sequence[Leaf]) -> list[int]:
        """The inputs that a call lays out anew before it runs; of mere shapes nothing is known."""
        if isinstance(self.mesh, AbstractMesh):
            return []
        hosted = [k for k in self.hosted if isinstance(arrays[k], np.ndarray | np.generic)]
        here = [(k, arrays[k]) for k in self.on_device if isinstance(arrays[k], jax.Array)]
        return hosted + [
            k for k, x in here if not (compat.is_tracer(x) or self._keeps_memory(x, k))
        ]

    def _keeps_memory(self, x: jax.Array, k: int) -> bool:
        """Whether the program gets `x` in the memory where it is, by whatever name."""
        same = x.sharding is self.seen[k] or x.sharding.is_equivalent_to(self.targets[k], x.ndim)
        if not self._is_on_mesh(x):
            return same and not self.donating
        return same or self._lies_right(x, k)

    def _lies_right(self, x: jax.Array, k: int) -> bool:
        return lies_right(x, self.targets[k], self._names)

    def _is_on_mesh(self, x: jax.Array) -> bool:
        return isinstance(x.sharding, NamedSharding) and bool(x.sharding.mesh == self.mesh)

    def _spare(self, originals: Sequence[Leaf], ready: list[Leaf], moved: Iterable[int]) -> None:
        """Copy what was not moved but shares memory with an original that was: both would be given up."""
        sizes = {math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in originals}
        # To look at the memory of any other would wait for what is being computed.
        others = set(self.on_device).difference(moved)
        alike = [k for k in others if self.part_size(k, ready[k]) in sizes]
        spared = frozenset().union(*map(memory, originals)) if alike else frozenset()
        for k in alike:
            if not memory(ready[k]).isdisjoint(spared):
                ready[k] = copied(ready[k])

    def part_size(self, k: int, x: Leaf) -> int:
        """The bytes of an input that a device holds; 0 of what is no array."""
        target = self.targets[k]
        if target is None:
            return 0
        return math.prod(target.shard_shape(np.shape(x))) * x.dtype.itemsize

    def returned(
        self, arrays: Sequence[Leaf], shown: Sequence[Leaf], forwarded: Iterable[int]
    ) -> Sequence[Leaf]:
        """What comes back as it went in, in memory of its own where it had to be moved.

        An array outside a State had to be where its sharding is not that of its placement, whatever it is
        called.
        """
        results = list(shown)
        for k in forwarded:
            x, target = arrays[k], self.targets[k]
            if target is None or compat.is_tracer(shown[k]):
                continue
            if shown[k] is not x:
                if isinstance(x, jax.Array) and not self.donating:
                    source = unshared(x, target)
                    results[k] = shown[k] if source is x else self._put(source, k)
            elif not (self.inputs[k].stateful or is_laid_out(x, target, self._names)):
                results[k] = self._put(unshared(x, target), k)
        return results

    def placed(self, arrays: Sequence[Leaf]) -> Sequence[Leaf]:
        """Arrays as the program takes them, in memory of their own where they had to be moved."""
        ready, shown = self.concrete(arrays)
        moved = [k for k, x in enumerate(arrays) if shown[k] is not x]
        return self.returned(arrays, ready, moved)

    def _put(self, x: Leaf, k: int) -> jax.Array:
        return onto(strong(x) if self.inputs[k].strong else x, self.targets[k])

    def traced(self, arrays: Sequence[Leaf], recorded: bool) -> list[Leaf]:
        """Inputs some of which are traced: tracers are never put anywhere, concrete arrays are,
        except into a jaxpr, where they are constants that the compiler places."""
        targets = zip(self.inputs, arrays, self.targets, strict=True)
        local = [(leaf.path, x) for leaf, x, t in targets if t is not None and is_own(x)]
        if local and self.shared is not None and not recorded:
            check_same_arrays(self.fun_name, self.shared, local)
        weak = frozenset(self._weak(arrays))
        return [
            x if t is None else self._traced(strong(x) if k in weak else x, t, recorded)
            for k, (x, t) in enumerate(zip(arrays, self.targets, strict=True))
        ]

    def _traced(self, x: Leaf, target: NamedSharding, recorded: bool) -> Any:
        if self.shared is not None and not recorded and is_own(x):
            return onto(x, target)
        if compat.is_tracer(x) and not recorded:
            x = compat.onto_devices(x, target.mesh)
        if compat.is_tracer(x) or recorded:
            return traced_onto(x, target, self._names)
        if isinstance(x, jax.Array) and lies_right(x, target, self._names):
            return x
        return onto(x if isinstance(x, jax.Array) else unshared(x, target), target)

    def abstract(self, arrays: Sequence[Leaf]) -> list[Leaf]:
        """Shapes and dtypes on the mesh, to lower the program with."""
        self.check(arrays)
        abstract = list(arrays)
        for k, (x, target) in enumerate(zip(arrays, self.targets, strict=True)):
            if target is not None:
                abstract[k] = jax.ShapeDtypeStruct(np.shape(x), dtype_of(x), sharding=target)
        return abstract

    def count(self, arrays: Sequence[Leaf]) -> int | None:
        """The number of instances in this process."""
        return math.prod(self.sizes[name] for name in self.axis_names)

    def varying(self) -> VaryingAxes:
        """How one run learns which values differ between instances."""
        if self.check_vma:
            return FromTypes(self.axis_names)
        return FromDataflow(self.axis_names, is_known=False)

    def call(self, run: Run, arrays: Sequence[Leaf]) -> list[Leaf]:
        """Run every instance, and put its outputs together."""
        # `shard_map` reads the out specs after it has traced the function. So the list may be filled
        # while tracing, and no second trace is needed to learn the structure of the result.
        out_specs: list[PartitionSpec] = []

        def instance(*shards: Leaf) -> list[Leaf]:
            outputs, placements = run(*shards)
            out_specs[:] = [placement.written for placement in placements]
            return outputs

        instance.__name__ = instance.__qualname__ = self.fun_name
        outputs: list[Leaf] = jax.shard_map(
            instance,
            mesh=self.mesh,
            in_specs=tuple(x.placement.written for x in self.inputs),
            out_specs=out_specs,
            axis_names=set(self.axis_names),
            check_vma=self.check_vma,
        )(*arrays)
        return outputs

    def own_parts(self, outputs: list[Leaf], placements: Sequence[Placement]) -> list[Leaf]:
        """The outputs as this process's callers get them."""
        return outputs


def dtype_of(leaf: Leaf) -> Any:
    """The dtype that a leaf has on a device."""
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.dtypes.canonicalize_dtype(leaf.dtype)
    return leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)


def check_shapes(
    what: str,
    named: Sequence[tuple[str, Leaf]],
    placements: Sequence[Placement],
    mesh: Mesh | AbstractMesh,
) -> None:
    """Refuse arrays whose rank or sizes do not fit their specs.

    **Arguments:**

    - `what`: what they were given to, for the error.
    - `named`: the arrays, each with its path.

    **Raises:** `SpecError` listing every such array with the arithmetic.
    """
    items: list[str] = []
    for (path, x), wanted in zip(named, placements, strict=True):
        if wanted.axes:
            items += _misfits(path, x, wanted, mesh)
    if items:
        raise error_listing(
            SpecError,
            f"{what}: arrays do not fit their specs on {mesh_str(mesh)}",
            items,
            "Pad the array, choose another spec, or write P() to replicate it.",
        )


def _misfits(path: str, x: Leaf, placement: Placement, mesh: Mesh | AbstractMesh) -> Iterator[str]:
    """What does not fit of an array: its rank, or the sizes of axes."""
    shape, spec, per_shard = np.shape(x), placement.written, placement.axis is not None
    if len(placement.axes) > len(shape):
        yield (
            f"{path}: {describe(x)} with spec {spec_str(spec)} (PerShard) is a scalar; it needs a leading "
            "axis with one entry per shard"
            if per_shard
            else rank_item(path, x, spec)
        )
        return
    for dim, names in enumerate(placement.axes):
        sizes = [mesh.shape[name] for name in names if name in mesh.shape]
        parts, size = math.prod(sizes), shape[dim]
        if size == parts if placement.axis == dim else size % parts == 0:
            continue
        shown = f"{path}: {describe(x)} with spec {spec_str(spec)}"
        product = " * ".join(map(str, sizes)) + (f" = {parts}" if len(sizes) > 1 else "")
        if per_shard:
            yield (
                f"{shown} (PerShard): axis {dim} has size {size}, but needs one entry per shard, {product}"
            )
        else:
            yield (
                f"{shown}: axis {dim} has size {size}, not divisible by {quoted(names)} of size {product} "
                f"({size} % {parts} = {size % parts})"
            )


def rank_item(path: str, x: Leaf, spec: PartitionSpec) -> str:
    """What is said of an array with fewer axes than its spec has entries."""
    entries = counted(len(spec.partitions), "entry", "entries")
    return (
        f"{path}: {describe(x)} has rank {np.ndim(x)}, but its spec {spec_str(spec)} has {entries}"
    )


def is_laid_out(x: jax.Array, target: NamedSharding, names: Axes) -> bool:
    """Whether `x` lies on the mesh of `target` as its spec says, with however many entries either is spelled.

    JAX's results on Explicit axes have a spec with an entry for each axis of the array. On mesh axes that are
    not in `names` an array may lie as it likes.
    """
    here = x.sharding
    if here == target:
        return True
    if not isinstance(here, NamedSharding) or here.mesh != target.mesh:
        return False
    if here.memory_kind != target.memory_kind:
        return False
    return bool(only(here.spec, names) == canonical(target.spec))


def lies_right(x: jax.Array, target: NamedSharding, names: Axes) -> bool:
    """Whether `x` need not be moved.

    On axes that the call does not map over an array may lie as it likes; on Explicit axes its type
    has to agree too.
    """
    if is_laid_out(x, target, names):
        return True
    mesh = target.mesh
    if names < frozenset(mesh.axis_names):
        return False
    if explicit.has_explicit_axes(mesh) or explicit.is_explicitly_typed(x):
        return False
    return x.sharding.is_equivalent_to(target, x.ndim)


def traced_onto(x: Leaf, target: NamedSharding, names: frozenset[AxisName]) -> Any:
    """A traced value laid out, where the mesh's axes are Explicit and its type says otherwise.

    On Auto axes there is nothing to do: the compiler lays it out. On those that the call does not map over
    it stays as it lies.
    """
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return x
    typed = explicit.is_explicitly_typed(x)
    if not explicit.has_explicit_axes(target.mesh):
        return explicit.off_explicit_axes(x, target.mesh) if typed else x
    typed_target = explicit.explicit_part(target)
    if typed:
        here = jax.typeof(x).sharding.spec
        if only(here, names) == only(typed_target.spec, names):
            return x
        typed_target = typed_target.update(
            spec=_combined(typed_target.spec, only(here, frozenset(target.mesh.axis_names) - names))
        )
    elif typed_target.spec == PartitionSpec():
        return x
    return jax.sharding.reshard(x, typed_target)


def _combined(spec: PartitionSpec, other: PartitionSpec) -> PartitionSpec:
    """A spec that splits each axis as one does, and its parts as another does."""
    pairs = zip_longest(spec_axes(spec), spec_axes(other), fillvalue=())
    return canonical(spec.update(partitions=tuple(a + b for a, b in pairs)))


def onto(x: Leaf, target: NamedSharding) -> jax.Array:
    """`x` on the mesh of `target`, whose devices may be those of several processes.

    Every process has the same `x` then.
    """
    if not (target.mesh.is_multi_process and is_own(x)):
        return jax.device_put(x, target)
    if not isinstance(x, jax.Array):
        x = np.asarray(x, jax.dtypes.canonicalize_dtype(np.result_type(x)))
    indices = target.addressable_devices_indices_map(x.shape)
    parts = jax.device_put([x[index] for index in indices.values()], [*indices])
    return jax.make_array_from_single_device_arrays(x.shape, target, parts, dtype=x.dtype)


def unshared(x: Leaf, target: Sharding) -> Any:
    """`x`, or a copy if JAX would lay it out as `target` in the memory that `x` already has.

    `jax.device_put` takes a part that lies on one of the devices for the part to be put there, and on the
    host's own device the memory of a NumPy array.
    """
    if isinstance(x, jax.Array):
        if compat.is_tracer(x) or not _may_share(x, target):
            return x
        return copied(x)
    devices: set[Any] = target.device_set
    if isinstance(x, np.ndarray) and any(device.platform == "cpu" for device in devices):
        return np.array(x)
    return x


def _may_share(x: jax.Array, target: Sharding) -> bool:
    if x.sharding.device_set.isdisjoint(target.device_set):
        return False
    return x.sharding.shard_shape(x.shape) == target.shard_shape(x.shape)


def check_concrete(what: str, named: Sequence[tuple[str, Any]]) -> None:
    """Refuse arrays that cannot be moved: traced ones, those given up, and shapes without values."""
    if traced := [path for path, x in named if compat.is_tracer(x)]:
        raise place_traced(what, traced)
    check_valued(what, named)


def place_traced(name: str, paths: Sequence[str]) -> TypeError:
    return error_listing(
        TypeError,
        f"{name}: these arrays are traced, as inside jit, grad or vmap, and cannot be placed",
        paths,
        "Place them before, outside the traced function. Inside it, a mapped call lays out its "
        "arguments itself.",
    )


def placed_states(
    tree: PyTree, root: str, state_specs: StateSpecs
) -> list[tuple[str, PyTree, list[SpecPlacement] | None]]:
    """The units of a tree: the path of each, and for a State the placements of its arrays.

    A State lies by the spec that `state_specs` has for it, else by its own.
    """
    check_state_specs(state_specs, "state_specs")
    declared = iter(choose_specs(state_specs, [(root, tree)], "state_specs"))
    units: list[tuple[str, PyTree, list[SpecPlacement] | None]] = []
    for keys, node in tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]:
        path, placements = path_str(keys, root), None
        if is_state(node):
            spec = next(declared)
            placements = own_placements(node, node.spec if spec is UNDECLARED else spec, path)
        units.append((path, node, placements))
    return units


def shardings(
    what: str,
    named: Sequence[tuple[str, Leaf]],
    placements: Sequence[Placement],
    mesh: AnyMesh,
) -> list[NamedSharding]:
    """The sharding on a mesh of each array of a tree.

    **Arguments:**

    - `what`: what lays them out, for errors.
    - `named`: the arrays, each with its path.

    **Raises:** `SpecError` for placements that do not fit the mesh or the arrays.
    """
    pairs = zip(named, placements, strict=True)
    specs = [(f"the spec of {path}", placement.spec) for (path, _), placement in pairs]
    check_specs(specs, mesh, manual_names(mesh, ()))
    check_shapes(what, named, placements, mesh)
    return [NamedSharding(mesh, placement.spec) for placement in placements]


@without_own_frames
def place(
    tree: PyTree, mesh: AnyMesh, specs: SpecTree = None, *, state_specs: StateSpecs = None
) -> Any:
    """Put a tree onto a mesh the way a mapped call wants it.

    **Arguments:**

    - `tree`: any pytree. The buffers of a `Packed` in it lie right already, and stay.
    - `mesh`: the mesh.
    - `specs`: a spec, or a prefix tree of specs, for the arrays outside States; left out, they are
        replicated.
    - `state_specs`: where the States go: one spec, or `{filter: spec}`. A state that it does not
        mention goes by its own `spec`, else it is replicated.

    **Returns:** the tree, its arrays on the mesh. Arrays that already lie right are not touched, and
    leaves that are not arrays stay as they are. What is moved shares no memory with what it was moved
    from, so that one may be donated without the other.

    **Raises:** `SpecError` for specs that do not fit the tree, its arrays or the mesh, and for a mesh without
    devices; `TypeError` for arrays that are traced: there a mapped call lays its arguments out itself.

    !!! example

        ```python
        >>> import jax, numpy as np, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> model = sm.place({"w": sm.ParamState(np.ones(4))}, mesh, state_specs=P("x"))
        >>> model["w"].value.sharding.spec == P("x")
        True

        ```
    """
    check_mesh("place", mesh)
    if isinstance(mesh, AbstractMesh):
        expected = "a jax.sharding.Mesh, which has devices to put arrays on"
        raise errors.invalid_argument("place", "mesh", mesh, expected)
    names = manual_names(mesh, ())
    check_specs([("specs", specs)], mesh, names)
    nodes = tree_util.tree_leaves(tree, is_leaf=is_state_or_packed)
    packed = {id(buffer) for node in nodes if is_packed(node) for buffer in node.buffers}
    leaves: list[Leaf] = []
    inputs: list[Input] = []
    of_states = OfStates()
    units = placed_states(tree, "tree", state_specs)
    for (path, node, placements), spec in zip(
        units, broadcast_specs(specs, tree, "specs", "tree"), strict=True
    ):
        arrays = tree_util.tree_leaves(node)
        if placements is not None:
            of_states.state("specs", spec, path, node, placements)
        elif is_shaped(node):
            of_states.array("specs", spec)
            placements = [] if id(node) in packed else [placement(spec)]
        # Whatever is placed loses a weak type, as what is in States does.
        for k, wanted in enumerate(placements or ()):
            position, kind = len(leaves) + k, type(arrays[k])
            inputs.append(
                Input(position, path, wanted, "specs", kind, stateful=True, in_module=False)
            )
        leaves += arrays
    if bad := of_states.bad():
        raise specs_of_states("place", "specs", "state_specs", bad)
    named = [(x.path, leaves[x.position]) for x in inputs]
    targets = shardings("place", named, [x.placement for x in inputs], mesh)
    check_concrete("place", named)
    layout = OnMesh("place", mesh, names)
    # What is moved may be donated without what it was moved from.
    layout.expect(inputs, donating=True)
    placed = layout.placed([x for _, x in named])
    for source, x, target in zip(inputs, placed, targets, strict=True):
        # A call takes any name of a layout, such as P("x") for P() where "x" has one device.
        leaves[source.position] = x if is_laid_out(x, target, frozenset(names)) else onto(x, target)
    return tree_util.tree_structure(tree).unflatten(leaves)
