"""What is drawn: meshes, specs, shapes, arrays, model trees and filters. Each shrinks to the simplest.

Shapes come from a small set, since each costs a compile; values are free.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import statemesh as sm

from .programs import FLOAT, INT, Axes, Branch, MeshShape, Spec
from .reference import Array
from .trees import FORMS, KINDS, grow


LINES = ((1,), (2,), (4,), (8,))
GRIDS = ((2, 2), (4, 2), (2, 2, 2))
STATICS = ("relu", "", None)


def meshes(*, grids: bool = True) -> st.SearchStrategy[MeshShape]:
    """Meshes of one to eight devices, of Auto axes or Explicit ones."""
    sizes = st.sampled_from(LINES + GRIDS if grids else LINES)
    return st.builds(MeshShape, sizes, explicit=st.booleans())


@st.composite
def specs(draw: st.DrawFn, *, axes: Axes, rank: int) -> Spec:
    """Which of an array's axes are split over which of these mesh axes, several on one included."""
    split: list[list[str]] = [[] for _ in range(rank)]
    for name in draw(st.permutations(axes)):
        where = draw(st.integers(-1, rank - 1))
        if where >= 0:
            split[where].append(name)
    return tuple(map(tuple, split))


@st.composite
def all_split(draw: st.DrawFn, *, axes: Axes, rank: int) -> Spec:
    """The same, with every one of the mesh axes used."""
    split: list[list[str]] = [[] for _ in range(rank)]
    for name in draw(st.permutations(axes)):
        split[draw(st.integers(0, rank - 1))].append(name)
    return tuple(map(tuple, split))


def sides(*, rank: int) -> st.SearchStrategy[tuple[int, ...]]:
    """The shape of one shard's part; a spec dilates it by the mesh."""
    return st.tuples(*[st.integers(1, 3)] * rank)


def dilated(side: tuple[int, ...], spec: Spec, mesh: MeshShape) -> tuple[int, ...]:
    """The global shape whose parts under a spec have shape `side`."""
    return tuple(n * mesh.size(axes) for n, axes in zip(side, spec, strict=True))


@st.composite
def arrays(draw: st.DrawFn, *, shape: tuple[int, ...], dtype: str = FLOAT) -> Array:
    """Arrays filled with a few drawn numbers in turn, finite and none of them subnormal.

    Up to seven, a number that divides no power of two: then parts on different shards differ.
    """
    numbers: st.SearchStrategy[Any] = st.integers(-50, 50)
    if dtype == FLOAT:
        numbers = st.floats(-4, 4, width=32, allow_subnormal=False)
    few = draw(st.lists(numbers, min_size=1, max_size=7))
    return np.resize(np.array(few, {FLOAT: np.float32, INT: np.int32}[dtype]), shape)


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


TAGS = ("a", "b")


@st.composite
def states(draw: st.DrawFn, *, random: bool = True) -> sm.State:
    """States of any kind, random streams too if wanted, with any metadata."""
    tag = draw(st.sampled_from([None, "a", "b", ("a", "b")]))
    name = draw(st.sampled_from([None, "n"]))
    kind = draw(st.sampled_from([*KINDS, *(["RandomState"] if random else [])]))
    if kind == "RandomState":
        return sm.RandomState(jax.random.key(draw(st.integers(0, 3))), name=name, tag=tag)
    shape = draw(st.sampled_from([(), (2,), (2, 1)]))
    value: Any = draw(arrays(shape=shape, dtype=draw(st.sampled_from([FLOAT, INT]))))
    value = draw(st.sampled_from([value, {"a": value, "b": (value, 1.0)}]))
    return KINDS[kind](value, name=name, tag=tag, reduce=draw(st.sampled_from([None, "sum"])))


def leaves() -> st.SearchStrategy[Any]:
    """Leaves that are no State: arrays, numbers, and what is not even an array."""
    return st.one_of(
        st.sampled_from([None, "relu", 1, 0.5, True]),
        st.sampled_from([jnp.tanh, np.float32, jnp.float32, slice(None)]),
        st.builds(jnp.asarray, arrays(shape=(2,))),
        arrays(shape=(2,)),
    )


@st.composite
def trees(draw: st.DrawFn, *, min_states: int = 0) -> Any:
    """Trees of modules, dictionaries, lists and tuples with States and other leaves."""
    units = draw(st.lists(states(), min_size=min_states, max_size=5))
    units += draw(st.lists(leaves(), max_size=3))
    template = draw(templates(count=len(units)))
    return grow(template, lambda k: units[k])
