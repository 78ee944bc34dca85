"""Random streams on random meshes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..base.settings import fewer
from ..programs import MeshShape
from ..strategies import meshes
from .streams import ON_MESHES, SPLIT, Draws, check_per_shard, check_streams


seeds = st.integers(0, 2**31 - 1)


def draws(*of: str | int) -> st.SearchStrategy[Draws]:
    """One draw of each kind, in any order; sometimes none at all."""
    every = st.permutations(of).map(tuple)
    return st.integers(0, 5).flatmap(lambda n: st.just(()) if n == 5 else every)


def some(mesh: MeshShape, least: int) -> st.SearchStrategy[tuple[str, ...]]:
    """At least `least` axes of a mesh, in any order."""
    ordered = st.permutations(mesh.axis_names)
    return ordered.flatmap(
        lambda names: st.integers(least, len(names)).map(lambda n: tuple(names[:n]))
    )


@fewer(1 / 6)  # Each example compiles programs of its own.
@given(st.data())
def test_streams_are_those_of_the_unsharded_run(data: st.DataObject) -> None:
    mesh = data.draw(meshes(), "mesh")
    axes = data.draw(some(mesh, 0), "axes of the rows")
    impl = data.draw(st.sampled_from(list(ON_MESHES)), "implementation")
    drawn = data.draw(draws(*ON_MESHES[impl]), "draws")
    jit = data.draw(st.booleans(), "inside jit")
    for seed in data.draw(st.lists(seeds, min_size=1, max_size=3), "seeds"):
        check_streams(mesh, axes, drawn, seed, impl, jit=jit)


@pytest.mark.slow
@fewer(1 / 6)
@given(st.data())
def test_a_key_per_shard(data: st.DataObject) -> None:
    mesh = data.draw(meshes(), "mesh")
    axes = data.draw(some(mesh, 1), "axes of the keys")
    impl = data.draw(st.sampled_from(list(ON_MESHES)), "implementation")
    drawn = data.draw(draws(SPLIT, 2), "draws")
    for seed in data.draw(st.lists(seeds, min_size=1, max_size=3), "seeds"):
        check_per_shard(mesh, axes, drawn, seed, impl)
