"""The measurements as tables in the pages."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.scripts.benchmarks.peers._peers import FLOOR
from tests.scripts.benchmarks.peers._run import Row


BEGIN, END = "<!-- table of {}: begin -->", "<!-- table of {}: end -->"
HEAD = (
    "| program | axes | devices | states | | wall | to hand | host | to hand | first | second | traces "
    "| compiles | held | moved |"
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
        place = f"| {row.kind} | {row.axes} | {row.devices} | {row.states} | {row.peer} |"
        if row.wall is None or row.host is None:
            lines.append(f"{place} {row.refused} |" + " |" * 9)
            continue
        mark = "**" if row.wall == quickest.get(_case(row)) else ""
        shown = [
            f"{mark}{1e6 * row.wall:.0f}{mark}",
            _range([_ratio(row, rows, "wall") for rows in runs]),
            f"{1e6 * row.host:.0f}",
            _range([_ratio(row, rows, "host") for rows in runs]),
            f"{1e3 * (row.first or 0):.0f}",
            f"{1e3 * (row.second or 0):.1f}",
            f"{row.traces:.3g}",
            f"{row.compiles:.3g}",
            "" if row.peak is None else f"{row.peak:.0f}",
            "" if row.moved is None else f"{row.moved:.0f}",
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
    """Put the table of each program into its place in the pages of a folder."""
    for page in sorted(folder.glob("benchmarks*.md")):
        text = page.read_text()
        for kind in dict.fromkeys(row.kind for row in firsts(runs)):
            begin, end = BEGIN.format(kind), END.format(kind)
            if begin in text:
                lines = table([[row for row in rows if row.kind == kind] for rows in runs])
                before, _, rest = text.partition(begin)
                after = rest.partition(end)[2]
                text = "\n".join([before + begin, "", about, "", *lines, "", end + after])
        page.write_text(text)
