"""The tutorial as a notebook and as a script has the code of its page, which `test_pages.py` runs."""

import doctest
import runpy
from typing import Any

import nbformat
import pytest

from tests.docs.test_pages import fences, shown
from tests.helpers import DOCS


PAGE = DOCS / "pages" / "tutorial.md"
SCRIPT = DOCS / "examples" / "tutorial.py"
# Cells that only show what the cell before them made.
SHOWN = ["explanation", "picture"]


def test_the_notebook_has_the_code_of_the_page() -> None:
    read: Any = nbformat.read
    notebook = read(SCRIPT.with_suffix(".ipynb"), as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    parser = doctest.DocTestParser()
    page = [
        fence.source
        if fence.kind == "python"
        else "".join(part.source for part in parser.get_examples(fence.source))
        for fence in fences(PAGE.name, PAGE.read_text())
    ]
    ours = [cell.source.strip() for cell in cells if cell.source not in SHOWN]
    assert ours == [source.strip() for source in page]
    assert [cell.source for cell in cells if cell.source in SHOWN] == SHOWN
    assert not any(cell.outputs for cell in cells)


def test_the_page_shows_lines_of_the_script() -> None:
    (source,) = shown(PAGE, "py")
    lines = [" ".join(line.split()) for line in SCRIPT.read_text().splitlines()]
    assert [line for line in source.splitlines() if " ".join(line.split()) not in lines] == []


@pytest.mark.slow
def test_two_processes_learn_what_one_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    assert runpy.run_path(str(SCRIPT))["launch"](2) == 0
    output = capfd.readouterr().out
    lines = sorted(line for line in output.splitlines() if line.startswith("process "))
    assert len(lines) == 2
    assert "\n".join(lines) in PAGE.read_text()
    # The page prints what one process learned, and runs that line too.
    learned = lines[0].partition(", ")[2]
    assert f"\n{learned}\n" in PAGE.read_text()
