"""An explanation as text of at most 100 columns."""

import textwrap
from collections.abc import Sequence

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
        cells = [
            textwrap.wrap(cell, width, break_long_words=True, break_on_hyphens=False) or [""]
            for cell, width in zip(row, widths, strict=True)
        ]
        for k in range(max(map(len, cells))):
            texts = [cell[k] if k < len(cell) else "" for cell in cells]
            padded = [text.ljust(width) for text, width in zip(texts, widths, strict=True)]
            lines.append((_GAP + _GAP.join(padded)).rstrip())
    return "\n".join(lines)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The widths of the columns: the widest give way until all of them fit."""
    widths = [max(1, *map(len, column)) for column in zip(*rows, strict=True)]
    room = WIDTH - len(_GAP) * len(widths)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths
