"""The library under `docs/embedding`: its page and its own tests."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = ROOT / "docs" / "embedding"
PACKAGE = LIBRARY / "quantmesh"


def test_the_page_shows_its_classes_which_are_short_and_know_no_mesh() -> None:
    files = {path.name: path.read_text() for path in PACKAGE.glob("*.py")}
    assert sorted(files) == ["__init__.py", "_quantize.py", "_range.py"]
    for name, text in files.items():
        code = re.sub(r'""".*?"""', "", text, flags=re.S)
        assert not re.search(r"\bmesh|device", code), name
    page = (ROOT / "docs" / "pages" / "embedding.md").read_text()
    for name in ("_range.py", "_quantize.py"):
        assert files[name][files[name].index("class ") :] in page
    classes = [x for x in ast.parse(files["_range.py"]).body if isinstance(x, ast.ClassDef)]
    (kind,) = classes
    assert kind.end_lineno is not None and kind.end_lineno - kind.lineno < 15


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
