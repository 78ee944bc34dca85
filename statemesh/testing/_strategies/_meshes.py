"""Strategies for meshes, for specs, and for the shapes that a spec divides; `given_meshes`."""

import math
from collections.abc import Callable, Hashable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

import statemesh as sm

from .. import _errors as errors
from .._errors import check
from .._types import AnyMesh, Fun


Shape: TypeAlias = tuple[int, ...]
# The type of the first argument of a composite strategy. Hypothesis has it for type checkers only.
if TYPE_CHECKING:
    Draw: TypeAlias = st.DrawFn
else:
    Draw = Callable[..., Any]
SpecEntry: TypeAlias = Hashable | tuple[Hashable, ...] | None
NAMES = ("x", "y", "z")


def check_mesh(what: str, mesh: object) -> None:
    check(what, "mesh", mesh, Mesh | AbstractMesh, "a jax.sharding.Mesh or AbstractMesh")


def meshes(
    *,
    axis_names: str | Sequence[Hashable] | None = None,
    max_devices: int | None = None,
    axis_types: Sequence[AxisType] = (AxisType.Auto, AxisType.Explicit),
) -> st.SearchStrategy[Mesh]:
    """Meshes of some of the devices that JAX has, half of them of Auto axes and half of Explicit ones.

    `jax.make_mesh` makes Explicit axes. The sizes of axes are powers of two, including one. JAX is asked for
    its devices when a mesh is drawn, not before. Shrinks to a mesh of one device.

    **Arguments:**

    - `axis_names`: the name of the axis, or the names of several in order. Left out, meshes have one to
        three axes, called `'x'`, `'y'` and `'z'`.
    - `max_devices`: the largest number of devices of a mesh. Left out: all.
    - `axis_types`: the types to draw from, equally often, the simplest first. All axes of a mesh have the
        same type.

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
        check(
            "meshes",
            "axis_names",
            axis_names,
            str | Sequence,
            "a name or several, as in ['x', 'y']",
        )
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        if not names:
            raise sm.StatemeshError(
                "meshes: axis_names is empty. Name an axis, or leave it out for axes called 'x', 'y' and 'z'."
            )
    if max_devices is not None:
        check("meshes", "max_devices", max_devices, Integral, "an int, 1 or more")
        if max_devices < 1:
            raise sm.StatemeshError(
                f"meshes: max_devices={max_devices}, and a mesh has at least one device. Give a positive "
                "number, or leave it out for all devices."
            )
    kinds = "several jax.sharding.AxisType"
    check("meshes", "axis_types", axis_types, Sequence, kinds)
    if not axis_types or not all(isinstance(kind, AxisType) for kind in axis_types):
        raise errors.bad_keyword("meshes", "axis_types", axis_types, kinds)

    @st.composite
    def drawn(draw: Draw) -> Mesh:
        devices = jax.devices()
        if max_devices is not None and max_devices > len(devices):
            raise sm.StatemeshError(
                f"meshes: max_devices={max_devices}, and JAX has {len(devices)} "
                f"device{'s' * (len(devices) != 1)}. Call statemesh.testing.set_devices({max_devices}) "
                "before JAX starts, as in conftest.py, or allow fewer."
            )
        axes = NAMES[: draw(st.integers(1, len(NAMES)))] if names is None else names
        # First the exponent of the number of devices is drawn. Then each axis takes a part of it, the first
        # axis what is left.
        left = draw(st.integers(0, (max_devices or len(devices)).bit_length() - 1))
        powers: list[int] = []
        for _ in axes[1:]:
            powers.insert(0, draw(st.integers(0, left)))
            left -= powers[0]
        sizes = [2**power for power in (left, *powers)]
        chosen = np.array(devices[: math.prod(sizes)]).reshape(sizes)
        return Mesh(chosen, axes, axis_types=(draw(st.sampled_from(axis_types)),) * len(axes))

    return drawn()


def specs(*, shape: Sequence[int], mesh: AnyMesh) -> st.SearchStrategy[PartitionSpec]:
    """Specs under which a mesh divides a shape.

    Every mesh axis splits one axis of the array or none. Several mesh axes may split the same axis, in any
    order. Some specs end in entries of `None`, which mean nothing. Shrinks to `P()`.

    **Arguments:**

    - `shape`: the shape of the array.
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
    check_mesh("specs", mesh)
    sides = "the shape of an array, as in shape=(8, 4)"
    check("specs", "shape", shape, Sequence, sides)
    if not all(isinstance(side, Integral) for side in shape):
        raise errors.bad_keyword("specs", "shape", shape, sides)

    @st.composite
    def drawn(draw: Draw) -> PartitionSpec:
        # To Hypothesis fewer choices are simpler. So every spec is drawn in the same number of choices.
        any_axis = st.integers(0, len(shape))
        left = list(shape)
        split: list[list[Hashable]] = [[] for _ in shape]
        for name in draw(st.permutations(mesh.axis_names)):
            size = mesh.shape[name]
            ways = [None, *(axis for axis, count in enumerate(left) if count % size == 0)]
            axis = ways[draw(any_axis) % len(ways)]
            if axis is not None:
                left[axis] //= size
                split[axis].append(name)
        used = max((axis + 1 for axis, names in enumerate(split) if names), default=0)
        written = max(used, draw(any_axis))
        return PartitionSpec(*[tuple(names) or None for names in split[:written]])

    return drawn()


def shapes(
    *,
    spec: PartitionSpec,
    mesh: AnyMesh,
    min_rank: int | None = None,
    max_rank: int | None = None,
    max_side: int = 3,
) -> st.SearchStrategy[Shape]:
    """Shapes that a spec divides.

    The shape of one shard's part is drawn, then multiplied by the number of shards along each axis. Few
    different shapes are drawn, since each costs a compile. Shrinks to the lowest rank and to parts of size
    one.

    **Arguments:**

    - `spec`: the spec that splits the arrays.
    - `mesh`: a `Mesh`, or an `AbstractMesh`.
    - `min_rank`: the smallest number of axes. Left out: the number of entries of `spec`.
    - `max_rank`: the largest number of axes. Left out: two, or `min_rank` if that is larger.
    - `max_side`: the largest size of an axis of one shard's part.

    **Returns:** a strategy of tuples of numbers.

    **Raises:** `SpecError` for a spec that names axes the mesh does not have, or has more entries than
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
    check("shapes", "spec", spec, PartitionSpec, "a jax.sharding.PartitionSpec")
    check_mesh("shapes", mesh)
    for argument, number in (("min_rank", min_rank), ("max_rank", max_rank)):
        if number is not None:
            check("shapes", argument, number, Integral, "an int, 0 or more")
    check("shapes", "max_side", max_side, Integral, "an int, 1 or more")
    factors = [split_count(names, spec, mesh) for names in spec]
    least = len(factors) if min_rank is None else min_rank
    most = max(least, 2) if max_rank is None else max_rank
    if least < len(factors):
        raise sm.SpecError(
            f"shapes: min_rank={least}, and {errors.spec_str(spec)} has {len(tuple(spec))} entries, one for "
            "each axis of an array."
        )
    if most < least or max_side < 1:
        raise sm.StatemeshError(
            f"shapes: there is no shape of rank {least} to {most} with sides from 1 to {max_side}. Give a "
            "max_rank that is no less than min_rank, and a positive max_side."
        )

    @st.composite
    def drawn(draw: Draw) -> Shape:
        rank = draw(st.integers(least, most))
        sides = draw(st.tuples(*[st.integers(1, max_side)] * rank))
        spread = (*factors, *[1] * (rank - len(factors)))
        return tuple(n * count for n, count in zip(sides, spread, strict=True))

    return drawn()


def split_count(entry: SpecEntry, spec: PartitionSpec, mesh: AnyMesh) -> int:
    """The number of parts into which an entry of a spec splits an axis."""
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    if unknown := [name for name in names if name not in mesh.shape]:
        raise sm.SpecError(
            f"shapes: {errors.spec_str(spec)} names {errors.names(unknown)}, and the mesh has the axes "
            f"{errors.names(mesh.axis_names)}."
        )
    return math.prod(mesh.shape[name] for name in names)


def given_meshes(
    *,
    axis_names: Sequence[str] | None = None,
    max_devices: int | None = None,
    **given_by: st.SearchStrategy[Any],
) -> Callable[[Fun], Fun]:
    """`hypothesis.given` for a test that takes a mesh as its argument `mesh`.

    **Arguments:**

    - `axis_names`, `max_devices`: as for `meshes`.
    - `given_by`: strategies for the other arguments of the test, by name.

    **Returns:** a decorator.

    !!! example

        ```python
        >>> import jax
        >>> from hypothesis import settings
        >>> from jax.sharding import PartitionSpec as P
        >>> from statemesh.testing import arrays, assert_equivalent, given_meshes
        >>> def share(x):
        ...     return x / (1 + jax.lax.psum(abs(x).sum(), "data"))
        >>> @settings(max_examples=5, deadline=None)
        ... @given_meshes(axis_names=["data"], x=arrays(shape=(8, 2)))
        ... def test_share(mesh, x):
        ...     assert_equivalent(share, (x,), meshes=[mesh], in_specs=P("data"), out_specs=P("data"))
        >>> test_share()

        ```
    """
    drawn: st.SearchStrategy[Any] = meshes(axis_names=axis_names, max_devices=max_devices)
    return given(mesh=drawn, **given_by)
