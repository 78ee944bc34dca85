"""Strategies for the parts of cases, as plain data: drawn by `statemesh.testing`, and written without JAX.

Shapes come from a small set, since each costs a compile; values are free.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from statemesh import testing

from .base.arrays import Array
from .programs import FLOAT, Axes, Branch, MeshShape, Spec
from .trees import FORMS


STATICS = ("relu", "", None)


def meshes() -> st.SearchStrategy[MeshShape]:
    """Meshes of one to eight devices, of Auto axes or Explicit ones."""
    return testing.meshes().map(
        lambda mesh: MeshShape(tuple(mesh.shape.values()), AxisType.Explicit in mesh.axis_types)
    )


def specs(*, axes: Axes, rank: int) -> st.SearchStrategy[Spec]:
    """Which of an array's axes are split over which of these mesh axes, several on one included."""
    # Axes of size one divide everything: the arrays are made afterwards.
    mesh = AbstractMesh((1,) * len(axes), axes)
    return testing.specs(shape=(1,) * rank, mesh=mesh).map(lambda spec: plain_spec(spec, rank))


def plain_spec(spec: PartitionSpec, rank: int) -> Spec:
    """A spec with an entry for each axis of an array, and each a tuple."""
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
    return (*entries, *[()] * (rank - len(entries)))


@st.composite
def all_split(draw: st.DrawFn, *, axes: Axes, rank: int) -> Spec:
    """The same, with every one of the mesh axes used."""
    split: list[list[str]] = [[] for _ in range(rank)]
    for name in draw(st.permutations(axes)):
        split[draw(st.integers(0, rank - 1))].append(name)
    return tuple(map(tuple, split))


def sides(*, rank: int) -> st.SearchStrategy[tuple[int, ...]]:
    """The shape of one shard's part; a spec dilates it by the mesh."""
    single = AbstractMesh((1,), ("x",))
    return testing.shapes(spec=PartitionSpec(), mesh=single, min_rank=rank, max_rank=rank)


def dilated(side: tuple[int, ...], spec: Spec, mesh: MeshShape) -> tuple[int, ...]:
    """The global shape whose parts under a spec have shape `side`."""
    return tuple(n * mesh.size(axes) for n, axes in zip(side, spec, strict=True))


def arrays(*, shape: tuple[int, ...], dtype: str = FLOAT) -> st.SearchStrategy[Array]:
    """Arrays of floats from -4 to 4, or integers from -50 to 50."""
    most = 4 if dtype == FLOAT else 50
    return testing.arrays(shape=shape, dtype=dtype, min_value=-most, max_value=most)


@st.composite
def templates(draw: st.DrawFn, *, count: int) -> Branch:
    """Containers in one another that hold each of `count` numbers once, and static leaves."""
    parts: list[Branch | int | str | None] = list(draw(st.permutations(range(count))))
    parts += draw(st.lists(st.sampled_from(STATICS), max_size=2))
    while len(parts) > 4:
        parts = [*parts[3:], Branch(draw(st.sampled_from(FORMS)), tuple(parts[:3]))]
    # Now and then a level more, so that paths of different lengths end alike.
    if len(parts) > 1 and draw(st.booleans()):
        cut = draw(st.integers(1, len(parts)))
        parts = [Branch(draw(st.sampled_from(FORMS)), tuple(parts[:cut])), *parts[cut:]]
    return Branch(draw(st.sampled_from(FORMS)), tuple(parts))


def leaves() -> st.SearchStrategy[Any]:
    """Leaves that are no State: arrays, numbers, and what is not even an array, nor hashable."""
    return st.one_of(
        st.sampled_from([None, "relu", 1, 0.5, True, jnp.tanh, np.float32, jnp.float32]),
        st.builds(slice, st.none()),
        st.builds(set),
        arrays(shape=(2,)).map(jnp.asarray),
        arrays(shape=(2,)),
    )


def trees(*, min_states: int = 0) -> st.SearchStrategy[Any]:
    """Trees of modules, dictionaries, lists and tuples with States and other leaves; some stand twice."""
    modules = st.one_of(
        *[
            testing.modules(leaves=leaves(), min_states=min_states, shared=shared)
            for shared in (False, True)
        ]
    )
    return st.one_of(
        modules,
        st.tuples(modules),
        st.dictionaries(st.sampled_from("ab"), modules, min_size=1),
        st.lists(modules, min_size=min(min_states, 1), max_size=2),
    )
