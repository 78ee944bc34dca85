"""Step 2, arrays: each is checked against its spec, laid out on the mesh, and never given up twice."""

import dataclasses
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from operator import call, is_, itemgetter
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .._base._errors import (
    SpecError,
    StatemeshError,
    counted,
    error_listing,
    mesh_str,
    quoted,
    spec_str,
)
from .._base._specs import Placement, canonical, only, spec_axes
from .._base._trees import describe
from .._base._types import Axes, AxisName, Leaf
from .._jax import _compat as compat
from .._jax import _explicit as explicit


@dataclasses.dataclass(frozen=True)
class RankMismatch:
    """An array with fewer axes than its spec has entries."""

    path: str
    value: Any
    spec: PartitionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A leaf of the arguments that is an input of the program.

    **Attributes:**

    - `position`: its position among the leaves.
    - `path`: its path, for messages.
    - `placement`: where it lies.
    - `placed_by`: what says so: an entry as the author wrote it, the state's own spec, its kind or the
        default.
    - `kind`: its type.
    - `stateful`: whether it is a leaf of a State.
    - `in_module`: whether it stands in a Module, outside States.
    - `fresh`: whether it is a new array inside the program, which never comes back as it went in.
    """

    position: int
    path: str
    placement: Placement
    placed_by: str
    kind: type
    stateful: bool
    in_module: bool
    fresh: bool = False

    @property
    def strong(self) -> bool:
        """Whether it loses a weak type.

        What it becomes in the result is then no news to the compiler when it is fed back. An array outside
        States and Modules keeps its weak type, as under JAX's own maps.
        """
        return self.stateful or self.in_module


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
    for (path, x), placement in zip(named, placements, strict=True):
        if placement.axes:
            items += _misfits(path, x, placement, mesh)
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
            else rank_item(RankMismatch(path, x, spec))
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


def is_own(x: Leaf) -> bool:
    """Whether every process has an `x` of its own: of the host, or on devices of its own."""
    if compat.is_tracer(x):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def check_concrete(what: str, named: Sequence[tuple[str, Any]]) -> None:
    """Refuse arrays that cannot be moved: traced ones, those given up, and shapes without values."""
    if traced := [path for path, x in named if compat.is_tracer(x)]:
        raise place_traced(what, traced)
    check_valued(what, named)


def check_valued(what: str, named: Sequence[tuple[str, Any]]) -> None:
    """Refuse what has a shape and no value."""
    if bare := [path for path, x in named if isinstance(x, jax.ShapeDtypeStruct)]:
        raise error_listing(
            TypeError,
            f"{what}: these arguments are shapes without values (jax.ShapeDtypeStruct)",
            bare,
            "Pass arrays. For shapes there are `mapped.lower(...)` and `jax.eval_shape(mapped, ...)`.",
        )
    if gone := [path for path, x in named if is_deleted(x)]:
        raise deleted(what, gone)


def is_deleted(x: Leaf) -> bool:
    """Whether it is an array whose memory was given up."""
    return isinstance(x, jax.Array) and not compat.is_tracer(x) and x.is_deleted()


def copied(x: jax.Array) -> jax.Array:
    """`x` in memory of its own, on the devices where it lies."""
    return jax.device_put(x, x.sharding, may_alias=False)


def apart(x: Leaf, target: Sharding) -> Any:
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


Refs: TypeAlias = Sequence[Callable[[], Any]]


class Made:
    """The arrays that programs have made, each with the serial number of its run. No two share memory.

    They are known as long as somebody else holds them. Other threads may add some meanwhile: what is lost
    then is taken for an array that no program made, whose memory is looked up.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Refs, int]] = []
        self._most = 32
        self.number = 0

    def add(self, arrays: Sequence[Leaf]) -> tuple[Refs, int]:
        """Remember arrays.

        **Returns:** references to them, and their number.
        """
        self.number += 1
        run: tuple[Refs, int] = list(map(weakref.ref, arrays)), self.number
        self._runs.append(run)
        if len(self._runs) > self._most:
            self._forget()
        return run

    def _forget(self) -> None:
        """Forget what has died."""
        alive = [([ref for ref in refs if ref() is not None], n) for refs, n in self._runs]
        self._runs = [run for run in alive if run[0]]
        self._most = max(32, 2 * len(self._runs))

    def numbers(self, arrays: Sequence[Leaf]) -> list[int]:
        """The serial number of each array; 0 for one that no program made."""
        self._forget()
        # Only the living have an identity of their own.
        numbers = {id(ref()): number for refs, number in self._runs for ref in refs}
        return [numbers.get(id(x), 0) for x in arrays]


MADE = Made()


class Spared:
    """A program's inputs at each call, in memory of their own where they are given up.

    Two arrays may share memory without being one object: what was moved and what it was moved from, an
    array and a part of it, a key and its data. To give up one would take it away from the other.

    **Arguments:**

    - `donated`: which inputs the program gives up.
    - `sizes`: of the part of each input that a device holds, in bytes. Only where these are equal can two
        inputs share memory.
    """

    def __init__(self, donated: Sequence[int], sizes: Sequence[int]) -> None:
        self.donated = frozenset(donated)
        count = Counter(sizes)
        wanted = {sizes[k] for k in donated if sizes[k] and count[sizes[k]] > 1}
        self.compared = [k for k, size in enumerate(sizes) if size in wanted]
        # There are none, or several: a donated input is compared only if another one has its size.
        self._pick = itemgetter(*self.compared) if self.compared else None
        # What no program made and none took, found apart from all others, and the last number by then.
        self._apart: tuple[Refs, int] = [], 0
        # What the program made last, and its number.
        self._last_run: tuple[Refs, int] = [], 0
        # Picks what was compared last from what the program had made and then from what was apart.
        self._order: Any = None

    def __call__(self, arrays: Sequence[Leaf]) -> Sequence[Leaf]:
        """The arrays, with a copy of each donated one that shares memory with another."""
        if self._pick is None:
            return arrays
        compared = self._pick(arrays)
        if self._fed_back(compared) or self._known(compared):
            return arrays
        lies = {k: memory(arrays[k]) for k in self.compared}
        times = Counter(part for parts in lies.values() for part in parts)
        shared = {k for k, parts in lies.items() if any(times[part] > 1 for part in parts)}
        if shared:
            return [copied(x) if k in shared & self.donated else x for k, x in enumerate(arrays)]
        each = zip(self.compared, compared, MADE.numbers(compared), strict=True)
        left = [weakref.ref(x) for k, x, n in each if not n and k not in self.donated]
        self._apart = left, MADE.number
        return arrays

    def _fed_back(self, compared: Sequence[Leaf]) -> bool:
        """Whether these are what the program made last and what was apart, in the order of last time.

        It says nothing that `_known` would not say, and says it in one pass in C.
        """
        order, (outputs, number), (left, before) = self._order, self._last_run, self._apart
        if order is None or number <= before:
            return False
        try:
            expected = order([*outputs, *left])
        except IndexError:  # Another thread has put in fewer meanwhile.
            return False
        return all(map(is_, map(call, expected), compared))

    def _known(self, compared: Sequence[Leaf]) -> bool:
        """Whether nothing has to be looked up: that would wait for what is being computed.

        So it is where programs made all of these, or the others are those of last time and all that
        programs made was made since.
        """
        if len(set(map(id, compared))) < len(compared):
            return False
        numbers = MADE.numbers(compared)
        others = [x for x, n in zip(compared, numbers, strict=True) if not n]
        left, before = self._apart
        if others and (
            len(others) != len(left)
            or any(0 < n <= before for n in numbers)
            or not all(ref() is x for ref, x in zip(left, others, strict=True))
        ):
            return False
        outputs, number = self._last_run
        if set(numbers) <= {0, number}:
            # The next call, if it takes the like, asks in the quickest way.
            known = [*(ref() for ref in outputs), *others]
            place = {id(x): k for k, x in enumerate(known) if x is not None}
            self._order = itemgetter(*[place[id(x)] for x in compared])
        return True

    def keep(self, outputs: Sequence[Leaf]) -> None:
        """Remember what the program has made."""
        if self.compared:
            self._last_run = MADE.add(outputs)


def memory(x: Leaf) -> frozenset[tuple[Any, int]]:
    """The address at which each part of `x` begins, with its device."""
    if not isinstance(x, jax.Array) or x.is_deleted():
        return frozenset()
    return frozenset(
        (part.device, part.data.unsafe_buffer_pointer()) for part in x.addressable_shards
    )


def place_traced(name: str, paths: Sequence[str]) -> TypeError:
    return error_listing(
        TypeError,
        f"{name}: these arrays are traced, as inside jit, grad or vmap, and cannot be placed",
        paths,
        "Place them before, outside the traced function. Inside it, a mapped call lays out its "
        "arguments itself.",
    )


def deleted(name: str, paths: Sequence[str]) -> StatemeshError:
    return error_listing(
        StatemeshError,
        f"{name}: these arguments were given up to an earlier call that donates its arguments",
        paths,
        "Go on with what that call returned, as in `out, model = step(model, x)`.",
    )


def rank_item(mismatch: RankMismatch) -> str:
    entries = counted(len(mismatch.spec.partitions), "entry", "entries")
    return (
        f"{mismatch.path}: {describe(mismatch.value)} has rank {np.ndim(mismatch.value)}, but its spec "
        f"{spec_str(mismatch.spec)} has {entries}"
    )
