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
            line = (_GAP + _GAP.join(padded)).rstrip()
            lines.append(line.replace("\N{NO-BREAK SPACE}", " "))
    return "\n".join(lines)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The widths of the columns: the widest give way until all fit, those that break at spaces first."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [
        max((len(w) for cell in column for w in cell.split(" ")), default=1) for column in columns
    ]
    room = WIDTH - len(_GAP) * len(widths)
    for least in (words, [_NARROWEST] * len(widths)):
        while sum(widths) > room:
            spare = [(width, k) for k, width in enumerate(widths) if width > least[k]]
            if not spare:
                break
            widths[max(spare)[1]] -= 1
    return [max(1, width) for width in widths]
