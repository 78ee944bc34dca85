"""What was measured, as Markdown."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .lines import cause, named, right_lines
from .mistakes import Mistake, mistakes


if TYPE_CHECKING:
    from .measure import Outcome


FIRST, LAST = "<!-- measured: from here -->", "<!-- measured: to here -->"
DTYPES = ("float32", "bfloat16", "float16", "int32")


def tables(outcomes: Sequence["Outcome"]) -> str:
    """Counts first, then what was missed or accused, then every case."""
    of_kind = {
        kind: [one for one in outcomes if one.task.kind == kind]
        for kind in ("planted", "right", "delicate")
    }
    parts = []
    if of_kind["planted"]:
        parts += [
            ("Planted mistakes, by dtype", _counts(of_kind["planted"])),
            ("The line, in the reports on them", _lines(of_kind["planted"])),
            ("Mistakes whose line is not named", _unnamed(of_kind["planted"])),
            ("Mistakes that were not found", _missed(of_kind["planted"])),
            ("Mistakes that the call or the check refused", _refused(of_kind["planted"])),
        ]
    if of_kind["right"] or of_kind["delicate"]:
        right = [*of_kind["right"], *of_kind["delicate"]]
        parts += [
            ("Right programs, by dtype", _right_counts(right)),
            ("Right programs that were accused", _accused(right)),
            ("What share of the numbers of the right models is judged", _judged(of_kind["right"])),
        ]
    if of_kind["planted"]:
        parts.append(("Every planted mistake", _all_planted(of_kind["planted"])))
    if of_kind["delicate"]:
        parts.append(("Every delicate program", _all_delicate(of_kind["delicate"])))
    return "\n".join(f"### {title}\n\n{body}\n" for title, body in parts)


def put(folder: pathlib.Path, text: str) -> None:
    """Put the tables into the docs: the counts into one page, the tables of every case into another."""
    counts, first, cases = text.partition("### Every ")
    for name, part in (("", counts.rstrip("\n")), ("-cases", (first + cases).rstrip("\n"))):
        page = folder / f"what-the-check-finds{name}.md"
        page.write_text(with_tables(page.read_text(), f"{part}\n"))


def with_tables(page: str, text: str) -> str:
    """A page of the docs, with these tables in the place of those that it has."""
    before, rest = page.split(FIRST)
    _, after = rest.split(LAST)
    return f"{before}{FIRST}\n\n{text}\n{LAST}{after}"


def _rows(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    body = [" | ".join(_cell(cell) for cell in row) for row in rows]
    if not body:
        return "None."
    lines = [" | ".join(head), " | ".join("---" for _ in head), *body]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _by_dtype(outcomes: Sequence["Outcome"]) -> list[tuple[str, list["Outcome"]]]:
    """Those of each dtype, and all of them last."""
    found = [(dtype, [one for one in outcomes if one.task.dtype == dtype]) for dtype in DTYPES]
    return [*((dtype, those) for dtype, those in found if those), ("all", list(outcomes))]


def _count(outcomes: Sequence["Outcome"], result: str) -> int:
    return sum(one.result == result for one in outcomes)


def _mean_seconds(outcomes: Sequence["Outcome"]) -> str:
    return f"{sum(one.seconds for one in outcomes) / max(len(outcomes), 1):.1f}"


def _counts(outcomes: Sequence["Outcome"]) -> str:
    mistake = {(m.model, m.name): m for m in mistakes()}
    rows = []
    for dtype, those in _by_dtype(outcomes):
        seen = [one for one in those if mistake[one.task.model, one.task.name].detectable]
        results = [_count(seen, result) for result in ("found", "raised", "silent", "timed out")]
        rows.append((dtype, len(those), len(those) - len(seen), *results, _mean_seconds(those)))
    head = ("dtype", "cases", "one device has it too", "found", "refused", "not found", "timed out")
    return _rows((*head, "seconds each"), rows)


def _lines(outcomes: Sequence["Outcome"]) -> str:
    rows = []
    for model, those in _by_model(outcomes):
        found = [(one, mistake) for one, mistake in those if one.result == "found"]
        right = [
            [line in right_lines(mistake) for line in named(one.report, mistake)]
            for one, mistake in found
        ]
        causes = [
            not lines.isdisjoint(right_lines(mistake))
            for one, mistake in found
            if (lines := cause(one.report))
        ]
        seconds = [one.locating for one, _ in found] or [0.0]
        rows.append(
            (
                model,
                len(found),
                _share(sum(any(one[:1]) for one in right), len(found)),
                _share(sum(map(any, right)), len(found)),
                sum(causes),
                len(causes) - sum(causes),
                f"{sum(seconds) / len(seconds):.1f}",
                f"{max(seconds):.1f}",
            )
        )
    head = ("model", "found", "right line first", "among three", "right cause", "wrong cause")
    return _rows((*head, "processor's seconds", "most"), rows)


def _unnamed(outcomes: Sequence["Outcome"]) -> str:
    rows = []
    for one, mistake in _by_model(outcomes)[-1][1]:
        lines = named(one.report, mistake)
        if one.result == "found" and not right_lines(mistake).intersection(lines):
            right = " or ".join(map(str, sorted(right_lines(mistake))))
            got = ", ".join(map(str, lines)) or "none"
            rows.append((mistake.model, mistake.name, mistake.kind, one.task.dtype, right, got))
    return _rows(("model", "mistake", "kind", "dtype", "right lines", "lines in the report"), rows)


def _share(count: int, of: int) -> str:
    return f"{count} ({count / max(of, 1):.0%})"


def _by_model(
    outcomes: Sequence["Outcome"],
) -> list[tuple[str, list[tuple["Outcome", Mistake]]]]:
    """The mistakes that one device does not make too, by model, and all of them last."""
    mistake = {(m.model, m.name): m for m in mistakes()}
    both = [(one, mistake[one.task.model, one.task.name]) for one in outcomes]
    seen = [(one, planted) for one, planted in both if planted.detectable]
    models = dict.fromkeys(planted.model for _, planted in seen)
    of_model = [
        (model, [(one, planted) for one, planted in seen if planted.model == model])
        for model in models
    ]
    return [*of_model, ("all", seen)]


def _missed(outcomes: Sequence["Outcome"]) -> str:
    mistake = {(m.model, m.name): m for m in mistakes()}
    rows = []
    for one in outcomes:
        if one.result in ("silent", "timed out"):
            planted = mistake[one.task.model, one.task.name]
            why = planted.unseen or "; ".join(sorted(set(one.warned))) or one.result
            rows.append((one.task.model, one.task.name, planted.kind, one.task.dtype, why))
    return _rows(("model", "mistake", "kind", "dtype", "why"), rows)


def _refused(outcomes: Sequence["Outcome"]) -> str:
    rows = [
        (one.task.model, one.task.name, one.task.dtype, one.text)
        for one in outcomes
        if one.result == "raised"
    ]
    return _rows(("model", "mistake", "dtype", "what was raised"), rows)


def _right_counts(outcomes: Sequence["Outcome"]) -> str:
    rows = []
    for dtype, those in _by_dtype(outcomes):
        results = [_count(those, result) for result in ("silent", "found", "raised", "timed out")]
        rows.append((dtype, len(those), *results, _mean_seconds(those)))
    return _rows(
        ("dtype", "cases", "passed", "accused", "raised", "timed out", "seconds each"), rows
    )


def _accused(outcomes: Sequence["Outcome"]) -> str:
    rows = []
    for one in outcomes:
        if one.result != "silent":
            why = next(
                (line for line in one.report.splitlines() if line.startswith("  - ")), one.text
            )
            rows.append(
                (one.task.model or "", one.task.name, one.task.dtype, one.result, why.strip())
            )
    return _rows(("model", "program", "dtype", "result", "why"), rows)


def _judged(outcomes: Sequence["Outcome"]) -> str:
    """The share of the numbers that are judged at all, and of those in the dtypes of the model too."""
    passed = [one for one in outcomes if one.result == "silent"]
    rows = []
    for model in dict.fromkeys(one.task.model for one in passed):
        cells = [""] * len(DTYPES)
        for one in passed:
            if one.task.model == model:
                judged = one.numbers - one.unjudged
                shares = (judged / one.numbers, (judged - one.only_double) / one.numbers)
                cells[DTYPES.index(one.task.dtype)] = f"{shares[0]:.1%}, {shares[1]:.1%}"
        rows.append((model, *cells))
    return _rows(("model", *DTYPES), rows)


def _all_planted(outcomes: Sequence["Outcome"]) -> str:
    by_case = {(one.task.model, one.task.name, one.task.dtype): one for one in outcomes}

    def cells(mistake: Mistake) -> list[str]:
        found = [by_case.get((mistake.model, mistake.name, dtype)) for dtype in DTYPES]
        return ["" if one is None else _short(one) for one in found]

    rows = [(m.model, m.name, m.kind, m.line, *cells(m)) for m in mistakes()]
    return _rows(("model", "mistake", "kind", "line", *DTYPES), rows)


def _short(one: "Outcome") -> str:
    return {"silent": "no", "found": "yes", "raised": "refused"}.get(one.result, one.result)


def _all_delicate(outcomes: Sequence["Outcome"]) -> str:
    names = dict.fromkeys(one.task.name for one in outcomes)
    by_case = {(one.task.name, one.task.dtype): one for one in outcomes}
    named = {"silent": "passed", "found": "accused"}

    def cells(name: str) -> list[str]:
        found = [by_case.get((name, dtype)) for dtype in DTYPES]
        return ["" if one is None else named.get(one.result, one.result) for one in found]

    return _rows(("program", *DTYPES), [(name, *cells(name)) for name in names])
