"""The values of all shards in one array whose leading axes are mesh axes."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike


Axes: TypeAlias = tuple[Hashable, ...]

_OF_NUMPY = np.ndarray, np.generic, float, int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["axes"])
@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """One value as all shards have it. To JAX it is a tree of one leaf, so that loops can carry it.

    **Attributes:**

    - `x`: an array, or the type of one. Its first axes are `axes`; the others are those of
        the value of one shard.
    - `axes`: the mesh axes along which shards may have different values, in the order of the scope. Along the
        other mesh axes all shards have the same value, and the array holds one copy.
    """

    x: Any
    axes: Axes = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value of one shard."""
        return self.x.shape[len(self.axes) :]


@dataclasses.dataclass(frozen=True)
class MappedAxes:
    """The mesh axes that are mapped over around an equation.

    **Attributes:**

    - `sizes`: the sizes of the axes along which values are stacked, in the order of stacking.
    - `indices`: for each axis that is run shard by shard, the index of the current shard.
    """

    sizes: Mapping[Hashable, int] = dataclasses.field(default_factory=dict)
    indices: Mapping[Hashable, jax.Array] = dataclasses.field(default_factory=dict)

    def in_order(self, names: Iterable[Hashable]) -> Axes:
        wanted = set(names)
        return tuple(name for name in self.sizes if name in wanted)

    def union(self, values: Iterable[Stacked]) -> Axes:
        return self.in_order(name for value in values for name in value.axes)

    def shape(self, names: Iterable[Hashable]) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in names)

    def over_axes(self, fun: Callable[..., list[Any]], values: Sequence[Stacked]) -> list[Stacked]:
        """The results on all shards of a function of one shard's values."""
        axes = self.union(values)
        # One `vmap` for each axis, the innermost first: values that lack an axis are not copied along it.
        for name in reversed(axes):
            in_axes = tuple(0 if name in value.axes else None for value in values)
            fun = jax.vmap(fun, in_axes=in_axes)
        return [Stacked(x, axes) for x in fun(*[value.x for value in values])]

    def spread(self, value: Stacked, names: Iterable[Hashable]) -> Stacked:
        """The value with a copy for each shard along these axes."""
        axes = self.in_order({*value.axes, *names})
        new = [i for i, name in enumerate(axes) if name not in value.axes]
        if not new:
            return value
        numpy = numpy_of(value.x)
        x = numpy.expand_dims(value.x, new)
        return Stacked(numpy.broadcast_to(x, (*self.shape(axes), *value.shape)), axes)

    def ordered(self, x: ArrayLike, names: Sequence[Hashable], at: Sequence[int]) -> Stacked:
        """The value of an array whose axes `at` are the mesh axes `names`."""
        position_of = dict(zip(names, at, strict=True))
        axes = self.in_order(names)
        return Stacked(
            numpy_of(x).moveaxis(x, [position_of[name] for name in axes], range(len(axes))), axes
        )

    def flat(self, value: Stacked, names: Sequence[Hashable]) -> tuple[Any, Axes]:
        """An array with all shards along `names` on its first axis, and the mesh axes that follow."""
        value = self.spread(value, names)
        rest = tuple(name for name in value.axes if name not in names)
        order = [value.axes.index(name) for name in (*names, *rest)]
        x = numpy_of(value.x).moveaxis(value.x, order, range(len(order)))
        count = math.prod(self.shape(names))
        return x.reshape(count, *x.shape[len(names) :]), rest

    def unflat(self, x: Any, names: Sequence[Hashable], rest: Sequence[Hashable]) -> Stacked:
        """The inverse of `flat`."""
        x = x.reshape(*self.shape(names), *x.shape[1:])
        return self.ordered(x, [*names, *rest], range(len(names) + len(rest)))

    def split(self, value: Stacked, spec: PartitionSpec) -> Stacked:
        """The parts that shards get of a value under a `PartitionSpec` whose axes are in this scope."""
        names, at = list(value.axes), list(range(len(value.axes)))
        shape = list(value.x.shape[: len(value.axes)])
        for size, entry in zip(value.shape, _entries(spec, len(value.shape)), strict=True):
            for name in entry:
                names.append(name)
                at.append(len(shape))
                shape.append(self.sizes[name])
            shape.append(size // math.prod(self.shape(entry)))
        return self.ordered(value.x.reshape(shape), names, at)

    def joined(self, value: Stacked, spec: PartitionSpec) -> Stacked:
        """The inverse of `split`: the whole value from the parts of the shards."""
        entries = _entries(spec, len(value.shape))
        used = [name for entry in entries for name in entry]
        value = self.spread(value, used)
        outer = [name for name in value.axes if name not in used]
        order, shape = [value.axes.index(name) for name in outer], list(self.shape(outer))
        for dim, (size, entry) in enumerate(zip(value.shape, entries, strict=True)):
            order += [*map(value.axes.index, entry), len(value.axes) + dim]
            shape.append(size * math.prod(self.shape(entry)))
        return Stacked(value.x.transpose(order).reshape(shape), tuple(outer))


def numpy_of(*xs: object) -> Any:
    """What computes with arrays: NumPy where all are its own, so that nothing is compiled for them."""
    return np if all(isinstance(x, _OF_NUMPY) for x in xs) else jnp


def vmap(
    fun: Callable[..., Any], in_axes: Sequence[int | None], out_axes: int = 0
) -> Callable[..., Any]:
    """`jax.vmap`, which keeps NumPy's arrays."""
    by_jax = jax.vmap(fun, in_axes, out_axes)

    def mapped(*xs: Any) -> Any:
        if numpy_of(*xs) is jnp:
            return by_jax(*xs)
        both = zip(xs, in_axes, strict=True)
        each = [itertools.repeat(x) if at is None else np.moveaxis(x, at, 0) for x, at in both]
        return np.stack([fun(*parts) for parts in zip(*each, strict=False)], out_axes)

    return mapped


def _entries(spec: PartitionSpec, ndim: int) -> list[Axes]:
    return [as_names(entry) for entry in (*spec, *[None] * (ndim - len(spec)))]


def as_names(entry: Any) -> Axes:
    """The axis names in one entry of a spec, or in one parameter of a collective."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list | set | frozenset) else (entry,)


def names_of_spec(spec: PartitionSpec) -> list[Hashable]:
    """All axis names in a `PartitionSpec`."""
    return [name for entry in spec for name in as_names(entry)]
