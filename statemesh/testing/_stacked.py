"""A value on all shards at once: one array that has mesh axes as its leading axes."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """What every shard has of one value.

    **Attributes:**

    - `x`: an array; its first axes are `axes`, the rest is what one shard has.
    - `axes`: the mesh axes over which shards may have different values, in the order of the scope. Over the
        others they have the same, of which there is one copy.
    """

    x: Any
    axes: tuple[Hashable, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """What one shard has."""
        shape: tuple[int, ...] = self.x.shape[len(self.axes) :]
        return shape


@dataclasses.dataclass(frozen=True)
class Scope:
    """The mesh axes that are mapped over, around an equation.

    **Attributes:**

    - `sizes`: of the axes over which values are stacked, in the order of stacking.
    - `places`: for each axis that is gone through shard by shard, where on it that is now.
    """

    sizes: Mapping[Hashable, int] = dataclasses.field(default_factory=dict)
    places: Mapping[Hashable, Any] = dataclasses.field(default_factory=dict)

    def in_order(self, names: Iterable[Hashable]) -> tuple[Hashable, ...]:
        wanted = set(names)
        return tuple(name for name in self.sizes if name in wanted)

    def union(self, values: Iterable[Stacked]) -> tuple[Hashable, ...]:
        return self.in_order(name for value in values for name in value.axes)

    def shape(self, names: Iterable[Hashable]) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in names)

    def over_axes(self, fun: Callable[..., list[Any]], values: Sequence[Stacked]) -> list[Stacked]:
        """What one shard's function makes of stacked values."""
        axes = self.union(values)
        for name in reversed(axes):
            in_axes = tuple(0 if name in value.axes else None for value in values)
            fun = jax.vmap(fun, in_axes=in_axes)
        return [Stacked(x, axes) for x in fun(*[value.x for value in values])]

    def spread(self, value: Stacked, names: Iterable[Hashable]) -> Stacked:
        """The same with a copy for each shard along these axes."""
        axes = self.in_order({*value.axes, *names})
        new = [i for i, name in enumerate(axes) if name not in value.axes]
        if not new:
            return value
        x = jnp.expand_dims(value.x, new)
        return Stacked(jnp.broadcast_to(x, (*self.shape(axes), *value.shape)), axes)

    def ordered(self, x: Any, names: Sequence[Hashable], at: Sequence[int]) -> Stacked:
        """An array whose axes `at` are the mesh axes `names`."""
        found = dict(zip(names, at, strict=True))
        axes = self.in_order(names)
        return Stacked(jnp.moveaxis(x, [found[name] for name in axes], range(len(axes))), axes)

    def flat(self, value: Stacked, names: Sequence[Hashable]) -> tuple[Any, tuple[Hashable, ...]]:
        """An array with all shards along `names` on its first axis, major to minor; and its further axes."""
        value = self.spread(value, names)
        rest = tuple(name for name in value.axes if name not in names)
        order = [value.axes.index(name) for name in (*names, *rest)]
        x = jnp.moveaxis(value.x, order, range(len(order)))
        count = math.prod(self.shape(names))
        return x.reshape(count, *x.shape[len(names) :]), rest

    def unflat(self, x: Any, names: Sequence[Hashable], rest: Sequence[Hashable]) -> Stacked:
        """The way back from `flat`."""
        x = x.reshape(*self.shape(names), *x.shape[1:])
        return self.ordered(x, [*names, *rest], range(len(names) + len(rest)))

    def split(self, value: Stacked, spec: Any) -> Stacked:
        """What shards get of a value by a `PartitionSpec`, whose axes are in this scope."""
        names, at = list(value.axes), list(range(len(value.axes)))
        shape = list(value.x.shape[: len(value.axes)])
        for size, entry in zip(value.shape, _entries(spec, len(value.shape)), strict=True):
            for name in entry:
                names.append(name)
                at.append(len(shape))
                shape.append(self.sizes[name])
            shape.append(size // math.prod(self.shape(entry)))
        return self.ordered(value.x.reshape(shape), names, at)

    def joined(self, value: Stacked, spec: Any) -> Stacked:
        """The way back from `split`: the whole, of what shards have."""
        entries = _entries(spec, len(value.shape))
        used = [name for entry in entries for name in entry]
        value = self.spread(value, used)
        outer = [name for name in value.axes if name not in used]
        order, shape = [value.axes.index(name) for name in outer], list(self.shape(outer))
        for dim, (size, entry) in enumerate(zip(value.shape, entries, strict=True)):
            order += [*map(value.axes.index, entry), len(value.axes) + dim]
            shape.append(size * math.prod(self.shape(entry)))
        return Stacked(value.x.transpose(order).reshape(shape), tuple(outer))


def _entries(spec: Any, ndim: int) -> list[tuple[Hashable, ...]]:
    return [as_names(entry) for entry in (*spec, *[None] * (ndim - len(spec)))]


def as_names(entry: Any) -> tuple[Hashable, ...]:
    """The axis names that stand for one axis of an array, or in one parameter of a collective."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list | set | frozenset) else (entry,)


def names_of_spec(spec: Any) -> list[Hashable]:
    """All axis names in a `PartitionSpec`."""
    return [name for entry in spec for name in as_names(entry)]
