"""The library under `docs/embedding`, tested as its authors test it."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "docs" / "embedding"
PACKAGE = LIBRARY / "quantmesh"


def test_a_kind_takes_few_lines_and_no_file_knows_a_mesh() -> None:
    (kind,) = [
        node
        for node in ast.parse((PACKAGE / "_range.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert kind.end_lineno is not None and kind.end_lineno - kind.lineno < 15
    files = {path.name: path.read_text() for path in PACKAGE.glob("*.py")}
    assert sorted(files) == ["__init__.py", "_quantize.py", "_range.py"]
    for name, text in files.items():
        code = re.sub(r'""".*?"""', "", text, flags=re.S)
        assert not re.search(r"\bmesh|device", code), name


def classes(name: str) -> str:
    text = (PACKAGE / name).read_text()
    return text[text.index("class ") :]


def test_the_page_shows_its_classes() -> None:
    page = (ROOT / "docs" / "pages" / "embedding.md").read_text()
    assert classes("_range.py") in page and classes("_quantize.py") in page


@pytest.mark.slow
def test_its_own_tests_pass() -> None:
    # The devices of this suite are left out, because its tests set up their own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "PYTEST_"))}
    paths = [str(ROOT), str(LIBRARY), *filter(None, [environment.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=LIBRARY,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths), "CI": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^7 passed", done.stdout, re.M)
