"""A policy merges with the old value of the state that was written, at whatever position it is returned.

Arrays outside States, and values that are the same on all shards, are also checked.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..base.checks import HOMES
from ..base.settings import fewer
from ..programs import Branch, MeshShape
from .cases import HOWS, LANES, STYLES, WRAPS, Given, Moves, Write, given_to, moves
from .checks import check_arrays, check_moves


# Every example compiles one or two programs.
few = fewer(1 / 2)

# `{"a": m["b"].set(m["b"].value + x.sum()), "b": m["a"].set(m["a"].value + x.sum())}` on 1 and 2.
SWAP = Moves(
    MeshShape((4,), explicit=True), ("x",), Branch("dict", (0, 1)), (Write(), Write()), (1, 0)
)
ROWS = np.arange(12, dtype=np.float32)
ONE, TWO = np.array(1, np.float32), np.array(2, np.float32)
NUMBERS = Given([ONE, TWO], [], [(ROWS, np.bool_(True)), (ROWS, np.bool_(0))])


@pytest.mark.parametrize("how", ["shard_map", "vmap2"])
@pytest.mark.parametrize("wrap", ["", *WRAPS])
def test_two_states_that_change_places(wrap: str, how: str) -> None:
    moved = "after" if wrap == "scan" else "inside"
    wraps = (wrap,) if wrap else ()
    check_moves(dataclasses.replace(SWAP, wraps=wraps, moved=moved), NUMBERS, how)


@pytest.mark.parametrize("style", STYLES[1:])
def test_two_states_that_change_places_in_other_styles(style: str) -> None:
    check_moves(dataclasses.replace(SWAP, style=style), NUMBERS, "shard_map")


def test_rows_of_all_shards_count_once() -> None:
    still = (Write("gathered"), Write("gathered"))
    check_moves(dataclasses.replace(SWAP, states=still, sources=(0, 1)), NUMBERS, "shard_map")


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("size", [1, 2])
def test_two_arrays_beside_them(size: int, home: str) -> None:
    """One array is returned as it came, one is written."""
    case = dataclasses.replace(
        SWAP,
        mesh=MeshShape((size,), explicit=size == 2),
        tree=Branch("dict", (0, 2, 1, 3)),
        arrays=(Write(None), Write("whole")),
        sources=(0, 1, 2, 3),
    )
    pair = np.arange(2, dtype=np.float32)
    check_arrays(case, dataclasses.replace(NUMBERS, arrays=[pair, pair]), home)


@given(st.data())
def test_states_that_change_places(data: st.DataObject) -> None:
    check_drawn(data, moves())


@few
@given(st.data())
def test_what_only_a_run_can_tell_is_right_or_names_two_states(data: st.DataObject) -> None:
    check_drawn(data, moves(unknown=True))


@few
@given(st.data())
def test_what_is_the_same_on_all_shards_counts_once(data: st.DataObject) -> None:
    check_drawn(data, moves(adds=("gathered", ""), policies=("sum", "mean", "max")))


@few
@given(st.data())
def test_arrays_beside_states(data: st.DataObject) -> None:
    case = data.draw(moves(most_arrays=3), "case")
    home = data.draw(st.sampled_from(HOMES), "home")
    check_arrays(case, data.draw(given_to(moves=case, calls=1), "given"), home)


def check_drawn(data: st.DataObject, strategy: st.SearchStrategy[Moves]) -> None:
    case = data.draw(strategy, "case")
    # Lanes have one axis.
    lanes = len(case.mesh.sizes) == 1
    how = data.draw(st.sampled_from([how for how in HOWS if lanes or how not in LANES]), "how")
    check_moves(case, data.draw(given_to(moves=case), "given"), how)
