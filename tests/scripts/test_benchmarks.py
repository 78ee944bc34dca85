"""The compared programs compute the same, and the code that measures them runs and writes its results."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest

from tests.benchmarks.peers._case import Axes, Case, Kind
from tests.benchmarks.peers._peers import FLOOR, PEERS, maker
from tests.benchmarks.peers._pictures import PANELS, SHOWN, picture, small_picture
from tests.benchmarks.peers._run import Row, measure
from tests.benchmarks.peers._table import put, table


# The tests do not depend on brainstate; `measure` compares its results when it times it.
TESTED = [peer for peer in PEERS if "brainstate" not in peer and peer != FLOOR]


@functools.cache
def by_hand(kind: Kind, axes: Axes) -> np.ndarray:
    return after_two_steps(FLOOR, kind, axes)


def after_two_steps(peer: str, kind: Kind, axes: Axes) -> np.ndarray:
    made = maker(peer)(Case(kind, axes, 2, 4))
    for _ in range(2):
        jax.block_until_ready(made.step())
    return np.asarray(made.state())


@pytest.mark.slow
@pytest.mark.parametrize("axes", get_args(Axes))
@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("peer", TESTED)
def test_peers_compute_what_is_computed_by_hand(peer: str, kind: Kind, axes: Axes) -> None:
    start = Case(kind, axes, 2, 4).initial()[0]
    wanted = by_hand(kind, axes)
    assert not np.allclose(wanted, start)
    np.testing.assert_allclose(after_two_steps(peer, kind, axes), wanted, rtol=1e-5)


@pytest.mark.parametrize("axes", get_args(Axes))
def test_programs_run_on_the_type_of_axes_that_their_row_names(axes: Axes) -> None:
    for peer in (FLOOR, "statemesh, donating"):
        made = maker(peer)(Case("sharded", axes, 2, 1))
        for _ in range(2):
            jax.block_until_ready(made.step())
        mesh = made.state().sharding.mesh
        assert [kind.name for kind in mesh.axis_types] == [axes] and mesh.size == 2


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    peers = [FLOOR, "statemesh, donating"]
    return measure("sharded", ["Explicit", "Auto"], 2, 3, peers, 2, 0.01, 100.0)


@pytest.mark.slow
def test_they_are_timed_in_processes_of_their_own(rows: list[Row]) -> None:
    peers = [FLOOR, "statemesh, donating"]
    assert [row.peer for row in rows] == peers * 2
    assert [row.axes for row in rows] == ["Explicit"] * 2 + ["Auto"] * 2
    for row in rows:
        assert row.refused is None
        assert (row.traces, row.compiles) == (0, 0)
        for seconds in (row.wall, row.host, row.first, row.second):
            assert seconds is not None and seconds > 0


@pytest.mark.slow
def test_a_peer_that_fails_is_left_out_with_its_reason() -> None:
    (row,) = measure("sharded", ["Explicit"], 2, 0, ["statemesh"], 1, 0.01, 100.0)
    assert row.wall is None and row.refused is not None and "Error" in row.refused


def made_up(peer: str, wall: float, **more: Any) -> Row:
    return Row(peer, "sharded", "Explicit", 8, 10, wall, wall / 10, 1.0, 0.5, 0.0, 0.0, **more)


def test_the_table_has_the_first_run_the_range_of_the_ratios_and_the_quickest_library() -> None:
    runs = [[made_up(FLOOR, 2e-4), made_up("statemesh", 3e-4 + k * 1e-4)] for k in (0, 1)]
    runs[0].append(Row("brainstate", "sharded", "Explicit", 8, 10, refused="took over 5 s"))
    runs[0].append(made_up("jax.Ref", 4e-4))
    *_, floor, ours, refused, slower = table(runs)
    assert floor.startswith(
        "| sharded | Explicit | 8 | 10 | by hand | 200 | 1.00 (1.00-1.00) | 20 |"
    )
    assert ours.startswith(
        "| sharded | Explicit | 8 | 10 | statemesh | **300** | 1.50 (1.50-2.00) | 30 | 1.50"
    )
    assert slower.startswith("| sharded | Explicit | 8 | 10 | jax.Ref | 400 |")
    assert "took over 5 s" in refused
    assert len({line.count("|") for line in table(runs)}) == 1


def test_a_ratio_is_to_the_program_by_hand_on_the_same_type_of_axes() -> None:
    explicit = [made_up(FLOOR, 2e-4), made_up("statemesh", 3e-4)]
    auto = [dataclasses.replace(row, axes="Auto", wall=1e-4) for row in explicit]
    *_, of_explicit, _, of_auto = table([[*explicit, *auto]])
    assert of_explicit.startswith("| sharded | Explicit | 8 | 10 | statemesh | **300** | 1.50 |")
    assert of_auto.startswith("| sharded | Auto | 8 | 10 | statemesh | **100** | 1.00 |")


def test_pages_get_the_tables_of_their_programs_and_keep_the_rest(tmp_path: Path) -> None:
    for name, kind in (("benchmarks.md", "sharded"), ("benchmarks-more.md", "reduced")):
        old = f"<!-- table of {kind}: begin -->\nold\n<!-- table of {kind}: end -->"
        (tmp_path / name).write_text(f"before\n{old}\nafter\n")
    runs = [[made_up("statemesh", 3e-4)]]
    put(tmp_path, "new", runs)
    put(tmp_path, "newer", runs)
    text = (tmp_path / "benchmarks.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "newer" in text and "old" not in text and text.count("<!-- table") == 2
    assert text.count("| statemesh |") == 1
    assert "old" in (tmp_path / "benchmarks-more.md").read_text()  # nothing was measured


def test_the_picture_shows_the_number_of_devices_with_the_most_sizes(tmp_path: Path) -> None:
    sizes = [dataclasses.replace(made_up("statemesh", 3e-4), states=k) for k in (1, 10)]
    wide = dataclasses.replace(made_up("statemesh", 3e-4), devices=64)
    picture([made_up(FLOOR, 2e-4), *sizes, wide], tmp_path / "assets" / "a.svg")
    drawn = (tmp_path / "assets" / "a.svg").read_text()
    assert "statemesh" in drawn and "on 8 devices" in drawn


def test_the_small_picture_has_a_bar_for_each_program_and_library(tmp_path: Path) -> None:
    rows = [
        dataclasses.replace(made_up(peer, 1e-3 * (10 * k + j)), kind=kind, states=states)
        for k, (kind, states) in enumerate({"sharded": 100, "reduced": 100, "training": 10}.items())
        for j, peer in enumerate(SHOWN, 1)
    ]
    small_picture(rows, tmp_path / "small.svg")
    drawn = (tmp_path / "small.svg").read_text()
    for text in [
        *PANELS.values(),
        *SHOWN.values(),
        *(f"{10 * k + j:.1f}" for k in range(3) for j in (1, 5)),
    ]:
        assert text in drawn
    small_picture(rows[:5], tmp_path / "one.svg")
    assert "11.0" not in (tmp_path / "one.svg").read_text()
