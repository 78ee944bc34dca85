"""The measurements as tables in the pages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from tests.scripts.benchmarks.peers._models import Model
from tests.scripts.benchmarks.peers._peers import FLOOR
from tests.scripts.benchmarks.peers._run import Row


BEGIN, END = "<!-- table of {}: begin -->", "<!-- table of {}: end -->"
HEAD = "| program | axes | devices | states | | wall | to hand | host | to hand | first | held |"


HEAD_OF_MODELS = (
    "| model | axes | devices | | wall | to hand | host | to hand | first | to hand | held |"
)


def read(files: Sequence[Path]) -> tuple[str, list[list[Row]]]:
    """The machine, and the rows of each run."""
    saved = [json.loads(file.read_text()) for file in files]
    return saved[0]["about"], [[Row(**row) for row in one["rows"]] for one in saved]


def firsts(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Each program with each peer, from the first run that has it."""
    found: dict[tuple[str, str, int, int, str], Row] = {}
    for row in (row for rows in runs for row in rows):
        found.setdefault((*_case(row), row.peer), row)
    return list(found.values())


def tables(runs: Sequence[Sequence[Row]]) -> list[str]:
    """Lines of Markdown: the table of the programs, and that of the models that are trained."""
    programs = [[row for row in rows if row.kind not in get_args(Model)] for rows in runs]
    models = [row for row in firsts(runs) if row.kind in get_args(Model)]
    return [
        *(table(programs) if any(programs) else []),
        *(["", *table_of_models(models)] if models else []),
    ]


def table_of_models(rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown: medians with their range over rounds, and the ratios of medians."""
    lines = [HEAD_OF_MODELS, "|" + " --- |" * HEAD_OF_MODELS.count(" |")]
    for row in rows:
        place = f"| {row.kind} | {row.axes} | {row.devices} | {row.peer} |"
        if row.wall is None or row.host is None or row.first is None:
            lines.append(f"{place} {row.refused} |" + " |" * 6)
            continue
        shown = [
            f"{1e6 * row.wall:.0f}{_spread(1e6, row.walls)}",
            _range([_ratio(row, rows, "wall")]),
            f"{1e6 * row.host:.0f}{_spread(1e6, row.hosts)}",
            _range([_ratio(row, rows, "host")]),
            f"{1e3 * row.first:.0f}{_spread(1e3, row.firsts)}",
            _range([_ratio(row, rows, "first")]),
            "" if row.peak is None else f"{row.peak:.0f}",
        ]
        lines.append(f"{place} {' | '.join(shown)} |")
    return lines


def _spread(unit: float, seconds: Sequence[float]) -> str:
    return f" ({unit * min(seconds):.0f}-{unit * max(seconds):.0f})" if len(seconds) > 1 else ""


def table(runs: Sequence[Sequence[Row]]) -> list[str]:
    """Lines of Markdown: the first run of each program, with the range of its ratios over all runs.

    The wall time of the quickest library is bold. What is written by hand is none.
    """
    lines = [HEAD, "|" + " --- |" * HEAD.count(" |")]
    found = firsts(runs)
    quickest: dict[tuple[str, str, int, int], float] = {}
    for row in found:
        if row.wall is not None and not row.peer.startswith(FLOOR):
            quickest[_case(row)] = min(row.wall, quickest.get(_case(row), row.wall))
    for row in found:
        anew = ", compiling at every call" if row.traces or row.compiles else ""
        place = f"| {row.kind} | {row.axes} | {row.devices} | {row.states} | {row.peer}{anew} |"
        if row.wall is None or row.host is None:
            lines.append(f"{place} {row.refused} |" + " |" * 5)
            continue
        mark = "**" if row.wall == quickest.get(_case(row)) else ""
        shown = [
            f"{mark}{1e6 * row.wall:.0f}{mark}",
            _range([_ratio(row, rows, "wall") for rows in runs]),
            f"{1e6 * row.host:.0f}",
            _range([_ratio(row, rows, "host") for rows in runs]),
            f"{1e3 * (row.first or 0):.0f}",
            "" if row.peak is None else f"{row.peak:.0f}",
        ]
        lines.append(f"{place} {' | '.join(shown)} |")
    return lines


def _ratio(row: Row, rows: Sequence[Row], what: str) -> float | None:
    """The ratio of a peer's number to the number by hand in the same run, on the same type of axes."""
    alike = {one.peer: one for one in rows if _case(one) == _case(row)}
    if row.peer not in alike or FLOOR not in alike:
        return None
    own, floor = getattr(alike[row.peer], what), getattr(alike[FLOOR], what)
    return own / floor if own and floor else None


def _case(row: Row) -> tuple[str, str, int, int]:
    return row.kind, row.axes, row.devices, row.states


def _range(ratios: Sequence[float | None]) -> str:
    found = [ratio for ratio in ratios if ratio is not None]
    if not found:
        return ""
    low, high = f"{min(found):.2f}", f"{max(found):.2f}"
    return f"{found[0]:.2f}" + (f" ({low}-{high})" if len(found) > 1 else "")


def put(folder: Path, about: str, runs: Sequence[Sequence[Row]]) -> None:
    """Put the table of each program, and that of the models, into its place in the pages of a folder."""
    rows_of: dict[str, list[list[Row]]] = {}
    for kind in dict.fromkeys(row.kind for row in firsts(runs)):
        place = "models" if kind in get_args(Model) else kind
        rows_of.setdefault(place, [[] for _ in runs])
        for rows, of_place in zip(runs, rows_of[place], strict=True):
            of_place += [row for row in rows if row.kind == kind]
    for page in sorted(folder.glob("benchmarks*.md")):
        text = page.read_text()
        for place, of_runs in rows_of.items():
            begin, end = BEGIN.format(place), END.format(place)
            if begin in text:
                lines = tables(of_runs)
                before, _, rest = text.partition(begin)
                after = rest.partition(end)[2]
                text = "\n".join([before + begin, "", about, "", *lines, "", end + after])
        page.write_text(text)
