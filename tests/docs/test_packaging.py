"""What importing statemesh loads and starts, and what its extras bring."""

import ast
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable

import pytest

import statemesh as sm


ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.slow
def test_importing_loads_no_other_packages_and_starts_no_devices_and_names_a_missing_one() -> None:
    lines = (
        "import sys, equinox",
        "before = {name.split('.')[0] for name in sys.modules}",
        "import statemesh as sm",
        "print('statemesh._engine' in sys.modules)",
        "sm.shard_map",
        "print('statemesh._engine' in sys.modules)",
        "after = {name.split('.')[0] for name in sys.modules}",
        "print(sorted(after - before - sys.stdlib_module_names))",
        "sys.modules['orbax'] = None",
        "try: import statemesh.checkpoint",
        "except ImportError as error: print(error)",
        "del sys.modules['orbax']",
        "import statemesh.testing, statemesh.checkpoint, jax",
        "jax.config.update('jax_num_cpu_devices', 3)  # An error once devices are started.",
        "print(jax.device_count())",
    )
    # In a process of its own, without the devices of this suite.
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={"PYTHONPATH": ":".join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [
        "False",
        "True",
        "['statemesh']",
        "statemesh.checkpoint needs Orbax: pip install 'statemesh[checkpoint]'.",
        "3",
        "",
    ]


def test_the_pages_are_of_this_version() -> None:
    pages = ROOT / "docs" / "pages"
    newest = re.search(r"^## (\S+)$", (pages / "changelog.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == sm.__version__
    major, minor = map(int, sm.__version__.split(".")[:2])
    assert f"This is version {major}.{minor}." in (pages / "stability.md").read_text()
    for file in (
        pages / "stability.md",
        pages / "embedding.md",
        ROOT / "docs/embedding/pyproject.toml",
    ):
        assert f"statemesh>={major}.{minor},<{major}.{minor + 1}" in file.read_text(), file


def imported(files: Iterable[pathlib.Path]) -> set[str]:
    """The packages, other than Python's and statemesh, that files import."""
    found = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found - sys.stdlib_module_names - {"statemesh", "__future__"}


def required(*groups: Iterable[str]) -> set[str]:
    """The packages that requirements name, as programs import them."""
    other = {"orbax-checkpoint": "orbax", "scikit-learn": "sklearn"}
    names = [one.split(">=")[0] for group in groups for one in group]
    return {other.get(name, name) for name in names}


# What only type checkers read, and what shows values in notebooks where it is installed already.
NOT_NEEDED = {"typing_extensions", "treescope", "wadler_lindig"}
ALWAYS = PROJECT["dependencies"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("extra", ["testing", "checkpoint", "certify"])
def test_an_extra_brings_what_its_module_imports(extra: str) -> None:
    files = [*(ROOT / "statemesh" / extra).rglob("*.py")]
    # Tests of users are run by pytest.
    assert required(EXTRAS[extra]) - {"pytest"} <= imported(files)
    assert imported(files) - NOT_NEEDED <= required(ALWAYS, EXTRAS[extra])


def test_nothing_else_needs_an_extra() -> None:
    files = (ROOT / "statemesh").rglob("*.py")
    others = [file for file in files if not {"testing", "checkpoint", "certify"} & set(file.parts)]
    assert imported(others) - NOT_NEEDED == required(ALWAYS)


def test_demo_and_bench_bring_what_examples_and_peers_import() -> None:
    examples = imported((ROOT / "docs" / "examples").glob("*.py"))
    assert required(EXTRAS["demo"]) <= examples <= required(ALWAYS, EXTRAS["demo"])
    peers = imported((ROOT / "tests" / "scripts" / "benchmarks" / "peers").glob("*.py"))
    assert peers - {"tests"} <= required(ALWAYS, EXTRAS["bench"])
    assert {"flax", "matplotlib"} <= peers
