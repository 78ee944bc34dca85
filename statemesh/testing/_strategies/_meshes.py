"""Strategies for meshes, for specs, and for the shapes that a spec divides. Each shrinks to the simplest."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .. import _errors as errors


Shape: TypeAlias = tuple[int, ...]
AnyMesh: TypeAlias = Mesh | AbstractMesh
# What a strategy draws with; the type of Hypothesis's own cannot be checked at run time.
if TYPE_CHECKING:
    Draw: TypeAlias = st.DrawFn
else:
    Draw = Callable[..., Any]
NAMES = ("x", "y", "z")


def meshes(
    *,
    axis_names: str | Sequence[Hashable] | None = None,
    max_devices: int | None = None,
    axis_types: Sequence[AxisType] = (AxisType.Auto, AxisType.Explicit),
) -> st.SearchStrategy[Mesh]:
    """Meshes of some of the devices that there are.

    Sizes of axes are powers of two, one among them. JAX is asked for its devices when a mesh is drawn, not
    before. Shrinks to a mesh of one device.

    **Arguments:**

    - `axis_names`: the name of one axis, or of several in order. Left out, meshes have one to three axes,
        called `'x'`, `'y'` and `'z'`.
    - `max_devices`: how many devices a mesh may have. Left out: all.
    - `axis_types`: one of them is drawn for all axes of a mesh; the first is the simplest.

    **Returns:** a strategy of `jax.sharding.Mesh`.

    **Raises:** `StatemeshError`, when a mesh is drawn, where JAX has fewer devices than `max_devices`.

    !!! example

        ```python
        >>> from hypothesis import find
        >>> from statemesh.testing import meshes
        >>> dict(find(meshes(axis_names="data"), lambda mesh: True).shape)
        {'data': 1}

        ```
    """
    names = None
    if axis_names is not None:
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        if not names:
            raise errors.no_axis_names()
    if max_devices is not None and max_devices < 1:
        raise errors.no_devices(max_devices)
    return _meshes(names, max_devices, tuple(axis_types))


@st.composite
def _meshes(
    draw: Draw,
    names: tuple[Hashable, ...] | None,
    most: int | None,
    types: tuple[AxisType, ...],
) -> Mesh:
    devices = jax.devices()
    if most is not None and most > len(devices):
        raise errors.too_many_devices(most, len(devices))
    if names is None:
        names = NAMES[: draw(st.integers(1, len(NAMES)))]
    # Sizes as powers of two: all of them together, then what each axis takes of it, the first one the rest.
    left = draw(st.integers(0, (most or len(devices)).bit_length() - 1))
    powers: list[int] = []
    for _ in names[1:]:
        powers.insert(0, draw(st.integers(0, left)))
        left -= powers[0]
    sizes = [2**power for power in (left, *powers)]
    chosen = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    return Mesh(chosen, names, axis_types=(draw(st.sampled_from(types)),) * len(names))


def specs(*, shape: Sequence[int], mesh: AnyMesh) -> st.SearchStrategy[PartitionSpec]:
    """Specs under which a mesh divides a shape.

    Every mesh axis splits one of the array's axes or none; several may split the same one, in any order.
    Entries of `None` at the end, which mean nothing, are written out now and then. Shrinks to `P()`.

    **Arguments:**

    - `shape`: of the array.
    - `mesh`: a `Mesh`, or an `AbstractMesh`.

    **Returns:** a strategy of `jax.sharding.PartitionSpec`.

    !!! example

        ```python
        >>> from hypothesis import find
        >>> from jax.sharding import AbstractMesh
        >>> from statemesh.testing import specs
        >>> mesh = AbstractMesh((4, 2), ("x", "y"))
        >>> find(specs(shape=(3, 8), mesh=mesh), lambda spec: "y" in str(spec))
        P(None, 'y')

        ```
    """
    return _specs(tuple(shape), mesh)


@st.composite
def _specs(draw: Draw, shape: Shape, mesh: AnyMesh) -> PartitionSpec:
    # As many choices whatever is chosen: Hypothesis takes fewer for simpler.
    where = st.integers(0, len(shape))
    left = list(shape)
    split: list[list[Hashable]] = [[] for _ in shape]
    for name in draw(st.permutations(mesh.axis_names)):
        size = mesh.shape[name]
        ways = [None, *(axis for axis, count in enumerate(left) if count % size == 0)]
        axis = ways[draw(where) % len(ways)]
        if axis is not None:
            left[axis] //= size
            split[axis].append(name)
    used = max((axis + 1 for axis, names in enumerate(split) if names), default=0)
    written = max(used, draw(where))
    return PartitionSpec(*[tuple(names) or None for names in split[:written]])


def shapes(
    *,
    spec: PartitionSpec,
    mesh: AnyMesh,
    min_rank: int | None = None,
    max_rank: int | None = None,
    max_side: int = 3,
) -> st.SearchStrategy[Shape]:
    """Shapes that a spec divides.

    The part of one shard is drawn, and the shape is as many of those as there are shards. There are few
    different ones, since each costs a compile. Shrinks to the lowest rank and to parts of size one.

    **Arguments:**

    - `spec`: how arrays of these shapes are split.
    - `mesh`: a `Mesh`, or an `AbstractMesh`.
    - `min_rank`: the least number of axes. Left out: as many as `spec` has entries.
    - `max_rank`: the largest number of axes. Left out: two, or `min_rank` if that is more.
    - `max_side`: the largest size of an axis of one shard's part.

    **Returns:** a strategy of tuples of numbers.

    **Raises:** `SpecError` for a spec with axes that the mesh does not have, or with more entries than
    `min_rank`; `StatemeshError` where `max_rank` is less than `min_rank`, or `max_side` less than one.

    !!! example

        ```python
        >>> from hypothesis import find
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> from statemesh.testing import shapes
        >>> mesh = AbstractMesh((4, 2), ("x", "y"))
        >>> find(shapes(spec=P(None, ("x", "y")), mesh=mesh, min_rank=3), lambda shape: True)
        (1, 8, 1)

        ```
    """
    factors = [factor(names, spec, mesh) for names in spec]
    least = len(factors) if min_rank is None else min_rank
    most = max(least, 2) if max_rank is None else max_rank
    if least < len(factors):
        raise errors.rank_too_low(spec, least)
    if most < least or max_side < 1:
        raise errors.no_shapes(least, most, max_side)
    return _shapes(tuple(factors), least, most, max_side)


@st.composite
def _shapes(draw: Draw, factors: Shape, least: int, most: int, side: int) -> Shape:
    rank = draw(st.integers(least, most))
    sides = draw(st.tuples(*[st.integers(1, side)] * rank))
    spread = (*factors, *[1] * (rank - len(factors)))
    return tuple(n * count for n, count in zip(sides, spread, strict=True))


def factor(entry: Any, spec: Any, mesh: AnyMesh) -> int:
    """Into how many parts an entry of a spec splits an axis."""
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    if unknown := [name for name in names if name not in mesh.shape]:
        raise errors.unknown_axes(spec, unknown, mesh.axis_names)
    return math.prod(mesh.shape[name] for name in names)
