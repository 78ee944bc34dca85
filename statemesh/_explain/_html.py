"""An explanation as tables for a notebook."""

import html
from collections.abc import Sequence

from ._sections import Section


def html_of(summary: str, sections: Sequence[Section], advice: Sequence[str]) -> str:
    """The summary, the tables, and the advice."""
    parts = [f"<p><b>{html.escape(summary)}</b></p>", *map(_table, sections)]
    if advice:
        items = "".join(f"<li>{html.escape(text)}</li>" for text in advice)
        parts.append(f"<p><b>Advice</b></p><ul>{items}</ul>")
    return f'<div class="statemesh-explanation">{"".join(parts)}</div>'


def _table(section: Section) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in section.heads)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in section.rows
    )
    title = html.escape(section.title)
    return (
        f"<table><caption>{title}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )
