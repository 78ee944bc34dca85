"""The texts in `docs/certify/reports`, ready to be sent to JAX: their programs fail as they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest


CERTIFY = Path(__file__).resolve().parents[2] / "docs" / "certify"
REPORTS = sorted((CERTIFY / "reports").glob("*.md"))
LONGEST = 10
SECTIONS = (
    "**Expected:**",
    "**Seen** with JAX",
    "**Where:**",
    "**With statemesh:**",
    "**Upstream:**",
)


def block(text: str, language: str) -> str:
    """The one fence of this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return found


def named_jax(text: str) -> str:
    found = re.search(r"^\*\*Seen\*\* with JAX (\S+):$", text, re.M)
    assert found, "the text does not say which JAX it is about"
    return found[1]


def outcome(program: str) -> tuple[int, str]:
    """Of a program in a process of its own, on the CPU, without this package."""
    settings = {"JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_FILTERING": "off"}
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=kept | settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def complaint(text: str) -> str:
    """What no longer holds of a report, or nothing."""
    code, output = outcome(block(text, "python"))
    last = block(text, "text").strip().splitlines()[-1]
    if code == 0:
        return "It no longer reproduces: take the text down."
    if last not in output:
        return f"It fails in another way than the text says:\n{output[-3000:]}"
    return ""


def title(text: str) -> str:
    return text.splitlines()[0].removeprefix("# ")


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_a_report_has_a_title_ten_lines_and_all_sections(report: Path) -> None:
    text = report.read_text()
    assert re.match(r"# \S", text)
    assert len(block(text, "python").splitlines()) <= LONGEST
    assert block(text, "text").strip()
    places = [text.find(section) for section in SECTIONS]
    assert -1 not in places and places == sorted(places)
    assert "statemesh" not in block(text, "python")
    compile(block(text, "python"), report.name, "exec")


def test_the_table_has_one_row_for_each_report() -> None:
    rows = re.findall(r"^\| \[(.*)\]\(reports/(.*)\) \|", (CERTIFY / "README.md").read_text(), re.M)
    assert {name: shown for shown, name in rows} == {
        report.name: title(report.read_text()) for report in REPORTS
    }
    assert len(rows) == len(REPORTS) >= LONGEST


@pytest.mark.slow
@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_a_report_still_reproduces(report: Path) -> None:
    text = report.read_text()
    if named_jax(text) == jax.__version__:
        found = complaint(text)
        assert not found, found
    else:
        pytest.skip(f"The text is about JAX {named_jax(text)}.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("x = 1", "no longer reproduces"),
        ("raise ValueError('other')", "in another way"),
        ("raise ValueError('this one')", ""),
    ],
)
def test_a_report_that_no_longer_holds_is_named(program: str, said: str) -> None:
    found = complaint(f"```python\n{program}\n```\n\n```text\nValueError: this one\n```\n")
    assert said in found and bool(said) == bool(found)
