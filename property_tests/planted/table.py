"""What was measured, as Markdown."""

import pathlib
from collections.abc import Iterable, Sequence

from .lines import cause, named, right_lines
from .measure import DTYPES, Outcome
from .mistakes import NEVER_FITTED, Mistake, mistakes


FIRST, LAST = "<!-- measured: from here -->", "<!-- measured: to here -->"


def tables(outcomes: Sequence[Outcome]) -> str:
    """Counts first, then what was missed or accused, then every case; of no kind that was not measured."""
    planted, right, delicate = (
        [one for one in outcomes if one.task.kind == kind]
        for kind in ("planted", "right", "delicate")
    )
    both = [*right, *delicate]
    parts = {
        "Planted mistakes, by dtype": planted and _counts(planted),
        "The line, in the reports on them": planted and _lines(planted),
        "Mistakes whose line is not named": planted and _unnamed(planted),
        "Mistakes that were not found": planted and _missed(planted),
        "Mistakes that the call or the check refused": planted and _refused(planted),
        "Right programs, by dtype": both and _right_counts(both),
        "Right programs that were accused": both and _accused(both),
        "What share of the numbers of the right models is judged": both and _judged(right),
        "Every planted mistake": planted and _all_planted(planted),
        "Every delicate program": delicate and _all_delicate(delicate),
    }
    return "\n".join(f"### {title}\n\n{body}\n" for title, body in parts.items() if body)


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


def _by_dtype(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Those of each dtype, and all of them last."""
    found = [(dtype, [one for one in outcomes if one.task.dtype == dtype]) for dtype in DTYPES]
    return [*((dtype, those) for dtype, those in found if those), ("all", list(outcomes))]


def _numbers(outcomes: Sequence[Outcome], *results: str) -> list[object]:
    """How many there are of each of these results, and the mean of their seconds."""
    seconds = sum(one.seconds for one in outcomes) / max(len(outcomes), 1)
    return [*(sum(one.result == r for one in outcomes) for r in results), f"{seconds:.1f}"]


def _counts(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for dtype, those in _by_dtype(outcomes):
        seen = [one for one in those if _mistake(one).detectable]
        results = _numbers(seen, "found", "raised", "silent", "timed out")[:-1]
        seconds = _numbers(those)
        rows.append((dtype, len(those), len(those) - len(seen), *results, *seconds))
    head = ("dtype", "cases", "one device has it too", "found", "refused", "not found", "timed out")
    return _rows((*head, "seconds each"), rows)


def _mistake(outcome: Outcome) -> Mistake:
    (found,) = (
        m for m in mistakes() if (m.model, m.name) == (outcome.task.model, outcome.task.name)
    )
    return found


def _lines(outcomes: Sequence[Outcome]) -> str:
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


def _unnamed(outcomes: Sequence[Outcome]) -> str:
    by_model: dict[str, list[str]] = {}
    for one, mistake in _by_model(outcomes)[-1][1]:
        lines = named(one.report, mistake)
        if one.result == "found" and not right_lines(mistake).intersection(lines):
            right = " or ".join(map(str, sorted(right_lines(mistake))))
            got = ", ".join(map(str, lines)) or "none"
            text = f"`{mistake.name}` in {one.task.dtype} ({right}: {got})"
            by_model.setdefault(mistake.model, []).append(text)
    head = ("model", "mistakes (the right lines: those in the report)")
    return _rows(head, [(model, "; ".join(each)) for model, each in by_model.items()])


def _share(count: int, of: int) -> str:
    return f"{count} ({count / max(of, 1):.0%})"


def _by_model(outcomes: Sequence[Outcome]) -> list[tuple[str, list[tuple[Outcome, Mistake]]]]:
    """The mistakes that one device does not make too, by model, and all of them last."""
    both = [(one, _mistake(one)) for one in outcomes]
    seen = [(one, planted) for one, planted in both if planted.detectable]
    models = dict.fromkeys(planted.model for _, planted in seen)
    of_model = [(model, [pair for pair in seen if pair[1].model == model]) for model in models]
    never = [pair for pair in seen if pair[1].model in NEVER_FITTED]
    rows = [(f"the {len(set(NEVER_FITTED))} never fitted on", never)] if never else []
    return [*of_model, *rows, ("all", seen)]


def _missed(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for one in outcomes:
        if one.result in ("silent", "timed out"):
            why = _mistake(one).unseen or "; ".join(sorted(set(one.warned))) or one.result
            rows.append((one.task.model, one.task.name, _mistake(one).kind, one.task.dtype, why))
    return _rows(("model", "mistake", "kind", "dtype", "why"), rows)


def _refused(outcomes: Sequence[Outcome]) -> str:
    refused = [one for one in outcomes if one.result == "raised"]
    rows = [(one.task.model, one.task.name, one.task.dtype, one.text) for one in refused]
    return _rows(("model", "mistake", "dtype", "what was raised"), rows)


def _right_counts(outcomes: Sequence[Outcome]) -> str:
    rows = [
        (dtype, len(those), *_numbers(those, "silent", "found", "raised", "timed out"))
        for dtype, those in _by_dtype(outcomes)
    ]
    head = ("dtype", "cases", "passed", "accused", "raised", "timed out", "seconds each")
    return _rows(head, rows)


def _accused(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for one in outcomes:
        if one.result != "silent":
            lines = [line for line in one.report.splitlines() if line.startswith("  - ")]
            why = (lines or [one.text])[0].strip()
            rows.append((one.task.model, one.task.name, one.task.dtype, one.result, why))
    return _rows(("model", "program", "dtype", "result", "why"), rows)


def _judged(outcomes: Sequence[Outcome]) -> str:
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


def _all_planted(outcomes: Sequence[Outcome]) -> str:
    words = {"silent": "no", "found": "yes", "raised": "refused"}
    rows = [
        (m.model, m.name, m.kind, _in_dtypes(outcomes, m.model, m.name, words)) for m in mistakes()
    ]
    return _rows(("model", "mistake", "kind", "found"), rows)


def _all_delicate(outcomes: Sequence[Outcome]) -> str:
    words = {"silent": "passed", "found": "accused"}
    names = dict.fromkeys(one.task.name for one in outcomes)
    rows = [(name, _in_dtypes(outcomes, "", name, words)) for name in names]
    return _rows(("program", "result"), rows)


def _in_dtypes(outcomes: Sequence[Outcome], model: str, name: str, words: dict[str, str]) -> str:
    """The result of a case in these words: one word, or one for each dtype if they differ."""
    those = [one for one in outcomes if (one.task.model, one.task.name) == (model, name)]
    results = {one.task.dtype: words.get(one.result, one.result) for one in those}
    if len(set(results.values())) < 2:
        return next(iter(results.values()), "")
    return ", ".join(f"{results[dtype]} in {dtype}" for dtype in DTYPES if dtype in results)
