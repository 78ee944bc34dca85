"""The measurements as tables in the pages, and all of them as a file."""

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import get_args

from tests.scripts.benchmarks.peers._case import Axes
from tests.scripts.benchmarks.peers._models import Model
from tests.scripts.benchmarks.peers._peers import FLOOR
from tests.scripts.benchmarks.peers._run import Row


BEGIN, END = "<!-- table of {}: begin -->", "<!-- table of {}: end -->"
# The numbers of a row that are shown, with their unit and its size.
UNITS = {"wall": ("µs", 1e6), "host": ("µs", 1e6), "first": ("ms", 1e3)}


def read(files: Sequence[Path]) -> tuple[str, list[Row]]:
    """The machine, and each program with each peer, from the first file that has it."""
    saved = [json.loads(file.read_text()) for file in files]
    found: dict[tuple[str, str, int, int, str], Row] = {}
    for row in (Row(**row) for one in saved for row in one["rows"]):
        found.setdefault((row.kind, row.axes, row.devices, row.states, row.peer), row)
    return saved[0]["about"], list(found.values())


def tables(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Lines of Markdown, by the place that they have in a page.

    Programs are shown with at most a thousand states.
    """
    models = [row for row in rows if row.kind in get_args(Model)]
    programs = [row for row in rows if row.states <= 1000 and row.kind not in get_args(Model)]
    found = {}
    for axes in get_args(Axes):
        on_axes = [row for row in programs if row.axes == axes]
        for devices in (8, 1):
            found[f"programs on {devices}, {axes}"] = table(
                [row for row in on_axes if row.devices == devices],
                ("wall", "host"),
                lambda row: f"{row.kind} {row.states}",
            )
        found[f"devices, {axes}"] = table(
            [row for row in on_axes if (row.kind, row.states) == ("sharded", 100)],
            ("wall",),
            lambda row: f"{row.devices} devices",
        )
    found["models"] = table(
        models, ("wall", "host", "first"), lambda row: f"{row.kind}, {row.axes} {row.devices}"
    )
    return {place: lines for place, lines in found.items() if lines}


def table(rows: Sequence[Row], shown: Iterable[str], column: Callable[[Row], str]) -> list[str]:
    """Lines of Markdown: for each number the time by hand, and that of each peer as a ratio to it.

    Rows with one name are a column. Its smallest ratio is bold; programs by hand do not compete.
    """
    columns: dict[str, dict[str, Row]] = {}
    for row in rows:
        columns.setdefault(column(row), {})[row.peer] = row
    peers = dict.fromkeys(row.peer for row in rows)
    lines: list[str] = []
    for what in shown if rows else ():
        unit, size = UNITS[what]
        lines += ["", f"| {what} | {' | '.join(columns)} |", "|" + " --- |" * (1 + len(columns))]
        ratios = {name: _ratios(of_peers, what) for name, of_peers in columns.items()}
        for peer in peers:
            cells = []
            for name, of_peers in columns.items():
                found = ratios[name].get(peer)
                floors = [r for other, r in ratios[name].items() if not other.startswith(FLOOR)]
                if found is None:
                    cells.append("refused" if peer in of_peers and of_peers[peer].refused else "")
                elif peer == FLOOR:
                    cells.append(f"{size * getattr(of_peers[peer], what):.0f} {unit}")
                else:
                    mark = "**" if found == min(floors, default=None) else ""
                    cells.append(f"{mark}{found:.2f}{mark}")
            lines.append(f"| {peer} | {' | '.join(cells)} |")
    return lines[1:]


def _ratios(rows: dict[str, Row], what: str) -> dict[str, float]:
    """The number of each peer over that by hand."""
    numbers = {peer: getattr(row, what) for peer, row in rows.items()}
    floor = numbers.get(FLOOR)
    return {peer: number / floor for peer, number in numbers.items() if number and floor}


def put(folder: Path, about: str, rows: Sequence[Row]) -> None:
    """Put each table into its place in the pages of a folder, and all numbers into a file there."""
    found = tables(rows)
    for page in sorted(folder.glob("benchmarks*.md")):
        text = page.read_text()
        for place, lines in found.items():
            begin, end = BEGIN.format(place), END.format(place)
            if begin in text:
                before, _, rest = text.partition(begin)
                text = "\n".join(
                    [before + begin, "", about, "", *lines, "", end + rest.partition(end)[2]]
                )
        page.write_text(text)
    with (folder / "assets" / "benchmarks.csv").open("w", newline="") as file:
        names = [field.name for field in dataclasses.fields(Row)]
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            writer.writerow([_plain(getattr(row, name)) for name in names])


def _plain(value: object) -> str:
    """A cell: seconds to four digits, several of them with spaces between."""
    if isinstance(value, list):
        return " ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
