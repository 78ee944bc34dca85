"""The compared programs compute the same, and the code that measures them runs and writes its results."""

from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest

from tests.scripts.benchmarks.peers._case import Axes, Case, Kind, Made
from tests.scripts.benchmarks.peers._models import Model
from tests.scripts.benchmarks.peers._peers import FLOOR, PEERS, TRAINERS, maker
from tests.scripts.benchmarks.peers._pictures import PANELS, SHOWN, picture, small_picture
from tests.scripts.benchmarks.peers._run import Row, measure
from tests.scripts.benchmarks.peers._table import put, tables


# The tests do not depend on brainstate; `measure` compares its results when it times it.
TESTED = [peer for peer in PEERS if "brainstate" not in peer and peer != FLOOR]


PROGRAMS = [kind for kind in get_args(Kind) if kind not in get_args(Model)]


def after_two_steps(peer: str, case: Case) -> Made:
    made = maker(case.kind, peer)(case)
    for _ in range(2):
        jax.block_until_ready(made.step())
    return made


@pytest.mark.slow
@pytest.mark.parametrize("axes", get_args(Axes))
@pytest.mark.parametrize("kind", PROGRAMS)
def test_peers_compute_what_is_computed_by_hand(kind: Kind, axes: Axes) -> None:
    case = Case(kind, axes, 2, 4)
    by_hand = after_two_steps(FLOOR, case).state()
    assert [kind.name for kind in by_hand.sharding.mesh.axis_types] == [axes]
    assert not np.allclose(by_hand, case.initial()[0])
    # Each peer on one type of axes in half of the programs.
    half = (PROGRAMS.index(kind) + get_args(Axes).index(axes)) % 2
    for peer in TESTED[half::2]:
        state = after_two_steps(peer, case).state()
        np.testing.assert_allclose(state, by_hand, rtol=1e-5, err_msg=peer)


@pytest.mark.slow
def test_models_are_trained_alike_by_all() -> None:
    case = Case("cnn", "Explicit", 2, 16)
    by_hand = after_two_steps(FLOOR, case).state()
    for peer in TRAINERS:
        state = after_two_steps(peer, case).state()
        np.testing.assert_allclose(state, by_hand, rtol=1e-4, atol=1e-5, err_msg=peer)


@pytest.mark.slow
def test_they_are_timed_in_processes_of_their_own() -> None:
    peers = [FLOOR, "statemesh, donating"]
    rows = measure("sharded", ["Explicit"], 2, 3, peers, 2, 3, 0.01, 100.0)
    assert [row.peer for row in rows] == peers
    for row in rows:
        assert row.refused is None
        assert (row.traces, row.compiles) == (0, 0)
        for seconds in (row.wall, row.host, row.first, row.second):
            assert seconds is not None and seconds > 0
        assert (len(row.firsts), len(row.walls), len(row.hosts)) == (2, 3, 3)
        assert row.wall == np.median(row.walls) and row.first == np.median(row.firsts)


def measured(peer: str, wall: float, kind: str = "sharded", axes: str = "Explicit") -> Row:
    states = 10 if kind == "training" else 100
    return Row(peer, kind, axes, 8, states, wall, wall / 10, 1.0, 0.5, 0.0, 0.0)


def test_tables_have_ratios_to_the_program_by_hand_and_the_quickest_library(tmp_path: Path) -> None:
    rows = [measured(FLOOR, 2e-4), measured(f"{FLOOR}, donating", 1e-4)]
    rows += [measured("statemesh", 3e-4), measured("jax.Ref", 4e-4)]
    rows.append(Row("brainstate", "sharded", "Explicit", 8, 100, refused="took over 5 s"))
    rows += [measured(FLOOR, 1e-4, axes="Auto"), measured("statemesh", 5e-4, axes="Auto")]
    found = tables(rows)
    assert found["programs on 8, Explicit"] == [
        *("| wall | sharded 100 |", "| --- | --- |"),
        *("| by hand | 200 µs |", "| by hand, donating | 0.50 |"),
        *("| statemesh | **1.50** |", "| jax.Ref | 2.00 |", "| brainstate | refused |", ""),
        *("| host | sharded 100 |", "| --- | --- |"),
        *("| by hand | 20 µs |", "| by hand, donating | 0.50 |"),
        *("| statemesh | **1.50** |", "| jax.Ref | 2.00 |", "| brainstate | refused |"),
    ]
    assert found["devices, Explicit"][0] == "| wall | 8 devices |"
    of_axes = {
        f"{what}, {axes}" for what in ("programs on 8", "devices") for axes in get_args(Axes)
    }
    assert found.keys() == of_axes
    assert found["programs on 8, Auto"][-1] == "| statemesh | **5.00** |"
    (tmp_path / "assets").mkdir()
    page = tmp_path / "benchmarks.md"
    place = "<!-- table of programs on 8, Explicit: {} -->\n"
    page.write_text(f"before\n{place.format('begin')}old\n{place.format('end')}after\n")
    put(tmp_path, "new", rows)
    put(tmp_path, "newer", rows)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "newer" in text and "old" not in text and text.count("| wall |") == 1
    head, *lines = (tmp_path / "assets" / "benchmarks.csv").read_text().splitlines()
    assert head.startswith("peer,kind,axes,devices,states,wall,host,first") and len(lines) == 7
    assert lines[2].startswith("statemesh,sharded,Explicit,8,100,0.0003,3e-05,1,")


def test_models_are_shown_on_both_types_of_axes() -> None:
    rows = [
        Row(peer, kind, axes, 8, 27, 3e-4 * k, 1e-4, 0.5, 0.1, 0.0, 0.0)
        for kind in get_args(Model)
        for axes in get_args(Axes)
        for k, peer in ((1, FLOOR), (2, "statemesh"))
    ]
    found = tables([*rows, measured(FLOOR, 2e-4)])["models"]
    columns = [f"{kind}, {axes} 8" for kind in get_args(Model) for axes in get_args(Axes)]
    assert found[0] == f"| wall | {' | '.join(columns)} |"
    assert found[3] == "| statemesh |" + " **2.00** |" * len(columns)
    assert [line.split(" |")[0] for line in found if "by hand" not in line] == [
        *("| wall", "| ---", "| statemesh", ""),
        *("| host", "| ---", "| statemesh", ""),
        *("| first", "| ---", "| statemesh"),
    ]


def test_pictures_show_programs_and_libraries(tmp_path: Path) -> None:
    rows = [
        measured(peer, 1e-3 * (10 * k + j), kind)
        for k, kind in enumerate(PANELS)
        for j, peer in enumerate(SHOWN, 1)
    ]
    files: dict[str, Any] = {"a.svg": picture, "small.svg": small_picture}
    for name, draw in files.items():
        draw(rows, tmp_path / "assets" / name)
    assert "on 8 devices" in (tmp_path / "assets" / "a.svg").read_text()
    small = (tmp_path / "assets" / "small.svg").read_text()
    for text in (*PANELS.values(), *SHOWN.values(), "1.0", "25.0"):
        assert text in small
