"""An explanation as text of at most 100 columns."""

import re
import textwrap
from collections.abc import Iterator, Sequence

from ._sections import Section


WIDTH = 100
_GAP = "  "
# No column gets narrower than this.
_NARROWEST = 8


def text_of(summary: str, sections: Sequence[Section], advice: Sequence[str]) -> str:
    """The summary, the tables, and the advice."""
    parts = ["\n".join(textwrap.wrap(summary, WIDTH, subsequent_indent="  "))]
    parts += [_table(section) for section in sections]
    if advice:
        lines = [
            textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ")
            for text in advice
        ]
        parts.append("\n".join(["Advice", *lines]))
    return "\n\n".join(parts)


def _table(section: Section) -> str:
    rows = [section.heads, *section.rows]
    widths = _widths(rows)
    lines = [section.title]
    for row in rows:
        cells = [list(_wrapped(cell, width)) for cell, width in zip(row, widths, strict=True)]
        for k in range(max(map(len, cells))):
            texts = [cell[k] if k < len(cell) else "" for cell in cells]
            padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
            line = (_GAP + _GAP.join(padded)).rstrip()
            lines.append(line.replace("\N{NO-BREAK SPACE}", " "))
    return "\n".join(lines)


def _steps(word: str) -> list[str]:
    """The parts of a word between which it may be broken if it has to: the steps of a path."""
    return re.split(r"(?=\.[A-Za-z_])|(?=\[)", word)


def _wrapped(cell: str, width: int) -> Iterator[str]:
    """The lines of a cell. It is broken at spaces, then at the steps of a path, then anywhere."""
    line = ""
    for word in cell.split(" "):
        if line and len(line) + 1 + len(word) <= width:
            line += f" {word}"
            continue
        if line:
            yield line
        line = ""
        for step in _steps(word):
            while len(line) + len(step) > width:
                if not line:
                    line, step = step[:width], step[width:]
                yield line
                line = ""
            line += step
    yield line


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The widths of the columns: the widest give way until all fit, those that break at spaces first."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [[word for cell in column for word in cell.split(" ")] for column in columns]
    steps = [[step for word in column for step in _steps(word)] for column in words]
    room = WIDTH - len(_GAP) * len(widths)
    for least in (_longest(words), _longest(steps), [_NARROWEST] * len(widths)):
        while sum(widths) > room:
            spare = [(width, k) for k, width in enumerate(widths) if width > least[k]]
            if not spare:
                break
            widths[max(spare)[1]] -= 1
    return [max(1, width) for width in widths]


def _longest(columns: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in columns]
