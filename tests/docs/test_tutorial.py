"""The tutorial as a notebook and as a script. `test_docs.py` runs its page."""

import doctest
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests import test_docs


ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "pages" / "tutorial.md"
PICTURE = ROOT / "docs" / "pages" / "assets" / "tutorial.svg"
NOTEBOOK = ROOT / "docs" / "examples" / "tutorial.ipynb"
SCRIPT = ROOT / "docs" / "examples" / "tutorial.py"
# Each program runs only a few times, so fast compilation matters more than fast programs.
COMPILED_FAST = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Cells that only show what the cell before them made.
SHOWN = ["explanation", "picture"]


def sources(fence: test_docs.Fence) -> str:
    """The code of a fence, without prompts and results."""
    if fence.kind == "python":
        return fence.source
    return "".join(part.source for part in doctest.DocTestParser().get_examples(fence.source))


def read() -> Any:
    notebooks: Any = nbformat
    return notebooks.read(NOTEBOOK, as_version=4)


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_has_the_code_of_the_page() -> None:
    found = cells(read())
    page = test_docs.fences(PAGE.name, PAGE.read_text())
    ours = [cell.source.strip() for cell in found if cell.source not in SHOWN]
    assert ours == [sources(fence).strip() for fence in page]
    assert [cell.source for cell in found if cell.source in SHOWN] == SHOWN
    assert not any(cell.outputs for cell in found)


def test_the_page_shows_lines_of_the_script() -> None:
    (shown,) = [
        m["source"] for m in test_docs._FENCE.finditer(PAGE.read_text()) if m["kind"] == "py"
    ]
    lines = [" ".join(line.split()) for line in SCRIPT.read_text().splitlines()]
    assert [line for line in shown.splitlines() if " ".join(line.split()) not in lines] == []


@pytest.mark.slow
# What the packages of Jupyter warn of is not ours.
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_and_shows_the_report_the_table_and_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*COMPILED_FAST)
    notebook = read()
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    table, picture = (cell.outputs[0].data for cell in cells(notebook) if cell.source in SHOWN)
    assert (
        "<table" in table["text/html"] and "the gradient of net.down, net.up" in table["text/html"]
    )
    assert picture["image/svg+xml"] == PICTURE.read_text()
    (report,) = [
        cell.outputs[0].text for cell in cells(notebook) if "except AssertionError" in cell.source
    ]
    assert 'return sm.pmean(x.mean(0), "data"), sm.pmean(x.var(0), "data")' in report


@pytest.mark.slow
def test_two_processes_learn_what_one_does() -> None:
    # The devices of this suite are left out, because the script sets up its own.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= dict([COMPILED_FAST, ("PYTHONPATH", os.pathsep.join(paths))])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--processes", "2"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("process "))
    assert len(lines) == 2
    assert "\n".join(lines) in PAGE.read_text()
    # The page prints what one process learned, and runs that line too.
    learned = lines[0].partition(", ")[2]
    assert f"\n{learned}\n" in PAGE.read_text()
